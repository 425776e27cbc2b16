"""Pages are one file, reach no network, and show hostile text as text."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re

import jinja2
import pytest

from whet.report import page

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31mred\u202eright"


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A template that prints a value in a text and in an attribute."""
    source = (
        '{% extends "base.html" %}{% block main %}<p id="x" title="{{ text }}">{{ text }}</p>{% endblock %}'
    )
    path = page.FOLDER / "templates" / "base.html"
    environment = page._environment()
    loader = jinja2.DictLoader({"t.html": source, "base.html": path.read_text(encoding="utf-8")})
    monkeypatch.setattr(environment, "loader", loader)
    return "t.html"


class Elements(html.parser.HTMLParser):
    """Every element with its attributes, and the text inside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag in self.raw:
            self.raw[tag].append("")
            self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.raw[self.inside][-1] += data


def parse(text: str) -> Elements:
    parser = Elements()
    parser.feed(text)
    return parser


def test_hostile_text_stays_text(template: str) -> None:
    text = page.render(
        template, title=HOSTILE, data={"a": {HOSTILE: HOSTILE}}, scripts=("uplot.js",), text=HOSTILE
    )
    elements = parse(text)
    assert [tag for tag, _ in elements.found if tag == "img"] == []
    assert len(elements.raw["script"]) == 3  # data, page.js, uplot.js
    assert not any(key.startswith("on") for _, attributes in elements.found for key in attributes)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert json.loads(elements.raw["script"][0]) == {HOSTILE: HOSTILE}


def test_policy_allows_exactly_our_scripts_and_styles(template: str) -> None:
    elements = parse(page.render(template, title="t", scripts=("uplot.js",), styles=("uplot.css",), text=""))
    policy = next(a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None

    def hashes(kind: str) -> set[str]:
        return set(re.findall(r"sha256-([^']+)", next(p for p in policy.split(";") if kind in p)))

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    assert {digest(code) for code in elements.raw["script"]} == hashes("script-src")
    assert {digest(sheet) for sheet in elements.raw["style"]} == hashes("style-src")
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src 'self'" in page.render(template, title="t", connect=True, text="")


def test_nothing_is_loaded_from_elsewhere(template: str) -> None:
    for tag, attributes in parse(page.render(template, title="t", scripts=("uplot.js",), text="")).found:
        assert not {"src", "href"} & attributes.keys(), tag


def test_numbers_that_json_lacks_become_null() -> None:
    assert page.json_for_script({"a": [float("nan"), float("inf"), 1.5]}) == '{"a":[null,null,1.5]}'


def test_every_table_scrolls_inside_its_box():
    for path in sorted((page.FOLDER / "templates").glob("*.html")):
        text = path.read_text(encoding="utf-8")
        tables = re.findall(r'(.{0,40}\s*)<table(?! class="bars")', text)
        assert all(before.rstrip().endswith('<div class="scroll">') for before in tables), path.name
