"""The optimizer step, shared by all training programs: score tokens, backpropagate, clip, update."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch

from whet.config import Removed, counted
from whet.kernels.cpu import build, toolchain
from whet.kernels.cpu.ops import forget
from whet.model.attention import Packed
from whet.model.checkpointing import CheckpointKind, Recompute
from whet.model.config import ModelConfig, kv_shape
from whet.model.gpt2 import Conv1D
from whet.model.lora.side import Beside, sides_of
from whet.model.parts import Linear
from whet.model.transformer import LanguageModel
from whet.ranks import collectives
from whet.ranks.collectives import is_share, world_size
from whet.ranks.context import Costs, share_micro_batches
from whet.ranks.fsdp import (
    ParallelConfig,
    begin_backward,
    evened,
    fill,
    full,
    is_balanced,
    like,
    local,
    outer_parameters,
    part_of,
    places_of,
    shard_model,
    share_of,
    sum_over_shares,
)
from whet.ranks.tensor import Side, divide_layers
from whet.telemetry.spans import span, spanned
from whet.train.optim.adam8bit import MIN_NUMBERS, Moments
from whet.train.optim.optimizer import (
    CHUNK,
    LossScale,
    Master,
    adamw,
    muon,
    orthogonalise,
    suits_kernel,
    sum_of_squares,
)
from whet.types import MicroBatch, UnreadError, UserError

M_MMAP_THRESHOLD = -3
LARGE_BYTES = 2**20
"""Where layers are recomputed, tensors beyond this size have their own pages, which go back when they are freed."""
Precision = Literal[
    "auto", "float32", "bfloat16_autocast", "bfloat16_master", "float16_autocast", "float16_master"
]
OptimizerName = Literal["adamw", "muon"]
Schedule = Literal["cosine", "linear", "constant"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
DYNAMIC = {"auto": None, "yes": True, "no": False}
OTHER_OPTIMIZER = "use adamw, with adam_bits = 8 for moments in a quarter of the memory"
OTHER_SCHEDULE = "use cosine, linear or constant"
"""What to use instead of optimizers and schedules that are gone."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, the learning-rate schedule and the precision of the step."""

    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Schedule = "cosine"
    """Shape after the warm-up: cosine or linear down to `lr * final_lr_share`; or constant."""
    warmup_steps: int = 10
    """Steps of linear warm-up; step 0 already has lr / warmup_steps, never 0."""
    final_lr_share: float = 0.1
    """Learning rate at the last step as a share of the peak."""
    optimizer: OptimizerName = "adamw"
    """muon: orthogonalised momentum for the layers' matrices, with AdamW for embeddings, head, norms and biases."""
    muon_lr: float | None = None
    """Peak learning rate of Muon's matrices; None: lr, which suits muon_scale = rms."""
    muon_momentum: float = 0.95
    """Decay of Muon's momentum."""
    muon_scale: Literal["rms", "spectral"] = "rms"
    """Size of Muon's update of a matrix [rows, columns]: rms: times 0.2 sqrt(max(rows, columns)), the size of AdamW's,
    so that its learning rate and weight decay fit; spectral: times sqrt(max(1, rows / columns))."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices (never of norms and biases)."""
    max_grad_norm: float = 1.0
    """The global gradient norm is clipped to this; inf clips nothing."""
    token_budget: int = 16384
    """Tokens per micro-batch; results do not depend on it."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts, which costs a forward pass more; 0 (default) disables;
    that of config.json is not read."""
    precision: Precision = "float32"
    """float32; bfloat16_autocast (float32 parameters, bfloat16 products); bfloat16_master (bfloat16 model,
    float32 master weights); float16_autocast and float16_master: the same in float16 with a dynamic loss scale, for
    GPUs without bfloat16; or auto: the fastest for the model's widths on the run's device, measured at start-up."""
    checkpoint_layers: bool = False
    """Recompute each layer's activations in the backward pass (less memory, more time)."""
    checkpoint_kind: CheckpointKind = "layer"
    """What checkpoint_layers recomputes: layer: whole layers; mlp: only their feed-forward part; alternate: every
    second layer."""
    offload_inputs: bool = False
    """With checkpoint_layers: keep the layers' inputs in host memory until the backward pass (on a GPU)."""
    adam_bits: Literal[32, 8] = 32
    """Bits per number of AdamW's moments; 8 takes 2 bytes per parameter instead of 8."""
    offload_state: bool = False
    """Keep moments and master weights in host memory, and update there (with a GPU)."""
    compile: bool = False
    """Compile the per-token parts of the layers with torch.compile."""
    compile_mode: CompileMode = "default"
    """torch.compile's mode; reduce-overhead uses CUDA graphs, max-autotune measures kernels."""
    compile_backend: str = "inductor"
    """torch.compile's backend."""
    compile_dynamic: Literal["auto", "yes", "no"] = "yes"
    """Compile for any number of tokens at once (yes), for each number (no), or for any after the second (auto)."""
    compile_fullgraph: bool = False
    """Fail where a part cannot be compiled as one graph, instead of running pieces of it uncompiled."""

    RENAMED = {
        "decay_share": Removed(0.2, OTHER_SCHEDULE),
        "num_cycles": Removed(2, OTHER_SCHEDULE),
        "cycle_factor": Removed(1.0, OTHER_SCHEDULE),
        "schedule=wsd": Removed(None, OTHER_SCHEDULE),
        "schedule=cosine_restarts": Removed(None, OTHER_SCHEDULE),
        "galore_rank": Removed(128, OTHER_OPTIMIZER),
        "galore_every": Removed(200, OTHER_OPTIMIZER),
        "galore_scale": Removed(0.25, OTHER_OPTIMIZER),
        "adafactor_relative": Removed(False, OTHER_OPTIMIZER),
        "optimizer=galore": Removed(None, OTHER_OPTIMIZER),
        "optimizer=adafactor": Removed(None, OTHER_OPTIMIZER),
        "update_in_backward": Removed(False, "use precision = bfloat16_master, whose gradients take half"),
    }

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"optim.{name} = {getattr(self, name)}: expected a finite number above 0")
        if not self.max_grad_norm > 0:
            raise ValueError(
                f"optim.max_grad_norm = {self.max_grad_norm}: expected a number above 0 (inf clips nothing)"
            )
        self._check_table()
        if not 0 <= self.router_aux_loss_coef < math.inf:
            raise ValueError(
                f"optim.router_aux_loss_coef = {self.router_aux_loss_coef}: expected 0 (no load-balancing loss) or more"
            )
        if self.warmup_steps < 0 or self.token_budget < 1:
            raise ValueError(
                f"optim.warmup_steps = {self.warmup_steps}, optim.token_budget = {self.token_budget}: "
                "expected 0 or more, and 1 or more"
            )
        if not 0 <= self.final_lr_share <= 1:
            raise ValueError(f"optim.final_lr_share = {self.final_lr_share}: expected 0 to 1")
        if self.checkpoint_kind != "layer" and not self.checkpoint_layers:
            raise ValueError(
                f"optim.checkpoint_kind = {self.checkpoint_kind}: expected with checkpoint_layers = true only"
            )
        if self.offload_inputs and not (self.checkpoint_layers and self.checkpoint_kind == "layer"):
            raise ValueError(
                "optim.offload_inputs = true: expected with checkpoint_layers = true and checkpoint_kind = layer only"
            )

    def _check_table(self) -> None:
        """Refuse values out of range, and options that the rest of the settings would ignore."""
        if not 0 <= self.muon_momentum < 1:
            raise ValueError(f"optim.muon_momentum = {self.muon_momentum}: expected 0 to below 1")
        if self.muon_lr is not None and not 0 < self.muon_lr < math.inf:
            raise ValueError(
                f"optim.muon_lr = {self.muon_lr}: expected a finite number above 0, or None for lr"
            )
        needs = {
            "muon_lr": ("optimizer = muon", self.optimizer == "muon"),
            "muon_momentum": ("optimizer = muon", self.optimizer == "muon"),
            "muon_scale": ("optimizer = muon", self.optimizer == "muon"),
            "compile_mode": ("compile = true", self.compile),
            "compile_backend": ("compile = true", self.compile),
            "compile_dynamic": ("compile = true", self.compile),
            "compile_fullgraph": ("compile = true", self.compile),
        }
        for name, (owner, is_read) in needs.items():
            value = getattr(self, name)
            if not is_read and value != type(self).__dataclass_fields__[name].default:
                raise UnreadError(
                    f"optim.{name} = {value} is read with optim.{owner} only; leave it out", name
                )

    @property
    def is_scaled(self) -> bool:
        """Whether losses are scaled, because small gradients would be 0 in float16."""
        return self.precision.startswith("float16")


def lean() -> dict[str, Any]:
    """Return the fields of `OptimConfig` for the least memory; updates are still float32."""
    return {
        "precision": "bfloat16_master",
        "adam_bits": 8,
        "checkpoint_layers": True,
        "checkpoint_kind": "layer",
        "token_budget": 512,
    }


PRESETS: dict[str, Callable[[], dict[str, Any]]] = {"lean": lean}
"""Presets of several fields: `--optim lean`."""


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of a 0-based step: linear warm-up, then the schedule over what remains."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps))
    shape = SHAPES[config.schedule](progress)
    return (
        config.lr * (config.final_lr_share + (1 - config.final_lr_share) * shape) if shape != 1 else config.lr
    )


def warm_up_warning(config: OptimConfig, num_steps: int) -> str:
    """Return what to say of a warm-up that a run of so many steps does not leave; '' where it does."""
    if config.warmup_steps < max(num_steps, 2):
        return ""
    last = learning_rate(config, num_steps - 1, num_steps)
    length = counted(num_steps, "step")
    return (
        f"optim.warmup_steps = {config.warmup_steps} and the run has {length}: the learning rate only rises, "
        f"to {last:g} ({last / config.lr:.0%} of optim.lr); set --optim.warmup-steps {num_steps // 10}"
    )


SHAPES: dict[Schedule, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "constant": lambda progress: 1.0,
}
"""Learning rate between its final share (0) and its peak (1), by schedule and progress after the warm-up."""


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Say whether a parameter is a matrix, or a stack of them: the biases of all experts in one tensor are none."""
    return parameter.dim() >= 2 and not name.endswith("bias")


class Optimizer:
    """AdamW or Muon over a model's parameters, with float32 master weights for 16-bit parameters (`Master`).

    In float16 the gradients are those of a scaled loss (`LossScale`): `step` divides them again, and leaves an update
    out where they overflowed.

    The update is PyTorch's fused kernel, called directly: `torch.optim` would import its compiler (1.3 s).

    Args:
        model: The model to train.
        config: Hyper-parameters.

    Attributes:
        num_overflows: Updates left out so far because scaled gradients overflowed.

    Source: AdamW 1711.05101; matrices are decayed, vectors (norms, biases) are not. Muon: see `muon`.
    """

    def __init__(self, model: torch.nn.Module, config: OptimConfig) -> None:
        self._config = config
        self.num_overflows = 0
        self._scaled = [part for part in model.modules() if isinstance(part, LanguageModel)]
        self._scale = LossScale() if config.is_scaled and self._scaled else None
        self._share_scale()
        hidden = {
            id(p)
            for part in self._scaled
            for layer in part.layers
            for name, p in layer.named_parameters()
            if p.dim() == 2 and is_matrix(name, p)
        }
        ratios = {id(part.lora_B): part.lr_ratio for part in model.modules() if isinstance(part, Beside)}
        turned = {id(part.weight) for part in model.modules() if isinstance(part, Conv1D)}
        self._named = [
            (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        self._refuse_shards()
        self._masters = [
            Master(local(parameter), is_offloaded=config.offload_state) for _, parameter in self._named
        ]
        for master, (name, parameter) in zip(self._masters, self._named, strict=True):
            master.dither(places_of(parameter), zlib.crc32(name.encode()) << 20)
        self._packed: dict[int, Moments] = {}
        self._first: list[torch.Tensor] = []
        self._second: list[torch.Tensor] = []
        self._steps: list[torch.Tensor] = []
        self._by_muon = set[int]()
        self._turned = {index for index, (_, parameter) in enumerate(self._named) if id(parameter) in turned}
        for index, (master, (_, parameter)) in enumerate(zip(self._masters, self._named, strict=True)):
            first = second = local(parameter).shape
            if config.optimizer == "muon" and id(parameter) in hidden:
                self._by_muon.add(index)
                second = (0,)
            is_packed = (
                config.adam_bits == 8 and index not in self._by_muon and math.prod(first) >= MIN_NUMBERS
            )
            if is_packed and master.dtype == torch.float32:
                self._packed[index] = Moments(math.prod(first), master.device)
                first = second = (0,)
            place: dict[str, Any] = {"dtype": master.dtype, "device": master.device}
            self._first.append(torch.zeros(first, **place))
            self._second.append(torch.zeros(second, **place))
            self._steps.append(torch.zeros((), device=master.device))
        self._ratios = [ratios.get(id(parameter), 1.0) for _, parameter in self._named]

    def _refuse_shards(self) -> None:
        """Refuse moments in blocks, where a rank has a share of each matrix.

        Raises:
            UserError: With what to leave out.
        """
        if not any(is_share(parameter) for _, parameter in self._named):
            return
        setting = "parallel.kind = fsdp" if collectives.across is None else "parallel.tensor"
        if self._config.adam_bits == 8:
            raise UserError(
                f"optim.adam_bits = 8 with {setting}: its blocks would depend on the number of ranks; "
                "leave it out (shards divide the state by that number)"
            )

    @spanned("optimizer_step")
    def step(self, lr: float, *, loss: float = 0.0) -> float:
        """Clip the gradients' global norm, update and clear them.

        Args:
            lr: Learning rate of this step.
            loss: Loss of the step. If it is not finite, nothing is updated.

        Returns:
            The norm before clipping. If it is not finite, nothing is updated.
        """
        used = [index for index, (_, parameter) in enumerate(self._named) if parameter.grad is not None]
        gradients = [local(grad) for index in used if (grad := self._named[index][1].grad) is not None]
        scale = self.loss_scale or 1.0
        squares = [sum_of_squares(gradient) for gradient in gradients]
        norm = math.sqrt(sum_over_shares([self._named[index][1] for index in used], squares)) / scale
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        if self._scale is not None and math.isfinite(loss):
            # Below 1 nothing is left to scale back: such gradients are as infinite without a scale.
            self.num_overflows += not is_finite and scale > 1
            self._scale.update(is_finite=is_finite)
            self._share_scale()
        if is_finite:
            factor = min(1.0, self._config.max_grad_norm / (norm + 1e-6)) / scale
            is_native = build.library() is not None and all(map(suits_kernel, gradients))
            has_masters = any(master.held() for master in self._masters)
            has_ratios = any(ratio != 1.0 for ratio in self._ratios)
            is_adamw = self._config.optimizer == "adamw"
            if self._packed or has_masters or is_native or has_ratios or not is_adamw:
                del gradients
                for index in used:
                    self._update_one(index, lr, factor)
            else:
                self._update(used, [grad * factor for grad in gradients] if factor != 1 else gradients, lr)
        for _, parameter in self._named:
            parameter.grad = None
        return norm

    @torch.no_grad()
    def _update_one(self, index: int, lr: float, factor: float) -> None:
        """Update a parameter on its weights' device, and drop its gradient."""
        config, parameter, master = self._config, self._named[index][1], self._masters[index]
        assert parameter.grad is not None
        lr *= self._ratios[index]
        gradient = local(parameter.grad).to(master.device)
        parameter.grad = None
        self._steps[index] += 1
        decay = config.weight_decay if is_matrix(*self._named[index]) else 0.0
        if index in self._by_muon:
            self._orthogonal_update(index, gradient, lr, factor)
        else:
            self._adamw(index, gradient, lr, factor, decay)
        torch.autograd.graph.increment_version(
            local(parameter)
        )  # the kernels write without PyTorch's knowledge

    def _adamw(self, index: int, gradient: torch.Tensor, lr: float, factor: float, decay: float) -> None:
        """Update a parameter's weights by AdamW."""
        master = self._masters[index]
        for part, first, second in self._parts(index):
            weights = master.read(part)
            adamw(
                weights,
                gradient.reshape(-1)[part],
                first,
                second,
                step=self._steps[index],
                factor=factor,
                lr=lr,
                betas=(self._config.beta1, self._config.beta2),
                eps=self._config.eps,
                decay=decay,
            )
            master.write(weights, part)

    def _orthogonal_update(self, index: int, gradient: torch.Tensor, lr: float, factor: float) -> None:
        """Update a matrix by Muon, as a whole: its update is no function of its parts."""
        config, master, parameter = self._config, self._masters[index], self._named[index][1]
        whole, shape = master.read(), tuple(parameter.shape)
        weights, momentum = whole.view(self._first[index].shape), self._first[index]
        moved, is_turned = gradient.to(whole.dtype) * factor, index in self._turned

        def direction(share: torch.Tensor) -> torch.Tensor:
            if not is_share(parameter):
                return orthogonalise(share)
            rows = share.t().contiguous() if is_turned else share
            found = orthogonalise(full(like(rows, parameter)))[part_of(parameter)]
            return found.t() if is_turned else found

        if is_turned:  # stored [in, out]
            weights, moved, momentum, shape = weights.t(), moved.t(), momentum.t(), shape[::-1]
        muon(
            weights,
            moved,
            momentum,
            lr=lr if config.muon_lr is None else lr * config.muon_lr / config.lr,
            decay=config.weight_decay,
            momentum=config.muon_momentum,
            scale=config.muon_scale,
            direction=direction,
            shape=shape,
        )
        master.write(whole)

    @property
    def muon_names(self) -> set[str]:
        """Names of the parameters that Muon updates."""
        return {self._named[index][0] for index in self._by_muon}

    @property
    def adamw_names(self) -> set[str]:
        """Names of the parameters that AdamW updates number by number."""
        return {name for index, (name, _) in enumerate(self._named) if index not in self._by_muon}

    @property
    def loss_scale(self) -> float | None:
        """Factor of the loss in backward passes; None outside float16."""
        return None if self._scale is None else float(self._scale.value)

    def _share_scale(self) -> None:
        """Tell the models, whose `forward_backward` scales the loss."""
        for model in self._scaled:
            model.loss_scale = self.loss_scale or 1.0

    def _parts(self, index: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield a tensor in parts, with its moments; as one part if nothing needs unpacking."""
        if index in self._packed:
            yield from self._packed[index].parts(int(self._steps[index]) * len(self._named) + index)
            return
        first, second = self._first[index].view(-1), self._second[index].view(-1)
        size = CHUNK[first.device.type] if self._masters[index].is_split else max(1, first.numel())
        for start in range(0, first.numel(), size):
            part = slice(start, start + size)
            yield part, first[part], second[part]

    @torch.no_grad()
    def _update(self, used: list[int], gradients: list[torch.Tensor], lr: float) -> None:
        """Update all parameters that are their own weights, in two calls."""
        for decays in (True, False):
            chosen = [place for place, index in enumerate(used) if is_matrix(*self._named[index]) == decays]
            if not chosen:
                continue
            indices = [used[place] for place in chosen]
            torch._foreach_add_(  # pyright: ignore[reportPrivateImportUsage]
                [self._steps[index] for index in indices], 1.0
            )
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                [local(self._named[index][1].data) for index in indices],
                [gradients[place] for place in chosen],
                [self._first[index] for index in indices],
                [self._second[index] for index in indices],
                [],
                [self._steps[index] for index in indices],
                lr=lr,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                weight_decay=self._config.weight_decay if decays else 0.0,
                eps=self._config.eps,
                amsgrad=False,
                maximize=False,
            )
        for index in used:
            torch.autograd.graph.increment_version(local(self._named[index][1]))

    def held(self) -> list[torch.Tensor]:
        """Return the tensors that the optimizer holds besides the parameters, in their in-memory form."""
        packed = [tensor for moments in self._packed.values() for tensor in moments.tensors().values()]
        masters = [tensor for master in self._masters for tensor in master.held()]
        return [*packed, *masters, *self._first, *self._second, *self._steps]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state as named tensors (moments, step counts and master weights), for a checkpoint.

        Master weights are float32 here, whatever their in-memory form: copies of the current state.
        """
        state: dict[str, torch.Tensor] = {} if self._scale is None else self._scale.tensors()
        for index, (name, parameter) in enumerate(self._named):
            if parameter.dtype != self._masters[index].dtype:
                state[f"{name}/master"] = like(
                    self._masters[index].read().view(local(parameter).shape), parameter
                )
            moments = {"exp_avg": self._first[index], "exp_avg_sq": self._second[index]}
            if index in self._by_muon:
                moments = {"momentum": self._first[index]}
            elif index in self._packed:
                moments = self._packed[index].tensors()
            state |= {f"{name}/{key}": like(tensor, parameter) for key, tensor in moments.items()}
            state[f"{name}/step"] = self._steps[index]
        return state

    @torch.no_grad()
    def load_tensors(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `tensors`; restore the model's own weights first."""
        for (name, parameter), master in zip(self._named, self._masters, strict=True):
            stored = state[f"{name}/master"] if parameter.dtype != master.dtype else parameter
            if master.held():
                mine = share_of(stored, parameter)
                master.write(mine.detach().to(master.device, master.dtype, copy=True).view(-1))
        for name, tensor in self.tensors().items():
            if not name.endswith("/master"):
                fill(tensor, state[name])
        self._share_scale()


AUTOCAST: dict[Precision, torch.dtype] = {
    "bfloat16_autocast": torch.bfloat16,
    "float16_autocast": torch.float16,
}
PARAMETERS: dict[Precision, torch.dtype] = {
    "bfloat16_master": torch.bfloat16,
    "float16_master": torch.float16,
}


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype of products if it is not the parameters' own."""
    return AUTOCAST.get(precision)


def dtypes(precision: Precision) -> dict[str, Any]:
    """Return the dtypes of parameters and products, as `load_policy` takes them."""
    return {"dtype": parameter_dtype(precision), "autocast": autocast_dtype(precision)}


def prepare_model(model: LanguageModel, config: OptimConfig) -> None:
    """Apply the options that change how a model runs, not what it computes: recomputation and compilation.

    Only the per-token parts of a layer are compiled; attention keeps its own kernels, because its context differs in
    every call and would be recompiled each time.

    Raises:
        UserError: If an option needs a GPU but there is none.
    """
    for name, is_on in {
        "offload_inputs": config.offload_inputs,
        "offload_state": config.offload_state,
    }.items():
        if is_on and model.head_weight.device.type == "cpu":
            raise UserError(
                f"optim.{name} = true on a CPU: expected a GPU, whose memory it spares; leave it out"
            )
    model.checkpoint_layers = config.checkpoint_layers
    if config.checkpoint_layers and model.head_weight.device.type == "cpu":
        _keep_less()
    model.recompute = Recompute(config.checkpoint_kind, offload=config.offload_inputs)
    if config.compile:
        _check_compiler(config, model.head_weight.device)
        mode = {} if config.compile_mode == "default" else {"mode": config.compile_mode}
        for layer in model.layers:
            for name, part in layer.named_children():
                if "attn" not in name or "norm" in name:
                    part.compile(
                        dynamic=DYNAMIC[config.compile_dynamic],
                        backend=config.compile_backend,
                        fullgraph=config.compile_fullgraph,
                        **mode,
                    )


def shard_layers(model: LanguageModel, config: ParallelConfig, device: torch.device | None = None) -> None:
    """Deal a model out over the ranks, layer by layer, where its run is to; every rank keeps all of the adapters.

    Its micro-batches are dealt out, too, and shared by ranks, where that is asked for.

    Args:
        model: The model; one that is sharded already is left alone.
        config: How.
        device: Where the shares of a model without memory are made.

    Raises:
        UserError: If the model or the number of ranks rules it out.
    """
    if is_balanced(config) and world_size() > 1:
        if config.context > 1 and any(spec.mixer != "attention" for spec in model.config.layers):
            raise UserError(
                f"parallel.context = {config.context}: layers of this model go from token to token (a recurrence or a "
                "convolution), which ranks that share a sequence cannot; leave it out"
            )
        has_all_rows, size = config.tensor > 1, max(config.context, config.tensor)
        share_micro_batches(model, size, costs_of(model.config), has_all_rows=has_all_rows)
        if has_all_rows:
            divide_layers(model, matrix_plan(model, config.tensor), config.tensor)
    adapters = [parameter for _, side in sides_of(model) for parameter in side.parameters()]
    shard_model(model, list(model.layers), config, replicated=adapters, device=device)


def matrix_plan(model: LanguageModel, size: int) -> dict[str, Side]:
    """Return by which side each matrix of the layers is divided among a group: heads and channels are not cut.

    Args:
        model: The model, as it is trained.
        size: Ranks in a group.

    Raises:
        UserError: If its layers are of another kind, or do not divide evenly.
    """
    plan: dict[str, Side] = {}
    for name, _ in model.named_modules():
        if name.endswith(".self_attn"):
            plan |= {f"{name}.{part}": "rows" for part in ("q_proj", "k_proj", "v_proj")}
            plan[f"{name}.o_proj"] = "columns"
        elif name.endswith(".mlp"):
            plan |= {f"{name}.{part}": "rows" for part in ("gate_proj", "up_proj")}
            plan[f"{name}.down_proj"] = "columns"
    config = model.config
    block, found = config.block, dict(model.named_modules())
    is_known = plan and all(type(found.get(name)) is Linear for name in plan)
    if not is_known or block.whole_qk_norm or block.has_sinks or block.latent is not None:
        raise UserError(
            f"parallel.tensor = {size}: expected a decoder of grouped-query attention and gated feed-forward parts "
            "without experts, sinks or norms over all heads; leave it out, or use parallel.kind = fsdp"
        )
    linears = {name: cast(Linear, found[name]) for name in plan}
    if any(layer.side is not None or layer.packed is not None for layer in linears.values()):
        raise UserError(
            f"parallel.tensor = {size} with adapters or matrices in few bits: expected whole weights that are trained; "
            "leave it out"
        )
    if any(linears[name].bias is not None for name, side in plan.items() if side == "columns"):
        raise UserError(
            f"parallel.tensor = {size}: this model adds biases to sums over heads or channels, which each rank would "
            "add; leave it out, or use parallel.kind = fsdp"
        )
    for spec in config.layers:
        counts = {
            "query heads": config.num_heads,
            "key/value heads": kv_shape(spec, config)[0],
            "feed-forward channels": spec.intermediate_size or config.intermediate_size,
        }
        for what, count in counts.items():
            if count % size:
                raise UserError(
                    f"parallel.tensor = {size}: the model has {count} {what}, expected a multiple of {size}"
                )
    return plan


def costs_of(config: ModelConfig) -> Costs:
    """Estimate the work of sequences from a model's shape.

    Products take 2 FLOPs per weight and token (of experts, those that are active), attention 4 per channel and pair of
    a query and a key that it sees.
    """
    width, experts = config.hidden_size, config.block.experts
    weights, pairs = config.vocab_size * width, dict[int, float]()
    for spec in config.layers:
        kv_heads, channels = kv_shape(spec, config)
        own = spec.intermediate_size or config.intermediate_size
        if spec.has_experts and experts is not None:
            own = experts.top_k * experts.width
        weights += width * (2 * (config.num_heads + kv_heads) * channels + 3 * own)
        pairs[spec.window] = pairs.get(spec.window, 0.0) + 2.0 * config.num_heads * channels
    return Costs(tuple((window, total / weights) for window, total in sorted(pairs.items())))


def _check_compiler(config: OptimConfig, device: torch.device) -> None:
    """Refuse compilation where what it needs is missing, which PyTorch would say in the middle of the first step."""
    from torch._dynamo import list_backends  # 1.3 s

    backend = config.compile_backend
    if backend not in (known := sorted(list_backends(exclude_tags=None))):
        raise UserError(
            f"optim.compile_backend = {backend!r}: no backend of this PyTorch; expected one of {', '.join(known)}"
        )
    if backend != "inductor":
        if config.compile_mode != "default":
            raise UserError(
                f"optim.compile_mode = {config.compile_mode} with compile_backend = {backend}: modes are inductor's; "
                "leave one of them out"
            )
        return
    if device.type == "cpu" and toolchain.compiler() is None:
        raise UserError(
            "optim.compile = true on a CPU needs a C++ compiler, and there is none: install g++ (apt-get install g++), "
            "or leave it out"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError("optim.compile = true on a GPU needs Triton: pip install triton, or leave it out")


def give_back(model: LanguageModel) -> None:
    """Free memory that the next pass does not need, if layers are recomputed.

    This is the allocator's free memory, and the head's packed weights: the backward pass reads saved logits.
    """
    if model.checkpoint_layers:
        forget((model.head_weight,))
        release_freed()


def release_freed() -> None:
    """Return to the system what glibc keeps of freed memory (`whet.__main__.keep_freed_memory`).

    What lives long between what is freed leaves holes, and a heap that is never trimmed grows by them: by 1 MB in 1,000
    steps of the soak (docs/results/reliability.md).
    """
    _allocator("malloc_trim", 0)


def _keep_less() -> None:
    """Make glibc return large tensors' memory immediately.

    `whet` otherwise keeps freed memory for the next step, which is a tenth faster. But long-lived tensors then fragment
    the kept memory: a quarter of the memory of a step that recomputes layers was holes (measured, 124M parameters).
    """
    if not any(name.startswith("MALLOC_") for name in os.environ):
        _allocator("mallopt", M_MMAP_THRESHOLD, LARGE_BYTES)


def _allocator(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:  # musl lacks it
        function(*arguments)


def parameter_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of the model's parameters."""
    assert precision != "auto", "resolve_precision comes first"
    return PARAMETERS.get(precision, torch.float32)


def _nothing(model: LanguageModel | None) -> torch.Tensor:
    """Return a loss of 0 that every trained parameter has a part in: other ranks have a micro-batch more, and sharded
    parameters are gathered, and their gradients dealt out, by all together."""
    assert model is not None
    device = model.head_weight.device
    token = torch.zeros(1, dtype=torch.int64, device=device)
    hidden = model(token, token, Packed([1], device))
    return 0.0 * sum((p.sum() for p in outer_parameters(model)), hidden.sum())


def forward_backward(
    micro_batches: Iterable[MicroBatch],
    score: Callable[[MicroBatch], tuple[torch.Tensor, dict[str, float]]],
    model: LanguageModel | None = None,
) -> dict[str, float]:
    """Run every micro-batch and add up gradients, losses and metrics, which `score` has already divided.

    Args:
        micro_batches: The step's micro-batches.
        score: Returns a micro-batch's share of the loss (differentiable) and of the metrics.
        model: The trained model: its loss scale multiplies the gradients; if its layers are recomputed, memory is
            freed around each pass.

    Returns:
        Summed metrics with the summed 'loss'. A metric whose name ends in '_max' is the maximum instead.
    """
    totals: dict[str, float] = {"loss": 0.0}
    release = (lambda: None) if model is None else partial(give_back, model)
    cut: Sequence[MicroBatch | None] = list(micro_batches)
    if model is not None:
        cut = evened(cut, model)
    for place, micro in enumerate(cut, start=1):
        release()
        if model is not None:
            begin_backward(model, is_last=place == len(cut))
        with span("forward"):
            loss, metrics = score(micro) if micro is not None else (_nothing(model), {})
        release()
        with span("backward"):
            (loss if model is None or model.loss_scale == 1.0 else loss * model.loss_scale).backward()
        if micro is not None and not micro.is_counted:
            continue
        totals["loss"] += float(loss.detach())
        for name, value in metrics.items():
            totals[name] = (
                max(totals.get(name, value), value)
                if name.endswith("_max")
                else totals.get(name, 0.0) + value
            )
    release()
    return totals
