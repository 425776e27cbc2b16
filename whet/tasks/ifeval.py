"""The task `ifeval`: prompts with instructions that a program can verify, such as a number of words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from whet.schema import AnswerType
from whet.tasks.hub import Part, read_hub
from whet.tasks.read import BadRow, Row, check_split, is_hub_name, read_file, select_split
from whet.tasks.sets import HUB_SETS
from whet.types import Problem, UserError, problem_uid

MAX_CHARACTERS = 64 * 1024
"""A longer response follows nothing and is not read."""
LANGUAGE = "language:response_language"
CHECKS_META = "instructions"
"""Label in a problem's `meta`: JSON list of [instruction, its arguments]."""

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]

CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"[^\W_]+(?:['\u2019&.-][^\W_]+)*")
_SENTENCE = re.compile(r"[.!?]+[\"')\]\u201d]*(?=\s+[\"'(\[\u201c*#-]*[^\Wa-z_]|\s*$)")
_ABBREVIATION = re.compile(r"(?:^|[\s(\"'])(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|e\.g|i\.e|etc|[A-Z])$")
_BULLET = re.compile(r"[ \t\r\f\v]*(?:\*[^*\n]|-)")


class IFEval:
    """Prompts whose instructions are verified in the text of the answer; it is right if it follows all of them.

    Twenty-four of the twenty-five kinds of instruction are judged. Rows that ask for a language
    (`language:response_language`) are left out: whet has no detector of languages.

    Source: arXiv:2311.07911, the strict accuracy of its program. Deviations: the two instructions of English in capital
    or small letters judge the letters, not the language; sentences and words in capitals are counted by a rule of our
    own, not by NLTK's models; keywords are texts, not regular expressions.

    Attributes:
        name: 'ifeval'.
        answer_type: 'text'.
        needs_gold: False: instructions have no gold answer.
        bad_rows: Rows skipped so far.
        num_left_out: Rows that ask for a language, so far.
    """

    name = "ifeval"
    answer_type: AnswerType = "text"
    needs_gold = False

    def __init__(self, path: str | Path = "", *, max_rows: int = 0, max_bad_rows: int = 0) -> None:
        """Set the location of the data.

        Args:
            path: A file (or a folder with test.jsonl) whose rows have prompt, instruction_id_list and kwargs, which is
                split like any other; or a hub name; '' for 'google/IFEval', which has a test split only.
            max_rows: Rows to stream from the hub; 0 downloads all.
            max_bad_rows: Bad rows that are tolerated.
        """
        known = HUB_SETS[self.name]
        self._path = Path(path)
        on_hub = not str(path) or is_hub_name(str(path))
        self._part = Part(path=str(path) or known.path, split=known.parts["test"].split) if on_hub else None
        if self._part is None and not self._path.exists():
            raise UserError(f"{str(path)!r}: no such file or folder; check --task.path")
        self._max_rows, self._max_bad_rows = max_rows, max_bad_rows
        self._problems: list[Problem] | None = None
        self.bad_rows: list[BadRow] = []
        self.num_left_out = 0

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of 'train', 'dev' or 'test'; those of the hub are all 'test'."""
        check_split(split)
        if self._part is not None:
            return self._read() if split == "test" else []
        return select_split(self._read(), split, test_percent=5)

    def is_correct(self, problem: Problem, answer: str | None) -> bool:
        """Say whether an answer follows all instructions of its problem."""
        return all(self.followed(problem, answer))

    def followed(self, problem: Problem, answer: str | None) -> list[bool]:
        """Return for each instruction of a problem whether an answer follows it."""
        checks = json.loads(problem.meta[CHECKS_META])
        if answer is None or not answer.strip() or len(answer) > MAX_CHARACTERS:
            return [False] * len(checks)
        return [CHECKS[name](answer, arguments) for name, arguments in checks]

    def _read(self) -> list[Problem]:
        if self._problems is None:
            options: Any = {"max_bad_rows": self._max_bad_rows, "check": _fault}
            required = ("prompt",)
            if self._part is not None:
                source = str(self._part)
                rows, bad = read_hub(self._part, required=required, max_rows=self._max_rows, **options)
            else:
                path = self._path / "test.jsonl" if self._path.is_dir() else self._path
                source, (rows, bad) = path.name, read_file(path, required=required, **options)
            self.bad_rows += bad
            used = [(number, row) for number, row in rows if LANGUAGE not in row["instruction_id_list"]]
            self.num_left_out = len(rows) - len(used)
            self._problems = [_problem(row, source, number) for number, row in used]
        return list(self._problems)


def _problem(row: Row, source: str, number: int) -> Problem:
    pairs = zip(row["instruction_id_list"], row["kwargs"], strict=True)
    # The hub's rows name all arguments of all instructions, null where they do not belong.
    checks = [[name, {key: v for key, v in (given or {}).items() if v is not None}] for name, given in pairs]
    return Problem(
        uid=problem_uid(IFEval.name, row["prompt"]),
        task=IFEval.name,
        prompt=row["prompt"],
        answer="",
        meta={"file": source, "line": str(number), CHECKS_META: json.dumps(checks)},
    )


def _fault(row: Row) -> str | None:
    """Return why a row's instructions cannot be verified."""
    names, given = row.get("instruction_id_list"), row.get("kwargs")
    if not isinstance(names, list) or not isinstance(given, list) or len(names) != len(given) or not names:
        return "'instruction_id_list' and 'kwargs' are not lists of one length"
    for name, arguments in zip(names, given, strict=True):
        if name == LANGUAGE:
            continue
        if name not in CHECKS:
            return f"instruction {name!r:.60} is unknown"
        needed = ARGUMENTS[name]
        for key, kind in needed.items():
            if not isinstance((arguments or {}).get(key), kind):
                return f"instruction {name!r} lacks {key!r}"
        relation = next((arguments[key] for key in needed if key.endswith("relation")), AT_LEAST)
        if relation not in (LESS, AT_LEAST):
            return f"instruction {name!r}: relation {relation!r:.40}, expected {LESS!r} or {AT_LEAST!r}"
    return None


LESS, AT_LEAST = "less than", "at least"


def _compare(count: int, relation: str, limit: int) -> bool:
    return count < limit if relation == LESS else count >= limit


def count_sentences(text: str) -> int:
    """Count sentences: what ends with a full stop, ! or ? before a capital or the end, abbreviations aside."""
    count, end = 0, 0
    for match in _SENTENCE.finditer(text):
        head = text[max(end, match.start() - 20) : match.start()]
        if match.group().startswith(".") and _ABBREVIATION.search(head) and match.end() < len(text.rstrip()):
            continue
        count, end = count + 1, match.end()
    return count + bool(text[end:].strip())


def _times(word: str, text: str) -> int:
    """Count a word, inside longer words too, whatever its case."""
    return text.lower().count(word.lower())


def _has_word(word: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


def _bullets(text: str, a: Arguments) -> bool:
    return sum(_BULLET.match(line) is not None for line in text.split("\n")) == a["num_bullets"]


def _between(text: str, opening: str, closing: str) -> list[str]:
    """Return what stands between the marks on one line; each closing mark ends the nearest opening one before it."""
    found = []
    for line in text.split("\n"):
        start = line.find(opening)
        while start >= 0:
            end = line.find(closing, start + len(opening))
            if end < 0:
                break
            found.append(line[start + len(opening) : end])
            start = line.find(opening, end + len(closing))
    return found


def _highlights(text: str, a: Arguments) -> bool:
    """Count `*...*`, and `**...**` once more, as the original does."""
    count = 0
    for pattern, marks in ((r"\*[^\n*]*\*", 1), (r"\*\*[^\n*]*\*\*", 2)):
        found = re.findall(pattern, text)
        count += sum(bool((part.strip("*") if marks == 1 else part[2:-2]).strip()) for part in found)
    return count >= a["num_highlights"]


def _sections(text: str, a: Arguments) -> bool:
    marks = re.findall(rf"{re.escape(a['section_spliter'])}\s?\d", text)
    return len(marks) >= a["num_sections"]


def _paragraphs(text: str, a: Arguments) -> bool:
    parts = [part.strip() for part in text.split("***")]
    inner = parts[1:-1]
    count = len(inner) + sum(bool(part) for part in ((parts[0], parts[-1]) if len(parts) > 1 else parts))
    return all(inner) and count == a["num_paragraphs"]


def _first_word(text: str, a: Arguments) -> bool:
    """Judge the number of paragraphs, and the first word of the n-th, counted with the empty ones as the original."""
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    nth = a["nth_paragraph"]
    part = parts[nth - 1].strip() if 1 <= nth <= count else ""
    if not part:
        return False
    word = re.split(r"[.,?!'\"]", part.split()[0].lstrip("'").lstrip('"'), maxsplit=1)[0].lower()
    return count == a["num_paragraphs"] and word == a["first_word"].lower()


def _postscript(text: str, a: Arguments) -> bool:
    marker = str(a["postscript_marker"])
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, re.escape(marker.lower())), text.lower()) is not None


def _json_format(text: str, a: Arguments) -> bool:
    text = text.strip()
    for opening in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(opening)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str, a: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******")]
    kept = [part for part in parts if part]
    return all(parts[1:-1]) and len(kept) == 2 and kept[0] != kept[1]


def _capitals(text: str, a: Arguments) -> bool:
    words = sum(token.group().isupper() for token in _TOKEN.finditer(text))
    return _compare(words, a["capital_relation"], a["capital_frequency"])


def _quoted(text: str, a: Arguments) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda text, a: all(_times(word, text) for word in a["keywords"]),
    "keywords:frequency": lambda text, a: _compare(_times(a["keyword"], text), a["relation"], a["frequency"]),
    "keywords:forbidden_words": lambda text, a: not any(_has_word(w, text) for w in a["forbidden_words"]),
    "keywords:letter_frequency": lambda text, a: _compare(
        text.lower().count(a["letter"].lower()), a["let_relation"], a["let_frequency"]
    ),
    "length_constraints:number_sentences": lambda text, a: _compare(
        count_sentences(text), a["relation"], a["num_sentences"]
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda text, a: _compare(
        len(_WORD.findall(text)), a["relation"], a["num_words"]
    ),
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda text, a: (
        len(list(islice(_between(text, "[", "]"), a["num_placeholders"]))) >= a["num_placeholders"]
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda text, a: any(said in text for said in CONSTRAINED),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json_format,
    "detectable_format:title": lambda text, a: any(
        part.lstrip("<").rstrip(">").strip() for part in _between(text, "<<", ">>")
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, a: (
        text.strip().lower().startswith(a["prompt_to_repeat"].strip().lower())
    ),
    "startend:end_checker": lambda text, a: (
        text.strip().strip('"').lower().endswith(a["end_phrase"].strip().lower())
    ),
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capitals,
    "change_case:english_capital": lambda text, a: text.isupper(),
    "change_case:english_lowercase": lambda text, a: text.islower(),
    "punctuation:no_comma": lambda text, a: "," not in text,
}
"""Instruction -> whether a response follows it. Every check is one pass over a text of at most `MAX_CHARACTERS`."""
ARGUMENTS: dict[str, dict[str, type]] = {name: {} for name in CHECKS} | {
    "keywords:existence": {"keywords": list},
    "keywords:frequency": {"keyword": str, "relation": str, "frequency": int},
    "keywords:forbidden_words": {"forbidden_words": list},
    "keywords:letter_frequency": {"letter": str, "let_relation": str, "let_frequency": int},
    "length_constraints:number_sentences": {"relation": str, "num_sentences": int},
    "length_constraints:number_paragraphs": {"num_paragraphs": int},
    "length_constraints:number_words": {"relation": str, "num_words": int},
    "length_constraints:nth_paragraph_first_word": {
        "num_paragraphs": int,
        "nth_paragraph": int,
        "first_word": str,
    },
    "detectable_content:number_placeholders": {"num_placeholders": int},
    "detectable_content:postscript": {"postscript_marker": str},
    "detectable_format:number_bullet_lists": {"num_bullets": int},
    "detectable_format:number_highlighted_sections": {"num_highlights": int},
    "detectable_format:multiple_sections": {"section_spliter": str, "num_sections": int},
    "combination:repeat_prompt": {"prompt_to_repeat": str},
    "startend:end_checker": {"end_phrase": str},
    "change_case:capital_word_frequency": {"capital_relation": str, "capital_frequency": int},
}
"""Instruction -> the arguments that it must have, as the columns of `kwargs` name them."""
