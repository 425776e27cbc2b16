"""Matrices in 4 or 8 bits in place of dense parameters: products on the dequantised matrix, no gradient of their own.

The tensors are those of bitsandbytes (NF4 with double quantisation; LLM.int8's rows), so that its folders are read and
its tensors dequantise to the same bits. Sampling and training dequantise to the same numbers and multiply by the same
product: a quantised base adds nothing to the difference between sampler and trainer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn

from whet.kernels import dispatch, eager
from whet.kernels.cpu import ops as cpu
from whet.model.config import TOWER
from whet.types import UserError

Kind = Literal["nf4", "int8"]
KINDS: tuple[Kind, ...] = ("nf4", "int8")
FULL = "bf16"
"""Kind of a layer that stays in 16 bits, in quantization.json."""
QUANTIZATION = "quantization.json"
EXCLUDED = ("shared_expert_gate.weight",)
"""Ends of parameters that are never quantised, though they are linear layers inside of the decoder."""
LEVELS = 127


class Spots(NamedTuple):
    """Single weights that stay exact: super weights.

    Attributes:
        places: Places in the flattened matrix, int64.
        values: Float32.
    """

    places: torch.Tensor
    values: torch.Tensor


class PackedMatrix(nn.Module):
    """A matrix in 4 or 8 bits.

    Args:
        kind: nf4 (blocks of 64 along the flattened matrix), or int8 (symmetric, a scale per row).
        shape: Of the matrix as it is stored.
        codes: NF4: two codes per uint8, padded to a whole block; int8: the matrix.
        absmax: Largest magnitude of each block or row; NF4: 8-bit codes when doubly quantised.
        scale: Of a doubly quantised `absmax`; else None.
        offset: Of a doubly quantised `absmax`; else None.
        columns: Factors by which columns were multiplied before they were rounded (AWQ); None for none.
        spots: Weights that stay exact.
        transposed: Whether the matrix is stored [in, out].
    """

    def __init__(
        self,
        kind: Kind,
        shape: tuple[int, ...],
        codes: torch.Tensor,
        absmax: torch.Tensor,
        scale: torch.Tensor | None = None,
        offset: torch.Tensor | None = None,
        *,
        columns: torch.Tensor | None = None,
        spots: Spots | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.shape, self.transposed = torch.Size(shape), transposed
        self.codes: torch.Tensor
        self.absmax: torch.Tensor
        self.scale: torch.Tensor | None
        self.offset: torch.Tensor | None
        self.columns: torch.Tensor | None
        self.spots: torch.Tensor | None
        self.spot_values: torch.Tensor | None
        self.register_buffer("codes", codes)
        self.register_buffer("absmax", absmax)
        self.register_buffer("scale", scale)
        self.register_buffer("offset", offset)
        self.register_buffer("columns", columns)
        self.register_buffer("spots", None if spots is None else spots.places)
        self.register_buffer("spot_values", None if spots is None else spots.values)
        self._kept: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        kind: Kind,
        *,
        columns: torch.Tensor | None = None,
        spots: torch.Tensor | None = None,
        transposed: bool = False,
        double: bool = True,
    ) -> PackedMatrix:
        """Round a matrix to the nearest codes.

        Args:
            weight: The matrix.
            kind: How.
            columns: Factors of its columns for the rounding.
            spots: Places in the flattened matrix that stay exact, and do not widen the range of their block.
            transposed: Whether it is stored [in, out].
            double: NF4: quantise the blocks' absmax, too.
        """
        full = weight.detach()
        scaled = full if columns is None else full.float() * columns
        kept = None
        if spots is not None and spots.numel():
            kept = Spots(spots, full.reshape(-1)[spots].float())
            scaled = scaled.clone()
            scaled.view(-1)[spots] = 0
        if kind == "nf4":
            found = eager.nf4_quantize(scaled, double=double)
            parts = found.codes, found.absmax, found.scale, found.offset
        else:
            absmax = scaled.float().abs().amax(-1)
            steps = scaled.float() * (LEVELS / absmax.masked_fill(absmax == 0, 1.0))[:, None]
            parts = steps.round().to(torch.int8), absmax, None, None
        return cls(kind, tuple(full.shape), *parts, columns=columns, spots=kept, transposed=transposed)

    @property
    def nbytes(self) -> int:
        """Its size in bytes, without a kept dense copy."""
        return sum(tensor.nbytes for tensor in self.buffers())

    @property
    def exact(self) -> Spots | None:
        """The weights that stay exact; None for none."""
        if self.spots is None or self.spot_values is None:
            return None
        return Spots(self.spots, self.spot_values)

    @property
    def is_kept(self) -> bool:
        """Whether a dense copy is kept."""
        return self._kept is not None

    def keep(self, dtype: torch.dtype | None) -> None:
        """Keep a dense copy in some dtype for the products that follow; None drops it."""
        self._kept = None
        if dtype is not None:
            self._kept = self.dense(dtype)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix that the codes stand for, computed in float32 and rounded once."""
        if self._kept is not None and self._kept.dtype == dtype:
            return self._kept
        # The kernels' panels ask for a version counter, which inference mode's tensors have not.
        with torch.inference_mode(False), torch.no_grad():
            return self._dequantized(dtype)

    def _dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        is_plain = self.columns is None and self.spots is None
        first = dtype if is_plain else torch.float32
        if self.kind == "nf4":
            stored = eager.NF4(self.codes, self.absmax, self.scale, self.offset, tuple(self.shape))
            values = dispatch.run(eager.nf4_dequantize, stored, first)
        else:
            values = (self.codes.float() * self.absmax[:, None] * (1 / LEVELS)).to(first)
        if is_plain:
            return values
        if self.columns is not None:
            values /= self.columns
        if self.spots is not None and self.spot_values is not None:
            values.view(-1)[self.spots] = self.spot_values
        return values.to(dtype)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x @ matrix.T + bias; the gradient of x is computed from the matrix dequantised once more."""
        needs_grad = x.requires_grad or (bias is not None and bias.requires_grad)
        if needs_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _Product.apply(x, bias, self)  # pyright: ignore[reportReturnType]
        return self._product(x, bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        device = x.device.type
        is_cast = torch.is_autocast_enabled(device)
        weight = self.dense(torch.get_autocast_dtype(device) if is_cast else x.dtype)
        return dispatch.run(eager.linear, x, weight, bias, transposed=self.transposed)

    def extra_repr(self) -> str:
        """Describe it."""
        return f"{self.kind}, {list(self.shape)}"


class _Product(torch.autograd.Function):
    """A product that saves neither its input nor the dense matrix."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, packed: PackedMatrix) -> torch.Tensor:
        ctx.packed, ctx.dtype = packed, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return packed._product(x, bias)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad, packed = upstream[0], cast(PackedMatrix, ctx.packed)
        needs_x, needs_bias = ctx.needs_input_grad[:2]
        grad_x = grad_bias = None
        if needs_x:
            weight = packed.dense(grad.dtype)
            grad_x = cpu.matmul(grad, weight.t() if packed.transposed else weight).to(ctx.dtype)
        if ctx.bias_dtype is not None and needs_bias:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return grad_x, grad_bias, None


# A model's matrices by the names of their parameters. A linear layer has `weight` or `packed`; the weights of experts
# have a list of packed matrices, one for each expert, in the dictionary `packed`.


class Place(NamedTuple):
    """Where a matrix, or those of experts, is in a model.

    Attributes:
        owner: The module that has it.
        leaf: Its name there.
    """

    owner: nn.Module
    leaf: str

    @property
    def weight(self) -> torch.Tensor | None:
        """The dense parameter; None if it is packed."""
        return getattr(self.owner, self.leaf)

    @property
    def packs(self) -> list[PackedMatrix]:
        """The packed matrix, or one for each expert; empty if it is dense."""
        held = self.owner.packed
        if isinstance(held, PackedMatrix):
            return [held]
        if isinstance(held, nn.ModuleDict) and self.leaf in held:
            return [part for part in held[self.leaf].modules() if isinstance(part, PackedMatrix)]
        return []

    @property
    def transposed(self) -> bool:
        """Whether matrices are stored [in, out]."""
        return bool(self.owner.transposed)

    @property
    def shape(self) -> torch.Size:
        """Its shape: [F, D], or [E, F, D] of experts."""
        if self.weight is not None:
            return self.weight.shape
        packs = self.packs
        return torch.Size((len(packs), *packs[0].shape)) if self.is_experts else packs[0].shape

    @property
    def is_experts(self) -> bool:
        """Whether there is a matrix for each expert."""
        return isinstance(self.owner.packed, nn.ModuleDict)

    def matrices(self) -> list[torch.Tensor]:
        """Return the dense matrix, or those of the experts, which share the parameter's memory."""
        if self.weight is not None:
            return list(self.weight) if self.is_experts else [self.weight]
        return [part.dense(torch.float32) for part in self.packs]

    def pack(self, packs: list[PackedMatrix]) -> None:
        """Put packed matrices in place of the parameter."""
        setattr(self.owner, self.leaf, None)
        if isinstance(self.owner.packed, nn.ModuleDict):
            self.owner.packed[self.leaf] = nn.ModuleList(packs)
        else:
            (self.owner.packed,) = packs

    def unpack(self, dtype: torch.dtype) -> None:
        """Put a dense parameter back in place of packed matrices."""
        dense = [part.dense(dtype) for part in self.packs]
        self.set(nn.Parameter(torch.stack(dense) if self.is_experts else dense[0]))

    def set(self, weight: torch.Tensor | None) -> None:
        """Put a dense parameter in place of whatever is there."""
        held = self.owner.packed
        if not isinstance(held, nn.ModuleDict):
            setattr(self.owner, "packed", None)  # noqa: B010 (the type checker knows no None among modules)
        elif self.leaf in held:
            del held[self.leaf]
        setattr(self.owner, self.leaf, weight)


def packed_size(kind: Kind, shape: torch.Size) -> int:
    """Return the bytes of a packed matrix without exact weights or scaled columns."""
    if kind == "int8":
        return shape.numel() + 4 * shape[0]
    num_blocks = -(-shape.numel() // eager.NF4_BLOCK)
    return num_blocks * (eager.NF4_BLOCK // 2 + 1) + 4 * -(-num_blocks // eager.SCALE_BLOCK) + 4


def places(model: nn.Module) -> dict[str, Place]:
    """Return the matrices of a decoder's layers that can be quantised, by the names of their parameters.

    Embeddings, heads, norms, biases, routers and what turns images into embeddings are not among them.
    """
    found: dict[str, Place] = {}
    for name, module in model.named_modules():
        is_layer = ".layers." in f".{name}" or ".h." in f".{name}"
        if not is_layer or name.startswith(TOWER):
            continue
        if not hasattr(module, "packed"):
            continue
        leaves = ("gate_up_proj", "down_proj") if isinstance(module.packed, nn.ModuleDict) else ("weight",)
        found |= {f"{name}.{leaf}": Place(module, leaf) for leaf in leaves}
    return {name: place for name, place in found.items() if not name.endswith(EXCLUDED)}


def packed_parts(model: nn.Module) -> list[PackedMatrix]:
    """Return all packed matrices of a model; empty if it is not quantised."""
    return [module for module in model.modules() if isinstance(module, PackedMatrix)]


def quantize(model: nn.Module, kind: Kind) -> None:
    """Round all matrices of a decoder's layers, in place."""
    for place in places(model).values():
        if place.weight is not None:
            packs = [PackedMatrix.of(part, kind, transposed=place.transposed) for part in place.matrices()]
            place.pack(packs)


def dequantize(model: nn.Module, dtype: torch.dtype) -> None:
    """Make all matrices of a model dense again, in place: the one way to the weights of a quantised model."""
    for place in places(model).values():
        if place.packs:
            place.unpack(dtype)


def share_packed(source: nn.Module, target: nn.Module) -> None:
    """Give a model of the same layers the packed matrices of another one; both then share them."""
    own = places(target)
    for name, place in places(source).items():
        if place.packs:
            own[name].pack(place.packs)


def packed_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all packed matrices by name: with the parameters, all of a model's numbers."""
    for name, module in model.named_modules():
        if isinstance(module, PackedMatrix):
            yield from ((f"{name}.{leaf}", tensor) for leaf, tensor in module.named_buffers())


ROOM_SHARE = 0.5
"""Share of the free memory that dense copies may take: the cache of keys and values comes after them."""


@contextmanager
def dense_copies(model: nn.Module, dtype: torch.dtype, room: int | None = None) -> Iterator[None]:
    """Keep dense copies of packed matrices within this context, first layer to last, as memory allows.

    A rollout multiplies by each matrix thousands of times; dequantising it takes as long as a product of some 100
    rows.

    Args:
        model: The model.
        dtype: Dtype of the products.
        room: Bytes that the copies may take; default: half of what is free.
    """
    parts = [part for part in packed_parts(model) if not part.is_kept]
    if not parts:
        yield
        return
    left = int(ROOM_SHARE * free_bytes(parts[0].codes.device)) if room is None else room
    # On a CPU the kernels' panels are another copy.
    number = dtype.itemsize * (2 if parts[0].codes.device.type == "cpu" else 1)
    try:
        for part in parts:
            left -= number * part.shape.numel()
            if left < 0:
                break
            part.keep(dtype)
        yield
    finally:
        for part in parts:
            part.keep(None)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that are free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


# On disk: bitsandbytes' tensors under its names, and three of our own.

STATE = "quant_state.bitsandbytes__nf4"
NF4_TENSORS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE)
OWN_TENSORS = ("spots", "spot_values", "columns")
INT8_TENSORS = ("SCB", "weight_format")


def stored_tensors(name: str, packed: PackedMatrix) -> dict[str, torch.Tensor]:
    """Return what is written of a packed matrix, by bitsandbytes' names.

    Args:
        name: Name of its parameter, such as 'model.layers.0.self_attn.q_proj.weight'.
        packed: The matrix.
    """
    found: dict[str, torch.Tensor | None] = {}
    if packed.kind == "nf4":
        device = packed.codes.device
        facts: dict[str, Any] = {"quant_type": "nf4", "blocksize": eager.NF4_BLOCK}
        facts |= {"dtype": "bfloat16", "shape": list(packed.shape)}
        if packed.offset is not None:
            facts |= {"nested_blocksize": eager.SCALE_BLOCK, "nested_dtype": "float32"}
            facts["nested_offset"] = packed.offset.item()
            found[f"{name}.nested_absmax"] = packed.scale
            found[f"{name}.nested_quant_map"] = eager.dynamic_table(device)
        found[name] = packed.codes[: (packed.shape.numel() + 1) // 2, None]
        found[f"{name}.absmax"], found[f"{name}.quant_map"] = packed.absmax, eager.nf4_table(device)
        found[f"{name}.{STATE}"] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    else:
        module = name.removesuffix(".weight")
        found[name], found[f"{module}.SCB"] = packed.codes, packed.absmax
        found[f"{module}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    found |= {f"{name}.{leaf}": getattr(packed, leaf) for leaf in OWN_TENSORS}
    return {key: value.cpu().contiguous().clone() for key, value in found.items() if value is not None}


def part_of(stored: str, dtype: str) -> tuple[str, str] | None:
    """Say which packed matrix a stored tensor belongs to, and as what; None for a dense tensor.

    Args:
        stored: Its name.
        dtype: Its dtype as safetensors writes it.
    """
    for leaf in (*NF4_TENSORS, *OWN_TENSORS):
        if stored.endswith(f".{leaf}"):
            return stored.removesuffix(f".{leaf}"), leaf
    for leaf in INT8_TENSORS:
        if stored.endswith(f".{leaf}"):
            return f"{stored.removesuffix(leaf)}weight", leaf
    return (stored, "codes") if dtype in ("U8", "I8") else None


def is_finite(tensor: torch.Tensor) -> bool:
    """Say whether a floating-point tensor has neither NaN nor infinity."""
    # A sum reads the tensor once (30 times faster than isfinite on a CPU), and keeps every NaN and infinity; an
    # overflow of finite numbers is told apart by the second look.
    total = tensor.sum(dtype=torch.float32 if tensor.itemsize == 1 else None)
    return bool(total.isfinite()) or bool(tensor.float().isfinite().all())


def read_packed(
    name: str, tensors: Mapping[str, torch.Tensor], shape: torch.Size, *, transposed: bool, where: str
) -> PackedMatrix:
    """Put a packed matrix together from what `part_of` told apart.

    Args:
        name: Its parameter's name.
        tensors: Its stored tensors.
        shape: As the model has it.
        transposed: Whether it is stored [in, out].
        where: File, for errors.

    Raises:
        UserError: If parts are missing, or of another shape or form.
    """
    what = f"{where}: {name[:80]!r}"
    if not all(is_finite(part) for part in tensors.values() if part.is_floating_point()):
        raise UserError(f"{what}: its scales contain NaN or infinity: the file is damaged")
    codes = tensors.get("codes")
    if codes is None:
        raise UserError(f"{what}: its quantisation is stored without its codes")
    spots = None
    if "spots" in tensors or "spot_values" in tensors:
        spots = _read_spots(tensors, shape, what)
    columns = tensors.get("columns")
    if columns is not None and (columns.dtype != torch.float32 or columns.shape != shape[-1:]):
        raise UserError(
            f"{what}: columns has shape {list(columns.shape)}, expected float32 {list(shape[-1:])}"
        )
    own = {"columns": columns, "spots": spots, "transposed": transposed}
    if codes.dtype == torch.int8:
        rows = tensors.get("SCB")
        if codes.shape != shape or rows is None or rows.shape != shape[:1] or rows.dtype != torch.float32:
            raise UserError(f"{what}: int8 codes {list(codes.shape)} and their SCB do not give {list(shape)}")
        if int(tensors.get("weight_format", torch.tensor(0))) != 0:
            raise UserError(f"{what}: int8 weights that are not stored by rows; save the model again")
        return PackedMatrix("int8", tuple(shape), codes, rows, **own)
    return PackedMatrix("nf4", tuple(shape), *_read_nf4(codes, tensors, shape, what), **own)


def _read_nf4(
    codes: torch.Tensor, tensors: Mapping[str, torch.Tensor], shape: torch.Size, what: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Check the tensors of NF4 and return codes, absmax, scale and offset."""
    if STATE not in tensors:
        raise UserError(f"{what}: 4-bit codes without {STATE}; whet reads NF4 and int8 of bitsandbytes")
    try:
        facts = json.loads(bytes(tensors[STATE].tolist()))
        got = facts["quant_type"], facts["blocksize"], tuple(facts["shape"])
        offset = facts.get("nested_offset")
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{what}: {STATE} is malformed") from None
    if got != ("nf4", eager.NF4_BLOCK, tuple(shape)):
        raise UserError(f"{what} is {got}, expected ('nf4', {eager.NF4_BLOCK}, {tuple(shape)})")
    num_blocks = -(-shape.numel() // eager.NF4_BLOCK)
    flat, absmax = codes.reshape(-1), tensors.get("absmax")
    if codes.dtype != torch.uint8 or flat.numel() != (shape.numel() + 1) // 2:
        raise UserError(f"{what}: {codes.numel()} {codes.dtype} codes do not give {list(shape)}")
    padding = num_blocks * eager.NF4_BLOCK // 2 - flat.numel()
    flat = torch.nn.functional.pad(flat, (0, padding), value=0x77)  # twice the code of zero
    if absmax is None or absmax.shape != (num_blocks,):
        raise UserError(f"{what}: absmax is missing, or not one number for each of {num_blocks} blocks")
    if not torch.equal(tensors.get("quant_map", torch.empty(0)), eager.nf4_table(torch.device("cpu"))):
        raise UserError(f"{what}: quant_map is not NF4's")
    if offset is None:
        return flat, absmax.float(), None, None
    scale, table = tensors.get("nested_absmax"), tensors.get("nested_quant_map")
    is_known = table is not None and torch.equal(table, eager.dynamic_table(torch.device("cpu")))
    if not is_known or scale is None or scale.shape != (-(-num_blocks // eager.SCALE_BLOCK),):
        raise UserError(f"{what}: nested_absmax or nested_quant_map are missing, or of another kind")
    if absmax.dtype != torch.uint8 or facts.get("nested_blocksize") != eager.SCALE_BLOCK:
        raise UserError(f"{what}: absmax is {absmax.dtype} in blocks of {facts.get('nested_blocksize')}")
    return flat, absmax, scale.float(), torch.tensor(float(offset))


def _read_spots(tensors: Mapping[str, torch.Tensor], shape: torch.Size, what: str) -> Spots:
    index, values = tensors.get("spots"), tensors.get("spot_values")
    is_right = index is not None and values is not None and index.dtype == torch.int64
    if not is_right or index.shape != values.shape or index.dim() != 1:  # pyright: ignore[reportOptionalMemberAccess]
        raise UserError(f"{what}: spots and spot_values are not int64 places and as many numbers")
    assert index is not None
    assert values is not None
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < shape.numel():
        raise UserError(f"{what}: spots has places outside of {list(shape)}")
    return Spots(index, values.float())


# torchao's tensors, as transformers stores them: parts by name, and what they are in the file's metadata.

TORCHAO_TYPES = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")
"""Those with a plain layout: a code for each weight, and a scale (and zero) for each block of a row."""
TORCHAO_CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


class BlockScaled(NamedTuple):
    """What a file's metadata says of one of torchao's tensors.

    Attributes:
        kind: Its class there; 'activations' for one that rounds its inputs, too.
        leaves: Its parts.
        block: Weights with one scale, along each axis.
    """

    kind: str
    leaves: tuple[str, ...]
    block: tuple[int, ...]

    @staticmethod
    def part_name(name: str, leaf: str) -> str:
        """Return the stored name of a part."""
        owner, _, own = name.rpartition(".")
        return f"{owner}._{own}_{leaf}"


def read_torchao_metadata(metadata: Mapping[str, str], where: str) -> dict[str, BlockScaled]:
    """Read which tensors of a file are torchao's, by their parameters' names.

    Raises:
        UserError: If one is of a kind whose numbers whet does not read, or rounds activations, too.

    Source: torchao 0.18, prototype/safetensors/safetensors_support.py.
    """
    found: dict[str, BlockScaled] = {}
    try:
        described = {str(name): json.loads(metadata[name]) for name in json.loads(metadata["tensor_names"])}
        for name, facts in described.items():
            if facts["_type"] in ("Tensor", "Parameter"):
                continue
            data, leaves = facts["_data"], tuple(map(str, facts["_tensor_data_names"]))
            block = tuple(map(int, data["block_size"])) if facts["_type"] in TORCHAO_TYPES else ()
            rounds = any(key.startswith("act") and data[key] is not None for key in data)
            rounds |= any(leaf.startswith("act") for leaf in leaves)
            found[name] = BlockScaled("activations" if rounds else str(facts["_type"]), leaves, block)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{where}: torchao's metadata is missing or malformed; save the model again"
        ) from None
    for name, kind in found.items():
        if kind.kind == "activations":
            raise UserError(
                f"{where}: {name[:80]!r} rounds or scales its inputs, too, which whet does not; quantise weights only "
                "(torchao's Int8WeightOnlyConfig, IntxWeightOnlyConfig, Float8WeightOnlyConfig)"
            )
        if kind.kind not in TORCHAO_TYPES:
            raise UserError(
                f"{where}: {name[:80]!r} is torchao's {kind.kind[:40]}, which whet does not read (it reads "
                f"{', '.join(TORCHAO_TYPES)}); use the folder with float weights"
            )
    return found


def read_block_scaled(
    name: str, kind: BlockScaled, tensors: Mapping[str, torch.Tensor], where: str
) -> PackedMatrix | torch.Tensor:
    """Return the matrix of torchao's parts: (code - zero) x scale; symmetric int8 by rows stays in 8 bits.

    Args:
        name: Its parameter's name.
        kind: What the metadata says.
        tensors: Its parts.
        where: File, for errors.

    Returns:
        The packed matrix, or a float32 tensor.

    Raises:
        UserError: If parts are missing, or of another shape or dtype.
    """
    what = f"{where}: {name[:80]!r}"
    missing = [leaf for leaf in ("qdata", "scale", *kind.leaves) if leaf not in tensors]
    if missing:
        raise UserError(f"{what}: {missing[0]} is missing")
    codes, scale, zero = tensors["qdata"], tensors["scale"], tensors.get("zero_point")
    is_right = codes.dtype in TORCHAO_CODES and scale.is_floating_point() and len(kind.block) == codes.dim()
    if not is_right or any(b < 1 or n % b for n, b in zip(codes.shape, kind.block, strict=True)):
        raise UserError(
            f"{what}: {codes.dtype} {list(codes.shape)} in blocks of {list(kind.block)} is not torchao's"
        )
    blocks = [n // b for n, b in zip(codes.shape, kind.block, strict=True)]
    if list(scale.shape) != blocks or (zero is not None and list(zero.shape) != blocks):
        raise UserError(f"{what}: scale or zero_point has not the shape {blocks}")
    is_by_rows = codes.dtype == torch.int8 and codes.dim() == 2 and blocks == [codes.shape[0], 1]
    if is_by_rows and (zero is None or not zero.any()):
        return PackedMatrix("int8", tuple(codes.shape), codes, scale[:, 0].float() * LEVELS)
    values = codes.float()
    for axis, size in enumerate(kind.block):
        scale = scale.repeat_interleave(size, axis)
        zero = None if zero is None else zero.repeat_interleave(size, axis)
    return (values if zero is None else values - zero.float()) * scale.float()
