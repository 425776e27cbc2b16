"""What suits a model and a task where the user says nothing: learning rates by size, token limits by worked solutions.

The recipes `own` of the command line and the functions of `import whet` ask here, so that both give the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from whet.eval.evaluate import EvalConfig
from whet.generate.policy import PolicyConfig, load_policy
from whet.inspect.memory.phases import parameter_sizes
from whet.inspect.memory.plan import policy_shape
from whet.inspect.memory.room import adapter_rate
from whet.tasks.base import ROW_SETS, TaskConfig, load_task, tasks_of
from whet.train.dpo import DPOConfig
from whet.train.rft import RFTConfig
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.types import UserError

AnyConfig = RLConfig | SFTConfig | DPOConfig | RFTConfig | EvalConfig
Suited = TypeVar("Suited", bound=AnyConfig)
Tell = Callable[[str], object]

Rates = tuple[tuple[float, float], ...]
RL_RATES: Rates = ((0.3e9, 1e-5), (1e9, 5e-6), (3e9, 2e-6))
"""Rates of reinforcing all weights of models that have fewer than so many: 1e-6, usual at 7e9, did not move one of
1.3e8 in 24 steps, and 1e-5 took it from 5 to 62 % of sums."""
SFT_RATES: Rates = ((2e7, 1e-3), (0.3e9, 2e-4), (4e9, 2e-5), (math.inf, 1e-5))
"""Rates of fine-tuning all weights of models that have fewer than so many. Published: 1e-3 for SmolLM2-135M and -360M,
3e-4 for its 1.7B, in batches of 128 long rows (alignment-handbook, recipes/smollm2/sft), eight times those of `own`;
2e-5 for 0.5B (TRL's sft.py) and 7B (Zephyr, Alpaca), 5e-6 for 8B (Tulu 3). With SmolLM2-135M on GSM8K 2e-4 takes the
loss from 2.23 to 1.65 in three steps, 1e-5 is slow. Toys learn nearly everything anew."""

PERCENTILE, FACTOR = 0.95, 2
"""A limit on completions is so many times what so large a share of the worked solutions takes: models write at greater
length than people, and what is cut off counts as wrong."""
LEAST_TOKENS, STEP_TOKENS = 128, 64
"""Least limit on completions, and what limits are multiples of, so that tokenizers that differ little share one.
SmolLM2 writes 89 tokens about sums of two numbers."""
NUM_SOLUTIONS = 500
"""Worked solutions that are measured, the first ones of the training split."""
READ = frozenset({"gsm8k", "math", "jsonl", "hub", *ROW_SETS})
"""Tasks that read rows with worked solutions; others make their problems, which may take long."""


def suited(config: Suited, typed: Collection[str], tell: Tell | None = None) -> Suited:
    """Choose a learning rate and a limit on completions where the user gave none.

    Args:
        config: A recipe of one's own, or what a function of `import whet` was given, with their defaults.
        typed: Dotted names of the fields that the user gave; a named group stands for all its fields.
        tell: Takes a line about each choice; default: prints it as a comment, which a dry run's YAML may hold.

    Returns:
        The config, changed only in fields that the user did not give.
    """
    tell = tell or _comment
    if not isinstance(config, EvalConfig) and not {"optim", "optim.lr"} & set(typed):
        config = _with_rate(config, tell)
    is_free = not {"sampling", "sampling.max_new_tokens"} & set(typed)
    if isinstance(config, RLConfig | EvalConfig) and is_free and not getattr(config, "tasks", ()):
        found = token_limit(config.policy, config.task, config.sampling.max_new_tokens)
        if found is not None:
            limit, told = found
            tell(f"sampling.max_new_tokens = {limit}: {told}")
            config = replace(config, sampling=replace(config.sampling, max_new_tokens=limit))
    return config


def _comment(line: str) -> None:
    # stderr is for an error's one line; a dry run's output is YAML
    print(f"# {line}", flush=True)


def _with_rate(config: Suited, tell: Tell) -> Suited:
    """Return a training's config with the rate that suits the model's size.

    Random weights, and a model whose shape is not known yet, keep theirs. DPO and RFT have one rate for all sizes.
    """
    assert not isinstance(config, EvalConfig)
    if not config.policy.init:
        return config
    try:
        count = sum(parameter_sizes(policy_shape(config.policy)))
    except UserError:
        return config  # the run will say why
    rates = RL_RATES if isinstance(config, RLConfig) else SFT_RATES if isinstance(config, SFTConfig) else ()
    before, what = config.optim.lr, "all weights"
    rate = next((rate for most, rate in rates if count < most), before)
    if config.lora.rank:
        rate, what = adapter_rate(rate), "an adapter"
    if rate == before:
        return config
    size = f"{count / 1e6:,.0f} million" if count >= 1e6 else f"{count:,}"
    tell(f"optim.lr = {rate:g}, which suits {what} of a model of {size}")
    return replace(config, optim=replace(config.optim, lr=rate))


def token_limit(policy: PolicyConfig, task: TaskConfig, most: int) -> tuple[int, str] | None:
    """Find a limit on completions by the worked solutions of a task, under the model's own tokenizer.

    Args:
        policy: The model.
        task: The task.
        most: Largest limit, tokens.

    Returns:
        The limit in tokens, and what it goes by; None where there are no worked solutions, or something is missing that
        the run will name.
    """
    if not tasks_of(task) <= READ:
        return None
    try:
        problems = load_task(task).problems("train")[:NUM_SOLUTIONS]
        texts = [problem.solution for problem in problems if problem.solution]
        if not texts or 2 * len(texts) < len(problems):
            return None
        encode = load_policy(policy, seed=0, weights=False).tokenizer.encode
    except (UserError, OSError, ImportError):
        return None
    length = at_percentile([len(encode(text)) for text in texts], PERCENTILE)
    limit = max(LEAST_TOKENS, STEP_TOKENS * math.ceil(FACTOR * length / STEP_TOKENS))
    share = f"{PERCENTILE:.0%} of the worked solutions".replace("%", " %")
    told = f"{share} take at most {length} of the model's tokens"
    return min(limit, most), told


def at_percentile(lengths: Sequence[int], share: float) -> int:
    """Return the least length that a share of all lengths do not exceed."""
    return sorted(lengths)[math.ceil(share * len(lengths)) - 1]
