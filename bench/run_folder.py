"""Make a large run folder, open it by `whet watch` and `whet report` in Chromium, and print how long a reader waits;
exit status 1 when a goal is missed.

python bench/run_folder.py [--num-samples 100000] [--folder FOLDER] [--no-report]

Rows are as reinforcement learning on word problems logs them: groups of 8, some 150 tokens each with its id and
log-probability, about 1.7 KB a row. FOLDER is kept and used again when it holds as many samples.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from whet import processes
from whet.model.text.tokenizer import Tokenizer

GOALS_S = {"open": 3.0, "filter": 0.3}
GROUP, GROUPS_PER_STEP = 8, 16
TEXT = "the first then we have so that gives eggs per day and each left sold costs dollars times plus minus total of"
WORDS = TEXT.split()
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
WATCH = "import sys; from whet.report.watch import *; main(WatchConfig(run=sys.argv[1], open=False))"
REPORT = "import sys; from whet.report.html import *; main(ReportConfig(run=(sys.argv[1],)))"
TAGS = {
    "think_open": "<think>",
    "think_close": "</think>",
    "answer_open": "<answer>",
    "answer_close": "</answer>",
}


def make_run(folder: Path, num_samples: int) -> None:
    """Write a run folder with so many samples."""
    rng = random.Random(0)
    checkpoint = folder / "checkpoints" / "step_00000001"
    Tokenizer.bytes().save(checkpoint)
    (checkpoint / "protocol.json").write_text(json.dumps({"schema": TAGS}))
    num_steps = num_samples // (GROUP * GROUPS_PER_STEP)
    (folder / "config.yaml").write_text(f"num_steps: {num_steps}\n")
    with (folder / "samples.jsonl").open("w") as samples, (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(1, num_steps + 1):
            skill = step / num_steps
            for _ in range(GROUPS_PER_STEP):
                problem = rng.randrange(7000)
                prompt = f"Problem {problem}: " + " ".join(rng.choices(WORDS, k=40)) + "?"
                rows = [make_row(rng, step, problem, index, prompt, skill) for index in range(GROUP)]
                samples.writelines(json.dumps(row) + "\n" for row in rows)
            row = {"stage": "rl", "step": step, "time_s": time.time() - 9 * (num_steps - step)}
            row |= {"rl/correct": rng.random() * skill, "rl/reward_mean": skill, "rl/entropy": 1 - skill / 2}
            metrics.write(json.dumps(row) + "\n")


def make_row(
    rng: random.Random, step: int, problem: int, index: int, prompt: str, skill: float
) -> dict[str, Any]:
    """Return one sample; one in 10,000 says 'perplexing'."""
    words = rng.choices(WORDS, k=rng.randrange(5, 25)) + (["perplexing"] if rng.random() < 1e-4 else [])
    completion = f"{' '.join(words)}</think><answer>{problem + index}</answer>"
    ids = list(completion.encode())
    right, format_ = float(rng.random() < skill), float(rng.random() < 0.9)
    return {
        "step": step,
        "uid": f"{problem:016x}",
        "index": index,
        "prompt": prompt,
        "answer": str(problem),
        "completion": completion,
        "num_completion_tokens": len(ids),
        "num_read_tokens": 0,
        "num_turns": 1,
        "completion_ids": ids,
        "sampler_logprobs": [round(-rng.expovariate(2.0), 4) for _ in ids],
        "finish_reason": "stop",
        "rewards": {"correct": right, "format": format_, "length": round(rng.random(), 4)},
        "reward": right + 0.1 * format_,
        "advantage": rng.gauss(0, 1),
    }


def count(page: Page) -> str:
    """Return the line above the list."""
    return page.locator(".browser .found").inner_text()


def timed(page: Page, act: Callable[[], Any], shown: str) -> float:
    """Return the seconds from a click to the list's answer.

    Args:
        page: The page.
        act: The click.
        shown: Regular expression of the line above the list afterwards.
    """
    began = time.perf_counter()
    act()
    until(
        page, f"new RegExp({json.dumps(shown)}).test(document.querySelector('.browser .found').textContent)"
    )
    return time.perf_counter() - began


def until(page: Page, wanted: str, timeout_s: float = 60.0) -> None:
    """Wait until an expression is true; the page's policy forbids the library's own way, which evaluates text."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(wanted):
        assert time.monotonic() < deadline, wanted
        time.sleep(0.005)


def steps(page: Page) -> dict[str, float]:
    """Filter, search and open samples; return seconds by action."""
    select = page.locator("select[name=correct]")
    everything = count(page)
    found: dict[str, list[float]] = {
        "filter": [],
        "order": [],
        "search (rare word)": [],
        "page": [],
        "detail": [],
    }
    for value in ("true", "false", "true"):
        found["filter"].append(
            timed(page, lambda v=value: select.select_option(v), f"^(?!{re.escape(count(page))}$)1–")
        )
    select.select_option("")
    page.locator(".browser .found", has_text=everything).wait_for()
    for order in ("length", "advantage"):
        before = page.locator("li.sample").first.get_attribute("data-id")
        began = time.perf_counter()
        page.locator("select[name=order]").select_option(order)
        until(page, f"document.querySelector('li.sample').dataset.id !== '{before}'")
        found["order"].append(time.perf_counter() - began)
    page.locator("select[name=order]").select_option("step")
    found["page"].append(timed(page, lambda: page.locator("button.page-on").click(), "^51–"))
    for place in (3, 7, 11):
        row = page.locator("li.sample").nth(place)
        identity, began = row.get_attribute("data-id"), time.perf_counter()
        row.click()
        until(
            page, f"document.querySelector('table.group tr[aria-selected=true]')?.dataset.id === '{identity}'"
        )
        found["detail"].append(time.perf_counter() - began)
    box = page.locator("input[name=text]")
    found["search (rare word)"].append(
        timed(page, lambda: box.fill("perplexing"), "^1–.* of [0-9]{1,3} samples")
    )
    return {name: statistics.median(values) for name, values in found.items()}


def memory_mib(pid: int) -> float:
    """Return the peak memory of a process."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def watch(browser: Any, folder: Path, num_samples: int) -> tuple[dict[str, float], float]:
    """Open the folder by `whet watch`; return seconds by action and the server's peak memory."""
    began = time.perf_counter()
    server = processes.start([sys.executable, "-c", WATCH, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = re.search(r"http\S+", server.stdout.readline())
        assert address is not None
        table = {"start of the server": time.perf_counter() - began}
        page = browser.new_page()
        opened = time.perf_counter()
        page.goto(address[0])
        page.locator("li.sample").first.wait_for()
        table["open: first samples shown"] = time.perf_counter() - opened
        until(
            page,
            f"document.querySelector('.browser .found').textContent.endsWith('of {num_samples:,} samples')",
        )
        table["all samples indexed"] = time.perf_counter() - opened
        return table | steps(page), memory_mib(server.pid)
    finally:
        server.terminate()
        server.wait(20)


def open_report(browser: Any, folder: Path) -> dict[str, float]:
    """Make the folder's report and open it; return seconds by action."""
    began = time.perf_counter()
    processes.run([sys.executable, "-c", REPORT, str(folder)], check=True, stdout=subprocess.DEVNULL)
    table = {"made": time.perf_counter() - began}
    page = browser.new_page()
    opened = time.perf_counter()
    page.goto((folder / "report.html").as_uri())
    page.locator("li.sample").first.wait_for()
    table["first samples shown"] = time.perf_counter() - opened
    return {f"report: {name}": seconds for name, seconds in (table | steps(page)).items()}


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-samples", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "whet-run-folder")
    parser.add_argument("--no-report", action="store_true")
    args = parser.parse_args()
    num_samples = args.num_samples // (GROUP * GROUPS_PER_STEP) * (GROUP * GROUPS_PER_STEP)
    made = args.folder / "made"
    if not made.is_file() or made.read_text() != str(num_samples):
        shutil.rmtree(args.folder, ignore_errors=True)
        make_run(args.folder, num_samples)
        made.write_text(str(num_samples))
    print(f"{num_samples:,} samples, {(args.folder / 'samples.jsonl').stat().st_size / 2**20:.0f} MiB")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS)
        table, peak = watch(browser, args.folder, num_samples)
        table |= {} if args.no_report else open_report(browser, args.folder)
        browser.close()
    for name, seconds in table.items():
        print(f"{name:<34} {seconds:8.3f} s")
    print(f"{'peak memory of the server':<34} {peak:6.0f} MiB")
    return int(table["open: first samples shown"] > GOALS_S["open"] or table["filter"] > GOALS_S["filter"])


if __name__ == "__main__":
    sys.exit(main())
