"""Every task: its gold answers are right in any spelling; near misses and hostile texts are not, and cost no time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from needs import SHARED, require

from whet.tasks.base import OPTIONS, ROW_SETS, TaskConfig, load_task
from whet.tasks.code import Code
from whet.tasks.selftest import LENGTH, hostile_answers, mutated_answer, rewritten_answers
from whet.types import Problem, Task

DATA = SHARED / "data"
GOLDEN = Path(__file__).parents[1] / "golden"
NUM_HOSTILE = 6
"""Problems of each task that meet the hostile answers."""

MINE = """
from whet.types import Problem, problem_uid
class Doubles:
    def problems(self, split):
        start = {"train": 0, "dev": 100, "test": 200}[split]
        return [Problem(uid=problem_uid("d", str(n)), task="d", prompt=f"2*{n}", answer=str(2 * n))
                for n in range(start, start + 50)]
    def is_correct(self, problem, answer):
        return answer is not None and answer.strip() == problem.answer
"""


ELSEWHERE = {*ROW_SETS, "hub", "humaneval_plus", "mbpp_plus", "livecodebench", "ifeval"}
"""Judged as jsonl and code are, or without gold answers: test_hub.py, test_code.py, test_ifeval.py."""
SIZES = {"gym": 20, "humaneval": 8, "mbpp": 8, "code": 4}


def rows(path: Path, *rows: object) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def make(name: str, folder: Path) -> Task:
    """Return a small instance of the task of a name."""
    path = ""
    if name in ("gsm8k", "math", "humaneval"):
        part = "code" if name == "humaneval" else name
        path = str((DATA if DATA.is_dir() else GOLDEN) / part)
    elif name == "mbpp":
        require("shared/data/code")
        path = str(DATA / "code")
    elif name == "code":
        case = {"tests": ["assert f(2) == 3"], "names": ["f"], "solution": "def f(x):\n    return x + 1"}
        path = rows(folder / "p.jsonl", *({"prompt": f"Write f, number {n}."} | case for n in range(40)))
    elif name == "gym":
        pytest.importorskip("reasoning_gym")
        return load_task(TaskConfig(name=name, path="chain_sum,gsm_symbolic", num_problems=2))
    elif name == "jsonl":
        answers = [
            "1/2",
            "1,000",
            "-3.5",
            r"\frac{2}{3}",
            "(1, -2)",
            "blue",
            r"\sqrt{2}",
            "x^2+1",
            "12%",
            "[0, 1)",
        ]
        path = rows(
            folder / "a.jsonl", *({"prompt": f"p{n}{a}", "answer": a} for n in range(9) for a in answers)
        )
    elif name == "choice":
        lists = (["red", "5", "7 or 5", "none of these"], ["Paris", "Rome"], ["I", "B", "A"])
        cases = ({"question": f"q{n}", "choices": c, "answer": n % len(c)} for n in range(60) for c in lists)
        path = rows(folder / "c.jsonl", *cases)
    elif name == "yes_no":
        path = rows(folder / "y.jsonl", *({"question": f"q{n}?", "answer": n % 2 == 0} for n in range(90)))
    elif name.startswith("chess"):
        require("stockfish")
    elif name == "mixture":
        weights = {"countdown": 1.0, "letters": 1.0}
        return load_task(TaskConfig(name=name, weights=weights, num_problems=100))
    elif name == "mine":
        (folder / "mine.py").write_text(MINE)
        return load_task(TaskConfig(name=f"{folder / 'mine.py'}:Doubles"))
    small = 200 if "num_problems" in OPTIONS[name] else 0
    return load_task(TaskConfig(name=name, path=path, num_problems=small))


OWN = [name for name in OPTIONS if name not in ELSEWHERE]
LONG = ("gym", "mbpp", "humaneval", "code")  # a hundred tasks; programs that run


@pytest.mark.some(6)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] * (name in LONG)) for name in (*OWN, "mine")]
)
def test_every_task_judges_itself(name: str, tmp_path: Path) -> None:
    task = make(name, tmp_path)
    problems = [problem for split in ("train", "dev", "test") for problem in task.problems(split)]
    problems = sorted(problems, key=lambda problem: problem.uid)[: SIZES.get(name, 300)]
    assert problems
    kinds: dict[str, Problem] = {problem.prompt[:3]: problem for problem in problems}
    for problem in problems:
        assert task.is_correct(problem, problem.answer) is True, problem
        assert task.is_correct(problem, None) is False
        wrong = getattr(task, "wrong_answer", lambda p: mutated_answer(p.answer))(problem)
        assert task.is_correct(problem, wrong) is False, problem
        if isinstance(task, Code):
            assert all(task.is_correct(problem, text) for text in task.other_spellings(problem))
            continue
        for spelling in rewritten_answers(problem.answer)[: 1 if name in ("gym", "mine") else None]:
            assert name == "gym" or task.is_correct(problem, spelling) is True, (problem, spelling)
    for problem in [*kinds.values()][: 1 if name in SIZES else NUM_HOSTILE]:
        wrong = getattr(task, "wrong_answer", lambda _: None)(problem)
        for what, text in hostile_answers(problem, wrong):
            began = time.process_time()
            assert task.is_correct(problem, text) is False, (what, text[:80], problem)
            assert time.process_time() - began < 1, what  # CPU time of this process: load does not count


def test_mutations_differ_and_rewritings_do_too() -> None:
    answers = ["0", "9", "90", "-7", "0.05", "1/2", "x", "Z", "yes", "No", "blue", r"\pi", "(3, -2)", "1,000"]
    assert [mutated_answer(answer) for answer in answers] == [
        *("1", "8", "80", "-8", "0.06", "2/2", "y", "Y", "no", "Yes", "blueq", r"\piq", "(4, -2)", "2,000")
    ]
    assert rewritten_answers("1200") == [
        *(" 1200\n", "1,200", "1200.0", "$1200$", r"\boxed{1200}", r"\text{1200}")
    ]
    assert rewritten_answers("-1/4") == [" -1/4\n", r"-\frac{1}{4}", r"-\dfrac{1}{4}", "-0.25"]
    assert rewritten_answers(r"\frac{1}{3}") == [" \\frac{1}{3}\n", "1/3", r"\dfrac{1}{3}"]
    assert rewritten_answers("0.5") == [" 0.5\n", "0.50", "$0.5$", r"\frac{1}{2}"]
    assert rewritten_answers("B") == [" B\n", "(B)", "B.", "B)"]
    assert rewritten_answers("blue") == [" blue\n"]
    assert rewritten_answers("1/0") == [" 1/0\n"]


def test_hostile_answers_never_hold_the_gold_answer() -> None:
    problem = Problem(uid="a", task="t", prompt="5 or 7", answer="NaN")
    texts = dict(hostile_answers(problem))
    assert "NaN" not in texts.values()
    assert texts["empty"] == ""
    assert texts["near miss"] == "NaNq"
    assert max(map(len, texts.values())) >= LENGTH
    assert len(texts) >= 30
