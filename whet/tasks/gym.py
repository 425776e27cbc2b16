"""The procedural environments of the `reasoning-gym` package by name, judged by their own scorers in killable workers.

Known problems of the scorers of 0.1.25, and how they are handled:

- Some call `eval` or sympy's `parse_expr`, which is `eval`, on the model's text. No such text reaches them: if the
  evaluated form could never earn full marks, or plain arithmetic is meant, our own judge is used instead; the three
  that need sympy see only numbers, operators and names from a list.
- Sums such as `9**9**9` hang or fill the memory: every call has a deadline and a memory limit; an answer that exceeds
  them is wrong.
- `puzzle24` accepts any four numbers, `game_of_life_halting` any text, `gsm_symbolic` the first of several numbers:
  we judge these ourselves. Others ignore text after the right answer: there, an answer may have no more parts than the
  gold answer. `nan` passes for any complex number; it is refused unless it is the gold answer.
- `boxnet` and `rush_hour` have no right answer, and `composite` has no problems of its own: they are refused.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

from whet import processes
from whet.install import install_command
from whet.rewards.answers.equal import answers_equal
from whet.sandbox.graders.graders import GraderPool
from whet.schema import AnswerType
from whet.tasks.made.countdown import MAX_CHARACTERS, evaluate
from whet.tasks.made.draft import DEV_PERCENT, TEST_PERCENT
from whet.tasks.read import check_split, split_of
from whet.types import Problem, UserError, problem_uid

NUM_PROBLEMS = 1000
"""Problems of each environment, all splits together."""
DEADLINE_S, MEMORY_MIB = 2.0, 1024
MAX_ANSWER = 20_000
REFUSED = frozenset({"boxnet", "composite", "rush_hour"})
SYMBOLIC = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})
OVERLOOKING = frozenset(
    {
        "fraction_simplification",
        "knights_knaves",
        "letter_jumble",
        "polynomial_equations",
        "time_intervals",
        "word_sorting",
    }
)
"""Environments whose scorers read only the beginning of an answer."""
GOLD_FIELDS = ("possible_answer", "example_answer", "example_correct_answer")
"""Fields of the gold answer of a problem with several right answers."""
_NAMES = (
    "pi E I C exp log ln sqrt Abs sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh"
)
_SYMBOLIC_TEXT = re.compile(
    rf"(?:[0-9]{{1,12}}(?:\.[0-9]{{1,12}})?(?![0-9.])|\b(?:{'|'.join(_NAMES.split())}|[a-z])\b|[-+*/() ]){{1,500}}"
)
_PART = re.compile(r"[^\s,;|]+")


class Gym:
    """Problems of one or several environments; 5 % are 'dev', 8 % 'test', by hash of the question.

    Attributes:
        name: 'gym'.
        answer_type: 'text'; the questions say what they want.
    """

    name = "gym"
    answer_type: AnswerType = "text"

    def __init__(self, environments: str, *, num_problems: int = 0, seed: int = 0) -> None:
        """Set the environments; problems are generated when a split is requested.

        Args:
            environments: One name, or several separated by commas.
            num_problems: Problems of each environment, all splits together; 0 means 1,000.
            seed: Seed of the environments.

        Raises:
            UserError: If the package is missing, or a name is unknown.
        """
        self._names = [name.strip() for name in environments.split(",") if name.strip()]
        known = sorted(set(package().DATASETS) - REFUSED)
        for name in self._names:
            if name in REFUSED:
                raise UserError(
                    f"task.path: environment '{name}' has no gold answers, so no run can be checked on it"
                )
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
                hint = (
                    f"did you mean {' or '.join(near)}?"
                    if near
                    else f"there are {len(known)}: {', '.join(known)}"
                )
                raise UserError(f"task.path: no environment '{name}'; {hint}")
        self._size, self._seed = num_problems or NUM_PROBLEMS, seed
        self._splits: dict[str, list[Problem]] = {}
        self._pool: GraderPool | None = None

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of 'train', 'dev' or 'test', environment after environment, without repetitions."""
        check_split(split)
        if not self._splits:
            self._splits = {"train": [], "dev": [], "test": []}
            made = {problem.uid: problem for problem in self._made()}
            for uid, problem in made.items():
                place = split_of(uid, dev_percent=DEV_PERCENT, test_percent=TEST_PERCENT)
                self._splits[place].append(problem)
        return list(self._splits[split])

    def is_correct(self, problem: Problem, answer: str | None) -> bool | None:
        """Judge an answer by the environment's scorer; right is the full score of 1. None: the worker died without a
        verdict."""
        return self.judge_many([(problem, answer)])[0]

    def judge_many(self, items: Sequence[tuple[Problem, str | None]]) -> list[bool | None]:
        """Judge answers as `is_correct` does, in parallel: all that hang together cost about one deadline."""
        if self._pool is None:
            self._pool = GraderPool(
                "whet.tasks.gym:score",
                deadline_s=DEADLINE_S,
                memory_mib=MEMORY_MIB,
                prepare="whet.tasks.gym:prepare",
            )
        asked = [place for place, (_, answer) in enumerate(items) if answer and len(answer) <= MAX_ANSWER]
        metas = [items[place][0].meta for place in asked]
        calls = [
            (meta["environment"], meta["entry"], items[i][1]) for i, meta in zip(asked, metas, strict=True)
        ]
        verdicts: list[bool | None] = [False] * len(items)
        for place, outcome in zip(asked, self._pool.map(calls), strict=True):
            verdicts[place] = (
                None if outcome.kind == "error" else outcome.kind == "ok" and outcome.value >= 1.0
            )
        return verdicts

    def _made(self) -> list[Problem]:
        """Generate all problems in a process with a fixed hash seed: some environments draw from Python sets."""
        code = "import sys; from whet.tasks.gym import print_entries; print_entries(*sys.argv[1:])"
        done = processes.run(
            [sys.executable, "-c", code, ",".join(self._names), str(self._size), str(self._seed)],
            env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it was killed"])[-1]
            raise UserError(f"task gym: {','.join(self._names)} cannot be made: {reason[:300]}")
        return [
            Problem(
                uid=problem_uid(f"gym {name}", question),
                task=self.name,
                prompt=question,
                answer=gold,
                meta={"environment": name, "entry": frozen, "category": category},
            )
            for name, question, gold, frozen, category in json.loads(done.stdout.rpartition("\n")[2])
        ]


def print_entries(names: str, size: str, seed: str) -> None:
    """Print a last line with the problems of environments as JSON: name, question, gold answer, entry, category.

    Args:
        names: Comma-separated environments.
        size: Problems of each; they are generated in order, since some environments continue from the last one.
        seed: Seed of each.
    """
    rows: list[tuple[str, str, str, str, str]] = []
    for name in names.split(","):
        dataset = package().create_dataset(name, seed=int(seed), size=int(size))
        for index in range(int(size)):
            entry = dataset[index]
            gold = entry["answer"] if entry["answer"] is not None else _gold(dataset, entry)
            is_plain = name not in SYMBOLIC or _SYMBOLIC_TEXT.fullmatch(str(gold))  # not 'Integral(x**2, x)'
            if isinstance(gold, str) and gold.strip() and is_plain:
                rows.append((name, entry["question"], gold, _frozen(entry), dataset.category))
    print("\n" + json.dumps(rows), end="")  # packages used by some environments print, too


def score(name: str, frozen: str, answer: str) -> float:
    """Score an answer; runs in a worker that is killed at the deadline.

    Args:
        name: Environment.
        frozen: The problem's entry as a Python literal.
        answer: Any text.

    Returns:
        The environment's score, at most 1 for a right answer; 0 if it raises.
    """
    entry = ast.literal_eval(frozen)
    if name in JUDGES:
        return float(JUDGES[name](answer.strip(), entry))
    if name in SYMBOLIC and not _SYMBOLIC_TEXT.fullmatch(answer.strip()):
        return 0.0
    if name in OVERLOOKING and len(_PART.findall(answer)) > len(_PART.findall(entry["answer"])):
        return 0.0
    if answer.strip().lower() in ("nan", "inf", "-inf", "infinity") and answer.strip() != entry["answer"]:
        return 0.0
    try:
        return float(_scorer(name)(answer, entry))
    except Exception:  # the scorers are not ours, and the text is the model's
        return 0.0


def prepare() -> None:
    """Create all scorers before workers are forked: some load word lists, which would count against the deadline."""
    for name in set(package().DATASETS) - REFUSED:
        _scorer(name)


def _is_gold(answer: str, entry: Mapping[str, Any]) -> bool:
    """Say whether an answer is exactly the gold answer, or one of several."""
    golds: Sequence[str] = entry["metadata"].get("valid_answers", ())
    return answer in [gold.strip() for gold in (entry["answer"], *golds)]


def _is_number(answer: str, entry: Mapping[str, Any]) -> bool:
    """Say whether an answer is the gold number."""
    return answers_equal(answer, entry["answer"], plain_number=True)


def _is_way(answer: str, entry: Mapping[str, Any]) -> bool:
    """Say whether an expression uses each number of the problem once and equals its target, 24 by default."""
    parsed = evaluate(answer) if len(answer) <= MAX_CHARACTERS else None
    meta = entry["metadata"]
    target = Fraction(meta.get("target", 24))
    return parsed is not None and parsed[0] == target and sorted(parsed[1]) == sorted(meta["numbers"])


JUDGES: dict[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "binary_matrix": _is_gold,
    "countdown": _is_way,
    "game_of_life_halting": _is_gold,
    "gsm_symbolic": _is_number,
    "n_queens": _is_gold,
    "puzzle24": _is_way,
    "spiral_matrix": _is_gold,
    "string_insertion": _is_gold,
}
"""Our own judges, for environments whose scorer evaluates the answer as code or rewards wrong ones."""


def package() -> Any:
    """Import reasoning-gym and return its module of environments.

    Raises:
        UserError: If the package is missing.
    """
    try:
        with warnings.catch_warnings():
            # One of its own packages (cellpylib) compares with `is`: said once, when Python first compiles it.
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym import factory
    except ImportError as error:
        raise UserError(f"task gym: {install_command('gym')} ({error})") from error
    return factory


@cache
def _scorer(name: str) -> Callable[[str, Any], float]:
    return package().get_score_answer_fn(name)


def _gold(dataset: Any, entry: Mapping[str, Any]) -> str | None:
    """Return an example answer with the full score, for problems without a single gold answer."""
    found = next((entry["metadata"][name] for name in GOLD_FIELDS if name in entry["metadata"]), None)
    text = json.dumps(found) if isinstance(found, dict) else found
    return text if dataset.score_answer(text, entry) >= 1.0 else None


def _frozen(entry: Mapping[str, Any]) -> str:
    """Write an entry as a Python literal (JSON would turn tuples into lists), without fields that are not literals."""
    kept = {name: value for name, value in entry["metadata"].items() if _is_literal(value)}
    return repr({**entry, "metadata": kept})


def _is_literal(value: Any) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False
