"""The task `math`: competition problems with LaTeX answers; MATH-500 is the test split."""

from __future__ import annotations

from pathlib import Path

from whet.rewards.answers.equal import answers_equal
from whet.schema import AnswerType
from whet.tasks.hub import Part, check_path, read_part
from whet.tasks.read import BadRow, Row, as_raw, check_split, is_hub_name, select_split, text_fault
from whet.tasks.sets import HUB_SETS
from whet.types import Problem, problem_uid

FILES = {
    "train": ("MATH_train.jsonl", "train.jsonl"),
    "test": ("math500_test.json", "test.jsonl", "test.json"),
}


class MATH:
    """The 7,500 training problems and MATH-500; 5 % of the training problems are 'dev'.

    An answer column is used unchanged. The hub's MATH has none: there the answer is the content of the solution's last
    box, which is how the answer column of the published copies was made (a solution may box several values).
    Two training rows have an empty gold answer (`\\boxed{}` in the source): no answer could score, so they are skipped.

    Source: arXiv:2103.03874; MATH-500 from arXiv:2305.20050.

    Attributes:
        name: 'math'.
        is_published: True: models that know no format are given an instruction.
        answer_type: 'text': LaTeX of any kind.
        bad_rows: Rows skipped so far; those without a gold answer do not count towards the limit.
        num_repeated: Repeated problems so far; they are kept.
    """

    name = "math"
    is_published = True
    answer_type: AnswerType = "text"

    def __init__(self, path: str | Path = "", *, max_bad_rows: int = 0) -> None:
        """Set the location of the data; rows are read when a split is requested.

        Args:
            path: Folder with MATH_train.jsonl and math500_test.json (or train.jsonl and test.jsonl), or a hub name
                whose rows have problem and solution, such as 'HuggingFaceH4/MATH-500'; '' for the seven subjects of
                'EleutherAI/hendrycks_math', tested on MATH-500.
            max_bad_rows: Bad rows per file that are tolerated.
        """
        self._path = str(path) or HUB_SETS["math"].path
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
            known = HUB_SETS["math"]
            there = known.parts[part] if self._path == known.path else Part(path=self._path, split=part)
            source, rows, bad = read_part(
                self._path,
                there if is_hub_name(self._path) else None,
                names=FILES[part],
                required=("problem", "solution"),
                max_bad_rows=self._max_bad_rows,
                check=_with_answer,
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


def _with_answer(row: Row) -> Row | str | None:
    """Add the answer where there is no such column, or say what is wrong with it; an empty one is told later."""
    if "answer" not in row:
        return {**row, "answer": last_box(row["solution"])}
    fault = text_fault(row, "answer")
    return None if fault == "'answer' is empty" else fault


def last_box(text: str) -> str:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`, braces nested, or the word after `\boxed `.

    Unlike `whet.rewards.answers.extract.from_box`, which reads completions, it never joins several boxes.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return ""
    rest = text[start:].partition("boxed" if text.startswith("\\boxed", start) else "fbox")[2]
    if not rest.startswith("{"):
        return rest.strip().partition("$")[0].strip()
    depth = 0
    for place, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[1:place]
    return ""


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
