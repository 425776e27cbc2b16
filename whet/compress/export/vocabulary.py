"""A tokenizer in llama.cpp's terms: tokens, types, merges or scores, the name of its way to split words, stop ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whet.model.text.gguf import BYTE, CONTROL, GPT2, NORMAL, PATTERNS, UNKNOWN, UNUSED, USER_DEFINED
from whet.model.text.tokenizer import Tokenizer, byte_letters
from whet.types import UserError

KNOWN_STOPS = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "<|end_of_text|>",
        "<eos>",
        "<turn|>",
    ]
)
"""Texts at which llama.cpp stops whatever the file says."""
MARKS = frozenset({"tekken", "gpt-4o"})
"""Splits whose words may have combining marks, but not in llama.cpp's spelling of them."""
MERGES_ALL = {"llama-bpe": "smaug-bpe"}
"""Another name of the same split, for vocabularies whose whole words are not taken before their merges."""
NEVER = f"{chr(0x100)}{chr(0x100)} {chr(0x100)}{chr(0x100)}"
"""A merge that never applies: its halves are no letters, and nothing makes them. llama.cpp needs a list of some."""
PAD = "[PAD{}]"


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer for GGUF.

    Attributes:
        facts: Keys below `tokenizer.`, with their values.
        notes: What llama.cpp does otherwise, in a sentence each.
        strips: Whether special tokens take the spaces after them, as Phi-3's do.
    """

    facts: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    strips: bool = False

    def with_template(self, template: str) -> Vocabulary:
        """Return it with a chat template; '' for none."""
        return replace(self, facts={**self.facts, "chat_template": template}) if template else self

    def model_name(self, name: str) -> str:
        """Return a name for the model. llama.cpp strips the spaces after special tokens by it: if it has 'phi-3' or
        'phi3' in it, and then it does not load a file without Phi-3's tokens."""
        name = re.sub("phi-?3", "phi", name, flags=re.IGNORECASE)
        return f"phi-3 {name}" if self.strips else name


def leads_with_bos(tokenizer: Tokenizer) -> bool:
    """Whether llama.cpp and Ollama are told to put BOS before each prompt: as whet does, or else a template that writes
    its own would lose it, and one without any would get one."""
    bos = tokenizer.bos_id
    if bos is None or not tokenizer.adds_bos:
        return False
    if tokenizer.prompt_bos or tokenizer.chat_template is None:
        return True
    return tokenizer.render([{"role": "user", "content": "a"}]).startswith(tokenizer.token_text(bos))


def express(tokenizer: Tokenizer, num_rows: int, stop_ids: Sequence[int]) -> Vocabulary:
    """Express a tokenizer in llama.cpp's terms.

    Args:
        tokenizer: The tokenizer.
        num_rows: Rows of the tables in the file; one without a text becomes an unused token.
        stop_ids: Every id that ends a generation.

    Raises:
        UserError: If llama.cpp has no such tokenizer.
    """
    data = json.loads(tokenizer.backend_text())
    model = data["model"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _no(f"a {model['type']} model", "")
    if model.get("byte_fallback"):
        facts, notes = _sentencepiece(tokenizer, data, num_rows)
    else:
        facts, notes = _byte_level(tokenizer, data, num_rows)
    stops, more = _stops(tokenizer, stop_ids)
    facts |= stops
    roles = {"bos": tokenizer.bos_id, "unknown": tokenizer.unk_id, "padding": tokenizer.pad_id}
    facts |= {f"ggml.{role}_token_id": index for role, index in roles.items() if index is not None}
    facts["ggml.add_bos_token"] = leads_with_bos(tokenizer)
    if tokenizer.adds_bos and not facts["ggml.add_bos_token"]:
        more.append(
            "prompts of the chat template have no BOS, so llama.cpp puts none before other texts either"
        )
    facts["ggml.add_eos_token"] = False
    strips = _strips(data)
    return Vocabulary(facts=facts, notes=(*notes, *more, *_unstripped(data, strips)), strips=strips)


UNSTRIPPED = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Phi-3's special tokens that leave the spaces after them."""


def _strips(data: Mapping[str, Any]) -> bool:
    """Say whether added tokens take the spaces after them in the way that llama.cpp knows."""
    tokens = {row["content"]: bool(row.get("rstrip")) for row in data["added_tokens"]}
    is_phi = {*UNSTRIPPED, "</s>"} <= tokens.keys()
    return is_phi and all(strips == (text not in UNSTRIPPED) for text, strips in tokens.items())


def _unstripped(data: Mapping[str, Any], strips: bool) -> list[str]:
    """Note special tokens that take spaces beside them in another way."""
    wide = [
        row["content"]
        for row in data["added_tokens"]
        if row.get("lstrip") or (row.get("rstrip") and not strips)
    ]
    return [f"llama.cpp keeps the spaces beside {wide[0]!r}, which the tokenizer takes away"] if wide else []


def _no(what: str, why: str) -> UserError:
    return UserError(
        f"llama.cpp has no tokenizer with {what}{why and f' ({why})'}: use --to hf, or train with a byte-level BPE, "
        "SentencePiece's BPE, 'characters' or 'bytes'"
    )


def _rows(tokenizer: Tokenizer, data: Mapping[str, Any], num_rows: int) -> list[tuple[str, int]]:
    """Return each row's text and type, before either kind of tokenizer changes the texts of ordinary tokens."""
    added = {row["id"]: row for row in data["added_tokens"]}
    words = {index: text for text, index in data["model"]["vocab"].items()}
    rows: list[tuple[str, int]] = []
    for index in range(num_rows):
        if index in added:
            text, is_control = added[index]["content"], index in tokenizer.special_ids
            # Control tokens are not shown by llama.cpp; a response's tags are.
            rows.append((text, CONTROL if is_control and text not in tokenizer.tags else USER_DEFINED))
        elif index in words:
            rows.append((words[index], CONTROL if index in tokenizer.special_ids else NORMAL))
        else:
            rows.append((PAD.format(index), UNUSED))
    if tokenizer.unk_id is not None:
        rows[tokenizer.unk_id] = rows[tokenizer.unk_id][0], UNKNOWN
    return rows


def _byte_level(
    tokenizer: Tokenizer, data: Mapping[str, Any], num_rows: int
) -> tuple[dict[str, Any], list[str]]:
    """Express a byte-level BPE, or one of characters."""
    rows, model, notes = _rows(tokenizer, data, num_rows), data["model"], []
    merges = [pair.split(" ", 1) if isinstance(pair, str) else list(pair) for pair in model["merges"]]
    normaliser = data["normalizer"]
    if normaliser is not None and normaliser["type"] != "NFC":
        raise _no(f"the normaliser {normaliser['type']}", "")
    if normaliser is not None:
        notes.append("llama.cpp does not compose characters (NFC): text must come composed")
    if data["pre_tokenizer"] is None:
        if merges:
            raise _no("merges of characters, not of bytes", "no pre-tokenizer")
        letters = byte_letters()
        rows = [
            ("".join(letters[byte] for byte in text.encode()) if kind == NORMAL else text, kind)
            for text, kind in rows
        ]
        # A character of several bytes is joined byte by byte; what is no token on the way is never kept.
        merges = [
            [text[:place], text[place]]
            for text, kind in rows
            if kind == NORMAL
            for place in range(1, len(text))
        ]
        merges = [list(pair) for pair in dict.fromkeys(map(tuple, merges))]
        pre = GPT2
        notes.append("llama.cpp leaves out characters that the vocabulary does not have, in place of <unk>")
    else:
        pre = _split_name(data["pre_tokenizer"], has_merges=bool(merges))
        if pre in MARKS:
            notes.append(
                "llama.cpp takes combining marks for signs, not for parts of words: texts in Hindi or Thai get other "
                "tokens"
            )
        if not model.get("ignore_merges"):
            pre = MERGES_ALL.get(pre, pre)
    facts: dict[str, Any] = {"ggml.model": "gpt2", "ggml.pre": pre}
    facts["ggml.tokens"] = [text for text, _ in rows]
    facts["ggml.token_type"] = [kind for _, kind in rows]
    facts["ggml.merges"] = [f"{left} {right}" for left, right in merges] or [NEVER]
    return facts, notes


def _split_name(step: Mapping[str, Any], *, has_merges: bool) -> str:
    """Return llama.cpp's name for how a tokenizer.json splits words."""
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    kinds = [inner["type"] for inner in steps]
    last = steps[-1]
    if kinds[-1] != "ByteLevel" or last.get("add_prefix_space"):
        raise _no(
            f"the pre-tokenizer {' + '.join(kinds)}", "expected ByteLevel, without a space before the text"
        )
    if not has_merges:
        return GPT2  # each byte is a token, however words are split
    if kinds == ["ByteLevel"] and last.get("use_regex", True):
        return GPT2
    if kinds == ["Digits", "ByteLevel"] and last.get("use_regex", True) and steps[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True) and not steps[0].get("invert"):
        pattern = steps[0]["pattern"].get("Regex", "")
        if pattern in PATTERNS and steps[0]["behavior"] == "Isolated":
            return PATTERNS[pattern]
    raise _no(f"the pre-tokenizer {' + '.join(kinds)}", "its split of words is none that whet knows there")


def _sentencepiece(
    tokenizer: Tokenizer, data: Mapping[str, Any], num_rows: int
) -> tuple[dict[str, Any], list[str]]:
    """Express SentencePiece's BPE: llama.cpp joins the pair whose joined token has the highest score."""
    rows, model = _rows(tokenizer, data, num_rows), data["model"]
    words = model["vocab"]
    merges = [tuple(pair.split(" ", 1) if isinstance(pair, str) else pair) for pair in model["merges"]]
    ranks: dict[str, list[int]] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, []).append(rank)
    known = set(merges)
    for text, found in ranks.items():
        splits = [(text[:place], text[place:]) for place in range(1, len(text))]
        absent = [pair for pair in splits if pair[0] in words and pair[1] in words and pair not in known]
        if absent or found[-1] - found[0] >= len(found):
            raise _no("merges in another order than their tokens' scores", f"token {text[:40]!r}")
    for text, index in words.items():
        # llama.cpp would join these, as it does whatever is a token.
        splits = [(text[:place], text[place:]) for place in range(1, len(text))]
        is_made = text in ranks or rows[index][1] != NORMAL or re.fullmatch(r"<0x[0-9A-F]{2}>", text)
        if not is_made and any(left in words and right in words for left, right in splits):
            raise _no("tokens that no merge makes", f"token {text[:40]!r}")
    rows = [
        (text, BYTE if kind == NORMAL and re.fullmatch(r"<0x[0-9A-F]{2}>", text) else kind)
        for text, kind in rows
    ]
    missing = next((b for b in range(256) if f"<0x{b:02X}>" not in words), None)
    if missing is not None:
        raise _no("SentencePiece's BPE without a token for every byte", f"byte {missing}")
    first = {text: found[0] for text, found in ranks.items()}
    lead, notes = _space_prefix(data)
    facts: dict[str, Any] = {"ggml.model": "llama", "ggml.pre": "default"}
    facts["ggml.tokens"] = [text for text, _ in rows]
    facts["ggml.scores"] = [
        -float(first.get(text, 0 if kind != NORMAL else len(merges))) for text, kind in rows
    ]
    facts["ggml.token_type"] = [kind for _, kind in rows]
    facts["ggml.add_space_prefix"] = lead
    return facts, notes


def _space_prefix(data: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Say whether text gets a space before it, and what differs after control tokens."""
    normaliser, split = data["normalizer"], data["pre_tokenizer"]
    steps = (normaliser or {}).get("normalizers", [normaliser] if normaliser else [])
    kinds = [step["type"] for step in steps]
    if any(kind not in ("Prepend", "Replace") for kind in kinds):
        raise _no(f"the normaliser {' + '.join(kinds)}", "expected Prepend and Replace of spaces")
    if split is None or split["type"] == "Split":
        return "Prepend" in kinds, []
    if split["type"] != "Metaspace":
        raise _no(f"the pre-tokenizer {split['type']}", "expected Metaspace")
    scheme = split.get("prepend_scheme", "always")
    notes = []
    if scheme != "never":
        notes = ["llama.cpp writes one more space before a text that begins with one"]
    if scheme == "first":
        notes.append(
            "llama.cpp writes a space after each control token, too, before a letter that follows at once"
        )
    return scheme != "never", notes


def _stops(tokenizer: Tokenizer, stop_ids: Sequence[int]) -> tuple[dict[str, int], list[str]]:
    """Give the ids that end a generation their places: there are three, and texts that llama.cpp knows itself."""
    end = tokenizer.eos_id
    others = [index for index in sorted(stop_ids) if index != end]
    named = [index for index in others if tokenizer.token_text(index) in KNOWN_STOPS]
    rest = [index for index in others if index not in named]
    if end is None and rest:
        end = rest.pop(0)
    unmade = None
    if end is None:
        # Without the key llama.cpp ends at its own default, an ordinary token (11, or 2 of SentencePiece's).
        unmade = next((i for i in (tokenizer.pad_id, tokenizer.bos_id) if i is not None), None)
        if unmade is None:
            raise UserError(
                "the tokenizer has no token that ends a text, and none for padding or BOS to take its place: llama.cpp "
                "would end at an ordinary one; use --to hf"
            )
    places = {"ggml.eos_token_id": end} | dict(
        zip(("ggml.eot_token_id", "ggml.eom_token_id"), rest, strict=False)
    )
    notes = [
        f"llama.cpp has no place for a further stop token: give {tokenizer.token_text(index)!r} as a stop string"
        for index in rest[2:]
    ]
    if unmade is not None:
        places["ggml.eos_token_id"] = unmade
        notes.append(
            f"no token ends a text, and llama.cpp needs one: the file names {tokenizer.token_text(unmade)!r}"
        )
    return {name: index for name, index in places.items() if index is not None}, notes
