"""Settings of the RL algorithms, and checks of combinations that cannot be exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from whet.algo.advantages import Scale
from whet.algo.corrections import BOUNDS, Correction
from whet.algo.losses import Aggregation, RatioLevel, Surrogate
from whet.types import UnreadError

Overlong = Literal["none", "soft", "hard", "filter"]
KLKind = Literal["none", "log", "k1_reward", "k2_loss", "k3_loss", "k3_unbiased"]
KL_COEF_RANGE = (1e-5, 10.0)
"""Bounds of the adaptive weight."""


def _require(config: Any, names: str, low: float, high: float = float("inf")) -> None:
    """Raise ValueError unless each named field is None or within [low, high]."""
    for name in names.split():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            bounds = f"{low:g} or more" if high == float("inf") else f"{low:g} to {high:g}"
            raise ValueError(f"{name} = {value}: expected {bounds}")


def _require_positive(config: Any, names: str) -> None:
    """Raise ValueError unless each named field is None or above 0."""
    for name in names.split():
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} = {value}: expected above 0")


def _leave_out(config: Any, names: str, reason: str) -> None:
    """Raise ValueError if a field is set that nothing reads."""
    for field in fields(config):
        if field.name in names.split() and getattr(config, field.name) != field.default:
            raise UnreadError(
                f"{field.name} = {getattr(config, field.name)} is not read {reason}; leave it out", field.name
            )


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """The policy objective: advantage x ratio x surrogate x aggregation x KL x entropy. GRPO by default."""

    baseline: Literal["group_mean", "leave_one_out", "none", "value"] = "group_mean"
    """Subtracted from the reward: group_mean (GRPO), leave_one_out (RLOO), none (REINFORCE), or value: a critic
    with GAE (PPO)."""
    scale: Scale = "group"
    """Divisor of the difference: the standard deviation of its group (GRPO) or of the batch, the group's mean
    (MaxRL), or none (Dr. GRPO)."""
    std_ddof: int = 1
    """1 for the sample, 0 for the population standard deviation."""
    eps: float = 1e-4
    """Added to the standard deviation."""
    whiten: bool = False
    """Shift and scale all token advantages of the step to mean 0 and variance 1 (REINFORCE++, PPO)."""
    multi_reward: Literal["sum", "normalise"] = "sum"
    """Several rewards: advantage of their weighted sum, or each normalised in its group, then summed and whitened
    over the samples of the step (GDPO)."""
    advantage_clip: float | None = None
    """Largest absolute advantage of a sample, or none."""
    ratio: RatioLevel = "token"
    """Level of the importance ratio: each token's, or sequence: its geometric mean over the completion (GSPO)."""
    surrogate: Surrogate = "clip"
    """clip (PPO, GRPO), geometric (GMPO), weight (CISPO), sigmoid (SAPO) or logprob (REINFORCE: no ratio)."""
    clip_low: float = 0.2
    """Lower clip range of the ratio (of its logarithm with geometric)."""
    clip_high: float = 0.2
    """Upper clip range; 0.28 is DAPO's clip-higher."""
    dual_clip: float | None = None
    """With a negative advantage the ratio counts at most this much (dual clip, two-sided clip delta), or none."""
    tau_positive: float = 1.0
    """sigmoid: temperature for positive advantages."""
    tau_negative: float = 1.05
    """sigmoid: temperature for the others."""
    entropy_top_share: float = 1.0
    """Only this share of the step's tokens, those of highest entropy, receives policy gradient (0.2 for 80/20)."""
    aggregation: Aggregation = "token_mean"
    """token_mean (DAPO), sequence_mean (GRPO as published), prompt_mean, sequence_sum or constant (Dr. GRPO);
    denominators are global."""
    kl: KLKind = "none"
    """KL to the reference: log (only measured), k1_reward (in the reward), or as a loss k2_loss, k3_loss (GRPO's),
    k3_unbiased."""
    kl_coef: float = 0.0
    """Weight of the KL term; 0 loads no reference, unless kl = log asks for one."""
    kl_stop: float | None = None
    """The run stops when the KL of a step is above this, in nats per token, or never."""
    kl_target: float | None = None
    """Adapt kl_coef each step so that the KL stays near this (x1.5 above 1.5 times it, x0.8 below its 1.5th part)."""
    ref_refresh_every: int = 0
    """Steps after which the reference becomes the current policy; 0 for never."""
    ref_ema: float | None = None
    """The reference follows the policy: reference = ref_ema * reference + (1 - ref_ema) * policy, each step."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus; the start value when entropy_target is given."""
    entropy_coef_final: float | None = None
    """The weight moves linearly to this over the run."""
    entropy_target: float | None = None
    """Adapt the weight by 0.005 per step, and apply the bonus only while the entropy is at most this (Skywork-OR1)."""
    uninformative: Literal["keep", "drop", "refill"] = "drop"
    """Groups whose rewards are all equal: keep them in the denominators, drop them, or sample replacements (DAPO)."""
    max_refills: int = 4
    """refill: rounds of further sampling before the step continues with the groups it has."""
    overlong: Overlong = "none"
    """Completions near or at the limit: soft (DAPO's ramp of length to -1), hard (-0.5 if cut off without an answer),
    or filter (cut-off ones leave the loss and its denominators)."""
    overlong_cache: int = 0
    """soft: width of the ramp before max_new_tokens, in tokens; 0 for a fifth of it, as in the paper."""
    num_minibatches: int = 1
    """Optimizer updates per pass over a rollout batch; must divide num_prompts."""
    num_epochs: int = 1
    """Passes over a rollout batch."""

    def __post_init__(self) -> None:
        _require(
            self,
            "eps clip_low clip_high kl_coef entropy_coef entropy_coef_final max_refills overlong_cache "
            "ref_refresh_every",
            0,
        )
        _require(self, "num_minibatches num_epochs", 1)
        _require(self, "std_ddof ref_ema", 0, 1)
        if self.surrogate in ("clip", "weight"):
            _require(self, "clip_low", 0, 1)
        _require_positive(
            self,
            "tau_positive tau_negative kl_target kl_stop entropy_target entropy_top_share advantage_clip",
        )
        _require(self, "entropy_top_share", 0, 1)
        self._check_objective()
        self._check_kl_and_entropy()

    def _check_objective(self) -> None:
        if self.surrogate == "geometric" and self.ratio != "sequence":
            raise ValueError("surrogate = geometric is a mean over the sequence; set ratio to sequence")
        if self.ratio == "sequence" and self.surrogate not in ("clip", "geometric"):
            raise ValueError(
                f"ratio = sequence with surrogate = {self.surrogate}: expected clip or geometric"
            )
        if self.surrogate != "sigmoid":
            _leave_out(self, "tau_positive tau_negative", f"by surrogate {self.surrogate}")
        if self.surrogate in ("sigmoid", "logprob"):
            _leave_out(self, "clip_low clip_high", f"by surrogate {self.surrogate}")
        if self.dual_clip is not None and (self.surrogate != "clip" or self.dual_clip <= 1 + self.clip_high):
            raise ValueError(
                f"dual_clip = {self.dual_clip}: expected above 1 + clip_high, with surrogate clip"
            )
        if self.surrogate == "logprob" and self.num_updates > 1:
            raise ValueError(
                f"surrogate = logprob with {self.num_updates} updates per batch: without a ratio only the first is "
                "on-policy; use clip, or num_minibatches = num_epochs = 1"
            )
        if self.baseline in ("none", "value") and self.uninformative != "keep":
            raise ValueError(
                f"uninformative = {self.uninformative} with baseline = {self.baseline}: equal rewards carry signal, "
                "too; set uninformative to keep"
            )
        if self.baseline == "value":
            _leave_out(self, "std_ddof eps multi_reward advantage_clip", "with baseline = value")
            if self.scale != "none":
                raise ValueError(
                    f"scale = {self.scale} with baseline = value: set it to none (whiten scales tokens)"
                )
        if self.multi_reward == "normalise" and (self.baseline, self.scale) != ("group_mean", "group"):
            raise ValueError("multi_reward = normalise is defined for baseline group_mean with scale group")
        if self.scale in ("mean", "none"):
            _leave_out(self, "std_ddof eps", f"with scale = {self.scale}, which has no standard deviation")
        if self.uninformative == "refill" and self.max_refills == 0:
            raise ValueError(
                "max_refills = 0 with uninformative = refill: expected 1 or more; drop never refills"
            )
        if self.uninformative != "refill":
            _leave_out(self, "max_refills", f"with uninformative = {self.uninformative}")
        if self.overlong != "soft":
            _leave_out(self, "overlong_cache", f"with overlong = {self.overlong}")
        if self.advantage_clip is not None and self.whiten:
            raise ValueError(
                f"advantage_clip = {self.advantage_clip} with whiten: whitening would then move the bound; give one"
            )
        if self.surrogate == "geometric" and (self.baseline == "value" or self.kl == "k1_reward"):
            raise ValueError(
                "surrogate = geometric clips a completion by the sign of its one advantage; with a critic or k1_reward "
                "tokens have advantages of both signs: use clip"
            )

    def _check_kl_and_entropy(self) -> None:
        if (self.kl in ("none", "log")) != (self.kl_coef == 0):
            raise ValueError(
                f"kl = {self.kl} with kl_coef = {self.kl_coef}: give both or neither (0 loads no reference)"
            )
        if self.kl == "none":
            _leave_out(
                self,
                "kl_target kl_stop ref_refresh_every ref_ema",
                "with kl = none, which loads no reference",
            )
        if self.kl == "log":
            _leave_out(self, "kl_target", "with kl = log, which has no weight to adapt")
        if self.ref_refresh_every and self.ref_ema is not None:
            raise ValueError(
                "ref_refresh_every and ref_ema: the reference can follow in one way only; give one"
            )
        if self.num_updates == 1 and (self.ref_refresh_every == 1 or self.ref_ema == 0):
            raise ValueError(
                "ref_refresh_every = 1 or ref_ema = 0: the reference is then the policy itself, and the KL term 0 at "
                "the one update of a step; refresh more rarely"
            )
        if self.kl_target is not None and self.kl_coef > KL_COEF_RANGE[1]:
            raise ValueError(
                f"kl_coef = {self.kl_coef} with kl_target: expected at most {KL_COEF_RANGE[1]:g}, where its "
                "adaptation ends"
            )
        if self.entropy_target is not None and self.entropy_coef_final is not None:
            raise ValueError("entropy_target adapts the weight, entropy_coef_final schedules it; give one")

    @property
    def num_updates(self) -> int:
        """Optimizer updates per rollout batch."""
        return self.num_minibatches * self.num_epochs

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether an entropy bonus is on, or may turn on."""
        return self.entropy_coef > 0 or bool(self.entropy_coef_final) or self.entropy_target is not None

    @property
    def is_group_scaled(self) -> bool:
        """Whether the sum of rewards is divided by its group's standard deviation."""
        return self.scale == "group" and self.multi_reward == "sum"

    def ramp(self, max_new_tokens: int) -> int:
        """Return the width of the soft overlong penalty in tokens."""
        return self.overlong_cache or max(1, max_new_tokens // 5)

    @property
    def is_token_level(self) -> bool:
        """Whether advantages differ between the tokens of a completion, or depend on more than their group."""
        return self.whiten or self.baseline == "value" or self.kl == "k1_reward"


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig:
    """Handling of samples from a policy other than the current one: staleness, recomputation, correction."""

    staleness: int = 0
    """Rollouts are sampled this many steps before they are trained on, as with asynchronous sampling; 0 is
    on-policy."""
    proximal: Literal["sampler", "recomputed"] = "sampler"
    """What the ratio starts from: the sampler's log-probabilities, or the trainer's, recomputed before the first
    update of a batch (decoupled PPO)."""
    correction: Correction = "none"
    """Weight for proximal / sampler: token_truncate (TIS), token_mask (IcePop), sequence_truncate, sequence_mask,
    geometric_mask or k3_mask."""
    low: float | None = None
    """Lower bound of the correction; none takes the published one."""
    high: float | None = None
    """Upper bound of the correction; none takes the published one."""
    router_replay: bool = False
    """For mixtures of experts: train each token with the experts that it went to in the sampler (R3), also where
    rounding or moved weights would choose others."""

    def __post_init__(self) -> None:
        _require(self, "staleness low high", 0)
        if self.correction == "none":
            _leave_out(self, "low high", "without a correction")
        if self.correction != "none" and self.proximal == "sampler":
            raise ValueError(
                f"correction = {self.correction} with proximal = sampler: the ratio starts from the sampler already, "
                "so the weight would count twice; set proximal to recomputed"
            )
        low, high = self.bounds
        if low > high:
            raise ValueError(f"low = {low}, high = {high}: expected low below high")

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the correction."""
        low, high = BOUNDS[self.correction]
        return (low if self.low is None else self.low, high if self.high is None else self.high)


@dataclass(frozen=True, kw_only=True)
class ValueConfig:
    """The critic of PPO: a copy of the starting policy with one number per token as its head."""

    lr: float | None = None
    """Its learning rate, with the policy's schedule; none for 5 times the policy's."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """GAE's trade of bias (0) against variance (1)."""
    clip: float | None = 0.2
    """Clip range of value estimates around their values at the start of the batch, or none."""
    warmup_steps: int = 0
    """First steps, in which only the critic is trained."""

    def __post_init__(self) -> None:
        _require(self, "gamma lam", 0, 1)
        _require(self, "warmup_steps", 0)
        _require_positive(self, "lr clip")


def check_combination(
    algo: AlgoConfig,
    off_policy: OffPolicyConfig,
    value: ValueConfig,
    *,
    num_prompts: int,
    group_size: int,
    weights: Mapping[str, float],
    num_steps: int,
    max_new_tokens: int,
) -> None:
    """Refuse, before anything is loaded, settings that cannot be exact or that nothing would read.

    Raises:
        ValueError: One line: what, why, and what to change.
    """
    if group_size < 2 and (
        algo.baseline in ("group_mean", "leave_one_out") or algo.scale in ("group", "mean")
    ):
        raise ValueError(
            f"group_size = {group_size}: a group-relative baseline or scale needs at least 2; use baseline none or "
            "value with scale none or batch"
        )
    if num_prompts % algo.num_minibatches:
        raise ValueError(
            f"algo.num_minibatches = {algo.num_minibatches}: expected a divisor of num_prompts = {num_prompts}, since "
            "a group is never cut in two"
        )
    if algo.overlong_cache > max_new_tokens:
        raise ValueError(
            f"algo.overlong_cache = {algo.overlong_cache}: expected at most sampling.max_new_tokens = {max_new_tokens}"
        )
    if algo.multi_reward == "normalise" and len(weights) < 2:
        raise ValueError(
            "algo.multi_reward = normalise: expected 2 rewards or more; with one it changes nothing"
        )
    if algo.ratio == "sequence" and off_policy.correction in ("token_truncate", "token_mask"):
        raise ValueError(
            f"algo.ratio = sequence with off_policy.correction = {off_policy.correction}: token weights do not fit "
            "a sequence-level ratio; use sequence_truncate, sequence_mask or geometric_mask"
        )
    _check_age(algo, off_policy)
    for name, steps in (
        ("off_policy.staleness", off_policy.staleness),
        ("algo.ref_refresh_every", algo.ref_refresh_every),
    ):
        if steps >= num_steps and steps:
            raise ValueError(
                f"{name} = {steps}: expected below num_steps = {num_steps}, otherwise it never takes effect"
            )
    if algo.multi_reward == "normalise" and 0 in weights.values():
        raise ValueError(
            "algo.multi_reward = normalise with a reward of weight 0: it would never train, yet keep groups; leave it "
            "out"
        )
    if algo.baseline != "value" and value != ValueConfig():
        raise UnreadError("value.* is read with algo.baseline = value only; leave it out", "value")


def _check_age(algo: AlgoConfig, off_policy: OffPolicyConfig) -> None:
    """Refuse stale samples without a correction, and a recomputation that nothing reads."""
    if (
        algo.surrogate == "logprob"
        and off_policy.proximal == "recomputed"
        and off_policy.correction == "none"
    ):
        raise ValueError(
            "off_policy.proximal = recomputed with algo.surrogate = logprob: nothing reads a ratio; give a correction "
            "or leave it out"
        )
    if algo.surrogate == "logprob" and off_policy.staleness and off_policy.correction == "none":
        raise ValueError(
            f"off_policy.staleness = {off_policy.staleness} with algo.surrogate = logprob: stale samples need a ratio "
            "or a correction; use surrogate clip, or proximal recomputed with a correction"
        )
    if off_policy.staleness and (off_policy.proximal, off_policy.correction) == ("recomputed", "none"):
        raise ValueError(
            f"off_policy.staleness = {off_policy.staleness} with proximal = recomputed and no correction: nothing "
            "corrects for stale samples; give a correction, or set proximal to sampler"
        )
