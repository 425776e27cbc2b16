"""Companions of the policy in training: reference, critic, and adaptive coefficients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from whet.algo.config import KL_COEF_RANGE, AlgoConfig, ValueConfig
from whet.generate.policy import Policy
from whet.generate.scoring import hidden_rows, of_all_ranks
from whet.model.attention import AttentionKind
from whet.model.lora.side import sides_of, targets_of
from whet.model.quant import packed_parts
from whet.model.transformer import LanguageModel
from whet.model.weights import build_model
from whet.ranks.fsdp import ParallelConfig, Sharding, fill, local, sharding
from whet.train.optim.step import OptimConfig, Optimizer, shard_layers
from whet.types import MicroBatch

REPLICATE = ParallelConfig()
KL_RAISE, KL_LOWER, KL_BAND = 1.5, 0.8, 1.5
ENTROPY_STEP = 0.005
LR_FACTOR = 5.0
ENTROPY_COEF_MAX = 1.0


class Reference:
    """The reference policy of the KL term: frozen, or following the policy.

    Where adapters are trained, the reference has its own and shares all other weights; a frozen one has none where they
    change nothing yet.

    Args:
        model: The policy's model; the reference is a copy of its current state.
        algo: Decides whether and how the reference follows.
        parallel: How the ranks hold it.
    """

    def __init__(self, model: LanguageModel, algo: AlgoConfig, parallel: ParallelConfig = REPLICATE) -> None:
        self.model = shared_copy(model)
        self._refresh_every, self._ema = algo.ref_refresh_every, algo.ref_ema
        self._own = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.model.requires_grad_(False)
        if not self.tensors():
            for target, side in sides_of(self.model):
                if side.magnitude is None and not side.lora_B.any():
                    target.set(None)
        shard_layers(self.model, parallel)
        if self.tensors():
            self._own = [(name, self.model.get_parameter(name)) for name, _ in self._own]

    @torch.no_grad()
    def follow(self, model: LanguageModel, step: int) -> None:
        """Move towards the policy after an optimizer step, if configured.

        Args:
            model: The policy's model.
            step: Steps done.
        """
        if self._refresh_every and step % self._refresh_every == 0:
            for name, mine in self._own:
                fill(mine, model.get_parameter(name))
        if self._ema is not None:
            for name, mine in self._own:
                local(mine).lerp_(local(model.get_parameter(name)), 1.0 - self._ema)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint tensors: none for a frozen reference, which a resumed run recreates."""
        if not self._refresh_every and self._ema is None:
            return {}
        return {f"reference/{name}": parameter for name, parameter in self._own}

    @torch.no_grad()
    def load_tensors(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `tensors`."""
        for name, tensor in self.tensors().items():
            fill(tensor, state[name])


def shared_copy(model: LanguageModel) -> LanguageModel:
    """Copy a model with all that is trained; frozen weights are shared, those in few bits too.

    The copy of a sharded model is sharded as that is, with frozen weights of its own.
    """
    if (own := sharding(model)) is not None:
        return _copy_of_shares(model, own)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    frozen += [tensor for part in packed_parts(model) for tensor in part.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in frozen})


@torch.no_grad()
def _copy_of_shares(model: LanguageModel, own: Sharding) -> LanguageModel:
    """Copy a sharded model share by share: no rank ever holds the whole."""
    with torch.device("meta"):
        twin = build_model(model.config).to(model.head_weight.dtype)
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    shard_layers(twin, own.config, own.device)
    for name, parameter in twin.named_parameters():
        fill(parameter, model.get_parameter(name))
    places = {(place.name, place.attribute): place for place in targets_of(twin)}
    for place, side in sides_of(model):
        places[place.name, place.attribute].set(copy.deepcopy(side))
    twin.num_valid_tokens, twin.sampling_defaults = model.num_valid_tokens, model.sampling_defaults
    twin.images = model.images
    twin.checkpoint_layers, twin.recompute = model.checkpoint_layers, model.recompute
    twin.loss_scale, twin.merged_adapters = model.loss_scale, model.merged_adapters
    return twin.train(model.training)


class Critic(torch.nn.Module):
    """The value model of PPO: a copy of the starting policy whose head returns one number per token, initially 0.

    Args:
        policy: The starting policy.
        value: Its arguments.
        optim: The policy's optimizer arguments; the learning rate is the critic's own.
        parallel: How the ranks hold its trunk; every rank has the head.
    """

    def __init__(
        self,
        policy: Policy,
        value: ValueConfig,
        optim: OptimConfig,
        parallel: ParallelConfig = REPLICATE,
    ) -> None:
        super().__init__()
        self._autocast = policy.autocast
        self._attention: AttentionKind = policy.attention
        self.trunk = shared_copy(policy.model)
        if not policy.model.config.tie_embeddings:
            self.trunk.head_weight.requires_grad_(False)
        weight_VD = policy.model.head_weight
        self.head = torch.nn.Parameter(
            torch.zeros(weight_VD.shape[1], dtype=weight_VD.dtype, device=weight_VD.device)
        )
        lr = LR_FACTOR * optim.lr if value.lr is None else value.lr
        self.lr_ratio = lr / optim.lr
        frozen = {f"trunk.{name}" for name, p in policy.model.named_parameters() if not p.requires_grad}
        self._own_names = [name for name, _ in self.named_parameters() if name not in frozen]
        shard_layers(self.trunk, parallel)
        self.optimizer = Optimizer(self, replace(optim, lr=lr))

    def values(self, micro: MicroBatch) -> torch.Tensor:
        """Estimate the return from before each trained token [M]; differentiable unless autograd is off."""
        hidden_MD = hidden_rows(self.trunk, micro, autocast=self._autocast, attention=self._attention)
        wide = torch.float64 if self.head.dtype == torch.float64 else torch.float32
        return of_all_ranks(hidden_MD.to(wide) @ self.head.to(wide), micro)

    def _own(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return what the critic does not share with the policy."""
        return [(name, self.get_parameter(name)) for name in self._own_names]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint tensors: weights and optimizer state."""
        state = {f"critic/{name}": parameter.detach() for name, parameter in self._own()}
        return state | {f"critic/optimizer/{name}": t for name, t in self.optimizer.tensors().items()}

    @torch.no_grad()
    def load_tensors(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `tensors`."""
        for name, parameter in self._own():
            fill(parameter, state[f"critic/{name}"])
        prefix = "critic/optimizer/"
        own = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
        self.optimizer.load_tensors(own)


class Coefficients:
    """Current weights of the KL term and of the entropy bonus: constant, scheduled or adaptive.

    Args:
        algo: Start values, targets and schedule.

    Attributes:
        kl: Weight of the KL term.
        entropy: Weight of the entropy bonus, 0 while the entropy is above its target.

    Source: KL controller after 1909.08593 section 2.2, in the stepwise form of PPO's code (x1.5, x0.8, clamped);
    adaptive entropy: Skywork-OR1 2505.22312 section 4. Deviation: it uses the entropy of the previous step.
    """

    def __init__(self, algo: AlgoConfig) -> None:
        self._algo = algo
        self.kl = algo.kl_coef
        self._entropy = algo.entropy_coef
        self._last_entropy = 0.0

    @property
    def entropy(self) -> float:
        """Weight of the entropy bonus in the next update."""
        target = self._algo.entropy_target
        return self._entropy if target is None or self._last_entropy <= target else 0.0

    def begin_step(self, progress: float) -> None:
        """Follow the schedule.

        Args:
            progress: Completed share of the run's steps, 0 to 1.
        """
        final = self._algo.entropy_coef_final
        if final is not None:
            self._entropy = self._algo.entropy_coef + (final - self._algo.entropy_coef) * progress

    def end_step(self, *, kl: float, entropy: float) -> None:
        """Adapt to the step's measurements, in nats per token."""
        target = self._algo.kl_target
        if target is not None:
            factor = KL_RAISE if kl > KL_BAND * target else KL_LOWER if kl < target / KL_BAND else 1.0
            self.kl = min(max(self.kl * factor, KL_COEF_RANGE[0]), KL_COEF_RANGE[1])
        if self._algo.entropy_target is not None:
            move = ENTROPY_STEP if entropy < self._algo.entropy_target else -ENTROPY_STEP
            self._entropy = min(max(self._entropy + move, 0.0), ENTROPY_COEF_MAX)
        self._last_entropy = entropy

    def state(self) -> dict[str, Any]:
        """Return the checkpoint state."""
        return {"kl": self.kl, "entropy": self._entropy, "last_entropy": self._last_entropy}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        self.kl, self._entropy = float(state["kl"]), float(state["entropy"])
        self._last_entropy = float(state["last_entropy"])
