"""The audit finds what is wrong with a task or a reward, and nothing where nothing is."""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet.eval.audit import audit as audit_module
from whet.eval.audit.audit import AuditConfig, audit_task, main, preflight
from whet.eval.audit.dispute import dispute, dispute_samples, plain_equal
from whet.eval.grade import judge_answers
from whet.rewards.base import WeightedReward, build_rewards
from whet.schema import SCHEMAS, ResponseSchema
from whet.tasks.base import TaskConfig
from whet.tasks.made.arithmetic import Arithmetic
from whet.types import Problem, UserError

pytestmark = pytest.mark.usefixtures("whole_start")

SCHEMA = ResponseSchema()
TASK = Arithmetic()
PROBLEMS = TASK.problems("dev")[:4]
WEIGHTS = {"correct": 1.0, "format": 0.5}


class Judge:
    """A task with a judgement to be tried."""

    name = "mine"

    def __init__(self, is_correct: Callable[[Problem, str | None], Any]) -> None:
        self._is_correct = is_correct

    def problems(self, split: str) -> list[Problem]:
        return PROBLEMS

    def is_correct(self, problem: Problem, answer: str | None) -> Any:
        return self._is_correct(problem, answer)


def failures(task: Any, rewards: list[WeightedReward] | None = None) -> dict[str, int]:
    """Return how many cases of each claim fail, of those that do."""
    found = audit_task(task, rewards or build_rewards(WEIGHTS, SCHEMA, task), SCHEMA, PROBLEMS)
    return {check.name.split(" ")[1]: len(check.failures) for check in found.checks if check.failures}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", [name for name in SCHEMAS if name != "none"])
def test_a_sound_task_passes_with_every_schema(name: str) -> None:
    schema = SCHEMAS[name]
    worked = [replace(problem, solution=f"<think>well</think>{problem.answer}") for problem in PROBLEMS]
    for problems in (PROBLEMS, worked):
        found = audit_task(TASK, build_rewards(WEIGHTS, schema, TASK), schema, problems)
        assert [check.failures for check in found.checks] == [[]] * 8
        preflight(TASK, build_rewards(WEIGHTS, schema, TASK), schema, problems)


def test_a_whole_text_is_the_answer_of_a_plain_chat() -> None:
    schema = SCHEMAS["none"]
    preflight(TASK, build_rewards({"correct": 1.0}, schema, TASK), schema, PROBLEMS)


def test_a_sound_task_passes() -> None:
    found = audit_task(TASK, build_rewards(WEIGHTS, SCHEMA, TASK), SCHEMA, PROBLEMS)
    assert [check.failures for check in found.checks] == [[]] * 8
    assert min(check.num_cases for check in found.checks) >= 4
    assert found.best == found.maximum == 1.5
    assert 0 < found.peak_bytes < 2**24


def test_a_substring_pays_a_cheater() -> None:
    lenient = Judge(lambda problem, answer: answer is not None and problem.answer in answer)
    found = failures(lenient)
    assert found["hostile"] >= 4 * len(PROBLEMS)  # "1 or 2", "2 or 1", "1, 2", two boxes
    strict = Judge(lambda problem, answer: answer == problem.answer)
    assert set(failures(strict)) == {"spelling"}  # too strict: a matter for the reader, no refusal
    preflight(strict, build_rewards(WEIGHTS, SCHEMA, strict), SCHEMA, PROBLEMS)
    with pytest.raises(UserError, match=r"preflight: .*gold or wrong .*judged right.*whet audit"):
        preflight(lenient, build_rewards(WEIGHTS, SCHEMA, lenient), SCHEMA, PROBLEMS)


def test_a_task_that_never_accepts_gold() -> None:
    assert failures(Judge(lambda problem, answer: False))["right"] == len(PROBLEMS)


def test_a_near_miss_that_pays() -> None:
    task = Judge(
        lambda problem, answer: (answer or "").isdigit() and len(answer or "") == len(problem.answer)
    )
    assert failures(task)["near"] == len(PROBLEMS)
    with pytest.raises(UserError, match="preflight: .*near miss .*judged right"):
        preflight(task, build_rewards(WEIGHTS, SCHEMA, task), SCHEMA, PROBLEMS)


@pytest.mark.ci
def test_a_slow_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "SECONDS_PER_CALL", 0.05)

    def slow(problem: Problem, answer: str | None) -> bool:
        time.sleep(0.1 if answer and "10^{10" in answer else 0.0)
        return TASK.is_correct(problem, answer) is True

    assert failures(Judge(slow))["judgement"] == 2 * len(PROBLEMS)  # judged itself, and in the reward

    once: set[str] = set()

    def busy(problem: Problem, answer: str | None) -> bool:
        """Slow the first time that an answer comes, as on a machine that does other work."""
        time.sleep(0.0 if answer is None or answer in once else 0.1)
        once.add(answer or "")
        return answer == problem.answer

    assert "judgement" not in failures(Judge(busy))


def test_rewards_with_other_tags_and_senseless_weights() -> None:
    other = SCHEMAS["working_out_solution"]
    wrong_tags = build_rewards({"format": 1.0}, other, TASK)
    with pytest.raises(
        UserError, match=r"perfect completion .* scores 0, expected the maximum 1; .*schema asks for"
    ):
        preflight(TASK, wrong_tags, SCHEMA, PROBLEMS)
    constant = [WeightedReward("mine", 1.0, lambda problem, text: 1.0)]
    with pytest.raises(
        UserError,
        match="empty completion of problem .* scores 1, a wrong one 1, a perfect one 1; expected empty < perfect",
    ):
        preflight(TASK, constant, SCHEMA, PROBLEMS)
    format_alone = build_rewards({"format": 1.0}, SCHEMA, TASK)
    preflight(TASK, format_alone, SCHEMA, PROBLEMS)  # a run may teach the format first
    assert failures(TASK, format_alone) == {"rewards": len(PROBLEMS)}
    with pytest.raises(
        UserError, match="reward 'mine' gives a perfect completion .* no score: it returned None"
    ):
        preflight(TASK, [WeightedReward("mine", 1.0, lambda problem, text: None)], SCHEMA, PROBLEMS)
    upside_down = [
        WeightedReward("mine", 1.0, lambda problem, text: 1.0 - SCHEMA.format_reward(text), best=None)
    ]
    assert "empty" in failures(TASK, upside_down)
    short = WeightedReward("short", 0.2, lambda problem, text: max(0.0, 1 - len(text) / 200), best=None)
    (doubt,) = preflight(TASK, [*build_rewards({"correct": 1.0}, SCHEMA, TASK), short], SCHEMA, PROBLEMS)
    assert "an empty completion" in doubt
    assert "may learn to say nothing" in doubt


@pytest.mark.parametrize("name", SCHEMAS)
def test_preflight_accepts_rewards_that_share_the_schema(name: str) -> None:
    for weights in (WEIGHTS, {"correct": 1.0}):
        preflight(TASK, build_rewards(weights, SCHEMAS[name], TASK), SCHEMAS[name], PROBLEMS)


@pytest.mark.ci
def test_disputes() -> None:
    assert dispute(TASK, PROBLEMS) == []
    strict = Judge(lambda problem, answer: answer == problem.answer)
    rows = dispute(strict, PROBLEMS)
    assert {row.source for row in rows} == {"spelling"}
    assert all(row.task_says is False and row.other_says is True for row in rows)


@pytest.mark.ci
def test_disputed_samples_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "eval_samples.jsonl"
    first = PROBLEMS[0]
    answers = [first.answer, f"{first.answer}.0", "0", None]
    path.write_text("".join(json.dumps({"uid": first.uid, "answer": answer}) + "\n" for answer in answers))
    strict = Judge(lambda problem, answer: answer == problem.answer)
    (row,) = dispute_samples(strict, PROBLEMS, path)
    assert (row.answer, row.source) == (f"{first.answer}.0", "sample")
    with pytest.raises(UserError, match="no answer to a problem of this task"):
        dispute_samples(strict, PROBLEMS[1:], path)
    path.write_text("no json")
    with pytest.raises(UserError, match=r"expected eval_samples\.jsonl"):
        dispute_samples(strict, PROBLEMS, path)


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("1,000", "1000", True),
        ("X y", "xY", True),
        ("0.50", "0.5", True),
        ("5 or 7", "5", False),
        ("$20$", "20", True),
        (r"\boxed{20}", "20", True),
        (r"\( \text{Paris} \)", "paris", True),
        ("$5$ or $7$", "5", False),
        ("", "1", False),
    ],
)
def test_plain_comparison(answer: str, gold: str, expected: bool) -> None:
    assert plain_equal(answer, gold) is expected


@pytest.mark.ci
def test_calls_without_a_score_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A service that fails now and then refutes nothing, and should not go unseen."""
    (tmp_path / "mine.py").write_text(
        "calls = 0\n\n\ndef pay(problem, completion):\n    global calls\n    calls += 1\n"
        "    if calls == 5:\n        raise ConnectionError('503 away')\n    return 0.5\n"
    )
    main(AuditConfig(out=str(tmp_path / "a"), num_problems=2, reward=(f"{tmp_path / 'mine.py'}:pay=0.5",)))
    told = capsys.readouterr().out
    assert re.search(r"reward 'pay': \d+ calls? gave no score, the last because: .*503 away", told)
    assert "2 problems, schema think_answer" in told


@pytest.mark.ci
def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = AuditConfig(out=str(tmp_path / "a"), num_problems=3)
    main(config)
    shown = capsys.readouterr().out
    assert "audit of arithmetic: 3 problems" in shown
    assert "FAIL" not in shown
    content = json.loads((tmp_path / "a" / "audit.json").read_text())
    assert content["best"] == content["maximum"] == pytest.approx(1.1)
    with (tmp_path / "a" / "disputed.csv").open() as file:
        assert next(csv.reader(file))[0] == "uid"
    lenient = tmp_path / "lenient.py"
    lenient.write_text(
        "from whet.types import Problem\n\n\nclass Mine:\n    name = 'mine'\n\n    def problems(self, split):\n"
        "        return [Problem(uid='a', task='mine', prompt='1+1', answer='2')]\n\n"
        "    def is_correct(self, problem, answer):\n        return answer is not None and problem.answer in answer\n"
    )
    task = TaskConfig(name=f"{lenient}:Mine")
    with pytest.raises(UserError, match="required claims fail, first"):
        main(AuditConfig(out=str(tmp_path / "b"), task=task, num_problems=0))
    assert "FAIL" in capsys.readouterr().out
    assert (tmp_path / "b" / "disputed.csv").exists()


@pytest.mark.parametrize("samples", ["", "none.jsonl"])
def test_an_audit_is_kept_where_the_second_verifier_does_not_start(
    samples: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise UserError("importing it took more than 120 s")

    monkeypatch.setattr(audit_module, "dispute", fails)
    main(AuditConfig(out=str(tmp_path / "a"), num_problems=2, samples=samples))
    assert "no second verifier, so no answers are disputed: importing it took" in capsys.readouterr().out
    assert json.loads((tmp_path / "a" / "audit.json").read_text())["num_disputed"] == 0


def slow_reward(seconds: float, calls: list[int]) -> WeightedReward:
    """A reward that takes a time for each batch, as a pool of many workers does."""

    def many(items: Any) -> list[float | None]:
        calls.append(len(items))
        time.sleep(seconds)
        return [float(SCHEMA.parse(text).answer == problem.answer) for problem, text in items]

    return WeightedReward("mine", 1.0, many=many, best=1.0)


def test_the_preflight_of_a_slow_reward_scores_together_says_how_far_it_is_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast: list[int] = []
    assert preflight(TASK, [slow_reward(0.0, fast)], SCHEMA, PROBLEMS) == []
    assert sum(fast) > 60
    assert len(fast) < sum(fast) / 3
    monkeypatch.setattr(audit_module, "PREFLIGHT_S", 0.1)
    monkeypatch.setattr(audit_module, "TOLD_S", 0.0)
    slow: list[int] = []
    (doubt,) = preflight(TASK, [slow_reward(0.06, slow)], SCHEMA, PROBLEMS)
    assert sum(slow) <= 2 + audit_module.AT_ONCE + 4  # the first batch, and single cases beside it
    assert "others were left out: the rewards or the judge are slow (`whet audit` tries all)" in doubt
    assert "whet: preflight: trying the rewards before the run: " in capsys.readouterr().out


def test_a_slow_reward_that_pays_for_nothing_is_still_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "PREFLIGHT_S", 0.0)
    constant = replace(slow_reward(0.0, []), many=lambda items: [1.0] * len(items))
    with pytest.raises(UserError, match="an empty completion"):
        preflight(TASK, [constant], SCHEMA, PROBLEMS)


def test_an_audit_scores_the_completions_of_several_problems_together() -> None:
    calls: list[int] = []
    problems = Arithmetic().problems("train")[:16]
    audit = audit_task(TASK, [slow_reward(0.0, calls)], SCHEMA, problems)
    assert not any(check.is_refuted for check in audit.checks)
    assert sum(calls) > 16 * 10
    assert len(calls) < sum(calls) / 16


def test_a_service_that_is_away_for_a_moment_refutes_nothing() -> None:
    seen: set[tuple[str, str]] = set()
    sound = slow_reward(0.0, [])

    def many(items: Any) -> list[float | None]:
        assert sound.many is not None
        first = [(problem.uid, text) not in seen for problem, text in items]
        seen.update((problem.uid, text) for problem, text in items)
        return [None if new else score for new, score in zip(first, sound.many(items), strict=True)]

    flaky = replace(sound, many=many)
    assert preflight(TASK, [flaky], SCHEMA, PROBLEMS) == []
    audit = audit_task(TASK, [flaky], SCHEMA, PROBLEMS)
    assert not any(check.is_refuted for check in audit.checks)


def test_why_an_empty_completion_has_no_score_is_said() -> None:
    sound = slow_reward(0.0, [])

    def many(items: Any) -> list[float | None]:
        assert sound.many is not None
        sound.failures.latest = "503: try again later"
        return [score if text else None for (_, text), score in zip(items, sound.many(items), strict=True)]

    with pytest.raises(
        UserError, match="reward 'mine' gives an empty completion of problem .* no score: 503: try"
    ):
        preflight(TASK, [replace(sound, many=many)], SCHEMA, PROBLEMS)


@pytest.mark.parametrize("form", ["What is {} + {}?", "{} + {} =", "{}+{}=", "Compute {} * {}."])
def test_repeating_the_question_is_not_paid_where_answers_are_read_anywhere(form: str) -> None:
    schema = replace(SCHEMAS["anywhere"], answer_type="text")
    pairs = [(a, b) for a in range(2, 6) for b in range(2, 6)]  # no number of the question is the answer
    problems = [
        Problem(
            uid=f"{a}-{b}", task="sums", prompt=form.format(a, b), answer=str(a * b if "*" in form else a + b)
        )
        for a, b in pairs
    ]
    rewards = build_rewards({"correct": 1.0}, schema, TASK)
    assert not any(check.is_refuted for check in audit_task(TASK, rewards, schema, problems).checks)
    (correct,) = rewards
    assert correct.function is not None
    for problem in problems:
        for echo in (problem.prompt, problem.prompt.removeprefix("What is ").rstrip("?")):
            assert correct.function(problem, echo) == 0.0
            assert judge_answers(TASK, [(problem, echo)]) == [False]
        assert correct.function(problem, f"{problem.prompt} {problem.answer}") == 1.0
