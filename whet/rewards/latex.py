r"""Answer text as people write it -> one plain spelling: wrappers, spacing and synonyms go, meaning stays.

The output is still text, over a small alphabet: `\frac \sqrt \binom \log ...` remain commands; `∪ ∞ π ± ∓ ≤
≥ ≠ ∈ ≈ °` are one character each; set braces are `⦃ ⦄`, matrices `⟦ ⟧`, words between `❮ ❯`, row breaks
`¶`. All passes are linear.
"""

from __future__ import annotations

import re

WORD_OPEN, WORD_CLOSE = "❮", "❯"
SET_OPEN, SET_CLOSE = "⦃", "⦄"
MATRIX_OPEN, MATRIX_CLOSE = "⟦", "⟧"
ROW_BREAK = "¶"
UNIT_LETTERS = frozenset("mgshlLNJWVKCF")
"""Letters that are a unit when they stand upright behind a digit (`5\\text{m}`)."""

_CHARACTERS: dict[int, str] = {
    **dict.fromkeys(
        [*range(0x0A), *range(0x0B, 0x20), 0x7F, 0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000],
        " ",
    ),
    **dict.fromkeys([0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF], ""),
    **dict.fromkeys(map(ord, "−–—﹣－‐‑"), "-"),
    **dict.fromkeys(map(ord, "£€¥₹"), ""),
    **dict.fromkeys(map(ord, "❮❯⦃⦄⟦⟧¶"), "?"),  # ours; nobody else may write them
    **{
        ord(c): f" {a}/{b}"
        for c, a, b in zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "112131234151357", "233445555668888", strict=True)
    },
    **{ord(c): f"^{i}" for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{ord(c): f"_{i}" for i, c in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    **{
        ord(k): v
        for k, v in {
            "×": "*",
            "·": "*",
            "⋅": "*",
            "∙": "*",
            "∗": "*",
            "÷": "/",
            "∕": "/",
            "⁄": "/",
            "√": "\\sqrt ",
        }.items()
    },
    **{
        ord(k): v
        for k, v in {
            "⩽": "≤",
            "⩾": "≥",
            "º": "°",
            "≃": "≈",
            "∼": "~",
            "“": '"',
            "”": '"',
            "’": "'",
            "，": ",",
            "∣": "|",
        }.items()
    },
}

_COMMANDS: dict[str, str] = {
    **dict.fromkeys(
        [
            "left",
            "right",
            "big",
            "Big",
            "bigg",
            "Bigg",
            "bigl",
            "bigr",
            "Bigl",
            "Bigr",
            "biggl",
            "biggr",
            "Biggl",
            "Biggr",
        ],
        "",
    ),
    **dict.fromkeys(
        [
            "displaystyle",
            "textstyle",
            "scriptstyle",
            "limits",
            "nolimits",
            "rm",
            "bf",
            "it",
            "boxed",
            "fbox",
            "hbox",
        ],
        " ",
    ),
    **dict.fromkeys(["quad", "qquad", "thinspace", "enspace", "space", "medspace", "thickspace"], " "),
    **dict.fromkeys(["dfrac", "tfrac", "cfrac", "frac"], "\\frac"),
    **dict.fromkeys(["dbinom", "tbinom", "binom"], "\\binom"),
    **dict.fromkeys(["cdot", "times", "ast", "cdotp"], "*"),
    **dict.fromkeys(["le", "leq", "leqslant"], "≤"),
    **dict.fromkeys(["ge", "geq", "geqslant"], "≥"),
    **dict.fromkeys(["ne", "neq"], "≠"),
    **dict.fromkeys(["langle", "lparen"], "("),
    **dict.fromkeys(["rangle", "rparen"], ")"),
    **dict.fromkeys(["lvert", "rvert", "vert", "lVert", "rVert", "mid"], "|"),
    **dict.fromkeys(["emptyset", "varnothing"], "∅"),
    **dict.fromkeys(["ldots", "dots", "cdots"], "…"),
    **dict.fromkeys(["degree", "degrees", "textdegree"], "°"),
    **dict.fromkeys(
        [
            "text",
            "textbf",
            "textit",
            "textrm",
            "textnormal",
            "textsf",
            "texttt",
            "textup",
            "mbox",
            "emph",
            "mathrm",
        ],
        "\\text",
    ),
    **dict.fromkeys(["mathsf", "mathit", "operatorname", "mathop"], "\\text"),
    **dict.fromkeys(["mathbf", "boldsymbol", "bm", "vec", "overrightarrow", "hat", "mathcal", "bold"], ""),
    "div": "/",
    "infty": "∞",
    "pi": "π",
    "cup": "∪",
    "pm": "±",
    "mp": "∓",
    "lt": "<",
    "gt": ">",
    "in": "∈",
    "approx": "≈",
    "lbrace": SET_OPEN,
    "rbrace": SET_CLOSE,
    "lbrack": "[",
    "rbrack": "]",
    "R": "ℝ",
    "varphi": "\\phi",
    "varepsilon": "\\epsilon",
    "newline": ROW_BREAK,
    "cr": ROW_BREAK,
    "top": "T",
    "intercal": "T",
    "vartheta": "\\theta",
    "euro": "",
    "pounds": "",
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
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|[^A-Za-z])", re.DOTALL)
_THOUSANDS = re.compile(
    r"(?<=[0-9])(?: ?\{ ?, ?\} ?| ?\\! ?, ?|, ?\\! ?|\\[,;: ]|~|\\! ?)(?=[0-9]{3}(?![0-9]))"
)
_DEGREE = re.compile(r"\^ ?(?:\{ ?(?:°|\\circ) ?\}|\\circ(?![A-Za-z])|°|∘)")
_MATRIX = re.compile(r"\\(begin|end) ?\{ ?([pbB]?matrix|smallmatrix|array)\*? ?\}")
_COLUMNS = re.compile(r" *\{[ lcr|]*\}")
_PERCENT = re.compile(r" ?(?:percentage|percent|pct)(?![A-Za-z])")
_ROW_GAP = re.compile(ROW_BREAK + r"\[[0-9.a-z]{1,8}\]")
_SPACES = re.compile(r"[ \t]+")


def clean(text: str) -> str:
    """Bring an answer into the plain spelling that the module describes.

    Args:
        text: An answer of bounded length (the caller's cap).

    Returns:
        The plain spelling, stripped; it may be empty.
    """
    text = text.translate(_CHARACTERS).strip()
    if "\\" not in text and "$" not in text and "{" not in text:
        return _finish(text)
    text = _THOUSANDS.sub("", _SPACES.sub(" ", text))
    text = text.replace("\\mathbb{R}", "ℝ").replace("\\mathbb R", "ℝ")
    text = _COMMAND.sub(_translate, text)
    if "\\text" in text:
        text = _mark_words(text)
    if "\\begin" in text:
        text = _mark_matrices(text)
    return _finish(text.replace("~", " "))


def _finish(text: str) -> str:
    """Apply what plain text and LaTeX share."""
    text = text.replace("+∞", "∞").strip("`")
    if text.startswith("**") and text.endswith("**"):
        text = text.strip("*")
    if "^" in text or "°" in text:
        text = _DEGREE.sub("°", text)
        text = text.replace("**", "^")
    elif "**" in text:
        text = text.replace("**", "^")
    if "p" in text:
        text = _PERCENT.sub("%", text)
    if "$" in text:
        text = text.replace("$", " ")
    text = _SPACES.sub(" ", text).strip()
    return text.rstrip(".,;: ") if text[-1:] in ".,;: " else text


def _translate(match: re.Match[str]) -> str:
    command = match.group()
    name = command[1:]
    if name.isalpha() and name.isascii():
        return _COMMANDS.get(name, command)
    return _SYMBOLS.get(command, command)


def closing_brace(text: str, start: int) -> int:
    """Return the index of the brace that closes the one at `start`, or -1."""
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
    r"""Turn every `\text{words}` into marked words; one letter alone is a symbol, and stays one."""
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
        words = text[brace + 1 : end].replace("\\text", "").replace("{", "").replace("}", "")
        is_unit = words in UNIT_LETTERS and text[:start].rstrip()[-1:].isdigit()
        is_symbol = (len(words) == 1 and not is_unit) or words.strip() in (
            "sin",
            "cos",
            "tan",
            "log",
            "ln",
            "exp",
        )
        pieces.append(words if is_symbol else f"{WORD_OPEN}{words}{WORD_CLOSE}")
        position = end + 1
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
            pieces.append(_matrix(source[body : mark.start()]))
            position, body = mark.end(), -1
    return "".join(pieces) + _ROW_GAP.sub(ROW_BREAK, text)[position:]


def _matrix(body: str) -> str:
    rows = [row.split("&") for row in body.replace("\\hline", "").split(ROW_BREAK) if row.strip()]
    if len(rows) == 1 or all(len(row) == 1 for row in rows):
        return MATRIX_OPEN + ",".join(cell.strip() for row in rows for cell in row) + MATRIX_CLOSE
    inner = [MATRIX_OPEN + ",".join(cell.strip() for cell in row) + MATRIX_CLOSE for row in rows]
    return MATRIX_OPEN + ",".join(inner) + MATRIX_CLOSE
