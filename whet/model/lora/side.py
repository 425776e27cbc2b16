"""Adapters beside frozen weights: the one code by which they are trained, sampled and scored.

Merging them into 16-bit weights would round away most of what an adapter has learned at first, so they never are, while
they train. A layer with a `side` returns W x + scaling B (A x), the second term in float32 whatever W is.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import nn

from whet.config import closest
from whet.kernels import dispatch, eager
from whet.model.config import TOWER
from whet.model.experts import ExpertWeights
from whet.model.gpt2 import Conv1D
from whet.model.parts import Linear
from whet.model.quant import Place
from whet.model.transformer import LanguageModel
from whet.types import UnreadError, UserError

ALL_LINEAR = "all-linear"
EXPERT_SIDES = {"gate_up_proj": "gate_up_side", "down_proj": "down_side"}
"""Attribute of `ExpertWeights` that holds the adapter of a parameter."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters, trained in place of the weights, which stay as they are."""

    rank: int = 0
    """Rank of the adapters; 0 (default) trains the weights themselves."""
    alpha: float | None = None
    """An adapter's product is multiplied by alpha / rank; None: 2 x rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, which suits high ranks."""
    dora: bool = False
    """Also train the length of each row of W + B A apart from its direction; slower."""
    lr_ratio: float = 1.0
    """Learning rate of B over that of A, which is optim.lr (LoRA+; 16 is usual)."""
    init: Literal["default", "pissa"] = "default"
    """default: B starts at 0; pissa: A and B start as the largest singular vectors of the weight (minutes for a large
    model)."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """What gets an adapter: all-linear (the layers' matrices; not experts', head and embeddings), ends of names such as
    q_proj or experts.down_proj, or patterns such as *.self_attn.*. Of the tower of a model with images only what is
    named from its beginning: visual.*, visual.blocks.*.attn.qkv."""
    layers: str = ""
    """Layers that get one, the first being 0: such as 8-15 or 0,4-7; empty for all."""
    modules_to_save: tuple[str, ...] = ()
    """Ends of names of modules that are trained whole and kept with the adapter, such as embed_tokens or norm."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"lora.rank = {self.rank}: expected 0 (no adapter) or more")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ValueError(
                f"lora.alpha = {self.alpha}: expected a finite number above 0, or None for 2 x rank"
            )
        if not 0 < self.lr_ratio < math.inf:
            raise ValueError(f"lora.lr_ratio = {self.lr_ratio}: expected a finite number above 0")
        if not self.targets:
            raise ValueError("lora.targets is empty: expected all-linear, or ends of names such as q_proj")
        _ranges(self.layers)
        for name, item in type(self).__dataclass_fields__.items():
            if not self.rank and getattr(self, name) != item.default:
                raise UnreadError(f"lora.{name} is read with lora.rank above 0 only; leave it out", name)

    @property
    def scale(self) -> float:
        """The alpha in force."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


def _ranges(text: str) -> list[tuple[int, int]]:
    """Read `0,4-7` as first and last layers."""
    found = []
    for part in filter(None, text.split(",")):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f"lora.layers = {text!r}: expected numbers and ranges such as 8-15 or 0,4-7")
        found.append((int(first), int(last or first)))
    return found


class Layer(Protocol):
    """A layer that an adapter stands beside: `Linear` or `Conv1D`."""

    @property
    def bias(self) -> torch.Tensor | None:
        """What is added to the product."""
        ...

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        """Return the product with the weight alone, plus the bias."""
        ...

    def matrix(self) -> torch.Tensor:
        """Return the weight [out, in]."""
        ...


class Side(nn.Module):
    """What stands beside a linear layer: scaling B A, and with DoRA the length of each row of the sum.

    Args:
        a_RD: Matrix [R, in], float32 (float64 for a float64 model).
        b_FR: Matrix [out, R].
        scaling: Factor of their product.
        magnitude_F: DoRA's lengths; None for plain LoRA.
        start: A frozen adapter that is subtracted: where A and B started, if that was not zero.
        lr_ratio: Learning rate of B over that of the rest.

    Source: LoRA 2106.09685 equation 3; DoRA 2402.09353 equation 5, where gradients do not pass through the norm
    (section 4.3); LoRA+ 2402.12354. PiSSA 2404.02948 takes the start out of the weight; here the weight stays as it is
    and the start is subtracted beside it, which is the same function.
    """

    def __init__(
        self,
        a_RD: torch.Tensor,
        b_FR: torch.Tensor,
        scaling: float,
        *,
        magnitude_F: torch.Tensor | None = None,
        start: Side | None = None,
        lr_ratio: float = 1.0,
    ) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(a_RD), nn.Parameter(b_FR)
        self.scaling, self.lr_ratio = scaling, lr_ratio
        self.magnitude = None if magnitude_F is None else nn.Parameter(magnitude_F)
        self.start = start
        self._norm: tuple[tuple[int, ...], torch.Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is one low-rank product, which the compiled decoding step knows."""
        return self.magnitude is None and self.start is None

    def forward(self, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Return the layer's output with the adapter.

        Args:
            x: Input [..., in].
            layer: The layer.
        """
        if self.magnitude is None:
            return self.added(x, layer.product(x, layer.bias))
        y = self.added(x, layer.product(x, None))
        out = y.to(self.magnitude.dtype) * (self.magnitude / self._lengths(layer))
        return (out if layer.bias is None else out + layer.bias).to(y.dtype)

    def added(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return a product y of x with what the adapter adds, DoRA's lengths left out."""
        if self.start is not None:
            y = self.start.added(x, y)
        return dispatch.run(eager.low_rank, x, y, self.lora_A, self.lora_B, self.scaling)

    def delta(self) -> torch.Tensor:
        """Return scaling B A [out, in], less the start."""
        own = self.scaling * (self.lora_B @ self.lora_A)
        return own if self.start is None else own + self.start.delta()

    def _lengths(self, layer: Layer) -> torch.Tensor:
        """Return the lengths of the rows of W + scaling B A; computed again only where one of them has changed."""
        weight = layer.matrix()
        tensors = (weight, self.lora_A, self.lora_B)
        key = tuple(number for t in tensors for number in (t.data_ptr(), t._version))
        if self._norm is None or self._norm[0] != key:
            # The sampler may compute it in inference mode, and training then reads it.
            with torch.inference_mode(False), torch.no_grad():
                whole = weight.to(self.lora_A.dtype) + self.delta()
                self._norm = key, torch.linalg.vector_norm(whole, dim=1)
        return self._norm[1]

    def set_start(self, layer: Layer) -> None:
        """Let DoRA's lengths start as those of the layer's weight, so that nothing changes at first."""
        assert self.magnitude is not None
        with torch.no_grad():
            self.magnitude.copy_(self._lengths(layer))


class ExpertSide(nn.Module):
    """What stands beside one parameter of all experts, in peft's layout: A has the experts one below the other, in B
    the ranks' columns hold one of each expert.

    Args:
        a_XD: Matrix [R x E, in].
        b_FX: Matrix [out, R x E].
        scaling: Factor of their product.
        count: Experts E.
        start: As for `Side`.
        lr_ratio: Learning rate of B over that of A.
    """

    magnitude: None = None
    is_plain = False

    def __init__(
        self,
        a_XD: torch.Tensor,
        b_FX: torch.Tensor,
        scaling: float,
        *,
        count: int,
        start: ExpertSide | None = None,
        lr_ratio: float = 1.0,
    ) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(a_XD), nn.Parameter(b_FX)
        self.scaling, self.count, self.lr_ratio, self.start = scaling, count, lr_ratio, start

    def forward(self, expert: int, x_ND: torch.Tensor, y_NF: torch.Tensor) -> torch.Tensor:
        """Return an expert's product with what the adapter adds."""
        if self.start is not None:
            y_NF = self.start(expert, x_ND, y_NF)
        a_RD, b_FR = self.of(expert)
        return eager.low_rank(x_ND, y_NF, a_RD, b_FR, self.scaling)

    def of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [R, in] and B [out, R] of one expert."""
        rank = self.lora_A.shape[0] // self.count
        return self.lora_A[expert * rank : (expert + 1) * rank], self.lora_B[:, expert :: self.count]


Beside = Side | ExpertSide
"""An adapter of one weight."""


@dataclass(frozen=True, slots=True)
class Target:
    """A weight that has, or may get, an adapter.

    Attributes:
        name: Name of the module; for experts of the parameter.
        module: The module.
        attribute: Attribute of the module that holds the adapter.
    """

    name: str
    module: nn.Module
    attribute: str = "side"

    @property
    def side(self) -> Beside | None:
        """The adapter that is there."""
        return getattr(self.module, self.attribute)

    def set(self, side: Beside | None) -> None:
        """Put an adapter there, or take it off."""
        setattr(self.module, self.attribute, side)

    @property
    def is_expert(self) -> bool:
        """Whether it is a parameter of experts."""
        return self.attribute != "side"

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is stored [..., in, out]."""
        if isinstance(self.module, ExpertWeights):
            return self.module.is_clamped
        return isinstance(self.module, Conv1D)

    @property
    def place(self) -> Place:
        """The weight, dense or packed."""
        return Place(self.module, self.name.rpartition(".")[2] if self.is_expert else "weight")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        rows, columns = self.place.shape[-2:]
        return (columns, rows) if self.is_transposed else (rows, columns)

    @property
    def count(self) -> int:
        """Experts; 1 for other weights."""
        return self.place.shape[0] if self.is_expert else 1

    @property
    def kind(self) -> dict[str, Any]:
        """Device and dtype of an adapter's matrices: float32, or float64 beside float64."""
        weight, packs = self.place.weight, self.place.packs
        if weight is None:
            return {"device": packs[0].codes.device, "dtype": torch.float32}
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return {"device": weight.device, "dtype": wide}

    def matrices(self) -> list[torch.Tensor]:
        """Return the weight as matrices [out, in]: one for each expert; dequantised where it is packed."""
        each = [matrix.detach() for matrix in self.place.matrices()]
        return [matrix.t() if self.is_transposed else matrix for matrix in each]


def targets_of(model: LanguageModel) -> list[Target]:
    """List the weights that may get an adapter: the layers' matrices in the modules' order, and a tower's."""
    prefix = next(name for name, module in model.named_modules() if module is model.layers)
    found: list[Target] = []
    for name, module in model.layers.named_modules(prefix=prefix):
        if isinstance(module, Linear | Conv1D):
            found.append(Target(name, module))
        elif isinstance(module, ExpertWeights):
            found += [Target(f"{name}.{part}", module, side) for part, side in EXPERT_SIDES.items()]
    if model.config.vision is not None:
        tower = model.get_submodule(TOWER[:-1]).named_modules(prefix=TOWER[:-1])
        found += [Target(name, module) for name, module in tower if isinstance(module, Linear)]
    return found


def sides_of(model: LanguageModel) -> Iterator[tuple[Target, Beside]]:
    """Yield the adapters that stand in a model, with their places."""
    for target in targets_of(model):
        if target.side is not None:
            yield target, target.side


def with_tower(config: LoRAConfig) -> LoRAConfig:
    """Return a config that gives a tower adapters, too, unless it names matrices of one already."""
    if not config.rank or any(text.startswith(TOWER) for text in config.targets):
        return config
    return replace(config, targets=(*config.targets, f"{TOWER}*"))


def choose(model: LanguageModel, config: LoRAConfig) -> list[Target]:
    """Find the weights that get an adapter.

    Raises:
        UserError: If a target or the range of layers matches nothing.
    """
    every = targets_of(model)
    prefix = len(next(name for name, module in model.named_modules() if module is model.layers)) + 1
    wanted = _ranges(config.layers)
    count = len(model.layers)
    if bad := [last for _, last in wanted if last >= count]:
        raise UserError(f"lora.layers = {config.layers}: the model has layers 0 to {count - 1}, not {bad[0]}")
    within = [
        target
        for target in every
        if not wanted
        or target.name.startswith(TOWER)
        or any(first <= int(target.name[prefix:].partition(".")[0]) <= last for first, last in wanted)
    ]
    chosen: set[str] = set()
    for text in config.targets:
        found = {target.name for target in within if _matches(text, target)}
        if not found:
            decoder = [target.name for target in within if not target.name.startswith(TOWER)]
            ends = sorted({name.rpartition(".")[2] for name in decoder})
            near = closest(text, ends)
            hint = f"did you mean {near!r}? " if near else ""
            special = ""
            if text in ("lm_head", "embed_tokens", "wte"):
                special = " (head and embeddings are trained whole: lora.modules_to_save)"
            raise UserError(
                f"lora.targets: {text!r} matches no matrix of the layers{special}; {hint}"
                f"expected {ALL_LINEAR}, a pattern, or ends of names: {', '.join(ends)}"
            )
        chosen |= found
    if config.dora and (expert := next((t for t in within if t.name in chosen and t.is_expert), None)):
        raise UserError(
            f"lora.dora: {expert.name} belongs to experts, which DoRA does not know; leave one of them out"
        )
    return [target for target in within if target.name in chosen]


def _matches(text: str, target: Target) -> bool:
    if target.name.startswith(TOWER) and not text.startswith(TOWER):
        return False  # many of its matrices have the names of the decoder's
    if text == ALL_LINEAR:
        return not target.is_expert
    if any(letter in text for letter in "*?["):
        return fnmatch.fnmatchcase(target.name, text)
    return target.name == text or target.name.endswith(f".{text}")


def attach(model: LanguageModel, config: LoRAConfig, targets: Sequence[Target], seed: int) -> None:
    """Give weights adapters that change nothing yet.

    Args:
        model: The model; in place.
        config: Rank, scaling and initialisation.
        targets: The weights.
        seed: Seed of A.

    Source: A uniform in +-1/sqrt(in) and B zero, as peft; 'pissa': 2404.02948 equations 2 and 3, scaled as in peft so
    that scaling B A is the best approximation of the weight.
    """
    generator = torch.Generator().manual_seed(seed)
    scaling = config.scale / (math.sqrt(config.rank) if config.rslora else config.rank)
    for target in targets:
        rows, columns = target.shape
        place = target.kind
        pieces_a, pieces_b = [], []
        for matrix in target.matrices():
            if config.init == "pissa":
                a_RD, b_FR = _principal(matrix.to(**place), config.rank, scaling, target.name)
            else:
                bound = 1 / math.sqrt(columns)
                a_RD = torch.empty(config.rank, columns).uniform_(-bound, bound, generator=generator)
                b_FR = torch.zeros(rows, config.rank)
            pieces_a.append(a_RD.to(**place))
            pieces_b.append(b_FR.to(**place))
        a, b = torch.cat(pieces_a), torch.stack(pieces_b, dim=-1).flatten(1)
        side = make_side(target, a, b, scaling, lr_ratio=config.lr_ratio)
        if config.init == "pissa":
            start = make_side(target, a.clone(), b.clone(), -scaling).requires_grad_(False)
            setattr(side, "start", start)  # noqa: B010 (the type checker cannot know that both are of one class)
        if config.dora:
            assert isinstance(side, Side)
            side.magnitude = nn.Parameter(torch.ones(rows, **place))
            assert isinstance(target.module, Linear | Conv1D)
            side.set_start(target.module)
        target.set(side)


def make_side(
    target: Target,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    *,
    magnitude_F: torch.Tensor | None = None,
    lr_ratio: float = 1.0,
) -> Beside:
    """Make what stands beside a weight, of tensors in peft's layout."""
    if target.is_expert:
        return ExpertSide(a, b, scaling, count=target.count, lr_ratio=lr_ratio)
    return Side(a, b, scaling, magnitude_F=magnitude_F, lr_ratio=lr_ratio)


def _principal(
    matrix_FD: torch.Tensor, rank: int, scaling: float, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B whose scaled product is the best approximation of a matrix of that rank."""
    if rank > min(matrix_FD.shape):
        raise UserError(
            f"lora.init = pissa: {name} has rank {min(matrix_FD.shape)} at most, lora.rank is {rank}; lower it"
        )
    u, s, vh = torch.linalg.svd(matrix_FD, full_matrices=False)
    root = (s[:rank] / scaling).sqrt()
    return root[:, None] * vh[:rank], u[:, :rank] * root
