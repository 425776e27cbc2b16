"""Checkpoints are whole or absent, and a damaged one is noticed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.kernels.cpu import build
from whet.storage import checkpoint, commit
from whet.storage.checkpoint import (
    LogHashes,
    _machine_differences,
    load_step,
    save_step,
    saved_steps,
    step_folder,
)
from whet.storage.commit import MANIFEST, DiskFullError, commit_folder, new_folder, recover, verify_folder
from whet.storage.folder import check_folder, open_run
from whet.telemetry.provenance import write_provenance
from whet.types import UserError


def write_model(folder: Path) -> None:
    (folder / "model.bin").write_bytes(bytes(range(256)) * 8)
    (folder / "config.json").write_text("{}")


def save(run: Path, step: int, keep: int = 2) -> Path:
    tensors = {"w/exp_avg": torch.full((3, 2), float(step)), "w/step": torch.tensor(float(step))}
    return save_step(
        run, step, write_model=write_model, tensors=tensors, state={"cursor": 10 * step}, keep=keep
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    assert load_step(tmp_path) is None
    folder = save(tmp_path, 7)
    verify_folder(folder)
    found = load_step(tmp_path)
    assert found is not None
    assert found.folder == folder == step_folder(tmp_path, 7)
    tensors = found.read({})
    assert torch.equal(tensors["w/exp_avg"], torch.full((3, 2), 7.0))
    assert tensors["w/step"].shape == ()
    assert found.state == {"step": 7, "cursor": 70}


def write(final: Path, content: str, error: BaseException | None = None) -> None:
    with commit_folder(final) as folder:
        (folder / "a").write_text(content)
        if error is not None:
            raise error


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    final = tmp_path / "step_00000001"
    for error in (RuntimeError("disk"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            write(final, "new", error)
        assert names(tmp_path) == []
    write(final, "old")
    with pytest.raises(RuntimeError):
        write(final, "new", RuntimeError("disk"))
    assert names(tmp_path) == ["step_00000001"]
    assert (final / "a").read_text() == "old"
    verify_folder(final)


def test_a_new_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for number in (
        gone.pid,
        os.getpid(),
        os.getppid(),
    ):  # dead; this one's, as after a restart of a container; alive
        (tmp_path / f".tmp-out-{number}").mkdir()
    (tmp_path / ".tmp-out-x-1").mkdir()

    def fail() -> None:
        with new_folder(tmp_path / "out") as folder:
            write_model(folder)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        DiskFullError, match=r"out: could not be written \(No space left.*\); nothing is left"
    ):
        fail()
    assert names(tmp_path) == [f".tmp-out-{os.getppid()}", ".tmp-out-x-1"]
    with new_folder(tmp_path / "out") as folder:
        write_model(folder)
        assert not (tmp_path / "out").exists()
    assert names(tmp_path / "out") == ["config.json", "model.bin"]
    assert names(tmp_path) == [f".tmp-out-{os.getppid()}", ".tmp-out-x-1", "out"]


def test_a_commit_replaces_the_whole_folder(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with commit_folder(tmp_path / "best") as folder:
            (folder / content).write_text(content)
            assert not (tmp_path / "best" / content).exists()
    assert names(tmp_path) == ["best"]
    assert names(tmp_path / "best") == [MANIFEST, "new"]


def test_everything_is_on_disk_before_the_name_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = commit.sync, Path.rename
    monkeypatch.setattr(commit, "sync", lambda path: (events.append(f"sync {path.name}"), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda a, b: (events.append("rename"), rename(a, b))[1])
    with commit_folder(tmp_path / "best") as folder:
        write_model(folder)
        inner = folder.name
    before = set(events[: events.index("rename")])
    assert before == {"sync model.bin", "sync config.json", f"sync {MANIFEST}", f"sync {inner}"}
    assert events[-1] == f"sync {tmp_path.name}"


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


DAMAGES = (flip_bit, cut, Path.unlink)
FILES = ("model.bin", "config.json", "training/optimizer.safetensors", "training/state.json")


def test_a_saved_step_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of a run folder are on disk as well: without them the files of the step would be nowhere."""
    synced: list[tuple[Path, set[str]]] = []
    fsync = os.fsync

    def look(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path, set(os.listdir(path)) if path.is_dir() else set()))

    monkeypatch.setattr(os, "fsync", look)
    run = tmp_path / "runs" / "mine"
    open_run(run, "seed: 1\n")
    assert (run, {"config.yaml"}) in synced
    assert any(path == run.parent and "mine" in found for path, found in synced)
    (run / "metrics.jsonl").write_text("{}\n")
    save(run, 3)
    last = {path: found for path, found in synced if found}
    assert last[run] == {"config.yaml", "metrics.jsonl", "checkpoints"}
    assert last[run / "checkpoints"] == {"step_00000003"}


@pytest.mark.parametrize("damage", [*DAMAGES, grow])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_noticed_and_the_checkpoint_before_is_used(
    damage: Callable[[Path], None], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    damage(step_folder(tmp_path, 2) / name)
    with pytest.raises(UserError, match=name):
        verify_folder(step_folder(tmp_path, 2))
    found = load_step(tmp_path)
    assert found is not None
    assert found.state["step"] == 1
    assert "warning" in (output := capsys.readouterr().out)
    assert name in output
    assert saved_steps(tmp_path) == [1]
    assert ".corrupt-step_00000002" in names(tmp_path / "checkpoints")
    # The run reaches the step again, and it happens again.
    save(tmp_path, 2)
    damage(step_folder(tmp_path, 2) / name)
    assert load_step(tmp_path) is not None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"files": 3}', '{"files": {"a": {}}}', '{"files": {"a": 1}}']
)
def test_a_broken_manifest_is_noticed(text: str, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (step_folder(tmp_path, 2) / MANIFEST).write_text(text)
    with pytest.raises(UserError, match="no readable manifest"):
        verify_folder(step_folder(tmp_path, 2))
    found = load_step(tmp_path)
    assert found is not None
    assert found.state["step"] == 1


def test_any_flipped_byte_of_a_manifest_is_noticed_or_harmless(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    path = folder / MANIFEST
    whole = path.read_bytes()
    generator = random.Random(0)
    for _ in range(100):
        data = bytearray(whole)
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
        try:
            verify_folder(folder)
        except UserError:
            continue
        # Accepted: then every file is still named with its size and hash.
        assert json.loads(data)["files"] == json.loads(whole)["files"]


def test_a_checkpoint_under_another_steps_name_is_not_that_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    step_folder(tmp_path, 2).rename(step_folder(tmp_path, 9))
    with pytest.raises(UserError, match="step_00000009: holds step 2: it was renamed"):
        load_step(tmp_path, 9)
    found = load_step(tmp_path)
    assert found is not None
    assert found.state["step"] == 1
    assert "holds step 2" in capsys.readouterr().out


def test_no_readable_checkpoint_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    for step in (1, 2):
        cut(save(tmp_path, step) / "model.bin")
    with pytest.raises(UserError, match=r"no checkpoint can be read.*model\.bin"):
        load_step(tmp_path)


@pytest.mark.parametrize(("keep", "kept"), [(2, [4, 5]), (0, [4, 5]), (3, [3, 4, 5])])
def test_the_newest_are_kept(keep: int, kept: list[int], tmp_path: Path) -> None:
    with commit_folder(tmp_path / "checkpoints" / "best") as folder:
        write_model(folder)
    for step in range(1, 6):
        save(tmp_path, step, keep=keep)
    assert saved_steps(tmp_path) == kept
    assert names(tmp_path / "checkpoints") == ["best", *(f"step_{step:08d}" for step in kept)]


def test_unfinished_folders_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(step_folder(tmp_path, 1), step_folder(tmp_path, 2))
    (step_folder(tmp_path, 2) / MANIFEST).unlink()
    (tmp_path / "checkpoints" / "step_x").mkdir()
    assert saved_steps(tmp_path) == [1]


def test_recover_undoes_half_a_replacement(tmp_path: Path) -> None:
    for name in ("best", ".old-step_00000003-77", ".old-best-77", ".tmp-best-78"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "was").write_text(name)
    recover(tmp_path)
    assert names(tmp_path) == ["best", "step_00000003"]
    assert (tmp_path / "best" / "was").read_text() == "best"
    recover(tmp_path / "missing")


WRITER = """
import sys, time
from pathlib import Path
import torch
from whet.storage.checkpoint import save_step
from whet.storage.commit import commit_folder
run = Path(sys.argv[1])
def write_model(folder):
    for number in range(4):
        (folder / f"part{number}").write_text(str(step) * 20000)
step = 0
while True:
    step += 1
    save_step(run, step, write_model=write_model, tensors={"a": torch.full((1000,), float(step))}, state={})
    with commit_folder(run / "checkpoints" / "best") as folder:
        write_model(folder)
    print(step, flush=True)
"""


@pytest.mark.ci
def test_killed_at_any_time_old_or_new_is_whole(tmp_path: Path) -> None:
    generator = random.Random(0)
    for attempt in range(3):
        run = tmp_path / str(attempt)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(run)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        reported = [process.stdout.readline()]
        time.sleep(generator.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        reported += process.communicate(timeout=30)[0].split()
        last = int(reported[-1])
        checkpoints = run / "checkpoints"
        found = load_step(run)  # before any recovery
        assert found is not None
        # The report may have been cut off just before or after the save; nothing older comes back.
        assert last <= found.state["step"] <= last + 1
        recover(checkpoints)
        verify_folder(checkpoints / "best")
        assert {path.read_text() for path in (checkpoints / "best").glob("part*")} in (
            {str(last) * 20000},
            {str(last + 1) * 20000},
        )
        for step in saved_steps(run):
            verify_folder(step_folder(run, step))
        assert not [name for name in names(checkpoints) if name.startswith(".")]


def test_open_run(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    with pytest.raises(UserError, match="nothing to resume"):
        open_run(run, "a: 1\n", resume=True)
    open_run(run, "a: 1\nb: 2\n", resume=False)
    assert (run / "config.yaml").read_text() == "a: 1\nb: 2\n"
    (run / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"already exists and is never overwritten.*--resume"):
        open_run(run, "a: 1\nb: 2\n", resume=False)
    with pytest.raises(UserError, match="choose another --out$"):
        open_run(run, "a: 1\nb: 2\n", resumable=False)
    open_run(run, "a: 1\nb: 2\n", resume=True)
    with pytest.raises(UserError, match="config.yaml line 2 has 'b: 2', you gave 'b: 3'"):
        open_run(run, "a: 1\nb: 3\n", resume=True)
    with pytest.raises(UserError, match="number of fields"):
        open_run(run, "a: 1\nb: 2\nc: 3\n", resume=True)


def test_a_folder_that_cannot_be_made_is_found_before_the_run(tmp_path: Path) -> None:
    check_folder(tmp_path / "deep" / "run")
    assert list(tmp_path.iterdir()) == []  # it tries, and leaves nothing
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "run", *map(Path, ["/proc/x"] * Path("/proc").is_dir())):
        with pytest.raises(UserError, match=r"cannot be written \(.* is no folder that you may write to\)"):
            check_folder(folder)


def test_the_folder_that_is_named_is_the_run(tmp_path: Path) -> None:
    """Its name when it began decides nothing, whether the config was edited after a move or not."""
    open_run(tmp_path / "a", "out: a\nseed: 1\nsafety:\n  keep: 2\n")
    write_provenance(tmp_path / "a", config_yaml=(tmp_path / "a/config.yaml").read_text())
    moved = (tmp_path / "a").rename(tmp_path / "b")
    open_run(moved, "out: b\nseed: 1\nsafety:\n  keep: 2\n", resume=True)
    (moved / "config.yaml").write_text("out: b\nseed: 1\nsafety:\n  keep: 3\n")
    open_run(moved, "out: b\nseed: 1\nsafety:\n  keep: 2\n", resume=True)
    (moved / "config.yaml").write_text("out: b\nseed: 2\n")
    with pytest.raises(UserError, match=r"config\.yaml: changed since the run started"):
        open_run(moved, "out: b\nseed: 2\n", resume=True)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    runs: list[Path] = []
    for seed in (1, 2):
        run = tmp_path / f"seed-{seed}"
        open_run(run, f"seed: {seed}\n")
        write_provenance(run, config_yaml=f"seed: {seed}\n")
        tensors, state = {"w": torch.zeros(1)}, {"inputs": {"whet": "1"}}
        save_step(run, 2 * seed, write_model=write_model, tensors=tensors, state=state)
        runs.append(run)
    shutil.copytree(runs[0], copy := tmp_path / "copy")
    assert load_step(copy) is not None  # as a whole it is the same run
    shutil.copytree(step_folder(runs[1], 4), step_folder(copy, 4))
    for resume in (True, 4):
        with pytest.raises(UserError, match=r"step_00000004: a checkpoint of run seed-2-.* is run seed-1-"):
            load_step(copy, resume)
    shutil.rmtree(step_folder(copy, 4))
    (copy / "provenance.json").unlink()
    write_provenance(copy, config_yaml="seed: 1\n")  # takes its id from the checkpoint
    assert load_step(copy) is not None


BITS = {
    "threads": 2,
    "kernels": "C++, 1a2b",
    "torch": "2",
    "cpu": "AVX2",
    "processor": "A 1",
    "variables": {},
}


@pytest.mark.parametrize(
    ("saved", "here", "told"),
    [
        ({}, {}, []),
        ({"kernels": "eager: no C++ compiler"}, {"kernels": "eager"}, []),  # as earlier versions wrote it
        (
            {"kernels": "eager"},
            {},
            [("saved with kernels eager, resumed with C++, 1a2b", "set WHET_KERNELS=eager")],
        ),
        ({"processor": "B 2"}, {}, [("saved with processor B 2, resumed with A 1", "")]),
        (
            {"variables": {"MKL_CBWR": "AVX2", "OMP_DYNAMIC": "true"}},
            {"variables": {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}},
            [
                ("saved with MKL_CBWR=AVX2, resumed with MKL_CBWR=COMPATIBLE", "set MKL_CBWR=AVX2"),
                ("saved with OMP_DYNAMIC=true, resumed with no OMP_DYNAMIC", "set OMP_DYNAMIC=true"),
                (
                    "saved with no ONEDNN_MAX_CPU_ISA, resumed with ONEDNN_MAX_CPU_ISA=SSE41",
                    "unset ONEDNN_MAX_CPU_ISA",
                ),
            ],
        ),
    ],
)
def test_what_changes_the_last_bits_is_said_with_what_undoes_it(
    saved: dict[str, Any], here: dict[str, Any], told: list[tuple[str, str]]
) -> None:
    assert _machine_differences({**BITS, **saved}, {**BITS, **here}) == told
    old = {name: value for name, value in {**BITS, **saved}.items() if name not in ("processor", "variables")}
    assert all("kernels" in line for line, _ in _machine_differences(old, BITS))


def test_a_run_without_a_compiler_goes_on_where_there_is_none_for_another_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "library", lambda: None)
    for reason in ("eager: no C++ compiler", "eager: the kernels could not be built (g++: timed out)"):
        monkeypatch.setattr(build, "reason", lambda reason=reason: reason)
        if not (tmp_path / "checkpoints").exists():
            save(tmp_path, 1)
    assert load_step(tmp_path, sameness="strict") is not None
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setattr(commit, "processor_kind", lambda: "GenuineIntel 6 143")
    said = "saved with processor .*, resumed with GenuineIntel 6 143; saved with no MKL_CBWR, .*; unset MKL_CBWR, or"
    with pytest.raises(UserError, match=said):
        load_step(tmp_path, sameness="strict")


def test_variables_that_steer_the_libraries_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(commit.STEERING)]:
        monkeypatch.delenv(name)
    steering = {
        "MKL_CBWR": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "MKL_DEBUG_CPU_TYPE": "5",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
        "OMP_DYNAMIC": "true",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2_Usable",
    }
    idle = {
        "MKL_VERBOSE": "1",
        "MKL_NUM_THREADS": "2",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        "MKLROOT": "/opt",
    }
    for name, value in (steering | idle).items():
        monkeypatch.setenv(name, value)
    expected = {name.replace("DNNL_MAX", "ONEDNN_MAX"): value for name, value in steering.items()}
    assert commit.machine()["variables"] == expected


@pytest.mark.parametrize(
    ("cpuinfo", "kind"),
    [
        (
            ["vendor_id\t: AuthenticAMD", "cpu family\t: 25", "model\t\t: 1", "model name\t: AMD EPYC"],
            "AuthenticAMD 25 1 AMD EPYC",
        ),
        (["CPU implementer\t: 0x41", "CPU variant\t: 0x1", "CPU part\t: 0xd40"], "0x41 0xd40 0x1"),
    ],
)
def test_two_processors_of_one_name_are_told_apart(
    cpuinfo: list[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_cpuinfo", lambda: tuple(cpuinfo))
    assert build.processor_kind.__wrapped__() == kind


@pytest.mark.parametrize("rest", [[], ["environment.json"], ["metrics.jsonl", "samples.jsonl"]])
def test_a_run_that_ended_before_its_first_result_blocks_nobody(tmp_path: Path, rest: list[str]) -> None:
    open_run(tmp_path / "run", "a: 1\n")
    for name in rest:
        (tmp_path / "run" / name).write_text("{}" if name == "environment.json" else "")
    open_run(tmp_path / "run", "a: 2\n")
    assert (tmp_path / "run" / "config.yaml").read_text() == "a: 2\n"
    assert os.listdir(tmp_path / "run") == ["config.yaml"]


@pytest.mark.parametrize("name", ["eval.json", "checkpoints", "notes.txt"])
def test_a_folder_with_anything_else_is_left_alone(tmp_path: Path, name: str) -> None:
    open_run(tmp_path / "run", "a: 1\n")
    (tmp_path / "run" / name).write_text("")
    with pytest.raises(UserError, match="already exists"):
        open_run(tmp_path / "run", "a: 1\n")


def test_open_run_takes_an_empty_folder_and_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    open_run(tmp_path / "empty", "a: 1\n", resume=False)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match="already exists"):
        open_run(tmp_path / "file", "a: 1\n", resume=False)
    with pytest.raises(UserError, match="cannot be written"):
        open_run(tmp_path / "file" / "run", "a: 1\n", resume=False)
    assert (tmp_path / "file").read_text() == "precious"
    assert os.listdir(tmp_path / "empty") == ["config.yaml"]


def test_a_digest_of_a_part_is_that_of_its_bytes(tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (tmp_path / "log").write_bytes(content)
    for size in (0, 5, 1 << 20, (2 << 20) + 7):  # pieces of 1 MiB are read
        assert commit.digest(tmp_path / "log", size) == hashlib.sha256(content[:size]).hexdigest()
    assert commit.digest(tmp_path / "log") == hashlib.sha256(content).hexdigest()


def test_what_a_manifest_does_not_say_is_noticed(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "extra.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"extra\.bin: the manifest does not name it"):
        verify_folder(folder)
    (folder / "extra.bin").unlink()
    verify_folder(folder)
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"torch": "another"}))  # what no file's hash covers
    with pytest.raises(UserError, match="not as it was written"):
        verify_folder(folder)
    path.write_text(json.dumps({name: value for name, value in manifest.items() if name != "sha256"}))
    verify_folder(folder)  # of a version that wrote none


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_not_saved(value: float, tmp_path: Path) -> None:
    save(tmp_path, 1)
    tensors = {"fine": torch.ones(2), "w/exp_avg": torch.tensor([1.0, value])}
    with pytest.raises(UserError, match=r"step 2: w/exp_avg is not finite and was not saved"):
        save_step(tmp_path, 2, write_model=write_model, tensors=tensors, state={})
    assert saved_steps(tmp_path) == [1]


def test_logs_are_hashed_as_they_are_and_only_what_is_new_is_read(tmp_path: Path) -> None:
    logs, path = LogHashes(tmp_path), tmp_path / "metrics.jsonl"

    def expected() -> dict[str, Any]:
        content = path.read_bytes()
        return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    path.write_text('{"step": 1}\n')
    assert logs.describe() == {"metrics.jsonl": expected()}
    with path.open("a") as file:
        file.write('{"step": 2}\n')
    assert logs.describe() == {"metrics.jsonl": expected()}
    path.write_text('{"step": 9}\n')  # cut to less than was read, and other than it was
    assert logs.describe() == {"metrics.jsonl": expected()}


def test_records_are_kept_for_the_checkpoints_that_are(tmp_path: Path) -> None:
    """A record starts from the checkpoint of the step before; the first one needs none."""
    for number in range(1, 5):
        record = tmp_path / "replay" / f"step_{number:08d}"
        record.mkdir(parents=True)
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert saved_steps(tmp_path) == [2, 3]
    assert names(tmp_path / "replay") == ["step_00000001", "step_00000003", "step_00000004"]


def test_a_log_that_was_changed_is_kept_as_found_and_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    save(tmp_path, 1)
    with path.open("a") as file:  # what came after the checkpoint is cut off by the run
        file.write('{"step": 2}\n')
    assert load_step(tmp_path) is not None
    assert "damaged" not in capsys.readouterr().out
    path.write_text('{"step": 7}\n')
    assert load_step(tmp_path) is not None
    assert "metrics.jsonl: damaged since step_00000001 was saved" in capsys.readouterr().out
    assert (tmp_path / ".corrupt-metrics.jsonl").read_text() == '{"step": 7}\n'


def test_steps_after_the_one_that_is_named_are_set_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3)
    found = load_step(tmp_path, 1)
    assert found is not None
    assert found.state["step"] == 1
    assert names(tmp_path / "checkpoints") == [
        ".later-step_00000002",
        ".later-step_00000003",
        "step_00000001",
    ]


def test_a_tensor_of_which_a_part_is_missing_is_refused(tmp_path: Path) -> None:
    into = {"w": torch.zeros(3, 2)}
    checkpoint._check(tmp_path, into, {"w": (torch.Size((3, 2)), torch.float32, 6)})
    for found in (
        {"w": (torch.Size((3, 2)), torch.float32, 4)},  # a rank's file is not there
        {"w": (torch.Size((2, 3)), torch.float32, 6)},
        {"w": (torch.Size((3, 2)), torch.float64, 6)},
        {},
    ):
        with pytest.raises(UserError, match="'w'"):
            checkpoint._check(tmp_path, into, found)


def test_the_threads_of_a_checkpoint_are_taken(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        save(tmp_path, 1)
        torch.set_num_threads(1)
        assert load_step(tmp_path) is not None
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_folder_without_files_is_no_checkpoint(tmp_path: Path) -> None:
    with commit_folder(tmp_path / "empty"):
        pass
    with pytest.raises(UserError, match="not as it was written"):
        verify_folder(tmp_path / "empty")


def test_a_config_that_was_edited_is_refused_even_where_it_may_differ(tmp_path: Path) -> None:
    config = "seed: 1\nsafety:\n  keep: 2\n"
    open_run(tmp_path, config)
    written = {"config_sha256": hashlib.sha256(config.encode()).hexdigest()}
    (tmp_path / "provenance.json").write_text(json.dumps(written))
    open_run(tmp_path, config.replace("keep: 2", "keep: 3"), resume=True)  # given, not edited
    (tmp_path / "config.yaml").write_text(config.replace("keep: 2", "keep: 3"))
    with pytest.raises(UserError, match=r"config\.yaml: changed since the run started"):
        open_run(tmp_path, config, resume=True)


@pytest.mark.parametrize("mask", [0o022, 0o007, 0o077])
def test_a_file_of_tensors_has_the_permissions_of_any_new_file(mask: int, tmp_path: Path) -> None:
    """Others read what is exported, and colleagues resume: safetensors 0.8 alone writes files for their owner."""
    before = os.umask(mask)
    try:
        commit.save_tensors({"a": torch.ones(2)}, tmp_path / "a.safetensors", {"format": "pt"})
        (tmp_path / "a.txt").write_text("")
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "a.txt").stat().st_mode
