"""`whet report`: the page of every kind and state of run folder, and one clear line for what is no run."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import pytest

from whet.report.html import ReportConfig, main
from whet.report.part import differences, facts, find_parts, read_part
from whet.report.stages import Stage, tell
from whet.stats import Interval
from whet.types import UserError

HOSTILE = "<script>alert(1)</script>\x1b[31m</script><!-- \u202e"


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch):
    """Leave report.md and its PNG plots to the test that looks at them."""

    def write(folder, part=None):
        (folder / "report.md").write_text("stub")
        return folder / "report.md"

    monkeypatch.setattr("whet.report.html.write_report", write)


def metric_rows(num_steps, *, stage="rl", start_s=1.0e9):
    return [
        {
            "stage": stage,
            "step": step,
            "time_s": start_s + 10 * step,
            f"{stage}/loss": 2.0 / step,
            f"{stage}/grad_norm": 1.0,
            **({"rl/correct": step / num_steps, "rl/truncated": 0.5} if stage == "rl" else {}),
        }
        for step in range(1, num_steps + 1)
    ]


def sample_rows(num_steps):
    rng = random.Random(0)
    return [
        {
            "step": step,
            "uid": f"{step}-{group}",
            "index": index,
            "prompt": f"say {HOSTILE}",
            "answer": "7",
            "completion": f"{HOSTILE} number {rng.random()}",
            "num_completion_tokens": 9,
            "finish_reason": "stop",
            "reward": 0.1 + right,
            "advantage": 0.0,
            "rewards": {"correct": right, HOSTILE: -1.0},
        }
        for step in range(1, num_steps + 1)
        for group in range(3)
        for index in range(2)
        for right in [float(rng.random() < step / num_steps)]
    ]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder, *, num_steps=20, finished=True, start_s=1.0e9, config="num_steps: 20\nseed: 1\n"):
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", metric_rows(num_steps, start_s=start_s))
    write_lines(folder / "samples.jsonl", sample_rows(num_steps))
    (folder / "config.yaml").write_text(config)
    (folder / "environment.json").write_text(json.dumps({"cpu": HOSTILE, "num_cpus": 2, "torch": "2"}))
    if finished:
        (folder / "summary.json").write_text('{"correct": 1.0}')
    return folder


def make_evaluation(folder, mean=0.5):
    folder.mkdir(parents=True)
    estimate = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}
    content = {"label": folder.name, "num_problems": 4, "num_samples": 2, "seconds": 3.5}
    groups = {"metrics": {"pass@1": estimate, "thinking_tokens": {"mean": 12, "low": 10, "high": 14}}}
    (folder / "eval.json").write_text(
        json.dumps(content | groups | {"pass@1 by": {"level": {HOSTILE: estimate}}})
    )
    row = {
        "uid": "u",
        "prompt": "p",
        "gold": "1",
        "sample": "greedy",
        "text": "1",
        "correct": True,
        "format": "none",
    }
    write_lines(folder / "eval_samples.jsonl", [row, {**row, "sample": 0, "correct": None}])
    return folder


def page_of(folder, **fields):
    others = fields.pop("others", ())
    main(ReportConfig(run=(str(folder), *map(str, others)), **fields))
    return (folder / "report.html").read_text()


def data_of(page, name):
    found = re.search(f'id="data-{name}">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def text_of(page):
    body = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


def test_a_run_without_thinking_has_no_card_of_it(tmp_path):
    """Without thinking tags every token counts as thinking: the same number twice."""
    for name, thinking in (("plain", 9.0), ("thinks", 5.0)):
        folder = make_run(tmp_path / name)
        lengths = {"rl/completion_tokens": 9.0, "rl/thinking_tokens": thinking}
        write_lines(folder / "metrics.jsonl", [row | lengths for row in metric_rows(20)])
        labels = re.findall('class="label">([^<]*)<', page_of(folder))
        assert "completion tokens" in labels
        assert ("thinking tokens" in labels) == (name == "thinks")


def test_a_finished_run(tmp_path, capsys, monkeypatch):
    monkeypatch.undo()
    page = page_of(make_run(tmp_path / "run"))
    text = text_of(page)
    assert "Finished after 20 steps. Correct 100.0% in the last 2 steps, from 0.0% in the first." in text
    assert "step 5: over 20% of completions are cut off" in text
    assert "1 warning" in text
    assert "began 2001-09-09 01:46 UTC took 3 min 10 s" in text
    began = {"start_utc": "2001-09-09T01:46:00+00:00"}  # 50 s before the end of the first step
    (tmp_path / "run" / "environment.json").write_text(json.dumps(began))
    assert "took 4 min 0 s" in text_of(page_of(tmp_path / "run"))
    part = data_of(page, "part-0")
    assert {panel["title"] for figure in part["figures"] for panel in figure["panels"]} >= {
        "truncated",
        "gradient norm",
    }
    assert part["samples"]["num_indexed"] == part["samples"]["num_samples"] == 120
    assert part["samples"]["steps"] == [1, 20]
    assert "120 of 120 completions" in capsys.readouterr().out
    assert (tmp_path / "run" / "report.md").read_text().startswith("# run")


def test_what_a_run_took_leaves_out_the_pause_before_its_resume(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = metric_rows(20)
    for number, row in enumerate(rows):
        row |= {"time_s": row["time_s"] + 86_400 * (number >= 10), "run_time_s": 15.0 + 10 * number}
    write_lines(folder / "metrics.jsonl", rows)
    assert "took 3 min 25 s" in text_of(page_of(folder))
    write_lines(
        folder / "metrics.jsonl", [{**rows[0], "run_time_s": None}, *rows[1:]]
    )  # begun by an earlier version
    assert "took 24 h 3 min" in text_of(page_of(folder))


def test_the_interval_of_a_headline_number_is_over_groups(tmp_path):
    run = make_run(tmp_path / "run", num_steps=1)
    rows = [
        {**sample_rows(1)[0], "uid": f"{g}", "rewards": {"correct": float(g < 3)}}
        for g in range(10)
        for _ in "ab"
    ]
    write_lines(run / "samples.jsonl", rows)
    # Wilson for 3 of 10 problems, by its formula; the 20 samples would give 14.5% to 51.9%.
    assert "30.0% 10.8% to 60.3%" in text_of(page_of(run))


def test_what_a_model_wrote_is_never_markup(tmp_path):
    page = page_of(make_run(tmp_path / "run"))
    scripts = re.findall(r"<script\b", page)
    assert page.count("</script") == len(scripts)
    assert "alert(1)" not in text_of(page).replace("&lt;script&gt;alert(1)&lt;/script&gt;", "")
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "connect-src &#39;none&#39;" in page or "connect-src 'none'" in page


def test_a_run_that_was_killed_and_one_that_runs(tmp_path):
    killed = make_run(tmp_path / "killed", num_steps=7, finished=False)
    assert "Stopped at step 7 of 20 without a summary" in text_of(page_of(killed))
    live = make_run(tmp_path / "live", num_steps=7, finished=False, start_s=time.time() - 75)
    assert "Still running: step 7 of 20." in text_of(page_of(live))


def test_damage_is_said_and_the_rest_is_shown(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('nonsense\n{"stage": "rl", "step": {}, "rl/loss": 1}\n{"stage": "rl", "st')
    with (run / "samples.jsonl").open("a") as file:
        file.write('[]\n{"step": "x", "rewards": [1], "reward": "high", "completion": 5}\n')
    (run / "config.yaml").write_text("a: [")
    (run / "environment.json").write_text("[")
    text = text_of(page_of(run))
    for said in (
        "2 damaged lines of metrics.jsonl skipped",
        "the last line of metrics.jsonl is cut off",
        "1 damaged line of samples.jsonl skipped",
        "config.yaml cannot be read",
        "environment.json cannot be read",
        "Correct 100.0%",
    ):
        assert said in text


@pytest.mark.parametrize("gone", ["metrics.jsonl", "samples.jsonl", "config.yaml", "environment.json"])
def test_a_missing_file_does_not_hide_the_others(tmp_path, gone):
    run = make_run(tmp_path / "run")
    (run / gone).unlink()
    page = page_of(run)
    part = data_of(page, "part-0")
    assert bool(part["figures"]) == (gone != "metrics.jsonl")
    assert (part["samples"] is not None) == (gone != "samples.jsonl")
    if gone == "environment.json":
        assert "Missing or damaged" not in text_of(page)
    else:
        assert "Missing or damaged: " in text_of(page)


def test_an_evaluation(tmp_path):
    page = page_of(make_evaluation(tmp_path / "eval"))
    text = text_of(page)
    assert "Finished. Pass@1 50.0%." in text
    assert "50.0% 40.0% to 60.0%" in text
    assert "12 10 to 14" in text
    assert "problems × samples 4 × 2 took 3.5 s" in text
    assert data_of(page, "part-0")["samples"]["steps"] is None


def test_a_folder_of_runs_is_one_page_with_its_evaluations_side_by_side(tmp_path):
    make_run(tmp_path / "all" / "second", start_s=2.0e9)
    make_run(tmp_path / "all" / "first")
    make_evaluation(tmp_path / "all" / "eval" / "base", 0.25)
    make_evaluation(tmp_path / "all" / "eval" / "rl", 0.75)
    folder = tmp_path / "all"
    (folder / "report.md").write_text("my own")
    names = find_parts(folder)
    assert set(names) == {"first", "second", "eval/base", "eval/rl"}
    assert names.index("first") < names.index("second")
    page = page_of(folder)
    assert page.count('role="tab"') == 4
    assert data_of(page, "start") == names.index("first")  # where learning is seen, not an evaluation
    assert "25.0% 15.0% to 35.0%" in text_of(page)
    assert "75.0% 65.0% to 85.0%" in text_of(page)
    assert (folder / "report.md").read_text() == "my own"


def stage(name, right, *, thinks=None, right_with=None, right_without=None, width=0.01):
    def around(mean):
        return None if mean is None else Interval(mean, mean - width, mean + width)

    return Stage(
        name=name,
        right=around(right),
        thinks=around(thinks),
        right_with=right_with,
        right_without=right_without,
    )


SFT = stage("sft", 0.49, thinks=0.48, right_with=0.97, right_without=0.05)
EVERY = {"thinks": 1.0, "right_with": 0.98}


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (
            [stage("base", 0.0), SFT, stage("rl", 0.978, **EVERY)],
            "0 → 49 → 98 % of held-out sums, because it now uses the scratch-pad every time",
        ),
        ([SFT, stage("rl", 0.93, **EVERY | {"thinks": 0.96})], "49 → 93 % .* scratch-pad almost every time"),
        (  # it thinks less, and is right less often for that
            [SFT, stage("rl", 0.2, thinks=0.16, right_with=0.97, right_without=0.05)],
            "49 → 20 % .*because it now uses the scratch-pad in 16 % of its answers instead of 48 %",
        ),
        (  # 0.48 * 0.97 + 0.52 * 0.8: the answers without the scratch-pad became right
            [SFT, stage("rl", 0.88, thinks=0.48, right_with=0.97, right_without=0.8)],
            "49 → 88 % .*right more often, which using the scratch-pad more or less often does not explain",
        ),
        (  # more thinking, yet worse answers
            [SFT, stage("rl", 0.3, thinks=1.0, right_with=0.3)],
            "49 → 30 % .*wrong more often, which using",
        ),
        ([SFT, stage("rl", 0.5, **EVERY)], r"the intervals of sft and rl overlap \(512 sums\)"),
        ([stage("a", 0.001, width=0), stage("b", 0.9996, width=0)], "0.1 → > 99.9 % of held-out sums"),
    ],
)
def test_the_headline_says_what_the_numbers_say(stages, expected):
    identity = {"task": {"name": "arithmetic"}, "split": "test"}
    headline, _ = tell(stages, {"identity": identity, "num_problems": 512})
    assert re.search(expected, headline)


def test_the_page_of_stages_begins_with_the_answer(tmp_path):
    folder = tmp_path / "all"
    for name, thinking in (("rl", (True, True)), ("base", (False, False)), ("sft", (True, False))):
        make_evaluation(folder / "eval" / name, 0.5 * sum(thinking))
        content = json.loads((folder / "eval" / name / "eval.json").read_text())
        content["identity"] = {"task": {"name": "arithmetic"}, "split": "test"}
        (folder / "eval" / name / "eval.json").write_text(json.dumps(content))
        rows = [
            {"uid": f"u{n}", "prompt": "p", "gold": "1", "sample": place, "text": "x", "correct": is_thinking}
            | {"format": "perfect", "thinking_tokens": 9 * is_thinking}
            for n in range(4)
            for place, is_thinking in (("greedy", False), (0, thinking[0]), (1, thinking[1]))
        ]
        write_lines(folder / "eval" / name / "eval_samples.jsonl", rows)
    page = page_of(folder)
    text = text_of(page)
    headline = "0 → 50 → 100 % of held-out sums, because it now uses the scratch-pad every time."
    assert text.index(headline) < 200
    assert (
        "sft uses the scratch-pad in 50 % of its answers and is right in 100 % of those and in 0 % of" in text
    )
    table = page.partition('<table class="bars">')[2]
    assert re.findall(r'<th rowspan="2">(\w+)</th>', table) == ["base", "sft", "rl"]
    short = table.partition("<table>")[2].partition("</table>")[0]
    # Columns that no stage has a value for are left out: greedy, format, tokens.
    assert re.findall(r">([^<>]+)</th>", short.partition("</tr>")[0]) == [
        "stage",
        "right, sampled",
        "thinks first",
    ]
    assert page.count("<details><summary>All 3 measures</summary>") == 1
    (folder / "eval" / "sft" / "eval.json").write_text(
        (folder / "eval" / "sft" / "eval.json").read_text().replace("arithmetic", "chess")
    )
    assert "because" not in text_of(page_of(folder))  # other problems: shares of them make no sequence


def test_another_run_is_overlaid_and_compared(tmp_path):
    run = make_run(tmp_path / "run")
    other = make_run(tmp_path / "other", config="num_steps: 20\nseed: 2\noptim:\n  lr: 0.1\n")
    third = make_run(tmp_path / "third", num_steps=10)
    page = page_of(run, others=(other, third))
    added = {
        series.get("other")
        for figure in data_of(page, "part-0")["figures"]
        for panel in figure["panels"]
        for series in panel["series"]
    }
    assert added == {None, "other", "third"}
    text = text_of(page)
    assert "seed 1 2" in text
    assert "optim.lr – 0.1" in text
    assert "num_steps 20" not in text.partition("Differences from other")[2].partition("Configuration")[0]


def test_differences_name_every_field_that_differs():
    own, other = {"a": {"b": 1, "c": [1]}, "d": None}, {"a": {"b": 2, "c": [1]}, "e": 0}
    assert differences(own, other) == [("a.b", "1", "2"), ("d", "None", "–"), ("e", "–", "0")]


def test_of_many_samples_as_many_as_asked_for(tmp_path):
    run = make_run(tmp_path / "run")
    page = page_of(run, max_samples=24)
    assert data_of(page, "part-0")["samples"]["num_indexed"] == 24
    assert "24 of 120 are on this page" in text_of(page)
    assert data_of(page_of(run, max_samples=0), "part-0")["samples"]["num_indexed"] == 0


def test_the_newest_rows_of_a_long_run_are_searched_for_warnings(tmp_path, monkeypatch):
    monkeypatch.setattr("whet.report.part.MAX_HEALTH_ROWS", 50)
    run = make_run(tmp_path / "run", num_steps=300)
    assert read_part(run, ".").findings == []  # the warning at step 5 is too long ago
    monkeypatch.setattr("whet.report.part.MAX_HEALTH_ROWS", 300)
    assert [step for step, _ in read_part(run, ".").findings] == [5]


def test_mistakes_are_one_line(tmp_path):
    run = make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b")
    runs, empty = str(tmp_path / "runs"), tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "folder.html").mkdir()
    cases = {
        "RUN is missing": {},
        "no such run or folder": {"run": (str(tmp_path / "none"),)},
        "is a file, expected the run folder": {"run": (str(run / "metrics.jsonl"),)},
        "holds no run": {"run": (str(empty),)},
        "expected the name of an .html file": {"run": (str(run),), "out": str(run / "metrics.jsonl")},
        "expected 0": {"run": (str(run),), "max_samples": -1},
        "config.yaml' is a file, expected a folder": {
            "run": (str(run),),
            "out": str(run / "config.yaml" / "x.html"),
        },
        "expected a new file": {"run": (str(run),), "out": str(tmp_path / "folder.html")},
        "is given twice": {"run": (str(run), str(run))},
        "holds 2 runs; give one": {"run": (str(run), runs)},
        "holds 2 itself; give one": {"run": (runs, str(run))},
        f"{tmp_path / 'none'}': no such run": {"run": (str(run), str(tmp_path / "none"))},
    }
    for said, fields in cases.items():
        with pytest.raises(ValueError, match=re.escape(said)) as error:
            main(ReportConfig(**fields))
        assert "\n" not in str(error.value)
        assert isinstance(error.value, UserError) or "max_samples" in fields or ".html file" in said


def test_links_out_of_the_folder_and_deep_results_are_left_out(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text("key: hunter2\n")
    (run / "environment.json").unlink()
    (run / "environment.json").symlink_to(secret)
    (run / "report.html").symlink_to(secret)
    (run / "config.yaml").write_text("a: " + "{b: " * 200 + "1" + "}" * 200)
    (run / "eval.json").write_text(
        '{"model": {"init": "' + "x" * 600 + '"}, "metrics": ' + '{"a": ' * 400 + "1" + "}" * 401
    )
    other = make_run(tmp_path / "other")
    main(ReportConfig(run=(str(run), str(other))))
    assert secret.read_text() == "key: hunter2\n"
    assert "hunter2" not in (run / "report.html").read_text()
    assert not list(run.glob("*.partial"))


def test_counts_of_an_evaluation_are_no_percentages_and_its_remark_is_said(tmp_path):
    share, count = {"mean": 0.5, "low": 0.25, "high": 0.75}, {"mean": 0.3, "low": 0.1, "high": 0.6}
    content = {
        "num_problems": 4,
        "num_samples": 8,
        "remark": "anecdote: <one> says little",
        "metrics": dict.fromkeys(("pass@1", "greedy", "pass@2", "pass@8", "maj@8", "best@8", ""), share),
        "pass@k": {"2": share},
        "consistency": {"mixed": share},
        "opportunity": share,
        "confidence": {
            "hedges": count,
            "answer_logprob": {"mean": 0.0, "low": -0.5, "high": 0.0},
            "vote_share": share,
        },
        "lengths": {"right": {"thinking": count}},
    }
    (tmp_path / "eval.json").write_text(json.dumps(content))
    row = {"stage": "eval", "step": 0, "time_s": 1e9, "eval/pass@1": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    main(ReportConfig(run=(str(tmp_path),)))
    page = (tmp_path / "report.html").read_text()
    table = re.sub(r"<[^>]+>", " ", page[page.index("All 14 estimates") : page.index("</table>")])
    lines = {" ".join(line.split()) for line in re.split(r"\n", table)}
    found = " | ".join(lines)
    for text in (
        "pass@k 2 50.0%",
        "consistency mixed 50.0%",
        "opportunity 50.0%",
        "vote_share 50.0%",
        "– 50.0%",
    ):
        assert text in found
    for text in (
        "hedges 0.3 0.1 to 0.6",
        "answer_logprob 0 -0.5 to 0",
        "lengths · right thinking 0.3 0.1 to 0.6",
    ):
        assert text in found
    assert re.search(r"verdict warn.*Anecdote: &lt;one&gt; says little", page)
    cards = re.findall(r'<div class="label">([^<]*)</div>', page)
    assert cards == ["pass@1", "greedy", "pass@8", "maj@8", "best@8"]
    assert "curve-area" not in page.split("<script")[0]  # one point is no curve


def test_data_of_ones_own_stands_where_the_task_does(tmp_path: Path) -> None:
    made = {"policy": {"init": "my-model"}, "task": {"name": "arithmetic", "path": ""}, "pairs": "mine.jsonl"}
    for config, told in (
        (made, "mine.jsonl"),  # DPO reads pairs, and no task
        (made | {"pairs": ""}, "arithmetic"),
        ({"task": {"name": "jsonl", "path": "questions.csv"}}, "questions.csv"),
        ({"task": {"name": "gsm8k", "path": "rows"}}, "gsm8k"),
    ):
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time_s": 1.0, "dpo/loss": 0.5}\n')
        assert dict(facts(read_part(tmp_path, "."))).get("task") == told
