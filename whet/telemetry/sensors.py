"""The devices of this machine and how each of their sensors is read: NVIDIA, AMD, and the CPU with its memory.

Each function finds the devices of one kind and raises where there are none, with the reason. Libraries are imported
inside: none of them is needed for anything else. GPUs that the environment hides from this process are not shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

EXTRA = "pip install 'whet[hardware]'"
MIB, GIB = 2**20, 2**30
CPU_THERMOMETERS = ("coretemp", "k10temp", "zenpower")

Sensor = Callable[[], float | None]
"""Reads one value; None when there is none yet; raises what its driver raises."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    Attributes:
        id: Short and unique on this machine: 'gpu0', 'cpu'.
        name: What the driver calls it.
        kind: 'gpu' or 'cpu'.
        sensors: By field: utilisation, memory_activity (shares), power_w, temperature_c, memory_gib, and energy_j, a
            counter of joules that only grows.
        absent: Reasons for fields that this kind of device does not have.
    """

    id: str
    name: str
    kind: str
    sensors: dict[str, Sensor]
    absent: dict[str, str] = field(default_factory=dict)


def growing(read: Callable[[], float], wrap: float | None = None) -> Sensor:
    """Turn a counter into one that only grows.

    Args:
        read: The counter.
        wrap: Where it starts again from 0; None for never.

    Returns:
        A sensor of what was counted since its first reading.
    """
    last: float | None = None
    total = 0.0

    def sensor() -> float:
        nonlocal last, total
        now = read()
        step = now - (now if last is None else last)
        if step < 0:
            if wrap is None:
                raise ValueError("the counter went back")
            step += wrap
        last, total = now, total + step
        return total

    return sensor


def nvidia_devices() -> list[Device]:
    """Find the NVIDIA GPUs that this process may use, through NVML."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise LookupError(f"nvidia-ml-py is not installed: {EXTRA}") from None
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
    uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    devices: list[Device] = []
    for number in visible(uuids, ("CUDA_VISIBLE_DEVICES",)):
        handle = handles[number]

        def share(which: str, handle: Any = handle) -> float:
            return getattr(pynvml.nvmlDeviceGetUtilizationRates(handle), which) / 100

        sensors: dict[str, Sensor] = {
            "utilisation": partial(share, "gpu"),
            "memory_activity": partial(share, "memory"),
            "power_w": lambda handle=handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_c": lambda handle=handle: float(
                pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
            ),
            "memory_gib": lambda handle=handle: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) / GIB,
            "energy_j": growing(
                lambda handle=handle: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
            ),
        }
        devices.append(Device(f"gpu{number}", str(pynvml.nvmlDeviceGetName(handle)), "gpu", sensors))
    return _some(devices, "NVIDIA")


def amd_devices(kfd: Path = Path("/dev/kfd")) -> list[Device]:
    """Find the AMD GPUs that this process may use, through amdsmi.

    Args:
        kfd: The driver's device file; without it amdsmi is not imported (it prints when its library is missing).
    """
    if not kfd.exists():
        raise LookupError(f"no AMD GPU on this machine: there is no {kfd}")
    try:
        import amdsmi  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise LookupError(f"amdsmi is not installed: take ROCm's own, or {EXTRA}") from None
    amdsmi.amdsmi_init()
    handles = amdsmi.amdsmi_get_processor_handles()
    devices: list[Device] = []
    names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    for number in visible([""] * len(handles), names):
        handle = handles[number]

        def activity(which: str, handle: Any = handle) -> float:
            return _number(amdsmi.amdsmi_get_gpu_activity(handle)[which]) / 100

        def power(handle: Any = handle) -> float:
            info = amdsmi.amdsmi_get_power_info(handle)
            keys = ("socket_power", "current_socket_power", "average_socket_power")
            return next((float(info[key]) for key in keys if _is_number(info.get(key))), float("nan"))

        def energy(handle: Any = handle) -> float:
            count = amdsmi.amdsmi_get_energy_count(handle)
            return (
                count["energy_accumulator"] * count["counter_resolution"] / 1e6
            )  # the resolution is in microjoules

        def temperature(handle: Any = handle) -> float:
            kind, now = amdsmi.AmdSmiTemperatureType.HOTSPOT, amdsmi.AmdSmiTemperatureMetric.CURRENT
            return _number(amdsmi.amdsmi_get_temp_metric(handle, kind, now))

        sensors: dict[str, Sensor] = {
            "utilisation": partial(activity, "gfx_activity"),
            "memory_activity": partial(activity, "umc_activity"),
            "power_w": power,
            "temperature_c": temperature,
            "memory_gib": lambda handle=handle: (
                _number(amdsmi.amdsmi_get_gpu_vram_usage(handle)["vram_used"]) * MIB / GIB
            ),
            "energy_j": growing(energy),
        }
        name = str(amdsmi.amdsmi_get_gpu_asic_info(handle)["market_name"])
        devices.append(Device(f"gpu{number}", name, "gpu", sensors))
    return _some(devices, "AMD")


def cpu_devices(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> list[Device]:
    """Describe the processor and the memory of the whole machine.

    Linux tells both in files; elsewhere psutil is asked. Energy is RAPL's, of all processor packages (not of the
    memory), where the system lets this user read it.

    Args:
        proc: The proc file system.
        sys: The sys file system.
    """
    absent = {"memory_activity": "no such sensor for a CPU"}
    if (proc / "stat").is_file():
        sensors: dict[str, Sensor] = {
            "utilisation": _busy_share(lambda: _cpu_times(proc / "stat")),
            "memory_gib": lambda: _memory_gib(proc / "meminfo"),
        }
    else:
        try:
            import psutil  # pyright: ignore[reportMissingModuleSource]
        except ImportError:
            raise LookupError(
                f"no {proc}/stat on this system, and psutil is not installed: {EXTRA}"
            ) from None
        psutil.cpu_percent(None)
        sensors = {
            "utilisation": lambda: psutil.cpu_percent(None) / 100,
            "memory_gib": lambda: psutil.virtual_memory().used / GIB,
        }
    try:
        sensors["energy_j"] = _rapl(sys / "class/powercap")
    except (OSError, ValueError, LookupError) as error:
        absent["energy_j"] = f"{error}"
    absent["power_w"] = "no such sensor for a CPU; the mean is taken from energy_j where that is there"
    for folder in sorted((sys / "class/hwmon").glob("hwmon*")):
        if _text(folder / "name") in CPU_THERMOMETERS and (folder / "temp1_input").is_file():
            sensors["temperature_c"] = lambda path=folder / "temp1_input": int(path.read_text()) / 1e3
    if "temperature_c" not in sensors:
        absent["temperature_c"] = f"no CPU thermometer in {sys}/class/hwmon"
    return [Device("cpu", _cpu_name(proc), "cpu", sensors, absent)]


def visible(uuids: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the numbers of the GPUs that the environment shows to this process.

    Args:
        uuids: Identity of each GPU of the machine.
        names: Environment variables; the first that is set counts.

    Returns:
        All where none is set. As for CUDA, an entry that is no GPU hides those after it.
    """
    text = next((os.environ[name] for name in names if name in os.environ), None)
    if text is None:
        return list(range(len(uuids)))
    shown: list[int] = []
    for entry in (part.strip() for part in text.split(",")):
        places = [n for n, uuid in enumerate(uuids) if entry == str(n) or (entry and uuid.startswith(entry))]
        if not places:
            break
        shown.append(places[0])
    return shown


def _some(devices: list[Device], maker: str) -> list[Device]:
    if not devices:
        raise LookupError(f"no {maker} GPU that this process may use")
    return devices


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)  # amdsmi writes 'N/A'


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"the driver says {value!r}")
    return float(value)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _cpu_name(proc: Path) -> str:
    lines = _text(proc / "cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def _cpu_times(stat: Path) -> tuple[float, float]:
    """Return (busy, all) time of all processors since the start of the machine, in clock ticks."""
    ticks = [int(word) for word in stat.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))  # idle and waiting for a disk


def _busy_share(times: Callable[[], tuple[float, float]]) -> Sensor:
    """Turn cumulative times into the share since the reading before."""
    last = times()

    def sensor() -> float | None:
        nonlocal last
        now = times()
        (busy, total), last = (now[0] - last[0], now[1] - last[1]), now
        return min(1.0, max(0.0, busy / total)) if total > 0 else None

    return sensor


def _memory_gib(meminfo: Path) -> float:
    lines = meminfo.read_text(encoding="ascii").splitlines()
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Mem")}
    return (kib["MemTotal"] - kib["MemAvailable"]) / MIB


def _rapl(folder: Path) -> Sensor:
    """Sum the energy counters of the processor packages; they are small and start again from 0 often."""
    packages: list[Sensor] = []
    for domain in sorted(folder.glob("intel-rapl:*")):  # AMD's processors have it under the same name
        if _text(domain / "name").startswith("package"):
            counter = domain / "energy_uj"
            counter.read_text()  # an unreadable one is found here
            wrap = int((domain / "max_energy_range_uj").read_text()) + 1
            packages.append(growing(lambda path=counter: float(path.read_text()), float(wrap)))
    if not packages:
        raise LookupError(f"no RAPL counter in {folder}")
    return lambda: sum(package() or 0.0 for package in packages) / 1e6
