"""Filters of training problems: a policy of known skill, so that every pass rate is known or has a known spread."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from whet.generate.engine import Completion, Request
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.rows import OnEnded
from whet.generate.sampling import SamplingParams
from whet.schema import SCHEMAS
from whet.tasks.made.arithmetic import Arithmetic
from whet.train.rollout import curriculum
from whet.train.rollout.curriculum import (
    CurriculumConfig,
    histogram,
    measure_difficulty,
    percentile,
    select_problems,
)
from whet.types import Problem, UserError

SAMPLING = SamplingParams(max_new_tokens=4)


class Dice:
    """An engine and a policy at once: each completion answers with a number from 0 to 99 that its seed names."""

    max_rows = 2
    schema = SCHEMAS["think_answer"]

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.tokenizer = self

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def prompt_ids(self, problem: Problem) -> tuple[int, ...]:
        return tuple(problem.prompt.encode())

    def completion_text(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
        return f"hm</think><answer>{ids[0]}</answer>"

    def engine(self) -> Dice:
        return self

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, *, on_ended: OnEnded
    ) -> list[list[Completion]]:
        assert params is SAMPLING
        self.calls.append(len(requests))
        drawn = [
            [
                Completion(ids=(seed // 7 % 100,), logprobs=(0.0,), finish_reason="stop")
                for seed in request.seeds
            ]
            for request in requests
        ]
        for place, row in enumerate(drawn):
            on_ended(place, row)
        return drawn


class Threshold:
    """A problem's answer is the number of faces of 100 that are right."""

    name = "threshold"

    def problems(self, split: str) -> list[Problem]:
        skills = [0, 0, 0, 50, 100, 50, 10, 90, 100, 50]
        return [make(index, skill) for index, skill in enumerate(skills)]

    def is_correct(self, problem: Problem, answer: str | None) -> bool:
        return answer is not None and int(answer) < int(problem.answer)


def make(index: int, skill: int) -> Problem:
    return Problem(uid=f"u{index}", task="threshold", prompt="x" * (index + 1), answer=str(skill))


TASK = Threshold()
PROBLEMS = TASK.problems("train")


def measure(dice: Dice, problems: Sequence[Problem] = PROBLEMS, num_samples: int = 40, seed: int = 0) -> Any:
    policy = cast(Policy, dice)
    return measure_difficulty(policy, TASK, problems, num_samples=num_samples, sampling=SAMPLING, seed=seed)


def select(
    folder: Path, dice: Dice | None = None, problems: Sequence[Problem] = PROBLEMS, **options: Any
) -> tuple[list[str], list[str]]:
    config = CurriculumConfig(**options)
    policy = cast(Policy, dice or Dice())
    kept, notes = select_problems(policy, TASK, problems, config, folder, sampling=SAMPLING, seed=0)
    return [problem.uid for problem in kept], notes


def test_pass_rates() -> None:
    rates = measure(Dice(), num_samples=400)
    for problem in PROBLEMS:
        share = int(problem.answer) / 100
        assert rates[problem.uid].num_samples == 400
        assert abs(rates[problem.uid].share - share) <= 4 * math.sqrt(share * (1 - share) / 400)


def test_a_rate_depends_on_uid_and_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure(Dice())
    assert measure(Dice(), PROBLEMS[::-1]) == whole
    dice = Dice()
    assert measure(dice, PROBLEMS[5:6] * 2) == {"u5": whole["u5"]}
    assert dice.calls == [1]
    dice = Dice()
    monkeypatch.setattr(curriculum, "ROWS_PER_PORTION", 60)  # 60 x 2 rows of 40 samples are 3 problems
    assert measure(dice) == whole
    assert dice.calls == [3, 3, 3, 1]
    assert measure(Dice(), seed=1) != whole


def test_ranks_share_the_work_and_know_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure(Dice())
    shares: list[list[float]] = []
    measured = []
    for number in range(3):
        monkeypatch.setattr(curriculum, "shard", lambda count, first=number: range(first, count, 3))
        monkeypatch.setattr(
            curriculum, "all_reduce_sum", lambda *counts: shares.append(list(counts)) or counts
        )
        dice = Dice()
        measure(dice)
        measured.append(sum(dice.calls))
    assert measured == [4, 3, 3]
    assert [sum(column) for column in zip(*shares, strict=True)] == [
        rate.num_right for rate in whole.values()
    ]
    monkeypatch.setattr(curriculum, "all_reduce_sum", lambda *counts: [3.0] * len(counts))
    assert {rate.num_right for rate in measure(Dice()).values()} == {3}


def test_keeps_what_is_neither_hopeless_nor_mastered(tmp_path: Path) -> None:
    kept, notes = select(tmp_path, num_samples=40)
    assert kept == ["u3", "u5", "u6", "u7", "u9"]
    assert notes[0].startswith(
        "5 of 10 problems have 0 < pass rate < 1 under the starting policy; never right 3, "
    )
    assert notes[0].endswith(", always right 2")
    rows = [json.loads(line) for line in (tmp_path / "difficulty.jsonl").read_text().splitlines()]
    assert [(row["uid"], row["prompt"], row["num_samples"]) for row in rows] == [
        (problem.uid, problem.prompt, 40) for problem in PROBLEMS
    ]
    assert [rows[index]["num_right"] for index in (0, 4)] == [0, 40]


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        (0.0, 1.0, "1234"),
        (0.25, 1.0, "234"),  # bounds are never kept
        (0.0, 0.75, "12"),
        (None, 1.0, "01234"),
        (0.0, None, "12345"),
        (0.3, 0.6, "2"),
    ],
)
def test_bounds(low: float | None, high: float | None, kept: str, tmp_path: Path) -> None:
    shares = [0, 2, 4, 6, 7, 8]
    text = "\n".join(f'{{"uid": "u{i}", "num_right": {n}, "num_samples": 8}}' for i, n in enumerate(shares))
    (tmp_path / "difficulty.jsonl").write_text(text)
    for given in (tmp_path, tmp_path / "difficulty.jsonl"):
        dice = Dice()
        found, _ = select(
            tmp_path / "none",
            dice,
            PROBLEMS[:6],
            difficulty_file=str(given),
            min_pass_rate=low,
            max_pass_rate=high,
        )
        assert found == [f"u{digit}" for digit in kept]
        assert dice.calls == []
    assert not (tmp_path / "none").exists()


def test_a_resumed_run_reads_and_never_measures(tmp_path: Path) -> None:
    first = select(tmp_path, num_samples=40)
    dice = Dice()
    assert select(tmp_path, dice, num_samples=40) == first
    assert dice.calls == []
    (tmp_path / "difficulty.jsonl").write_text('{"uid": "u0", "num_right": 1}\n')
    with pytest.raises(UserError, match=r"difficulty.jsonl line 1: expected a JSON object with uid"):
        select(tmp_path, num_samples=40)


def test_a_killed_measurement_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, written = json.dumps, []

    def killed(record: Any) -> str:
        written.append(record)
        if len(written) == 4:
            raise KeyboardInterrupt
        return original(record)

    monkeypatch.setattr(json, "dumps", killed)
    with pytest.raises(KeyboardInterrupt):
        select(tmp_path, num_samples=4)
    monkeypatch.undo()
    assert not (tmp_path / "difficulty.jsonl").exists()
    dice = Dice()
    select(tmp_path, dice, num_samples=4)
    assert dice.calls
    assert [path.name for path in tmp_path.iterdir()] == ["difficulty.jsonl"]


@pytest.mark.parametrize(
    ("unmeasured", "expected"), [("keep", [f"u{index}" for index in range(1, 10)]), ("drop", ["u1"])]
)
def test_problems_that_the_file_lacks(unmeasured: Any, expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "rates.jsonl"
    rows = [{"uid": "u0", "num_right": 0, "num_samples": 2}, {"uid": "u1", "num_right": 1, "num_samples": 2}]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        UserError, match=r"^8 of 10 problems have no measured pass rate in .*rates.jsonl; measure"
    ):
        select(tmp_path, difficulty_file=str(path))
    kept, notes = select(tmp_path, difficulty_file=str(path), unmeasured=unmeasured)
    assert kept == expected
    assert notes[0].startswith("1 of 2 problems have")
    assert notes[0].endswith(f"; 8 unmeasured: {unmeasured}")


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"uid": 1, "num_right": 0, "num_samples": 1}', '{"uid": "u", "num_right": true}', "[" * 9999]
    + [
        f'{{"uid": "u", "num_right": {right}, "num_samples": {of}}}'
        for right, of in [(0, 0), (3, 2), (-1, 2), (1.0, 2)]
    ],
)
def test_malformed_files(line: str, tmp_path: Path) -> None:
    path = tmp_path / "rates.jsonl"
    path.write_text('{"uid": "u", "num_right": 0, "num_samples": 1}\n' + line)
    with pytest.raises(UserError, match="rates.jsonl line 2: expected a JSON object"):
        select(tmp_path, difficulty_file=str(path))
    with pytest.raises(UserError, match="pass rates cannot be read"):
        select(tmp_path, difficulty_file=str(tmp_path / "no such"))


def test_nothing_left_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        select(tmp_path, problems=PROBLEMS[:3], num_samples=8)
    assert str(caught.value) == (
        "no problem has 0 < pass rate < 1 under the starting policy (never right 3, 0-25 % 0, 25-50 % 0, 50-75 % 0, "
        "75-100 % 0, always right 0); start from a better model (SFT first), or use easier problems or more samples, "
        "or widen curriculum.min_pass_rate and max_pass_rate"
    )
    (tmp_path / "difficulty.jsonl").unlink()
    with pytest.raises(UserError, match=r"always right 1\); use harder problems, or widen"):
        select(tmp_path, problems=PROBLEMS[4:5], num_samples=8)


def test_histogram() -> None:
    text = histogram([0, 0, 0.125, 0.25, 0.5, 0.625, 0.75, 0.99, 1])
    assert text == "never right 2, 0-25 % 1, 25-50 % 1, 50-75 % 2, 75-100 % 2, always right 1"


def test_only_some_are_measured(tmp_path: Path) -> None:
    problems = [make(index, 50) for index in range(400)]
    kept, notes = select(tmp_path, problems=problems, num_samples=20, max_problems=100)
    assert notes[0].startswith("100 of 100 problems have")
    assert kept == [problem.uid for problem in problems if problem.uid in set(kept)]
    assert len(kept) == 100
    places = sorted(int(uid[1:]) for uid in kept)
    assert 150 < sum(places) / 100 < 250  # mean of 0..399 is 199.5; standard deviation of the mean is 10
    rows = (tmp_path / "difficulty.jsonl").read_text().splitlines()
    assert len(rows) == 100
    shuffled = curriculum.hash_sample(problems[::-1], 100)
    assert {problem.uid for problem in shuffled} == set(kept)


@pytest.mark.parametrize(
    ("lengths", "percent", "expected"),
    [
        ([5], 1, 5),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 90, 9),
        ([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], 91, 10),
        ([1, 2, 3, 4], 50, 2),
        (list(range(1, 101)), 7, 7),  # 0.07 * 100 is more than 7 in floating point,
        (list(range(1, 376)), 8.8, 33),  # and so is 8.8 * 375 / 100
        ([3, 3, 3, 9], 75, 3),
    ],
)
def test_percentile(lengths: list[int], percent: float, expected: int) -> None:
    assert percentile(lengths, percent) == expected


def test_long_prompts_are_left_out_before_anything_is_measured(tmp_path: Path) -> None:
    kept, notes = select(tmp_path, max_prompt_percentile=80)
    assert kept == [f"u{index}" for index in range(8)]
    assert notes == [
        "prompts of more than 8 tokens (percentile 80) are dropped: 2 of 10, the longest of 10 tokens"
    ]
    dice = Dice()
    kept, notes = select(tmp_path, dice, max_prompt_percentile=80, num_samples=40)
    assert kept == ["u3", "u5", "u6", "u7"]
    assert sum(dice.calls) == 8
    assert len(notes) == 2


def test_by_default_all_are_kept(tmp_path: Path) -> None:
    assert select(tmp_path) == ([problem.uid for problem in PROBLEMS], [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_prompt_percentile": 0}, "max_prompt_percentile = 0: expected above 0, at most 100"),
        ({"num_samples": -1}, "num_samples = -1: expected 0 or more"),
        ({"num_samples": 8, "min_pass_rate": 0.5, "max_pass_rate": 0.5}, "the first below the second"),
        ({"num_samples": 8, "max_pass_rate": 1.5}, "expected 0 to 1 or None"),
        ({"num_samples": 8, "min_pass_rate": -0.5}, "expected 0 to 1 or None"),
        ({"num_samples": 8, "min_pass_rate": math.nan}, "expected 0 to 1 or None"),
        ({"num_samples": 8, "difficulty_file": "x"}, "give one of the two"),
        ({"num_samples": 8, "min_pass_rate": None, "max_pass_rate": None}, "nothing would be filtered"),
        ({"num_samples": 1}, "expected 2 or more"),
        ({"max_problems": 8}, "max_problems is read with num_samples only"),
        ({"unmeasured": "keep"}, "unmeasured is read with difficulty_file only"),
        ({"min_pass_rate": 0.2}, "need pass rates: give num_samples or difficulty_file"),
    ],
)
def test_config_says_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CurriculumConfig(**options)


def test_with_a_real_policy(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = load_policy(tiny_policy, seed=0)
    problems = Arithmetic().problems("dev")[:6]

    class Short(Arithmetic):
        def is_correct(self, problem: Problem, answer: str | None) -> bool:
            return answer is None  # random weights never close their thinking

    def run(folder: Path, task: Arithmetic) -> list[Problem]:
        folder.mkdir()
        config = CurriculumConfig(num_samples=3, max_pass_rate=None)
        return select_problems(policy, task, problems, config, folder, sampling=SAMPLING, seed=0)[0]

    assert run(tmp_path / "a", Short()) == problems
    assert "pass rates of the starting policy, arithmetic" in capsys.readouterr().out
    with pytest.raises(UserError, match="never right 6"):
        run(tmp_path / "b", Arithmetic())
