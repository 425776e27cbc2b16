"""The process that runs a sweep's steps: running out of memory kills it, not the sweep.

Requests and answers are lines of JSON. `Worker` is the client; `python -m whet.inspect.sweep.worker` is the server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import psutil
import torch

from whet import processes
from whet.config import from_dict
from whet.generate.policy import resolve_device
from whet.inspect.sweep.steps import Reinforcement, Steps, load, memory_errors
from whet.install import NoPosix
from whet.sandbox.graders.graders import num_cores
from whet.sandbox.reentry import end_with_parent, refuse_reentry
from whet.telemetry.provenance import describe_environment
from whet.train.optim.safety import is_out_of_memory
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.types import UserError

try:
    import resource
except ImportError:  # Windows
    resource = NoPosix()  # pyright: ignore[reportAssignmentType]

COMMAND = (sys.executable, "-m", "whet.inspect.sweep.worker")
WORDS_OF_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "Cannot allocate memory")
"""Messages of a process that ends for lack of memory."""
CGROUP = "/sys/fs/cgroup/memory"
Answer = dict[str, Any]


class Worker:
    """A process that runs steps of one recipe; `close` ends it.

    Args:
        command: Its command line.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        refuse_reentry("a sweep")
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        self._process = processes.start(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
        )

    def ask(self, request: Mapping[str, Any]) -> Answer:
        """Send a request and wait for the answer.

        Returns:
            The answer, with 'status': 'ok', 'oom' or 'failed', the last two with 'why'.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        if line := self._process.stdout.readline():
            return json.loads(line)
        return self._ended()

    def _ended(self) -> Answer:
        """Return why it ended without an answer."""
        code = self._process.wait()
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()] or [""]
        if code == -signal.SIGKILL:
            return {"status": "oom", "why": "killed, probably by the system for lack of memory"}
        name = signal.Signals(-code).name if code < 0 else f"status {code}"
        status = "oom" if any(word in line for line in lines[-5:] for word in WORDS_OF_MEMORY) else "failed"
        return {"status": status, "why": f"the process ended with {name}: {lines[-1][:200]}"}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()


class _Server:
    """Answers requests; loads the recipe at the first one, with its settings."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._steps: Steps | None = None
        self._memory = 0

    def answer(self, request: Mapping[str, Any]) -> Answer:
        """Execute a request: 'about', 'memory' or 'time'."""
        kind = RLConfig if request["program"] == "rl" else SFTConfig
        run = from_dict(kind, request["run"], where="sweep")
        if self._steps is None:
            self._memory = limit_memory(request["memory_bytes"], resolve_device(run.policy.device))
            self._steps = load(run, self._stack)
        steps = self._steps
        if request["what"] == "about":
            facts = describe_environment()
            is_cuda = steps.policy.device.type == "cuda"
            return {
                "is_cuda": is_cuda,
                "device": facts["cuda_device"] if is_cuda else facts["cpu"],
                "torch": facts["torch"],
                "threads": torch.get_num_threads(),
                "cores": num_cores(),
                "memory_bytes": self._memory,
                "longest": steps.longest,
                "update": steps.update,
                "samples": steps.num_samples,
            }
        if request["what"] == "memory":
            peaks, seconds = steps.memory(run)
            return {"peaks": peaks, "longest_seconds": seconds}
        found = steps.time(run, request["count"])
        return {
            "steps": found,
            "is_substituted": isinstance(steps, Reinforcement) and steps.is_substituted,
        }


def answer_safely(work: Callable[[], Answer]) -> Answer:
    """Run a request; return its answer, or why it failed."""
    try:
        return {"status": "ok", **work()}
    except Exception as error:  # any failure that a setting causes is a finding
        status = "oom" if is_out_of_memory(error) else "failed"
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return {"status": status, "why": " ".join(reason.split())[:300]}


def limit_memory(num_bytes: int, device: torch.device) -> int:
    """Make allocations fail before memory is full, and make the system kill this process before others.

    Args:
        num_bytes: Permitted bytes; 0 for the free memory.
        device: The device whose memory is limited.

    Returns:
        Permitted bytes.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        num_bytes = min(num_bytes or free, free)
        torch.cuda.set_per_process_memory_fraction(num_bytes / total, device)
        return num_bytes
    num_bytes = num_bytes or free_memory()
    with suppress(OSError, ValueError):  # existing memory of the process does not count
        own = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (own + num_bytes, hard))
    return num_bytes


def free_memory() -> int:
    """Return the bytes of memory that are free for this process: on the machine, and in its control group."""
    free = psutil.virtual_memory().available
    group = [_text(f"{CGROUP}.{name}").strip() for name in ("max", "current")]
    if all(text.isdigit() for text in group):
        files = [
            line.split()[1]
            for line in _text(f"{CGROUP}.stat").splitlines()
            if line.startswith("inactive_file")
        ]
        # Cached files are given up at need.
        free = min(free, int(group[0]) - int(group[1]) + sum(map(int, files)))
    return free


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(encoding="ascii")
    return ""


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer line by line until end of input."""
    with ExitStack() as stack, memory_errors():
        server = _Server(stack)
        for line in requests:
            request = json.loads(line)
            answers.write(json.dumps(answer_safely(lambda request=request: server.answer(request))) + "\n")
            answers.flush()


def main() -> None:
    """Answer on standard output; all other output goes to standard error."""
    end_with_parent()  # end of input is noticed only between steps, which may take minutes
    with os.fdopen(os.dup(1), "w", encoding="ascii") as answers:
        os.dup2(2, 1)
        serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
