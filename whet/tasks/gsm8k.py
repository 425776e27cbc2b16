"""GSM8K: grade-school word problems with worked solutions and a number after '####'."""

from __future__ import annotations

import re
from pathlib import Path

from whet.rewards.answers.equal import answers_equal
from whet.tasks.hub import Part, check_path, read_part
from whet.tasks.read import BadRow, Row, check_split, is_hub_name, select_split
from whet.tasks.sets import HUB_SETS
from whet.types import Problem, problem_uid

CALCULATOR = re.compile(r"<<[^<>]*>>")


class GSM8K:
    """The 7,473 training and 1,319 test problems; 5 % of the training problems are 'dev'.

    Source: arXiv:2110.14168. Deviation: calculator annotations `<<48/2=24>>` are removed by default.

    Attributes:
        name: 'gsm8k'.
        is_published: True: models that know no format are given an instruction.
        bad_rows: Rows skipped so far.
        num_repeated: Repeated problems so far; they are kept.
    """

    name = "gsm8k"
    is_published = True

    def __init__(
        self, path: str | Path = "", *, keep_calculator: bool = False, max_bad_rows: int = 0
    ) -> None:
        """Set the location of the data; rows are read when a split is requested.

        Args:
            path: Folder with train.jsonl and test.jsonl (.gz too), or a hub name; '' for 'openai/gsm8k'.
            keep_calculator: Whether solutions keep their `<<...>>`.
            max_bad_rows: Bad rows per file that are tolerated.
        """
        self._path = str(path) or HUB_SETS["gsm8k"].path
        check_path(self._path, "openai/gsm8k")
        self._keep_calculator = keep_calculator
        self._max_bad_rows = max_bad_rows
        self._files: dict[str, list[Problem]] = {}
        self.bad_rows: list[BadRow] = []
        self.num_repeated = 0

    def problems(self, split: str) -> list[Problem]:
        """Return all problems of 'train', 'dev' or 'test'."""
        check_split(split)
        return list(self._file("test")) if split == "test" else select_split(self._file("train"), split)

    def is_correct(self, problem: Problem, answer: str | None) -> bool:
        """Judge an extracted final answer."""
        return answer is not None and answers_equal(answer, problem.answer)

    def _file(self, part: str) -> list[Problem]:
        if part not in self._files:
            known = HUB_SETS["gsm8k"]
            there = known.parts[part] if self._path == known.path else Part(path=self._path, split=part)
            source, rows, bad = read_part(
                self._path,
                there if is_hub_name(self._path) else None,
                names=[f"{part}.jsonl"],
                required=("question", "answer"),
                max_bad_rows=self._max_bad_rows,
                check=_fault,
            )
            self.bad_rows += bad
            self._files[part] = [self._problem(row, source, number) for number, row in rows]
            self.num_repeated += len(self._files[part]) - len({p.uid for p in self._files[part]})
        return self._files[part]

    def _problem(self, row: Row, source: str, number: int) -> Problem:
        solution, _, answer = row["answer"].rpartition("####")
        return Problem(
            uid=problem_uid(self.name, row["question"]),
            task=self.name,
            prompt=row["question"],
            answer=answer.strip().replace(",", ""),
            solution=(solution if self._keep_calculator else CALCULATOR.sub("", solution)).strip(),
            meta={"file": source, "line": str(number)},
        )


def _fault(row: Row) -> str | None:
    if "####" not in row["answer"]:
        return "'answer' has no '####'"
    return None if row["answer"].rpartition("####")[2].strip(" ,\n") else "'answer' has nothing after '####'"
