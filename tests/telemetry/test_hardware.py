"""Hardware telemetry: fake drivers, a fake psutil and a fake /sys, on a clock that the test turns."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from needs import require

from whet.eval.compare.page import not_sensed
from whet.install import install_command
from whet.telemetry import hardware
from whet.telemetry.hardware import (
    Device,
    HardwareMonitor,
    Readings,
    amd_devices,
    cpu_devices,
    growing,
    hardware_metrics,
    nvidia_devices,
    peak_memory_gib,
    rates,
    visible,
)

GIB = 2**30


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def monitor_of(clock: Clock, *devices: Device, interval_s: float = 1.0) -> HardwareMonitor:
    return HardwareMonitor(interval_s, sources={"fake": lambda: list(devices)}, clock=clock)


def run(monitor: HardwareMonitor, clock: Clock, times: list[float]) -> None:
    for now in times:
        clock.now = now
        monitor.sample()


def gpu(number: int = 0, **sensors: Callable[[], float | None]) -> Device:
    return Device(f"gpu{number}", f"Fake {number}", "gpu", sensors)


def seconds(first: int, last: int, step: float = 1.0) -> list[float]:
    return [first + step * n for n in range(round((last - first) / step) + 1)]


def test_energy_of_a_known_power_curve_over_exactly_the_window() -> None:
    clock = Clock()
    monitor = monitor_of(clock, gpu(power_w=lambda: 10 * (clock.now - 100)))
    run(monitor, clock, seconds(100, 120))
    for start, end in ((102.0, 110.0), (102.25, 109.6), (104.9, 106.1), (100.0, 120.0)):
        device = monitor.window(start, end)["devices"][0]
        # The integral of 10 (t - 100); a straight line is what the trapezoid rule gets exactly.
        assert device["energy_j"] == pytest.approx(5 * ((end - 100) ** 2 - (start - 100) ** 2))
        assert device["energy_from"] == "power"
        assert device["power_w"]["mean"] == pytest.approx(10 * ((start + end) / 2 - 100))
        assert device["power_w"]["max"] == pytest.approx(10 * (end - 100))


def test_the_counter_goes_before_the_integral_and_gives_power_where_there_is_no_sensor() -> None:
    clock = Clock()
    both = gpu(0, power_w=lambda: 50.0, energy_j=growing(lambda: 1000 + 70 * clock.now))
    only = gpu(1, energy_j=growing(lambda: 7 * clock.now))
    monitor = monitor_of(clock, both, only)
    run(monitor, clock, seconds(100, 110))
    window = monitor.window(101.5, 110.5)  # the last half second has no reading yet
    first, second = window["devices"]
    assert first["energy_j"] == pytest.approx(70 * 9)
    assert first["energy_from"] == second["energy_from"] == "counter"
    assert first["power_w"] == {"mean": 50.0, "max": 50.0}
    assert second["power_w"] == {"mean": pytest.approx(7.0), "max": None}
    assert "gpu1/power_w" not in window["absent"]
    assert first["num_samples"] == window["num_samples"] == 9


def test_a_counter_that_wraps_and_one_that_goes_back() -> None:
    values = iter([990.0, 998.0, 5.0, 9.0])
    sensor = growing(lambda: next(values), 1000.0)
    assert [sensor() for _ in range(4)] == [0, 8, 15, 19]
    reset = iter([50.0, 3.0])
    sensor = growing(lambda: next(reset))
    sensor()
    with pytest.raises(ValueError, match="went back"):
        sensor()


def test_windows_without_readings_say_so_and_never_zero() -> None:
    clock = Clock()
    monitor = monitor_of(clock, gpu(power_w=lambda: 100.0, utilisation=lambda: 0.5))
    assert monitor.window(90.0, 95.0)["absent"] == {"fake": "not looked for yet"}
    run(monitor, clock, seconds(100, 110))
    cases = {
        (103.2, 103.8): "no reading in the window",  # between two readings
        (100.0, 100.0): "the window is empty",
        (50.0, 60.0): "no reading in the window",
        (90.0, 105.0): "readings cover only 5.0 of 15.0 s",
        (105.0, 140.0): "readings cover only 5.0 of 35.0 s",
    }
    for (start, end), reason in cases.items():
        window = monitor.window(start, end)
        device = window["devices"][0]
        assert device["power_w"] is device["energy_j"] is device["energy_from"] is None
        assert window["absent"]["gpu0/power_w"] == reason
        assert window["absent"]["gpu0/temperature_c"]
        assert rates(window, 100, 10)["joules_per_token"] is None
        assert hardware_metrics(window) == {}
        assert json.loads(json.dumps(window, allow_nan=False)) == window
    assert monitor.window(102.0, 104.0)["devices"][0]["energy_j"] == pytest.approx(200.0)


def test_a_sensor_that_fails_half_way_is_absent_with_its_reason_and_the_others_go_on() -> None:
    clock = Clock()

    def power() -> float:
        if clock.now == 103:
            raise OSError("a hiccup")  # one failure is none
        if clock.now > 110:
            raise OSError("GPU is lost\nsecond line")
        return 100.0

    broken = gpu(0, power_w=power, utilisation=lambda: 1.0, temperature_c=lambda: float("nan"))
    monitor = monitor_of(clock, broken)
    run(monitor, clock, seconds(100, 130))
    window = monitor.window(101.0, 129.0)
    assert window["devices"][0]["utilisation"] == {"mean": 1.0, "max": 1.0}
    assert window["absent"]["gpu0/power_w"] == "OSError: GPU is lost second line"
    assert window["absent"]["gpu0/temperature_c"] == "ValueError: the sensor reads nan"
    assert window["devices"][0]["power_w"] is None
    assert window["devices"][0]["energy_j"] is None
    before = monitor.window(101.0, 109.0)
    assert before["devices"][0]["energy_j"] == pytest.approx(800.0)


def test_a_hanging_sensor_holds_up_neither_the_other_sources_nor_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()

    def hang() -> float:
        release.wait(30)
        return 1.0

    sources = {
        "hangs": lambda: [gpu(0, power_w=hang)],
        "hangs too": lambda: [gpu(1)] if release.wait(30) else [],
        "works": lambda: [Device("cpu", "CPU", "cpu", {"utilisation": lambda: 0.25})],
        "raises": lambda: (_ for _ in ()).throw(LookupError("no such thing")),
    }
    with HardwareMonitor(0.01, sources=sources) as monitor:
        start = time.monotonic()
        deadline = start + 20
        while monitor.window(start, time.monotonic())["num_samples"] < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        window = monitor.window(start, time.monotonic())
        began = time.monotonic()
    assert time.monotonic() - began < 10  # a second is granted to all threads together
    ids = {device["id"]: device for device in window["devices"]}
    assert ids["cpu"]["utilisation"]["max"] == 0.25
    assert ids["gpu0"]["power_w"] is None
    assert window["absent"]["raises"] == "no such thing"
    monkeypatch.setattr("whet.telemetry.hardware.HOLD_S", 0.05)
    time.sleep(0.2)
    late = monitor.window(start, time.monotonic())["absent"]
    assert late["gpu0/power_w"].startswith("gpu0/power_w has not answered for")
    assert late["hangs too"].startswith("hangs too has not answered for")
    release.set()


def test_memory_is_bounded_and_thinning_keeps_integrals_and_maxima() -> None:
    whole, thin = Readings(10**6), Readings(64)
    for n in range(5000):
        for readings in (whole, thin):
            readings.add(float(n), 100.0 + (900.0 if n == 700 else n % 7))
    assert len(thin._times) < 64
    assert thin.summary(0, 4999) == pytest.approx(whole.summary(0, 4999))
    assert thin.summary(0, 4999)["max"] == 1000
    assert thin.count(0, 4999) == whole.count(0, 4999) == 5000
    assert thin.summary(4980, 4999) == pytest.approx(whole.summary(4980, 4999))
    # An edge inside a thinned stretch: its own mean stands for the part.
    assert thin.summary(1000, 3000)["mean"] == pytest.approx(whole.summary(1000, 3000)["mean"], rel=0.2)


def test_rates_count_the_gpus_or_else_the_cpu() -> None:
    def window(**joules: float | None) -> dict[str, Any]:
        devices = [{"id": i, "kind": i.rstrip("01"), "energy_j": j} for i, j in joules.items()]
        return {"seconds": 4.0, "devices": devices}

    two = rates(window(gpu0=100.0, gpu1=60.0, cpu=40.0), 80, 5)
    assert two == {
        "tokens_per_second": 20.0,
        "joules_per_token": 2.0,
        "joules_per_request": 32.0,
        "joules_of": ["gpu0", "gpu1"],
    }
    assert rates(window(cpu=40.0), 80, 0)["joules_per_token"] == 0.5
    assert rates(window(cpu=40.0), 80, 0)["joules_per_request"] is None
    one_silent = rates(window(gpu0=100.0, gpu1=None, cpu=40.0), 80, 5)
    assert one_silent["joules_per_token"] is None
    assert one_silent["joules_of"] == []


def fake_nvml(watts: list[int]) -> SimpleNamespace:
    def power(handle: int) -> int:
        return watts[handle] * 1000

    def energy(handle: int) -> int:
        if handle == 1:
            raise RuntimeError("Not Supported")
        return 5000

    return SimpleNamespace(
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(watts),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{'abc'[handle]}",
        nvmlDeviceGetName=lambda handle: f"Fake H{handle}",
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=100, memory=13 - handle),
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetTemperature=lambda handle, kind: 41 - handle,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=(handle + 1) * GIB),
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )


def test_two_nvidia_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([394, 320]))
    clock = Clock()
    monitor = HardwareMonitor(1.0, sources={"nvidia": nvidia_devices}, clock=clock)
    run(monitor, clock, seconds(100, 104))
    window = monitor.window(100, 104)
    first, second = window["devices"]
    assert (first["id"], first["name"], second["id"]) == ("gpu0", "Fake H0", "gpu1")
    assert (first["power_w"]["max"], second["power_w"]["max"]) == (394, 320)
    assert (first["memory_activity"]["max"], second["memory_activity"]["max"]) == (0.13, 0.12)
    assert (first["utilisation"]["max"], second["temperature_c"]["max"]) == (1.0, 40)
    assert second["memory_gib"]["mean"] == 2
    assert (first["energy_from"], second["energy_from"]) == ("counter", "power")
    assert second["energy_j"] == 320 * 4
    assert window["absent"] == {}
    metrics = hardware_metrics(window)
    assert metrics["hardware/power_w/gpu1"] == 320
    assert metrics["hardware/utilisation/gpu0"] == 1.0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert [device.id for device in nvidia_devices()] == ["gpu1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(LookupError, match="no NVIDIA GPU"):
        nvidia_devices()


def test_the_driver_library_has_every_name_that_is_used() -> None:
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py: pip install 'whet-rl[hardware]'")
    used = set(re.findall(r"pynvml\.(\w+)", inspect.getsource(nvidia_devices)))
    assert len(used) == 11
    assert used == {name for name in used if hasattr(pynvml, name)}


def test_no_driver_no_gpu_no_claim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    (tmp_path / "kfd").touch()
    sources = {
        "nvidia": lambda: nvidia_devices([tmp_path / "none", tmp_path / "kfd"]),
        "no nvidia": lambda: nvidia_devices([tmp_path / "none"]),
        "no amd": lambda: amd_devices(tmp_path / "none"),
        "amd": lambda: amd_devices(tmp_path / "kfd"),
    }
    monitor = HardwareMonitor(sources=sources)
    monitor.sample()
    window = monitor.window(0, 1)
    assert window["devices"] == []
    assert window["absent"]["nvidia"] == f"nvidia-ml-py is not installed: {install_command('hardware')}"
    assert "no NVIDIA GPU" in window["absent"]["no nvidia"]
    assert "no AMD GPU" in window["absent"]["no amd"]
    none = {name: reason for name, reason in window["absent"].items() if name.startswith("no ")}
    assert not not_sensed([{"hardware": {"devices": [], "seconds": 1, "absent": none}}])
    assert not_sensed([{"hardware": window | {"seconds": 1}}]).startswith(
        "nvidia (nvidia-ml-py is not installed"
    )
    assert install_command("amd") in window["absent"]["amd"]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([]))
    with pytest.raises(LookupError, match="no NVIDIA GPU"):
        nvidia_devices()


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The real amdsmi on a stand-in for its driver's library (amd_smi.c); the file that says there is a driver."""
    require("amdsmi", "c compiler")  # .ci/run has the package
    wrapper = importlib.util.find_spec("amdsmi")
    assert wrapper is not None
    assert wrapper.origin is not None
    source = Path(__file__).with_name("amd_smi.c").read_text()
    bound = set(
        re.findall(
            r"\['libamd_smi.so'\]\.(\w+)", Path(wrapper.origin).with_name("amdsmi_wrapper.py").read_text()
        )
    )
    own = set(re.findall(r"^int (\w+)\(", source, flags=re.MULTILINE))
    assert own < bound, "the package binds all that the stand-in answers"
    rest = "".join(f"int {name}(void) {{ return NOT_SUPPORTED; }}\n" for name in sorted(bound - own))
    (tmp_path / "lib").mkdir()
    (tmp_path / "amd_smi.c").write_text(source + rest)
    command = ["cc", "-shared", "-fPIC", "-o", tmp_path / "lib" / "libamd_smi.so", tmp_path / "amd_smi.c"]
    subprocess.run(command, check=True, timeout=60)
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROCM_HOME", str(tmp_path))
    (tmp_path / "kfd").touch()
    yield tmp_path / "kfd"
    for name in [name for name in sys.modules if name.partition(".")[0] == "amdsmi"]:
        del sys.modules[name]


def test_amd_gpus(amd: Path) -> None:
    clock = Clock()
    monitor = HardwareMonitor(1.0, sources={"amd": lambda: amd_devices(amd)}, clock=clock)
    run(monitor, clock, seconds(100, 110))
    window = monitor.window(100, 110)
    new, old, _ = window["devices"]
    assert (new["id"], new["name"], old["name"]) == ("gpu0", "AMD Instinct MI300X", "AMD Instinct MI250")
    assert (new["utilisation"]["mean"], new["memory_activity"]["mean"]) == (1.0, pytest.approx(0.13))
    assert (new["power_w"]["mean"], old["power_w"]["mean"]) == (394, 320)
    assert (new["temperature_c"]["max"], old["temperature_c"]["max"]) == (41, 38)
    assert new["memory_gib"]["mean"] == pytest.approx(2.0)
    # A million counts of 15.25 microjoules a second; where no counter is, the integral of power.
    assert (new["energy_j"], new["energy_from"]) == (pytest.approx(10 * 15.25), "counter")
    assert (old["energy_j"], old["energy_from"]) == (pytest.approx(3200), "power")
    assert window["absent"]["gpu1/memory_activity"] == "ValueError: the driver says 4294967295"
    unsupported = (
        "AmdSmiLibraryException: Error code: 2 | AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported"
    )
    assert {key for key, reason in window["absent"].items() if reason == unsupported} == {
        f"gpu2/{name}" for name in (*hardware.FIELDS, "energy_j")
    }


def test_amd_gpus_that_the_environment_hides(amd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm's runtime hides first, by number or UUID; HIP counts what is left."""
    for rocr, hip, expected in (
        ("1,0", None, ["gpu1", "gpu0"]),
        ("1,0", "1", ["gpu0"]),
        ("GPU-00000000000000BB", None, ["gpu1"]),
        ("1,2", "0", ["gpu1"]),
        (None, "2,0", ["gpu2", "gpu0"]),
    ):
        for name, text in (("ROCR_VISIBLE_DEVICES", rocr), ("HIP_VISIBLE_DEVICES", hip)):
            monkeypatch.delenv(name, raising=False)
            if text is not None:
                monkeypatch.setenv(name, text)
        assert [device.id for device in amd_devices(amd)] == expected
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    with pytest.raises(LookupError, match="no AMD GPU"):
        amd_devices(amd)


def test_an_amd_driver_without_its_library_is_told(
    amd: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (amd.parent / "lib" / "libamd_smi.so").unlink()
    monkeypatch.setenv("ROCM_PATH", str(amd.parent))
    with pytest.raises(LookupError, match="finds no libamd_smi.so: set ROCM_PATH"):
        amd_devices(amd)
    assert capfd.readouterr().out.count("\n") <= 2


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A made-up /sys of a machine with two processor packages."""
    for number, name in enumerate(("package-0", "package-1", "psys")):
        folder = tmp_path / f"sys/class/powercap/intel-rapl:{number}"
        folder.mkdir(parents=True)
        (folder / "name").write_text(name + "\n")
        (folder / "max_energy_range_uj").write_text("9999999\n")
        (folder / "energy_uj").write_text("0\n")
    sub = tmp_path / "sys/class/powercap/intel-rapl:0:0"
    sub.mkdir()
    (sub / "name").write_text("core\n")
    (sub / "energy_uj").write_text("1\n")
    hwmon = tmp_path / "sys/class/hwmon/hwmon3"
    hwmon.mkdir(parents=True)
    (hwmon / "name").write_text("k10temp\n")
    (hwmon / "temp1_input").write_text("52500\n")
    return tmp_path


class Counters:
    """What psutil counts, on Linux: a guest's time is in the user's once more."""

    busy = idle = 0.0

    def cpu_times(self) -> Any:
        names = "user nice system idle iowait irq softirq steal guest guest_nice"
        values = (self.busy + 7, 0, 0, self.idle, 5, 0, 0, 0, 7, 0)
        return namedtuple("Times", names)(*values)

    def virtual_memory(self) -> Any:
        return SimpleNamespace(total=8 * GIB, available=6 * GIB)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    found = Counters()
    for name in ("cpu_times", "virtual_memory"):
        monkeypatch.setattr(hardware.psutil, name, getattr(found, name))
    monkeypatch.setattr(hardware, "cpu_name", lambda: "Fake 9000")
    return found


def test_cpu_memory_and_rapl_with_wrap_around(machine: Path, counters: Counters) -> None:
    clock = Clock()
    sources = {"cpu": lambda: cpu_devices(machine / "sys")}
    monitor = HardwareMonitor(1.0, sources=sources, clock=clock)
    for n in range(11):
        clock.now = 100.0 + n
        counters.busy, counters.idle = 0.3 * n, 0.1 * n
        for number in range(3):  # 3 W and 6 W: the counters pass 10 J in the first three seconds
            joules = (number + 1) * 3_000_000 * n
            (machine / f"sys/class/powercap/intel-rapl:{number}/energy_uj").write_text(
                f"{joules % 10_000_000}\n"
            )
        monitor.sample()
    window = monitor.window(101.0, 109.0)
    (device,) = window["devices"]
    assert (device["id"], device["name"], device["kind"]) == ("cpu", "Fake 9000", "cpu")
    assert device["utilisation"]["mean"] == pytest.approx(0.75)
    assert device["memory_gib"]["mean"] == pytest.approx(2.0)
    assert device["temperature_c"]["mean"] == pytest.approx(52.5)
    assert device["energy_j"] == pytest.approx((3 + 6) * 8)  # packages only: 'psys' holds them once more
    assert device["power_w"] == {"mean": pytest.approx(9.0), "max": None}
    assert window["absent"] == {"cpu/memory_activity": "no such sensor for a CPU"}


def test_unreadable_rapl_is_absent_not_zero(machine: Path) -> None:
    (machine / "sys/class/powercap/intel-rapl:0/energy_uj").unlink()
    (device,) = cpu_devices(machine / "sys")
    assert "energy_j" not in device.sensors
    assert "energy_uj" in device.absent["energy_j"]
    (device,) = cpu_devices(machine / "nothing")
    assert "no RAPL counter" in device.absent["energy_j"]
    assert "no CPU thermometer" in device.absent["temperature_c"]


def test_a_system_that_counts_neither_guests_nor_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As psutil has it on macOS."""
    times = iter([(1.0, 0.0, 1.0, 8.0), (2.0, 0.0, 2.0, 10.0)])
    monkeypatch.setattr(
        hardware.psutil, "cpu_times", lambda: namedtuple("Times", "user nice system idle")(*next(times))
    )
    (device,) = cpu_devices(Path("/nothing"))
    assert device.sensors["utilisation"]() == 0.5


def test_this_machine_has_a_cpu() -> None:
    with HardwareMonitor(0.02) as monitor:
        start = time.monotonic()
        while time.monotonic() - start < 20:
            window = monitor.window(start, time.monotonic())
            if window["num_samples"] >= 3:
                break
            time.sleep(0.02)
    cpu = next(device for device in window["devices"] if device["id"] == "cpu")
    assert 0 < cpu["memory_gib"]["mean"] < 10_000
    assert (cpu["energy_j"] is None) == ("cpu/energy_j" in window["absent"])


def test_visible_follows_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = ["GPU-aa", "GPU-bb", "GPU-cc"]
    for text, expected in {"2,0": [2, 0], "GPU-b": [1], "0,-1,1": [0], "-1": [], "": [], "7": []}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert visible(uuids, ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")) == expected


def test_peak_memory_of_this_process() -> None:
    first = peak_memory_gib("cpu")
    block = bytearray(b"x") * (64 * 2**20)
    now_gib = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / GIB  # what is resident at present
    assert len(block) == 64 * 2**20
    assert 0.99 * now_gib <= peak_memory_gib("cpu") < 10 * now_gib
    assert peak_memory_gib("cpu") >= first


def test_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match="interval_s = 0"):
        HardwareMonitor(0)
