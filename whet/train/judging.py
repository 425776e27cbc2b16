"""The judge of a run: a server, or a model of our own in our own engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from whet.generate.engine import Engine, Request
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.rewards.base import JUDGE, WeightedReward
from whet.rewards.judge import LOCAL, AskBatch, Judge, JudgeConfig
from whet.schema import ResponseSchema
from whet.types import Problem


@contextmanager
def open_judge(
    config: JudgeConfig,
    rewards: Sequence[WeightedReward],
    folder: Path,
    schema: ResponseSchema,
    problem: Problem,
) -> Iterator[tuple[list[WeightedReward], Judge | None]]:
    """Put the judge behind the reward of that name, if there is one, and try it.

    Args:
        config: Which model judges.
        rewards: The run's rewards.
        folder: The run folder; the judge's scores are kept there unless the config says where.
        schema: Renders a perfect completion.
        problem: A problem that it is tried with.

    Yields:
        The rewards, and the judge.

    Raises:
        UserError: If the judge cannot be had, or cannot tell a perfect completion from an empty one.
    """
    if all(reward.name != JUDGE for reward in rewards):
        yield list(rewards), None
        return
    config = replace(config, cache=config.cache or str(folder / "judge.jsonl"))
    ask_batch = local_model(config) if config.url == LOCAL else None
    with Judge(config, ask_batch=ask_batch) as judge:
        judge.check(problem, schema.render(problem.solution or "...", problem.answer))
        yield [replace(r, many=judge.score) if r.name == JUDGE else r for r in rewards], judge


def local_model(config: JudgeConfig) -> AskBatch:
    """Load a chat model that judges in this process, by greedy decoding.

    Args:
        config: `model` is its folder or hub name.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    source = PolicyConfig(init=config.model, tools=("none",), attention="fast", device=device)
    policy = load_policy(source, seed=0, dtype=dtype)
    tokenizer = policy.tokenizer
    engine = Engine(policy.model, stop_ids=sorted(tokenizer.stop_ids), attention="fast")
    params = SamplingParams(temperature=0.0, max_new_tokens=config.max_reply_tokens)

    def ask(messages: Sequence[tuple[str, str]]) -> list[str]:
        requests = [
            Request(prompt_ids=tuple(tokenizer.encode_prompt(_chat(system, user))), seeds=(0,))
            for system, user in messages
        ]
        replies = engine.generate(requests, params)
        engine.release()
        return [
            tokenizer.decode_completion(request.prompt_ids, done.ids) if done.finish_reason == "stop" else ""
            for request, (done,) in zip(requests, replies, strict=True)
        ]

    return ask


def _chat(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]
