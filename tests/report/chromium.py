"""A headless Chromium for tests of pages: it reaches this machine alone, and writes down what a page must not do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from needs import BROWSERS, program, require

HEIGHT = 900
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WATCH_POLICY = """
addEventListener("securitypolicyviolation", (event) => console.error("policy: " + event.violatedDirective));
"""


@contextmanager
def launch() -> Iterator[Any]:
    """Start the browser; the test is skipped, with the reason, where it or its driver is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    require("browser")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program(*BROWSERS), args=FLAGS)
        yield browser
        browser.close()


class Tab:
    """A tab whose every slip is gathered: errors, dialogs, violations of the policy, requests to elsewhere.

    Attributes:
        page: The page, as playwright drives it.
        slips: What the page did that it must not.
    """

    def __init__(self, browser: Any, *, width: int = 1280) -> None:
        self.slips: list[str] = []
        self._context = browser.new_context(color_scheme="light", viewport={"width": width, "height": HEIGHT})
        self._context.add_init_script(WATCH_POLICY)
        self._context.route("**/*", self._route)
        self.page = self._context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on(
            "console", lambda message: self._note(message.type in ("error", "warning"), message.text)
        )
        self.page.on("pageerror", lambda error: self._note(True, str(error)))
        self.page.on(
            "dialog", lambda dialog: (self._note(True, f"dialog: {dialog.message}"), dialog.dismiss())
        )

    def _note(self, is_slip: bool, text: str) -> None:
        if is_slip:
            self.slips.append(text)

    def _route(self, route: Any) -> None:
        url = urlsplit(route.request.url)
        if url.scheme in ("file", "data", "blob") or url.hostname == "127.0.0.1":
            route.continue_()
        else:
            self.slips.append(f"request: {route.request.url}")
            route.abort()

    def is_hacked(self) -> bool:
        """Say whether an injected script ran, or an injected element is part of the page."""
        injected = "document.querySelector('[onerror], [src=x], a[href^=javascript]')"
        return bool(self.page.evaluate(f"Boolean(window.__hacked !== undefined || {injected})"))

    def visible_text(self) -> str:
        """Return every text of the page, with those of tips and of empty fields."""
        names = "['title', 'placeholder', 'aria-label']"
        texts = f"[...document.querySelectorAll('*')].flatMap((n) => {names}.map((name) => n.getAttribute(name) || ''))"
        return str(self.page.evaluate(f"document.body.textContent + {texts}.join(' ')"))

    def overflow(self) -> int:
        """Return how many pixels the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    def show(self, *, dark: bool, width: int) -> None:
        """Change the colours and the window."""
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.page.set_viewport_size({"width": width, "height": HEIGHT})

    def hurry(self) -> None:
        """Make a live page look for news now, as when its reader comes back to it."""
        self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    def shoot(self, folder: Path, name: str) -> None:
        """Save a screenshot in the folder that WHET_SCREENSHOTS names, else in `folder`."""
        folder = Path(os.environ.get("WHET_SCREENSHOTS") or folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=folder / f"{name}.png", full_page=True)

    def close(self) -> None:
        """Close the tab."""
        self._context.close()
