"""Child processes that end with their parent, however that ends: by itself, SIGTERM or SIGKILL.

Linux kills a child when its parent dies, if the child asks for it (PR_SET_PDEATHSIG): a program is started by a small
one that asks, checks that the parent was still there, and becomes the program. That holds for one generation, and for
a child of the main thread (the kernel means the thread, not the process). Elsewhere, for a child of another thread, and
for a program that starts others which know nothing of this, a watcher waits for the end of a pipe from the parent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess  # 20 ms that other callers do not need

PR_SET_PDEATHSIG = 1
TICK_S = 0.2
"""Seconds between two looks at the parent where the kernel does not tell."""

# The parent may have died before prctl took effect, or before a watcher was there: nothing comes through the gate then.
# Python ignores SIGPIPE, which would be inherited.
_BECOME = f"""
import os, signal, sys
parent, number, gate = map(int, sys.argv[1:4])
if number:
    import ctypes
    ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, number)
if os.getppid() == parent and (gate < 0 or os.read(gate, 1)):
    if gate >= 0:
        os.close(gate)
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execvp(sys.argv[4], sys.argv[4:])
"""
_WATCH = f"""
import os, select, sys
pid, number, kill = int(sys.argv[1]), int(sys.argv[2]), os.killpg if sys.argv[3] == "tree" else os.kill
try:
    while not select.select([0], [], [], {TICK_S})[0]:
        os.kill(pid, 0)
    kill(pid, number)
except OSError:
    pass
"""
_PYTHON = (sys.executable, "-I", "-S", "-c")


class Child(subprocess.Popen[Any]):
    """A started program; see `start`."""

    _watcher: subprocess.Popen[bytes] | None = None

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""
        status = super().poll()
        if status is not None:
            self._dismiss()
        return status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit status."""
        status = super().wait(timeout)
        self._dismiss()
        return status

    def _dismiss(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.kill()
            watcher.communicate()


def start(
    words: Sequence[str | os.PathLike[str]],
    *,
    death: signal.Signals = signal.SIGKILL,
    tree: bool = False,
    **options: Any,
) -> Child:
    """Start a program that ends with this process.

    Args:
        words: Program and arguments.
        death: The signal that it gets when this process ends; SIGTERM for one that then saves and stops by itself.
        tree: Whether it starts others that would outlive it: it leads a session of its own, which ends as a whole.
        options: Of `subprocess.Popen`.

    Raises:
        OSError: If there is no such program.
    """
    options = options | ({"start_new_session": True} if tree else {})
    is_asking = sys.platform == "linux" and threading.current_thread() is threading.main_thread()
    number = int(death) if is_asking else 0
    if is_asking and not tree:
        child = Child(_becoming(words, number, -1, options), **options)
    else:
        inner, outer = os.pipe()
        try:
            options["pass_fds"] = (*options.get("pass_fds", ()), inner)
            child = Child(_becoming(words, number, inner, options), **options)
            child._watcher = _watcher(child.pid, death, tree=tree)
            os.write(outer, b"1")
        finally:
            os.close(inner)
            os.close(outer)
    child.args = list(words)  # for messages
    return child


def _watcher(pid: int, death: signal.Signals, *, tree: bool) -> subprocess.Popen[bytes]:
    """Start what ends a process with this one; its owner keeps the object, for without it the pipe is closed."""
    words = [*_PYTHON, _WATCH, str(pid), str(int(death)), "tree" if tree else "one"]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    # In a session of its own: neither Ctrl-C nor the end of the tree is for it.
    return subprocess.Popen(words, stdin=pipe, stdout=null, stderr=null, cwd="/", start_new_session=True)


@contextmanager
def started(children: Sequence[BaseProcess]) -> Iterator[None]:
    """Start processes of `multiprocessing` that end with this one, and join them at the end.

    They call `end_with_parent` as well; until they come to that, they import for seconds.
    """
    watchers: list[subprocess.Popen[bytes]] = []
    try:
        for child in children:
            child.start()
            assert child.pid is not None
            watchers.append(_watcher(child.pid, signal.SIGKILL, tree=False))
        yield
        for child in children:
            child.join()
        for watcher in watchers:
            watcher.kill()
    finally:
        for watcher in watchers:
            watcher.communicate()


def run(
    words: Sequence[str | os.PathLike[str]],
    *,
    input: Any = None,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a program that ends with this process, and wait for it; arguments are those of `subprocess.run`.

    Raises:
        OSError: If there is no such program.
        subprocess.SubprocessError: As `subprocess.run` does.
    """
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(words, **options) as child:
        try:
            out, err = child.communicate(input, timeout)
        except BaseException:
            child.kill()
            child.wait()
            raise
    done = subprocess.CompletedProcess(list(words), child.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def end_with_parent(parent: int = 0) -> None:
    """Have this process killed when its parent ends; the first call of a child made by `fork` or `multiprocessing`.

    Args:
        parent: The parent's process id, taken before the fork; 0 for what `multiprocessing` knows.
    """
    if not parent:
        import multiprocessing  # 20 ms that other callers do not need

        found = multiprocessing.parent_process()
        parent = found.pid or 0 if found is not None else os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(TICK_S)
    with suppress(ProcessLookupError):
        os.kill(os.getpid(), signal.SIGKILL)


def _becoming(
    words: Sequence[str | os.PathLike[str]], number: int, gate: int, options: dict[str, Any]
) -> list[str]:
    """Return the command line of what asks the kernel for a signal, waits at a gate, and then becomes the program."""
    program = os.fspath(words[0])
    environment = options.get("env") or os.environ
    if shutil.which(program, path=environment.get("PATH")) is None and not options.get("cwd"):
        number = errno.EACCES if os.path.exists(program) else errno.ENOENT
        raise OSError(number, os.strerror(number), program)
    return [*_PYTHON, _BECOME, str(os.getpid()), str(number), str(gate), *(os.fspath(word) for word in words)]
