"""The surfaces: how an input of each is made, and how whet is asked to take it."""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, get_args, get_origin

import fuzz_seeds as seeds
import yaml
from fuzz_mutations import (
    CANARY,
    NUMBERS,
    TEXTS,
    dump,
    hostile,
    mutate_bytes,
    mutate_json,
    mutate_lines,
    mutate_text,
    mutate_tree,
    payloads,
    pickled,
)

from whet import cli
from whet.__main__ import COMMANDS, Program
from whet.config import default_data, dump_yaml, groups, leaves, load_yaml, unwrap
from whet.eval.compare.compare import CompareConfig
from whet.eval.compare.compare import main as compare
from whet.generate.policy import PolicyConfig, load_policy
from whet.model.lora.files import read_adapter
from whet.model.text.template import BASE_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.vision.pixels import Preprocessing
from whet.model.vision.reading import read_picture
from whet.model.weights import load_model
from whet.recipes.models import seeing_model
from whet.report.html import ReportConfig
from whet.report.html import main as report
from whet.report.runs import RunsConfig
from whet.report.runs import main as runs
from whet.report.track import TrackRunConfig, send, track_settings
from whet.rewards.answers.equal import answers_equal
from whet.rewards.answers.extract import extract_answer
from whet.rewards.steps.audit import audit_steps
from whet.schema import ResponseSchema
from whet.tasks.base import TaskConfig, load_task
from whet.tasks.quarantine import QUARANTINE, write_quarantine
from whet.tasks.read import BadRow
from whet.telemetry.trackers import Link
from whet.train.data.pairs import read_pairs
from whet.types import Problem, UserError

MISSING, FOLDER, LOOP = b"@missing@", b"@folder@", b"@loop@"
"""Contents that stand for: no such file, a folder in its place, a symbolic link to itself."""


@dataclass
class Case:
    """An input: files of a folder, and words (a command line, texts, options)."""

    files: dict[str, bytes] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    def write(self, folder: Path, canary: Path) -> None:
        for name, data in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if data == FOLDER:
                path.mkdir()
            elif data == LOOP:
                path.symlink_to(path.name)
            elif data != MISSING:
                path.write_bytes(data.replace(CANARY.encode(), str(canary).encode()))


@dataclass(frozen=True)
class Surface:
    make: Callable[[Random], Case]
    run: Callable[[Case, Path], None]
    weight: float
    """Share of the inputs: less where one takes long."""
    valid: Callable[[], Case]
    """An input that must be taken: else the mutations would start from nothing."""


def odd_file(data: bytes, rng: Random, change: Callable[[bytes, Random], bytes] = mutate_json) -> bytes:
    """Mutate a file, or put something in its place."""
    kind = rng.randrange(60)
    if kind < 4:
        return [MISSING, FOLDER, LOOP, pickled()][kind]
    return change(data, rng)


# --- configs ---------------------------------------------------------------------------------------------------


@cache
def programs() -> dict[str, Program]:
    return {name: command.load() for name, command in COMMANDS.items()}


def _word(hint: Any, rng: Random) -> list[str]:
    """Make the words of an override: right ones, near misses, hostile ones."""
    inner, _ = unwrap(hint)
    kind = rng.randrange(10)
    if kind < 3:
        return [rng.choice([*TEXTS, *payloads()])]
    if kind < 5:
        return [str(rng.choice(NUMBERS)) if rng.random() < 0.98 else "9" * 5000]
    if kind == 5:
        return [
            str(rng.choice(["1", "None", "true", "x", "-3", "{}"])) for _ in range(rng.choice([0, 2, 3, 40]))
        ]
    if get_origin(inner) is tuple or get_origin(inner) is dict:
        return [
            rng.choice(["1", "0.5", "a", "correct", "format", "-1", "nan"])
            for _ in range(rng.choice([1, 2, 4]))
        ]
    choices = [str(arm) for arm in get_args(inner)] or {
        int: ["1", "2", "64", "0", "-1"],
        float: ["0.5", "1e-4", "0", "1", "inf", "-0.1"],
        bool: ["true", "False", "1", ""],
    }.get(inner, ["a", "runs/x", "gsm8k", ""])
    return [rng.choice(choices)]


def make_words(rng: Random) -> Case:
    name = rng.choice(list(programs()))
    program = programs()[name]
    fields = leaves(program.config_class)
    words: list[str] = []
    if program.recipes:
        words.append(
            rng.choice(list(program.recipes)) if rng.random() < 0.9 else rng.choice([*TEXTS, "x/y", "/dev"])
        )
    elif program.positional and rng.random() < 0.7:
        words += [rng.choice(["runs/a", "gsm8k", *TEXTS]) for _ in range(rng.choice([1, 2]))]
    for _ in range(rng.choice([1, 1, 2, 4])):
        option = rng.choice([*fields, *groups(program.config_class), *program.presets] or ["x"])
        hint = fields.get(option, str)
        if rng.random() < 0.1:
            option = mutate_text(option, rng)
        prefix = rng.choice(["--"] * 8 + ["--no-", "-"])
        flag = prefix + (option.replace("_", "-") if rng.random() < 0.7 else option)
        values = _word(hint, rng)
        words += [f"{flag}={values[0]}"] if values and rng.random() < 0.3 else [flag, *values]
    if rng.random() < 0.1:
        words.insert(
            rng.randrange(len(words) + 1), rng.choice(["--dry-run", "--resume", "-h", "--", "-", *TEXTS])
        )
    return Case(words=[name, *words])


def run_words(case: Case, folder: Path) -> None:
    name, *words = case.words
    program = programs()[name]
    parsed = cli.parse(
        f"whet {name}",
        program.config_class,
        program.recipes,
        [word for word in words if word not in ("-h", "--help")],
        resumable=program.resumable,
        presets=program.presets,
        positional=program.positional,
    )
    (folder / "config.yaml").write_text(cli.dump_yaml(parsed.config), encoding="utf-8")
    again = load_yaml(folder / "config.yaml", program.config_class)
    assert cli.dump_yaml(again) == cli.dump_yaml(parsed.config), (
        "config.yaml does not read back as it was written"
    )


YAML_BITS = [
    "!!python/object/apply:os.system ['touch " + CANARY + "']",
    "!!python/name:os.system",
    "!!binary aGVsbG8=",
    "!!set {a, b}",
    "!!timestamp 2001-99-99",
    "2001-01-01",
    "!!float x",
    "!!int 0o9z",
    "&a [*a]",
    "*unknown",
    "{<<: {a: 1}}",
    "? [1, 2]\n: x",
    "{[1]: 2}",
    "{{a: 1}: 2}",
    "1:2:3",
    "0x" + "f" * 5000,
    "9" * 5000,
    ".inf",
    ".nan",
    "~",
    "|\n  text\n",
    "[" * 5000,
    "- " * 3000,
    "a: " * 300,
    "%YAML 9.9\n---\n",
    "---\nx: 1\n---\ny: 2\n",
    '"\\uD800"',
    '"\\U00110000"',
    "\t",
    "&" + "a" * 3000 + " x",
]
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(12)
)


def yaml_seed(name: str, rng: Random) -> str:
    program = programs()[name]
    if program.recipes:
        return dump_yaml(program.recipes[rng.choice(list(program.recipes))]())
    return yaml.dump(default_data(program.config_class), sort_keys=False)


def make_yaml(rng: Random) -> Case:
    name = rng.choice(list(programs()))
    lines = yaml_seed(name, rng).splitlines() or ["x: 1"]
    kind = rng.randrange(12)
    if kind == 0:
        top = [
            key for key, value in zip(lines, lines[1:], strict=False) if key[:1] != " " and value[:1] != " "
        ]
        inside = (
            (rng.choice(top).partition(":")[0] if top else "x")
            + ":\n"
            + BOMB.replace("\n", "\n  ").replace("a:", "  a:", 1)
        )
        text = rng.choice([BOMB + "\n".join(lines), inside.rstrip(), inside.replace("  ", " ") + " "])
    elif kind == 1:
        text = rng.choice(YAML_BITS) * rng.choice([1, 2])
    elif kind < 8:
        for _ in range(rng.choice([1, 1, 3])):
            place = rng.randrange(len(lines))
            key = lines[place].partition(":")[0]
            value = rng.choice(YAML_BITS) if rng.random() < 0.5 else json.dumps(hostile(rng))
            if key.strip() in ("l", "m"):
                value = "*l"
            lines[place] = rng.choice([f"{key}: {value}", f"{key}: {value}", f"{value}: 1", lines[place] * 2])
        text = "\n".join(lines)
    else:
        text = mutate_text("\n".join(lines), rng)
    data = (text + "\n").encode("utf-8", "surrogatepass")
    data = mutate_bytes(data, rng) if rng.random() < 0.15 else data
    return Case(files={"config.yaml": odd_file(data, rng, lambda data, _: data)}, words=[name])


def run_yaml(case: Case, folder: Path) -> None:
    cls = programs()[case.words[0]].config_class
    cli.dump_yaml(load_yaml(folder / "config.yaml", cls))


# --- rows ------------------------------------------------------------------------------------------------------


def as_file(name: str, rows: list[Any], rng: Random) -> bytes:
    if ".parquet" in name:
        return seeds.parquet(rows)
    if name.endswith(".csv"):
        return as_csv(rows)
    text = (
        dump(rows, rng)
        if name.endswith(".json")
        else b"".join(dump(row, rng).replace(b"\n", b" ") + b"\n" for row in rows)
    )
    return gzip.compress(text, mtime=0) if name.endswith(".gz") else text


def as_csv(rows: list[Any]) -> bytes:
    import csv
    import io

    sink = io.StringIO()
    writer = csv.writer(sink)
    names = list(rows[0]) if rows and isinstance(rows[0], dict) and rows[0] else ["x"]
    writer.writerow(names)
    for row in rows:
        values = [row.get(name, "") for name in names] if isinstance(row, dict) else [row]
        writer.writerow([json.dumps(value) if isinstance(value, list | dict) else value for value in values])
    return sink.getvalue().encode("utf-8", "surrogatepass")


def make_rows(rng: Random) -> Case:
    task = rng.choice(list(seeds.ROWS))
    name = rng.choice(seeds.NAMES.get("jsonl" if task == "messages" else task, seeds.ANY_NAME))
    rows: list[Any] = json.loads(json.dumps(seeds.ROWS[task]))
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        rows[rng.randrange(len(rows))] = mutate_tree(rng.choice(rows), rng)
    if rng.random() < 0.1:
        rows = rows[: rng.choice([0, 1])]
    data = as_file(name, rows, rng)
    if rng.random() < 0.25:
        plain = gzip.decompress(data) if name.endswith(".gz") and rng.random() < 0.5 else None
        data = mutate_bytes(data, rng) if plain is None else gzip.compress(mutate_bytes(plain, rng), mtime=0)
    if name.endswith(".gz") and rng.random() < 0.03:
        data = gzip.compress(b"\x00" * (300 << 20), 9, mtime=0)  # 300 MiB of one line
    alone = task not in ("gsm8k", "math") and rng.random() < 0.5
    split = rng.choice(["train", "train", "test", "dev"])
    words = [task, name if alone else "", split, str(rng.choice([0, 0, 5, 100]))]
    return Case(files={name: odd_file(data, rng, lambda data, _: data)}, words=words)


@cache
def policy() -> Any:
    from dataclasses import replace

    from whet.recipes.models import demo_policy

    return load_policy(replace(demo_policy(), model=seeds.SHAPE, max_rows=8), seed=1)


def run_rows(case: Case, folder: Path) -> None:
    task, name, split, max_bad = case.words
    path = str(folder / name) if name else str(folder)
    if task == "pairs":
        bad_rows: list[BadRow] = []
        read_pairs(str(folder / next(iter(case.files))), policy(), int(max_bad), bad_rows)
        check_quarantine(folder, bad_rows, int(max_bad))
        return
    config = TaskConfig(name={"messages": "jsonl"}.get(task, task), path=path, max_bad_rows=int(max_bad))
    made = load_task(config)
    problems = made.problems(split)
    check_quarantine(folder, made, int(max_bad))
    if task in ("humaneval", "mbpp", "code"):  # judging runs the sandbox, which has a battery of its own
        return
    for problem in problems[:2]:
        for answer in (problem.answer, "5", "", None, problem.prompt[:200]):
            made.is_correct(problem, answer)


def check_quarantine(folder: Path, source: Any, max_bad: int) -> None:
    """See that the rows which were left out are kept: as many as were allowed at most, each in one line of JSON."""
    said = write_quarantine(folder, source)
    path = folder / QUARANTINE
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    assert all(row["where"] and row["reason"] and len(row["raw"]) <= 2000 for row in rows), rows
    assert bool(rows) == ("skipped" in said), said
    counted = [row for row in rows if row["reason"] != "'answer' is empty"]  # of math, they do not count
    assert len(counted) <= max_bad * 2, f"{len(rows)} bad rows of two files"


# --- model folders ---------------------------------------------------------------------------------------------


def change_one(files: seeds.Files, names: list[str], rng: Random, change: Any = mutate_json) -> Case:
    files = dict(files)
    for _ in range(rng.choice([1, 1, 1, 2])):
        name = rng.choice(names)
        if files[name] not in (MISSING, FOLDER, LOOP):
            files[name] = odd_file(files[name], rng, change)
    return Case(files=files)


def tokenizer_tree(tree: Any, rng: Random) -> Any:
    """Mutate tokenizer.json; its parts that have kinds also get others of the library's."""
    if isinstance(tree, dict) and rng.random() < 0.4:
        part = rng.choice(
            ["normalizer", "pre_tokenizer", "decoder", "post_processor", "truncation", "padding", "model"]
        )
        kinds = [
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            {"type": "Split", "pattern": {"Regex": rng.choice(["(a+)+$", "(", "(?:", "\\p{L}+", "x*" * 50, "(?=a)*"])},
             "behavior": "Isolated", "invert": False},
            {"type": "Sequence", "decoders": [], "normalizers": [], "pretokenizers": [], "processors": []},
            {"type": "Strip", "content": " ", "start": rng.choice([0, 1, 2**31, 2**63]), "stop": 0},
            {"type": "Replace", "pattern": {"String": ""}, "content": "a" * 100},
            {"type": "Replace", "pattern": {"Regex": ".*"}, "content": "ab"},
            {"type": "Prepend", "prepend": "▁" * 10000},
            {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
            {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 3, "pair": [],
             "special_tokens": {}},
            {"type": "Fuse"},
            {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
            {"type": "BPEDecoder", "suffix": ""},
            {"type": "Unigram", "unk_id": 5, "vocab": [["a", float(rng.choice([0, -1e308]))]], "byte_fallback": True},
            {"type": "WordLevel", "vocab": {"<eos>": 2**32 - 1, "a": 0}, "unk_token": "zz"},
            {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "zz", "continuing_subword_prefix": "##",
             "max_input_chars_per_word": 0},
            {"max_length": 0, "strategy": "LongestFirst", "stride": 9, "direction": "Left"},
            {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
        ]  # fmt: skip
        tree = json.loads(json.dumps(tree))
        tree[part] = rng.choice(kinds)
        return mutate_tree(tree, rng) if rng.random() < 0.3 else tree
    return mutate_tree(tree, rng)


def config_tree(tree: Any, rng: Random) -> Any:
    """Mutate config.json towards other families and sizes that could fill a machine."""
    if isinstance(tree, dict) and rng.random() < 0.5:
        tree = json.loads(json.dumps(tree))
        for _ in range(rng.choice([1, 2, 5])):
            tree[rng.choice(list(tree))] = rng.choice([*NUMBERS, "x", None, True])
        if rng.random() < 0.3:
            tree |= rng.choice(
                [
                    {"num_hidden_layers": 1024},
                    {"num_hidden_layers": 1024, "vocab_size": 2**24, "hidden_size": 2**24},
                    {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 2**24},
                    {"model_type": rng.choice(["qwen2", "qwen3", "llama4", "mamba"])},
                    {"rope_scaling": {"rope_type": "llama3", "factor": rng.choice(NUMBERS), "low_freq_factor": 1,
                                      "high_freq_factor": rng.choice([1, 4, 0]),
                                      "original_max_position_embeddings": rng.choice(NUMBERS)}},
                    {"auto_map": {"AutoModel": "x.py"}},
                    {"max_position_embeddings": 2**24},
                ]
            )  # fmt: skip
        return tree
    return mutate_tree(tree, rng)


def tokenizer_case(rng: Random) -> Case:
    files = {
        name: data
        for name, data in seeds.model_files().items()
        if "safetensors" not in name and name != "config.json"
    }
    names = ["tokenizer.json"] * 5 + [
        name for name in files if name.endswith(".json") and name != "protocol.json"
    ]
    case = change_one(files, names, rng, lambda data, rng: mutate_json(data, rng, tokenizer_tree))
    if rng.random() < 0.1:
        case.files["special_tokens_map.json"] = dump(
            {"eos_token": hostile(rng), "bos_token": hostile(rng)}, rng
        )
    return case


def run_tokenizer(case: Case, folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("1+1=2 <eos> a" + "é💥" * 3)
    tokenizer.decode(ids)
    tokenizer.decode([0, 1, 2**31, 5])
    _ = tokenizer.fingerprint
    if tokenizer.chat_template is not None:
        tokenizer.encode_prompt([{"role": "user", "content": "1+1="}])
    tokenizer.save(folder / "saved")
    Tokenizer.load(folder / "saved")


def run_model(case: Case, folder: Path) -> None:
    import torch

    model, config = load_model(folder)
    with torch.no_grad():
        model.logits(torch.zeros(1, min(4, config.max_positions), dtype=torch.long))


def run_policy(case: Case, folder: Path) -> None:
    loaded = load_policy(PolicyConfig(init=str(folder), max_rows=8), seed=0)
    loaded.schema.parse("a<answer>1</answer>")
    loaded.prompt_ids(Problem(uid="u", task="arithmetic", prompt="1+1=", answer="2"))


def change_header(data: bytes, rng: Random) -> bytes:
    """Mutate a safetensors file with its structure in mind."""
    try:
        header, tensors = seeds.split(data)
        names = [name for name in header if name != "__metadata__"]
        one = header[rng.choice(names)]
        for name in names:
            shape = [int(length) for length in header[name]["shape"]]
            header[name] |= {"shape": shape, "data_offsets": [*header[name]["data_offsets"]]}
            assert all(0 <= length < 2**20 for length in shape)
    except (
        ValueError,
        TypeError,
        LookupError,
        AssertionError,
        ArithmeticError,
        RecursionError,
        struct.error,
    ):  # mutated before
        return mutate_bytes(data, rng)
    kind = rng.randrange(13)
    if kind == 0:
        return seeds.join(
            header, tensors, size=rng.choice([0, 1, 7, 2**20, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1])
        )
    if kind == 1:
        return seeds.join(header, tensors[: rng.randrange(len(tensors))])
    if kind == 2:
        return seeds.join(header, tensors + b"x" * rng.choice([1, 8, 10000]))
    if kind == 3:
        one["data_offsets"] = rng.choice(
            [[0, 2**62], [5, 1], [-1, 4], [0, 0], [0], [0, 4, 8], header[rng.choice(names)]["data_offsets"], ["0", "4"],
             [2**64, 2**65], [0.0, 4.0], None]
        )  # fmt: skip
    elif kind == 4:
        one["dtype"] = rng.choice(
            [
                "F64",
                "F16",
                "BF16",
                "F8_E4M3",
                "F8_E5M2",
                "I64",
                "U8",
                "BOOL",
                "I32",
                "C64",
                "F4",
                "X",
                "",
                None,
                3,
            ]
        )
    elif kind == 5:
        one["shape"] = rng.choice(
            [
                [],
                [0],
                [2**63],
                [2**32, 2**32],
                [-1, 16],
                [1] * 70,
                [1, *one["shape"]],
                one["shape"][::-1],
                [1.5],
                ["1"],
                None,
            ]
        )
    elif kind == 6:
        header = mutate_tree(header, rng)
    elif kind == 7:
        header["__metadata__"] = rng.choice([None, 1, {"a": 1}, {"format": "np"}, {"x": "y" * 100_000}, []])
    elif kind == 8:
        text = json.dumps(header)
        return seeds.join(("{" + text[1:-1] + ", " + text[1:]).encode(), tensors)
    elif kind == 9:
        return seeds.join(
            rng.choice([b"", b"{}", b"[]", b"null", b"{" * 5000, b" " * 5000, b"\xff{}", b"[" * 100_000]),
            tensors,
        )
    elif kind == 10:  # all as it should be, but for the numbers
        return seeds.join(header, bytes(rng.choice([b"\xff", b"\x7f", b"\x00"])) * len(tensors))
    elif kind == 11:
        low = 0
        for name in names:  # another dtype, consistently: F64 read by a float32 model
            size = 8
            for length in header[name]["shape"]:
                size *= length
            header[name] |= {"dtype": "F64", "data_offsets": [low, low + size]}
            low += size
        return seeds.join(header, bytes(low))
    else:
        return mutate_bytes(data, rng)
    return seeds.join(header, tensors)


def run_tensors(case: Case, folder: Path) -> None:
    if "adapter_config.json" in case.files:
        run_adapter(case, folder)
    else:
        run_model(case, folder)


def tensors_case(rng: Random) -> Case:
    if rng.random() < 0.4:
        return change_one(seeds.adapter_files(), ["adapter_model.safetensors"], rng, change_header)
    names = [name for name in seeds.sharded_files() if name.endswith(".safetensors")]
    if rng.random() < 0.5:
        return change_one(seeds.model_files(), ["model.safetensors"], rng, change_header)
    return change_one(seeds.sharded_files(), names, rng, change_header)


PATTERNS = [
    "(a+)+$",
    "(.*)*",
    "((a|a)*)*b",
    "[",
    "(?P<x>",
    "a{99999}",
    ".*.*.*",
    "\\",
    "(?i)q",
    "x" * 300,
    "q_proj|" * 3,
]
PATTERNS += [".*.*_proj", ".*self.*q", "(?<=a)b", "a{1,65535}", "[a-", "(?#", "(?:a{9}){9}"]


def adapter_tree(tree: Any, rng: Random) -> Any:
    if isinstance(tree, dict) and rng.random() < 0.4:
        key = rng.choice(
            ["rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform"]
        )
        pattern = rng.choice(PATTERNS)
        value = rng.choice(
            [{pattern: rng.choice([2, 4, *NUMBERS])}, pattern, [pattern], [[pattern]], {pattern: None}]
        )
        return {**tree, key: value}
    return mutate_tree(tree, rng)


def run_adapter(case: Case, folder: Path) -> None:
    import torch

    adapter = read_adapter(folder)
    model = adapter.fit(policy().model)
    adapter.apply(model)
    with torch.no_grad():
        model.logits(torch.zeros(1, 3, dtype=torch.long))
    adapter.remove(model)


# --- templates -------------------------------------------------------------------------------------------------

ATOMS = ["messages", "messages[0]", "m", "m.content", "m['role']", "loop", "loop.index", "ns", "ns.x", "x", "'ab'", "7",
         "1.5", "none", "true", "[1,2]", "{'a': 1}", "bos_token", "self", "range", "namespace", "cycler", "joiner",
         "raise_exception", "strftime_now", "add_generation_prompt", "tools", "missing", "dict", "()"]  # fmt: skip
WRAPS = ["({})|upper", "({})|tojson", "({})|tojson(indent=99999999)", "({})|join(x)", "({})|replace('a', 'a' * 9999)",
         "({})|string", "({})|list", "({})|batch(99999999, 'x')|list", "({})|slice(99999999)|list", "({})|int",
         "({})|float", "({})|round(9999999)", "({})|indent(99999999)", "({})|attr('__class__')", "({}).__class__",
         "({})|map('upper')|list", "({})|map(attribute='__class__')|list", "({})|sum", "({})|sort", "({})|unique|list",
         "({})|wordcount", "({})|truncate(5)", "({})|urlize", "({})|xmlattr", "({})|pprint", "({})|dictsort",
         "({}) ~ ({})", "({}) + ({})", "({}) * 99999", "99999 * ({})", "({}) % 7", "({}) // 0", "({}) - 1", "-({})",
         "({}).split('a')", "({}).replace('a', 'b' * 9999)", "({}).join(messages)", "({}).encode('utf-16')",
         "({}).zfill(999999999)", "({}).translate({{}})", "({}).format(1)", "({})()", "({})[0]", "({})[99999]",
         "({}).x", "({}) in ({})", "({}) == ({})", "({}) < ({})", "({}) if x else ({})", "({}) is defined",
         "({}) is mapping", "({})[::-1]", "({})[::0]", "({}).items()", "({}).get('x')", "range(({})|int)",
         "strftime_now(({})|string)", "({})|groupby('role')|list", "({})|random", "({})|filesizeformat",
         "({})|striptags", "({})|escape", "({})|selectattr('role')|list", "({})|default(x, true)|first"]  # fmt: skip
WRAPS = [wrap.replace("{{}}", "@@") for wrap in WRAPS]


def expression(rng: Random, depth: int = 3) -> str:
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(ATOMS)
    wrap = rng.choice(WRAPS)
    while "{}" in wrap:
        wrap = wrap.replace("{}", expression(rng, depth - 1), 1)
    return wrap.replace("@@", "{}")


def statement(rng: Random, depth: int = 3) -> str:
    if depth == 0 or rng.random() < 0.25:
        return "{{ " + expression(rng) + " }}"
    body = "".join(statement(rng, depth - 1) for _ in range(rng.choice([1, 1, 2])))
    value = expression(rng, 2)
    return rng.choice(
        [
            f"{{% for m in {value} %}}{body}{{% endfor %}}",
            f"{{% for m in messages %}}{body}{{% endfor %}}",
            f"{{% for i in range({rng.choice([3, 99, 999, 99999])}) %}}{body}{{% endfor %}}",
            f"{{% for c in 'ab' * {rng.choice([9, 999, 49999])} %}}{body}{{% endfor %}}",
            f"{{% if {value} %}}{body}{{% else %}}{body}{{% endif %}}",
            f"{{% set x = {value} %}}{body}",
            f"{{% set ns.x = {value} %}}{body}",
            f"{{% set ns = namespace(x={value}) %}}{body}",
            "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}"
            "{% endfor %}{{ ns.x }}",
            f"{{% macro f(n) %}}{body}{{{{ f(n) }}}}{{% endmacro %}}{{{{ f(1) }}}}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            f"{{% filter {rng.choice(['upper', 'indent(9)', 'replace(1,2)'])} %}}{body}{{% endfilter %}}",
            f"{{% call(x) {value} %}}{body}{{% endcall %}}",
            "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
            f"{{% include '/etc/passwd' %}}{body}",
            f"{{% import 'os' as os %}}{body}",
            f"{{% extends 'x' %}}{body}",
            f"{{% block a %}}{body}{{% endblock %}}{{{{ self.a() }}}}",
            f"{{% generation %}}{body}{{% endgeneration %}}",
            f"{{% with x = {value} %}}{body}{{% endwith %}}",
            f"{{% raw %}}{body}{{% endraw %}}",
            f"{{%- set t %}}{body}{{% endset -%}}{{{{ t * 9 }}}}",
            f"{{% for m in messages %}}{body}{{% continue %}}{{% endfor %}}",
        ]
    )


def make_template(rng: Random) -> Case:
    kind = rng.randrange(10)
    if kind == 0:
        text = "".join(rng.choice(payloads()) for _ in range(2))
    elif kind < 7:
        text = "".join(statement(rng) for _ in range(rng.choice([1, 2])))
    else:
        text = mutate_text(rng.choice([seeds.CHAT, BASE_TEMPLATE]), rng)
    return Case(words=[text])


MESSAGES = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}]


def run_template(case: Case, folder: Path) -> None:
    Tokenizer.bytes().with_template(case.words[0]).render(MESSAGES)


# --- run folders -----------------------------------------------------------------------------------------------


def change_run(files: seeds.Files, names: list[str], rng: Random) -> Case:
    files = dict(files)
    for _ in range(rng.choice([1, 1, 2, 3])):
        name = rng.choice(names)
        if files[name] in (MISSING, FOLDER, LOOP):
            continue
        if name.endswith(".jsonl"):
            files[name] = odd_file(files[name], rng, mutate_lines)
        elif name.endswith(".json"):
            files[name] = odd_file(files[name], rng)
        else:
            lines = files[name].decode("utf-8", "replace").splitlines() or [""]
            place = rng.randrange(len(lines))
            key = lines[place].partition(":")[0]
            lines[place] = f"{key}: {rng.choice([*YAML_BITS, json.dumps(hostile(rng))])}"
            changed = "\n".join(lines).encode("utf-8", "surrogatepass")
            files[name] = odd_file(files[name], rng, mutate_bytes) if rng.random() < 0.3 else changed
            if rng.random() < 0.03:
                files[name] = BOMB.encode()
    return Case(files=files)


def make_report(rng: Random) -> Case:
    names = ["metrics.jsonl", "samples.jsonl"] * 3 + [
        "eval.json",
        "summary.json",
        "environment.json",
        "config.yaml",
    ]
    case = change_run(seeds.run_files(), names, rng)
    return Case(files={f"run/{name}": data for name, data in case.files.items()})


def run_report(case: Case, folder: Path) -> None:
    report(ReportConfig(run=(str(folder / "run"),)))


def make_eval_report(rng: Random) -> Case:
    case = change_run(seeds.eval_files(0), ["eval.json", "eval_samples.jsonl"], rng)
    return Case(files={f"run/{name}": data for name, data in case.files.items()})


def make_runs(rng: Random) -> Case:
    names = ["provenance.json", "environment.json", "summary.json", "eval.json", "config.yaml", "notes.jsonl"]
    first = change_run(seeds.run_files(), names, rng).files
    files = {f"runs/a/{name}": data for name, data in first.items()}
    keep = ("config.yaml", "environment.json", "provenance.json")
    files |= {f"runs/b/{name}": seeds.run_files()[name] for name in keep}
    return Case(files=files, words=[rng.choice(["", "", "rl-2026", "a", *TEXTS[:20]])])


def run_runs(case: Case, folder: Path) -> None:
    note = (case.words[0], "seen") if case.words[0] else None
    runs(RunsConfig(folder=str(folder / "runs"), note=note))


def make_compare(rng: Random) -> Case:
    first = change_run(seeds.eval_files(0), ["eval.json", "eval_samples.jsonl"], rng).files
    files = {f"a/{name}": data for name, data in first.items()}
    files |= {f"b/{name}": data for name, data in seeds.eval_files(1).items()}
    return Case(files=files, words=[str(rng.random() < 0.3)])


def run_compare(case: Case, folder: Path) -> None:
    models = (str(folder / "a"), str(folder / "b"))
    compare(CompareConfig(models=models, out=str(folder / "out"), force=case.words[0] == "True"))


class Recorder:
    """A tracker that writes what it gets to nowhere, as JSON and as numbers that must be finite."""

    def open(self, run: Any) -> Link:
        json.dumps(run.config, default=str)
        return Link(id="x")

    def log(self, step: int, time_s: float, values: Any) -> None:
        assert isinstance(step, int), step
        json.dumps([step, time_s, dict(values)], allow_nan=False)

    def log_samples(self, step: int, table: Any) -> None:
        json.dumps([step, [list(row) for row in table]])

    def close(self, *, failed: bool) -> None:
        pass


def make_track(rng: Random) -> Case:
    names = ["metrics.jsonl", "samples.jsonl"] * 3 + ["trackers.json"] * 2 + ["config.yaml"]
    return change_run(seeds.run_files(), names, rng)


def run_track(case: Case, folder: Path) -> None:
    settings = track_settings(TrackRunConfig(run=str(folder), to=("tensorboard",)), folder)
    send("tensorboard", Recorder(), folder, settings.num_samples)


# --- completions -----------------------------------------------------------------------------------------------

PIECES = ["\\boxed{", "}", "{", "(", ")", "[", "]", "$", "\\frac", "\\sqrt", "^", "_", "=", "+", "-", "*", "/", "!",
          ",", ";", " ", "\n", "<answer>", "</answer>", "<think>", "</think>", "1", "23", "0.5", "x", "e", "i", "\\pi",
          "####", "The answer is ", "(B)", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "\\text{", "%", "°", "²",
          "\\cup", "\\infty", "<", ">", "\\le", "|", "1e999", "9" * 400, "10^{10^{10}}", "9^{9^{9^9}}", "100000000!",
          "\\binom{9999}{4999}", "\\sum_{k=1}^{99999}", "\\int_0^1", "(x+1)^{100000}", "7^{10^9} \\mod 13", "٣", "5",
          "1_0", "\u202e", "\x00", "\ud800", "1/0", "0^0", "nan", "2+2=5", "12+43=55=1=", "twenty ", "3:45", "=" * 30,
          "\\lfloor", "\\gcd(", "\\max\\{", "x^2", "1,000", "00", "-", "±", "\\pm", "::", "<tool>1</tool>"]  # fmt: skip


def make_completion(rng: Random) -> Case:
    def text() -> str:
        kind = rng.randrange(8)
        if kind < 4:
            return "".join(rng.choice(PIECES) for _ in range(rng.choice([1, 3, 8, 30])))
        if kind == 4:
            return "".join(rng.choice(PIECES) for _ in range(3)) * rng.choice([50, 700, 20_000])
        if kind == 5:
            return "".join(
                chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x10FFFF)])) for _ in range(60)
            )
        if kind == 6:
            return mutate_text("<think>so 3*4=12</think><answer>\\boxed{\\frac{12}{5}}</answer>", rng)
        return rng.choice([*TEXTS, *payloads()])

    return Case(words=[text()[:400_000], text()[:4000]])


def run_completion(case: Case, folder: Path) -> None:
    text, gold = case.words
    for schema in (ResponseSchema(), ResponseSchema(opening_in_prompt=False)):
        schema.parse(text)
        schema.format_reward(text)
    answer = extract_answer(text)
    audit_steps(text)
    for left, right in ((answer or "", gold), (text, gold), (gold, text), (gold, gold)):
        answers_equal(left, right)
        answers_equal(left, right, ordered=True)


# --- images ----------------------------------------------------------------------------------------------------

FORMATS = {"PNG": "png", "JPEG": "jpg", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "WEBP": "webp"}
MODES = ("RGB", "RGBA", "L", "LA", "P", "CMYK", "I;16", "1", "F")


def picture(rng: Random) -> tuple[str, bytes]:
    """Draw a small image file of any format and mode, now and then one whose header promises terabytes."""
    import io
    import zlib

    from PIL import Image

    name = rng.choice(list(FORMATS))
    size = rng.choice([(1, 1), (17, 40), (64, 3), (200, 200)])
    image = Image.new(rng.choice(MODES), size, 1)
    sink = io.BytesIO()
    try:
        exif = Image.Exif()
        exif[0x0112] = rng.choice([0, 1, 3, 6, 8, 77])
        more = (
            {"save_all": True, "append_images": [image] * 3} if name == "GIF" and rng.random() < 0.3 else {}
        )
        image.save(sink, name, exif=exif, **more)
    except (OSError, KeyError, ValueError):  # formats do not have every mode
        sink = io.BytesIO()
        image.convert("RGB").save(sink, name)
    data = sink.getvalue()
    if name == "PNG" and rng.random() < 0.2:
        head = struct.pack(">II", rng.choice([0, 1, 70_000, 2**31]), rng.choice([0, 1, 70_000, 2**31]))
        head = b"IHDR" + head + data[24:29]
        data = data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]
    return f"a.{rng.choice(list(FORMATS.values())) if rng.random() < 0.2 else FORMATS[name]}", data


def make_image(rng: Random) -> Case:
    """An image file, mutated; the name that a row gives it, mutated, too."""
    name, data = picture(rng)
    if rng.random() < 0.7:
        data = mutate_bytes(data, rng)
    row: Any = {"question": "how many?", "answer": "1", "image": name}
    if rng.random() < 0.2:
        row["image"] = "data:image/png;base64," + base64.b64encode(data).decode()
    if rng.random() < 0.2:
        elsewhere = ["/etc/passwd", "../a.png", "http://127.0.0.1:1/a.png", "file:///etc/passwd"]
        row["image"] = rng.choice([*elsewhere, [name] * 3])
    if rng.random() < 0.3:
        row = mutate_tree(row, rng)
    rows = b"".join(dump(each, rng).replace(b"\n", b" ") + b"\n" for each in (row, VALID_ROW))
    return Case({name: odd_file(data, rng, lambda data, _: data), "ok.png": PNG, "rows.jsonl": rows}, [name])


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAACgAAAAoCAIAAAADnC86AAAAMklEQVR4nO3NQQkAQAgAsPM+Yv9SxjKGIFuBRXW+DX9lFYvFYrFYLBaLxWKxWCwW"
    "H40H+kgBKPvToGQAAAAASUVORK5CYII="
)
VALID_ROW = {"question": "how many?", "answer": "2", "image": "ok.png"}


@cache
def eyes() -> Preprocessing:
    """How a model of Qwen3-VL's shape reads pictures."""
    model = seeing_model(0).model
    assert model.images is not None
    return model.images.preprocessing


def run_image(case: Case, folder: Path) -> None:
    """Read the file as a model does; read the rows, and all of their images."""
    (name,) = case.words
    refusals = []
    os.environ["XDG_CACHE_HOME"] = str(folder)  # where large images of rows are kept
    try:
        shown = read_picture(str(folder / name))
        eyes().grid(shown.height, shown.width)
        assert eyes().patches(shown.read()).isfinite().all()
    except UserError as error:
        refusals.append(error)
    made = load_task(
        TaskConfig(name="jsonl", path=str(folder / "rows.jsonl"), images="image", max_bad_rows=1)
    )
    for split in ("train", "dev", "test"):
        for problem in made.problems(split):
            for source in problem.images:
                read_picture(source).read()
    for refusal in refusals:
        raise refusal


def model_case(
    files: Callable[[], seeds.Files], names: list[str], change: Any = mutate_json
) -> Callable[[Random], Case]:
    return lambda rng: change_one(files(), names, rng, change)


def _valid_rows(task: str, name: str) -> Case:
    return Case(
        files={name: as_file(name, seeds.ROWS[task], random.Random(0))}, words=[task, "", "train", "0"]
    )


def _below(folder: str, files: seeds.Files) -> seeds.Files:
    return {f"{folder}/{name}": data for name, data in files.items()}


SURFACES: dict[str, Surface] = {
    "command line": Surface(
        make_words, run_words, 4, lambda: Case(words=["rl", next(iter(programs()["rl"].recipes))])
    ),
    "YAML config": Surface(
        make_yaml,
        run_yaml,
        3,
        lambda: Case({"config.yaml": yaml_seed("rl", random.Random(0)).encode()}, ["rl"]),
    ),
    "data rows": Surface(make_rows, run_rows, 4, lambda: _valid_rows("gsm8k", "train.jsonl")),
    "tokenizer files": Surface(
        tokenizer_case,
        run_tokenizer,
        3,
        lambda: Case({k: v for k, v in seeds.model_files().items() if k != "config.json"}),
    ),
    "config.json": Surface(
        model_case(seeds.model_files, ["config.json"], lambda data, rng: mutate_json(data, rng, config_tree)),
        run_model,
        2,
        lambda: Case(seeds.model_files()),
    ),
    "shard index": Surface(
        model_case(seeds.sharded_files, ["model.safetensors.index.json"]),
        run_model,
        1,
        lambda: Case(seeds.sharded_files()),
    ),
    "protocol.json": Surface(
        model_case(seeds.model_files, ["protocol.json"] * 4 + ["generation_config.json"]),
        run_policy,
        2,
        lambda: Case(seeds.model_files()),
    ),
    "safetensors": Surface(tensors_case, run_tensors, 3, lambda: Case(seeds.sharded_files())),
    "adapter_config": Surface(
        model_case(
            seeds.adapter_files,
            ["adapter_config.json"],
            lambda data, rng: mutate_json(data, rng, adapter_tree),
        ),
        run_adapter,
        2,
        lambda: Case(seeds.adapter_files()),
    ),
    "chat template": Surface(make_template, run_template, 1, lambda: Case(words=[BASE_TEMPLATE])),
    "report of a run": Surface(make_report, run_report, 0.1, lambda: Case(_below("run", seeds.run_files()))),
    "report of an eval": Surface(
        make_eval_report, run_report, 0.5, lambda: Case(_below("run", seeds.eval_files(0)))
    ),
    "runs": Surface(make_runs, run_runs, 1, lambda: Case(_below("runs/a", seeds.run_files()), [""])),
    "compare": Surface(
        make_compare,
        run_compare,
        1,
        lambda: Case(_below("a", seeds.eval_files(0)) | _below("b", seeds.eval_files(1)), ["False"]),
    ),
    "track": Surface(make_track, run_track, 1, lambda: Case(seeds.run_files())),
    "completions": Surface(
        make_completion, run_completion, 6, lambda: Case(words=["<answer>5</answer>", "5"])
    ),
    "images": Surface(
        make_image,
        run_image,
        3,
        lambda: Case(
            {"a.png": PNG, "rows.jsonl": dump(VALID_ROW, Random(0)) + b"\n", "ok.png": PNG}, ["a.png"]
        ),
    ),
}
