"""Whet's graders on the neighbours of their principles (docs/rewards.md): clear cases with known verdicts."""

import random

import pytest
from neighbours import Case, answers, ballots, completions, hedges, thoughts

from whet.eval.confidence import group_votes
from whet.rewards.answers.equal import answers_equal
from whet.rewards.answers.extract import extract_answer
from whet.rewards.answers.texts import column_of

LEAST_RIGHT, MOST_PAID = 0.995, 0.002
"""The issue asks for 0.95 and 0.02 on a set that nobody here has seen."""


def _whole(case: Case) -> bool:
    return answers_equal(case.text, case.gold, column=case.column)  # type: ignore[arg-type]


def _searched(case: Case) -> bool:
    answer = extract_answer(case.text)
    return answer is not None and answers_equal(answer, case.gold)


@pytest.mark.parametrize(
    ("cases", "judge", "count"),
    [
        (answers, _whole, 3900),
        (completions, _searched, 600),
        (hedges, _searched, 400),
        (thoughts, _searched, 140),
    ],
    ids=[
        "what is text, a number, an expression",
        "which part is the answer",
        "hedges and denials",
        "open thoughts",
    ],
)
def test_clear_cases_are_judged_right_and_wrong_ones_not_paid(cases, judge, count: int) -> None:
    found = cases()
    assert len(found) >= count
    wrong = [case for case in found if judge(case) != case.is_right]
    paid = [case for case in wrong if not case.is_right]
    assert len(wrong) <= (1 - LEAST_RIGHT) * len(found), wrong
    assert len(paid) <= MOST_PAID * sum(not case.is_right for case in found), paid


@pytest.mark.parametrize(
    ("golds", "column"),
    [
        (["2024-01-05", "2024-02-06", "12"], "text"),
        (["1.10.2", "v1.2", "1.10"], "text"),
        (["3-2", "2-1", "1-0", "7"], "text"),
        (["AB-12", "XY-34", "12E3"], "text"),
        (["Paris", "ab", "the Nile", "12"], "words"),
        (["12", "3.5", "1/2", "2024-01-05"], ""),
        (["x^2", "\\frac{1}{2}", "\\text{Monday}"], ""),
        ([], ""),
        (["7,00", "12", "0,5"], "comma"),
        (["R$ 1.234,50", "-3,05", "1.234"], "comma"),
        (["1.550", "12,50", "2,5"], "comma"),
        (["1.550", "12,50", "2.5"], ""),
        (["1,2", "3,4", "5"], ""),  # lists of roots, for all that one can see
        (["1,00", "2.5"], ""),
        (["1,05", "1,234"], ""),
        (["1,05", "2, 3"], ""),
        (["CA$5", "MX$12", "12 TL"], ""),  # amounts of money, no codes
    ],
)
def test_most_gold_answers_of_a_column_say_what_each_of_them_is(golds: list[str], column: str) -> None:
    assert column_of(golds) == column


@pytest.mark.parametrize(
    ("golds", "column"),
    [
        (["12,75", "5,75", "11,50"], "comma"),
        (["12,50 €", "7", "0,5 %"], "comma"),
        (["1,5", "2.5"], ""),
        (["1,5", "1,2,3"], ""),  # lists, then
        (["1,5", "2, 3"], ""),
        (["7", "12"], ""),
    ],
)
def test_where_semicolons_part_the_columns_a_comma_in_a_number_is_a_point(
    golds: list[str], column: str
) -> None:
    assert column_of(golds, has_semicolons=True) == column


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("11,00 €", "11.0", True),
        ("11,00", "11", True),
        ("11", "11,00 €", True),
        ("1.234,50", "1234.5", True),
        ("11,50", "11", False),
        ("€ 10,-", "€ 10,00", True),
        ("€ 5,00", "€ 5,-", True),
        ("5", "€ 5,-", True),
        ("6", "€ 5,-", False),
        ("10,--", "10", True),
        ("€ 10,\u2013", "10,00", True),
        ("3,-2", "3", False),
        ("11,0", "11", False),  # two roots
        ("3,5", "3, 5", True),  # lists
        ("3,05", "3", False),
    ],
)
def test_a_comma_that_can_only_be_decimal_is_one_whatever_the_column(
    answer: str, gold: str, equal: bool
) -> None:
    assert answers_equal(answer, gold) is equal


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("7", "7,00", True),
        ("7.00", "7,00", True),
        ("7,0", "7,00", True),
        ("R$ 7,00", "7,00", True),
        ("7,00 €", "7", True),
        ("9,5", "9,50", True),
        ("1234,5", "1.234,50", True),
        ("1 234,5", "1.234,50", True),
        ("-0,5", "-0,50", True),
        ("the total is 3,50", "3.5", False),
        ("1,234", "1234", True),
        ("700", "7,00", False),
        ("7,10", "7,01", False),
        ("2,5", "5,2", False),
        ("7", "7,50", False),
        ("2.795 zł", "2795 zł", True),
        ("2.795", "2795 zł", True),
        ("2.795 zł", "3 zł", False),
        ("12.50 PLN", "12,50 zł", True),
        ("12.50 EUR", "12,50 zł", False),
    ],
)
def test_among_decimal_commas_a_comma_is_a_point(answer: str, gold: str, equal: bool) -> None:
    assert answers_equal(answer, gold, column="comma") is equal


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.ci)])
def test_votes_join_what_the_grader_calls_equal_in_any_order(every: int) -> None:
    found = ballots()[::every]
    assert len(found) >= 300 // every
    draw = random.Random(0)
    split = []
    for groups in found:
        votes = [(text, at) for at, group in enumerate(groups) for text in group]
        draw.shuffle(votes)
        joined = group_votes([text for text, _ in votes])
        if len(set(zip(joined, (at for _, at in votes), strict=True))) != len(groups) or len(
            set(joined)
        ) != len(groups):
            split.append(groups)
        backwards = group_votes([text for text, _ in votes[::-1]])[::-1]
        assert backwards == joined
    assert len(split) <= 0.01 * len(found), split
