"""What other programs need to ask a model as it was trained: one whole chat template, and Ollama's Modelfile."""

from __future__ import annotations

import json
from collections.abc import Sequence

from whet.generate.policy import Policy
from whet.types import UserError

BOS = "{{ bos_token }}"
S, U, A = "\u2402system\u2403", "\u2402user\u2403", "\u2402assistant\u2403"
"""Stand for the words of a conversation where what the template writes around them is looked for."""


def whole_template(policy: Policy) -> str:
    """Return one Jinja template that writes whet's prompts: BOS, the schema's instruction, the model's own template,
    the opening tag.

    whet keeps these apart (protocol.json); a program that reads only the chat template would ask without them.
    """
    tokenizer, schema = policy.tokenizer, policy.schema
    source, lines = tokenizer.chat_template or "", []
    for name, value in tokenizer.template_values.items():
        lines.append(
            f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"
        )
    if schema.instruction_in == "user" and schema.request:
        lines.append(_asking(schema.request))
    if policy.system_prompt and schema.system_prompt:
        own = f"{{'role': 'system', 'content': {_literal(schema.system_prompt)}}}"
        lines.append(
            "{%- if not messages or messages[0]['role'] != 'system' %}"
            f"{{%- set messages = [{own}] + messages %}}{{%- endif %}}"
        )
    start = BOS if tokenizer.prompt_bos and BOS not in source else ""
    bare = tokenizer.render([{"role": "user", "content": U}])
    asked = policy.chat_text([{"role": "user", "content": U}])
    prefix = schema.generation_prefix if asked.endswith(schema.generation_prefix) else ""
    if prefix and bare.rstrip().endswith(prefix):
        prefix = ""
    end = f"{{% if add_generation_prompt %}}{{{{ {_literal(prefix)} }}}}{{% endif %}}" if prefix else ""
    return "".join([*lines, start, source, end])


def _literal(value: bool | str) -> str:
    """Return a value as Jinja reads it."""
    return json.dumps(value)


def _asking(request: str) -> str:
    """Return the Jinja that appends an instruction to the first user message."""
    return (
        "{%- set asked = namespace(messages=[], is_done=false) %}{%- for message in messages %}"
        "{%- if message['role'] == 'user' and not asked.is_done %}{%- set asked.is_done = true %}"
        "{%- set asked.messages = asked.messages + [{'role': 'user', 'content': message['content'] + "
        f"{_literal(chr(10) + request)}}}] %}}"
        "{%- else %}{%- set asked.messages = asked.messages + [message] %}{%- endif %}{%- endfor %}"
        "{%- set messages = asked.messages %}"
    )


def modelfile(policy: Policy, gguf: str, context: int, sampling: dict[str, float]) -> tuple[str, list[str]]:
    """Write Ollama's Modelfile: its template in Go, stops, parameters.

    Args:
        policy: The policy.
        gguf: Name of the GGUF file beside it.
        context: Longest sequence in tokens.
        sampling: Sampling parameters, such as temperature.

    Returns:
        The text, and notes on what Ollama does otherwise.
    """
    template, notes = go_template(policy)
    tokenizer, schema = policy.tokenizer, policy.schema
    stops = [*policy.stop_strings, *(tokenizer.token_text(index) for index in policy.stop_ids)]
    lines = [f"FROM ./{gguf}", f"TEMPLATE {QUOTES}{template}{QUOTES}"]
    texts = [("PARAMETER stop", stop) for stop in stops]
    if policy.system_prompt and schema.system_prompt:
        texts.insert(0, ("SYSTEM", schema.system_prompt))
    for name, text in texts:
        if QUOTES in text:
            notes = [*notes, f"a Modelfile cannot hold three quotes: set this yourself: {name} {text[:40]!r}"]
        else:
            lines.append(f"{name} {QUOTES}{text}{QUOTES}")
    lines += [f"PARAMETER num_ctx {context}"]
    lines += [f"PARAMETER {name} {value:g}" for name, value in sampling.items()]
    return "\n".join(lines) + "\n", notes


QUOTES = '"""'
"""Around a value in a Modelfile, which knows no escapes: `"\\n"` would be a backslash and an n (Ollama's parser.go)."""


def _go_text(text: str) -> str:
    """Return a text as Go's templates write it, without three quotes, which end a value of a Modelfile."""
    return text.replace("{{", '{{ "{{" }}').replace(QUOTES, '{{ "\\"\\"\\"" }}')


def go_template(policy: Policy) -> tuple[str, list[str]]:
    """Express the prompt in Go's templates, from what the chat template writes around each message.

    Returns:
        A template of whole conversations where messages are written one after the other; else one of a single
        question. And notes.
    """
    tokenizer = policy.tokenizer
    has_system = bool(policy.system_prompt and policy.schema.system_prompt)
    talk = [{"role": "system", "content": S}] * has_system
    talk += [
        {"role": "user", "content": U},
        {"role": "assistant", "content": A},
        {"role": "user", "content": U},
    ]
    request = policy.schema.instruction_in == "user" and policy.schema.request
    try:
        steps = [_text(policy, talk[: end + 1], cue=False) for end in range(len(talk))]
        parts = [steps[0], *(_added(before, after) for before, after in zip(steps, steps[1:], strict=False))]
        cue = _added(steps[-1], _text(policy, talk, cue=True))
        by_role: dict[str, set[str]] = {}
        for message, part in zip(talk, parts, strict=True):
            by_role.setdefault(message["role"], set()).add(part)
        if request or any(len(found) > 1 for found in by_role.values()):
            raise UserError("messages are not all written alike")
        words = {"system": S, "user": U, "assistant": A}
        rows = [
            f'{{{{ if eq .Role "{role}" }}}}{_go_text(found.pop()).replace(words[role], "{{ .Content }}")}{{{{ end }}}}'
            for role, found in by_role.items()
        ]
        return "{{ range .Messages }}" + "".join(rows) + "{{ end }}" + _go_text(cue), []
    except UserError:
        asked = _without_bos(policy, policy.chat_text([{"role": "user", "content": U}]))
        said = policy.schema.system_prompt if has_system else ""
        if said and said in asked:
            asked = asked.replace(said, S, 1)
        note = "the Modelfile's template writes the last question alone: Ollama's cannot express the conversation"
        asked = _go_text(asked).replace(S, "{{ .System }}")
        return asked.replace(U, "{{ .Prompt }}"), [note] if tokenizer.chat_template else []


def _text(policy: Policy, messages: Sequence[dict[str, str]], *, cue: bool) -> str:
    """Render without BOS, which Ollama writes itself."""
    text = policy.chat_text(messages, add_generation_prompt=cue)
    return _without_bos(policy, text)


def _without_bos(policy: Policy, text: str) -> str:
    bos = policy.tokenizer.bos_id
    return text if bos is None else text.removeprefix(policy.tokenizer.token_text(bos))


def _added(before: str, after: str) -> str:
    if not after.startswith(before):
        raise UserError("the template rewrites earlier messages")
    return after[len(before) :]
