r"""Neighbours of the graders' principles: answers and completions whose verdict is known by construction.

Every verdict follows from how a case was made (one value written twice, or another value written like it), never from a
grader. `python tests/rewards/neighbours.py` prints how whet's rules judge them; with
`--peer` math-verify, too.
"""

from __future__ import annotations

import datetime
import random
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

SEED = 43


class Case(NamedTuple):
    """A prediction or a completion, the gold answer, and whether it is right."""

    kind: str
    text: str
    gold: str
    is_right: bool
    column: str = ""


def _both(kind: str, spellings: Iterable[str], others: Iterable[str], column: str = "") -> Iterator[Case]:
    """Yield each spelling against the first one, which is gold, then the other values against it."""
    gold, *rest = spellings
    yield from (Case(kind, text, gold, True, column) for text in (gold, *rest))
    yield from (Case(kind, text, gold, False, column) for text in others)


# --- what is text: dates, times, ranges, scores, addresses, codes, words ---------------------------------------------


def _dates(draw: random.Random) -> Iterator[Case]:
    for number in range(14):
        day = datetime.date(draw.randint(1950, 2030), draw.randint(1, 12), draw.randint(1, 12))
        y, m, d = day.year, day.month, day.day
        later = day + datetime.timedelta(days=draw.randint(1, 9))
        forms = [
            f"{day:%Y-%m-%d}",
            f"{y}/{m:02}/{d:02}",
            f"{y}-{m}-{d}",
            f"{day:%B} {d}, {y}",
            f"{day:%b} {d}, {y}",
            f"{day:%b}. {d}, {y}",
            f"{d} {day:%B} {y}",
            f"{day:%A}, {day:%B} {d}, {y}",
            f"{d}th of {day:%B} {y}",
            f"\\text{{{day:%B} {d}, {y}}}",
        ]
        wrong = [
            f"{later:%Y-%m-%d}",
            f"{y + 1}-{m:02}-{d:02}",
            f"{y - m - d}",
            str(y),
            f"{later:%B} {later.day}, {later.year}",
            f"{day:%B} {y}",
        ]
        if m != d:
            wrong.append(f"{y}-{d:02}-{m:02}")
        at = number % len(forms)
        yield from _both("date", [forms[at], *draw.sample(forms, 5)], wrong)
        slashes = [f"{m}/{d}/{y}", f"{m:02}/{d:02}/{y}", f"{day:%B} {d}, {y}"]
        yield from _both("date", slashes, [f"{2 * m}/{2 * d}/{y}", f"{m}/{d + 1}/{y}", f"{m}/{d}/{y + 1}"])
        dots = [f"{d}.{m}.{y}", f"{d:02}.{m:02}.{y}", f"{d} {day:%B} {y}"]
        yield from _both("date", dots, [f"{d}.{m}.{y + 10}", f"{d}.{m % 12 + 1}.{y}", f"{d}.{m}{y}"])


def _times(draw: random.Random) -> Iterator[Case]:
    for _ in range(8):
        hour, minute = draw.randint(1, 11), draw.randint(10, 59)
        forms = [
            f"{hour}:{minute} p.m.",
            f"{hour}:{minute} PM",
            f"{hour + 12}:{minute}",
            f"{hour:02}:{minute} pm",
        ]
        wrong = [
            f"{hour}:{minute} a.m.",
            f"{hour}:{(minute + 7) % 60:02} PM",
            f"{(hour + 13) % 24}:{minute}",
            f"{minute}",
        ]
        yield from _both("time", forms, wrong)
        yield from _both(
            "time", [f"{hour} am", f"{hour} a.m.", f"{hour}:00 AM"], [f"{hour} pm", f"{hour % 11 + 1} am"]
        )


def _pairs(draw: random.Random) -> Iterator[Case]:
    for _ in range(12):
        low = draw.randint(1, 60)
        high = low + draw.randint(2, 40)
        wide = [
            f"{low}-{high}",
            f"{low}–{high}",
            f"{low} - {high}",
            f"{low} to {high}",
            f"from {low} to {high}",
        ]
        wrong = [
            f"{low + 5}-{high + 5}",
            f"{high}-{low}",
            f"{low}-{high + 1}",
            str(low - high),
            str(low),
            str(high),
        ]
        yield from _both("range", [*wide, f"between {low} and {high}"], wrong)
        yield from _both(
            "range",
            [f"{low}-{high} cm", f"{low}–{high} cm", f"{low} to {high} cm"],
            [f"{low}-{high} kg", f"{low} cm"],
        )
        yield from _both(
            "range", [f"{low}%-{high}%", f"{low}% to {high}%"], [f"{low}%-{high + 2}%", f"{low - high}%"]
        )
        won, lost = draw.randint(2, 9), draw.randint(0, 9)
        lost += lost == won
        yield from _both(
            "score",
            [f"{won}-{lost}", f"{won}–{lost}", f"{won} - {lost}"],
            [f"{lost}-{won}", f"{won + 1}-{lost + 1}", str(won - lost), f"{won}-{lost + 1}"],
        )
        sets = f"{won}-{lost}, 6-3"
        yield from _both(
            "score", [sets, f"{won}–{lost}, 6–3"], [f"{won + 1}-{lost + 1}, 6-3", f"{won}-{lost}, 7-4"]
        )
        a, b = draw.sample(range(2, 40), 2)
        yield from _both(
            "ratio",
            [f"{a}:{b}", f"{a} : {b}", f"{a}\\!:\\!{b}", f"{a} to {b}"],
            [f"{b}:{a}", f"{a}:{b + 1}", f"{a + b}"],
        )


def _addresses(draw: random.Random) -> Iterator[Case]:
    for _ in range(10):
        a, b, c, d = (draw.randint(1, 25) for _ in range(4))
        yield from _both(
            "IP address",
            [f"{a}.{b}.{c}.{d}", f"`{a}.{b}.{c}.{d}`"],
            [f"{a}.{b}.{c}.{d}0", f"{a}.{b}.{d + 1}.{c}", f"{a}.{b}.{c}", f"{a}.{b}{c}.{d}", f"{a}.{b}"],
        )
        yield from _both(
            "version",
            [f"{a}.{b}.{c}", f"v{a}.{b}.{c}", f"version {a}.{b}.{c}"],
            [f"{a}.{b}.{c}0", f"{a}.{b}", f"{a}.{c + 1}.{b}", f"{a}.{b}{c}"],
        )
        yield from _both("version", [f"v{a}.{b}0", f"V{a}.{b}0"], [f"v{a}.{b}", f"v{a}{b}.0", f"v{a}.{b}00"])
        yield from _both("version", [f"{a}.{b}0"], [f"{a}.{b}", f"{a}.0{b}", f"{a}.{b}00"], column="text")
        phone = f"{draw.randint(200, 989)}", f"{draw.randint(200, 989)}", f"{draw.randint(1000, 9998)}"
        x, y, z = phone
        yield from _both(
            "phone",
            [f"{x}-{y}-{z}", f"({x}) {y}-{z}", f"{x}.{y}.{z}", f"+1 {x} {y} {z}", f"+1-{x}-{y}-{z}"],
            [f"{x}-{y}-{int(z) + 1}", f"{y}-{x}-{z}", str(int(x) - int(y) - int(z))],
        )
        street = draw.choice(["Oak", "Mill", "Park", "Lake"])
        yield from _both(
            "address",
            [f"{a} {street} Street", f"{a} {street.lower()} street"],
            [f"{a + 1} {street} Street", f"{a} Elm Road"],
        )


def _codes(draw: random.Random) -> Iterator[Case]:
    for _ in range(10):
        x, y, z = draw.sample("ABCDEFGHKLMNPRSTUVWXYZ", 3)
        n = draw.randint(102, 987)
        m = draw.randint(12, 98)
        yield from _both(
            "plate",
            [f"{x}{y}{z}-{n}", f"{x}{y}{z} {n}", f"{x}{y}{z}{n}", f"{x}{y}{z}-{n}".lower()],
            [f"{z}{y}{x}-{n}", f"{x}{z}{y}-{n}", f"{x}{y}{z}-{n + 1}", str(n)],
        )
        yield from _both(
            "plate", [f"{x}{y}-{m}", f"{x}{y} {m}"], [f"{y}{x}-{m}", f"{x}{y}-{m + 1}", f"{x}-{m}"]
        )
        yield from _both(
            "plate", [f"{m} {x}{y} {n}", f"{m}-{x}{y}-{n}"], [f"{m} {y}{x} {n}", f"{n} {x}{y} {m}"]
        )
        yield from _both(
            "code", [f"{n}-{m}-{n + 7}"], [f"{n + 1}-{m + 1}-{n + 7}", f"{m}-{n}-{n + 7}", f"{-m - 7}"]
        )
        yield from _both("code", [f"{x}-{m}-{y}"], [f"{x}-{y}-{m}", f"{x}-{m + 1}-{y}", f"{y}-{m}-{x}"])
        yield from _both("room", [f"{m}{x}"], [f"{m}{y}", f"{m + 1}{x}", str(m)], column="text")
        yield from _both("room", [f"0{m}"], [str(m), f"00{m}", f"0{m}.0"], column="text")
        yield from _both(
            "code", [f"{m % 9 + 1}E{m % 7 + 2}"], [f"{(m % 9 + 1) * 10 ** (m % 7 + 2)}"], column="text"
        )
        yield from _both(
            "room", [f"Room {n}", f"room {n}", f"\\text{{Room }}{n}"], [f"Room {n + 1}", f"Hall {n}"]
        )


_ANAGRAMS = (
    "LISTEN SILENT|stone notes|cat act|ON NO|evil vile|AL LA|IV VI|XI IX|NY YN|CA AC|is si|go og|was saw|"
    "DE ED|on no"
)
_PHRASES = (
    "go on|no go on|go to it|to go it|it is so|is it so|we do|do we|the red fox|the fox red|up to me|me up to"
)
_NAMES = (
    "New York|Mount Everest|Marie Curie|photosynthesis|the Pacific Ocean|William Shakespeare|carbon dioxide|"
    "a rhombus"
)


def _words(draw: random.Random) -> Iterator[Case]:
    for pair in _ANAGRAMS.split("|"):
        one, other = pair.split()
        yield from _both("word", [one, f"{one}.", f"\\text{{{one}}}", f'"{one}"'], [other, f"{one} {other}"])
    for one, other in zip(_PHRASES.split("|")[::2], _PHRASES.split("|")[1::2], strict=True):
        yield from _both("phrase", [one, one.upper(), f"{one}."], [other])
    names = _NAMES.split("|")
    for at, name in enumerate(names):
        bare = name.removeprefix("the ").removeprefix("a ")
        wrong = [names[at - 1], bare[::-1], f"{bare} or {names[at - 1]}", f"not {name}", bare[:-2]]
        yield from _both("name", [name, bare, name.lower(), name.upper(), f"{name}.", f"**{name}**"], wrong)
    for one, other in (
        ("example.com", "examplecom"),
        ("a.txt", "b.txt"),
        ("U.S.", "U.K."),
        ("C++", "C"),
        ("A+", "A-"),
    ):
        yield from _both("name", [one], [other])
    for x, y in ("ab", "pq", "mn"):
        yield from _both("word", [f"{x}{y}"], [f"{y}{x}"], column="words")
    for formula, mixed in (
        ("H2O", "H2O2"),
        ("CO2", "C2O"),
        ("NaCl", "NaCl2"),
        ("H2SO4", "H2SO3"),
        ("C6H12O6", "C6H6O12"),
    ):
        low = "".join(f"_{{{c}}}" if c.isdigit() else c for c in formula.replace("12", "\x01"))
        low = low.replace("\x01", "_{12}")
        plain = formula.translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))
        yield from _both(
            "formula", [formula, plain, f"\\mathrm{{{low}}}", low], [mixed, formula[::-1], formula[:-1]]
        )
    yield from _both("formula", ["CO"], ["OC", "Co"])


# --- what is a number ------------------------------------------------------------------------------------------------


def _numbers(draw: random.Random) -> Iterator[Case]:
    for _ in range(12):
        n = draw.randint(1_001, 9_999_999)
        grouped = f"{n:,}"
        spaced = grouped.replace(",", " ")
        forms = [
            str(n),
            grouped,
            f"{n}.0",
            f"{grouped}.00",
            spaced,
            spaced.replace(" ", "\u202f"),
            grouped.replace(",", "{,}"),
            grouped.replace(",", "\\,"),
            grouped.replace(",", "'"),
            f"+{n}",
            f"${n}$",
            f"\\boxed{{{n}}}",
            f"**{n}**",
        ]
        if n > 999_999:
            forms.append(grouped.replace(",", "."))
        yield from _both(
            "thousands", forms, [str(n + 1), str(n * 10), f"-{n}", f"{n}.5", f"{n // 1000},{n % 1000 + 1000}"]
        )
        power = draw.randint(3, 9)
        lead = draw.randint(11, 97)
        value = lead * 10 ** (power - 1)
        tens = f"{lead // 10}.{lead % 10}"
        forms = [
            f"{tens} \\times 10^{{{power}}}",
            f"{tens}e{power}",
            f"{tens}E+{power:02}",
            f"{tens} x 10^{power}",
            f"{tens}×10^{power}",
            f"{tens}*10**{power}",
            f"{tens} \\cdot 10^{power}",
            str(value),
            f"{value:,}",
        ]
        wrong = [
            f"{tens} \\times 10^{{{power + 1}}}",
            f"{tens}e-{power}",
            tens,
            str(value // 10),
            f"{tens} \\times {power}^{{10}}",
        ]
        yield from _both("scientific", forms, wrong)
    for _ in range(12):
        whole, bottom = draw.randint(1, 9), draw.choice([3, 7, 8, 4, 5])
        top = draw.randint(1, bottom - 1)
        over = whole * bottom + top
        forms = [
            f"\\frac{{{over}}}{{{bottom}}}",
            f"{over}/{bottom}",
            f"\\dfrac{{{over}}}{{{bottom}}}",
            f"{whole} {top}/{bottom}",
            f"{whole}\\frac{{{top}}}{{{bottom}}}",
            f"\\frac{{{3 * over}}}{{{3 * bottom}}}",
            f"\\tfrac{{{over}}}{bottom}",
        ]
        wrong = [
            f"{bottom}/{over}",
            f"{over + 1}/{bottom}",
            f"{whole}/{bottom}",
            f"-{over}/{bottom}",
            f"{over}{bottom}",
        ]
        yield from _both("fraction", forms, wrong)
        n = draw.randint(2, 95)
        yield from _both(
            "percent",
            [f"{n}%", f"{n}\\%", f"{n} percent", str(n), f"{n / 100}"],
            [f"{n + 1}%", f"{n / 1000}", f"{n * 10}%"],
        )
        yield from _both(
            "negative", [f"-{n}", f"−{n}", f"- {n}", f"-{n}.0", f"$-{n}$"], [str(n), f"-{n + 1}", f"1/-{n}"]
        )
    words = {
        7: "seven",
        12: "twelve",
        42: "forty-two",
        90: "ninety",
        105: "one hundred and five",
        3000: "three thousand",
    }
    for n, word in words.items():
        yield from _both(
            "word number",
            [str(n), word, word.capitalize(), f"\\text{{{word}}}"],
            [f"{word} hundred", str(n + 1)],
        )
    for n, scaled in (
        (3_000_000, "3 million"),
        (2_500_000, "2.5 million"),
        (7_000, "7 thousand"),
        (4_000_000_000, "4 billion"),
    ):
        yield from _both(
            "scale", [str(n), scaled, f"{n:,}", f"\\${scaled}"], [scaled.split()[0], str(n * 10)]
        )
    for text, rounded, coarse in (
        ("\\pi", "3.14159", "3.14"),
        ("1/3", "0.33333", "0.33"),
        ("\\sqrt{2}", "1.41421", "1.41"),
    ):
        yield from _both("rounding", [text, rounded], [coarse, rounded[:-1] + "8"])


def _units(draw: random.Random) -> Iterator[Case]:
    areas = ("cm", "centimeters"), ("m", "meters"), ("ft", "feet"), ("in", "inches"), ("km", "kilometers")
    for unit, name in areas:
        n = draw.randint(3, 97)
        square = [
            f"{n} {unit}^2",
            f"{n} {unit}²",
            f"{n} square {name}",
            f"{n} sq {unit}",
            f"{n}\\text{{ {unit}}}^2",
            str(n),
            f"{n}\\ \\mathrm{{{unit}^2}}",
            f"{n} {name} squared",
        ]
        wrong = [
            f"{n} {unit}",
            f"{n} {unit}^3",
            f"{n} {name}",
            f"{n} cubic {name}",
            f"{n + 1} {unit}^2",
            f"{n} kg^2",
        ]
        yield from _both("unit power", square, wrong)
        yield from _both(
            "unit power",
            [f"{n} {unit}^3", f"{n} cubic {name}", f"{n} {unit}³"],
            [f"{n} {unit}^2", f"{n} {unit}"],
        )
        yield from _both(
            "unit",
            [f"{n} {unit}", f"{n} {name}", f"{n}\\text{{ {unit}}}"],
            [f"{n} {unit}^2", f"{n} kg", f"{n} hours"],
        )
    for _ in range(5):
        v = draw.randint(2, 80)
        speed = [
            f"{v} m/s",
            f"{v}\\text{{ m/s}}",
            f"{v} meters per second",
            f"{v} m s^{{-1}}",
            f"{v}\\frac{{\\text{{m}}}}{{\\text{{s}}}}",
        ]
        yield from _both("unit power", speed, [f"{v} m/s^2", f"{v} m", f"{v} s/m", f"{v} km/h", f"{v} m s"])
        pull = [
            f"{v} m/s^2",
            f"{v} m/s²",
            f"{v} meters per second squared",
            f"{v}\\ \\mathrm{{m/s^2}}",
            f"{v} m s^{{-2}}",
        ]
        yield from _both("unit power", pull, [f"{v} m/s", f"{v} m/s^3", f"{v} m^2/s"])
        yield from _both(
            "unit",
            [f"{v} mph", f"{v} miles per hour", f"{v} mi/h"],
            [f"{v} km/h", f"{v} miles", f"{v} hours per mile"],
        )
        yield from _both(
            "temperature",
            [f"{v}°C", f"{v} °C", f"{v}^\\circ C", f"{v} degrees Celsius"],
            [f"{v}°F", f"{v + 1}°C"],
        )
        dollars = [f"${v}", f"\\${v}", f"{v} dollars", f"${v}.00", f"USD {v}", f"US${v}", f"{v} USD"]
        yield from _both(
            "currency",
            [*dollars, f"{100 * v} cents"],
            [f"{v} cents", f"€{v}", f"£{v}", f"{v} euros", f"${v + 1}"],
        )
        yield from _both(
            "currency", [f"€{v}", f"{v} €", f"{v} euros", f"EUR {v}"], [f"${v}", f"{v} dollars", f"{v} cents"]
        )
        yield from _both("currency", [f"£{v}", f"{v} pounds", f"GBP {v}"], [f"${v}", f"{v} euros"])
        things = draw.sample(["apples", "oranges", "books", "chairs"], 2)
        yield from _both(
            "count",
            [f"{v} {things[0]}", str(v), f"{v} {things[0]} in total"],
            [f"{v} {things[1]}", f"{v + 1} {things[0]}"],
        )
        yield from _both(
            "angle", [f"{v}^\\circ", f"{v}°", f"{v} degrees", f"{v}"], [f"{v} radians", f"{v + 1}°"]
        )


# --- what is an expression -------------------------------------------------------------------------------------------


def _expressions(draw: random.Random) -> Iterator[Case]:
    for _ in range(8):
        a, b = draw.sample(range(2, 10), 2)
        c = a + b + 1
        x, y = draw.sample("xzapqr", 2)
        yield from _both(
            "product",
            [f"{x}{y}", f"{y}{x}", f"{x} \\cdot {y}", f"{y} {x}"],
            [f"{x}+{y}", f"{x}{x}", f"{x}/{y}"],
        )
        yield from _both(
            "product",
            [f"{a}{x}{y}", f"{a}{y}{x}", f"{x}{a}{y}".replace(f"{x}{a}", f"{a}{x}")],
            [f"{a + 1}{x}{y}", f"{a}{x}"],
        )
        yield from _both(
            "linear",
            [f"{a}{x}-{b}", f"-{b}+{a}{x}", f"{a}{x} - {b}", f"{a} \\cdot {x}-{b}"],
            [f"{a}{x}+{b}", f"{b}-{a}{x}", f"{a}{x}-{b + 1}"],
        )
        yield from _both(
            "polynomial",
            [f"(x+{a})(x-{b})", f"x^2+({a - b})x-{a * b}", f"(x-{b})(x+{a})"],
            [f"(x-{a})(x+{b + c})", f"x^2-{a * b}"],
        )
        yield from _both(
            "root",
            [f"{a}\\sqrt{{{b}}}", f"\\sqrt{{{a * a * b}}}", f"{a}\\sqrt {b}", f"{a} sqrt({b})"],
            [f"\\sqrt{{{a * b}}}", f"{b}\\sqrt{{{a * a * b + 1}}}"],
        )
        yield from _both(
            "constant",
            [f"{a}\\pi", f"{a}π", f"{a} \\cdot \\pi", f"\\pi \\cdot {a}", f"{a}*pi"],
            [f"{b + a}\\pi", f"{a}", f"\\pi^{a}"],
        )
        yield from _both(
            "complex", [f"{a}+{b}i", f"{b}i+{a}", f"{a} + {b}i"], [f"{a}-{b}i", f"{a + 1}+{b}i", f"{a}+{b}"]
        )
        yield from _both(
            "equation",
            [f"{a}", f"x={a}", f"x = {a}", f"$x={a}$", f"x = {a}.0", f"x={a + b}-{b}={a}"],
            [f"x={a + 1}", f"x=-{a}", f"{a}=x+1", f"x<{a}"],
        )
        line = [f"y={a}x+{b}", f"y = {b}+{a}x", f"{a}x+{b}=y", f"y-{b}={a}x", f"{a}x+{b}"]
        yield from _both("equation", line, [f"y={a}x-{b}", f"y={b}x+{a + b}", f"x={a}y+{b}"])
        yield from _both(
            "interval",
            [f"[{a},{c})", f"[{a}, {c})", f"\\left[{a},{c}\\right)", f"{a} \\le x < {c}"],
            [f"({a},{c})", f"[{a},{c}]", f"[{a},{c + 1})", f"{a}"],
        )
        yield from _both(
            "interval",
            [f"(-\\infty,{a})", f"x<{a}", f"(-\\infty, {a})"],
            [f"(-\\infty,{a}]", f"x>{a}", f"({a},\\infty)"],
        )
        yield from _both(
            "set",
            [f"\\{{{a},{c}\\}}", f"\\{{{c}, {a}\\}}", f"{a}, {c}", f"{c},{a}", f"{a} and {c}"],
            [f"\\{{{a}\\}}", f"{a}", f"\\{{{a},{c + 1}\\}}", f"({c},{a + 1})"],
        )
        yield from _both(
            "tuple",
            [f"({a},{c})", f"({a}, {c})", f"\\left({a},{c}\\right)", f"(x,y)=({a},{c})"],
            [f"({c},{a})", f"({a},{c + 1})", f"[{a},{c}]", f"{a}"],
        )
        matrix = f"\\begin{{pmatrix}}{a}&{b}\\\\{c}&1\\end{{pmatrix}}"
        yield from _both(
            "matrix",
            [matrix, matrix.replace("pm", "bm"), f"[[{a},{b}],[{c},1]]", f"[[{a}, {b}], [{c}, 1]]"],
            [f"[[{a},{c}],[{b + c},1]]", f"\\begin{{pmatrix}}{a}&{b}\\\\{c}&2\\end{{pmatrix}}", f"{a}"],
        )
        yield from _both(
            "arithmetic",
            [f"{a + b}", f"{a}+{b}", f"\\frac{{{2 * (a + b)}}}{{2}}"],
            [f"{a}{b}", f"{a}*{b}+1000"],
        )
        yield from _both("base", [f"{a}01_{{12}}", f"{a}01_{{12}}"], [f"{a}01", f"{a}01_{{11}}"])
        yield from _both(
            "plus minus", [f"\\pm {a}", f"{a}, -{a}", f"-{a} or {a}"], [f"{a}", f"-{a}", f"\\pm {a + 1}"]
        )
        hedge = f"{a} or {c}"
        yield from _both(
            "hedge",
            [f"{a}"],
            [hedge, f"{a}, {c}", f"not {a}", f"{a} and {c}", f"{a}/{c}", f"\\boxed{{{a}}} or \\boxed{{{c}}}"],
        )
    for letter, other in ("BC", "DA", "AE"):
        forms = [
            letter,
            f"({letter})",
            f"{letter}.",
            f"{letter})",
            f"\\text{{{letter}}}",
            f"\\text{{({letter})}}",
            f"**{letter}**",
            f"{letter}) 12",
        ]
        forms += [
            f"Option {letter}",
            f"({letter}) 12",
            f"{letter}. a cube",
            f"{letter}: 12",
            f"\\textbf{{({letter})}}",
            letter.lower(),
        ]
        wrong = [
            other,
            f"({other})",
            f"{letter} or {other}",
            f"{letter}{other}",
            f"{other}) 12",
            f"not {letter}",
            f"{letter}, {other}",
            f"({letter}) or ({other})",
        ]
        yield from _both("choice", forms, wrong)
    for word, opposite in (("yes", "no"), ("true", "false"), ("No", "Yes"), ("False", "True")):
        yield from _both(
            "verdict",
            [word, word.upper(), f"{word}.", f"\\text{{{word}}}"],
            [opposite, f"not {word}", f"{word} or {opposite}"],
        )


def answers() -> list[Case]:
    """Return pairs of a prediction and a gold answer: what is text, a number, an expression."""
    makers = (_dates, _times, _pairs, _addresses, _codes, _words, _numbers, _units, _expressions)
    found = [case for maker in makers for case in maker(random.Random(f"{SEED} {maker.__name__}"))]
    return list(dict.fromkeys(found))


# --- which part of a completion is its answer -------------------------------------------------------------------------

_STATED = r"""
The answer is @.
The answer is @ in total.
The answer is therefore @.
The answer is: @
The answer is **@**.
The answer is __@__.
The answer is `@`.
The answer is <b>@</b>.
The answer is $@$.
The answer is \(@\).
So the answer is \boxed{@}.
So the answer is \boxed{@
#### @
#### @</s>
#### **@**
#### @<|endoftext|>
**Answer:** @
Final answer: @
<answer>@</answer>
<answer> <u>@</u> </answer>
The answer is @, because nothing else fits.
The answer is @, not !.
The answer is not !, but @.
The answer is not !. The answer is @.
I first thought it was !, but the answer is @.
"""
_COUNTED = r"""
The answer is @ apples.
The answer is @ apples in total.
The answer is @ (as computed above).
The answer is exactly @ apples, which is a lot.
**@** apples are left.
They have $@$ apples.
So there are @ apples, therefore @.
She pays @ dollars, not ! dollars.
The answer is <span style="color:red">@</span>.
The answer is @ apples and that is all.
The final answer is $@$, since the others are eaten.
<think>It is !.</think>It is @.
<think>It is \boxed{!}.</think>The answer is @.
"""
_RUN_ON = (
    "\n\nQuestion: How many are ! and 2?\nAnswer: The answer is !.",
    "\n\nQ: What is !?\nA: It is !.",
    "\nQuestion:",
    "\n\nProblem 2: Take !.\nSolution: #### !",
    "\n\n**Question 3:** What now?\n\\boxed{!}",
    "\n\nUser: and !?\nAssistant: The answer is !.",
    "<|im_end|>\n<|im_start|>user\nWhat is !?<|im_end|>",
    "\n\n### Question\nWhat is !?\n### Answer\n!",
    "\n\nHuman: thanks\n\nAssistant: #### !",
    "\n\nExercise 4. Add !.\n#### !",
)
_ENDS = ("", "</s>", "<|im_end|>", "<eos>", "<|endoftext|>", "\n", "<end_of_turn>")


def completions() -> list[Case]:
    """Return completions: which part of them is the answer."""
    draw = random.Random(f"{SEED} completions")
    found: list[Case] = []
    for form in _STATED.strip().splitlines() + _COUNTED.strip().splitlines():
        for _ in range(4):
            n = draw.randint(3, 99)
            other = n + draw.randint(1, 9)
            text = f"We add {other - n} and {n}. " + form.replace("@", str(n)).replace("!", str(other))
            found.append(Case("place", text, str(n), True))
            found.append(Case("place", text, str(other), False))
    for form in _STATED.strip().splitlines():
        for answer, wrong in (
            ("\\frac{3}{7}", "\\frac{7}{3}"),
            ("x+1", "x-1"),
            ("(2,5)", "(5,2)"),
            ("\\sqrt{5}", "5"),
        ):
            if "`" in form or "not !" in form or "!" in form:
                continue
            text = form.replace(
                "@", answer if "$" in form or "\\(" in form or "boxed" in form else f"${answer}$"
            )
            found += [Case("formula", text, answer, True), Case("formula", text, wrong, False)]
    for run_on in _RUN_ON:
        for start in (
            "The answer is @.",
            "#### @",
            "\\boxed{@}",
            "So he has @ apples.",
            "<answer>@</answer>",
            "@",
        ):
            n = draw.randint(20, 60)
            text = (start + run_on).replace("@", str(n)).replace("!", str(n + 13))
            found += [Case("run on", text, str(n), True), Case("run on", text, str(n + 13), False)]
    restated = "Question: How many are there?\nWe add 4 and @.\nAnswer: "
    for start in (restated, "Problem: find it.\n\n"):
        for n in (14, 27, 31):
            text = start.replace("@", str(n - 4)) + f"There are {n}. \\boxed{{{n}}}"
            found += [Case("restated", text, str(n), True), Case("restated", text, str(n - 4), False)]
    for end in _ENDS:
        for n in (17, 240):
            for start in ("It is @", "#### @", "The answer is @.", "\\boxed{@}"):
                found.append(Case("end", start.replace("@", str(n)) + end, str(n), True))
    return list(dict.fromkeys(found))


# --- a hedge or a denial is no answer ---------------------------------------------------------------------------------

_AFFIRMED = """
The answer is (@).
@
(@)
@.
@) 12
\\boxed{@) 12}
\\boxed{@}
@ is correct.
@ is the correct answer.
Correct choice: @
The correct option is @.
The correct answer is option @.
I choose @.
Option @ is right.
The answer is (@), since (!) is wrong.
(@), since (!) is wrong.
It is (@), because (!) has no solution.
It cannot be (!). So it is (@).
It is not (!), so it must be (@).
(!) is impossible, hence (@).
Neither (!) nor (?) works, so it's (@).
We can rule out (!). The answer is @.
(!) is wrong and (?) is wrong. (@) is correct.
The answer is @, not !.
The answer is not (!), it is (@).
**@**
**(@)** is the answer.
I would go with (@).
Since (!) fails, the answer is (@).
<answer>(@)</answer>
"""
_OFFERED = """
The answer is (@) or (!).
It is option @ or !.
Either (@) or (!).
It could be (@) or (!).
The answer is @ or !.
\\boxed{@ or !}
(@) or maybe (!)
The answer is @/!.
Options @ and !
The answer is both @ and !.
"""
_DENIED = """
It cannot be (@).
It is not (@).
The answer is not (@).
It can't be (@).
(@) is wrong.
(@) is not correct.
Option @ is incorrect.
It isn't option @.
We can rule out (@).
Neither (@) nor (!).
I do not think it is (@).
(@) cannot be right.
"""
_NUMBERS_OFFERED = """
The answer is @ or !.
It is @ or !.
It is either @ or !.
The answer is between @ and !.
The answer is @, !.
\\boxed{@ or !}
It is @ or maybe !.
$@$ or $!$
The answer is at least @.
The answer is more than @.
The answer is less than @.
The answer is not @.
It is not @.
It cannot be @.
@ is wrong.
@ is not the answer.
The answer isn't @.
"""
_NUMBERS_AFFIRMED = """
It is @, not !.
It is not !. It is @.
It is not !, it is @.
! is wrong. It is @.
The answer is not ! but @.
It cannot be !, so it is @.
The answer is not ! but rather @.
"""


def hedges() -> list[Case]:
    """Return completions that deny an answer, offer several, or affirm one beside denied ones."""
    draw = random.Random(f"{SEED} hedges")
    found: list[Case] = []
    for form in _AFFIRMED.strip().splitlines():
        for _ in range(4):
            letter, other, third = draw.sample("ABCDE", 3)
            text = form.replace("@", letter).replace("!", other).replace("?", third)
            found += [Case("affirmed", text, letter, True), Case("affirmed", text, other, False)]
    for form in (*_OFFERED.strip().splitlines(), *_DENIED.strip().splitlines()):
        for _ in range(4):
            letter, other = draw.sample("ABCDE", 2)
            text = form.replace("@", letter).replace("!", other)
            found += [Case("hedged", text, letter, False), Case("hedged", text, other, False)]
    for form in _NUMBERS_OFFERED.strip().splitlines():
        n = draw.randint(13, 80)
        text = form.replace("@", str(n)).replace("!", str(n + 5))
        found += [Case("hedged", text, str(n), False), Case("hedged", text, str(n + 5), False)]
    for form in _NUMBERS_AFFIRMED.strip().splitlines():
        for n in (draw.randint(13, 80), draw.randint(100, 800)):
            text = form.replace("@", str(n)).replace("!", str(n + 5))
            found += [Case("affirmed", text, str(n), True), Case("affirmed", text, str(n + 5), False)]
    return list(dict.fromkeys(found))


# --- an open thought is no answer -------------------------------------------------------------------------------------

THOUGHTS = (
    "@",
    "It is @.",
    "\\boxed{@}",
    "The answer is @.",
    "#### @",
    "$x = @$",
    "So @ or",
    "\\boxed{@",
    "(@ apples)",
)
ENDINGS = ("The answer is @.", "\\boxed{@}", "@", "#### @", "It is **@**.", "$@$")


def thoughts() -> list[Case]:
    """Return completions with thinking: open, which has no answer, and closed, whose answer follows."""
    found: list[Case] = []
    for at, thought in enumerate(THOUGHTS):
        for opening in ("<think>", "<think>\n", "Sure. <think>", "<think>First, 3.</think> Hmm. <think>"):
            n = 21 + at
            found.append(Case("open", opening + thought.replace("@", str(n)), str(n), False))
        for ending in ENDINGS:
            text = f"<think>{thought.replace('@', str(n + 30))}</think>{ending.replace('@', str(n))}"
            found += [Case("closed", text, str(n), True), Case("closed", text, str(n + 30), False)]
    return found


# --- votes join what the grader calls equal ---------------------------------------------------------------------------


def ballots() -> list[list[list[str]]]:
    """Return lists of answers in groups: those of one group are one answer, of two groups are two."""
    draw = random.Random(f"{SEED} ballots")
    groups: dict[str, list[list[str]]] = {}
    for case in answers():
        if (
            case.is_right
            and not case.column
            and case.kind not in ("percent", "unit", "unit power", "count", "angle", "rounding")
        ):
            own = groups.setdefault(case.kind, [])
            if not own or own[-1][0] != case.gold:
                own.append([case.gold])
            if "cube" not in case.text and not case.text.startswith(
                "y-"
            ):  # equal to some of their group only
                own[-1] = list(dict.fromkeys([*own[-1], case.text]))
    found = []
    for kind in groups:
        for _ in range(8):
            chosen = draw.sample(groups[kind], min(2, len(groups[kind])))
            if len({group[0] for group in chosen}) == len(chosen):
                found.append([draw.sample(group, min(len(group), 4)) for group in chosen])
    return found


def _report() -> None:
    """Print the share of right verdicts, and of wrong answers that are paid."""
    import logging

    from whet.rewards.answers.equal import answers_equal
    from whet.rewards.answers.extract import extract_answer

    def whole(case: Case) -> bool:
        return answers_equal(case.text, case.gold, column=case.column)  # type: ignore[arg-type]

    def searched(case: Case) -> bool:
        answer = extract_answer(case.text)
        return answer is not None and answers_equal(answer, case.gold)

    sets = (
        ("answers", answers(), whole),
        ("places", completions(), searched),
        ("hedges", hedges(), searched),
    )
    for name, cases, judge in (*sets, ("thoughts", thoughts(), searched)):
        print(name, summary([judge(case) for case in cases], cases))
        wrong = [case for case in cases if judge(case) != case.is_right]
        for case in wrong[:400]:
            print(
                "   ",
                "paid  " if not case.is_right else "missed",
                repr(case.text),
                "for",
                repr(case.gold),
                case.kind,
            )
    if "--peer" not in sys.argv:
        return
    import math_verify

    logging.disable(logging.CRITICAL)
    cases = answers()
    verdicts = [
        math_verify.verify(math_verify.parse(f"${case.gold}$"), math_verify.parse(f"\\boxed{{{case.text}}}"))
        for case in cases
    ]
    print("math-verify on answers", summary(verdicts, cases))


def summary(verdicts: list[bool], cases: list[Case]) -> str:
    """Say how many verdicts are right, and how many wrong answers are paid."""
    right = sum(verdict == case.is_right for verdict, case in zip(verdicts, cases, strict=True))
    paid = sum(verdict and not case.is_right for verdict, case in zip(verdicts, cases, strict=True))
    unequal = sum(not case.is_right for case in cases)
    shares = f"{100 * right / len(cases):.1f} %", f"{100 * paid / unequal:.1f} %"
    return f"{right} of {len(cases)} right ({shares[0]}), {paid} of {unequal} wrong ones paid ({shares[1]})"


if __name__ == "__main__":
    _report()
