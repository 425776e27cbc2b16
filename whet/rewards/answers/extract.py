"""Find the final answer in a completion: tags, box, phrase, `####`, formula, choice, last number.

The chain is tags, then the last box, then "the answer is", then `####`, then the last number; before that last resort a
number is taken with the formula around it, and a lone option letter or verdict counts. Text in other scripts is folded
first (`whet.rewards.answers.scripts`), so that every step sees ASCII digits and punctuation.

Completions are untrusted and may be 128 KB of one repeated tag, so every step is one linear pass (`find`,
`rfind`, or a scan whose alternatives cannot overlap); there is no `.*?` anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from whet.rewards.answers.scripts import (
    ABOUT,
    FINAL_VERBS,
    FOREIGN,
    FOREIGN_LETTER,
    HEDGED,
    JOINED,
    SCALED,
    SCALES,
    UNITS,
    VERDICTS,
    WORD,
    end_of_phrase,
    fold,
    start_of_reason,
)

ANSWER_OPEN = "<answer>"
ANSWER_CLOSE = "</answer>"
LONGEST_NUMBER = 2048
"""Longest number (in characters) that the last step reads; a longer run of digits is not an answer."""
LONGEST_TAIL = 64 * 1024
"""Boxes that open further than this from the end of the text are ignored."""

_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])|\\.|\{+|\}+", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
LONGEST_FORMULA = 2000
"""Longest formula (in characters); a longer text between math delimiters is not one."""

LONGEST_GAP = 60
"""Longest gap (in characters) between two boxes of one list."""
LONGEST_SCALED = 60
"""Longest number with Chinese scale words (in characters)."""
LONGEST_REMARK = 100
"""Longest line (in characters) that counts as an answer without saying so."""

_PHRASE = re.compile(r"answer\*{0,3}(?: is| ?[:=])[:*]{0,3}", re.IGNORECASE)
_SURE = re.compile(r"(?:for sure|definitely|clearly|certainly) \(?([A-J])\)?(?=[,.]|$)")
_ASIDE = re.compile(r",? (?:because|since) |, (?:which|so|as|it|obviously|of course)(?: |$)")
_ONLY_BOXES = re.compile(r"[\s$]*(?:\\[(\[]\s*)?\\boxed ?\{[^{}]*\}[\s$]*(?:and|,)[\s$]*\\boxed")
"""A text that starts with boxes. Two may be a change of mind, three are a list."""
_CORRECTION = re.compile(
    r"\b(?:wait|actually|rather|instead|mistaken?|incorrect|wrong|correction|sorry|no[,:;])|不[对對]|[错錯][误誤了]|更正|等等",
    re.IGNORECASE,
)
"""Words between two boxes that take the first one back."""
_VERB = re.compile(r" (?:is|are|equals) ")
_WORDS_INSIDE = re.compile(
    r"\\[a-zA-Z]{0,12}(?:text|rm|box|name)[a-z]{0,12} ?\{[^{}]*\}|\\(?:begin|end) ?\{[A-Za-z*]*\}(?:\{[lcr|]*\})?"
)
_JOINT = re.compile(
    r"(?:[\s,;$]|\\[()\[\],; ]|\\q?quad|\\text ?\{ ?(?:[a-z() ]{0,30} )?(?:and|or) ?\}|and(?= ?[$\\])(?<=, and))*"
)
_NOT_PROSE = r"(?:arc)?(?:sin|cos|tan)|sec|csc|cot|log|ln|exp|sqrt|pi|or|and|[A-Z]{2,4}"
_PROSE = re.compile(rf"(?<![\\A-Za-z0-9])(?!(?:{_NOT_PROSE})(?![A-Za-z]))[A-Za-z]{{2,}}")
_PROSE_IN_MATH = re.compile(
    rf"(?<![\\A-Za-z])(?!(?:{_NOT_PROSE})(?![A-Za-z]))[A-Za-z]?[a-z]{{3,}}|[A-Za-z,.;] [a-z]{{2,3}} [A-Za-z0-9]"
    r"|^ ?(?:is|to|for|the|and|has|in|of|each|per) | (?:is|to|for|the|and|has|in|of|each|per) ?$"
)
_EVIDENCE = re.compile(r"[0-9A-Za-z]|\\(?:infty|pi|emptyset|varnothing)|[∞π∅]")
_NAMED = re.compile(r"[A-Za-z](?:_\{?[A-Za-z0-9]\}?|\([a-z]\))?|[^A-Za-z]*")
_LIST = re.compile(
    rf",(?![0-9]{{3}})|;|(?<![A-Za-z])(?:or|and)(?![A-Za-z])|{JOINED.pattern.replace('?P<any>', '?:')}"
)
_RESULT = re.compile(r"[-+\u2212\\$(]?[^A-Za-z,=<>]*[0-9][^A-Za-z,=<>]*")
_LETTER = re.compile(
    r"(?:(?:option|choice|it's|it is) (?:is )?|[选選](?:[择擇项項])?(?:是|为|為)?:? ?)[(*]{0,3}([A-J])(?![A-Za-z'])"
    r"|(?<![A-Za-z0-9_])\(([A-J])\)"
)
_LABELLED = re.compile(r"\(?([A-J])[).:] [A-Za-z]")
_VERDICT = re.compile(rf"\(?[A-Ja-j]\)?|{'|'.join(map(re.escape, VERDICTS))}", re.IGNORECASE)
_SENTENCE_END = re.compile(rf"\n|[.!?](?=[\s\"*{FOREIGN}]|$)|[。！？؟]")
_COUNTED = re.compile(rf"(?:{ABOUT})? ?([-+\u2212$]?[0-9][0-9.,/]*) ?(%|{WORD})?")
"""A number with a counter or a currency behind it: `42个`, `约 42 元`."""
_SAYS = re.compile(rf"[是为為有得剩需](?:{ABOUT})? ?$")
_MEASURES = frozenset({*UNITS.split(), *SCALES})
_NUMBER = re.compile(
    r"(?<![A-Za-z_0-9.^])"
    r"(?:(?<!\))[-+\u2212])?[$]?"
    r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[1-9][0-9]{0,2}(?:\.[0-9]{3})+,[0-9]{1,2}(?![0-9,.])"
    r"|[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}(?![0-9,.])"
    r"|(?<![0-9,(\[])[0-9]+,[0-9]{1,2}(?![0-9,)\]])|[0-9]+)?(?:(?<![0-9,])\.[0-9]+|(?<=[0-9])(?:\.[0-9]+)?)"
    r"(?:/[0-9]+(?:\.[0-9]+)?)?(?:[ ]?\\?%)?"
)
_NUMBER_CHARACTERS = frozenset("0123456789.,/+-\u2212$%\\ ")
_DIGITS = "0123456789"
_DIGIT = re.compile("[0-9]")


def from_tags(text: str) -> str | None:
    """Return the text of the last closed `<answer>` block; an unclosed one does not count."""
    end = text.rfind(ANSWER_CLOSE)
    start = text.rfind(ANSWER_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(ANSWER_OPEN) : end].strip() or None if start >= 0 else None


def from_box(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}` or `\fbox{...}`, braces nested; also `\boxed 5`.

    Of nested boxes the outer one is returned. Escaped braces (`\{`) do not nest. A Minerva close ("The final answer
    is $7$. I hope it is correct.") after the last box takes its place.
    """
    text = _with_backslash(text[-LONGEST_TAIL:])
    if max(text.rfind("\\boxed"), text.rfind("\\fbox")) < 0:
        return None
    contents, bare_at, braced_at = _boxes(text)
    outer = _outer(contents)
    hope = text.rfind("I hope it is correct")
    if hope > 0 and "final answer is" in text[max(bare_at, braced_at) : hope].lower():
        return (from_phrase(text[:hope]) or "").strip('\\" ') or None
    content = _bare_box(text, bare_at) if bare_at > braced_at else None
    if content or len(outer) < 2:
        return content or _joined(text, contents)
    answer = _joined(text, contents)
    return Boxed(answer, _together(text, outer)) if answer else None


class Boxed(str):
    """The answer of a text with several boxes: the last one, which knows all, for a gold answer of several values.

    Attributes:
        boxes: The contents of all boxes in their order; none if the text takes one back.
    """

    boxes: tuple[str, ...]

    def __new__(cls, answer: str, boxes: Sequence[str]) -> Boxed:
        """Make the answer.

        Args:
            answer: What it is where the gold answer is a single value.
            boxes: The contents of the boxes.
        """
        self = super().__new__(cls, answer)
        self.boxes = tuple(boxes)
        return self


def all_boxes(text: str) -> tuple[str, ...]:
    """Return the contents of all outer boxes that are closed, in their order; none if the text takes one back."""
    text = _with_backslash(text)
    return _together(text, _outer(_boxes(text)[0]))


def _together(text: str, outer: list[tuple[int, int, int]]) -> tuple[str, ...]:
    """Return the contents of boxes that can be the parts of one answer: no box corrects the one before."""
    for left, right in pairwise(outer):
        gap = text[left[2] + 1 : right[0]]
        if _CORRECTION.search(gap) or (len(gap) <= LONGEST_GAP and "then" in gap):
            return ()
    return tuple(text[start:end].strip() for _, start, end in outer)


def boxed_list(text: str) -> str | None:
    r"""Return the contents of several boxes as one list: `\boxed{1} and \boxed{2}` is `1, 2`.

    Args:
        text: A short text.

    Returns:
        The list; None when no boxes are closed, or more than `LONGEST_GAP` characters lie between two, or a "then" or
        a correction does.
    """
    text = _with_backslash(text)
    outer = _outer(_boxes(text)[0])
    if len(outer) < 2 or any(right[0] - left[2] - 1 > LONGEST_GAP for left, right in pairwise(outer)):
        return None
    return ", ".join(_together(text, outer)) or None


def _with_backslash(text: str) -> str:
    r"""Repair `\boxed` written in a Python string that is not raw, and the typo `\beginboxed`."""
    return text.replace("\x08oxed", "\\boxed").replace("\\beginboxed", "\\boxed") if "oxed" in text else text


def _boxes(text: str) -> tuple[list[tuple[int, int, int]], int, int]:
    """Find the closed boxes (positions of command, content and closing brace), and the last with and without brace."""
    first = _BOX.search(text)
    contents: list[tuple[int, int, int]] = []
    opened: list[int] = []  # where each open brace's content starts, negative for braces without a box
    bare_at = braced_at = -1  # where the last box without a brace, and the last closed one, end
    box_ended_at = -1  # end of a box command whose brace has not come yet
    for token in _BOX_TOKEN.finditer(text, first.start() if first else len(text)):
        mark = token.group()
        if mark[0] == "{":
            is_box = box_ended_at >= 0 and not text[box_ended_at : token.start()].strip()
            opened.append(token.start() + 1 if is_box else -1)
            opened.extend([-1] * (len(mark) - 1))
            box_ended_at = -1
        elif mark[0] == "}":
            for end in range(token.start(), token.start() + min(len(mark), len(opened))):
                start = opened.pop()
                if start >= 0:
                    contents.append((text.rfind("\\", 0, start), start, end))
                    braced_at = end
            box_ended_at = -1
        elif mark in ("\\boxed", "\\fbox"):
            box_ended_at = token.end()
            bare_at = token.end() if text[token.end() : token.end() + 1] != "{" else bare_at
    return contents, bare_at, braced_at


def _outer(contents: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Leave out boxes inside of boxes; `contents` is in the order of the closing braces."""
    outer: list[tuple[int, int, int]] = []
    for box in reversed(contents):
        if not outer or box[2] < outer[-1][0]:
            outer.append(box)
    return outer[::-1]


def _joined(text: str, boxes: list[tuple[int, int, int]]) -> str | None:
    r"""Return the last box; boxes in one row (`\boxed{1}, \boxed{2}`) are one answer of several parts."""
    if text.count("\\boxed") > 2 and _ONLY_BOXES.match(text):
        whole = boxed_list(text)
        if whole:
            return whole
    parts: list[str] = []
    left_edge = -1
    for command, start, end in reversed(boxes):
        gap = text[end + 1 : left_edge] if parts else ","
        if parts and (end > left_edge or len(gap) > 60):
            if end > left_edge:
                continue
            break
        if not _JOINT.fullmatch(gap) or not ("," in gap or ";" in gap or "\\text" in gap):
            break
        parts.append(text[start:end].strip())
        left_edge = command
    return ", ".join(part for part in reversed(parts) if part) or None


def _bare_box(text: str, start: int) -> str | None:
    r"""Read the word after a `\boxed` that has no brace."""
    word = text[start : start + 200].lstrip(" ")
    if not word or word[0] in "{}$\n":
        return None
    return re.split(r"[\s$}]", word, maxsplit=1)[0].rstrip(".,;") or None


def from_phrase(text: str) -> str | None:
    """Return what follows the last "answer is" or "answer:" in its sentence, without `$` and bold marks."""
    start = end_of_phrase(text)
    for match in _PHRASE.finditer(text):
        start = max(start, match.end())
    if start < 0:
        return None
    start += len(text[start : start + 16]) - len(text[start : start + 16].lstrip(" *#:\n\u00a0\u202f"))
    if text.startswith("$", start):
        fence = "$$" if text.startswith("$$", start) else "$"
        end = text.find(fence, start + len(fence))
        if end >= 0 and "\n" not in text[start:end].strip("$\n"):
            stop = _SENTENCE_END.search(text, end + len(fence))
            tail = text[end + len(fence) : stop.start() if stop else len(text)].strip(" *")
            if "$" not in tail:  # "$5$ or $7$" keeps both, so that a hedge stays visible
                return (text[start + len(fence) : end].strip() + (f" {tail}" if tail else "")) or None
    stop = _SENTENCE_END.search(text, start)
    answer = text[start : stop.start() if stop else len(text)].strip().strip("*").rstrip(". ")
    for verb in FINAL_VERBS:
        answer = answer.removesuffix(verb)
    answer = answer.rstrip(" *")
    if answer.count("$") == 2 and answer[0] == answer[-1] == "$":
        answer = answer[1:-1].strip()
    return _conclusion(answer) or None


def _conclusion(answer: str) -> str:
    """Cut off a reason ("A because ...") and a subject ("the largest n is 34")."""
    aside = _ASIDE.search(answer)
    reasons = [start for start in (aside.start() if aside else -1, start_of_reason(answer)) if start >= 0]
    if reasons:
        answer = answer[: min(reasons)] or answer
    sure = _SURE.match(answer)
    if sure is not None:
        return sure[1]
    if not answer.isascii() and FOREIGN_LETTER.search(answer):
        return _foreign_conclusion(answer)
    if not answer[:1].isalpha() or answer.count(" ") < 3:
        return answer
    verbs = [match.end() for match in _VERB.finditer(answer)]
    if verbs and re.search(r"[0-9\\]", answer[verbs[-1] :]):
        return answer[verbs[-1] :].strip(" *$")
    numbers = [
        match.group() for match in _NUMBER.finditer(answer[:LONGEST_FORMULA]) if match.group().strip("-+$")
    ]
    return numbers[0].strip() if len(numbers) == 1 else answer


def _foreign_conclusion(answer: str) -> str:
    """Drop a counter ("42个") and what else stands around the only number, unless it negates or bounds it."""
    if HEDGED.search(answer[:LONGEST_FORMULA]):
        return answer
    counted = _COUNTED.fullmatch(answer)
    if counted is not None:
        is_measure = counted[2] is not None and counted[2] in _MEASURES
        is_scaled = is_measure or SCALED.match(answer, counted.start(1)) is not None
        return answer[counted.start(1) :] if is_scaled or counted[2] == "%" else counted[1].rstrip(".,/")
    numbers = [match for match in _NUMBER.finditer(answer[:LONGEST_FORMULA]) if match.group().strip("-+$")]
    if len(numbers) != 1 or "\\" in answer or "=" in answer or SCALED.search(answer[:LONGEST_FORMULA]):
        return answer
    is_said = answer.count(" ") >= 3 or _SAYS.search(answer, 0, numbers[0].start()) is not None
    return numbers[0].group().strip() if is_said else answer


def from_hashes(text: str) -> str | None:
    """Return the rest of the line after the last `####` (the format of GSM8K)."""
    start = text.rfind("####")
    if start < 0:
        return None
    end = text.find("\n", start)
    return text[start + 4 : end if end >= 0 else len(text)].strip(" :\t\r") or None


def from_formula(text: str) -> str | None:
    r"""Return a text that is only a formula, or the math (`$`, `\(`, `\[`) that contains the last digit.

    Of `x = 5` and `2+3 = 5` only the 5 is returned; an equation in two variables is kept.
    """
    whole = text.strip()
    if len(whole) <= LONGEST_FORMULA and _is_formula(_unfenced(whole)):
        lines = whole.splitlines()
        return _right_side(lines[-1] if "=" in whole and "\\begin" not in whole else whole)
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\[", "\\]"), ("\\(", "\\)")):
        end = text.rfind(closing)
        start = text.rfind(opening, max(0, end - LONGEST_FORMULA), end) if end > 0 else -1
        if start < 0 or _DIGIT.search(text, end):
            continue
        inside = text[start + len(opening) : end].strip()
        if _is_formula(inside, _PROSE_IN_MATH):
            other = _alternative(text[max(0, start - LONGEST_FORMULA) : start].rstrip(), opening, closing)
            return f"{other} or {inside}" if other else _right_side(inside)
    last = max(text.rfind(digit) for digit in _DIGITS)
    before, after = text[max(0, last - 500) : last].split(" "), text[last : last + 500].split()
    word = (before[-1] + after[0]).rstrip(".,;:!?") if after else ""
    is_latex = "\\" in word and "{" in word and word.count("{") == word.count("}") and _is_formula(word)
    return _right_side(word) if is_latex else None


def _alternative(before: str, opening: str, closing: str) -> str | None:
    """Return the formula before an "or": `$2$ or $3$` stay two answers."""
    if not before.endswith(f"{closing} or"):
        return None
    end = len(before) - len(closing) - 3
    start = before.rfind(opening, 0, end)
    return before[start + len(opening) : end].strip() if start >= 0 else None


def _unfenced(formula: str) -> str:
    for fence in ("$$", "$"):
        if len(formula) > 2 * len(fence) and formula.startswith(fence) and formula.endswith(fence):
            return formula[len(fence) : -len(fence)].strip()
    return formula


def _is_formula(text: str, prose: re.Pattern[str] = _PROSE) -> bool:
    text = text.replace("\\$", "")
    return (
        _EVIDENCE.search(text) is not None
        and "$" not in text
        and "#" not in text
        and prose.search(words := _WORDS_INSIDE.sub(" ", text)) is None
        and (words.isascii() or FOREIGN_LETTER.search(JOINED.sub(" ", words)) is None)
    )


def _right_side(formula: str) -> str | None:
    r"""Keep the 5 of `x = 5`, `2 + 3 = 5` and `a = b = 5`."""
    formula = _unfenced(formula.strip())
    sides = formula.split("=")
    result = sides[-1].strip().rstrip(".。 ")
    if _LIST.search(formula):
        return formula.rstrip("。") or None
    is_named = len(sides) > 2 or _NAMED.fullmatch(re.sub(r"\\[A-Za-z]+", "", sides[0].strip())) is not None
    if len(sides) > 1 and is_named and _RESULT.fullmatch(re.sub(r"\\[A-Za-z]+", "", result)):
        return result
    return formula.rstrip("。") or None


def from_choice(text: str) -> str | None:
    """Return the verdict (an option letter, yes or no) that makes up the last line, or the last `(B)`.

    A completion of one word is that word, and a few words after `</think>` are the answer.
    """
    whole = text.strip()
    tail = whole[-LONGEST_FORMULA:]
    line = tail.rpartition("\n")[2].strip(" *_.。！")
    if _VERDICT.fullmatch(line):
        return line
    _, closed, rest = tail.rpartition("</think>")
    rest = rest.strip()
    if closed and 0 < len(rest) <= LONGEST_REMARK and "\n" not in rest and not _DIGIT.search(rest):
        return rest
    labelled = _LABELLED.match(whole) if len(whole) <= LONGEST_REMARK and "\n" not in whole else None
    if labelled:
        return labelled[1]
    if 0 < len(whole) <= LONGEST_REMARK and whole.rstrip(".!").replace("-", "").isalpha():
        return whole.rstrip(".!")
    letters = list(_LETTER.finditer(tail))
    if not letters or _DIGIT.search(tail, letters[-1].end()):
        return None
    return letters[-1][1] or letters[-1][2]


def from_last_number(text: str) -> str | None:
    """Return the last number: sign, decimals, strict thousands commas, `a/b` and a percent sign belong to it.

    Digits inside a word (`A2B`) are not a number, and the minus of `5-3` is not a sign.
    """
    end = max(text.rfind(digit) for digit in _DIGITS)
    if end < 0:
        return None
    start = end
    floor = max(0, end - LONGEST_NUMBER)
    while start > floor and text[start - 1] in _NUMBER_CHARACTERS:
        start -= 1
    window = text[max(0, start - 1) : end + 4]
    number: re.Match[str] | None = None
    for match in _NUMBER.finditer(window):
        if match.group().strip("-+$\u2212"):
            number = match
    if number is None:  # the last digits belong to a word: look further left
        return _earlier_number(text, start)
    cut = start == floor > 0 and number.start() <= 1
    return None if cut else _with_scale(text, end) or number.group().strip()


def _with_scale(text: str, end: int) -> str | None:
    """Return the number whose last digit, or whose scale word, is at `end`: 3万, 3万5千, 3分之1."""
    before = max(0, end - LONGEST_SCALED)
    for match in SCALED.finditer(text[before : end + 4]):
        if match.start() <= end - before < match.end():
            return match.group().strip()
    return None


def _earlier_number(text: str, end: int) -> str | None:
    """Return the last number within a bounded window before `end`."""
    number: str | None = None
    for match in _NUMBER.finditer(text, max(0, end - LONGEST_NUMBER), end):
        number = match.group().strip() or number
    return number


Step = Callable[[str], "str | None"]

STEPS: dict[str, Step] = {
    "tags": from_tags,
    "box": from_box,
    "phrase": from_phrase,
    "hashes": from_hashes,
    "formula": from_formula,
    "choice": from_choice,
    "last_number": from_last_number,
}
DEFAULT_STEPS: tuple[str, ...] = tuple(STEPS)


def extract_answer_with_step(
    text: str, steps: Sequence[str] = DEFAULT_STEPS
) -> tuple[str | None, str | None]:
    """Find the final answer; also return which step found it.

    Args:
        text: Any completion.
        steps: Names in `STEPS`, in the order in which to try them.

    Returns:
        (answer, step), or (None, None) when no step found anything.

    Raises:
        ValueError: If a step is unknown.
    """
    unknown = [name for name in steps if name not in STEPS]
    if unknown:
        raise ValueError(f"extraction steps {unknown} are unknown, expected some of {list(STEPS)}")
    text = fold(text)
    for name in steps:
        answer = STEPS[name](text)
        if answer is not None:
            return answer, name
    return None, None


def extract_answer(text: str) -> str | None:
    """Find the final answer with the default steps; None if there is none."""
    return extract_answer_with_step(text)[0]
