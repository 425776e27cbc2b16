"""Makes the README's screenshots from a demo folder: the demo's report, a comparison, the chat page of whet serve.

    whet demo --out runs/demo
    python bench/screenshots.py runs/demo            # -> docs/images/report.png, compare.png, chat.png

Each is a whole window of Chromium, not a cut-out, in 128 colours (well under 150 KB).
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from whet import processes

SIZE = {"width": 1400, "height": 1000}
COLOURS = 128
QUESTION = "47+85+39="


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("demo", type=Path, help="folder of whet demo")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--dark", action="store_true", help="the dark look")
    asked = parser.parse_args()
    stages = [str(asked.demo / "eval" / name) for name in ("base", "sft", "rl")]
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        sys.exit("no Chromium on this machine (apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        report, compared = Path(folder) / "report.html", Path(folder) / "compared"
        whet("report", str(asked.demo), "--out", str(report))
        whet("compare", *stages, "--out", str(compared))
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE, color_scheme="dark" if asked.dark else "light")
        page.goto(report.as_uri())
        save(page, asked.out / "report.png")
        page.goto((compared / "compare.html").as_uri())
        save(page, asked.out / "compare.png")
        with serving(asked.demo / "rl") as address:
            page.goto(address)
            page.locator("#about", has_text="context of").wait_for()
            page.fill("#temperature", "0")
            for question in (QUESTION, "12+30+21="):
                page.fill("#question", question)
                page.press("#question", "Enter")
                page.locator("button.probabilities").last.wait_for()
                page.locator("#send:not(:disabled)").wait_for()
            page.locator("details.thinking summary").last.click()
            page.locator("button.probabilities").last.click()
            save(page, asked.out / "chat.png")
        browser.close()


def whet(*words: str) -> None:
    """Run a command of whet."""
    processes.run([sys.executable, "-m", "whet", *words], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """Serve a model, and yield the address of its chat page."""
    command = [sys.executable, "-m", "whet", "serve", str(model), "--port", "0"]
    with processes.start(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://[\d.:]+", server.stdout.readline())
        try:
            assert found is not None, "whet serve did not start"
            yield found[0] + "/"
        finally:
            server.terminate()


def save(page: Any, path: Path) -> None:
    """Save the window in few colours, which is a third of the bytes."""
    page.wait_for_timeout(500)  # charts are drawn
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
