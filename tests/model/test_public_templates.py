"""Chat templates of public models render as in transformers: the same text, the same ids, or both refuse.

The templates are those that TRL ships (Apache-2.0, read where it is installed), and our own short ones with the
features of families that it lacks.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import trl
from chats import CALL, CHAT, EDGES, OTHERS, SHAPES, THOUGHT, Shape, said
from transformers import PreTrainedTokenizerFast

from whet.model.text.tokenizer import Tokenizer
from whet.types import UserError

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
PUBLIC = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))
DATE = datetime.date.today().isoformat()

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Look <outside> & say «fine»",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where", "enum": ["Paris", "Rome"]},
                "days": {"type": ["integer", "null"], "default": 1},
                "units": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
    },
}
SPELLED = {
    "type": "function",
    "id": "abc123def",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "abc123def"}]},
    {"role": "tool", "content": "fine", "name": "weather", "tool_call_id": "abc123def"},
]
TWICE = [*ASKED, {"role": "assistant", "content": "Fine", "reasoning_content": "It is."}, *said("And <b>?")]
PARTS = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}]},
]
Case = tuple[list[dict[str, Any]], dict[str, Any]]
CASES: dict[str, Case] = {
    "chat": (CHAT[:-1], {}),
    "no cue": (CHAT, {"add_generation_prompt": False}),
    "edges": (EDGES, {}),
    "thoughts": ([*THOUGHT, *said("Sure?")], {}),
    "thinking off": (CHAT[:2], {"enable_thinking": False, "thinking": False}),
    "thinking on": (CHAT[:2], {"enable_thinking": True, "reasoning_effort": "high"}),
    "tools": (ASKED[:2], {"tools": [WEATHER]}),
    "calls": (ASKED, {"tools": [WEATHER]}),
    "two calls": (
        [*ASKED[:2], ASKED[2] | {"tool_calls": [CALL, CALL], "content": None}],
        {"tools": [WEATHER]},
    ),
    "arguments as text": ([*ASKED[:2], {"role": "assistant", "tool_calls": [SPELLED]}, ASKED[3]], {}),
    "after calls": (TWICE, {"tools": [WEATHER]}),
    "developer": ([{"role": "developer", "content": "Be brief."}, *CHAT[1:2]], {}),
    "parts": (PARTS, {}),
    "documents": (CHAT[:2], {"documents": [{"title": "Naïve", "text": "<1>"}, {"title": "B", "text": "2"}]}),
    "goes on": (CHAT, {"continue_final_message": True}),
    "goes on, trimmed": (
        [*CHAT[:2], {"role": "assistant", "content": "It is \n"}],
        {"continue_final_message": True},
    ),
}


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the trial in another process out: these templates are known, and others test it."""
    monkeypatch.setattr("whet.model.text.tokenizer.try_template", lambda source, calls: None)


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    """A byte-level tokenizer with the control tokens of several families."""
    control = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<end_of_turn>", "<think>")
    return Shape(template="", control=control, eos="<|endoftext|>", bos="<bos>").tokenizer(trim=False)


def compare(tokenizer: Tokenizer, template: str) -> None:
    """Render each case with whet and with transformers: some work, the others are refused by both."""
    ours, num_rendered = tokenizer.with_template(template, date=DATE), 0
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, **tokenizer._roles)
    for name, (messages, values) in CASES.items():
        values = {"add_generation_prompt": "continue_final_message" not in values, **values}
        try:
            text = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **values)
            expected = text, theirs.encode(text, add_special_tokens=False)
        except Exception as error:  # of the template, of jinja2, of transformers
            expected = type(error).__name__, []
        try:
            got = ours.render(messages, values=values), ours.encode_prompt(messages, values=values)
        except UserError as error:
            is_known = expected[0] in str(error) or expected[0] in ("ValueError", "TemplateError")
            got = (expected[0] if is_known else str(error)), []
        assert got == expected, name
        num_rendered += bool(expected[1])
    assert num_rendered > 0


@pytest.mark.some(12)
@pytest.mark.parametrize("name", PUBLIC)
def test_public_templates_render_as_in_transformers(name: str, plain: Tokenizer) -> None:
    compare(plain, (TEMPLATES / f"{name}.jinja").read_text())


def test_there_are_public_templates() -> None:
    assert len(PUBLIC) >= 40


@pytest.mark.parametrize("name", [*SHAPES, *OTHERS])
def test_shapes_render_as_in_transformers(name: str) -> None:
    tokenizer = (SHAPES | OTHERS)[name].tokenizer()
    compare(tokenizer, tokenizer.chat_template or "")
