"""A GGUF file's tokens as tokenizer.json: llama.cpp's types of tokens, its names of splits of words, its scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.types import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""llama.cpp's types of tokens."""
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
SIGNS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
GPT2 = "gpt-2"
PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": GPT2,
    f"{CONTRACTIONS}|{WORDS}|\\p{{N}}|{SIGNS}|{SPACES}": "qwen2",
    f"{CONTRACTIONS}|{WORDS}|\\p{{N}}{{1,3}}|{SIGNS}|{SPACES}": "llama-bpe",
    f"{CASED[0]}|{CASED[1]}|\\p{{N}}|{SIGNS_SLASH}|{SPACES}": "tekken",
    f"{CASED[0]}{CONTRACTIONS}?|{CASED[1]}{CONTRACTIONS}?|\\p{{N}}{{1,3}}|{SIGNS_SLASH}|{SPACES}": "gpt-4o",
}
"""Patterns of tokenizer.json that split words before a byte-level BPE, by llama.cpp's name."""
SPLITS: dict[str, str] = {
    GPT2: GPT2,
    **dict.fromkeys(("smollm", "starcoder", "refact"), "smollm"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe"), "llama-bpe"),
    "tekken": "tekken",
    "gpt-4o": "gpt-4o",
}
"""Names that a file may have for how words are split, by the one that whet has for the same split."""
WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
"""Those of which llama.cpp takes whole words before their merges, and puts BOS first where the file does not say."""
COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Those whose tokenizers compose characters first (NFC), which llama.cpp does not."""
SPACE = "\u2581"


def tokenizer_files(facts: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make tokenizer.json and tokenizer_config.json of a file's keys.

    Args:
        facts: Keys of the file.
        where: Its name for error messages.

    Raises:
        UserError: If the file has no tokenizer, or one that is not read here.
    """
    kind = facts.get("tokenizer.ggml.model")
    tokens = facts.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or kind not in ("gpt2", "llama"):
        raise UserError(
            f"{where}: its tokenizer is of the kind {str(kind)[:40]!r}; expected 'gpt2' (byte-level BPE) or 'llama' "
            "(SentencePiece's BPE): take the model's folder from the hub"
        )
    types = facts.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"{where}: {len(types)} types of {len(tokens)} tokens")
    roles = {
        role: facts[f"tokenizer.ggml.{name}_token_id"]
        for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if 0 <= facts.get(f"tokenizer.ggml.{name}_token_id", -1) < len(tokens)
    }
    is_pieces, pre = kind == "llama", str(facts.get("tokenizer.ggml.pre", "default"))
    leads = (
        bool(facts.get("tokenizer.ggml.add_bos_token", is_pieces or pre in WHOLE_WORDS)) and "bos" in roles
    )
    vocab = {text: index for index, text in enumerate(tokens) if types[index] != UNUSED}
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "vocab": vocab}
    rest = _pieces(facts, vocab, types, where) if is_pieces else _bytes(facts, vocab, pre, where)
    model |= rest.pop("model")
    if is_pieces and "unk" in roles:
        model["unk_token"] = tokens[roles["unk"]]
    added = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[index] != USER_DEFINED,
        }
        for index, found in enumerate(types)
        if found in (CONTROL, USER_DEFINED) or (found == UNKNOWN and is_pieces)
    ]
    if leads:
        bos = tokens[roles["bos"]]
        one = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        two = [*one, {"Sequence": {"id": "B", "type_id": 1}}]
        special = {bos: {"id": bos, "ids": [roles["bos"]], "tokens": [bos]}}
        rest["post_processor"] = {
            "type": "TemplateProcessing",
            "single": one,
            "pair": two,
            "special_tokens": special,
        }
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": leads}
    config |= {f"{role}_token": tokens[index] for role, index in roles.items()}
    config |= {"clean_up_tokenization_spaces": False}
    if template := facts.get("tokenizer.chat_template"):
        config["chat_template"] = template
    none = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return {"version": "1.0", **none, "added_tokens": added, **rest, "model": model}, config


def _bytes(facts: Mapping[str, Any], vocab: Mapping[str, int], pre: str, where: str) -> dict[str, Any]:
    """Return the parts of a byte-level BPE."""
    split = SPLITS.get(pre)
    if split is None:
        raise UserError(
            f"{where}: its tokenizer splits words as {pre[:40]!r}; expected one of {', '.join(SPLITS)}: take the "
            "model's folder from the hub"
        )
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if split == GPT2:
        steps: Any = whole
    else:
        if split == "smollm":
            first: dict[str, Any] = {"type": "Digits", "individual_digits": True}
        else:
            pattern = next(text for text, name in PATTERNS.items() if name == split)
            first = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        steps = {"type": "Sequence", "pretokenizers": [first, whole | {"use_regex": split == "smollm"}]}
    merges = [text.split(" ", 1) for text in facts.get("tokenizer.ggml.merges") or ()]
    lost = {left + right for left, right in merges if not {left, right, left + right} <= vocab.keys()}
    if lost and (cut := next((text for text in vocab if any(text.startswith(part) for part in lost)), "")):
        raise UserError(
            f"{where}: token {cut[:40]!r} is merged from what is no token, which is not read here"
        )
    merges = [pair for pair in merges if "".join(pair) not in lost]  # these never apply
    return {
        "normalizer": {"type": "NFC"} if pre in COMPOSED else None,
        "pre_tokenizer": steps,
        "decoder": whole,
        "model": {"merges": merges, "ignore_merges": pre in WHOLE_WORDS},
    }


def _pieces(
    facts: Mapping[str, Any], vocab: Mapping[str, int], types: Sequence[int], where: str
) -> dict[str, Any]:
    """Return the parts of SentencePiece's BPE: the pair whose joined token has the highest score is joined first."""
    scores = facts.get("tokenizer.ggml.scores") or ()
    if len(scores) != len(types):
        raise UserError(f"{where}: {len(scores)} scores of {len(types)} tokens")
    found = [
        (-scores[index], -place, text[:place], text[place:])
        for text, index in vocab.items()
        if types[index] == NORMAL
        for place in range(1, len(text))
        if text[:place] in vocab and text[place:] in vocab
    ]
    has_prefix = bool(facts.get("tokenizer.ggml.add_space_prefix", True))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*[{"type": "Prepend", "prepend": SPACE}] * has_prefix, spaces],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                back,
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *[{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * has_prefix,
            ],
        },
        "model": {
            "merges": [[left, right] for _, _, left, right in sorted(found)],
            "byte_fallback": True,
            "fuse_unk": True,
        },
    }
