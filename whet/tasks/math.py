"""The task `math`: competition problems with LaTeX answers; MATH-500 is the test split."""

from __future__ import annotations

from pathlib import Path

from whet.rewards.answers.equal import answers_equal
from whet.schema import AnswerType
from whet.tasks.read import BadRow, Row, as_raw, check_path, check_split, read_part, select_split, text_fault
from whet.types import Problem, problem_uid

FILES = {
    "train": ("MATH_train.jsonl", "train.jsonl"),
    "test": ("math500_test.json", "test.jsonl", "test.json"),
}


class MATH:
    """The 7,500 training problems and MATH-500; 5 % of the training problems are 'dev'.

    The answer column is used unchanged: a solution may box several values, and extraction finds only one.
    Two training rows have an empty gold answer (`\\boxed{}` in the source): no answer could score, so they are skipped.

    Source: arXiv:2103.03874; MATH-500 from arXiv:2305.20050.

    Attributes:
        name: 'math'.
        answer_type: 'text': LaTeX of any kind.
        bad_rows: Rows skipped so far; those without a gold answer do not count towards the limit.
        num_repeated: Repeated problems so far; they are kept.
    """

    name = "math"
    answer_type: AnswerType = "text"

    def __init__(self, path: str | Path, *, max_bad_rows: int = 0) -> None:
        """Set the location of the data; rows are read when a split is requested.

        Args:
            path: Folder with MATH_train.jsonl and math500_test.json (or train.jsonl and test.jsonl), or a hub
                name whose rows have problem, solution and answer, such as 'HuggingFaceH4/MATH-500'.
            max_bad_rows: Bad rows per file that are tolerated.
        """
        self._path = str(path)
        check_path(self._path, "HuggingFaceH4/MATH-500")
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
            source, rows, bad = read_part(
                self._path,
                part,
                names=FILES[part],
                required=("problem", "solution"),
                max_bad_rows=self._max_bad_rows,
                check=_fault,
            )
            empty = [(number, row) for number, row in rows if not row["answer"].strip()]
            self.bad_rows += [
                *bad,
                *(
                    BadRow(f"{source} line {number}", "'answer' is empty", number, as_raw(row))
                    for number, row in empty
                ),
            ]
            self._files[part] = [
                _problem(row, source, number) for number, row in rows if row["answer"].strip()
            ]
            self.num_repeated += len(self._files[part]) - len({p.uid for p in self._files[part]})
        return self._files[part]


def _fault(row: Row) -> str | None:
    fault = text_fault(row, "answer")
    return None if fault == "'answer' is empty" else fault


def _problem(row: Row, source: str, number: int) -> Problem:
    return Problem(
        uid=problem_uid(MATH.name, row["problem"]),
        task=MATH.name,
        prompt=row["problem"],
        answer=row["answer"],
        solution=row["solution"],
        meta={
            "subject": str(row.get("subject") or row.get("type") or ""),
            "level": str(row.get("level", "")).removeprefix("Level "),
            "file": source,
            "line": str(number),
        },
    )
