"""Templates: our own in words, and hostile ones."""

from __future__ import annotations

import time

import pytest

from whet.model.text.template import BASE_TEMPLATE, render_template
from whet.model.text.tokenizer import Tokenizer
from whet.types import UserError

MESSAGES = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}]


def test_base_template_in_words() -> None:
    prompt = Tokenizer.bytes().with_template(BASE_TEMPLATE).render(MESSAGES, prefix="<think>")
    assert prompt == "Think.\n\nQuestion: 1+1?\nAnswer:\n<think>"


@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].missing.more }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely|SecurityError"),
        ("{{ 'a' * 2000000000 }}", "too long"),
        ("{{ 10 ** 10000000 }}", "not allowed"),
        ("{{ '%1000000000d' % 1 }}", "not allowed"),
        ("{{ '%1000000000d'|format(1) }}", "not allowed"),
        ("{{ '%.*f'|format(1000000000, 1) }}", "not allowed"),
        ("{{ '{:1000000000d}'.format(1) }}", "unsafe"),
        ("{{ 'a'.ljust(2000000000) }}", "unsafe"),
        ("{{ 'a'|center(2000000000) }}", "center"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "ranges of more"),
        ("{% set text = 'a' * 99999 %}{% for i in range(99999) %}{{ text }}{% endfor %}", "characters or"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_bad_template_is_a_user_error(template: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Tokenizer.bytes().with_template(template).render(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ 0 if add_generation_prompt }}!",
    ],
)
def test_a_template_that_rewrites_earlier_messages_asks_once_but_plays_no_episode(template: str) -> None:
    tokenizer = Tokenizer.bytes().with_template(template)
    assert MESSAGES[-1]["content"] in tokenizer.render(MESSAGES)
    with pytest.raises(UserError, match="not prefix-preserving"):
        tokenizer.encode_next("more")


def test_template_length_is_bounded() -> None:
    with pytest.raises(UserError, match="65,537 characters; expected at most 65,536"):
        Tokenizer.bytes().with_template("a" * 65537)


DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "template",
    [
        DOUBLED,
        DOUBLED.replace("'ab'", "[1]").replace("~ ns.x", "+ ns.x"),
        DOUBLED.replace("'ab'", "[1]").replace("ns.x ~ ns.x", "[ns.x, ns.x]"),
        "{% set a = 'a' * 99999 %}{{ a|replace('a', a) }}",
        "{% for a in 'a' * 9999 %}{% for b in 'a' * 9999 %}{% endfor %}{% endfor %}",
        "{{ [1]|batch(999999999999, 'x')|list }}",
    ],
)
def test_template_that_fills_memory_or_hangs_is_killed_elsewhere(template: str) -> None:
    with pytest.raises(UserError, match="chat template fails"):
        Tokenizer.bytes().with_template(template).render(MESSAGES)


def test_what_is_never_rendered_costs_nothing() -> None:
    """jinja2 computes constants while it compiles: this list would take 19 s and gigabytes, for nothing."""
    began = time.process_time()
    assert render_template("{% for _ in () %}{{ [1,2]|batch(99999999, 'x')|list }}{% endfor %}ok", {}) == "ok"
    assert time.process_time() - began < 1
