"""Strict loading and saving of model folders in the Hugging Face format.

They are safetensors and JSON: nothing in them can execute.

A run folder counts as a model folder too: its best checkpoint is taken, else its newest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from whet.model.config import ModelConfig, from_hf, to_hf
from whet.model.files import check_manifest, hub_folder, is_hub_name, read_json
from whet.model.gpt2 import GPT2
from whet.model.transformer import LanguageModel, LlamaLike
from whet.storage.commit import MANIFEST
from whet.types import UserError

SHARD_BYTES = 4 * 10**9
MAX_POSITIONS = 2**21
"""Positions that a configuration from outside may ask for: twice as many as any model of these families has."""
HUB_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def build_model(config: ModelConfig) -> LanguageModel:
    """Make the module of a configuration, with uninitialised weights on the current default device."""
    return GPT2(config) if config.family == "gpt2" else LlamaLike(config)


def model_folder(source: str | Path) -> Path:
    """Find the model folder that a user means.

    Args:
        source: A Hugging Face folder, a whet run folder, or a hub name such as 'Qwen/Qwen2.5-0.5B'.

    Returns:
        A local folder that holds config.json and safetensors.

    Raises:
        UserError: If there is none.
    """
    path = Path(source).expanduser()
    if (path / "config.json").is_file():
        return path
    checkpoints = path / "checkpoints"
    if checkpoints.is_dir():
        steps = [p for p in checkpoints.glob("step_*") if re.fullmatch(r"step_\d{1,18}", p.name)]
        newest_first = sorted(steps, key=lambda p: int(p.name.removeprefix("step_")), reverse=True)
        for candidate in [checkpoints / "best", *newest_first]:
            if (candidate / "config.json").is_file() or (
                candidate / MANIFEST
            ).is_file():  # damaged: not passed over
                return candidate
        raise UserError(
            f"{path}: the run folder has no finished checkpoint; "
            "let the run reach its first one, or give another folder"
        )
    if path.exists():
        raise UserError(f"{path}: neither a model folder (no config.json) nor a run folder (no checkpoints/)")
    if str(source).startswith("runs/"):
        raise UserError(f"{str(source)!r}: no such run yet; make it first, or give another folder")
    if "/" not in str(source) or not is_hub_name(str(source)):
        raise UserError(f"{str(source)!r}: no such folder, and not a hub name such as 'owner/name'")
    return hub_folder(str(source), HUB_PATTERNS)


def _shards(folder: Path) -> list[Path]:
    """List the weight files of a folder, refusing names that leave it."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if single.is_file():
            return [single]
        pickled = next(iter([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.ckpt")]), None)
        hint = (
            f"; {pickled.name} is a pickle, which whet never reads: convert it to safetensors"
            if pickled
            else ""
        )
        raise UserError(f"{folder}: no model.safetensors{hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: 'weight_map' is missing, or not an object")
    for name in weight_map.values():
        if not isinstance(name, str) or not re.fullmatch(
            r"[A-Za-z0-9][\w.-]{0,200}\.safetensors", name, re.A
        ):
            raise UserError(f"{index}: shard name {str(name)[:80]!r} is not a plain file name")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: no such shard, though the index names it")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _canonical_name(name: str, config: ModelConfig) -> str | None:
    """Map a stored tensor name to the module's; None for buffers that old checkpoints carry."""
    if name.endswith(("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")):
        return None
    if config.family == "gpt2" and not name.startswith(("transformer.", "lm_head.", "score.")):
        name = f"transformer.{name}"
    return None if name == "lm_head.weight" and config.tie_embeddings else name


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    is_reward: bool | None = False,
) -> tuple[LanguageModel, ModelConfig]:
    """Load a model folder, strictly: every parameter once, every shape as configured.

    Args:
        path: Hugging Face folder, run folder or hub name.
        dtype: Parameter dtype.
        device: Where the parameters live.
        is_reward: Whether a reward model is expected, or a language model; None for either.

    Returns:
        The model in evaluation mode and its configuration.

    Raises:
        UserError: If a file is missing or malformed, or not as its manifest says, or tensors are missing, unexpected,
            repeated or of another shape, or it is a model of the other kind.
    """
    folder = model_folder(path)
    check_manifest(folder)
    config = from_hf(read_json(folder / "config.json"), where=str(folder / "config.json"))
    if is_reward is not None and config.is_reward != is_reward:
        got, want = ("a reward model, which scores texts and writes none", "a language model")
        if is_reward:
            got, want = "a language model", "a reward model (whet dpo --loss reward trains one)"
        raise UserError(f"{folder}: {got}; expected {want}")
    if config.max_positions > MAX_POSITIONS:
        what = f"max_positions = {config.max_positions:,}: expected at most {MAX_POSITIONS:,}"
        raise UserError(f"{folder / 'config.json'}: {what}, as a table with a row for each is made; lower it")
    with torch.device("meta"):
        model = build_model(config)
    expected = dict(model.named_parameters())
    loaded: dict[str, torch.Tensor] = {}
    for shard in _shards(folder):
        try:
            with safe_open(str(shard), framework="pt", device="cpu") as file:
                for stored in file.keys():  # noqa: SIM118 (safe_open has no iterator)
                    name = _canonical_name(stored, config)
                    if name is None:
                        continue
                    if name not in expected:
                        raise UserError(
                            f"{shard}: unexpected tensor {stored[:80]!r} for a {config.family} model"
                        )
                    if name in loaded:
                        raise UserError(f"{shard}: tensor {stored[:80]!r} occurs twice")
                    want, got = tuple(expected[name].shape), tuple(file.get_slice(stored).get_shape())
                    if want != got:
                        raise UserError(
                            f"{shard}: tensor {stored[:80]!r} has shape {list(got)}, config.json says {list(want)}"
                        )
                    tensor = file.get_tensor(stored)
                    if not tensor.is_floating_point():
                        raise UserError(f"{shard}: tensor {stored[:80]!r} is {tensor.dtype}, expected floats")
                    loaded[name] = tensor.to(device=device, dtype=dtype)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{shard}: not a readable safetensors file ({str(error)[:300]})") from None
    missing = sorted(set(expected) - set(loaded))
    if missing:
        raise UserError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]!r}")
    model.load_state_dict(loaded, strict=True, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval(), config


def save_model(
    model: LanguageModel,
    folder: Path,
    *,
    bos_id: int | None = None,
    eos_ids: tuple[int, ...] = (),
    pad_id: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a folder that `transformers` loads: two JSON files and safetensors, in shards when large.

    Args:
        model: The model; tied heads are stored once.
        folder: Existing or new folder.
        bos_id: Beginning-of-sequence id for the configuration.
        eos_ids: Ids that end a generation.
        pad_id: Padding id of a reward model that no text ends with.
        shard_bytes: Largest size of one weight file in bytes.
        weights: What is written in place of the model's own parameters: a copy of them that was taken earlier.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(model.named_parameters()) if weights is None else weights
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in weights.items()}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    hf = to_hf(model.config, bos_id=bos_id, eos_ids=eos_ids, dtype=dtype, pad_id=pad_id)
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n")
    generation = {
        "bos_token_id": bos_id,
        "eos_token_id": hf["eos_token_id"],
        "do_sample": True,
        "temperature": 1.0,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    )


def as_reward_model(model: LanguageModel) -> LanguageModel:
    """Return the model with a reward model's head, at first 0, in place of its output head; the rest is shared."""
    if model.config.is_reward:
        return model
    with torch.device("meta"):
        scoring = build_model(replace(model.config, is_reward=True))
    like = model.head_weight
    head = torch.zeros(1, like.shape[1], dtype=like.dtype, device=like.device)
    kept = {name: weight for name, weight in model.named_parameters() if not name.startswith("lm_head.")}
    scoring.load_state_dict({**kept, "score.weight": head}, strict=True, assign=True)
    for parameter in scoring.parameters():
        parameter.requires_grad_(True)
    return scoring.eval()


def resize_vocabulary(model: LanguageModel, num_rows: int, seed: int) -> LanguageModel:
    """Return the model with `num_rows` vocabulary rows; new rows start near the mean of the old ones.

    The noise around that mean is normal, with 0.02 of the old rows' standard deviation.

    Args:
        model: The model; unchanged when it already has at least `num_rows`.
        num_rows: Rows wanted.
        seed: Seed of the noise.
    """
    old = model.config.vocab_size
    if num_rows <= old:
        return model
    like = next(model.parameters())
    grown = build_model(replace(model.config, vocab_size=num_rows)).to(device=like.device, dtype=like.dtype)
    generator = torch.Generator().manual_seed(seed)
    state = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            source = state[name]
            if source.shape == parameter.shape:
                parameter.copy_(source)
                continue
            noise = torch.empty(num_rows - old, source.shape[1]).normal_(0, 0.02, generator=generator)
            noise = noise.to(source.device) * source.float().std()
            parameter[:old].copy_(source)
            parameter[old:].copy_(source.float().mean(0) + noise)
    return grown.eval()
