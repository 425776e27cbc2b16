"""Grading elsewhere: the verdicts, scores and failures are those of grading here, whoever dies meanwhile."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crew import ThreadCrew
from test_samplers import make_config, run, untimed

from whet.generate.backends.staff import LostError
from whet.generate.policy import PolicyConfig
from whet.ranks.ray import ClusterConfig
from whet.rewards.base import build_rewards, score_completions
from whet.schema import ResponseSchema
from whet.tasks.base import TaskConfig, load_task
from whet.train.rl_config import RLConfig
from whet.train.rollout import grading
from whet.train.rollout.grading import GradedTask, Graders, GradingWorker, graded
from whet.types import UserError

OWN = """
def steps(problem, text):
    if "7" in text:
        raise ValueError("no sevens")
    return len(text) / 10
"""


def graders(
    config: TaskConfig,
    own: tuple[str, ...] = (),
    before: Callable[[int], str | None] = lambda _: None,
    count: int = 2,
) -> tuple[Graders, ThreadCrew]:
    crew = ThreadCrew(before, GradingWorker)
    return Graders(crew, count=count, arguments=(config, own, str(Path.cwd()))), crew


def test_programs_are_judged_and_scored_as_here(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": f"Write add{n}(a), which adds {n}.",
            "tests": [f"assert add{n}(1) == {n + 1}", f"assert add{n}(0) == {n}"],
            "solution": f"def add{n}(a):\n    return a + {n}",
            "names": [f"add{n}"],
        }
        for n in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TaskConfig(name="code", path=str(tmp_path / "rows.jsonl"))
    here = load_task(config)
    items: list[tuple[Any, str | None]] = []
    for problem in here.problems("train")[:2]:
        head = f"```python\ndef {problem.prompt.split()[1].rstrip(',')}:\n    return "
        number = problem.prompt.split()[-1].rstrip(".")
        right, half = (
            head + f"a + {number}\n```",
            head + f"a or {number}\n```",
        )  # the second passes one test of two
        items += [
            (problem, answer)
            for answer in (right, half, "```python\ndef f(:\n```", "```python\nx = 1\n```", None)
        ]
    schema = ResponseSchema()
    weights = {"correct": 1.0, "program_loads": 0.5, "program_tests": 0.25}
    made, crew = graders(config, before=lambda call: "die" if call == 1 else None)
    recipe = RLConfig(out="x", policy=PolicyConfig(init="x"), task=config, rewards=weights)
    local = build_rewards(weights, schema, here)
    task, remote = graded(recipe, here, schema, local, made)
    texts = [(problem, schema.render("", answer or "")) for problem, answer in items]
    assert len({str(row) for row, _ in score_completions(local, texts)}) >= 4  # partial credit, too
    try:
        assert isinstance(task, GradedTask)
        assert task.judge_many(items) == here.judge_many(items) == [True, *[False] * 4] * 2  # type: ignore[attr-defined]
        calls = crew.calls
        assert score_completions(remote, texts) == score_completions(local, texts)
        # The rewards ask for what the metrics have asked for already, but for the spelling of the empty answer.
        assert crew.calls <= calls + 2 * len(weights)
        assert made.num_lost == 1
        assert made.num_started == 3
    finally:
        made.close()


@pytest.mark.ci
def test_a_run_that_grades_elsewhere_is_the_same_run(
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    few_problems: None,
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    own = (f"{tmp_path}/mine.py:steps=0.5",)
    made: list[ThreadCrew] = []
    fates = dict.fromkeys(random.Random(3).sample(range(2, 14), 3), "die")

    def crew_of(config: ClusterConfig, actor: type[Any], **asked: Any) -> ThreadCrew:
        assert asked == {"count": 2, "cpus": 1}
        made.append(ThreadCrew(fates.get, actor))
        return made[-1]

    monkeypatch.setattr(grading, "RayCrew", crew_of)
    alone, rows = run(make_config(tiny_policy, tmp_path / "alone", reward=own, preflight="warn"))
    config = make_config(
        tiny_policy,
        tmp_path / "graded",
        reward=own,
        preflight="warn",
        cluster=ClusterConfig(reward_workers=2),
    )
    weights, metrics = run(config)
    assert all((alone[name] == weights[name]).all() for name in alone)
    assert untimed(metrics) == untimed(rows)
    assert any(row["rl/reward_failures"] for row in rows)
    assert made[0].fired == 3
    assert made[0].is_closed


def test_equal_answers_are_judged_once_and_failed_ones_again() -> None:
    config = TaskConfig(name="arithmetic")
    task = load_task(config)
    problem = task.problems("train")[0]
    made, _ = graders(config)
    asked: list[int] = []
    judge = made.map
    missing = [None]

    def counted(method: str, items: Any, *first: Any) -> list[Any]:
        asked.append(len(items))
        return [(missing.pop(), None)] if missing else judge(method, items, *first)

    made.map = counted  # type: ignore[method-assign]
    remote = GradedTask(task, made)
    items = [(problem, problem.answer)] * 5
    assert remote.judge_many(items) == [None] * 5
    assert remote.judge_many(items) == [True] * 5
    assert remote.is_correct(problem, problem.answer)
    assert asked == [1, 1]
    made.close()


def test_what_a_grader_raises_is_told_here_and_workers_that_never_start_end_the_run() -> None:
    config = TaskConfig(name="arithmetic")

    def fail(call: int) -> None:
        raise UserError("no such table")

    made, _ = graders(config, before=fail)
    with pytest.raises(UserError, match="no such table"):
        made.map("judge", [(None, "1")])
    made.close()
    made, crew = graders(replace(config, name="arithmetic"), own=("/nowhere.py:steps",))
    with pytest.raises(UserError, match="no file '/nowhere.py'"):
        made.map("judge", [(None, "1")])
    made.close()
    made, crew = graders(config, before=lambda call: "die", count=1)
    with pytest.raises(UserError, match="lost with the same work"):
        made.map("judge", [(None, "1")])
    made.close()
    assert crew.is_closed


def test_workers_that_die_at_their_start_end_the_run() -> None:
    class Short(GradingWorker):
        def load(self, *arguments: Any) -> int:
            raise LostError("out of memory")

    crew = ThreadCrew(actor=Short)
    made = Graders(crew, count=1, arguments=())
    with pytest.raises(UserError, match="3 workers in a row were lost before they were ready .out of memory"):
        made.map("judge", [(None, "1")])
    made.close()
