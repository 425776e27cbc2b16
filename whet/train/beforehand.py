"""What `whet rl` checks before it makes anything."""

from __future__ import annotations

from collections.abc import Sequence

from whet.distributed import world_size
from whet.eval.audit import preflight
from whet.generate.policy import Policy
from whet.rewards.base import EPISODE, WeightedReward
from whet.tasks.base import answer_type_of
from whet.tasks.mixture import PART
from whet.tasks.tools import environment_for
from whet.train.rl_config import RLConfig
from whet.types import Problem, Task, UserError


def check_fit(config: RLConfig, policy: Policy, task: Task) -> None:
    """Refuse what does not fit together.

    Raises:
        UserError: With what to leave out or change.
    """
    policy.expect(answer_type_of(task))
    environment_for(policy.schema, task)  # finds a tool that is not there
    if EPISODE in config.rewards and getattr(task, "environment", None) is None:
        raise UserError(f"rewards.episode: task {task.name} has no environment that pays; leave it out")
    if config.num_prompts % world_size():
        raise UserError(
            f"num_prompts = {config.num_prompts}: expected a multiple of the {world_size()} ranks"
        )


def audit_parts(
    config: RLConfig,
    task: Task,
    rewards: Sequence[WeightedReward],
    policy: Policy,
    problems: Sequence[Problem],
) -> list[str]:
    """Audit each part of the task in short; return what failed where that is only to be shown."""
    failures = []
    for part in {problem.meta.get(PART): None for problem in problems}:
        try:
            preflight(task, rewards, policy.schema, [p for p in problems if p.meta.get(PART) == part])
        except UserError as error:
            if config.preflight == "stop":
                raise
            failures.append(str(error))
    return failures
