"""whet: turn language models into reasoning models, in plain PyTorch.

The names below are the public interface (docs/python.md); each is imported when it is first used, so that `import whet`
takes no time.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.api import (
        Comparison,
        Edit,
        Evaluation,
        Policy,
        Run,
        Task,
        compare,
        dpo,
        edit,
        evaluate,
        export,
        load,
        logprobs,
        merge,
        quantize,
        rft,
        rl,
        rl_steps,
        sft,
        steer,
        trace,
    )
    from whet.rewards.answers.equal import answers_equal
    from whet.rewards.answers.extract import extract_answer
    from whet.sandbox.programs import run_python
    from whet.schema import Schema
    from whet.stats import pass_at_k
    from whet.types import UserError

__version__ = "0.1.0"
__all__ = (
    "Comparison",
    "Edit",
    "Evaluation",
    "Policy",
    "Run",
    "Schema",
    "Task",
    "UserError",
    "answers_equal",
    "compare",
    "dpo",
    "edit",
    "evaluate",
    "export",
    "extract_answer",
    "load",
    "logprobs",
    "merge",
    "pass_at_k",
    "quantize",
    "rft",
    "rl",
    "rl_steps",
    "run_python",
    "sft",
    "steer",
    "trace",
)
_ELSEWHERE = {
    "Schema": "whet.schema",
    "UserError": "whet.types",
    "answers_equal": "whet.rewards.answers.equal",
    "extract_answer": "whet.rewards.answers.extract",
    "pass_at_k": "whet.stats",
    "run_python": "whet.sandbox.programs",
}


def calm_libraries() -> None:
    """Set what OpenMP and oneDNN read when torch is imported, unless the user chose.

    Threads of OpenMP that wait for each other spin for a while, and then sleep. By default they spin for ever and stall
    when another process wants the core. 20,000 rounds are best where the cores are free (without any, steps of a tiny
    model take 1.2 to 1.6 times as long), and bad where they are not: then a step takes twice as long as without.
    oneDNN, and PyTorch's layer above it, keep 1,024 products by shape each; batches have a new shape at every
    step, and fine-tuning a model of 1 M parameters in bfloat16 grew to 3 GiB by them.
    """
    _allow_no_temporary_folder()
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ["GOMP_SPINCOUNT"] = "0" if _is_busy() else "20000"
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "128")


def _allow_no_temporary_folder() -> None:
    """Let packages that look for a temporary folder when they are imported (dill, by torch) find none.

    What writes there says so then; the run folder may be the only one that can be written.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tempfile.tempdir = os.environ.get("TMPDIR") or "/tmp"


def _is_busy() -> bool:
    """Say whether other programs keep half of the cores busy: most of a few looks, a millisecond apart."""
    looks: list[int] = []
    for _ in range(5):
        looks.append(_num_running() - 1)
        time.sleep(0.001)
    return sorted(looks)[2] >= (os.cpu_count() or 1) / 2


def _num_running() -> int:
    """Return how many threads of this machine run or wait for a core, this one among them; 1 where nobody tells."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("procs_running"))
    except (OSError, ValueError, IndexError, StopIteration):
        return 1


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'whet' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name not in _ELSEWHERE:
        calm_libraries()
    value = getattr(importlib.import_module(_ELSEWHERE.get(name, "whet.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
