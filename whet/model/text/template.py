"""Untrusted chat templates, rendered in jinja2's sandbox within limits; and whet's own two templates."""

from __future__ import annotations

import datetime
import functools
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.filters import do_indent
from jinja2.sandbox import ImmutableSandboxedEnvironment

from whet.sandbox.graders.graders import GraderPool
from whet.types import UserError

BASE_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\nAnswer:\n' }}"
    "{% else %}{{ message['content'] + '\n\n' }}{% endif %}"
    "{% endfor %}"
)
"""For base models without a template, any domain. The cue ends with a line break: a trailing space would be a token
that training texts never have there, because BPE joins a space to the next word."""

BASE_STOP = "\nQuestion:"
"""Where a base model that was asked by `BASE_TEMPLATE` goes on to ask itself the next question."""

PLAIN_TEMPLATE = (
    "{% for message in messages if message['role'] != 'system' %}{{ message['content'] }}{% endfor %}"
)
"""Nothing but the user text: for from-scratch models, which read no instructions."""

MAX_TEMPLATE_CHARS = 64 * 2**10
MAX_RENDERED_CHARS = 2**22
MAX_RANGE = 100_000
MAX_RENDER_S = 10.0
TODAY = "_today"
"""Key of the date in a template's values: a fixed one, so that prompts do not change overnight."""
TRIAL_S, TRIAL_MIB = 2.0, 512
"""Limits of the first rendering of an untrusted template, in a separate process."""
MARKS = ("_generation_opens", "_generation_closes")
"""Names whose values a generation block is written between."""
NARROW = re.compile(r"(?:[^%]|%%|%[-+ 0]?\d{0,2}(?:\.\d)?[sdfgx])*")
"""Formats whose fields take no more than a hundred characters beside their values."""
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""The start of a generation block in a template."""


def failure(source: str, values: Mapping[str, Any]) -> str:
    """Render, and return the template's error; '' if there is none."""
    try:
        render_template(source, values)
    except UserError as error:
        return str(error)
    return ""


_passed: set[str] = set()
"""Templates whose trial went well in this process: one takes a third of a second."""


def try_template(source: str, calls: Sequence[Mapping[str, Any]]) -> None:
    """Render an untrusted template in a killable process first, before this one renders it for the first time.

    Args:
        source: Jinja source; our own are trusted.
        calls: Values of `render_template`; each is tried.

    Raises:
        UserError: If the template fails, or takes too long or too much memory.
    """
    if source in (BASE_TEMPLATE, PLAIN_TEMPLATE) or source in _passed:
        return
    with GraderPool(f"{__name__}:failure", deadline_s=TRIAL_S, memory_mib=TRIAL_MIB, num_workers=1) as pool:
        for outcome in pool.map([(source, dict(values)) for values in calls]):
            if outcome.kind != "ok" or outcome.value:
                raise UserError(outcome.value or f"chat template fails: {outcome.message[:200]}")
    _passed.add(source)


def check_template(source: str) -> None:
    """Refuse an implausibly long template."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise UserError(
            f"chat template has {len(source):,} characters; expected at most {MAX_TEMPLATE_CHARS:,}"
        )


class _Generation(jinja2.ext.Extension):
    """Render `{% generation %}` blocks (which mark assistant text for trainers) as their body, between the values of
    `MARKS`: nothing, unless `render_marked` gives them."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opened, closed = (jinja2.nodes.Output([jinja2.nodes.Name(name, "load")]) for name in MARKS)
        return jinja2.nodes.Scope(
            [opened, *body, closed]
        )  # as in transformers, what a block sets ends with it


class _Unfolded(CodeGenerator):
    """Disables constant folding: text that a template never renders must not cost anything at compile time."""

    def _output_child_to_const(self, node: jinja2.nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Sandbox(ImmutableSandboxedEnvironment):
    """No attribute escapes, no mutation, and no cheap ways to fill memory."""

    code_generator_class = _Unfolded
    intercepted_binops = frozenset({"**", "*", "%"})  # intercepted operators are not folded at compile time
    padding_methods = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Allow only small arithmetic."""
        sizes = [len(side) if isinstance(side, (str, list, tuple)) else abs(side) for side in (left, right)]
        if (
            operator == "**"
            or (operator == "%" and isinstance(left, str) and not NARROW.fullmatch(left))
            or (operator == "*" and sizes[0] * sizes[1] > 2**53)
        ):
            raise SecurityError(f"operator {operator} is not allowed on {left!r:.40} and {right!r:.40}")
        if (
            operator == "*"
            and not all(isinstance(side, (int, float)) for side in (left, right))
            and sizes[0] * sizes[1] > MAX_RANGE
        ):
            raise SecurityError("repetition too long")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> None:
        """Leave `str.format` to `is_safe_attribute`, which refuses it."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse string methods that pad to any width."""
        return super().is_safe_attribute(obj, attr, value) and not (
            isinstance(obj, str) and attr in self.padding_methods
        )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _format(text: str, *values: Any) -> str:
    if not NARROW.fullmatch(text):
        raise SecurityError(f"format {text!r:.40} is not allowed")
    return text % values


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    """Compile as transformers does (block trimming, loop controls, helpers), minus the filters that pad."""
    extensions = [_Generation, jinja2.ext.loopcontrols]
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
    for name in ("center", "wordwrap"):
        del sandbox.filters[name]
    sandbox.filters["format"] = _format
    sandbox.filters["indent"] = lambda text, width=4, first=False, blank=False: do_indent(
        text, min(int(width), 80), first, blank
    )
    del sandbox.globals["lipsum"]
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    return sandbox.from_string(source)


def render_template(source: str, values: Mapping[str, Any]) -> str:
    """Render with limits on output, ranges and time.

    Loops without output, and strings doubled by `~` or `+`, escape these limits: call `try_template` first.

    Args:
        source: Jinja source.
        values: Names that the template sees: messages, add_generation_prompt, bos_token, eos_token, ...; and under
            `TODAY` the date of its function strftime_now, as YYYY-MM-DD.

    Returns:
        The text.

    Raises:
        UserError: If the template fails or exceeds a limit.
    """
    budget = MAX_RANGE

    def bounded_range(*arguments: int) -> range:
        nonlocal budget
        numbers = range(*arguments)
        budget -= len(numbers)
        if budget < 0:
            raise SecurityError(f"ranges of more than {MAX_RANGE:,} steps in all")
        return numbers

    deadline = time.monotonic() + MAX_RENDER_S
    pieces, num_chars = [], 0
    try:
        today = datetime.datetime.fromisoformat(values.get(TODAY) or datetime.date.today().isoformat())
        functions = {"range": bounded_range, "strftime_now": today.strftime}
        given = {"tools": None, "documents": None, **values, **functions}
        for piece in _compile(source).generate(given):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS or time.monotonic() > deadline:
                raise SecurityError(f"more than {MAX_RENDERED_CHARS:,} characters or {MAX_RENDER_S:g} s")
    except Exception as error:  # anything that an untrusted template may raise
        raise UserError(f"chat template fails: {type(error).__name__}: {str(error)[:200]}") from error
    return "".join(pieces)


def render_marked(source: str, values: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]] | None]:
    """Render, and find what the template's generation blocks wrote.

    Args:
        source: Jinja source.
        values: As for `render_template`.

    Returns:
        The text of `render_template`, and (start, end) of each generation block in it, in characters; None if the
        template has no such blocks, or changes what they wrote (trims it, say), so that it cannot be found again.

    Raises:
        UserError: If the template fails or exceeds a limit.
    """
    text = render_template(source, values)
    if not GENERATION.search(source):
        return text, None
    # No text of a conversation holds marks that nobody could know before.
    secret = secrets.token_hex(8)
    opened, closed = f"\x02{secret}\x02", f"\x03{secret}\x03"
    marked = render_template(source, {**values, **dict(zip(MARKS, (opened, closed), strict=True))})
    plain, spans, depth = "", [], 0
    for piece in re.split(f"({opened}|{closed})", marked):
        if piece == opened:
            if depth == 0:
                spans.append((len(plain), len(plain)))
            depth += 1
        elif piece == closed:
            depth -= 1
            if depth == 0:
                spans[-1] = (spans[-1][0], len(plain))
        else:
            plain += piece
    if plain != text or depth != 0:
        return text, None
    return text, [span for span in spans if span[0] < span[1]]
