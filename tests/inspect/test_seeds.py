"""`whet seeds`: the kill rules on made-up curves, and the launcher with a child that behaves as its seed says."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet.config import dump_yaml, from_dict
from whet.generate.policy import PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.inspect.seeds.outcome import Outcome
from whet.inspect.seeds.seeds import SeedsConfig, _Seed, launch, plan, rules_of, sign_of
from whet.inspect.seeds.spread import Curve, KillRules, band, first_reach, kill_reason, read_curve, spread
from whet.train.rl_config import RLConfig
from whet.types import UserError

CHILD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

args = dict(word[2:].split("=", 1) for word in sys.argv[3:] if "=" in word)
seed, out = int(args["seed"]), Path(args["out"])
if sys.argv[2] != "toy":
    sys.exit(f"whet: error: unknown recipe {sys.argv[2]!r}")
if "--dry-run" in sys.argv:
    print("num_steps: 30\\n\\nbatch of one step")
    sys.exit()
out.mkdir(exist_ok=True)
with (out / "starts").open("a") as file:
    print(*sys.argv[1:], os.environ["OMP_NUM_THREADS"], file=file)
(out / "config.yaml").write_text("")
log = (out / "metrics.new").open("w")
os.replace(out / "metrics.new", out / "metrics.jsonl")

def row(step, correct, flat=0.0):
    text = json.dumps({"stage": "rl", "step": step, "time_s": 100.0 + step, "rl/correct": correct,
                       "rl/zero_variance_groups": flat}) + "\\n"
    log.write(text[:20]); log.flush(); time.sleep(0.002)
    log.write(text[20:]); log.flush()

if seed == 4 and "--resume" not in sys.argv:  # clings to life, and has a child that does, too
    stubborn = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pids = [os.getpid(), subprocess.Popen(stubborn).pid]
    for step in range(1, 9):
        row(step, 0.1)
    time.sleep(0.3)  # until the child ignores it
    (out / "pids.new").write_text(json.dumps(pids))
    os.replace(out / "pids.new", out / "pids")
    time.sleep(60)
for step in range(1, {1: 1500, 3: 250}.get(seed, 30) + 1):
    if seed == 2 and step == 4 and "--resume" not in sys.argv:
        sys.exit("a traceback\\nwhet: error: the disk is full")
    row(step, 0.1 if seed in (1, 3) else 0.03 * step, float(seed in (1, 3)))
(out / "summary.json").write_text("{}")
"""


@pytest.fixture
def child(tmp_path: Path) -> list[str]:
    (tmp_path / "child.py").write_text(CHILD)
    return [sys.executable, "-S", str(tmp_path / "child.py")]


def make_config(tmp_path: Path, **changes: Any) -> SeedsConfig:
    return replace(SeedsConfig(out=str(tmp_path / "out"), recipe="toy", parallel=4, grace_s=0.3), **changes)


def make_curve(values: Sequence[float | None], flat: float = 0.0, metric: str = "rl/correct") -> Curve:
    curve = Curve(metric)
    for step, value in enumerate(values, start=1):
        curve.add(
            {"step": step, "time_s": 50.0 + 2 * step, metric: value}
            | ({"rl/zero_variance_groups": flat} if metric == "rl/correct" else {})
        )
    return curve


def ramp(start: float, end: float, num: int = 20) -> list[float | None]:
    return [start + (end - start) * index / (num - 1) for index in range(num)]


SAW: list[float | None] = [0.0, 0.2, 0.0, 0.2]
RULES = KillRules(after=8, window=4, margin=0.2, enough=0.5)
# The saw's noise: mean squared step between neighbours / 2 is about 0.0175, its window's error 2 sqrt(2 x 0.0175 / 4).


@pytest.mark.parametrize(
    ("values", "flat", "changes", "expected"),
    [
        (ramp(0.1, 0.1, 7), 1.0, {}, None),  # too early to say
        (ramp(0.1, 0.4), 1.0, {}, "no difference in reward within any group for 20 steps"),
        (ramp(0.1, 0.4), 0.97, {}, None),  # a few groups teach
        (ramp(0.6, 0.9), 1.0, {}, None),  # nothing to learn any more
        (ramp(0.1, 0.1), 0.0, {}, "dead at step 20: rl/correct began at 10.0% and is 10.0%; noise 0.0%"),
        (ramp(0.1, 0.4), 0.0, {}, None),
        (SAW + [value + 0.15 for value in SAW if value is not None], 0.0, {}, "began at 10.0% and is 25.0%"),
        (SAW + [value + 0.30 for value in SAW if value is not None], 0.0, {}, None),
        (ramp(0.4, 0.1), 0.0, {}, "began at"),
        (ramp(0.4, 0.1), 0.0, {"sign": -1, "enough": None}, None),
        (ramp(0.1, 0.4), 0.0, {"sign": -1, "enough": None}, "began at"),
        (ramp(0.6, 0.6), 0.0, {}, None),  # good from the start
        (ramp(0.6, 0.6), 0.0, {"enough": None}, "began at"),
        ([None] * 16 + ramp(0.1, 0.1, 4), 0.0, {}, None),  # one window cannot be compared
    ],
)
def test_the_dead_are_told_from_the_slow(
    values: list[float | None], flat: float, changes: dict[str, Any], expected: str | None
) -> None:
    reason = kill_reason(make_curve(values, flat), [], replace(RULES, **changes))
    assert reason is None if expected is None else expected in (reason or "")


def test_seconds_to_a_threshold_leave_out_the_pause_before_a_resume() -> None:
    curve = Curve("rl/correct")
    for step in range(1, 5):
        times = {"time_s": 1000.0 * step, "run_time_s": 10.0 + 2 * step}
        curve.add({"step": step, "rl/correct": step / 4, **times})
    assert first_reach(curve, 0.75, window=1) == (3, 4.0)


def test_flat_steps_count_only_without_a_gap() -> None:
    curve = make_curve(ramp(0.1, 0.2, 9), 1.0)
    curve.add({"step": 10, "time_s": 1.0, "rl/correct": 0.2, "rl/zero_variance_groups": 0.9})
    assert curve.num_flat == 0
    curve.add({"step": 11, "time_s": 1.0, "eval/greedy": 0.2})
    curve.add({"step": 12, "time_s": 1.0, "rl/correct": 0.2, "rl/zero_variance_groups": 1.0})
    assert (curve.num_flat, curve.last_step, curve.steps[-2:]) == (1, 12, [10, 12])


@pytest.mark.parametrize(
    ("peers", "changes", "expected"),
    [
        ([0.61, 0.8], {}, "behind at step 20: rl/correct 45.0%, median of 2 others 70.5%"),
        ([0.5, 0.61, 0.8], {}, None),  # the median is within the margin
        ([0.5, 0.7, 0.8], {}, "median of 3 others 70.0%"),
        ([0.9], {}, None),  # two seeds have no majority
        ([0.61, 0.8], {"margin": 0.3}, None),
        ([0.1, 0.2], {"sign": -1, "enough": 0.5}, "median of 2 others 15.0%"),
    ],
)
def test_who_is_behind(peers: list[float], changes: dict[str, Any], expected: str | None) -> None:
    sign = changes.get("sign", 1)
    own = make_curve([0.45 - sign * 0.3] * 8 + [0.45] * 12)
    others = [make_curve([peer] * 20 + [0.45] * 20) for peer in peers]  # what came later does not count
    reason = kill_reason(own, others, replace(RULES, **changes))
    assert reason is None if expected is None else expected in (reason or "")
    late = [make_curve([peer] * 19) for peer in peers]
    assert kill_reason(own, late, replace(RULES, **changes)) is None


@pytest.mark.parametrize(
    ("values", "window", "sign", "expected"),
    [
        ([0.2, 0.8, 0.8, 0.8], 2, 1, (3, 4.0)),
        ([0.2, 0.8, 0.8, 0.8], 1, 1, (2, 2.0)),
        ([0.9, 0.1, 0.2, 0.3], 2, 1, None),  # one lucky step is no full window
        ([0.2, None, 1.2, 0.9], 2, 1, (3, 4.0)),
        ([0.9, 0.9, 0.4, 0.2], 2, -1, (3, 4.0)),
        ([0.9], 2, 1, None),
    ],
)
def test_first_reach(
    values: list[float | None], window: int, sign: int, expected: tuple[int, float] | None
) -> None:
    assert first_reach(make_curve(values), 0.7, window=window, sign=sign) == expected


def test_the_numbers_of_a_spread() -> None:
    found = spread([4.0, 1.0, None, 2.0, 3.0])
    assert found is not None
    assert (found.num, found.mean, found.min, found.median, found.max) == (4, 2.5, 1.0, 2.5, 4.0)
    assert found.std == pytest.approx(math.sqrt(5 / 3))
    assert spread([None]) is None
    assert getattr(spread([0.5]), "std", 0) is None
    rows = band([make_curve([0.1, 0.3, 0.5]), make_curve([0.5, 0.5]), make_curve([0.9])], window=2)
    expected = [(1, 0.1, 0.5, 0.9), (2, 0.2, 0.35, 0.5), (3, 0.4, 0.4, 0.4)]
    assert rows == [pytest.approx(row) for row in expected]


def test_good_dead_and_crashing_seeds(
    tmp_path: Path, child: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, seeds=(0, 1, 2), kill_after=10, threshold=0.6, set=("optim.lr=1e-4",))
    config = replace(config, num_threads=3)
    outcomes = launch(config, command=child)
    assert [outcome.status for outcome in outcomes] == ["done", "killed", "failed"]
    assert outcomes[2].reason == "the disk is full"
    out = tmp_path / "out"
    killed = json.loads((out / "seed-1" / "killed.json").read_text())
    assert killed["step"] >= 10
    assert killed["reason"] == outcomes[1].reason
    assert killed["reason"].endswith(f"within any group for {killed['step']} steps")
    starts = (out / "seed-0" / "starts").read_text()
    assert starts == f"rl toy --out={out}/seed-0 --seed=0 --optim.lr=1e-4 3\n"
    summary = json.loads((out / "summary.json").read_text())
    first = summary["seeds"]["0"]
    assert (first["step"], first["threshold_step"], first["threshold_seconds"]) == (30, 22, 21.0)
    assert first["final"] == pytest.approx(0.03 * 28)
    assert [summary[name]["num"] for name in ("all", "finished")] == [3, 1]
    assert summary["all"]["mean"] == pytest.approx((0.84 + 0.1 + 0.06) / 3)
    assert summary["finished"]["mean"] == pytest.approx(0.84)
    assert summary["num_killed"] == 1
    texts = [re.sub(" +", " ", text) for text in ((out / "report.md").read_text(), capsys.readouterr().out)]
    for text in (
        "| 0 | done | 30/30 | 84.0% | 90.0% | 22 | 21.0 |",
        "seed 2 failed: the disk is full",
        "1 killed, 1 failed. The second row is a selected number",
    ):
        assert all(text in whole for whole in texts)
    assert (out / "spread.png").read_bytes()[:4] == b"\x89PNG"

    with pytest.raises(UserError, match="already exists and is never overwritten"):
        launch(config, command=child)
    again = launch(config, resume=True, command=child)
    assert [outcome.status for outcome in again] == ["done", "killed", "done"]
    assert again[1].reason == outcomes[1].reason
    starts = [(out / f"seed-{seed}" / "starts").read_text().splitlines() for seed in config.seeds]
    assert [len(lines) for lines in starts] == [1, 1, 2]
    assert "--resume" in starts[2][1]
    assert again[2].curve.steps == list(range(1, 31))


def test_the_last_one_is_never_killed(tmp_path: Path, child: list[str]) -> None:
    config = make_config(tmp_path, seeds=(3,), kill_after=10)
    assert [outcome.status for outcome in launch(config, command=child)] == ["done"]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    if stat.parent.parent.is_dir():
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_no_process_and_a_true_summary(
    number: signal.Signals, tmp_path: Path, child: list[str]
) -> None:
    config, pids = make_config(tmp_path, seeds=(4, 0), parallel=1), tmp_path / "out" / "seed-4" / "pids"

    def interrupt() -> None:
        for _ in range(500):
            if pids.exists():
                return os.kill(os.getpid(), number)
            time.sleep(0.02)
        return None

    before = signal.signal(
        number, signal.default_int_handler
    )  # tests in the background start with it ignored
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(config, command=child)
    thread.join()
    assert signal.signal(number, before) is signal.default_int_handler
    assert [is_alive(pid) for pid in json.loads(pids.read_text())] == [False, False]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [facts["status"] for facts in summary["seeds"].values()] == ["interrupted", "waiting"]
    assert [facts["final"] for facts in summary["seeds"].values()] == [pytest.approx(0.1), None]
    assert summary["finished"] is None
    again = launch(config, resume=True, command=child)
    assert [outcome.status for outcome in again] == ["done", "done"]
    assert again[0].curve.values == [0.03 * step for step in range(1, 31)]  # the old rows are forgotten


def test_reading_takes_whole_lines_once(tmp_path: Path) -> None:
    seed, path = _Seed(0, tmp_path, Outcome(0, Curve("rl/correct"))), tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step, "time_s": 1.0, "rl/correct": step / 4}) + "\n" for step in (1, 2, 3)]
    seed.read()
    for data, steps in [
        (rows[0] + rows[1][:9], [1]),
        (rows[1][9:], [1, 2]),
        ("", [1, 2]),
        (rows[2], [1, 2, 3]),
    ]:
        with path.open("a") as file:
            file.write(data)
        seed.read()
        assert seed.outcome.curve.steps == steps


def test_a_seed_that_is_still_running_is_not_started_again(tmp_path: Path, child: list[str]) -> None:
    import fcntl

    config = make_config(tmp_path, seeds=(0,))
    launch(config, command=child)
    with (tmp_path / "out" / "seed-0.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="seed-0: still running"):
            launch(config, resume=True, command=child)


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": (1, 2, 1)}, "seeds: got 1 twice, expected one or more different numbers"),
        ({"seeds": ()}, "seeds: got none"),
        ({"parallel": 0}, "parallel = 0: expected 1 or more"),
        ({"kill_after": 9}, "kill_after = 9: expected 0 (never) or at least two windows (10)"),
        ({"metric": "rl/corect"}, "metric = 'rl/corect': no program logs that, did you mean 'rl/correct'?"),
        ({"set": ("seed=3",)}, "seed differs for each seed"),
        ({"recipe": "tpy"}, "whet rl refuses: unknown recipe 'tpy'"),
        ({"kill_after": 30}, "kill_after = 30: expected less than the 30 steps of a run"),
        ({"metric": "sft/loss", "seeds": (1,)}, "metric = 'sft/loss': seed 1 did not log it in "),
        (
            {"metric": "eval/greedy"},
            "metric = 'eval/greedy': seed 0 did not log it in 30 steps; it logs rl/c",
        ),
        ({"metric": "rl/kl", "kill_after": 10, "seeds": (1,)}, "metric = 'rl/kl': seed 1 did not log it in "),
        ({"seeds": (2,)}, "no seed finished; seed 2 says: the disk is full"),
    ],
)
def test_mistakes_are_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path, child: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        launch(make_config(tmp_path, **({"seeds": (0,)} | changes)), command=child)
    assert message in str(caught.value)
    assert "1500 steps" not in str(caught.value)  # seed 1 is not waited for to its end


def test_better_and_the_level_that_is_enough() -> None:
    config = SeedsConfig(out="x", recipe="toy")
    assert (sign_of(config), rules_of(config).enough, rules_of(config).margin) == (1, 0.5, 0.25)
    assert rules_of(replace(config, threshold=0.9)).enough == 0.9
    loss = replace(config, metric="sft/validation_loss")
    assert (sign_of(loss), rules_of(loss).enough) == (-1, None)
    assert rules_of(replace(config, metric="eval/truncated", better="lower")).enough is None
    assert from_dict(SeedsConfig, {"out": "x", "recipe": "y"}, where="x").seeds == (0, 1, 2, 3)
    assert plan(replace(config, seeds=(7,))) == "whet rl toy --out=x/seed-7 --seed=7"


@pytest.mark.ci
def test_the_real_program_checks_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="whet rl refuses: unknown recipe 'demmo' for 'whet rl'; did you mean 'demo'"
    ):
        launch(SeedsConfig(out=str(tmp_path / "out"), recipe="demmo"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_real_seeds(tmp_path: Path, tiny_policy: PolicyConfig) -> None:
    recipe = RLConfig(
        out="unused", policy=tiny_policy, num_steps=2, num_prompts=2, group_size=2,
        sampling=SamplingParams(max_new_tokens=8),
    )  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(dump_yaml(recipe))
    config = SeedsConfig(
        out=str(tmp_path / "out"), recipe=str(tmp_path / "tiny.yaml"), seeds=(0, 3), parallel=2
    )
    outcomes = launch(replace(config, set=("num_steps=3",)))
    assert [(outcome.status, outcome.progress) for outcome in outcomes] == [("done", "3/3")] * 2
    for seed in (0, 3):
        folder = tmp_path / "out" / f"seed-{seed}"
        assert f"\nseed: {seed}\n" in (folder / "config.yaml").read_text()
        assert read_curve(folder, "rl/correct").steps == [1, 2, 3]
