"""What a conversation teaches: for each public template's shape, exactly the assistant's characters and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl
from chats import (
    CALL,
    CHAT,
    EDGES,
    LLAMA31,
    MARKED,
    QWEN3,
    R1,
    SHAPES,
    SMOLLM3,
    THOUGHT,
    TOOLS,
    Shape,
    marked,
    said,
)
from transformers import PreTrainedTokenizerFast

from whet.model.text.chat import Passage, render_passages
from whet.model.text.template import BASE_TEMPLATE, render_marked, render_template
from whet.model.text.tokenizer import Tokenizer
from whet.types import UserError

CHATS = {"chat": CHAT, "edges": EDGES, "tools": TOOLS, "thought": THOUGHT}
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
R1_OLD = R1.replace("<think>\\n' }}", "' }}")  # its first template, which left <think> to the model
HEADED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'bot: ' if add_generation_prompt }}"
)
IM = ("<|im_start|>", "<|im_end|>")

# What each shape makes of the conversations, by hand: one text each, what the assistant wrote in ⟦⟧.
EXPECTED: dict[tuple[str, str], list[str]] = {
    ("qwen2.5", "chat"): [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>"
        "assistant\n⟦hi<|im_end|>⟧\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "⟦Hello, hi<|im_end|>⟧\n",
    ],
    ("qwen2.5", "edges"): [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧\n<|im_start|>user\n"
        "hi hi<|im_end|>\n<|im_start|>assistant\n⟦  naïve 😀\nhi<|im_end|>⟧\n",
    ],
    ("qwen2.5", "tools"): [
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n⟦<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>⟧\n<|im_start|>'
        "user\n<tool_response>\nfine\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "⟦It is fine<|im_end|>⟧\n",
    ],
    ("chatml on a base model", "chat"): [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>"
        "assistant\n⟦hi<|im_end|>⟧\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "⟦Hello, hi<|im_end|>⟧\n",
    ],
    ("chatml on a base model", "edges"): [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧\n<|im_start|>user\n"
        "hi hi<|im_end|>\n<|im_start|>assistant\n⟦  naïve 😀\nhi<|im_end|>⟧\n",
    ],
    ("qwen3", "chat"): [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>"
        "assistant\n⟦<think>\n\n</think>\n\nhi<|im_end|>⟧\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>"
        "assistant\nhi<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n"
        "</think>\n\nHello, hi<|im_end|>⟧\n",
    ],
    ("qwen3", "edges"): [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\n<|im_end|>⟧\n",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\n"
        "hi hi<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\n  naïve 😀\nhi<|im_end|>⟧\n",
    ],
    ("qwen3", "tools"): [
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>⟧\n',
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n<|im_start|>'
        "user\n<tool_response>\nfine\n</tool_response><|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n"
        "</think>\n\nIt is fine<|im_end|>⟧\n",
    ],
    ("qwen3", "thought"): [
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nwhy\n</think>\n\n"
        "So.<|im_end|>⟧\n",
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n<|im_start|>user\n"
        "And?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nand\n</think>\n\nYes.<|im_end|>⟧\n",
    ],
    ("llama3.1", "chat"): [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n"
        "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nSay hi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦hi<|eot_id|>⟧<|start_header_id|>"
        "user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "⟦Hello, hi<|eot_id|>⟧",
    ],
    ("llama3.1", "edges"): [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n"
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>"
        "assistant<|end_header_id|>\n\n⟦<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>\n\n"
        "hi hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦naïve 😀\nhi<|eot_id|>⟧",
    ],
    ("llama3.1", "tools"): [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n"
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWeather?<|eot_id|><|start_header_id|>"
        'assistant<|end_header_id|>\n\n⟦{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>⟧'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"fine"<|eot_id|><|start_header_id|>'
        "assistant<|end_header_id|>\n\n⟦It is fine<|eot_id|>⟧",
    ],
    ("mistral", "chat"): [
        "<s> [INST] Be brief.\n\nSay hi [/INST]⟦ hi</s>⟧ [INST] hi [/INST]⟦ Hello, hi</s>⟧",
    ],
    ("mistral", "edges"): [
        "<s> [INST] hi [/INST]⟦ </s>⟧ [INST] hi hi [/INST]⟦   naïve 😀\nhi</s>⟧",
    ],
    ("mistral, system last", "chat"): [
        "<s> [INST] Be brief.\n\nSay hi [/INST]⟦ hi</s>⟧",
        "<s> [INST] Say hi [/INST] hi</s> [INST] Be brief.\n\nhi [/INST]⟦ Hello, hi</s>⟧",
    ],
    ("mistral, system last", "edges"): [
        "<s> [INST] hi [/INST]⟦ </s>⟧ [INST] hi hi [/INST]⟦   naïve 😀\nhi</s>⟧",
    ],
    ("gemma", "chat"): [
        "<bos><start_of_turn>user\nBe brief.\n\nSay hi<end_of_turn>\n<start_of_turn>model\n"
        "⟦hi<end_of_turn>⟧\n<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
        "⟦Hello, hi<end_of_turn>⟧\n",
    ],
    ("gemma", "edges"): [
        "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n⟦<end_of_turn>⟧\n"
        "<start_of_turn>user\nhi hi<end_of_turn>\n<start_of_turn>model\n⟦naïve 😀\nhi<end_of_turn>⟧\n",
    ],
    ("phi3", "chat"): [
        "<|system|>\nBe brief.<|end|>\n<|user|>\nSay hi<|end|>\n<|assistant|>\n⟦hi<|end|>⟧\n<|user|>\n"
        "hi<|end|>\n<|assistant|>\n⟦Hello, hi<|end|>⟧\n<|endoftext|>",
    ],
    ("phi3", "edges"): [
        "<|user|>\nhi<|end|>\n<|assistant|>\n⟦<|end|>⟧\n<|user|>\nhi hi<|end|>\n<|assistant|>\n"
        "⟦  naïve 😀\nhi<|end|>⟧\n<|endoftext|>",
    ],
    ("phi4", "chat"): [
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Say hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦hi<|im_end|>⟧<|im_start|>user<|im_sep|>hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦Hello, hi<|im_end|>⟧",
    ],
    ("phi4", "edges"): [
        "<|im_start|>user<|im_sep|>hi<|im_end|><|im_start|>assistant<|im_sep|>⟦<|im_end|>⟧<|im_start|>"
        "user<|im_sep|>hi hi<|im_end|><|im_start|>assistant<|im_sep|>⟦  naïve 😀\nhi<|im_end|>⟧",
    ],
    ("deepseek-r1", "chat"): [
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Say hi<｜Assistant｜><think>\n⟦\n</think>\n\n"
        "hi<｜end▁of▁sentence｜>⟧",
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Say hi<｜Assistant｜>hi<｜end▁of▁sentence｜><｜User｜>"
        "hi<｜Assistant｜><think>\n⟦\n</think>\n\nHello, hi<｜end▁of▁sentence｜>⟧",
    ],
    ("deepseek-r1", "edges"): [
        "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜><think>\n⟦\n</think>\n\n<｜end▁of▁sentence｜>⟧",
        "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜><｜end▁of▁sentence｜><｜User｜>hi hi<｜Assistant｜>"
        "<think>\n⟦\n</think>\n\n  naïve 😀\nhi<｜end▁of▁sentence｜>⟧",
    ],
    ("deepseek-r1", "tools"): [
        "<｜begin▁of▁sentence｜><｜User｜>Weather?<｜Assistant｜><think>\n⟦\n</think>\n\n<｜tool▁calls▁begin｜>"
        'weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>⟧',
        "<｜begin▁of▁sentence｜><｜User｜>Weather?<｜Assistant｜><｜tool▁calls▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁outputs▁begin｜>'
        "fine<｜tool▁outputs▁end｜>⟦It is fine<｜end▁of▁sentence｜>⟧",
    ],
    ("deepseek-r1", "thought"): [
        "<｜begin▁of▁sentence｜><｜User｜>Why?<｜Assistant｜><think>\n⟦why\n</think>\n\n"
        "So.<｜end▁of▁sentence｜>⟧",
        "<｜begin▁of▁sentence｜><｜User｜>Why?<｜Assistant｜>So.<｜end▁of▁sentence｜><｜User｜>And?<｜Assistant｜>"
        "<think>\n⟦and\n</think>\n\nYes.<｜end▁of▁sentence｜>⟧",
    ],
    ("smollm3", "chat"): [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hi<|im_end|>\n⟦<|im_start|>"
        "assistant\nhi<|im_end|>\n⟧<|im_start|>user\nhi<|im_end|>\n⟦<|im_start|>assistant\n"
        "Hello, hi<|im_end|>\n⟧",
    ],
    ("smollm3", "edges"): [
        "<|im_start|>system\nYou are SmolLM.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n⟦<|im_start|>"
        "assistant\n<|im_end|>\n⟧<|im_start|>user\nhi hi<|im_end|>\n⟦<|im_start|>assistant\n  naïve 😀\n"
        "hi<|im_end|>\n⟧",
    ],
    ("generation blocks", "chat"): [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>"
        "assistant\n⟦hi<|im_end|>⟧\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "⟦Hello, hi<|im_end|>⟧\n",
    ],
    ("generation blocks", "edges"): [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧\n<|im_start|>user\n"
        "hi hi<|im_end|>\n<|im_start|>assistant\n⟦  naïve 😀\nhi<|im_end|>⟧\n",
    ],
    ("gpt-oss", "chat"): [
        "<|start|>developer<|message|>Be brief.<|end|><|start|>user<|message|>Say hi<|end|><|start|>"
        "assistant⟦<|channel|>final<|message|>hi<|return|>⟧",
        "<|start|>developer<|message|>Be brief.<|end|><|start|>user<|message|>Say hi<|end|><|start|>"
        "assistant<|channel|>final<|message|>hi<|end|><|start|>user<|message|>hi<|end|><|start|>"
        "assistant⟦<|channel|>final<|message|>Hello, hi<|return|>⟧",
    ],
    ("gpt-oss", "edges"): [
        "<|start|>user<|message|>hi<|end|><|start|>assistant⟦<|channel|>final<|message|><|return|>⟧",
        "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|><|end|><|start|>"
        "user<|message|>hi hi<|end|><|start|>assistant⟦<|channel|>final<|message|>  naïve 😀\n"
        "hi<|return|>⟧",
    ],
    ("gpt-oss", "tools"): [
        "<|start|>user<|message|>Weather?<|end|><|start|>assistant⟦ to=functions.weather<|channel|>"
        'commentary json<|message|>{"city": "Paris"}<|call|>⟧<|start|>'
        "functions.weather to=assistant<|channel|>commentary<|message|>fine<|end|><|start|>assistant"
        "⟦<|channel|>final<|message|>It is fine<|return|>⟧",
    ],
    ("gpt-oss", "thought"): [
        "<|start|>user<|message|>Why?<|end|><|start|>assistant⟦<|channel|>analysis<|message|>why<|end|>"
        "<|start|>assistant<|channel|>final<|message|>So.<|return|>⟧",
        "<|start|>user<|message|>Why?<|end|><|start|>assistant<|channel|>final<|message|>So.<|end|>"
        "<|start|>user<|message|>And?<|end|><|start|>assistant⟦<|channel|>analysis<|message|>and<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>⟧",
    ],
    ("zephyr", "chat"): [
        "<|system|>\nBe brief.</s>\n<|user|>\nSay hi</s>\n<|assistant|>\n⟦hi</s>⟧\n<|user|>\nhi</s>\n"
        "<|assistant|>\n⟦Hello, hi</s>⟧\n",
    ],
    ("zephyr", "edges"): [
        "<|user|>\nhi</s>\n<|assistant|>\n⟦</s>⟧\n<|user|>\nhi hi</s>\n<|assistant|>\n⟦  naïve 😀\nhi</s>⟧\n",
    ],
    ("tulu3", "chat"): [
        "<|system|>\nBe brief.\n<|user|>\nSay hi\n<|assistant|>\n⟦hi<|end_of_text|>⟧\n<|user|>\nhi\n"
        "<|assistant|>\n⟦Hello, hi<|end_of_text|>⟧",
    ],
    ("tulu3", "edges"): [
        "<|user|>\nhi\n<|assistant|>\n⟦<|end_of_text|>⟧\n<|user|>\nhi hi\n<|assistant|>\n⟦  naïve 😀\n"
        "hi<|end_of_text|>⟧",
    ],
    ("command-r", "chat"): [
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Say hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
        "<|CHATBOT_TOKEN|>⟦hi<|END_OF_TURN_TOKEN|>⟧<|START_OF_TURN_TOKEN|><|USER_TOKEN|>"
        "hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦Hello, hi<|END_OF_TURN_TOKEN|>"
        "⟧",
    ],
    ("command-r", "edges"): [
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
        "<|CHATBOT_TOKEN|>⟦<|END_OF_TURN_TOKEN|>⟧<|START_OF_TURN_TOKEN|><|USER_TOKEN|>"
        "hi hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦naïve 😀\n"
        "hi<|END_OF_TURN_TOKEN|>⟧",
    ],
    ("granite", "chat"): [
        "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n<|start_of_role|>"
        "user<|end_of_role|>Say hi<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
        "⟦hi<|end_of_text|>⟧\n<|start_of_role|>user<|end_of_role|>hi<|end_of_text|>\n<|start_of_role|>"
        "assistant<|end_of_role|>⟦Hello, hi<|end_of_text|>⟧\n",
    ],
    ("granite", "edges"): [
        "<|start_of_role|>user<|end_of_role|>hi<|end_of_text|>\n<|start_of_role|>"
        "assistant<|end_of_role|>⟦<|end_of_text|>⟧\n<|start_of_role|>user<|end_of_role|>"
        "hi hi<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>⟦  naïve 😀\nhi<|end_of_text|>⟧"
        "\n",
    ],
    ("granite", "tools"): [
        "<|start_of_role|>user<|end_of_role|>Weather?<|end_of_text|>\n<|start_of_role|>"
        'assistant<|end_of_role|>⟦<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}'
        "]<|end_of_text|>⟧\n<|start_of_role|>tool_response<|end_of_role|>fine<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦It is fine<|end_of_text|>⟧\n",
    ],
}


def brackets(passage: Passage) -> str:
    """Write a passage's text with what the assistant wrote in ⟦⟧."""
    written, done = "", 0
    for start, end in passage.spans(list(passage.turns)):
        written += f"{passage.text[done:start]}⟦{passage.text[start:end]}⟧"
        done = end
    return written + passage.text[done:]


def learnt(tokenizer: Tokenizer, messages: list[dict[str, Any]], **values: Any) -> list[str]:
    return [brackets(passage) for passage in render_passages(tokenizer, messages, values=values)]


@pytest.mark.some(12)
@pytest.mark.parametrize(("name", "chat"), EXPECTED, ids=lambda value: value.replace(" ", "_"))
def test_exactly_what_the_assistant_wrote_is_learnt(name: str, chat: str) -> None:
    tokenizer = SHAPES[name].tokenizer()
    tokenizer = tokenizer.with_template(tokenizer.chat_template, date="2024-07-26")  # Llama 3.1's own default
    passages = render_passages(tokenizer, CHATS[chat])
    assert [brackets(passage) for passage in passages] == EXPECTED[name, chat]
    for passage in passages:
        ids, trained = tokenizer.encode_marked(passage.text, passage.spans(list(passage.turns)))
        assert list(ids) == tokenizer.encode(passage.text)
        shown, expected = marked(tokenizer, ids, trained), brackets(passage)
        if SHAPES[name].spaces:  # a word's first token shows a space that the text may not have
            shown, expected = shown.replace(" ", ""), expected.replace(" ", "")
        assert shown == expected


def hf(tokenizer: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    roles = {"eos_token": tokenizer.token_text(tokenizer.eos_id or 0)}
    if tokenizer.bos_id is not None:
        roles["bos_token"] = tokenizer.token_text(tokenizer.bos_id)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, chat_template=template, **roles)


def transformers_mask(
    tokenizer: Tokenizer, template: str, messages: list[dict[str, Any]]
) -> tuple[list[int], list[int]]:
    found = hf(tokenizer, template).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(found["input_ids"]), list(found["assistant_masks"])


def byte_level(template: str, *control: str, eos: str = "<|im_end|>", bos: str = "") -> Tokenizer:
    """Make a tokenizer whose offsets keep their spaces, as Qwen's does: transformers looks characters up in them."""
    shape = Shape(template=template, control=(*IM, *control), eos=eos, bos=bos)
    return shape.tokenizer(trim=False)


@pytest.mark.parametrize("template", [MARKED, SMOLLM3], ids=["content", "with_the_header"])
@pytest.mark.parametrize("chat", ["chat", "edges"])
def test_generation_blocks_are_what_transformers_trains(template: str, chat: str) -> None:
    tokenizer = byte_level(template)
    (passage,) = render_passages(tokenizer, CHATS[chat])
    ids, trained = tokenizer.encode_marked(passage.text, passage.spans(list(passage.turns)))
    assert (list(ids), [int(x) for x in trained]) == transformers_mask(tokenizer, template, CHATS[chat])
    assert 0 < sum(trained) < len(ids)


# The templates of public models with generation blocks, as TRL has them, and the control tokens that they need.
BLOCKS: dict[str, tuple[str, ...]] = {
    "qwen2_5_training": (),
    "qwen3_training": (),
    "qwen3_instruct_2507_training": (),
    "qwen3_vl_training": (),
    "lfm2_training": (),
    "llama3_training": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma3_training": ("<start_of_turn>", "<end_of_turn>"),
    "cohere_training": ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "glm4moe_training": ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("name", BLOCKS)
def test_masks_of_public_templates_are_those_of_transformers(name: str) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer = byte_level(template, *BLOCKS[name], bos="<bos>")
    for chat in (CHAT, EDGES, CHAT[1:3]):
        (passage,) = render_passages(tokenizer, chat)
        ids, trained = tokenizer.encode_marked(passage.text, passage.spans(list(passage.turns)))
        theirs = transformers_mask(tokenizer, template, chat)
        assert (list(ids), [int(x) for x in trained]) == theirs
        assert sum(trained) > 1


# Public templates without blocks, beside TRL's copies with them: two ways to find the same words.
ALIKE = ("qwen2_5", "qwen3_instruct_2507", "qwen3_vl", "lfm2", "llama3", "gemma3", "cohere")


@pytest.mark.some(3)
@pytest.mark.parametrize("name", ALIKE)
def test_rendering_prefixes_finds_what_blocks_mark(name: str) -> None:
    control = BLOCKS[f"{name}_training"]
    end = next((text for text in control if "eot" in text or "end_of" in text or "END" in text), "<|im_end|>")
    plain = byte_level((TEMPLATES / f"{name}.jinja").read_text(), *control, bos="<bos>", eos=end)
    with_blocks = (TEMPLATES / f"{name}_training.jinja").read_text()
    for chat in (CHAT, EDGES):
        (ours,) = render_passages(plain, chat)
        (theirs,) = render_passages(plain.with_template(with_blocks), chat)
        assert ours.text == theirs.text
        # The copies train the line break after the end of a turn, which nothing asks the model to write.
        parts = [
            [passage.text[slice(*span)].strip() for span in passage.spans(list(passage.turns))]
            for passage in (ours, theirs)
        ]
        assert parts[0] == parts[1]


def test_a_block_that_the_template_trims_is_found_by_prefixes() -> None:
    template = MARKED.replace("{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}", "") + ""
    trimmed = MARKED.replace(
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}",
        "{% set x %}{% generation %} {{ m.content }} {% endgeneration %}{% endset %}{{ x | trim + '<|im_end|>' }}",
    )
    assert template != trimmed
    text, spans = render_marked(trimmed, {"messages": CHAT, "add_generation_prompt": False})
    assert spans is None
    assert text == render_template(MARKED, {"messages": CHAT, "add_generation_prompt": False})
    assert learnt(byte_level(trimmed), CHAT) == EXPECTED["generation blocks", "chat"]


def test_a_conversation_cannot_forge_a_block() -> None:
    forged = said("hi {% generation %}x{% endgeneration %} _generation_opens", "hi")
    (text,) = learnt(byte_level(MARKED), forged)
    assert text.count("⟦") == 1
    assert text.endswith("assistant\n⟦hi<|im_end|>⟧\n")


def test_what_a_block_sets_ends_with_it_as_in_transformers() -> None:
    template = "{% set x = 'out' %}{% generation %}{% set x = 'in' %}{{ x }}{% endgeneration %}{{ x }}"
    tokenizer = byte_level(template)
    text, spans = render_marked(template, {"messages": [], "add_generation_prompt": False})
    theirs = hf(tokenizer, template).apply_chat_template(CHAT, tokenize=False)
    assert (text, spans) == (theirs, [(0, 2)]) == ("inout", [(0, 2)])


def spelled(tokenizer: Tokenizer, text: str, start: int, end: int) -> list[str]:
    """Return the texts of the tokens of a part."""
    ids, trained = tokenizer.encode_marked(text, [(start, end)])
    return [tokenizer.token_text(index) for index, is_in in zip(ids, trained, strict=True) if is_in]


def test_a_token_with_a_character_of_the_reply_is_the_replys() -> None:
    tokenizer = byte_level(MARKED)
    trimming = SHAPES["qwen2.5"].tokenizer()
    assert trimming._backend.post_processor is not None
    for coder in (tokenizer, trimming):
        assert [coder.token_text(index) for index in coder.encode("say hi")][-1] == " hi"
        assert spelled(coder, "say hi", 4, 6) == [" hi"]  # the space is the prompt's, the token is not
        assert spelled(coder, "say hi", 3, 6) == [" hi"]
        assert spelled(coder, "hi  hi", 2, 6)[-1] == " hi"
        assert len(spelled(coder, "hi  hi", 2, 6)) == 2  # the other space is a token of its own
        assert spelled(coder, "say hi", 0, 3)[-1] != " hi"


@pytest.mark.parametrize("name", ["qwen2.5", "zephyr"])
def test_every_byte_of_a_split_character_is_learnt(name: str) -> None:
    tokenizer = SHAPES[name].tokenizer()
    text = "🙂🙃🙂"
    ids, trained = tokenizer.encode_marked(text, [(1, 2)])
    assert tokenizer.decode(ids) == text
    assert (
        sum(trained) == {"qwen2.5": 3, "zephyr": 4}[name]
    )  # two bytes of such signs are one token of GPT-2's
    place = trained.index(True)
    assert tokenizer.decode_completion(ids[:place], ids[place : place + sum(trained)]) == "🙃"


def test_a_control_token_that_swallows_white_space_is_not_learnt() -> None:
    """Phi-3's <|assistant|> takes the line breaks after it, those of the reply, too."""
    tokenizer = SHAPES["phi3"].tokenizer(swallows=("<|assistant|>", "<|end|>"))
    (passage,) = render_passages(tokenizer, said("Say hi", "\n\nhi"))
    ids, trained = tokenizer.encode_marked(passage.text, passage.spans([1]))
    written = [tokenizer.token_text(i) for i, is_in in zip(ids, trained, strict=True) if is_in]
    assert "".join(written).strip() == "hi<|end|>"


def test_bos_is_that_of_prompts() -> None:
    tokenizer = SHAPES["llama3.1"].tokenizer()
    assert tokenizer.encode_marked("<|begin_of_text|>hi", [])[0] == tuple(
        tokenizer.encode("<|begin_of_text|>hi")
    )
    adding = Tokenizer(
        tokenizer._backend, roles=tokenizer._roles, adds_bos=True, chat_template=LLAMA31, prompt_bos=True
    )
    for text in ("hi", "<|begin_of_text|>hi"):
        ids, trained = adding.encode_marked(text, [(len(text) - 2, len(text))])
        assert list(ids) == [adding.bos_id, *tokenizer.encode("hi")]
        assert trained == (False, *(True,) * (len(ids) - 1))


def test_a_template_without_an_end_gets_eos_in_a_text_of_each_turn() -> None:
    tokenizer = byte_level(BASE_TEMPLATE, eos="<|endoftext|>")
    assert learnt(tokenizer, CHAT) == [
        "Be brief.\n\nQuestion: Say hi\nAnswer:\n⟦hi<|endoftext|>⟧",
        "Be brief.\n\nQuestion: Say hi\nAnswer:\nhi\n\nQuestion: hi\nAnswer:\n⟦Hello, hi<|endoftext|>⟧",
    ]
    # A control token that the reply itself ends with is no end, unless generation stops at it.
    ending = said("Say hi", "hi<|im_start|>")
    assert learnt(tokenizer, ending) == ["Question: Say hi\nAnswer:\n⟦hi<|im_start|><|endoftext|>⟧"]
    stop = tokenizer.encode("<|im_start|>")
    (passage,) = render_passages(tokenizer, ending, stop_ids=stop)
    assert brackets(passage) == "Question: Say hi\nAnswer:\n⟦hi<|im_start|>⟧\n\n"


@pytest.mark.parametrize(
    ("template", "reply", "expected"),
    [
        (QWEN3, "<think>\nwhy\n</think>\n\nSo.", "<think>\nwhy\n</think>\n\nSo.<|im_end|>"),
        (R1, "<think>\nwhy\n</think>\n\nSo.", "why\n</think>\n\nSo.<|im_end|>"),
        (R1, "why\n</think>\n\nSo.", "why\n</think>\n\nSo.<|im_end|>"),
        (
            R1.replace("<think>\\n' }}", "' }}"),
            "<think>\nwhy\n</think>\n\nSo.",
            "<think>\nwhy\n</think>\n\nSo.<|im_end|>",
        ),
        (MARKED, "<think>\nwhy\n</think>\n\nSo.", "<think>\nwhy\n</think>\n\nSo.<|im_end|>"),
    ],
)
def test_thinking_inside_a_reply_is_learnt_once(template: str, reply: str, expected: str) -> None:
    tokenizer = byte_level(template, bos="<bos>")
    (passage,) = render_passages(tokenizer, said("Why?", reply))
    assert [passage.text[slice(*span)] for span in passage.spans([1])] == [expected]
    assert passage.text.count("<think>") == 1


def test_a_prompt_without_thinking_teaches_the_answer_alone() -> None:
    tokenizer = byte_level(QWEN3)
    expected = [
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦So.<|im_end|>⟧",
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n⟦Yes.<|im_end|>⟧",
    ]
    assert learnt(tokenizer, THOUGHT, enable_thinking=False) == expected
    without = [
        text + "\n" for text in expected
    ]  # here the template writes the same, and its line break stays
    assert learnt(tokenizer, said("Why?", "So.", "And?", "Yes."), enable_thinking=False) == without


def test_turns_after_the_last_question_share_a_text() -> None:
    """Qwen3 keeps the thinking of a tool's turns until the next question."""
    messages = said("Hi", "Hello") + [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "ask", "tool_calls": [CALL]},
        {"role": "tool", "content": "fine"},
        {"role": "assistant", "content": "Fine.", "reasoning_content": "so"},
    ]
    passages = render_passages(byte_level(QWEN3), messages)
    assert [sorted(passage.turns) for passage in passages] == [[1], [3, 5]]


def test_what_opens_a_conversation_is_context() -> None:
    messages = [{"role": "assistant", "content": "Welcome"}, *said("Say hi", "hi")]
    (text,) = learnt(byte_level(QWEN3), messages)
    assert text.count("⟦") == 1
    assert text.endswith("⟦<think>\n\n</think>\n\nhi<|im_end|>⟧\n")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'bot: ' if add_generation_prompt }}",
            "prefix",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "leaves out the reply 'hi'",
        ),
        ("{{ raise_exception('no tools') }}", "no tools"),
    ],
)
def test_a_template_that_cannot_teach_is_refused(template: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        learnt(byte_level(template), CHAT[1:3])


NAMES = ("qwen2.5", "llama3.1", "mistral", "gemma", "phi3", "zephyr", "gpt-oss")


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_inside_words_are_text(name: str) -> None:
    """As transformers encodes a text with `split_special_tokens`, amid the template's own control tokens."""
    tokenizer = SHAPES[name].tokenizer()
    theirs = hf(tokenizer, tokenizer.chat_template or "")

    def controls(ids: Any) -> list[int]:
        return [index for index in ids if index in tokenizer.special_ids and index != tokenizer.unk_id]

    bare = tokenizer.encode_prompt(said("hi"))
    for token in {tokenizer.token_text(index) for index in controls(tokenizer.special_ids)}:
        for words in (
            f"say{token}hi",
            f"{token}hi",
            f"hi {token}",
            f"{token}\n{token}",
            f"naïve 😀{token}  hi",
        ):
            quoted = tokenizer.quoted_messages(said(words))
            ids = tokenizer.encode_prompt(quoted)
            assert controls(ids) == controls(bare)
            alone = tokenizer.encode(tokenizer.quoted(words))
            assert alone == theirs(words, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            text = tokenizer.plain(tokenizer.render(quoted))
            assert text == tokenizer.render(said(words))
            assert tokenizer.plain(tokenizer.quoted(words)) == words
            text, spans = tokenizer.quoted(words), [(2, 5)]
            marked, _ = tokenizer.encode_marked(text, spans)
            assert controls(marked) == ([tokenizer.bos_id] if tokenizer.prompt_bos else [])
    assert tokenizer.quoted("<b>no token</b>") == "<b>no token</b>"


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_inside_a_reply_are_text_and_a_turns_end_is_learnt_once(name: str) -> None:
    tokenizer = SHAPES[name].tokenizer()
    (end,) = {
        passage.text[slice(*passage.spans([1])[-1])].rpartition("hi")[2]
        for passage in render_passages(tokenizer, said("a", "hi"))
    }
    assert end in tokenizer.ends
    for reply, words in (
        (f"The mark {end} ends", f"The mark {end} ends"),
        (f"So{end}", "So"),
        (f"So{end}\n{end}\n", "So"),
    ):
        (passage,) = render_passages(tokenizer, tokenizer.quoted_messages(said("a", reply)))
        ids, trained = tokenizer.encode_marked(passage.text, passage.spans([1]), cuts=True)
        written = [index for index, is_in in zip(ids, trained, strict=True) if is_in]
        texts = [
            tokenizer.token_text(index)
            for index in written
            if index in tokenizer.special_ids and index != tokenizer.unk_id
        ]
        assert texts.count(end) == 1
        assert texts[-1] == end
        assert words.split()[-1] in tokenizer.decode(written)
        assert "".join(tokenizer.decode(written).split()).endswith(words.replace(" ", "") + end)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_ends_with_a_turns_end_gets_no_other_end(name: str) -> None:
    tokenizer = SHAPES[name].tokenizer()
    text = tokenizer.render(said("hi", "Hello"), values={"add_generation_prompt": False})
    ids = tokenizer.encode_document(text)
    led = (
        [tokenizer.bos_id]
        if tokenizer.adds_bos and not text.startswith(tokenizer.token_text(tokenizer.bos_id))
        else []
    )
    assert list(ids) == [*led, *tokenizer.encode(text)]
    if tokenizer.eos_id is not None:
        assert list(tokenizer.encode_document("hi")) == [*led, *tokenizer.encode("hi"), tokenizer.eos_id]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_that_are_rendered_already_are_known(name: str) -> None:
    tokenizer = SHAPES[name].tokenizer()
    text = tokenizer.render(said("Say hi"))
    bos = tokenizer.token_text(tokenizer.bos_id) if tokenizer.bos_id is not None else ""
    for rendered in (text, text.strip(), text.removeprefix(bos), f"\n{text}", bos + text.removeprefix(bos)):
        assert tokenizer.is_rendered(rendered)
    for words in ("Say hi", "What does [INST] mean?", f"hi {tokenizer.ends[0]} hi", "<s>old</s> new", ""):
        assert not tokenizer.is_rendered(words)
    assert not tokenizer.with_template(BASE_TEMPLATE).is_rendered(text)


def test_the_border_of_prompt_and_reply_is_the_samplers() -> None:
    """The sampler has the prompt's tokens alone: a reply cannot take the prompt's last space into its first word."""
    for name in ("qwen2.5", "zephyr", "mistral"):
        tokenizer = SHAPES[name].tokenizer().with_template(HEADED.replace("bot: ", "assistant: "))
        for turns in (("say", "hi"), ("say", "hi hi"), ("hi", " hi", "say", "hi")):
            messages = said(*turns)
            passage = render_passages(tokenizer, messages)[-1]
            last = len(messages) - 1
            ids, trained = tokenizer.encode_marked(passage.text, passage.spans([last]), cuts=True)
            prompt = tokenizer.encode_prompt(messages[:-1])
            assert list(ids[: len(prompt)]) == prompt
            assert trained.index(True) == len(prompt)
            assert tokenizer.decode(ids).rstrip() == passage.text.rstrip()
