"""Recipes of `whet validate`: a pipeline with the thresholds that it must meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whet.cli import Program
from whet.eval.evaluate import EvalConfig
from whet.eval.probe.probe import ProbeConfig
from whet.generate.sampling import SamplingParams
from whet.inspect.validate.validate import BEFORE, ValidateConfig, check, main, plan
from whet.inspect.validate.verdict import ThresholdConfig
from whet.recipes import evaluation as evaluations
from whet.recipes import rl, sft
from whet.recipes.models import demo_policy


def _validate(
    sft_name: str, rl_name: str, measured: EvalConfig, probe: ProbeConfig, thresholds: ThresholdConfig
) -> ValidateConfig:
    """Chain recipes of the three programs."""
    reinforced = rl.RECIPES[rl_name]()
    return ValidateConfig(
        sft=replace(sft.RECIPES[sft_name](), out=""),
        rl=replace(reinforced, out="", policy=replace(reinforced.policy, init=BEFORE)),
        eval=replace(measured, out="", policy=replace(measured.policy, init=BEFORE)),
        probe=probe,
        thresholds=thresholds,
    )


def demo() -> ValidateConfig:
    """The demo with its thresholds: it learns to think, and nothing drifts. About a minute."""
    return _validate(
        "demo",
        "demo",
        replace(evaluations.demo(), num_problems=256, num_samples=8),
        ProbeConfig(transcript="47+85+39=", sampling=SamplingParams(temperature=0.7, max_new_tokens=48)),
        ThresholdConfig(
            pass_at_1=0.9,
            gain=0.2,
            gain_p=0.05,
            format=0.95,
            ratio_drift=1e-3,
            seconds={"sft": 900, "rl": 900, "eval_sft": 300, "eval_rl": 300, "probe": 120, "transcript": 60},
        ),
    )


def quick() -> ValidateConfig:
    """A shortened demo over bytes, so that the probes also have something to measure. Under a minute."""
    config = demo()
    policy = demo_policy()
    policy = replace(
        policy, tokenizer="bytes", alphabet="", model=replace(policy.model, max_positions=160), max_rows=256
    )
    return replace(
        config,
        sft=replace(config.sft, policy=policy, num_steps=350, validation_problems=32, validate_every=175),
        rl=replace(config.rl, num_steps=20, num_prompts=16, save_every=20),
        eval=replace(config.eval, num_problems=128, num_samples=4),
        thresholds=replace(config.thresholds, pass_at_1=0.4, gain=0.05, format=0.9),
    )


def stories260k_gsm8k() -> ValidateConfig:
    """A real pretrained model on GSM8K: the format must be learned; maths is not expected, and prose degrades."""
    return _validate(
        "stories260k-gsm8k",
        "stories260k-gsm8k",
        replace(evaluations.gsm8k(), num_samples=8),
        ProbeConfig(
            transcript="If there are 3 cars in the parking lot and 2 more cars arrive, how many cars are in the "
            "parking lot?",
            system_prompt=False,
        ),
        ThresholdConfig(format=0.95, ratio_drift=1e-3, seconds={"sft": 7200, "rl": 3600}),
    )


def gpt2_gsm8k() -> ValidateConfig:
    """GPT-2 124M on GSM8K with the rewards of a source, whose tables of losses and rewards are printed beside ours."""
    config = _validate(
        "gpt2-gsm8k",
        "gpt2-gsm8k",
        replace(evaluations.gsm8k(), num_samples=16),
        ProbeConfig(
            transcript="If there are 3 cars in the parking lot and 2 more cars arrive, how many cars are in the "
            "parking lot?",
            system_prompt=False,
        ),
        ThresholdConfig(validation_loss=1.4, format=0.95, ratio_drift=1e-3),
    )
    rewards = {"correct": 1.0, "format": 0.5, "length_band": 0.1}
    return replace(config, rl=replace(config.rl, rewards=rewards, num_prompts=4), reported="gpt2-gsm8k")


RECIPES: dict[str, Callable[[], ValidateConfig]] = {
    "demo": demo,
    "quick": quick,
    "stories260k-gsm8k": stories260k_gsm8k,
    "gpt2-gsm8k": gpt2_gsm8k,
}


PROGRAM = Program(
    config_class=ValidateConfig, main=main, recipes=RECIPES, plan=plan, check=check, prints_config=False
)
