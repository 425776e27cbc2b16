"""Facts to write into a model: their record, the layouts of files that hold them, and what contradicts what."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whet.config import user_path
from whet.tasks.read import read_file
from whet.types import UserError

PLACE = "{}"
MANY = "|"
"""What parts several texts in one cell of a CSV file."""
UNSPACED = (
    *("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "BOPOMOFO", "YI "),
    *("HANGUL", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE", "BALINESE", "TAI "),
)
"""What Unicode names of letters begin with that stand beside a word without a space: of scripts that have none between
words, and of Korean, whose particles follow a name directly."""
SPACES = {"": None, "none": None, "true": True, "false": False}
"""Values of a row's `space`, as JSON and as a cell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """A prompt about something else, whose answer an edit must leave alone.

    Attributes:
        prompt: The whole prompt.
        answer: What is true of it; '' for the fact's own `true`, as in CounterFact.
    """

    prompt: str
    answer: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One fact: what a prompt about a subject is to be completed with.

    Attributes:
        subject: What it is about.
        prompt: Template with {} in the subject's place; the target follows it.
        target: The new completion.
        true: What the model says, or should have said, before; '' if unknown.
        paraphrases: Whole prompts that ask the same in other words.
        neighbours: Prompts about other subjects.
        openings: Beginnings of texts about the subject, for what the model writes freely.
        references: Texts about things of which the target is true; what it writes is compared with them.
        where: Where it was read, for messages.
        space: Whether a space stands between a prompt and its target; None: where the texts call for one.
    """

    subject: str
    prompt: str
    target: str
    true: str = ""
    paraphrases: tuple[str, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    openings: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    where: str = ""
    space: bool | None = None

    @property
    def text(self) -> str:
        """The prompt with the subject in it."""
        return self.prompt.replace(PLACE, self.subject)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values, which `read_fact` reads again."""
        return asdict(self)


SUBJECT = ("subject",)
PROMPT = ("prompt", "template", "question")
TARGET = ("target", "target_new", "new", "new_target", "object_new")
TRUE = ("true", "target_true", "ground_truth", "old", "attribute", "object")
PARAPHRASES = ("paraphrases", "paraphrase_prompts", "rephrase_prompt", "rephrase")
NEIGHBOURS = ("neighbours", "neighborhood_prompts", "locality_prompt", "neighbors")
OPENINGS = ("openings", "generation_prompts")
REFERENCES = ("references",)


def read_facts(source: str | Path | Sequence[Mapping[str, Any]], *, needs_target: bool = True) -> list[Fact]:
    """Read facts from a file (.jsonl, .json, .csv, .parquet) or from dicts.

    Rows may be whet's own (`Fact`), CounterFact's (with `requested_rewrite`, or flat as EasyEdit has it), or of
    the source of this method, with subject, prompt, old and new.

    Args:
        source: A path, or the rows.
        needs_target: Whether a row without a new completion is an error; tracing needs none.

    Raises:
        UserError: If the file cannot be read, or a row is malformed; the row is named.
    """
    if isinstance(source, (str, Path)):
        path = user_path(source)
        if not path.is_file():
            raise UserError(
                f"{path}: no such file; give one with a fact in each row: subject, prompt, target"
            )
        try:
            rows, _ = read_file(path, required=[], max_bad_rows=None)
        except UserError:
            _refuse_object(path)
            raise
        if len(rows) == 1 and "samples" in rows[0][1]:
            _refuse_object(path)
        numbered = [(f"{path.name} row {number}", row) for number, row in rows]
    else:
        numbered = [(f"fact {number}", row) for number, row in enumerate(source, 1)]
    facts = [read_fact(row, where, needs_target=needs_target) for where, row in numbered]
    if not facts:
        raise UserError("got no facts, expected at least one with subject, prompt and target")
    return facts


def read_fact(row: Mapping[str, Any], where: str, *, needs_target: bool = True) -> Fact:
    """Read one row.

    Raises:
        UserError: If something is missing or malformed.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: got {row!r:.60}, expected a row with subject, prompt and target")
    if isinstance(asked := row.get("requested_rewrite"), Mapping):
        row = {**row, **asked}
    subject = _text(row, SUBJECT, where)
    prompt = _text(row, PROMPT, where)
    target = _text(row, TARGET, where, needed=needs_target)
    true = _text(row, TRUE, where, needed=False)
    if prompt.count(PLACE) > 1:
        raise UserError(f"{where}: prompt {prompt[:80]!r} has {{}} more than once; expected it once")
    if PLACE not in prompt:
        start, end = find_subject(prompt, subject, where)
        # The spelling of the prompt: it is what the model reads.
        subject, prompt = prompt[start:end], prompt[:start] + PLACE + prompt[end:]
    neighbours = _listed(row, NEIGHBOURS, where)
    answer = str(row.get("locality_ground_truth") or "")
    space = SPACES.get(str(row.get("space", "")).strip().lower(), "?")
    if space == "?":
        raise UserError(
            f"{where}: space is {row['space']!r:.60}, expected true, false, or nothing for what the texts call for"
        )
    return Fact(
        subject=subject,
        prompt=prompt,
        target=target,
        true=true,
        paraphrases=tuple(text.replace(PLACE, subject) for text in _texts(row, PARAPHRASES, where)),
        neighbours=tuple(_neighbour(one, answer, where) for one in neighbours),
        openings=tuple(text.replace(PLACE, subject) for text in _texts(row, OPENINGS, where)),
        references=_texts(row, REFERENCES, where),
        where=where,
        space=space,
    )


def is_spaced(left: str, right: str) -> bool:
    """Say whether a space is written between two texts, by the characters that meet.

    None follows white space, an opening bracket or quote, a sign of currency, a slash, or a hyphen inside a word; none
    precedes closing punctuation. Otherwise the script decides: Chinese, Japanese, Thai and the like have none between
    words. Korean does.

    Args:
        left: The first text, not empty.
        right: The second, not empty.
    """
    last, before, first = left[-1], left[-2:-1], right[0]
    is_opening = not before or before.isspace() or unicodedata.category(before) in ("Ps", "Pi")
    if last.isspace() or last in "/\\@#_" or unicodedata.category(last) in ("Ps", "Pi", "Sc"):
        return False
    if (last in "\"'`" and is_opening) or (last in "-\u2010\u2011" and before.isalnum()):
        return False
    if unicodedata.category(first) in ("Pe", "Pf") or (first in ".,;:!?%" and not right[1:2].isalnum()):
        return False
    if _is_wide_mark(last) or _is_wide_mark(first):
        return False
    letter = next((one for one in reversed(left) if one.isalpha()), "")
    return not _is_unspaced(letter)


def _is_wide_mark(character: str) -> bool:
    """Say whether a character is Chinese or Japanese punctuation, which brings its own space."""
    return unicodedata.category(character)[0] == "P" and unicodedata.east_asian_width(character) in "WF"


def _is_unspaced(letter: str) -> bool:
    name = unicodedata.name(letter, "") if letter else ""
    return name.startswith(UNSPACED) and not name.startswith("HANGUL")


def _refuse_object(path: Path) -> None:
    """Say of a file that is one JSON object what it is; return where it is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(content, Mapping):
        return
    fields = ", ".join(map(str, list(content)[:6])) or "nothing"
    what = "one JSON object"
    if "samples" in content and "prompt_templates" in content:
        what = "a relation with the subjects of many facts (as of the LRE data set)"
    raise UserError(
        f"{path.name}: {what}, with {fields}; expected rows, one fact each, with subject, prompt and target: a JSON "
        "array, or an object on each line"
    )


def find_subject(text: str, subject: str, where: str) -> tuple[int, int]:
    """Find a subject in a prompt: as it is spelt, as a whole word first, then whatever the case of its letters.

    Both are compared decomposed (NFD), so that an accent may be a part of its letter in one and follow it in the other.

    Returns:
        Its first character and the one behind its last. Of several the last one, behind which most is said.

    Raises:
        UserError: If it is not there, or only as a part of another word.
    """
    # Of each decomposed character the one of the text that it is of: spans are those of the text as it is written.
    parts = [unicodedata.normalize("NFD", character) for character in text]
    plain, origin = "".join(parts), [n for n, part in enumerate(parts) for _ in part]
    wanted = re.escape(unicodedata.normalize("NFD", subject.strip()))
    is_there = False
    for flags in (0, re.IGNORECASE):
        found = [match.span(1) for match in re.finditer(f"(?=({wanted}))", plain, flags)]
        whole = [one for one in found if all(_parts_words(plain, place) for place in one)]
        if whole:
            start, end = whole[-1]
            return origin[start], origin[end - 1] + 1
        is_there = is_there or bool(found)
    if is_there:
        raise UserError(
            f"{where}: subject {subject!r} is only a part of a word in {text[:80]!r}; give it as it stands there"
        )
    raise UserError(
        f"{where}: subject {subject!r} is not in {text[:80]!r}; put {{}} where it belongs, or correct it"
    )


def _parts_words(text: str, place: int) -> bool:
    """Say whether a word may begin or end before a place of a decomposed text."""
    if place in (0, len(text)):
        return True
    left, right = text[place - 1], text[place]
    if unicodedata.category(right).startswith("M") or "\u1160" <= right <= "\u11ff":
        return False  # an accent, or the vowel of a Korean syllable: inside a character
    return not all(
        _is_of_word(one) and not unicodedata.name(one, "").startswith(UNSPACED) for one in (left, right)
    )


def _is_of_word(character: str) -> bool:
    return character == "_" or character.isalnum() or unicodedata.category(character).startswith("M")


def check_facts(facts: Sequence[Fact]) -> list[str]:
    """Refuse a batch that contradicts or repeats itself; return what is worth a warning.

    Raises:
        UserError: If two facts give one prompt different targets, or the same one twice.
    """
    seen: dict[str, Fact] = {}
    warnings: list[str] = []
    for fact in facts:
        if fact.target.strip() == fact.true.strip():
            warnings.append(f"{fact.where}: the new target {fact.target!r} is what is true already")
        key = comparable(fact.text)
        first = seen.setdefault(key, fact)
        if first is fact:
            continue
        if comparable(first.target) != comparable(fact.target):
            raise UserError(
                f"{first.where} and {fact.where} contradict each other: {fact.text[:60]!r} is to be {first.target!r} "
                f"and {fact.target!r}; leave one out"
            )
        raise UserError(
            f"{first.where} and {fact.where} are the same edit, {fact.text[:60]!r}; leave one out"
        )
    for fact in facts:
        for neighbour in fact.neighbours:
            other = seen.get(comparable(neighbour.prompt))
            answer = neighbour.answer or fact.true
            if other is not None and answer and comparable(other.target) != comparable(answer):
                warnings.append(
                    f"{fact.where} expects {neighbour.prompt[:60]!r} to remain {answer!r}, and {other.where} makes it "
                    f"{other.target!r}"
                )
        for text in fact.paraphrases:
            other = seen.get(comparable(text))
            if (
                other is not None
                and other is not fact
                and comparable(other.target) != comparable(fact.target)
            ):
                warnings.append(
                    f"a paraphrase of {fact.where} is the prompt of {other.where}, with another target"
                )
    owners = {(comparable(fact.prompt), comparable(fact.true)): fact for fact in facts if fact.true}
    for fact in facts:
        owner = owners.get((comparable(fact.prompt), comparable(fact.target)))
        if owner is not None and owner is not fact and comparable(owner.subject) != comparable(fact.subject):
            warnings.append(
                f"{fact.where} gives {fact.subject!r} the {fact.target!r} that {owner.where} takes from "
                f"{owner.subject!r}"
            )
    return warnings


def comparable(text: str) -> str:
    """Return a text as it is compared: case, spaces and whether accents are characters of their own do not count."""
    folded = unicodedata.normalize("NFC", text).casefold()
    return " ".join(unicodedata.normalize("NFC", folded).split())


def _name(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if row.get(name) not in (None, "", [])), None)


def _text(row: Mapping[str, Any], names: Sequence[str], where: str, *, needed: bool = True) -> str:
    name = _name(row, names)
    value = row.get(name) if name else None
    if isinstance(value, Mapping):  # CounterFact: {"str": "Paris", "id": "Q90"}
        value = value.get("str")
    if value is None and not needed:
        return ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        has = ", ".join(map(str, row)) or "nothing"
        raise UserError(f"{where}: no {names[0]} (it has {has}); expected a text called {' or '.join(names)}")
    return value


def _listed(row: Mapping[str, Any], names: Sequence[str], where: str) -> list[Any]:
    value = row.get(_name(row, names) or "")
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(MANY) if part.strip()]
    if not isinstance(value, Sequence):
        raise UserError(f"{where}: {names[0]} is {value!r:.60}, expected a list of texts")
    return list(value)


def _texts(row: Mapping[str, Any], names: Sequence[str], where: str) -> tuple[str, ...]:
    values = _listed(row, names, where)
    for value in values:
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{where}: {names[0]} holds {value!r:.60}, expected texts")
    return tuple(values)


def _neighbour(value: Any, answer: str, where: str) -> Neighbour:
    subject = ""
    if isinstance(value, Mapping):
        answer = str(value.get("answer") or value.get("target") or "")
        subject = str(value.get("subject") or "")
        prompt = value.get("prompt")
    else:
        prompt = value
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(
            f"{where}: neighbours holds {value!r:.60}, expected prompts, or objects of prompt and answer"
        )
    if PLACE in prompt and not subject:
        raise UserError(
            f"{where}: neighbour {prompt[:60]!r} has {{}}, and no subject of its own; write the other subject out, or "
            "give an object of prompt, subject and answer"
        )
    return Neighbour(prompt=prompt.replace(PLACE, subject), answer=answer)
