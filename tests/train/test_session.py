"""A run that is asked to stop, whose disk fills, whose memory runs out, or that goes on elsewhere."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from whet.generate.policy import Policy, PolicyConfig
from whet.storage import checkpoint, commit
from whet.storage.checkpoint import LogHashes, Sameness, load_step, save_step, saved_steps, step_folder
from whet.telemetry.health import past_rows
from whet.telemetry.trackers import Tracking
from whet.train import session, sft
from whet.train.optim.safety import SafetyConfig, TokenBudget, rehearse, set_deterministic
from whet.train.optim.step import OptimConfig, forward_backward
from whet.train.run import Run
from whet.train.session import Interrupted, Session, Skipped, Stopped, Writer, load_trained
from whet.train.sft import SFTConfig, train
from whet.types import UserError

pytestmark = pytest.mark.usefixtures("few_problems")


def make_config(tiny_policy: PolicyConfig, folder: Path, **changes: Any) -> SFTConfig:
    return replace(
        SFTConfig(
            out=str(folder),
            policy=tiny_policy,
            optim=OptimConfig(lr=3e-3, warmup_steps=2, token_budget=100),
            num_steps=8,
            batch_size=4,
            validation_problems=0,
            save_every=3,
        ),
        **changes,
    )


def weights(folder: Path, step: int) -> dict[str, bytes]:
    names = ("model.safetensors", "training/optimizer.safetensors")
    return {name: (step_folder(folder, step) / name).read_bytes() for name in names}


def at_call(number: int, action: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            action()
        return function(*arguments, **options)

    return wrapped


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "background"),
    [
        *((name, True) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")),
        *(pytest.param(name, True, marks=pytest.mark.ci) for name in ("SIGUSR2", "SIGQUIT", "SIGXCPU")),
        pytest.param("SIGTERM", False, marks=pytest.mark.ci),
    ],
)
def test_a_signal_saves_the_step_and_the_run_goes_on_exactly(
    name: str,
    background: bool,
    request: pytest.FixtureRequest,
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    safety = SafetyConfig(background=background, hang_timeout_s=1234.0)
    config = make_config(tiny_policy, tmp_path / "straight", safety=safety)
    train(config)
    (beat,) = (tmp_path / "straight" / "heartbeats").glob("*.json")
    assert json.loads(beat.read_text())["timeout_s"] == 1234.0
    number = signal.Signals[name]
    before = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    own = signal.signal(number, before)  # whatever the tests were started by (nohup)
    request.addfinalizer(lambda: signal.signal(number, own))
    config = replace(config, out=str(tmp_path / "run"))
    monkeypatch.setattr(sft, "train_step", at_call(5, lambda: os.kill(os.getpid(), number), sft.train_step))
    with pytest.raises(Stopped) as stopped:
        train(config)
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) == before
    assert saved_steps(tmp_path / "run") == [3, 5]
    output, errors = capfd.readouterr()
    assert (
        f"stopped by {name} after step 5 of 8, which is saved; go on with: whet sft {tmp_path}/run --resume"
        in output
    )
    assert f"{name}: stopping, saving the last whole step" in errors
    train(config, resume=True)
    assert weights(tmp_path / "run", 8) == weights(tmp_path / "straight", 8)


def empty(run: Path) -> None:
    """Do what `rm -rf run/*` does."""
    for path in run.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.some(1)
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda run: run.rename(run.with_name("elsewhere")), r"moved to .*elsewhere while .*; move it back"),
        (
            shutil.rmtree,
            r"removed while the run was writing to it; the weights of step 6 are in .*run-rescued$",
        ),
        (
            lambda run: empty(run),
            r"emptied while the run was writing to it; the weights of step 6 are in .*run-rescued$",
        ),
        (lambda run: (run / "metrics.jsonl").unlink(), r"emptied while .*run-rescued$"),
    ],
    ids=["moved", "removed", "emptied", "its log removed"],
)
def test_a_run_whose_folder_is_gone_keeps_its_weights_and_stops(
    harm: Callable[[Path], Any],
    told: str,
    background: bool,
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    safety = SafetyConfig(background=background)
    config = make_config(tiny_policy, tmp_path / "straight", save_every=6, safety=safety)
    train(config)
    config = replace(config, out=str(tmp_path / "run"))
    monkeypatch.setattr(sft, "train_step", at_call(5, lambda: harm(tmp_path / "run"), sft.train_step))
    with pytest.raises(UserError, match=told):
        train(config)
    rescued, known = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "run-rescued", step_folder(tmp_path / "straight", 6))
    )
    assert all(torch.equal(rescued[name], known[name]) for name in known)
    if (tmp_path / "elsewhere").exists():
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        (tmp_path / "elsewhere").rename(tmp_path / "run")
        train(config, resume=True)
        assert weights(tmp_path / "run", 8) == weights(tmp_path / "straight", 8)


def remove_all(folder: Path) -> None:
    """Remove a folder into which other threads write meanwhile."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("moment", ["before", "inside", "after"])
def test_a_folder_that_goes_while_a_checkpoint_is_written(
    moment: str, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def save_and_remove(folder: Path, step: int, **rest: Any) -> None:
        if moment == "before":
            remove_all(run)
        if moment == "inside":
            monkeypatch.setattr(checkpoint, "_steps", lambda _: remove_all(run) or [])
        save_step(folder, step, **rest)
        if moment == "after":
            remove_all(run)

    monkeypatch.setattr(session, "save_step", save_and_remove)
    with pytest.raises(UserError, match=r"removed while .*; the weights of step 6 are in .*run-rescued$"):
        train(make_config(tiny_policy, run, save_every=6))
    assert (tmp_path / "run-rescued" / "model.safetensors").is_file()
    if moment == "after":
        assert not run.exists()  # no record of a later step has made it anew


@pytest.mark.parametrize("harm", [shutil.rmtree, empty])
def test_a_folder_that_goes_after_the_last_save(
    harm: Callable[[Path], Any], tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, summary = tmp_path / "run", Run.write_summary

    def late(self: Run, extra: Any) -> None:
        harm(run)
        summary(self, extra)

    monkeypatch.setattr(Run, "write_summary", late)
    with pytest.raises(
        UserError, match=r"(removed|emptied) while .*; the weights of step 8 are in .*run-rescued$"
    ):
        train(make_config(tiny_policy, run, save_every=6))
    assert (tmp_path / "run-rescued" / "model.safetensors").is_file()


@pytest.mark.ci
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    program = """
import os, signal, sys, time
from whet.recipes.sft import RECIPES
from whet.tasks.made import arithmetic
from whet.train import session, sft
from dataclasses import replace
arithmetic.NUM_PROBLEMS = 500
def step(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
    print("first", flush=True)
    time.sleep(0.6)  # sooner it would be the same signal, sent on by somebody
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
sft.train_step = step
sft.train(replace(RECIPES["demo"](), out=sys.argv[1], validation_problems=0))
"""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "first" in done.stdout
    assert "SIGTERM again: ended at once" in done.stderr
    assert time.monotonic() - began < 50


@pytest.mark.ci
def test_a_run_whose_terminal_is_lost_is_saved(tmp_path: Path) -> None:
    """As after an SSH session: SIGHUP, and nothing can be printed any more."""
    program = """
import signal, sys, termios, fcntl
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started by (nohup)
from dataclasses import replace
from whet.recipes.sft import RECIPES
from whet.tasks.made import arithmetic
from whet.train import session, sft
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
arithmetic.NUM_PROBLEMS = 500
config = replace(RECIPES["demo"](), out=sys.argv[1], validation_problems=0, save_every=10**6, num_steps=10**6)
sft.main(config)
"""
    run = tmp_path / "run"
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(run)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    until = time.monotonic() + 200
    while not (run / "metrics.jsonl").is_file() or not (run / "metrics.jsonl").stat().st_size:
        assert process.poll() is None
        assert time.monotonic() < until
        with suppress(BlockingIOError):
            os.read(ours, 1 << 16)
        time.sleep(0.02)
    os.close(ours)
    assert process.wait(100) == 128 + signal.SIGHUP
    (step,) = saved_steps(run)
    assert 0 < step < 10**6


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.ci
def test_a_full_disk_stops_the_run_or_not_and_harms_nothing(
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tiny_policy, tmp_path / "straight")
    train(config)
    original, calls = commit.sync, [0]

    def full(path: Path) -> None:
        calls[0] += path.name == "optimizer.safetensors"
        if calls[0] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path)

    monkeypatch.setattr(commit, "sync", full)
    config = make_config(tiny_policy, tmp_path / "run")
    with pytest.raises(
        UserError, match=r"step_00000006: could not be written \(No space left.*free space, then"
    ):
        train(config)
    assert saved_steps(tmp_path / "run") == [3]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000003"]
    monkeypatch.setattr(commit, "sync", original)
    train(config, resume=True)
    assert weights(tmp_path / "run", 8) == weights(tmp_path / "straight", 8)

    calls[0] = 0
    monkeypatch.setattr(commit, "sync", full)
    monkeypatch.setattr(commit, "sync", at_call(10**9, lambda: None, full))
    goes_on = make_config(tiny_policy, tmp_path / "on", safety=SafetyConfig(disk_full="continue"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, 0))
    with pytest.raises(UserError, match="0 MB free, a checkpoint needs"):  # at its end it has to be saved
        train(goes_on)
    assert saved_steps(tmp_path / "on") == []
    errors = capfd.readouterr().err
    assert errors.count("0 MB free, a checkpoint needs") == 2
    assert "training goes on unsaved" in errors
    assert len((tmp_path / "on" / "metrics.jsonl").read_text().splitlines()) == 8


def test_parameters_that_are_not_finite_are_never_saved(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poison(policy: Any, *rest: Any, **options: Any) -> Any:
        result = original(policy, *rest, **options)
        if poison.calls == 4:  # pyright: ignore[reportFunctionMemberAccess]
            with torch.no_grad():
                next(policy.model.parameters())[0, 0] = torch.nan
        poison.calls += 1  # pyright: ignore[reportFunctionMemberAccess]
        return result

    poison.calls = 0  # pyright: ignore[reportFunctionMemberAccess]
    original = sft.train_step
    monkeypatch.setattr(sft, "train_step", poison)
    with pytest.raises(
        UserError, match=r"(parameter model.embed_tokens.weight is not finite|expected finite)"
    ):
        train(make_config(tiny_policy, tmp_path, safety=SafetyConfig(max_skipped=100)))
    assert saved_steps(tmp_path) == [3]


def test_a_step_that_is_named_is_taken_or_refused(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tiny_policy, tmp_path)
    train(config)
    end = weights(tmp_path, 8)
    assert saved_steps(tmp_path) == [6, 8]
    with pytest.raises(UserError, match=r"--resume 7: .* has no checkpoint of that step; it has: 6, 8"):
        train(config, resume=7)
    train(config, resume=6)
    assert "step_00000008 is later than step 6: kept as .later-step_00000008" in capsys.readouterr().out
    assert weights(tmp_path, 8) == end
    path = step_folder(tmp_path, 6) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"step_00000006: cannot be read .*leave out the step to fall back"):
        train(config, resume=6)
    assert saved_steps(tmp_path) == [6, 8]


def test_another_number_of_threads_or_another_torch(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tiny_policy, tmp_path, num_steps=3)
    train(config)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert load_step(tmp_path, sameness="strict") is not None
        assert torch.get_num_threads() == threads
        assert f"{threads} CPU threads, as when it was saved" in capsys.readouterr().out
        torch.set_num_threads(threads + 1)
        assert load_step(tmp_path, sameness="warn") is not None
        assert "warning: " in (said := capsys.readouterr().out)
        assert f"saved with threads {threads}, resumed with {threads + 1}" in said
        assert load_step(tmp_path, sameness="off") is not None
        assert capsys.readouterr().out == ""
    finally:
        torch.set_num_threads(threads)
    folder = step_folder(tmp_path, 3)
    manifest = json.loads((folder / commit.MANIFEST).read_text())
    del manifest["sha256"]  # as an earlier version wrote it
    (folder / commit.MANIFEST).write_text(json.dumps(manifest | {"torch": "2.0"}))
    with pytest.raises(UserError, match=r"saved with torch 2.0, resumed with .*--deterministic warn"):
        load_step(tmp_path, sameness="strict")


def test_safety_and_trackers_may_change_when_a_run_goes_on(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    config = make_config(tiny_policy, tmp_path)
    train(config)
    train(replace(config, safety=SafetyConfig(deterministic="warn", keep=3)), resume=True)
    with pytest.raises(
        UserError, match=r"config.yaml line \d+ has 'batch_size: \d', you gave 'batch_size: 9'"
    ):
        train(replace(config, batch_size=9), resume=True)


def test_out_of_memory_halves_the_micro_batch_for_the_same_gradient(
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Splitting changes the order of sums alone: 12 steps of Adam apart by no more than 1e-5."""
    config = make_config(tiny_policy, tmp_path / "whole", optim=OptimConfig(lr=3e-3, token_budget=100))
    whole = train(config).model.state_dict()
    limit, original = 60, Policy.score

    def small(policy: Policy, micro: Any, **options: Any) -> Any:
        found = original(policy, micro, **options)
        if torch.is_grad_enabled() and micro.tokens_N.numel() > limit:
            found[0].sum().backward(retain_graph=True)  # half of a step is in the gradients
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(Policy, "score", small)
    config = replace(config, out=str(tmp_path / "small"))
    halved = train(config).model.state_dict()
    assert "out of memory; micro-batches now have 50 tokens" in capsys.readouterr().out
    for name, tensor in whole.items():
        torch.testing.assert_close(halved[name], tensor, rtol=0, atol=1e-5)
    state = json.loads((step_folder(tmp_path / "small", 8) / "training" / "state.json").read_text())
    assert state["token_budget"] == 50
    limit = 10
    with pytest.raises(UserError, match=r"out of memory with \d+ tokens in a micro-batch, the length of one"):
        train(replace(config, out=str(tmp_path / "none")))


def test_other_errors_are_no_lack_of_memory() -> None:
    def wrong(_: int) -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        TokenBudget(8, []).run(wrong, 1)


def test_the_rehearsal_finds_the_budget_before_any_data(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def spy(micro_batches: Any, *arguments: Any) -> Any:
        (micro,) = micro_batches
        seen.append(int(micro.tokens_N.numel()))
        if seen[-1] > 60:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward_backward(micro_batches, *arguments)

    monkeypatch.setattr("whet.train.optim.safety.forward_backward", spy)
    policy = train(make_config(tiny_policy, tmp_path, num_steps=1))
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    budget = TokenBudget(100, policy.model.parameters())
    rehearse(policy, budget, 20)
    assert seen == [100, 40]
    assert budget.tokens == 50
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())


def test_the_writer_does_one_job_at_a_time_and_tells_of_errors() -> None:
    writer, done, gate = Writer(background=True), [], threading.Event()

    def job(number: int) -> None:
        gate.wait(10)
        done.append(number)

    writer.submit(lambda: job(1))
    assert done == []
    gate.set()
    writer.submit(lambda: job(2))
    assert done[:1] == [1]
    writer.wait()
    assert done == [1, 2]

    def fail() -> None:
        raise UserError("disk")

    writer.submit(fail)
    with pytest.raises(UserError, match="disk"):
        writer.wait()
    writer.check()
    with pytest.raises(UserError, match="disk"):
        Writer(background=False).submit(fail)


def test_log_hashes_read_only_what_is_new(tmp_path: Path) -> None:
    log, hashes = tmp_path / "metrics.jsonl", LogHashes(tmp_path)
    assert hashes.describe() == {}
    for text in ("a\n", "bc\n" * 1000, ""):
        with log.open("a") as file:
            file.write(text)
        assert hashes.describe() == LogHashes(tmp_path).describe()
        assert hashes.describe()["metrics.jsonl"]["size"] == log.stat().st_size
    log.write_text("cut\n")
    assert hashes.describe() == LogHashes(tmp_path).describe()


def test_deterministic_modes() -> None:
    try:
        modes: tuple[tuple[Sameness, bool, bool], ...]
        modes = (("strict", True, False), ("warn", True, True), ("off", False, False))
        for mode, enabled, warns in modes:
            set_deterministic(mode)
            assert torch.are_deterministic_algorithms_enabled() is enabled
            assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
    finally:
        set_deterministic("off")
    auto = SafetyConfig()
    assert auto.sameness(torch.device("cpu")) == "strict"
    assert auto.sameness(torch.device("cuda")) == "off"
    assert SafetyConfig(deterministic="warn").sameness(torch.device("cpu")) == "warn"


@pytest.mark.parametrize(
    "wrong", [{"keep": 1}, {"save_minutes": -1.0}, {"hang_timeout_s": float("inf")}, {"max_skipped": -1}]
)
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"safety.{next(iter(wrong))} = .*expected"):
        SafetyConfig(**wrong)


def test_a_run_takes_up_what_its_checkpoint_says(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    """Without the best value so far the first validation after a resume would become checkpoints/best."""
    config = make_config(tiny_policy, tmp_path, num_steps=2, save_every=1)
    train(config)
    path = step_folder(tmp_path, 2) / "training" / "state.json"
    state = json.loads(path.read_text()) | {"best": 0.125, "skipped": 2}
    path.write_text(json.dumps(state))
    (path.parent.parent / "manifest.json").unlink()
    for name in ("best", "step_00000001"):
        shutil.rmtree(tmp_path / "checkpoints" / name, ignore_errors=True)
    with commit.commit_folder(path.parent.parent.with_name("again")) as folder:
        shutil.copytree(path.parent.parent, folder, dirs_exist_ok=True)
    shutil.rmtree(path.parent.parent)
    (tmp_path / "checkpoints" / "again").rename(path.parent.parent)
    run = Run(
        "sft",
        config,
        load_trained(config),
        Tracking(config.track, tmp_path, enabled=False),
        best="sft/validation_loss",
        headline=(),
    )
    found = run.restore(True)
    assert found is not None
    assert (run.step, run.best, run.is_skipped) == (2, 0.125, True)
    assert run.last == state["last"]
    assert run.last["sft/loss"] > 0
    assert run._saved == 2, "nothing is to be saved again before the next step"
    assert run._history == past_rows(tmp_path, "sft", 2)
    assert len(run._history) == 2
    moments = load_file(path.parent / "optimizer.safetensors")
    for name, tensor in run.optimizer.tensors().items():
        assert torch.equal(tensor, moments[name])
    assert any(tensor.dim() and float(tensor.abs().max()) > 0 for tensor in moments.values())


class Around(NamedTuple):
    """A run without its programs: what its steps ask of the session is noted."""

    run: Run
    saves: list[tuple[int, bool, Any]]
    due: set[int]


def around(tiny_policy: PolicyConfig, folder: Path, *, higher: bool = False, **changes: Any) -> Around:
    config = make_config(tiny_policy, folder, **changes)
    tracking = Tracking(config.track, folder, enabled=False)
    run = Run(
        "sft",
        config,
        load_trained(config),
        tracking,
        best="eval/x",
        higher_is_better=higher,
        headline=(),
        records=False,
    )
    saves: list[tuple[int, bool, Any]] = []
    due: set[int] = set()

    def save(step: int, *, is_best: bool, training: Any) -> None:
        saves.append((step, is_best, training))

    asked: Any = SimpleNamespace(is_due=due.__contains__, save=save, stop_if_asked=lambda step: None)
    shown: Any = SimpleNamespace(begin=lambda phase: None)
    run.session, run.display = asked, shown
    return Around(run, saves, due)


def held() -> Any:
    return {"own": torch.ones(2)}, {"cursor": 7}


@pytest.mark.parametrize("higher", [False, True])
def test_the_best_is_the_best_finite_value_so_far(
    higher: bool, tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    run, saves, _ = around(tiny_policy, tmp_path, higher=higher)
    sign = -1.0 if higher else 1.0
    for value in (3.0, 2.0, 2.5, math.nan, -sign * math.inf, 2.0, 1.0):
        run.step += 1
        run._values = {"eval/x": value if math.isnan(value) else sign * value}
        run.end_step(held)
    run._values = {}  # a step without a validation
    run.end_step(held)
    assert [is_best for _, is_best, _ in saves] == [True, True, False, False, False, False, True, False]
    assert run.best == sign * 1.0


def test_steps_are_saved_where_due_and_at_the_end_with_all_that_training_goes_on_from(
    tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    run, saves, due = around(tiny_policy, tmp_path)
    due.add(2)
    run.best, run.last = 0.5, {"sft/loss": 2.0}
    run._skipped.count = 3
    for _ in run.steps(end=4):  # a part of the run: not its last step
        run.step += 1
        run.end_step(held)
    assert [training is not None for _, _, training in saves] == [False, True, False, True]
    tensors, state = saves[1][2]
    assert state == {"cursor": 7, "best": 0.5, "last": {"sft/loss": 2.0}, "skipped": 3, "idle": 0}
    assert tensors.keys() == {"own", *run.optimizer.tensors()}
    assert len(tensors) > 1


def test_a_part_of_a_step_that_is_given_up_saves_the_step_before_once(
    tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    run, saves, _ = around(tiny_policy, tmp_path)
    run.step, run._saved = 5, 5
    for saved, expected in ((5, []), (4, [5])):
        run._saved = saved
        with run.before_update(held):
            raise Interrupted
        assert [step for step, _, training in saves if training] == expected
    with run.before_update(held):
        pass
    assert len(saves) == 1


def test_where_a_run_stands(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    run, _, _ = around(tiny_policy, tmp_path, num_steps=5)
    shares = []
    for run.step in range(5):
        shares.append(run.progress)
    assert shares == [0.0, 0.25, 0.5, 0.75, 1.0]
    run._end = 5
    due = []
    for run.step in range(1, 6):
        due.append(run.is_due(2))
    assert due == [False, True, False, True, True]


def test_an_overflow_is_a_skip_that_is_reported_once(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    run, _, _ = around(tiny_policy, tmp_path)
    first = run.lr
    run.optimizer.num_overflows = 2
    assert not run.is_skipped
    found = run.end_update({"sft/loss": 1.0, "sft/grad_norm": math.inf}, held)
    assert found == {"sft/overflows": 2.0}, "an infinite norm is the overflow itself"
    assert run.is_skipped
    assert run.lr == first > 0, "the schedule goes on with the updates"
    assert run.end_update({"sft/loss": 1.0, "sft/grad_norm": 1.0}, held) == {}
    assert run.lr != first
    assert not run.is_skipped
    assert run.end_update({"sft/loss": math.nan, "sft/grad_norm": 1.0}, held) == {"sft/skipped": 1.0}
    assert run.is_skipped


def test_when_a_session_saves(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    config = make_config(tiny_policy, tmp_path, safety=SafetyConfig(save_minutes=1.0))
    one = Session("sft", config, load_trained(config))
    assert [step for step in range(1, 9) if one.is_due(step)] == [3, 6, 8]
    one._saved_at = time.monotonic() - 59
    assert not one.is_due(1)
    one._saved_at = time.monotonic() - 61
    assert one.is_due(1)
    assert one._stop == 0, "time to save is no reason to stop"
    one._saved_at = time.monotonic()
    one._signal = signal.SIGHUP
    assert one.is_due(1)
    assert one._stop == signal.SIGHUP
    with pytest.raises(Stopped) as stopped:
        one.stop_if_asked(1)
    assert stopped.value.code == 128 + signal.SIGHUP


def test_a_best_policy_is_saved_without_a_checkpoint_and_inputs_with_one(
    tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    config = make_config(tiny_policy, tmp_path)
    policy = load_trained(config)
    (tmp_path / "provenance.json").write_text(json.dumps({"inputs": {"data": "abc"}}))
    one = Session("sft", config, policy)
    assert one._inputs
    one.save(1, is_best=False, training=None)
    assert not (tmp_path / "checkpoints").exists()
    one.save(1, is_best=True, training=None)
    one.save(2, is_best=False, training=held())
    one._writer.wait()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best", "step_00000002"]
    state = json.loads((step_folder(tmp_path, 2) / "training" / "state.json").read_text())
    assert state == {"step": 2, "cursor": 7, "inputs": one._inputs}
    with torch.no_grad():
        next(policy.model.parameters())[0, 0] = torch.inf
    with pytest.raises(UserError, match=r"step 3: parameter \S+ is not finite and was not saved"):
        one.save(3, is_best=True, training=None)


def test_what_is_written_in_the_background_is_what_it_was(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    config = make_config(tiny_policy, tmp_path)
    one, weight = Session("sft", config, load_trained(config)), torch.ones(3)
    copies = one._copies({"w": weight})
    weight.zero_()
    assert copies["w"].tolist() == [1.0, 1.0, 1.0]


def test_a_full_disk_ends_the_last_save_whatever_was_said(
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tiny_policy, tmp_path, safety=SafetyConfig(disk_full="continue"))
    one = Session("sft", config, load_trained(config))

    def full() -> None:
        raise commit.DiskFullError("full")

    one._or_continue(full, is_last=False)
    assert "full; training goes on unsaved" in capfd.readouterr().err
    with pytest.raises(commit.DiskFullError):
        one._or_continue(full, is_last=True)
    for free, fits in ((5 << 20, False), (7 << 20, True)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        with nullcontext() if fits else pytest.raises(commit.DiskFullError, match="a checkpoint needs 6 MB"):
            one._check_space(6 * 10**6)


def test_steps_that_are_left_out_count_in_a_row_up_to_the_limit() -> None:
    skipped = Skipped(2)
    bad, fine = {"sft/loss": math.nan}, {"sft/loss": 1.0}
    assert [skipped.count_step(values) for values in (bad, fine, bad, bad)] == [1, 0, 1, 2]
    assert "step 4: sft/loss nan, expected finite" in skipped.tell(4, "do")
    assert skipped.count_step(bad) == 3
    with pytest.raises(UserError, match="3 in a row: do"):
        skipped.tell(5, "do")


def test_what_went_wrong_in_the_background_is_raised_once() -> None:
    writer = Writer(background=True)

    def fail() -> None:
        raise UserError("disk")

    writer.submit(fail)
    with pytest.raises(UserError, match="disk"):
        writer.wait()
    writer.wait()
    done: list[int] = []
    writer.submit(lambda: done.append(1))
    writer.wait()
    assert done == [1]


def test_a_second_signal_after_a_moment_ends_the_process(
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tiny_policy, tmp_path)
    one, codes = Session("sft", config, load_trained(config)), list[int]()
    monkeypatch.setattr(os, "_exit", codes.append)
    one._on_signal(signal.SIGTERM, None)
    one._on_signal(signal.SIGTERM, None)  # torchrun sends on what its process group has got already
    assert codes == []
    one._signalled_at -= 0.6
    one._on_signal(signal.SIGTERM, None)
    assert codes == [128 + signal.SIGTERM]
    assert "SIGTERM again: ended at once" in capfd.readouterr().err
