"""`whet compare`: small evaluations with known answers, the sources' tables, and mistakes a user makes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from needs import BROWSERS, needs, program

from whet import cli
from whet.eval.compare.asked import read_prompts
from whet.eval.compare.compare import CompareConfig, check, locate, main, plan, short_names
from whet.eval.compare.page import change, hardware_table, lengths
from whet.eval.confidence import count_hedges, count_revisions
from whet.eval.evaluate import EvalConfig
from whet.eval.record import StoredEval
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.rewards.answers.equal import answers_equal
from whet.schema import SCHEMAS
from whet.types import UserError

REASONING = SCHEMAS["reasoning_answer"]
PROTOCOL = {"schema": {"think_open": "<think>"}, "system_prompt": False}
IDENTITY = {"protocol": PROTOCOL, "task": {"name": "arithmetic"}, "split": "test", "sampling": {"top_k": 0}}
LENGTHS = ["format", "thinking tokens", "completion tokens"]
HOSTILE = "</script><script>alert(1)</script>\x1b[31m\u202e"


def completion(uid: str, sample: int | str, correct: bool, **more: Any) -> dict[str, Any]:
    answer = "7" if correct else "8"
    row = {
        "uid": uid,
        "prompt": f"what is {uid}?",
        "gold": "7",
        "meta": {},
        "sample": sample,
        "correct": correct,
    }
    text = f"so</think><answer>{answer}</answer>"
    row |= {
        "text": text,
        "answer": answer,
        "answer_from": "schema",
        "format": "perfect",
        "finish_reason": "stop",
    }
    return row | {"thinking_tokens": 5, "completion_tokens": 9} | more


def evaluation(folder: Path, rights: Sequence[int], *, prefix: str = "p", **summary: Any) -> Path:
    """Write an evaluation: so many of two samples of each problem are right; the greedy one when any is."""
    folder.mkdir(parents=True)
    rows = []
    for place, count in enumerate(rights):
        uid = f"{prefix}{place:03d}"
        rows.append(completion(uid, "greedy", count > 0))
        rows += [completion(uid, index, index < count) for index in range(2)]
    write(folder, rows, **summary)
    return folder


def write(folder: Path, rows: Sequence[dict[str, Any]], **summary: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    greedy = [row for row in rows if row["sample"] == "greedy"]
    content = {
        "label": folder.name,
        "remark": "",
        "num_problems": len(greedy),
        "num_samples": (len(rows) - len(greedy)) // len(greedy),
        "metrics": {},
        "identity": IDENTITY,
    }
    (folder / "eval.json").write_text(json.dumps(content | summary))
    (folder / "eval_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(out: Path, *models: Path, **fields: Any) -> dict[str, Any]:
    main(CompareConfig(models=tuple(map(str, models)), out=str(out), **fields))
    return json.loads((out / "compare.json").read_text())


def page_data(page: str, name: str) -> Any:
    return json.loads(page.partition(f'id="data-{name}">')[2].partition("</script>")[0])


def metric(content: dict[str, Any], name: str, table: int = 0) -> dict[str, Any]:
    return next(row for row in content["tables"][table]["rows"] if row["metric"] == name)


def test_only_problems_that_both_have_are_compared_and_the_rest_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = evaluation(tmp_path / "a", [2, 0, 0, 1, 0, 0, 0, 0, 0, 0])
    b = evaluation(tmp_path / "b", [0, 2, 2, 2, 2, 2, 2, 2, 2])
    content = run(tmp_path / "out", a, b)
    assert [model["left_out"] for model in content["models"]] == [1, 0]
    assert content["verdicts"] == [{"both right": 1, "fixed": 7, "broken": 1, "both wrong": 0}]
    assert metric(content, "pass@1")["difference"]["mean"] == pytest.approx((16 - 3) / 18)
    assert metric(content, "greedy")["flips"] == [1, 7]
    assert content["pass@k"] == {
        "a": [pytest.approx(3 / 18), pytest.approx(2 / 9)],
        "b": [pytest.approx(8 / 9)] * 2,
    }
    assert content["lengths"]["a"]["right"] == {"count": 3, "thinking_tokens": 5.0, "completion_tokens": 9.0}
    rows = [completion(uid, s, True, thinking_tokens=n) for uid, n in (("p", 2), ("q", 8)) for s in range(2)]
    side = StoredEval(a, "a", {}, {"p": rows[:2], "q": [rows[2], rows[3] | {"correct": False}]}, {})
    assert lengths(side, ["p", "q"])["right"]["thinking_tokens"] == 5.0  # each problem counts once
    out = capsys.readouterr().out
    assert "1 of its problems are not in all, skipped" in " ".join(out.split())
    assert "hardware: not recorded" in out
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "not recorded" in page
    verdicts = [row["columns"][1]["rows"][0]["correct"] for row in page_data(page, "transcripts")]
    assert verdicts == [False, *[True] * 8]


@pytest.mark.parametrize("thinking", [5, 9])
def test_models_that_do_not_think_are_not_compared_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], thinking: int
) -> None:
    """Of a plain chat all tokens count as thinking: the same row twice."""
    for name in "ab":
        rows = [
            completion(uid, s, uid == "p", thinking_tokens=thinking) for uid in "pq" for s in ("greedy", 0, 1)
        ]
        write(tmp_path / name, rows)
    run(tmp_path / "out", tmp_path / "a", tmp_path / "b")
    told = capsys.readouterr().out
    assert "completion tokens" in told
    assert ("thinking tokens" in told) == (thinking == 5)


def test_other_protocols_are_refused_and_by_force_get_a_banner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = evaluation(tmp_path / "a", [1, 2])
    b = evaluation(tmp_path / "b", [1, 2], identity=IDENTITY | {"split": "dev", "sampling": {"top_k": 5}})
    with pytest.raises(
        UserError, match=r"not comparable: sampling\.top_k \(0, 5\); split .*--force"
    ) as caught:
        run(tmp_path / "out", a, b)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    content = run(tmp_path / "out", a, b, force=True)
    assert content["different"] == ["sampling.top_k (0, 5)", 'split ("test", "dev")']
    page = (tmp_path / "out" / "compare.html").read_text()
    assert 'class="alarm"' in page
    assert "NOT COMPARABLE" in capsys.readouterr().out
    alike = evaluation(tmp_path / "c", [1, 2])
    run(tmp_path / "out2", a, alike)
    assert 'class="alarm"' not in (tmp_path / "out2" / "compare.html").read_text()


def test_three_models_get_a_matrix_and_a_correction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [evaluation(tmp_path / name, [n] * 7 + [0, 2]) for name, n in (("a", 0), ("b", 2), ("c", 2))]
    content = run(tmp_path / "out", *folders)
    greedy = metric(content, "greedy")
    assert (greedy["p"], greedy["p_holm"]) == (pytest.approx(2 / 2**7), pytest.approx(4 / 2**7))
    assert [(table["against"], table["name"]) for table in content["tables"]] == [("a", "b"), ("b", "c")]
    assert content["verdicts"][1] == {"both right": 8, "fixed": 0, "broken": 0, "both wrong": 1}
    assert content["verdict"] == (
        "b is better than a (+77.8 points); between b and c no difference could be shown (+0.0 points): "
        "11.1 → 88.9 → 88.9 % of the sampled answers to 9 problems are right."
    )
    means = [[cell and cell["mean"] for cell in cells] for cells in content["matrix"]]
    assert means[0] == [None, pytest.approx(-7 / 9), pytest.approx(-7 / 9)]
    assert means[1][0] == pytest.approx(7 / 9)
    assert means[1][2] == means[2][1] == 0
    out = capsys.readouterr().out
    assert "row minus column" in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("page: ")) <= 80
    assert "vote share" not in out  # six metrics; the others are folded on the page
    page = (tmp_path / "out" / "compare.html").read_text()
    assert page_data(page, "pairs") == [[0, 1], [1, 2]]
    first = page.partition("<h2>b against a</h2>")[2].partition("</div>")[0]
    assert re.findall(r"<tr>\s*<td>([^<]+)", first) == ["pass@1", "greedy", "maj@2", *LENGTHS]
    assert '<strong class="muted">0 broken</strong>' in page
    assert "weights" not in page.partition("<main>")[2]  # no evaluation recorded any: no column of nothing


@pytest.mark.parametrize(
    ("rights", "verdict"),
    [
        ([1, 1, 1, 1], "a is right most often (50.0 %): no difference from the other 3 could be shown."),
        ([2, 0, 0, 0], "a is right most often (100.0 %): better than the other 3."),
        (
            [0, 2, 2, 0],
            "b is right most often (100.0 %): better than a and d; no difference from c could be shown.",
        ),
    ],
)
def test_the_verdict_of_many_names_the_beaten_and_the_equal_even_if_there_are_none(
    tmp_path: Path, rights: list[int], verdict: str
) -> None:
    folders = [evaluation(tmp_path / name, [count] * 12) for name, count in zip("abcd", rights, strict=True)]
    assert run(tmp_path / "out", *folders)["verdict"].startswith(verdict)


def test_checkpoints_of_a_run_get_one_chart_over_steps_and_the_best_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rights = {5: [0] * 9, 10: [2] * 8 + [0], 15: [2] * 8 + [1], 100: [2] * 7 + [0] * 2}
    folders = [evaluation(tmp_path / f"step_{step:08}", counts) for step, counts in rights.items()]
    content = run(tmp_path / "out", *folders)
    assert content["steps"] == [5, 10, 15, 100]
    assert content["verdict"] == (
        "step_15 is right most often (94.4 %): better than step_5; no difference from step_10 and step_100 could be "
        "shown. 0.0 → 88.9 → 94.4 → 77.8 % of the sampled answers to 9 problems are right."
    )
    assert [row["model"] for row in content["overview"]] == ["step_5", "step_10", "step_15", "step_100"]
    assert [row["from the one before"] for row in content["overview"]] == ["", "+88.9", "+5.6", "-16.7"]
    page = (tmp_path / "out" / "compare.html").read_text()
    lines = page_data(page, "steps")["lines"]
    assert lines["right, sampled"]["mean"] == pytest.approx([0, 8 / 9, 17 / 18, 7 / 9])
    assert '<div id="steps"' in page
    assert 'class="bars"' not in page.partition("<main>")[2]
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if not line.startswith("page: ")) <= 80
    assert "row minus column" not in out  # a row for each model; every pair is on the page
    assert [line.split()[0] for line in out.splitlines() if line.startswith(" step_")] == [
        f"step_{step}" for step in rights
    ]
    twin = evaluation(tmp_path / "other" / "step_5", [0] * 9)
    assert run(tmp_path / "two", folders[1], folders[2], twin)["steps"] is None  # of another run


def test_labels_are_compared_one_by_one(tmp_path: Path) -> None:
    folders = []
    for name, levels in (("a", (0, 2)), ("b", (2, 1))):
        rows = []
        for place in range(12):
            count, meta = levels[place % 2], {"level": str(place % 2 + 1), "source": "x"}
            rows += [
                completion(f"p{place}", s, s == "greedy" or s < count, meta=meta) for s in ("greedy", 0, 1)
            ]  # type: ignore[operator]
        write(tmp_path / name, rows)
        folders.append(tmp_path / name)
    content = run(tmp_path / "out", *folders)
    assert list(content["by"]) == ["level"]
    one, two = content["by"]["level"]
    assert (one["value"], one["num_problems"], one["cells"][0]["difference"]["mean"]) == ("1", 6, 1.0)
    assert two["cells"][0]["difference"]["mean"] == -0.5


def window(power: float, activity: float, temperature: float, *, seconds: float = 10.0) -> dict[str, Any]:
    sensors = {
        "utilisation": 1.0,
        "memory_activity": activity,
        "power_w": power,
        "temperature_c": temperature,
    }
    device: dict[str, Any] = {"id": "gpu0", "name": "MI300X", "kind": "gpu", "memory_gib": None}
    device |= {name: {"mean": value, "max": value} for name, value in sensors.items()}
    device["energy_j"] = power * seconds
    return {"seconds": seconds, "num_samples": 20, "devices": [device], "absent": {}}


def summary(hardware: dict[str, Any] | None, tokens: int) -> dict[str, Any]:
    return {"num_problems": 3, "num_samples": 1, "tokens": {"completion": tokens}, "hardware": hardware}


def test_source_000_hardware_table_is_reproduced() -> None:
    # S0-14: utilisation 100 / 100 %, memory activity 13 / 6, power 394 / 320 W, temperature 41 / 38 degrees.
    table = hardware_table([summary(window(394, 0.13, 41), 600), summary(window(320, 0.06, 38), 300)])
    rows = {row["name"]: row for row in table}
    assert rows["power"]["changes"] == ["-74 W, -18.8 % (of 394); in reverse +74 W, +23.1 % (of 320)"]
    assert rows["memory activity"]["changes"][0].startswith("-7 points, -53.8 % (of 13)")
    assert rows["temperature"]["changes"] == ["-3 °C"], "a percentage of degrees means nothing"
    assert rows["utilisation"]["changes"] == ["+0 points"]
    assert rows["speed"]["values"] == [60.0, 30.0]
    assert rows["energy per token"]["values"] == [pytest.approx(3940 / 600), pytest.approx(3200 / 300)]
    assert rows["energy per request"]["values"] == [pytest.approx(3940 / 6), pytest.approx(3200 / 6)]
    assert rows["memory used by all programs"]["values"] == [None, None]


def test_a_side_without_sensors_is_not_recorded_and_never_zero() -> None:
    table = hardware_table([summary(None, 600), summary(window(320, 0.06, 38), 300)])
    rows = {row["name"]: row for row in table}
    assert (rows["power"]["values"], rows["power"]["changes"]) == ([None, 320.0], [None])
    assert rows["speed"]["values"] == [None, 30.0]
    assert hardware_table([summary(None, 0), summary(None, 0)]) == []
    assert change(0.0, 5.0, "W") == "+5 W", "no percentage of nothing"


def test_two_devices_add_up_in_watts_and_average_in_percent() -> None:
    both = window(100, 0.2, 40)
    both["devices"] += window(50, 0.4, 60)["devices"]
    both["devices"].append({"id": "cpu", "name": "x", "kind": "cpu", "power_w": {"mean": 9}, "energy_j": 1.0})
    rows = {row["name"]: row["values"][0] for row in hardware_table([summary(both, 10), summary(None, 1)])}
    assert (rows["power"], rows["memory activity"], rows["temperature"]) == (150.0, pytest.approx(30.0), 50.0)


def test_source_000_transcripts_get_their_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # S0-07 to S0-10 and S0-16: format partial and wrong, then perfect and right, with fewer hedges and tokens.
    texts = json.loads((Path(__file__).parent / "seed_000.json").read_text())
    for name, text in texts.items():
        parsed = REASONING.parse(text)
        more = {
            "text": text,
            "answer": parsed.answer,
            "format": parsed.verdict,
            "completion_tokens": len(text.split()),
            "thinking_tokens": len((parsed.thinking or text).split()),
            "hedges": count_hedges(text),
            "revisions": count_revisions(text, REASONING),
        }
        right = parsed.answer is not None and answers_equal("[60, 270, 90, 180]", parsed.answer)
        protocol = {
            "schema": {"think_open": "<reasoning>", "think_close": "</reasoning>", "opening_in_prompt": False}
        }
        rows = [completion("q", sample, right, **more) for sample in ("greedy", 0)]
        write(tmp_path / name, rows, identity=IDENTITY | {"protocol": protocol})
    content = run(tmp_path / "out", tmp_path / "base", tmp_path / "rl")
    page = (tmp_path / "out" / "compare.html").read_text()
    base, trained = (column["rows"][0] for column in page_data(page, "transcripts")[0]["columns"])
    assert (base["format"], base["correct"], base["answer"]) == ("partial", False, "600")
    assert (trained["format"], trained["correct"], trained["answer"]) == ("perfect", True, "60\n270\n90\n180")
    assert "text" in base
    assert trained["thinking"].startswith("\nWe are given a matrix operation")
    assert base["hedges"] >= 10 > trained["hedges"]
    assert base["tokens"] > 3 * trained["tokens"]
    assert content["tables"][0]["reasoning"].endswith("one problem is an anecdote: nothing can be shown")
    assert content["verdicts"][0]["fixed"] == 1
    assert "anecdote" in capsys.readouterr().out


def test_what_a_model_wrote_is_text_in_page_and_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", f"b[bold]{chr(27)}[2J"):
        more = {
            "text": HOSTILE,
            "answer": HOSTILE,
            "prompt": HOSTILE,
            "gold": HOSTILE,
            "meta": {"level": HOSTILE},
        }
        rows = [completion("q", sample, False, **more) for sample in ("greedy", 0)]
        write(tmp_path / name, rows, remark=HOSTILE)
    run(tmp_path / "out", *[path for path in tmp_path.iterdir() if path.name != "out"])
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "<script>alert" not in page
    assert page_data(page, "transcripts")[0]["columns"][0]["rows"][0]["text"] == HOSTILE
    out = capsys.readouterr().out
    assert not {"\x1b", "\u202e"} & set(out)
    assert "[bold]" in out


def test_the_page_is_bounded_and_says_what_it_left_out(tmp_path: Path) -> None:
    a, b = (evaluation(tmp_path / name, [1] * 30) for name in "ab")
    long = completion("p000", "greedy", True, text="x" * 50_000, format="none")
    loose = completion("p000", 0, True, text="so</think>, I say <answer>7</answer>", format="partial")
    lines = (a / "eval_samples.jsonl").read_text().splitlines()
    (a / "eval_samples.jsonl").write_text("\n".join([json.dumps(long), json.dumps(loose), *lines[2:]]) + "\n")
    run(tmp_path / "out", a, b, shown_problems=4, shown_samples=1)
    page = (tmp_path / "out" / "compare.html").read_text()
    shown = page_data(page, "transcripts")
    assert [len(column["rows"]) for problem in shown for column in problem["columns"]] == [2] * 8
    first, second = shown[0]["columns"][0]["rows"]
    assert (len(first["text"]), first["left_out"]) == (20_000, 30_000)
    assert second["text"] == loose["text"], "what stands outside perfect tags is shown as it was written"
    assert "26 more problems are not on this page" in page
    assert len(page) < 300_000


@pytest.mark.ci
@pytest.mark.usefixtures("few_problems")
def test_models_are_evaluated_first_and_again_only_where_needed(
    tmp_path: Path, tiny_policy: PolicyConfig
) -> None:
    for seed in (0, 1):
        load_policy(tiny_policy, seed=seed).save(tmp_path / f"m{seed}")
    start = EvalConfig(
        out="-", policy=tiny_policy, num_problems=6, num_samples=2, sampling=SamplingParams(max_new_tokens=8)
    )
    content = run(tmp_path / "out", tmp_path / "m0", tmp_path / "m1", eval=replace(start, hardware=False))
    assert len(content["uids"]) == 6
    assert (tmp_path / "out" / "evals" / "m1" / "eval.json").is_file()
    hashes = [model["model"]["sha256"] for model in content["models"]]
    assert len(set(hashes)) == 2
    # An evaluation folder beside a model says how the model is evaluated.
    again = run(tmp_path / "out2", tmp_path / "out" / "evals" / "m0", tmp_path / "m1")
    assert again["tables"][0]["rows"] == content["tables"][0]["rows"]
    out, written = tmp_path / "out", (tmp_path / "out" / "evals" / "m1" / "eval.json").stat().st_mtime_ns
    (out / "compare.html").unlink()
    main(cli.load_yaml(out / "config.yaml", CompareConfig), resume=True)
    assert (out / "compare.html").is_file()
    assert (out / "evals" / "m1" / "eval.json").stat().st_mtime_ns == written


def test_own_prompts_get_transcripts_and_no_score(
    tmp_path: Path, tiny_policy: PolicyConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        load_policy(tiny_policy, seed=seed).save(tmp_path / f"m{seed}")
    (tmp_path / "asked.txt").write_text("1+1=\n\n2+2=\n")
    content = run(
        tmp_path / "out",
        tmp_path / "m0",
        tmp_path / "m1",
        prompts=(str(tmp_path / "asked.txt"), "3+3="),
        prompt_samples=2,
        sampling=SamplingParams(max_new_tokens=6),
    )
    assert content["tables"] == []
    page = (tmp_path / "out" / "compare.html").read_text()
    asked = page_data(page, "transcripts")
    assert [problem["prompt"] for problem in asked] == ["1+1=", "2+2=", "3+3="]
    rows = asked[0]["columns"][0]["rows"]
    assert [row["sample"] for row in rows] == ["greedy", 0, 1]
    assert {row["correct"] for row in rows} == {None}
    assert "pass@1" not in page.partition("</table>")[0]
    assert len((tmp_path / "out" / "m1.jsonl").read_text().splitlines()) == 9
    assert "1+1=" in capsys.readouterr().out


def test_prompts_come_from_texts_and_files(tmp_path: Path) -> None:
    rows = tmp_path / "p.jsonl"
    rows.write_text('{"prompt": "a\\nb"}\n{"prompt": "c"}\n')
    assert read_prompts([str(rows), "What is the sqrt of 101?"]) == ["a\nb", "c", "What is the sqrt of 101?"]
    assert read_prompts(["x" * 5000]) == ["x" * 5000]


def test_names_are_as_short_as_they_can_be() -> None:
    assert short_names(["a/step_00000002", "a/step_00000010"]) == ["step_2", "step_10"]
    assert short_names(["a/step_2", "a/step_02"]) == ["step_2", "step_02"]
    assert short_names(["/x/eval/base", "runs/rl/"]) == ["base", "rl"]
    assert short_names(["/x/a/eval", "/x/b/eval"]) == ["a/eval", "b/eval"]
    assert short_names(["b", "/a/b"]) == ["b", "a/b"]


def test_plan_makes_nothing(tmp_path: Path) -> None:
    a, b = (evaluation(tmp_path / name, [1]) for name in "ab")
    text = plan(CompareConfig(models=(str(a), str(b)), prompts=("x",)))
    assert "read" in text
    assert not (tmp_path / "runs").exists()


def test_ten_mistakes_each_get_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = evaluation(tmp_path / "a", [1, 0]), evaluation(tmp_path / "b", [1, 2])
    other = evaluation(tmp_path / "other", [1, 2], prefix="q")
    group = tmp_path / "demo"
    evaluation(group / "eval" / "sft", [1])
    torn = evaluation(tmp_path / "torn", [1, 2])
    with (torn / "eval_samples.jsonl").open("a") as file:
        file.write('{"uid": "p')
    (tmp_path / "file.txt").write_text("\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "compare.json").write_text("{}")
    (tmp_path / "runs").mkdir()
    cases: list[tuple[Sequence[str | Path], dict[str, Any], str]] = [
        ((), {}, "name two models"),
        ((a,), {}, "expected two or more"),
        ((a, a), {}, "is given twice"),
        ((a, tmp_path / "nowhere" / "x"), {}, "no such run or folder"),
        ((a, "nowhere-20260101"), {}, "no such run or folder"),
        ((a, group), {}, f"it contains evaluations, name them: {group / 'eval' / 'sft'}"),
        ((a, tmp_path / "file.txt"), {}, "is a file; expected the folder"),
        ((a, torn), {}, "line 7 is damaged"),
        ((a, other), {}, "no problem in common"),
        ((model, tmp_path / "b"), {"eval": None}, "no config.yaml|give the protocol: --eval gsm8k"),
        ((a, b), {"shown_problems": 0}, "shown_problems = 0: expected 1 or more"),
        ((a, b), {"out": str(tmp_path / "taken")}, "already exists and is never overwritten"),
        ((a, b), {"prompts": ("questions.txt",)}, "no such file 'questions.txt'"),
        ((a, b), {"prompts": (str(tmp_path / "file.txt"),)}, "has no line to ask"),
        ((a, b), {"prompts": ("hello",)}, "with --prompts name the model"),
    ]
    for models, fields, message in cases:
        options: dict[str, Any] = {"out": str(tmp_path / "out")} | fields
        with pytest.raises(ValueError, match=message.split("|")[-1]) as caught:
            main(CompareConfig(models=tuple(map(str, models)), **options))
        assert "\n" not in str(caught.value), models
        assert not (tmp_path / "out").exists(), message


def test_hub_names_and_run_ids_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert locate("smollm2") == "smollm2"
    made = tmp_path / "runs" / "rl-one"
    (made / "checkpoints").mkdir(parents=True)
    (made / "provenance.json").write_text('{"run_id": "rl-one-20260101-000000-abcdef"}')
    assert locate("rl-one-20260101") == "runs/rl-one"
    with pytest.raises(UserError, match="not a hub name"):
        locate("runs/rl-two")


@pytest.mark.ci
@needs("browser")
def test_the_page_filters_searches_and_turns_in_a_browser(tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    a = evaluation(tmp_path / "a", [0] * 14 + [2] * 3)
    b = evaluation(tmp_path / "b", [2] * 14 + [0] * 2 + [1])
    rows = [json.loads(line) for line in (b / "eval_samples.jsonl").read_text().splitlines()]
    rows[0] |= {"text": HOSTILE, "format": "none", "prompt": HOSTILE, "answer_logprob": -0.5, "hedges": 3}
    write(b, rows)
    run(tmp_path / "out", a, b)
    with sync_api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
        browser = playwright.chromium.launch(executable_path=program(*BROWSERS), args=options)
        page = browser.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(dialog.message))
        page.goto((tmp_path / "out" / "compare.html").as_uri())
        assert page.inner_text("#place") == "1–10 of 17"
        assert "<script>alert(1)</script>\\x1b[31m\\u202e" in page.inner_text(".side-2 >> nth=0")
        assert (
            "-0.500 nats per token (probability 0.607); hedges 3; revisions not recorded"
            in page.inner_text(".side-2 >> nth=0")
        )
        assert page.inner_text(".problem .badge >> nth=0") == "greedy: fixed"
        page.click("#next")
        assert page.inner_text("#place") == "11–17 of 17"
        page.select_option("#verdict", "broken")
        assert page.locator(".problem .prompt").all_inner_texts() == ["what is p014?", "what is p015?"]
        page.select_option("#verdict", "")
        page.fill("#search", "P003")
        assert page.locator(".problem").count() == 1
        page.click(".problem summary")
        opened = page.locator(".problem details").first.locator(".answer")
        opened.nth(1).wait_for()  # a toggle event comes later than the click
        assert opened.count() == 2
        page.fill("#search", "")
        page.select_option("#format", "none")
        assert page.locator(".problem").count() == 1
        assert page.locator("#curves canvas").count() == 1
        assert faults == []
        browser.close()


@pytest.mark.ci
def test_runs_are_compared_on_the_task_that_they_were_trained_on(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, task in (("sft", "arithmetic"), ("rl", "arithmetic"), ("other", "products")):
        load_policy(tiny_policy, seed=len(name)).save(tmp_path / name)
        fields = {"out": name, "task": {"name": task}, "turns": "all", "sampling": {"max_new_tokens": 12}}
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(fields))
    check(CompareConfig(models=(str(tmp_path / "sft"), str(tmp_path / "rl"))), resume=False)
    assert capsys.readouterr().out.count("200 problems of task arithmetic") == 2
    with pytest.raises(
        UserError, match=r"trained on different tasks \(.*sft: arithmetic, .*other: products\)"
    ):
        check(CompareConfig(models=(str(tmp_path / "sft"), str(tmp_path / "other"))), resume=False)
    config = CompareConfig(models=(str(tmp_path / "sft"), str(tmp_path / "rl")), out=str(tmp_path / "out"))
    main(config)
    assert "evaluated on arithmetic/test, as trained" in capsys.readouterr().out
    stored = json.loads((tmp_path / "out/compare.json").read_text())
    assert len(stored["uids"]) == 200


@pytest.mark.parametrize(
    "identity", [7, "x", [1], {"protocol": 7}, {"protocol": [1]}, {"protocol": {"date": 7}}]
)
def test_an_identity_of_somebody_s_own_is_one_line(identity: Any, tmp_path: Path) -> None:
    odd = evaluation(tmp_path / "odd", [1, 0], identity=identity)
    sound = evaluation(tmp_path / "sound", [1, 0])
    with pytest.raises(UserError):
        run(tmp_path / "out", odd, sound)
