"""The index of samples against plain loops over the same rows, while the file grows, is cut, damaged or hostile."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.report import index as index_module
from whet.report.index import MAX_REWARDS, Query, SampleIndex, merge, read_columns

Row = dict[str, Any]


def make_rows(num_steps: int, seed: int = 0, group: int = 4) -> list[Row]:
    """Rows as the log writes them, with rewards that are missing now and then."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for step in range(1, num_steps + 1):
        for problem in range(2):
            for sample in range(group):
                right = rng.choice([0.0, 1.0])
                rows.append(
                    {
                        "step": step,
                        "uid": f"problem-{rng.randrange(3) if problem else step}",
                        "index": sample,
                        "prompt": f"Was ist {step} + {sample}?",
                        "answer": str(step + sample),
                        "completion": rng.choice(["so Ünique", "plain text", 'line\nbreak "quoted"'])
                        + f" {step}",
                        "num_completion_tokens": rng.randrange(100),
                        "finish_reason": rng.choice(["stop", "length"]),
                        "rewards": {"correct": right}
                        | ({"format": rng.random()} if rng.random() < 0.7 else {}),
                        "reward": rng.choice([None, right, 0.5]),
                        "advantage": rng.gauss(0, 1),
                    }
                )
    return rows


def write(path: Path, rows: Sequence[Row], mode: str = "w") -> None:
    with path.open(mode, encoding="ascii") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def opened(path: Path, block_bytes: int = 700) -> SampleIndex:
    found = SampleIndex(path, follow_s=None, block_bytes=block_bytes)
    while found.advance():
        pass
    return found


def key(row: Row) -> tuple[Any, ...]:
    return row["step"], row["uid"], row["index"], row["advantage"]


def test_filters_and_orders_equal_a_plain_loop(tmp_path: Path) -> None:
    rows = make_rows(12)
    write(tmp_path / "s.jsonl", rows)
    found = opened(tmp_path / "s.jsonl")
    tests: list[tuple[Query, Any]] = [
        (Query(step_min=3, step_max=5), lambda row: 3 <= row["step"] <= 5),
        (Query(correct=True), lambda row: row["rewards"]["correct"] == 1),
        (
            Query(correct=False, finish="length"),
            lambda r: r["rewards"]["correct"] == 0 and r["finish_reason"] == "length",
        ),
        (Query(uid="problem-1"), lambda row: row["uid"] == "problem-1"),
        (Query(reward_min=0.5), lambda row: row["reward"] is not None and row["reward"] >= 0.5),
        (Query(reward="format", reward_max=0.4), lambda row: row["rewards"].get("format", 2) <= 0.4),
        (Query(reward="nobody's", reward_min=0.0), lambda row: False),
    ]
    for query, keeps in tests:
        answer = found.find(query)
        kept = [row for row in rows if keeps(row)]
        assert [key(row) for row in answer["rows"]] == [key(row) for row in kept[::-1][:50]], query
        assert answer["total"] == len(kept)
    for order, value in (("reward", lambda r: r["reward"]), ("length", lambda r: r["num_completion_tokens"])):
        for descending in (True, False):
            answer = found.find(Query(order=order, descending=descending, limit=500))
            values = [value({**row, "num_completion_tokens": row["num_tokens"]}) for row in answer["rows"]]
            known = [x for x in values if x is not None]
            assert known == sorted(known, reverse=descending)
            assert values == known + [None] * (len(values) - len(known))  # without a number: last, both ways
    pages = [
        found.find(Query(descending=False, offset=offset, limit=7))["rows"] for offset in range(0, 98, 7)
    ]
    assert [key(row) for page in pages for row in page] == [key(row) for row in rows]


def test_newest_rows_come_before_the_rest_is_read(tmp_path: Path) -> None:
    rows = make_rows(40)
    write(tmp_path / "s.jsonl", rows)
    found = SampleIndex(tmp_path / "s.jsonl", follow_s=None, block_bytes=2000)
    assert found.advance()
    newest = found.find(Query(limit=1))["rows"][0]
    assert key(newest) == key(rows[-1])
    info = found.info()
    assert info["num_indexed"] < 20 < 200 < info["num_samples"] < 500  # of 320: estimated from bytes
    while found.advance():  # asked meanwhile, every sample that it knows is there, in the order of the file
        known = found.find(Query(limit=500, descending=False))["rows"]
        assert [row["id"] for row in known] == sorted(row["id"] for row in known)
        assert all(found.sample(row["id"]) for row in known)
    assert found.info() == {
        "num_samples": 320,
        "num_indexed": 320,
        "num_damaged": 0,
        "steps": [1, 40],
        "rewards": ["correct", "format"],
        "has_logprobs": False,
        "generation": 0,
    }


def test_appended_rows_are_followed_and_a_torn_line_is_waited_for(tmp_path: Path) -> None:
    path, rows = tmp_path / "s.jsonl", make_rows(3)
    found = SampleIndex(path, follow_s=None)  # the file comes later
    assert not found.advance()
    assert found.find(Query()) == {"rows": [], "total": 0, "indexed": 0, "searched": 0, "next": None}
    write(path, rows[:5])
    while found.advance():
        pass
    text = json.dumps(rows[5] | {"sampler_logprobs": [-0.5]})
    for part, count in ((text[:30], 5), (text[30:], 5), ("\n", 6)):
        with path.open("a") as file:
            file.write(part)
        while found.advance():
            pass
        assert found.info()["num_indexed"] == count
    assert found.info()["num_damaged"] == 0
    assert found.info()["has_logprobs"]


def test_a_thread_follows_by_itself(tmp_path: Path) -> None:
    write(tmp_path / "s.jsonl", make_rows(2))
    found = SampleIndex(tmp_path / "s.jsonl", follow_s=0.01)
    write(tmp_path / "s.jsonl", make_rows(1), "a")
    deadline = time.monotonic() + 20
    while found.info()["num_indexed"] < 24 and time.monotonic() < deadline:
        time.sleep(0.01)
    found.close()
    assert found.info()["num_indexed"] == 24


def test_a_resumed_run_is_indexed_again(tmp_path: Path) -> None:
    path, rows = tmp_path / "s.jsonl", make_rows(6)
    write(path, rows)
    found = opened(path)
    last = found.find(Query(limit=1))["rows"][0]["id"]
    write(tmp_path / "new", rows[:24])  # as the log does: written beside it, then put in its place
    (tmp_path / "new").replace(path)
    write(path, make_rows(9, seed=1)[24:], "a")  # longer than before, and other rows
    while found.advance():
        pass
    info = found.info()
    assert (info["num_indexed"], info["generation"]) == (72, 1)
    assert last not in [row["id"] for row in found.find(Query(limit=100))["rows"]]
    assert found.sample(last) is None
    write(path, rows[:2])  # cut in place
    while found.advance():
        pass
    assert (found.info()["num_indexed"], found.info()["generation"]) == (2, 2)
    path.unlink()
    assert not found.advance()
    assert (found.info()["num_indexed"], found.info()["generation"]) == (0, 3)


def test_overwritten_in_place_with_the_same_length_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"step": 1, "uid": "a"}\n')
    found = opened(path)
    path.write_text('{"step": 2, "uid": "b"}\n')
    while found.advance():
        pass
    assert found.info()["steps"] == [2, 2]
    assert found.find(Query(uid="b"))["total"] == 1


def test_damaged_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(1)
    lines = [
        json.dumps(rows[0]),
        "{not json",
        "[1, 2]",
        "",
        "\x00\x00",
        '{"a":' * 5000,
        json.dumps(rows[1]) + "\r",
        "9" * 9000,
    ]
    (tmp_path / "s.jsonl").write_text("\n".join([*lines, json.dumps(rows[2])]) + "\n", newline="")
    found = opened(tmp_path / "s.jsonl", block_bytes=1 << 16)
    assert [key(row) for row in found.find(Query())["rows"]] == [key(rows[n]) for n in (2, 1, 0)]
    assert found.info()["num_damaged"] == 5  # the empty line is none
    monkeypatch.setattr(index_module, "MAX_LINE_BYTES", 1000)  # now two lines are too long to be read whole
    again = opened(tmp_path / "s.jsonl", block_bytes=500)
    assert [key(row) for row in again.find(Query())["rows"]] == [key(rows[n]) for n in (2, 1, 0)]
    assert again.info()["num_damaged"] > 5  # a line in pieces counts more than once


def test_search_equals_a_plain_loop_in_slices(tmp_path: Path) -> None:
    path, rows = tmp_path / "s.jsonl", make_rows(10)
    write(path, rows)
    found = opened(path)
    for text, query in (
        ("ünique", Query(text="ünique")),
        ("WAS IST 7", Query(text="WAS IST 7", correct=True)),
        ('break "quoted"', Query(text='break "quoted"', order="length")),
        ("line\nbreak", Query(text="line\nbreak", descending=False)),
        ("u00fc", Query(text="u00fc")),
        ("uid", Query(text="uid")),  # a key of every row, in no text
    ):
        chosen = [
            r["id"]
            for r in found.find(
                Query(correct=query.correct, order=query.order, descending=query.descending, limit=500)
            )["rows"]
        ]
        wanted = []
        for place in chosen:
            sample = found.sample(place)
            assert sample is not None
            if any(text.lower() in sample[name].lower() for name in ("prompt", "answer", "completion")):
                wanted.append(place)
        got, after, calls = [], None, 0
        while calls == 0 or after is not None:
            answer = found.find(query, after=after, seconds=0.0)  # one sample a call
            got += answer["rows"]
            after, calls = answer["next"], calls + 1
            assert answer["searched"] == calls
        assert [row["id"] for row in got] == wanted
        assert calls == len(chosen) == answer["total"]
        assert all(" ".join(text.lower().split()) in row["snippet"].lower() for row in got)
    assert len(found.find(Query(text="WAS IST"))["rows"]) == 50


def test_a_search_goes_on_while_rows_are_appended(tmp_path: Path) -> None:
    path, rows = tmp_path / "s.jsonl", make_rows(4)
    write(path, rows)
    found = opened(path)
    first = found.find(Query(text="was", limit=5))
    write(path, make_rows(2), "a")
    while found.advance():
        pass
    second = found.find(Query(text="was", limit=500), after=first["next"])
    assert [key(row) for row in first["rows"] + second["rows"]] == [key(row) for row in rows[::-1]]


def test_a_group_is_the_samples_of_a_problem_and_step(tmp_path: Path) -> None:
    rows = make_rows(5)
    random.Random(0).shuffle(rows)
    write(tmp_path / "s.jsonl", rows)
    found = opened(tmp_path / "s.jsonl")
    first = found.find(Query(limit=1))["rows"][0]
    members = [found.sample(place) for place in found.group(first["id"])]
    same = [row for row in rows if (row["step"], row["uid"]) == (first["step"], first["uid"])]
    assert [m["index"] for m in members if m] == sorted(row["index"] for row in same)
    assert found.group(first["id"] + 1) == []
    assert found.sample(first["id"] + 1) is None


def test_hostile_values_make_no_row_unreadable(tmp_path: Path) -> None:
    rows: list[Row] = [
        {},
        {
            "step": 10**30,
            "uid": ["x"],
            "index": -(10**40),
            "reward": 1e300,
            "rewards": {"a": "<b>", "b": True},
        },
        {
            "step": "1",
            "uid": None,
            "rewards": [1],
            "reward": {"x": 1},
            "num_completion_tokens": 2**63,
            "completion": 5,
        },
        {"step": 2, "rewards": {f"r{n}": n for n in range(500)}, "finish_reason": {"a": []}},
        {"step": 3, "completion_ids": "no", "sampler_logprobs": [1], "advantage": float("nan")},
    ]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = opened(tmp_path / "s.jsonl")
    assert found.info()["num_indexed"] == 5
    assert len(found.info()["rewards"]) == MAX_REWARDS
    for order in ("step", "reward", "length", "advantage"):
        assert found.find(Query(order=order, text="5"))["searched"] == 5
        assert found.find(Query(order=order))["total"] == 5
    assert found.find(Query(reward_max=-1e308))["total"] == found.find(Query(step_min=10**20))["total"] == 0


@pytest.mark.parametrize(
    "options", [{"order": "size"}, {"offset": -1}, {"limit": 0}, {"limit": 10**6}, {"offset": 10**30}]
)
def test_a_query_beyond_bounds_is_refused_in_one_line(options: Row) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(options))} = .*: expected [^\n]+$"):
        Query(**options)


def test_a_million_samples_fit_into_200_mb() -> None:
    rows = make_rows(50)
    for row in rows:
        row["rewards"] |= {f"reward {n}": 0.5 for n in range(6)}
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    columns, _, _ = read_columns(data, 0)
    num_bytes = sum(column.nbytes for column in merge([dict(columns), dict(columns)]).values()) / (
        2 * len(rows)
    )
    assert num_bytes <= 100  # of a row; while parts are joined one column is there twice
    assert max(column.nbytes for column in columns.values()) <= 8 * len(rows)
    assert columns["reward"].dtype == np.float32
