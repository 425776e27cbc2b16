"""From a recipe, a YAML file or a run folder, plus overrides, to one typed config; knows no program."""

from __future__ import annotations

import ast
import difflib
import errno
import inspect
import os
import re
import shlex
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

from whet.config import (
    closest,
    counts,
    default_data,
    dump_yaml,
    expected,
    from_dict,
    from_texts,
    groups,
    is_switch,
    leaves,
    load_yaml,
    meant,
    near_file,
    options,
    put,
    read_yaml,
    removed,
    reset,
    show,
    to_dict,
    unwrap,
)
from whet.install import missing_core
from whet.types import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "Parsed",
    "Program",
    "dump_yaml",
    "escape",
    "from_dict",
    "guard",
    "load_yaml",
    "parse",
    "to_dict",
    "unknown",
]

Config = TypeVar("Config", bound="DataclassInstance")
FindRun = Callable[[str, bool], str]
_NEGATIVE_NUMBER = re.compile(r"-(\d|\.\d|inf$|nan$)")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SHORT = {
    "--task": ("task.name", "eval.task.name"),
    "--data": ("pairs", "task.name", "eval.task.name"),
    "--model": ("policy.init",),
    "--track": ("track.to",),
    "--method": ("edit.method",),
    "--layers": ("edit.layers",),
    "--deterministic": ("safety.deterministic",),
}
"""Short options, each for the first of these fields that a program has."""
TAKES = {
    "--task": ": a task's name, or a file of your own",
    "--data": ": a file of your own, a folder, or the name of a data set",
    "--model": ": a run, a folder, a GGUF file, or a name",
}
"""What help says that short options take."""
NEAR_SHORT = 0.8
"""Share of letters in common, dashes too, from which a short option is meant, before any other."""
_FOREIGN_CHOICES = {
    "hf": ("transformers", "huggingface", "safetensors", "vllm", "sglang", "pytorch"),
    "adapter": ("peft", "lora"),
    "gguf": ("llama.cpp", "llamacpp", "llama-cpp", "lmstudio"),
    "mlx": ("mlx-lm", "mlx_lm"),
    "bfloat16": ("bf16",),
    "bf16": ("bfloat16",),
    "bfloat16_master": ("bf16", "bfloat16"),
    "float16_autocast": ("fp16", "float16", "half"),
    "f16": ("fp16", "float16", "half"),
    "float32": ("fp32", "f32"),
    "f32": ("fp32", "float32"),
    "nf4": ("4bit", "4-bit", "int4"),
    "int8": ("8bit", "8-bit"),
}
"""What other programs call a value of ours: suggested where the field has it."""
_RUNS: dict[str, bool] = {
    "policy.init": True,
    "policy.adapter": True,
    "adapters": True,
    "teacher.init": True,
    "reward_model": True,
    "models": True,
    "runs": True,
    "run": False,
    "against": False,
}
"""Fields, by their last words, that take a run (and whether its model is wanted): it is found by a short name."""
_WORDS = {
    "policy.init": "MODEL",
    "task.name": "TASK",
    "models": "MODEL",
    "runs": "MODEL",
    "adapters": "ADAPTER",
    "what": "RUN OWNER/NAME",
    "name": "OWNER/NAME",
}
"""Positional field -> what stands for it in the help, where that is not its own name."""
_MEMORY = (
    "can't allocate memory",  # PyTorch's CPU allocator
    "bad_alloc",
    "out of memory",
    "failed to map segment",  # a library, under a bound of addresses (ulimit -v)
    "annot allocate memory",
)
"""What errors of memory say, beyond MemoryError."""
_THREADS = ("start new thread", "start watchdog thread", "Resource temporarily unavailable")
"""What errors of starting a thread say."""
MAX_LINE = 1000
_DATA = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
_SWITCHES = {
    "--dry-run": "dry_run",
    "--dry_run": "dry_run",
    "--print-config": "print_config",
    "--help": "help",
    "-h": "help",
}


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
        passes: For a program that looks at another one's recipe, the configs of those by the value of its field `of`:
            their options are its own, too, and are collected in its field `set`.
        check: Finds what a run would stop at before its first step, for --dry-run: `check(config, resume)` creates
            nothing.
        before: Compares a run with the memory at hand: refuses it, or returns warnings.
        prints_config: Whether --dry-run prints the config; not where it is that of several programs.
        sized: Fits a config to this machine, for recipes of one's own, and commands without
            recipes: `sized(config, typed)` changes no typed field.
    """

    config_class: type[Any]
    main: Callable[..., None]
    recipes: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    plan: Callable[[Any], str] | None = None
    presets: Mapping[str, Mapping[str, Callable[[], Any]]] = field(default_factory=dict)
    resumable: bool = False
    shared: bool = False
    positional: str = ""
    passes: Mapping[str, type[Any]] = field(default_factory=dict)
    check: Callable[[Any, Any], None] | None = None
    before: Callable[[Any], list[str]] | None = None
    prints_config: bool = True
    sized: Callable[[Any, Collection[str]], Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed(Generic[Config]):
    """A command line, understood.

    Attributes:
        config: The resolved config.
        recipe: The RECIPE argument as written; '' for a program without recipes.
        dry_run: Print the config and the plan, create nothing.
        resume: Continue an earlier run of this config: from its newest checkpoint, or from that of a step.
        print_config: Print the config alone, and check nothing else.
        restarts: How often to start it again after a crash.
        typed: Dotted names of the fields that the user gave; a named group stands for all its fields.
        spelt: Field -> the short option that the user typed for it, for errors (`as_typed`).
    """

    config: Config
    recipe: str
    dry_run: bool
    resume: bool | int
    print_config: bool = False
    restarts: int = 0
    typed: frozenset[str] = frozenset()
    spelt: Mapping[str, str] = field(default_factory=dict)


def parse(
    program: str,
    config_class: type[Config],
    recipes: Mapping[str, Callable[[], Config]],
    argv: Sequence[str],
    *,
    resumable: bool = True,
    has_steps: bool = True,
    presets: Mapping[str, Mapping[str, Callable[[], Any]]] | None = None,
    positional: str = "",
    passes: Mapping[str, type[Any]] | None = None,
    find_run: FindRun = lambda text, _: text,
) -> Parsed[Config]:
    """Understand `RECIPE [--field value ...] [--dry-run] [--resume]`.

    Only what the user typed can conflict: where an override makes a recipe's default meaningless, that falls away.

    tyro writes the help; values are converted here, because YAML needs the same typed construction and an
    error must be one line. tests/test_cli.py holds the results equal to tyro's own.

    Args:
        program: What the user typed before argv, for messages: 'whet sft'.
        config_class: The program's config.
        recipes: Name -> function returning a full config; empty for a program that takes no RECIPE.
        argv: The words after the program.
        resumable: Whether the program knows `--resume`; otherwise that is an unknown field.
        has_steps: Whether it trains: it knows `--resume STEP` and `--restarts N`, too.
        presets: For a group of fields, named values of all of them (`--algo gspo`) or of some (`--optim lean`); fields
            given beside it change it further.
        positional: Field that a program without recipes takes as its one word, `whet audit gsm8k`, or, where it is a
            tuple, as all its words: `whet compare A B`.
        passes: As in `Program`.
        find_run: Given the name of a run and whether its model is wanted, returns the folder; any other text unchanged.

    Returns:
        The config and the switches.

    Raises:
        UserError: One line: what is wrong and the closest right spelling.
        SystemExit: Status 0 after printing help.
    """
    argv = [part for word in argv for part in (word.split("=") if word.startswith("--resume=") else [word])]
    _refuse_old(program, argv, positional, [config_class, *(passes or {}).values()])
    words, overrides, switches = _scan(argv, _SWITCHES | ({"--resume": "resume"} if resumable else {}))
    restarts, overrides = _take_restarts(overrides) if resumable and has_steps else (0, overrides)
    is_word = bool(positional and words)
    if is_word:
        takes_all = get_origin(unwrap(leaves(config_class)[positional])[0]) is tuple
        taken = words if takes_all else words[:1]
        overrides, words = [(_flag(positional), taken), *overrides], words[len(taken) :]
    if recipes and not words:
        if "help" in switches:
            lines = {n: first_sentence(inspect.getdoc(make) or "") for n, make in recipes.items()}
            print(overview(program, lines, resumable=resumable, has_steps=has_steps))
            raise SystemExit(0)
        first = next(iter(recipes))
        raise UserError(f"'{program}' needs a RECIPE: '{program} {first}' ({program} --help lists all)")
    recipe, stray = (words[0], words[1:]) if recipes else ("", words)
    start, run = _start(program, config_class, recipes, recipe, find_run) if recipes else (None, "")
    command = f"{program} {recipe}".rstrip()
    if "help" in switches:
        notes = [
            f"  {option:<15} short for {_flag(place)}{TAKES.get(option, '')}"
            for option in SHORT
            if (place := _long(config_class, option, ())[2:]) in leaves(config_class)
        ]
        notes += [f"--{group} NAME: {', '.join(table)}" for group, table in (presets or {}).items()]
        notes += [
            f"  --field value   a field of the recipe, too: 'whet {name} RECIPE --help' lists them"
            for name in list(passes or {})[:1]
        ]
        lines = _switch_lines(resumable=resumable, has_steps=has_steps)
        _print_help(command, config_class, start, [*lines, *notes], positional, bool(passes))
        raise SystemExit(0)
    resume: bool | int = "resume" in switches
    if resume and len(stray) == 1 and re.fullmatch(r"auto|[1-9]\d{0,17}" if has_steps else "auto", stray[0]):
        resume = (word := stray.pop()) == "auto" or int(word)
    if stray:
        raise UserError(
            f"unexpected argument {show(stray[0])} for '{program}'; an override is written --field value"
        )
    data = default_data(config_class) if start is None else to_dict(start)
    named = [option[2:] for option, _ in overrides if option[2:] in (presets or {})]
    written = {_long(config_class, option, overrides): option for option, _ in overrides}
    programs = [config_class, *(passes or {}).values()]
    spelt = {name: option for cls in reversed(programs) for name, option in _spelt(cls, overrides).items()}
    if is_word and positional == "task.name" and "task.path" not in {option[2:] for option in written}:
        spelt = {"task.path": "the name"} | spelt  # `whet data rows.csv`: no option was typed for its path
    overrides = [(_long(config_class, option, overrides), texts) for option, texts in overrides]
    for dotted, table in (presets or {}).items():
        if data.get(dotted) is None and any(option.startswith(f"--{dotted}.") for option, _ in overrides):
            overrides = [(f"--{dotted}", [next(iter(table))])] * (dotted not in named) + overrides
        overrides = _preset(command, data, overrides, dotted, table)
    if passes:
        overrides = _pass_on(command, config_class, passes, data, overrides)
    typed = frozenset({*named, *_apply(command, config_class, data, overrides, written)})
    if resume is not False and run and "out" in data and "out" not in typed:
        data["out"] = run  # whatever it was called when it began
    for dotted in typed:
        _forget(config_class, data, start, dotted, typed)
    for item in options(config_class):
        if item.default is MISSING and item.default_factory is MISSING and item.name not in data:
            if item.name == positional:
                word = _WORDS.get(positional, positional.upper())
                raise UserError(f"'{program}' needs a {word} after it ({program} --help says more)")
            example = (
                "a new folder, as in --out runs/mine"
                if item.name == "out"
                else expected(leaves(config_class)[item.name])
            )
            raise UserError(f"'{program}' needs {_flag(item.name)}: {example}")
    with as_typed(programs, spelt):
        _name_runs(config_class, data, find_run)
        config = _built(command, config_class, data, typed)
    return Parsed(
        config=config,
        recipe=recipe,
        dry_run="dry_run" in switches,
        resume=resume,
        print_config="print_config" in switches,
        restarts=restarts,
        typed=typed,
        spelt=spelt,
    )


def _take_restarts(
    overrides: Sequence[tuple[str, list[str]]],
) -> tuple[int, list[tuple[str, list[str]]]]:
    """Take --restarts N out of the options; return N, 0 without it, and the others."""
    given = [texts for option, texts in overrides if option == "--restarts"]
    if not given:
        return 0, list(overrides)
    text = " ".join(given[-1])
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise UserError(
            f"--restarts {show(text)}: expected how often to start again after a crash, 1 or more"
        )
    return int(text), [(option, texts) for option, texts in overrides if option != "--restarts"]


def _refuse_old(program: str, argv: Sequence[str], positional: str, configs: Sequence[type[Any]]) -> None:
    """Refuse how earlier versions were called, with the words of this one.

    Args:
        program: What the user typed before argv.
        argv: The words after the program.
        positional: Field that the program takes as a word.
        configs: The program's config, and those of programs whose options are its own, too.
    """
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        option, _, value = word.partition("=")
        value = value or ("" if after.startswith("-") else after)  # '--set a=b' has it in the word after
        if option == "--set":
            example = _written(*value.partition("=")[::2]) if value else "--policy.init MODEL"
            raise UserError(f"--set is gone: a field is an option of '{program}' itself, as in {example}")
        if option == "--program":
            raise UserError(f"--program is now --of, as in: {program} demo --of {value or 'rl'}")
        if option == "--against" and program == "whet report":
            raise UserError(
                f"--against is gone: name further runs after the first, as in: {program} RUN {value or 'OTHER'}"
            )
        if option == "--recipe" and positional == "recipe":
            raise UserError(f"--recipe is now the first word: {program} {value or 'demo'}")
        if not option.startswith("--"):
            continue
        name = option[2:].replace("-", "_")
        known = [cls for cls in configs if name in leaves(cls)]
        for cls in known or configs:
            if instead := removed(cls, name, value):
                raise UserError(f"{f'{option}={value}' if known else option} is gone: {instead}")


def _long(cls: type[Any], option: str, given: Sequence[tuple[str, list[str]]]) -> str:
    """Return the option that a short one stands for; `--data` beside `--task` is the path of that task's data."""
    places = SHORT.get(option, ())
    if option == "--data" and any(name in ("--task", "--task.name") for name, _ in given):
        places = ("task.path", "eval.task.path")
    fields = leaves(cls) if places else {}
    return next((_flag(place) for place in places if place in fields), option)


def _spelt(cls: type[Any], given: Sequence[tuple[str, list[str]]]) -> dict[str, str]:
    """Return the short option that the user typed for a field, by the names that errors have for the field."""
    found: dict[str, str] = {}
    for option, texts in given:
        place = _long(cls, option, given)[2:].replace("-", "_")
        if option not in SHORT or _flag(place) == option:
            continue
        found |= {place: option, place.removeprefix("eval."): option}
        group, _, last = place.rpartition(".")
        if last == "name":  # data in a task's place; with a task's name, its data stands after --data
            is_task = texts and texts[0] in unwrap(groups(cls)[group])[0].KNOWN
            found = {f"{part}.path": "--data" if is_task else option for part in (group, "task")} | found
    whole = {option[2:].replace("-", "_") for option, _ in given if option not in SHORT}
    return {name: option for name, option in found.items() if not whole & {name, f"eval.{name}"}}


_TOLD = re.compile(r"(?<![\w./-])(--)?([a-z][\w-]*(?:\.[\w-]+)*)( = )?(?![\w/])")
_OTHER = re.compile(r"(?<=.)\bwhet [a-z]+ ")
"""Where an error begins to tell of another command line; at its own beginning it names this one."""


@contextmanager
def as_typed(programs: Sequence[type[Any]], spelt: Mapping[str, str]) -> Iterator[None]:
    """Let errors name options as the program has them, and as the user typed them.

    Code below the programs names a field by its own group: `--task.path`, which is `--data` where the user typed that,
    and `--eval.task.path` of a program that keeps its task there.

    Args:
        programs: The program's config, and those of programs whose options are its own, too.
        spelt: Field -> the short option that the user typed for it.
    """
    known = {name for cls in programs for name in leaves(cls) | groups(cls)}

    def name(match: re.Match[str]) -> str:
        dashes, dotted, equals = match[1], match[2].replace("-", "_"), match[3] or ""
        if dotted in spelt and (dashes or equals or "." in dotted):
            return spelt[dotted] + (" " if equals else "")
        if not dashes or "." not in dotted or dotted in known:
            return match[0]
        alike = [name for name in known if name.endswith(f".{dotted}")]
        return _flag(alike[0]) + equals if len(alike) == 1 else match[0]

    try:
        yield
    except UserError as error:
        text = str(error)
        other = found.start() if (found := _OTHER.search(text)) else len(text)
        error.args = (_TOLD.sub(name, text[:other]) + text[other:],)
        raise


def _pass_on(
    command: str,
    cls: type[Any],
    passes: Mapping[str, type[Any]],
    data: dict[str, Any],
    overrides: Sequence[tuple[str, list[str]]],
) -> list[tuple[str, list[str]]]:
    """Collect the options of the recipe's own program in the field `set`; return the others."""
    of = next((texts[0] for option, texts in overrides if option == "--of" and texts), data.get("of"))
    theirs = passes.get(str(of))
    own, passed = [], []
    for option, texts in overrides:
        long = option if theirs is None else _long(theirs, option, overrides)
        try:
            _resolve(command, cls, data, option)
        except UserError:
            if theirs is None:
                raise
            if long not in ("--algo", "--optim"):
                try:
                    _resolve(command, theirs, {}, long)
                except UserError:
                    if _near(cls, option):  # a misspelt option of this command
                        _resolve(command, cls, data, option)
                    raise
            passed.append(f"{long[2:]}={texts[0]}" if len(texts) == 1 else shlex.join([long[2:], *texts]))
        else:
            own.append((option, texts))
    return [*own, ("--set", passed)] if passed else own


def passed_words(items: Sequence[str]) -> list[str]:
    """Return the words of a command line that the entries of a field `set` stand for."""
    words: list[str] = []
    for item in items:
        is_single = re.match(r"[\w.-]+=", item) is not None
        name, *values = [item] if is_single else shlex.split(item)
        words += [f"--{name}", *values]
    return words


def _near(cls: type[Any], option: str) -> bool:
    """Say whether an unknown option is a field of a class, misspelt."""
    return closest(option, [_flag(name) for name in leaves(cls)]) is not None


def _written(name: str, value: str) -> str:
    return f"{_flag(name)} {value}" if value else f"{_flag(name)}=VALUE"


def _covers(typed: Collection[str], dotted: str) -> bool:
    """Say whether the user gave a field, its group, or one of its own fields."""
    return any(
        name == dotted or name.startswith(f"{dotted}.") or dotted.startswith(f"{name}.") for name in typed
    )


def _forget(cls: type[Any], data: dict[str, Any], start: Any, dotted: str, typed: Collection[str]) -> None:
    """Where the user named another thing than the recipe has, drop what the recipe says about that one."""
    group, _, last = dotted.rpartition(".")
    hint = groups(cls).get(group)
    names = getattr(unwrap(hint)[0], "NAMED_BY", {}).get(last, ()) if hint is not None else ()
    if not names or start is None:
        return
    was: Any = to_dict(start)
    now: Any = data
    for part in group.split("."):
        was, now = (was or {}).get(part), (now or {}).get(part)
    if was is None or was.get(last) == now.get(last):
        return
    for name in names:
        if not _covers(typed, f"{group}.{name}"):
            reset(cls, data, f"{group}.{name}")


def _built(command: str, cls: type[Config], data: dict[str, Any], typed: Collection[str]) -> Config:
    """Build the config; a recipe's default that nothing reads any more, because of an override, falls away."""
    for _ in range(100):  # each round resets a field for good; a config of more is a fault of ours
        try:
            return from_dict(cls, data, where=command)
        except UserError as error:
            idle = [name for name in error.unread if not _covers(typed, name)]
            if not typed or not idle:
                raise
            for name in idle:
                reset(cls, data, name)
    raise AssertionError(f"{command}: defaults that do not fall away")


def _name_runs(cls: type[Any], data: dict[str, Any], find_run: FindRun) -> None:
    """Put folders in the place of runs' short names."""
    for dotted in leaves(cls):
        name = next((name for name in _RUNS if dotted == name or dotted.endswith(f".{name}")), "")
        if not name:
            continue
        of_model = _RUNS[name]
        *outer, last = dotted.split(".")
        group: Any = data
        for part in outer:
            group = (group or {}).get(part)
        value = (group or {}).get(last)
        if last == "adapter" and isinstance(value, str) and ("," in value or "=" in value):
            group[last] = ",".join(_name_adapter(part, find_run) for part in value.split(","))
        elif isinstance(value, str) and value:
            group[last] = find_run(value, of_model)
        elif isinstance(value, list):
            group[last] = [find_run(item, of_model) if isinstance(item, str) else item for item in value]


def _name_adapter(text: str, find_run: FindRun) -> str:
    """Put a folder in the place of a run's short name in `math=demo-lora`, or in `demo-lora`, which stays its name."""
    name, sign, source = text.strip().rpartition("=")
    found = find_run(source, True)
    return f"{name if sign else source}={found}" if sign or found != source else text.strip()


UNWIND_S = 5
"""Longest time that a program may take to end after SIGTERM, outside of a training's steps."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, outside of a training's steps, which have their own handler."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a program as Ctrl-C does, where nothing else handles it: with a line, nothing half written."""
    is_free = threading.current_thread() is threading.main_thread()
    if not (is_free and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield
        return

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once
        signal.alarm(UNWIND_S)  # and so does time: in an import or a callback the exception may be lost
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _warning_in_lines() -> Iterator[None]:
    """Print whet's own Python warnings as the lines that its programs print, each once."""
    told: set[str] = set()
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show_line(message: Any, category: type[Warning], filename: str, *rest: Any) -> None:
            if category is not UserWarning or Path(__file__).parent not in Path(filename).parents:
                return shown(message, category, filename, *rest)
            if str(message) not in told:
                told.add(str(message))
                print(f"whet: warning: {escape(str(message))}", file=sys.stderr, flush=True)
            return None

        warnings.showwarning = show_line
        yield


def guard(function: Callable[[], int | None]) -> int:
    """Run a program and turn its end into an exit status; a user's mistake becomes one line on stderr.

    Args:
        function: The program; None counts as 0.

    Returns:
        Its status; 2 after a UserError, or if the system refused a file, memory or a process; 130 after Ctrl-C, 143
        after SIGTERM, 141 if the reader of stdout went away.
    """
    try:
        with _terminable(), _warning_in_lines():
            status = function()
            sys.stdout.flush()
    except UserError as error:
        print(f"whet: error: {escape(str(error))}", file=sys.stderr)
        return 2
    except SystemExit as error:
        if isinstance(error.code, str):
            raise
        return error.code or 0
    except KeyboardInterrupt as error:
        is_asked = isinstance(error, Terminated)
        what = "stopped by SIGTERM" if is_asked else "interrupted"
        print(f"whet: {what}{f'; {error}' if str(error) else ''}", file=sys.stderr)
        return 128 + (signal.SIGTERM if is_asked else signal.SIGINT)
    except BrokenPipeError:
        # Python flushes stdout once more at exit: give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        lacks = missing_core(error) if isinstance(error, ModuleNotFoundError) else ""
        if not (line := lacks or exhausted(error) or _refused(error)):
            raise
        print(f"whet: error: {escape(line)}", file=sys.stderr)
        return 2
    return status or 0


def exhausted(error: BaseException) -> str:
    """Say in one line which of the machine's bounds a program met, memory or processes; '' for any other error."""
    text, number = str(error), getattr(error, "errno", None) if isinstance(error, OSError) else None
    is_start = any(sign in text for sign in _THREADS)
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and is_start):
        return "no further process or thread can be started: raise the limit (ulimit -u), or end others"
    is_memory = isinstance(error, MemoryError) or number == errno.ENOMEM
    if is_memory or (
        isinstance(error, (RuntimeError, ImportError)) and any(sign in text for sign in _MEMORY)
    ):
        return "out of memory: choose a smaller model or batch ('whet plan' says what a recipe needs), or free some"
    return ""


def _refused(error: Exception) -> str:
    """Say in one line which file the system refused and what to do; '' for any other error, which is a bug of ours."""
    name = str(getattr(error, "filename2", None) or getattr(error, "filename", None) or "")
    number = getattr(error, "errno", None) if isinstance(error, OSError) else None
    if number not in _FULL and "No space left on device" not in str(error):  # as safetensors says it
        is_proc = name.startswith("/proc/")
        remedy = "whet needs /proc: mount it" if is_proc else "check the path and its permissions"
        return f"{name}: {getattr(error, 'strerror', None) or error}; {remedy}" if number and name else ""
    reason = os.strerror(number) if number else "No space left on device"
    return f"{name or 'a file'}: cannot be written ({reason}); free space, then --resume"


def escape(text: str) -> str:
    """Make text safe for one line of a terminal: control characters become escapes, and what is endless is cut."""
    safe = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:MAX_LINE])
    return "".join(safe)[:MAX_LINE]


def unknown(
    kind: str,
    name: str,
    owner: str,
    candidates: Sequence[str],
    *,
    help_command: str,
    sure: bool = False,
    unit: str = "",
) -> UserError:
    """Make the one-line error for a misspelt name.

    Args:
        kind: 'recipe', 'command' or 'field'.
        name: What the user wrote.
        owner: Who does not know it: 'whet sft'.
        candidates: All right spellings.
        help_command: The command that lists them.
        sure: Whether the first candidate is meant, however it is spelt.
        unit: What that counts, if the name counts something else elsewhere.

    Returns:
        The error, to be raised.
    """
    match = candidates[0] if sure else closest(name, candidates)
    hint = f"; did you mean {match!r}?" if match else ""
    told = f"{unit}; {help_command}" if unit else help_command
    return UserError(f"unknown {kind} {show(name)} for '{owner}'{hint} ({told} lists all)")


def _scan(
    argv: Sequence[str], switches: Mapping[str, str]
) -> tuple[list[str], list[tuple[str, list[str]]], set[str]]:
    """Cut argv into leading words, (--name, values) pairs and switches; a switch never takes a value."""
    words: list[str] = []
    pairs: list[tuple[str, list[str]]] = []
    found: set[str] = set()
    values = words
    for token in argv:
        if token in switches:
            found.add(switches[token])
            values = words
        elif token.startswith("-") and not _NEGATIVE_NUMBER.match(token):
            name, equals, value = token.partition("=")
            values = [value] if equals else []
            pairs.append((name, values))
        else:
            values.append(token)
    return words, pairs, found


def _start(
    program: str,
    cls: type[Config],
    recipes: Mapping[str, Callable[[], Config]],
    recipe: str,
    find_run: FindRun,
) -> tuple[Config, str]:
    """Return the config that a RECIPE argument names, and the run folder if it is one's, else ''.

    A name in the table wins over a file of that name.
    """
    if recipe in recipes:
        return recipes[recipe](), ""
    if not recipe.endswith((".yaml", ".yml")):
        try:
            recipe = find_run(recipe, False)
        except (
            UserError
        ) as error:  # a prefix of several runs, and as likely a recipe that another command has
            raise UserError(f"{error}; recipes of '{program}': {', '.join(recipes)}") from None
    path = Path(recipe)
    if os.path.isdir(recipe):  # False, no error, for what no file system takes as a name
        if os.path.exists(path / "config.json"):
            raise UserError(
                f"{show(recipe)} is a model, not a recipe: {program} {next(iter(recipes))} --model {recipe}"
            )
        if not os.path.exists(path / "config.yaml"):
            raise UserError(f"folder {show(recipe)} has no config.yaml, so it is not a run folder")
        try:
            return load_yaml(path / "config.yaml", cls), recipe.rstrip(os.sep) or recipe
        except UserError as error:
            if "unknown field" not in str(error):
                raise
            raise UserError(
                f"{error}; if {show(recipe)} is a folder of another program, start from its model: "
                f"{program} RECIPE --policy.init {recipe}"
            ) from None
    if kind := _misplaced(cls, recipe):
        option = "--task" if kind == "a task" else "--data"
        raise UserError(
            f"{show(recipe)} is {kind}, not a recipe: {program} {next(iter(recipes))} {option} {recipe}"
        )
    if path.suffix in (".yaml", ".yml") or (os.sep in recipe and os.path.exists(recipe)):
        is_run = path.name == "config.yaml" and os.path.exists(path.with_name("environment.json"))
        data = read_yaml(path)
        if "out" in leaves(cls):  # --out gives it as well
            data = {"out": f"runs/{path.stem}", **data}
        return from_dict(cls, data, where=str(path)), str(path.parent) if is_run else ""
    if os.sep in recipe:
        near = f"; {found}" if (found := near_file(recipe)) else ""
        raise UserError(
            f"no recipe, file or folder {show(recipe)} for '{program}'{near} ({program} --help lists all)"
        )
    raise unknown("recipe", recipe, program, list(recipes), help_command=f"{program} --help")


def _misplaced(cls: type[Any], word: str) -> str:
    """Say what a word in the place of a recipe is: 'a task', 'data', or '' for neither."""
    task = groups(cls).get("task")
    if task is None:
        return ""
    if word in unwrap(task)[0].KNOWN:
        return "a task"
    return "data" if word.endswith(_DATA) else ""


def _preset(
    command: str,
    data: dict[str, Any],
    overrides: Sequence[tuple[str, list[str]]],
    group: str,
    table: Mapping[str, Callable[[], Any]],
) -> list[tuple[str, list[str]]]:
    """Set a top-level group, or some of its fields, by name where `--group NAME` asks; return the other overrides."""
    chosen = [texts for option, texts in overrides if option == _flag(group)]
    if len(chosen) > 1:
        raise UserError(f"{_flag(group)} is given twice")
    for texts in chosen:
        name = " ".join(texts)
        if name not in table:
            hint = f"; did you mean {match!r}?" if (match := closest(name, list(table))) else ""
            if name.endswith(_DATA):
                hint = f"; data stands after --data: --data {name}"
            raise UserError(f"{_flag(group)}: got {name!r}, expected one of {', '.join(table)}{hint}")
        value = table[name]()
        is_partial = isinstance(value, Mapping)
        data[group] = {**data[group], **value} if is_partial else to_dict(value)
    return [pair for pair in overrides if pair[0] != _flag(group)]


def _apply(
    command: str,
    cls: type[DataclassInstance],
    data: dict[str, Any],
    overrides: Sequence[tuple[str, list[str]]],
    written: Mapping[str, str],
) -> list[str]:
    """Write overrides into plain config data; return the dotted names of the fields.

    Args:
        command: What the user typed before them, for messages.
        cls: The config's class.
        data: The config.
        overrides: Options and their values.
        written: How the user wrote an option that stands for another.
    """
    seen: dict[str, str] = {}
    for long, texts in overrides:
        path, hint, negated = _resolve(command, cls, data, long)
        option = written.get(long, long)
        dotted = ".".join(path)
        for earlier, spelling in seen.items():
            if earlier == dotted:
                raise UserError(f"{option} is given twice")
            if earlier.startswith(dotted + ".") or dotted.startswith(earlier + "."):
                raise UserError(f"{spelling} and {option} contradict each other")
        seen[dotted] = option
        inner, optional = unwrap(hint)
        if is_dataclass(inner) and not (optional and texts == ["None"]):
            example = _flag(f"{dotted}.{next(iter(leaves(inner)))}")  # pyright: ignore[reportArgumentType]
            raise UserError(f"{option} is a group of fields; set one of them, as in {example}")
        got = " ".join(map(show, texts)) or f"no value (one that starts with '-' is written {option}=VALUE)"
        if negated and texts:
            raise UserError(f"{option}: got {got}, expected no value")
        try:
            value = False if negated else from_texts(hint, texts)
        except (ValueError, KeyError):
            hint_ = _meant(hint, texts, option)
            raise UserError(f"{option}: got {got}, expected {expected(hint)}{hint_}") from None
        put(cls, data, path, value)
    return list(seen)


def _meant(hint: Any, texts: Sequence[str], option: str) -> str:
    """Suggest the value of a field with few values that a wrong one means, or show how names are given, or ''."""
    inner, _ = unwrap(hint)
    if get_origin(inner) is dict:
        name = re.split(r"[:=\s]", texts[0].strip("{}\"' "))[0] if texts else ""
        return f", such as: {option} {name or 'NAME'} 1"
    if get_origin(inner) is not Literal or len(texts) != 1:
        return ""
    choices, text = [str(choice) for choice in get_args(inner)], texts[0].lower()
    known = (choice for choice in choices if text == choice or text in _FOREIGN_CHOICES.get(choice, ()))
    match = next(known, None) or closest(text, choices)
    return f"; did you mean {match!r}?" if match else ""


def _resolve(
    command: str, cls: type[DataclassInstance], data: Mapping[str, Any], option: str
) -> tuple[list[str], Any, bool]:
    """Find the field that `--a.b-c`, `--a.no-b` or `--weights.key` names.

    Returns:
        Path from the root, type, and whether it is the negated form of a bool.
    """
    fields, name = leaves(cls) | groups(cls), option[2:].replace("-", "_")
    if option.startswith("--"):
        if name in fields:
            return name.split("."), fields[name], False
        group, _, last = name.rpartition(".")
        positive = f"{group}.{last[3:]}".lstrip(".")
        if last.startswith("no_") and is_switch(fields.get(positive)):
            return positive.split("."), fields[positive], True
        for field, hint in fields.items():
            inner, _ = unwrap(hint)
            if get_origin(inner) is dict and name.startswith(field + "."):
                present: Any = data
                for part in field.split("."):
                    present = (present or {}).get(part)
                written = option[2 + len(field) + 1 :]
                key = next(
                    (key for key in present or {} if key.replace("-", "_") == written.replace("-", "_")),
                    written,
                )
                return [*field.split("."), key], get_args(inner)[1], False
    negations = [
        _flag(re.sub(r"(\w+)$", r"no_\1", field)) for field, hint in fields.items() if is_switch(hint)
    ]
    if found := meant(name, fields):
        raise unknown(
            "field",
            option,
            command,
            [_flag(found)],
            help_command=f"{command} --help",
            sure=True,
            unit=counts(name, found),
        )
    flags = [*map(_flag, fields), *negations]
    ends = {flag.rpartition(".")[2] for flag in flags}
    if option[2:] not in ends:  # '--mode' is '--overlap.mode', not '--model'
        shorts = [short for short in SHORT if _long(cls, short, ()) != short]
        flags = difflib.get_close_matches(option, shorts, n=1, cutoff=NEAR_SHORT) or flags
    raise unknown("field", option, command, flags, help_command=f"{command} --help")


def _flag(dotted: str) -> str:
    return "--" + dotted.replace("_", "-")


def first_sentence(doc: str) -> str:
    """Return a docstring's first paragraph on one line."""
    return " ".join(doc.partition("\n\n")[0].split())


def overview(program: str, recipes: Mapping[str, str], *, resumable: bool, has_steps: bool) -> str:
    """Return the help of a program without a RECIPE: the recipes and how to override.

    Args:
        program: What the user typed: 'whet sft'.
        recipes: A line about each, by name.
        resumable: Whether the program knows `--resume`.
        has_steps: Whether it trains, and knows `--restarts`.
    """
    width = max(map(len, recipes))
    gap = " " * (width + 4)
    lines = [
        textwrap.fill(text, 110, initial_indent=f"  {name:<{width}}  ", subsequent_indent=gap)
        for name, text in recipes.items()
    ]
    return "\n".join(
        [
            f"usage: {program} RECIPE [--field value ...] [--dry-run]{' [--resume]' if resumable else ''}",
            "",
            "RECIPE is one of these, a .yaml file, or the folder of an earlier run (with its config.yaml):",
            *lines,
            "",
            "  --field value   set one field: --group.field 1e-4, --group.field=1e-4, --flag, --no-flag",
            *_switch_lines(resumable=resumable, has_steps=has_steps),
            f"  {program} RECIPE --help   lists all fields with their meaning and that recipe's values",
        ]
    )


def _switch_lines(*, resumable: bool, has_steps: bool) -> list[str]:
    lines = [
        "  --dry-run       print the resolved config and the plan, find what the run would stop at; create nothing",
        "  --print-config  print the resolved config alone, a recipe for later",
    ]
    more = [
        "  --resume [STEP] continue the earlier run of this config, from its newest checkpoint or that of a step"
    ]
    again = ["  --restarts N    start it again after a crash, with --resume, N times at most"]
    return lines + more * resumable + again * (resumable and has_steps)


def _documentation(cls: type[Any]) -> str:
    """Return a class's docstring; under python -OO from its source, for a dataclass then has its signature there."""
    text = inspect.getdoc(cls) or ""
    if sys.flags.optimize < 2:
        return text
    with suppress(OSError, TypeError, SyntaxError, IndexError):
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        return ast.get_docstring(found) or "" if isinstance(found, ast.ClassDef) else ""
    return "" if text.startswith(f"{cls.__name__}(") else text


def _print_help(
    command: str,
    cls: type[Config],
    start: Config | None,
    notes: Sequence[str],
    positional: str,
    passes: bool,
) -> None:
    """Let tyro print every field with its docstring and, as the default, the value in `start`.

    What is written as a word is listed as one, and `set`, which collects the fields of a recipe, not at all.
    """
    import tyro  # here, so that only --help pays for it

    off: list[str] = []
    if start is not None:
        # tyro hides the fields of a group that is None: show them with the group's defaults, and say so.
        start = copy(start)
        for name, hint in groups(cls).items():
            inner, _ = unwrap(hint)
            if "." not in name and getattr(start, name) is None:
                with suppress(UserError):  # a group with required fields has no defaults to show
                    object.__setattr__(start, name, from_dict(inner, {}, where=name))
                off.append(f"'{name}' is off here; any --{name}.FIELD switches it on, from its defaults.")
    summary = _documentation(cls).partition("\n\n")[0]
    description = "\n".join(filter(None, [summary, *notes, *off]))
    options: dict[str, Any] = {} if start is None else {"default": start}
    word, hints = _WORDS.get(positional, positional.upper()), leaves(cls)
    told: list[tuple[str, Any, Any]] = []
    for item in fields(cls):
        if item.name == positional:
            hint = tyro.conf.Positional[hints[positional]]
            if get_origin(unwrap(hints[positional])[0]) is not Literal:  # whose values are its name
                hint = Annotated[hint, tyro.conf.arg(metavar=word)]
            told.append((item.name, hint, copy(item)))
        elif item.name == "set" and passes:
            told.append((item.name, tyro.conf.Suppress[hints["set"]], copy(item)))
    if told:  # a class of the same fields, whose annotations say so
        cls = make_dataclass(cls.__name__, told, bases=(cls,), frozen=True, kw_only=True)
    elif positional:  # a field of a group has its option as well
        command = f"{command} {word}"
    try:
        tyro.cli(
            cls,
            args=["--help"],
            prog=command,
            description=description,
            config=(tyro.conf.AvoidSubcommands,),
            **options,
        )
    except SystemExit:
        return
