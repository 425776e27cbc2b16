"""whet: turn language models into reasoning models, in plain PyTorch.

The names below are the public interface (docs/python.md); each is imported when it is first used, so that `import whet`
takes no time.
"""

from __future__ import annotations

import importlib
import os
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

    Idle threads of OpenMP sleep after a while: by default they spin for ever and stall when another process wants the
    core (a step then takes 4 times as long); when they sleep immediately (PASSIVE), tiny operations are 1.5 times
    slower. oneDNN, and PyTorch's layer above it, keep 1,024 products by shape each; batches have a new shape at every
    step, and fine-tuning a model of 1 M parameters in bfloat16 grew to 3 GiB by them.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "128")


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
