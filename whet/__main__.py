"""The command table: `whet COMMAND` is `python -m whet COMMAND`."""

from __future__ import annotations

import ast
import ctypes
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from whet import __version__, calm_libraries
from whet.install import missing_core, wrong_system

try:
    from whet import cli
    from whet.cli import Program
    from whet.types import UserError
except ModuleNotFoundError as error:  # yaml, before anything could catch it
    if not (line := missing_core(error)):
        raise
    sys.exit(f"whet: error: {line}")


def keep_streams() -> None:
    """Open /dev/null for each standard stream that the shell closed (`>&-`): the next file would get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


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
        case "infer":
            from whet.eval.compare.infer import PROGRAM
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
        case "chess":
            from whet.serve.chess.chess import PROGRAM
        case "serve":
            from whet.serve.serve import PROGRAM
        case "export":
            from whet.compress.export.export import PROGRAM
        case "push":
            from whet.serve.hub import PUSH as PROGRAM
        case "pull":
            from whet.serve.hub import PULL as PROGRAM
        case "quantize":
            from whet.compress.quantize.quantize import PROGRAM
        case "merge":
            from whet.compress.merge import PROGRAM
        case "edit":
            from whet.editing.edit import PROGRAM
        case "trace":
            from whet.editing.inside import PROGRAM
        case "steer":
            from whet.editing.steer import PROGRAM
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
        case _:
            raise KeyError(name)
    return PROGRAM


GROUPS: dict[str, dict[str, str]] = {
    "train": {
        "demo": "the whole story in minutes on a laptop: base model, SFT, RL, report",
        "sft": "fine-tune a model on worked solutions, chats or texts",
        "rft": "fine-tune a model on those of its own completions that are right",
        "dpo": "teach a model to prefer better completions over worse ones",
        "rl": "reinforce a model with verifiable rewards",
        "seeds": "one recipe with several seeds: stop the hopeless ones, report the spread",
        "edit": "write facts into a model's weights, measure what that did, take them out again",
    },
    "measure": {
        "eval": "measure a model: accuracy with its confidence interval",
        "compare": "models side by side: what differs, how certain, what they wrote",
        "infer": "many questions and images to many runs, adapters on and off: transcripts, energy",
        "probe": "what a model forgot: off-domain questions, perplexity of prose, token transcripts",
        "validate": "a whole recipe against thresholds declared before; exit status 1 when one is missed",
    },
    "look": {
        "report": "one HTML page of a run: curves, warnings, every completion, differences",
        "watch": "a running run in the browser: live curves, every completion",
        "runs": "the registry of runs: lineage, hashes, results",
        "track": "send a run that has ended to experiment trackers, from its own files",
        "data": "what a task's data is: columns, lengths, repetitions, train/test overlap",
        "explain": "the arithmetic behind it, by worked examples with plots",
        "trace": "look inside a prompt: where a fact is, what each layer would say, who attends to whom",
    },
    "use": {
        "chat": "talk to a model in the terminal",
        "chess": "play chess against a model: in the terminal, on a page, or as a UCI engine",
        "steer": "a direction of what a model says, from pairs of texts, to push it along or against",
        "serve": "serve a model to OpenAI's clients and evaluation harnesses",
        "export": "write a model for transformers, peft, llama.cpp, Ollama or mlx, and check it there",
        "push": "upload a run's model to the hub, with a card of what was measured",
        "pull": "download a model from the hub, every file checked",
    },
    "compress": {
        "quantize": "a smaller model: each layer in 4, 8 or 16 bits, as measured on a task",
        "merge": "several LoRA adapters of one base, or what training added to whole models: sum, TIES, DARE",
    },
    "check": {
        "plan": "peak memory of a recipe by phase, before it runs, and what fits a device",
        "audit": "test a task and its rewards before training: right pays most, hostile nothing",
        "diagnose": "one real training step, component by component: pass, warn or fail, with reasons",
        "profile": "where a step's time and memory go, by phase; a trace, a page, Nsight's command lines",
        "sweep": "the fastest settings of a recipe on this machine that its memory holds",
        "replay": "recompute a recorded step and say at which stage it differs",
        "doctor": "attack the sandbox; train twice and compare; look at a run that hangs",
    },
}
"""Commands by what one wants to do, each with its line of help."""

RECIPE_FILES = {
    "sft": "sft",
    "rft": "rft",
    "dpo": "dpo",
    "rl": "rl",
    "eval": "evaluation",
    "validate": "validation",
}
"""The file in `recipes` of each command that takes a recipe."""
ARGUMENTS = {
    **dict.fromkeys(RECIPE_FILES, "RECIPE"),
    **dict.fromkeys(("plan", "diagnose", "profile", "sweep", "seeds"), "RECIPE"),
    **dict.fromkeys(("report", "watch", "track", "replay"), "RUN"),
    **dict.fromkeys(("chat", "chess", "serve", "quantize", "export", "edit", "trace", "steer"), "MODEL"),
    **dict.fromkeys(("compare", "infer", "probe"), "MODEL ..."),
    "explain": "[TOPIC]",
    **dict.fromkeys(("audit", "data"), "TASK"),
    "merge": "ADAPTER ADAPTER",
    "runs": "[FOLDER]",
    "push": "RUN OWNER/NAME",
    "pull": "OWNER/NAME",
    "doctor": "CHECK",
}
"""What the words after a command name."""

REMOVED = {"bench": "run a program of bench/ in a clone, such as python bench/grpo_step.py"}
"""Commands of earlier versions, each with what to use instead."""

COMMANDS = {
    name: Command(load=partial(load, name), help=text)
    for group in GROUPS.values()
    for name, text in group.items()
}


def usage() -> str:
    """Return the table of commands."""
    width = max(map(len, COMMANDS)) + 2
    wide = max(map(len, ARGUMENTS.values())) + 2
    rows: list[str] = []
    for group, names in GROUPS.items():
        lines = (f"  {name:<{width}}{ARGUMENTS.get(name, ''):<{wide}}{text}" for name, text in names.items())
        rows += [f"{group}:", *lines, ""]
    return "\n".join(
        [
            "usage: whet COMMAND [RECIPE|RUN|TASK] [--field value ...]",
            "",
            *rows,
            "whet COMMAND --help          its recipes, or its fields",
            "whet COMMAND RECIPE --help   its fields, with the recipe's values",
            "whet --completion SHELL      completion for bash, zsh or fish",
            "whet --version",
            "",
            "your own model and data:     whet sft|dpo|rl|eval own --model MODEL --data FILE|HUB_NAME",
        ]
    )


def recipe_lines(name: str) -> dict[str, str]:
    """Return the recipes of a command, each with the first line about it, from the source: nothing is imported.

    Args:
        name: A name of `RECIPE_FILES`.
    """
    path = Path(__file__).parent / "recipes" / f"{RECIPE_FILES[name]}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    told = {
        node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    tables = [
        node
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "RECIPES"
    ]
    table = tables[0].value
    assert isinstance(table, ast.Dict), path
    return {
        ast.literal_eval(key): cli.first_sentence(told[ast.unparse(value)])
        for key, value in zip(table.keys, table.values, strict=True)
        if key is not None
    }


def completion(shell: str) -> str:
    """Return what a shell reads to complete whet's commands, recipes, common options and paths.

    Raises:
        UserError: If the shell is unknown.
    """
    options = "--model --data --task --num-steps --out --dry-run --print-config --resume --help"
    words = {name: " ".join(recipe_lines(name)) for name in RECIPE_FILES}
    cases = "\n".join(f"    {name}) words='{names}' ;;" for name, names in words.items())
    if shell in ("bash", "zsh"):
        head = ["autoload -U +X bashcompinit && bashcompinit"] * (shell == "zsh")
        return "\n".join(
            [
                *head,
                "_whet() {",
                '  local current="${COMP_WORDS[COMP_CWORD]}" words=""',
                f"  if [ \"$COMP_CWORD\" -eq 1 ]; then words='{' '.join(COMMANDS)} --help --version --completion'",
                '  elif [[ "$current" == -* ]]; then',
                f"    words='{options}'",
                '  elif [ "$COMP_CWORD" -eq 2 ]; then case "${COMP_WORDS[1]}" in',
                cases,
                "  esac; fi",
                '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
                "}",
                "complete -o default -F _whet whet",
            ]
        )
    if shell == "fish":
        first = "__fish_use_subcommand"
        lines = [
            f"complete -c whet -n {first} -a {name} -d {shlex.quote(row.help)}"
            for name, row in COMMANDS.items()
        ]
        second = "test (count (commandline -opc)) -eq 2; and __fish_seen_subcommand_from"
        lines += [f"complete -c whet -n '{second} {name}' -a '{names}'" for name, names in words.items()]
        return "\n".join([*lines, *(f"complete -c whet -l {option[2:]}" for option in options.split())])
    raise UserError(
        f"--completion {cli.escape(shell) or 'SHELL'}: expected bash, zsh or fish, as in: whet --completion bash"
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
    if name == "--completion":
        print(completion(" ".join(argv[1:])))
        return 0
    if name in REMOVED:
        raise UserError(f"'whet {name}' is gone: {REMOVED[name]}")
    if name not in COMMANDS:
        words = [*COMMANDS, "--help", "--version", "--completion"]
        raise cli.unknown("command", name, "whet", words, help_command="whet --help")
    if line := wrong_system():
        raise UserError(line)
    if name == "chess" and "--uci" in argv:
        from whet.serve.chess.uci import answering

        with answering(argv[1:]):
            return _run_command(name, argv)
    return _run_command(name, argv)


def _run_command(name: str, argv: Sequence[str]) -> int:
    """Run a command of the table."""
    resumable = name in RECIPE_FILES and name != "validate"
    if name in RECIPE_FILES and list(argv[1:]) in (["--help"], ["-h"]):
        lines, trains = recipe_lines(name), name not in ("eval", "validate")
        print(cli.overview(f"whet {name}", lines, resumable=resumable, has_steps=trains))
        return 0
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
        passes=program.passes,
        find_run=_find_run,
    )
    with cli.as_typed([program.config_class, *program.passes.values()], parsed.spelt):
        return _perform(name, argv, program, parsed)


def _perform(name: str, argv: Sequence[str], program: Program, parsed: cli.Parsed[Any]) -> int:
    """Do what a command line asks for."""
    config = parsed.config
    if program.sized is not None and parsed.recipe in ("own", ""):
        config = program.sized(config, parsed.typed)
    if parsed.print_config:
        print(cli.dump_yaml(config), end="")
    elif parsed.dry_run:
        _rehearse(name, program, parsed.recipe, config, parsed.resume)
    elif parsed.restarts:
        is_named = parsed.recipe in program.recipes or "out" in parsed.typed
        # A recipe that is a run folder would, with --resume, be the run itself.
        return _supervise([*argv, *([] if is_named else ["--out", config.out])], config, parsed.restarts)
    else:
        if parsed.resume is False:
            _need_stages(program, config)
        for warning in program.before(config) if program.before is not None else ():
            print(f"whet: warning: {warning}", flush=True)
        try:
            _start(program, config, parsed.resume)
        except (RuntimeError, MemoryError, OSError, ImportError) as error:
            if not (line := cli.exhausted(error)):
                raise
            raise UserError(f"{line}{_saved(program, config)}") from None
    return 0


def _saved(program: Program, config: Any) -> str:
    """Say what a training that ended early has saved; '' for what saves nothing on its way."""
    if not program.shared:
        return ""
    from whet.train.restarts import newest_step

    if step := newest_step(Path(config.out)):
        return f"; step {step} is saved in {config.out}: --resume goes on from it"
    return "; no step was saved"


def _rehearse(name: str, program: Program, recipe: str, config: Any, resume: bool | int) -> None:
    """Print what would be done, and find what it would stop at before its first step: data, columns, files, memory."""
    if program.prints_config:
        print(cli.dump_yaml(config, leave_out=_unread(config)), end="", flush=True)
    else:
        print(f"# all fields: whet {name} {recipe} --print-config")
    sign = "# " if program.recipes else ""  # what is printed of a recipe is one again
    told = program.plan(config).splitlines() if program.plan is not None else []
    told += [f"warning: {line}" for line in (program.before(config) if program.before is not None else ())]
    if told:
        print("\n".join(f"{sign}{line}".rstrip() for line in told), flush=True)
    if resume is False:
        _need_stages(program, config)
    if program.check is not None:
        program.check(config, resume)
    elif program.passes and config.of in program.passes:
        _check_recipe(config)


def _unread(config: Any) -> set[str]:
    """Return the dotted fields, all at their defaults, that a run of this config does not read: the shape of random
    weights where a model is named, games without chess, what other tasks read."""
    from whet.tasks.base import TaskConfig, fields_read

    policy, task = getattr(config, "policy", None), getattr(config, "task", None)
    found = {"policy.model"} if getattr(policy, "init", "") else set()
    if isinstance(task, TaskConfig) and not getattr(config, "tasks", ()):
        found |= {f"task.{name}" for name in vars(task) if name not in fields_read(task)}
        found |= {"games"} if not task.name.startswith("chess") else set()
    return found


def _inner(config: Any) -> Any:
    """Return the config of the recipe that a program looks at, as the recipe's own program reads it."""
    program, words = COMMANDS[config.of].load(), [config.recipe, *cli.passed_words(config.set)]
    return cli.parse(
        f"whet {config.of}",
        program.config_class,
        program.recipes,
        words,
        presets=program.presets,
        find_run=_find_run,
    ).config


def _check_recipe(config: Any) -> None:
    """Check a recipe that a program looks at as the recipe's own program would, but for its run folder."""
    program, inner = COMMANDS[config.of].load(), _inner(config)
    assert program.check is not None
    program.check(inner, True)


def _need_stages(program: Program, config: Any) -> None:
    """Refuse a recipe whose earlier stage was not run."""
    _need_earlier(_inner(config) if program.passes and config.of in program.passes else config)


def _need_earlier(config: Any) -> None:
    """Refuse, before data is made, a recipe whose earlier stage has not been run, and name that one's command."""
    init = getattr(getattr(config, "policy", None), "init", "")
    if not isinstance(init, str) or not init.startswith("runs/") or Path(init).exists():
        return
    for name in RECIPE_FILES:
        for recipe, make in COMMANDS[name].load().recipes.items():
            if getattr(make(), "out", "") == init:
                raise UserError(f"{init!r}: no such run yet; `whet {name} {recipe}` makes it")


def _started_elsewhere(config: Any) -> str:
    """Say where a run was started, if what its config names by relative paths is there and not here; else ''."""
    from whet.telemetry.provenance import read_json

    begun = read_json(Path(config.out) / "environment.json").get("folder")
    task, policy = getattr(config, "task", None), getattr(config, "policy", None)
    names = [getattr(task, "path", ""), getattr(config, "pairs", ""), getattr(policy, "init", "")]
    names += [str(reward).partition(":")[0] for reward in getattr(config, "reward", ())]
    if not isinstance(begun, str) or not any(
        name and not os.path.exists(name) and os.path.exists(os.path.join(begun, name)) for name in names
    ):
        return ""
    return f"the run was started in {begun}, where its paths begin: cd there, or give absolute ones"


def _start(program: Program, config: Any, resume: bool | int) -> None:
    if not program.resumable:
        program.main(config)
        return
    if program.shared and "TORCHELASTIC_RESTART_COUNT" in os.environ and resume is False:
        from whet.ranks.launch import was_restarted

        resume = was_restarted(Path(config.out))
    try:
        program.main(config, resume=resume)
    except UserError as error:
        hint = "" if resume is False else _started_elsewhere(config)
        if hint:
            raise UserError(f"{error}; {hint}") from error
        raise
    except KeyboardInterrupt as error:
        again = "the same command with --resume goes on from its last checkpoint"
        folder = Path(config.out)
        if not folder.is_dir() or not any(folder.iterdir()):  # in its preflight: there is no run yet
            again = "nothing was begun: the same command starts it again"
        raise type(error)(str(error) or again) from None


def _supervise(argv: Sequence[str], config: Any, restarts: int) -> int:
    """Run a training in a process of its own, and start it again after a crash."""
    from whet.train.restarts import supervise

    if _is_rank():
        raise UserError("--restarts starts one process again; under torchrun give torchrun --max-restarts")
    words = list(argv)
    while "--restarts" in words:
        place = words.index("--restarts")
        del words[place : place + 2]
    words = [word for word in words if not word.startswith("--restarts=")]
    return supervise(words, Path(config.out), restarts)


def _find_run(word: str, of_model: bool) -> str:
    """Return the run folder that a short name stands for, and tell which it is."""
    from whet.telemetry.provenance import resolve_run

    found = resolve_run(word, of_model)
    if found != word:
        print(f"whet: {word} is {found}", file=sys.stderr, flush=True)
    return found


def _is_rank() -> bool:
    """Say whether torchrun (or the like) started this process as one of several."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Args:
        argv: The words after `whet`; None takes them from the process.
    """
    if argv is None:
        keep_streams()
        calm_libraries()
        keep_freed_memory()
    words = sys.argv[1:] if argv is None else argv
    if _is_rank():
        parent = os.getppid()  # before the import, which takes seconds
        from whet.ranks.launch import run_rank

        run_rank(lambda: run(words), parent)
    return cli.guard(lambda: run(words))


if __name__ == "__main__":
    sys.exit(main())
