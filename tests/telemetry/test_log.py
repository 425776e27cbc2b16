import base64
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from whet.telemetry.health import QUIET_ROWS, health_warnings
from whet.telemetry.log import RunLog, clean_metrics, read_metrics, read_rows, write_warning
from whet.telemetry.metrics import FAMILIES, METRICS, find_metric, format_metric
from whet.types import Group, Message, Problem, Sample


def make_group(
    *, text="7", reward=1.0, advantage=0.5, prompt="3+4=", rewards=None, logprobs=(-0.12346, -0.00001, 0.0)
):
    sample = Sample(
        uid="ab12",
        index=0,
        prompt_ids=(1, 5),
        completion_ids=(7, 8, 2),
        sampler_logprobs=logprobs,
        text=text,
        finish_reason="stop",
        rewards={"correct": 1.0} if rewards is None else rewards,
        reward=reward,
        advantage=advantage,
    )
    return Group(problem=Problem(uid="ab12", task="t", prompt=prompt, answer="7"), samples=(sample,))


def strict_rows(path):
    """Parse like a strict reader: NaN is an error, and so are lone surrogates."""

    def refuse(word):
        raise AssertionError(word)

    rows = [
        json.loads(line, parse_constant=refuse) for line in path.read_bytes().decode("ascii").splitlines()
    ]
    json.dumps(rows, ensure_ascii=False).encode("utf-8")
    return rows


def test_every_metric_is_declared_well():
    for name, metric in METRICS.items():
        group, quantity = name.split("/", 1)
        assert group in ("sft", "dpo", "rft", "rl", "router", "eval")
        assert quantity
        assert metric.unit
        assert metric.meaning
        assert (metric.unit == "share") == metric.format.endswith("%")
        assert format(0.5, metric.format)
    assert all(prefix.endswith("/") for prefix in FAMILIES)


def test_families_take_names_that_the_user_chose():
    assert find_metric("rl/reward/my_reward") is FAMILIES["rl/reward/"]
    assert find_metric("eval/pass@16").unit == "share"
    assert find_metric("eval/thinking_tokens").unit == "tokens"


@pytest.mark.parametrize("name", ["rl/rewards_mean", "rl/reward/", "eval/", "loss", "", "RL/loss"])
def test_undeclared_metric_is_an_error_even_where_nothing_is_written(tmp_path, name):
    for enabled in (True, False):
        with RunLog(tmp_path, enabled=enabled) as log, pytest.raises(ValueError, match="not declared"):
            log.write_metrics("rl", 1, {name: 0.0})
    assert read_metrics(tmp_path) == []


def test_undeclared_metric_gets_a_hint():
    with pytest.raises(ValueError, match="did you mean 'rl/reward_mean'"):
        find_metric("rl/rewards_mean")


def test_metrics_come_back_as_they_were_written(tmp_path):
    with RunLog(tmp_path / "new" / "run") as log:
        log.write_metrics("sft", 1, {"sft/loss": 0.1 + 0.2, "sft/tokens": 10})
        log.write_metrics("sft", 2, {"sft/loss": np.float32(0.5)})
        on_disk_before_close = read_metrics(tmp_path / "new" / "run" / "metrics.jsonl")
    rows = read_metrics(tmp_path / "new" / "run")
    assert rows == on_disk_before_close  # a killed run keeps every row
    assert [(row["stage"], row["step"]) for row in rows] == [("sft", 1), ("sft", 2)]
    assert rows[0]["sft/loss"] == 0.1 + 0.2
    assert isinstance(rows[0]["sft/tokens"], int)
    assert rows[1]["sft/loss"] == 0.5
    assert rows[0]["time_s"] > 1.7e9


def test_non_finite_values_are_null_named_and_counted(tmp_path):
    with RunLog(tmp_path) as log:
        log.write_metrics("rl", 1, {"rl/grad_norm": math.nan, "rl/kl": -math.inf, "rl/loss": 0.0})
        log.write_samples(
            1, [make_group(reward=math.nan, advantage=None, rewards={"a": None, "b": math.inf})]
        )
        assert log.num_non_finite == 4
    (row,) = strict_rows(tmp_path / "metrics.jsonl")
    assert row["rl/grad_norm"] is None
    assert row["non_finite"] == {"rl/grad_norm": "nan", "rl/kl": "-inf"}
    (sample,) = strict_rows(tmp_path / "samples.jsonl")
    assert (sample["reward"], sample["advantage"], sample["rewards"]) == (None, None, {"a": None, "b": None})


def test_samples_hold_everything_of_a_rollout(tmp_path):
    with RunLog(tmp_path) as log:
        log.write_samples(4, [make_group(), make_group()])
    rows = strict_rows(tmp_path / "samples.jsonl")
    assert len(rows) == 2
    assert rows[0] == {
        "step": 4,
        "uid": "ab12",
        "index": 0,
        "prompt": "3+4=",
        "answer": "7",
        "completion": "7",
        "num_completion_tokens": 3,
        "num_read_tokens": 0,
        "num_turns": 1,
        "completion_ids": [7, 8, 2],
        "sampler_logprobs": [-0.1235, 0.0, 0.0],
        "finish_reason": "stop",
        "rewards": {"correct": 1.0},
        "reward": 1.0,
        "advantage": 0.5,
    }


def test_images_are_named_and_long_ones_are_files_of_the_run_once(tmp_path, monkeypatch, capsys):
    data = bytes(range(256)) * 40
    long = "data:image/png;base64," + base64.b64encode(data).decode()
    sources = ("data:image/png;base64,AAAA", "/data/a.png", long, "https://example.org/a.png")
    group = make_group()
    asked = replace(group.problem, images=sources)
    turns = replace(group.problem, messages=(Message(role="user", content="x", images=(long,)),))
    with RunLog(tmp_path) as log:
        for step in (1, 2):
            log.write_samples(step, [replace(group, problem=asked), replace(group, problem=turns), group])
        rows = strict_rows(tmp_path / "samples.jsonl")
        shown = {tuple(row.get("images", ())) for row in rows}
        (name,) = [path.name for path in (tmp_path / "images").iterdir()]
        assert (tmp_path / "images" / name).read_bytes() == data
        kept = f"images/{name}"
        assert shown == {(), (kept,), (*sources[:2], kept, sources[3])}
        assert max(map(len, (tmp_path / "samples.jsonl").read_text().splitlines())) < 2000

        (tmp_path / "images" / name).unlink()

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        log.write_samples(3, [replace(group, problem=asked)])
        assert log.num_failed_writes > 0
    assert "could not be written" in capsys.readouterr().err
    with RunLog(tmp_path / "other", enabled=False) as log:
        log.write_samples(1, [replace(group, problem=asked)])
    assert not (tmp_path / "other").exists()


def test_logprobs_are_short_and_always_json(tmp_path):
    with RunLog(tmp_path) as log:
        log.write_samples(1, [make_group(logprobs=(-0.00001, -math.inf, math.nan))])
        assert log.num_non_finite == 2
    (row,) = strict_rows(tmp_path / "samples.jsonl")
    assert row["sampler_logprobs"] == [0.0, None, None]
    assert "-0.0" not in (tmp_path / "samples.jsonl").read_text()


def test_a_listener_hears_what_is_written_and_nothing_on_other_ranks(tmp_path):
    heard = []

    def listen(file, rows):
        heard.append((file, [dict(row) for row in rows]))

    for enabled in (False, True):
        with RunLog(tmp_path, enabled=enabled, listener=listen) as log:
            log.write_metrics("rl", 1, {"rl/loss": 0.5})
            log.write_samples(1, [make_group(), make_group()])
    assert heard == [(name, strict_rows(tmp_path / name)) for name in ("metrics.jsonl", "samples.jsonl")]


@pytest.mark.parametrize("text", ["\ud800", "a\u2028b\r\n\x85c", "\x1b]0;title\x07\x00", '"\\', "漢字 🙂"])
def test_hostile_text_stays_one_strict_line(tmp_path, text):
    with RunLog(tmp_path) as log:
        log.write_samples(1, [make_group(text=text, prompt=text)])
    (row,) = strict_rows(tmp_path / "samples.jsonl")
    assert row["completion"] == row["prompt"] == ("\\ud800" if text == "\ud800" else text)


def test_appends_and_mends_a_line_that_a_crash_cut(tmp_path):
    with RunLog(tmp_path) as log:
        log.write_metrics("sft", 1, {"sft/loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"stage": "sft", "st')
    with RunLog(tmp_path) as log:
        log.write_metrics("sft", 2, {"sft/loss": 0.9})
    assert path.read_bytes().startswith(whole)
    assert [row["step"] for row in strict_rows(path)] == [1, 2]


def test_resume_drops_the_rows_that_will_be_written_again(tmp_path):
    with RunLog(tmp_path) as log:
        log.write_metrics("eval", 0, {"eval/pass@1": 0.1})
        for step in range(1, 6):
            log.write_metrics("rl", step, {"rl/loss": 0.0})
            log.write_samples(step, [make_group()])
    kept = b"".join((tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:4])
    with RunLog(tmp_path, resume_step=3) as log:
        assert (tmp_path / "metrics.jsonl").read_bytes() == kept
        log.write_metrics("rl", 4, {"rl/loss": 0.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in read_rows(tmp_path / "samples.jsonl")] == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "warnings.jsonl"])
def test_resume_drops_a_line_that_stands_there_twice(tmp_path, name):
    with RunLog(tmp_path) as log:
        for step in (1, 2):
            log.write_metrics("rl", step, {"rl/loss": 0.0})
            log.write_samples(step, [make_group()])
            write_warning(tmp_path, step, "rewards fell")
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole + whole.splitlines(keepends=True)[-1])
    with RunLog(tmp_path, resume_step=2):
        assert (tmp_path / name).read_bytes() == whole


def test_other_ranks_write_nothing(tmp_path):
    with RunLog(tmp_path / "run", enabled=False) as log:
        log.write_metrics("rl", 1, {"rl/loss": 0.0})
        log.write_samples(1, [make_group()])
    assert not (tmp_path / "run").exists()


def test_a_full_disk_stops_no_training(tmp_path, monkeypatch, capsys):
    def refuse(file, data):
        raise OSError(28, "No space left on device")

    with RunLog(tmp_path) as log:
        monkeypatch.setattr("whet.telemetry.log.os.write", refuse)
        log.write_metrics("rl", 1, {"rl/loss": 0.0})
        log.write_metrics("rl", 2, {"rl/loss": 0.0})
        assert log.num_failed_writes == 2
    assert capsys.readouterr().err.count("No space left") == 1


def test_a_line_cut_by_a_full_disk_spoils_no_other(tmp_path, monkeypatch):
    write, room = os.write, [10]

    def cut(file, data):
        if room[0] <= 0:
            raise OSError(28, "No space left on device")
        room[0] -= len(data[: room[0]])
        return write(file, data[:10])

    with RunLog(tmp_path) as log:
        log.write_metrics("rl", 1, {"rl/loss": 0.0})
        with monkeypatch.context() as patch:
            patch.setattr("whet.telemetry.log.os.write", cut)
            log.write_metrics("rl", 2, {"rl/loss": 0.0})
        log.write_metrics("rl", 3, {"rl/loss": 0.0})
        log.write_metrics("rl", 4, {"rl/loss": 0.0})
    with pytest.warns(UserWarning, match=r"skipped 1 unreadable line\(s\)"):
        assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3, 4]


def test_closed_log_is_quiet(tmp_path):
    log = RunLog(tmp_path)
    log.close()
    log.close()
    log.write_metrics("rl", 1, {"rl/loss": 0.0})
    assert read_metrics(tmp_path) == []


def test_reader_skips_what_is_no_row_and_says_so(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n[1]\n' + b"[" * 100_000 + b'\n{"step": 2}\n')
    with pytest.warns(UserWarning, match="skipped 3 unreadable"):
        assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    assert read_metrics(tmp_path / "missing.jsonl") == []


def test_format_metric():
    assert format_metric("rl/correct", 0.617) == "61.7%"
    assert format_metric("sft/lr", 2e-5) == "2.00e-05"
    assert format_metric("sft/tokens_per_second", 12345.6) == "12,346"
    assert format_metric("rl/kl", math.nan) == format_metric("rl/kl", None) == "–"


def replay(stage, rows):
    return [
        (index, text) for index, row in enumerate(rows) for text in health_warnings(stage, row, rows[:index])
    ]


@pytest.mark.parametrize(
    ("stage", "row", "word", "num_rows"),
    [
        ("sft", {"sft/loss": 3.5}, "template", 10),
        ("sft", {"sft/loss": 9.0}, "broken", 3),
        ("sft", {"sft/grad_norm": math.nan}, "finite", 1),
        ("rl", {"rl/grad_norm": None}, "finite", 1),
        ("rl", {"rl/loss": math.inf}, "finite", 1),
        ("rl", {"rl/reward_std": 0.0}, "learning signal", 10),
        ("rl", {"rl/zero_variance_groups": 0.95}, "equal rewards", 5),
        ("rl", {"rl/truncated": 0.3}, "cut off", 5),
        ("rl", {"rl/ratio_drift": 0.01}, "on-policy", 1),
        ("rl", {"rl/entropy": 0.01, "rl/correct": 0.2}, "entropy", 5),
        ("rl", {"rl/kl": 3.0}, "reference", 5),
    ],
)
def test_warning_comes_once_when_its_problem_is_certain(stage, row, word, num_rows):
    found = [(index, text) for index, text in replay(stage, [row] * 40) if word in text]
    assert [index for index, _ in found] == [num_rows - 1]
    assert "\n" not in found[0][1]
    assert all(len(text) <= 110 for _, text in found)


@pytest.mark.parametrize(
    ("stage", "row"),
    [
        ("sft", {"sft/loss": 2.9, "sft/grad_norm": 1.0}),
        ("sft", {"sft/loss": -0.5}),
        (
            "rl",
            {"rl/loss": -0.0053, "rl/reward_std": 0.1, "rl/truncated": 0.1, "rl/zero_variance_groups": 0.5},
        ),
        ("rl", {"rl/loss": 0.0, "rl/ratio_drift": 0.0}),
        ("rl", {"rl/ratio_drift": 0.2, "rl/staleness": 1}),  # off-policy by design
        ("rl", {"rl/entropy": 0.01, "rl/correct": 0.95}),  # certain because it is right
        ("rl", {}),
        ("eval", {"eval/pass@1": 0.0}),
    ],
)
def test_healthy_runs_have_no_warnings(stage, row):
    assert replay(stage, [row] * 40) == []


def test_warning_comes_again_after_a_quiet_time():
    bad, good = {"rl/grad_norm": math.nan}, {"rl/grad_norm": 1.0}
    assert [index for index, _ in replay("rl", [bad, good, bad])] == [0]
    rows = [bad] + [good] * QUIET_ROWS + [bad]
    assert [index for index, _ in replay("rl", rows)] == [0, QUIET_ROWS + 1]


def test_the_metrics_page_names_every_metric():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name, metric in METRICS.items():
        assert f"| `{name}` | {metric.unit} | {metric.meaning} |" in page, name
    assert all(f"| `{prefix}NAME` |" in page for prefix in FAMILIES)


def test_rows_that_anybody_wrote_come_into_one_shape():
    row = {"stage": "rl", "step": 3.0, "time_s": 1e9, "run_time_s": 60, "a/x": 1, "a/null": None, "plain": 1}
    row["a/huge"] = 10**400
    odd = {"a/text": "1", "a/list": [1], "a/map": {}, "a/true": True}
    assert clean_metrics(row | odd) == {
        "stage": "rl",
        "step": 3,
        "time_s": 1e9,
        "run_time_s": 60.0,
        "a/x": 1.0,
        "a/null": None,
        "a/huge": None,
    }
    assert clean_metrics({"step": 1, "stage": ["x"], "time_s": -1}) == {
        "stage": "",
        "step": 1,
        "time_s": None,
        "run_time_s": None,
    }
    assert [clean_metrics({"step": step}) for step in (None, "1", True, math.nan, 2**53, [1])] == [None] * 6
