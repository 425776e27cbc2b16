"""What the machine did while something ran: load, power, temperature, memory and energy of each device.

A sensor that is not there, fails or hangs is reported as absent with the reason, never as 0. Every source (NVIDIA, AMD,
CPU) has its own daemon thread, so that one that hangs holds up neither the others nor the program. No cause is
inferred from a reading: see docs/hardware.md for what each one can and cannot say.
"""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from whet.install import install_command

# The devices of this machine and how each of their sensors is read: NVIDIA, AMD, and the CPU with its memory.
#
# Each function finds the devices of one kind and raises where there are none, with the reason. The GPUs' libraries are
# imported inside: none of them is needed for anything else. GPUs that the environment hides from this process are not
# shown.

MIB, GIB = 2**20, 2**30
MAX_WATTS, MAX_CELSIUS, MAX_VRAM_MIB = 10_000, 200, 2**24
"""What no device exceeds."""
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


DRIVER = tuple(map(Path, ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")))
"""What NVIDIA's driver leaves behind, by module, in a container and in WSL2."""


def nvidia_devices(driver: Sequence[Path] = DRIVER) -> list[Device]:
    """Find the NVIDIA GPUs that this process may use, through NVML.

    Args:
        driver: Files of the driver; where none exists, the error does not advise installing NVML.
    """
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        if not any(path.exists() for path in driver):
            raise LookupError(f"no NVIDIA GPU on this machine: there is no {driver[0]}") from None
        raise LookupError(f"nvidia-ml-py is not installed: {install_command('hardware')}") from None
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
        raise LookupError(f"amdsmi is not installed: take ROCm's own, or {install_command('amd')}") from None
    except KeyError:  # what its import fails with where it cannot load the driver's library
        raise LookupError("amdsmi finds no libamd_smi.so: set ROCM_PATH to where ROCm is") from None
    amdsmi.amdsmi_init()
    handles = amdsmi.amdsmi_get_processor_handles()
    chips = [amdsmi.amdsmi_get_gpu_asic_info(handle) for handle in handles]
    uuids = [f"GPU-{str(chip.get('asic_serial')).lower().removeprefix('0x')}" for chip in chips]
    # ROCm's runtime hides GPUs first; HIP counts those that are left.
    numbers = visible(uuids, ("ROCR_VISIBLE_DEVICES",))
    kept = visible([uuids[n] for n in numbers], ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
    devices: list[Device] = []
    for number in (numbers[n] for n in kept):
        handle = handles[number]

        def activity(which: str, handle: Any = handle) -> float:
            return _reading(amdsmi.amdsmi_get_gpu_activity(handle)[which], 100) / 100

        def power(handle: Any = handle) -> float:
            # MI300 has the current power, older cards the average; later versions of the library put either first.
            info = amdsmi.amdsmi_get_power_info(handle)
            keys = ("socket_power", "current_socket_power", "average_socket_power")
            found = [info[key] for key in keys if _is_reading(info.get(key), MAX_WATTS)]
            return _reading(found[0] if found else info.get(keys[0]), MAX_WATTS)

        def energy(handle: Any = handle) -> float:
            count = amdsmi.amdsmi_get_energy_count(handle)
            return (
                count["energy_accumulator"] * count["counter_resolution"] / 1e6
            )  # the resolution is in microjoules

        def temperature(handle: Any = handle) -> float:
            kind, now = amdsmi.AmdSmiTemperatureType.HOTSPOT, amdsmi.AmdSmiTemperatureMetric.CURRENT
            return _reading(amdsmi.amdsmi_get_temp_metric(handle, kind, now), MAX_CELSIUS)

        def memory(handle: Any = handle) -> float:
            used_mib = amdsmi.amdsmi_get_gpu_vram_usage(handle)["vram_used"]
            return _reading(used_mib, MAX_VRAM_MIB) * MIB / GIB

        sensors: dict[str, Sensor] = {
            "utilisation": partial(activity, "gfx_activity"),
            "memory_activity": partial(activity, "umc_activity"),
            "power_w": power,
            "temperature_c": temperature,
            "memory_gib": memory,
            "energy_j": growing(energy),
        }
        name = str(chips[number].get("market_name"))
        devices.append(Device(f"gpu{number}", name, "gpu", sensors))
    return _some(devices, "AMD")


def cpu_devices(sys: Path = Path("/sys")) -> list[Device]:
    """Describe the processor and the memory of the whole machine.

    Energy is RAPL's, of all processor packages (not of the
    memory), where the system lets this user read it.

    Args:
        sys: The sys file system.
    """
    absent = {"memory_activity": "no such sensor for a CPU"}
    sensors: dict[str, Sensor] = {"utilisation": _busy_share(_cpu_times), "memory_gib": _memory_gib}
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
    return [Device("cpu", cpu_name() or "CPU", "cpu", sensors, absent)]


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
        start = entry.lower()
        places = [
            n for n, uuid in enumerate(uuids) if entry == str(n) or (start and uuid.lower().startswith(start))
        ]
        if not places:
            break
        shown.append(places[0])
    return shown


def _some(devices: list[Device], maker: str) -> list[Device]:
    if not devices:
        raise LookupError(f"no {maker} GPU that this process may use")
    return devices


def _is_reading(value: object, most: float) -> bool:
    """Say whether a driver's value is one; amdsmi writes 'N/A' or a number of ones alone where it has none."""
    return isinstance(value, int | float) and value <= most


def _reading(value: object, most: float) -> float:
    if not (isinstance(value, int | float) and _is_reading(value, most)):
        raise ValueError(f"the driver says {value!r}")
    return float(value)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def cpu_name() -> str | None:
    """Return the marketing name of the processor, where the system tells it."""
    lines = _text(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def _cpu_times() -> tuple[float, float]:
    """Return (busy, all) time of all processors since the start of the machine, in seconds."""
    times = psutil.cpu_times()
    # A guest's time is in the user's, too; only Linux tells of guests and of waiting for a disk.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total


def _busy_share(times: Callable[[], tuple[float, float]]) -> Sensor:
    """Turn cumulative times into the share since the reading before."""
    last = times()

    def sensor() -> float | None:
        nonlocal last
        now = times()
        (busy, total), last = (now[0] - last[0], now[1] - last[1]), now
        return min(1.0, max(0.0, busy / total)) if total > 0 else None

    return sensor


def _memory_gib() -> float:
    memory = psutil.virtual_memory()
    return (memory.total - memory.available) / GIB


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


FIELDS = ("utilisation", "memory_activity", "power_w", "temperature_c", "memory_gib")
ENERGY = "energy_j"
SOURCES: dict[str, Callable[[], list[Device]]] = {
    "nvidia": nvidia_devices,
    "amd": amd_devices,
    "cpu": cpu_devices,
}
MAX_POINTS = 4096
MAX_FAILURES = 3
HOLD_S = 2.0  # besides two intervals: a loaded machine samples late


class Readings:
    """The readings of one sensor, joined by straight lines; constant beyond the first and the last.

    Memory is bounded: when there are `max_points`, every second one of the older half goes. Its share of the integral
    and its maximum stay with the next one, so means over days remain right; only edges of old windows get coarser.
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points, self._num = max_points, 0
        self._times, self._values, self._areas = array("d"), array("d"), array("d")
        self._highs, self._counts = array("d"), array("d")  # since the point before; up to this point
        self._columns = (self._times, self._values, self._areas, self._highs, self._counts)

    def add(self, time_s: float, value: float) -> None:
        """Append a reading; times never go back."""
        area = 0.0
        if self._times:
            area = self._areas[-1] + 0.5 * (self._values[-1] + value) * (time_s - self._times[-1])
        self._num += 1
        for column, item in zip(self._columns, (time_s, value, area, value, float(self._num)), strict=True):
            column.append(item)
        if len(self._times) >= self._max_points:
            half = self._max_points // 4 * 2
            for place in range(2, half + 1, 2):
                self._highs[place] = max(self._highs[place - 1 : place + 1])
            for column in self._columns:
                del column[1:half:2]

    def gap(self, start_s: float, end_s: float, hold_s: float) -> str | None:
        """Say why the readings do not speak for a window; None when they do."""
        if end_s <= start_s:
            return "the window is empty"
        if not self._times:
            return "no reading yet"
        if self.count(start_s, end_s) == 0:
            return "no reading in the window"
        first, last = self._times[0], self._times[-1]
        if start_s < first - hold_s or end_s > last + hold_s:
            covered = min(end_s, last) - max(start_s, first)
            return f"readings cover only {covered:.1f} of {end_s - start_s:.1f} s"
        return None

    def count(self, start_s: float, end_s: float) -> int:
        """Count the readings in a window."""
        first, after = bisect_left(self._times, start_s), bisect_right(self._times, end_s)
        return (
            int(self._counts[after - 1] - (self._counts[first - 1] if first else 0)) if after > first else 0
        )

    def summary(self, start_s: float, end_s: float) -> dict[str, float]:
        """Return the mean over a window, weighted by time, and the maximum."""
        (low, before), (high, after) = self._at(start_s), self._at(end_s)
        inside = self._highs[bisect_left(self._times, start_s) : bisect_right(self._times, end_s)]
        return {"mean": (after - before) / (end_s - start_s), "max": max(low, high, *inside)}

    def growth(self, start_s: float, end_s: float) -> float | None:
        """Return what a counter grew over a window, the part without readings at its mean rate; one reading: None."""
        first, last = max(start_s, self._times[0]), min(end_s, self._times[-1])
        if last <= first:
            return None
        return (self._at(last)[0] - self._at(first)[0]) * (end_s - start_s) / (last - first)

    def _at(self, time_s: float) -> tuple[float, float]:
        """Return value and integral at a time."""
        after = bisect_left(self._times, time_s)
        if after in (0, len(self._times)):
            end = min(after, len(self._times) - 1)
            value = self._values[end]
            return value, self._areas[end] + value * (time_s - self._times[end])
        before = after - 1
        width, left = self._times[after] - self._times[before], self._values[before]
        share = (time_s - self._times[before]) / width
        value = left + share * (self._values[after] - left)
        whole = 0.5 * (left + self._values[after])  # of a thinned stretch, the true mean may be another
        part = share * 0.5 * (left + value) / whole if whole else share
        return value, self._areas[before] + part * (self._areas[after] - self._areas[before])


class _Feed:
    """One source and what its sensors said."""

    def __init__(self, name: str, find: Callable[[], list[Device]], clock: Callable[[], float]) -> None:
        self.name = name
        self.devices: list[Device] | None = None
        self.readings: dict[str, Readings] = {}
        self.absent: dict[str, str] = {}
        self.busy: tuple[str, float] | None = None
        self._find, self._clock = find, clock
        self._failures: dict[str, int] = {}
        self._lock = threading.Lock()

    def run(self, stop: threading.Event, interval_s: float) -> None:
        """Sample until told to stop; whatever goes wrong is noted, never raised."""
        while not stop.is_set() and self.sample():
            stop.wait(interval_s)

    def sample(self) -> bool:
        """Take one reading of every sensor; return False when the source has none."""
        if self.devices is None:
            self.busy = (self.name, self._clock())
            try:
                found = self._find()
            except Exception as error:  # drivers raise errors of many libraries
                found, self.absent[self.name] = [], _reason(error)
            with self._lock:
                for device in found:
                    self.absent |= {f"{device.id}/{name}": reason for name, reason in device.absent.items()}
                self.devices = found
        for device in self.devices:
            for name, read in device.sensors.items():
                key = f"{device.id}/{name}"
                if self._failures.get(key, 0) < MAX_FAILURES:
                    self._read(key, read)
        self.busy = None
        return bool(self.devices)

    def _read(self, key: str, read: Callable[[], float | None]) -> None:
        """Take one reading; a sensor that fails several times in a row is given up."""
        self.busy = (key, self._clock())
        try:
            value = read()
            if value is not None and not math.isfinite(value):
                raise ValueError(f"the sensor reads {value}")
        except Exception as error:  # drivers raise errors of many libraries
            self._failures[key] = self._failures.get(key, 0) + 1
            if self._failures[key] == MAX_FAILURES:
                with self._lock:
                    self.absent[key] = _reason(error)
            return
        self._failures[key] = 0
        if value is not None:
            with self._lock:
                self.readings.setdefault(key, Readings()).add(self._clock(), value)

    def window(
        self, start_s: float, end_s: float, hold_s: float
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Describe the devices over a window: the list, and what is absent from it."""
        waiting = self.busy
        silent_s = self._clock() - waiting[1] if waiting else 0.0
        late = (
            f"{waiting[0]} has not answered for {silent_s:.0f} s" if waiting and silent_s > hold_s else None
        )
        with self._lock:
            if not self.devices:
                return [], {self.name: self.absent.get(self.name) or late or "not looked for yet"}
            absent: dict[str, str] = {}
            return [self._describe(d, start_s, end_s, hold_s, late, absent) for d in self.devices], absent

    def _describe(
        self,
        device: Device,
        start_s: float,
        end_s: float,
        hold_s: float,
        late: str | None,
        absent: dict[str, str],
    ) -> dict[str, Any]:
        seconds = end_s - start_s
        shown: dict[str, Any] = {"id": device.id, "name": device.name, "kind": device.kind}
        gaps: dict[str, str | None] = {}
        for name in (*FIELDS, ENERGY):
            key = f"{device.id}/{name}"
            readings = self.readings.get(key, Readings())
            gaps[name] = readings.gap(start_s, end_s, hold_s)
            if gaps[name] is not None:
                absent[key] = self.absent.get(key) or late or gaps[name] or ""
            shown[name] = None if gaps[name] else readings.summary(start_s, end_s)
        counts = [self.readings[key].count(start_s, end_s) for key in self.readings if _of(key, device)]
        joules = None
        if gaps[ENERGY] is None:
            joules = self.readings[f"{device.id}/{ENERGY}"].growth(start_s, end_s)
        shown["energy_from"] = None if joules is None else "counter"
        power = shown["power_w"]
        if joules is None and power is not None:
            joules, shown["energy_from"] = power["mean"] * seconds, "power"
        elif joules is not None and power is None:
            shown["power_w"] = {"mean": joules / seconds, "max": None}
            absent.pop(f"{device.id}/power_w", None)
        if joules is None:
            absent.setdefault(f"{device.id}/{ENERGY}", "only one reading")
        else:
            absent.pop(f"{device.id}/{ENERGY}", None)
        return shown | {ENERGY: joules, "num_samples": max(counts, default=0)}


class HardwareMonitor:
    """Watches the machine's devices from threads of their own. Use it as a context manager.

    Args:
        interval_s: Seconds between readings.
        sources: Functions that find devices, by name; default NVIDIA, AMD and CPU.
        clock: Clock of the readings.
    """

    def __init__(
        self,
        interval_s: float = 0.5,
        *,
        sources: Mapping[str, Callable[[], list[Device]]] = SOURCES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < interval_s < math.inf:
            raise ValueError(f"interval_s = {interval_s}: expected a positive number of seconds")
        self._interval_s = interval_s
        self._feeds = [_Feed(name, find, clock) for name, find in sources.items()]
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> HardwareMonitor:
        for feed in self._feeds:
            arguments = (self._stop, self._interval_s)
            thread = threading.Thread(
                target=feed.run, args=arguments, name=f"hardware-{feed.name}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no more threads to be had
                feed.absent[feed.name] = _reason(error)
                feed.devices = []
            else:
                self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop sampling; a sensor that hangs is left behind after a second. Windows can still be asked for."""
        self._stop.set()
        deadline = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def sample(self) -> None:
        """Take one reading of every sensor now and in this thread, for programs that need no other thread."""
        for feed in self._feeds:
            feed.sample()

    def window(self, start_s: float, end_s: float) -> dict[str, Any]:
        """Summarise the readings between two times of `time.monotonic()`.

        Args:
            start_s: Begin of the window.
            end_s: Its end.

        Returns:
            JSON: 'seconds', 'num_samples', 'devices' and 'absent'. A device has 'id', 'name', 'kind', 'num_samples';
            'utilisation' and 'memory_activity' (shares), 'power_w', 'temperature_c' and 'memory_gib', each {'mean'
            (weighted by time), 'max'} or None; 'energy_j' or None; 'energy_from': 'counter' of the device, 'power'
            integrated by the trapezoid rule, or None. 'absent' has a reason for every sensor that is None, by
            'device/field', and for every source without devices.
        """
        devices: list[dict[str, Any]] = []
        absent: dict[str, str] = {}
        for feed in self._feeds:
            found, missing = feed.window(start_s, end_s, HOLD_S + 2 * self._interval_s)
            devices += found
            absent |= missing
        return {
            "seconds": end_s - start_s,
            "num_samples": max((device["num_samples"] for device in devices), default=0),
            "devices": devices,
            "absent": absent,
        }


def rates(window: Mapping[str, Any], num_tokens: int, num_requests: int) -> dict[str, Any]:
    """Relate work to time and energy of the same window.

    Args:
        window: Of `HardwareMonitor.window`.
        num_tokens: Tokens produced in the window.
        num_requests: Requests answered in it.

    Returns:
        'tokens_per_second', 'joules_per_token', 'joules_per_request' (None where time, energy or work is missing) and
        'joules_of': ids of the devices whose energy is counted: the GPUs where there are any, else the CPU.
    """
    devices = window["devices"]
    counted = [d for d in devices if d["kind"] == "gpu"] or devices
    parts = [device[ENERGY] for device in counted]
    joules = sum(parts) if parts and None not in parts else None
    return {
        "tokens_per_second": num_tokens / window["seconds"] if window["seconds"] > 0 else None,
        "joules_per_token": joules / num_tokens if joules is not None and num_tokens else None,
        "joules_per_request": joules / num_requests if joules is not None and num_requests else None,
        "joules_of": [device["id"] for device in counted] if joules is not None else [],
    }


def hardware_metrics(window: Mapping[str, Any]) -> dict[str, float]:
    """Return the means of a window as metrics, 'hardware/<field>/<device>'; what is absent is left out."""
    return {
        f"hardware/{field}/{device['id']}": device[field]["mean"]
        for device in window["devices"]
        for field in FIELDS
        if device[field] is not None
    }


def step_metrics(monitor: HardwareMonitor, stage: str, began: float, device: Any) -> dict[str, float]:
    """Return what a training step logs of the machine: means of its window, and the peak of memory.

    Args:
        monitor: The run's monitor.
        stage: First part of the peak's name: 'sft', 'rl' ...
        began: Start of the step, time.monotonic(); short steps look back over two seconds, to have readings at all.
        device: Device of the model.
    """
    now = time.monotonic()
    window = monitor.window(min(began, now - 2.0), now)
    return hardware_metrics(window) | {f"{stage}/peak_memory_gib": peak_memory_gib(device)}


def peak_memory_gib(device: Any) -> float:
    """Return the most memory that this process held so far, in GiB.

    Args:
        device: Device (or its name) of the model. On a GPU: what PyTorch allocated there since the start or the last
            `torch.cuda.reset_peak_memory_stats`; else the process's largest resident set.
    """
    import torch

    place = torch.device(device)
    if place.type == "cuda":
        return torch.cuda.max_memory_allocated(place) / 2**30
    try:  # of this program alone: ru_maxrss also remembers what ran before it in the same process
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**20
    except (OSError, IndexError, ValueError):
        import resource
        import sys

        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _of(key: str, device: Device) -> bool:
    return key.startswith(f"{device.id}/")


def _reason(error: Exception) -> str:
    # amdsmi's errors have the code in their first line and the meaning in the second.
    return " ".join(f"{type(error).__name__}: {error}".split())[:200].removeprefix("LookupError: ")
