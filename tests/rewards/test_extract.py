"""`extract_answer`: which step finds what, in which order, and in linear time on loops."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import LITTLE, seconds

from whet.rewards.answers.extract import (
    DEFAULT_STEPS,
    LONGEST_GAP,
    STEPS,
    STEPS_OF,
    boxed_list,
    extract_answer,
    extract_answer_with_step,
    from_box,
    from_choice,
    from_formula,
    from_hashes,
    from_last_number,
    from_phrase,
    from_tags,
)

TAGS = [
    ("<answer>5</answer>", "5"),
    ("<think>2</think><answer> 12 </answer>", "12"),
    ("<answer>1</answer> or rather <answer>2</answer>", "2"),
    ("<answer>1</answer><answer>2", "1"),
    ("<answer>2", None),
    ("2</answer>", None),
    ("<answer></answer>", None),
    ("<answer>\n60\n270\n</answer>", "60\n270"),
    ("<answer>a<answer>b</answer>", "b"),
    ("<answer>5 or 7</answer>", "5 or 7"),
    ("<ANSWER>5</ANSWER>", None),
]
BOXES = [
    (r"so \boxed{5}", "5"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{1} and \boxed{2}", "2"),
    (r"\boxed{1} and \boxed{2", "2"),  # a last box that is not closed ends with its line
    ("so $\\boxed{\\frac{1}{2}$.\nThe end", r"\frac{1}{2}"),
    ("\\boxed{(1,2)\\]", "(1,2)"),
    (r"\boxed{1} and \boxed{", "1"),
    (r"\boxed{7} after \boxed{", "7"),
    (r"\boxed{4} and \boxed{7} and $\boxed{8}$", "4, 7, 8"),
    (r"I had \boxed{4} and \boxed{7} and \boxed{8}", "8"),
    (r"\boxed{(4, 1)} \text{ for the first and } \boxed{(7, 2)}", "(4, 1), (7, 2)"),
    ("\boxed{6}", "6"),  # not a raw string: \b is a control character
    (r"\beginboxed{6}", "6"),
    (r"\boxed{40}. Final Answer: The final answer is $45$. I hope it is correct.", "45"),
    (r"The final answer is $45$. I hope it is correct. No: \boxed{40}", "40"),
    (r"\boxed{40} is no guess. I hope it is correct.", "40"),
    (r"\boxed{1", "1"),
    (r"\boxed{\boxed{1}", "1"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
    (r"\fbox{7}", "7"),
    (r"\boxed 5", "5"),
    (r"$\boxed 5$ it is", "5"),
    (r"\boxed {5}", "5"),
    (r"\boxed{\boxed{5}}", r"\boxed{5}"),
    (r"\boxed{}", None),
    (r"}} \boxed{3} {{", "3"),
    (r"\boxedx{3}", None),
    (r"\boxed{a{b{c}}d}{e}", "a{b{c}}d"),
    (r"\boxed{1}, then \boxed", "1"),
    (r"\boxed{1}, \boxed{2}, \boxed{3}", "1, 2, 3"),
    (r"$\boxed{4} \quad \text{and} \quad \boxed{9}$", "4, 9"),
    (r"\boxed{5} then, later on, \boxed{9}", "9"),
    (r"\boxed{5} \boxed{9}", "9"),
    (r"\boxed{5}, \boxed{\boxed{6}}", r"5, \boxed{6}"),
    ("no box", None),
]
PHRASES = [
    ("The answer is definitely C, for A and B are even", "C"),
    ("the answer is 6, obviously", "6"),
    ("The answer is 5.", "5"),
    ("the answer is 3.14. I hope it is correct.", "3.14"),
    ("Final Answer: The final answer is $\\frac{1}{2}$. I hope it is correct.", r"\frac{1}{2}"),
    ("THE ANSWER IS x", "x"),
    ("The answer is 4. No: the answer is 6.", "6"),
    ("The answer is 5 or 7.", "5 or 7"),
    ("The answer is $5$ or $7$.", "$5$ or $7$"),
    ("the answer is: 12\nthank you", "12"),
    ("Answer: 42", "42"),
    ("**Answer:** 42", "42"),
    ("The answer is **42**.", "42"),
    ("The answer is (B).", "(B)"),
    ("The answer is $x = 5$ cm.", "x = 5 cm"),
    ("The answer is $$7$$.", "7"),
    ("**Final Answer**: 12", "12"),
    ("answer = 12", "12"),
    ("The answer is #### 12", "12"),
    ("The answer is B because (A) and (C) fail.", "B"),
    ("The answer is 8, which is 2 more than 6.", "8"),
    ("Final answer: the smallest such number is 35.", "35"),
    ("Answer: he finished the race 6 minutes later", "6"),
    ("Answer: he ate 2 cakes and 3 pies", "he ate 2 cakes and 3 pies"),
    ("The answer is the cat is on the mat", "the cat is on the mat"),
    ("the answer is", None),
    ("the answer was 5", None),
]
HASHES = [
    ("reasoning\n#### 72", "72"),
    ("#### 1\n#### 2\nmore", "2"),
    ("####5", "5"),
    ("####: 5", "5"),
    ("####", None),
    ("#### 1,234 dollars", "1,234 dollars"),
    ("# 5", None),
]
NUMBERS = [
    ("Prix : 3,85 euros", "3,85"),
    ("Peso: 3,5 kilos", "3,5"),
    ("Cuesta 1.234,56 euros", "1.234,56"),
    ("Es sind 1.234.567 Leute", "1.234.567"),
    ("in 1.234 steps", "1.234"),
    ("from 3,85,12", "12"),
    ("f(3,85)", "85"),
    ("so we have 3 and 4", "4"),
    ("x = -3", "-3"),
    ("x = \u22123", "\u22123"),
    ("5-3", "3"),
    ("f(2)-3", "3"),
    ("between 10-20", "20"),
    ("it costs $1,234.50 in all", "$1,234.50"),
    ("1,2,3", "3"),
    ("about .34", ".34"),
    ("a fraction 3/4.", "3/4"),
    ("it is -7/2!", "-7/2"),
    ("rises by 50%.", "50%"),
    (r"rises by 50\%.", r"50\%"),
    ("it is 123,456.", "123,456"),
    ("AZYUK2A", None),
    ("5 apples in box A2B", "5"),
    ("an area of 5 cm^2", "5"),
    ("12.5 is it", "12.5"),
    ("version 1.2", "1.2"),
    ("no number", None),
    ("", None),
    ("9" * 5000, None),
]
FORMULAS = [
    (r"\frac{3}{8}", r"\frac{3}{8}"),
    ("$[2,5)$", "[2,5)"),
    ("12 or 15", "12 or 15"),
    ("60\n270\n90\n180", "60\n270\n90\n180"),
    ("3+4=7\n7+2=9", "9"),
    ("x = 5", "5"),
    ("a = b = 5", "5"),
    ("2x + y = 5", "2x + y = 5"),
    ("x=1, y=2", "x=1, y=2"),
    (r"We find that $x \geq 5$.", r"x \geq 5"),
    (r"Hence \(x = \frac{1}{2}\) holds", r"\frac{1}{2}"),
    (r"Thus \[\begin{pmatrix} 1 \\ 2 \end{pmatrix}\]", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("It is $2$ or $3$.", "2 or 3"),
    (r"so we get \frac{5}{6} in the end", r"\frac{5}{6}"),
    ("It costs $5 and then $7 more, $12 in all", None),
    ("It is $5$ but then 7", None),
    ("there are 5 of them", None),
]
CHOICES = [
    ("It's not A, so I think it's (D)", "D"),
    ("I weigh them all.\n\nC", "C"),
    ("Is it 5? \n**Yes.**", "Yes"),
    ("I would take (B) here", "B"),
    ("The correct option is D.", "D"),
    ("not (A), rather (C)", "C"),
    ("<think>it is warm</think>Paris", "Paris"),
    ("Paris", "Paris"),
    ("C. lightning", "C"),
    ("take (B), that is 5", None),
    ("no verdict here", None),
    ("f(A) is not it", None),
]
SIZE = 128 * 1024
# fmt: off
LOOPS = [
    "<answer>", "</answer>", "\\boxed{", "\\boxed", "\\boxed ", "\\boxed{}", "{", "}", "{}", " ", "\n",
    "1", "9.", "1,1,1,", "1,234,", "1/", "answer is ", "answer is $", "answer:", "####", "$", "\\", "-",
    ".", "\x00", "\ud800", "a1", "%",
]
# fmt: on


@pytest.mark.parametrize(("text", "expected"), TAGS)
def test_tags(text: str, expected: str | None) -> None:
    assert from_tags(text) == expected


@pytest.mark.parametrize(("text", "expected"), BOXES)
def test_box(text: str, expected: str | None) -> None:
    assert from_box(text) == expected


@pytest.mark.parametrize(("text", "expected"), PHRASES)
def test_phrase(text: str, expected: str | None) -> None:
    assert from_phrase(text) == expected


@pytest.mark.parametrize(("text", "expected"), HASHES)
def test_hashes(text: str, expected: str | None) -> None:
    assert from_hashes(text) == expected


@pytest.mark.parametrize(("text", "expected"), NUMBERS)
def test_last_number(text: str, expected: str | None) -> None:
    assert from_last_number(text) == expected


@pytest.mark.parametrize(("text", "expected"), FORMULAS)
def test_formula(text: str, expected: str | None) -> None:
    assert from_formula(text) == expected


@pytest.mark.parametrize(("text", "expected"), CHOICES)
def test_choice(text: str, expected: str | None) -> None:
    assert from_choice(text) == expected


def test_several_boxes_are_one_list() -> None:
    assert boxed_list(r"\boxed{1} and \boxed{2}") == "1, 2"
    assert boxed_list(r"\boxed{\boxed{1}} or \boxed{2}") == r"\boxed{1}, 2"
    assert boxed_list(r"\boxed{1}") is None
    assert boxed_list(r"\boxed{1}, then \boxed{2}") is None
    for gap, expected in ((LONGEST_GAP, "1, 2"), (LONGEST_GAP + 1, None)):
        assert boxed_list(r"\boxed{1}" + "." * gap + r"\boxed{2}") == expected


def test_steps_are_tried_in_their_order_and_named() -> None:
    whole = r"9 #### 4" "\nThe answer is 3. " r"\boxed{2} <answer>1</answer>"
    assert DEFAULT_STEPS == ("tags", "box", "phrase", "hashes", "formula", "choice", "last_number")
    assert extract_answer(whole) == "1"
    for skipped, (step, expected) in enumerate(zip(DEFAULT_STEPS[:4], ("1", "2", "3", "4"), strict=True)):
        assert extract_answer_with_step(whole, DEFAULT_STEPS[skipped:]) == (expected, step)
    assert extract_answer_with_step("so it is $7$, as $x = 8$ says") == ("8", "formula")
    assert extract_answer_with_step("There are 7 of them.\n(C)") == ("(C)", "choice")
    assert extract_answer_with_step("There are 7 of them.") == ("7", "last_number")
    assert extract_answer_with_step("nothing here") == (None, None)
    assert extract_answer_with_step("only 5", ("tags", "box")) == (None, None)
    assert extract_answer_with_step("an unclosed <answer>5") == ("5", "last_number")


def test_an_unknown_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown"):
        extract_answer_with_step("5", ("tag",))


@pytest.mark.parametrize("unit", LOOPS)
def test_128_kilobytes_of_a_loop_take_linear_time(unit: str) -> None:
    loop = (unit * (SIZE // len(unit) + 1))[:SIZE]
    for text in (
        loop,
        loop + " 5",
        r"\boxed{" + loop,
        "<answer>" + loop + "</answer>",
        "the answer is " + loop,
    ):
        assert seconds(extract_answer, text) < LITTLE


@given(st.text(max_size=200), st.sampled_from(LOOPS))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_without_raising(text: str, unit: str) -> None:
    for mixed in (text, unit + text + unit, text + "<answer>" + text + "</answer>"):
        answer, step = extract_answer_with_step(mixed)
        assert (answer is None) == (step is None)
        assert step is None or step in STEPS
        assert answer is None or (answer == answer.strip() != "" and len(answer) <= len(mixed) + 1)


@given(st.text(alphabet="ab{}\\ 1", max_size=40))
@settings(max_examples=200, deadline=None)
def test_box_returns_the_balanced_text_that_was_put_in(inside: str) -> None:
    depth, balanced, escaped = 0, True, False
    for character in inside:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        else:
            depth += (character == "{") - (character == "}")
            balanced = balanced and depth >= 0
    if balanced and depth == 0 and not escaped:
        assert from_box("x \\boxed{" + inside + "} y") == (inside.strip() or None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Luís tem 47 maçãs e 14 a Mônica.", "14"),  # no time of day
        ("The shop opens at 9 am.", "9 am"),
        ("Há 12 orégãos.", "12"),  # no `or`
        ("São 12 andróides.", "12"),
        ("Son 5 notícias.", "5"),
    ],
)
def test_a_word_of_another_language_is_not_cut_at_its_accents(text: str, expected: str) -> None:
    assert extract_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Il y a 2 800 kg en tout.", "2800"),
        ("2 800 kg", "2800"),
        ("2 300 + 500 = 2 800 kg", "2800"),
        ("Le total est 1 234 567.", "1234567"),
        ("Всего 2 800 кг.", "2800"),
        ("Prix : 2 800,50 €", "2800,50"),
        ("She bought it for 2 800,50 €.", "2800,50"),  # a comma behind groups: one number in any language
        ("He has 3 500 ml bottles", "500"),  # in English three bottles of 500 ml
        ("En 2020 100 personnes", "100"),
        ("Il a 3 sacs de 100 et 200.", "200"),
        ("Liste : 5 100 20", "20"),
        ("Das sind 2'800 Franken.", "2800"),
        ("Dat kost € 1.234,50.", "1.234,50"),
        ("Dat is 1.234,50, dus.", "1.234,50"),
        ("Dat is 1.234.567.", "1.234.567"),
        ("Dat is 12,75, dus klaar.", "12,75"),
        ("The roots are 1,2,3.", "3"),
        ("Das kostet 2\u2019800.50 Fr.", "2800.50"),
    ],
)
def test_thousands_are_grouped_by_spaces_and_apostrophes(text: str, expected: str) -> None:
    assert extract_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Yes, no apples are left.", "Yes"),
        ("Yes, true.", "Yes"),
        ("No, yes is wrong.", "No"),
        ("yes, no", "yes, no"),  # both are offered, which judges take for neither
        ("No or yes.", "No or yes"),
        ("The answer is yes, no.", "yes, no"),
        ("Let me see. **Yes**; no", "Yes; no"),
    ],
)
def test_two_verdicts_are_no_verdict(text: str, answer: str) -> None:
    assert extract_answer_with_step(text, STEPS_OF["yes_no"])[0] == answer
