"""The claim of docs/results/calculator.md: reinforcement makes a model call the tool, and nothing else would do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from whet.eval.evaluate import evaluate, take_problems
from whet.generate.sampling import SamplingParams
from whet.recipes import rl, sft
from whet.tasks.made.products import Products
from whet.train.rl import train as train_rl
from whet.train.sft import train as train_sft


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("tools", "low", "high"),
    [
        ((), 0.9, 1.0),
        (("none",), 0.0, 0.3),
    ],
)
def test_with_and_without_the_calculator(
    tools: tuple[str, ...], low: float, high: float, tmp_path: Path
) -> None:
    first, second = sft.calculator(), rl.calculator()
    tools = tools or first.policy.tools
    train_sft(replace(first, out=str(tmp_path / "sft"), policy=replace(first.policy, tools=tools)))
    start = replace(second.policy, init=str(tmp_path / "sft"))
    sampling = SamplingParams(max_new_tokens=112 if tools == ("none",) else second.sampling.max_new_tokens)
    policy = train_rl(replace(second, out=str(tmp_path / "rl"), policy=start, sampling=sampling))
    task = Products()
    problems = take_problems(task, "test", 128)
    result = evaluate(policy, task, problems, num_samples=4, sampling=sampling, seed=0)
    assert low <= result.metrics["pass@1"].mean <= high
