"""Programming problems: HumanEval, MBPP, the user's own. Programs run in the sandbox; their tests run in another
process."""

from __future__ import annotations

import ast
import json
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from whet.sandbox.graders.graders import num_cores
from whet.sandbox.programs import TestsVerdict, run_tests
from whet.schema import AnswerType
from whet.tasks.read import BadRow, Check, Row, check_split, read_jsonl, select_split
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


@dataclass(frozen=True, slots=True)
class Exam:
    """The tests of one problem.

    Attributes:
        setup: Python that runs before the tests.
        tests: Pieces of Python that raise when the program is wrong.
        names: Names that the tests take from the program; () for all that they do not define themselves.
        prefix: Start of the function, put before an answer that only continues it.
        keywords: Words that the program should use, for partial credit.
    """

    setup: str
    tests: tuple[str, ...]
    names: tuple[str, ...] = ()
    prefix: str = ""
    keywords: tuple[str, ...] = ()


class Code:
    """Problems whose answer is a program that passes tests.

    The answer may stand in a Markdown fence. It runs isolated (docs/sandbox.md) and never sees the expected results.

    Attributes:
        name: 'humaneval', 'mbpp' or 'code'.
        answer_type: 'program'.
        seconds_per_answer: Upper bound of the time to judge an answer.
        bad_rows: Rows skipped so far.
        num_repeated: Repeated problems so far; they are kept.
    """

    answer_type: AnswerType = "program"
    seconds_per_answer = 3 * TIMEOUT_S

    def __init__(self, name: str, path: str | Path, *, max_bad_rows: int = 0) -> None:
        """Set the location of the data.

        Args:
            name: 'humaneval' (HumanEval.jsonl, only a test split), 'mbpp' (mbpp.jsonl), or 'code': rows with prompt,
                tests (a list of Python texts), and maybe solution, setup, names, keywords.
            path: The file, or the folder that holds it (train.jsonl and test.jsonl for 'code'); .gz too.
            max_bad_rows: Bad rows that are tolerated.
        """
        self.name = name
        self._path = Path(path)
        if not str(path) or not self._path.exists():
            raise UserError(f"{str(path)!r}: no such file or folder; check --task.path")
        self._max_bad_rows = max_bad_rows
        self._files: dict[Path, list[tuple[Problem, Row]]] = {}
        self._exams: dict[str, Exam] = {}
        self._verdicts: OrderedDict[tuple[str, str], TestsVerdict] = OrderedDict()
        self.bad_rows: list[BadRow] = []
        self.num_repeated = 0

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of 'train', 'dev' or 'test'; HumanEval has only 'test'."""
        check_split(split)
        if self.name == "humaneval":
            return [problem for problem, _ in self._file("HumanEval.jsonl")] if split == "test" else []
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
        verdict = run_tests(
            code if _defines(code, exam.names) else exam.prefix + code,
            exam.tests,
            setup=exam.setup,
            names=exam.names,
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
        used = _names_in(program_of(answer or ""))
        wanted = self._exams[problem.uid].keywords
        return {
            "loads": sum(verdict.scores[stage] for stage in LOADED) / len(LOADED),
            "tests": verdict.scores["tests"],
            "keywords": sum(word in used for word in wanted) / len(wanted) if wanted else 1.0,
        }

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
            required, make, _ = READERS[self.name]
            check = partial(_unreadable, self.name)
            rows, bad = read_jsonl(path, required=required, max_bad_rows=self._max_bad_rows, check=check)
            self.bad_rows += bad
            found = []
            for number, row in rows:
                prompt, answer, exam = make(row)
                uid = problem_uid(self.name, prompt)
                self._exams[uid] = exam
                meta = {"file": path.name, "line": str(number), "id": str(row.get("task_id", number))}
                problem = Problem(uid=uid, task=self.name, prompt=prompt, answer=answer, meta=meta)
                found.append((problem, row))
            self._files[path] = found
            self.num_repeated += len(found) - len({problem.uid for problem, _ in found})
        return self._files[path]


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
    """Say whether a program defines all names at its top level; True for one that does not parse."""
    try:
        body = _parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return not code.startswith((" ", "\t"))
    found = {
        node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    found |= {
        t.id for node in body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
    }
    return set(names) <= found


def _names_in(code: str) -> set[str]:
    """Return every name, attribute and imported module that a program uses; comments and strings do not count."""
    try:
        tree = _parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
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


def _human_eval(row: Row) -> tuple[str, str, Exam]:
    """Read HumanEval: `check(candidate)` becomes one test per assertion if its body consists of assertions."""
    prompt, entry = row["prompt"], row["entry_point"]
    check = next(node for node in _parse(row["test"]).body if isinstance(node, ast.FunctionDef))
    tests = [f"check({entry})"]
    if all(isinstance(part, ast.Assert) for part in check.body):
        tests = [f"candidate = {entry}\n{ast.unparse(part)}" for part in check.body]
    exam = Exam(f"{prompt}\n    pass\n{row['test']}", tuple(tests), (entry,), prompt)
    question = f"Complete this Python function.\n\n{FENCE}python\n{prompt}{FENCE}"
    return question, prompt + row["canonical_solution"], exam


def _mbpp(row: Row) -> tuple[str, str, Exam]:
    code, tests = row["code"].replace("\r\n", "\n"), row["test_list"]
    used = set().union(*map(_names_in, tests))
    names = [node.name for node in _parse(code).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    question = f"{row['text']}\n\nYour code should pass this test:\n{FENCE}python\n{tests[0]}\n{FENCE}"
    return question, code, Exam(row["test_setup_code"], tuple(tests), tuple(n for n in names if n in used))


def _own(row: Row) -> tuple[str, str, Exam]:
    exam = Exam(
        row.get("setup", ""),
        tuple(row["tests"]),
        tuple(row.get("names", ())),
        keywords=tuple(row.get("keywords", ())),
    )
    return row["prompt"], row.get("solution", ""), exam


def _fault(row: Row, name: str) -> str | None:
    """Return what is wrong with the row's tests."""
    tests = row.get(name)
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
    return None if all(isinstance(text, str) for text in texts) else "a field of the row is not text"


READERS: dict[str, tuple[tuple[str, ...], Callable[[Row], tuple[str, str, Exam]], Check | None]] = {
    "humaneval": (("prompt", "entry_point", "canonical_solution", "test"), _human_eval, None),
    "mbpp": (("text", "code"), _mbpp, lambda row: _fault(row, "test_list") or _number_fault(row)),
    "code": (("prompt",), _own, lambda row: _fault(row, "tests")),
}
"""Name -> (required fields, reader of a row, further conditions)."""
