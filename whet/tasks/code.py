"""Programming problems: HumanEval, MBPP, contests, the user's own. Programs run in the sandbox; their tests run in
another process, or compare what the program writes."""

from __future__ import annotations

import ast
import base64
import binascii
import inspect
import json
import pickletools
import re
import threading
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Any

from whet.sandbox.graders.graders import num_cores
from whet.sandbox.jobs import Verdict
from whet.sandbox.programs import TestResult, TestsVerdict, run_python, run_tests
from whet.schema import AnswerType
from whet.tasks.hub import TRAIN, Part, read_hub
from whet.tasks.read import BadRow, Check, Row, check_split, is_hub_name, read_jsonl, select_split
from whet.tasks.sets import HUB_SETS
from whet.types import Problem, UserError, problem_uid

TIMEOUT_S = 5.0
"""Time limit for loading a program, and for each of its tests."""
MEMORY_MIB = 512
MAX_CHARACTERS = 64 * 1024
"""A longer answer is wrong and is not run."""
NUM_REMEMBERED = 4096
"""Cached verdicts: metrics and several rewards ask about the same program."""
MBPP_SPLITS = {"test": range(11, 511), "dev": range(511, 601), "train": range(601, 975)}
"""The authors' split by task id; 1 to 10 are for prompts."""
TEST_PERCENT = 5
FENCE = "```"
_PARSING = threading.Lock()
LOADED = ("syntax", "imports", "runs")
MAX_UNPACKED = 256 * 2**20
"""Private tests of a contest problem that are larger (in bytes, unpacked) make a bad row."""
CONTEST_IMPORTS = """from typing import *
from collections import *
from itertools import *
from functools import *
from heapq import *
from bisect import *
from string import *
from operator import *
from math import *
import sys, re, math, random, string, datetime, bisect, heapq, functools, itertools, collections, operator, copy
"""
"""What LiveCodeBench puts above every answer (its numpy aside, which the sandbox does not have)."""
NUMPY = """import types as _types
def _allclose(a, b, rtol=1e-05, atol=1e-08, equal_nan=False):
    if isinstance(a, (list, tuple)) or isinstance(b, (list, tuple)):
        both = isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b)
        return both and all(_allclose(x, y, rtol, atol) for x, y in zip(a, b))
    return a == b or abs(a - b) <= atol + rtol * abs(b)
def _assert_allclose(a, b, rtol=1e-07, atol=0):
    assert _allclose(a, b, rtol, atol)
class _Array:
    pass
np = _types.SimpleNamespace(ndarray=_Array, float64=float, float32=float, allclose=_allclose)
np.testing = _types.SimpleNamespace(assert_allclose=_assert_allclose)
"""
"""The four names of numpy that the tests of EvalPlus use, for numbers and lists: the sandbox has no numpy."""


@dataclass(frozen=True, slots=True)
class Exam:
    """The tests of one problem.

    Attributes:
        setup: Python that runs before the tests.
        tests: Pieces of Python that raise when the program is wrong.
        names: Names that the tests take from the program; () for all that they do not define themselves.
        prefix: Start of the function, put before an answer that only continues it.
        keywords: Words that the program should use, for partial credit.
        cases: Pairs of standard input and expected output, for a whole program; without `tests`.
        header: Imports that stand above every answer.
        has_objects: Whether the tests use the program's objects, as tests of a class do; see `run_tests`.
    """

    setup: str
    tests: tuple[str, ...]
    names: tuple[str, ...] = ()
    prefix: str = ""
    keywords: tuple[str, ...] = ()
    cases: tuple[tuple[str, str], ...] = ()
    header: str = ""
    has_objects: bool = False


class Code:
    """Problems whose answer is a program that passes tests.

    The answer may stand in a Markdown fence. It runs isolated (docs/sandbox.md) and never sees the expected results.

    Attributes:
        name: 'humaneval', 'humaneval_plus', 'mbpp', 'mbpp_plus', 'livecodebench' or 'code'.
        needs_gold: False: the tests judge.
        answer_type: 'program'.
        seconds_per_answer: Upper bound of the time to judge an answer.
        bad_rows: Rows skipped so far.
        num_repeated: Repeated problems so far; they are kept.
    """

    answer_type: AnswerType = "program"
    seconds_per_answer = 3 * TIMEOUT_S
    needs_gold = False

    def __init__(
        self, name: str, path: str | Path = "", *, config: str = "", max_rows: int = 0, max_bad_rows: int = 0
    ) -> None:
        """Set the location of the data.

        Args:
            name: A key of `READERS`. 'humaneval' (HumanEval.jsonl) and most others have only a test split. 'code':
                rows with prompt, tests (a list of Python texts, or of objects with input and output), and maybe
                solution, setup, names, keywords, objects.
            path: The file, or the folder that holds it (train.jsonl and test.jsonl for 'code'); .gz too. Or a hub name;
                '' for that of `whet.tasks.sets`.
            config: Configuration on the hub.
            max_rows: Rows to stream from the hub; 0 downloads all.
            max_bad_rows: Bad rows that are tolerated.
        """
        self.name = name
        self._path = Path(path)
        self._hub: dict[str, Part] = {}
        if name in HUB_SETS and (not str(path) or is_hub_name(str(path))):
            parts = HUB_SETS[name].parts
            self._hub = {ours: replace(part, path=str(path) or part.path) for ours, part in parts.items()}
        elif is_hub_name(str(path)):
            self._hub = {TRAIN: Part(path=str(path), split=TRAIN)}
        elif not str(path) or not self._path.exists():
            raise UserError(f"{str(path)!r}: no such file or folder; check --task.path")
        if config:
            self._hub = {ours: replace(part, configs=(config,)) for ours, part in self._hub.items()}
        self._max_rows, self._max_bad_rows = max_rows, max_bad_rows
        self._files: dict[Path | Part, list[tuple[Problem, Row]]] = {}
        self._exams: dict[str, Exam] = {}
        self._verdicts: OrderedDict[tuple[str, str], TestsVerdict] = OrderedDict()
        self._names: OrderedDict[str, set[str]] = OrderedDict()
        self.bad_rows: list[BadRow] = []
        self.num_repeated = 0

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of 'train', 'dev' or 'test'; HumanEval and other benchmarks have only 'test'."""
        check_split(split)
        if self._hub and self.name in HUB_SETS:
            part = self._hub.get(split)
            return [problem for problem, _ in self._part(part)] if part is not None else []
        if self._hub:
            found = [problem for problem, _ in self._part(self._hub[TRAIN])]
            return select_split(found, split, test_percent=TEST_PERCENT)
        if self.name in TEST_FILES:
            return [problem for problem, _ in self._file(TEST_FILES[self.name])] if split == "test" else []
        if self.name == "mbpp":
            numbered = self._file("mbpp.jsonl")
            return [problem for problem, row in numbered if row["task_id"] in MBPP_SPLITS[split]]
        if self._path.is_file():
            found = [problem for problem, _ in self._file("")]
            return select_split(found, split, test_percent=TEST_PERCENT)
        found = [problem for problem, _ in self._file("test.jsonl" if split == "test" else "train.jsonl")]
        return found if split == "test" else select_split(found, split)

    def is_correct(self, problem: Problem, answer: str | None) -> bool | None:
        """Say whether a program passes all tests; None if the sandbox failed."""
        return self.judge_many([(problem, answer)])[0]

    def judge_many(self, items: Sequence[tuple[Problem, str | None]]) -> list[bool | None]:
        """Judge programs in parallel, one per core."""
        with ThreadPoolExecutor(num_cores()) as threads:
            verdicts = list(threads.map(lambda item: self.examine(*item), items))
        return [
            False if verdict is None else None if verdict.status == "infra_error" else verdict.status == "ok"
            for verdict in verdicts
        ]

    def examine(self, problem: Problem, answer: str | None) -> TestsVerdict | None:
        """Run a program against its tests; None if there is no program."""
        code = program_of(answer or "")
        if not code or len(code) > MAX_CHARACTERS:
            return None
        key = (problem.uid, code)
        known = self._verdicts.get(key)
        if known is not None and known.status != "infra_error":
            return known
        exam = self._exams[problem.uid]
        whole = code if not exam.prefix or _defines(code, exam.names) else exam.prefix + code
        if exam.header and "from __future__" not in code:
            whole = exam.header + whole
        if exam.cases:
            verdict = run_cases(whole, exam.cases)
        else:
            verdict = run_tests(
                whole,
                exam.tests,
                setup=exam.setup,
                names=exam.names,
                has_objects=exam.has_objects,
                timeout_s=TIMEOUT_S,
                memory_mib=MEMORY_MIB,
            )
        self._verdicts[key] = verdict
        while len(self._verdicts) > NUM_REMEMBERED:
            self._verdicts.popitem(last=False)
        return verdict

    def code_scores(self, problem: Problem, answer: str | None) -> dict[str, float] | None:
        """Return partial credit, each from 0 to 1; None if the sandbox failed.

        Returns:
            'loads': how far loading got, in thirds: syntax, imports, the rest; 'tests': share of tests that pass;
            'keywords': share of the problem's keywords that the program uses as names (1 if there are none).
        """
        verdict = self.examine(problem, answer)
        if verdict is None:
            return {"loads": 0.0, "tests": 0.0, "keywords": 0.0}
        if verdict.status == "infra_error":
            return None
        wanted = self._exams[problem.uid].keywords
        used = self._used_names(program_of(answer or "")) if wanted else set()
        if used is None:
            return None
        return {
            "loads": sum(verdict.scores[stage] for stage in LOADED) / len(LOADED),
            "tests": verdict.scores["tests"],
            "keywords": sum(word in used for word in wanted) / len(wanted) if wanted else 1.0,
        }

    def _used_names(self, code: str) -> set[str] | None:
        """Return the names that a program uses; None if the sandbox failed.

        It is parsed in the sandbox: some texts of a few thousand characters take Python's parser many seconds.
        """
        found = self._names.get(code)
        if found is None:
            verdict = run_python(_NAMES_PROGRAM, stdin=code, timeout_s=TIMEOUT_S, memory_mib=MEMORY_MIB)
            if verdict.status == "infra_error":
                return None
            found = self._names[code] = set(verdict.stdout.split()) if verdict.status == "ok" else set()
            while len(self._names) > NUM_REMEMBERED:
                self._names.popitem(last=False)
        return found

    def wrong_answer(self, problem: Problem) -> str:
        """Return a program that defines the right names and is wrong: each function returns None."""
        code = program_of(problem.answer)
        names = [node.name for node in _parse(code).body if isinstance(node, ast.FunctionDef)]
        return "\n".join(f"def {name}(*args, **kwargs):\n    return None" for name in names) or "pass"

    def other_spellings(self, problem: Problem) -> list[str]:
        """Return the gold program in a Markdown fence, and with Windows line ends."""
        return [
            f"Here it is:\n{FENCE}python\n{problem.answer}\n{FENCE}",
            problem.answer.replace("\n", "\r\n"),
        ]

    def _file(self, name: str) -> list[tuple[Problem, Row]]:
        path = self._path
        if path.is_dir():
            files = [path / f"{name}{end}" for end in ("", ".gz")]
            path = next((file for file in files if file.is_file()), files[0])
            if not path.is_file():
                raise UserError(f"{self._path}: no {name} there; check --task.path")
        if path not in self._files:
            self._files[path] = self._read(path.name, read_jsonl, path)
        return self._files[path]

    def _part(self, part: Part) -> list[tuple[Problem, Row]]:
        if part not in self._files:
            self._files[part] = self._read(str(part), partial(read_hub, max_rows=self._max_rows), part)
        return self._files[part]

    def _read(self, source: str, read: Callable[..., Any], place: Path | Part) -> list[tuple[Problem, Row]]:
        required, make, _ = READERS[self.name]
        check = partial(_unreadable, self.name)
        rows, bad = read(place, required=required, max_bad_rows=self._max_bad_rows, check=check)
        self.bad_rows += bad
        found = []
        for number, row in rows:
            prompt, answer, exam = make(row)
            uid = problem_uid(self.name, prompt)
            self._exams[uid] = exam
            name = row.get("task_id", row.get("question_id", number))
            meta = {"file": source, "line": str(number), "id": str(name)}
            problem = Problem(uid=uid, task=self.name, prompt=prompt, answer=answer, meta=meta)
            found.append((problem, row))
        self.num_repeated += len(found) - len({problem.uid for problem, _ in found})
        return found


def run_cases(code: str, cases: Sequence[tuple[str, str]]) -> TestsVerdict:
    """Run a whole program on standard inputs, and compare what it writes; after a case without time, none is run.

    Args:
        code: The program.
        cases: Standard input and expected output of each case.
    """
    program: Verdict | None = None
    results: list[TestResult] = []
    for given, expected in cases:
        if results and results[-1].status == "tle":
            results.append(results[-1])
            continue
        verdict = run_python(code, stdin=given, timeout_s=TIMEOUT_S, memory_mib=MEMORY_MIB)
        program = program or verdict
        is_right = verdict.status == "ok" and same_output(verdict.stdout, expected)
        status = verdict.status if verdict.status != "ok" else "ok" if is_right else "wrong"
        result = TestResult(status=status, message=verdict.message, seconds=verdict.seconds, num_calls=1)
        results.append(result)
    assert program is not None
    return TestsVerdict(program=program, results=tuple(results))


def same_output(written: str, expected: str) -> bool:
    """Compare what a program wrote line by line: white space does not matter, and 0.50 is 0.5.

    Source: LiveCodeBench's `grade_stdio` (arXiv:2403.07974).
    """
    lines, wanted = ([line.split() for line in text.strip().splitlines()] for text in (written, expected))
    return len(lines) == len(wanted) and all(
        len(line) == len(goal) and all(map(_same_word, line, goal))
        for line, goal in zip(lines, wanted, strict=True)
    )


def _same_word(word: str, goal: str) -> bool:
    if word == goal:
        return True
    try:
        return Decimal(word) == Decimal(goal)
    except InvalidOperation:
        return False


def program_of(answer: str) -> str:
    """Return the program in an answer: the last closed Markdown fence, else all of it; with tabs and \\r normalised."""
    text = answer.replace("\r\n", "\n").expandtabs(8)
    pieces = text.split(FENCE)
    if len(pieces) >= 3:
        inside = pieces[len(pieces) - 2 if len(pieces) % 2 else len(pieces) - 3]
        language, _, rest = inside.partition("\n")
        text = rest if language.strip().lower() in ("", "python", "py", "python3") else inside
    return text.strip("\n")


def _parse(code: str) -> ast.Module:
    """Parse Python text without warnings about doubtful escapes."""
    with _PARSING, warnings.catch_warnings():  # the filters are global, so threads take turns
        warnings.simplefilter("ignore")
        return ast.parse(code)


def _defines(code: str, names: Sequence[str]) -> bool:
    """Say whether a program defines all names at its top level.

    By its lines, not by its syntax tree: they are as many as an answer has, whatever is written in them.
    """
    return all(
        re.search(rf"^((async[ ]+)?def|class)[ ]+{re.escape(name)}\b|^{re.escape(name)}[ ]*=[^=]", code, re.M)
        for name in names
    )


def _names_in(tree: ast.AST) -> set[str]:
    """Return every name, attribute and imported module in a syntax tree: no comments, no strings."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.name for alias in node.names}
            found |= {node.module} if isinstance(node, ast.ImportFrom) and node.module else set()
    return found


_NAMES_PROGRAM = f"""import ast, sys
{inspect.getsource(_names_in)}
print("\\n".join(_names_in(ast.parse(sys.stdin.read()))))
"""
"""Prints the names that the program on its standard input uses."""


def _human_eval(row: Row) -> tuple[str, str, Exam]:
    """Read HumanEval: `check(candidate)` becomes one test per assertion on it, if its body is assertions only."""
    prompt, entry = row["prompt"], row["entry_point"]
    functions = [node for node in _parse(row["test"]).body if isinstance(node, ast.FunctionDef)]
    check = next((node for node in functions if node.name == "check"), *functions[:1])
    tests = [f"check({entry})"]
    if all(isinstance(part, ast.Assert) for part in check.body):
        # Some 36 problems have an `assert True`, which a program that only raises passes as well.
        asking = [part for part in check.body if "candidate" in _names_in(part)]
        tests = [f"candidate = {entry}\n{ast.unparse(part)}" for part in asking] or tests
    exam = Exam(f"{prompt}\n    pass\n{_without_numpy(row['test'])}", tuple(tests), (entry,), prompt)
    question = f"Complete this Python function.\n\n{FENCE}python\n{prompt}{FENCE}"
    return question, prompt + row["canonical_solution"], exam


def _mbpp(row: Row) -> tuple[str, str, Exam]:
    code, tests = row["code"].replace("\r\n", "\n"), row["test_list"]
    used: set[str] = set().union(*(_names_in(_parse(test)) for test in tests))
    names = [node.name for node in _parse(code).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    question = f"{row['text']}\n\nYour code should pass this test:\n{FENCE}python\n{tests[0]}\n{FENCE}"
    return question, code, Exam(row["test_setup_code"], tuple(tests), tuple(n for n in names if n in used))


def _mbpp_plus(row: Row) -> tuple[str, str, Exam]:
    """Read MBPP+: its one test is a text that calls the function with many inputs."""
    question, code, exam = _mbpp({**row, "text": row["prompt"], "test_setup_code": ""})
    setup = "\n".join(row.get("test_imports") or [])
    return question, code, replace(exam, setup=setup, tests=(_without_numpy(row["test"]),))


def _without_numpy(test: str) -> str:
    """Put our own four names of numpy in the place of its import."""
    return test.replace("import numpy as np", NUMPY, 1)


def _contest(row: Row) -> tuple[str, str, Exam]:
    """Read LiveCodeBench: standard input and output, or calls of a method of the class `Solution`.

    Source: `lcb_runner/benchmarks/code_generation.py` and `evaluation/testing_util.py` of LiveCodeBench. Deviations: no
    program has numpy; a program is stopped after 5 s a case, theirs after 6 s; private tests are not unpickled, the
    one text in the pickle is read.
    """
    cases = [*json.loads(row["public_test_cases"]), *_private(row["private_test_cases"])]
    kinds = {case["testtype"] for case in cases}
    starter = row.get("starter_code") or ""
    ask = "Write a Python program that reads standard input and writes standard output."
    if starter.strip():
        ask = f"Complete this Python class.\n\n{FENCE}python\n{starter}\n{FENCE}"
    question = f"{row['question_content']}\n\n{ask}"
    if kinds == {"stdin"}:
        pairs = tuple((case["input"], case["output"]) for case in cases)
        return question, "", Exam("", (), cases=pairs, header=CONTEST_IMPORTS)
    if kinds != {"functional"}:
        raise ValueError(f"tests of the kinds {sorted(kinds)}")
    name = json.loads(row["metadata"])["func_name"]
    if not str(name).isidentifier():
        raise ValueError("func_name is not a name")
    tests = tuple(
        f"got = Solution().{name}(*{[json.loads(line) for line in case['input'].splitlines()]!r})\n"
        f"got = list(got) if isinstance(got, tuple) else got\nassert got == {json.loads(case['output'])!r}"
        for case in cases
    )
    # What a method returns is only compared with a literal, so an object cannot say anything for itself.
    return question, "", Exam("", tests, ("Solution",), header=CONTEST_IMPORTS, has_objects=True)


def _private(text: str) -> list[dict[str, str]]:
    """Read private tests: JSON, or base64 of zlib of a pickle of JSON text, whose one text is taken out of it."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_UNPACKED)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"private tests are neither JSON nor packed ({error})") from error
    if unpacker.unconsumed_tail:
        raise ValueError(f"private tests are larger than {MAX_UNPACKED:,} bytes")
    texts = [value for code, value, _ in pickletools.genops(data) if "UNICODE" in code.name]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError("private tests are no pickle of one text")
    return json.loads(texts[0])


def _own(row: Row) -> tuple[str, str, Exam]:
    pairs = tuple((case["input"], case["output"]) for case in row["tests"] if isinstance(case, dict))
    exam = Exam(
        row.get("setup", ""),
        () if pairs else tuple(row["tests"]),
        tuple(row.get("names", ())),
        keywords=tuple(row.get("keywords", ())),
        cases=pairs,
        has_objects=row.get("objects", _tests_classes(row)),
    )
    return row["prompt"], row.get("solution", ""), exam


def _tests_classes(row: Row) -> bool:
    """Say whether the tests name a class of the row's solution."""
    try:
        body = _parse(row.get("solution", "")).body
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # no Python, or no text
        return False
    classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
    return any(classes & _names_in(_parse(test)) for test in row["tests"] if isinstance(test, str))


def _fault(row: Row, name: str) -> str | None:
    """Return what is wrong with the row's tests."""
    tests = row.get(name)
    if not isinstance(row.get("objects", False), bool):
        return f"'objects' is {json.dumps(row['objects'])[:60]}, expected true or false"
    if isinstance(tests, list) and tests and all(isinstance(test, dict) for test in tests):
        sides = [test.get(side) for test in tests for side in ("input", "output")]
        is_text = all(isinstance(side, str) for side in sides)
        return None if is_text else f"{name!r}: expected texts as 'input' and 'output' of every case"
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        return f"{name!r}: expected a list of Python texts, at least one"
    for test in (*tests, row.get("setup", "")):
        try:
            _parse(test)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            return f"{name!r} or 'setup' is not valid Python ({json.dumps(str(test)[:60])}: {error})"
    return None


def _number_fault(row: Row) -> str | None:
    return None if type(row.get("task_id")) is int else "'task_id' is not a whole number"


def _unreadable(name: str, row: Row) -> str | None:
    """Return why a row does not make a problem."""
    _, make, check = READERS[name]
    if check is not None and (fault := check(row)):
        return fault
    try:
        prompt, answer, exam = make(row)
    except StopIteration:
        return "'test' defines no function"
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        return f"its program or tests cannot be read ({type(error).__name__}: {str(error)[:80]})"
    texts = (prompt, answer, exam.setup, exam.prefix, *exam.tests, *exam.names, *exam.keywords)
    texts += tuple(text for case in exam.cases for text in case)
    return None if all(isinstance(text, str) for text in texts) else "a field of the row is not text"


READERS: dict[str, tuple[tuple[str, ...], Callable[[Row], tuple[str, str, Exam]], Check | None]] = {
    "humaneval": (("prompt", "entry_point", "canonical_solution", "test"), _human_eval, None),
    "humaneval_plus": (("prompt", "entry_point", "canonical_solution", "test"), _human_eval, None),
    "mbpp": (("text", "code"), _mbpp, lambda row: _fault(row, "test_list") or _number_fault(row)),
    "mbpp_plus": (("prompt", "code", "test"), _mbpp_plus, lambda row: _fault(row, "test_list")),
    "livecodebench": (("question_content", "public_test_cases", "private_test_cases"), _contest, None),
    "code": (("prompt",), _own, lambda row: _fault(row, "tests")),
}
"""Name -> (required fields, reader of a row, further conditions)."""
TEST_FILES = {
    "humaneval": "HumanEval.jsonl",
    "humaneval_plus": "HumanEvalPlus.jsonl",
    "mbpp_plus": "MbppPlus.jsonl",
    "livecodebench": "test.jsonl",
}
"""Name -> its file in a folder, for those with a test split only."""
