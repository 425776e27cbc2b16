r"""Normalises answer text to one plain spelling: removes wrappers, spacing and synonyms, keeps the meaning.

The output is still text, over a small alphabet: `\frac \sqrt \binom \log ...` remain commands; `∪ ∞ π ± ∓ ≤
≥ ≠ ∈ ≈ °` are one character each; set braces are `⦃ ⦄`, matrices `⟦ ⟧`, words between `❮ ❯`, row breaks
`¶`. All passes are linear.
"""

from __future__ import annotations

import re

from whet.rewards.answers.expression import FUNCTIONS, OF_MEMBERS
from whet.rewards.answers.scripts import JOINED, PERCENT, fold

WORD_OPEN, WORD_CLOSE = "❮", "❯"
SET_OPEN, SET_CLOSE = "⦃", "⦄"
MATRIX_OPEN, MATRIX_CLOSE = "⟦", "⟧"
ROW_BREAK = "¶"
UNIT_LETTERS = frozenset("mgshlLNJWVKCF")
"""Letters that are a unit when upright after a digit (`5\\text{m}`)."""

_CHARACTERS: dict[int, str] = {
    **dict.fromkeys(
        [*range(0x0A), *range(0x0B, 0x20), 0x7F, 0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000],
        " ",
    ),
    **dict.fromkeys([0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF], ""),
    **dict.fromkeys(map(ord, "−–—﹣－‐‑"), "-"),
    **dict.fromkeys(map(ord, "£€¥₹₩₽＄฿₫₴₺₪₱৳₸"), ""),
    **dict.fromkeys(
        map(ord, "❮❯⦃⦄⟦⟧¶"), "?"
    ),  # reserved for our markers; untrusted text must not contain them
    **{
        ord(c): f" {a}/{b}"
        for c, a, b in zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "112131234151357", "233445555668888", strict=True)
    },
    **dict(zip(map(ord, "×·⋅∙∗÷∕⁄⩽⩾º≃∼“”’‘′，∣⟨⟩〈〉"), "*****///≤≥°≈~\"\"''',|()()", strict=True)),
    ord("√"): "\\sqrt ",
    ord("∛"): "\\sqrt[3]",
    ord("∜"): "\\sqrt[4]",
    ord("∑"): "\\sum",
    ord("∏"): "\\prod",
    ord("∫"): "\\int",
    ord("¢"): " cents",
    **dict(zip(map(ord, "！＜＞「」『』《》。"), '!<>"""""".', strict=True)),
}
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+"), re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_ON_THE_LINE = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789+-n0123456789")

_SYNONYMS = r"""
left right mleft mright big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr =
mathbf boldsymbol bm vec overrightarrow hat mathcal bold mathsf mathbfit euro pounds =
displaystyle textstyle scriptstyle limits nolimits rm bf it boxed fbox hbox = SPACE
quad qquad thinspace enspace space medspace thickspace = SPACE
dfrac tfrac cfrac frac = \frac
dbinom tbinom binom = \binom
cdot times ast cdotp = *
div = /
le leq leqslant = ≤
ge geq geqslant = ≥
ne neq = ≠
lt = <
gt = >
in = ∈
equiv = =
approx simeq = ≈
langle lparen lgroup = (
rangle rparen rgroup = )
lbrack = [
rbrack = ]
lbrace = SET_OPEN
rbrace = SET_CLOSE
lfloor llcorner = ⌊
rfloor lrcorner = ⌋
lceil ulcorner = ⌈
rceil urcorner = ⌉
lvert rvert vert lVert rVert mid = |
emptyset varnothing = ∅
ldots dots cdots = …
degree degrees textdegree = °
text textbf textit textrm textnormal textsf texttt textup mbox emph mathrm mathit operatorname mathop = \text
infty = ∞
pi = π
cup = ∪
cap = ∩
setminus smallsetminus backslash = ∖
exponentialE = e
imaginaryI imaginaryJ = i
pm = ±
mp = ∓
R = ℝ
varphi = \phi
varepsilon = \epsilon
vartheta = \theta
lor vee = OR
land wedge = AND
newline cr = ROW_BREAK
top intercal = T
"""
_PLACEHOLDERS = {
    "SPACE": " ",
    "SET_OPEN": SET_OPEN,
    "SET_CLOSE": SET_CLOSE,
    "ROW_BREAK": ROW_BREAK,
    "OR": " or ",
    "AND": " and ",
}
_COMMANDS: dict[str, str] = {
    name: _PLACEHOLDERS.get(meaning.strip(), meaning.strip())
    for names, _, meaning in (line.partition(" =") for line in _SYNONYMS.strip().splitlines())
    for name in names.split()
}
_SYMBOLS: dict[str, str] = {
    **dict.fromkeys(["\\,", "\\;", "\\:", "\\ ", "\\>", "\\\n"], " "),
    "\\\\": ROW_BREAK,
    "\\{": SET_OPEN,
    "\\}": SET_CLOSE,
    "\\%": "%",
    "\\$": " ",
    "\\!": "",
    "\\(": " ",
    "\\)": " ",
    "\\[": " ",
    "\\]": " ",
    "\\#": "#",
    "\\&": "&",
    "\\_": "_",
    "\\|": "|",
    "\\-": "",
}
_GLUED = re.compile(
    r"(leq|geq|le|ge|lt|gt|neq|cdot|times|quad|cup|pi|[lr]?vert|[lr](?:group|brace|brack|paren|floor|ceil)|[ul][lr]corner)"
    r"([A-Za-z])"
)
"""A command that lacks the space before a variable: `\\lex` for `\\le x`."""
_ESCAPED_TWICE = re.compile(
    r"(?<!\\)\\\\(?=(?:[dtc]?frac|sqrt|left|right|text|begin|end|pi|cdot|times|infty|cup|[lg]eq?|pm)(?![A-Za-z]))"
)
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|[^A-Za-z])", re.DOTALL)
_APOSTROPHES = re.compile(r"(?<![0-9'.,])([0-9]{1,3}(?:'[0-9]{3})+)(?![0-9'])")
"""Thousands as the Swiss write them."""
_THOUSANDS = re.compile(
    r"(?<=[0-9])(?: ?\{ ?, ?\} ?| ?\\! ?, ?|, ?\\! ?|\\[,;: ]|~|\\! ?)(?=[0-9]{3}(?![0-9]))"
)
_FRACTION_OF_UNITS = re.compile(
    r"(?<=[0-9}]) {0,3}\\frac ?\{ ?\\text ?\{ ?([A-Za-z]{1,12}) ?\}((?: ?\^ ?\{?[2-4]\}?)?) ?\}"
    r" ?\{ ?\\text ?\{ ?([A-Za-z]{1,12}) ?\}((?: ?\^ ?\{?[2-4]\}?)?) ?\}"
)
_DEGREE = re.compile(r"\^ ?(?:\{ ?(?:°|\\circ) ?\}|\\circ(?![A-Za-z])|°|∘)")
_MATRIX = re.compile(r"\\(begin|end) ?\{ ?([pbBvV]?matrix|smallmatrix|array)\*? ?\}")
_COLUMNS = re.compile(r" *\{[ lcr|]*\}")
_LOST_BACKSLASH = {"\x08oxed": "\\boxed", "\x0crac": "\\frac"}
"""What Python makes of `\\boxed` and `\\frac` in a string that is not raw."""
_PERCENT = re.compile(
    rf" ?{WORD_OPEN} ?(?:percentage|percent|pct) ?{WORD_CLOSE}| ?(?:percentage|percent|pct|{PERCENT})(?![A-Za-z])"
)
_LAYOUT = re.compile(r"\\(?:begin|end) ?\{ ?(?:cases|aligned|align|gathered|split|equation)\*? ?\}")
_INFIX = re.compile(r"\{([^{}]{1,80})\\(choose|over)(?![A-Za-z])([^{}]{1,80})\}")
_MODULO = re.compile(r"\( ?\\?[bp]?mod ?\{? ?(\w+) ?\}? ?\)|\\[pb]?mod ?\{? ?(\w+) ?\}?")
_CURRENCY = re.compile(r"(?:USD|US |EUR|GBP|INR|CNY|RMB|Rs\.?) ?(?=[0-9.])")
_NOT_EQUAL = re.compile(r"(?<![0-9)])!=")
_TIMES_TEN = re.compile(r"(?<=[0-9]) ?x ?(?=10 ?\^)")
_INFINITY = re.compile(r"(?<![A-Za-z])infinity(?![A-Za-z])", re.IGNORECASE)
_END_TOKEN = re.compile(r"<\|[A-Za-z_]{1,20}\|>")
_ROW_GAP = re.compile(ROW_BREAK + r"\[[0-9.a-z]{1,8}\]")
_BRACKETS = frozenset("([{" + SET_OPEN)
_JOINS = (" oder ", " ou ", " und ", " et ")
"""The words of `JOINED` that ASCII can write."""
_SPACES = re.compile(r"[ \t]+")


def clean(text: str) -> str:
    """Rewrite an answer in the plain spelling that the module describes.

    Args:
        text: An answer of bounded length (the caller's cap).

    Returns:
        The plain spelling, stripped; it may be empty.
    """
    if "\x08" in text or "\x0c" in text:
        for lost, command in _LOST_BACKSLASH.items():
            text = text.replace(lost, command)
    if not text.isascii():
        text = fold(text).rstrip("。 ")
        text = _RAISED.sub(lambda match: "^{" + match.group().translate(_ON_THE_LINE) + "}", text)
        text = _LOWERED.sub(lambda match: "_{" + match.group().translate(_ON_THE_LINE) + "}", text)
    if not text.isascii() or any(word in text for word in _JOINS):
        text = JOINED.sub(lambda match: " or " if match["any"] else " and ", text)
    text = text.translate(_CHARACTERS).strip()
    if "<|" in text:
        text = _END_TOKEN.sub(" ", text)
    if "\\" not in text and "$" not in text and "{" not in text:
        return _finish(text)
    text = _THOUSANDS.sub("", _SPACES.sub(" ", _ESCAPED_TWICE.sub(r"\\", text)))
    text = text.replace("\\mathbb{R}", "ℝ").replace("\\mathbb R", "ℝ").replace("\\sqrt{}", "\\sqrt")
    if "\\choose" in text or "\\over" in text:
        text = _INFIX.sub(_prefix, text)
    text = _COMMAND.sub(_translate, text)
    if "\\text" in text:
        text = _mark_words(_FRACTION_OF_UNITS.sub(r" \1\2/\3\4", text) if "\\frac" in text else text)
    if "\\begin" in text:
        text = _mark_matrices(text)
        if "\\begin" in text and _LAYOUT.search(text):
            text = _LAYOUT.sub(" ", text).replace("&", " ")
    return _finish(text.replace("~", " "))


def _finish(text: str) -> str:
    """Apply the rules that plain text and LaTeX share."""
    text = text.replace("+∞", "∞").replace("$", " ").rstrip("\\ ").lstrip("=≈ ")
    if text.startswith("**") and text.endswith("**"):
        text = text.strip("*")
    if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'`*_":
        text = text[1:-1]
    if "'" in text:
        text = _APOSTROPHES.sub(lambda match: match[1].replace("'", ""), text)
    if "^" in text or "°" in text:
        text = _TIMES_TEN.sub("*", _DEGREE.sub("°", text))
    text = text.replace("**", "^").replace("&", ",")
    if "p" in text or "rozent" in text or not text.isascii():
        text = _PERCENT.sub("%", text)
    if "=" in text:
        text = _NOT_EQUAL.sub("≠", text.replace(">=", "≥").replace("<=", "≤").replace("==", "="))
    if "mod" in text:
        text = _MODULO.sub(lambda match: f" mod {match[1] or match[2]}", text)
    if "nfinity" in text:
        text = _INFINITY.sub("∞", text)
    if text[:1] in "UEGICR":
        text = _CURRENCY.sub("", text, count=1)
    text = _SPACES.sub(" ", text).strip()
    return text.rstrip(".,;: ") if text[-1:] in ".,;: " else text


def _prefix(match: re.Match[str]) -> str:
    r"""Turn `{n \choose k}` and `{a \over b}` into commands with arguments."""
    return f"\\{'binom' if match[2] == 'choose' else 'frac'}{{{match[1]}}}{{{match[3]}}}"


def _translate(match: re.Match[str]) -> str:
    command = match.group()
    name = command[1:]
    if name.isalpha() and name.isascii():
        meaning = _COMMANDS.get(name)
        if meaning is None:
            glued = _GLUED.fullmatch(name)
            return f"{_COMMANDS[glued[1]]} {glued[2]}" if glued else command
        return meaning
    return _SYMBOLS.get(command, command)


def closing_brace(text: str, start: int) -> int:
    """Return the index of the brace that closes the one at `start`, or -1."""
    if text.find("}", start) < 0:
        return -1
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "{":
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth == 0:
                return index
    return -1


def _mark_words(text: str) -> str:
    r"""Turn every `\text{words}` into marked words; a single letter stays a symbol."""
    pieces: list[str] = []
    position = 0
    for _ in range(64):
        start = text.find("\\text", position)
        if start < 0:
            break
        pieces.append(text[position:start])
        brace = start + 5
        while text[brace : brace + 1] == " ":
            brace += 1
        end = closing_brace(text, brace) if text[brace : brace + 1] == "{" else -1
        if end < 0:
            position = brace
            continue
        position = end + 1
        if "^" in text[brace:end]:  # a formula inside \text
            pieces.append(text[brace + 1 : end])
            continue
        words = text[brace + 1 : end].replace("\\text", "").replace("{", "").replace("}", "")
        is_unit = words in UNIT_LETTERS and text[:start].rstrip()[-1:].isdigit()
        is_symbol = (len(words) == 1 and not is_unit) or words.strip() in FUNCTIONS
        is_symbol = is_symbol or (words.strip() in OF_MEMBERS and text[position:].lstrip()[:1] in _BRACKETS)
        pieces.append(words if is_symbol else f"{WORD_OPEN}{words}{WORD_CLOSE}")
    return "".join(pieces) + text[position:]


def _mark_matrices(text: str) -> str:
    r"""Turn a matrix `a & b \\ c & d` into `⟦⟦a,b⟧,⟦c,d⟧⟧`, and one row or column into `⟦a,b⟧`."""
    pieces: list[str] = []
    position = 0
    body = -1
    for mark in _MATRIX.finditer(_ROW_GAP.sub(ROW_BREAK, text)):
        source = mark.string
        if mark[1] == "begin":
            pieces.append(source[position : mark.start()])
            columns = _COLUMNS.match(source, mark.end()) if mark[2] == "array" else None
            position = body = columns.end() if columns else mark.end()
        elif body >= 0:
            prefix = "\\det " if mark[2][0] in "vV" else ""
            pieces.append(prefix + _matrix(source[body : mark.start()]))
            position, body = mark.end(), -1
    return "".join(pieces) + _ROW_GAP.sub(ROW_BREAK, text)[position:]


def _matrix(body: str) -> str:
    rows = [row.split("&") for row in body.replace("\\hline", "").split(ROW_BREAK) if row.strip()]
    if len(rows) == 1 or all(len(row) == 1 for row in rows):
        return MATRIX_OPEN + ",".join(cell.strip() for row in rows for cell in row) + MATRIX_CLOSE
    inner = [MATRIX_OPEN + ",".join(cell.strip() for cell in row) + MATRIX_CLOSE for row in rows]
    return MATRIX_OPEN + ",".join(inner) + MATRIX_CLOSE
