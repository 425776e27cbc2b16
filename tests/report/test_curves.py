"""Rows of metrics as chart data: what is drawn, what is thinned, what another run adds."""

from __future__ import annotations

import json
import math
import random

import pytest

from whet.report.curves import MAX_POINTS, NUM_BINS, collect, figures, overlay
from whet.telemetry.log import as_number
from whet.telemetry.metrics import METRICS


def panels(rows):
    return {panel["title"]: panel for figure in figures(rows) for panel in figure["panels"]}


def test_a_panel_has_unit_label_meaning_and_values():
    rows = [
        {"step": 2, "rl/correct": 0.5, "rl/format": None},
        {"step": 1, "rl/correct": 0.25, "rl/format": 1.0},
    ]
    panel = panels(rows)["right and well formed"]
    assert panel["unit"] == "share"
    assert panel["smooth"]
    right, form = panel["series"]
    assert right["label"] == "correct"
    assert right["meaning"] == METRICS["rl/correct"].meaning
    assert (right["steps"], right["values"]) == ([1, 2], [0.25, 0.5])
    assert form["values"] == [1.0, None]
    json.dumps(panel, allow_nan=False)


def test_correctness_is_a_series_apart_from_format_and_other_rewards():
    rows = [{"step": 1, "rl/reward/correct": 1.0, "rl/reward/format": 0.5, "rl/reward/my own": -2.0}]
    series = panels(rows)["reward components"]["series"]
    assert [item["label"] for item in series] == ["correct", "format", "my own"]


def test_of_a_step_logged_twice_the_later_row_counts():
    rows = [{"step": 3, "sft/loss": 9.0}, {"step": 4, "sft/loss": 1.0}, {"step": 3, "sft/loss": 2.0}]
    assert panels(rows)["loss"]["series"][0]["values"] == [2.0, 1.0]


def test_the_first_figure_of_reinforcement_is_learning_and_unknown_metrics_come_last():
    rows = [{"step": 1, "rl/reward_mean": 1.0, "rl/loss": 0.1, "eval/pass@1": 0.5, "new/thing": 3.0}]
    found = figures(rows)
    assert [figure["title"] for figure in found][0] == "Learning"
    assert found[-1]["name"] == "other"
    assert found[-1]["panels"][0]["title"] == "new/thing"


def test_more_rewards_than_colours_go_on_in_a_further_panel():
    rows = [{"step": 1, **{f"rl/reward/r{number}": 1.0 for number in range(8)}}]
    found = panels(rows)
    assert len(found["reward components"]["series"]) == 6
    assert len(found["reward components (2)"]["series"]) == 2


def test_every_declared_metric_is_drawn_somewhere():
    rows = [{"step": 1, **dict.fromkeys(METRICS, 1.0)}]
    drawn = [
        item["name"] for figure in figures(rows) for panel in figure["panels"] for item in panel["series"]
    ]
    assert sorted(drawn) == sorted(METRICS)  # and each of them once


def test_a_long_run_is_thinned_to_means_and_extremes_of_shared_bins():
    rng = random.Random(0)
    values = [rng.random() for _ in range(2 * NUM_BINS * 3)]
    values[1000] = 50.0
    rows = ({"step": step + 1, "rl/kl": value, "rl/entropy": 1.0} for step, value in enumerate(values))
    found = panels(rows)
    kl, entropy = found["KL to the reference"]["series"][0], found["entropy"]["series"][0]
    assert len(values) > MAX_POINTS
    assert len(kl["values"]) == NUM_BINS
    assert kl["steps"] == entropy["steps"]
    assert kl["values"][0] == pytest.approx(
        sum(values[:6]) / 6, rel=1e-5
    )  # six steps in a bin, six digits kept
    assert max(kl["high"]) == 50.0
    assert min(kl["low"]) == pytest.approx(min(values), rel=1e-5)
    assert all(
        low <= mean <= high for low, mean, high in zip(kl["low"], kl["values"], kl["high"], strict=True)
    )


def test_what_is_no_number_of_a_step_is_left_out():
    rows = [
        {"step": "x", "rl/kl": 1.0},
        {"step": 10**40, "rl/kl": 1.0},
        {"step": True, "rl/kl": 1.0},
        {"rl/kl": 1.0},
        {"step": 1, "rl/kl": "<b>", "rl/loss": True, "name": 3.0},
        {"step": 2, "rl/kl": 10**400},
        {"step": 3, "rl/kl": 7.0},
    ]
    steps, values = collect(rows)["rl/kl"]
    assert steps.tolist() == [2, 3]
    assert math.isnan(values[0])
    assert figures([]) == []
    assert [as_number(value) for value in (None, True, "1", math.inf, 1e300, 2)] == [None] * 5 + [2.0]


def test_another_run_is_added_to_the_panels_that_both_have():
    own = figures([{"step": 1, "rl/kl": 1.0, "rl/correct": 0.5}])
    other = figures([{"step": 1, "rl/kl": 2.0, "sft/loss": 1.0}])
    both = {panel["title"]: panel for figure in overlay(own, other, "B") for panel in figure["panels"]}
    assert [series.get("other") for series in both["KL to the reference"]["series"]] == [None, "B"]
    assert len(both["right and well formed"]["series"]) == 1
    assert "loss" not in both
    assert len(own[1]["panels"][0]["series"]) == 1  # the given figures are left as they are
