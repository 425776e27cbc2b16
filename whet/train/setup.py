"""What a run of reinforcement learning is made of, loaded and checked before anything is written.

`whet rl`, and every program that needs its first step (diagnose, sweep), begin here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from whet.eval.audit.audit import preflight
from whet.eval.evaluate import fitting_problems
from whet.generate.engine import Engine, Request
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.reward_model import RewardModel, messages_of
from whet.generate.rows import Sampler
from whet.generate.sampling import SamplingParams
from whet.model.config import has_experts
from whet.ranks.collectives import rank, world_size
from whet.rewards.base import EPISODE, JUDGE, MODEL, REWARDS, Item, ManyScores, WeightedReward, build_rewards
from whet.rewards.judge.judge import LOCAL, AskBatch, Judge, JudgeConfig
from whet.schema import ResponseSchema
from whet.tasks.base import answers_of, check_gold, load_task
from whet.tasks.mixture import PART
from whet.tasks.tools import environment_for
from whet.telemetry.heartbeat import Heartbeat, current
from whet.train.rl_config import RLConfig
from whet.train.rollout.order import data_order
from whet.train.rollout.rollout import Rollout, collect_groups
from whet.train.session import load_trained
from whet.types import Problem, Task, UserError

# The judge of a run: a server, or a model of our own in our own engine.


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


def model_scores(path: str, policy: Policy) -> ManyScores:
    """Return a function that scores completions with a reward model, which reads question and reply, tags included.

    Args:
        path: What `RewardModel` loads.
        policy: The policy whose completions are scored; the model computes on its device, in its products' dtype.

    Raises:
        UserError: If the model cannot be loaded.
    """
    dtype = policy.autocast or policy.model.head_weight.dtype
    scorer, prefix = RewardModel(path, device=policy.device, dtype=dtype), policy.schema.generation_prefix

    def score(items: Sequence[Item]) -> list[float | None]:
        return scorer.score([(messages_of(problem), prefix + text) for problem, text in items])

    return score


@dataclass(frozen=True, slots=True, kw_only=True)
class RLSetup:
    """The parts of a run.

    Attributes:
        config: Its settings.
        policy: The policy that is trained, as it starts.
        task: The task.
        problems: Problems of the train split that fit the context.
        num_left_out: Those that do not.
        rewards: The rewards, without the judge behind 'judge' and the model behind 'model'.
        score: The reward model behind 'model'; None without one.
    """

    config: RLConfig
    policy: Policy
    task: Task
    problems: list[Problem]
    num_left_out: int
    rewards: list[WeightedReward]
    score: ManyScores | None = None

    def first_problems(self) -> list[tuple[int, Problem]]:
        """Return the problems of the first step, each with its epoch; a curriculum and refills are left out."""
        order = data_order(self.task, self.problems, self.config.seed)
        return order.next(self.config.num_prompts)

    def first_rollout(self, engine: Sampler, rewards: Sequence[WeightedReward]) -> Rollout:
        """Sample and score the groups of the first step.

        Args:
            engine: The policy's engine.
            rewards: The run's rewards, judge included.
        """
        drawn = self.first_problems()
        return collect_groups(
            self.policy,
            engine,
            self.task,
            list(rewards),
            [problem for _, problem in drawn],
            seeds=[(self.config.seed, 0, epoch) for epoch, _ in drawn],
            params=self.config.rollout,
        )

    def open_judge(self, folder: Path) -> AbstractContextManager[tuple[list[WeightedReward], Judge | None]]:
        """Put judge and reward model behind the rewards of their names; the judge's scores are kept in a folder.

        Raises:
            UserError: If the judge cannot be had, or cannot tell a perfect completion from an empty one.
        """
        scored = [replace(r, many=self.score) if r.name == MODEL else r for r in self.rewards]
        return open_judge(self.config.judge, scored, folder, self.policy.schema, self.problems[0])


def load_rl(config: RLConfig, *, weights: bool = True) -> RLSetup:
    """Load what a run is made of.

    Args:
        config: Its settings, with a precision that is settled.
        weights: False for a dry run, which computes nothing.

    Raises:
        UserError: If something is missing, or does not fit together.
    """
    task = load_task(config.task)
    policy = load_trained(config, weights=weights)
    check_fit(config, policy, task)
    policy.replays_experts = config.off_policy.router_replay
    problems = task.problems("train")
    kept = fitting_problems(policy, problems, min_new_tokens=config.sampling.max_new_tokens)
    if not kept:
        raise UserError(f"task {task.name}: no problem of the train split fits the context")
    if comparing := [name for name in config.rewards if name in REWARDS and REWARDS[name].needs_gold]:
        others = {name: weight for name, weight in config.rewards.items() if name not in comparing}
        words = " ".join(f"{name} {weight:g}" for name, weight in (others or {"format": 0.1}).items())
        check_gold(
            task,
            kept,
            f"the reward {comparing[0]!r} compares answers",
            instead=f"reward something else: --rewards {words}{'' if config.reward else ' --reward FILE.py:FUNCTION'}",
        )
    rewards = build_rewards(
        config.rewards, policy.schema, task, config.reward, timeout_s=config.reward_timeout_s
    )
    left_out = len(problems) - len(kept)
    return RLSetup(
        config=config,
        policy=policy,
        task=task,
        problems=kept,
        num_left_out=left_out,
        rewards=rewards,
        score=model_scores(config.reward_model, policy) if config.reward_model and weights else None,
    )


def check_fit(config: RLConfig, policy: Policy, task: Task) -> None:
    """Refuse what does not fit together.

    Raises:
        UserError: With what to leave out or change.
    """
    policy.expect(*answers_of(task))
    other = (
        "cluster.rollout_workers"
        if config.cluster.rollout_workers
        else f"sampler.kind = {config.sampler.kind}"
    )
    if policy.model.images is not None and other != "sampler.kind = engine":
        raise UserError(
            f"{other}: the model sees, and images reach only the engine in the trainer's process; leave it out"
        )
    environment_for(policy.schema, task)  # finds a tool that is not there
    if EPISODE in config.rewards and getattr(task, "environment", None) is None:
        raise UserError(f"rewards.episode: task {task.name} has no environment that pays; leave it out")
    if config.off_policy.router_replay and not has_experts(policy.model.config):
        raise UserError("off_policy.router_replay: this model has no experts to choose from; leave it out")
    if config.num_prompts % world_size():
        raise UserError(
            f"num_prompts = {config.num_prompts}: expected a multiple of the {world_size()} ranks"
        )


def audit_parts(setup: RLSetup) -> list[str]:
    """Audit each part of the task in short; return what is to be shown: doubts, and failures that shall not stop."""
    failures = []
    if setup.config.teacher.is_given and not any(setup.config.reward_weights.values()):
        return failures  # the teacher teaches alone: rewards of weight 0 tell nothing apart
    alone = Heartbeat(None, rank(), timeout_s=setup.config.safety.hang_timeout_s)  # of a dry run
    with alone if (beating := current()) is None else nullcontext(beating) as heartbeat:
        for part in {problem.meta.get(PART): None for problem in setup.problems}:
            own = [problem for problem in setup.problems if problem.meta.get(PART) == part]
            heartbeat.go_on("preflight")
            try:
                sign = "# " if beating is None else "whet: "
                failures += preflight(setup.task, setup.rewards, setup.policy.schema, own, sign=sign)
            except UserError as error:
                if setup.config.preflight == "stop":
                    raise
                failures.append(str(error))
    return failures
