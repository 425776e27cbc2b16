"""What routers of experts are told in a pass, and what they did: choices to take, choices and loads to note."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from whet.model.config import ModelConfig
from whet.types import Segment

MOST_IN_A_BYTE = 255
"""Up to so many experts a choice takes one byte, else two. All ones stand for a choice that was not recorded."""


def record_bytes(config: ModelConfig) -> int:
    """Return the bytes that record a token's experts in all layers; 0 for a model without experts."""
    experts = config.block.experts
    if experts is None:
        return 0
    num_layers = sum(spec.has_experts for spec in config.layers)
    return num_layers * experts.top_k * (1 if experts.count <= MOST_IN_A_BYTE else 2)


class RoutedLayer:
    """One layer's part of a `Routing`.

    Args:
        given_NK: Experts to take, below 0 where the router chooses; None: it chooses everywhere.
        weights_N: How often each row counts in the mass; None adds nothing up.

    Attributes:
        chosen_NK: The experts that were taken, those of row padding included.
        mass_E: Sum of the rows' probabilities, differentiable.
    """

    def __init__(self, given_NK: torch.Tensor | None, weights_N: torch.Tensor | None) -> None:
        self._given, self._weights = given_NK, weights_N
        self.chosen_NK: torch.Tensor | None = None
        self.mass_E: torch.Tensor | None = None

    def settle(self, own_NK: torch.Tensor, probs_NE: torch.Tensor) -> torch.Tensor:
        """Return the experts to take, and note them.

        Activation checkpointing computes a layer again in the backward pass and expects the same saved tensors, from
        the same compiled code: so this does the same each time, and what is noted then is read by nobody.

        Args:
            own_NK: The router's own choice.
            probs_NE: Its probabilities of all experts, differentiable.
        """
        which_NK = own_NK
        if self._given is not None:
            surplus = own_NK.shape[0] - self._given.shape[0]
            given_NK = F.pad(self._given, (0, 0, 0, surplus), value=-1)
            which_NK = torch.where(given_NK < 0, own_NK, given_NK)
        self.chosen_NK = which_NK
        if self._weights is not None:
            surplus = own_NK.shape[0] - self._weights.shape[0]
            self.mass_E = (probs_NE * F.pad(self._weights, (0, surplus))[:, None]).sum(0)
        return which_NK


class Routing:
    """What the routers of all layers are told in one pass, and what they did.

    Args:
        config: Shape of a model with experts.
        given_NX: Choices to take, as `encoded` writes them; None leaves them to the routers.
        weights_N: How often each row counts in loads and masses; None adds nothing up.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        given_NX: torch.Tensor | None = None,
        weights_N: torch.Tensor | None = None,
    ) -> None:
        assert config.block.experts is not None
        self._experts, self._weights = config.block.experts, weights_N
        places = [index for index, spec in enumerate(config.layers) if spec.has_experts]
        given_NLK = None
        if given_NX is not None:
            numbers_NZ = given_NX if self._experts.count <= MOST_IN_A_BYTE else given_NX.view(torch.int16)
            numbers_NZ = torch.where(numbers_NZ == self._unrecorded, -1, numbers_NZ.long())
            given_NLK = numbers_NZ.view(-1, len(places), self._experts.top_k)
        self._layers = {
            index: RoutedLayer(None if given_NLK is None else given_NLK[:, place], weights_N)
            for place, index in enumerate(places)
        }

    @property
    def _unrecorded(self) -> int:
        return 255 if self._experts.count <= MOST_IN_A_BYTE else -1

    def layer(self, index: int) -> RoutedLayer | None:
        """Return a layer's part; None for a layer without experts."""
        return self._layers.get(index)

    def encoded(self, num_rows: int) -> torch.Tensor:
        """Return the choices as uint8 [N, X]: the bytes of a row, layer by layer, best expert first.

        Args:
            num_rows: Rows of the pass, without row padding.
        """
        kind = torch.uint8 if self._experts.count <= MOST_IN_A_BYTE else torch.int16
        chosen_NLK = torch.stack([chosen_NK[:num_rows] for chosen_NK in self._chosen()], 1)
        return chosen_NLK.flatten(1).to(kind).view(torch.uint8)

    def load_LE(self) -> torch.Tensor:
        """Return how often each expert of each layer was taken, float64."""
        assert self._weights is not None
        counts_NK = self._weights.double()[:, None].expand(-1, self._experts.top_k)
        loads = [
            counts_NK.new_zeros(self._experts.count).index_add_(
                0, chosen_NK[: len(counts_NK)].flatten(), counts_NK.flatten()
            )
            for chosen_NK in self._chosen()
        ]
        return torch.stack(loads)

    def mass_E(self) -> torch.Tensor:
        """Return the sum of each expert's probabilities over layers and rows, differentiable."""
        return torch.stack([part.mass_E for part in self._layers.values() if part.mass_E is not None]).sum(0)

    def _chosen(self) -> list[torch.Tensor]:
        return [part.chosen_NK for part in self._layers.values() if part.chosen_NK is not None]


def times_read(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """Return of how many sequences each row is a part, float32 [N]: a shared prompt's rows count for all that share it.

    Args:
        segments: Those of a packed batch.
        device: Where the numbers go.
    """
    weights_N = torch.zeros(sum(segment.length for segment in segments))
    prompts = {segment.prefix for segment in segments if segment.shared}
    for segment in segments:
        if segment.shared or segment.start not in prompts:
            weights_N[segment.start : segment.start + segment.length] += 1
            weights_N[segment.prefix : segment.prefix + segment.shared] += 1
    return weights_N.to(device)
