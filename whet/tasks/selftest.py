r"""Test answers for every task: hostile texts, near misses, and other spellings of the right answer.

Used by the tests of all tasks and by anyone who wants to check a task before training on it. The texts depend only on
the gold answer and the question, not on the task.
"""

from __future__ import annotations

import re
from fractions import Fraction

from whet.schema import ResponseSchema
from whet.types import Problem

LENGTH = 128 * 1024
"""Length of the long hostile answers, in characters: like a policy that loops to its token limit."""
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(r"-?[0-9]{1,15}\.[0-9]{1,15}")
_FRACTION = re.compile(r"(-?)(?:\\[dt]?frac\{([0-9]{1,9})\}\{([0-9]{1,9})\}|([0-9]{1,9})/([0-9]{1,9}))")
_PAIR = re.compile(r"\(-?[0-9]{1,9}(?:, ?-?[0-9]{1,9})+\)")
_WIDE = str.maketrans("0123456789", "０１２３４５６７８９")


def hostile_answers(problem: Problem, wrong: str | None = None) -> list[tuple[str, str]]:
    """Return texts that must not count as correct, whatever the task.

    Args:
        problem: Some answers use its gold answer and question.
        wrong: A wrong answer that looks like one; None changes a character of the gold answer.

    Returns:
        (what it is, text): empty, wrong, hedged, copied, huge, nested, malformed and code. A text that happens to be
        the gold answer is dropped.
    """
    gold, prompt = problem.answer, problem.prompt
    wrong = mutated_answer(gold) if wrong is None else wrong
    schema = ResponseSchema()
    found = {
        "empty": "",
        "white space": " \t\n\u00a0",
        "words": "no answer",
        "near miss": wrong,
        "gold or wrong": f"{gold} or {wrong}",
        "wrong or gold": f"{wrong} or {gold}",
        "gold, wrong": f"{gold}, {wrong}",
        "two boxes": rf"\boxed{{{gold}}} \boxed{{{wrong}}}",
        "5 or 7": "5 or 7",
        "every number": " ".join(map(str, range(-200, 1000))),
        "every letter": "A B C D E F G H I J",
        "the question": prompt,
        "the question with an answer": f"{prompt} {wrong}",
        "the system prompt": schema.system_prompt,
        "the format's example": schema.render("...", "..."),
        "an answer tag, repeated": "<answer>" * (LENGTH // 8),
        "a box, repeated": r"\boxed{" * (LENGTH // 7),
        "braces": "{" * (LENGTH // 2) + "}" * (LENGTH // 2),
        "parentheses": "(" * 5000 + "1" + ")" * 5000,
        "brackets": "[" * LENGTH,
        "minus signs": "-" * LENGTH + "1",
        "digits": "9" * LENGTH,
        "white space and a number": " " * LENGTH + wrong,
        "fractions": r"\frac{1}{" * 10_000,
        "a tower of powers": "10^{10^{10}}",
        "a Python tower": "9**9**9**9",
        "an exponent": "1e999999999",
        "a factorial": "100000000!",
        "not a number": "NaN",
        "infinity": r"\infty",
        "wide digits": wrong.translate(_WIDE),
        "other digits": "٣٤٥",
        "NUL": f"{wrong}\x00",
        "a lone surrogate": "\ud800",
        "control characters": "\x1b[2J\x07\u202e" + wrong,
        "code": "__import__('os')._exit(0)",
        "an object": '{"answer": {"$ne": null}}',
    }
    return [(name, text) for name, text in found.items() if text.strip() != gold.strip() or not text.strip()]


def mutated_answer(answer: str) -> str:
    """Return a wrong answer that looks like the right one: another digit, letter, or word.

    Args:
        answer: The gold answer.
    """
    place = next((i for i, character in enumerate(answer) if character in "123456789"), -1)
    if place < 0:
        place = answer.find("0")
    if place >= 0:
        digit = answer[place]
        return answer[:place] + ("8" if digit == "9" else str(int(digit) + 1)) + answer[place + 1 :]
    word = answer.strip()
    flipped = {"yes": "no", "no": "yes", "true": "false", "false": "true"}.get(word.lower())
    if flipped:
        return flipped.capitalize() if word[0].isupper() else flipped
    if len(word) == 1 and word.isascii() and word.isalpha():
        return chr(ord(word) + 1) if word not in "zZ" else chr(ord(word) - 1)
    return f"{word}q"


def rewritten_answers(answer: str) -> list[str]:
    r"""Return other spellings of an answer that mean the same for its kind.

    Args:
        answer: The gold answer: a whole number, decimal, fraction, tuple of whole numbers, letter, yes or no; for
            anything else only surrounding white space certainly does not matter.

    Returns:
        Spellings that differ from the answer, without repetition.
    """
    text = answer.strip()
    found = [f" {text}\n"]
    fraction = _FRACTION.fullmatch(text)
    if _INTEGER.fullmatch(text):
        found += [f"{int(text):,}", f"{text}.0", f"${text}$", rf"\boxed{{{text}}}", rf"\text{{{text}}}"]
    elif _DECIMAL.fullmatch(text):
        value = Fraction(text)
        found += [f"{text}0", f"${text}$", rf"\frac{{{value.numerator}}}{{{value.denominator}}}"]
    elif fraction and int(fraction[3] or fraction[5]):
        sign, top, bottom = fraction[1], fraction[2] or fraction[4], fraction[3] or fraction[5]
        found += [
            f"{sign}{top}/{bottom}",
            rf"{sign}\frac{{{top}}}{{{bottom}}}",
            rf"{sign}\dfrac{{{top}}}{{{bottom}}}",
        ]
        value = Fraction(int(f"{sign}{top}"), int(bottom))
        if 10**6 % value.denominator == 0:
            found.append(f"{value.numerator / value.denominator:f}".rstrip("0").rstrip("."))
    elif _PAIR.fullmatch(text):
        found += [text.replace(" ", ""), text.replace(",", " , "), f"${text}$"]
    elif text.lower() in ("yes", "no"):
        found += [text.lower(), text.upper(), text.capitalize(), f"{text}."]
    elif len(text) == 1 and text.isascii() and text.isupper():
        found += [f"({text})", f"{text}.", f"{text})"]
    return [spelling for spelling in dict.fromkeys(found) if spelling != answer]
