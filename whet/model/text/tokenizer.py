"""The tokenizer: text <-> ids and messages -> prompt, on top of the `tokenizers` library."""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import json
import math
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from whet.install import install_command
from whet.model.files import CONVERTED, find_files, read_json, read_text
from whet.model.text.template import (
    BASE_TEMPLATE,
    PLAIN_TEMPLATE,
    TODAY,
    check_template,
    render_marked,
    render_template,
    try_template,
)
from whet.types import UserError

MAX_ID = 2**24
CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
NAMED = "additional_chat_templates"
"""Folder of the templates beside the default one; of those on a hub the two that transformers documents are read."""
TEMPLATES = ("chat_template.jinja", "chat_template.json", f"{NAMED}/tool_use.jinja", f"{NAMED}/rag.jinja")
FILES = ("tokenizer.json", *CONFIGS, "added_tokens.json", *TEMPLATES)
RESERVED = ("messages", "add_generation_prompt", "strftime_now", "range", TODAY)
MARK = "\u2402words\u2403"
"""Stands for words of a message where what the template writes around them is looked for."""
QUOTE = f"Q{secrets.token_hex(8)}x"
"""Begins what stands for a control token that is only text (`Tokenizer.quoted`): no text can hold it by chance or on
purpose, and no template changes it."""
QUOTED = re.compile(rf"{QUOTE}(\d+)Z")
TAGS = "whet_tags"
"""Of tokenizer_config.json: control tokens that other programs are to show, and tokenizer.json calls ordinary ones."""
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
MAX_ENDINGS = 64
CUES = ("add_generation_prompt", "continue_final_message")
"""Values that say how a prompt ends, as transformers has them."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's thinking: templates read one of them."""
LOCAL_STEPS = frozenset({"ByteLevel", "ByteFallback", "Fuse"})
"""Steps of decoders that spell a token alike at the start of a text and inside it."""

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
MAX_GROWTH, MAX_STEPS, MAX_PATTERN, MAX_CLASS = 256, 100, 2**14, 2**12
"""Bounds of an untrusted tokenizer's parts: how many times as long they may make a text, their steps, the letters
of a pattern, and those of a class in it that are looked at one by one. SentencePiece's table of characters alone makes
33 bytes of one letter."""

Values = Mapping[str, bool | str]
"""Further values for a chat template that are kept with it, such as enable_thinking."""


class Tokenizer:
    """Token ids of text, text of token ids, and prompts from a chat template; the `with_...` methods return copies.

    Attributes:
        bos_id: Id that starts a text, or None.
        eos_id: Id that ends a text, or None.
        unk_id: Id of characters outside the vocabulary, or None.
        pad_id: Id for padding, or None (also if the config names one that tokenizer.json lacks).
        stop_ids: Every id that ends a generation: `eos_id` and those of generation_config.json.
        adds_bos: Whether texts start with `bos_id`.
        prompt_bos: Whether a prompt whose template does not write `bos_id` starts with it all the same. False for the
            template of a chat model, as in transformers and vLLM; True for whet's own templates.
        special_ids: Control tokens; they keep their text in `decode`.
        tags: Texts of those that `save` does not mark as special, because other programs leave special ones out of
            what they show.
        vocab_size: Highest decodable id, plus 1.
        chat_template: Jinja source, or None.
        named_templates: Further ones by name; 'tool_use' is taken for prompts with tools.
        template_values: Further values that the template reads, such as enable_thinking.
        date: The template's today, as YYYY-MM-DD.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        roles: Mapping[str, str],
        adds_bos: bool = False,
        chat_template: str | None = None,
        named_templates: Mapping[str, str] | None = None,
        stop_ids: Iterable[int] = (),
        template_values: Values | None = None,
        date: str = "",
        prompt_bos: bool | None = None,
        tags: Iterable[str] = (),
    ) -> None:
        """Wrap a backend.

        Args:
            backend: The library's tokenizer; owned by this object.
            roles: Token text by role (`ROLES`); absent if the model has none.
            adds_bos: Whether prompts start with BOS even if the post-processor adds none.
            chat_template: Jinja source.
            named_templates: Further ones by name.
            stop_ids: Further ids that end a generation.
            template_values: Further values for the template.
            date: The template's today; empty for the computer's.
            prompt_bos: None: True with whet's own templates only.
            tags: Special tokens of the backend that are part of a response's text.

        Raises:
            UserError: If a role's token is unknown, an id is absurd, or the template is too long.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._texts = {index: text for text, index in backend.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = max(self._texts, default=-1) + 1
        if self.vocab_size > MAX_ID:
            raise UserError(f"tokenizer.json: {self.vocab_size:,} ids; expected at most {MAX_ID:,}")
        self._roles = dict(roles)
        ids = {role: backend.token_to_id(text) for role, text in roles.items()}
        for role, index in ids.items():
            if index is None:
                raise UserError(
                    f"tokenizer_config.json: {role} {roles[role][:80]!r} is not in tokenizer.json"
                )
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (ids.get(role) for role in ROLES[:4])
        flagged = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(flagged | {index for index in ids.values() if index is not None})
        self.tags = frozenset(tags)
        self.stop_ids = frozenset(stop_ids) | ({self.eos_id} if self.eos_id is not None else frozenset())
        leads = backend.encode("a", add_special_tokens=True).ids[:1] == [self.bos_id]
        self.adds_bos = self.bos_id is not None and (adds_bos or leads)
        if self.adds_bos and not leads:  # transformers 5 only uses the post-processor
            bos = roles["bos_token"]
            backend.post_processor = TemplateProcessing(
                single=[bos, "$A"], special_tokens=[(bos, self.bos_id)]
            )
        self.chat_template = chat_template
        self.named_templates = dict(named_templates or {})
        for source in (chat_template, *self.named_templates.values()):
            check_template(source or "")
        self.template_values = dict(template_values or {})
        for name in self.template_values:
            sources = "\n".join((chat_template or "", *self.named_templates.values()))
            if not re.search(rf"\b{re.escape(name)}\b", sources) or name in RESERVED:
                raise UserError(
                    f"policy.template_values.{name}: the model's chat template does not read it; leave it out"
                )
        self.date = date or datetime.date.today().isoformat()
        own = chat_template in (None, BASE_TEMPLATE, PLAIN_TEMPLATE)
        self.prompt_bos = self.adds_bos and (own if prompt_bos is None else prompt_bos)
        self._endings: dict[str, str] = {}
        self._turns_are_checked = False
        steps = _steps(backend)
        self._joins_words = backend.decoder is None or steps == ["WordPiece"]
        self._opens_apart = not LOCAL_STEPS.issuperset(steps) or self._joins_words

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tokenizer.json with its tags as special tokens: same fingerprint, same ids."""
        return hashlib.sha256(self._backend.to_str(pretty=True).encode()).hexdigest()

    def backend_text(self) -> str:
        """Return the tokenizer.json that `save` writes, for programs that build another kind of tokenizer from it."""
        text = self._backend.to_str(pretty=True)
        return _marked(text, self.tags, special=False) if self.tags else text

    def difference(self, other: Tokenizer) -> str:
        """Return how another tokenizer's ids differ in their texts; '' if they are the same."""
        if self._texts == other._texts:
            return ""
        index = min(n for n in self._texts | other._texts if self._texts.get(n) != other._texts.get(n))
        return f"id {index} is {self._texts.get(index)!r:.40} here and {other._texts.get(index)!r:.40} there"

    @functools.cached_property
    def longest(self) -> int:
        """Characters of the longest token, at most: a text of more than n times as many has more than n tokens."""
        return max(map(len, self._texts.values()), default=1)

    def encode(self, text: str) -> list[int]:
        """Turn text into ids; control tokens spelt out in the text become their single id; BOS is never added.

        Args:
            text: Any text without lone surrogates.

        Returns:
            Token ids.

        Raises:
            UserError: If the text is not valid Unicode.
        """
        try:
            text.encode()
            if QUOTE in text:
                return [index for index, _, _ in self._encode_quoted(text)]
            return self._backend.encode(text, add_special_tokens=False).ids
        except UnicodeEncodeError as error:
            raise UserError(
                f"text contains a lone surrogate at character {error.start}: not Unicode"
            ) from error
        except BaseException as error:  # a bare Exception, or a panic of a regular expression: PanicException
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise UserError(f"tokenizer.json cannot encode {text[:40]!r}: {str(error)[:200]}") from error

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        """Return the ids of `encode`, each with its first character in the text and the one behind its last.

        Args:
            text: Any text without lone surrogates.
        """
        ids = self.encode(text)
        offsets = self._backend.encode(text, add_special_tokens=False).offsets
        return [(index, start, end) for index, (start, end) in zip(ids, offsets, strict=True)]

    @functools.cached_property
    def _control(self) -> dict[int, str]:
        """Texts of the control tokens that the library finds in a text, by id."""
        added = self._backend.get_added_tokens_decoder()
        return {index: token.content for index, token in added.items() if token.special and token.content}

    @functools.cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        texts = sorted(self._control.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @functools.cached_property
    def _around(self) -> frozenset[str]:
        """Control tokens that the template writes around messages: an assistant never writes them itself."""
        user, assistant = {"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}
        found = set[str]()
        for messages in ([user], [{"role": "system", "content": MARK}, user], [user, assistant, user]):
            try:
                found |= set(self._control_pattern.findall(self._render(messages, cue=False)))
            except UserError:  # no template, or none for such messages
                continue
        return frozenset(found)

    def quoted(self, text: str, *, by_assistant: bool = False) -> str:
        """Return a text in which the texts of control tokens stay text when it is encoded.

        `encode`, `encode_marked` and what they are made of read it; `plain` is its inverse.

        Args:
            text: What a user, a tool or an assistant wrote.
            by_assistant: Quote only tokens that the template writes around messages, BOS and those that end texts: an
                assistant writes others, such as those around calls, itself. One at the end of the text that ends a
                generation is left out, because the turn's own end follows.
        """
        if not self._control_pattern.search(text):
            return text
        kept = None
        if by_assistant:
            stops = {self._texts[index] for index in self.stop_ids if index in self._texts}
            kept = (
                stops
                | self._around
                | {self._roles[r] for r in ("bos_token", "eos_token") if r in self._roles}
            )
            ends = tuple(stops & set(self._control.values()))
            while ends and (rest := text.rstrip()).endswith(ends):
                text = rest[: -max(len(end) for end in ends if rest.endswith(end))]
        ids = {content: index for index, content in self._control.items()}

        def quote(match: re.Match[str]) -> str:
            return f"{QUOTE}{ids[match[0]]}Z" if kept is None or match[0] in kept else match[0]

        return self._control_pattern.sub(quote, text)

    def quoted_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Quote the words of messages (`quoted`): content, thinking, names, and the arguments of calls."""
        if self.chat_template == PLAIN_TEMPLATE:  # the user's text is the whole prompt, as it stands
            return [dict(message) for message in messages]
        found = []
        for message in messages:
            quote = functools.partial(self.quoted, by_assistant=message.get("role") == "assistant")
            names = {"content", "name", "tool_calls", *THOUGHTS} & message.keys()
            found.append({**message, **{name: _deeply(quote, message[name]) for name in names}})
        return found

    def plain(self, text: str) -> str:
        """Return a text with quoted control tokens as they were written."""
        return QUOTED.sub(lambda match: self._control[int(match[1])], text) if QUOTE in text else text

    @functools.cached_property
    def _verbatim(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A backend that takes control tokens for text, with an alias for each of them; their ids by their aliases'."""
        backend = tokenizers.Tokenizer.from_str(self._aligned.to_str())
        backend.encode_special_tokens = True
        aliases = {index: f"{QUOTE}{index}A" for index in self._control}
        backend.add_tokens([AddedToken(alias, normalized=False) for alias in aliases.values()])
        found = {backend.token_to_id(alias): index for index, alias in aliases.items()}
        return backend, {alias: index for alias, index in found.items() if alias is not None}

    def _encode_quoted(self, text: str) -> list[tuple[int, int, int]]:
        """Encode a text with quoted control tokens; return ids, each with its place in the text."""
        found = self._aligned.encode(text, add_special_tokens=False)
        places = [
            (start, end, f"{QUOTE}{index}A")
            for index, (start, end) in zip(found.ids, found.offsets, strict=True)
            if index in self._control and text[start:end].strip() == self._control[index].strip()
        ]
        places += [(*match.span(), self._control[int(match[1])]) for match in QUOTED.finditer(text)]
        written, moves, done = "", [(0, 0, 0)], 0
        for start, end, instead in sorted(places):
            written += text[done:start] + instead
            moves.append((len(written) - len(instead), len(written), start))
            moves.append((len(written), len(written), end))
            done = end
        written += text[done:]
        backend, ids = self._verbatim
        found = backend.encode(written, add_special_tokens=False)

        def place(offset: int, *, is_end: bool) -> int:
            at = max(
                n for n, move in enumerate(moves) if move[0] <= (offset - 1 if is_end else offset) or n == 0
            )
            first, last, source = moves[at]
            if first == last:  # as it stands in the text
                return source + offset - first
            return moves[at + 1][2] if is_end else source

        return [
            (ids.get(index, index), place(start, is_end=False), place(max(end, start + 1), is_end=True))
            for index, (start, end) in zip(found.ids, found.offsets, strict=True)
        ]

    def _encode_placed(self, text: str) -> list[tuple[int, int, int]]:
        """Encode a text; return ids, each with its place, spaces included."""
        if QUOTE in text:
            return self._encode_quoted(text)
        found = self._aligned.encode(text, add_special_tokens=False)
        return [(index, *span) for index, span in zip(found.ids, found.offsets, strict=True)]

    def _encode_following(self, text: str) -> list[tuple[int, int, int]]:
        """Encode a text that goes on after another one, as a model does that was sampled: without a space before it."""
        found = self._encode_placed(text)
        if self.decode_completion((0,), [index for index, _, _ in found]) == self.plain(text):
            return found
        behind = self._encode_placed(f"\n{text}")
        if any(start < 1 < end for _, start, end in behind):
            return found
        return [(index, start - 1, end - 1) for index, start, end in behind if end > 1]

    def is_rendered(self, text: str) -> bool:
        """Say whether a text is a prompt already: it begins or ends as only the template's own text does."""
        if self.chat_template in (None, BASE_TEMPLATE, PLAIN_TEMPLATE):
            return False
        text, ending = text.strip(), self.ending().strip()
        bos = self._roles.get("bos_token", "")
        if bos and text.startswith(bos):
            return bos != "<s>" or "</s>" not in text  # HTML's, unless the rest is the template's
        has_end = bool(self._control_pattern.search(ending)) or ending.startswith("[/")
        opening = self._control_pattern.findall(self._opening.removeprefix(bos))[:1]
        return has_end and text.endswith(ending) or bool(opening) and text.startswith(opening[0])

    @functools.cached_property
    def _opening(self) -> str:
        """What the template writes before the user's words; '' if it fails."""
        try:
            text = self.render([{"role": "user", "content": MARK}])
        except UserError:
            return ""
        return text.rpartition(MARK)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids as the start of a text: control tokens visible, split characters and unknown ids as U+FFFD.

        SentencePiece's leading space is removed, as in transformers; its `clean_up_tokenization_spaces` is
        never done.
        """
        return self._spell(ids, opens=True)

    def decode_completion(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
        """Decode ids as the continuation of a prompt: `decode(prompt + ids)` minus `decode(prompt)`.

        Args:
            prompt_ids: The preceding ids; after any text the first space is kept.
            ids: The completion.
        """
        return self._spell(ids, opens=not prompt_ids)

    def keeps(self, text: str) -> bool:
        """Say whether a text comes back unchanged from its ids, but for white space before it."""
        return self.decode_completion((0,), self.encode(text)).lstrip() == text.lstrip()

    def token_text(self, index: int) -> str:
        """Decode one id as inside a text (keeping a leading space); a control token is its bare text."""
        return self._texts[index] if index in self.special_ids else self._spell([index])

    def token_bytes(self, index: int) -> list[int] | None:
        """Return the bytes of `token_text`, also where they are part of a character; None if they are not known."""
        text = self.token_text(index)
        return _part_bytes(self._texts.get(index, ""), text) if "\ufffd" in text else list(text.encode())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prefix: str = "",
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """Write the prompt: messages through the chat template, the generation cue, then `prefix`.

        Args:
            messages: Maps with 'role' and 'content'.
            prefix: Forced start of the response (`ResponseSchema.generation_prefix`); not written twice where the
                template's cue ends with it.
            values: Further values for the template, besides `template_values`: tools, documents, .... Three are not
                the template's, as in transformers: `chat_template` names one of `named_templates`,
                `add_generation_prompt=False` leaves the cue and `prefix` out, `continue_final_message=True` (or the
                name of another field than content) ends the text with the last message's own words.

        Returns:
            The prompt as text.

        Raises:
            UserError: If there is no template, it fails, or it exceeds a limit.
        """
        values = dict(values or {})
        if field := values.pop("continue_final_message", False):
            return self._render_open(messages, "content" if field is True else str(field), values)
        cue = bool(values.pop("add_generation_prompt", True))
        text = self._render(messages, cue=cue, values=values)
        is_open = not cue or (bool(prefix) and self.ending(values).rstrip().endswith(prefix))
        return text if is_open else text + prefix

    def _render_open(
        self, messages: Sequence[Mapping[str, Any]], field: str, values: Mapping[str, Any]
    ) -> str:
        """Render up to the words of the last message, as transformers does: whatever ends the turn is cut off."""
        if values.get("add_generation_prompt"):
            raise UserError("continue_final_message: a message that goes on has no generation cue after it")
        last = _plain(messages[-1])
        names = (
            {name for name in THOUGHTS if last.get(name) == last.get(field)} if field in THOUGHTS else {field}
        )
        content = last.get(field)
        parts = [{"text": content}] if isinstance(content, str) else [dict(part) for part in content or ()]
        texts = [part for part in parts if "text" in part]
        if not texts:
            raise UserError(f"continue_final_message: the last message's {field} has no text")
        said = str(texts[-1]["text"])
        texts[-1]["text"] = f"{said}{MARK} "  # the space tells whether the template trims the words
        last |= dict.fromkeys(names, texts[-1]["text"] if isinstance(content, str) else parts)
        text = self._render([*messages[:-1], last], cue=False, values=values)
        head, mark, tail = text.rpartition(MARK)
        if not mark or said.strip() not in head:
            raise UserError(f"continue_final_message: the chat template changes the last message's {field}")
        return head if tail.startswith(" ") else head.rstrip()

    def ending(self, values: Mapping[str, Any] | None = None) -> str:
        """Return what the template writes after the user's words in a prompt; '' if it fails.

        Args:
            values: Further values for the template.
        """
        values = {name: value for name, value in (values or {}).items() if name not in CUES}
        key = json.dumps(values, sort_keys=True, default=repr) if values else ""
        if key not in self._endings:
            if len(self._endings) >= MAX_ENDINGS:  # clients of a server choose the values
                self._endings.clear()
            try:
                text = self.render([{"role": "user", "content": MARK}], values=values)
            except UserError:  # it needs other messages, or is no template: whoever renders is told
                text = ""
            self._endings[key] = text.rpartition(MARK)[2] if MARK in text else ""
        return self._endings[key]

    @functools.cached_property
    def system_role(self) -> Literal["written", "dropped", "refused"]:
        """What the chat template does with a system message before a question: some raise an error, or leave it out."""
        asked = [{"role": "user", "content": "0"}]
        try:
            self._render(asked, cue=True)
        except UserError:  # it fails without one, too: rendering reports why
            return "written"
        try:
            text = self._render([{"role": "system", "content": MARK}, *asked], cue=True)
        except UserError:
            return "refused"
        return "written" if MARK in text else "dropped"

    def encode_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        prefix: str = "",
        values: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render and encode; with `prompt_bos` there is one leading BOS, whether or not the template wrote it."""
        return self.encode_rendered(self.render(messages, prefix=prefix, values=values))

    def encode_rendered(self, text: str) -> list[int]:
        """Encode a rendered prompt; BOS as in `encode_prompt`."""
        return self._led(self.encode(text), self.prompt_bos)

    def encode_conversation(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Render whole messages without a generation cue, and encode them; BOS as in `encode_prompt`."""
        return self._led(
            self.encode(self._render(self.quoted_messages(messages), cue=False)), self.prompt_bos
        )

    def _led(self, ids: list[int], is_wanted: bool) -> list[int]:
        """Return the ids with one BOS before them where it is wanted and not there."""
        if not is_wanted or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def encode_marked(
        self, text: str, spans: Sequence[tuple[int, int]], *, cuts: bool = False
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Encode a rendered conversation, and find the tokens of parts of it.

        Args:
            text: The whole text; it starts with BOS as in `encode_prompt`.
            spans: (start, end) of the parts in characters, ascending.
            cuts: Cut a token that joins the last letters before a part with its first ones in two: a sampler
                of the part starts from the letters before it alone.

        Returns:
            The ids, and True for those with at least one character of a part (as transformers' assistant masks have
            it); a control token that begins before a part is not of it, though it may swallow white space there.
        """
        self.encode(text)  # raises what is to be said of text that has no ids
        found = self._encode_placed(text)
        starts = {start for start, _ in spans}
        places = [
            next(place for place in range(a + 1, b) if place in starts)
            for index, a, b in found
            if cuts and index not in self._control and not starts.isdisjoint(range(a + 1, b))
        ]
        if places:
            found = self._encode_placed(text[: places[0]])
            for start, end in zip(places, [*places[1:], len(text)], strict=True):
                found += [(i, a + start, b + start) for i, a, b in self._encode_following(text[start:end])]
        marked = []
        place = 0
        for index, start, end in found:
            while place < len(spans) and spans[place][1] <= start:
                place += 1
            inside = place < len(spans) and spans[place][0] < max(end, start + 1)
            is_control = index in self.special_ids and index != self.unk_id
            marked.append(inside and not (is_control and start < spans[place][0]))
        ids = self._led([index for index, _, _ in found], self.prompt_bos)
        return tuple(ids), (False,) * (len(ids) - len(marked)) + tuple(marked)

    def encode_document(self, text: str) -> tuple[int, ...]:
        """Encode a text that stands alone: BOS where the tokenizer writes one, the text, EOS where there is one.

        A text that ends with a control token, such as that of a turn's end, has its end already.
        """
        ids = self._led(self.encode(text), self.adds_bos)
        if self.eos_id is None or self.last_control(ids[1:]) is not None or ids[-1:] == [self.eos_id]:
            return tuple(ids)
        return (*ids, self.eos_id)

    def last_control(self, ids: Sequence[int]) -> int | None:
        """Return the control token that a text ends with, but for white space; None if it ends otherwise."""
        last = next((index for index in reversed(ids) if self.token_text(index).strip()), None)
        return last if last in self._control and last != self.unk_id else None

    def render_turn(
        self, messages: Sequence[Mapping[str, Any]], *, cue: bool, values: Mapping[str, Any] | None = None
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Render a conversation as it stands: no prefix, and no demand that later messages leave earlier ones alone.

        Args:
            messages: Maps as chat templates take them.
            cue: Whether the assistant speaks next.
            values: Further names that the template sees, such as tools.

        Returns:
            The text, and the (start, end) of its generation blocks (`render_marked`).

        Raises:
            UserError: If there is no template, it fails, or it exceeds a limit.
        """
        return render_marked(*self._tried_call(messages, cue=cue, values=values))

    @functools.cached_property
    def ends(self) -> tuple[str, ...]:
        """Texts of the control tokens, longest first: one of them ends a turn, if the template writes an end."""
        texts = {self._texts[index] for index in self.special_ids | self.stop_ids if index in self._texts}
        return tuple(sorted(texts, key=lambda text: (-len(text), text)))

    @functools.cached_property
    def _aligned(self) -> tokenizers.Tokenizer:
        """The backend without its post-processor, which would cut spaces off the tokens' places in the text."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.post_processor = TemplateProcessing(single="$A", special_tokens=[])
        return backend

    def encode_next(self, text: str, prefix: str = "") -> list[int]:
        """Encode a further user message after a reply: the template's text, then `prefix`.

        Raises:
            UserError: If the template drops replies, or rewrites earlier messages.
        """
        turns = (("user", "0"), ("assistant", MARK), ("user", self.quoted(text)))
        rendered = self.render([{"role": role, "content": said} for role, said in turns], prefix=prefix)
        if MARK not in rendered:
            raise UserError("chat template drops earlier replies: multi-turn episodes need them")
        if not self._turns_are_checked:
            self._check_prefix()
            self._turns_are_checked = True
        return self.encode(rendered.rpartition(MARK)[2])

    def reads(self, name: str) -> bool:
        """Say whether the chat template uses a name."""
        return bool(re.search(rf"\b{re.escape(name)}\b", self.chat_template or ""))

    def with_template(
        self,
        template: str | None,
        *,
        values: Values | None = None,
        date: str = "",
        prompt_bos: bool | None = None,
    ) -> Tokenizer:
        """Return a copy with another chat template, values that it reads, and its date; the named templates stay
        beside the model's own."""
        return self._copy(self._backend, template, values or {}, date, prompt_bos)

    def with_tags(self, tags: Sequence[str], *, padded_vocab_size: int | None = None) -> Tokenizer:
        """Return a copy in which each tag is one control token, with ids after the existing vocabulary, in order.

        A tag that is already a token keeps its id, and one that is special stays so in what `save` writes.

        Args:
            tags: Texts such as '<think>'.
            padded_vocab_size: Rows of the model's embedding table; None if the caller will resize it.

        Raises:
            UserError: If the tags do not fit in `padded_vocab_size`.
        """
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens(_tokens(tags))
        new = {tag for tag in tags if self._backend.token_to_id(tag) not in self.special_ids}
        values, date, prompt_bos = self.template_values, self.date, self.prompt_bos
        grown = self._copy(backend, self.chat_template, values, date, prompt_bos, tags=self.tags | new)
        if padded_vocab_size is not None and grown.vocab_size > padded_vocab_size:
            raise UserError(
                f"tags {list(tags)} need {grown.vocab_size:,} embedding rows; there are {padded_vocab_size:,}"
            )
        return grown

    @classmethod
    def characters(cls, alphabet: str, tags: Sequence[str] = ()) -> Tokenizer:
        """Create a character-level tokenizer: <pad> 0, <eos> 1, <unk> 2, then the tags, then the alphabet."""
        texts = ["<pad>", "<eos>", "<unk>", *tags, *alphabet]
        if len(set(texts)) != len(texts):
            raise ValueError(f"alphabet {alphabet!r} and tags {list(tags)}: expected no repetition")
        backend = tokenizers.Tokenizer(
            models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=[], unk_token="<unk>")
        )
        backend.decoder = decoders.Fuse()
        backend.add_special_tokens(_tokens(texts[: 3 + len(tags)]))
        return cls(
            backend,
            roles={"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"},
            chat_template=PLAIN_TEMPLATE,
            tags=tags,
        )

    @classmethod
    def words(cls, words: Sequence[str], tags: Sequence[str] = ()) -> Tokenizer:
        """Create a tokenizer of given pieces of text: <pad> 0, <eos> 1, <unk> 2, then the tags, then the pieces.

        Where several pieces fit, the longest is taken. Text between two pieces is <unk>, as one token.
        """
        texts = ["<pad>", "<eos>", "<unk>", *tags, *words]
        if len(set(texts)) != len(texts) or "" in texts:
            raise ValueError(
                f"words {list(words)} and tags {list(tags)}: expected no repetition and no empty piece"
            )
        backend = tokenizers.Tokenizer(
            models.WordLevel(vocab={text: index for index, text in enumerate(texts)}, unk_token="<unk>")
        )
        longest = sorted(words, key=len, reverse=True)
        pieces = tokenizers.Regex("|".join(map(re.escape, longest)))
        backend.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
        backend.decoder = decoders.Fuse()
        backend.add_special_tokens(_tokens(texts[: 3 + len(tags)]))
        return cls(
            backend,
            roles={"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"},
            chat_template=PLAIN_TEMPLATE,
            tags=tags,
        )

    @classmethod
    def bytes(cls, tags: Sequence[str] = ()) -> Tokenizer:
        """Create a byte-level tokenizer, lossless on UTF-8 text: bytes 0 to 255, <eos> 256, <pad> 257, then the
        tags."""
        texts = [*byte_letters(), "<eos>", "<pad>", *tags]
        if len(set(texts)) != len(texts):
            raise ValueError(f"tags {list(tags)}: expected no repetition, and none of a single character")
        backend = tokenizers.Tokenizer(
            models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=[])
        )
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(_tokens(texts[256:]))
        roles = {"pad_token": "<pad>", "eos_token": "<eos>"}
        return cls(backend, roles=roles, chat_template=PLAIN_TEMPLATE, tags=tags)

    @classmethod
    def load(cls, path_or_hub_name: str | Path) -> Tokenizer:
        """Load a folder or hub model, never its code; BOS, EOS, PAD come from the first of `CONFIGS` that names them.

        Args:
            path_or_hub_name: Folder with tokenizer.json, or 'owner/name'; without it transformers, if it is installed,
                converts older files (`files.CONVERTED`).

        Raises:
            UserError: If files are missing, unreachable, too large, malformed, or ask for remote code.
        """
        files = find_files(path_or_hub_name, FILES, instead=CONVERTED)
        config, token_map, generation, model, added = (
            read_json(files[name]) if name in files else {} for name in (*CONFIGS, "added_tokens.json")
        )
        if "auto_map" in config:
            raise UserError(
                f"{files['tokenizer_config.json']}: 'auto_map' asks for remote code, which is never run"
            )
        home = next(iter(files.values())).parent
        where = files.get("tokenizer.json", home)
        text, defaults = (read_text(where), {}) if where != home else _converted(home)
        tags = config.get(TAGS, [])
        try:
            if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
                raise ValueError(f"{TAGS}: expected a list of texts, got {str(tags)[:80]}")
            text = _marked(text, tags, special=True) if tags else text
            backend = tokenizers.Tokenizer.from_str(text)
            _check_growth(backend)
            backend.no_padding()  # before anything is encoded: padding to 2**40 would abort the process
            backend.encode("a")
        except BaseException as error:  # the library raises bare Exception; its panics are BaseException
            if isinstance(error, (KeyboardInterrupt, SystemExit, UserError)):
                raise
            raise UserError(
                f"{where}: not a tokenizer that `tokenizers` reads: {str(error)[:300]}"
            ) from error
        _add_tokens(backend, config, token_map, added)
        names = {**dict.fromkeys(ROLES), **{name: None for name in config if name.endswith("_token")}}
        roles = {
            role: text
            for role in names
            if (text := _role_text(role, backend, (config, token_map, defaults), (generation, model)))
        }
        template, named = _templates(home, files, config)
        return cls(
            backend,
            roles=roles,
            adds_bos=config.get("add_bos_token") is True,
            chat_template=template,
            named_templates=named,
            stop_ids=_ids(generation.get("eos_token_id")),
            tags=tags,
        )

    def save(self, folder: str | Path) -> None:
        """Write the files that `load` and transformers read, including further stop ids."""
        (folder := Path(folder)).mkdir(parents=True, exist_ok=True)
        config = {**self._roles, "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": self.adds_bos}
        config |= {"clean_up_tokenization_spaces": False, "model_max_length": 2**30}
        config |= {TAGS: sorted(self.tags)} if self.tags else {}
        (folder / "tokenizer.json").write_text(self.backend_text(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        named = {f"{NAMED}/{name}.jinja": source for name, source in self.named_templates.items()}
        for name, source in {"chat_template.jinja": self.chat_template, **named}.items():
            if source is not None:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(source, encoding="utf-8")
        if self.stop_ids - {self.eos_id}:
            stops = json.dumps({"eos_token_id": sorted(self.stop_ids)})
            (folder / "generation_config.json").write_text(stops + "\n", encoding="utf-8")

    def _copy(
        self,
        backend: tokenizers.Tokenizer,
        template: str | None,
        values: Values,
        date: str,
        prompt_bos: bool | None,
        tags: Iterable[str] | None = None,
    ) -> Tokenizer:
        return Tokenizer(
            backend,
            roles=self._roles,
            adds_bos=self.adds_bos,
            chat_template=template,
            named_templates=self.named_templates if template == self.chat_template else {},
            stop_ids=self.stop_ids,
            template_values=values,
            date=date,
            prompt_bos=prompt_bos,
            tags=self.tags if tags is None else tags,
        )

    def _spell(self, ids: Sequence[int], *, opens: bool = False) -> str:
        """Decode ids.

        Control tokens are written verbatim, because a byte-level decoder would garble é in them; only a decoder that
        puts spaces between words (WordPiece's) gets them, too.

        Args:
            ids: The tokens.
            opens: Whether they start a text; otherwise they follow some.
        """
        parts: list[str] = []
        run: list[str] = []
        for index in ids:
            text = self._texts.get(index, "\ufffd")
            if self._joins_words or (index in self._texts and index not in self.special_ids):
                run.append(text)
                continue
            parts += [self._decode_run(run, opens=opens and not parts), text]
            run = []
        return "".join([*parts, self._decode_run(run, opens=opens and not parts)])

    def _decode_run(self, texts: list[str], *, opens: bool) -> str:
        decoder = self._backend.decoder
        if not texts:
            return ""
        if opens or not self._opens_apart:
            return decoder.decode(texts) if decoder is not None else " ".join(texts)
        texts = ["x", *texts]  # another token goes before: decoders treat only the first one of a text apart
        return (decoder.decode(texts) if decoder is not None else " ".join(texts))[1:]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], *, cue: bool, values: Mapping[str, Any] | None = None
    ) -> str:
        return render_template(*self._tried_call(messages, cue=cue, values=values))

    def _tried_call(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        cue: bool,
        values: Mapping[str, Any] | None,
    ) -> tuple[str, dict[str, Any]]:
        """Return a template and what it is rendered with; before its first use it is tried in another process."""
        given = {**self.template_values, **(values or {})}
        source = self._source(given.pop("chat_template", None), has_tools=bool(given.get("tools")))
        fixed = {
            "messages": [_plain(message) for message in messages],
            "add_generation_prompt": cue,
            TODAY: self.date,
        }
        given = {**self._roles, **given, **fixed}
        try_template(source, [given])
        return source, given

    def _source(self, name: str | None, *, has_tools: bool) -> str:
        """Choose a template as transformers does."""
        if name is None:
            tools = self.named_templates.get("tool_use") if has_tools else None
            source = self.chat_template if tools is None else tools
        elif name in ("default", self.chat_template):
            source = self.chat_template
        elif name in self.named_templates:
            source = self.named_templates[name]
        else:
            known = ", ".join(("default", *self.named_templates))
            raise UserError(f"chat_template = {name[:40]!r}: the model's templates are {known}")
        if source is None:
            raise UserError(
                "this tokenizer has no chat template; give it one (for a base model: BASE_TEMPLATE)"
            )
        return source

    def _check_prefix(self) -> None:
        """Refuse a template that renders a message differently when the generation cue or a reply follows."""
        asked = [{"role": "user", "content": "0"}]
        replied = [*asked, {"role": "assistant", "content": "0"}]
        plain, reply = self._render(asked, cue=False), self._render(replied, cue=False)
        if not (self._render(asked, cue=True).startswith(plain) and reply.startswith(plain)):
            raise UserError(
                "chat template is not prefix-preserving: what follows a message changes its text, "
                "so that the turns of an episode would differ from what was sampled; fix the template"
            )


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as transformers gives it to templates: no None, and thinking under each of its names."""
    given = {key: value for key, value in message.items() if value is not None}
    thought = next((given[key] for key in THOUGHTS if key in given), None)
    return given if thought is None else {"thinking": thought, **given, "reasoning_content": thought}


def _deeply(change: Callable[[str], str], value: Any) -> Any:
    """Change every text of a nested value, but for the names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        fixed = ("type", "image", "image_url", "url", "path", "base64")  # of parts of a message
        return {name: inner if name in fixed else _deeply(change, inner) for name, inner in value.items()}
    return [_deeply(change, inner) for inner in value] if isinstance(value, list | tuple) else value


def _tokens(texts: Sequence[str]) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def _marked(text: str, tags: Collection[str], *, special: bool) -> str:
    """Return a tokenizer.json in which the added tokens with these texts are special, or ordinary, ones."""
    data = json.loads(text)
    for row in data["added_tokens"]:
        if row["content"] in tags:
            row["special"] = special
    return json.dumps(data, ensure_ascii=False, indent=2)


def byte_letters() -> list[str]:
    """Return the letters of the 256 bytes in GPT-2's alphabet: printable bytes themselves, the others from U+0100
    on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + hidden.index(byte)) for byte in range(256)]


LETTER_BYTES = {letter: byte for byte, letter in enumerate(byte_letters())}
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def _part_bytes(spelled: str, text: str) -> list[int] | None:
    """Return the bytes that an entry of the vocabulary stands for, if they are those of a text with U+FFFD."""
    if fallback := BYTE_TOKEN.fullmatch(spelled):
        return [int(fallback[1], 16)]
    found = [LETTER_BYTES[letter] for letter in spelled if letter in LETTER_BYTES]
    is_whole = len(found) == len(spelled) and bytes(found).decode(errors="replace") == text
    return found if is_whole else None


def _steps(backend: tokenizers.Tokenizer) -> list[str]:
    """Name the steps of a decoder; a replacement of fixed text is none.

    Raises:
        UserError: If one of them makes a token's text depend on those after it.
    """
    holder = tokenizers.Tokenizer(models.BPE())  # without the vocabulary, which takes long to write
    holder.decoder = backend.decoder
    node = json.loads(holder.to_str())["decoder"] or {"type": "Sequence", "decoders": []}
    steps = node["decoders"] if node["type"] == "Sequence" else [node]
    for step in steps:
        if step["type"] in ("BPEDecoder", "CTC") or step.get("stop"):
            raise UserError(
                f"tokenizer.json: a token's text depends on the next token ({step['type']} in the decoder); expected "
                "ByteLevel, ByteFallback, Metaspace, WordPiece, Replace, Fuse, or Strip at the start"
            )
    return [step["type"] for step in steps if "String" not in step.get("pattern", ())]


def _pipeline(backend: tokenizers.Tokenizer) -> dict[str, list[dict[str, Any]]]:
    """Return the steps of a tokenizer's four parts, those of nested sequences one after the other."""
    holder = tokenizers.Tokenizer(models.BPE())  # without the vocabulary, which takes long to write
    for part in PARTS:
        setattr(holder, part, getattr(backend, part))
    nodes = json.loads(holder.to_str())
    found: dict[str, list[dict[str, Any]]] = {}
    for part in PARTS:
        waiting, found[part] = [nodes[part]], []
        while waiting:
            node = waiting.pop(0)
            if isinstance(node, dict) and node.get("type") == "Sequence":
                waiting = [
                    step for steps in node.values() if isinstance(steps, list) for step in steps
                ] + waiting
            elif isinstance(node, dict):
                found[part].append(node)
    return found


def _check_growth(backend: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer that could multiply a text: the library would abort the whole process.

    Raises:
        UserError: With the part.
    """
    for part, steps in _pipeline(backend).items():
        for step in steps:
            if len(json.dumps(step.get("pattern"))) > MAX_PATTERN:
                raise UserError(
                    f"tokenizer.json: {part} has a pattern of over {MAX_PATTERN:,} characters; it is not read"
                )
        growth = _worst_growth(steps) if len(steps) <= MAX_STEPS else math.inf
        if growth > MAX_GROWTH:
            raise UserError(
                f"tokenizer.json: {part} could make a text {min(growth, 1e9):,.0f} times as long in {len(steps)} "
                f"steps; expected at most {MAX_GROWTH} times in {MAX_STEPS}"
            )


ATOM = r"(?:\[\^?[^\[\]\\&^]+\]|\\[ sSdDwWnrt]|[^\[\]\\(){}|.*+?^$])"
"""Of a regular expression: a letter or a plain class of letters, which means the same in every dialect."""
FIRST = re.compile(rf"\^?({ATOM})(?:\+|\{{[1-9]|(?=\(|$|{ATOM}))")
BEHIND = re.compile(rf"\(\?<=(?:{ATOM})*?({ATOM})\)(?=\(|$)")
NEVER = rf"(?:{ATOM}\{{0\}}|\(\?:[^()]*\)\{{0\}})*+"
AHEAD = re.compile(rf"\(\?={NEVER}(?:(?=\(\?:[^()]*\)\{{[1-9])\(\?:)?({ATOM})(?:\{{[1-9]|(?![*+?{{]))")


class _Letters(NamedTuple):
    """What a pattern asks for where it matches: the letter that it replaces, or those before and after the place."""

    replaced: frozenset[str] | None = None
    before: frozenset[str] | None = None
    after: frozenset[str] | None = None


def _class_letters(atom: str) -> frozenset[str] | None:
    """Return the letters that an atom stands for; None: any."""
    if atom == "\\ ":
        return frozenset(" ")
    if not atom.startswith("["):
        return None if atom.startswith("\\") else frozenset(atom)
    if atom.startswith("[^") or re.search(r"-.-|--", atom):
        return None
    pairs = re.findall(r"(.)(?:-(.))?", atom[1:-1], re.DOTALL)
    ranges = [range(ord(first), ord(last or first) + 1) for first, last in pairs]
    return frozenset(chr(n) for some in ranges for n in some) if sum(map(len, ranges)) <= MAX_CLASS else None


def _asked_letters(pattern: str) -> _Letters | None:
    """Read the plainest forms of regular expressions; None: another one, which may match between any two letters."""
    if "|" in pattern:
        return None
    if first := FIRST.match(pattern):
        return _Letters(replaced=_class_letters(first[1]))
    behind = BEHIND.match(pattern)
    before = _class_letters(behind[1]) if behind else None
    if behind is None or before is None:
        return None
    rest = pattern[behind.end() :]
    ahead = AHEAD.match(rest)
    return _Letters(before=before, after=_class_letters(ahead[1]) if ahead else None)


class _Weights(dict[str, float]):
    """Into how many letters one letter of a text may grow in the steps that follow."""

    rest = 1.0

    def __missing__(self, letter: str) -> float:
        return self.rest

    def of(self, text: str) -> float:
        return sum(map(self.__getitem__, text))

    def most(self) -> float:
        return max(self.rest, *self.values()) if self else self.rest

    def change(self, change: Callable[[float], float]) -> None:
        """Change those of all letters."""
        self.update({letter: change(weight) for letter, weight in self.items()})
        self.rest = change(self.rest)


def _worst_growth(steps: Sequence[Mapping[str, Any]]) -> float:
    """Bound by how much steps, one after the other, may multiply a text's length.

    Steps are read from the last to the first. A product of each step's own factor would refuse dozens of replacements
    that never meet: what one of them writes is counted with what the later ones make of those letters alone.
    """
    weights = _Weights()
    todo = list(steps)
    while todo:
        step = todo.pop()
        if step.get("type") == "Replace":
            content, pattern = step["content"], step["pattern"]
            most = weights.of(content)
            if letters := pattern.get("String", ""):
                share = most / len(letters)  # each letter of a match gives way to its share of the content
                new = {x: share if len(letters) == 1 else max(weights[x], share) for x in set(letters)}
                weights.update(new)
                continue
            asked = _asked_letters(pattern.get("Regex", ""))
            if asked is None:  # it may match between letters
                weights.change(lambda weight, more=most: weight + more)
            elif asked.before is None:
                if asked.replaced is None:
                    weights.change(lambda weight, more=most: max(weight, more))
                else:
                    weights.update({x: max(weights[x], most) for x in asked.replaced})
            else:
                # A letter that has got something after it is followed by none that the neighbouring steps ask for:
                # of such steps one counts.
                after, firsts = asked.after, set(content[:1])
                while _is_alone(asked, content) and after is not None and todo:
                    other = _replacement(todo[-1])
                    if other is None or other[0].before != asked.before or other[0].after is None:
                        break
                    wider = after | other[0].after
                    starts = firsts | set(other[1][:1])
                    if not _is_alone(other[0], other[1]) or wider & starts:
                        break
                    after, firsts, most = wider, starts, max(most, weights.of(other[1]))
                    todo.pop()
                weights.update({x: weights[x] + most for x in asked.before})
        elif step.get("type") == "Prepend":
            more = weights.of(step["prepend"])
            weights.change(lambda weight, more=more: weight + more)
        else:  # each letter may become any others
            most = weights.most() * _growth(step)
            weights = _Weights()
            weights.rest = most
        if weights.most() > 1e12:
            break
    return weights.most()


def _replacement(step: Mapping[str, Any]) -> tuple[_Letters, str] | None:
    """Return what an insertion behind certain letters asks for, and what it writes."""
    asked = _asked_letters(step["pattern"].get("Regex", "")) if step.get("type") == "Replace" else None
    return None if asked is None or asked.before is None else (asked, step["content"])


def _is_alone(asked: _Letters, content: str) -> bool:
    """Say whether an insertion writes something, and none of the letters behind which it writes."""
    return bool(content) and asked.before is not None and not asked.before & set(content)


def _growth(step: Mapping[str, Any]) -> float:
    """Return by how much a step that is no replacement may multiply a text's length."""
    kind = step.get("type")
    if kind == "Precompiled":  # a trie, then the texts that it replaces others by, each with a 0 at its end
        data = base64.b64decode(step["precompiled_charsmap"] or "")
        texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
        return float(max(map(len, texts), default=1) or 1)
    if kind == "TemplateProcessing":
        pieces = [piece for name in ("single", "pair") for piece in step.get(name) or ()]
        return float(max(1, len(pieces) / 2))
    return {"BertNormalizer": 3.0, "ByteLevel": 2.0, "Metaspace": 2.0}.get(str(kind), 1.0)


def _converted(folder: Path) -> tuple[str, dict[str, str]]:
    """Let transformers convert a tokenizer without tokenizer.json.

    Returns:
        The text of such a file, and the tokens' roles.
    """
    try:
        import google.protobuf  # noqa: F401  # it reads sentencepiece's files
        import sentencepiece  # noqa: F401  # pyright: ignore[reportMissingImports]
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError(
            f"{folder}: no tokenizer.json there; transformers converts its other tokenizer files: "
            f"{install_command('convert')}, or save the folder with AutoTokenizer"
        ) from None
    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return found.backend_tokenizer.to_str(), dict(found.special_tokens_map)
    except Exception as error:  # whatever its readers of untrusted files raise
        raise UserError(
            f"{folder}: no tokenizer.json there, and transformers cannot make one: {str(error)[:200]}"
        ) from error


def _add_tokens(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    token_map: Mapping[str, Any],
    added: Mapping[str, Any],
) -> None:
    """Make tokens of those that only the configs name, as transformers does: they would be split as text.

    Args:
        backend: The tokenizer.
        config: tokenizer_config.json; where it lists `added_tokens_decoder` the other files are older.
        token_map: special_tokens_map.json.
        added: added_tokens.json: id by text.

    Raises:
        UserError: If a token would get another id than the configs give it.
    """
    wanted: dict[str, tuple[AddedToken, int | None]] = {}
    special = config if "added_tokens_decoder" in config else {**config, **token_map}
    names = [_content(special[role]) for role in special if role.endswith("_token")]
    names = [text for text in names if backend.token_to_id(text) is not None]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = special.get(key) or []
        names += [_content(row) for row in (more.values() if isinstance(more, dict) else more)]
    try:
        listed = config.get("added_tokens_decoder") or {}
        for index, row in sorted(listed.items(), key=lambda item: int(item[0])):
            flags = {name: value for name, value in row.items() if name != "__type"}
            wanted[row["content"]] = AddedToken(**flags), int(index)
        for text, index in added.items() if special is not config else ():
            wanted[text] = AddedToken(text, special=text in names, normalized=text not in names), int(index)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"tokenizer_config.json: malformed added tokens ({error})") from None
    for text in names:
        if text and text not in wanted:
            wanted[text] = AddedToken(text, special=True, normalized=False), None
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for text, (token, index) in wanted.items():
        if text in known:
            continue
        backend.add_tokens([token])
        if index is not None and (got := backend.token_to_id(text)) != index:
            raise UserError(
                f"tokenizer_config.json: token {text[:40]!r} has id {index:,}, and would get {got:,} with "
                "tokenizer.json, which lacks it; save both files with one version of transformers"
            )


def _content(value: Any) -> str:
    """Return the text of a token that a config writes as text or as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _templates(
    home: Path, files: Mapping[str, Path], config: Mapping[str, Any]
) -> tuple[str | None, dict[str, str]]:
    """Find a folder's chat templates, as transformers does: files before the entry of tokenizer_config.json.

    Returns:
        The default one, and the others by name.
    """
    stored = config.get("chat_template")
    rows = stored if isinstance(stored, list) else [{"name": "default", "template": stored}]
    found = {row.get("name"): row.get("template") for row in rows if isinstance(row, dict)}
    if stored is None and "chat_template.json" in files:  # of processors, which older image models have
        found = {"default": read_json(files["chat_template.json"]).get("chat_template")}
    on_disk = {path.stem: path for path in sorted((home / NAMED).glob("*.jinja"))}
    if "chat_template.jinja" in files:
        on_disk["default"] = files["chat_template.jinja"]
    if on_disk:
        found = {
            "default": found.get("default"),
            **{name: read_text(path) for name, path in on_disk.items()},
        }
    texts = {str(name): text for name, text in found.items() if isinstance(text, str)}
    return texts.pop("default", None), texts


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [index for index in values if type(index) is int and index >= 0]


def _role_text(
    role: str,
    backend: tokenizers.Tokenizer,
    by_text: Sequence[Mapping[str, Any]],
    by_id: Sequence[Mapping[str, Any]],
) -> str | None:
    """Find the token of a role, first in the files that name it by text, then in those that name it by id."""
    for source in by_text:
        if value := _content(source.get(role)):
            needs_id = role in ROLES and role not in ("pad_token", *ROLES[4:])
            return value if needs_id or backend.token_to_id(value) is not None else None
    if any(role in source for source in by_text):  # deliberately set to null
        return None
    texts = (
        backend.id_to_token(index)
        for source in by_id
        for index in _ids(source.get(f"{role}_id"))
        if index < MAX_ID
    )
    return next((text for text in texts if text), None)
