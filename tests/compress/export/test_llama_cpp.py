"""Every family and variant that the GGUF writer takes, in a real llama.cpp (xllamacpp): it loads, its log-probabilities
are our engine's, its tokens are the tokenizer's."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from needs import needs
from runtime_cases import CLOSE, CONTEXT, GELU_TABLE, REFUSED, SIZES, VARIANTS, difference, in_llama_cpp, make
from safetensors.torch import save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from whet.compress.export import gguf, parity
from whet.compress.export.ollama import ollama_writes, read_modelfile
from whet.compress.export.prompt import modelfile, whole_template
from whet.compress.export.runtimes import LlamaCpp
from whet.compress.export.vocabulary import PATTERNS, express
from whet.generate.policy import Policy
from whet.model.families import from_hf
from whet.model.gguf import read_back
from whet.model.lora.adapter import Adapter, LoRAPair
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model
from whet.schema import SCHEMAS
from whet.types import UserError

needs_llama = needs("xllamacpp", "gguf")


@pytest.mark.ci
@needs_llama
@pytest.mark.parametrize("name", VARIANTS)
def test_a_family_has_our_probabilities_in_llama_cpp_or_is_refused(name: str, tmp_path: Path) -> None:
    if name in REFUSED:
        with pytest.raises(UserError, match=REFUSED[name]):
            gguf.check_names(make(name))
        return
    bound = GELU_TABLE if name.startswith(("gemma", "gpt2")) else CLOSE
    assert in_llama_cpp(name, tmp_path) < bound


@pytest.mark.ci
@needs_llama
@pytest.mark.parametrize(("kind", "bound"), [("f16", 0.02), ("bf16", 0.15), ("q8_0", 0.3)])
def test_rounded_weights_have_nearly_our_probabilities(kind: Any, bound: float, tmp_path: Path) -> None:
    model, path = make("qwen3"), tmp_path / "m.gguf"
    gguf.write_gguf(model, express(Tokenizer.bytes(), 258, (256,)), path, kind)
    with torch.no_grad():
        for name, stored in read_back(path, model):
            model.get_parameter(name).copy_(stored)
    assert difference(model, path) < bound  # what llama.cpp's products round, beyond the weights


@pytest.mark.ci
@needs_llama
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "granite", "gpt2"])
def test_an_adapter_beside_its_base_is_ours(name: str, tmp_path: Path) -> None:
    model, generator = make(name), torch.Generator().manual_seed(2)
    names = [label for label in gguf.labels(model) if label not in gguf.TOP][:6]
    pairs, files = {}, {}
    for number, weight in enumerate(names):
        module, rank = weight.removesuffix(".weight"), 2 + number % 2
        shape = model.get_parameter(weight).shape[:: -1 if name == "gpt2" else 1]
        a, b = (
            torch.empty(size).normal_(0, 0.3, generator=generator)
            for size in ((rank, shape[1]), (shape[0], rank))
        )
        pairs[module] = LoRAPair(a, b, 3.0, 3.0 / rank)
        files |= {f"{module}.a": a, f"{module}.b": b}
    save_file(files, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    adapter = Adapter(tmp_path, {}, pairs, {})
    gguf.write_gguf(model, express(Tokenizer.bytes(), 258, (256,)), tmp_path / "m.gguf", "f32")
    gguf.write_lora(adapter, model, tmp_path / "lora.gguf")
    before = difference(model, tmp_path / "m.gguf", str(tmp_path / "lora.gguf"))
    adapter.merge(model)
    after = difference(model, tmp_path / "m.gguf", str(tmp_path / "lora.gguf"))
    assert after < (GELU_TABLE if name.startswith(("gemma", "gpt2")) else CLOSE) < before


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.ci
@needs_llama
@pytest.mark.parametrize("schema", ["none", "think_answer", "boxed", "hashes"])
@pytest.mark.parametrize("template", [None, CHATML, "{{ bos_token }}" + CHATML])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_whole_template_asks_in_llama_cpp_and_in_ollama_as_whet_does(
    schema: str, template: str | None, adds_bos: bool, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(
        tokenizers.Tokenizer.from_str(Tokenizer.bytes(["<|im_start|>", "<|im_end|>"]).backend_text()),
        roles={"bos_token": "<|im_start|>", "eos_token": "<eos>", "pad_token": "<pad>"},
        adds_bos=adds_bos,
        chat_template=template or Tokenizer.bytes().chat_template,
    )
    model = build_model(from_hf({"model_type": "llama"} | SIZES | {"vocab_size": tokenizer.vocab_size}))
    init_weights(model, 0)
    policy = Policy(model.eval(), tokenizer, SCHEMAS[schema])
    vocabulary = express(tokenizer, tokenizer.vocab_size, policy.stop_ids).with_template(
        whole_template(policy)
    )
    gguf.write_gguf(model, vocabulary, tmp_path / "m.gguf", "f16")
    runtime = LlamaCpp(str(tmp_path / "m.gguf"), CONTEXT, policy.stop_ids)
    assert runtime.stop_ids == list(policy.stop_ids)
    text, _ = modelfile(policy, "m.gguf", CONTEXT, {})
    read = dict(read_modelfile(text))
    user, reply = {"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}
    talks = [[user], [user, reply, user], [{"role": "system", "content": "Be brief."}, user]]
    for talk in talks if template else talks[:2]:  # whet's plain template drops system messages
        asked = list(policy.chat_ids(talk))
        assert runtime.render(talk) == asked
        assert runtime.tokenize(ollama_writes(read["TEMPLATE"], talk, read.get("SYSTEM", ""))) == asked


LINES = ["\n".join(pair) for pair in product(parity.LINES, repeat=2)]
"""324 lines at which nearly equal tokenizers part."""


UNLIKE = {"tekken": "combining marks", "gpt-4o": "combining marks"}
UNLIKE |= dict.fromkeys(("metaspace always", "metaspace first"), "one more space before a text")
"""Tokenizers of which llama.cpp has other tokens for some of them, with a word of the note."""


def byte_level(steps: list[Any], *, takes_words: bool = False) -> Tokenizer:
    """Train a byte-level BPE with a split of words on the hard lines."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=takes_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        show_progress=False, vocab_size=700, special_tokens=["<eos>"], initial_alphabet=alphabet
    )
    backend.train_from_iterator([*parity.LINES] * 3, trainer)
    return Tokenizer(backend, roles={"eos_token": "<eos>"}, chat_template=None)


def sentencepiece(scheme: str) -> Tokenizer:
    """Make SentencePiece's BPE with a token for every byte, whose space is written by a scheme of Metaspace or, with
    'prepend', by normalisers."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = "abcdefghijklmnopqrstuvwxyz0123456789.,'é日"
    merges = [("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the"), ("i", "n"), ("s", "p")]
    texts = ["<unk>", "<s>", "</s>", *bytes_, "▁", *words, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(texts)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if scheme == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(backend, roles=roles, chat_template=None)


def splits() -> dict[str, Tokenizer]:
    """Return a tokenizer of every kind that llama.cpp knows."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {
        name: byte_level(
            [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), level],
            takes_words=name == "llama-bpe",
        )
        for pattern, name in PATTERNS.items()
    }
    found["smaug-bpe"] = byte_level(
        [
            pre_tokenizers.Split(
                tokenizers.Regex(next(p for p, n in PATTERNS.items() if n == "llama-bpe")), "isolated"
            ),
            level,
        ]
    )
    found["smollm"] = byte_level(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return (
        found
        | {f"metaspace {scheme}": sentencepiece(scheme) for scheme in ("always", "first", "never")}
        | {
            "prepend": sentencepiece("prepend"),
            "bytes": Tokenizer.bytes(),
            "characters": Tokenizer.characters("".join(sorted(set("".join(parity.LINES))))),
        }
    )


@pytest.mark.ci
@needs_llama
def test_llama_cpp_s_tokens_are_the_tokenizer_s_or_a_note_says_why(tmp_path: Path) -> None:
    for name, tokenizer in splits().items():
        config = from_hf({"model_type": "llama"} | SIZES | {"vocab_size": tokenizer.vocab_size})
        model = build_model(config)
        init_weights(model, 0)
        vocabulary = express(tokenizer, tokenizer.vocab_size, tuple(tokenizer.stop_ids))
        gguf.write_gguf(model, vocabulary, tmp_path / "m.gguf", "f16")
        runtime = LlamaCpp(str(tmp_path / "m.gguf"), CONTEXT, ())
        unlike = [line for line in LINES if runtime.tokenize(line, special=False) != tokenizer.encode(line)]
        assert bool(unlike) == (name in UNLIKE), (name, unlike[:1])
        assert name not in UNLIKE or any(UNLIKE[name] in note for note in vocabulary.notes)
