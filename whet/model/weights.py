"""Strict loading and saving of model folders in the Hugging Face format.

They are safetensors and JSON: nothing in them can execute.

A run folder counts as a model folder too: its best checkpoint is taken, else its newest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from whet.config import user_path
from whet.model.config import TOWER, ModelConfig, VisionConfig
from whet.model.families import RopeFactors, from_hf, is_packed, quant_method, to_hf
from whet.model.files import CONVERTED, GGUF, check_manifest, full_name, hub_folder, is_hub_name, read_json
from whet.model.gpt2 import GPT2
from whet.model.lora.side import sides_of
from whet.model.names import HEAD, StoredPlace, as_stored, find_places
from whet.model.quant import (
    FULL,
    QUANTIZATION,
    BlockScaled,
    Kind,
    PackedMatrix,
    Place,
    is_finite,
    packed_parts,
    packed_tensors,
    part_of,
    places,
    read_block_scaled,
    read_packed,
    read_torchao_metadata,
    share_packed,
    stored_tensors,
)
from whet.model.quant import (
    quantize as quantize_matrices,
)
from whet.model.transformer import LanguageModel, LlamaLike
from whet.model.vision.pixels import Preprocessing, read_preprocessing
from whet.model.vision.store import ImageStore
from whet.ranks.collectives import is_share
from whet.ranks.fsdp import local, rows_of
from whet.storage.commit import MANIFEST, save_tensors
from whet.telemetry.provenance import no_run
from whet.types import UserError

SHARD_BYTES = 4 * 10**9
MAX_POSITIONS = 2**21
"""Positions that a configuration from outside may ask for: twice as many as any model of these families has."""
HUB_PATTERNS = (
    "*.safetensors",  # the weights first: `model_folder` can leave them out
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    QUANTIZATION,
    *CONVERTED,
)


def build_model(config: ModelConfig) -> LanguageModel:
    """Make the module of a configuration, with uninitialised weights on the current default device."""
    return GPT2(config) if config.family == "gpt2" else LlamaLike(config)


def model_folder(source: str | Path, *, weights: bool = True) -> Path:
    """Find the model folder that a user means.

    Args:
        source: A Hugging Face folder, a whet run folder, a GGUF file, a hub name such as 'Qwen/Qwen2.5-0.5B', or
            a short name (`whet.config.SHORT_MODELS`).
        weights: False to download no weights from the hub.

    Returns:
        A local folder that holds config.json and safetensors.

    Raises:
        UserError: If there is none.
    """
    source = full_name(source)
    path = user_path(source)
    if path.suffix == GGUF and not path.is_dir():
        from whet.model.gguf import gguf_folder  # for such files alone

        return gguf_folder(path)
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
            f"{path}: the run folder has no finished checkpoint: the run was stopped before its first one, or has not "
            "reached it; go on with --resume (Python: resume=True), or give another folder"
        )
    if path.exists():
        if files := sorted(path.glob(f"*{GGUF}")):
            raise UserError(f"{path}: a GGUF file is a model by its own name: {files[0]}")
        raise UserError(f"{path}: neither a model folder (no config.json) nor a run folder (no checkpoints/)")
    if str(source).startswith("runs/") or "/" not in str(source) or not is_hub_name(str(source)):
        raise no_run(str(source), or_hub=not str(source).startswith("runs/"))
    # The configuration alone first: a model that is refused need not be downloaded.
    stored_shape(hub_folder(str(source), ("config.json",)))
    return hub_folder(str(source), HUB_PATTERNS[0 if weights else 2 :])


def check_weights(folder: Path) -> None:
    """Check that a folder's weights are whole files with the tensors of its config.json; no number is read.

    Of quantised tensors, only that their files are whole.

    Raises:
        UserError: As `load_model`.
    """
    config, outer = stored_shape(folder), read_json(folder / "config.json")
    with torch.device("meta"):
        model = build_model(config)
    if (folder / QUANTIZATION).is_file() or is_packed(outer) or quant_method(outer):
        for shard in weight_files(folder):
            with _opened(shard):
                pass
    else:
        _Loaded(model, torch.float32, torch.device("meta"), None).read(folder, _Described)


def stored_shape(folder: Path, rope_factors: RopeFactors = "auto") -> ModelConfig:
    """Return the shape that a model folder's config.json has."""
    path = folder / "config.json"
    if not path.is_file() and (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder}: a LoRA adapter, which is read as a policy only (policy.init or policy.adapter); merge it first"
        )
    return from_hf(read_json(path), where=str(path), rope_factors=rope_factors)


def weight_files(folder: Path) -> list[Path]:
    """List the weight files of a folder, refusing names that leave it."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file() and single.is_file():
        raise UserError(
            f"{folder}: {single.name} stands beside {index.name}, and either may be meant; delete the wrong one"
        )
    if single.is_file():
        return [single]
    if not index.is_file():
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


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    is_reward: bool | None = False,
    rope_factors: RopeFactors = "auto",
    quantize: Kind | None = None,
    shard: Callable[[LanguageModel], None] | None = None,
) -> tuple[LanguageModel, ModelConfig]:
    """Load a model folder, strictly: every parameter once, every shape as configured.

    Args:
        path: Hugging Face folder, run folder or hub name.
        dtype: Parameter dtype.
        device: Where the parameters live.
        is_reward: Whether a reward model is expected, or a language model; None for either.
        rope_factors: Of ropes that change with the length of sequences; auto takes those of the folder, else short.
        quantize: Round the layers' matrices to 4 or 8 bits, each as soon as it is read; None leaves them.
        shard: Deals the model out over the ranks while it has no memory yet; this rank then reads its rows alone.
            Matrices in few bits are read whole, and the model is returned as it is.

    Returns:
        The model in evaluation mode and its configuration.

    Raises:
        UserError: If a file is missing or malformed, or not as its manifest says, or tensors are missing, unexpected,
            repeated or of another shape, or a tied head is another than the embeddings, or it is a model of the other
            kind.
    """
    folder = model_folder(path)
    check_manifest(folder)
    config = stored_shape(folder, rope_factors)
    if is_reward is not None and config.is_reward != is_reward:
        got, want = ("a reward model, which scores texts and writes none", "a language model")
        if is_reward:
            got, want = "a language model", "a reward model (whet dpo own --loss reward trains one)"
        raise UserError(f"{folder}: {got}; expected {want}")
    if config.max_positions > MAX_POSITIONS:
        what = f"max_positions = {config.max_positions:,}: expected at most {MAX_POSITIONS:,}"
        raise UserError(f"{folder / 'config.json'}: {what}, as a table with a row for each is made; lower it")
    with torch.device("meta"):
        model = build_model(config)
    _open_to_training(model)
    loaded = _Loaded(model, dtype, torch.device(device), quantize)
    loaded.is_own = (folder / QUANTIZATION).is_file()
    outer = read_json(folder / "config.json")
    loaded.is_torchao = quant_method(outer) == "torchao"
    loaded.is_packed = loaded.is_own or (is_packed(outer) and not loaded.is_torchao)
    if shard is not None and quantize is None and not (loaded.is_packed or loaded.is_torchao):
        shard(model.to(dtype))
        loaded.take_shares(model)
    loaded.read(folder)
    if quantize is not None and loaded.is_quantized:
        raise UserError(f"{folder}: its weights are quantised already; leave policy.quantize out")
    if not loaded.has_shares:
        model.load_state_dict(loaded.tensors | dict(packed_tensors(model)), strict=True, assign=True)
        if quantize is not None:
            quantize_matrices(model, quantize)  # what was read in pieces
    if loaded.head is not None and not torch.equal(loaded.head, local(model.head_weight)):
        raise UserError(
            f"{folder}: config.json ties the head to the embeddings (tie_word_embeddings), but {HEAD!r} is stored with "
            "other numbers; set tie_word_embeddings to false to use it, or delete the tensor"
        )
    _open_to_training(model)
    model.sampling_defaults = _sampling_defaults(folder)
    if config.vision is not None:
        model.images = ImageStore(preprocessing_of(folder, config.vision))
    return model.eval(), config


def load_shares(model: LanguageModel, folder: Path) -> None:
    """Overwrite a sharded model's weights with those of a folder; each rank reads its own rows.

    Args:
        model: The model; adapters beside it are left alone.
        folder: Of the same shape.

    Raises:
        UserError: As `load_model`.
    """
    check_manifest(folder)
    loaded = _Loaded(model, model.head_weight.dtype, local(model.head_weight).device, None)
    loaded.take_shares(model)
    loaded.read(folder)


def _open_to_training(model: LanguageModel) -> None:
    """Make all parameters trainable but those that no gradient moves: routers' offsets, layers' scales; and a tower's.

    A tower stays as it is unless a caller opens it: it sees already, and its features are then computed once.
    A quantised model's are trainable, too, where an adapter's settings name them; training all of them is refused.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(FROZEN) and not name.startswith(TOWER))


def train_tower(model: LanguageModel) -> None:
    """Make the parameters of a model's tower trainable.

    Raises:
        UserError: If the model reads text alone.
    """
    if model.images is None:
        raise UserError("policy.train_vision: the model reads text alone, and has no tower; leave it out")
    for name, parameter in model.named_parameters():
        if name.startswith(TOWER):
            parameter.requires_grad_(True)


FROZEN = ("e_score_correction_bias", "layer_scalar")


class _Loaded:
    """Parameters as they are read.

    Args:
        model: The module that they are read for; it changes where its matrices are packed, or it is sharded.
        dtype: Their dtype.
        device: Their device.
        quantize: Kind that matrices are rounded to as they are read; None for none.

    Attributes:
        is_own: Whether the folder is a quantised one of whet's, with its parameters' own names.
        is_packed: Whether it has quantised tensors.
        is_torchao: Whether its files say which of their tensors are parts of torchao's.
        is_quantized: Whether packed matrices were read.
        tensors: By name; those of several stored tensors are complete when `missing` does not name them.
        head: A tied model's stored head.
    """

    def __init__(
        self, model: LanguageModel, dtype: torch.dtype, device: torch.device, quantize: Kind | None
    ) -> None:
        self.is_own = self.is_packed = self.is_torchao = self.is_quantized = False
        self._homes: Mapping[str, Place] = places(model)
        self._shares: dict[str, tuple[slice, torch.Tensor]] = {}
        self._quantize: Kind | None = quantize
        self._parts: dict[str, dict[str, torch.Tensor]] = {}
        self._scaled: dict[str, BlockScaled] = {}
        self._scaled_parts: dict[str, tuple[str, str]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.head: torch.Tensor | None = None
        self._shapes = {name: parameter.shape for name, parameter in _own_parameters(model)}
        self._config, self._kind = model.config, {"device": device, "dtype": dtype}
        self._seen: set[str] = set()
        self._packed: dict[str, dict[str, torch.Tensor]] = {}
        self._counts: dict[str, int] = {}

    def expect(self, described: Mapping[str, BlockScaled]) -> None:
        """Note which stored tensors are parts of torchao's."""
        self._scaled |= described
        for name, kind in described.items():
            self._scaled_parts |= {kind.part_name(name, leaf): (name, leaf) for leaf in kind.leaves}

    @property
    def has_shares(self) -> bool:
        """Whether rows are read straight into the shares of a model."""
        return bool(self._shares)

    def take_shares(self, model: LanguageModel) -> None:
        """Read this rank's rows alone, into its shares of a model's parameters."""
        for name, parameter in _own_parameters(model):
            if is_share(parameter):
                self._shares[name] = rows_of(parameter), local(parameter)

    def read(self, folder: Path, seen_as: Callable[[Any], Any] = lambda file: file) -> None:
        """Read all files of a folder.

        Args:
            folder: Of a model.
            seen_as: Given an open file, returns what its tensors are read from.

        Raises:
            UserError: As `load_model`.
        """
        for shard in weight_files(folder):
            with _opened(shard) as file:
                if self.is_torchao:
                    self.expect(read_torchao_metadata(file.metadata() or {}, str(shard)))
                for stored in file.keys():  # noqa: SIM118 (safe_open has no iterator)
                    self.take(stored, seen_as(file), shard)
        self.finish_packs(folder)
        if missing := self.missing():
            raise UserError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]!r}")

    def take(self, stored: str, file: Any, shard: Path) -> None:
        """Read one stored tensor; UserError names the shard."""
        experts = self._config.block.experts
        if experts is not None and experts.is_clamped and stored.endswith(PACKED):
            self._unpack(stored, file, shard)
            return
        part = part_of(stored, file.get_slice(stored).get_dtype()) if self.is_packed else None
        part = self._scaled_parts.get(stored, part)
        if part is not None:
            held = self._parts.setdefault(part[0], {})
            if part[1] in held:
                raise UserError(f"{shard}: tensor {stored[:80]!r} occurs twice")
            held[part[1]] = file.get_tensor(stored)
            if part[0] in self._scaled and len(held) == len(self._scaled[part[0]].leaves):
                self._place_scaled(part[0], self._parts.pop(part[0]), shard)
            return
        pieces = file.get_slice(stored)
        shape = pieces.get_shape()
        if self._is_turned(stored, shape):
            pieces = _Turned(pieces)
            shape = pieces.get_shape()
            self._place(stored, shape, lambda: file.get_tensor(stored).transpose(1, 2), shard, pieces)
            return
        self._place(stored, shape, lambda: file.get_tensor(stored), shard, pieces)

    def _is_turned(self, stored: str, shape: Sequence[int]) -> bool:
        """Say whether a tensor of all experts is [E, in, out] in the file (Qwen3-VL's published ones are)."""
        if not self._config.block.has_turned_experts or len(shape) != 3:
            return False
        place = find_places(stored, self._config)[0]
        return place.name in self._shapes and list(shape) != list(self._shapes[place.name])

    def _place_scaled(self, stored: str, parts: Mapping[str, torch.Tensor], source: Path) -> None:
        """Put a matrix of torchao's where it belongs: in 8 bits if it is of a kind of ours, else dense."""
        found = read_block_scaled(stored, self._scaled[stored], parts, str(source))
        self.is_quantized = True
        if isinstance(found, PackedMatrix):
            places = find_places(stored, self._config)
            name = places[0].name if len(places) == 1 and not places[0].part else ""
            home = self._homes.get(name)
            is_linear = home is not None and not (home.is_experts or home.transposed)
            if home is not None and is_linear and found.shape == self._shapes[name]:
                home.pack([found.to(self._kind["device"])])
                self._counts[name] = found.shape.numel()
                return
            found = found.dense(torch.float32)
        self._place(stored, found.shape, lambda: found, source)

    def _place(
        self,
        stored: str,
        shape: Sequence[int],
        read: Callable[[], torch.Tensor],
        source: Path,
        pieces: Any = None,
    ) -> None:
        """Put a dense tensor where it belongs; it is read only if it does.

        Args:
            stored: Its stored name.
            shape: Its shape.
            read: Returns it.
            source: File, for errors.
            pieces: The same in the file, of which rows can be read; None for a tensor that is in no file.
        """
        places = (StoredPlace(stored),) if self.is_own else find_places(stored, self._config)
        what = f"{source}: tensor {stored[:80]!r}"
        is_tied_head = places == (StoredPlace(HEAD),) and self._config.tie_embeddings
        if is_tied_head:
            table = "transformer.wte.weight" if self._config.family == "gpt2" else "model.embed_tokens.weight"
            places = (StoredPlace(table),)
        for place in places:
            if place.name not in self._shapes:
                kind = json.loads(self._config.source)["model_type"]
                raise UserError(f"{source}: unexpected tensor {stored[:80]!r} for a {kind} model")
            if not is_tied_head and repr(place) in self._seen:
                raise UserError(f"{what} occurs twice")
        if not places:
            return
        parts = [torch.empty(self._shapes[p.name], device="meta")[p.part].shape for p in places]
        want = [sum(part[0] for part in parts), *parts[0][1:]]
        got = list(shape)
        if want != got:
            raise UserError(f"{what} has shape {got}, config.json says {want}")
        if self._shares:
            assert pieces is not None, "shares are not read from quantised folders"
            self._take_rows(places, [part[0] for part in parts], pieces, what, is_tied_head)
            return
        tensor = _floats(read(), what).to(**self._kind)
        if is_tied_head:
            self.head = tensor
            return
        rows = tensor.split([part[0] for part in parts]) if len(parts) > 1 else [tensor]
        for place, part in zip(places, rows, strict=True):
            self._seen.add(repr(place))
            self._counts[place.name] = self._counts.get(place.name, 0) + part.numel()
            if not place.part:
                whole = part if len(parts) == 1 else part.clone()
                home = self._homes.get(place.name) if self._quantize is not None else None
                if home is None or home.is_experts:
                    self.tensors[place.name] = whole
                elif self._quantize is not None:
                    home.pack([PackedMatrix.of(whole, self._quantize, transposed=home.transposed)])
                continue
            if place.name not in self.tensors:
                self.tensors[place.name] = torch.empty(self._shapes[place.name], **self._kind)
            self.tensors[place.name][place.part] = part

    def _take_rows(
        self, places: Sequence[StoredPlace], counts: Sequence[int], source: Any, what: str, is_tied_head: bool
    ) -> None:
        """Copy this rank's rows of one stored tensor into its shares.

        Args:
            places: Where its rows go, one place after the other.
            counts: Rows of each.
            source: The tensor in its file.
            what: The tensor, for errors.
            is_tied_head: Whether it is what the embeddings must be equal to.
        """
        begin = 0
        for place, count in zip(places, counts, strict=True):
            own, share = self._shares[place.name]
            if place.part:  # one expert, all of which is one row
                number, *rest = place.part
                assert isinstance(number, int)
                wanted = slice(begin, begin + count if own.start <= number < own.stop else begin)
                target = share[number - own.start, *rest] if wanted.stop > begin else share[:0]
            else:
                wanted, target = slice(begin + own.start, begin + own.stop), share
            begin += count
            rows = _floats(source[wanted], what).to(**self._kind) if wanted.stop > wanted.start else target
            if is_tied_head:
                self.head = rows
                continue
            target.copy_(rows)
            self._seen.add(repr(place))
            size = torch.empty(self._shapes[place.name], device="meta")[place.part].numel()
            self._counts[place.name] = self._counts.get(place.name, 0) + size

    def _unpack(self, stored: str, file: Any, shard: Path) -> None:
        """Read one half of a tensor in MXFP4, and the whole when both are there."""
        name, kind = stored.rpartition("_")[::2]
        halves = self._packed.setdefault(name, {})
        if kind in halves or name not in self._shapes or name in self._counts:
            raise UserError(f"{shard}: tensor {stored[:80]!r} is unexpected, or occurs twice")
        halves[kind] = file.get_tensor(stored)
        if len(halves) < len(PACKED):
            return
        blocks, scales = halves["blocks"], halves["scales"]
        del self._packed[name]
        is_packed = blocks.dtype == scales.dtype == torch.uint8 and blocks.shape[:-1] == scales.shape
        tensor = mxfp4(blocks, scales) if is_packed and blocks.dim() == 4 else torch.empty(0)
        if tensor.shape != self._shapes[name]:
            want = list(self._shapes[name])
            raise UserError(
                f"{shard}: {name[:80]!r} in MXFP4 has shape {list(blocks.shape)}, which gives no {want}"
            )
        self._counts[name] = tensor.numel()
        if self._shares:
            own, share = self._shares[name]
            share.copy_(tensor[own])
        else:
            self.tensors[name] = tensor.to(**self._kind)

    def finish_packs(self, folder: Path) -> None:
        """Put the packed matrices that were read in their places; UserError says what is wrong with one."""
        found: dict[str, dict[int, PackedMatrix]] = {}
        for stored, tensors in self._parts.items():
            if stored in self._scaled:  # not whole: `missing` names it
                continue
            name, _, number = stored.rpartition(".")
            if number.isdecimal() and name in self._homes:
                index = int(number)
            else:
                index, named = 0, (StoredPlace(stored),) if self.is_own else find_places(stored, self._config)
                name = named[0].name if len(named) == 1 and not named[0].part else ""
            home = self._homes.get(name)
            if home is None or (home.is_experts != number.isdecimal()):
                raise UserError(
                    f"{folder}: {stored[:80]!r} is quantised, but belongs to no matrix of this model alone; use the "
                    "folder with bfloat16 or float32 weights, with --policy.quantize nf4"
                )
            if self._config.family == "gpt2" and not self.is_own:
                raise UserError(
                    f"{folder}: bitsandbytes turns GPT-2's matrices; use the folder with float weights"
                )
            shape = self._shapes[name][1:] if home.is_experts else self._shapes[name]
            own = {"transposed": home.transposed, "where": str(folder)}
            packed = read_packed(stored, tensors, shape, **own).to(self._kind["device"])
            found.setdefault(name, {})[index] = packed
            self._counts[name] = self._counts.get(name, 0) + shape.numel()
        for name, packs in found.items():
            if sorted(packs) == list(range(len(packs))) and self._counts[name] == self._shapes[name].numel():
                self._homes[name].pack([packs[index] for index in range(len(packs))])
                self.is_quantized = True
            else:
                self._counts[name] = 0
        self._parts.clear()

    def missing(self) -> list[str]:
        """Return the names of parameters that are not there, or not whole."""
        sizes = {name: shape.numel() for name, shape in self._shapes.items()}
        return sorted(name for name, size in sizes.items() if self._counts.get(name) != size)


@contextmanager
def _opened(shard: Path) -> Iterator[Any]:
    """Open a file of weights; UserError where it is damaged, cut off, or larger than the memory."""
    try:
        with safe_open(str(shard), framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{shard}: not a readable safetensors file ({str(error)[:300]})") from None
    except RuntimeError as error:
        if "unable to mmap" not in str(error):
            raise
        text = "too large for this machine's memory in one file; save the model in files of some GB each"
        raise UserError(f"{shard}: {text} ({str(error)[:300]})") from None


class _Described:
    """An open file whose tensors have shape and dtype, and no numbers."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def get_slice(self, name: str) -> Any:
        """Return a tensor's description, which reads nothing by itself."""
        return self._file.get_slice(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor without numbers."""
        pieces = self._file.get_slice(name)
        kind = pieces.get_dtype()  # F32, BF16, I8, U8, BOOL ...
        whole = {"I": "int", "U": "uint"}.get(kind[0], "") + kind[1:]
        dtype = torch.float32 if kind.startswith(("F", "BF")) else getattr(torch, whole, torch.bool)
        return torch.empty(pieces.get_shape(), dtype=dtype, device="meta")


class _Turned:
    """A tensor of a file, of which rows can be read, with its last two axes exchanged."""

    def __init__(self, pieces: Any) -> None:
        self._pieces = pieces

    def get_shape(self) -> list[int]:
        """Return the shape."""
        rows, *both = self._pieces.get_shape()
        return [rows, *reversed(both)]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Read some rows."""
        return self._pieces[rows].transpose(1, 2)


def _own_parameters(model: LanguageModel) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that a model's files have, by name: all but those of adapters."""
    beside = {id(parameter) for _, side in sides_of(model) for parameter in side.parameters()}
    return [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in beside]


def _floats(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return a tensor, or refuse one that holds no floating-point numbers, or a NaN or infinity."""
    if not tensor.is_floating_point():
        raise UserError(f"{what} is {tensor.dtype}, expected floats")
    if not tensor.is_meta and not is_finite(tensor):
        raise UserError(f"{what} contains NaN or infinity: the file is damaged, or a training diverged")
    return tensor


PACKED = ("_blocks", "_scales")
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return gpt-oss' experts as bfloat16, which holds every value exactly.

    Args:
        blocks: uint8 [E, F, G, 16]: two codes per byte, the first in the low half, 32 of them with one scale.
        scales: uint8 [E, F, G]: exponents of 2, with an offset of 127.

    Returns:
        Weights [E, 32 G, F].

    Source: OCP Microscaling Formats 1.0, section 5.3 (codes E2M1, scales E8M0).
    """
    table = torch.tensor([*FP4, *(-value for value in FP4)], dtype=torch.bfloat16)
    experts = []
    # One at a time: indices take 16 times the codes' memory.
    for block, scale in zip(blocks, scales, strict=True):
        codes = torch.stack((block & 15, block >> 4), dim=-1).flatten(-2)
        values = torch.ldexp(table[codes.long()], scale.to(torch.int32)[..., None] - 127)
        experts.append(values.to(torch.bfloat16).flatten(1).t())
    return torch.stack(experts)


PREPROCESSING = ("preprocessor_config.json", "processor_config.json")
"""Where a folder says how images are made into patches: in a file of its own, or in one of all processors."""


def preprocessing_of(folder: Path, vision: VisionConfig) -> Preprocessing:
    """Read how a folder's model wants its images."""
    for name in PREPROCESSING:
        if (folder / name).is_file():
            data = read_json(folder / name)
            data = data.get("image_processor", data) if name == PREPROCESSING[1] else data
            if not isinstance(data, dict):
                raise UserError(f"{folder / name}: image_processor: expected an object")
            return read_preprocessing(data, vision, str(folder / name))
    return read_preprocessing({}, vision, str(folder))


SAMPLING_DEFAULTS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return how the model's makers sample: chats and servers do so, too, and what is written passes it on."""
    path = folder / "generation_config.json"
    stored = read_json(path) if path.is_file() else {}
    return {name: stored[name] for name in SAMPLING_DEFAULTS if stored.get(name) is not None}


def save_model(
    model: LanguageModel,
    folder: Path,
    *,
    bos_id: int | None = None,
    eos_ids: tuple[int, ...] = (),
    pad_id: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    weights: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
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
        dtype: Dtype of what is written; default: the parameters' own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(model.named_parameters()) if weights is None else weights
    tensors = {name: parameter.detach().to("cpu", dtype) for name, parameter in weights.items()}
    is_quantized = bool(packed_parts(model))
    if not is_quantized:
        tensors = as_stored(tensors, model.config)
    stored_dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    hf = to_hf(model.config, bos_id=bos_id, eos_ids=eos_ids, dtype=stored_dtype, pad_id=pad_id)
    if is_quantized:
        packs = {name: place for name, place in places(model).items() if place.packs}
        size = sum(tensor.nbytes for tensor in tensors.values()) + sum(p.nbytes for p in packed_parts(model))
        for name, place in packs.items():
            for number, packed in enumerate(place.packs):
                tensors |= stored_tensors(f"{name}.{number}" if place.is_experts else name, packed)
        hf["quantization_config"] = _quantization_config(model)
        layers = {name.removesuffix(".weight"): kind_of(place) for name, place in places(model).items()}
        facts = {"layers": layers, "bytes": size, "kl": None}
        (folder / QUANTIZATION).write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n")
    generation = {"bos_token_id": bos_id, "eos_token_id": hf["eos_token_id"]} | model.sampling_defaults
    if model.images is not None and model.images.preprocessing.stored:
        stored = json.dumps(dict(model.images.preprocessing.stored), indent=1) + "\n"
        (folder / PREPROCESSING[0]).write_text(stored)
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
        save_tensors(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    )


def kind_of(place: Place) -> str:
    """Return the kind of a matrix as quantization.json names it."""
    return place.packs[0].kind if place.packs else FULL


def _quantization_config(model: LanguageModel) -> dict[str, Any]:
    """Describe a quantised folder to transformers, which reads it with bitsandbytes if that has all of its parts."""
    kinds = {name.removesuffix(".weight"): kind_of(place) for name, place in places(model).items()}
    is_plain = all(part.columns is None and part.spots is None for part in packed_parts(model))
    is_plain = (
        is_plain and "int8" not in kinds.values() and not any(p.is_experts for p in places(model).values())
    )
    # The folder has the parameters' own names: other programs read it where these are the family's names, too.
    own = {name: parameter.shape for name, parameter in model.named_parameters()}
    own |= {name: place.shape for name, place in places(model).items()}
    own = {name: torch.empty(shape, device="meta") for name, shape in own.items()}
    has_names = as_stored(own, model.config).keys() == own.keys()
    if model.config.family == "gpt2" or not (is_plain and has_names):
        return {"quant_method": "whet"}  # which transformers refuses
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "float32" if model.head_weight.dtype == torch.float32 else "bfloat16",
        "llm_int8_skip_modules": ["lm_head", *(name for name, kind in kinds.items() if kind == FULL)],
    }


def as_reward_model(model: LanguageModel) -> LanguageModel:
    """Return the model with a reward model's head, at first 0, in place of its output head; the rest is shared."""
    if model.config.is_reward:
        return model
    if model.config.vision is not None:
        raise UserError("reward models that see images are not supported; take a model that reads text alone")
    with torch.device("meta"):
        scoring = build_model(replace(model.config, is_reward=True))
    like = model.head_weight
    head = torch.zeros(1, like.shape[1], dtype=like.dtype, device=like.device)
    kept = {name: weight for name, weight in model.named_parameters() if not name.startswith("lm_head.")}
    share_packed(model, scoring)
    kept |= dict(packed_tensors(model))
    scoring.load_state_dict({**kept, "score.weight": head}, strict=True, assign=True)
    _open_to_training(scoring)
    scoring.sampling_defaults, scoring.images = model.sampling_defaults, model.images
    return scoring.eval()


def without_rows(model: LanguageModel, num_rows: int) -> LanguageModel:
    """Return the model with the first `num_rows` rows of its vocabulary; everything else is shared."""
    count = model.config.vocab_size
    with torch.device("meta"):
        cut = build_model(replace(model.config, vocab_size=num_rows))
    sizes = {name: p.shape for name, p in cut.named_parameters()}
    found = {
        name: weight.detach()[:num_rows] if len(weight) == count and sizes[name][0] == num_rows else weight
        for name, weight in model.named_parameters()
    }
    share_packed(model, cut)
    cut.load_state_dict({**found, **dict(packed_tensors(model))}, strict=True, assign=True)
    cut.sampling_defaults, cut.images = model.sampling_defaults, model.images
    return cut.eval()


def resize_vocabulary(model: LanguageModel, num_rows: int, seed: int) -> LanguageModel:
    """Return the model with `num_rows` vocabulary rows; new rows start near the mean of the old ones.

    The noise around that mean is normal, with 0.02 of the old rows' standard deviation.

    Args:
        model: The model; unchanged when it already has at least `num_rows`.
        num_rows: Rows wanted.
        seed: Seed of the noise.
    """
    if num_rows <= model.config.vocab_size:
        return model
    like = next(model.parameters())
    grown = build_model(replace(model.config, vocab_size=num_rows)).to(device=like.device, dtype=like.dtype)
    generator = torch.Generator().manual_seed(seed)
    share_packed(model, grown)
    state = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            source = state[name]
            if source.shape == parameter.shape:
                parameter.copy_(source)
                continue
            old, more = len(source), len(parameter) - len(source)
            noise = torch.empty(more, source.shape[1]).normal_(0, 0.02, generator=generator)
            noise = noise.to(source.device) * source.float().std()
            parameter[:old].copy_(source)
            parameter[old:].copy_(source.float().mean(0) + noise)
    grown.sampling_defaults, grown.images = model.sampling_defaults, model.images
    return grown.eval()
