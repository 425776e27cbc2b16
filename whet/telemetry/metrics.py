"""Declarations of all metrics: unit and meaning of each."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of one metric.

    Attributes:
        unit: Unit of the value; 'share' is a fraction in [0, 1], shown as percent.
        meaning: One line that explains it to the reader of a report.
        format: Format specification for display.
    """

    unit: str
    meaning: str
    format: str = ".3f"


def _share(meaning: str) -> Metric:
    return Metric("share", meaning, ".1%")


METRICS: dict[str, Metric] = {
    "sft/loss": Metric("nats/token", "mean negative log-probability of the trained tokens"),
    "sft/outside_rules": Metric(
        "nats/token", "-log of the probability of all that the task's rules allow, where they are learnt"
    ),
    "sft/validation_loss": Metric("nats/token", "the same on held-out rows"),
    "sft/lr": Metric("1", "learning rate of this step", ".2e"),
    "sft/skipped": Metric(
        "steps", "consecutive steps skipped because loss or gradient was not finite", ".0f"
    ),
    "sft/loss_scale": Metric("1", "factor of the loss in float16's backward passes", ",.0f"),
    "sft/overflows": Metric(
        "updates", "updates of this step left out because float16 gradients overflowed", ".0f"
    ),
    "sft/grad_norm": Metric("1", "gradient norm before clipping"),
    "sft/tokens_per_second": Metric("tokens/s", "all tokens per second of wall time", ",.0f"),
    "sft/tokens": Metric("tokens", "trained tokens so far", ",.0f"),
    "sft/epoch": Metric("epochs", "passes over the data so far", ".2f"),
    "sft/peak_memory_gib": Metric(
        "GiB", "most memory held so far: PyTorch's on a GPU, resident on a CPU", ".2f"
    ),
    "dpo/loss": Metric(
        "1", "mean loss of a pair (kto: of a completion), including the fine-tuning term", ".4f"
    ),
    "dpo/validation_loss": Metric("1", "the same on held-out pairs", ".4f"),
    "dpo/accuracy": _share("pairs whose chosen completion has the higher implicit (or the model's) reward"),
    "dpo/validation_accuracy": _share("the same on held-out pairs"),
    "dpo/margin": Metric("score", "mean implicit reward of the chosen minus that of the rejected completion"),
    "dpo/chosen_reward": Metric("score", "mean implicit reward of the chosen completions: beta x log-ratio"),
    "dpo/rejected_reward": Metric("score", "the same of the rejected completions"),
    "dpo/chosen_logprob": Metric("nats", "mean log-probability of a whole chosen completion", ".1f"),
    "dpo/rejected_logprob": Metric("nats", "mean log-probability of a whole rejected completion", ".1f"),
    "dpo/nll": Metric("nats/token", "mean over pairs of the chosen completion's nats per token"),
    "dpo/desirable": _share("kto: completions of the step that are desirable"),
    "dpo/kl": Metric("nats", "kto: mean log-ratio of completions of other prompts, at least 0", ".4f"),
    "dpo/lr": Metric("1", "learning rate of this step", ".2e"),
    "dpo/skipped": Metric(
        "steps", "consecutive steps skipped because loss or gradient was not finite", ".0f"
    ),
    "dpo/loss_scale": Metric("1", "factor of the loss in float16's backward passes", ",.0f"),
    "dpo/overflows": Metric(
        "updates", "updates of this step left out because float16 gradients overflowed", ".0f"
    ),
    "dpo/grad_norm": Metric("1", "gradient norm before clipping"),
    "dpo/tokens_per_second": Metric("tokens/s", "all tokens per second of wall time", ",.0f"),
    "dpo/tokens": Metric("tokens", "trained tokens so far", ",.0f"),
    "dpo/epoch": Metric("epochs", "passes over the pairs so far", ".2f"),
    "dpo/peak_memory_gib": Metric(
        "GiB", "most memory held so far: PyTorch's on a GPU, resident on a CPU", ".2f"
    ),
    "rft/loss": Metric("nats/token", "mean negative log-probability of the kept completions' tokens"),
    "rft/sampled": Metric("completions", "completions sampled for this round", ",.0f"),
    "rft/right": _share("sampled completions that are right and in perfect format"),
    "rft/kept": Metric("completions", "distinct right completions kept for training", ",.0f"),
    "rft/covered": _share("problems with at least one kept completion"),
    "rft/lr": Metric("1", "learning rate of this step", ".2e"),
    "rft/skipped": Metric(
        "steps", "consecutive steps skipped because loss or gradient was not finite", ".0f"
    ),
    "rft/loss_scale": Metric("1", "factor of the loss in float16's backward passes", ",.0f"),
    "rft/overflows": Metric(
        "updates", "updates of this step left out because float16 gradients overflowed", ".0f"
    ),
    "rft/grad_norm": Metric("1", "gradient norm before clipping"),
    "rft/tokens_per_second": Metric("tokens/s", "all tokens per second of wall time", ",.0f"),
    "rft/tokens": Metric("tokens", "trained tokens so far", ",.0f"),
    "rft/epoch": Metric("epochs", "passes over the round's completions so far", ".2f"),
    "rft/peak_memory_gib": Metric(
        "GiB", "most memory held so far: PyTorch's on a GPU, resident on a CPU", ".2f"
    ),
    "rl/reward_mean": Metric("score", "mean total reward of the scorable samples"),
    "rl/reward_std": Metric("score", "standard deviation of the total reward over all samples of the step"),
    "rl/correct": _share("samples whose answer is right"),
    "rl/format": _share("samples in perfect format"),
    "rl/thinking_tokens": Metric("tokens", "mean length of the thinking block", ".0f"),
    "rl/completion_tokens": Metric("tokens", "mean length of a completion", ".0f"),
    "rl/turns": Metric("turns", "mean turns of an episode, including tool calls", ".2f"),
    "rl/reward_failures": Metric(
        "samples", "calls of your own rewards that hung, failed or returned no number, so far", ",.0f"
    ),
    "rl/judge_requests": Metric("requests", "requests to the judge so far, including retries", ",.0f"),
    "rl/judge_retries": Metric("requests", "retried requests to the judge so far", ",.0f"),
    "rl/judge_cache_hits": Metric("completions", "completions judged from the cache so far", ",.0f"),
    "rl/judge_failures": Metric(
        "completions", "completions without a score because requests failed, so far", ",.0f"
    ),
    "rl/judge_unscorable": Metric(
        "completions", "completions that the judge gave no readable score, so far", ",.0f"
    ),
    "rl/judge_tokens": Metric("tokens", "tokens used for judging so far", ",.0f"),
    "rl/judge_corrupt_lines": Metric("lines", "unreadable lines of the judge's cache", ",.0f"),
    "rl/truncated": _share("samples cut off by the length limit"),
    "rl/zero_variance_groups": _share(
        "groups whose rewards are all equal, so that comparing them gives no signal"
    ),
    "rl/groups_with_signal": Metric("groups", "groups with a non-zero advantage, which carry signal", ".0f"),
    "rl/all_right_groups": _share("groups whose answers are all right"),
    "rl/all_wrong_groups": _share("groups whose answers are all wrong"),
    "rl/cancellation": _share("spread of the rewards within groups that their sum loses; 1 if they cancel"),
    "rl/repetition": _share("token 4-grams of a completion that are repeats"),
    "rl/groups_refilled": Metric("groups", "groups sampled to replace uninformative ones", ".0f"),
    "rl/prompts_consumed": Metric("prompts", "prompts trained on so far", ",.0f"),
    "rl/prompts_dropped": Metric("prompts", "prompts dropped from training so far, for any reason", ",.0f"),
    "rl/prompts_in_flight": Metric("prompts", "prompts sampled and waiting to be trained on", ",.0f"),
    "rl/unscorable": Metric("samples", "unscorable samples; they are dropped from every denominator", ".0f"),
    "rl/entropy": Metric("nats/token", "entropy of the policy on the tokens that reach the backward pass"),
    "rl/kl": Metric("nats/token", "divergence from the reference model", ".4f"),
    "rl/teacher_kl": Metric("nats/token", "divergence from the teacher, on the policy's own samples", ".4f"),
    "rl/kl_coef": Metric("1", "current weight of the KL term", ".2e"),
    "rl/entropy_coef": Metric("1", "current weight of the entropy bonus", ".2e"),
    "rl/ratio_spread": Metric(
        "nats", "mean |log ratio| of a trained token over the step's updates; 0 at the first", ".1e"
    ),
    "rl/clip_high": _share("trained tokens clipped by the upper clip"),
    "rl/clip_low": _share("trained tokens clipped by the lower clip"),
    "rl/staleness": Metric("steps", "steps between sampling and training; 0 is on-policy", ".0f"),
    "rl/token_age": Metric("steps", "mean updates since the weights that a token was drawn with", ".2f"),
    "rl/overlap": _share("share of sampling and scoring time hidden behind other work of a step"),
    "rl/self_play_buffer": Metric(
        "positions", "chess: positions of the policy's games that are kept", ",.0f"
    ),
    "rl/self_play_moves": Metric("moves", "chess: moves of the policy's games so far", ",.0f"),
    "rl/self_play_games": Metric("games", "chess: games that ended so far", ",.0f"),
    "rl/engine_wait_seconds": Metric("s", "chess: what was waited for Stockfish so far", ".1f"),
    "rl/updates": Metric("updates", "optimizer updates on the step's rollouts", ".0f"),
    "rl/mismatch_k3": Metric(
        "nats/token", "estimated KL of the sampler from the trainer before the first update", ".1e"
    ),
    "rl/effective_samples": _share(
        "effective share of tokens under the weights w = trainer / sampler: (sum w)^2 / (n sum w^2)"
    ),
    "rl/correction_active": _share("tokens whose off-policy weight is truncated or masked"),
    "rl/value_loss": Metric("1", "half the mean squared error of the critic"),
    "rl/value_grad_norm": Metric("1", "gradient norm of the critic before clipping"),
    "rl/value_clipped": _share("tokens where the critic's clip is active"),
    "rl/value_explained": Metric(
        "1", "share of the returns' variance that the critic explains; 1 is perfect", ".2f"
    ),
    "rl/ratio_drift": Metric(
        "1", "largest |ratio - 1| at the first update of the step; 0 when on-policy", ".1e"
    ),
    "rl/logprob_gap_mean": Metric("nats", "mean |sampler - trainer| log-probability of a token", ".1e"),
    "rl/logprob_gap_max": Metric("nats", "largest |sampler - trainer| log-probability of a token", ".1e"),
    "rl/loss": Metric("1", "surrogate loss; its sign and size say nothing about health", ".4f"),
    "rl/lr": Metric("1", "learning rate of this step", ".2e"),
    "rl/skipped": Metric("steps", "consecutive steps skipped because loss or gradient was not finite", ".0f"),
    "rl/loss_scale": Metric("1", "factor of the loss in float16's backward passes", ",.0f"),
    "rl/overflows": Metric(
        "updates", "updates of this step left out because float16 gradients overflowed", ".0f"
    ),
    "rl/grad_norm": Metric("1", "gradient norm before clipping"),
    "rl/tokens_per_second": Metric("tokens/s", "completion tokens per second of the whole step", ",.0f"),
    "rl/generate_seconds": Metric("s", "time to sample", ".2f"),
    "rl/sync_seconds": Metric("s", "time to bring the weights to a sampler that has a copy of them", ".2f"),
    "rl/reward_seconds": Metric("s", "time to score", ".2f"),
    "rl/train_seconds": Metric("s", "time to train", ".2f"),
    "rl/generate_tokens_per_second": Metric("tokens/s", "completion tokens per second of sampling", ",.0f"),
    "rl/train_tokens_per_second": Metric(
        "tokens/s", "tokens of the policy's updates per second of training", ",.0f"
    ),
    "rl/peak_memory_gib": Metric(
        "GiB", "most memory held so far: PyTorch's on a GPU, resident on a CPU", ".2f"
    ),
    "router/balance_loss": Metric(
        "1", "load-balancing loss, without its weight: top_k if all experts are used alike", ".4f"
    ),
    "router/load_max": _share("tokens that go to the busiest expert of any layer"),
    "router/load_min": _share("tokens that go to the idlest expert of any layer"),
    "eval/pass@1": _share("mean share of right samples over problems"),
    "eval/greedy": _share("problems answered right by greedy decoding"),
    "eval/format": _share("completions in perfect format"),
    "eval/truncated": _share("completions cut off by the length limit"),
    "eval/thinking_tokens": Metric("tokens", "mean length of the thinking block", ".0f"),
    "eval/completion_tokens": Metric("tokens", "mean length of a completion", ".0f"),
    "eval/turns": Metric("turns", "mean turns of an episode, including tool calls", ".2f"),
    "eval/seconds": Metric("s", "time of the evaluation", ".1f"),
}
"""Every metric with its unit and meaning. Logging another name is an error, unless it belongs to a family."""

FAMILIES: dict[str, Metric] = {
    "rl/dropped/": Metric("prompts", "prompts dropped from training so far for this reason", ",.0f"),
    "rl/reward/": Metric("score", "mean unweighted score of this reward"),
    "rl/signal/": _share(
        "this reward's share of the spread of advantages within groups; negative means against the rest"
    ),
    "eval/": _share("evaluation score"),
    "hardware/utilisation/": _share(
        "time with a kernel resident (GPU) or processors busy (CPU); not the share of their capacity in use"
    ),
    "hardware/memory_activity/": _share("time during which the device's memory was read or written"),
    "hardware/power_w/": Metric("W", "mean power of the device", ".0f"),
    "hardware/temperature_c/": Metric("°C", "mean temperature of the device", ".0f"),
    "hardware/memory_gib/": Metric("GiB", "memory in use on the device, by all programs", ".1f"),
}
"""Prefixes of metrics whose last part is a name that the user chose (a reward, a subject, a k).

No name goes on after another one and a slash: trackers that keep a file for each name could not have both.
"""
RENAMED = {"rl/prompts_dropped/": "rl/dropped/"}
"""Beginnings of names in the files of earlier versions, and what they are now."""


def find_metric(name: str) -> Metric:
    """Look up a metric.

    Args:
        name: `group/quantity`.

    Returns:
        Its declaration, or that of its family.

    Raises:
        ValueError: If it is not declared.
    """
    if name in METRICS:
        return METRICS[name]
    for prefix, family in FAMILIES.items():
        if name.startswith(prefix) and len(name) > len(prefix):
            return family
    close = difflib.get_close_matches(name, METRICS, n=1)
    hint = f"did you mean '{close[0]}'?" if close else "declare it"
    raise ValueError(f"metric '{name}' is not declared in whet/telemetry/metrics.py: {hint}")


def format_metric(name: str, value: float | None) -> str:
    """Format a value by its metric's format; a dash if there is none."""
    if value is None or math.isnan(value):
        return "–"
    return format(value, find_metric(name).format)
