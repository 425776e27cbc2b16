"""reasoning-gym: names, splits, verdicts, and scorers that are not to be trusted with a model's text."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from needs import needs

from whet.tasks import gym
from whet.tasks.gym import Gym, score
from whet.tasks.read import split_of
from whet.types import UserError

needs_gym = needs("reasoning_gym")


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"^task gym: .*pip install .*\[gym\]' .*\("):
        Gym("chain_sum")


@needs_gym
def test_names() -> None:
    for names, message in (
        ("chain_sums", "task.path: no environment 'chain_sums'; did you mean .*chain_sum"),
        ("gcd, xxxxxxxxx", "task.path: no environment 'xxxxxxxxx'; there are [0-9]{3}: ab, acre, "),
        (
            "gcd,rush_hour",
            "task.path: environment 'rush_hour' has no gold answers, so no run can be checked on it",
        ),
    ):
        with pytest.raises(UserError, match=message):
            Gym(names)


@needs_gym
@pytest.mark.ci
def test_problems_do_not_depend_on_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed in "12":  # isomorphic_strings draws from a set, whose order depends on this
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.append(Gym("isomorphic_strings", num_problems=20).problems("train"))
    assert found[0] == found[1] != []


@needs_gym
@pytest.mark.slow
def test_splits_and_labels() -> None:
    task = Gym("gcd,lcm", num_problems=60)
    splits = {split: task.problems(split) for split in ("train", "dev", "test")}
    assert 110 <= sum(map(len, splits.values())) <= 120  # a question that comes twice stays once
    for split, problems in splits.items():
        assert all(split_of(p.uid, dev_percent=5, test_percent=8) == split for p in problems)
    assert {p.meta["environment"] for p in splits["train"]} == {"gcd", "lcm"}
    assert {p.meta["category"] for p in splits["train"]} == {"arithmetic"}
    assert Gym("gcd", num_problems=60, seed=1).problems("train") != Gym("gcd", num_problems=60).problems(
        "train"
    )


@needs_gym
@pytest.mark.ci
def test_verdicts_and_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "DEADLINE_S", 20.0)  # right answers have time, also on a busy machine
    task = Gym("simple_integration,gcd,graph_color,puzzle24", num_problems=3)
    problems = [p for split in ("train", "dev", "test") for p in task.problems(split)]
    assert {p.meta["environment"] for p in problems} == {
        "simple_integration",
        "gcd",
        "graph_color",
        "puzzle24",
    }
    assert task.judge_many([(p, p.answer) for p in problems]) == [True] * len(problems)
    monkeypatch.setattr(gym, "DEADLINE_S", 0.7)
    task = Gym("simple_integration,gcd", num_problems=3)
    integral = next(p for p in problems if p.meta["environment"] == "simple_integration")
    gcd = next(p for p in problems if p.meta["environment"] == "gcd")
    mixed = [
        (integral, "9**9**9**9"),
        (gcd, gcd.answer),
        (gcd, None),
        (gcd, ""),
        (gcd, "0" * 50_000),
        (gcd, "no"),
    ]
    assert task.judge_many(mixed) == [False, True, False, False, False, False]
    assert task.is_correct(gcd, "\ud800") is False


@pytest.mark.ci
@needs_gym
def test_a_worker_that_dies_gives_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dead.py").write_text("def score(*args):\n    raise SystemError('gone')\n")

    class Dead(gym.GraderPool):
        def __init__(self, function: str, **options: object) -> None:
            super().__init__(f"{tmp_path / 'dead.py'}:score")

    monkeypatch.setattr(gym, "GraderPool", Dead)
    task = Gym("gcd", num_problems=2)
    problem = [p for split in ("train", "dev", "test") for p in task.problems(split)][0]
    assert task.is_correct(problem, "4") is None


def entry(answer: str, **metadata: object) -> str:
    return repr({"question": "q", "answer": answer, "metadata": metadata})


CODE = "__import__('pathlib').Path({!r}).touch()"


@needs_gym
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("string_insertion", entry("ABC")),
        ("spiral_matrix", entry("1 2 3")),
        ("binary_matrix", entry("0 1\n1 0")),
        ("n_queens", entry("Q _", valid_answers=["Q _"])),
        ("countdown", entry("1+2", numbers=[1, 2], target=3)),
        ("puzzle24", entry("4*6*1*1", numbers=[4, 6, 1, 1])),
        ("polynomial_multiplication", entry("x**2 + 1")),
        ("simple_integration", entry("x**2 + C", variable="x", integrand="2*x")),
        ("intermediate_integration", entry("x**2 + C", variable="x", integrand="2*x")),
    ],
)
def test_answers_are_never_run_as_code(tmp_path: Path, name: str, frozen: str) -> None:
    answer = ast.literal_eval(frozen)["answer"]
    assert score(name, frozen, answer) == 1.0
    for form in ("{}", "[{}]", "x + {}", "({} and 1)", "(1).__class__ or {}"):
        text = form.format(CODE.format(str(tmp_path / "breach")))
        assert score(name, frozen, text) < 1.0
    assert not (tmp_path / "breach").exists()


@needs_gym
@pytest.mark.parametrize(
    ("name", "frozen", "answer", "expected"),
    [
        ("puzzle24", entry("4*6*1*1", numbers=[4, 6, 1, 1]), "6*4*1/1", True),
        ("puzzle24", entry("4*6*1*1", numbers=[4, 6, 1, 1]), "8*3*1*1", False),  # the package pays this
        ("countdown", entry("-1+2+3", numbers=[1, 2, 3], target=4), "3+2-1", True),
        ("countdown", entry("-1+2+3", numbers=[1, 2, 3], target=4), "2+2", False),
        ("game_of_life_halting", entry("False"), "False", True),
        ("game_of_life_halting", entry("False"), "True", False),  # the package pays this, and anything else
        ("gsm_symbolic", entry("279"), "$279", True),
        ("gsm_symbolic", entry("279"), "279 or 379", False),  # the package pays this
        ("gsm_symbolic", entry("279"), "279-379", False),
        ("word_sorting", entry("a, b", sorted_words=["a", "b"]), "a, b, c", False),
        ("simple_integration", entry("x**2 + C", variable="x", integrand="2*x"), "x**2 + 7*C", True),
        ("simple_integration", entry("x**2 + C", variable="x", integrand="2*x"), "Integral(2*x, x)", False),
        (
            "simple_integration",
            entry("x**2 + C", variable="x", integrand="2*x"),
            "x*x + sin(x)**2 + cos(x)**2",
            True,
        ),
    ],
)
def test_scorers_that_pay_wrong_answers(name: str, frozen: str, answer: str, expected: bool) -> None:
    assert (score(name, frozen, answer) >= 1.0) is expected
