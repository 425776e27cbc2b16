"""Base of the puzzle tasks: problems are generated from a seed, or read from rows of a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from whet.config import near_file
from whet.model.vision.reading import Urls
from whet.schema import AnswerType
from whet.tasks.columns import NONE, image_column, images_of
from whet.tasks.images import ImageReader
from whet.tasks.read import (
    BadRow,
    Row,
    check_split,
    division,
    first_row,
    read_file,
    select_files,
    split_of,
)
from whet.types import Problem, UserError, problem_uid

Item = TypeVar("Item")
Judge = Callable[[Problem, str], bool]
"""Says whether an extracted answer, which may be any text, solves the problem."""

DEV_PERCENT = 5
TEST_PERCENT = 8
MAX_REPEATS = 2000
"""Consecutive draws without a new problem after which generation gives up."""


class Draw:
    """Random choices seeded by words, equal on every machine and in every version of Python."""

    def __init__(self, *words: object) -> None:
        """Start the sequence of these words."""
        self._key = "\x00".join(map(str, ("whet", *words)))
        self._count = 0

    def below(self, limit: int) -> int:
        """Return an integer in [0, limit); SHA-256 in counter mode, so its bias is below limit / 2^64."""
        self._count += 1
        digest = hashlib.sha256(f"{self._key}\x00{self._count}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % limit

    def between(self, low: int, high: int) -> int:
        """Return an integer in [low, high]."""
        return low + self.below(high - low + 1)

    def one(self, items: Sequence[Item]) -> Item:
        """Return one of the items."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """Return the items in a random order."""
        mixed = list(items)
        for place in range(len(mixed) - 1, 0, -1):
            other = self.below(place + 1)
            mixed[place], mixed[other] = mixed[other], mixed[place]
        return mixed


@dataclass(frozen=True, slots=True)
class Draft:
    """A problem before it has a task and a split.

    Attributes:
        key: The same for all rearrangements of a problem; splits go by it.
        prompt: The question.
        answer: The gold answer.
        solution: Worked thinking, or ''.
        meta: Labels.
        images: Sources of its images.
        shows: What the images show, in words: they name the problem, whatever a drawing's bytes are.
    """

    key: str
    prompt: str
    answer: str
    solution: str = ""
    meta: dict[str, str] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    shows: str = ""

    def uid(self, task: str) -> str:
        """Return the problem's uid."""
        return problem_uid(task, self.prompt, (self.shows,) if self.images else ())

    def problem(self, task: str, uid: str, **meta: str) -> Problem:
        """Return the problem; its `prompt_uid` keeps rearrangements in one split."""
        meta = {**self.meta, **meta, "prompt_uid": problem_uid(task, self.key)}
        return Problem(
            uid=uid,
            task=task,
            prompt=self.prompt,
            answer=self.answer,
            solution=self.solution,
            images=self.images,
            meta=meta,
        )


class Generated:
    """A task whose problems are drawn: 5 % 'dev' and 8 % 'test' by hash of their keys.

    Attributes:
        name: Name of the task.
        answer_type: What an answer is; it words the system prompt.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Draw, int], Sequence[Draft]],
        judge: Judge,
        *,
        num_levels: int,
        num_problems: int,
        answer_type: AnswerType = "number",
        level: int = 0,
        seed: int = 0,
    ) -> None:
        """Describe the task; problems are generated when a split is requested.

        Args:
            name: Name of the task.
            make: Draws problems of a level in [1, num_levels]; if it returns none, the next draw is tried.
            judge: Judges an answer.
            num_levels: Number of difficulty levels; 1 is the easiest.
            num_problems: Number of problems in all splits together.
            answer_type: What an answer is.
            level: A single level; 0 takes turns.
            seed: Seed of the problems; a problem's split does not depend on it.
        """
        if not 0 <= level <= num_levels:
            raise UserError(f"task.level = {level}: {name} has levels 1 to {num_levels}; 0 mixes them")
        self.name, self.answer_type = name, answer_type
        self._make, self._judge = make, judge
        self._levels = [level] if level else list(range(1, num_levels + 1))
        self._num_problems, self._seed = num_problems, seed
        self._splits: dict[str, list[Problem]] = {}

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of 'train', 'dev' or 'test' in a fixed order; all questions differ.

        Raises:
            UserError: If there is no such split, or the level has fewer problems than requested.
        """
        check_split(split)
        if not self._splits:
            self._splits = self._drawn()
        return list(self._splits[split])

    def is_correct(self, problem: Problem, answer: str | None) -> bool:
        """Judge an extracted final answer."""
        return answer is not None and self._judge(problem, answer)

    def _drawn(self) -> dict[str, list[Problem]]:
        splits: dict[str, list[Problem]] = {"train": [], "dev": [], "test": []}
        seen: set[str] = set()
        index, last = 0, 0
        while len(seen) < self._num_problems:
            level = self._levels[index % len(self._levels)]
            for draft in self._make(Draw(self.name, self._seed, level, index), level):
                uid = draft.uid(self.name)
                if uid not in seen and len(seen) < self._num_problems:
                    seen.add(uid)
                    last = index
                    problem = draft.problem(self.name, uid, level=str(level))
                    place = problem.meta["prompt_uid"]
                    split = split_of(place, dev_percent=DEV_PERCENT, test_percent=TEST_PERCENT)
                    splits[split].append(problem)
            index += 1
            if index - last > MAX_REPEATS:
                raise UserError(
                    f"task.num_problems = {self._num_problems}: {self.name} ran out of different problems at "
                    f"{len(seen)}; ask for fewer, or for a higher level"
                )
        return splits


class FromRows:
    """A task whose problems are in a file, which is divided by hash, or in a folder's train and test files.

    Attributes:
        name: Name of the task.
        answer_type: What an answer is.
        bad_rows: Rows skipped so far.
        num_duplicates: Repeated problems dropped so far.
        divided: How many rows of a file are kept from training, once it was read.
    """

    def __init__(
        self,
        name: str,
        path: str | Path,
        make: Callable[[Row], Draft | str],
        judge: Judge,
        *,
        answer_type: AnswerType = "number",
        max_bad_rows: int = 0,
        held_out: float = 0.05,
        images: str = NONE,
        image_root: str = "",
        image_urls: Urls = "none",
    ) -> None:
        """Set the location of the data; rows are read when a split is requested.

        Args:
            name: Name of the task.
            path: A .jsonl, .jsonl.gz, .json, .csv or .parquet file, or a folder of such.
            make: Turns a row into a problem, or says what is wrong with the row.
            judge: Judges an answer.
            answer_type: What an answer is.
            max_bad_rows: Bad rows per file that are tolerated.
            held_out: Share of 'dev', and of 'test', where one file is divided.
            images: Column of the images that a question is about; '' is recognised, 'none' reads none.
            image_root: Folder of images that are named by paths; '' for the folder of the data.
            image_urls: Which URLs of images are fetched.

        Raises:
            UserError: If the path does not exist.
        """
        if not str(path) or not Path(path).exists():
            told = near_file(path) or "check --task.path"
            raise UserError(f"{str(path)!r}: no such file or folder; {told}")
        self.name, self.answer_type = name, answer_type
        self._path, self._make, self._judge = Path(path), make, judge
        self._max_bad_rows, self._percent = max_bad_rows, 100 * held_out
        self._images, self._image_root = images, image_root
        self._image_urls: Urls = image_urls
        self._files: dict[Path, list[Problem]] = {}
        self.bad_rows: list[BadRow] = []
        self.num_duplicates = 0
        self.divided = ""

    def problems(self, split: str) -> list[Problem]:
        """Return all problems of 'train', 'dev' or 'test'."""
        if self._path.is_file() and not self.divided:
            self.divided = division(self._path.name, self._file(self._path), self._percent)
        return select_files(self._path, split, self._file, percent=self._percent)

    def is_correct(self, problem: Problem, answer: str | None) -> bool:
        """Judge an extracted final answer."""
        return answer is not None and self._judge(problem, answer)

    def _file(self, path: Path) -> list[Problem]:
        if path not in self._files:
            column = image_column(first_row(path), path.name, self._images)
            reader = ImageReader(Path(self._image_root or path.parent), self._image_urls)

            def check(row: Row) -> Draft | str:
                draft = self._make(row)
                return _with_images(draft, row, column, reader) if isinstance(draft, Draft) else draft

            drafts, bad = read_file(path, required=(), max_bad_rows=self._max_bad_rows, check=check)
            self.bad_rows += bad
            problems: dict[str, Problem] = {}
            for number, draft in drafts:
                uid = draft.uid(self.name)
                if uid in problems and problems[uid].answer != draft.answer:
                    uid = problem_uid(self.name, f"{draft.prompt}\x00{draft.answer}", (draft.shows,))
                self.num_duplicates += uid in problems
                problems.setdefault(uid, draft.problem(self.name, uid, file=path.name, line=str(number)))
            self._files[path] = list(problems.values())
        return self._files[path]


def _with_images(draft: Draft, row: Row, column: str, reader: ImageReader) -> Draft | str:
    """Give a draft the images of its row, by which it is another problem than that of the same words."""
    try:
        found = images_of(row, column, reader)
        prompt, sources = found.of_text(draft.prompt)
        sources += found.rest()
    except UserError as error:
        return str(error)
    if not sources:
        return draft
    shows = "\x00".join(found.names)
    return replace(draft, prompt=prompt, images=sources, shows=shows, key=f"{draft.key}\x00image\x00{shows}")
