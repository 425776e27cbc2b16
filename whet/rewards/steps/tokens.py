"""Words, numbers and signs of a trace: the tokens that the step audit reads. Linear in the text's length."""

from __future__ import annotations

import re
from typing import NamedTuple

_TOKEN = re.compile(
    r"(?P<skip>[^\S\n]+|[&`]|\\[,;:! ]|\\(?:right|boxed|fbox|q?quad|displaystyle)(?![A-Za-z])|<<[^<>\n]{0,200}>>"
    r"|\.{2,}|\u2026)"
    r"|(?P<newline>\n|\\\\)"
    r"|(?P<number>(?:[1-9][0-9]{0,2}(?:(?:,(?:\\!)?|\{,\})[0-9]{3}){1,8}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"|\\(?:text|mathrm|mbox|textbf) ?\{(?P<text>[^{}\n]{0,80})\}"
    r"|\\left ?(?P<left>[(\[{|])"
    r"|(?P<word>\\?[^\W\d_]+)"
    r"|(?P<relation>[<>!:~]?=+>?)"
    r"|(?P<symbol>\*\*|\\?.)"
)
_KINDS = {
    **dict.fromkeys(["+", "-", "\u2212", "\u2013", "*", "\u00d7", "\u00b7", "\u22c5", "/", "\u00f7", "^"], "operator"),
    **dict.fromkeys(["\\times", "\\cdot", "\\div", "**"], "operator"),
    **dict.fromkeys(["\\frac", "\\dfrac", "\\tfrac"], "frac"),
    **dict.fromkeys("([{", "open"),
    **dict.fromkeys(")]}", "close"),
    **dict.fromkeys(["$", "\\$", "\u00a3", "\u20ac"], "money"),
    **dict.fromkeys(["%", "\\%", "percent"], "percent"),
    **dict.fromkeys(["=", "=="], "equals"),
}  # fmt: skip
_OPERATORS = {
    **dict.fromkeys(["-", "\u2212", "\u2013"], "-"),
    **dict.fromkeys(["*", "\u00d7", "\u00b7", "\u22c5", "\\times", "\\cdot", "x", "X"], "*"),
    **dict.fromkeys(["/", "\u00f7", "\\div"], "/"),
    **dict.fromkeys(["^", "**"], "^"),
}
_MARKS = frozenset(["\\#", "\\&", "\\|", *"@#_|√∛∑∏∫°′∘⊕⊗⌊⌈⌋⌉"])
OPERANDS = frozenset({"number", "money", "open", "frac"})
"""Kinds of token that start a number or a group."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CONTEXT_WORDS = _words(
    """half third thirds quarter quarters fourth fifth twice thrice double triple dozen dozens hundred hundreds
    thousand thousands million millions billion billions trillion plus minus times divided multiplied over mod
    modulo remainder sqrt log ln lg sin cos tan sec csc cot gcd lcm lcf gcf arcsin arccos arctan"""
)
"""Words next to a number that change its value: the expression is then not checked."""
NEUTRAL_COMMANDS = _words(
    """\\implies \\Rightarrow \\Longrightarrow \\rightarrow \\to \\iff \\Leftrightarrow \\therefore \\because \\item
    \\end \\begin \\neq \\ne \\le \\leq \\ge \\geq \\approx"""
)
"""LaTeX commands that leave an adjacent number unchanged; all others change it."""
LABEL_WORDS = _words("step problem question case part example day days week weeks")
"""Words before a number that make it a name: `Weeks 1-2`."""
CLAUSE_WORDS = _words(
    """and so then is are was were has have had the if since because but or where which that let thus hence therefore
    equals equal means gives makes get gets we he she they it total sum cost answer before after
    than with from for until when while"""
)
"""Words that no unit contains: they start a new clause."""
MEASURES = _words(
    """$ second sec minute min hour hr day week month year decade century cent dollar penny pennies nickel dime foot
    feet ft inch inches in yard yd mile mi meter metre m cm mm km kilometer centimeter millimeter kg g gram kilogram mg
    ton lb pound ounce oz liter litre l ml milliliter gallon quart pint cup tablespoon teaspoon mph kph"""
)
"""Units that convert into one another: `60 minutes * 2 = 2 hours` is a conversion, not an error."""


class Token(NamedTuple):
    """A piece of the trace; `glued` if it directly follows the previous token."""

    kind: str
    text: str
    start: int
    end: int
    glued: bool


END = Token("end", "", 0, 0, False)
"""Placeholder beyond either end of a trace."""


def tokenise(text: str) -> list[Token]:
    """Cut a text into tokens, dropping pure formatting: spaces, `&`, `**`, math dollars, `<<...>>`."""
    tokens: list[Token] = []
    end = -1  # where the last token that was kept ends
    for match in _TOKEN.finditer(text):
        group = match.lastgroup or "symbol"
        if group == "skip":
            continue
        written = match[group]
        kind = _KINDS.get(written) or {"text": "word", "left": "symbol"}.get(group, group)
        glued = match.start() == end or group == "left"  # `15 \\left(` multiplies like `15(`
        tokens.append(Token(kind, written, match.start(), match.end(), glued))
        end = match.end()
    kept: list[Token] = []
    for token, after in zip(tokens, [*tokens[1:], END], strict=True):
        if not _only_formats(kept[-1] if kept else END, token, after):
            kept.append(token)
    return list(map(_resolve_times, [END, *kept], kept, [*kept[1:], END]))


def _only_formats(before: Token, token: Token, after: Token) -> bool:
    if token.kind == "money":
        return after.kind != "number"
    if token.kind == "newline":
        return "equals" in (before.kind, after.kind) or before.kind == "newline"
    return token.text == "**" and not (before.kind in ("number", "close") and after.kind in OPERANDS)


def _resolve_times(before: Token, token: Token, after: Token) -> Token:
    """Read `x` between a number (or its unit) and a number as a times sign."""
    if token.text not in ("x", "X") or before.kind not in ("number", "percent", "close", "word"):
        return token
    is_variable = after.kind not in OPERANDS or (after.kind == "open" and after.glued)
    return token if is_variable else token._replace(kind="operator")


def symbol(token: Token) -> str:
    """Return the plain symbol of an operator: `\\times` and `x` are `*`."""
    return _OPERATORS.get(token.text, token.text)


def is_sign(token: Token) -> bool:
    """Say whether an operator can be a number's sign."""
    return symbol(token) in ("+", "-")


def singular(word: str) -> str:
    r"""Return a word in lower case, without the backslash of a command and the s of a plural measure."""
    word = word.lower().lstrip("\\")
    return word[:-1] if word.endswith("s") and word[:-1] in MEASURES else word


def is_word(token: Token) -> bool:
    """Say whether a token is an English word, not a variable or LaTeX command."""
    return token.kind == "word" and len(token.text) > 1 and token.text[0] != "\\"


def changes_value(token: Token) -> bool:
    """Say whether a token next to a number changes its value: a variable, a function, a mark like `!`."""
    if token.kind == "word":
        return not is_word(token) and token.text not in NEUTRAL_COMMANDS
    return token.kind == "symbol" and token.text in _MARKS
