"""Folders of strangers: what is missing, wrong or hostile is one line that names the file, never a traceback."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from whet.algo.logprobs import head_logits
from whet.model import files
from whet.model.attention import Packed
from whet.model.config import ModelConfig, RopeScaling
from whet.model.families import from_hf
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import (
    build_model,
    check_weights,
    load_model,
    model_folder,
    resize_vocabulary,
    save_model,
)
from whet.storage.commit import MANIFEST, commit_folder
from whet.types import UserError

TINY = ModelConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=32,
)
TINY_GPT2 = replace(TINY, family="gpt2", num_kv_heads=2)
EMBEDDING = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"


def tiny(config: ModelConfig = TINY) -> LanguageModel:
    model = build_model(config)
    init_weights(model, seed=1)
    return model


def refused(call: Callable[[], object], *parts: str) -> str:
    """Run what must fail, and return its message: one line, holding every part."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message, message
    assert len(message) < 500, message
    for part in parts:
        assert part in message
    return message


def logits(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        hidden = model(torch.tensor(ids), torch.arange(len(ids)), Packed([len(ids)], torch.device("cpu")))
        return head_logits(hidden, model.head_weight, temperature=1.0, num_valid=model.num_valid_tokens)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tiny(), tmp_path / "model")
    return tmp_path / "model"


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def in_two_shards(folder: Path) -> dict[str, str]:
    """Store the folder's tensors in a.safetensors and b.safetensors; return the index's weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for file, part in (("a.safetensors", names[:4]), ("b.safetensors", names[4:])):
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


# --- tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda tensors: tensors.pop(EMBEDDING), "1 tensors are missing, the first is 'model.embed_tokens"),
        (lambda tensors: tensors.update(spare=torch.zeros(2)), "unexpected tensor 'spare'"),
        (
            lambda tensors: tensors.update({EMBEDDING: torch.zeros(17, 16)}),
            "has shape [17, 16], config.json says [16, 16]",
        ),
        (lambda tensors: tensors.update({EMBEDDING: torch.zeros(256)}), "has shape [256]"),
        (
            lambda tensors: tensors.update({EMBEDDING: torch.zeros(16, 16, dtype=torch.int8)}),
            "is torch.int8, expected floats",
        ),
        (lambda tensors: tensors.clear(), "tensors are missing"),
    ],
    ids=["missing", "unexpected", "rows", "flat", "quantised", "empty"],
)
def test_wrong_tensors(folder: Path, change: Callable[[Any], object], part: str) -> None:
    change_tensors(folder, change)
    told = refused(lambda: load_model(folder), str(folder), part)
    assert refused(lambda: check_weights(folder)) == told  # a dry run's, which reads no number


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_none_are_refused_as_they_are_read(
    folder: Path, value: float, dtype: torch.dtype
) -> None:
    change_tensors(
        folder, lambda tensors: tensors.update({EMBEDDING: torch.full((16, 16), 6e4, dtype=dtype)})
    )
    load_model(folder)  # large numbers, whose sum is no float16

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EMBEDDING][3, 5] = value

    change_tensors(folder, spoil)
    refused(lambda: load_model(folder), str(folder), EMBEDDING, "contains NaN or infinity")


def test_a_tensor_that_occurs_twice(folder: Path, tmp_path: Path) -> None:
    in_two_shards(folder)
    both = load_file(folder / "b.safetensors")
    both[EMBEDDING] = torch.zeros(16, 16)
    save_file(both, folder / "b.safetensors")
    refused(lambda: load_model(folder), "b.safetensors", f"tensor '{EMBEDDING}' occurs twice")
    # GPT-2's two spellings of one name, in one file.
    save_model(tiny(TINY_GPT2), tmp_path / "gpt2")
    change_tensors(tmp_path / "gpt2", lambda tensors: tensors.update({"ln_f.bias": torch.zeros(16)}))
    refused(lambda: load_model(tmp_path / "gpt2"), "model.safetensors", "occurs twice")


def test_buffers_of_old_checkpoints_are_passed_over(folder: Path, tmp_path: Path) -> None:
    expected = logits(load_model(folder)[0], [1, 2, 3])
    head = load_file(folder / "model.safetensors")[EMBEDDING].clone()
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": head}
    change_tensors(folder, lambda tensors: tensors.update(buffers))
    assert torch.equal(logits(load_model(folder)[0], [1, 2, 3]), expected)
    save_model(tiny(TINY_GPT2), tmp_path / "gpt2")
    expected = logits(load_model(tmp_path / "gpt2")[0], [1, 2, 3])
    # openai-community/gpt2 has no 'transformer.' in its names, and stores the causal mask.
    stored = load_file(tmp_path / "gpt2/model.safetensors")
    plain = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    plain["h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.uint8)
    save_file(plain, tmp_path / "gpt2/model.safetensors")
    assert torch.equal(logits(load_model(tmp_path / "gpt2")[0], [1, 2, 3]), expected)


# --- files -------------------------------------------------------------------------------------------------


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04K\x01.",  # a pickle by another name
        header(b"not json at all"),
        header(b"{}", 2**62),
        header(b'{"model.norm.weight":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}'),
        header(b'{"model.norm.weight":{"dtype":"F32","shape":[16],"data_offsets":[0,99999999]}}') + bytes(64),
        header(b'{"model.norm.weight":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}'),
        header(b"[" * 50_000),
    ],
    ids=["empty", "pickle", "garbage", "huge-header", "no-data", "far-offset", "overflow", "nested"],
)
def test_broken_safetensors(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refused(lambda: load_model(folder), "model.safetensors", "not a readable safetensors file")


def test_truncated_safetensors(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 9):
        (folder / "model.safetensors").write_bytes(whole[:length])
        refused(lambda: load_model(folder), "model.safetensors", "not a readable safetensors file")
        refused(lambda: check_weights(folder), "model.safetensors", "not a readable safetensors file")


def test_a_folder_of_pickles_says_so(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(lambda: load_model(folder), str(folder), "pytorch_model.bin is a pickle, which whet never reads")
    (folder / "pytorch_model.bin").unlink()
    assert refused(lambda: load_model(folder)) == f"{folder}: no model.safetensors"


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/outside.safetensors",
        "sub/a.safetensors",
        "..\\a.safetensors",
        "a.bin",
        ".safetensors",
        "",
        7,
        None,
        ["a.safetensors"],
        {"a.safetensors": 1},
    ],
)
def test_shard_names_stay_in_the_folder(folder: Path, name: Any) -> None:
    (folder.parent / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    weight_map = in_two_shards(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map | {EMBEDDING: name}}))
    refused(lambda: load_model(folder), INDEX, "is not a plain file name")


@pytest.mark.parametrize("index", [{}, {"weight_map": None}, {"weight_map": ["a.safetensors"]}])
def test_an_index_without_a_map(folder: Path, index: Any) -> None:
    in_two_shards(folder)
    (folder / INDEX).write_text(json.dumps(index))
    refused(lambda: load_model(folder), INDEX, "'weight_map' is missing")


def test_a_missing_shard(folder: Path) -> None:
    in_two_shards(folder)
    load_model(folder)
    (folder / "b.safetensors").unlink()
    refused(lambda: load_model(folder), "b.safetensors", "no such shard, though the index names it")


def test_a_tied_head_with_other_numbers_is_refused(folder: Path) -> None:
    """transformers would use the stored one, whet the embeddings: neither is what both mean."""
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING] + 1}))
    refused(
        lambda: load_model(folder), "'lm_head.weight' is stored with other numbers", "tie_word_embeddings"
    )


def test_one_file_beside_an_index_is_refused(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: "model.safetensors"}}))
    refused(lambda: load_model(folder), "model.safetensors stands beside model.safetensors.index.json")


# --- config.json -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[]", "expected a JSON object, got list"),
        ('"llama"', "expected a JSON object, got str"),
        ("[" * 100_000, "not JSON"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "not JSON"),
    ],
    ids=["cut", "empty", "list", "string", "nested", "digits"],
)
def test_a_malformed_config(folder: Path, text: str, part: str) -> None:
    (folder / "config.json").write_text(text)
    refused(lambda: load_model(folder), "config.json", part)


def test_a_config_that_is_no_text_or_too_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "config.json").write_bytes(b'{"model_type": "\xff"}')
    refused(lambda: load_model(folder), "config.json", "not UTF-8 text (byte 16)")
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10)
    refused(lambda: load_model(folder), "config.json", "expected at most 10")
    refused(lambda: files.read_json(folder / "nothing.json"), "nothing.json: no such file")


def test_keys_that_cannot_change_the_computation_pass(folder: Path) -> None:
    before = load_model(folder)[0].config
    change_config(folder, _made_by="x", _fixed=2, tool_token_id=7, stop_token_ids=[1], unsloth_mark=True)
    assert load_model(folder)[0].config == before


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; expected one of 40 such as llama"),
        ({"model_type": None}, "model_type 'None' is not supported"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"model_type": "x" * 10_000}, "is not supported"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "asks for remote code (auto_map), which whet never runs"),
        ({"auto_map": None}, "auto_map"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, "rope type 'axial' is not"),
        ({"rope_scaling": {"type": "linear"}}, "field 'factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "model.factor = 0: expected a positive number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta": 3}}, "rope type 'yarn' with 'beta'"),
        ({"sliding_window": 4096}, "key 'sliding_window' is not known for model_type 'llama'"),
        ({"query_scale": 2.0}, "key 'query_scale' is not known"),
        (
            {"query_scale": 2.0, "sliding_window": 4096, "per_layer_config": {}},
            "keys 'query_scale', 'sliding_window', 'per_layer_config' are not known for model_type 'llama'",
        ),
        ({"torch_dtype": "float4096"}, "torch_dtype = 'float4096': expected a dtype such as 'bfloat16'"),
        ({"dtype": 16}, "dtype = 16: expected a dtype"),
        ({"dtype": ["float32"]}, "dtype = ['float32']: expected a dtype"),
        ({"tie_word_embeddings": "maybe"}, "tie_word_embeddings = 'maybe': expected true or false"),
        ({"tie_word_embeddings": 2}, "tie_word_embeddings = 2: expected true or false"),
        ({"attention_bias": "no"}, "attention_bias = 'no': expected true or false"),
        ({"rope_theta": "x"}, "rope_theta = 'x': expected a number"),
        ({"rope_theta": True}, "rope_theta = True: expected a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "factor = '8': expected a number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5': expected a number"),
        ({"rms_norm_eps": None}, "rms_norm_eps = null: expected a number"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers = 1.5: expected a whole number"),
        ({"num_key_value_heads": False}, "num_key_value_heads = False: expected a whole number"),
        ({"max_position_embeddings": {}}, "max_position_embeddings = {}: expected a whole number"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config (awq): the weights are quantised",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config (gptq): the weights are quantised in a form that is not supported",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "field 'low_freq_factor' is missing"),
        ({"rope_scaling": [1]}, "rope_scaling: expected an object, got list"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"hidden_size": None}, "hidden_size = null: expected a whole number"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide': expected a whole number"),
        ({"hidden_size": [16]}, "hidden_size = [16]: expected a whole number"),
        ({"hidden_size": 0}, "model.hidden_size = 0"),
        ({"hidden_size": -16}, "model.hidden_size = -16"),
        ({"vocab_size": 2**40}, "model.vocab_size = 1099511627776: expected 1 to 16,777,216"),
        ({"num_hidden_layers": 10**7}, "model.num_layers = 10000000: expected 1 to 1,024"),
        ({"intermediate_size": math.inf}, "intermediate_size = inf: expected a whole number"),
        ({"hidden_size": math.nan}, "hidden_size = nan: expected a whole number"),
        ({"num_attention_heads": 0}, "model.num_heads = 0"),
        ({"num_attention_heads": 0, "head_dim": None}, "model.num_heads = 0"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_kv_heads = 2: expected a divisor"),
        ({"head_dim": 7}, "rotary positions need an even number"),
        ({"rms_norm_eps": math.nan}, "model.norm_eps = nan"),
        ({"rope_theta": -1.0}, "model.rope_theta = -1.0"),
    ],
)
def test_an_unsupported_config(folder: Path, fields: dict[str, Any], part: str) -> None:
    change_config(folder, **fields)
    refused(lambda: load_model(folder), "config.json", part)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"activation_function": "relu"}, "activation_function 'relu' is not supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ({"scale_attn_weights": False}, "scale_attn_weights = False"),
        ({"add_cross_attention": True}, "add_cross_attention = True"),
        ({"n_head": 0}, "model.num_heads = 0"),
        ({"n_head": 3}, "gpt2 needs num_heads * head_dim"),
    ],
)
def test_an_unsupported_gpt2_config(tmp_path: Path, fields: dict[str, Any], part: str) -> None:
    save_model(tiny(TINY_GPT2), tmp_path)
    change_config(tmp_path, **fields)
    refused(lambda: load_model(tmp_path), "config.json", part)


def test_every_missing_field_is_named(folder: Path) -> None:
    whole = json.loads((folder / "config.json").read_text())
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for name in needed:
        rest = {key: value for key, value in whole.items() if key != name}
        refused(
            lambda rest=rest: from_hf(rest, where="x/config.json"), "x/config.json", f"'{name}' is missing"
        )


def test_huge_shapes_are_refused_before_memory_is_taken(folder: Path) -> None:
    """2^24 x 2^24 float32 would be 2^50 bytes: the file's own shape is compared first."""
    change_config(folder, vocab_size=2**24, hidden_size=2**24)
    refused(lambda: load_model(folder), "model.safetensors", "config.json says")


def test_what_transformers_writes_beside_a_models_shape_changes_nothing(folder: Path) -> None:
    """Generation's defaults, as older versions put them into config.json, ids, and what reading a GGUF leaves there."""
    shape = load_model(folder)[1]
    found = {**transformers.GenerationConfig().to_dict(), **transformers.PreTrainedConfig().to_dict()}
    left = {name: 7 if value is None else value for name, value in found.items() if name != "model_type"}
    del left["dtype"], left["architectures"]
    left |= {"_model_name_or_path": "SmolLM2 135M", "unk_token_id": 0, "torch_dtype": "bfloat16"}
    change_config(folder, **left)
    assert replace(load_model(folder)[1], source="") == replace(shape, source="")


def test_a_qwen3_config_without_head_dim_means_128() -> None:
    """The default of transformers' Qwen3Config, which is not hidden_size / num_attention_heads."""
    fields = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = from_hf(fields | {"model_type": "qwen3", "vocab_size": 16})
    assert config.head_dim == 128
    assert from_hf(fields | {"model_type": "qwen2", "vocab_size": 16}).head_dim == 16


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"family": "gpt2"}, "num_kv_heads = num_heads"),
        ({"family": "qwen2", "attention_bias": True}, "attention_bias is for llama and qwen3"),
        ({"family": "qwen3", "mlp_bias": True}, "mlp_bias is for llama only"),
        (
            {
                "family": "gpt2",
                "num_kv_heads": 4,
                "rope_scaling": RopeScaling(
                    factor=2, low_freq_factor=1, high_freq_factor=4, original_max_positions=8
                ),
            },
            "no rope_scaling",
        ),
        ({"num_layers": 0}, "model.num_layers = 0: expected 1 to 1,024"),
    ],
)
def test_a_shape_whose_options_would_be_ignored(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        ModelConfig(**options)


# --- which folder ------------------------------------------------------------------------------------------


def test_a_run_folder_is_its_best_checkpoint_else_its_newest(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(parents=True)
    refused(lambda: model_folder(run), str(run), "the run folder has no finished checkpoint")

    def add(name: str) -> Path:
        (checkpoints / name).mkdir()
        (checkpoints / name / "config.json").write_text((folder / "config.json").read_text())
        return checkpoints / name

    for unfinished in (".tmp-step_00000009-77", "step_00000009.old", "step_x"):
        add(unfinished)
    (checkpoints / "step_00000008").mkdir()  # no config.json in it
    refused(lambda: model_folder(run), "no finished checkpoint")
    two = add("step_00000002")
    assert model_folder(run) == two
    newest = add("step_00000010")
    assert model_folder(run) == newest
    assert model_folder(str(run)) == newest
    full = add("step_99999999")
    assert model_folder(run) == full
    wide = add("step_100000000")  # one digit more than the padding: by number, not by letter
    assert model_folder(run) == wide
    best = add("best")
    assert model_folder(run) == best
    assert model_folder(two) == two


def test_folders_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hub(*_: object, **__: object) -> str:
        raise AssertionError("this name must not reach the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_hub)
    refused(lambda: model_folder(tmp_path), str(tmp_path), "neither a model folder (no config.json)")
    (tmp_path / "file").write_text("")
    refused(lambda: load_model(tmp_path / "file"), "neither a model folder")
    (tmp_path / "model.gguf").touch()
    refused(lambda: model_folder(tmp_path), "a GGUF file is a model by its own name", "model.gguf")
    for name in ("runs", "../a/b", "/nowhere/at/all", "a/b/c", "", "owner/", "https://x.org/a"):
        refused(lambda name=name: model_folder(name), "o")


@pytest.mark.parametrize(
    "error",
    [
        OSError("We couldn't connect to the hub\nand a second line"),
        ValueError(""),
        RuntimeError("Cannot send a request, as the client has been closed."),
    ],
)
def test_an_unreachable_hub(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    reason = str(error).split("\n")[0] or "ValueError"
    message = refused(lambda: load_model("owner/name"), "'owner/name'", f"({reason})", "check the name")
    assert "second line" not in message


def test_a_hub_model_asks_for_no_file_that_can_execute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    _, config = load_model("owner/name")
    assert config == TINY
    assert asked["name"] == "owner/name"
    for pattern in asked["allow_patterns"]:
        assert pattern.endswith((".json", ".safetensors", ".jinja", ".model", ".txt"))
    names = ["model.safetensors", "original/model.safetensors", "additional_chat_templates/tool_use.jinja"]
    chosen = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(chosen) == [names[0], names[2]]  # not the copies in original/


def test_a_model_that_is_refused_is_not_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(name: str, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    change_config(folder, model_type="mamba")
    refused(lambda: load_model("owner/name"), "model_type 'mamba' is not supported")
    assert asked == [["config.json"]]


def test_what_is_written_has_the_sampling_defaults_and_the_dtype_that_were_read(
    folder: Path, tmp_path: Path
) -> None:
    stored = json.loads((folder / "generation_config.json").read_text())
    theirs = stored | {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_length": 5}
    (folder / "generation_config.json").write_text(json.dumps(theirs))
    model, _ = load_model(folder)
    save_model(model, tmp_path / "out", dtype=torch.bfloat16)
    kept = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (kept["temperature"], kept["top_p"], kept["top_k"], "max_length" in kept) == (0.6, 0.95, 20, False)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


# --- growing the vocabulary --------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TINY, replace(TINY, tie_embeddings=False), TINY_GPT2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_resize_keeps_the_old_logits(config: ModelConfig, dtype: torch.dtype) -> None:
    model = tiny(config).to(dtype)
    grown = resize_vocabulary(model, 48, seed=5)
    assert grown.config == replace(config, vocab_size=48)
    assert grown.num_valid_tokens == 48
    assert {parameter.dtype for parameter in grown.parameters()} == {dtype}
    ids = [3, 1, 15, 0, 7]
    # A product with more columns may round otherwise (it does in float64 on some machines): a few last places.
    close = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(logits(grown, ids)[:, :16], logits(model, ids)[:, :16], rtol=close, atol=close)
    tables = [(grown.head_weight, model.head_weight)]
    if not config.tie_embeddings:
        name = "model.embed_tokens.weight"
        tables.append((grown.get_parameter(name), model.get_parameter(name)))
    for new, old in tables:
        rows = (new[16:].double() - old.double().mean(0)) / old.double().std()
        # 32 x 16 draws of N(0, 0.02): their deviation has a standard error of 0.02 / sqrt(2 * 512) = 0.0006;
        # bfloat16 rounds by 2^-9 of a row value. The rows must differ, or new tokens would learn as one.
        assert 0.015 < rows.std() < 0.025
        assert rows.mean().abs() < 0.005
        assert (new[16] - new[17]).abs().max() > 0


def test_resize_is_reproducible_and_only_grows() -> None:
    model = tiny()
    assert torch.equal(
        resize_vocabulary(model, 20, 5).head_weight, resize_vocabulary(model, 20, 5).head_weight
    )
    other = resize_vocabulary(model, 20, seed=6)
    assert not torch.equal(resize_vocabulary(model, 20, seed=5).head_weight, other.head_weight)
    assert resize_vocabulary(model, 16, seed=5) is model
    assert resize_vocabulary(model, 3, seed=5) is model


def test_a_checkpoint_is_compared_with_its_manifest_before_use(tmp_path: Path) -> None:
    final = tmp_path / "checkpoints" / "step_00000001"
    final.parent.mkdir()
    with commit_folder(final) as folder:
        save_model(tiny(), folder)
        (folder / "tokenizer.json").write_text("{}")
    load_model(tmp_path)
    weights = (final / "model.safetensors").read_bytes()
    flipped = weights[:-9] + bytes([weights[-9] ^ 1]) + weights[-8:]
    (final / "model.safetensors").write_bytes(flipped)
    refused(
        lambda: load_model(tmp_path), "model.safetensors: differs from its manifest", "another checkpoint"
    )
    (final / MANIFEST).rename(tmp_path / "kept")
    load_model(final)  # of a stranger's folder nobody knows what it was
    (final / MANIFEST).write_text('{"name": "a browser extension"}')
    load_model(final)
    (final / "model.safetensors").write_bytes(weights)
    for text in ("{", (tmp_path / "kept").read_text().replace('"size": ', '"size": 1')):
        (final / MANIFEST).write_text(text)
        refused(lambda: load_model(final), "manifest.json: no")
    (tmp_path / "kept").replace(final / MANIFEST)
    load_model(final)
    (final / "tokenizer.json").unlink()
    refused(lambda: load_model(final), "tokenizer.json: missing, though the manifest names it")
    (final / "tokenizer.json").write_text("{}")
    (final / INDEX).write_text("{}")
    refused(lambda: load_model(final), f"{INDEX}: the manifest does not name it")


def test_no_table_of_absurd_length_is_made(tmp_path: Path) -> None:
    save_model(tiny(), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"max_position_embeddings": 2**24}))
    refused(lambda: load_model(tmp_path), "max_positions = 16,777,216: expected at most 2,097,152")
