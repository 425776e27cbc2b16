"""Metrics of an evaluation from verdicts that were written down by hand, and from the seeds' recorded counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from itertools import combinations
from typing import Any

import pytest

from whet.eval.confidence import Confidence
from whet.eval.grade import Grade, Judged
from whet.eval.metrics import best_of_n, breakdown, headline, remark, summarise
from whet.eval.show import describe
from whet.stats import detectable_difference, fisher_exact, minimum_detectable_effect
from whet.types import Problem


def done(
    is_correct: bool,
    *,
    answer: str | None = "1",
    reward: float | None = None,
    thinking: int = 3,
    tokens: int = 5,
) -> Judged:
    graded = Grade(answer, is_correct, "perfect", thinking)
    rewards = {} if reward is None else {"format": reward}
    sure = Confidence(-0.5, None if answer is None else -0.25, hedges=2, revisions=1)
    return Judged("", tokens, "stop", graded, confidence=sure, rewards=rewards, reward=reward)


def problems(count: int) -> list[Problem]:
    return [Problem(uid=str(n), task="t", prompt="?", answer="1") for n in range(count)]


def rows_of(counts: Sequence[int], num_samples: int) -> list[list[Judged]]:
    return [[done(index < count) for index in range(num_samples)] for count in counts]


def summary_of(samples: list[list[Judged]]) -> dict[str, Any]:
    metrics = headline(samples, [row[0] for row in samples], seed=0)
    extra = {"generation_seconds": 0.0, "hardware": None}
    return summarise(problems(len(samples)), samples, metrics) | extra


def test_recorded_gap_of_the_source() -> None:
    # S1-09: sampled pass@1 67.7 and pass@8 95.0 leave 27.3 points; 1083 of 1600 samples, 190 of 200 problems.
    counts = [8] * 81 + [4] * 107 + [5, 2] + [0] * 10
    assert (sum(counts), len(counts), counts.count(0)) == (1083, 200, 10)
    found = summary_of(rows_of(counts, 8))
    shares = [f"{100 * found['pass@k'][k]['mean']:.1f}" for k in ("1", "8")]
    gap = found["opportunity"]
    assert shares == ["67.7", "95.0"]
    assert f"{100 * gap['mean']:.1f}" == "27.3"
    assert 0.2 < gap["low"] < gap["mean"] < gap["high"] < 0.35


def test_the_table_of_source_004_from_its_counts() -> None:
    # S4-13: 200 problems x 16; 48 and 64 samples right over 44 problems; 3165 and 3180 perfect. S4-16: 670 of 800.
    def shown(counts: Sequence[int], num_perfect: int) -> dict[str, list[str]]:
        samples = rows_of(counts, 16)
        places = [(row, index) for row in samples for index in range(16)]
        for row, index in places[num_perfect:]:
            row[index] = replace(row[index], grade=replace(row[index].grade, verdict="partial"))
        metrics = headline(samples, [row[0] for row in samples], seed=0)
        return {name: [f"{100 * value:.1f}" for value in astuple(found)] for name, found in metrics.items()}

    before, after = shown([2] * 4 + [1] * 40 + [0] * 156, 3165), shown([2] * 20 + [1] * 24 + [0] * 156, 3180)
    # the source's percentile bootstrap of pass@16 is 16.0 to 28.0; Wilson's of 44 of 200:
    assert before["pass@16"] == after["pass@16"] == ["22.0", "16.8", "28.2"]
    assert (before["pass@1"][0], after["pass@1"][0]) == ("1.5", "2.0")
    assert (before["format"][0], after["format"][0]) == ("98.9", "99.4")
    assert shown([0] * 50, 670)["format"][0] == "83.8"


def test_no_interval_claims_certainty_about_problems_that_were_not_drawn() -> None:
    half = summary_of(rows_of([2] * 8, 4))["metrics"]["pass@1"]
    assert (half["mean"], half["low"], half["high"]) == pytest.approx((0.5, 0.1756, 0.8244), abs=1e-4)
    assert summary_of(rows_of([0] * 8, 4))["opportunity"] == pytest.approx(
        {"mean": 0.0, "low": 0.0, "high": 0.3244}, abs=1e-4
    )
    assert summary_of(rows_of([1] * 8, 1))["opportunity"]["high"] == 0.0  # pass@1 - pass@1
    one = summary_of(rows_of([3], 4))
    assert one["metrics"]["pass@1"]["low"] == 0.0
    assert any("below 100.0 points would go undetected with 1 problem " in line for line in describe(one))


def test_counts_of_one_or_none_are_no_shares() -> None:
    rows = [[done(True, thinking=0, tokens=1)] * 2 for _ in range(8)]
    found = headline(rows, [row[0] for row in rows], seed=0)
    assert astuple(found["thinking_tokens"]) == (0.0, 0.0, 0.0)
    assert astuple(found["completion_tokens"]) == (1.0, 1.0, 1.0)


def test_every_k_is_that_of_exhaustive_draws() -> None:
    counts = [0, 1, 3, 5]
    found = summary_of(rows_of(counts, 5))["pass@k"]
    assert list(found) == ["1", "2", "3", "4", "5"]
    for k in range(1, 6):
        draws = [[any(index < c for index in chosen) for chosen in combinations(range(5), k)] for c in counts]
        expected = sum(sum(row) / len(row) for row in draws) / len(counts)
        assert found[str(k)]["mean"] == pytest.approx(expected)


def test_wanted_k_and_one_too_large() -> None:
    samples = rows_of([1, 2], 5)
    metrics = headline(samples, [row[0] for row in samples], seed=0, ks=(3,))
    assert [name for name in metrics if name.startswith("pass@")] == [
        "pass@1",
        "pass@2",
        "pass@3",
        "pass@4",
        "pass@5",
    ]
    with pytest.raises(ValueError, match="k=6, num_samples=5: draw more samples"):
        headline(samples, [row[0] for row in samples], seed=0, ks=(6,))


def test_consistency_formats_lengths_and_confidence() -> None:
    long_wrong = done(False, answer=None, thinking=20, tokens=20)
    samples = [[done(True), done(True)], [done(True), long_wrong], [long_wrong, done(False)]]
    found = summary_of(samples)
    consistency = {name: row["mean"] for name, row in found["consistency"].items()}
    assert consistency == pytest.approx({"always": 1 / 3, "mixed": 1 / 3, "never": 1 / 3})
    # Wilson of 1 in 3, from the closed form (z = 1.96): 0.0615 to 0.7923.
    assert found["consistency"]["mixed"]["low"] == pytest.approx(0.0615, abs=5e-4)
    assert found["consistency"]["mixed"]["high"] == pytest.approx(0.7923, abs=5e-4)
    assert found["format"] == {"perfect": 1.0, "partial": 0.0, "none": 0.0}
    right, wrong = found["lengths"]["right"], found["lengths"]["wrong"]
    assert (right["completion"]["mean"], right["answer"]["mean"], right["completion"]["num_samples"]) == (
        5,
        2,
        3,
    )
    # Means over problems, not over samples: problem 2 has 20, problem 3 has (20 + 5) / 2.
    assert wrong["completion"]["mean"] == pytest.approx((20 + 12.5) / 2)
    assert wrong["thinking"]["quartiles"] == [11.5, 20.0, 20.0]
    sure = found["confidence"]
    assert sure["answer_logprob"]["num_samples"] == 4
    assert (sure["hedges"]["mean"], sure["revisions"]["mean"]) == (2, 1)
    assert sure["vote_share"]["mean"] == pytest.approx((1 + 0.5 + 0.5) / 3)


def test_no_right_sample_has_no_lengths() -> None:
    found = summary_of(rows_of([0, 0], 2))
    assert found["lengths"]["right"] == {"thinking": None, "answer": None, "completion": None}
    assert any("wrong 5.0" in line and "right" not in line for line in describe(found) if "tokens" in line)


def test_votes_of_equal_numbers_count_together() -> None:
    row = [
        done(False, answer="7"),
        done(False, answer="7"),
        *(done(True, answer=a) for a in ("5", "5.0", " 5")),
    ]
    metrics = headline([row], [row[0]], seed=0)
    assert metrics["maj@5"].mean == 1.0
    tie = [done(False, answer="7"), done(True, answer="5"), done(False, answer=None)]
    assert headline([tie], [tie[0]], seed=0)["maj@3"].mean == 0.5
    # two programs that differ in white space vote together, and one of them is wrong: in whichever order, half
    programs = [done(True, answer="if x:\n  a()\nb()"), done(False, answer="if x:\n  a()\n  b()")]
    for pair in (programs, programs[::-1]):
        assert headline([pair], [pair[0]], seed=0)["maj@2"].mean == 0.5


def test_best_of_n_by_reward() -> None:
    high_wrong, high_right = done(False, reward=2.0), done(True, reward=2.0)
    low_right, unknown = done(True, reward=1.0), done(True, reward=None)
    assert best_of_n([high_wrong, low_right]) == 0.0
    assert best_of_n([high_wrong, high_right, low_right]) == 0.5
    assert best_of_n([high_right, high_wrong, unknown]) == 0.5
    assert best_of_n([unknown, done(False, reward=None)]) == 0.5
    samples = [[high_wrong, low_right]]
    assert headline(samples, [low_right], seed=0)["best@2"].mean == 0.0
    assert "best@2" not in headline([[unknown, unknown]], [unknown], seed=0)


@pytest.mark.parametrize(("count", "num_samples"), [(3, 1), (1, 4)])
def test_anecdote(count: int, num_samples: int) -> None:
    found = summary_of(rows_of([1] * count, num_samples))
    assert found["anecdote"] is True
    assert str(found["remark"]).startswith("anecdote: one")
    assert any(line.startswith("anecdote") for line in describe(found))
    several = summary_of(rows_of([2, 3], 4))
    assert (several["anecdote"], several["remark"]) == (False, "")


def test_the_reference_of_a_published_baseline_is_printed() -> None:
    found = summary_of(rows_of([2, 3], 4))
    for init, task, said in (
        ("Qwen/Qwen2.5-3B", {"name": "gsm8k"}, "reference: 70.0 % of gsm8k for Qwen/Qwen2.5-3B, greedy"),
        ("Qwen/Qwen2.5-3B", "math500", "reference: about 40 % of math500"),
        ("Qwen/Qwen2.5-3B", "aime24", None),
        ("runs/x", "gsm8k", None),
    ):
        lines = describe(found | {"model": {"init": init}, "identity": {"task": task}})
        assert [line.startswith(said or "-") for line in lines if "reference" in line] == [True] * (
            said is not None
        )
    assert not any("reference" in line for line in describe(found))


def test_detectable_difference() -> None:
    # 4 of 200 right: 3.9 points, the closed form of section 6.10; several samples per problem make it smaller.
    assert detectable_difference([1.0] * 4 + [0.0] * 196) == pytest.approx(
        minimum_detectable_effect(0.02, 200)
    )
    assert detectable_difference([1.0] * 4 + [0.0] * 196) == pytest.approx(0.0392, abs=5e-5)
    assert detectable_difference([0.4, 0.6] * 100) == pytest.approx(
        2.8016 * (2 * 0.01 / 200) ** 0.5, abs=1e-5
    )
    assert detectable_difference([0.0] * 200) == pytest.approx(minimum_detectable_effect(1 / 201, 200))
    assert detectable_difference([1.0]) > 1  # one problem shows nothing
    found = summary_of(rows_of([16] * 4 + [0] * 196, 16))
    assert any("below 3.9 points would go undetected with 200 problems" in line for line in describe(found))


def test_fisher_against_an_oracle() -> None:
    # scipy.stats.fisher_exact 1.17, two-sided; the first two are the seeds' tables (S4-15), the third S4-14.
    assert fisher_exact(3, 200, 4, 200) == pytest.approx(1.0)
    assert fisher_exact(3, 200, 6, 200) == pytest.approx(0.5028218860560039, rel=1e-12)
    assert fisher_exact(726, 800, 670, 800) == pytest.approx(3.417886735716473e-05, rel=1e-10)
    assert fisher_exact(8, 10, 1, 6) == pytest.approx(0.034965034965034975, rel=1e-12)
    assert fisher_exact(1, 6, 8, 10) == fisher_exact(
        8, 10, 1, 6
    )  # whoever comes first, with fewer trials or more
    assert fisher_exact(0, 5, 5, 5) == pytest.approx(0.007936507936507938, rel=1e-12)
    for wrong in ((3, 2, 0, 1), (-1, 2, 0, 1), (0, 0, 0, 1)):
        with pytest.raises(ValueError, match="expected 0 <= successes <= trials"):
            fisher_exact(*wrong)


def test_the_share_of_cut_off_samples() -> None:
    cut = replace(done(False), finish_reason="length")
    found = headline(
        [[cut, done(True), done(True), done(True)], [cut, cut, done(True), cut]], [cut, cut], seed=0
    )
    assert found["truncated"].mean == pytest.approx((1 / 4 + 3 / 4) / 2)


@pytest.mark.parametrize(("pass_at_1", "warns"), [(0.0, True), (0.049, True), (0.05, False), (0.5, False)])
def test_below_one_in_twenty_a_score_is_luck(pass_at_1: float, warns: bool) -> None:
    text = remark(pass_at_1, 200, 16)
    assert text.startswith("accuracy is near zero") == warns
    assert bool(text) == warns


def test_a_score_near_zero_is_no_luck_where_greedy_answers_are_right_or_samples_were_cut() -> None:
    assert "luck" not in remark(0.02, 200, 16, greedy=0.08)
    assert "not greedily (8.0 %): lower sampling.temperature" in remark(0.02, 200, 16, greedy=0.08)
    assert "luck" in remark(0.02, 200, 16, greedy=0.04)
    assert "62 % of the samples were cut off" in remark(0.5, 200, 16, truncated=0.62)
    assert remark(0.5, 200, 16, greedy=0.6, truncated=0.1) == ""


def test_a_label_with_one_value_makes_no_table() -> None:
    labels = [{"subject": "algebra", "level": "1"}, {"subject": "algebra", "level": "2"}]
    asked = [replace(problem, meta=meta) for problem, meta in zip(problems(2), labels, strict=True)]
    found = breakdown(asked, rows_of([1, 2], 2))
    assert list(found) == ["level"]
    assert {value: interval.mean for value, interval in found["level"].items()} == {"1": 0.5, "2": 1.0}
