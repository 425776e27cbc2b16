"""Paired statistics: against formulas, scipy and statsmodels, and the sources' own claims."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from late import Late

from whet.eval.compare.paired import (
    Paired,
    compare_pairs,
    compare_scores,
    holm,
    percent,
    score_problems,
    show,
    show_p,
    unit,
    verdict,
)

scipy_stats: Any = Late("scipy.stats", reason="scipy is not installed")
multitest: Any = Late("statsmodels.stats.multitest", reason="statsmodels is not installed")


def row(answer: str | None, correct: bool, **more: Any) -> dict[str, Any]:
    shown = {"format": "perfect", "finish_reason": "stop", "thinking_tokens": 10, "completion_tokens": 14}
    return {"answer": answer, "correct": correct, **shown, **more}


def compared(metric: str, a: list[float], b: list[float]) -> Paired:
    found = compare_scores(metric, a, b)
    assert found is not None
    return found


def rights(count: int, n: int = 200) -> list[float]:
    return [1.0] * count + [0.0] * (n - count)


def test_scores_of_problems_worked_out_by_hand() -> None:
    samples = [
        [row("7", True, hedges=2), row("7.0", True), row("8", False, format="none"), row(None, False)],
        [row("1", False), row("2", True), row("3", False, finish_reason="length"), row("4", False)],
    ]
    greedy = [row("7", True), row("1", False)]
    scores = score_problems(samples, greedy, 4)
    assert scores["pass@1"] == [0.5, 0.25]
    assert scores["greedy"] == [1.0, 0.0]
    # 1 - C(2,2)/C(4,2) = 5/6; 1 - C(3,2)/C(4,2) = 1/2
    assert scores["pass@2"] == [pytest.approx(5 / 6), 0.5]
    assert scores["pass@4"] == [1.0, 1.0]
    assert scores["maj@4"] == [1.0, 0.25], "7 and 7.0 vote together; four tied answers share the credit"
    assert scores["vote_share"] == [0.5, 0.25]
    assert scores["format"] == [0.75, 1.0]
    assert scores["truncated"] == [0.0, 0.25]
    assert scores["hedges"] == [2.0, None], "only what is recorded is averaged"
    assert "answer_logprob" not in scores, "a metric that no row holds is left out"
    two = score_problems(samples, greedy, 2)
    assert (two["pass@1"], two["vote_share"]) == ([1.0, 0.5], [1.0, 0.5])
    assert "pass@4" not in two
    one = score_problems(samples, greedy, 1)
    assert not {"pass@2", "maj@1", "vote_share"} & one.keys()


def test_greedy_is_judged_by_the_exact_mcnemar_test() -> None:
    a = rights(30, 60)
    b = [*[0.0] * 4, *[1.0] * 26, *[1.0] * 15, *[0.0] * 15]
    found = compared("greedy", a, b)
    assert found.flips == (4, 15)
    assert found.p == pytest.approx(scipy_stats.binomtest(4, 19).pvalue, rel=1e-12)
    assert found.difference.mean == pytest.approx(11 / 60)
    assert found.is_shown


def test_a_tied_vote_counts_as_right_when_more_than_half_of_it_is() -> None:
    assert compared("maj@4", [0.0, 0.5, 1.0], [1.0, 0.6, 0.5]).flips == (1, 2)


def test_shares_are_judged_close_to_the_t_test() -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(0, 17, 150) / 16
    b = np.clip(a + rng.normal(0.03, 0.2, 150), 0, 1)
    found = compare_scores("pass@1", a.tolist(), b.tolist())
    assert found is not None
    exact = scipy_stats.ttest_rel(b, a)
    low, high = exact.confidence_interval()
    # 150 problems: the t distribution is nearly normal, so the two agree to a tenth of the interval's width.
    assert found.difference.low == pytest.approx(low, abs=0.1 * (high - low))
    assert found.difference.high == pytest.approx(high, abs=0.1 * (high - low))
    assert found.p == pytest.approx(exact.pvalue, abs=0.03)


def test_few_changed_problems_prove_nothing() -> None:
    # A sign test of m problems cannot go below 2^(1-m).
    assert compared("pass@1", [0.0] * 3, [0.5] * 3).p == 0.25
    assert compared("pass@1", [0.0] * 9, [0.5] * 9).p < 0.005
    assert compared("pass@1", [0.25] * 5, [0.25] * 5).p == 1.0
    one = compared("pass@1", [0.0], [1.0])
    assert one.detectable is None
    assert one.p == 1.0
    assert "anecdote" in verdict(one, "a", "b")


def test_intervals_of_unanimous_problems_claim_no_certainty() -> None:
    same = compared("pass@16", [1.0] * 100, [1.0] * 100).difference
    # Wilson at 100 of 100: z^2 / (n + z^2) is left open
    unseen = 1.96**2 / (100 + 1.96**2)
    assert (same.low, same.high) == (pytest.approx(-unseen, abs=1e-4), pytest.approx(unseen, abs=1e-4))
    # One problem more, half won and half lost, of 101: mean 100/101, and t(101) = 1.98373 standard errors
    half = 1.983731 * math.sqrt(1 - (100 / 101) ** 2) / math.sqrt(101)
    flipped = compared("pass@16", [0.0] * 100, [1.0] * 100).difference
    assert (flipped.low, flipped.high) == (pytest.approx(100 / 101 - half, abs=1e-6), 1.0)
    # Lengths: nine problems that got longer by 2, and one by +-2: mean 1.8, t(10) = 2.228139
    half = 2.228139 * math.sqrt(4 - 1.8**2) / math.sqrt(10)
    lengths = compared("thinking_tokens", [5.0] * 9, [7.0] * 9).difference
    assert (lengths.low, lengths.high) == (
        pytest.approx(1.8 - half, abs=1e-6),
        pytest.approx(1.8 + half, abs=1e-6),
    )
    assert lengths.mean == 2.0


def test_a_tie_does_not_make_interval_and_p_contradict_each_other() -> None:
    # Six votes won by a hair: McNemar's p is 2/2^6, though the credits barely differ and one problem lost a lot.
    a, b = [0.5] * 6 + [0.5] + [0.0] * 20, [0.51] * 6 + [0.0] + [0.0] * 20
    found = compared("maj@4", a, b)
    assert found.flips == (0, 6)
    assert found.p >= 0.05
    assert found.difference.low <= 0 <= found.difference.high


def test_the_detectable_effect_is_seen_in_four_of_five_comparisons() -> None:
    rng = np.random.default_rng(1)
    spread = rng.choice([-0.25, 0.0, 0.25], size=(200, 120))
    first = compare_scores("pass@1", [0.5] * 120, (0.5 + spread[0]).tolist())
    assert first is not None
    assert first.detectable is not None
    effect = (1.959964 + 0.841621) * spread[0].std(ddof=1) / math.sqrt(120)
    assert first.detectable == pytest.approx(effect, rel=1e-5)
    seen = [
        found.p < 0.05
        for noise in spread
        if (found := compare_scores("pass@1", [0.5] * 120, (0.5 + effect + noise).tolist()))
    ]
    # 200 draws of a share near 0.8: three standard errors are 0.085.
    assert np.mean(seen) == pytest.approx(0.8, abs=0.085)


def test_without_any_change_a_verdict_needs_six_problems() -> None:
    assert compared("greedy", rights(3), rights(3)).detectable == pytest.approx(6 / 200)
    assert compared("greedy", [0.0] * 4, [0.0] * 4).detectable == 1.0


def test_of_few_problems_no_difference_is_promised_that_no_outcome_could_show() -> None:
    """Seven problems of which one changed by half: six must change for p < 5 %, so 6/7 of a half."""
    found = compared("pass@1", [0.0] * 7, [0.5] + [0.0] * 6)
    assert found.detectable == pytest.approx(0.5 * 6 / 7)  # the standard error alone: 0.2
    for changed in range(8):
        outcome = compared("pass@1", [0.0] * 7, [0.5] * changed + [0.0] * (7 - changed))
        assert outcome.is_shown == (outcome.difference.mean >= found.detectable - 1e-9)


@pytest.mark.parametrize("after", [4, 6])
def test_source_004_claims_an_improvement_that_its_numbers_do_not_show(after: int) -> None:
    # S4-15: 3 of 200 right, then 4 or 6. Unpaired, Fisher gives 1.0 and 0.503; paired, whichever problems they were:
    assert scipy_stats.fisher_exact([[3, 197], [after, 200 - after]]).pvalue == pytest.approx(
        {4: 1.0, 6: 0.503}[after], abs=5e-4
    )
    nested = compared("greedy", rights(3), rights(after))
    apart = compared("greedy", rights(3), rights(after)[::-1])
    for found in (nested, apart):
        assert not found.is_shown
        text = verdict(found, "sft", "grpo")
        assert text.startswith("no difference could be shown; differences below ")
        assert text.endswith(" points would mostly go undetected")
    assert found.detectable is not None
    # 3 and 6 of 200 at different problems: sd of the differences is 0.212, so 2.80 * 0.212 / sqrt(200) = 4.2 points
    assert {4: 0.037, 6: 0.042}[after] == pytest.approx(found.detectable, abs=5e-4)


def test_completions_of_one_problem_are_no_independent_observations() -> None:
    # S4-15: format 726 -> 670 of 800 (50 problems x 16) is p = 3.4e-5 if completions were independent.
    assert scipy_stats.fisher_exact([[726, 74], [670, 130]]).pvalue == pytest.approx(3.4e-5, rel=0.1)
    before = [16] * 45 + [6, 0, 0, 0, 0]
    after = [2] * 4 + [16] * 41 + [6, 0, 0, 0, 0]

    def scores(counts: list[int]) -> list[float | None]:
        """Through the rows of eval_samples.jsonl, as the program gets them."""
        rows = [
            [row("1", False, format="perfect" if index < count else "none") for index in range(16)]
            for count in counts
        ]
        return score_problems(rows, [one[0] for one in rows], 16)["format"]

    found = compare_scores("format", scores(before), scores(after))
    assert found is not None
    assert (found.a, found.b) == (726 / 800, 670 / 800)
    assert found.difference.mean == pytest.approx(-0.07)
    assert not found.is_shown, "four problems changed"


@pytest.mark.ci
def test_holm_equals_statsmodels() -> None:
    rng = np.random.default_rng(2)
    for size in (1, 2, 5, 9):
        p = rng.random(size) ** 3
        assert holm(p.tolist()) == pytest.approx(
            np.asarray(multitest.multipletests(p, method="holm")[1]).tolist(), rel=1e-12
        )
    assert holm([]) == []


def test_several_models_are_corrected_metric_by_metric() -> None:
    base, better, same = rights(10, 40), rights(17, 40), rights(10, 40)
    p = compared("greedy", base, better).p
    alone = compare_pairs([{"greedy": base}, {"greedy": better}], [(0, 1)])[0]["greedy"]
    assert alone.p_holm == alone.p == p == pytest.approx(2 / 2**7)
    tables = compare_pairs(
        [{"greedy": base}, {"greedy": better}, {"greedy": same}, {"pass@1": same}], [(0, 1), (0, 2), (0, 3)]
    )
    assert tables[0]["greedy"].p_holm == pytest.approx(2 * p)
    assert tables[1]["greedy"].p_holm == 1.0
    assert tables[2] == {}, "only what both have is compared"
    # Of four models that look better, none is shown: 4 x 0.0156 is above 5 %.
    many = compare_pairs([{"greedy": base}, *[{"greedy": better}] * 4], [(0, n) for n in range(1, 5)])
    assert [table["greedy"].p for table in many] == [p] * 4
    assert [table["greedy"].p_holm for table in many] == pytest.approx([4 * p] * 4)
    assert [table["greedy"].is_shown for table in many] == [False] * 4


def test_neighbours_are_compared_with_each_other() -> None:
    base, better = rights(10, 40), rights(17, 40)
    first, second = compare_pairs([{"greedy": base}, {"greedy": better}, {"greedy": base}], [(0, 1), (1, 2)])
    assert (first["greedy"].a, first["greedy"].b) == (0.25, 17 / 40)
    assert (second["greedy"].a, second["greedy"].b) == (17 / 40, 0.25)
    assert second["greedy"].p_holm == pytest.approx(2 * second["greedy"].p)


def test_problems_without_a_score_leave_the_pair() -> None:
    found = compare_scores("answer_logprob", [-1.0, None, -3.0], [-0.5, -9.0, None])
    assert found is not None
    assert (found.num_problems, found.a, found.b) == (1, -1.0, -0.5)
    assert compare_scores("answer_logprob", [None], [-1.0]) is None


def test_words_and_numbers() -> None:
    longer = [float(x) for x in range(50, 64)]
    # S4-13: 56.77 -> 37.12 tokens
    assert percent(56.77, 37.12) == "-34.6 %"
    found = compared("thinking_tokens", longer, [x - 20 for x in longer])
    assert verdict(found, "sft", "grpo") == "grpo is shorter by 20.0 tokens (-35.4 % of sft)"
    assert verdict(compared("hedges", [0.0] * 9, [0.0] * 9), "a", "b") == "the same on every problem"
    share = compared("pass@1", [0.1] * 20, [0.35] * 20)
    assert verdict(share, "a", "b") == "b is higher by 25.0 points"
    assert (unit("pass@4"), unit("completion_tokens"), unit("answer_logprob")) == ("%", "tokens", "nats")
    assert (show("format", 0.9891), show("hedges", 1.5), show("greedy", -0.0001, signed=True)) == (
        "98.9",
        "1.500",
        "+0.0",
    )
    assert (show_p(0.0004), show_p(0.0314)) == ("< 0.001", "0.031")
