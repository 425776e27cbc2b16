"""LoRA adapters: logits equal to the peft library's, on and off at will, and one clear line for whatever is wrong."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs
from safetensors.torch import load_file, save_file

from whet.generate.policy import PolicyConfig, load_policy
from whet.model.config import ModelConfig
from whet.model.lora.adapter import adapter_digest
from whet.model.lora.files import find_model, read_adapter
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model, load_model, save_model
from whet.types import UserError

needs_peft = needs("peft")

SHAPE = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=32,
    init_std=0.2,
)
SHAPES = {
    "llama": replace(SHAPE, tie_embeddings=False),
    "llama-biases": replace(SHAPE, attention_bias=True),
    "qwen2": replace(SHAPE, family="qwen2"),
    "gpt2": replace(SHAPE, family="gpt2", num_kv_heads=4),
}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all linear": ("llama", {"target_modules": LINEAR, "r": 4, "lora_alpha": 8}),
    "tied": ("qwen2", {"target_modules": ["q_proj", "v_proj"], "r": 3, "lora_alpha": 16}),
    "rslora": ("qwen2", {"target_modules": ["q_proj"], "r": 9, "lora_alpha": 3, "use_rslora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "v_proj", "up_proj"],
            "r": 4,
            "lora_alpha": 8,
            "rank_pattern": {"layers.1.self_attn.q_proj": 7, "up_proj": 2},
            "alpha_pattern": {r"model.layers.\d.self_attn.v_proj": 40, "q_proj": 1},
        },
    ),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "r": 4, "lora_alpha": 8}),
    "layers": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1], "r": 4}),
    "tables": ("llama", {"target_modules": ["embed_tokens", "lm_head", "o_proj"], "r": 4}),
    "tables, no copies": ("llama", {"target_modules": ["embed_tokens", "lm_head"], "r": 4, "copies": False}),
    "tied tables": ("qwen2", {"target_modules": ["embed_tokens", "q_proj"], "r": 4}),
    "tied head": ("gpt2", {"target_modules": ["lm_head", "c_attn"], "r": 4}),
    "saved": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"], "r": 4}),
    "tied saved": ("qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "r": 4}),
    "dora": ("llama-biases", {"target_modules": LINEAR, "r": 4, "lora_alpha": 8, "use_dora": True}),
    "dora conv1d": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "r": 5, "use_dora": True}),
    "biases": ("llama-biases", {"target_modules": ["q_proj", "k_proj"], "bias": "lora_only", "r": 4}),
}
# float32 sums in another order move logits of size 1 to 10 by some 1e-6; a wrong scaling moves them by 0.1 and more.
CLOSE = 1e-5
IDS = torch.tensor([[3, 14, 15, 9, 2, 6, 5], [35, 8, 9, 7, 9, 3, 2]])


def make_base(folder: Path, shape: ModelConfig) -> Path:
    model = build_model(shape)
    init_weights(model, seed=1)
    save_model(model, folder)
    return folder


def make_peft(base: Path, folder: Path, options: dict[str, Any]) -> torch.Tensor:
    """Write an adapter with the peft library, every tensor of it changed; return its logits on IDS."""
    import peft
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its advice on tied tables and Conv1D
        model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
        copies = options.get(
            "copies", "auto"
        )  # of the base's tables, which peft writes beside a change of them
        options = {key: value for key, value in options.items() if key != "copies"}
        tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in tuned.parameters():
                if parameter.requires_grad:
                    noise = torch.empty(parameter.shape).normal_(0, 0.2, generator=generator)
                    parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
            tuned.save_pretrained(str(folder), save_embedding_layers=copies)
            again = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
            return peft.PeftModel.from_pretrained(again, str(folder)).eval()(IDS).logits


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(IDS)


@pytest.mark.some(5)
@needs_peft
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_peft_merged_and_applied_and_off_is_bitwise_the_base(
    case: str, tmp_path: Path
) -> None:
    kind, options = CASES[case]
    base = make_base(tmp_path / "base", SHAPES[kind])
    theirs = make_peft(base, tmp_path / "adapter", options)
    adapter = read_adapter(tmp_path / "adapter")
    assert adapter.base == str(base)
    plain, _ = load_model(base)
    before = logits(plain)
    assert (before - theirs).abs().max() > 0.1  # the adapter does something

    merged = adapter.fit(load_model(base)[0])
    adapter.merge(merged)
    torch.testing.assert_close(logits(merged), theirs, atol=CLOSE, rtol=CLOSE)

    model = adapter.fit(load_model(base)[0])
    kept = {name: weight.clone() for name, weight in model.named_parameters()}
    adapter.apply(model)
    torch.testing.assert_close(logits(model), theirs, atol=CLOSE, rtol=CLOSE)
    with adapter.off(model):
        assert not adapter.is_applied
        assert torch.equal(logits(model), before)
    torch.testing.assert_close(logits(model), theirs, atol=CLOSE, rtol=CLOSE)
    adapter.remove(model)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, kept[name]), name
    assert torch.equal(logits(model), before)


def make_adapter(folder: Path, base: Path | str = "", *, rank: int = 4, **config: Any) -> Path:
    """Write an adapter of q_proj by hand: what peft would write, without it."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for layer in range(SHAPE.num_layers):
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, 32, generator=generator)
        tensors[f"{stem}.lora_B.weight"] = torch.randn(32, rank, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]}
    plain["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    return folder


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_an_applied_adapter_keeps_no_copy_of_a_matrix(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", SHAPE)
    adapter = read_adapter(make_adapter(tmp_path / "adapter"))
    model = adapter.fit(load_model(base)[0])
    pointers = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    before = logits(model)
    adapter.apply(model)
    assert {name: model.get_parameter(name).data_ptr() for name in pointers} == pointers
    assert not torch.allclose(logits(model), before)
    with pytest.raises(ValueError, match="already"):
        adapter.apply(model)
    with pytest.raises(KeyError), adapter.off(model):
        raise KeyError  # back on, whatever happens
    assert adapter.is_applied
    adapter.remove(model)
    with pytest.raises(ValueError, match="not applied"):
        adapter.remove(model)


def test_bfloat16_is_added_in_float32(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", SHAPE)
    adapter = read_adapter(make_adapter(tmp_path / "adapter"))
    model = adapter.fit(load_model(base, dtype=torch.bfloat16)[0])
    name = "model.layers.0.self_attn.q_proj"
    weight = model.get_parameter(f"{name}.weight").detach().clone()
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    adapter.merge(model)
    expected = (weight.float() + 8 / 4 * b @ a).bfloat16()
    assert torch.equal(model.get_parameter(f"{name}.weight"), expected)


def test_digest_depends_on_scaling_and_weights_not_on_the_place(tmp_path: Path) -> None:
    first = make_adapter(tmp_path / "one")
    assert adapter_digest(first) == adapter_digest(make_adapter(tmp_path / "two"))
    assert read_adapter(first).sha256 == adapter_digest(first)
    assert len(adapter_digest(first)) == 64
    digests = {adapter_digest(first), adapter_digest(make_adapter(tmp_path / "three", lora_alpha=9))}
    edit(first, lambda tensors: tensors[min(tensors)].add_(1e-3))
    assert len(digests | {adapter_digest(first)}) == 3


def make_policy(folder: Path) -> Path:
    """Write a base with a tokenizer; its generation_config.json names one more stop token."""
    tokenizer = Tokenizer.characters("abc 0123456789+=?", ("<think>", "</think>"))
    make_base(folder, replace(SHAPE, vocab_size=tokenizer.vocab_size))
    tokenizer.save(folder)
    return folder


def test_policies_with_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = make_policy(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", base)
    plain = load_policy(PolicyConfig(init=str(base)), seed=0)
    assert capsys.readouterr().out == ""
    both = load_policy(PolicyConfig(init=str(base), adapter=str(adapter)), seed=0, merge=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"whet: {adapter} is merged: ")
    assert "trained" not in line  # which edits and quantisation do not
    alone = load_policy(PolicyConfig(init=str(adapter)), seed=0, merge=True)
    applied = load_policy(PolicyConfig(init=str(adapter)), seed=0)
    weight = "model.layers.1.self_attn.q_proj.weight"
    assert plain.adapter is None
    assert both.adapter is not None
    assert both.adapter.sha256 == adapter_digest(adapter)
    assert not both.adapter.is_applied
    assert not torch.equal(plain.model.get_parameter(weight), both.model.get_parameter(weight))
    assert torch.equal(alone.model.get_parameter(weight), both.model.get_parameter(weight))
    ids = IDS % plain.tokenizer.vocab_size
    assert applied.adapter is not None
    with torch.no_grad():
        torch.testing.assert_close(applied.model.logits(ids), both.model.logits(ids), atol=CLOSE, rtol=CLOSE)
        with applied.adapter.off(applied.model):
            assert torch.equal(applied.model.logits(ids), plain.model.logits(ids))
    both.save(tmp_path / "saved")
    again = load_policy(PolicyConfig(init=str(tmp_path / "saved")), seed=0)
    assert torch.equal(again.model.get_parameter(weight), both.model.get_parameter(weight))
    applied.save(tmp_path / "saved too")
    merged = load_policy(PolicyConfig(init=str(tmp_path / "saved too")), seed=0)
    assert merged.adapter is None
    assert torch.equal(merged.model.get_parameter(weight), both.model.get_parameter(weight))


def test_the_tokenizer_of_an_adapter_goes_first_with_the_stops_of_its_base(tmp_path: Path) -> None:
    base = make_policy(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", base)
    own = Tokenizer.load(base).with_template("{{ messages[0]['content'] }}!")
    own.save(adapter)
    (base / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    (adapter / "generation_config.json").unlink(missing_ok=True)
    policy = load_policy(PolicyConfig(init=str(adapter)), seed=0)
    assert policy.tokenizer.chat_template == own.chat_template
    assert {3, 5} <= set(policy.stop_ids)
    assert load_policy(PolicyConfig(init=str(base)), seed=0).tokenizer.chat_template != own.chat_template


def refused(call: Callable[[], object], *parts: str) -> None:
    """Run what must fail: one line that holds every part."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message, message
    assert len(message) < 400, message
    for part in parts:
        assert part in message, message


def set_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def set_tensor(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    stem = "base_model.model.model.layers.0.self_attn.q_proj."

    def change(folder: Path) -> None:
        edit(folder, lambda tensors: tensors.update({stem + name: value(tensors[stem + name])}))

    return change


def rename(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: edit(
        folder, lambda tensors: [tensors.update({k.replace(old, new): tensors.pop(k)}) for k in list(tensors)]
    )


def drop(part: str) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda tensors: [tensors.pop(k) for k in list(tensors) if part in k])


def add(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda tensors: tensors.update({name: tensor}))


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def twice(folder: Path) -> None:
    name = "base_model.model.model.embed_tokens{}.weight"
    for part in ("", ".base_layer"):
        add(name.format(part), torch.ones(40, 32))(folder)


def garbled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 40)


BAD: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), ("no adapter_model.safetensors",)),
    "pickle": (pickled, ("pickle", "never reads")),
    "garbage": (garbled, ("not a readable safetensors",)),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), ("not JSON",)),
    "other kind": (set_config(peft_type="IA3"), ("peft_type", "IA3", "only LORA")),
    "dora": (set_config(use_dora=True), ("use_dora", "no lora_magnitude_vector")),
    "newer option": (set_config(twisted=[1]), ("twisted",)),
    "pissa": (set_config(init_lora_weights="pissa_niter_4"), ("pissa_niter_4", "changes the base")),
    "rank": (set_config(r=5), ("rank 5", "[4, 32]")),
    "no rank": (set_config(r=None), ("r = None",)),
    "alpha": (set_config(lora_alpha=float("nan")), ("lora_alpha = nan",)),
    "hostile pattern": (set_config(rank_pattern={"(a+)+$": 4}), ("rank_pattern", "(a+)+$")),
    "many branches": (set_config(alpha_pattern={".?" * 40: 4}), ("alpha_pattern",)),
    "no pattern": (set_config(alpha_pattern={"[": 4}), ("alpha_pattern",)),
    "flags inside": (set_config(alpha_pattern={"(?i)q": 4}), ("alpha_pattern",)),
    "no object": (set_config(alpha_pattern=[3]), ("alpha_pattern is not an object",)),
    "target": (
        rename("self_attn.q_proj", "self_attn.qkv_proj"),
        ("'model.layers.0.self_attn.qkv_proj'", "does not have"),
    ),
    "prefix": (rename("base_model.model.", ""), ("unexpected tensor", "base_model.model.")),
    "NaN": (set_tensor("lora_B.weight", lambda t: t / 0 * 0), ("lora_B.weight", "NaN or infinity")),
    "many dimensions": (
        set_tensor("lora_B.weight", lambda t: t.reshape(*t.shape, *([1] * 62))),
        ("lora_B.weight", "64 dimensions"),
    ),
    "integers": (set_tensor("lora_A.weight", lambda t: t.int()), ("torch.int32", "expected floats")),
    "shape": (
        set_tensor("lora_A.weight", lambda t: t[:, :9].clone()),
        ("[32, 9]", "[32, 32]", "another base"),
    ),
    "half a pair": (drop("layers.0.self_attn.q_proj.lora_B"), ("has lora_A only",)),
    "half the layers": (drop("layers.1."), ("lists 'model.layers.1.self_attn.q_proj'", "no tensors")),
    "nothing": (drop("lora"), ("no LoRA tensors",)),
    "left over": (
        add("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", torch.ones(3)),
        ("magnitude",),
    ),
    "twice": (twice, ("occurs twice",)),
    "strange": (
        add("base_model.model.model.surprise", torch.ones(3)),
        ("'model.surprise'", "none of that name"),
    ),
    "more rows": (
        add("base_model.model.model.embed_tokens.weight", torch.ones(50, 32)),
        ("[50, 32]", "[40, 32]"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_one_line(case: str, tmp_path: Path) -> None:
    spoil, parts = BAD[case]
    base = make_base(tmp_path / "base", SHAPE)
    folder = make_adapter(tmp_path / "adapter")
    read_adapter(folder).fit(load_model(base)[0])
    spoil(folder)
    refused(lambda: read_adapter(folder).fit(load_model(base)[0]), str(folder), *parts)


def test_what_cannot_be_found_is_one_line(tmp_path: Path) -> None:
    base = make_policy(tmp_path / "base")
    nameless = make_adapter(tmp_path / "nameless")
    lost = make_adapter(tmp_path / "lost", tmp_path / "gone")
    old = make_adapter(tmp_path / "old", base, revision="v1")
    loop = make_adapter(tmp_path / "loop", nameless)
    refused(lambda: find_model(str(nameless)), "does not name its base", "policy.adapter")
    refused(lambda: find_model(str(lost)), "its base is missing", "gone", "policy.adapter")
    refused(lambda: find_model(str(old)), "revision 'v1'")
    refused(lambda: find_model(str(loop)), "its base is missing", "no config.json")
    refused(lambda: find_model(str(old), str(nameless)), "is an adapter itself")
    refused(lambda: find_model(str(base), str(base)), "no adapter_config.json")
    refused(lambda: find_model(str(base), str(tmp_path / "none")), "no such run or folder")
    tied = make_adapter(tmp_path / "tied", ensure_weight_tying=True)
    add("base_model.model.model.embed_tokens.weight", torch.ones(40, 32))(tied)
    refused(
        lambda: read_adapter(tied).fit(load_model(make_base(tmp_path / "b", SHAPE))[0]), "ensure_weight_tying"
    )
    with pytest.raises(ValueError, match=r"policy\.adapter is read with policy\.init"):
        PolicyConfig(adapter=str(nameless), tokenizer="bytes")


def test_an_adapter_that_changes_nothing_is_warned_about(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter")
    set_tensor("lora_B.weight", torch.zeros_like)(folder)
    with pytest.warns(UserWarning, match="1 of 2 changes are all zero"):
        read_adapter(folder)
