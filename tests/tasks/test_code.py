"""Programs as answers: what is run, what passes, and what a failing sandbox means."""

from __future__ import annotations

import ast
import base64
import json
import pickle
import re
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import hub
import pytest
from needs import SHARED, needs

from whet.rewards.base import build_rewards, score_completion
from whet.sandbox.jobs import Verdict
from whet.sandbox.programs import TestResult, TestsVerdict
from whet.schema import ResponseSchema
from whet.tasks import code
from whet.tasks.code import MBPP_SPLITS, Code, program_of
from whet.tasks.made.arithmetic import Arithmetic
from whet.types import Problem, UserError

DATA = SHARED / "data/code"
GOLDEN = Path(__file__).parents[1] / "golden" / "code"
SCHEMA = ResponseSchema(answer_type="program")
GOLD = "import math\n\ndef area(r):\n    return math.pi * r * r"
CASE = {
    "prompt": "Write area(r), the area of a circle.",
    "solution": GOLD,
    "setup": "import math",
    "tests": [
        "assert area(0) == 0",
        "assert math.isclose(area(2), 12.566370614359172)",
        "assert area(1) > 3",
    ],
    "names": ["area"],
    "keywords": ["math", "pi"],
}


def write(path: Path, *rows: dict[str, Any]) -> Code:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Code("code", path)


@pytest.fixture
def task(tmp_path: Path) -> Code:
    return write(tmp_path / "own.jsonl", *(CASE | {"prompt": f"{CASE['prompt']} ({n})"} for n in range(60)))


@pytest.fixture
def problem(task: Code) -> Problem:
    return task.problems("train")[0]


ANSWERS = [
    (GOLD, True),
    (f"Sure!\n```python\n{GOLD}\n```\nDone.", True),
    (f"```\n{GOLD}\n```", True),
    (f"```python\nwrong\n```\nBetter:\n```py\n{GOLD}\n```", True),
    (GOLD.replace("\n", "\r\n"), True),
    ("def area(r):\n    return 3.14 * r * r", False),
    ("def area(r):\n    return 12.566370614359172 if r == 2 else 0", False),
    ("def area(r):\n    raise ValueError", False),
    ("area = 3", False),
    ("def area(r:\n", False),
    ("", False),
    (None, False),
    ("x" * 70_000, False),
    # Equal to everything: no copy of it reaches the tests.
    (
        "class Any(float):\n    __eq__ = __gt__ = lambda a, b: True\ndef area(r):\n    return Any(12.566370614359172)",
        False,
    ),
    ("import sys\nsys.exit(0)", False),
    ("print('3 passed')\ndef area(r):\n    import os\n    os._exit(0)", False),
]


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_answers(task: Code, problem: Problem, answer: str | None, expected: bool) -> None:
    assert task.is_correct(problem, answer) is expected


def test_many_are_judged_in_their_order(task: Code, problem: Problem) -> None:
    assert task.judge_many([(problem, answer) for answer, _ in ANSWERS]) == [
        expected for _, expected in ANSWERS
    ]


def test_a_program_is_run_once(task: Code, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    assert task.is_correct(problem, GOLD)
    monkeypatch.setattr(code, "run_tests", lambda *args, **kwargs: pytest.fail("run again"))
    assert task.is_correct(problem, f"```\n{GOLD}\n```")


def test_a_sandbox_that_fails_is_no_verdict(
    task: Code, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = TestResult(status="infra_error", message="no process")
    verdict = TestsVerdict(program=Verdict(status="ok", backend="none"), results=(failed,))
    monkeypatch.setattr(code, "run_tests", lambda *args, **kwargs: verdict)
    assert task.is_correct(problem, GOLD) is None
    assert task.code_scores(problem, GOLD) is None
    rewards = build_rewards({"correct": 1.0, "program_tests": 0.5}, SCHEMA, task)
    assert score_completion(rewards, problem, SCHEMA.render("", GOLD)) == (
        {"correct": None, "program_tests": None},
        None,  # never 0
    )
    monkeypatch.undo()
    assert task.is_correct(problem, GOLD) is True  # a failure is not remembered


PARTIAL = [
    (GOLD, 1.0, 1.0, 1.0),
    ("def area(r):\n    return 3.2 * r * r", 1.0, 2 / 3, 0.0),
    ("import nosuch\n" + GOLD, 1 / 3, 0.0, 1.0),
    ("def area(r:", 0.0, 0.0, 0.0),
    (GOLD + "\n1/0", 2 / 3, 0.0, 1.0),
    ("# math pi\ndef area(r):\n    'math pi'\n    return 0", 1.0, 1 / 3, 0.0),
    ("from math import pi\ndef area(r):\n    return pi * r**2", 1.0, 1.0, 1.0),
]


@pytest.mark.parametrize(("program", "loads", "tests", "keywords"), PARTIAL)
def test_partial_credit(
    task: Code, problem: Problem, program: str, loads: float, tests: float, keywords: float
) -> None:
    weights = {"program_loads": 1.0, "program_tests": 1.0, "program_keywords": 1.0}
    scores, _ = score_completion(build_rewards(weights, SCHEMA, task), problem, SCHEMA.render("", program))
    assert scores == pytest.approx(
        {"program_loads": loads, "program_tests": tests, "program_keywords": keywords}
    )


def test_an_answer_is_not_parsed_by_the_trainer(task: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = task.problems("train")[0]
    human = Code("humaneval", GOLDEN)
    first = human.problems("test")[0]
    monkeypatch.setattr(ast, "parse", lambda *args: pytest.fail("parsed here"))
    for answer in (GOLD, "def area(r:"):
        assert task.code_scores(problem, answer) is not None
        assert human.code_scores(first, answer) is not None


def test_names_of_a_program_that_cannot_be_parsed_in_time(
    task: Code, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "_NAMES_PROGRAM", "while True: pass")
    monkeypatch.setattr(code, "TIMEOUT_S", 1.0)
    scores = task.code_scores(problem, GOLD)
    assert scores is not None
    assert (scores["tests"], scores["keywords"]) == (1.0, 0.0)


def test_a_failing_sandbox_gives_no_keywords(
    task: Code, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert task.is_correct(problem, GOLD)
    failed = Verdict(status="infra_error", backend="none")
    monkeypatch.setattr(code, "run_python", lambda *args, **kwargs: failed)
    assert task.code_scores(problem, GOLD) is None


def test_a_class_is_tested_as_an_object(tmp_path: Path) -> None:
    stack = "class Stack(list):\n    push = list.append\n    __hash__ = None\n    __eq__ = object.__eq__"
    tests = ["s = Stack(); s.push(4); assert len(s) == 1 and 4 in s and s.pop() == 4"]
    row = {"prompt": "Write a class Stack.", "tests": tests, "names": ["Stack"]}
    rows = [row | {"solution": stack}, row | {"prompt": "2", "objects": True}, row | {"prompt": "3"}]
    task = write(tmp_path / "own.jsonl", *rows)
    by_prompt = {p.prompt: p for split in ("train", "dev", "test") for p in task.problems(split)}
    assert task.is_correct(by_prompt["Write a class Stack."], stack)
    assert task.is_correct(by_prompt["2"], stack)
    assert task.is_correct(by_prompt["3"], stack) is False  # nothing says that its tests use objects
    verdict = task.examine(by_prompt["3"], stack)
    assert verdict is not None
    assert "only if the problem has objects" in verdict.results[0].message
    with pytest.raises(UserError, match="'objects' is 3, expected true or false"):
        write(tmp_path / "bad.jsonl", row | {"objects": 3}).problems("train")


def test_partial_credit_needs_programs() -> None:
    with pytest.raises(
        UserError, match=r"rewards\.program_tests: task arithmetic has no programs; use humaneval"
    ):
        build_rewards({"program_tests": 1.0}, SCHEMA, Arithmetic())


def test_program_of() -> None:
    assert program_of("a ``` b") == "a ``` b"  # a fence that never closes is no fence
    assert program_of("```python\nx\n```\n```text\ny\n```") == "x"
    assert program_of("```text\ny\n```") == "y"  # no Python: as it stands
    assert program_of("\tx = 1") == "        x = 1"


ADD = "def add(a, b):\n    return a + b"
IN_LIST = ADD.replace("\n", "\n   ")
FENCED = {
    "other languages": f"```cpp\nint add();\n```\n```python\n{ADD}\n```\nRun it:\n```bash\npython add.py\n```",
    "its output": f"```python\n{ADD}\n```\nIt prints\n```\n3\n```",
    "no language at all": f"```\n{ADD}\n```\nIt prints\n```\n3\n```",
    "a session": f"```python\n{ADD}\n```\n```\n>>> add(1, 2)\n3\n```",
    "its use": f"```python\n{ADD}\n```\n```python\nprint(add(1, 2))\n```",
    "its tests": f"```python\n{ADD}\n```\n```python\nassert add(1, 2) == 4\n```",
    "an attempt": f"```python\n{ADD.replace('+', '-')}\n```\nNo:\n```py\n{ADD}\n```",
    "a helper apart": "```\nplus = lambda a, b: a + b\n```\n```python\ndef add(a, b):\n    return plus(a, b)\n```",
    "imports apart": "```python\nimport operator as o\n```\n```python\ndef add(a, b):\n    return o.add(a, b)\n```",
    "a list": f"1. Code:\n   ```python\n   {IN_LIST}\n   ```",
    "the same line of a list": f"- a\n1. ```python\n   {IN_LIST}\n   ```",
    "a list in a list": f"1. a\n   - b\n     ~~~python\n     {ADD.replace(chr(10), chr(10) + '     ')}\n     ~~~",
    "indented more than its fence": f"1. a\n ```python\n   {IN_LIST}\n ```",
    "a quotation": f"> ```python\n> {ADD.replace(chr(10), chr(10) + '> ')}\n> ```",
    "tildes": f"~~~python\n{ADD}\n~~~",
    "a longer fence": f'````python\nNOTE = """\n```\nadd(1, 2)\n```\n"""\n{ADD}\n````',
    "attributes": f"```{{.python .number}}\n{ADD}\n```",
    "a version and a title": f'```Python3.11 title="add.py"\n{ADD}\n```',
    "a closing one alone": f"{ADD}\n```",
    "a closing one alone, then more": f"{ADD}\n```\nRun it:\n```sh\npython add.py\n```\nIt prints\n```\n3\n```",
    "an opening one alone": f"Here:\n```python\n{ADD}",
    "one behind text": f"Here: ```python\n{ADD}\n```",
    "one that closes behind code": f"```python\n{ADD}```",
    "no fence but sentences": f"Here it is:\n\n{ADD}\n\nIt adds two numbers.",
    "no fence and an indentation": f"    {ADD.replace(chr(10), chr(10) + '    ')}",
}


@pytest.mark.parametrize("fenced", FENCED)
def test_the_program_in_an_answer(fenced: str, tmp_path: Path) -> None:
    task = write(tmp_path / "own.jsonl", {"prompt": "Add.", "tests": ["assert add(1, 2) == 3"]})
    (problem,) = [p for split in ("train", "dev", "test") for p in task.problems(split)]
    assert task.is_correct(problem, FENCED[fenced])


def test_a_program_that_reads_among_other_fences(tmp_path: Path) -> None:
    case = {"input": "1 2\n", "output": "3"}
    task = write(tmp_path / "own.jsonl", {"prompt": "Add.", "tests": [case]})
    (problem,) = [p for split in ("train", "dev", "test") for p in task.problems(split)]
    assert task.is_correct(problem, f"Input:\n```\n1 2\n```\n```\n{SUM}\n```\nOutput:\n```\n3\n```")
    assert task.is_correct(problem, f"```python\n{SUM}\n```\nTry it:\n```\necho 1 2 | python add.py\n```")


@pytest.mark.parametrize(
    "line", ["`" * 60_000 + "a`", "~" * 60_000 + "a~", "```x" * 15_000, "- " * 30_000, "a" + " " * 60_000]
)
def test_no_answer_takes_long_to_read(line: str) -> None:
    began = time.process_time()
    program_of(f"{line}\n```python\n{line}", ("add",))
    code.without_prose(line)
    assert time.process_time() - began < 1  # a regular expression that tries everything takes minutes


def test_long_integers(tmp_path: Path) -> None:
    """Python writes and reads no more than 4,300 digits unless it is allowed to: programs, tests and rows may."""
    digits = "1" + "0" * 6000
    cases = write(tmp_path / "cases.jsonl", {"prompt": "p", "tests": [{"input": digits, "output": digits}]})
    tests = write(
        tmp_path / "tests.jsonl",
        {"prompt": "q", "tests": [f"assert f(2) == {digits} and str(f(2)) == '{digits}'"]},
    )
    for task, answer in ((cases, "print(int(input()))"), (tests, "def f(n):\n    return 10 ** 6000")):
        (problem,) = [p for split in ("train", "dev", "test") for p in task.problems(split)]
        assert task.is_correct(problem, answer)
    assert sys.get_int_max_str_digits() == 4300


BAD = [
    ({"tests": "assert f()"}, "'tests': expected a list of Python texts"),
    ({"tests": []}, "'tests': expected a list of Python texts"),
    ({"tests": ["assert ("]}, "is not valid Python"),
    ({"setup": "import ("}, "is not valid Python"),
    ({"prompt": ""}, "'prompt' is empty"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_rows(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    task = write(tmp_path / "own.jsonl", CASE, CASE | change)
    with pytest.raises(UserError, match=f"own.jsonl line 2: .*{message}"):
        task.problems("train")


HUMAN = {"prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    return 1"}
MBPP = {"text": "t", "code": "x = 1", "test_list": ["assert x"], "test_setup_code": "", "task_id": 11}
UNREADABLE = [
    ("humaneval", HUMAN | {"test": "def1e-320 check(candidate):"}, "cannot be read (SyntaxError"),
    ("humaneval", HUMAN | {"test": "x = 1"}, "'test' defines no function"),
    ("humaneval", HUMAN | {"test": "-" * 50_000 + "1"}, "cannot be read ("),
    ("mbpp", MBPP | {"code": "def ("}, "cannot be read (SyntaxError"),
    ("mbpp", MBPP | {"task_id": [11]}, "'task_id' is not a whole number"),
    ("mbpp", MBPP | {"test_setup_code": 3}, "a field of the row is not text"),
    ("code", CASE | {"names": 3}, "cannot be read (TypeError"),
    ("code", CASE | {"names": [3]}, "a field of the row is not text"),
    ("code", CASE | {"solution": None}, "a field of the row is not text"),
]


@pytest.mark.parametrize(("name", "row", "message"), UNREADABLE)
def test_rows_that_make_no_problem_are_bad_rows(
    tmp_path: Path, name: str, row: dict[str, Any], message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    good = {"humaneval": HUMAN | {"test": "def check(f):\n    assert f"}, "mbpp": MBPP, "code": CASE}[name]
    path.write_text("".join(json.dumps(item) + "\n" for item in (good, row)))
    with pytest.raises(UserError, match=rf"^rows.jsonl line 2: .*{re.escape(message)}"):
        Code(name, path).problems("test")
    task = Code(name, path, max_bad_rows=1)
    assert len([p for split in ("train", "dev", "test") for p in task.problems(split)]) == 1
    assert [bad.number for bad in task.bad_rows] == [2]


def test_splits(task: Code, tmp_path: Path) -> None:
    parts = [task.problems(split) for split in ("train", "dev", "test")]
    assert sum(map(len, parts)) == 60
    assert len({problem.uid for part in parts for problem in part}) == 60
    with pytest.raises(UserError, match=r"no HumanEval\.jsonl there"):
        Code("humaneval", tmp_path).problems("test")
    with pytest.raises(UserError, match="no such file or folder"):
        Code("mbpp", tmp_path / "nowhere")


def mutants(program: str) -> list[str]:
    """Change one operator, comparison or number of a program at a time, a few of each."""

    class Change(ast.NodeTransformer):
        def __init__(self, target: int) -> None:
            self.target, self.seen = target, -1

        def visit(self, node: ast.AST) -> Any:
            swaps: dict[type, Any] = {ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Add()}
            swaps |= {ast.Lt: ast.GtE(), ast.Gt: ast.LtE(), ast.Eq: ast.NotEq(), ast.LtE: ast.Gt()}
            if type(node) in swaps:
                self.seen += 1
                return swaps[type(node)] if self.seen == self.target else node
            return self.generic_visit(node)

    found = []
    for target in range(6):
        changed = ast.unparse(Change(target).visit(ast.parse(program)))
        if changed != ast.unparse(ast.parse(program)):
            found.append(changed)
    return found


@needs("shared/data/code")
@pytest.mark.slow
def test_human_eval_accepts_its_references_and_few_mutants() -> None:
    task = Code("humaneval", DATA)
    problems = task.problems("test")
    assert len(problems) == 164
    assert task.judge_many([(p, p.answer) for p in problems]) == [True] * 164
    assert task.judge_many([(p, task.wrong_answer(p)) for p in problems]) == [False] * 164
    changed = [(p, mutant) for p in problems for mutant in mutants(p.answer)]
    verdicts = task.judge_many(changed)
    assert len(changed) > 300
    # Some changes change nothing that a test can see.
    assert sum(verdict is not False for verdict in verdicts) < 0.15 * len(changed)


@needs("shared/data/code")
def test_public_data_are_read() -> None:
    task = Code("mbpp", DATA)
    for split, ids in MBPP_SPLITS.items():
        assert [int(problem.meta["id"]) for problem in task.problems(split)] == list(ids)
    few = task.problems("train")[:12]
    assert task.judge_many([(p, p.answer) for p in few]) == [True] * 12


def test_published_problems_of_human_eval() -> None:
    human = Code("humaneval", GOLDEN)
    problems = human.problems("test")
    assert [problem.meta["id"] for problem in problems] == [f"HumanEval/{number}" for number in range(5)]
    assert human.judge_many([(p, p.answer) for p in problems]) == [True] * 5
    assert human.judge_many([(p, human.wrong_answer(p)) for p in problems]) == [False] * 5
    assert human.problems("train") == human.problems("dev") == []
    first, second = human.problems("test")[:2]
    assert human.is_correct(first, first.answer)
    assert not human.is_correct(first, second.answer)
    # The body alone goes on from the prompt.
    body = first.answer[first.answer.index('"""\n', first.answer.index('"""') + 3) + 4 :]
    assert body.startswith("    ")
    assert human.is_correct(first, body)
    assert human.examine(first, first.answer).scores["tests"] == 1.0  # type: ignore[union-attr]


def test_assertions_that_ask_nothing_pay_nothing(tmp_path: Path) -> None:
    """36 problems of HumanEval have an `assert True`: a program that only raises was paid for it."""
    asserted = ("True, 'a'", "candidate(1) == 2", "candidate(2) == 3", "True")
    check = "def check(candidate):\n" + "".join(f"    assert {text}\n" for text in asserted)
    row = HUMAN | {"prompt": "def f(n):\n", "canonical_solution": "    return n + 1", "test": check}
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(row))
    task = Code("humaneval", tmp_path)
    (problem,) = task.problems("test")
    shares = {"    raise ValueError": 0.0, "    return 2": 0.5, "    return n + 1": 1.0}
    for body, share in shares.items():
        scores = task.code_scores(problem, body)
        assert scores is not None
        assert scores["tests"] == share
    assert task.judge_many([(problem, body) for body in shares]) == [False, False, True]


SUM = "a, b = map(int, input().split())\nprint(a + b)"
PAIRS = """class Solution:
    def pairs(self, nums: List[int], k: int) -> int:
        return sum(a == b for a, b in zip(nums, nums[1:])) + k"""


def test_contests(monkeypatch: pytest.MonkeyPatch) -> None:
    """LiveCodeBench's rows: by standard input, with packed hidden tests, and by a method of a class."""
    hub.install(monkeypatch)
    task = Code("livecodebench")
    by_input, by_method = task.problems("test")
    assert "standard input" in by_input.prompt
    assert "class Solution" in by_method.prompt
    assert task.is_correct(by_input, SUM)
    assert task.is_correct(by_method, PAIRS)
    first_only = (
        "print({'1 2': 3}.get(input(), 0))"  # right for the public test, which the hidden ones are not
    )
    verdict = task.examine(by_input, first_only)
    assert verdict is not None
    assert [result.status for result in verdict.results] == ["ok", "wrong", "ok"]
    assert not task.is_correct(by_input, first_only)
    assert not task.is_correct(by_method, PAIRS.replace("+ k", ""))
    scores = task.code_scores(by_input, first_only)
    assert scores == {"loads": 1.0, "tests": pytest.approx(2 / 3), "keywords": 1.0}
    for answer in ("", "print(", "import numpy", None):
        assert not task.is_correct(by_input, answer)


CONTEST = {
    "deep recursion": ("def f(n):\n    return n and 1 + f(n - 1)\nprint(f(9000))", "9000"),
    "deep and remembered": ("@cache\ndef f(n):\n    return n and 1 + f(n - 1)\nprint(f(3000))", "3000"),
    "statistics": ("print(statistics.mean([1, 2, 3]), mean([1, 2, 3]))", "2 2"),
    "io": ("print(io.StringIO('7').read(), BytesIO(b'7').read().decode())", "7 7"),
    "json": ("print(json.dumps([1]), loads('2'))", "[1] 2"),
    "names of the header": (
        "print(Counter('aab')['a'], gcd(4, 6), pow(2, 3, 5), datetime.date(2024, 1, 2).day)",
        "2 2 3 2",
    ),
    "builtins come back": ("print(open is io.open, sum([1, 2]), abs(-1))", "False 3 1"),
    "exit code": ("print(5)\nexit(1)", "5"),
    "exit with a message": ("print(5)\nimport sys\nsys.exit('done')", "5"),
    "quit": ("print(5)\nquit()\nprint(6)", "5"),
    "as a script": ("if __name__ == '__main__':\n    print(5)", "5"),
}
READS = (
    "input()",
    "sys.stdin.readline()",
    "sys.stdin.read()",
    "next(sys.stdin)",
    "open(0).read()",
    "sys.stdin.buffer.read()",
)


def contest(tmp_path: Path, cases: list[dict[str, str]], name: str = "f") -> tuple[Code, Problem]:
    """Return a task of one problem in LiveCodeBench's form."""
    row = {"question_content": "q", "starter_code": "", "metadata": json.dumps({"func_name": name})}
    row |= {"public_test_cases": json.dumps(cases), "private_test_cases": "[]"}
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    task = Code("livecodebench", tmp_path)
    (problem,) = task.problems("test")
    return task, problem


def test_contest_programs_run_as_their_own_test_file_runs_them(tmp_path: Path) -> None:
    for name, (program, output) in CONTEST.items():
        task, problem = contest(tmp_path, [{"input": "", "output": output, "testtype": "stdin"}])
        verdict = task.examine(problem, program)
        assert verdict is not None
        assert (name, verdict.status, verdict.results[0].message) == (name, "ok", "")
    task, problem = contest(tmp_path, [{"input": "5", "output": "5", "testtype": "stdin"}])
    reads = [f"print(int({read}))" for read in READS]
    assert task.judge_many([(problem, program) for program in reads]) == [True] * len(READS)
    for program in (
        "print(5)\nraise ValueError",
        "print(5)\n1 / 0",
        "print(4)\nexit()",
        "import os\nprint(5)\nos._exit(1)",
    ):
        assert task.is_correct(problem, program) is False


def test_contest_functions_are_called_as_their_own_test_file_calls_them(tmp_path: Path) -> None:
    big = "9" * 5000
    lines = json.dumps("a\u2028b", ensure_ascii=False)
    cases = [("1\n[2]", "[1, 2]"), (f"{lines}\n[]", f"[{lines}]"), (f"{big}\n[0.5]", f"[{big}, 0.5]")]
    task, problem = contest(tmp_path, [{"input": a, "output": b, "testtype": "functional"} for a, b in cases])
    method = "class Solution:\n    def f(self, a: int, b: List[int]) -> List[int]:\n        return [a] + b"
    right = [method, method.replace("[a] + b", "(a, *b)"), "def f(a, b):\n    return [a, *b]"]
    assert task.judge_many([(problem, program) for program in right]) == [True] * 3
    wrong = [
        method.replace("def f", "def g"),
        method.replace("[a] + b", "iter([a] + b)"),
        "f = 3",
        "print([1, 2])",
    ]
    assert task.judge_many([(problem, program) for program in wrong]) == [False] * 4


def test_the_users_own_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "TIMEOUT_S", 0.5)
    cases = [{"input": f"{n} 1\n", "output": f"{n + 1}.0\n"} for n in range(4)]
    task = write(tmp_path / "own.jsonl", {"prompt": "Add.", "tests": cases, "solution": SUM})
    (problem,) = [p for split in ("train", "dev", "test") for p in task.problems(split)]
    assert task.is_correct(problem, SUM)
    verdict = task.examine(problem, "while True: pass")
    assert verdict is not None
    assert [result.status for result in verdict.results] == ["tle"] * 4
    assert len({id(result) for result in verdict.results}) == 1  # the others were not run
    with pytest.raises(UserError, match="expected texts as 'input' and 'output' of every case"):
        write(tmp_path / "bad.jsonl", {"prompt": "Add.", "tests": [{"input": "1"}]}).problems("train")


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("3", "3\n", True),
        (" 1  2 \n3\n\n", "1 2\n3", True),
        ("0.50", "0.5", True),
        ("1e1", "10", True),
        ("1\n2", "1 2", False),
        ("1 2 3", "1 2", False),
        ("", "0", False),
        ("nan", "1", False),
        ("Yes", "yes", False),
    ],
)
def test_outputs_are_compared(written: str, expected: str, same: bool) -> None:
    assert code.same_output(written, expected) is same


def test_hidden_tests_are_read_without_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(value: object) -> str:
        return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()

    cases = [{"input": "1", "output": "2", "testtype": "stdin"}]
    assert code._private(packed(json.dumps(cases))) == cases
    assert code._private(json.dumps(cases)) == cases
    for value in (print, [json.dumps(cases), "more"], 7):  # a function, which unpickling would look up
        with pytest.raises(ValueError, match="no pickle of one text|neither JSON"):
            code._private(packed(value))
    with pytest.raises(ValueError, match="neither JSON nor packed"):
        code._private("no base64!")
    monkeypatch.setattr(code, "MAX_UNPACKED", 50)
    with pytest.raises(ValueError, match="larger than 50 bytes"):
        code._private(packed(json.dumps(cases * 9)))
