"""Every branch of every preset against its published constant, the two golden totals, and hostile texts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.rewards.answers.numbers import parse_number
from whet.rewards.presets import PRESETS, cosine_score, relative_error, repeated_share
from whet.schema import SCHEMAS, ResponseSchema
from whet.tasks.made.arithmetic import Arithmetic
from whet.types import Problem, UserError

TASK = Arithmetic()
SCHEMA = ResponseSchema()
NOTEBOOK = SCHEMAS["working_out_solution"]
VISION = SCHEMAS["reasoning_answer"]
ODD = ResponseSchema(
    think_open="((", think_close="))", answer_open="[=", answer_close="=]", opening_in_prompt=False
)
WORKSHOP = ("format_exact", "format_approximate", "answer_bands", "number_match")
NAN = "nan"


def problem(answer: str) -> Problem:
    return Problem(uid="ab", task="arithmetic", prompt="?", answer=answer)


def score(name: str, completion: str, gold: str = "132", schema: ResponseSchema = SCHEMA) -> float | None:
    return PRESETS[name].make(schema, TASK)(problem(gold), completion)


PLACED = [schema for name, schema in SCHEMAS.items() if name not in ("none", "anywhere")]
"""Those with a place for the answer: the others have no format to score."""


@pytest.mark.parametrize("schema", [*PLACED, ODD])
def test_the_workshop_totals(schema: ResponseSchema) -> None:
    """Recomputed in requirements 11 from the notebook; +13 and -7.5 are also what the talk shows."""
    assert sum(score(name, schema.render("w", "132"), schema=schema) or 0 for name in WORKSHOP) == 13.0
    assert sum(score(name, "no idea", schema=schema) or 0 for name in WORKSHOP) == -7.5
    assert sum(PRESETS[name].best for name in WORKSHOP) == 13.0


S, E = "<SOLUTION>", "</SOLUTION>"
T = "<end_working_out>"
NOTEBOOK_TABLE = [
    # name, completion, gold, score
    ("format_exact", f"w{T}{S}2{E}", "2", 3.0),
    ("format_exact", f"w{T} so {S}\n2\n{E} \n", "2", 3.0),
    ("format_exact", f"w{T}{S}2{E} more", "2", 0.0),
    ("format_exact", f"w{T}{S}2{E}\nmore", "2", 0.0),
    ("format_exact", f"w{S}2{E}{T}", "2", 0.0),
    ("format_exact", f"w{S}2{E}", "2", 0.0),
    ("format_exact", f"w{T}{S}{E}", "2", 0.0),
    ("format_exact", f"w{T}2{E}", "2", 0.0),
    ("format_approximate", f"w{T}{S}2{E}", "2", 1.5),
    ("format_approximate", f"w{T}{S}2", "2", 0.0),
    ("format_approximate", f"{E}{S}", "2", 0.0),
    ("format_approximate", f"{T}{T}{S}2{E}", "2", 0.0),
    ("format_approximate", f"{S}", "2", -1.5),
    ("format_approximate", "", "2", -3.0),
    ("answer_bands", f"w{T}{S}100{E}", "100", 5.0),
    ("answer_bands", f"w{T}{S} 100\n{E}", "100", 3.5),
    ("answer_bands", f"w{T}{S}100.0{E}", "100", 2.0),
    ("answer_bands", f"w{T}{S}110{E}", "100", 2.0),
    ("answer_bands", f"w{T}{S}90{E}", "100", 2.0),
    ("answer_bands", f"w{T}{S}110.1{E}", "100", 1.5),
    ("answer_bands", f"w{T}{S}80{E}", "100", 1.5),
    ("answer_bands", f"w{T}{S}120.1{E}", "100", -2.5),
    ("answer_bands", f"w{T}{S}79{E}", "100", -2.5),
    ("answer_bands", f"w{T}{S}-100{E}", "100", -2.5),
    ("answer_bands", f"w{T}{S}-90{E}", "-100", 2.0),
    ("answer_bands", f"w{T}{S}x{E}", "100", -4.5),
    ("answer_bands", f"w{T}{S}{NAN}{E}", "100", -4.5),
    ("answer_bands", f"w{T}{S}5 or 7{E}", "5", -4.5),
    ("answer_bands", f"w{T}{S}1{E}", "blue", -4.5),
    ("answer_bands", f"w{T}{S}blue{E}", "blue", 5.0),
    ("answer_bands", f"w{T}{S}1", "1", -2.0),
    ("answer_bands", f"w{T}{S}0.001{E}", "0", 2.0),
    ("answer_bands", f"w{T}{S}5{E}", "0", -2.5),
    ("answer_bands", f"w{T}{S}0.0{E}", "0", 2.0),
    ("answer_bands", f"w{T}{S}0{E}", "0.02", -2.5),
    ("number_match", f"w{T}{S}2{E}", "2", 3.5),
    ("number_match", f"w{T}{S}it is  2.0 eggs", "2", 3.5),
    ("number_match", f"w{T}{S}123,456{E}", "123456", 3.5),
    ("number_match", f"w{T}{S} -0.234.{E}", "-0.234", 3.5),
    ("number_match", f"w{T}{S}.34{E}", "0.34", 3.5),
    ("number_match", f"w{T}{S}-.34{E}", "-.34", 3.5),
    ("number_match", f"w{T}{S}2 or 3{E}", "3", -1.5),
    ("number_match", f"w{T}{S}1,2,3{E}", "123", -1.5),
    ("number_match", f"w{T}{S}none.{E}", "2", -2.5),
    ("number_match", f"{S}2{E}{T}{S}3{E}", "3", 3.5),
    ("number_match", "2", "2", -2.5),
    ("number_match", f"w{T}{S}2{E}", "blue", 0.0),
]


@pytest.mark.parametrize(("name", "completion", "gold", "expected"), NOTEBOOK_TABLE)
def test_workshop(name: str, completion: str, gold: str, expected: float) -> None:
    assert score(name, completion, gold, NOTEBOOK) == expected


# S0-08 and S0-09: the base model never closes its reasoning, the trained one is perfect.
BASE = "<reasoning>sum them <answer>600</answer>"
TRAINED = "<reasoning>one by one</reasoning>\n<answer>\n60\n270\n90\n180\n</answer>"
LAYOUTS = [
    (BASE, 0.0, 0.0, 0.0),
    (TRAINED, 0.5, 0.5, 0.5),
    (f"Well. {TRAINED}", 0.5, 0.5, 0.0),
    (f"{TRAINED}<answer>1</answer>", 0.0, 0.5, 0.0),
    ("<answer>1</answer><reasoning>w</reasoning>", 0.5, 0.0, 0.0),
    ("<reasoning>w</reasoning> so <answer>1</answer>", 0.5, 0.0, 0.0),
    ("<reasoning>w</reasoning><answer>1", 0.0, 0.0, 0.0),
    ("many words</reasoning><answer>1</answer>", 0.0, 0.0, 0.0),
    ("", 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("completion", "count", "soft", "strict"), LAYOUTS)
def test_layout(completion: str, count: float, soft: float, strict: float) -> None:
    names = ("tag_count", "format_soft", "format_strict")
    assert [score(name, completion, schema=VISION) for name in names] == [count, soft, strict]


def test_an_opening_tag_in_the_prompt_counts() -> None:
    names = ("tag_count", "format_soft", "format_strict")
    assert [score(name, "w</think><answer>1</answer>") for name in names] == [0.5, 0.5, 0.5]
    assert [score(name, "<think>w</think><answer>1</answer>") for name in names] == [0.0, 0.5, 0.0]


ANSWERS = [
    # answer, gold, exact_match, distance
    ("132", "132", 1.0, 1.0),
    (" 132 ", "132", 1.0, 1.0),
    ("132.0", "132", 0.0, 1.0),
    ("5", "4", 0.0, 0.8),  # the talk's own example
    ("3", "4", 0.0, 0.8),
    ("８", "4", 0.0, 0.5),
    ("198", "132", 0.0, 2 / 3),
    ("1/2", "0.52", 0.0, 26 / 27),
    ("-132", "132", 0.0, 1 / 3),
    ("0.25", "0", 0.0, 0.8),
    ("3", "0", 0.0, 0.25),
    ("1e900", "4", 0.0, 0.0),
    ("blue", "132", 0.0, -1.0),
    ("", "132", 0.0, -1.0),
]


@pytest.mark.parametrize(("answer", "gold", "exact", "near"), ANSWERS)
def test_answers(answer: str, gold: str, exact: float, near: float) -> None:
    completion = SCHEMA.render("w", answer)
    assert score("exact_match", completion, gold) == exact
    assert score("distance", completion, gold) == near


def test_no_answer_at_all() -> None:
    assert (score("exact_match", "132"), score("distance", "132")) == (0.0, -1.0)


@dataclass
class Unsure:
    """A task that cannot judge."""

    name: str = "unsure"

    def problems(self, split: str) -> list[Problem]:
        return []

    def is_correct(self, problem: Problem, answer: str | None) -> bool | None:
        return None


@pytest.mark.parametrize("name", ["distance", "cosine_length"])
def test_what_cannot_be_judged_is_unscorable(name: str) -> None:
    assert PRESETS[name].make(SCHEMA, Unsure())(problem("1"), SCHEMA.render("w", "1")) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "band", "penalty"),
    [
        (9, 0.0, 0.0),
        (10, 0.0, 0.0),
        (30, 0.5, 0.0),
        (50, 1.0, 0.0),
        (512, 1.0, 0.0),
        (768, 0.5, 0.0),
        (1024, 0.0, 0.0),
        (2048, 0.0, 0.0),
        (5120, 0.0, -0.5),
        (8192, 0.0, -1.0),
        (20000, 0.0, -1.0),
    ],
)
def test_length(length: int, band: float, penalty: float) -> None:
    assert (score("length_band", "x" * length), score("length_penalty", "x" * length)) == (band, penalty)


def test_cosine_is_the_formula_of_the_paper() -> None:
    """Endpoints as printed in the paper's run script; the middle of half a cosine is the mean of its ends."""
    assert cosine_score(0, is_correct=True, limit=100) == 2.0
    assert cosine_score(50, is_correct=True, limit=100) == pytest.approx(1.5)
    assert cosine_score(99, is_correct=True, limit=100) == pytest.approx(1.0, abs=1e-3)
    assert cosine_score(0, is_correct=False, limit=100) == -10.0
    assert cosine_score(25, is_correct=False, limit=100) == pytest.approx(-5.0 * (1 + math.sqrt(0.5)))
    assert cosine_score(99, is_correct=False, limit=100) == pytest.approx(0.0, abs=1e-2)
    assert cosine_score(100, is_correct=True, limit=100) == -10.0
    short, long = (SCHEMA.render("w" * number, "132") for number in (10, 4000))
    assert 2.0 > (score("cosine_length", short) or 0) > (score("cosine_length", long) or 0) > 1.0
    wrong_short, wrong_long = (SCHEMA.render("w" * number, "5") for number in (10, 4000))
    assert (
        -10.0 < (score("cosine_length", wrong_short) or 0) < (score("cosine_length", wrong_long) or 0) < 0.0
    )


def test_repeated_share_counts_windows_that_came_before() -> None:
    assert repeated_share("abcabc", 3) == 1 / 4  # abc bca cab abc
    assert repeated_share("abcabc", 3, reach=3) == 1 / 4
    assert repeated_share("abcabc", 3, reach=2) == 0.0
    assert repeated_share("aaaa", 2) == 2 / 3
    assert repeated_share(("a", "b", "a", "b"), 2) == 1 / 3
    assert repeated_share("ab", 3) == 0.0


def test_repetition() -> None:
    words = [f"word{number}" for number in range(60)]
    assert score("repetition", " ".join(words)) == 0.0
    # 120 words have 81 windows of 40, of which the last 21 stood in the first copy
    assert score("repetition", " ".join(words * 2)) == pytest.approx(-21 / 81)
    assert score("repetition", "Wait. " * 500) == pytest.approx(-(961 - 2) / 961)


PLAIN = " ".join(f"In step {number} we add {number * 17} to what we had." for number in range(20))
DEGENERATE = [
    (PLAIN, 0.0),
    ("", 0.0),
    ("s\nt\nr\na\nw\n", 0.0),
    ("7 5 3 1 9 2 4", 0.0),
    ("def f(x):\n        return x\n", 0.0),
    ("\n" * 40, -2.0),
    (PLAIN[:60] + " " * 70, -2.0),
    (PLAIN[:90] + " " * 60, 0.0),
    ("addCriterion" * 10, -2.0),
    ("addCriterion\n\n" * 10, -2.0),
    (PLAIN[:300] + "the same line again\n" * 30, -2.0),
    (PLAIN + "the same line again\n" * 8, 0.0),
]


@pytest.mark.parametrize(("text", "expected"), DEGENERATE)
def test_degenerate(text: str, expected: float) -> None:
    assert score("degenerate", text) == expected
    # One idle character of two is half; of three it is not.
    assert (score("degenerate", "a "), score("degenerate", "ab ")) == (-2.0, 0.0)


@pytest.mark.parametrize(
    ("guess", "gold", "expected"),
    [
        ("90", "100", Fraction(1, 10)),
        ("-90", "-100", Fraction(1, 10)),
        ("5", "-5", Fraction(2)),
        ("3", "0", Fraction(3)),
        ("0.015", "0.0", Fraction(15, 100)),  # a zero to one place counts as 0.1
    ],
)
def test_relative_error(guess: str, gold: str, expected: Fraction) -> None:
    numbers = parse_number(guess), parse_number(gold)
    assert numbers[0] is not None
    assert numbers[1] is not None
    assert relative_error(*numbers) == expected


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ("3 * 2 = 6 and 24 - 6 = 19", 0.5),
        ("24 - 6 = 19", 0.0),
        ("24 - 6 = 18", 1.0),
        ("x = 3 + 4", 1.0),
        ("I see.", 1.0),
    ],
)
def test_steps(thinking: str, expected: float) -> None:
    assert score("steps", SCHEMA.render(thinking, "24 - 6 = 19")) == expected


@pytest.mark.parametrize("name", ["anywhere", "boxed", "hashes"])
def test_steps_reads_all_of_a_completion_that_has_no_thinking(name: str) -> None:
    text = "So 24 - 6 = 19. Then 19 + 1 = 20."
    assert score("steps", text, schema=SCHEMAS[name]) == 0.5


def test_steps_needs_a_closed_thinking() -> None:
    assert score("steps", "1 + 1 = 2") == 0.0


def test_what_is_said_to_be_reached_is_reached() -> None:
    for name, preset in PRESETS.items():
        ideal = score(name, SCHEMA.render("7+5=12", "132"))
        assert ideal is not None
        assert ideal == preset.best or not preset.is_reached, name
    assert len(PRESETS) <= 16


UNITS = [
    "</think>",
    "</think> ",
    "</think><answer>",
    "<answer>1",
    "1",
    ".",
    " ",
    "1,111",
    "\\frac{1",
    "(",
    "-",
    "2^",
    "1=1+",
]
UNITS += ["5 apples of the kind = ", "\u0661\u00b2\ud800\x00="]
HOSTILE = ["<answer>" * 16384, *(unit * (32768 // len(unit)) + "=1" for unit in UNITS)]


@pytest.mark.parametrize("name", PRESETS)
def test_hostile_texts_are_bounded_in_time(name: str) -> None:
    """32 and 128 KB: what is quadratic takes minutes; 5 s leave room for a loaded machine."""
    reward, preset = PRESETS[name].make(SCHEMA, TASK), PRESETS[name]
    for text in HOSTILE:
        began = time.process_time()
        for completion in (text, SCHEMA.render(text[:8192], text[:8192])):
            value = reward(problem("132"), completion)
            assert value is not None
            assert preset.worst <= value <= preset.best
        assert time.process_time() - began < 5.0


PIECES = st.sampled_from(
    [
        *SCHEMA.tags,
        "132",
        "-",
        ".",
        ",",
        "=",
        "+",
        "*",
        "/",
        "^",
        "%",
        "$",
        "(",
        ")",
        "{",
        "}",
        " ",
        "\n",
        "0",
        "x",
        "of",
    ]
    + ["\\frac", "\\times", "\\text{", "1/2", "1,000", "\u00b2", "\\", "apples", "<<", ">>"]
)
TEXTS = st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=40).map("".join))
REWARDS = {name: preset.make(SCHEMA, TASK) for name, preset in PRESETS.items()}


@settings(max_examples=300, deadline=None)
@given(completion=TEXTS, gold=st.sampled_from(["132", "0", "0.0", "1/2", "blue", "", "1,000", "-3.5"]))
def test_any_text_scores_within_bounds(completion: str, gold: str) -> None:
    for name, reward in REWARDS.items():
        value = reward(problem(gold), completion)
        assert value is not None
        assert PRESETS[name].worst <= value <= PRESETS[name].best, name


R1, BOXED, HASHES = (SCHEMAS[name] for name in ("r1", "boxed", "hashes"))
PLACES_TABLE = [
    # name, schema, completion, score; the gold answer is 132
    ("format_exact", R1, "w</think>so \\boxed{132}", 3.0),
    ("format_exact", R1, "\\boxed{132}", 0.0),
    ("format_approximate", R1, "w</think>\\boxed{132}", 1.5),
    ("format_approximate", R1, "w</think>132", -0.75),
    ("format_approximate", BOXED, "\\boxed{1} \\boxed{132}", -3.0),
    ("format_approximate", HASHES, "#### 132", 1.5),
    ("answer_bands", R1, "w</think>\\boxed{132}", 5.0),
    ("answer_bands", BOXED, "\\boxed{133}", 2.0),
    ("answer_bands", BOXED, "132", -2.0),
    ("number_match", R1, "1</think>\\boxed{132}", 3.5),
    ("number_match", R1, "\\boxed{132}, no", -2.5),
    ("number_match", BOXED, "1 \\boxed{-132}", -1.5),
    ("number_match", HASHES, "1\n#### 132", 3.5),
    ("tag_count", R1, "w</think>\\boxed{132}", 0.5),
    ("tag_count", R1, "<think>w</think>\\boxed{132}", 0.0),
    ("tag_count", HASHES, "#### 1 #### 132", 0.0),
    ("format_soft", R1, "w</think>\\boxed{132}", 0.5),
    ("format_soft", BOXED, "132", 0.0),
    ("format_strict", HASHES, "w\n#### 132", 0.5),
    ("distance", BOXED, "so \\boxed{132.0}", 1.0),
    ("distance", R1, "so \\boxed{132}", -1.0),
]


@pytest.mark.parametrize(("name", "schema", "completion", "expected"), PLACES_TABLE)
def test_rewards_of_answers_without_tags(
    name: str, schema: ResponseSchema, completion: str, expected: float
) -> None:
    assert score(name, completion, schema=schema) == expected


def test_a_schema_without_tags_has_no_tags_to_count() -> None:
    for name in ("format_approximate", "tag_count"):
        with pytest.raises(UserError, match=f"rewards.{name}: the schema has neither tags"):
            score(name, "a", schema=SCHEMAS["none"])
