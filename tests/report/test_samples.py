"""Completions for a page: one shape for all rows, an even choice, and chunks that open to the same texts."""

from __future__ import annotations

import base64
import gzip
import json
import math

import numpy as np
import pytest

from whet.report import samples
from whet.report.samples import choose, clean, embed, find_samples, find_tags, histograms, scan, snippet

ROW = {
    "step": 3,
    "uid": "ab",
    "index": 1,
    "prompt": "1+1=",
    "answer": "2",
    "completion": "<b>é</think>2",
    "num_completion_tokens": 4,
    "num_turns": 1,
    "num_read_tokens": 2,
    "finish_reason": "stop",
    "rewards": {"correct": 1.0, "format": 0.5},
    "reward": 1.05,
    "advantage": -0.5,
}


def unpack(text):
    return json.loads(gzip.decompress(base64.b64decode(text)))


def write(folder, rows, name="samples.jsonl"):
    path = folder / name
    path.write_bytes(
        b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)
    )
    return path


def run_of(folder, *, num_steps, num_groups, size=2):
    rows = [
        {**ROW, "step": step, "uid": f"{step}-{group}", "index": index}
        for step in range(1, num_steps + 1)
        for group in range(num_groups)
        for index in range(size)
    ]
    return scan(write(folder, rows))


def test_a_row_keeps_its_values_and_says_whether_it_is_right():
    row = clean(ROW)
    assert {name: row[name] for name in ("step", "uid", "prompt", "answer", "completion", "reward")} == {
        name: ROW[name] for name in ("step", "uid", "prompt", "answer", "completion", "reward")
    }
    assert row["correct"] is True
    assert row["facts"] == {"num_read_tokens": 2}  # one turn says nothing
    assert clean({**ROW, "rewards": {"correct": 0.0}})["correct"] is False
    assert clean({**ROW, "rewards": {"correct": None}})["correct"] is None
    assert clean({**ROW, "rewards": {}})["correct"] is None


def test_a_row_of_an_evaluation_takes_the_same_shape():
    row = clean({
        "uid": "a", "prompt": "p", "gold": "7", "sample": "greedy", "text": "six", "answer": "6", "correct": False,
        "format": "partial", "completion_tokens": 5, "finish_reason": "length", "hedges": 2, "meta": {"x": "y"},
        "completion_ids": [1, 2], "logprobs": [-0.5, -1.0],
    })  # fmt: skip
    assert (row["answer"], row["completion"], row["index"], row["step"]) == ("7", "six", "greedy", None)
    assert row["rewards"] == {"correct": 0.0, "format": 0.5}
    assert row["facts"] == {"format": "partial", "hedges": 2, "extracted": "6"}
    assert row["sampler_logprobs"] == [-0.5, -1.0]


@pytest.mark.parametrize(
    "junk", [None, True, "x", 10**400, 1e300, math.inf, [], [[1]], {}, {"a": {}}, -(10**30)]
)
def test_no_value_of_a_wrong_type_gets_through(junk):
    for name in [*ROW, "completion_ids", "sampler_logprobs", "text", "gold", "correct", "a new field"]:
        row = clean({**ROW, name: junk})
        assert isinstance(row["completion"], str)
        assert row["step"] is None or 0 <= row["step"] < 2**53
        assert all(score is None or isinstance(score, float) for score in row["rewards"].values())
        json.dumps(row, allow_nan=False)


def test_damage_is_counted_and_the_rest_is_found(tmp_path):
    found = scan(write(tmp_path, [ROW, b"[1]\n", b"\xff{\n", {**ROW, "step": 9}, b'{"step": 4, "ui']))
    assert (len(found), found.num_bad, found.num_torn) == (2, 2, 1)
    assert found.steps.tolist() == [3, 9]
    assert find_samples(tmp_path) == tmp_path / "samples.jsonl"
    (tmp_path / "samples.jsonl").write_bytes(b"")
    assert find_samples(tmp_path) is None


def test_a_reward_that_begins_later_has_no_score_before(tmp_path):
    found = scan(write(tmp_path, [{**ROW, "rewards": {"a": 1}}, {**ROW, "rewards": {"b": 2}}]))
    assert np.array_equal(found.scores["a"], [1, np.nan], equal_nan=True)
    assert np.array_equal(found.scores["b"], [np.nan, 2], equal_nan=True)
    assert found.reward_names == ["a", "b"]


def test_all_are_chosen_when_they_fit(tmp_path):
    found = run_of(tmp_path, num_steps=7, num_groups=3)
    assert choose(found, 42).tolist() == list(range(42))


def test_whole_groups_are_chosen_evenly_over_the_steps(tmp_path):
    found = run_of(tmp_path, num_steps=40, num_groups=10)
    rows = choose(found, 80)
    assert len(rows) == 80
    assert set(found.steps[rows]) == set(range(1, 41))  # one group of each step
    assert np.bincount(found.groups[rows]).max() == 2
    assert len(np.unique(found.groups[rows] % 10)) > 3  # not always the same place in the step


def test_text_beyond_the_budget_takes_fewer(tmp_path, monkeypatch):
    found = run_of(tmp_path, num_steps=10, num_groups=10)
    monkeypatch.setattr(samples, "MAX_TEXT_BYTES", int(found.sizes.sum()) // 4)
    assert len(choose(found, 1000)) == 50


def test_chunks_open_to_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "CHUNK_CHARACTERS", 1500)
    found = run_of(tmp_path, num_steps=6, num_groups=3)
    rows = choose(found, 18)
    packed = embed(found, rows, None)
    chunks = [unpack(chunk) for chunk in packed["chunks"]]
    columns = unpack(packed["columns"])
    assert len(chunks) > 1
    assert packed["starts"] == np.cumsum([0, *map(len, chunks)])[:-1].tolist()
    opened = [row for chunk in chunks for row in chunk]
    assert [(row["step"], row["uid"], row["index"]) for row in opened] == list(
        zip(columns["step"], columns["uid"], columns["index"], strict=True)
    )
    assert opened[0]["completion"] == ROW["completion"]
    assert columns["id"] == rows.tolist()
    assert columns["scores"]["format"] == [0.5] * 18
    assert not packed["has_logprobs"]


def test_log_probabilities_travel_with_the_texts_of_their_tokens(tmp_path):
    row = {**ROW, "completion_ids": [5, 7, 5], "sampler_logprobs": [-1.0, -0.5, 0.0]}
    found = scan(write(tmp_path, [row, {**row, "sampler_logprobs": [-1.0]}]))
    packed = embed(found, choose(found, 10), lambda index: f"<{index}>")
    assert packed["has_logprobs"]
    assert unpack(packed["vocabulary"]) == {"5": "<5>", "7": "<7>"}
    first, second = unpack(packed["chunks"][0])
    assert first["completion_ids"] == [5, 7, 5]
    assert second["sampler_logprobs"] is None  # their number differs from that of the tokens
    assert unpack(embed(found, choose(found, 10), None)["chunks"][0])[0]["completion_ids"] is None


def test_histograms_count_all_rows_by_ranges_of_steps(tmp_path):
    rows = [
        {**ROW, "step": step, "reward": step / 7, "rewards": {"correct": float(step > 5)}}
        for step in range(1, 11)
        for _ in range(10)
    ]
    rows += [{**ROW, "step": 10, "reward": 0.001 * number, "rewards": {}} for number in range(30)]
    total, right = histograms(scan(write(tmp_path, rows)))
    assert [table["label"] for table in right["ranges"]] == [
        f"steps {2 * k + 1}–{2 * k + 2}" for k in range(5)
    ]
    assert (right["name"], right["few"], right["bars"]) == ("correct", True, ["0", "1"])
    assert [row["shares"] for row in right["ranges"]] == [[1, 0], [1, 0], [0.5, 0.5], [0, 1], [0, 1]]
    assert (total["name"], total["few"], len(total["bars"])) == ("total", False, 20)
    assert [row["count"] for row in total["ranges"]] == [20, 20, 20, 20, 50]
    assert right["marks"] == ["0", "1"]
    long = [{**ROW, "reward": 0.09375 + 0.00025 * (number % 4), "rewards": {}} for number in range(8)]
    (wide,) = histograms(scan(write(tmp_path, long)))
    assert (len(wide["bars"]), wide["marks"]) == (
        4,
        ["0.09375", "0.0945"],
    )  # four would be wider than a phone
    assert all(sum(row["shares"]) == pytest.approx(1) for row in total["ranges"])


def test_the_snippet_is_the_end_in_one_line():
    assert snippet("a\n b") == "a b"
    assert snippet("x" * 1000 + " the end").endswith("the end")
    assert len(snippet("x" * 1000)) < 120


def test_tags_come_from_the_newest_checkpoint_or_the_evaluation(tmp_path):
    tags = {"think_open": "<t>", "think_close": "</t>", "answer_open": "<a>", "answer_close": "</a>"}
    assert find_tags(tmp_path) is None
    for name, opening in (("step_1", "<old>"), ("step_2", "<t>")):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "protocol.json").write_text(json.dumps({"schema": {**tags, "think_open": opening}}))
    assert find_tags(tmp_path) == tags
    identity = {"protocol": {"schema": {**tags, "think_open": "<e>"}}}
    (tmp_path / "eval.json").write_text(json.dumps({"identity": identity}))
    assert find_tags(tmp_path) == {**tags, "think_open": "<e>"}
