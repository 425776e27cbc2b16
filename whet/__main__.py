"""The command table: `whet COMMAND` is `python -m whet COMMAND`."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Before torch is imported. Idle OpenMP threads spin for ever by default and stall when another process wants
# the core (a step then takes 4 times as long); asleep at once (PASSIVE) tiny operations are 1.5 times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

from whet import __version__, cli
from whet.types import UserError


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next step: given back, it comes again page by page (a tenth of a step)."""
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        allocator = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if allocator is not None:
            allocator(-3, 1 << 30)  # M_MMAP_THRESHOLD in bytes
            allocator(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What a command runs, loaded.

    Attributes:
        config_class: Its config.
        main: Runs it; `main(config, resume=...)` when resumable, else `main(config)`.
        recipes: Name -> function returning a full config; empty when the command takes no RECIPE.
        plan: Text that --dry-run prints below the config.
        presets: Named values of a group of fields, or of some of them, as `--algo gspo` and `--optim lean`.
        resumable: Whether it knows --resume.
        shared: Whether it trains: several ranks (torchrun) can share its work, and it knows --resume STEP.
        positional: Field that its one word sets (all its words, where it is a tuple), for a program without recipes.
    """

    config_class: type[Any]
    main: Callable[..., None]
    recipes: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    plan: Callable[[Any], str] | None = None
    presets: Mapping[str, Mapping[str, Callable[[], Any]]] = field(default_factory=dict)
    resumable: bool = False
    shared: bool = False
    positional: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One row of the table: how to load a program (slow: it imports torch), and its line of help."""

    load: Callable[[], Program]
    help: str


def _diagnose() -> Program:
    from whet.inspect.diagnose.diagnose import DiagnoseConfig, main

    return Program(config_class=DiagnoseConfig, main=main, positional="recipe")


def _sweep() -> Program:
    from whet.inspect.sweep.sweep import SweepConfig, main

    return Program(config_class=SweepConfig, main=main, positional="recipe")


def _bench() -> Program:
    from whet.inspect.bench import BenchConfig, main

    return Program(config_class=BenchConfig, main=main)


def _profile() -> Program:
    from whet.inspect.profile.profile import ProfileConfig, main

    return Program(config_class=ProfileConfig, main=main, positional="recipe")


def _sft() -> Program:
    from whet.recipes.sft import RECIPES
    from whet.train.optim.step import PRESETS
    from whet.train.sft import SFTConfig, main, plan

    return Program(
        config_class=SFTConfig,
        main=main,
        recipes=RECIPES,
        plan=plan,
        resumable=True,
        shared=True,
        presets={"optim": PRESETS},
    )


def _dpo() -> Program:
    from whet.recipes.dpo import RECIPES
    from whet.train.dpo import DPOConfig, main, plan
    from whet.train.optim.step import PRESETS

    return Program(
        config_class=DPOConfig,
        main=main,
        recipes=RECIPES,
        plan=plan,
        resumable=True,
        shared=True,
        presets={"optim": PRESETS},
    )


def _rft() -> Program:
    from whet.recipes.rft import RECIPES
    from whet.train.optim.step import PRESETS
    from whet.train.rft import RFTConfig, main, plan

    return Program(
        config_class=RFTConfig,
        main=main,
        recipes=RECIPES,
        plan=plan,
        resumable=True,
        shared=True,
        presets={"optim": PRESETS},
    )


def _rl() -> Program:
    from whet.recipes.rl import ALGORITHMS, RECIPES
    from whet.train.optim.step import PRESETS
    from whet.train.rl import main
    from whet.train.rl_config import RLConfig, plan

    presets = {"algo": ALGORITHMS, "optim": PRESETS}
    return Program(
        config_class=RLConfig,
        main=main,
        recipes=RECIPES,
        plan=plan,
        resumable=True,
        shared=True,
        presets=presets,
    )


def _eval() -> Program:
    from whet.eval.evaluate import EvalConfig, main, plan
    from whet.recipes.evaluation import RECIPES

    return Program(config_class=EvalConfig, main=main, recipes=RECIPES, plan=plan, resumable=True)


def _compare() -> Program:
    from whet.eval.compare.compare import CompareConfig, main, plan
    from whet.recipes.evaluation import RECIPES

    presets = {"eval": RECIPES}
    return Program(
        config_class=CompareConfig, main=main, plan=plan, presets=presets, positional="models", resumable=True
    )


def _runs() -> Program:
    from whet.report.runs import RunsConfig, main

    return Program(config_class=RunsConfig, main=main, positional="folder")


def _report() -> Program:
    from whet.report.html import ReportConfig, main

    return Program(config_class=ReportConfig, main=main, positional="run")


def _watch() -> Program:
    from whet.report.watch import WatchConfig, main

    return Program(config_class=WatchConfig, main=main, positional="run")


def _probe() -> Program:
    from whet.eval.probe.probe import ProbeConfig, main, plan

    return Program(config_class=ProbeConfig, main=main, plan=plan, positional="models")


def _validate() -> Program:
    from whet.inspect.validate.validate import ValidateConfig, main, plan
    from whet.recipes.validation import RECIPES

    return Program(config_class=ValidateConfig, main=main, recipes=RECIPES, plan=plan)


def _chat() -> Program:
    from whet.serve.chat import ChatConfig, main

    return Program(config_class=ChatConfig, main=main, positional="policy.init")


def _serve() -> Program:
    from whet.serve.serve import ServeConfig, main

    return Program(config_class=ServeConfig, main=main, positional="policy.init")


def _plan() -> Program:
    from whet.inspect.memory.plan import PlanConfig, main

    return Program(config_class=PlanConfig, main=main, positional="recipe")


def _replay() -> Program:
    from whet.inspect.replay.replay import ReplayConfig, main

    return Program(config_class=ReplayConfig, main=main, positional="run")


def _track() -> Program:
    from whet.report.track import TrackRunConfig, main

    return Program(config_class=TrackRunConfig, main=main, positional="run")


def _audit() -> Program:
    from whet.eval.audit.audit import AuditConfig, main, plan

    return Program(config_class=AuditConfig, main=main, plan=plan, positional="task.name")


def _data() -> Program:
    from whet.inspect.data.data import DataReportConfig, main

    return Program(config_class=DataReportConfig, main=main)


def _doctor() -> Program:
    from whet.inspect.doctor.doctor import DoctorConfig, main

    return Program(config_class=DoctorConfig, main=main, positional="check")


def _demo() -> Program:
    from whet.recipes.demo import DemoConfig, main

    return Program(config_class=DemoConfig, main=main)


def _explain() -> Program:
    from whet.inspect.explain.explain import ExplainConfig, main

    return Program(config_class=ExplainConfig, main=main)


def _seeds() -> Program:
    from whet.inspect.seeds.seeds import SeedsConfig, main, plan

    return Program(config_class=SeedsConfig, main=main, plan=plan, resumable=True)


COMMANDS: dict[str, Command] = {
    "sft": Command(load=_sft, help="fine-tune a model on worked solutions"),
    "rft": Command(load=_rft, help="fine-tune a model on those of its own completions that are right"),
    "dpo": Command(load=_dpo, help="teach a model to prefer better completions over worse ones"),
    "rl": Command(load=_rl, help="reinforce a model with verifiable rewards"),
    "eval": Command(load=_eval, help="measure a model: accuracy with its confidence interval"),
    "compare": Command(load=_compare, help="models side by side: what differs, how certain, what they wrote"),
    "report": Command(
        load=_report, help="one HTML page of a run: curves, warnings, every completion, differences"
    ),
    "watch": Command(load=_watch, help="a running run in the browser: live curves, every completion"),
    "probe": Command(
        load=_probe, help="what a model forgot: off-domain questions, perplexity of prose, token transcripts"
    ),
    "validate": Command(
        load=_validate,
        help="a whole recipe against thresholds declared before; exit status 1 when one is missed",
    ),
    "chat": Command(load=_chat, help="talk to a model in the terminal"),
    "serve": Command(load=_serve, help="serve a model to OpenAI's clients and evaluation harnesses"),
    "runs": Command(load=_runs, help="the registry of runs: lineage, hashes, results"),
    "sweep": Command(
        load=_sweep, help="the fastest settings of a recipe on this machine that its memory holds"
    ),
    "bench": Command(load=_bench, help="speed and memory beside TRL, transformers and vLLM on this machine"),
    "diagnose": Command(
        load=_diagnose,
        help="one real training step, component by component: pass, warn or fail, with reasons",
    ),
    "profile": Command(
        load=_profile,
        help="where a step's time and memory go, by phase; a trace, a page, Nsight's command lines",
    ),
    "plan": Command(
        load=_plan, help="peak memory of a recipe by phase, before it runs, and what fits a device"
    ),
    "replay": Command(load=_replay, help="recompute a recorded step and say at which stage it differs"),
    "track": Command(
        load=_track, help="send a run that has ended to experiment trackers, from its own files"
    ),
    "audit": Command(
        load=_audit, help="test a task and its rewards before training: right pays most, hostile nothing"
    ),
    "data": Command(load=_data, help="report on a task's data: lengths, repetitions, train/test overlap"),
    "doctor": Command(
        load=_doctor, help="attack the sandbox; train twice and compare; look at a run that hangs"
    ),
    "demo": Command(load=_demo, help="the whole story in minutes on a laptop: base model, SFT, RL, report"),
    "seeds": Command(
        load=_seeds, help="one recipe with several seeds: stop the hopeless ones, report the spread"
    ),
    "explain": Command(load=_explain, help="the arithmetic behind it, by worked examples with plots"),
}


def usage() -> str:
    """Return the table of commands."""
    width = max(map(len, COMMANDS)) + 2
    rows = [f"  {name:<{width}}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: whet COMMAND [RECIPE] [--field value ...]",
            "",
            *rows,
            "",
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
        keep_freed_memory()
    words = sys.argv[1:] if argv is None else argv
    if _is_rank():
        from whet.ranks.launch import run_rank

        run_rank(lambda: run(words))
    return cli.guard(lambda: run(words))


if __name__ == "__main__":
    sys.exit(main())
