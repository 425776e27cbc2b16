"""Function tests: the program runs in one child, its tests in another; every call between them is relayed and checked.

Only the tests' child knows the expected values; the program's child sees the arguments of one call at a time. An answer
counts only with the nonce drawn for its call, so it can be neither prepared nor replayed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from whet.sandbox.inside.remote import NONCE_BYTES
from whet.sandbox.jobs import (
    Process,
    Stage,
    Status,
    Verdict,
    cpu_limit,
    judge_end,
    one_line,
    pump,
    stage_of,
)
from whet.sandbox.launch import Supervisor

MAX_RESTARTS = 2
"""How often a program is restarted after a test that killed it; later tests are not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TestResult:
    """How one test ended.

    Attributes:
        status: `ok`; `wrong` the test failed; `rte` the program raised what the test does not expect; `tle`, `mle`,
            `ole`, `killed` as in `Verdict`; `infra_error` the test cannot run this way, or the sandbox failed.
        message: One line for people.
        seconds: Wall time.
        num_calls: How often the test asked the program for something.
    """

    __test__ = False  # not for pytest to collect

    status: Status
    message: str = ""
    seconds: float = 0.0
    num_calls: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TestsVerdict:
    """A program's test results.

    Attributes:
        program: How loading it ended (`ok` and stage `done` if it defined its names), with its output.
        results: One per test, in order.
    """

    __test__ = False

    program: Verdict
    results: tuple[TestResult, ...]

    @property
    def status(self) -> Status:
        """`ok` when every test is; otherwise that of the first that is not, but `infra_error` before all others."""
        statuses: list[Status] = [self.program.status, *(result.status for result in self.results)]
        if "infra_error" in statuses:
            return "infra_error"
        failed: list[Status] = [status for status in statuses if status != "ok"]
        return failed[0] if failed else "ok"

    @property
    def scores(self) -> dict[str, float]:
        """Partial credit, each from 0 to 1: `syntax`, `imports`, `runs`, and `tests`, the share that is ok.

        A test that passes without asking the program anything (`assert True`) counts for nobody.
        """
        stages: tuple[Stage, ...] = ("syntax", "import", "run", "done")
        reached = stages.index(self.program.stage)
        counted = [result for result in self.results if result.status != "ok" or result.num_calls]
        passed = sum(result.status == "ok" for result in counted)
        return {
            "syntax": float(reached > 0),
            "imports": float(reached > 1),
            "runs": float(reached > 2),
            "tests": passed / len(counted) if counted else 0.0,
        }


_Outcome = tuple[Status, str, int]


class _Pair:
    """A program's child and its tests' child."""

    def __init__(
        self, stack: ExitStack, supervisor: Supervisor, code: str, setup: str, **limits: Any
    ) -> None:
        names: Sequence[str] = limits.pop("names")
        has_objects: bool = limits.pop("has_objects")
        self.timeout_s: float = limits.pop("timeout_s")

        def start(payload: dict[str, Any]) -> Process:
            return stack.enter_context(Process(supervisor, payload, **limits))

        self.program = start({"role": "serve", "code": code})
        judge = {"role": "judge", "code": setup, "names": list(names), "has_objects": has_objects}
        self.tests = start(judge)
        self.both = (self.program, self.tests)
        self.is_broken = False

    def load(self) -> Verdict:
        """Load the program and run the tests' setup."""
        for process in self.both:
            process.wait_ready()
        deadline = time.monotonic() + self.timeout_s
        names: list[bytes] = []

        def has_names() -> bool:
            frame = self.program.receive()
            names.extend([frame] if frame is not None else [])
            return bool(names) or self.program.has_ended

        in_time = pump(self.both, deadline, has_names)
        if not names:
            status, exit_code, message = self._end_program(is_late=not in_time)
            if status == "ok":
                status, message = "rte", "the program exited"
            return self._verdict(status, message, exit_code)
        self.tests.send(names[0])
        status, message, _ = self._relay(deadline, b"s")
        return self._verdict(status, message and f"setup of the tests: {message}", None)

    def run(self, test: str) -> TestResult:
        """Run one test."""
        start = time.monotonic()
        self.tests.send(test.encode("utf-8", "surrogatepass"))
        status, message, num_calls = self._relay(start + self.timeout_s, b"r")
        seconds = time.monotonic() - start
        return TestResult(status=status, message=message, seconds=seconds, num_calls=num_calls)

    def _verdict(self, status: Status, message: str, exit_code: int | None) -> Verdict:
        return Verdict(
            status=status,
            stdout=self.program.stdout.decode("utf-8", "replace"),
            stderr=self.program.stderr.decode("utf-8", "replace"),
            exit_code=exit_code,
            seconds=time.monotonic() - self.program.started,
            backend=self.program.backend,
            message=message,
            stage=stage_of(self.program),
        )

    def _relay(self, deadline: float, last: bytes) -> _Outcome:
        """Relay calls and answers until the tests' child reports; `last` is the kind of that message."""
        self.is_broken = True
        nonce = b""
        num_calls = 0
        call: bytes | None = None
        answer: bytes | None = None

        def has_message() -> bool:
            nonlocal call, answer
            call = call or self.tests.receive()
            answer = answer or self.program.receive()
            return bool(call or answer or self.tests.has_ended or (nonce and self.program.has_ended))

        while pump(self.both, deadline, has_message):
            if answer is not None:
                if not nonce or answer[:NONCE_BYTES] != nonce:
                    return "rte", "the program sent an answer to no call", num_calls
                self.tests.send(answer[NONCE_BYTES:])
                nonce, answer = b"", None
            elif call is not None:
                if call[:1] == last:
                    self.is_broken = False
                    status, message, num_calls = json.loads(call[1:])
                    return status, one_line(message), num_calls
                if self.program.has_ended:
                    nonce = b"-"
                else:
                    nonce = os.urandom(NONCE_BYTES)
                    self.program.send(nonce + call[1:])
                num_calls, call = num_calls + 1, None
            elif self.tests.has_ended:
                return "wrong", "the process of the tests ended", num_calls
            else:
                status, _, message = self._end_program(is_late=False)
                if status == "ok":
                    status, message = "rte", "the program exited"
                return status, message, num_calls
        return "tle", "out of time", num_calls

    def _end_program(self, *, is_late: bool) -> tuple[Status, int, str]:
        self.program.kill()
        return judge_end(self.program, is_late)

    @property
    def is_usable(self) -> bool:
        """Whether another test can be run."""
        return not self.is_broken and not any(process.has_ended for process in self.both)


def run_function_tests(
    supervisor: Supervisor,
    code: str,
    tests: Sequence[str],
    *,
    setup: str,
    names: Sequence[str],
    has_objects: bool,
    timeout_s: float,
    memory_mib: int,
    max_output_bytes: int,
) -> TestsVerdict:
    """Load a program and run its tests, each with its own deadline.

    Raises:
        SupervisorError: If the sandbox itself failed.
    """
    results: list[TestResult] = []
    program: Verdict | None = None
    num_starts = 0
    while len(results) < len(tests) or program is None:
        if num_starts > MAX_RESTARTS:
            message = f"not run: the program did not survive {num_starts} earlier tests"
            results += [TestResult(status=results[-1].status, message=message)] * (len(tests) - len(results))
            break
        num_starts += 1
        with ExitStack() as stack:
            pair = _Pair(
                stack,
                supervisor,
                code,
                setup,
                names=names,
                has_objects=has_objects,
                timeout_s=timeout_s,
                memory_mib=memory_mib,
                cpu_s=cpu_limit(timeout_s * (len(tests) + 2)),
                max_output_bytes=max_output_bytes,
            )
            loaded = pair.load()
            program = program or loaded
            if loaded.status != "ok":
                rest = TestResult(status=loaded.status, message=loaded.message)
                results += [rest] * (len(tests) - len(results))
                break
            while len(results) < len(tests):
                result = pair.run(tests[len(results)])
                results.append(result)
                if not pair.is_usable:
                    break
    assert program is not None
    return TestsVerdict(program=program, results=tuple(results))
