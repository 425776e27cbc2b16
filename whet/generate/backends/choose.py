"""Which sampler a run has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whet.generate.backends.base import CopySampler, SamplerConfig
from whet.generate.policy import Policy
from whet.ranks.ray import ClusterConfig


@contextmanager
def open_sampler(
    config: SamplerConfig, policy: Policy, folder: Path, cluster: ClusterConfig
) -> Iterator[CopySampler | None]:
    """Open the sampler of a run, and close it in the end; None stands for the policy's own engine.

    Args:
        config: Which one.
        policy: The policy, as it starts.
        folder: Run folder, for the log of a server that is started.
        cluster: Rollout workers, where there are any.

    Raises:
        UserError: If it cannot be had, or cannot have a copy of the policy's weights.
    """
    sampler = sampler_for(config, policy, folder, cluster)
    try:
        yield sampler
    finally:
        if sampler is not None:
            sampler.close()


def sampler_for(
    config: SamplerConfig, policy: Policy, folder: Path, cluster: ClusterConfig
) -> CopySampler | None:
    """Make the sampler of a run, which the caller closes; see `open_sampler`."""
    if cluster.rollout_workers:
        from whet.generate.backends.crew import open_workers

        return open_workers(cluster, policy)
    if config.kind == "engine":
        return None
    from whet.generate.backends.server import ServerSampler
    from whet.generate.backends.vllm import VllmSampler, start_server

    if config.kind == "openai":
        return ServerSampler(config, policy)
    return start_server(config, policy, folder) if config.python else VllmSampler(config, policy)
