"""The command table: `whet COMMAND` is `python -m whet COMMAND`."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from whet import __version__, calm_threads, cli
from whet.cli import Program
from whet.types import UserError


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next step: given back, it comes again page by page (a tenth of a step)."""
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        allocator = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if allocator is not None:
            allocator(-3, 1 << 30)  # M_MMAP_THRESHOLD in bytes
            allocator(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One row of the table: how to load a program (slow: it imports torch), and its line of help."""

    load: Callable[[], Program]
    help: str


def load(name: str) -> Program:
    """Import a command's program; only that one, since most import torch.

    Args:
        name: A name of `GROUPS`.
    """
    match name:
        case "demo":
            from whet.recipes.demo import PROGRAM
        case "explain":
            from whet.inspect.explain.explain import PROGRAM
        case "sft":
            from whet.recipes.sft import PROGRAM
        case "rft":
            from whet.recipes.rft import PROGRAM
        case "dpo":
            from whet.recipes.dpo import PROGRAM
        case "rl":
            from whet.recipes.rl import PROGRAM
        case "eval":
            from whet.recipes.evaluation import PROGRAM
        case "compare":
            from whet.recipes.evaluation import COMPARE as PROGRAM
        case "probe":
            from whet.eval.probe.probe import PROGRAM
        case "validate":
            from whet.recipes.validation import PROGRAM
        case "seeds":
            from whet.inspect.seeds.seeds import PROGRAM
        case "report":
            from whet.report.html import PROGRAM
        case "watch":
            from whet.report.watch import PROGRAM
        case "runs":
            from whet.report.runs import PROGRAM
        case "track":
            from whet.report.track import PROGRAM
        case "replay":
            from whet.inspect.replay.replay import PROGRAM
        case "chat":
            from whet.serve.chat import PROGRAM
        case "serve":
            from whet.serve.serve import PROGRAM
        case "push":
            from whet.serve.hub import PUSH as PROGRAM
        case "pull":
            from whet.serve.hub import PULL as PROGRAM
        case "plan":
            from whet.inspect.memory.plan import PROGRAM
        case "diagnose":
            from whet.inspect.diagnose.diagnose import PROGRAM
        case "sweep":
            from whet.inspect.sweep.sweep import PROGRAM
        case "audit":
            from whet.eval.audit.audit import PROGRAM
        case "data":
            from whet.inspect.data.data import PROGRAM
        case "doctor":
            from whet.inspect.doctor.doctor import PROGRAM
        case "profile":
            from whet.inspect.profile.profile import PROGRAM
        case "bench":
            from whet.inspect.bench import PROGRAM
        case _:
            raise KeyError(name)
    return PROGRAM


GROUPS: dict[str, dict[str, str]] = {
    "see it work": {
        "demo": "the whole story in minutes on a laptop: base model, SFT, RL, report",
        "explain": "the arithmetic behind it, by worked examples with plots",
    },
    "train": {
        "sft": "fine-tune a model on worked solutions",
        "rft": "fine-tune a model on those of its own completions that are right",
        "dpo": "teach a model to prefer better completions over worse ones",
        "rl": "reinforce a model with verifiable rewards",
    },
    "measure and compare": {
        "eval": "measure a model: accuracy with its confidence interval",
        "compare": "models side by side: what differs, how certain, what they wrote",
        "probe": "what a model forgot: off-domain questions, perplexity of prose, token transcripts",
        "validate": "a whole recipe against thresholds declared before; exit status 1 when one is missed",
        "seeds": "one recipe with several seeds: stop the hopeless ones, report the spread",
    },
    "look at a run": {
        "report": "one HTML page of a run: curves, warnings, every completion, differences",
        "watch": "a running run in the browser: live curves, every completion",
        "runs": "the registry of runs: lineage, hashes, results",
        "track": "send a run that has ended to experiment trackers, from its own files",
        "replay": "recompute a recorded step and say at which stage it differs",
    },
    "use a model": {
        "chat": "talk to a model in the terminal",
        "serve": "serve a model to OpenAI's clients and evaluation harnesses",
        "push": "upload a run's model to the hub, with a card of what was measured",
        "pull": "download a model from the hub, every file checked",
    },
    "before a run": {
        "plan": "peak memory of a recipe by phase, before it runs, and what fits a device",
        "diagnose": "one real training step, component by component: pass, warn or fail, with reasons",
        "sweep": "the fastest settings of a recipe on this machine that its memory holds",
        "audit": "test a task and its rewards before training: right pays most, hostile nothing",
        "data": "report on a task's data: lengths, repetitions, train/test overlap",
    },
    "this machine": {
        "doctor": "attack the sandbox; train twice and compare; look at a run that hangs",
        "profile": "where a step's time and memory go, by phase; a trace, a page, Nsight's command lines",
        "bench": "speed and memory beside TRL, transformers and vLLM on this machine",
    },
}
"""Commands by what one wants to do, each with its line of help."""

COMMANDS = {
    name: Command(load=partial(load, name), help=text)
    for group in GROUPS.values()
    for name, text in group.items()
}


def usage() -> str:
    """Return the table of commands."""
    width = max(map(len, COMMANDS)) + 2
    rows: list[str] = []
    for group, names in GROUPS.items():
        rows += [f"{group}:", *(f"  {name:<{width}}{text}" for name, text in names.items()), ""]
    return "\n".join(
        [
            "usage: whet COMMAND [RECIPE] [--field value ...]",
            "",
            *rows,
            "whet COMMAND --help          its recipes",
            "whet COMMAND RECIPE --help   its fields, with the recipe's values",
            "whet --version",
        ]
    )


def run(argv: Sequence[str]) -> int:
    """Run one command line.

    Args:
        argv: The words after `whet`.

    Returns:
        0; mistakes of the user are raised as UserError.
    """
    name = argv[0] if argv else "--help"
    if name in ("--help", "-h", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"whet {__version__}")
        return 0
    if name not in COMMANDS:
        raise cli.unknown("command", name, "whet", list(COMMANDS), help_command="whet --help")
    program = COMMANDS[name].load()
    if _is_rank() and not program.shared:
        raise UserError(f"'whet {name}' runs in one process; start it without torchrun")
    parsed = cli.parse(
        f"whet {name}",
        program.config_class,
        program.recipes,
        argv[1:],
        resumable=program.resumable,
        has_steps=program.shared,
        presets=program.presets,
        positional=program.positional,
    )
    if parsed.dry_run:
        print(cli.dump_yaml(parsed.config))
        if program.plan is not None:
            print(program.plan(parsed.config))
    elif program.resumable:
        try:
            program.main(parsed.config, resume=parsed.resume)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "the same command with --resume goes on from its last checkpoint"
            ) from None
    else:
        program.main(parsed.config)
    return 0


def _is_rank() -> bool:
    """Say whether torchrun (or the like) started this process as one of several."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Args:
        argv: The words after `whet`; None takes them from the process.
    """
    if argv is None:
        calm_threads()
        keep_freed_memory()
    words = sys.argv[1:] if argv is None else argv
    if _is_rank():
        from whet.ranks.launch import run_rank

        run_rank(lambda: run(words))
    return cli.guard(lambda: run(words))


if __name__ == "__main__":
    sys.exit(main())
