"""Rollout workers, and others that are started, called and lost as they are, as Ray actors."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

from whet.generate.backends.staff import Hand, LostError, Refs
from whet.generate.backends.workers import RolloutWorker, Workers
from whet.generate.policy import Policy
from whet.ranks.collectives import shard
from whet.ranks.ray import ClusterConfig, find_address, open_ray

FETCH_S = 600.0


class RayCrew:
    """Starts workers as Ray actors; their calls and the weights go through its object store.

    Args:
        config: The cluster, and what its other workers ask for.
        actor: The worker's class.
        arguments: What it is made from.
        count: Workers that there will be.
        cpus: CPUs that each of them asks for.
        gpus: GPUs that each of them asks for.
        nbytes: Bytes of the policy, of which the object store holds a few versions.
    """

    def __init__(
        self,
        config: ClusterConfig,
        actor: type[Any],
        *arguments: Any,
        count: int,
        cpus: float,
        gpus: float = 0.0,
        nbytes: int = 0,
    ) -> None:
        self._stack = ExitStack()
        # Rollout workers and graders share a local cluster, whoever starts it.
        context = open_ray(
            find_address(config),
            cpus=config.rollout_workers * config.worker_threads + config.reward_workers,
            gpus=count * gpus,
            store_bytes=6 * nbytes,
        )
        self._ray = self._stack.enter_context(context)
        self._actor = self._ray.remote(actor).options(num_cpus=cpus, num_gpus=gpus, max_concurrency=2)
        self._arguments, self._hands = arguments, list[Any]()
        self._errors = self._ray.exceptions

    def put(self, value: Any) -> Any:
        """Put an object into the object store."""
        return self._ray.put(value)

    def hire(self) -> Hand:
        """Ask for an actor; it starts when the cluster has room."""
        hand = self._actor.remote(*self._arguments)
        self._hands.append(hand)
        return hand

    def call(self, hand: Any, method: str, *arguments: Any) -> Any:
        """Call a method of an actor."""
        return getattr(hand, method).remote(*arguments)

    def wait(self, refs: Refs, timeout_s: float) -> Refs:
        """Return the references whose results are there, or will never be."""
        done, _ = self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        if done:  # and what else is there by now
            done, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        return done

    def result(self, ref: Any) -> Any:
        """Return a result; raise LostError if the actor died, else what the method raised, as it raised it."""
        try:
            return self._ray.get(ref, timeout=FETCH_S)
        except self._errors.RayTaskError as error:
            raise getattr(error, "cause", None) or error from None
        except self._errors.RayError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise LostError(reason[:300]) from None

    def fire(self, hand: Any) -> None:
        """Kill an actor."""
        self._hands.remove(hand)
        self._ray.kill(hand)

    def close(self) -> None:
        """End the workers, and leave the cluster if no other crew is there; a local one then ends, too."""
        with suppress(self._errors.RayError):
            while self._hands:
                self._ray.kill(self._hands.pop())
        self._stack.close()


def open_workers(config: ClusterConfig, policy: Policy) -> Workers:
    """Start this rank's share of a run's rollout workers.

    Raises:
        UserError: If Ray is missing, or there is no such cluster.
    """
    count = len(shard(config.rollout_workers))
    nbytes = sum(tensor.nbytes for tensor in policy.model.state_dict().values())
    crew = RayCrew(
        config,
        RolloutWorker,
        config.worker_threads,
        count=count,
        cpus=config.worker_threads,
        gpus=config.worker_gpus,
        nbytes=nbytes,
    )
    try:
        return Workers(policy, config, crew, count=count)
    except BaseException:
        crew.close()
        raise
