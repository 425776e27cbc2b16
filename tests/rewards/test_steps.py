"""The step audit: what it calls true, false and unchecked, where it finds it, and that nothing upsets it."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.rewards.steps.audit import audit_steps
from whet.tasks.made.arithmetic import Arithmetic

TRUE = [
    "24 - 6 = 18",
    "3 * $4 = $12",
    "1/2 + 1/4 = 3/4",
    "50% of 80 = 40",
    "2/3 of 60 = 40",
    "1,000 + 2,500 = 3,500",
    "0.2 x 50 = $10",
    "2x3=6",
    "2 X 3 = 6",
    "3 - 5 = -2",
    "-3 + 4 = 1",
    "2 + 3 * 4 = 14",
    "(2 + 3) * 4 = 20",
    "2(3+4) = 14",
    "(2)(3) = 6",
    "10 - 2 - 3 = 5",
    "100 / 10 / 2 = 5",
    "-3^2 = -9",
    "2^10 = 1024",
    "2**3 = 8",
    "2^{-1} = 0.5",
    "1 1/2 + 1/2 = 2",
    "20/3 = 6.67",
    "20/3 = 6.66",
    "20/3 = 7",
    "1/3 = 33%",
    "(5/20)*100 = 25%",
    "9 / 27 * 100% = 33.33",
    "100% - 30% = 70%",
    "100% - 30% = 70",
    "5 apples + 3 apples = 8 apples",
    "6 tubs of lip gloss * 2 tubes = 12 tubes",
    "5 hours * $20/hour = $100",
    "48/2 = <<48/2=24>>24 clips",
    "3 + 4 == 7",
    "- 3 + 4 = 7",
    "**3 + 4 = 7**",
    "Then $3 + 4 = 7$.",
    r"\frac{1}{2} \times 8 = 4",
    r"\frac12 \cdot 8 = 4",
    r"1\frac{1}{2} + \frac{1}{2} = 2",
    r"\frac{1}{2} (6)(6) = \boxed{18}",
    r"2 \left( 3 + 4 \right) &= 14",
    r"20\% \times \$50 = \$10",
    r"8{,}000 + 500 = 8{,}500",
    "6 \u00f7 3 \u00d7 2 \u2212 1 = 3",
    "8 = 2 * 4",
]
FALSE = [
    "24 - 6 = 19",
    "there are 24 - 6 = 19 crayons left.",
    "so -3 + 4 = 2",
    "3 * $4 = $13",
    "1/2 + 1/4 = 2/6",
    "50% of 80 = 4000",
    "1,000 + 2,500 = 35,000",
    "5 apples + 3 apples = 9 apples",
    "20/3 = 6.5",
    "20/3 = 6",
    "24 - 6 = 18.5",
    "20/3 = 8",
    "0.1 + 0.2 = 0.4",
    "2^10 = 1000",
    "2 + 3 * 4 = 20",
    "10 - 2 - 3 = 11",
    r"\frac{1}{2} \times 8 = 5",
    r"3 \cdot 4 = 11",
    "9 = 2 * 4",
    "- 3 + 4 = 1",
]
UNCHECKED = [
    "x = 3 + 4",
    "5 - x + 3 = 7",
    "2y * 3 = 12",
    "f(3) + 2 = 7",
    r"\sqrt{16} + 2 = 6",
    r"\log_2 8 + 1 = 4",
    r"3 \pi + 2 = 12 \pi",
    "total - 3 + 1 = 5",
    "half of 20 + 5 = 15",
    "5 million + 2 million = 8 million",
    "17/3 = 5 remainder 2",
    "17/3 = 5 and 2/3",
    "60 minutes * 2 = 2 hours",
    "4 pounds - 6 ounces = 58 ounces",
    "10 / 0 = 5",
    "4! + 1 = 25",
    "8:30 + 2 = 10:30",
    "4 bedrooms = 121 * 4",
    "Week 2 = 35 + 35",
    "60 / 3/4 = 80",
    r"\frac 5 + 1 + 1 = 3",
    r"2\frac{6}{2} = 6",
    "1 5/3 + 1 = 4",
    "50 x 50 = 2 500",
    "9^9^9 = 1",
    "9^99999999 = 1",
    "2 * " + "9" * 5000 + " = 1",
    "(" * 50 + "1 + 1" + ")" * 50 + " = 3",
]


@pytest.mark.parametrize("text", TRUE)
def test_true(text: str) -> None:
    assert [step.verdict for step in audit_steps(text)] == ["true"]


@pytest.mark.parametrize("text", FALSE)
def test_false(text: str) -> None:
    assert [step.verdict for step in audit_steps(text)] == ["false"]


@pytest.mark.parametrize("text", UNCHECKED)
def test_unchecked(text: str) -> None:
    assert {step.verdict for step in audit_steps(text)} <= {"unchecked"}


@pytest.mark.parametrize(
    "text", ["x = 5", "2 hours = 120 minutes", "3 + 4 != 8", "3 + 4 <= 8", "a => 3 + 4", "", "3 + 4"]
)
def test_no_step(text: str) -> None:
    assert audit_steps(text) == []


@pytest.mark.parametrize(
    ("text", "verdicts"),
    [
        ("x = 3 + 4 = 7", "ut"),
        ("7+5=12+9=21,2+4=6+8=14+3=17", "ttttt"),
        ("7+5=13+9=22", "ft"),
        ("7+5=12+9=22", "tf"),
        ("2*3 + 4 = 6 + 4 = 10", "tt"),
        ("10 * 80 = 800 cents = $8", "t"),
        ("3/3 - 2/3 = 1/3 of $150 = $50", "tt"),
        ("5 - 2 = 3. Then 3 + 4 = 8; and 2020 5 + 3 = 9", "tfu"),
        ("3 * 2 = 6 and 24 - 6 = 19", "tf"),
        ("12 x 1 and 1/4 = 15", "u"),
        ("1. 3 + 4 = 7\n2. 3 + 5 = 7\n- 1 + 1 = 2", "tft"),
        ("3 + 4\n= 7\n= 5 + 3", "tf"),
    ],
)
def test_several(text: str, verdicts: str) -> None:
    assert "".join(step.verdict[0] for step in audit_steps(text)) == verdicts


def test_the_place_of_a_step() -> None:
    text = "There are 3*2 = 6 shelves.\nThere are 24 - 6 = 19 left."
    found = audit_steps(text)
    assert [step.text for step in found] == ["3*2 = 6", "24 - 6 = 19"]
    assert all(text[step.start : step.end] == step.text for step in found)


def test_the_demo_task_writes_no_false_step() -> None:
    problems = Arithmetic().problems("test")[:300]
    verdicts = [step.verdict for problem in problems for step in audit_steps(problem.solution)]
    assert len(verdicts) > 4 * len(problems)
    assert set(verdicts) == {"true"}


NUMBERS = st.integers(-999, 9999)


@settings(max_examples=200, deadline=None)
@given(
    left=NUMBERS,
    right=NUMBERS,
    operator=st.sampled_from("+-*/"),
    spaces=st.sampled_from(["", " "]),
    off=st.integers(-3, 3),
)
def test_agrees_with_exact_fractions(left: int, right: int, operator: str, spaces: str, off: int) -> None:
    """Results are written as exact fractions, computed here by Python's own operators; a wrong one is off by >= 1."""
    if operator == "/" and right == 0:
        return
    a, b = Fraction(left), Fraction(right)
    value = {"+": a + b, "-": a - b, "*": a * b}[operator] if operator != "/" else a / b
    second = f"({right})" if right < 0 else str(right)
    text = f"{left}{spaces}{operator}{spaces}{second}{spaces}={spaces}{value + off}"
    assert [step.verdict for step in audit_steps(text)] == ["true" if off == 0 else "false"]


PIECES = st.sampled_from(
    [
        "1",
        "23",
        "4.5",
        ".5",
        "1,000",
        "x",
        " ",
        "\n",
        "+",
        "-",
        "*",
        "/",
        "^",
        "%",
        "$",
        "=",
        "(",
        ")",
        "{",
        "}",
        "of",
        "and",
    ]
    + [
        "\\frac",
        "\\left(",
        "\\right)",
        "\\text{a}",
        "\\times",
        "**",
        "apples",
        "!",
        ":",
        "<<",
        "\u00b2",
        "\\",
        "x",
        "_",
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(max_size=80), st.lists(PIECES, max_size=40).map("".join)))
def test_any_text(text: str) -> None:
    found = audit_steps(text)
    assert all(text[step.start : step.end] == step.text for step in found)
    assert [step.start for step in found] == sorted(step.start for step in found)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "unit", ["2^", "1=1+", "(", "\\text{a", "1,111", "<<a", "5 apples per box and ", "=", "- "]
)
def test_time_is_linear(unit: str) -> None:
    """Four times the text may take four times as long; quadratic would be sixteen. The bound leaves room for noise."""

    def seconds(number: int) -> float:
        text = unit * (number // len(unit)) + "="
        runs: list[float] = []
        for _ in range(2):
            began = time.process_time()
            audit_steps(text)
            runs.append(time.process_time() - began)
        return min(runs)

    small, large = seconds(4_000), seconds(16_000)
    assert large < 10 * small + 0.05
