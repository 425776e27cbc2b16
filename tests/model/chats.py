"""Chat templates in the shapes of public models, in our own short words, each with a tiny tokenizer that has their
control tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from whet.model.text.tokenizer import Tokenizer

TEXTS = [
    "Hello there, how are you? I am well. You are a helpful assistant.\n\nBe brief, and say hi hi hi.\n\n",
    "user assistant system tool model What is the weather in Paris? The weather is fine, and so am I.\n",
    "  two spaces   three; naïve façade 😀 日本語 <think> </think> {'a': 1} [INST] [/INST]",
]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A template with its tokens.

    Attributes:
        template: Jinja source.
        control: Control tokens of the vocabulary.
        eos: End of text.
        bos: Start of text, as the template's bos_token; '' for none.
        stops: Further tokens at which generation stops, as generation_config.json has them.
        spaces: Whether words carry their space as SentencePiece has it, else as GPT-2 has it.
    """

    template: str
    control: tuple[str, ...]
    eos: str
    bos: str = ""
    stops: tuple[str, ...] = ()
    spaces: bool = False

    def tokenizer(self, *, trim: bool = True, swallows: Sequence[str] = ()) -> Tokenizer:
        """Train the tokenizer on a few sentences.

        Args:
            trim: Whether the post-processor cuts spaces off offsets, as that of Llama 3 does.
            swallows: Control tokens that take the white space after them.
        """
        backend = sentencepiece() if self.spaces else gpt2(trim=trim)
        control = [*self.control, self.eos, *([self.bos] if self.bos else [])]
        backend.add_special_tokens(
            [AddedToken(text, special=True, normalized=False, rstrip=text in swallows) for text in control]
        )
        roles = {"eos_token": self.eos} | ({"bos_token": self.bos} if self.bos else {})
        stops = [index for text in self.stops if (index := backend.token_to_id(text)) is not None]
        return Tokenizer(backend, roles=roles, chat_template=self.template, stop_ids=stops)


def gpt2(*, trim: bool) -> Backend:
    """Train a byte-level vocabulary."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS * 4, trainer)
    return backend


def sentencepiece() -> Backend:
    """Train a vocabulary with bytes for what it does not know, and a space before the first word, as Llama 2 has it."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Backend(models.BPE(unk_token="<unk>"))
    marked = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.normalizer = marked
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", *pieces], limit_alphabet=70, show_progress=False
    )
    trained.train_from_iterator(TEXTS * 4, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Backend(
        models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = marked
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def marked(tokenizer: Tokenizer, ids: Sequence[int], trained: Sequence[bool]) -> str:
    """Write the tokens as text, the trained ones in ⟦⟧."""
    text, done = "", 0
    for is_trained, run in groupby(trained):
        count = len(list(run))
        piece = tokenizer.decode_completion(ids[:done], ids[done : done + count])
        text += f"⟦{piece}⟧" if is_trained else piece
        done += count
    return text


def said(*turns: str, system: str = "") -> list[dict[str, Any]]:
    """Make a conversation: the user's and the assistant's words in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]
    return [{"role": "system", "content": system}, *messages] if system else messages


CHAT = said("Say hi", "hi", "hi", "Hello, hi", system="Be brief.")
EDGES = said("hi", "", "hi hi", "  naïve 😀\nhi")
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "fine", "name": "weather"},
    {"role": "assistant", "content": "It is fine"},
]
THOUGHT = said("Why?", "So.", "And?", "Yes.")
THOUGHT[1] |= {"reasoning_content": "why", "thinking": "why"}
THOUGHT[3] |= {"reasoning_content": "and", "thinking": "and"}

CHATML = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.tool_calls %}
{{- '<|im_start|>assistant' }}
{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN3 = """\
{%- set ns = namespace(query=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
{%- set content = m.content %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.query and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}
{%- for call in m.tool_calls %}
{{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA31 = """\
{{- bos_token }}
{%- set date = date_string if date_string is defined else strftime_now('%d %b %Y') %}
{%- if messages[0].role == 'system' %}
{%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}{%- set system, rest = '', messages %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n\\n' + system + '<|eot_id|>' }}
{%- for m in rest %}
{%- if m.tool_calls %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- m.content | tojson }}{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL = """\
{%- if messages[0].role == 'system' %}
{%- set system, rest = messages[0].content + '\\n\\n', messages[1:] %}
{%- else %}{%- set system, rest = '', messages %}{%- endif %}
{{- bos_token }}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- if m.role == 'user' %}{{- ' [INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}
{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}
{%- endfor %}"""

MISTRAL_LAST = MISTRAL.replace(
    "system if loop.first", "system if m == rest | selectattr('role', 'eq', 'user') | list | last"
)

GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set system, rest = messages[0].content + '\\n\\n', messages[1:] %}
{%- else %}{%- set system, rest = '', messages %}{%- endif %}
{%- for m in rest %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (system if loop.first else '') }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

PHI3 = """\
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}"""

PHI4 = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{%- endif %}"""

R1 = """\
{%- set ns = namespace(is_tool=false, system='') %}
{%- for m in messages %}{%- if m.role == 'system' %}{%- set ns.system = m.content %}{%- endif %}{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.is_tool = false %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' + m.tool_calls[0].function.name + '<｜tool▁sep｜>' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}
{%- set ns.is_tool = true %}{{- '<｜tool▁outputs▁begin｜>' + m.content }}
{%- elif m.role == 'assistant' and ns.is_tool %}
{{- '<｜tool▁outputs▁end｜>' + m.content + '<｜end▁of▁sentence｜>' }}{%- set ns.is_tool = false %}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""

SMOLLM3 = """\
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You are SmolLM.') }}
{{- '<|im_end|>\\n' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- generation %}
{{- '<|im_start|>assistant\\n' + m.content.lstrip('\\n') + '<|im_end|>\\n' }}
{%- endgeneration %}
{%- elif m.role != 'system' %}
{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

MARKED = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

GPT_OSS = """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{- '<|start|>developer<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- elif m.tool_calls %}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{- '<|call|>' }}
{%- elif loop.last and not add_generation_prompt %}
{%- if 'thinking' in m %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

ZEPHYR = """\
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""

TULU3 = """\
{%- for m in messages %}
{%- if m.role != 'assistant' %}{{- '<|' + m.role + '|>\\n' + m.content + '\\n' }}
{%- else %}{{- '<|assistant|>\\n' + m.content + eos_token + ('' if loop.last else '\\n') }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""

COMMAND_R = """\
{{- bos_token }}
{%- for m in messages %}
{%- set role = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}[m.role] %}
{{- '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' + m.content | trim + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"""

GRANITE = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start_of_role|>tool_response<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}
{%- elif m.tool_calls %}
{{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' }}{{- [m.tool_calls[0].function] | tojson }}
{{- '<|end_of_text|>\\n' }}
{%- else %}
{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""

IM = ("<|im_start|>", "<|im_end|>")
SHAPES: dict[str, Shape] = {
    "qwen2.5": Shape(template=CHATML, control=(*IM, "<|endoftext|>"), eos="<|im_end|>"),
    "chatml on a base model": Shape(template=CHATML, control=IM, eos="<|endoftext|>"),
    "qwen3": Shape(template=QWEN3, control=(*IM, "<|endoftext|>"), eos="<|im_end|>"),
    "llama3.1": Shape(
        template=LLAMA31,
        control=("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "mistral": Shape(template=MISTRAL, control=(), eos="</s>", bos="<s>", spaces=True),
    "mistral, system last": Shape(template=MISTRAL_LAST, control=(), eos="</s>", bos="<s>", spaces=True),
    "gemma": Shape(
        template=GEMMA,
        control=("<start_of_turn>", "<end_of_turn>"),
        eos="<eos>",
        bos="<bos>",
        stops=("<end_of_turn>",),
        spaces=True,
    ),
    "phi3": Shape(
        template=PHI3,
        control=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        eos="<|endoftext|>",
        stops=("<|end|>",),
        spaces=True,
    ),
    "phi4": Shape(template=PHI4, control=(*IM, "<|im_sep|>", "<|endoftext|>"), eos="<|im_end|>"),
    "deepseek-r1": Shape(
        template=R1,
        control=(
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁sep｜>",
        )
        + ("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "smollm3": Shape(template=SMOLLM3, control=IM, eos="<|im_end|>"),
    "generation blocks": Shape(template=MARKED, control=IM, eos="<|im_end|>"),
    "gpt-oss": Shape(
        template=GPT_OSS,
        control=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|endoftext|>"),
        eos="<|return|>",
        stops=("<|call|>",),
    ),
    "zephyr": Shape(template=ZEPHYR, control=(), eos="</s>", spaces=True),
    "tulu3": Shape(template=TULU3, control=(), eos="<|end_of_text|>"),
    "command-r": Shape(
        template=COMMAND_R,
        control=("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        eos="<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
    ),
    "granite": Shape(
        template=GRANITE,
        control=("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        eos="<|end_of_text|>",
    ),
}

# More shapes, for what their templates do rather than for what they teach: rendering alone is compared.
OLMO2 = """\
{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ '<|system|>\n' + m['content'] + '\n' }}
{%- elif m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '\n' }}{% elif m['role'] == 'assistant' %}
{%- if not loop.last %}{{ '<|assistant|>\n' + m['content'] + eos_token + '\n' }}
{%- else %}{{ '<|assistant|>\n' + m['content'] + eos_token }}{% endif %}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"""

MISTRAL_TOOLS = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set users = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for m in loop_messages %}
    {%- if not (m.role in ("tool", "tool_results") or (m.tool_calls is defined and m.tool_calls is not none)) %}
        {%- if (m["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the system message, roles must alternate user/assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in loop_messages %}
    {%- if m["role"] == "user" %}
        {%- if tools is not none and (m == users[-1]) %}
            {{- "[AVAILABLE_TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + m["content"] + "[/INST]" }}
        {%- else %}{{- "[INST]" + m["content"] + "[/INST]" }}{%- endif %}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for call in m.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif m["role"] == "assistant" %}{{- m["content"] + eos_token }}
    {%- elif m["role"] == "tool_results" or m["role"] == "tool" %}
        {%- if m.content is defined and m.content.content is defined %}{%- set content = m.content.content %}
        {%- else %}{%- set content = m.content %}{%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + content | string + ", " }}
        {{- '"call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}
{%- endfor %}"""

GLM4 = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools{% for tool in tools %}{%- set f = tool.function if tool.get("function") else tool %}

## {{ f.name }}

{{ f | tojson(indent=4, ensure_ascii=False) }}
Write arguments as JSON.{%- endfor %}
{%- endif -%}
{%- for msg in messages %}
{%- if msg.role == 'system' %}
<|system|>
{{ msg.content }}{%- endif %}{%- endfor %}
{%- for m in messages if m.role != 'system' %}
{%- set role, content, meta = m.role, m.content, m.get("metadata", "") -%}
{%- if role == 'user' -%}
<|user|>
{{ content }}
{%- elif role == 'assistant' and not meta -%}
<|assistant|>
{{ content.split('</think>')[-1].strip() if content else '' }}
{%- for call in m.tool_calls or [] -%}
<|assistant|>{{ call.function.name }}
{%- set arguments = call.function.arguments %}
{{ arguments if arguments is string else arguments | tojson(indent=None, separators=(',', ':'), sort_keys=true) }}
{%- endfor -%}
{%- elif role in ('tool', 'observation') -%}
<|observation|>
{{ content }}
{%- endif -%}
{%- endfor -%}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""

VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'].strip() + ' ' }}"
    "{% set messages = messages[1:] %}"
    "{% else %}{{ 'A chat.\\u0020' }}{% endif %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'USER: ' + message['content'].strip() + ' ' }}{% else %}"
    "{{ message['role'].upper() ~ ': ' ~ message['content'].strip() ~ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

COMMAND_R_TOOLS = """\
{{ bos_token }}
{%- macro kind(spec, required=true) %}
    {%- set names = {'string': 'str', 'integer': 'int', 'number': 'float', 'boolean': 'bool', 'array': 'List'} %}
    {%- if spec.type is string %}{{ names[spec.type] if spec.type in names else spec.type | capitalize }}
    {%- else %}{%- for one in spec.type %}{{ one }}{{ ' | ' if not loop.last }}{%- endfor %}{%- endif %}
    {%- if spec['items'] %}[{{ kind(spec['items']) }}]{%- endif %}
    {%- if not required %} = None{%- endif %}
{%- endmacro %}
{%- if messages[0]['role'] == 'system' %}{%- set rest = messages[1:] %}{%- set system = messages[0]['content'] %}
{%- else %}{%- set rest = messages %}{%- set system = false %}{%- endif %}
<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># Preamble
{{ system if system != false else '## Style' -}}
{%- for tool in tools or [] %}
{%- set f = tool.function %}

```python
def {{ f.name }}(
{%- for name, spec in f.parameters.properties.items() %}
{{- ', ' if not loop.first }}{{ name }}: {{ kind(spec, name in f.parameters.required) }}
{%- endfor %}) -> List[Dict]:
    \"\"\"{{ f.description }}

    Args:
{%- for name, spec in f.parameters.properties | dictsort %}
        {{ name }} ({{ kind(spec) }}): {{ spec.description | default('-', true) }}
{%- endfor %}
    \"\"\"
    pass
```{%- endfor %}<|END_OF_TURN_TOKEN|>
{%- if documents %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><results>
{%- for document in documents %}
Document: {{ loop.index0 }}
{%- for key, value in document.items() %}
{{ key }}: {{ value }}{% endfor %}
{% endfor %}</results><|END_OF_TURN_TOKEN|>{%- endif %}
{%- for message in rest %}
{%- if message.role not in ['user', 'assistant', 'tool'] %}{{ raise_exception('no role ' ~ message.role) }}{% endif %}
{%- set content = message['content'] %}
{%- if message['role'] == 'user' %}<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ content.strip() }}<|END_OF_TURN_TOKEN|>
{%- elif message.tool_calls %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Action:```json
[
{%- for call in message.tool_calls %}
    {
        "tool_name": {{ call.function.name | tojson }},
        "parameters": {{ call.function.arguments | tojson(indent=8) }}
    }{{ ',' if not loop.last }}
{%- endfor %}
]```<|END_OF_TURN_TOKEN|>
{%- else %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{{ content.strip() }}<|END_OF_TURN_TOKEN|>{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{%- endif %}"""

SMOLLM3_TOOLS = """\
{#- defaults -#}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = '/think' if enable_thinking else '/no_think' -%}
{{- "<|im_start|>system\\n" -}}
{%- if messages[0].role == "system" -%}
  {%- set custom = messages[0].content.replace("/no_think", "").replace("/think", "").rstrip() -%}
  {%- if "/no_think" in messages[0].content -%}{%- set mode = '/no_think' -%}{%- endif -%}
{%- endif -%}
{%- set today = strftime_now("%d %B %Y") -%}
{{- "Today Date: " ~ today ~ "\\nReasoning Mode: " + mode + "\\n\\n" -}}
{%- if custom -%}{{ custom + "\\n\\n" }}{%- endif -%}
{%- if tools is iterable and tools | length > 0 -%}
  {%- set ns = namespace(xml="<tools>") -%}
  {%- for tool in tools[:] -%}{%- set ns.xml = ns.xml ~ "\\n" ~ (tool | string) -%}{%- endfor -%}
  {{- ns.xml + "\\n</tools>\\n\\n" -}}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "user" -%}
    {{ "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" }}
  {%- elif message.role == "assistant" -%}
    {% generation %}
    {%- if mode == "/think" -%}{{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
    {%- else -%}{{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
    {%- endif -%}
    {% endgeneration %}
  {%- elif message.role == "tool" -%}
    {{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ "<|im_start|>assistant\\n" }}{%- if mode == "/no_think" -%}{{ "<think>\\n\\n</think>\\n" }}{%- endif -%}
{%- endif -%}"""

GRANITE_RAG = """\
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else
    'Knowledge Cutoff Date: April 2024.\\nToday\\'s Date: ' ~ strftime_now('%B %d, %Y') ~ '.' %}
{%- if tools %}
<|start_of_role|>available_tools<|end_of_role|>
{%- for tool in tools %}
{{ tool | tojson(indent=4) }}
{% if not loop.last %}

{% endif %}
{%- endfor %}<|end_of_text|>
{% endif %}
<|start_of_role|>system<|end_of_role|>{{ system }}<|end_of_text|>
{% if documents %}{% for d in documents %}
<|start_of_role|>document {"document_id": "{{ d['doc_id'] | default(loop.index) }}"}<|end_of_role|>
{{ d.text | safe }}<|end_of_text|>
{% endfor %}{% endif %}
{% for message in messages[1:] if messages[0].role == 'system' or true %}
  {% if message.role == 'system' %}
    {% continue %}
  {% endif %}
<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content or '' }}<|end_of_text|>
  {% if loop.index > 40 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|start_of_role|>assistant
{%- if controls %}{{ ' ' ~ controls | tojson }}{% endif %}<|end_of_role|>{% endif %}"""

FEATURES = """\
{%- macro listed(items, sep=', ') -%}{{ items | map('string') | join(sep) }}{%- endmacro -%}
{%- set ns = namespace(count=0, last=none) -%}
{%- for m in messages -%}
  {%- set ns.count = ns.count + 1 -%}
  {%- if m.content is string -%}{%- set body -%}{{ m.content | trim | replace('\\n', ' ') }}{%- endset -%}
  {%- elif m.content is iterable and m.content is not mapping -%}
    {%- set body = m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('|') -%}
  {%- else -%}{%- set body = '' -%}{%- endif -%}
  {{- '%s/%d ' % (m.role | upper, loop.index) -}}{{- '%s'|format(body.title()) -}}
  {{- loop.cycle(' odd', ' even') ~ (' new' if loop.changed(m.role)) -}}
  {{- ' after ' ~ loop.previtem.role if loop.previtem -}}
  {%- for key, value in m | dictsort if key not in ('role', 'content') -%}
    {{- '\\n' ~ key ~ '=' ~ (value | tojson(ensure_ascii=true, sort_keys=true)) | indent(2) -}}
  {%- endfor -%}
  {{- '\\n' -}}
{%- endfor -%}
{{- listed(['a', 1, 2.5, true, none, {'k': 'é'}]) -}}
{%- macro framed(title) -%}<{{ title }}>{{ caller(title | length) }}</{{ title }}>{%- endmacro -%}
{%- call(size) framed('box') -%}{{ size }}{%- endcall -%}
{%- for row in [[1, [2, [3]]]] recursive -%}{{ row if row is number else loop(row) }}{%- endfor -%}
{{- ' ' ~ (messages | groupby('role') | map('first') | list) ~ messages[::-1][0].role ~ messages[-1]['role'][:3] -}}
{{- [3, 1, 2] | sort | string ~ (range(3) | sum) ~ 7 // 2 ~ -7 % 3 ~ 'ab' * 2 ~ (1 if 'a' in 'abc' else 0) -}}
{{- ('x' ~ bos_token).startswith('x') ~ 'a,b'.split(',') ~ 'é'.encode is defined -}}
{{- tools | length if tools else 'no tools' -}}
{%- if add_generation_prompt %}{{ '\\n\\nassistant:' }}{% endif -%}"""

GEMMA1 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('there is no system role') }}{%- endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

MISTRAL1 = """\
{{- bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('user and assistant alternate') }}{%- endif %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{- m.content + eos_token + ' ' }}
{%- else %}{{- raise_exception('only user and assistant') }}{%- endif %}
{%- endfor %}"""

MINISTRAL3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}{%- set rest = messages[1:] %}
{%- else %}{{- '[SYSTEM_PROMPT]You help.[/SYSTEM_PROMPT]' }}{%- set rest = messages %}{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in rest %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}{{- eos_token }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('unknown role') }}{%- endif %}
{%- endfor %}"""

LFM2 = """\
{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if tools %}{%- set system = system + ('\\n' if system else '') + 'List of tools: ' + (tools | tojson) %}{%- endif %}
{%- if system %}{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(reply=-1) %}
{%- for m in rest %}{%- if m.role == 'assistant' %}{%- set ns.reply = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in rest %}
{%- set content = m.content or '' %}
{%- if m.role == 'assistant' and loop.index0 != ns.reply and '</think>' in content %}
{%- set content = content.split('</think>')[-1] | trim %}{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

GLM45 = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n# Tools\\n' }}{%- for t in tools %}{{- t | tojson + '\\n' }}{%- endfor %}{%- endif %}
{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}
{{- '/nothink' if enable_thinking is defined and not enable_thinking }}
{%- elif m.role == 'assistant' %}
{%- set thought = (m.reasoning_content or '') if loop.index0 > ns.asked else '' %}
{{- '<|assistant|>\\n<think>' + thought + '</think>' }}
{%- if m.content %}{{- '\\n' + m.content.split('</think>')[-1] | trim }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name + '\\n' + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}{{- '<|observation|>\\n<tool_response>' + m.content + '</tool_response>' }}
{%- elif m.role == 'system' %}{{- '<|system|>\\n' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{{- '\\n<think></think>' if enable_thinking is defined and not enable_thinking }}{%- endif %}"""

OPENED = (
    QWEN3.rpartition("{%- if enable_thinking")[0]
    + """\
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}"""
)

QWEN25 = (
    """\
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}
"""
    + CHATML
)

TURNS = ("<start_of_turn>", "<end_of_turn>")
GLM_CONTROL = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
OTHERS: dict[str, Shape] = {
    "gemma 1": Shape(template=GEMMA1, control=TURNS, eos="<eos>", bos="<bos>", stops=TURNS[1:], spaces=True),
    "mistral 7b": Shape(template=MISTRAL1, control=(), eos="</s>", bos="<s>", spaces=True),
    "ministral 3": Shape(template=MINISTRAL3, control=("[INST]", "[/INST]"), eos="</s>", bos="<s>"),
    "lfm2": Shape(template=LFM2, control=IM, eos="<|im_end|>", bos="<|startoftext|>"),
    "glm4.5": Shape(
        template=GLM45, control=GLM_CONTROL, eos="<|endoftext|>", stops=("<|user|>", "<|observation|>")
    ),
    "qwen3.5": Shape(template=OPENED, control=(*IM, "<|endoftext|>"), eos="<|im_end|>"),
    "qwen2.5, own system": Shape(template=QWEN25, control=(*IM, "<|endoftext|>"), eos="<|im_end|>"),
    "olmo2": Shape(
        template=OLMO2, control=("<|user|>", "<|assistant|>"), eos="<|endoftext|>", bos="<|endoftext|>"
    ),
    "mistral, tools": Shape(
        template=MISTRAL_TOOLS,
        control=(
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
        ),
        eos="</s>",
        bos="<s>",
    ),
    "glm4": Shape(
        template=GLM4,
        control=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        eos="<|endoftext|>",
    ),
    "vicuna": Shape(template=VICUNA, control=(), eos="</s>", bos="<s>", spaces=True),
    "command-r, tools": Shape(
        template=COMMAND_R_TOOLS,
        control=("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        eos="<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
    ),
    "smollm3, tools": Shape(template=SMOLLM3_TOOLS, control=IM, eos="<|im_end|>"),
    "granite, documents": Shape(
        template=GRANITE_RAG, control=("<|start_of_role|>", "<|end_of_role|>"), eos="<|end_of_text|>"
    ),
    "features": Shape(template=FEATURES, control=(), eos="</s>", bos="<s>", spaces=True),
}
