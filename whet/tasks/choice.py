"""Multiple-choice and yes/no questions from the user's own files."""

from __future__ import annotations

import json
import re
from typing import Any

from whet.rewards.answers.scripts import VERDICTS, fold
from whet.tasks.made.draft import Draft, FromRows
from whet.tasks.read import Row, text_fault
from whet.types import Problem, Task

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
QUESTION_FIELDS = ("prompt", "question", "problem")
CHOICE_FIELDS = ("choices", "options")
ANSWER_FIELDS = ("answer", "answerKey", "label")
YES_NO = {"yes": "yes", "no": "no", "true": "yes", "false": "no", "1": "yes", "0": "no"}
MAX_CHARACTERS = 4000
_LABEL = re.compile(r"[(\[]?([A-Za-z])[)\].:]?(?:\s+(.*))?", re.DOTALL)


def choice(path: str, **options: Any) -> Task:
    """Return the task `choice`.

    A row is a question (`prompt`, `question` or `problem`), its choices (`choices` or `options`: a list, a dict of
    label and text lists, or a dict of letters; or columns A, B, C, ...) and an answer (`answer`, `answerKey` or
    `label`): a letter, a whole number that counts from 0, one of the data's own labels, or the text of a choice.

    Args:
        path: File or folder.
        options: Of `FromRows`: which rows are bad or held out, and where their images are.
    """
    return FromRows("choice", path, _choice_row, is_choice, answer_type="choice", **options)


def yes_no(path: str, **options: Any) -> Task:
    """Return the task `yes_no`: rows of a question and an answer that is yes, no, true, false, 1 or 0.

    Args:
        path: File or folder.
        options: Of `FromRows`: which rows are bad or held out, and where their images are.
    """
    return FromRows("yes_no", path, _yes_no_row, is_yes_no, answer_type="yes_no", **options)


def has_options(row: Row) -> bool:
    """Say whether a row's answer is the letter or the place of a choice that stands in a column of its own."""
    labels, texts = _choices(row)
    raw = next((row[name] for name in ANSWER_FIELDS if name in row), None)
    is_named = isinstance(raw, int) or (isinstance(raw, str) and raw.strip() in labels)
    texts_given = len(texts) >= 2 and all(isinstance(text, str) for text in texts)
    return texts_given and is_named and isinstance(_right(raw, labels, texts), int)


def is_choice(problem: Problem, answer: str) -> bool:
    """Say whether an answer names the right choice, and only that one.

    Accepted are the letter (`B`, `b`, `(B)`, `B.`, `B:`), the letter with the text of the same choice, and the text of
    a choice if no other choice has the same; case, white space and a full stop at the end do not matter in texts.
    """
    if len(answer) > MAX_CHARACTERS:
        return False
    return _chosen(answer, json.loads(problem.meta["choices"])) == LETTERS.index(problem.answer)


def is_yes_no(problem: Problem, answer: str) -> bool:
    """Say whether an answer is the right one of yes and no, in any known language; true and false count as these."""
    word = fold(answer).strip().rstrip(".。").lower() if len(answer) <= MAX_CHARACTERS else ""
    return word in VERDICTS and YES_NO[VERDICTS[word]] == problem.answer


def _chosen(answer: str, choices: list[str]) -> int | None:
    """Return the index of the one choice that an answer means, or None; a single letter is always a label."""
    texts = [_plain(text) for text in choices]
    label = _LABEL.fullmatch(answer.strip())
    if label and label[1].upper() in LETTERS[: len(choices)]:
        place = LETTERS.index(label[1].upper())
        if label[2] is None or _plain(label[2]) == texts[place]:
            return place
    return texts.index(_plain(answer)) if _plain(answer) in texts else None


def _plain(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").casefold()


def _choice_row(row: Row) -> Draft | str:
    question = next((name for name in QUESTION_FIELDS if name in row), QUESTION_FIELDS[0])
    if fault := text_fault(row, question):
        return fault
    labels, texts = _choices(row)
    if not 2 <= len(texts) <= len(LETTERS) or not all(
        isinstance(text, str) and text.strip() for text in texts
    ):
        return f"expected 2 to {len(LETTERS)} choices of text in 'choices' or columns A, B, C, ..., got {len(texts)}"
    if fault := next(filter(None, (text_fault({"choice": text}, "choice") for text in texts)), None):
        return fault
    if len({_plain(text) for text in texts}) < len(texts):
        return "two choices are the same"
    raw = next((row[name] for name in ANSWER_FIELDS if name in row), None)
    right = _right(raw, labels, texts)
    if isinstance(right, str):
        return right
    listed = "\n".join(f"{letter}. {text.strip()}" for letter, text in zip(LETTERS, texts, strict=False))
    text = row[question].strip()
    key = f"{text}\n{sorted(_plain(choice) for choice in texts)}"
    meta = {"choices": json.dumps(texts), "subject": str(row.get("subject") or "")}
    return Draft(key, f"{text}\n\n{listed}", LETTERS[right], meta=meta)


def _choices(row: Row) -> tuple[list[str], list[Any]]:
    """Return the data's own labels and the texts of the choices, from any of the known columns."""
    found = next((row[name] for name in CHOICE_FIELDS if name in row), None)
    if isinstance(found, dict) and isinstance(found.get("text"), list):
        return list(map(str, found.get("label", LETTERS[: len(found["text"])]))), found["text"]
    if isinstance(found, list):
        return list(LETTERS[: len(found)]), found
    columns = found if isinstance(found, dict) else row
    letters = [letter for letter in LETTERS if columns.get(letter) not in (None, "")]
    return letters, [columns[letter] for letter in letters] if "".join(letters) in LETTERS else []


def _right(raw: Any, labels: list[str], texts: list[str]) -> int | str:
    """Return the index of the gold choice, or why it cannot be determined."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw if 0 <= raw < len(texts) else f"'answer' {raw} is not an index from 0 to {len(texts) - 1}"
    if not isinstance(raw, str):
        return f"no 'answer' that is a letter, an index or the text of a choice, got {str(raw)[:40]!r}"
    found = {index for index, label in enumerate(labels) if label == raw.strip().strip("().")}
    found |= {index for index, text in enumerate(texts) if text.strip() == raw.strip()}
    if len(found) != 1:
        return f"'answer' {raw[:40]!r} is {'more than one' if found else 'none'} of the choices"
    return found.pop()


def _yes_no_row(row: Row) -> Draft | str:
    question = next((name for name in QUESTION_FIELDS if name in row), QUESTION_FIELDS[0])
    if fault := text_fault(row, question):
        return fault
    raw = next((row[name] for name in ANSWER_FIELDS if name in row), None)
    word = fold(str(raw)).strip().lower()
    gold = YES_NO.get(VERDICTS.get(word, word))
    if gold is None:
        return f"'answer' is {str(raw)[:40]!r}, expected yes, no, true, false, 1 or 0"
    return Draft(row[question].strip(), row[question].strip(), gold)
