"""The report and the live page in a real browser: clicked through, with hostile text wherever a run has text."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Tab, launch
from seeing import uri

from whet.eval.compare.compare import CompareConfig
from whet.eval.compare.compare import main as compare
from whet.model.text.tokenizer import Tokenizer
from whet.report.html import ReportConfig
from whet.report.html import main as report
from whet.report.runs import RunsConfig
from whet.report.runs import main as registry

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from whet.report.watch import (  # noqa: E402
    Guard,
    Runs,
    build_app,
)

HOSTILE = (
    "</script><script>window.__hacked=1</script><img src=x onerror=window.__hacked=2>"
    "<a href='javascript:window.__hacked=3'>{{7*7}}\x1b[31mred\u202eright-to-left\u0000'\"&amp;"
)
SHOWN = re.compile(r"<script>window\.__hacked=1</script><img src=x onerror=window\.__hacked=2>")
TAGS = {"think_open": "<th>", "think_close": "</th>", "answer_open": "<b>", "answer_close": "</b>"}
TOKEN = "secret"


def sample(step: int, problem: int, index: int) -> dict[str, Any]:
    ids = [104, 105, 32, 33]
    right = float((step + problem + index) % 3 == 0)
    hostile = HOSTILE if problem == 0 else ""
    return {
        "step": step,
        "uid": f"uid{problem}{hostile}",
        "index": index,
        "prompt": f"What is {step} and {problem}? {hostile}",
        **({} if problem else {"images": [uri(9, 200), HOSTILE, "https://example.org/a.png", 7]}),
        "answer": f"{step}{hostile}",
        "completion": f"{hostile} considering {step}</th><b>{step + index}{hostile}</b>"
        + (" zebra" if step == 2 else ""),
        "num_completion_tokens": 4 + step,
        "completion_ids": ids,
        "sampler_logprobs": [-0.01, -1.5, -4.0, -9.0],
        "finish_reason": "stop" if index else "length",
        "rewards": {"correct": right, f"style {HOSTILE}": 0.25 * index},
        "reward": right + 0.25 * index,
        "advantage": right - 0.5,
        "note": hostile,
    }


def metrics(step: int) -> dict[str, Any]:
    return {
        "stage": "rl",
        "step": step,
        "time_s": time.time(),
        "rl/correct": min(1.0, 0.1 * step),
        "rl/reward_mean": 0.05 * step,
        "rl/entropy": 1 / step,
        "rl/zero_variance_groups": 0.95,
        f"rl/reward/style {HOSTILE}": 0.1 * step,
        f"rl/{HOSTILE}": 0.3 * step,
    }


def append(folder: Path, steps: range) -> None:
    """Log steps as a run does: 2 problems with 4 samples each."""
    with (folder / "samples.jsonl").open("a") as file:
        for step in steps:
            file.writelines(json.dumps(sample(step, n, k)) + "\n" for n in (1, 0) for k in range(4))
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(metrics(step)) + "\n" for step in steps)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launch() as found:
        yield found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of 20 steps: 160 samples."""
    folder = tmp_path / "run <img src=x onerror=window.__hacked=4>"
    checkpoint = folder / "checkpoints" / "step_00000020"
    Tokenizer.bytes().save(checkpoint)
    (checkpoint / "protocol.json").write_text(json.dumps({"schema": TAGS}))
    (folder / "config.yaml").write_text(f"num_steps: 40\ntask: {json.dumps(HOSTILE)}\n")
    (folder / "summary.json").write_text(json.dumps({"correct": 0.5, HOSTILE: HOSTILE}))
    append(folder, range(1, 21))
    return folder


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    """The live page of the run's parent folder, which has no other run."""
    runs = Runs(run.parent)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    guard = Guard(build_app(runs), token=TOKEN, cookie=f"whet_{port}", hosts=("127.0.0.1",))
    server = uvicorn.Server(uvicorn.Config(guard, http="h11", ws="none", lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{port}/?token={TOKEN}"
    server.should_exit = True
    thread.join(20)
    runs.close()


def found(tab: Tab, text: str) -> None:
    """Wait until the line above the list says so."""
    tab.page.locator(".browser .found", has_text=text).wait_for()


def click_through(tab: Tab) -> None:
    """Filter, page, search, open a sample, its tokens and its group; 160 samples are there."""
    page = tab.page
    found(tab, "1–50 of 160 samples")
    assert page.locator("li.sample").count() == 50
    page.locator("button.page-on").click()
    found(tab, "51–100 of 160 samples")
    page.locator("select[name=correct]").select_option("true")
    found(tab, "1–50 of 53 samples")
    page.locator("input[name=step_min]").fill("3")
    page.locator("input[name=step_max]").fill("4")
    found(tab, "1–5 of 5 samples")
    assert {node.inner_text() for node in page.locator("li.sample .s-step").all()} == {"3", "4"}
    page.locator("button.clear").click()
    found(tab, "1–50 of 160 samples")
    page.locator("select[name=finish]").select_option("length")
    found(tab, "1–40 of 40 samples")
    page.locator("button.clear").click()
    page.locator("input[name=text]").fill("ZEBRA")
    found(tab, "1–8 of 8 samples")
    page.locator("li.sample").first.click()
    page.locator(".detail h3", has_text="Step 2").wait_for()
    page.locator("input[name=text]").fill("<IMG SRC=X")
    found(tab, "of 80 samples" if page.locator("#samples").count() == 0 else "1–50 of")
    page.locator("li.sample", has_text="").first.click()
    page.locator(".detail pre.prompt", has_text="<img src=x").wait_for()
    shown = page.locator(".detail .pictures")
    shown.locator("img.tiny").wait_for()  # it was decoded
    assert shown.locator("img").evaluate_all("(all) => all.map((one) => one.naturalWidth)") == [32]
    notes = shown.locator(".note").all_inner_texts()
    assert SHOWN.search(notes[0])
    assert "pages fetch nothing" in notes[1]
    assert len(notes) == 2
    for name in ("parts", "raw", "tokens"):
        page.locator(f"[data-view={name}]").click()
        assert page.locator(".view").inner_text()
        if name == "parts":
            assert SHOWN.search(page.locator("pre.thinking").inner_text())
            assert SHOWN.search(page.locator("pre.answer").inner_text())
        if name == "tokens":
            assert [node.inner_text() for node in page.locator("span.token").all()] == ["h", "i", " ", "!"]
            colours = [
                node.evaluate("node => node.style.backgroundColor")
                for node in page.locator("span.token").all()
            ]
            assert len(set(colours)) == 4  # the likeliest has none
    detail = page.locator(".detail").inner_text()
    assert "\\x1b[31mred\\u202eright-to-left\\x00" in detail
    assert SHOWN.search(page.locator(".rewards").inner_text())
    members = page.locator("table.group tr[data-id]")
    assert members.count() == 4
    members.last.click()
    page.locator(".detail h3", has_text="sample 3").wait_for()
    page.locator("button.clear").click()
    found(tab, "1–50 of 160 samples")


def check(tab: Tab) -> None:
    """Nothing ran, nothing was asked of elsewhere, no control character reached the page."""
    assert not tab.is_hacked()
    assert tab.slips == []
    assert not re.search("[\x00\x1b\u202e]", tab.visible_text())


def look_at(tab: Tab, folder: Path, name: str) -> None:
    """See the page light, dark and on a phone; it is never wider than the window."""
    for look, dark, width in (("light", False, 1280), ("dark", True, 1280), ("phone", False, 390)):
        tab.show(dark=dark, width=width)
        tab.shoot(folder, f"{name}-{look}")
        background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") != dark
        assert tab.overflow() <= 0, look
    check(tab)


@pytest.mark.ci
def test_report(browser: Any, run: Path, tmp_path: Path) -> None:
    report(ReportConfig(run=(str(run),), out=str(tmp_path / "report.html")))
    tab = Tab(browser)
    tab.page.goto((tmp_path / "report.html").as_uri())
    found(tab, "1–50 of 160 samples")
    assert "<img src=x onerror=window.__hacked=4>" in tab.page.locator("h1").inner_text()
    click_through(tab)
    look_at(tab, tmp_path, "report")
    tab.close()


@pytest.mark.ci
def test_no_page_is_wider_than_a_phone(browser: Any, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "stages" / "other"
    other.mkdir(parents=True)
    append(other, range(1, 21))
    for name, shift in (("base", 0), ("sft", 1), ("rl", 2)):
        evaluation(tmp_path / "stages" / "eval" / name, shift)
    folders = [str(tmp_path / "stages" / "eval" / name) for name in ("base", "sft", "rl")]
    compare(CompareConfig(models=tuple(folders), out=str(tmp_path / "compared")))
    report(ReportConfig(run=(str(run), str(other)), out=str(tmp_path / "two.html")))
    report(ReportConfig(run=(str(tmp_path / "stages"),), out=str(tmp_path / "stages.html")))
    registry(RunsConfig(folder=str(tmp_path / "stages" / "eval"), write=True))
    pages = ("two.html", "stages.html", "compared/compare.html", "stages/eval/runs.html")
    tab = Tab(browser, width=400)
    for name in pages:
        tab.page.goto((tmp_path / name).as_uri())
        if name != "stages/eval/runs.html":
            tab.page.locator("h3, h2").first.wait_for()
        tab.page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
        for dark in (False, True):
            tab.show(dark=dark, width=400)
            tab.shoot(tmp_path, f"phone-{name.replace('/', '-')}-{'dark' if dark else 'light'}")
            assert tab.overflow() <= 0, name
        if name == "compared/compare.html":
            tab.page.locator(".pictures img.tiny").first.wait_for()
            assert tab.page.locator(".problem .pictures img").count() == 8
            assert len(re.findall("data:image/png", (tmp_path / name).read_text())) == 5  # each once
    assert tab.slips == []
    tab.page.goto((tmp_path / "two.html").as_uri())
    legend = tab.page.locator(".legend .name", has_text="other").first
    legend.wait_for()  # the further run's curve, by its name
    tab.close()


def evaluation(folder: Path, num_right: int) -> None:
    """Write an evaluation of four problems, each with two samples of which so many are right."""
    folder.mkdir(parents=True)
    rows = [
        {
            "uid": f"u{problem}",
            "prompt": f"12+{problem}=" + "9" * 200,
            "images": [uri(problem), uri(9)],
            "gold": "7",
            "meta": {},
            "sample": place,
            "text": "x" * 300,
            "answer": "7",
            "answer_from": "schema",
            "correct": place != "greedy" and place < num_right,
            "format": "perfect",
            "thinking_tokens": 5,
            "completion_tokens": 9,
            "finish_reason": "stop",
        }
        for problem in range(4)
        for place in ("greedy", 0, 1)
    ]
    (folder / "eval_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text("answer_from: schema\n")
    (folder / "environment.json").write_text("{}")
    estimate = {"mean": num_right / 2, "low": num_right / 2, "high": num_right / 2}
    content = {
        "label": folder.name,
        "remark": "",
        "num_problems": 4,
        "num_samples": 2,
        "metrics": {f"a rather long name of a metric {n}": estimate for n in range(40)}
        | {"pass@1": estimate, "greedy": estimate, "format": estimate},
        "identity": {"protocol": {}, "task": {"name": "arithmetic"}, "split": "test", "sampling": {}},
    }
    (folder / "eval.json").write_text(json.dumps(content))


def test_live_page(browser: Any, run: Path, address: str, tmp_path: Path) -> None:
    tab = Tab(browser)
    page = tab.page
    page.goto(address)
    found(tab, "1–50 of 160 samples")
    assert TOKEN not in page.url
    steps = [node.inner_text() for node in page.locator("li.sample .s-step").all()]
    assert steps[:8] == ["20"] * 8  # newest first
    page.locator("#status-text", has_text="running · step 20 of 40").wait_for()
    assert "over 90% of groups" in page.locator("#warning-list").inner_text()
    assert page.locator(".card .value").first.inner_text() == "100.0%"
    assert page.locator("#charts canvas").count() >= 3
    click_through(tab)
    page.locator("details summary", has_text="config.yaml").click()
    assert SHOWN.search(page.locator("#config").inner_text())
    look_at(tab, tmp_path, "watch")
    tab.close()


@pytest.mark.ci
def test_live_page_follows_the_run(browser: Any, run: Path, address: str, tmp_path: Path) -> None:
    tab = Tab(browser)
    page = tab.page
    page.goto(address)
    found(tab, "1–50 of 160 samples")
    append(run, range(21, 26))
    tab.hurry()
    found(tab, "1–50 of 200 samples")
    page.locator("#status-text", has_text="step 25 of 40").wait_for()
    assert page.locator("li.sample .s-step").first.inner_text() == "25"
    page.locator("button.page-on").click()
    found(tab, "51–100 of 200 samples")
    append(run, range(26, 28))
    tab.hurry()
    page.locator("#fresh").click()  # somebody who reads on a later page is asked
    found(tab, "51–100 of 216 samples")
    kept = (run / "samples.jsonl").read_text().splitlines(keepends=True)[:80]
    (run / "samples.partial").write_text("".join(kept))
    (run / "samples.partial").replace(run / "samples.jsonl")  # resumed from step 10
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:10]
    (run / "metrics.partial").write_text("".join(rows))
    (run / "metrics.partial").replace(run / "metrics.jsonl")
    found(tab, "51–80 of 80 samples")
    page.locator("#status-text", has_text="step 10 of 40").wait_for()
    run.rename(tmp_path / "gone")
    tab.hurry()
    page.locator("#status-text", has_text="the run folder is gone").wait_for()
    check(tab)
    tab.shoot(tmp_path, "watch-gone")
    tab.close()


def test_points_are_only_added_behind_the_last_one(browser: Any, address: str) -> None:
    tab = Tab(browser)
    tab.page.goto(address)
    for newer, name, own, fits in (
        ([4, 5], "a", {}, True),
        ([3], "a", {}, False),  # a step that was logged again
        ([4], "new", {}, False),
        ([4], "a", {"low": [0, 0, 0]}, False),  # thinned: means of bins
    ):
        series = {"name": "a", "steps": [1, 2, 3], "values": [0, 0, 0], **own}
        old = [{"name": "f", "panels": [{"series": [series]}]}]
        new = [{"name": "f", "panels": [{"series": [{"name": name, "steps": newer, "values": newer}]}]}]
        code = "([old, newer]) => [appendPoints(old, newer), old[0].panels[0].series[0].steps]"
        assert tab.page.evaluate(code, [old, new]) == [fits, [1, 2, 3, *(newer if fits else [])]]
    tab.close()


def test_a_page_without_its_server_says_so(browser: Any, address: str) -> None:
    tab = Tab(browser)
    tab.page.goto(address)
    found(tab, "1–50 of 160 samples")
    tab.page.context.clear_cookies()  # as after a restart of the server
    tab.hurry()
    tab.page.locator("#connection", has_text="open the address that the terminal printed").wait_for()
    assert tab.page.locator("li.sample").count() == 50  # what was there stays
    assert all("403" in slip for slip in tab.slips)
    tab.close()


def test_the_choice_among_runs(browser: Any, run: Path, address: str) -> None:
    append_to = run.parent / "second"
    append_to.mkdir()
    append(append_to, range(1, 3))
    tab = Tab(browser, width=390)
    tab.page.goto(address)
    assert tab.page.locator(".choice li").count() == 2
    assert TOKEN not in tab.page.url
    assert tab.overflow() <= 0
    tab.page.locator(".choice a", has_text="second").click()
    found(tab, "1–16 of 16 samples")
    assert tab.page.locator("nav a[aria-current]").inner_text() == "second"
    tab.page.locator("input.overlay").check()  # the first run's curves, beside these
    tab.page.locator(".legend .name", has_text="run <img").first.wait_for()
    assert tab.page.locator(".legend .key.dashed").count() >= 3
    tab.page.locator("input.overlay").uncheck()
    tab.page.wait_for_function("document.querySelectorAll('.legend .key.dashed').length === 0")
    check(tab)
    tab.close()


def test_long_and_hostile_names_fit_the_registry_on_a_phone(browser: Any, tmp_path: Path) -> None:
    name = HOSTILE + "long" * 300
    for place in ("one", "two"):
        folder = tmp_path / place
        folder.mkdir()
        content = {
            "run_id": name,
            "base": {"name": name},
            "links": [{"name": name, "url": "javascript:alert(1)"}],
        }
        (folder / "provenance.json").write_text(json.dumps(content))
        (folder / "notes.jsonl").write_text(json.dumps({"note": name}) + "\n")
    registry(RunsConfig(folder=str(tmp_path), write=True))
    tab = Tab(browser, width=390)
    tab.page.goto((tmp_path / "runs.html").as_uri())
    assert tab.page.locator("article").count() == 2
    assert tab.overflow() == 0
    assert not tab.is_hacked()
    assert tab.slips == []
    tab.close()
