"""The tokenizer: text <-> ids and messages -> prompt, on top of the `tokenizers` library."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from whet.model.files import find_files, read_json, read_text
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
FILES = ("tokenizer.json", *CONFIGS, "chat_template.jinja")
RESERVED = ("messages", "add_generation_prompt", "strftime_now", "range", TODAY)
MARK = "\u2402words\u2403"
"""Stands for words of a message where what the template writes around them is looked for."""
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")

Values = Mapping[str, bool | str]
"""Further values for a chat template, such as enable_thinking."""


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
        vocab_size: Highest decodable id, plus 1.
        chat_template: Jinja source, or None.
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
        stop_ids: Iterable[int] = (),
        template_values: Values | None = None,
        date: str = "",
        prompt_bos: bool | None = None,
    ) -> None:
        """Wrap a backend.

        Args:
            backend: The library's tokenizer; owned by this object.
            roles: Token text by role (`ROLES`); absent if the model has none.
            adds_bos: Whether prompts start with BOS even if the post-processor adds none.
            chat_template: Jinja source.
            stop_ids: Further ids that end a generation.
            template_values: Further values for the template.
            date: The template's today; empty for the computer's.
            prompt_bos: None: True with whet's own templates only.

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
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (ids.get(role) for role in ROLES)
        flagged = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(flagged | {index for index in ids.values() if index is not None})
        self.stop_ids = frozenset(stop_ids) | ({self.eos_id} if self.eos_id is not None else frozenset())
        leads = backend.encode("a", add_special_tokens=True).ids[:1] == [self.bos_id]
        self.adds_bos = self.bos_id is not None and (adds_bos or leads)
        if self.adds_bos and not leads:  # transformers 5 only uses the post-processor
            bos = roles["bos_token"]
            backend.post_processor = TemplateProcessing(
                single=[bos, "$A"], special_tokens=[(bos, self.bos_id)]
            )
        if chat_template is not None:
            check_template(chat_template)
        self.chat_template = chat_template
        self.template_values = dict(template_values or {})
        for name in self.template_values:
            if not re.search(rf"\b{re.escape(name)}\b", chat_template or "") or name in RESERVED:
                raise UserError(
                    f"policy.template_values.{name}: the model's chat template does not read it; leave it out"
                )
        self.date = date or datetime.date.today().isoformat()
        own = chat_template in (None, BASE_TEMPLATE, PLAIN_TEMPLATE)
        self.prompt_bos = self.adds_bos and (own if prompt_bos is None else prompt_bos)
        self._endings: dict[tuple[tuple[str, bool | str], ...], str] = {}
        self._template_is_checked = self._turns_are_checked = self._turns_are_tried = False
        self._decoder, self._num_stripped = _space_keeping(backend.decoder)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer.json that `save` writes: same fingerprint, same ids."""
        return hashlib.sha256(self._backend.to_str(pretty=True).encode()).hexdigest()

    def difference(self, other: Tokenizer) -> str:
        """Return how another tokenizer's ids differ in their texts; '' if they are the same."""
        if self._texts == other._texts:
            return ""
        index = min(n for n in self._texts | other._texts if self._texts.get(n) != other._texts.get(n))
        return f"id {index} is {self._texts.get(index)!r:.40} here and {other._texts.get(index)!r:.40} there"

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
            return self._backend.encode(text, add_special_tokens=False).ids
        except UnicodeEncodeError as error:
            raise UserError(
                f"text contains a lone surrogate at character {error.start}: not Unicode"
            ) from error
        except Exception as error:  # a bare Exception: the vocabulary has no token for unknown text
            raise UserError(f"tokenizer.json cannot encode {text[:40]!r}: {str(error)[:200]}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids as the start of a text: control tokens visible, split characters and unknown ids as U+FFFD.

        SentencePiece's leading space is removed, as in transformers.
        """
        return self._strip(self._spell(ids))

    def decode_completion(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
        """Decode ids as the continuation of a prompt: `decode(prompt + ids)` minus `decode(prompt)`.

        Args:
            prompt_ids: The preceding ids; after any text the first space is kept.
            ids: The completion.
        """
        if not self._num_stripped:
            return self._spell(ids)
        before = self._spell(prompt_ids)
        return self._strip(before + self._spell(ids))[len(self._strip(before)) :]

    def token_text(self, index: int) -> str:
        """Decode one id as inside a text (keeping a leading space)."""
        return self._spell([index])

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, prefix: str = "", values: Values | None = None
    ) -> str:
        """Write the prompt: messages through the chat template, the generation cue, then `prefix`.

        Args:
            messages: Maps with 'role' and 'content'.
            prefix: Forced start of the response (`ResponseSchema.generation_prefix`); not written twice where the
                template's cue ends with it.
            values: Further values for the template, besides `template_values`.

        Returns:
            The prompt as text.

        Raises:
            UserError: If there is no template, it fails, or it exceeds a limit.
        """
        if self.chat_template is None:
            raise UserError(
                "this tokenizer has no chat template; give it one (for a base model: BASE_TEMPLATE)"
            )
        if not self._template_is_checked:
            try_template(self.chat_template, [self._values(messages, True, values)])
            self._template_is_checked = True
        text = self._render(messages, cue=True, values=values)
        is_open = bool(prefix) and self.ending(values).rstrip().endswith(prefix)
        return text if is_open else text + prefix

    def ending(self, values: Values | None = None) -> str:
        """Return what the template writes after the user's words in a prompt; '' if it fails.

        Args:
            values: Further values for the template.
        """
        key = tuple(sorted((values or {}).items()))
        if key not in self._endings:
            try:
                text = self.render([{"role": "user", "content": MARK}], values=values)
            except UserError:  # it needs other messages, or is no template: whoever renders is told
                text = ""
            self._endings[key] = text.rpartition(MARK)[2] if MARK in text else ""
        return self._endings[key]

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], prefix: str = "", values: Values | None = None
    ) -> list[int]:
        """Render and encode; with `prompt_bos` there is one leading BOS, whether or not the template wrote it."""
        ids = self.encode(self.render(messages, prefix=prefix, values=values))
        if self.prompt_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_conversation(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Render whole messages without a generation cue, and encode them; BOS as in `encode_prompt`."""
        self.render(messages[:-1])  # checks the template once
        ids = self.encode(self._render(messages, cue=False))
        if self.prompt_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_marked(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Encode a rendered conversation, and find the tokens of parts of it.

        Args:
            text: The whole text; it starts with BOS as in `encode_prompt`.
            spans: (start, end) of the parts in characters, ascending.

        Returns:
            The ids, and True for those with at least one character of a part (as transformers' assistant masks have
            it); a control token that begins before a part is not of it, though it may swallow white space there.
        """
        self.encode(text)  # raises what is to be said of text that has no ids
        found = self._aligned.encode(text, add_special_tokens=False)
        marked = []
        place = 0
        for index, (start, end) in zip(found.ids, found.offsets, strict=True):
            while place < len(spans) and spans[place][1] <= start:
                place += 1
            inside = place < len(spans) and spans[place][0] < max(end, start + 1)
            marked.append(inside and not (index in self.special_ids and start < spans[place][0]))
        ids = list(found.ids)
        if self.prompt_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids, marked = [self.bos_id, *ids], [False, *marked]
        return tuple(ids), tuple(marked)

    def encode_document(self, text: str) -> tuple[int, ...]:
        """Encode a text that stands alone: BOS where the tokenizer writes one, the text, EOS where there is one."""
        ids = self.encode(text)
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return tuple(ids if self.eos_id is None or ids[-1:] == [self.eos_id] else [*ids, self.eos_id])

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
        if self.chat_template is None:
            raise UserError(
                "this tokenizer has no chat template; give it one (for a base model: BASE_TEMPLATE)"
            )
        given = {**self._values(messages, cue), **(values or {})}
        if not self._turns_are_tried:
            try_template(self.chat_template, [given])
            self._turns_are_tried = True
        return render_marked(self.chat_template, given)

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
        turns = (("user", "0"), ("assistant", MARK), ("user", text))
        rendered = self.render([{"role": role, "content": said} for role, said in turns], prefix=prefix)
        if MARK not in rendered:
            raise UserError("chat template drops earlier replies: multi-turn episodes need them")
        if not self._turns_are_checked:
            self._check_prefix()
            self._turns_are_checked = True
        return self.encode(rendered.rpartition(MARK)[2])

    def with_template(
        self,
        template: str | None,
        *,
        values: Values | None = None,
        date: str = "",
        prompt_bos: bool | None = None,
    ) -> Tokenizer:
        """Return a copy with another chat template, values that it reads, and its date."""
        return self._copy(self._backend, template, values or {}, date, prompt_bos)

    def with_tags(self, tags: Sequence[str], *, padded_vocab_size: int | None = None) -> Tokenizer:
        """Return a copy in which each tag is one control token, with ids after the existing vocabulary, in order.

        A tag that is already a token keeps its id.

        Args:
            tags: Texts such as '<think>'.
            padded_vocab_size: Rows of the model's embedding table; None if the caller will resize it.

        Raises:
            UserError: If the tags do not fit in `padded_vocab_size`.
        """
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens(_tokens(tags))
        grown = self._copy(backend, self.chat_template, self.template_values, self.date, self.prompt_bos)
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
        )

    @classmethod
    def bytes(cls, tags: Sequence[str] = ()) -> Tokenizer:
        """Create a byte-level tokenizer, lossless on UTF-8 text: bytes 0 to 255, <eos> 256, <pad> 257, then the
        tags."""
        texts = [*_byte_letters(), "<eos>", "<pad>", *tags]
        if len(set(texts)) != len(texts):
            raise ValueError(f"tags {list(tags)}: expected no repetition, and none of a single character")
        backend = tokenizers.Tokenizer(
            models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=[])
        )
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(_tokens(texts[256:]))
        return cls(backend, roles={"pad_token": "<pad>", "eos_token": "<eos>"}, chat_template=PLAIN_TEMPLATE)

    @classmethod
    def load(cls, path_or_hub_name: str | Path) -> Tokenizer:
        """Load a folder or hub model, never its code; BOS, EOS, PAD come from the first of `CONFIGS` that names them.

        Args:
            path_or_hub_name: Folder with tokenizer.json, or 'owner/name'.

        Raises:
            UserError: If files are missing, unreachable, too large, malformed, or ask for remote code.
        """
        files = find_files(path_or_hub_name, FILES)
        text = read_text(files["tokenizer.json"])
        try:
            backend = tokenizers.Tokenizer.from_str(text)
            backend.no_padding()  # before anything is encoded: padding to 2**40 would abort the process
            backend.encode("a")
        except BaseException as error:  # the library raises bare Exception; its panics are BaseException
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise UserError(
                f"{files['tokenizer.json']}: not a tokenizer that `tokenizers` reads: {str(error)[:300]}"
            ) from error
        config, token_map, generation, model = (
            read_json(files[name]) if name in files else {} for name in CONFIGS
        )
        if "auto_map" in config:
            raise UserError(
                f"{files['tokenizer_config.json']}: 'auto_map' asks for remote code, which is never run"
            )
        roles = {
            role: text
            for role in ROLES
            if (text := _role_text(role, backend, (config, token_map), (generation, model)))
        }
        template = (
            read_text(files["chat_template.jinja"])
            if "chat_template.jinja" in files
            else config.get("chat_template")
        )
        if isinstance(template, list):  # several named templates
            named = {row.get("name"): row.get("template") for row in template if isinstance(row, dict)}
            template = named.get("default")
        return cls(
            backend,
            roles=roles,
            adds_bos=config.get("add_bos_token") is True,
            chat_template=template if isinstance(template, str) else None,
            stop_ids=_ids(generation.get("eos_token_id")),
        )

    def save(self, folder: str | Path) -> None:
        """Write the files that `load` and transformers read, including further stop ids."""
        (folder := Path(folder)).mkdir(parents=True, exist_ok=True)
        config = {**self._roles, "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": self.adds_bos}
        config |= {"clean_up_tokenization_spaces": False, "model_max_length": 2**30}
        (folder / "tokenizer.json").write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
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
    ) -> Tokenizer:
        return Tokenizer(
            backend,
            roles=self._roles,
            adds_bos=self.adds_bos,
            chat_template=template,
            stop_ids=self.stop_ids,
            template_values=values,
            date=date,
            prompt_bos=prompt_bos,
        )

    def _strip(self, text: str) -> str:
        head = text[: self._num_stripped]
        return head.lstrip(" ") + text[self._num_stripped :]

    def _spell(self, ids: Sequence[int]) -> str:
        """Decode ordinary tokens; control tokens verbatim, because a byte-level decoder would garble é in them."""
        parts: list[str] = []
        run: list[str] = []
        for index in ids:
            text = self._texts.get(index, "\ufffd")
            if index in self.special_ids or index not in self._texts:
                parts += [self._decode_run(run), text]
                run = []
            else:
                run.append(text)
        return "".join([*parts, self._decode_run(run)])

    def _decode_run(self, texts: list[str]) -> str:
        return self._decoder.decode(texts) if self._decoder is not None else " ".join(texts)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], *, cue: bool, values: Values | None = None
    ) -> str:
        assert self.chat_template is not None
        return render_template(self.chat_template, self._values(messages, cue, values))

    def _values(
        self, messages: Sequence[Mapping[str, Any]], cue: bool, values: Values | None = None
    ) -> dict[str, Any]:
        fixed = {
            "messages": list(messages),
            "add_generation_prompt": cue,
            TODAY: self.date,
        }
        return {**self._roles, **self.template_values, **(values or {}), **fixed}

    def _check_prefix(self) -> None:
        """Refuse a template that renders a message differently when the generation cue or a reply follows."""
        assert self.chat_template is not None
        asked = [{"role": "user", "content": "0"}]
        replied = [*asked, {"role": "assistant", "content": "0"}]
        plain, reply = self._render(asked, cue=False), self._render(replied, cue=False)
        if not (self._render(asked, cue=True).startswith(plain) and reply.startswith(plain)):
            raise UserError(
                "chat template is not prefix-preserving: what follows a message changes its text, "
                "so that the turns of an episode would differ from what was sampled; fix the template"
            )


def _tokens(texts: Sequence[str]) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def _byte_letters() -> list[str]:
    """Return the letters of the 256 bytes in GPT-2's alphabet: printable bytes themselves, the others from U+0100
    on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + hidden.index(byte)) for byte in range(256)]


def _space_keeping(decoder: Any) -> tuple[Any, int]:
    """Return the decoder without its stripping of leading spaces, and how many it stripped."""
    if decoder is None:
        return None, 0
    shell = json.loads(tokenizers.Tokenizer(models.BPE()).to_str())
    holder = tokenizers.Tokenizer(models.BPE())
    holder.decoder = decoder
    node = json.loads(holder.to_str())["decoder"]
    steps = node["decoders"] if node["type"] == "Sequence" else [node]
    kept, num_stripped = [], 0
    for step in steps:
        if step["type"] == "Strip" and step["content"] == " " and step["start"] and not step["stop"]:
            num_stripped += step["start"]
            continue
        if step["type"] == "Metaspace" and step.get("prepend_scheme") != "never":
            num_stripped += 1
            step = {**step, "prepend_scheme": "never"}
        kept.append(step)
    shell["decoder"] = {"type": "Sequence", "decoders": kept}
    return tokenizers.Tokenizer.from_str(json.dumps(shell)).decoder, num_stripped


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
        value = source.get(role)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            return None if role == "pad_token" and backend.token_to_id(value) is None else value
    if any(role in source for source in by_text):  # deliberately set to null
        return None
    texts = (
        backend.id_to_token(index)
        for source in by_id
        for index in _ids(source.get(f"{role}_id"))
        if index < MAX_ID
    )
    return next((text for text in texts if text), None)
