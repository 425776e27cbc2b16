"""One optimizer step, shared by every program that trains: score tokens, backpropagate, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from whet.model.transformer import LanguageModel
from whet.types import MicroBatch

Precision = Literal["float32", "bfloat16_autocast", "bfloat16_master"]
Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, its learning-rate schedule and the precision of the step."""

    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Schedule = "cosine"
    """Shape after the warm-up: cosine or linear down to `lr * final_lr_share`, or constant."""
    warmup_steps: int = 10
    """Steps of linear warm-up; step 0 already has lr / warmup_steps, never 0."""
    final_lr_share: float = 0.1
    """Learning rate at the last step as a share of the peak."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices (never of norms and biases)."""
    max_grad_norm: float = 1.0
    """The global gradient norm is clipped to this."""
    token_budget: int = 16384
    """Tokens of one micro-batch; the mathematics does not depend on it."""
    precision: Precision = "float32"
    """float32; bfloat16_autocast (float32 parameters, bfloat16 products); or bfloat16_master (bfloat16 model,
    float32 master weights)."""
    checkpoint_layers: bool = False
    """Recompute each layer's activations in the backward pass (less memory, more time)."""
    compile: bool = False
    """Compile the per-token parts of the layers with torch.compile."""

    def __post_init__(self) -> None:
        for name, low in (("lr", 0.0), ("max_grad_norm", 0.0), ("eps", 0.0)):
            if not low < getattr(self, name) < math.inf:
                raise ValueError(
                    f"optim.{name} = {getattr(self, name)}: expected a finite number above {low:g}"
                )
        if self.warmup_steps < 0 or self.token_budget < 1:
            raise ValueError(
                f"optim.warmup_steps = {self.warmup_steps}, optim.token_budget = {self.token_budget}: "
                "expected 0 or more, and 1 or more"
            )
        if not 0 <= self.final_lr_share <= 1:
            raise ValueError(f"optim.final_lr_share = {self.final_lr_share}: expected 0 to 1")


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of a 0-based step: linear warm-up, then the schedule over what remains."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
    return config.lr * (config.final_lr_share + (1 - config.final_lr_share) * shape)


class Optimizer:
    """AdamW over a model's parameters, with float32 master weights when the model is bfloat16.

    The update is PyTorch's fused kernel, called directly: `torch.optim` would import its compiler (1.3 s).

    Args:
        model: The model to train.
        config: Hyper-parameters.

    Source: AdamW 1711.05101; matrices are decayed, vectors (norms, biases) are not.
    """

    def __init__(self, model: torch.nn.Module, config: OptimConfig) -> None:
        self._config = config
        self._named = [
            (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        self._masters = [
            p.detach().float().clone() if p.dtype == torch.bfloat16 else p.detach() for _, p in self._named
        ]
        self._first = [torch.zeros_like(master) for master in self._masters]
        self._second = [torch.zeros_like(master) for master in self._masters]
        self._steps = [torch.zeros((), device=master.device) for master in self._masters]

    def step(self, lr: float, *, loss: float = 0.0) -> float:
        """Clip the gradients' global norm, update and clear them.

        Args:
            lr: Learning rate of this step.
            loss: Loss of the step. When it is not finite nothing is updated.

        Returns:
            The norm before clipping. When it is not finite nothing is updated.
        """
        used = [index for index, (_, parameter) in enumerate(self._named) if parameter.grad is not None]
        gradients = [
            grad.to(self._masters[index].dtype)
            for index in used
            if (grad := self._named[index][1].grad) is not None
        ]
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients))
        if math.isfinite(norm) and math.isfinite(loss):
            factor = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
            self._update(used, [grad * factor for grad in gradients] if factor < 1 else gradients, lr)
        for _, parameter in self._named:
            parameter.grad = None
        return norm

    @torch.no_grad()
    def _update(self, used: list[int], gradients: list[torch.Tensor], lr: float) -> None:
        for is_matrix in (True, False):
            chosen = [
                place for place, index in enumerate(used) if (self._masters[index].dim() >= 2) == is_matrix
            ]
            if not chosen:
                continue
            indices = [used[place] for place in chosen]
            torch._foreach_add_(  # pyright: ignore[reportPrivateImportUsage]
                [self._steps[index] for index in indices], 1.0
            )
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                [self._masters[index] for index in indices],
                [gradients[place] for place in chosen],
                [self._first[index] for index in indices],
                [self._second[index] for index in indices],
                [],
                [self._steps[index] for index in indices],
                lr=lr,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                weight_decay=self._config.weight_decay if is_matrix else 0.0,
                eps=self._config.eps,
                amsgrad=False,
                maximize=False,
            )
        for (_, parameter), master in zip(self._named, self._masters, strict=True):
            if parameter.dtype != master.dtype:
                parameter.copy_(master)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state as named tensors (moments, step counts and master weights), for a checkpoint."""
        state: dict[str, torch.Tensor] = {}
        for index, (name, parameter) in enumerate(self._named):
            if parameter.dtype != self._masters[index].dtype:
                state[f"{name}/master"] = self._masters[index]
            state[f"{name}/exp_avg"] = self._first[index]
            state[f"{name}/exp_avg_sq"] = self._second[index]
            state[f"{name}/step"] = self._steps[index]
        return state

    @torch.no_grad()
    def load_tensors(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put back what `tensors` returned."""
        for name, tensor in self.tensors().items():
            tensor.copy_(state[name])


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype that products run in when it is not the parameters' own."""
    return torch.bfloat16 if precision == "bfloat16_autocast" else None


def prepare_model(model: LanguageModel, config: OptimConfig) -> None:
    """Apply the options that change how a model runs, not what it computes: recomputation and compilation.

    Compiled are the parts of a layer that see one token at a time; attention keeps its own kernels, since its context
    differs in every call and would be compiled again and again.
    """
    model.checkpoint_layers = config.checkpoint_layers
    if config.compile:
        for layer in model.layers:
            for name, part in layer.named_children():
                if "attn" not in name or "norm" in name:
                    part.compile(dynamic=True)


def parameter_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of the model's parameters."""
    return torch.bfloat16 if precision == "bfloat16_master" else torch.float32


def forward_backward(
    micro_batches: Iterable[MicroBatch], score: Callable[[MicroBatch], tuple[torch.Tensor, dict[str, float]]]
) -> dict[str, float]:
    """Run every micro-batch and add up gradients, losses and metrics, which the caller has divided already.

    Args:
        micro_batches: The step's micro-batches.
        score: Returns a micro-batch's share of the loss (differentiable) and of the metrics.

    Returns:
        Summed metrics with the summed 'loss'. A metric whose name ends in '_max' is the maximum instead.
    """
    totals: dict[str, float] = {"loss": 0.0}
    for micro in micro_batches:
        loss, metrics = score(micro)
        loss.backward()
        totals["loss"] += float(loss.detach())
        for name, value in metrics.items():
            totals[name] = (
                max(totals.get(name, value), value)
                if name.endswith("_max")
                else totals.get(name, 0.0) + value
            )
    return totals
