"""Self-contained HTML pages: one file, no network; model-written text is never read as markup.

A page is a jinja2 template (autoescaped) with styles and scripts of this package inlined and allowed by their hashes:
an injected script or handler would not run even if escaping were missing somewhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from whet import __version__
from whet.telemetry.display import escape_controls

FOLDER = Path(__file__).parent
STYLES = ("page.css",)


def render(
    template: str,
    *,
    title: str,
    data: Mapping[str, Any] | None = None,
    scripts: Sequence[str] = (),
    styles: Sequence[str] = (),
    connect: bool = False,
    **values: Any,
) -> str:
    """Render a page.

    Args:
        template: File in `templates/`; it extends base.html and fills its block `main`.
        title: Title and heading.
        data: JSON values that scripts read with `pageData(name)`; NaN and infinities become null.
        scripts: Files in `static/`, in order; page.js is put first automatically.
        styles: Files in `static/` besides page.css.
        connect: Whether the page may connect to its own server; otherwise it has no network access.
        values: Template values. Text is escaped; control and direction characters are made visible.

    Returns:
        The complete HTML file.
    """
    scripts = ("page.js", *scripts)
    sheets = [_static(name) for name in (*STYLES, *styles)]
    codes = [_static(name) for name in scripts]
    policy = [
        "default-src 'none'",
        "img-src data: blob:",
        f"style-src {' '.join(map(_hash, sheets))}",
        f"script-src {' '.join(map(_hash, codes)) or chr(39) + 'none' + chr(39)}",
        f"connect-src {chr(39)}{'self' if connect else 'none'}{chr(39)}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return (
        _environment()
        .get_template(template)
        .render(
            title=title,
            version=__version__,
            policy=Markup("; ".join(policy)),  # only hashes and keywords
            styles=[Markup(sheet) for sheet in sheets],
            scripts=[Markup(code) for code in codes],
            data={name: json_for_script(value) for name, value in (data or {}).items()},
            **values,
        )
    )


def json_for_script(value: Any) -> Markup:
    r"""Encode a value as JSON that no HTML parser reads as markup: <, >, & and line separators are \u escapes.

    Args:
        value: JSON value; NaN and infinities in it become null.
    """
    text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


@cache
def _static(name: str) -> str:
    text = (FOLDER / "static" / name).read_text(encoding="utf-8")
    assert "</script" not in text, name  # it would close its own script element
    assert "</style" not in text, name
    return text


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _shown(value: Any) -> Any:
    """Make the control and direction characters of printed text visible."""
    return escape_controls(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters["percent"] = lambda share, digits=1: f"{100 * share:.{digits}f} %"
    return environment
