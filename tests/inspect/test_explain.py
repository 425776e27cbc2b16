"""The teaching examples against published numbers and closed forms, and the program's files and mistakes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pytest
import torch

from whet import __main__
from whet.inspect.explain import explain
from whet.inspect.explain import maths as explain_maths
from whet.inspect.explain.maths import (
    ACTION_REWARDS,
    FORMATS,
    POLICIES,
    POLICY_LOGITS,
    REF_LOGITS,
    TRAPS,
    expected_reward,
    kl_facts,
    log_sum,
    multiplier_cost,
    objective_gradient,
    sampled_gradient,
    surrogate,
    vector,
)

REWARDS = vector(ACTION_REWARDS)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "explain.md"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("policy", "total", "expected"),
    [("all equal", 4.8165, -2.0), ("right more often", 2.5815, -3.6), ("right less often", 8.9542, -0.4)],
)
def test_pac_man(policy: str, total: float, expected: float) -> None:
    # Published with four digits.
    assert log_sum(vector(POLICIES[policy]), REWARDS) == pytest.approx(total, abs=5e-5)
    assert expected_reward(vector(POLICIES[policy]), REWARDS) == pytest.approx(expected, abs=1e-12)


def test_the_log_sum_can_prefer_the_worse_policy() -> None:
    up, dots = (vector(policy) for policy in TRAPS.values())
    assert log_sum(up, REWARDS) > log_sum(dots, REWARDS)
    assert expected_reward(up, REWARDS) < expected_reward(dots, REWARDS)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_baseline_moves_the_variance_and_not_the_gradient(policy: str) -> None:
    p_V = vector(POLICIES[policy])
    expected = float((p_V * REWARDS).sum())
    gradient_V = p_V * (REWARDS - expected)
    torch.testing.assert_close(objective_gradient(p_V, REWARDS), gradient_V, rtol=0, atol=1e-12)
    variances = []
    for baseline in (0.0, expected):
        mean_V, variance = sampled_gradient(p_V, REWARDS, baseline)
        torch.testing.assert_close(mean_V, gradient_V, rtol=0, atol=1e-12)
        second = 0.0  # sum over sampled actions a and logits v of p_a ((r_a - b) (1[a = v] - p_v))^2
        for a, chance in enumerate(POLICIES[policy]):
            for v, other in enumerate(POLICIES[policy]):
                second += chance * ((ACTION_REWARDS[a] - baseline) * ((a == v) - other)) ** 2
        assert variance == pytest.approx(second - float(gradient_V.square().sum()), rel=1e-12)
        variances.append(variance)
    assert variances[1] < variances[0]


def test_ratios_and_what_the_clip_stops() -> None:
    (table,) = explain.LESSONS["ratio"]().tables
    assert [row[1] for row in table.rows] == ["1.000", "0.010", "99.000", "1.000"]
    assert [row[2] for row in table.rows] == ["1.000", "0.800", "1.200", "1.000"]
    ratio_M = vector([0.01 / 0.99, 1.0, 99.0])
    value_M, push_M, passes_M = surrogate(ratio_M, 1.0)
    assert value_M.tolist() == pytest.approx([0.01 / 0.99, 1.0, 1.2], rel=1e-12)
    assert push_M.tolist() == pytest.approx([0.01 / 0.99, 1.0, 0.0], rel=1e-12)
    assert passes_M.tolist() == [True, True, False]
    value_M, push_M, passes_M = surrogate(ratio_M, -1.0)
    assert value_M.tolist() == pytest.approx([-0.8, -1.0, -99.0], rel=1e-12)
    assert push_M.tolist() == pytest.approx([0.0, -1.0, -99.0], rel=1e-12)
    assert passes_M.tolist() == [False, True, True]


def test_z_scores_and_the_wrong_slide() -> None:
    slide, rules = explain.LESSONS["group"]().tables
    assert [row[2:] for row in slide.rows] == [
        ("0.375", "0.43301", "1.44", ""),
        ("0.250", "0.43301", "1.732", "no"),
        ("0.250", "0.50000", "1.500", "no"),
        ("0.375", "0.37500", "1.667", "no"),
        ("0.375", "0.43301", "1.443", "yes"),
    ]
    one_right = ("-0.500, 1.500", "-0.577, 1.732", "-0.250, 0.750", "-0.333, 1.000")
    assert rules.rows[0][1:] == one_right
    assert rules.rows[1][1:] == one_right  # shifted by 10
    assert rules.rows[2][1:] == (*one_right[:2], "-2.500, 7.500", "-3.333, 10.000")  # times 10
    assert rules.rows[-1][1:] == ("0.000, 0.000",) * 4
    fitting_G = vector(explain_maths.FITTING_REWARDS)
    z_G = explain_maths.GROUP_RULES["GRPO, sample"](fitting_G[None], eps=0.0)[0]
    assert z_G.tolist() == pytest.approx([-0.866, -0.2887, -0.2887, 1.443], abs=5e-4)  # published digits


def test_kl_against_closed_forms() -> None:
    facts = kl_facts(vector(POLICY_LOGITS), vector(REF_LOGITS))
    p_V, q_V = (torch.softmax(vector(logits), 0) for logits in (POLICY_LOGITS, REF_LOGITS))
    delta_V = (p_V / q_V).log()
    kl = float((p_V * delta_V).sum())
    reverse_V, forward_V = p_V * (delta_V - kl), p_V - q_V
    exact = {"rtol": 0.0, "atol": 1e-9}  # float64, and sums of six terms
    torch.testing.assert_close(facts.reverse_V, reverse_V, **exact)
    torch.testing.assert_close(facts.forward_V, forward_V, **exact)
    torch.testing.assert_close(facts.gradients["k1 as a loss"], torch.zeros_like(p_V), **exact)
    torch.testing.assert_close(facts.gradients["k2 as a loss"], reverse_V, **exact)
    torch.testing.assert_close(facts.gradients["k3 as a loss"], forward_V, **exact)
    torch.testing.assert_close(facts.gradients["k1 off the reward"], reverse_V, **exact)
    for name in ("k2 off the reward", "k3 off the reward", "k3 as a loss"):
        assert (facts.gradients[name] - reverse_V).norm() > 0.2 * reverse_V.norm()
    half = float((p_V * delta_V.square()).sum()) / 2
    assert facts.kl == pytest.approx(kl, rel=1e-12)
    assert facts.means == pytest.approx({"k1": kl, "k2": half, "k3": kl}, rel=1e-12)
    assert facts.stds["k1"] == pytest.approx(math.sqrt(2 * half - kl**2), rel=1e-12)
    assert facts.stds["k3"] < facts.stds["k1"]


def test_for_bad_tokens_the_upper_bound_does_not_matter() -> None:
    (table,) = explain.LESSONS["clip"]().tables
    assert [row[3] for row in table.rows] == [row[5] for row in table.rows]
    assert table.rows[-1] == ("1.50", "1.28", "0.00", "-1.50", "-1.50", "-1.50")
    assert table.rows[0] == ("0.50", "0.50", "0.50", "-0.80", "0.00", "-0.80")


def test_costs_of_number_formats() -> None:
    costs = {name: multiplier_cost(*bits) for name, bits in FORMATS.items()}
    assert list(costs.values()) == [537, 105, 57, 13, 9, 3]
    (table,) = explain.LESSONS["float"]().tables
    assert [row[4] for row in table.rows] == ["", "5.11x", "1.84x", "4.38x", "1.44x", "3.00x"]
    assert table.rows[-1][5] == "179.0x"
    assert "not a benchmark" in table.note
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    for (exponent, mantissa), dtype in zip(FORMATS.values(), dtypes, strict=False):
        assert (1 + exponent + mantissa, 2.0**-mantissa) == (torch.finfo(dtype).bits, torch.finfo(dtype).eps)


@pytest.mark.parametrize("topic", list(explain.LESSONS))
@pytest.mark.ci
def test_each_topic_runs_alone(topic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["explain", "--topic", topic, "--out", str(tmp_path / "new")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"report.md", f"{topic}.png"}
    assert (tmp_path / "new" / f"{topic}.png").read_bytes().startswith(PNG)
    lesson = explain.LESSONS[topic]()
    printed, report = capsys.readouterr().out, (tmp_path / "new" / "report.md").read_text(encoding="utf-8")
    for table in lesson.tables:
        assert table.title in printed
        for row in filter(None, table.rows):
            cells = [cell for cell in row if cell]
            assert any(all(cell.strip() in line for cell in cells) for line in printed.splitlines()), row
        assert explain.markdown(table) in report
    assert f"![{lesson.title}]({topic}.png)" in report


def test_all_topics_into_an_earlier_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    for name in explain.LESSONS:
        monkeypatch.setattr(explain.explain_plots, f"draw_{name}", lambda path: drawn.append(path.name))
    config = explain.ExplainConfig(out=str(tmp_path))
    explain.main(config)
    explain.main(config)  # its own files are overwritten
    assert drawn == [f"{name}.png" for name in explain.LESSONS] * 2
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert report.count("\n## ") == len(explain.LESSONS)
    assert report.splitlines()[0] == explain.HEADING


def test_topics_are_the_lessons() -> None:
    assert get_args(explain.Topic) == ("all", *explain.LESSONS)


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run `whet explain`, expect exit status 2 and return its one line."""
    assert __main__.main(["explain", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--topic: got 'klip', expected" in error_of(capsys, "--topic", "klip")
    stray = tmp_path / "run" / "report.md"
    stray.parent.mkdir()
    stray.write_text("# my run\n")
    assert "is a file, expected a folder" in error_of(capsys, "--out", str(stray))
    assert "not from 'whet explain'" in error_of(capsys, "--out", str(stray.parent))
    assert "cannot be written" in error_of(capsys, "--out", str(stray / "below"))
    assert stray.read_text() == "# my run\n"


def test_the_docs_hold_the_program_s_tables() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for make in explain.LESSONS.values():
        for table in make().tables:
            assert explain.markdown(table).split("\n\n")[-1] in text, table.title
