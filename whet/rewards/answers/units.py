"""Units after a number: `5 cm`, `5cm`, `12 dollars`, `20 m/s`, `3 million`."""

from __future__ import annotations

import re

from whet.rewards.answers import scripts
from whet.rewards.answers.latex import UNIT_LETTERS, WORD_CLOSE, WORD_OPEN
from whet.rewards.answers.scripts import FOREIGN_LETTER, HEDGED, POWERS

_SPELLINGS = """
cm centimeter centimeters centimetre centimetres cms|mm millimeter millimeters millimetre millimetres
m meter meters metre metres|km kilometer kilometers kilometre kilometres kms|in inch inches|ft foot feet
yd yard yards yds
mi mile miles|g gram grams gm|kg kilogram kilograms kgs kilo kilos|mg milligram milligrams
lb lbs pound pounds|oz ounce ounces
s sec secs second seconds|min mins minute minutes|h hr hrs hour hours|day days|week weeks|month months
year years yr yrs
ms millisecond milliseconds|l liter liters litre litres|ml milliliter milliliters|gal gallon gallons
dollar dollars usd bucks
cent cents|euro euros eur|mph|kmh kph|n newton newtons|j joule joules|w watt watts|v volt volts
a amp amps ampere amperes
ohm ohms|hz hertz|pa pascal pascals|mol moles mole|k kelvin|unit units|degree degrees deg
radian radians rad|rupee rupees
st nd rd th|people person persons|point points|time times|way ways|kj|kw|kn|mhz|ghz|nm
nanometer nanometers|acre acres
"""
_CANONICAL: dict[str, str] = {}
for _line in (_SPELLINGS + scripts.UNITS).replace("\n", "|").split("|"):
    for _word in _line.split():
        _CANONICAL.setdefault(_word, _line.split()[0])

SCALES: dict[str, int] = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    **scripts.SCALES,
}
_MODIFIERS = frozenset(["per", "square", "cubic", "sq", "cu", "squared", "cubed"])
LONGEST_UNIT = 24
"""Longest words of other languages (in characters) that are taken for a unit."""
_RESERVED_WORDS = (
    "or and not no mod if but is nor with to versus vs plus minus than pi i e x y z infinity oo inf nan"
)
_RESERVED = frozenset(_RESERVED_WORDS.split())
_TAIL = re.compile(
    r"(?P<core>.*[0-9)}π°%])(?P<gap> ?)"
    r"(?P<unit>[A-Za-z]+\.?(?: ?\^ ?\{?[23]\}?)?"
    r"(?:(?: per | ?[/*] ?| )[A-Za-z]+(?: ?\^ ?\{?-?[1-3]\}?)?){0,4})",
    re.DOTALL,
)
_MARKED_TAIL = re.compile(
    rf"(?: ?[/*]? ?{WORD_OPEN}[^{WORD_OPEN}{WORD_CLOSE}]*{WORD_CLOSE}(?: ?\^ ?\{{?-?[1-3]\}}?)?)+$"
)
_SYMBOL = re.compile(r"π|(?<![A-Za-z\\])[A-Za-z]|\\(?!frac|sqrt)[A-Za-z]")
_WORDS = re.compile(scripts.WORD)
_FOREIGN_TAIL = re.compile(
    rf"(?P<core>.*[0-9)}}π°%])(?P<gap> ?)"
    rf"(?P<unit>{scripts.WORD}\.?(?: ?\^ ?\{{?[23]\}}?)?(?:(?: ?/ ?| ){scripts.WORD}){{0,3}})",
    re.DOTALL,
)
_TRIG = re.compile(r"sin|cos|tan|sec|csc|cot|log|ln|exp|sqrt")


def split_unit(text: str) -> tuple[str, str]:
    r"""Cut a trailing unit off.

    A marked word (`5\text{ cm}`) is always a unit; among plain words known units are, and any other words after a plain
    number ("12 apples"). One letter counts only if marked, or after a number and a space (`5 m`; `5m`, `5 k` and `\pi
    r` are products).

    Args:
        text: Cleaned text.

    Returns:
        (text before the unit, the unit or '').
    """
    if len(text) > 300:
        return text, ""
    if text.endswith(WORD_CLOSE) or (WORD_CLOSE in text and text[-1] in "123}"):
        start = text.find(WORD_OPEN)
        match = _MARKED_TAIL.search(text, max(0, start - 3))
        if match and match.start() > 0 and text[match.start() - 1] not in "_^(,{":
            return text[: match.start()].rstrip(), match.group()
        return text, ""
    if not text.isascii() and FOREIGN_LETTER.search(text):
        return _split_foreign(text)
    match = _TAIL.fullmatch(text) if text[-1:].isalnum() or text[-1:] in ".}" else None
    if match is None or not match["core"].strip(" +-"):
        return text, ""
    unit = match["unit"]
    words = [word.lower() for word in _WORDS.findall(unit)]
    is_number = not _WORDS.search(match["core"])
    if _RESERVED.intersection(words) or _TRIG.search(unit) or HEDGED.search(unit):
        return text, ""
    if len(words[0]) == 1 and (unit[0] not in UNIT_LETTERS or _SYMBOL.search(match["core"])):
        return text, ""
    known = all(word in _CANONICAL or word in _MODIFIERS or word in SCALES for word in words)
    if known and (match["gap"] or len(words[0]) > 1):
        return match["core"].rstrip(), unit
    if (
        is_number
        and match["gap"]
        and len(words) <= 4
        and all(len(word) > 1 for word in words)
        and len(words[0]) > 2
    ):
        return match["core"].rstrip(), unit
    return text, ""


def _split_foreign(text: str) -> tuple[str, str]:
    """Cut off words of another language: known units behind anything, others behind a plain number."""
    match = _FOREIGN_TAIL.fullmatch(text)
    if match is None or not match["core"].strip(" +-") or HEDGED.search(match["unit"]):
        return text, ""
    words = [word.lower() for word in _WORDS.findall(match["unit"])]
    known = all(_canonical(word) in _CANONICAL or word in SCALES for word in words)
    is_number = not _WORDS.search(match["core"]) and (match["gap"] or FOREIGN_LETTER.match(match["unit"]))
    if _RESERVED.intersection(words) or not (known or (is_number and len(match["unit"]) <= LONGEST_UNIT)):
        return text, ""
    return match["core"].rstrip(), match["unit"]


def _canonical(word: str) -> str:
    """Return a unit without the "square" or "cubic" that is written together with it."""
    for power in POWERS:
        word = word.removeprefix(power)
    return _CANONICAL.get(word, word)


def unit_words(unit: str) -> frozenset[str]:
    """Return the canonical words of a unit, without powers and modifiers (`square cm` and `cm^2` agree)."""
    words = [str(word).lower() for word in _WORDS.findall(unit)]
    return frozenset(_canonical(word) for word in words if word not in _MODIFIERS and word not in SCALES)


def unit_scale(unit: str) -> int:
    """Return the factor of a scale word ('million'), else 1."""
    first = _WORDS.search(unit)
    return SCALES.get(first.group().lower(), 1) if first else 1


def units_conflict(left: str, right: str) -> bool:
    """Say whether both sides have known units that differ; missing or unknown units never conflict."""
    if not left or not right:
        return False
    first, second = unit_words(left), unit_words(right)
    known = frozenset(_CANONICAL.values())
    return bool(first and second) and first <= known and second <= known and first != second
