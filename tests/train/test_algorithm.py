"""Options of the objective: each is read by the algorithm that it is given to, or refused in one line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import play

from whet.algo.config import BOUNDS, AlgoConfig, OffPolicyConfig, ValueConfig, check_combination
from whet.generate.policy import PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.recipes.rl import ALGORITHMS
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig

STEP: dict[str, Any] = {"num_prompts": 6, "group_size": 4, "max_new_tokens": 128, "num_steps": 10}
STEP["weights"] = {"correct": 1.0, "format": 0.1}


def message_of(wrong: type, options: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=".") as caught:
        wrong(**options)
    text = str(caught.value)
    assert "\n" not in text
    return text


ALGO_ERRORS = [
    # out of range: the field, what it got, what is expected
    ({"eps": -1.0}, "eps = -1.0: expected 0 or more"),
    ({"eps": float("nan")}, "eps = nan: expected 0 or more"),
    ({"std_ddof": 2}, "std_ddof = 2: expected 0 to 1"),
    ({"clip_low": 1.5}, "clip_low = 1.5: expected 0 to 1"),
    ({"clip_low": -0.1}, "clip_low = -0.1: expected 0 or more"),
    ({"surrogate": "weight", "clip_low": 1.5}, "clip_low = 1.5: expected 0 to 1"),
    (
        {"surrogate": "geometric", "ratio": "sequence", "clip_low": -0.1},
        "clip_low = -0.1: expected 0 or more",
    ),
    ({"clip_high": -0.1}, "clip_high = -0.1: expected 0 or more"),
    ({"advantage_clip": 0.0}, "advantage_clip = 0.0: expected above 0"),
    ({"entropy_top_share": 0.0}, "entropy_top_share = 0.0: expected above 0"),
    ({"entropy_top_share": 1.1}, "entropy_top_share = 1.1: expected 0 to 1"),
    ({"surrogate": "sigmoid", "tau_positive": 0.0}, "tau_positive = 0.0: expected above 0"),
    ({"surrogate": "sigmoid", "tau_negative": -1.0}, "tau_negative = -1.0: expected above 0"),
    ({"kl": "k3_loss", "kl_coef": -0.1}, "kl_coef = -0.1: expected 0 or more"),
    ({"kl": "k2_loss", "kl_coef": 0.1, "kl_target": 0.0}, "kl_target = 0.0: expected above 0"),
    ({"kl": "k2_loss", "kl_coef": 0.1, "ref_ema": 1.1}, "ref_ema = 1.1: expected 0 to 1"),
    ({"kl": "k2_loss", "kl_coef": 0.1, "ref_refresh_every": -1}, "ref_refresh_every = -1: expected 0 or"),
    ({"entropy_coef": -0.1}, "entropy_coef = -0.1: expected 0 or more"),
    ({"entropy_coef": 0.1, "entropy_coef_final": -1.0}, "entropy_coef_final = -1.0: expected 0 or more"),
    ({"entropy_coef": 0.1, "entropy_target": 0.0}, "entropy_target = 0.0: expected above 0"),
    (
        {"uninformative": "refill", "max_refills": 0},
        "max_refills = 0 with uninformative = refill: expected 1",
    ),
    (
        {"kl": "k2_loss", "kl_coef": 11.0, "kl_target": 0.1},
        "kl_coef = 11.0 with kl_target: expected at most 10",
    ),
    ({"uninformative": "refill", "max_refills": -1}, "max_refills = -1: expected 0 or more"),
    ({"overlong": "soft", "overlong_cache": -1}, "overlong_cache = -1: expected 0 or more"),
    ({"num_minibatches": 0}, "num_minibatches = 0: expected 1 or more"),
    ({"num_epochs": 0}, "num_epochs = 0: expected 1 or more"),
    # combinations
    ({"surrogate": "geometric"}, "geometric is a mean over the sequence; set ratio to sequence"),
    (
        {"surrogate": "weight", "ratio": "sequence"},
        "ratio = sequence with surrogate = weight: expected clip or",
    ),
    ({"tau_positive": 2.0}, "tau_positive = 2.0 is not read by surrogate clip; leave it out"),
    ({"tau_negative": 2.0}, "tau_negative = 2.0 is not read by surrogate clip; leave it out"),
    ({"surrogate": "sigmoid", "clip_low": 0.1}, "clip_low = 0.1 is not read by surrogate sigmoid"),
    ({"surrogate": "logprob", "clip_high": 0.1}, "clip_high = 0.1 is not read by surrogate logprob"),
    ({"dual_clip": 1.2}, "dual_clip = 1.2: expected above 1 . clip_high"),
    ({"surrogate": "weight", "dual_clip": 3.0}, "dual_clip = 3.0: expected .* with surrogate clip"),
    ({"surrogate": "logprob", "num_epochs": 2}, "logprob with 2 updates per batch: .*use clip, or"),
    ({"surrogate": "logprob", "num_minibatches": 2}, "logprob with 2 updates per batch: .*use clip, or"),
    ({"baseline": "none", "scale": "none"}, "uninformative = drop with baseline = none: .*set unin"),
    ({"baseline": "value", "scale": "none", "uninformative": "refill"}, "= refill with baseline = value"),
    ({"baseline": "value", "uninformative": "keep"}, "scale = group with baseline = value: set it to none"),
    (
        {"baseline": "value", "scale": "none", "uninformative": "keep", "eps": 0.1},
        "eps = 0.1 is not read with baseline = value",
    ),
    (
        {"baseline": "value", "scale": "none", "uninformative": "keep", "advantage_clip": 0.1},
        "advantage_clip = 0.1 is not read with baseline = value",
    ),
    ({"scale": "none", "eps": 0.1}, "eps = 0.1 is not read with scale = none"),
    ({"scale": "mean", "std_ddof": 0}, "std_ddof = 0 is not read with scale = mean"),
    ({"multi_reward": "normalise", "scale": "none"}, "defined for baseline group_mean with scale group"),
    (
        {"multi_reward": "normalise", "baseline": "leave_one_out"},
        "defined for baseline group_mean with scale group",
    ),
    ({"max_refills": 3}, "max_refills = 3 is not read with uninformative = drop; leave it out"),
    ({"overlong": "hard", "overlong_cache": 4}, "overlong_cache = 4 is not read with overlong = hard"),
    ({"advantage_clip": 2.0, "whiten": True}, "advantage_clip = 2.0 with whiten: .*give one"),
    (
        {"surrogate": "geometric", "ratio": "sequence", "kl": "k1_reward", "kl_coef": 0.1},
        "surrogate = geometric clips .*: use clip",
    ),
    ({"kl": "k2_loss"}, "kl = k2_loss with kl_coef = 0.0: give both or neither"),
    ({"kl_coef": 0.1}, "kl = none with kl_coef = 0.1: give both or neither"),
    ({"ref_refresh_every": 5}, "ref_refresh_every = 5 is not read with kl = none, which loads no reference"),
    ({"ref_ema": 0.9}, "ref_ema = 0.9 is not read with kl = none"),
    ({"kl_target": 0.1}, "kl_target = 0.1 is not read with kl = none"),
    ({"kl": "k2_loss", "kl_coef": 0.1, "ref_ema": 0.9, "ref_refresh_every": 2}, "one way only; give one"),
    ({"kl": "k2_loss", "kl_coef": 0.1, "ref_refresh_every": 1}, "KL term 0 at the one update .*more rarely"),
    ({"kl": "k1_reward", "kl_coef": 0.1, "ref_ema": 0.0}, "KL term 0 at the one update .*more rarely"),
    (
        {"entropy_coef": 0.1, "entropy_coef_final": 0.3, "entropy_target": 0.3},
        "entropy_target adapts the weight, entropy_coef_final schedules it; give one",
    ),
]


@pytest.mark.parametrize(("options", "message"), ALGO_ERRORS)
def test_algo_refuses_in_one_line(options: dict[str, Any], message: str) -> None:
    assert re.search(message, message_of(AlgoConfig, options))


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (OffPolicyConfig, {"staleness": -1}, "staleness = -1: expected 0 or more"),
        (OffPolicyConfig, {"low": 0.5}, "low = 0.5 is not read without a correction; leave it out"),
        (OffPolicyConfig, {"high": 0.5}, "high = 0.5 is not read without a correction; leave it out"),
        (
            OffPolicyConfig,
            {"correction": "token_mask"},
            "proximal = sampler: .*would count twice; set proximal to recomputed",
        ),
        (
            OffPolicyConfig,
            {"proximal": "recomputed", "correction": "token_mask", "low": -1.0},
            "low = -1.0: expected 0 or",
        ),
        (
            OffPolicyConfig,
            {"proximal": "recomputed", "correction": "token_truncate", "low": 3.0},
            "low = 3.0, high = 2.0: expected low below high",
        ),
        (ValueConfig, {"lr": 0.0}, "lr = 0.0: expected above 0"),
        (ValueConfig, {"gamma": 1.1}, "gamma = 1.1: expected 0 to 1"),
        (ValueConfig, {"lam": -0.1}, "lam = -0.1: expected 0 to 1"),
        (ValueConfig, {"clip": 0.0}, "clip = 0.0: expected above 0"),
        (ValueConfig, {"warmup_steps": -1}, "warmup_steps = -1: expected 0 or more"),
    ],
)
def test_the_other_groups_refuse_in_one_line(config: type, options: dict[str, Any], message: str) -> None:
    assert re.search(message, message_of(config, options))


REINFORCE = ALGORITHMS["reinforce"]()
PPO = ALGORITHMS["ppo"]()


@pytest.mark.parametrize(
    ("algo", "off_policy", "value", "step", "message"),
    [
        ({}, {}, {}, {"group_size": 1}, "group_size = 1: .*needs at least 2; use baseline none or value"),
        ({"baseline": "leave_one_out", "scale": "none"}, {}, {}, {"group_size": 1}, "needs at least 2"),
        (
            {"baseline": "none", "scale": "mean", "uninformative": "keep"},
            {},
            {},
            {"group_size": 1},
            "needs at least 2",
        ),
        ({"num_minibatches": 4}, {}, {}, {}, "num_minibatches = 4: expected a divisor of num_prompts = 6"),
        (
            {"overlong": "soft", "overlong_cache": 129},
            {},
            {},
            {},
            "overlong_cache = 129: expected at most sampling.max_new_tokens = 128",
        ),
        (
            {"multi_reward": "normalise"},
            {},
            {},
            {"weights": {"correct": 1.0, "format": 0.0}},
            "a reward of weight 0: it would never train",
        ),
        ({}, {"staleness": 10}, {}, {}, "off_policy.staleness = 10: expected below num_steps = 10"),
        (
            {"kl": "k3_loss", "kl_coef": 0.1, "ref_refresh_every": 12},
            {},
            {},
            {},
            "algo.ref_refresh_every = 12: expected below num_steps = 10",
        ),
        (
            {"multi_reward": "normalise"},
            {},
            {},
            {"weights": {"correct": 1.0}},
            "normalise: expected 2 rewards or more",
        ),
        (
            {"ratio": "sequence"},
            {"proximal": "recomputed", "correction": "token_mask"},
            {},
            {},
            "do not fit a sequence-level ratio; use sequence_truncate",
        ),
        (
            {"ratio": "sequence"},
            {"proximal": "recomputed", "correction": "token_truncate"},
            {},
            {},
            "do not fit a sequence-level ratio; use sequence_truncate",
        ),
        (
            {"surrogate": "logprob"},
            {"proximal": "recomputed"},
            {},
            {},
            "nothing reads a ratio; give a correction",
        ),
        ({"surrogate": "logprob"}, {"staleness": 1}, {}, {}, "staleness = 1 .*use surrogate clip, or"),
        (
            {},
            {"staleness": 1, "proximal": "recomputed"},
            {},
            {},
            "nothing corrects for stale samples; give a correction, or set proximal to sampler",
        ),
        ({}, {}, {"gamma": 0.9}, {}, "value.* is read with algo.baseline = value only; leave it out"),
    ],
)
def test_combinations_are_refused_in_one_line(
    algo: dict[str, Any],
    off_policy: dict[str, Any],
    value: dict[str, Any],
    step: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_combination(
            AlgoConfig(**algo), OffPolicyConfig(**off_policy), ValueConfig(**value), **STEP | step
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("algo", "off_policy", "step"),
    [
        (REINFORCE, {}, {"group_size": 1}),
        (PPO, {}, {"group_size": 1}),
        (replace(REINFORCE, scale="batch"), {}, {"group_size": 1}),
        (REINFORCE, {"staleness": 1, "proximal": "recomputed", "correction": "sequence_truncate"}, {}),
        (AlgoConfig(), {"staleness": 3}, {}),
        (AlgoConfig(), {"proximal": "recomputed"}, {}),
        (AlgoConfig(ratio="sequence"), {"proximal": "recomputed", "correction": "geometric_mask"}, {}),
        (AlgoConfig(kl="k2_loss", kl_coef=0.1, ref_refresh_every=1, num_epochs=2), {}, {}),
        (AlgoConfig(overlong="soft", overlong_cache=128), {}, {}),
    ],
)
def test_sensible_combinations_are_accepted(
    algo: AlgoConfig, off_policy: dict[str, Any], step: dict[str, Any]
) -> None:
    check_combination(algo, OffPolicyConfig(**off_policy), ValueConfig(), **STEP | step)


def make_config(tiny_policy: PolicyConfig, **changes: Any) -> RLConfig:
    return replace(RLConfig(out="nowhere", policy=tiny_policy), **changes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"group_size": 0, "algo": REINFORCE}, "group_size = 0: expected 1 or more"),
        ({"num_prompts": 0}, "num_prompts = 0: expected 1 or more"),
        ({"validate_every": 0}, "validate_every = 0: expected 1 or more"),
        ({"save_every": 0}, "save_every = 0: expected 1 or more"),
        ({"validation_problems": -1}, "validation_problems = -1: expected 0 or more"),
        ({"ratio_tolerance": -0.1}, "ratio_tolerance = -0.1: expected 0 or more"),
        ({"sampling": SamplingParams(temperature=0.0)}, "temperature = 0: .*use 1.0 for training"),
        (
            {"algo": PPO, "value": ValueConfig(warmup_steps=100)},
            "value.warmup_steps = 100: expected below num_steps = 100",
        ),
        (
            {
                "algo": AlgoConfig(kl="k2_loss", kl_coef=0.1, ref_ema=0.9),
                "optim": OptimConfig(precision="bfloat16_master"),
            },
            "16 bits cannot hold its small moves; use ref_refresh_every, or float32",
        ),
        (
            {"control": "random_reward", "algo": ALGORITHMS["gdpo"]()},
            "expected 2 rewards or more",
        ),
    ],
)
def test_the_run_refuses_before_anything_is_loaded(
    wrong: dict[str, Any], message: str, tiny_policy: PolicyConfig
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_config(tiny_policy, **wrong)
    assert "\n" not in str(caught.value)


def test_the_overlong_punishment_counts_as_a_reward(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    algo = replace(ALGORITHMS["gdpo"](), overlong="hard")
    config = make_config(tiny_policy, algo=algo, rewards={"correct": 1.0})
    assert config.reward_weights == {"correct": 1.0, "overlong": 1.0}


OTHER: dict[str, Any] = {
    "std_ddof": 0,
    "eps": 0.1,
    "multi_reward": "normalise",
    "advantage_clip": 0.3,
    "ratio": "sequence",
    "clip_low": 0.05,
    "clip_high": 0.05,
    "dual_clip": 1.25,
    "tau_positive": 2.0,
    "tau_negative": 3.0,
    "entropy_top_share": 0.3,
    "kl_coef": 0.5,
    "kl_target": 1e-4,
    "ref_refresh_every": 1,
    "ref_ema": 0.5,
    "entropy_coef": 0.5,
    "aggregation": "prompt_mean",
    "num_minibatches": 2,
    "num_epochs": 2,
    "overlong": "filter",
}
"""Another value of every field that the objective reads, the rollouts apart."""


@pytest.mark.ci
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_option_is_read_or_refused(name: str) -> None:
    base = ALGORITHMS[name]()
    start = play(base).weights
    num_read = 0
    for field, value in (OTHER | {"whiten": not base.whiten}).items():
        try:
            changed = replace(base, **{field: value})
            check_combination(changed, OffPolicyConfig(), ValueConfig(), **STEP)
        except ValueError:
            continue
        if changed != base:
            assert not torch.equal(play(changed).weights, start), f"{name}: nothing reads {field} = {value}"
            num_read += 1
    assert num_read >= 6


@pytest.mark.parametrize("kind", [kind for kind in BOUNDS if kind != "none"])
def test_every_off_policy_option_is_read(kind: Any) -> None:
    # Bounds inside the made-up mismatch of the groups, so that moving one matters.
    low, high = (0.1, 0.25) if kind == "k3_mask" else (0.8, 1.3)
    recomputed = OffPolicyConfig(proximal="recomputed", correction=kind)
    settings = [
        recomputed,
        replace(recomputed, low=low, high=high),
        replace(recomputed, low=low / 1.5, high=high),
        replace(recomputed, low=low, high=high * 1.5),
    ]
    weights = [play(AlgoConfig(num_epochs=2), off_policy=one, num_steps=1).weights for one in settings]
    for first, second in ((0, 1), (1, 2), (1, 3)):
        assert not torch.equal(weights[first], weights[second])


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "change", [{"lr": 1e-2}, {"gamma": 0.9}, {"lam": 0.9}, {"clip": 1e-3}, {"warmup_steps": 1}]
)
def test_every_option_of_the_critic_is_read(change: dict[str, Any]) -> None:
    algo = replace(PPO, clip_low=1.0, clip_high=10.0)
    base = ValueConfig(lr=5e-3)
    first, second = (play(algo, value=value, num_steps=3) for value in (base, replace(base, **change)))
    assert not torch.equal(first.weights, second.weights)


def test_what_follows_from_the_arguments() -> None:
    assert AlgoConfig(num_minibatches=3, num_epochs=2).num_updates == 6
    # DAPO 2503.14476: a ramp of 4,096 before 20,480 tokens, a fifth.
    assert AlgoConfig(overlong="soft").ramp(20_480) == 4096
    assert AlgoConfig(overlong="soft", overlong_cache=100).ramp(20_480) == 100
    assert AlgoConfig().is_group_scaled
    assert not AlgoConfig(multi_reward="normalise").is_group_scaled  # each reward is divided, not their sum
    assert not AlgoConfig(scale="batch").is_group_scaled
    assert not AlgoConfig().has_entropy_bonus
    for options in ({"entropy_coef": 0.1}, {"entropy_coef_final": 0.1}, {"entropy_target": 0.5}):
        assert AlgoConfig(**options).has_entropy_bonus, options
