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
