"""Programming problems: HumanEval, MBPP, contests, the user's own. Programs run in the sandbox; their tests run in
another process, or compare what the program writes."""

from __future__ import annotations

import ast
import base64
import binascii
import builtins
import inspect
import json
import pickletools
import re
import sys
import textwrap
import threading
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Any

from whet.config import near_file
from whet.sandbox.graders.graders import num_cores
from whet.sandbox.jobs import Verdict
from whet.sandbox.programs import TestResult, TestsVerdict, run_python, run_tests
from whet.schema import AnswerType
from whet.tasks.hub import TRAIN, Part, read_hub
from whet.tasks.read import (
    BadRow,
    Check,
    Row,
    check_split,
    division,
    is_hub_name,
    read_jsonl,
    select_split,
)
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
FENCE = "```"
MAX_DIGITS = 100_000
"""Digits of an integer in a test; Python's own limit is 4,300."""
_PARSING = threading.Lock()
LOADED = ("syntax", "imports", "runs")
MAX_UNPACKED = 256 * 2**20
"""Private tests of a contest problem that are larger (in bytes, unpacked) make a bad row."""
_IMPORTED = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
CONTEST_IMPORTS = "".join(
    (
        *(f"from {name} import *\n" for name in (*_IMPORTED, "builtins", "typing")),
        *(f"import {name}\n" for name in _IMPORTED),
        "sys.setrecursionlimit(50000)\n",
    )
)
"""What LiveCodeBench puts above every answer, in its order: `builtins` gives back what the others hide."""
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
        wanted: Names that tell the program from other code in an answer; () for `names`.
    """

    setup: str
    tests: tuple[str, ...]
    names: tuple[str, ...] = ()
    prefix: str = ""
    keywords: tuple[str, ...] = ()
    cases: tuple[tuple[str, str], ...] = ()
    header: str = ""
    has_objects: bool = False
    wanted: tuple[str, ...] = ()


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
        divided: How many rows of one file are kept from training, once it was read.
    """

    answer_type: AnswerType = "program"
    seconds_per_answer = 3 * TIMEOUT_S
    needs_gold = False

    def __init__(
        self,
        name: str,
        path: str | Path = "",
        *,
        config: str = "",
        max_rows: int = 0,
        max_bad_rows: int = 0,
        held_out: float = 0.05,
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
            held_out: Share of 'dev', and of 'test', where 'code' reads one file or split.
        """
        self.name, self._percent = name, 100 * held_out
        self._path = Path(path)
        self._hub: dict[str, Part] = {}
        if name in HUB_SETS and (not str(path) or is_hub_name(str(path))):
            parts = HUB_SETS[name].parts
            self._hub = {ours: replace(part, path=str(path) or part.path) for ours, part in parts.items()}
        elif is_hub_name(str(path)):
            self._hub = {TRAIN: Part(path=str(path), split=TRAIN)}
        elif not str(path) or not self._path.exists():
            told = near_file(path) or "check --task.path"
            raise UserError(f"{str(path)!r}: no such file or folder; {told}")
        if config:
            self._hub = {ours: replace(part, configs=(config,)) for ours, part in self._hub.items()}
        self._max_rows, self._max_bad_rows = max_rows, max_bad_rows
        self._files: dict[Path | Part, list[tuple[Problem, Row]]] = {}
        self._exams: dict[str, Exam] = {}
        self._verdicts: OrderedDict[tuple[str, str], TestsVerdict] = OrderedDict()
        self._names: OrderedDict[str, set[str]] = OrderedDict()
        self.bad_rows: list[BadRow] = []
        self.num_repeated = 0
        self.divided = ""

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of 'train', 'dev' or 'test'; HumanEval and other benchmarks have only 'test'."""
        check_split(split)
        if self._hub and self.name in HUB_SETS:
            part = self._hub.get(split)
            return [problem for problem, _ in self._part(part)] if part is not None else []
        if self._hub:
            return self._divide(str(self._hub[TRAIN]), self._part(self._hub[TRAIN]), split)
        if self.name in TEST_FILES:
            return [problem for problem, _ in self._file(TEST_FILES[self.name])] if split == "test" else []
        if self.name == "mbpp":
            numbered = self._file("mbpp.jsonl")
            return [problem for problem, row in numbered if row["task_id"] in MBPP_SPLITS[split]]
        if self._path.is_file():
            return self._divide(self._path.name, self._file(""), split)
        found = [problem for problem, _ in self._file("test.jsonl" if split == "test" else "train.jsonl")]
        return found if split == "test" else select_split(found, split, dev_percent=self._percent)

    def _divide(self, source: str, rows: Sequence[tuple[Problem, Row]], split: str) -> list[Problem]:
        found = [problem for problem, _ in rows]
        self.divided = self.divided or division(source, found, self._percent)
        return select_split(found, split, dev_percent=self._percent, test_percent=self._percent)

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
        exam = self._exams[problem.uid]
        code = program_of(answer or "", exam.wanted or exam.names)
        if not code or len(code) > MAX_CHARACTERS:
            return None
        key = (problem.uid, code)
        known = self._verdicts.get(key)
        if known is not None and known.status != "infra_error":
            return known
        verdict = _run(exam, code)
        if verdict.program.stage == "syntax" and verdict.status != "infra_error":
            without = without_prose(code)
            verdict = _run(exam, without) if without not in ("", code) else verdict
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
        exam = self._exams[problem.uid]
        code = program_of(answer or "", exam.wanted or exam.names)
        used = self._used_names(code) if wanted else set()
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


def _run(exam: Exam, code: str) -> TestsVerdict:
    """Run a program against the tests of a problem."""
    whole = exam.prefix + code
    if exam.prefix and _defines(code, exam.names):
        # The prompt's imports and helpers stand above it all the same, as in HumanEval's own file.
        is_free = "from __future__" in code
        whole = code if is_free else f"{exam.prefix}\n    pass\n{code}"
    if exam.header and "from __future__" not in code:
        whole = exam.header + whole
    if exam.cases:
        return run_cases(whole, exam.cases)
    return run_tests(
        whole,
        exam.tests,
        setup=exam.setup,
        names=exam.names,
        has_objects=exam.has_objects,
        timeout_s=TIMEOUT_S,
        memory_mib=MEMORY_MIB,
    )


def run_cases(code: str, cases: Sequence[tuple[str, str]]) -> TestsVerdict:
    """Run a whole program on standard inputs, and compare what it writes; after a case without time, none is run.

    A program that ends itself by `exit`, with whatever status, has said what it had to (as LiveCodeBench has it).

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
        has_ended = verdict.status == "ok" or (verdict.status == "rte" and verdict.stage == "done")
        verdict = replace(verdict, status="ok", message="") if has_ended else verdict
        program = program or verdict
        is_right = has_ended and same_output(verdict.stdout, expected)
        status = "wrong" if has_ended and not is_right else verdict.status
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


_PROSE = re.compile(r"(?:[ \t]*(?:>|[-*+][ \t]|\d+[.)][ \t]))*[ \t]*")
"""What stands before a fence in a list or a quotation."""
_PYTHON = re.compile(r"(i?python|py|pypy)[\d.]*$", re.IGNORECASE)
_DEFINED = re.compile(r"^(?:async[ ]+def|def|class)[ ]+(\w+)|^(\w+)[ ]*(?::[^=\n]+)?=[^=]", re.MULTILINE)
_IMPORTED_NAME = re.compile(r"^(?:from[ ]+[\w.]+[ ]+)?import[ ]+(.+)$", re.MULTILINE)
_CODE_LINE = re.compile(
    r"""\s+\S|[@#)\]}]|("{3}|'{3})|(from[ ]+[\w.]+[ ]+)?import[ ]+[\w.*(]|(async[ ]+)?(def|class)[ ]+\w+.*|"""
    r"""(if|elif|for|while|with|except|match)\b.*:\s*(#.*)?$|(else|try|finally)\s*:|(pass|return|raise|del|assert)\b|"""
    r"""\w[\w.,\[\]'" *]*(:[^=]+)?([-+*/%&|^@]|//|\*\*|<<|>>)?=[^=]|[\w.]+\(.*"""
)
"""A line without indentation that is Python rather than English, by its look."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A fenced text of an answer.

    Attributes:
        language: First word after the fence, in lower case.
        text: What it holds, without the indentation of its fence.
    """

    language: str
    text: str

    @property
    def is_python(self) -> bool:
        """Whether its language is Python."""
        return _PYTHON.match(self.language) is not None


@dataclass(frozen=True, slots=True)
class _Fence:
    """An opening fence: `size` times its mark, after some text, before what names the language."""

    mark: str
    size: int
    before: str
    info: str


def program_of(answer: str, wanted: Sequence[str] = ()) -> str:
    """Return the program in an answer, with line ends and indentation normalised.

    It is the last fenced block that is Python, by its language or for want of one, and that defines a wanted name; else
    the last that defines anything, or reads and writes; else the last. Blocks before it that define what it uses and
    does not define stand above it. An answer without a fence is the program; so is what stands before a lone closing
    one (the prompt had opened it).

    Args:
        answer: What the model wrote.
        wanted: Names of which the program defines at least one; () for a program that reads and writes.
    """
    text = re.sub(r"^[ \t]+", lambda found: found[0].expandtabs(8), answer.replace("\r\n", "\n"), flags=re.M)
    blocks = _blocks(text)
    if not blocks:
        return text.strip("\n")
    places = [at for at, block in enumerate(blocks) if block.is_python or not block.language]
    if not places:
        return blocks[-1].text.strip("\n")

    def rank(at: int) -> tuple[bool, bool, bool, int]:
        found = blocks[at].text
        defined = _defined(found)
        writes = re.search(r"\b(print|write|writelines)\(", found) is not None
        reads = re.search(r"\b(input|open)\(|\bstdin\b|\bfileinput\b", found) is not None
        is_likely = bool(defined) if wanted else writes and (reads or bool(defined))
        is_it = any(name in defined for name in wanted)
        return is_it, is_likely, is_it or blocks[at].is_python, at

    best = max(places, key=rank)
    parts = [blocks[best].text]
    words, known = _words(parts[0]), _defined(parts[0]) | _imported(parts[0])
    for other in (blocks[at].text for at in reversed(places) if at < best):
        gives = _defined(other) | _imported(other)
        if (gives - known) & words:
            parts.insert(0, other)
            words, known = words | _words(other), known | gives
    return "\n".join(parts).strip("\n")


def _blocks(text: str) -> list[_Block]:
    """Return the fenced blocks of a Markdown text: by CommonMark's rules, and what models make of them."""
    blocks: list[_Block] = []
    lines = text.split("\n")
    opening: _Fence | None = None
    start = 0
    for at, line in enumerate(lines):
        if opening is not None:
            size = _run_at_end(line, opening.mark)
            if size >= opening.size:
                rest = line.rstrip()[:-size]  # a fence may close at the end of the last line of code
                blocks.append(
                    _block(opening, [*lines[start:at], *([] if _PROSE.fullmatch(rest) else [rest])])
                )
                opening, start = None, at + 1
            continue
        found = _opening(line)
        if found is None:
            inside = line.strip()[3:-3]
            if "`" not in inside and line.strip() == f"{FENCE}{inside}{FENCE}" and inside:  # all in one line
                blocks.append(_Block("", re.sub(r"^ *(python|py) ", "", inside)))
            continue
        before = [*lines[start:at], found.before]
        if not found.info and not blocks and _looks_like_code(before):
            blocks.append(_Block("", "\n".join(before)))
            start = at + 1
        else:
            opening, start = found, at + 1
    if opening is not None and any(line.strip() for line in lines[start:]):
        blocks.append(_block(opening, lines[start:]))  # cut off, or ended by a stop string
    return blocks


def _run_at_end(line: str, mark: str) -> int:
    """Return how many marks a line ends with."""
    text = line.rstrip()
    return len(text) - len(text.rstrip(mark))


def _opening(line: str) -> _Fence | None:
    """Return the fence that a line opens, after its text, if any."""
    text = line.rpartition("`")
    size = _run_at_end(text[0] + text[1], "`") if text[1] else 0
    if size >= len(FENCE):
        before, info = (text[0] + text[1])[:-size], text[2].strip()
        # Behind other text in the same line only a bare word is a language.
        return _Fence("`", size, before, info) if _PROSE.fullmatch(before) or " " not in info else None
    prose = _PROSE.match(line)
    before = prose[0] if prose is not None else ""
    rest = line[len(before) :]
    size = len(rest) - len(rest.lstrip("~"))
    return _Fence("~", size, before, rest[size:].strip()) if size >= len(FENCE) else None


def _block(opening: _Fence, lines: Sequence[str]) -> _Block:
    """Return a block, without the marks and the indentation that its fence has."""
    before = opening.before if _PROSE.fullmatch(opening.before) else ""
    if ">" in before:
        lines = [re.sub(r"^ *>[ ]?", "", line) for line in lines]
        before = before.rpartition(">")[2].removeprefix(" ")
    text = "\n".join(line[min(len(before), len(line) - len(line.lstrip(" "))) :] for line in lines)
    word = re.match(r"[{. ]*([\w+#.-]*)", opening.info)
    return _Block(word[1].lower() if word is not None else "", text)


def _looks_like_code(lines: Sequence[str]) -> bool:
    """Say whether a text begins as a program does."""
    first = next((line for line in lines if line.strip()), "")
    return _is_code(first)


def _is_code(line: str) -> bool:
    """Say whether a line is Python, or indented, by its look."""
    return _CODE_LINE.match(line[:1000]) is not None


def without_prose(text: str) -> str:
    """Return the program in a text that is no Python as it stands: without prose around it, not indented as a whole.

    Args:
        text: A program, perhaps with sentences before and after it.

    Returns:
        Its lines from the first that looks like Python to the last before a sentence; '' if none does, or if what
        follows defines the same once more: two programs are no answer.
    """
    lines = textwrap.dedent(text).split("\n")
    first = next((at for at, line in enumerate(lines) if line.strip() and _is_code(line)), len(lines))
    end = next(
        (at for at, line in enumerate(lines[first:], first) if line.strip() and not _is_code(line)),
        len(lines),
    )
    program = "\n".join(lines[first:end]).strip("\n")
    again = re.findall(r"\b(?:def|class)[ ]+(\w+)", "\n".join(lines[end:]))
    return "" if not _defined(program).isdisjoint(again) else program


def _defined(code: str) -> set[str]:
    """Return the names that a program defines at its top level, by the look of its lines."""
    return {name for pair in _DEFINED.findall(code) for name in pair if name}


def _words(code: str) -> set[str]:
    """Return the names that a text may refer to: no attributes."""
    return set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", code))


def _imported(code: str) -> set[str]:
    """Return the names that a program imports at its top level, by the look of its lines."""
    parts = (part for found in _IMPORTED_NAME.findall(code) for part in found.strip("()").split(","))
    return {part.split(" as ")[-1].strip().partition(".")[0] for part in parts}


def _free_names(setup: str, tests: Sequence[str]) -> tuple[str, ...]:
    """Return the names that tests use, and neither they, their setup nor Python define."""
    used: set[str] = set()
    defined = set(dir(builtins))
    for text in (setup, *tests):
        for node in ast.walk(_parse(text)):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return tuple(sorted(used - defined))


def _parse(code: str) -> ast.Module:
    """Parse Python text without warnings about doubtful escapes, and with integers of any reasonable length."""
    with _lenient():
        return ast.parse(code)


@contextmanager
def _lenient() -> Iterator[None]:
    limit = sys.get_int_max_str_digits()
    with _PARSING, warnings.catch_warnings():  # filters and limit are global, so threads take turns
        warnings.simplefilter("ignore")
        sys.set_int_max_str_digits(MAX_DIGITS)
        try:
            yield
        finally:
            sys.set_int_max_str_digits(limit)


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
        with _lenient():
            tests = [f"candidate = {entry}\n{ast.unparse(part)}" for part in asking] or tests
    exam = Exam(f"{prompt}\n    pass\n{_without_numpy(row['test'])}", tuple(tests), (entry,), prompt)
    question = f"Complete this Python function.\n\n{FENCE}python\n{prompt}{FENCE}"
    return question, prompt + row["canonical_solution"], exam


def _mbpp(row: Row) -> tuple[str, str, Exam]:
    code, tests = row["code"].replace("\r\n", "\n"), row["test_list"]
    setup = row["test_setup_code"]  # two of them build trees of the program's own class
    used: set[str] = set().union(
        *(_names_in(_parse(text)) for text in (*tests, setup) if isinstance(text, str))
    )
    named = [node for node in _parse(code).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names = tuple(node.name for node in named if node.name in used)
    has_objects = any(isinstance(node, ast.ClassDef) and node.name in used for node in named)
    question = f"{row['text']}\n\nYour code should pass this test:\n{FENCE}python\n{tests[0]}\n{FENCE}"
    return question, code, Exam(setup, tuple(tests), names, has_objects=has_objects)


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
    # One object for all calls, or a function where there is no class, as in `grade_call_based`.
    setup = f"import json\ntry:\n    call = Solution().{name}\nexcept NameError:\n    call = {name}"
    tests = []
    for case in cases:
        lines = [line for line in case["input"].split("\n") if line.strip()]
        for text in (*lines, case["output"]):
            json.loads(text, parse_int=str)  # a bad row is noticed here
        got = f"got = call(*map(json.loads, {lines!r}))\ngot = list(got) if isinstance(got, tuple) else got"
        tests.append(f"{got}\nassert got == json.loads({case['output']!r})")
    # What a method returns is only compared with a literal, so an object cannot say anything for itself.
    names = ("Solution", name)
    return question, "", Exam(setup, tuple(tests), names, header=CONTEST_IMPORTS, has_objects=True)


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
        wanted=() if pairs else _free_names(row.get("setup", ""), row["tests"]),
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
