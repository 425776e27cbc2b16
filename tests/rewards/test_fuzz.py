"""Answer grading on random and hostile text: it never raises or hangs, and wrapping an answer changes nothing."""

import datetime
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import LITTLE, SIZE, seconds

from whet.rewards.answers.equal import answers_equal
from whet.rewards.answers.extract import extract_answer, extract_answer_with_step
from whet.rewards.answers.numbers import spelled_number

WRAPPERS = {
    "dollars": "${}$",
    "display": "\\[ {} \\]",
    "spaces": "  {}\n",
    "full stop": "{}.",
    "box": "\\boxed{{{}}}",
    "answer": "The answer is ${}$",
    "tags": "<answer>{}</answer>",
    "thin space": "\\,{}\\;",
    "style": "\\displaystyle {}",
}
# fmt: off
PIECES = [
    "\\frac", "{", "}", "1", "23", ",", ";", " ", "(", ")", "[", "]", "^", "_", "x", "y", "\\sqrt", "\\pm",
    "=", "<", ">", "\\le", "\\neq", "!=", ">=", "|", "\\cup", "\\in", "-", "+", "*", "/", "%", "\\%",
    "\\text{", "cm", " or ", " and ", "\\{", "\\}", "!", "\\begin{pmatrix}", "\\end{pmatrix}",
    "\\begin{cases}", "\\end{cases}", "&", "\\\\", "\\overline", ".", "\\log", "°", "\\sin", "\\binom",
    "\\choose", "\\approx", "\\infty", "$", "\\boxed{", "\n", "e", "i", "\\lfloor", "\\rfloor", "\\sum_",
    "array(", "two", "hundred", "B", "(C)", "3:45", " p.m.", "yes", "²", "₃", "❮", "\\lex", " mod 5",
    "\\gcd(", "\\max\\{", "\\sum_{k=1}^{4}", "\\int_0^1", "dx", "\\bar{x}", "I", "\\cap", "1.4142", "\\boxed{2}",
]
LOOPS = [
    "<answer>", "{", "}", "(", ")", "[", "\\frac", "\\frac{1}{", "$", "$1", "1", "1,", " ", "\\boxed{",
    "\\boxed{1},", "\\boxed{1} \\text{and} ", "answer is ", "answer: the ", " is ", ", which ", "####",
    "\\", "\\(", "\\[", "(B)", "option A ", "</think>", "\\text{", "\\texttext", "x=", "|x|<", "x≠(", "±",
    "a and ", "or ", "∪", "\\begin{pmatrix}", "1&", "\\\\", "twenty ", "3:30 ", "mod ", "\\lfloor",
    "\\sum_", "²", "aB", "A. ", "**", "\n1", "0.(", "!=", "{a\\over", "<|", "$1$ or ", "\\gcd(", "max(1,",
    "\\sum_{k=1}^{9}k+", "\\int x dx", "1 mod ", "\\bar", "∩", "x^2_", "1.2345x+", "\\boxed{1} and ",
    "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}", "final answer is ",
]
# fmt: on


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.lists(st.sampled_from(PIECES), max_size=12))
@settings(max_examples=500, deadline=None)
def test_any_mixture_is_judged_without_raising_and_symmetrically(left: list[str], right: list[str]) -> None:
    a, b = "".join(left), "".join(right)
    assert answers_equal(a, b) == answers_equal(b, a)
    assert answers_equal(a, a) == bool(a.strip())
    answer, step = extract_answer_with_step(a + " " + b)
    assert (answer is None) == (step is None)
    assert answer is None or answer == answer.strip() != ""


integers = st.integers(-50, 50).map(str)
fractions = st.tuples(integers, st.integers(1, 20)).map(lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}")
scalars = (
    integers
    | fractions
    | st.decimals(-99, 99, places=2).map(str)
    | st.sampled_from(["x+1", "2\\sqrt{3}", "\\pi"])
)
answers = (
    scalars
    | st.lists(scalars, min_size=2, max_size=4).map(lambda items: f"({', '.join(items)})")
    | st.lists(scalars, min_size=2, max_size=4).map(lambda items: f"\\{{{', '.join(items)}\\}}")
    | st.tuples(scalars, scalars).map(lambda pair: f"[{pair[0]}, {pair[1]})")
    | st.lists(scalars, min_size=2, max_size=3).map(
        lambda items: r"\begin{pmatrix} " + r" \\ ".join(items) + r" \end{pmatrix}"
    )
)


@given(answers, answers, st.sampled_from(sorted(WRAPPERS)))
@settings(max_examples=300, deadline=None)
def test_wrapping_an_answer_changes_no_verdict(left: str, right: str, name: str) -> None:
    wrapped = WRAPPERS[name].format(left)
    assert answers_equal(wrapped, left)
    assert answers_equal(left, wrapped)
    assert answers_equal(wrapped, right) == answers_equal(left, right)


@given(answers)
@settings(max_examples=150, deadline=None)
def test_an_answer_is_found_again_in_a_completion(answer: str) -> None:
    for text in (
        f"We see that it must be ${answer}$.",
        f"so \\[{answer}\\]",
        f"Hence the final answer is ${answer}$.",
    ):
        found = extract_answer(text)
        assert found is not None
        assert answers_equal(found, answer)


@given(st.integers(-9, 9).filter(bool), st.integers(-20, 20), st.integers(-20, 20), st.booleans())
@settings(max_examples=150, deadline=None)
def test_linear_inequalities_agree_with_their_solution(
    slope: int, offset: int, right: int, strict: bool
) -> None:
    bound = Fraction(right - offset, slope)
    relation = f"{slope}x + {offset} {'<' if strict else '≤'} {right}"
    below = slope > 0
    solution = (
        f"(-\\infty, {bound}{')' if strict else ']'}"
        if below
        else f"{'(' if strict else '['}{bound}, \\infty)"
    )
    wrong = f"(-\\infty, {bound + 1}{')' if strict else ']'}"
    assert answers_equal(relation, solution)
    assert answers_equal(relation, f"x {'<' if below else '>'}{'' if strict else '='} {bound}")
    assert not answers_equal(relation, wrong)
    assert not answers_equal(relation, f"x {'>' if below else '<'} {bound}")


ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
SMALL = [*ONES.split(), "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(number: int) -> str:
    """Spell a number below a million."""
    if number < 20:
        return SMALL[number]
    if number < 100:
        tens = TENS[number // 10 - 2]
        return tens if number % 10 == 0 else f"{tens}-{SMALL[number % 10]}"
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    head = f"{in_words(number // size)} {name}"
    return head if number % size == 0 else f"{head} {'and ' if size == 100 else ''}{in_words(number % size)}"


@given(st.integers(0, 999_999))
@settings(max_examples=200, deadline=None)
def test_number_words_are_their_number(number: int) -> None:
    assert spelled_number(in_words(number)) == str(number)
    assert answers_equal(in_words(number).capitalize(), f"{number:,}")
    assert not answers_equal(in_words(number), str(number + 1))


@given(st.times(), st.times())
@settings(max_examples=100, deadline=None)
def test_times_of_day_agree_with_the_clock(left: datetime.time, right: datetime.time) -> None:
    spellings = [f"{left:%H:%M:%S}", f"{left:%I:%M:%S %p}", f"{left:%I:%M:%S} {f'{left:%p}'[0].lower()}.m."]
    other = f"{right:%I:%M:%S %p}"
    for spelling in spellings[1:]:
        assert answers_equal(spelling, spellings[1])
        assert answers_equal(spelling, other) == (left.replace(microsecond=0) == right.replace(microsecond=0))
    if left.hour > 0:
        assert answers_equal(spellings[0], spellings[1])


@pytest.mark.some(15)
@pytest.mark.parametrize("unit", LOOPS)
def test_a_loop_of_any_size_costs_next_to_nothing(unit: str) -> None:
    # Beyond every cap, just below the cap of the comparison, and of the parser.
    for size in (SIZE, 3990, 900):
        loop = (unit * (size // len(unit) + 1))[:size]
        for text in (loop, f"{loop} 5", f"the answer is {loop}", f"${loop}$"):
            assert seconds(extract_answer, text) < LITTLE
            assert seconds(answers_equal, text, "x+5") < LITTLE
            assert seconds(answers_equal, text[1:], text) < LITTLE
