"""Measured confidence: hedges, revisions and the answer's tokens, counted by hand."""

from __future__ import annotations

import math
import time
from itertools import accumulate, permutations

import pytest

from whet.eval.confidence import (
    HEDGES,
    LONGEST_VOTE,
    Confidence,
    answer_entropy,
    answer_span,
    canonical,
    count_hedges,
    count_revisions,
    group_votes,
    measure_confidence,
    token_span,
    vote_score,
    vote_share,
)
from whet.model.text.tokenizer import Tokenizer
from whet.schema import SCHEMAS

SCHEMA = SCHEMAS["think_answer"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("Alternatively, x. But perhaps y.", 2),  # 'but perhaps' is one, not two
        ("Given the ambiguity, let me\n check again.", 2),
        ("Waiter! waiting, awaits; unperhaps perhapsed", 0),  # whole words
        ("WAIT, wait... Wait", 3),
        ("I\u2019m not sure", 1),
        ("let me double-check", 1),
        ("i think-not, I think", 2),
    ],
)
def test_hedges(text: str, count: int) -> None:
    assert count_hedges(text) == count


def test_every_hedge_counts_once() -> None:
    assert all(count_hedges(f"so, {phrase}. then") == 1 for phrase in HEDGES)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("47+85=132</think><answer>132</answer>", 0),
        ("The answer is 5. Wait, the answer is 6.</think><answer>6</answer>", 1),
        ("The answer is 5. Wait, the answer is 6. No, the answer is 5.</think><answer>5</answer>", 2),
        (r"so \boxed{5}, hence \boxed{5.0}</think><answer>\boxed{5}</answer>", 0),
        (r"The answer is \boxed{5}. #### 7", 1),
        ("<answer>1</answer><answer>2</answer>", 1),
        ("</think><answer>so 5, #### 6</answer>", 0),  # one statement, however it is worded inside
        ("answer is answer: answer =", 0),
        ("<answer>1", 0),
    ],
)
def test_revisions(text: str, count: int) -> None:
    assert count_revisions(text, SCHEMA) == count


def test_answer_span() -> None:
    text = "7 or 8</think><answer> 8 </answer>"
    start = text.index("> 8 ") + 2
    assert answer_span(text, "8", SCHEMA) == (start, start + 1)
    assert answer_span("<answer>8</answer><answer>8</answer>", "8", SCHEMA) == (26, 27), "the last block"
    assert answer_span("it is 42, so 42.", "42", SCHEMA) == (13, 15)
    assert answer_span(r"\boxed{1}, \boxed{2}", "1, 2", SCHEMA) is None
    assert answer_span("<answer></answer>", "", SCHEMA) is None


def test_tokens_that_hold_a_character_of_the_answer() -> None:
    pieces = ["ab", "c", "", "de", "f"]
    ends = [0, *accumulate(map(len, pieces))]
    for start in range(6):
        for end in range(start + 1, 7):
            held = [n for n, p in enumerate(pieces) if p and ends[n] < end and ends[n] + len(p) > start]
            first, last = token_span((start, end), len(pieces), ends.__getitem__)
            assert [n for n in range(first, last) if pieces[n]] == held


def test_answer_tokens_of_a_byte_tokenizer_and_of_what_a_tool_wrote() -> None:
    tokenizer = Tokenizer.bytes(SCHEMA.tags)
    text = "π is é</think><answer>né3</answer>"  # é is two tokens of one byte
    ids = tokenizer.encode(text)
    logprobs = [-float(place**2) for place in range(len(ids))]  # every other one has another mean
    trained = [place % 2 == 0 for place in range(len(ids))]
    end = ids.index(tokenizer.encode("</answer>")[0])
    places = range(end - 4, end)  # n, two bytes, 3

    def measure(mask: list[bool]) -> Confidence:
        return measure_confidence(
            text,
            "né3",
            SCHEMA,
            logprobs,
            trained=mask,
            num_characters=lambda n: len(tokenizer.decode(ids[:n])),
        )

    whole, own = measure([]), measure(trained)
    assert whole.answer_logprob == pytest.approx(-sum(place**2 for place in places) / 4)
    assert whole.mean_logprob == pytest.approx(sum(logprobs) / len(ids))
    written = [place for place in places if trained[place]]
    assert own.answer_logprob == pytest.approx(-sum(place**2 for place in written) / len(written))
    mine = [value for value, is_own in zip(logprobs, trained, strict=True) if is_own]
    assert own.mean_logprob == pytest.approx(sum(mine) / len(mine))
    nothing = measure_confidence("", None, SCHEMA, (), trained=(), num_characters=lambda n: 0)
    assert nothing == Confidence(None, None, 0, 0)


def test_votes() -> None:
    assert vote_share(["1", "1.0", " 1 ", "2", None]) == pytest.approx(3 / 5)
    assert vote_share([None, None]) == 0.0
    # A block without anything in it is an answer that others may have given, too; no block is none.
    assert vote_share(["", "", "1", None]) == 0.5
    assert answer_entropy(["", "1", None]) == pytest.approx(math.log(2))
    assert answer_entropy(["1", "1.0", None, "2", "2"]) == pytest.approx(math.log(2))
    assert (answer_entropy(["5", " 5"]), answer_entropy([None])) == (0.0, None)
    # What the grader calls equal votes together, in whichever order: maj@5 is right here.
    halves = [r"\frac{1}{2}", r"\dfrac{1}{2}", "1/2", "2", "2"]
    for order in permutations(halves):
        assert vote_share(order) == 3 / 5
        assert vote_score(order, [text != "2" for text in order]) == 1.0
    # 50% is 50 and 0.5, which are two answers: it votes with the more frequent one, then with the first in order.
    for order in permutations(["50%", "50", "50", "0.5"]):
        groups = dict(zip(order, group_votes(order), strict=True))
        assert groups["50%"] == groups["50"] != groups["0.5"]
    assert len(set(group_votes(["x", "X", "10-20", "20-30", "A", "a"]))) == 5
    assert canonical("1/2") == canonical("0.5") == canonical("$0.50$")
    assert canonical("Yes.") == canonical(" yes")
    assert canonical("1") != canonical("2")
    assert canonical("9" * 5000) == "9" * 5000
    # "Longer answers vote as they are written": 200 characters are not longer.
    assert canonical("A" * LONGEST_VOTE) == "a" * 200
    assert canonical("A" * (LONGEST_VOTE + 1)) == "A" * 201


def test_votes_of_different_verdicts_share_the_credit() -> None:
    """Programs that differ in white space vote together; of this majority two in three are right."""
    answers = ["a  b", "a b", "a\nb", "c", None]
    for verdicts in ([True, False, True, True, False], [False, True, True, True, False]):
        assert vote_score(answers, verdicts) == pytest.approx(2 / 3)


@pytest.mark.ci
@pytest.mark.parametrize(
    "piece",
    ["<answer>", "</answer>", "\\boxed{", "answer is ", "####", "wait ", "let me ", "</answer><answer>", "{"],
)
def test_hostile_texts_take_linear_time(piece: str) -> None:
    def seconds(length: int) -> float:
        text = piece * (length // len(piece))
        began = time.process_time()
        count_hedges(text)
        count_revisions(text, SCHEMA)
        answer_span(text, "answer", SCHEMA)
        return time.process_time() - began

    # Quadratic work would take 64 times as long for 8 times the text; below 50 ms the clock decides.
    assert seconds(800_000) < max(24 * seconds(100_000), 1.5)
