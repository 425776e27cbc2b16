"""Questions, chats and plain text from rows of any columns: the user's files, and data sets of the hub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from whet.config import near_file
from whet.model.vision.reading import Urls, shown
from whet.rewards.answers.equal import answers_equal
from whet.rewards.answers.numbers import is_grouped, with_points
from whet.rewards.answers.texts import Column, column_of
from whet.schema import COLUMN, AnswerType
from whet.tasks.choice import has_options
from whet.tasks.columns import Columns, Content, accepted_in, read_row, recognise
from whet.tasks.hub import TEST, TRAIN, Part, find_parts, hub_rows
from whet.tasks.images import ImageReader
from whet.tasks.read import (
    ENDINGS,
    TEST_PERCENT,
    BadRow,
    Row,
    check_split,
    division,
    first_row,
    has_semicolons,
    is_hub_name,
    read_file,
    refuse_kind,
    select_files,
    select_split,
    sift,
)
from whet.tasks.selftest import mutated_answer, rewritten_answers
from whet.tasks.sets import HubSet, known_set
from whet.types import Problem, UserError, problem_uid

SHOWN = 160
"""Characters of the sample row that `Jsonl.recognised` shows of each field."""
TOOLS, CALLS = "tools", "tool_calls"
"""Labels in a problem's `meta`: JSON list of tool definitions, and of the calls that its reply makes."""


class Jsonl:
    """Problems from a file, from a folder with train and test files, or from the hub.

    A file is split by hash of the prompt: 5 % 'dev', 5 % 'test' (`held_out`). In a folder, 'dev' is 5 % of the train
    file. On the hub the splits train and test are used, or one split, which is split like a file.

    A row is a question with an answer, a worked solution or a reply; a chat, whose last assistant message is the reply
    and all before it the question; or plain text. If the answer is inside a worked text or a reply, it is taken from
    there: the answer block, else what follows '####', else what the text calls its answer. A column of the answer may
    hold a list, of which any is right (as JSON text, where every row has one). Where one row of the data has none, and
    `max_bad_rows` does not leave it out, all replies are learned as they are, and no problem has an answer. Repeated
    rows are dropped; one prompt with several solutions stays several problems.

    Attributes:
        name: 'jsonl', or the name of the data set.
        answer_type: 'text', or what the answers of a data set with a name are.
        is_published: Whether it is a data set with a name.
        bad_rows: Rows skipped so far.
        num_duplicates: Repeated rows dropped so far.
        divided: How the rows of one file or split were divided; '' before, and for other data.
        recognised: What each column was taken for, and a sample row; '' before anything was read.
        no_gold: Why problems have no answer; '' where they have one.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str = "jsonl",
        known: HubSet | None = None,
        prompt: str = "",
        answer: str = "",
        solution: str = "",
        images: str = "",
        image_root: str = "",
        image_urls: Urls = "none",
        config: str = "",
        split: str = "",
        max_rows: int = 0,
        max_bad_rows: int = 0,
        held_out: float = 0.01 * TEST_PERCENT,
    ) -> None:
        """Set the location of the data; rows are read when a split is requested.

        Args:
            path: A file that `read_file` reads, a folder of such, or a hub name; '' for that of `known`.
            name: Name of the task.
            known: A data set with a name: its columns, and which of its rows are used.
            prompt: Column of the question, or of the chat; '' is recognised (`whet.tasks.columns`).
            answer: Column of the gold answer; 'none' learns replies as they are.
            solution: Column of the worked solution or reply.
            images: Column of the images; '' is recognised, 'none' reads none.
            image_root: Folder of images that are named by paths; '' for the folder of the data.
            image_urls: Which URLs of images are fetched.
            config: Configuration on the hub.
            split: Split on the hub, if it is to be only one.
            max_rows: Rows to read of each file or split, from the front; of the hub they are streamed. 0 reads all.
            max_bad_rows: Bad rows per file that are tolerated.
            held_out: Share of 'dev', and of 'test', where one file or split is divided.
        """
        self.name = name
        place = Path(path) if str(path) else None
        is_local = place is not None and place.exists()
        # Only a folder that has no train or test file of ours is left to `datasets`.
        self._path = (
            place if is_local and (place is None or place.is_file() or not _is_hub_folder(place)) else None
        )
        if self._path is None and not is_local and str(path) and not is_hub_name(str(path)):
            raise UserError(
                f"{str(path)!r}: no such file or folder, and not a hub name such as 'openai/gsm8k'; "
                f"{near_file(path) or 'check --task.path'}"
            )
        if self._path is not None and (config or split):
            option = "config" if config else "split"
            raise UserError(
                f"task.{option} is for data sets of the hub; {path} is a file or folder: leave it out"
            )
        self._hub = str(path)
        self._known = known or (
            known_set(self._hub) if not (prompt or answer or solution or images) else None
        )
        self._columns = {"prompt": prompt, "answer": answer, "solution": solution, "images": images}
        if self._known is not None:
            self._columns = {
                option: given or getattr(self._known, option) for option, given in self._columns.items()
            }
        self.is_published = self._known is not None
        self.answer_type: AnswerType = self._known.answer_type if self._known is not None else "text"
        self._config, self._split = config, split
        self._image_root = image_root
        self._image_urls: Urls = image_urls
        on_hub = self._known if self._path is None else None
        self._max_rows = max_rows or (on_hub.max_rows if on_hub else 0)
        self._max_bad_rows = max_bad_rows
        self._percent = 100 * held_out
        self._files: dict[Any, list[Problem]] = {}
        self._parts: dict[str, Part] | None = None
        self.bad_rows: list[BadRow] = []
        self.num_duplicates = 0
        self.recognised = self.divided = self.no_gold = ""

    def problems(self, split: str) -> list[Problem]:
        """Return all problems of 'train', 'dev' or 'test'."""
        if self._path is not None:
            found = select_files(
                self._path, split, self._file, ENDINGS, name=self.name, percent=self._percent
            )
            if self._path.is_file() and not self.divided:
                self.divided = division(self._path.name, self._file(self._path), self._percent)
            return found
        check_split(split)
        if self._parts is None:
            self._parts = self._found_parts()
        if split == TEST and TEST in self._parts:
            return list(self._part(self._parts[TEST]))
        if TRAIN not in self._parts:
            return []
        rows = self._part(self._parts[TRAIN])
        if TEST in self._parts:
            return select_split(rows, split, dev_percent=self._percent)
        self.divided = self.divided or division(str(self._parts[TRAIN]), rows, self._percent)
        return select_split(rows, split, dev_percent=self._percent, test_percent=self._percent)

    def is_correct(self, problem: Problem, answer: str | None) -> bool:
        """Judge an extracted final answer."""
        if answer is None or not problem.answer:
            return False
        column: Any = problem.meta.get(COLUMN, "")
        return any(answers_equal(answer, gold, column=column) for gold in problem.answers)

    def wrong_answer(self, problem: Problem) -> str:
        """Return an answer that is nearly right, for audits."""
        return mutated_answer(meant_answer(problem))

    def other_spellings(self, problem: Problem) -> list[str]:
        """Return other spellings of a right answer, for audits."""
        return rewritten_answers(meant_answer(problem))

    def _found_parts(self) -> dict[str, Part]:
        """Return what to read on the hub: as the table has it, unless something else is asked for."""
        known = self._known
        if known is None or (self._hub and self._hub != known.path):
            return find_parts(self._hub, self._config, self._split)
        parts = dict(known.parts)
        if self._config:
            parts = {ours: replace(part, configs=(self._config,)) for ours, part in parts.items()}
        if self._split:
            parts = {TRAIN: replace(next(iter(parts.values())), split=self._split)}
        return parts

    def _part(self, part: Part) -> list[Problem]:
        """Read a part of the hub."""
        if part not in self._files:
            rows = hub_rows(part, max_rows=self._max_rows)
            begun = []
            for row in rows:
                begun.append(row)
                if isinstance(row[2], dict) and row[2]:
                    break
            if not begun:
                raise UserError(f"{part}: no rows in it")
            present = begun[-1][2] if isinstance(begun[-1][2], dict) else {}
            self._files[part] = self._read(str(part), self._prepared(present) or present, chain(begun, rows))
        return self._files[part]

    def _file(self, path: Path) -> list[Problem]:
        if path not in self._files:
            refuse_kind(path)
            present = first_row(path)
            self._files[path] = self._read(path.name, self._prepared(present) or present, path)
        return self._files[path]

    def _prepared(self, row: Row) -> Row | None:
        prepare = self._known.prepare if self._known is not None else None
        return row if prepare is None else prepare(row)

    def _read(self, source: str, present: Row, rows: Path | Iterable[tuple[Any, ...]]) -> list[Problem]:
        """Read rows into problems: a file's, or those that `sift` takes."""
        columns = recognise(present, source, **self._columns) if present else None
        if self._known is None and not self._columns["answer"] and has_options(present):
            raise UserError(
                f"{source}: multiple-choice questions, whose choices the model would not see; read them with --task "
                "choice (or, where the question itself lists them, name the answer's column: --task.answer)"
            )

        folder = rows.parent if isinstance(rows, Path) else None
        reader = ImageReader(Path(self._image_root) if self._image_root else folder, self._image_urls)

        def check(row: Row) -> Any:
            prepared = self._prepared(row)
            assert columns is not None
            # () stands for a row that is not used.
            return () if prepared is None else read_row(prepared, columns, reader)

        if isinstance(rows, Path):
            options: Any = {"max_bad_rows": self._max_bad_rows, "check": check, "max_rows": self._max_rows}
            found, bad = read_file(rows, required=(), **options)
        else:
            found, bad = sift(source, rows, (), self._max_bad_rows, check)  # pyright: ignore[reportArgumentType]
        contents = [(number, content) for number, content in found if content != ()]
        if columns is not None:
            contents, left_out = self._settled(source, columns, contents, self._max_bad_rows - len(bad))
            bad += left_out
            sample = contents[0][1] if contents else None
            self.recognised = _shown(source, columns, sample, self.no_gold)
        self.bad_rows += bad
        if not contents:
            raise UserError(f"{source}: no rows that can be used")
        golds = [content.answer for _, content in contents if content.answer]
        column = column_of(golds, has_semicolons=isinstance(rows, Path) and has_semicolons(rows))
        self.recognised += _numbers(column, golds)
        return self._unique(source, contents, column)

    def _settled(
        self, source: str, columns: Columns, contents: list[tuple[int, Content]], num_tolerated: int
    ) -> tuple[list[tuple[int, Content]], list[BadRow]]:
        """Decide for the whole data whether answers are taken from replies: all of them have one, or none is parsed."""
        if columns.answer:
            parsed = [(number, content.parsed()) for number, content in contents]
            lists = [accepted_in(content) for _, content in parsed]
            if all(lists):  # of the whole column: among other answers such text is an answer itself
                parsed = [(n, found) for (n, _), found in zip(parsed, lists, strict=True) if found]
            return parsed, []
        without = [(number, content) for number, content in contents if not content.answer]
        column = "the last assistant message" if columns.kind == "chat" else repr(columns.solution)
        if not without or (len(without) <= num_tolerated and len(without) < len(contents)):
            reason = f"no final answer found in {column}"
            word = "line" if source.endswith((".jsonl", ".jsonl.gz")) else "row"
            bad = [BadRow(f"{source} {word} {number}", reason, number) for number, _ in without]
            return [(number, content.parsed()) for number, content in contents if content.answer], bad
        if columns.kind == "text" or not any(content.reply for _, content in contents):
            what = "they are plain text" if columns.kind == "text" else "no column holds one"
            self.no_gold = f"{source}: {what}"
        elif columns.is_verbatim:
            self.no_gold = f"{source}: replies are learned as they are"
        else:
            remedy = f", or leave out such rows with --task.max-bad-rows {len(without)}"
            self.no_gold = (
                f"{source}: {len(without):,} of {len(contents):,} rows have no final answer in {column} (first: "
                f"{without[0][0]})" + (remedy if len(without) < len(contents) else "")
            )
        return [(number, content.verbatim()) for number, content in contents], []

    def _unique(self, source: str, contents: Sequence[tuple[int, Content]], column: Column) -> list[Problem]:
        problems: dict[str, Problem] = {}
        seen: set[Content] = set()
        for number, content in contents:
            if content in seen:
                self.num_duplicates += 1
                continue
            seen.add(content)
            names = content.image_names
            prompt_uid = uid = problem_uid(self.name, content.key, names)
            if uid in problems:
                gold = "\x00".join((content.answer, *content.other_answers))
                said = (content.key, gold, content.solution, content.reply)
                uid = problem_uid(self.name, "\x00".join(said[: 4 if content.reply else 3]), names)
            meta = {"file": source, "line": str(number), "prompt_uid": prompt_uid}
            meta |= {
                name: text
                for name, text in ((TOOLS, content.tools), (CALLS, content.calls), (COLUMN, column))
                if text
            }
            problems[uid] = Problem(
                uid=uid,
                task=self.name,
                prompt=content.prompt,
                answer=content.answer,
                solution=content.solution,
                messages=content.messages,
                images=content.images,
                reply=content.reply,
                other_answers=content.other_answers,
                meta=meta,
            )
        return list(problems.values())


def _is_hub_folder(folder: Path) -> bool:
    """Say whether a folder is a copy of a data set of the hub: it has no train or test file of the forms read here."""
    names = ("train", "test")
    plain = any((folder / f"{name}{end}").is_file() for name in names for end in ENDINGS)
    return folder.is_dir() and not plain and not any(folder.glob("t*-*-of-*.parquet")) and _has_card(folder)


def _has_card(folder: Path) -> bool:
    return (folder / "README.md").is_file()


def _shown(source: str, columns: Columns, sample: Content | None, no_gold: str) -> str:
    """Say what was recognised, with one row."""
    lines = [f"{source}: {columns}"]
    if no_gold:
        lines.append(f"without gold answers: {no_gold.removeprefix(f'{source}: ')}")
    if sample is not None:
        asked = (
            f"{len(sample.messages)} messages, last {sample.prompt!r}"
            if sample.messages
            else repr(sample.prompt)
        )
        parts = {
            "question": asked if sample.prompt else "",
            "answer": " or ".join(map(repr, (sample.answer, *sample.other_answers))) if sample.answer else "",
        }
        images = (*sample.images, *(source for message in sample.messages for source in message.images))
        parts |= {"images": ", ".join(map(shown, images))}
        parts |= {"solution": repr(sample.solution) if sample.solution else ""}
        parts |= {"reply": repr(sample.reply) if sample.reply else ""}
        lines += [f"  {name}: {text[:SHOWN]}" for name, text in parts.items() if text]
    return "\n".join(lines)


def meant_answer(problem: Problem) -> str:
    """Return a gold answer as any reader would read it: among decimal commas `1.050` as `1050`."""
    return (
        with_points(problem.answer, has_groups=True)
        if problem.meta.get(COLUMN) == "comma"
        else problem.answer
    )


def _numbers(column: Column, golds: Sequence[str]) -> str:
    """Report how answers like `1.700` and `12,75` are read, with the first of each."""
    grouped = next((gold for gold in golds if is_grouped(gold)), "")
    if column == "comma":
        decimal = next((gold for gold in golds if with_points(gold) != gold), "")
        shown = (f"{one!r} is {with_points(one, has_groups=True)}" for one in (grouped, decimal) if one)
        return f"\n  decimal commas: {', '.join(shown)}"
    if (column or column_of(golds, has_semicolons=True)) != "comma":
        return ""
    if grouped:
        whole = with_points(grouped, has_groups=True)
        return f"\n  warning: {grouped!r} is read as a decimal number; where it means {whole}, write it so"
    pair = next((gold for gold in golds if with_points(gold) != gold), "")
    return (
        f"\n  warning: {pair!r} is read as two numbers; where it means {with_points(pair)}, write it so"
        if pair
        else ""
    )
