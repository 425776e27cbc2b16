"""The seam between rollouts and samplers whose weights are a copy of the policy's, which have to be brought to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol

from whet.generate.engine import EngineStats
from whet.generate.policy import Policy
from whet.generate.rows import Completion, OnEnded, Request
from whet.generate.sampling import SamplingParams
from whet.types import UnreadError

READ_BY: dict[str, tuple[str, ...]] = {
    "engine": (),
    "openai": ("url", "model", "sync", "folder", "concurrency", "timeout_s", "retries", "api_key_env"),
    "vllm": ("dtype", "memory", "folder", "sleep"),
    "vllm with python": (
        "python",
        "arguments",
        "dtype",
        "memory",
        "folder",
        "concurrency",
        "timeout_s",
        "retries",
    ),
}
"""Fields that each kind of sampler reads."""


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """Where completions that are trained on come from."""

    kind: Literal["engine", "vllm", "openai"] = "engine"
    """engine: whet's own, on the trainer's weights, exact; openai: a server that gives token ids and log-probabilities
    (whet serve, vLLM, SGLang); vllm: one that whet starts, in this process or with `python`."""
    url: str = ""
    """Address of the server; it ends in /v1."""
    model: str = ""
    """Name of the policy at the server; empty for the one model that it has."""
    python: str = ""
    """Python of an environment that has vLLM, in which whet starts a server; empty for vLLM in this process."""
    sync: Literal["file", "broadcast"] = "file"
    """How whole weights come to a server: file through a folder that both see; broadcast from process to process over
    gloo, between GPUs over NCCL (whet serve, SGLang), which needs no shared folder."""
    folder: str = ""
    """Folder in which weights are handed over, which the server sees by the same path; empty for one in this machine's
    shared memory."""
    concurrency: int = 64
    """Requests under way at once."""
    timeout_s: float = 600.0
    """Seconds for one request."""
    retries: int = 5
    """Repetitions of a request that fails for a passing reason, each after a longer pause."""
    api_key_env: str = "WHET_API_KEY"
    """Variable of the environment with the server's key, where it has one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """vLLM's precision; auto takes the dtype that the policy computes in."""
    memory: float = 0.4
    """Share of a GPU's memory that vLLM may take, weights included; on a CPU GiB of its cache, times ten."""
    sleep: int | None = None
    """What vLLM in this process gives back on a GPU while the trainer works: 0 nothing; 1 its cache, and its weights
    wait in the host's memory; 2 its weights, too, which each step brings again. None: 1. On a CPU it never sleeps."""
    arguments: tuple[str, ...] = ()
    """Further arguments of vLLM's server, such as --enforce-eager."""

    def __post_init__(self) -> None:
        if self.kind == "openai" and not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"sampler.url = {self.url!r}: expected a server's address, such as http://127.0.0.1:8000/v1"
            )
        for name, least in (("concurrency", 1), ("retries", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"sampler.{name} = {getattr(self, name)}: expected {least} or more")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"sampler.timeout_s = {self.timeout_s}: expected above 0")
        if self.sync == "broadcast" and self.folder:
            raise UnreadError("sampler.folder is read with sampler.sync = file only; leave it out", "folder")
        if self.sleep not in (None, 0, 1, 2):
            raise ValueError(f"sampler.sleep = {self.sleep}: expected 0, 1 or 2")
        if not 0 < self.memory < 1:
            raise ValueError(f"sampler.memory = {self.memory}: expected above 0, below 1")
        kind = f"{self.kind} with python" if self.kind == "vllm" and self.python else self.kind
        for item in fields(self):
            is_read = item.name == "kind" or item.name in READ_BY[kind]
            if not is_read and getattr(self, item.name) != item.default:
                readers = " or ".join(reader for reader, read in READ_BY.items() if item.name in read)
                raise UnreadError(
                    f"sampler.{item.name} is read with sampler.kind = {readers} only; leave it out", item.name
                )


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
    ) -> list[list[Completion]]:
        """Draw every sample of every request, with log-probabilities under the distribution that was sampled.

        Args:
            requests: Prompts with the seeds of their samples.
            params: Temperature, filters and the longest completion.
            on_ended: Called in the caller's thread with each request that is complete, in the order of the requests, so
                that sums which a caller makes of them do not depend on time.

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
