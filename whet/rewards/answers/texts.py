r"""Answers that are text though they look like arithmetic: dates, times, ranges, scores, addresses, codes, words.

The gold answer decides. `read_text` returns how a text of these kinds is read, so that two spellings of one date or
one range are equal (`2024-01-05` is January 5, 2024) and nothing of it is computed (it is not 2018). Everything else,
above all a number, a fraction and an expression, is None and left to the calculator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from whet.rewards.answers.expression import FUNCTIONS, OF_MEMBERS
from whet.rewards.answers.latex import WORD_CLOSE, WORD_OPEN, clean
from whet.rewards.answers.numbers import decimal_comma, is_grouped, parse_number
from whet.rewards.answers.scripts import FOREIGN
from whet.rewards.answers.units import is_known_unit, money_in_words, split_unit, units_conflict

Column = Literal["", "words", "text", "comma"]
"""What most gold answers of a column are: nothing in particular, words, or text with digits in it."""
MOST_READ = 2000
LONGEST_TEXT = 80
"""Longer answers (in characters) are of none of these kinds."""

_MONTH_NAMES = "january february march april may june july august september october november december"
_MONTHS = tuple(_MONTH_NAMES.split())
_MONTH_OF = {name[:length]: at for at, name in enumerate(_MONTHS, 1) for length in range(3, len(name) + 1)}
_MONTH = rf"(?P<month>{'|'.join(rf'{name[:3]}(?:{name[3:]})?' for name in _MONTHS)}|sept)\.?"
_DAY, _YEAR = r"(?P<day>[0-9]{1,2})(?:st|nd|rd|th)?", r"(?P<year>[0-9]{4})"
_WEEKDAY = r"(?:on )?(?:(?P<weekday>mon|tue|wed|thu|fri|sat|sun)[a-z]{0,6}\.?,? )?(?:the )?"
_WRITTEN_DATES = tuple(
    re.compile(_WEEKDAY + form)
    for form in (
        rf"{_MONTH} (?:the )?{_DAY}(?:,? ?{_YEAR})?",
        rf"{_DAY}(?: of)? {_MONTH}(?:,? {_YEAR})?",
        rf"{_MONTH},? {_YEAR}",
        rf"{_YEAR},? {_MONTH} {_DAY}",
    )
)
_ISO_DATE = re.compile(
    r"(?P<year>[0-9]{4})(?:(?P<mark>[-/.])|年)(?P<month>[0-9]{1,2})(?:(?P=mark)|月)(?P<day>[0-9]{1,2})日?"
)
_SHORT_DATE = re.compile(r"([0-9]{1,2})([-/.])([0-9]{1,2})\2([0-9]{4}|(?<!\.)[0-9]{2})")
_MONTH_OF_YEAR = re.compile(r"(0[1-9])/([12][0-9]{3})")
_TIME = re.compile(
    r"([0-9]{1,2})(?: ?[:h] ?([0-5][0-9]))?(?: ?: ?([0-5][0-9]))?(?: ?([ap])\.? ?m\b\.?| ?(o'?clock))?",
    re.IGNORECASE,
)
_NAMED_TIMES = {"noon": "12:00 pm", "12 noon": "12:00 pm", "midnight": "12:00 am", "12 midnight": "12:00 am"}
_ADDRESS = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})((?:[:/][0-9]{1,5})?)")
_VERSION = re.compile(
    r"(?:version |v\.? ?)(?P<v>[0-9]+(?:\.[0-9]+)*)([a-z0-9.+-]*)|([0-9]+(?:\.[0-9]+){2,})([a-z0-9.+-]*)"
)
_GROUPED = re.compile(r"[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}")
_PHONE = re.compile(
    r"\+[0-9][0-9 ().-]{5,18}[0-9]|(?:1[ .-])?\([0-9]{3}\) ?[0-9]{3}[ .-][0-9]{4}"
    r"|(?:1[ .-])?[0-9]{3}([ .-])[0-9]{3}\1[0-9]{4}"
)
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?"
_PAIR = re.compile(
    rf"(?P<low>{_NUMBER}) ?(?P<unit>%|°|[A-Za-z]{{2,12}})? ?(?P<mark>-{{1,3}}|:|\.\.\.?) ?(?P<high>{_NUMBER}) ?"
    r"(?P<percent>%|°)?"
)
_TO = re.compile(
    rf"(?:from )?(?P<low>[-+]?{_NUMBER}) ?(?P<unit>%|°|[A-Za-z]{{2,12}})? (?P<mark>to|until|till|through) "
    rf"(?P<high>[-+]?{_NUMBER}) ?(?P<percent>%|°)?"
    rf"|between (?P<from>[-+]?{_NUMBER}) ?%?°? and (?P<upto>[-+]?{_NUMBER}) ?%?°?"
)
_CODE = re.compile(
    r"[0-9]+(?:-[0-9]+){2,}"  # 123-45-6789
    r"|O-O(?:-O)?"  # castling
    r"|(?=.*[0-9])(?:[A-Z0-9]+-){2,}[A-Z0-9]+"  # A-12-B
    r"|(?=.*[A-Z]{2})(?=.*[0-9])(?![0-9]+[A-Z]{2}$|[0-9]+ [A-Z]{3,}$)[A-Z0-9]+(?:[- ][A-Z0-9]+)*"  # AB 123, ABC-12
    r"|(?![x-z]{3,}-)[A-Z]?[a-z]{2,}-[0-9]{2,}[a-z]?|[A-Z][a-z]{2,}-[0-9]+[A-Za-z]?"  # item-042, Type-2
)
_ELEMENTS = """H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y
Zr Nb Mo Ag Cd In Sn Sb Te I Xe Cs Ba La W Pt Au Hg Tl Pb Bi Ra U"""
_ELEMENT = rf"(?:{'|'.join(sorted(_ELEMENTS.split(), key=len, reverse=True))})"
_FORMULA = re.compile(
    rf"[0-9]?{_ELEMENT}[0-9]{{0,2}}(?:{_ELEMENT}[0-9]{{0,2}}|\((?:{_ELEMENT}[0-9]{{0,2}}){{1,4}}\)[0-9]){{0,6}}"
)
_SYNONYMS = {"norealsolutions": "norealsolution", "dne": "doesnotexist"}
_SYNONYMS |= dict.fromkeys(
    ("∅", "emptyset", "nosolutions", "nosolutionexists", "nosolutionsexist"), "nosolution"
)
_SYNONYMS |= dict.fromkeys(("thereisnosolution", "therearenosolutions"), "nosolution")
_TWO_LETTERS = "do|go|he|hi|if|in|is|it|no|of|oh|ok|on|ox|so|to|up|us|we"
"""English words of two letters, of which none is likely to be a product of variables."""
_WORDS = re.compile(
    rf"[A-Z]{{2}}|{_TWO_LETTERS}"
    r"|(?![x-z ]+$)(?=.*[A-Za-z]{2})[A-Za-z']{1,12}(?: [A-Za-z']{1,12}){1,7}"
)
_FUNCTIONS = frozenset({*FUNCTIONS, *OF_MEMBERS, "mod", "sqrt", "pi"})
_LETTERS = re.compile(r"[A-Za-z]{2,4}")
_WORDY = re.compile(r"[^\W\d_]{2}[^\d\\^_=+*/<>|{}()\[\]]*")
_NO_MARKS = str.maketrans("", "", WORD_OPEN + WORD_CLOSE)
_IDLE = re.compile(
    r"[\s\"'`]+(?=[-:/.,])|(?<=[-:/.,])[\s\"'`]+|(?<=[a-z])[ -]+(?=[0-9])|(?<=[0-9])[ -]+(?=[a-z])"
)

_IDLE_PROSE = re.compile(
    rf"(?<![a-z0-9])(?:a|an|the)(?=\s[a-z]{{3}})|[\"'`!?{WORD_OPEN}{WORD_CLOSE}]|(?<![0-9])[\s,]|[\s,](?![0-9])"
    r"|(?<![a-z0-9]{2})(?<![0-9])\.|\.(?![a-z0-9]{2})(?![0-9])"
)
"""What does not count between words; a point and a space between digits do, and so does the point of `a1.txt`."""
_PROSE = re.compile(rf"[^\\^_=+*/<>|{{}}()\[\]]*[A-Za-z{FOREIGN}][^\\^_=+*/<>|{{}}()\[\]]*")


@dataclass(frozen=True, slots=True)
class Text:
    """How an answer is read that is text.

    Attributes:
        kind: 'date', 'time', 'address', 'version', 'phone', 'pair' (a range, a score, a ratio), 'code' or 'words'.
        value: What two spellings must share.
        unit: Unit of a range; '' without one.
    """

    kind: str
    value: tuple[object, ...]
    unit: str = ""


def read_text(cleaned: str) -> Text | None:
    """Read a cleaned answer (see `whet.rewards.answers.latex`) as text.

    Returns:
        How it is read; None if it is a number, an expression or prose.
    """
    if not 2 <= len(cleaned) <= LONGEST_TEXT or "\\" in cleaned or "^" in cleaned or "=" in cleaned:
        return None
    text = " ".join(cleaned.translate(_NO_MARKS).split())
    if text.isdecimal() or (text[:1] in "([{" and text[-1:] in ")]}"):
        return None
    for reader in (_date, _time, _address, _phone, _version, _pair, _code):
        found = reader(text)
        if found is not None:
            return found
    is_words = _WORDS.fullmatch(text) is not None and _FUNCTIONS.isdisjoint(text.split())
    return Text("words", (text.lower(),)) if is_words else None


def texts_equal(prediction: str, gold: str, read: Text | None) -> bool:
    """Compare a cleaned prediction with a cleaned gold answer that is text.

    Args:
        prediction: The prediction.
        gold: The gold answer.
        read: How the gold answer is read; None if only its spelling counts.
    """
    formulas = _composition(prediction), _composition(gold)
    if None not in formulas:
        return formulas[0] == formulas[1]
    other = read_text(prediction) if read is not None else None
    if (
        read is not None and other is not None and {read.kind, other.kind} == {"time", "pair"}
    ):  # 3:26 and 3 to 26
        other, read = (_pair(" ".join(text.translate(_NO_MARKS).split())) for text in (prediction, gold))
    if read is not None and other is not None and read.kind == other.kind:
        if read.kind in _COMPARED:
            return _COMPARED[read.kind](other, read)
        if read.value == other.value:
            return True
    return _spelling(prediction) == _spelling(gold) or words_equal(prediction, gold)


def words_equal(left: str, right: str) -> bool:
    """Compare prose without regard to case, spaces and quotes."""
    if not all(text == "∅" or _PROSE.fullmatch(text) for text in (left, right)):
        return False
    first, second = (_IDLE_PROSE.sub("", text.lower()) for text in (left, right))
    first, second = (_SYNONYMS.get(text, text) for text in (first, second))
    return bool(first) and first == second


def formulas_equal(prediction: str, gold: str) -> bool:
    """Say whether two cleaned answers are one chemical formula: `H_2O` is H2O."""
    formula = _composition(gold)
    return formula is not None and formula == _composition(prediction)


def _composition(cleaned: str) -> str | None:
    """Return a chemical formula of several elements, or with a number, without marks of subscripts; else None."""
    if len(cleaned) > LONGEST_TEXT:
        return None
    text = re.sub(r"[_{}\s]", "", cleaned.translate(_NO_MARKS))
    is_formula = _FORMULA.fullmatch(text) is not None and (any(map(str.isdigit, text)) or len(text) == 2)
    return text if is_formula and not text.isdecimal() else None


def column_of(golds: Iterable[str], *, has_semicolons: bool = False) -> Column:
    """Say what most gold answers of a column are, for those that would be ambiguous alone (`1.10` among versions).

    'comma' are numbers with decimal commas, whose points group thousands: among `1,05` and `7`, `2,50` is no list of 2
    and 50, and equals `2.5`. Of a long column some 2,000 evenly spaced answers decide.

    Args:
        golds: The answers.
        has_semicolons: Whether semicolons part the file's columns, as spreadsheets write where the comma is decimal:
            then `1.700` or `1,5` alone is enough, if no point can only be decimal (`2.5`) and no list is longer.
    """
    golds = list(golds)
    golds = golds[:: 1 + len(golds) // MOST_READ]
    num_golds = num_words = num_texts = 0
    commas = set[bool | None]()
    grouped = pairs = False
    for gold in golds:
        num_golds += 1
        if len(gold) > LONGEST_TEXT:
            continue
        text = clean(money_in_words(gold))
        read = read_text(text)
        is_certain = has_semicolons or re.search(r"\.[0-9]{3}\.[0-9]", text) is not None
        is_thousand = is_grouped(text)
        grouped, pairs = grouped or is_thousand, pairs or decimal_comma(text, is_likely=True) is True
        commas.add(True if is_certain and is_thousand else decimal_comma(text, is_likely=has_semicolons))
        num_texts += read is not None and read.kind != "words"
        num_words += (read is not None and read.kind == "words") or _WORDY.fullmatch(text) is not None
    if 2 * num_texts > num_golds:
        return "text"
    if 2 * num_words > num_golds:
        return "words"
    # `1.550` beside `12,50`: three decimals among pairs of numbers are far rarer than another country's prices.
    is_comma = True in commas or (grouped and pairs)
    return "comma" if is_comma and False not in commas else ""


def is_word(cleaned: str) -> bool:
    """Say whether letters are a word once it is known that the answer is one: `ab`, which might be a product."""
    return _LETTERS.fullmatch(cleaned.translate(_NO_MARKS)) is not None


def _spelling(text: str) -> str:
    """Drop what does not distinguish two spellings of a text: case, quotes, space around punctuation."""
    return _IDLE.sub("", " ".join(text.translate(_NO_MARKS).lower().split())).strip(" \"'`.,;:!")


def _date(text: str) -> Text | None:
    iso = _ISO_DATE.fullmatch(text)
    if iso is not None:
        return _checked_date(int(iso["year"]), int(iso["month"]), int(iso["day"]))
    short = _SHORT_DATE.fullmatch(text)
    if short is not None:
        first, second, year = int(short[1]), int(short[3]), int(short[4])
        is_day_first = short[2] == "." or first > 12  # 5.1.2024 is German, 1/5/2024 American
        month, day = (second, first) if is_day_first else (first, second)
        return _checked_date(year, month, day)
    month_of_year = _MONTH_OF_YEAR.fullmatch(text)
    if month_of_year is not None:
        return _checked_date(int(month_of_year[2]), int(month_of_year[1]), None)
    lower = text.lower()
    match = next((found for form in _WRITTEN_DATES if (found := form.fullmatch(lower))), None)
    if match is None:
        return None
    parts = match.groupdict()
    year, day = (int(parts[name]) if parts.get(name) else None for name in ("year", "day"))
    return _checked_date(year, _MONTH_OF[parts["month"]], day, parts["weekday"] or "")


def _checked_date(year: int | None, month: int, day: int | None, weekday: str = "") -> Text | None:
    if not 1 <= month <= 12 or (day is not None and not 1 <= day <= 31):
        return None
    return Text("date", (year, month, day, weekday))


def _same_date(one: Text, other: Text) -> bool:
    (year, month, day, weekday), (other_year, other_month, other_day, other_weekday) = one.value, other.value
    if (month, day) != (other_month, other_day) or (weekday and other_weekday and weekday != other_weekday):
        return False
    if not isinstance(year, int) or not isinstance(other_year, int):
        return year == other_year
    is_short = min(year, other_year) < 100  # 1/5/24
    return (year % 100, is_short) == (other_year % 100, True) or year == other_year


def _time(text: str) -> Text | None:
    match = _TIME.fullmatch(_NAMED_TIMES.get(text.lower(), text))
    if match is None or not (match[2] or match[4] or match[5]) or int(match[1]) > 24:
        return None
    return Text("time", (int(match[1]), int(match[2] or 0), int(match[3] or 0), (match[4] or "").lower()))


def _same_time(one: Text, other: Text) -> bool:
    """Compare times of day: `20:34`, `20:34:00` and `8:34 p.m.` are equal; a side may omit am and pm."""
    (hour, *rest, half), (other_hour, *other_rest, other_half) = one.value, other.value
    if rest != other_rest or (half and other_half and half != other_half):
        return False
    if hour == other_hour:
        return True
    hours = {_on_24_hours(hour, half), _on_24_hours(other_hour, other_half)}
    return len(hours) == 1 and bool(half or other_half)


def _on_24_hours(hour: object, half: object) -> int:
    assert isinstance(hour, int)
    return hour % 24 if not half else hour % 12 + (12 if half == "p" else 0)


def _address(text: str) -> Text | None:
    match = _ADDRESS.fullmatch(text)
    if match is None or any(int(part) > 255 for part in match.groups()[:4]):
        return None
    return Text("address", (*map(int, match.groups()[:4]), match[5]))


def _version(text: str) -> Text | None:
    match = _VERSION.fullmatch(text.lower()) if not _GROUPED.fullmatch(text) else None
    if match is None:
        return None
    numbers, suffix = (match["v"], match[2]) if match["v"] else (match[3], match[4])
    return Text("version", (*map(int, numbers.split(".")), suffix.strip("-. ")))


def _phone(text: str) -> Text | None:
    if not _PHONE.fullmatch(text):
        return None
    digits = re.sub(r"[^0-9]", "", text)
    return Text("phone", (digits[1:] if len(digits) == 11 and digits[0] == "1" else digits,))


def _pair(text: str) -> Text | None:
    """Read `10-20 cm`, `10 to 20`, `3:2`: two plain numbers, of which neither is taken from the other."""
    core, unit = split_unit(text)
    if unit and not is_known_unit(unit) and len(unit.strip()) < 3:
        return None
    match = _PAIR.fullmatch(core) or _TO.fullmatch(core)
    if match is None:
        return None
    parts = match.groupdict()
    low, high = parts["low"] or parts.get("from"), parts["high"] or parts.get("upto")
    inner = parts["unit"] or ""
    if inner not in ("", "%", "°") and not (is_known_unit(inner) and unit):
        return None
    numbers = [parse_number(side) for side in (low or "", high or "")]
    if None in numbers:
        return None
    mark = {":": ":", "-": "-"}.get((parts["mark"] or "to")[:1], "to")
    is_percent = "%" in (parts.get("percent"), inner)
    return Text("pair", (mark, is_percent, *(number.value for number in numbers if number is not None)), unit)


def _same_pair(one: Text, other: Text) -> bool:
    (mark, percent, *sides), (other_mark, other_percent, *other_sides) = one.value, other.value
    is_same_mark = mark == other_mark or "to" in (mark, other_mark)
    return (
        is_same_mark
        and percent == other_percent
        and sides == other_sides
        and not units_conflict(one.unit, other.unit)
    )


def _code(text: str) -> Text | None:
    if not _CODE.fullmatch(text) or is_known_unit(split_unit(text)[1]):
        return None
    return Text("code", (_spelling(text),))


_COMPARED = {"date": _same_date, "time": _same_time, "pair": _same_pair}
