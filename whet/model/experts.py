"""Mixture of experts as feed-forward part: a router sends each token to a few of many small networks."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from whet.kernels import dispatch, eager
from whet.model.config import Experts, ModelConfig
from whet.model.parts import MLP, Linear
from whet.model.quant import PackedMatrix
from whet.model.routing import RoutedLayer

ROW_QUANTUM = 16
"""Each expert's rows are padded to a multiple of it: then a row's result does not depend on who else is there."""
CLAMP, SHARPNESS = 7.0, 1.702
"""Of gpt-oss: largest gate and up, and factor in the gate's sigmoid."""


class Router(nn.Module):
    """Scores of the experts, and for some families an offset of each that joins them for the choice alone."""

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts.count, width))
        self.bias = nn.Parameter(torch.zeros(experts.count)) if experts.is_clamped else None
        if experts.has_offset:
            # Not learnt by gradients: its makers moved it by the load.
            self.e_score_correction_bias = nn.Parameter(torch.zeros(experts.count), requires_grad=False)

    def forward(
        self, x_ND: torch.Tensor, routed: RoutedLayer | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of each token's experts [N, top_k], float32, and which they are.

        Args:
            x_ND: Input of the layer's feed-forward part.
            routed: Which experts to take, if not the router's own choice, and where to note them. The weights are
                always the router's own, over those experts, so that gradients reach it.
        """
        e = self.experts
        if e.score == "sigmoid":
            scores_NE = dispatch.run(eager.linear, x_ND.float(), self.weight.float(), None)
            scores_NE = eager.row_wise(torch.sigmoid, scores_NE)
        else:
            scores_NE = dispatch.run(eager.linear, x_ND, self.weight, self.bias).float()
        if e.score == "softmax":
            scores_NE = scores_NE.softmax(-1)
        which = self._choose(scores_NE.detach()).topk(e.top_k, dim=-1)[1]
        if routed is not None:
            which = routed.settle(which, self._probabilities(scores_NE))
        weights = scores_NE.gather(1, which)
        if e.score == "softmax_of_top":
            return weights.softmax(-1), which
        if e.is_normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + e.sum_eps)
        return weights * e.scale, which

    def _probabilities(self, scores_NE: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of all experts from their scores."""
        if self.experts.score == "softmax_of_top":
            return scores_NE.softmax(-1)
        if self.experts.score == "sigmoid":  # 2412.19437 equation 19
            return scores_NE / (scores_NE.sum(-1, keepdim=True) + 1e-20)
        return scores_NE

    def _choose(self, scores_NE: torch.Tensor) -> torch.Tensor:
        """Return what the choice goes by: scores and offsets, of the groups whose two best are the best."""
        e = self.experts
        if e.has_offset:
            scores_NE = scores_NE + self.e_score_correction_bias
        if e.num_groups == 1:
            return scores_NE
        groups = scores_NE.view(len(scores_NE), e.num_groups, -1)
        best = groups.topk(2, dim=-1)[0].sum(-1).topk(e.top_groups, dim=-1)[1]
        is_kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=best.device).scatter_(1, best, True)
        return groups.masked_fill(~is_kept[..., None], float("-inf")).view(scores_NE.shape)


class ExpertWeights(nn.Module):
    """The experts' weights, one tensor for all of them, as transformers has them.

    Attributes:
        gate_up_side: An adapter beside `gate_up_proj` (`whet.model.lora.side.ExpertSide`); None without one.
        down_side: The same beside `down_proj`.
        packed: For a quantised tensor, by its name, the matrix of each expert in place of it; the tensor is None then.
    """

    gate_up_side: nn.Module | None
    down_side: nn.Module | None

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        count, inner, self.is_clamped = experts.count, experts.width, experts.is_clamped
        self.register_module("gate_up_side", None)
        self.register_module("down_side", None)
        self.packed, self.transposed = nn.ModuleDict(), experts.is_clamped
        if experts.is_clamped:
            self.gate_up_proj = nn.Parameter(torch.empty(count, width, 2 * inner))
            self.down_proj = nn.Parameter(torch.empty(count, inner, width))
            self.gate_up_proj_bias = nn.Parameter(torch.zeros(count, 2 * inner))
            self.down_proj_bias = nn.Parameter(torch.zeros(count, width))
        else:
            self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, width))
            self.down_proj = nn.Parameter(torch.empty(count, width, inner))

    def run(self, expert: int, x_ND: torch.Tensor) -> torch.Tensor:
        """Return what one expert makes of its rows."""
        if not self.is_clamped:
            both = _beside(self.gate_up_side, expert, x_ND, self.product("gate_up_proj", expert, x_ND))
            gate, up = both.chunk(2, dim=-1)
            gated = dispatch.run(eager.swiglu, gate.contiguous(), up.contiguous())
            return _beside(self.down_side, expert, gated, self.product("down_proj", expert, gated))
        both = self.product("gate_up_proj", expert, x_ND, self.gate_up_proj_bias[expert])
        both = _beside(self.gate_up_side, expert, x_ND, both)
        gate, up = both[..., 0::2].clamp(max=CLAMP), both[..., 1::2].clamp(-CLAMP, CLAMP)
        gated = (up + 1) * gate * eager.row_wise(torch.sigmoid, SHARPNESS * gate)
        out_ND = self.product("down_proj", expert, gated, self.down_proj_bias[expert])
        return _beside(self.down_side, expert, gated, out_ND)

    def product(
        self, name: str, expert: int, x_ND: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the product of an expert's rows with its own part of one of the tensors."""
        if name in self.packed:
            return cast(PackedMatrix, cast(nn.ModuleList, self.packed[name])[expert])(x_ND, bias)
        weight = getattr(self, name)[expert]
        return eager.linear(x_ND, weight.t() if self.is_clamped else weight, bias)


def _beside(side: nn.Module | None, expert: int, x_ND: torch.Tensor, y_NF: torch.Tensor) -> torch.Tensor:
    """Return a product and what an adapter adds to it."""
    return y_NF if side is None else side(expert, x_ND, y_NF)


class MixtureOfExperts(nn.Module):
    """Router, experts, and for some families a part that all tokens go through."""

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self._config = experts
        self.add_module(experts.router, Router(config.hidden_size, experts))
        self.experts = ExpertWeights(config.hidden_size, experts)
        if experts.shared:
            self.add_module(experts.shared, MLP(config, experts.shared_width))
        if experts.has_shared_gate:
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def forward(self, x_ND: torch.Tensor, routed: RoutedLayer | None = None) -> torch.Tensor:
        """Return the weighted sum of what each token's experts make of it.

        Args:
            x_ND: The input.
            routed: What the router is told and where it notes what it does (`Router.forward`).
        """
        weights_NK, which_NK = self.get_submodule(self._config.router)(x_ND, routed)
        top_k, flat = which_NK.shape[1], which_NK.reshape(-1)
        order = flat.argsort(stable=True)  # by expert, and within one by row
        counts = torch.bincount(flat, minlength=self._config.count).tolist()
        pieces = x_ND.index_select(0, order // top_k).split(counts)
        outs = [self._expert(number, rows) for number, rows in enumerate(pieces) if len(rows)]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        out_NKD = torch.cat(outs).index_select(0, back).view(-1, top_k, x_ND.shape[1])
        # Summed by rank of the expert, one after the other: the same order wherever the row stands.
        out_ND = out_NKD[:, 0] * weights_NK[:, 0, None].to(x_ND.dtype)
        for rank in range(1, top_k):
            out_ND = out_ND + out_NKD[:, rank] * weights_NK[:, rank, None].to(x_ND.dtype)
        if self._config.shared:
            shared_ND = self.get_submodule(self._config.shared)(x_ND)
            if self._config.has_shared_gate:
                shared_ND = shared_ND * eager.row_wise(torch.sigmoid, self.shared_expert_gate(x_ND))
            out_ND = out_ND + shared_ND
        return out_ND

    def _expert(self, number: int, rows_ND: torch.Tensor) -> torch.Tensor:
        count = rows_ND.shape[0]
        return self.experts.run(number, F.pad(rows_ND, (0, 0, 0, -count % ROW_QUANTUM)))[:count]
