"""Find the final answer in a completion: tags, then box, then phrase, then `####`, then the last number.

Completions are untrusted and may be 128 KB of one repeated tag, so every step is one linear pass (`find`,
`rfind`, or a scan whose alternatives cannot overlap); there is no `.*?` anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

ANSWER_OPEN = "<answer>"
ANSWER_CLOSE = "</answer>"
LONGEST_NUMBER = 2048
"""Characters of the longest number that the last step looks at; a longer run of digits is no answer."""
LONGEST_TAIL = 64 * 1024
"""A box that opens further than this from the end of the text is not looked at."""

_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])|\\.|\{+|\}+", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_PHRASE = re.compile(r"answer(?: is|:)[:*]{0,3}", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?=[\s\"*]|$)")
_NUMBER = re.compile(
    r"(?<![A-Za-z_0-9.^])"
    r"(?:(?<!\))[-+\u2212])?[$]?"
    r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:(?<![0-9,])\.[0-9]+|(?<=[0-9])(?:\.[0-9]+)?)"
    r"(?:/[0-9]+(?:\.[0-9]+)?)?(?:[ ]?\\?%)?"
)
_NUMBER_CHARACTERS = frozenset("0123456789.,/+-\u2212$%\\ ")
_DIGITS = "0123456789"


def from_tags(text: str) -> str | None:
    """Return the text of the last closed `<answer>` block; one that was never closed does not count."""
    end = text.rfind(ANSWER_CLOSE)
    start = text.rfind(ANSWER_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(ANSWER_OPEN) : end].strip() or None if start >= 0 else None


def from_box(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}` or `\fbox{...}`, braces nested; also `\boxed 5`.

    Of nested boxes the outer one is returned. Escaped braces (`\{`) do not nest.
    """
    text = text[-LONGEST_TAIL:]
    last_box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if last_box < 0:
        return None
    first = _BOX.search(text)
    content: str | None = None
    opened: list[int] = []  # where each open brace's content starts, negative for braces that are no box
    bare_at = braced_at = -1  # where the last box without a brace, and the last closed one, end
    box_ended_at = -1  # end of a box command that still waits for its brace
    for token in _BOX_TOKEN.finditer(text, first.start() if first else last_box):
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
                    content, braced_at = text[start:end], end
            box_ended_at = -1
        elif mark in ("\\boxed", "\\fbox"):
            box_ended_at = token.end()
            bare_at = token.end() if text[token.end() : token.end() + 1] != "{" else bare_at
    if bare_at > braced_at:
        content = _bare_box(text, bare_at) or content
    return content.strip() or None if content is not None else None


def _bare_box(text: str, start: int) -> str | None:
    r"""Read the word after a `\boxed` that has no brace."""
    word = text[start : start + 200].lstrip(" ")
    if not word or word[0] in "{}$\n":
        return None
    return re.split(r"[\s$}]", word, maxsplit=1)[0].rstrip(".,;") or None


def from_phrase(text: str) -> str | None:
    """Return what follows the last "answer is" or "answer:" in its sentence, without `$` and bold marks."""
    start = -1
    for match in _PHRASE.finditer(text):
        start = match.end()
    if start < 0:
        return None
    start += len(text[start : start + 16]) - len(text[start : start + 16].lstrip(" *\n"))
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
    if answer.count("$") == 2 and answer[0] == answer[-1] == "$":
        answer = answer[1:-1].strip()
    return answer or None


def from_hashes(text: str) -> str | None:
    """Return the rest of the line after the last `####` (the layout of GSM8K)."""
    start = text.rfind("####")
    if start < 0:
        return None
    end = text.find("\n", start)
    return text[start + 4 : end if end >= 0 else len(text)].strip() or None


def from_last_number(text: str) -> str | None:
    """Return the last number: sign, decimals, strict thousands commas, `a/b` and a percent sign belong to it.

    Digits inside a word (`A2B`) are no number, and the minus of `5-3` is no sign.
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
    return None if cut else number.group().strip()


def _earlier_number(text: str, end: int) -> str | None:
    """Return the last number of a bounded stretch before `end`."""
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
    "last_number": from_last_number,
}
DEFAULT_STEPS: tuple[str, ...] = tuple(STEPS)


def extract_answer_with_step(
    text: str, steps: Sequence[str] = DEFAULT_STEPS
) -> tuple[str | None, str | None]:
    """Find the final answer and say which step found it.

    Args:
        text: Any completion.
        steps: Names out of `STEPS`, in the order in which they are tried.

    Returns:
        (answer, step), or (None, None) when no step found anything.

    Raises:
        ValueError: If a step is unknown.
    """
    unknown = [name for name in steps if name not in STEPS]
    if unknown:
        raise ValueError(f"extraction steps {unknown} are unknown, expected some of {list(STEPS)}")
    for name in steps:
        answer = STEPS[name](text)
        if answer is not None:
            return answer, name
    return None, None


def extract_answer(text: str) -> str | None:
    """Find the final answer by the default steps; None when there is none."""
    return extract_answer_with_step(text)[0]
