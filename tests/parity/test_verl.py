"""verl's own loss and advantage functions against whet's, in float64, on the same padded numbers.

verl 0.9 needs ray, tensordict and an older transformers, so it is not an extra: `pip install verl --no-deps` (or its
unpacked wheel on PYTHONPATH) is enough here. Its file core_algos.py is loaded as it is; what it imports and these
functions do not use (configuration classes, TensorDict) is replaced by empty stand-ins.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from needs import needs

from whet.algo.advantages import group_advantages
from whet.algo.losses import aggregation_weight, loss_denominator, policy_loss, weighted_sum

FOUND = importlib.util.find_spec("verl")
pytestmark = [
    needs("verl"),
    pytest.mark.filterwarnings("ignore"),
]

LENGTHS = torch.tensor([3, 9, 5, 7, 2, 8])
ROWS, LONGEST = len(LENGTHS), int(LENGTHS.max())
TRAINED_BT = torch.arange(LONGEST) < LENGTHS[:, None]


class Settings(dict):
    """A configuration: keys as attributes, None for the others."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@pytest.fixture(scope="module")
def core() -> Iterator[Any]:
    """verl.trainer.ppo.core_algos, with stand-ins while this module's tests run."""
    assert FOUND is not None
    assert FOUND.origin is not None
    root, before = Path(FOUND.origin).parent, dict(sys.modules)

    def stand_in(name: str, folder: str | None = None, **members: Any) -> None:
        module = ModuleType(name)
        module.__dict__.update(members)
        if folder is not None:
            module.__path__ = [str(root / folder)]
        sys.modules[name] = module

    stand_in("omegaconf", DictConfig=Settings)
    stand_in("tensordict", TensorDict=dict)
    for name, folder in (("verl", "."), ("verl.trainer", "trainer"), ("verl.trainer.ppo", "trainer/ppo")):
        stand_in(name, folder)
    stand_in("verl.utils", "utils")
    stand_in("verl.workers", "workers")
    stand_in("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
    stand_in("verl.workers.config", ActorConfig=Settings)
    groupwise = importlib.import_module("verl.utils.groupwise")
    for name in ("as_torch_index", "group_mean_std"):
        setattr(sys.modules["verl.utils"], name, getattr(groupwise, name))
    yield importlib.import_module("verl.trainer.ppo.core_algos")
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] in ("verl", "omegaconf", "tensordict"):
            del sys.modules[name]
    sys.modules.update(before)


LOSSES: dict[str, tuple[str, dict[str, float], str, dict[str, Any]]] = {
    "vanilla": ("token-mean", {"clip_ratio_c": 1.5}, "token_mean", {"clip_high": 0.28, "dual_clip": 1.5}),
    "gspo": ("seq-mean-token-mean", {}, "sequence_mean", {"ratio": "sequence", "clip_high": 0.28}),
    "geo_mean": (
        "seq-mean-token-mean",
        {},
        "sequence_mean",
        {"ratio": "sequence", "surrogate": "geometric", "clip_high": 0.28},
    ),
    "cispo": ("token-mean", {}, "token_mean", {"surrogate": "weight", "clip_high": 0.28}),
    "sapo": ("seq-mean-token-mean", {}, "sequence_mean", {"surrogate": "sigmoid"}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_verls(name: str, core: Any) -> None:
    mode, settings, aggregation, arguments = LOSSES[name]
    generator = torch.Generator().manual_seed(0)
    shape = {"size": (ROWS, LONGEST), "generator": generator, "dtype": torch.float64}
    old_BT = 0.3 * torch.randn(**shape) - 2
    policy_BT = (old_BT + 0.3 * torch.randn(**shape)).requires_grad_()
    advantages_BT = torch.tensor([1.0, -0.5, 0.7, -1.2, 0.4, -0.9]).double()[:, None].expand(-1, LONGEST)
    config = Settings(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=10.0)
    config |= {"tau_pos": 1.0, "tau_neg": 1.05, "global_batch_info": {}, "policy_loss": Settings()} | settings
    theirs, _ = core.get_policy_loss_fn(name)(
        old_log_prob=old_BT,
        log_prob=policy_BT,
        advantages=advantages_BT,
        response_mask=TRAINED_BT.double(),
        loss_agg_mode=mode,
        config=Settings(config),
    )
    (their_gradient,) = torch.autograd.grad(theirs, policy_BT)
    sequence_M = torch.arange(ROWS).repeat_interleave(LENGTHS)
    loss_M, _, _ = policy_loss(
        policy_BT[TRAINED_BT],
        old_BT[TRAINED_BT],
        advantages_BT[TRAINED_BT],
        sequence_M=sequence_M,
        **arguments,
    )
    weights_B = torch.tensor([aggregation_weight(int(n), int(n), aggregation) for n in LENGTHS]).double()
    denominator = loss_denominator(
        aggregation, num_tokens=int(LENGTHS.sum()), num_sequences=ROWS, max_length=LONGEST
    )
    ours = weighted_sum(loss_M, weights_B[sequence_M], denominator)
    (gradient,) = torch.autograd.grad(ours, policy_BT)
    # verl adds 1e-8 to lengths, and sapo's temperatures are float32.
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
    torch.testing.assert_close(gradient, their_gradient * TRAINED_BT, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("function", "settings", "arguments"),
    [
        ("compute_grpo_outcome_advantage", {}, {"eps": 1e-6}),
        ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}, {"scale": "none"}),
        ("compute_rloo_outcome_advantage", {}, {"scale": "none", "baseline": "leave_one_out"}),
    ],
    ids=["grpo", "dr_grpo", "rloo"],
)
def test_advantages_are_verls(
    function: str, settings: dict[str, Any], arguments: dict[str, Any], core: Any
) -> None:
    rewards_B = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.25, 0.0], dtype=torch.float64)
    rewards_BT = torch.zeros(ROWS, LONGEST, dtype=torch.float64)
    rewards_BT[torch.arange(ROWS), LENGTHS - 1] = rewards_B
    theirs_BT, _ = getattr(core, function)(
        token_level_rewards=rewards_BT,
        response_mask=TRAINED_BT.double(),
        index=np.array(["a"] * 3 + ["b"] * 3, dtype=object),
        **settings,
    )
    ours_PG = group_advantages(rewards_B.view(2, 3), **arguments)
    torch.testing.assert_close(theirs_BT[:, 0], ours_PG.flatten(), rtol=1e-9, atol=1e-9)
