"""Units behind a number: `5 cm`, `5cm`, `12 dollars`, `20 m/s`, `3 million`, with their powers: `m/s^2` is no `m/s`."""

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
lb lbs|pound pounds|oz ounce ounces
s sec secs second seconds|min mins minute minutes|h hr hrs hour hours|day days|week weeks|month months
year years yr yrs
ms millisecond milliseconds|l liter liters litre litres|ml milliliter milliliters|gal gallon gallons
cent cents penny pennies
n newton newtons|j joule joules|w watt watts|v volt volts
a amp amps ampere amperes
ohm ohms|hz hertz|pa pascal pascals|mol moles mole|k kelvin|unit units|degree degrees deg
radian radians rad
st nd rd th|people person persons|point points|time times|way ways|kj|kw|kn|mhz|ghz|nm
nanometer nanometers|acre acres|hectare hectares|dozen dozens|ton tons tonne tonnes|celsius|fahrenheit
kwh|bpm|rpm|fps|sqft|sqm|calorie calories|kcal|knot knots
"""
_COMPOUND = {
    "mph": {"mi": 1, "h": -1},
    **dict.fromkeys(("kmh", "kph"), {"km": 1, "h": -1}),
    "fps": {"ft": 1, "s": -1},
    "sqft": {"ft": 2},
    "sqm": {"m": 2},
}
"""Units in one word -> the powers that they stand for."""
_CANONICAL: dict[str, str] = {}
for _line in (_SPELLINGS + scripts.UNITS).replace("\n", "|").split("|") + scripts.CURRENCIES.splitlines():
    for _word in _line.lower().replace("|", "").split():
        _CANONICAL.setdefault(_word, _line.split()[0])

_KNOWN = frozenset(_CANONICAL.values())
_NO_MARKS = str.maketrans(WORD_OPEN + WORD_CLOSE, "  ")

SCALES: dict[str, int] = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    **scripts.SCALES,
}
_MODIFIERS = frozenset(["per", "square", "cubic", "sq", "cu", "squared", "cubed", *scripts.NATIONS])
LONGEST_UNIT = 24
"""Longest words of other languages (in characters) that are taken for a unit."""
_RESERVED_WORDS = (
    "or and not no mod if but is nor with to versus vs plus minus than pi i e x y z infinity oo inf nan"
)
_RESERVED = frozenset(_RESERVED_WORDS.split())
_TAIL = re.compile(
    r"(?P<core>.*[0-9)}π°%])(?P<gap> ?)"
    r"(?P<unit>[A-Za-z]+\.?(?: ?\^ ?\{?-?[1-4]\}?|[23](?![0-9]))?"
    r"(?:(?: per | ?[/*] ?| )[A-Za-z]+(?: ?\^ ?\{?-?[1-4]\}?|[23](?![0-9]))?){0,4})",
    re.DOTALL,
)
_MARKED_TAIL = re.compile(
    rf"(?: ?[/*]? ?{WORD_OPEN}[^{WORD_OPEN}{WORD_CLOSE}]*{WORD_CLOSE}(?: ?\^ ?\{{?-?[1-4]\}}?)?)+$"
)
_SYMBOL = re.compile(r"π|(?<![A-Za-z\\])[A-Za-z]|\\(?!frac|sqrt)[A-Za-z]")
_WORDS = re.compile(scripts.WORD)
_FOREIGN_TAIL = re.compile(
    rf"(?P<core>.*[0-9)}}π°%])(?P<gap> ?)"
    rf"(?P<unit>{scripts.WORD}\.?(?: ?\^ ?\{{?[23]\}}?)?(?:(?: ?/ ?| ){scripts.WORD}){{0,3}})",
    re.DOTALL,
)
LONGEST_AMOUNT = 60
"""Longest amount of money (in characters) whose currency sign is read."""
_SIGNS = {
    sign: line.split()[0]
    for line in scripts.CURRENCIES.splitlines()
    for sign in line.partition("|")[0].split()[1:]
}
_SIGN = {
    sign: re.escape(sign).replace(r"\$", r" ?\\?\$") + (r"\.?" if sign.isalpha() else "") for sign in _SIGNS
}
_IN_FRONT = "|".join(_SIGN.values())
# A bare `$` behind a number may end a formula; codes there are units like any other.
_BEHIND = "|".join(_SIGN[sign] if sign != "$" else r"\\\$" for sign in _SIGNS if not sign.isalpha())
_AMOUNT = re.compile(
    rf"(?P<minus>-?)(?P<sign>(?:{_IN_FRONT})?) ?(?P<number>[1-9][0-9]{{0,2}}(?: [0-9]{{3}})+(?:[.,][0-9]+)?"
    rf"|[0-9](?:[0-9.,]*[0-9])?)(?P<end> ?(?:{_BEHIND})|)(?P<rest>(?: ?/ ?| )[A-Za-z][A-Za-z /]*)?[.]?"
)
_NO_ESCAPE = str.maketrans("", "", "\\ .")
_MARKS = re.compile(f"[{''.join({sign[-1] for sign in _SIGNS if not sign.isalpha()})}]")
_OF_CENTS = {(name, 1) for name in ("dollarsign", "dollar", "euro", "usd", "cad", "aud", "nzd", "sgd", "hkd")}
_TEMPERATURE = re.compile(r"(.*[0-9)}]) ?° ?([CF])", re.DOTALL)
_PIECE = re.compile(
    rf"(?P<word>{scripts.WORD})(?P<digit>[23](?![0-9]))?(?: ?\^ ?\{{?(?P<power>-?[1-4])\}}?)?|(?P<over>/)"
)
_GENERIC = frozenset(
    ["unit", "people", "point", "time", "way", "st", "item", "items", "thing", "things", "piece", "pieces"]
)
"""Units that may stand for any other thing that is counted."""
_FILLER_WORDS = "in total left altogether all overall each of the more remaining away now only"
_FILLERS = frozenset(_FILLER_WORDS.split())
"""Words behind a count that are no unit: `72 in total`."""
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
    temperature = _TEMPERATURE.fullmatch(text) if text[-1:] in "CF" else None
    if temperature:
        return temperature[1], "celsius" if temperature[2] == "C" else "fahrenheit"
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
    known = all(word in _CANONICAL or word in _MODIFIERS or word in SCALES for word in words)
    is_function = _TRIG.search(unit) is not None and not (known and words[0] != "sec")
    if _RESERVED.intersection(words) or (is_function and words != ["sec"]) or HEDGED.search(unit):
        return text, ""
    if len(words[0]) == 1 and (unit[0] not in UNIT_LETTERS or _SYMBOL.search(match["core"])):
        return text, ""
    if match["gap"] and len(words) > 1 and _FILLERS.issuperset(words):
        return match["core"].rstrip(), unit
    if known and not _MODIFIERS.issuperset(words) and (match["gap"] or len(words[0]) > 1):
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


def unit_powers(unit: str) -> dict[str, int]:
    """Return the power of each canonical word of a unit: `square cm` and `cm^2` are {'cm': 2}.

    `m/s` is {'m': 1, 's': -1}. Words that count nothing ("72 in total") and scales ("million") are left out.
    """
    powers: dict[str, int] = {}
    sign, prefix, last = 1, 1, ""
    pieces = list(_PIECE.finditer(unit.translate(_NO_MARKS).lower()))
    words = {_canonical(piece["word"]) for piece in pieces if piece["word"]}
    is_known = words - _MODIFIERS - SCALES.keys() <= _KNOWN
    for piece in pieces:
        word = piece["word"]
        if word is None or word == "per":
            sign = -1
        elif word in ("square", "sq", "cubic", "cu"):
            prefix = 2 if word[0] == "s" else 3
        elif word in ("squared", "cubed") and last:
            powers[last] *= 2 if word[0] == "s" else 3
        elif word not in SCALES and (is_known or word not in _FILLERS):
            for name, power in zip(POWERS, (2, 3, 2, 3), strict=True):
                prefix = power if word.startswith(name) else prefix
            power = sign * prefix * int(piece["digit"] or piece["power"] or 1)
            last = _canonical(word)
            for name, own in _COMPOUND.get(last, {last: 1}).items():
                powers[name] = powers.get(name, 0) + own * power
            prefix = 1
    if powers.keys() & {"celsius", "fahrenheit"}:
        powers.pop("degree", None)
    for nation in powers.keys() & scripts.NATIONS.keys():
        currency = scripts.NATIONS[nation]
        if any(currency in scripts.SHARED.get(name, ()) for name in powers):
            powers[currency] = powers.pop(nation)
    for name in powers.keys() & scripts.SHARED.keys():
        if scripts.SHARED[name] & powers.keys():  # pounds sterling, Canadian dollars
            powers.pop(name)
    return {name: power for name, power in powers.items() if power}


def unit_scale(unit: str) -> int:
    """Return the factor of a scale word ('million'), else 1."""
    first = _WORDS.search(unit)
    return SCALES.get(first.group().lower(), 1) if first else 1


def is_known_unit(unit: str) -> bool:
    """Say whether a unit consists of words that are known as units, and is not empty."""
    return bool(unit) and unit_powers(unit).keys() <= _KNOWN


def units_conflict(left: str, right: str) -> bool:
    """Say whether both sides have units that differ, powers included; a missing unit never conflicts.

    Of units that are not known ("12 red apples") one must consist of words of the other.
    """
    if not left or not right:
        return False
    first, second = unit_powers(left), unit_powers(right)
    if not first or not second or first == second:
        return False
    first, second = _as_specific(first, second), _as_specific(second, first)
    if first.keys() <= _KNOWN and second.keys() <= _KNOWN:
        return first != second
    words, others = ({_singular(name) for name in side} for side in (first, second))
    return not (words <= others or others <= words or any(side <= _GENERIC for side in (words, others)))


def _as_specific(unit: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Write a shared name as the one that the other side has, if it can be that: a pound is sterling or a weight."""
    return {
        min(scripts.SHARED.get(name, frozenset()) & other.keys(), default=name): n for name, n in unit.items()
    }


def money_in_words(text: str) -> str:
    r"""Write the currency of a lone amount behind it: `\$5`, `PLN 5` and `5 €`, not `5$`; other text as it is."""
    amount = text.strip()
    if len(text) > LONGEST_AMOUNT or not (amount.lstrip("-")[:1].isalpha() or _MARKS.search(text)):
        return text
    match = _AMOUNT.fullmatch(amount) or _AMOUNT.fullmatch(amount.strip("$").strip())
    if match is None or bool(match["sign"]) == bool(match["end"]):
        return text
    sign = (match["sign"] or match["end"]).translate(_NO_ESCAPE)
    currency, words = _SIGNS[sign], (match["rest"] or "").split()
    if words and _canonical(words[0].lower()) in (currency, *scripts.SHARED.get(currency, ())):
        currency = ""  # $5 USD
    scale = words.pop(0) if words and words[0].lower() in SCALES else ""
    return " ".join(filter(None, (f"{match['minus'] or ''}{match['number']}", scale, currency, *words)))


def money_ratio(left: str, right: str) -> int:
    """Return how many of the right side's units one of the left side's is worth: 100 for dollars in cents, else 0."""
    first, second = unit_powers(left), unit_powers(right)
    is_whole = len(first) == 1 and set(first.items()) <= _OF_CENTS
    return 100 if is_whole and second == {"cent": 1} else 0


def _singular(word: str) -> str:
    for ending, other in (
        ("ies", "y"),
        ("sses", "ss"),
        ("ches", "ch"),
        ("shes", "sh"),
        ("xes", "x"),
        ("s", ""),
    ):
        if word.endswith(ending) and not word.endswith("ss") and len(word) > len(ending) + 1:
            return word.removesuffix(ending) + other
    return word
