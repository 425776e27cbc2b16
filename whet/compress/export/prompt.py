"""What other programs need to ask a model as it was trained: one whole chat template, and Ollama's Modelfile."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence

from whet.compress.export.ollama import ollama_writes, read_modelfile
from whet.compress.export.vocabulary import leads_with_bos
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
        lines.append(_asking(after=chr(10) + schema.request))
    if own := _own_system(policy):
        if tokenizer.system_role == "written":
            message = f"{{'role': 'system', 'content': {_literal(own)}}}"
            lines.append(
                "{%- if not messages or messages[0]['role'] != 'system' %}"
                f"{{%- set messages = [{message}] + messages %}}{{%- endif %}}"
            )
        else:
            lines.append(
                "{%- if not messages or messages[0]['role'] != 'system' %}"
                f"{_asking(before=own + 2 * chr(10))}{{%- endif %}}"
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


def _own_system(policy: Policy) -> str:
    """Return the schema's system message, if prompts have it."""
    return policy.schema.system_prompt if policy.system_prompt else ""


def _asking(*, before: str = "", after: str = "") -> str:
    """Return the Jinja that puts text around the first user message's own."""
    around = [f"{_literal(before)} + "] * bool(before), [f" + {_literal(after)}"] * bool(after)
    content = "".join([*around[0], "message['content']", *around[1]])
    return (
        "{%- set asked = namespace(messages=[], is_done=false) %}{%- for message in messages %}"
        "{%- if message['role'] == 'user' and message['content'] is string and not asked.is_done %}"
        "{%- set asked.is_done = true %}"
        f"{{%- set asked.messages = asked.messages + [{{'role': 'user', 'content': {content}}}] %}}"
        "{%- else %}{%- set asked.messages = asked.messages + [message] %}{%- endif %}{%- endfor %}"
        "{%- set messages = asked.messages %}"
    )


def modelfile(
    policy: Policy, gguf: str, context: int, sampling: dict[str, float], *, has_template: bool = True
) -> tuple[str, list[str]]:
    """Write Ollama's Modelfile: its template in Go, stops, parameters.

    Args:
        policy: The policy.
        gguf: Name of the GGUF file beside it.
        context: Longest sequence in tokens.
        sampling: Sampling parameters, such as temperature.
        has_template: False for a model that continues texts as they are.

    Returns:
        The text, and notes on what Ollama does otherwise.
    """
    template, notes = go_template(policy) if has_template else ("{{ .Prompt }}", [])
    tokenizer = policy.tokenizer
    stops = [*policy.stop_strings, *(tokenizer.token_text(index) for index in policy.stop_ids)]
    lines = [f"FROM ./{gguf}", f"TEMPLATE {QUOTES}{template}{QUOTES}"]
    texts = [("PARAMETER stop", stop) for stop in stops]
    if own := _own_system(policy):
        texts.insert(0, ("SYSTEM", own))
    for name, text in texts:
        if QUOTES in text:
            notes = [*notes, f"a Modelfile cannot hold three quotes: set this yourself: {name} {text[:40]!r}"]
        else:
            lines.append(f"{name} {QUOTES}{text}{QUOTES}")
    lines += [f"PARAMETER num_ctx {context}"]
    lines += [f"PARAMETER {name} {value:g}" for name, value in sampling.items()]
    return "\n".join(lines) + "\n", notes


def unlike_ollama(policy: Policy, text: str, chats: Sequence[Sequence[dict[str, str]]]) -> list[str]:
    """Render a Modelfile as Ollama does, and compare it with the prompts that the policy would be asked with.

    A template of whole conversations is also rendered with a system message and with an earlier turn.

    Args:
        policy: The policy.
        text: The Modelfile.
        chats: Conversations.

    Returns:
        What Ollama asks otherwise, a sentence each.
    """
    read = dict(read_modelfile(text))
    template, own = read["TEMPLATE"], read.get("SYSTEM", "")
    system = {"role": "system", "content": "Be brief."}
    earlier = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    cases = [("a question", list(chat)) for chat in chats]
    if policy.tokenizer.system_role != "dropped":
        cases += [("a system message", [system, *chat]) for chat in chats[:1] if chat[0]["role"] != "system"]
    if ".Messages" in template:
        cases += [("an earlier turn", [*earlier, *chat]) for chat in chats[:1] if chat[0]["role"] == "user"]
    unlike = Counter(
        what for what, chat in cases if ollama_writes(template, chat, own) != _text(policy, chat, cue=True)
    )
    return [
        f"Ollama would ask otherwise: the Modelfile's template differs on {count} of "
        f"{sum(what == name for name, _ in cases)} prompts with {what}"
        for what, count in unlike.items()
    ]


QUOTES = '"""'
"""Around a value in a Modelfile, which knows no escapes: `"\\n"` would be a backslash and an n (Ollama's parser.go)."""


def _go_text(text: str) -> str:
    """Return a text as Go's templates write it, without three quotes, which end a value of a Modelfile."""
    return text.replace("{{", '{{ "{{" }}').replace(QUOTES, '{{ "\\"\\"\\"" }}')


def go_template(policy: Policy) -> tuple[str, list[str]]:
    """Express the prompt in Go's templates, from what the chat template writes around each message.

    Returns:
        A template of whole conversations; where the chat template rewrites messages when others follow, one of a single
        question. And notes on what Ollama does otherwise.
    """
    notes = _lost(policy)
    try:
        return _conversation(policy), notes
    except UserError:
        note = "the Modelfile's template writes the last question alone: Ollama's cannot express the conversation"
        return _question(policy), [note, *notes]


def _question(policy: Policy) -> str:
    """Return a Go template of a system message, if there is one, and a single question."""
    user = {"role": "user", "content": U}
    asked, told = _text(policy, [user], cue=True), _led(policy, [user], cue=True)
    asked, told = (_go_text(text).replace(U, "{{ .Prompt }}") for text in (asked, told))
    if S not in told:
        return asked
    return f"{{{{ if .System }}}}{told.replace(S, '{{ .System }}')}{{{{ else }}}}{asked}{{{{ end }}}}"


def _led(policy: Policy, talk: Sequence[dict[str, str]], *, cue: bool) -> str:
    """Render a conversation with a system message, where the template has one.

    Where it drops given ones, but not the schema's own, which whet puts into the user's turn, it stands in that place:
    the Modelfile's SYSTEM is the schema's own.
    """
    own = _own_system(policy)
    if policy.tokenizer.system_role == "dropped" and own:
        return _text(policy, talk, cue=cue).replace(own, S, 1)
    return _text(policy, [{"role": "system", "content": S}, *talk], cue=cue)


def _conversation(policy: Policy) -> str:
    """Return a Go template of whole conversations; UserError where the chat template does not write them in order."""
    user, reply = {"role": "user", "content": U}, {"role": "assistant", "content": A}
    talk = [user, reply, user]
    steps = [_text(policy, talk[: end + 1], cue=False) for end in range(3)]
    first, said, later = steps[0], _added(steps[0], steps[1]), _added(steps[1], steps[2])
    cue = _go_text(_added(steps[2], _text(policy, talk, cue=True)))
    own = _own_system(policy)
    # What a conversation with a system message begins with, up to the first question's end.
    led = _led(policy, [user], cue=False)
    if _led(policy, talk, cue=False) != led + said + later:
        raise UserError("a system message changes later ones")
    replied = _go_part("assistant", said, A)
    if led.endswith(later) and first.endswith(later) and led.count(S) <= 1:
        before, default = led.removesuffix(later), first.removesuffix(later)
        lines = _go_part("system", before, S) if S in before else ""
        # With an instruction of its own the Modelfile has a system message, so that there always is one.
        opening = f"{{{{ if not .System }}}}{_go_text(default)}{{{{ end }}}}" if default and not own else ""
        if not lines:
            opening = _go_text(default)
        return f"{opening}{{{{ range .Messages }}}}{lines}{_go_part('user', later, U)}{replied}{{{{ end }}}}{cue}"
    opened = _go_text(first).replace(U, "{{ .Content }}")
    if S in led:
        told = _go_text(led).replace(S, "{{ $.System }}").replace(U, "{{ .Content }}")
        opened = f"{{{{ if $.System }}}}{told}{{{{ else }}}}{opened}{{{{ end }}}}"
    following = _go_text(later).replace(U, "{{ .Content }}")
    asking = f"{{{{ if $first }}}}{{{{ $first = false }}}}{opened}{{{{ else }}}}{following}{{{{ end }}}}"
    return (
        "{{ $first := true }}{{ range .Messages }}"
        f'{{{{ if eq .Role "user" }}}}{asking}{{{{ end }}}}{replied}{{{{ end }}}}{cue}'
    )


def _go_part(role: str, text: str, word: str) -> str:
    """Return what is written of one message of a role."""
    return f'{{{{ if eq .Role "{role}" }}}}{_go_text(text).replace(word, "{{ .Content }}")}{{{{ end }}}}'


def _lost(policy: Policy) -> list[str]:
    """Name what Ollama's template leaves out of what the chat template does."""
    tokenizer, found = policy.tokenizer, []
    source = tokenizer.chat_template or ""
    if re.search(r"\btools\b", source) or tokenizer.named_templates:
        found.append("the Modelfile's template has no tools: Ollama answers without them")
    spaced = [{"role": "user", "content": f" {U} "}]
    if f" {U} " not in tokenizer.render(spaced):
        found.append("the chat template trims messages, which Ollama's cannot")
    thought = f"<think>\n{S}\n</think>\n\n{A}"
    talk = [
        {"role": role, "content": text} for role, text in (("user", U), ("assistant", thought), ("user", U))
    ]
    try:
        if S not in tokenizer.render(talk):
            found.append(
                "the chat template drops the thinking of earlier replies, which Ollama's keeps if it is sent"
            )
    except UserError:
        pass  # it takes no such conversation
    if "strftime_now" in source:
        found.append(f"the Modelfile's template has the date of today ({tokenizer.date})")
    if tokenizer.system_role == "dropped" and not _own_system(policy):
        found.append("the chat template drops system messages, and so does the Modelfile's")
    if tokenizer.system_role == "refused":
        found.append(
            "the chat template refuses system messages: Ollama's writes them before the first question"
        )
    return found


def _text(policy: Policy, messages: Sequence[dict[str, str]], *, cue: bool) -> str:
    """Render without the BOS that Ollama writes itself, as the file tells it to."""
    text, tokenizer = policy.chat_text(messages, add_generation_prompt=cue), policy.tokenizer
    bos = tokenizer.bos_id
    return (
        text if bos is None or not leads_with_bos(tokenizer) else text.removeprefix(tokenizer.token_text(bos))
    )


def _added(before: str, after: str) -> str:
    if not after.startswith(before):
        raise UserError("the template rewrites earlier messages")
    return after[len(before) :]
