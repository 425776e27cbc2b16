"""The task `jsonl`: the user's question-answer or chat data, as JSON lines or parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whet.rewards.answers.equal import answers_equal
from whet.rewards.answers.extract import extract_answer
from whet.schema import AnswerType, ResponseSchema
from whet.tasks.read import BadRow, Row, first_row, read_file, select_files, text_fault
from whet.types import Problem, UserError, problem_uid

PROMPT_FIELDS = ("prompt", "question", "problem")
MESSAGES = "messages"
ENDINGS = (".jsonl", ".jsonl.gz", ".parquet", ".csv", ".json")
READER = ResponseSchema(opening_in_prompt=False)


class Jsonl:
    """Problems from a file, or from a folder with train.jsonl and test.jsonl (or .parquet).

    A file is split by hash of the prompt: 5 % 'dev', 5 % 'test'. In a folder, 'dev' is 5 % of train.jsonl.
    A row is (prompt, answer, optional solution), or `messages`: the first user message is the prompt, the
    last assistant message holds solution and answer. If the answer is inside a worked text (`messages`,
    a solution without an answer column, an answer with '####' without a solution column), it is taken from
    there: the answer block, else what follows '####', else what `extract_answer` finds. Repeated rows are
    dropped; one prompt with several solutions stays several problems.

    Attributes:
        name: 'jsonl'.
        bad_rows: Rows skipped so far.
        num_duplicates: Repeated rows dropped so far.
    """

    name = "jsonl"
    answer_type: AnswerType = "text"

    def __init__(
        self,
        path: str | Path,
        *,
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        solution_field: str | None = None,
        max_bad_rows: int = 0,
    ) -> None:
        """Set the location of the data; rows are read when a split is requested.

        Args:
            path: A .jsonl, .jsonl.gz, .parquet, .csv or .json file, or a folder.
            prompt_field: Column of the question; default: the only one among `PROMPT_FIELDS` and messages.
            answer_field: Column of the gold answer; default: the answer is taken from the solution.
            solution_field: Column of the worked solution; default: 'solution', if present.
            max_bad_rows: Bad rows per file that are tolerated.
        """
        self._path = Path(path)
        if not str(path) or not self._path.exists():
            raise UserError(f"{str(path)!r}: no such file or folder; check --task.path")
        self._fields = (prompt_field, answer_field, solution_field)
        self._max_bad_rows = max_bad_rows
        self._files: dict[Path, list[Problem]] = {}
        self.bad_rows: list[BadRow] = []
        self.num_duplicates = 0

    def problems(self, split: str) -> list[Problem]:
        """Return all problems of 'train', 'dev' or 'test'."""
        return select_files(self._path, split, self._file, ENDINGS)

    def is_correct(self, problem: Problem, answer: str | None) -> bool:
        """Judge an extracted final answer."""
        return answer is not None and answers_equal(answer, problem.answer)

    def _file(self, path: Path) -> list[Problem]:
        if path not in self._files:
            prompt, answer, solution = columns = self._columns(path)
            worked = solution if self._fields[2] or answer is None else None
            rows, bad = read_file(
                path,
                required=[name for name in (prompt, answer, worked) if name not in (None, MESSAGES)],
                max_bad_rows=self._max_bad_rows,
                check=lambda row: found if isinstance(found := _contents(row, columns), str) else None,
            )
            self.bad_rows += bad
            contents = [(number, _contents(row, columns)) for number, row in rows]
            self._files[path] = self._unique(path.name, contents)
        return self._files[path]

    def _columns(self, path: Path) -> tuple[str, str | None, str | None]:
        """Determine the columns of prompt, answer and solution, from the first row that is an object."""
        prompt, answer, solution = self._fields
        present = first_row(path)
        there = f"there are: {', '.join(present)[:200]}"
        if prompt not in present and present:
            found = [name for name in (*PROMPT_FIELDS, MESSAGES) if name in present]
            if len(found) != 1:
                what = (
                    f"{' and '.join(map(repr, found))} could each be the prompt"
                    if found
                    else f"no {prompt!r}"
                )
                raise UserError(f"{path.name}: {what}; name the column with --task.prompt-field ({there})")
            prompt = found[0]
        if prompt == MESSAGES:
            return prompt, None, None
        solution = solution or ("solution" if "solution" in present else None)
        if answer in present or not present:
            return prompt, answer, solution
        if answer != "answer" or solution is None:
            raise UserError(f"{path.name}: no {answer!r}; name the column with --task.answer-field ({there})")
        return prompt, None, solution

    def _unique(self, source: str, contents: Sequence[tuple[int, Any]]) -> list[Problem]:
        problems: dict[str, Problem] = {}
        seen: set[tuple[str, str, str]] = set()
        for number, content in contents:
            if content in seen:
                self.num_duplicates += 1
                continue
            seen.add(content)
            prompt, answer, solution = content
            prompt_uid = problem_uid(self.name, prompt)
            uid = prompt_uid if prompt_uid not in problems else problem_uid(self.name, "\x00".join(content))
            meta = {"file": source, "line": str(number), "prompt_uid": prompt_uid}
            problems[uid] = Problem(
                uid=uid, task=self.name, prompt=prompt, answer=answer, solution=solution, meta=meta
            )
        return list(problems.values())


def _contents(row: Row, columns: tuple[str, str | None, str | None]) -> tuple[str, str, str] | str:
    """Return (prompt, answer, solution) of a row, or what is wrong with it."""
    prompt_field, answer_field, solution_field = columns
    if prompt_field == MESSAGES:
        return _from_messages(row.get(MESSAGES))
    prompt = row[prompt_field]
    if answer_field is None:
        assert solution_field is not None
        return _from_worked(prompt, row[solution_field], repr(solution_field))
    if solution_field is None and "####" in row[answer_field]:
        return _from_worked(prompt, row[answer_field], repr(answer_field))
    solution = row.get(solution_field) if solution_field is not None else None
    if solution in (None, ""):
        return prompt, row[answer_field].strip(), ""
    return text_fault(row, str(solution_field)) or (prompt, row[answer_field].strip(), str(solution).strip())


def _from_messages(messages: Any) -> tuple[str, str, str] | str:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return "'messages' is not a list of objects"
    users = [message for message in messages if message.get("role") == "user"]
    assistants = [message for message in messages if message.get("role") == "assistant"]
    if not users or not assistants:
        return f"'messages' has no {'assistant' if users else 'user'} message"
    for message in (users[0], assistants[-1]):
        if fault := text_fault(message, "content"):
            return f"'messages', {message['role']}: {fault}"
    return _from_worked(users[0]["content"], assistants[-1]["content"], "the last assistant message")


def _from_worked(prompt: str, text: str, source: str) -> tuple[str, str, str] | str:
    """Split a worked text into solution and answer: by its blocks, by '####', else by `extract_answer`."""
    parsed = READER.parse(text)
    if parsed.answer:
        return prompt, parsed.answer, (parsed.thinking or "").strip()
    solution, mark, last = text.rpartition("####")
    if mark and last.strip():
        return prompt, last.strip(), solution.strip()
    answer = extract_answer(text)
    return (prompt, answer, text) if answer else f"no final answer found in {source}"
