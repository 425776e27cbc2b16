"""Symbolic equality: right where whet's own rules stop, strict where they do not, bounded whatever is asked."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time

import pytest
from needs import needs

from whet.rewards.answers import identity, symbolic
from whet.rewards.answers.equal import answers_equal
from whet.rewards.answers.expression import parse_expression as tree
from whet.rewards.answers.symbolic import answers_equal_symbolically, needs_symbols, symbolic_equal_pairs
from whet.rewards.answers.units import unit_powers, units_conflict
from whet.types import UserError

needs_math_verify = needs("math_verify")
DEADLINE_S = 2.0
SUM = r"\int_0^{10} (x + \frac{1}{2}) dx"

EQUAL = [
    ("55", SUM),
    (f"${SUM}$", "55"),
    ("x = 55", SUM),
    ("\\frac{1}{3}", "\\int_0^1 x^2 dx"),
    ("0.333333", "\\int_0^1 x^2 dx"),
    ("-2", "\\det\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ("1", "\\lim_{x\\to 0}\\frac{\\sin x}{x}"),
    ("6", "\\gcd(12,18)"),
    ("2x", "\\frac{d}{dx} x^2"),
    ("\\frac{\\pi^2}{6}", "\\sum_{n=1}^{\\infty} \\frac{1}{n^2}"),
    ("\\frac{\\partial}{\\partial x} x^2 y", "2xy"),
    ("(1, \\sum_{k=1}^2 k)", "(1, 3)"),
]
UNEQUAL = [
    ("56", SUM),
    ("0.3333", "\\int_0^1 x^2 dx"),
    ("0.0", "\\int_0^1 10^{-9} dx"),
    ("x^2", "\\int 2x dx + 7"),
    ("(\\sum_{k=1}^2 k, 1)", "(1, 3)"),
    ("-1", "\\lim_{x\\to 0}\\frac{\\sin x}{x}"),
]
HEDGES = [
    "55,55",
    "55, 56",
    "55 or 56",
    "55 \\text{ or } 56",
    "55 \\text{ but maybe } 56",
    "$55$ and $56$",
    "$55$ $56$",
    "\\boxed{55}",
    "\\boxed{55, 56}",
    "\\{55\\}, \\{56\\}",
    "the answer is 55",
    "54 = 55",
    "x = 54 = 55",
    "[55, 55]",
    "55 \\text{ cm or } 56",
    "",
    "$",
]
HOSTILE = [
    "10^{10^{10}}",
    "9^{9^{9^9}}",
    "100000000!",
    "(((9!)!)!)!",
    "\\binom{10^{9}}{5 \\cdot 10^{8}}",
    "\\sum_{k=1}^{10^{9}} \\sin(k^{k})",
    "\\prod_{k=1}^{10^{8}} (1+\\frac{1}{k^2+k+1})",
    "\\int_0^{\\infty} \\frac{\\sin(x^{100})^{50}}{e^{x^7}+x^{33}} dx",
    "(x+1)^{100000}",
    "(x+y+z+w)^{300} - (w+z+y+x)^{300}",
    "\\lim_{n\\to\\infty} (1+\\frac{1}{n})^{n^{n^n}}",
    "7^{10^9} \\mod 13",
    "(" * 400 + "1" + ")" * 400,
    "(" * 3000 + "1" + ")" * 3000,
    "\\sqrt{" * 150 + "2" + "}" * 150,
    "\\frac{1}{1+" * 70 + "x" + "}" * 70,
    "__import__('os').system('touch PWNED')",
    "\\boxed{" + " " * 200_000 + "1",
    "\ud800\x00",
    "1," * 400,
    "x^" * 400 + "x",
]


@pytest.mark.ci
@needs_math_verify
def test_equal_and_unequal() -> None:
    """The values are the textbook's: 50 + 5 = 55, Basel's pi^2/6, the determinant -2."""
    pairs = EQUAL + UNEQUAL
    assert sum(needs_symbols(*pair) and not answers_equal(*pair) for pair in pairs) > len(pairs) / 2
    found = symbolic_equal_pairs(pairs, deadline_s=20.0)
    judged = [answers_equal(*pair) or symbolic for pair, symbolic in zip(pairs, found, strict=True)]
    assert judged == [True] * len(EQUAL) + [False] * len(UNEQUAL)


@pytest.mark.parametrize("hedge", HEDGES)
def test_hedges_never_reach_math_verify(hedge: str) -> None:
    assert not needs_symbols(hedge, SUM)
    assert answers_equal_symbolically(hedge, SUM) is False


@pytest.mark.parametrize(
    ("prediction", "gold"), [("5,5", "5"), ("5", "7"), ("x+1", "x+2"), ("1/2", "(1, 2)"), ("cat", "dog")]
)
def test_what_whet_decides_is_decided(prediction: str, gold: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        symbolic, "symbolic_equal_pairs", lambda pairs, deadline_s: [needs_symbols(*pairs[0])]
    )
    assert answers_equal_symbolically(prediction, gold) is False


@pytest.mark.ci
@needs_math_verify
def test_hostile_answers_cost_one_deadline_together() -> None:
    """None may be right, none may crash, and the pool works on."""
    warm = symbolic_equal_pairs([("55", SUM)], deadline_s=DEADLINE_S)
    assert warm == [True]
    pairs = [(answer, "5") for answer in HOSTILE]
    started = time.monotonic()
    found = symbolic_equal_pairs(pairs, deadline_s=DEADLINE_S)
    seconds = time.monotonic() - started
    assert set(found) <= {False, None}
    num_killed = found.count(None)
    assert num_killed > 5
    assert seconds < num_killed * DEADLINE_S / 3
    assert not os.path.exists("PWNED")
    assert symbolic_equal_pairs([("55", SUM), ("56", SUM)], deadline_s=DEADLINE_S) == [True, False]


@pytest.mark.ci
@needs_math_verify
def test_the_trainer_never_imports_sympy() -> None:
    code = (
        "import sys\nfrom whet.rewards.answers.symbolic import answers_equal_symbolically\n"
        f"assert answers_equal_symbolically('55', {SUM!r}, deadline_s=20.0)\n"
        "sys.exit(any(name in sys.modules for name in ('sympy', 'math_verify', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_math_verify_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install .*\[math\]'"):
        answers_equal_symbolically("55", SUM, deadline_s=3.25)


def test_expressions_are_equal_only_where_enough_points_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = tree("2x"), tree("x+x")
    for count in range(1, identity.MIN_POINTS + 2):
        points = [(float(n + 1),) for n in range(count)]
        monkeypatch.setattr(
            identity, "_sample_points", lambda *_, points=points: identity._rows(["x"], points)
        )
        assert identity.expressions_equal(left, right) == (count >= identity.MIN_POINTS)


def test_units_conflict_where_both_are_there_and_name_different_things() -> None:
    for left, right, expected in (
        ("cm", "kg", True),
        ("meters", "minutes", True),
        ("cm", "wombats", True),  # as apples are no oranges: an unknown word does not make a length right
        ("apples", "oranges", True),
        ("red apples", "apples", False),
        ("cm", "cm", False),
        ("cm", "", False),
        ("cm", "..", False),
        ("wombats", "units", False),
    ):
        assert units_conflict(left, right) is expected, (left, right)
        assert units_conflict(right, left) is expected, (right, left)
    # Powers are spelled before the unit or behind it.
    assert unit_powers("cm squared") == unit_powers("square cm") == {"cm": 2}
    assert unit_powers("cm cubed") == {"cm": 3}
    assert answers_equal("12 cm squared", "12 cm^2")
    assert answers_equal("12 cubic cm", "12 cm cubed")
    assert not answers_equal("12 cm squared", "12 cm")
    assert not answers_equal("12 cm cubed", "12 cm^2")
