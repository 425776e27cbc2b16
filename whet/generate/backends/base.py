"""The seam between rollouts and samplers whose weights are a copy of the policy's, which have to be brought to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from whet.generate.engine import EngineStats
from whet.generate.policy import Policy
from whet.generate.rows import Completion, OnEnded, Request
from whet.generate.sampling import SamplingParams


class CopySampler(Protocol):
    """A sampler in another process, or with another engine: what rollouts need of `Engine`, and `push`.

    Attributes:
        stats: Work done so far, for the display of a long step.
        look: Called now and then while `generate` waits; may raise to end it.
    """

    stats: EngineStats
    look: Callable[[], None]

    @property
    def max_positions(self) -> int:
        """Longest context in tokens, prompt and completion together."""
        ...

    def push(self, version: int, policy: Policy) -> float:
        """Bring the policy's present weights to the sampler; what `generate` draws afterwards is drawn with them.

        Args:
            version: Number of updates that made these weights.
            policy: The trained policy.

        Returns:
            Seconds that it took.
        """
        ...

    def generate(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        *,
        on_ended: OnEnded | None = None,
        is_streamed: bool = False,
    ) -> list[list[Completion]]:
        """Draw every sample of every request, with log-probabilities under the distribution that was sampled.

        Args:
            requests: Prompts with the seeds of their samples.
            params: Temperature, filters and the longest completion.
            on_ended: Called in the caller's thread with each request that is complete, as it ends.
            is_streamed: Asked of engines that may otherwise wait before they hand a request over; these never do.

        Returns:
            For every request its completions, in the order of its seeds. A sampler whose weights may change during a
            call gives every completion its `versions`; of others they are those of the last `push`.
        """
        ...

    def release(self, above: int = 0) -> None:
        """Give memory back until the next call, if more bytes than `above` are held for it."""
        ...

    def close(self) -> None:
        """End what was started for it; a second call does nothing."""
        ...
