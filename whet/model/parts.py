"""Modules that every decoder is made of: products, tables, norms and the feed-forward part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from whet.kernels import dispatch, eager
from whet.model.config import ModelConfig
from whet.model.quant import PackedMatrix


class Linear(nn.Linear):
    """A linear layer without PyTorch's default initialisation: it is loaded, or drawn by `init_weights`.

    Attributes:
        packed: The quantised matrix in place of `weight`, which is None then; else None.
        side: An adapter beside the weight (`whet.model.lora.side.Side`); None without one.
    """

    transposed = False
    side: nn.Module | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.register_module("side", None)
        self.packed: PackedMatrix | None = None

    def reset_parameters(self) -> None:
        """Leave the weights uninitialised."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b, and what the adapter adds."""
        return self.product(input, self.bias) if self.side is None else self.side(input, self)

    def product(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + bias, of the weight alone."""
        if self.packed is not None:
            return self.packed(input, bias)
        return dispatch.run(eager.linear, input, self.weight, bias)

    def matrix(self) -> torch.Tensor:
        """Return W [out, in]."""
        return self.weight if self.packed is None else self.packed.dense(torch.float32)

    def adapted(self) -> eager.Adapted | None:
        """Return the weight and what stands beside it; None if there is no plain adapter beside a dense weight."""
        side: Any = self.side
        if not getattr(side, "is_plain", False) or not hasattr(side, "lora_A") or self.packed is not None:
            return None
        # A matrix that is divided among ranks has its own product, and a hook wants to see this layer's call.
        if "product" in self.__dict__ or self._forward_hooks or self._forward_pre_hooks:
            return None
        return eager.Adapted(self.weight, self.bias, side.lora_A, side.lora_B, side.scaling)


def outputs(x: torch.Tensor, *layers: Linear) -> list[torch.Tensor]:
    """Return what each layer makes of the same input; at once where plain adapters stand beside all of them."""
    parts = [layer.adapted() for layer in layers]
    known = [part for part in parts if part is not None]
    if len(known) == len(parts) and (kernel := dispatch.kernel_for(eager.products, x, known)) is not None:
        return kernel(x, known)
    return [layer(x) for layer in layers]


def embedding(num_rows: int, width: int) -> nn.Embedding:
    """Make an uninitialised embedding table (PyTorch's own initialisation would import its compiler, 3 s)."""
    return nn.Embedding(num_rows, width, _weight=torch.empty(num_rows, width))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in float32, scaled in the input's dtype (as `transformers` does it).

    Args:
        width: Numbers that are normalised together.
        eps: Added to their mean square.
        offset: Added to the weight; then scaled in float32, too: 1 + w would be rounded to few digits of w.
    """

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        if self.offset:
            weight = eager.wide(self.weight) + self.offset
            return dispatch.run(eager.rms_norm, eager.wide(x), weight, self.eps)[0].to(x.dtype)
        return dispatch.run(eager.rms_norm, x, self.weight, self.eps)[0]


class UnitNorm(nn.Module):
    """Root-mean-square normalisation of the last axis without weights, in float32.

    Args:
        eps: Added to the mean square.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        ones = torch.ones(x.shape[-1], device=x.device)
        return dispatch.run(eager.rms_norm, eager.wide(x), ones, self.eps)[0].to(x.dtype)


class Layer(nn.Module):
    """A decoder layer: what mixes positions, and then the feed-forward part `mlp`."""

    mlp: nn.Module

    def forward(self, x_ND: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Return the residual stream after this layer.

        Args:
            x_ND: The residual stream.
            rest: What `mix` takes.
        """
        return self.feed(self.mix(x_ND, *rest), *rest)

    def mix(self, x_ND: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Return the residual stream after the part that mixes positions."""
        raise AssertionError("abstract")

    def feed(self, x_ND: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Return the residual stream after the feed-forward part; `rest` is what `mix` takes."""
        raise AssertionError("abstract")


class MLP(nn.Module):
    """Gated feed-forward part: SwiGLU, or with GELU in the gate.

    Args:
        config: Shape of the model.
        width: Feed-forward width; default: the model's.
    """

    def __init__(self, config: ModelConfig, width: int = 0) -> None:
        super().__init__()
        width = width or config.intermediate_size
        self.is_gelu = config.block.activation == "gelu_tanh"
        self.gate_proj = Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = Linear(width, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return down(silu(gate(x)) * up(x))."""
        gate_NF, up_NF = outputs(x_ND, self.gate_proj, self.up_proj)
        if self.is_gelu:
            inner_NF = eager.gelu(gate_NF) * up_NF
        else:
            inner_NF = dispatch.run(eager.swiglu, gate_NF, up_NF)
        return outputs(inner_NF, self.down_proj)[0]
