from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from whet import __main__, cli
from whet.inspect.doctor.determinism import BASE, SMALL, Trace, check_determinism, compare
from whet.types import UserError

FAKE = """#!/bin/sh
'''exec' '{python}' -SE "$0" "$@"
''' # the path of Python may have a space, which a first line with #! cannot
import json, shutil, sys
from pathlib import Path
words = sys.argv[1:]
out = Path(words[words.index("--out") + 1])
with Path({calls!r}).open("a") as file:
    file.write(json.dumps(words) + "\\n")
if out.name == {broken!r}:
    sys.exit("whet: error: it \\x1b broke")
shutil.copytree({other!r} if out.name == {changed!r} else {same!r}, out)
"""


def write_run(
    out: Path, *, loss: float = 0.5, logprob: float = -1.0, weight: float = 1.0, reward: float = 1.0
) -> None:
    """Write what a run of three steps leaves behind; the last step has the given numbers."""
    checkpoint = out / "checkpoints" / "step_00000003"
    (checkpoint / "training").mkdir(parents=True)
    save_file({"w": torch.tensor([weight, 2.0])}, checkpoint / "model.safetensors")
    save_file({"w/exp_avg": torch.tensor([0.25])}, checkpoint / "training" / "optimizer.safetensors")
    (out / "config.yaml").write_text("policy: {num_threads: 1}\noptim: {token_budget: 16384}\n")
    metrics, samples = [], []
    for step in (1, 2, 3):
        last = step == 3
        row = {"stage": "rl", "step": step, "rl/loss": loss if last else 0.5, "rl/grad_norm": 1.0}
        noise = {
            "time_s": id(out),
            "run_time_s": id(out),
            "rl/train_seconds": id(out),
            "hardware/power_w/cpu": id(out),
        }
        metrics.append(row | noise)
        for index in range(2):
            value = logprob if last and index else -1.0
            paid = {"reward": reward if last else 1.0, "rewards": {}, "advantage": 0.0}
            samples.append(
                {"step": step, "uid": "a", "index": index, "sampler_logprobs": [-2.0, value], **paid}
            )
    for name, rows in (("metrics", metrics), ("samples", samples)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def differences(tmp_path: Path, **changes: float) -> dict[str, str]:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", **changes)
    cells = compare(Trace(tmp_path / "a"), Trace(tmp_path / "b"))
    steps = [f"step {step} {stage}" for step in (1, 2, 3) for stage in ("rollouts", "rewards", "training")]
    assert [cell.where for cell in cells[:9]] == steps
    assert {cell.where for cell in cells[9:]} == {"parameters", "optimizer state"}
    assert all(len(cell.digest) == 12 for cell in cells)
    return {cell.where: cell.difference for cell in cells if cell.difference}


def test_what_the_machine_measured_is_no_difference(tmp_path: Path) -> None:
    assert differences(tmp_path) == {}


def test_each_stage_is_named(tmp_path: Path) -> None:
    assert differences(tmp_path / "1", loss=0.75) == {"step 3 training": "rl/loss by 2.5e-01"}
    assert differences(tmp_path / "2", logprob=-1.5) == {
        "step 3 rollouts": "1 of 2 rows, sampler_logprobs by 5.0e-01"
    }
    assert differences(tmp_path / "3", reward=0.0) == {"step 3 rewards": "2 of 2 rows, reward by 1.0e+00"}
    assert differences(tmp_path / "4", weight=1.125) == {"parameters": "max |delta| 1.2e-01 in w"}


def test_rows_that_are_missing_and_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    metrics = tmp_path / "b" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    (tmp_path / "b" / "checkpoints" / "step_00000003" / "model.safetensors").unlink()
    cells = compare(Trace(tmp_path / "a"), Trace(tmp_path / "b"))
    assert {cell.where: cell.difference for cell in cells if cell.difference} == {
        "step 3 training": "1 against 0 rows",
        "parameters": "in one of both only",
    }


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, changed: str = "", broken: str = "") -> Path:
    """Put a program in the place of Python that makes run folders at once; return the file of its command lines."""
    calls, script, same, other = (tmp_path / name for name in ("calls", "python", "same", "other"))
    write_run(same)
    write_run(other, loss=0.1)
    names = {
        "calls": str(calls),
        "same": str(same),
        "other": str(other),
        "changed": changed,
        "broken": broken,
    }
    script.write_text(FAKE.format(python=sys.executable, **names))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return calls


def test_runs_and_their_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake(tmp_path, monkeypatch)
    assert check_determinism("sft", "")
    printed = capsys.readouterr().out
    assert "the same twice: 11 comparisons of 3 steps, all bitwise equal" in printed
    assert "2 threads: bitwise equal" in printed
    lines = [json.loads(line) for line in calls.read_text().splitlines()]
    assert [line[:4] for line in lines] == [["-m", "whet", "sft", "demo"]] * 4
    assert [line[line.index("--policy.num-threads") + 1] for line in lines] == ["1", "1", "2", "1"]
    assert [line[line.index("--num-steps") + 1] for line in lines] == ["3"] * 4
    assert [line.count("--policy.num-threads") for line in lines] == [1] * 4
    assert lines[3][lines[3].index("--optim.token-budget") + 1] == "256"


def test_a_difference_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(tmp_path, monkeypatch, changed="same_again")
    assert not check_determinism("rl", "demo")
    printed = capsys.readouterr().out
    assert "not the same twice: step 3 training differs first: rl/loss by 4.0e-01" in printed


def test_a_run_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, broken="first_run")
    with pytest.raises(
        UserError, match=r"^first run: 'whet rl mine.yaml --num-steps 3' ended with status 1: it .* broke$"
    ):
        check_determinism("rl", "mine.yaml")


@pytest.mark.parametrize("words", [BASE, *([name, *words] for name, words in SMALL.items())])
def test_the_small_runs_can_be_parsed(words: list[str]) -> None:
    program = __main__.COMMANDS[words[0]].load()
    tail = ["base"] if words[-1] == "--policy.init" else []
    config = cli.parse(
        "whet", program.config_class, program.recipes, [*words[1:], *tail, "--num-steps", "3"][:-2]
    ).config
    assert config.policy.num_threads == 1
