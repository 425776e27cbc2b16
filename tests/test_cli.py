"""The command line and its configs: values held against tyro itself, error lines against their exact text."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from whet import __main__, __version__, cli, install
from whet.config import Removed, user_path
from whet.types import UserError


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters."""

    rank: int = 8
    """Rank of the update."""
    alphas: dict[str, float] = field(default_factory=lambda: {"q_proj": 16.0})
    """Scale by module."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer."""

    lr: float = 1e-3
    """Peak learning rate."""
    fused: bool = False
    """Use the fused kernel."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of both moments."""
    kind: Literal["adam", "sgd"] = "adam"
    """Update rule."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr={self.lr}, expected > 0")


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A toy program.

    More about it.

    Attributes:
        name: What the run is called.
        num_steps: Optimizer steps; None runs to the end of the data.
    """

    name: str
    num_steps: int | None = None
    optim: Optim = field(default_factory=lambda: Optim(lr=0.5))
    """How to step."""
    weights: dict[str, float] = field(default_factory=lambda: {"correct": 1.0})
    """Weight of each reward."""
    ks: tuple[int, ...] = (1, 2)
    """The k of pass@k."""
    lora: LoRA | None = None
    """Adapters instead of full weights."""
    note: str | None = None
    """Free text."""
    level: Literal[1, 2, "all"] = 1
    """Difficulty."""
    warm: bool = True
    """Warm up first."""

    def __post_init__(self) -> None:
        if self.num_steps == 0:
            raise ValueError("num_steps=0, expected >= 1 or None")


def toy_small() -> Toy:
    """Small and quick.

    Not shown in the overview.
    """
    return Toy(name="small")


def toy_large() -> Toy:
    """Large and slow."""
    return Toy(name="large", num_steps=1000, lora=LoRA(rank=64), optim=Optim(lr=0.25, fused=True))


RECIPES: dict[str, Callable[[], Toy]] = {"toy-small": toy_small, "toy-large": toy_large}
SMALL = toy_small()


def parse(*argv: str, **options: Any) -> cli.Parsed[Toy]:
    return cli.parse("whet toy", Toy, RECIPES, argv, **options)


def error_of(function: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        function()
    return str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "--name other",
        "--name=",
        "--name=--other",
        "--num-steps 3",
        "--num_steps=3",
        "--num-steps None",
        "--num-steps -3",
        "--optim.lr 1e-4",
        "--optim.lr=1e-4 --optim.kind sgd --optim.betas .5 .75",
        "--optim.fused",
        "--optim.no-fused",
        "--no-warm --optim.fused",
        "--ks",
        "--ks 4 8 16 --warm",
        "--weights.correct 2",
        "--lora.rank 3",
        "--lora.alphas.q-proj 3",
        "--note None",
        "--note -1",
        "--level all",
        "--level 2",
    ],
)
def test_overrides_equal_tyros(argv: str) -> None:
    """The independent implementation: tyro itself, where it accepts the same words."""
    ours = parse("toy-large", *argv.split()).config
    assert ours == tyro.cli(Toy, default=toy_large(), args=argv.split(), config=(tyro.conf.AvoidSubcommands,))


@pytest.mark.parametrize(
    ("argv", "config"),
    [
        (["--warm", "False"], replace(SMALL, warm=False)),
        (["--warm=true"], SMALL),
        (["--optim.fused", "True", "--optim.lr", "2"], replace(SMALL, optim=Optim(lr=2.0, fused=True))),
        (["--weights.brief", "0.5"], replace(SMALL, weights={"correct": 1.0, "brief": 0.5})),
        (["--weights.no-hints", "-1"], replace(SMALL, weights={"correct": 1.0, "no-hints": -1.0})),
        (["--weights", "brief", "0.5"], replace(SMALL, weights={"brief": 0.5})),
        (["--lora.rank", "2"], replace(SMALL, lora=LoRA(rank=2))),
        (["--lora.alphas.k_proj", "2"], replace(SMALL, lora=LoRA(alphas={"q_proj": 16.0, "k_proj": 2.0}))),
        (["--lora", "None"], SMALL),
    ],
)
def test_overrides_beyond_tyro(argv: list[str], config: Toy) -> None:
    """True/False after a flag, new names in a dict, switching a group on that the recipe leaves off."""
    assert parse("toy-small", *argv).config == config


def test_groups_can_be_switched_off() -> None:
    assert parse("toy-large", "--lora", "None").config == replace(toy_large(), lora=None)


def test_two_fields_may_be_valid_only_together() -> None:
    """Validation sees the final values once, not each override alone."""

    @dataclass(frozen=True, kw_only=True)
    class Range:
        low: int = 1
        high: int = 2

        def __post_init__(self) -> None:
            if self.low >= self.high:
                raise ValueError(f"low={self.low} is not below high={self.high}")

    Range.__annotations__ = {"low": int, "high": int}
    parsed = cli.parse("whet toy", Range, {"r": Range}, ["r", "--low", "5", "--high", "6"])
    assert (parsed.config.low, parsed.config.high) == (5, 6)


def test_switches_stand_anywhere() -> None:
    for argv in (["--dry-run", "toy-small", "--resume"], ["toy-small", "--resume", "--warm", "--dry_run"]):
        parsed = parse(*argv)
        assert (parsed.config, parsed.recipe, parsed.dry_run, parsed.resume) == (
            SMALL,
            "toy-small",
            True,
            True,
        )
    parsed = parse("toy-small")
    assert (parsed.dry_run, parsed.resume) == (False, False)


def test_a_program_without_recipes() -> None:
    parsed = cli.parse("whet toy", Toy, {}, ["--name", "x", "--weights.brief", "2", "--optim.fused"])
    weights = {"correct": 1.0, "brief": 2.0}
    assert parsed.config == Toy(name="x", weights=weights, optim=Optim(lr=0.5, fused=True))
    assert error_of(lambda: cli.parse("whet toy", Toy, {}, [])) == "'whet toy' needs --name: str"
    assert error_of(lambda: cli.parse("whet toy", Toy, {}, ["small"])) == (
        "unexpected argument 'small' for 'whet toy'; an override is written --field value"
    )


ALL = "(whet toy toy-small --help lists all)"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "'whet toy' needs a RECIPE: 'whet toy toy-small' (whet toy --help lists all)"),
        (["--name", "x"], "'whet toy' needs a RECIPE: 'whet toy toy-small' (whet toy --help lists all)"),
        (
            ["toy-smal"],
            "unknown recipe 'toy-smal' for 'whet toy'; did you mean 'toy-small'? (whet toy --help lists all)",
        ),
        (
            ["smlal"],
            "unknown recipe 'smlal' for 'whet toy'; did you mean 'toy-small'? (whet toy --help lists all)",
        ),
        (["qwertz"], "unknown recipe 'qwertz' for 'whet toy' (whet toy --help lists all)"),
        (["runs/none"], "no recipe, file or folder 'runs/none' for 'whet toy' (whet toy --help lists all)"),
        (["none.yaml"], "none.yaml: cannot be read: No such file or directory"),
        (
            ["toy-small", "toy-large"],
            "unexpected argument 'toy-large' for 'whet toy'; an override is written --field value",
        ),
        (
            ["toy-small", "--optim.lrr", "1"],
            f"unknown field '--optim.lrr' for 'whet toy toy-small'; did you mean '--optim.lr'? {ALL}",
        ),
        (
            ["toy-small", "--lr=1"],
            f"unknown field '--lr' for 'whet toy toy-small'; did you mean '--optim.lr'? {ALL}",
        ),
        (
            ["toy-small", "--no-fused"],
            f"unknown field '--no-fused' for 'whet toy toy-small'; did you mean '--optim.no-fused'? {ALL}",
        ),
        (["toy-small", "-n", "x"], f"unknown field '-n' for 'whet toy toy-small' {ALL}"),
        (["toy-small", "--optim.lr", "abc"], "--optim.lr: got 'abc', expected float"),
        (
            ["toy-small", "--optim.lr"],
            "--optim.lr: got no value (one that starts with '-' is written --optim.lr=VALUE), expected float",
        ),
        (["toy-small", "--optim.lr", "1", "2"], "--optim.lr: got '1' '2', expected float"),
        (["toy-small", "--num-steps", "1.5"], "--num-steps: got '1.5', expected int or None"),
        (["toy-small", "--ks", "1", "x"], "--ks: got '1' 'x', expected a list of int"),
        (["toy-small", "--optim.betas", "1"], "--optim.betas: got '1', expected a list of 2: float, float"),
        (["toy-small", "--optim.kind", "lion"], "--optim.kind: got 'lion', expected one of 'adam', 'sgd'"),
        (["toy-small", "--level", "3"], "--level: got '3', expected one of 1, 2, 'all'"),
        (["toy-small", "--warm", "maybe"], "--warm: got 'maybe', expected true or false"),
        (["toy-small", "--no-warm", "true"], "--no-warm: got 'true', expected no value"),
        (
            ["toy-small", "--weights", "brief"],
            "--weights: got 'brief', expected names with float, such as: --weights brief 1",
        ),
        (["toy-small", "--weights.brief", "x"], "--weights.brief: got 'x', expected float"),
        (
            ["toy-small", "--weights", "a", "1", "a", "2"],
            "--weights: got 'a' '1' 'a' '2', expected names with float, such as: --weights a 1",
        ),
        (["toy-small", "--optim", "x"], "--optim is a group of fields; set one of them, as in --optim.lr"),
        (["toy-small", "--name", "a", "--name=b"], "--name is given twice"),
        (["toy-small", "--lora", "None", "--lora.rank", "2"], "--lora and --lora.rank contradict each other"),
        (["toy-small", "--optim.lr", "-1"], "whet toy toy-small: optim: lr=-1.0, expected > 0"),
        (["toy-small", "--num-steps", "0"], "whet toy toy-small: num_steps=0, expected >= 1 or None"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str) -> None:
    assert error_of(lambda: parse(*argv)) == message


@dataclass(frozen=True, kw_only=True)
class Younger(Optim):
    """An optimizer of which a field and a value are gone."""

    RENAMED = {"rank": Removed(8, "use lora.rank"), "kind=lion": Removed(None, "use adam")}


@dataclass(frozen=True, kw_only=True)
class YoungToy:
    """A program that has it."""

    optim: Younger = field(default_factory=Younger)
    """How to step."""


def test_what_is_gone_is_refused_with_what_to_use() -> None:
    def parsed(*argv: str) -> YoungToy:
        return cli.parse("whet toy", YoungToy, {"toy": YoungToy}, ["toy", *argv]).config

    assert error_of(lambda: parsed("--optim.rank", "4")) == "--optim.rank is gone: use lora.rank"
    assert error_of(lambda: parsed("--optim.kind=lion")) == "--optim.kind=lion is gone: use adam"
    assert parsed("--optim.kind", "sgd").optim.kind == "sgd"

    def loaded(**optim: Any) -> YoungToy:
        return cli.from_dict(YoungToy, {"optim": optim}, where="file")

    assert error_of(lambda: loaded(rank=4)) == "file: optim.rank is gone: use lora.rank"
    assert error_of(lambda: loaded(kind="lion")) == "file: optim.kind = lion is gone: use adam"
    assert loaded(rank=8) == loaded() == YoungToy()  # what an old run left at its default


def test_resume_is_unknown_where_nothing_resumes() -> None:
    message = error_of(lambda: parse("toy-small", "--resume", resumable=False))
    assert message == f"unknown field '--resume' for 'whet toy toy-small' {ALL}"


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        (["--resume"], True),
        (["--resume", "auto"], True),
        (["--resume", "40"], 40),
        (["--resume=40"], 40),
        (["--resume", "40", "--dry-run"], 40),
    ],
)
def test_resume_takes_the_newest_step_or_the_one_that_is_named(words: list[str], resume: bool | int) -> None:
    got = parse("toy-small", *words).resume
    assert got is resume or (got == resume and type(got) is int)


def test_an_error_line_is_cut_where_its_text_is_endless(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("x", "\u2028", "\U000e0001"):  # what cannot be printed is spelt out in up to ten characters

        def fail(text: str = text) -> None:
            raise UserError(text * 50_000)

        assert cli.guard(fail) == 2
        assert len(capsys.readouterr().err) < 1_100


@pytest.mark.parametrize("word", ["0", "-1", "4o", "9" * 30, "40 41", "\u0664"])
def test_other_words_are_no_step(word: str) -> None:
    assert "unexpected argument" in error_of(lambda: parse("toy-small", "--resume", *word.split()))
    assert "unexpected argument" in error_of(lambda: parse("toy-small", "--resume", "40", has_steps=False))
    assert parse("toy-small", "--resume", "auto", has_steps=False).resume is True


PRESETS = {
    "optim": {"fast": lambda: Optim(lr=2.0, fused=True), "sgd": lambda: Optim(lr=0.1, kind="sgd")},
}


@pytest.mark.parametrize(
    ("argv", "optim"),
    [
        ("", Optim(lr=0.5)),
        ("--optim fast", Optim(lr=2.0, fused=True)),
        ("--optim=sgd", Optim(lr=0.1, kind="sgd")),
        ("--optim fast --optim.no-fused --optim.kind sgd", Optim(lr=2.0, kind="sgd")),
        ("--optim.lr 3 --optim fast", Optim(lr=3.0, fused=True)),  # in either order
    ],
)
def test_a_preset_replaces_its_whole_group(argv: str, optim: Optim) -> None:
    assert parse("toy-small", *argv.split(), presets=PRESETS).config == replace(SMALL, optim=optim)


def test_a_preset_of_some_fields_leaves_the_others() -> None:
    presets = {"optim": {"still": lambda: {"lr": 2.0, "fused": True}}}
    got = parse("toy-small", "--optim", "still", "--optim.kind", "sgd", "--optim.lr", "3", presets=presets)
    assert got.config.optim == replace(SMALL.optim, lr=3.0, fused=True, kind="sgd")
    assert parse("toy-small", "--optim", "still", presets=presets).config == replace(
        SMALL, optim=replace(SMALL.optim, lr=2.0, fused=True)
    )


@pytest.mark.parametrize("command", ["rl", "sft", "rft", "dpo"])
def test_every_training_program_knows_the_least_memory(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = "demo" if command in ("rl", "sft") else next(iter(__main__.COMMANDS[command].load().recipes))
    assert (
        __main__.main([command, recipe, "--optim", "lean", "--optim.token-budget", "64", "--print-config"])
        == 0
    )
    out = capsys.readouterr().out
    for line in ("adam_bits: 8", "precision: bfloat16_master", "checkpoint_layers: true", "token_budget: 64"):
        assert f"  {line}\n" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--optim slow", "--optim: got 'slow', expected one of fast, sgd"),
        ("--optim", "--optim: got '', expected one of fast, sgd"),
        ("--optim fast sgd", "--optim: got 'fast sgd', expected one of fast, sgd; did you mean 'fast'?"),
        ("--optim fast --optim.lr -1", "whet toy toy-small: optim: lr=-1.0, expected > 0"),
        ("--lora fast", "--lora is a group of fields; set one of them, as in --lora.rank"),
    ],
)
def test_mistakes_with_presets_are_one_line(argv: str, message: str) -> None:
    assert error_of(lambda: parse("toy-small", *argv.split(), presets=PRESETS)) == message


def test_every_named_algorithm_is_a_preset_of_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    from whet.recipes.rl import ALGORITHMS

    for name, make in ALGORITHMS.items():
        # DAPO's ramp for long completions is longer than the demo's completions, and the message says so.
        ramp = ["--algo.overlong-cache", "16"] if make().overlong_cache else []
        if ramp:
            assert __main__.main(["rl", "demo", "--algo", name, "--print-config"]) == 2
            assert "algo.overlong_cache = 128: expected at most" in capsys.readouterr().err
        assert __main__.main(["rl", "demo", "--algo", name, *ramp, "--print-config"]) == 0
        out = capsys.readouterr().out
        assert f"  aggregation: {make().aggregation}\n" in out
        assert f"  clip_high: {make().clip_high}\n" in out
    argv = ["rl", "demo", "--algo", "gspo", "--algo.clip-high", "0.1", "--print-config"]
    assert __main__.main(argv) == 0
    out = capsys.readouterr().out
    assert "  ratio: sequence\n" in out
    assert "  clip_low: 0.0003\n  clip_high: 0.1\n" in out


names = st.text(max_size=8)
floats = st.floats(allow_nan=False)  # nan is not equal to itself
optims = st.builds(
    Optim,
    lr=st.floats(min_value=0, exclude_min=True),
    fused=st.booleans(),
    betas=st.tuples(floats, floats),
    kind=st.sampled_from(["adam", "sgd"]),
)
toys = st.builds(
    Toy,
    name=names,
    num_steps=st.none() | st.integers(min_value=1),
    optim=optims,
    weights=st.dictionaries(names, floats, max_size=3),
    ks=st.lists(st.integers(), max_size=3).map(tuple),
    lora=st.none() | st.builds(LoRA, rank=st.integers(), alphas=st.dictionaries(names, floats, max_size=2)),
    note=st.none() | names,
    level=st.sampled_from([1, 2, "all"]),
    warm=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(config=toys)
def test_dicts_and_yaml_round_trip(config: Toy, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert cli.from_dict(Toy, cli.to_dict(config), where="here") == config
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_text(cli.dump_yaml(config), encoding="utf-8", newline="")
    assert cli.load_yaml(path, Toy) == config


@pytest.mark.parametrize(
    "text",
    ["no", "null", "1", "1e-4", "", " a ", "a\nb", "\n😀", "\x85", "\u2028", "\ufeff", "\x1b", "#", "é", "😀"]
    + [*"'\"{%@`|>\\", ": ", "- a", "? ", "[a, b]", "&a", "*a", "!t", "a" * 200],
)
def test_text_that_yaml_finds_special_round_trips(text: str, tmp_path: Path) -> None:
    config = Toy(name=text, note=text, weights={text: 1.0})
    path = tmp_path / "config.yaml"
    path.write_text(cli.dump_yaml(config), encoding="utf-8", newline="")
    assert cli.load_yaml(path, Toy) == config
    # A run resumes only with the very text that it was started with, wherever libyaml is missing.
    for name in (text, f"one {text} two", f"{text}: {text}, {text}" * 20):
        config = Toy(name=name, note=text, weights={name: 1.0, text: 2.0})
        written = cli.dump_yaml(config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("whet.config._FastDumper", None)
            assert cli.dump_yaml(config) == written


def test_yaml_is_one_line_per_field() -> None:
    expected = """\
name: large
num_steps: 1000
optim:
  lr: 0.25
  fused: true
  betas: [0.9, 0.99]
  kind: adam
weights:
  correct: 1.0
ks: [1, 2]
lora:
  rank: 64
  alphas:
    q_proj: 16.0
note: null
level: 1
warm: true
"""
    assert cli.dump_yaml(toy_large()) == expected


def test_yaml_may_leave_out_defaults_and_write_numbers_as_people_do(tmp_path: Path) -> None:
    """A partial group starts from the parent's default for it (lr=0.5), not from the group's (lr=0.001)."""
    path = tmp_path / "my.yaml"
    path.write_text("name: x\noptim:\n  fused: true\nweights: {a: 1e-4, b: 2}\nlora: {}\n")
    assert cli.load_yaml(path, Toy) == Toy(
        name="x", optim=Optim(lr=0.5, fused=True), weights={"a": 1e-4, "b": 2.0}, lora=LoRA()
    )
    assert type(cli.load_yaml(path, Toy).weights["b"]) is float


def test_a_run_folder_or_file_is_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(cli.dump_yaml(toy_large()))
    for recipe in (str(tmp_path), str(tmp_path / "config.yaml")):
        parsed = parse(recipe, "--num-steps", "7")
        assert (parsed.config, parsed.recipe) == (replace(toy_large(), num_steps=7), recipe)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)  # a long path would be cut in the message
    said = error_of(lambda: parse("./empty"))
    assert said == "folder './empty' has no config.yaml, so it is not a run folder"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A toy with a run folder."""

    out: str
    """Output folder."""


def test_resume_goes_on_in_the_folder_that_is_named(tmp_path: Path) -> None:
    """Wherever the run was when it began; a new run of its recipe goes where the recipe says."""
    run = tmp_path / "moved"
    run.mkdir()
    (run / "config.yaml").write_text("out: runs/old\n")

    def out(*argv: str) -> str:
        return cli.parse("whet toy", Kept, {"toy": lambda: Kept(out="runs/toy")}, argv).config.out

    assert out(str(run), "--resume") == out(f"{run}/", "--resume", "40") == str(run)
    assert out(str(run), "--resume", "--out", "runs/other") == "runs/other"
    assert out(str(run)) == "runs/old"
    assert out("toy", "--resume") == "runs/toy"
    file = str(run / "config.yaml")
    assert out(file, "--resume") == "runs/old"  # a file alone is a recipe, whatever it is called
    (run / "environment.json").write_text("{}")
    assert out(file, "--resume") == str(run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\noptim: {lrr: 1}", ": unknown field 'optim.lrr', did you mean 'optim.lr'?"),
        ("name: x\nlr: 1", ": unknown field 'lr', did you mean 'optim.lr'?"),
        ("name: x\nqqqq: 1", ": unknown field 'qqqq'"),
        ("name: x\n3: 1", ": unknown field '3'"),
        ("warm: true", ": missing field 'name', expected str"),
        ("name: 3", ": field 'name': got 3, expected str"),
        ("name: x\nnum_steps: true", ": field 'num_steps': got True, expected int or None"),
        ("name: x\nnum_steps: 1.0", ": field 'num_steps': got 1.0, expected int or None"),
        ("name: x\noptim: {lr: true}", ": field 'optim.lr': got True, expected float"),
        ("name: x\noptim: {lr: '3'}", ": field 'optim.lr': got '3', expected float"),
        (f"name: x\noptim: {{lr: 1{'0' * 400}}}", f": field 'optim.lr': got 1{'0' * 76}..., expected float"),
        ("name: x\noptim: 3", ": field 'optim': got 3, expected a group of fields"),
        ("name: x\noptim:", ": field 'optim': got None, expected a group of fields"),
        ("name: x\noptim: {kind: Adam}", ": field 'optim.kind': got 'Adam', expected one of 'adam', 'sgd'"),
        (
            "name: x\noptim: {betas: [1]}",
            ": field 'optim.betas': got [1], expected a list of 2: float, float",
        ),
        ("name: x\nlevel: true", ": field 'level': got True, expected one of 1, 2, 'all'"),
        ("name: x\nks: 3", ": field 'ks': got 3, expected a list of int"),
        ("name: x\nks: [1, a]", ": field 'ks[1]': got 'a', expected int"),
        ("name: x\nweights: {a: b}", ": field 'weights.a': got 'b', expected float"),
        ("name: x\nweights: {1: 2}", ": field 'weights': got {1: 2}, expected names with float"),
        ("name: x\nwarm: 1", ": field 'warm': got 1, expected true or false"),
        ("name: x\noptim: {lr: -1}", ": optim: lr=-1.0, expected > 0"),
        ("name: x\nnum_steps: 0", ": num_steps=0, expected >= 1 or None"),
        ("name: x\noptim:\n  lr: 1\n  lr: 2", ":4: malformed YAML: duplicate key 'lr'"),
        ("name: x\nks: [1", ":2: malformed YAML: expected ',' or ']', but got '<stream end>'"),
        (
            "name: !!python/object/apply:os.getcwd []",
            ":1: malformed YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object/apply:os.getcwd'",
        ),
        ("- name: x", ": got [{'name': 'x'}], expected lines of 'field: value'"),
        ("", ": got None, expected lines of 'field: value'"),
    ],
)
def test_mistakes_in_yaml_are_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert error_of(lambda: cli.load_yaml(path, Toy)) == f"{path}{message}"


@pytest.mark.parametrize(
    "raw", [b"name: \xff", b"name: \x00", b"name: 1" + b"0" * 5000, b"ks: " + b"[" * 100_000]
)
def test_hostile_yaml_is_one_line(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(raw)
    message = error_of(lambda: cli.load_yaml(path, Toy))
    assert message.startswith(f"{path}: malformed YAML: ")
    assert "\n" not in message


def test_huge_yaml_is_refused_unread() -> None:
    assert error_of(lambda: cli.load_yaml(Path("/dev/zero"), Toy)) == (
        "/dev/zero: larger than 1048576 bytes, so it is not a config"
    )


def help_of(capsys: pytest.CaptureFixture[str], *argv: str, **options: Any) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(*argv, **options)
    assert caught.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_help_without_a_recipe_lists_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "--help")
    assert text.startswith("usage: whet toy RECIPE [--field value ...] [--dry-run] [--resume]\n")
    assert "  toy-small  Small and quick.\n  toy-large  Large and slow.\n" in text
    assert "Not shown" not in text
    assert "--resume" not in help_of(capsys, "-h", resumable=False)


def test_help_of_a_recipe_shows_docstrings_and_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "toy-large", "--help")
    for words in (
        "--optim.lr FLOAT",
        "Peak learning rate. (default: 0.25)",
        "What the run is called.",
        "--dry-run",
    ):
        assert words in text
    assert "is off here" not in text
    small = help_of(capsys, "toy-small", "--help")
    assert "'lora' is off here; any --lora.FIELD switches it on, from its defaults." in small
    assert "Rank of the update. (default: 8)" in small


def fail(error: BaseException) -> Callable[[], int]:
    def program() -> int:
        raise error

    return program


def test_warnings_of_whets_own_are_lines_told_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def warn() -> None:
        for name in ("a", "a", "b"):
            warnings.warn_explicit(f"{name}: all zero", UserWarning, cli.__file__, 1, registry={})
        with pytest.warns(UserWarning, match="theirs"):
            warnings.warn_explicit("theirs", UserWarning, str(tmp_path / "x.py"), 1, registry={})

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.guard(warn) == 0
    assert capsys.readouterr().err == "whet: warning: a: all zero\nwhet: warning: b: all zero\n"


def test_guard_turns_ends_into_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.guard(lambda: None) == 0
    assert cli.guard(lambda: 3) == 3
    assert cli.guard(fail(SystemExit(0))) == 0
    assert cli.guard(fail(UserError("no \x1b[31m such\nthing \udc80"))) == 2
    assert capsys.readouterr().err == "whet: error: no \\x1b[31m such\\nthing \\udc80\n"
    assert cli.guard(fail(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "whet: interrupted\n"
    before = signal.getsignal(signal.SIGTERM)
    assert cli.guard(lambda: signal.raise_signal(signal.SIGTERM)) == 143
    assert capsys.readouterr().err == "whet: stopped by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(ValueError, match="^a bug of ours$"):
        cli.guard(fail(ValueError("a bug of ours")))


def test_an_interrupt_names_a_command_that_works(tmp_path: Path) -> None:
    """In the preflight there is no run yet, and nothing to resume."""

    def main(config: Any, *, resume: bool | int) -> None:
        raise KeyboardInterrupt

    program = replace(__main__.COMMANDS["rl"].load(), main=main)
    config = SimpleNamespace(out=str(tmp_path / "run"))
    with pytest.raises(KeyboardInterrupt, match="nothing was begun: the same command starts it again"):
        __main__._start(program, config, False)
    # An evaluation of several tasks, and seeds of a recipe, have their config.yaml one folder below.
    (tmp_path / "run" / "gsm8k").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt, match="with --resume goes on"):
        __main__._start(program, config, False)


def test_what_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number, reason in (
        (errno.ENOSPC, "No space left on device"),
        (errno.EDQUOT, "Disk quota exceeded"),
        (errno.EFBIG, "File too large"),
    ):
        assert cli.guard(fail(OSError(number, os.strerror(number), "runs/a/metrics.jsonl"))) == 2
        line = f"runs/a/metrics.jsonl: cannot be written ({reason}); free space, then --resume"
        assert capsys.readouterr().err == f"whet: error: {line}\n"
        assert cli.guard(fail(OSError(number, os.strerror(number)))) == 2
        assert capsys.readouterr().err.startswith(f"whet: error: a file: cannot be written ({reason})")
    foreign = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert cli.guard(fail(foreign)) == 2
    assert "a file: cannot be written (No space left on device); free space" in capsys.readouterr().err
    for name, reason in (("none", "No such file or directory"), (".", "Is a directory")):
        assert cli.guard(lambda name=name: print((tmp_path / name).read_text())) == 2
        line = f"{tmp_path / name}: {reason}; check the path and its permissions"
        assert capsys.readouterr().err == f"whet: error: {line}\n"
    assert cli.guard(fail(PermissionError(errno.EACCES, "Permission denied", "/root/a\nb"))) == 2
    assert "error: /root/a\\nb: Permission denied; check" in capsys.readouterr().err
    for bug in (OSError("no number"), OSError(errno.EINVAL, "Invalid argument"), TimeoutError("x")):
        with pytest.raises(OSError):  # noqa: PT011 (these are bugs of ours, whatever they say)
            cli.guard(fail(bug))


def test_a_full_disk_under_a_real_write_is_one_line(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; from pathlib import Path; from whet import cli\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99))\n"
        "sys.exit(cli.guard(lambda: print(Path(sys.argv[1]).write_text('x' * 1000))))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("cannot be written (File too large); free space, then --resume\n")
    assert done.stderr.count("\n") == 1


def test_words_that_no_file_system_takes() -> None:
    for word in ("{" * 5000, "a/" + "b" * 5000, "x" * 300 + ".yaml", "/" + "y" * 300):
        with pytest.raises(UserError) as caught:
            cli.parse("whet rl", Toy, {"demo": lambda: Toy(name="x")}, [word])
        assert len(str(caught.value)) < 700, word
    with pytest.raises(UserError, match="unexpected argument") as caught:
        cli.parse("whet rl", Toy, {"demo": lambda: Toy(name="x")}, ["demo", "w" * 5000])
    assert len(str(caught.value)) < 300


def test_a_closed_pipe_is_silent() -> None:
    code = "import sys; from whet import cli; sys.exit(cli.guard(lambda: print('x' * 10)))"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as stdout:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_command_table(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"]):
        assert __main__.main(argv) == 0
        out = capsys.readouterr().out
        assert all(f"  {name} " in out and row.help in out for name, row in __main__.COMMANDS.items())
    assert __main__.main(["--version"]) == 0
    assert capsys.readouterr().out == f"whet {__version__}\n"
    assert __main__.main(["stf"]) == 2
    assert capsys.readouterr().err == (
        "whet: error: unknown command 'stf' for 'whet'; did you mean 'sft'? (whet --help lists all)\n"
    )


def test_dry_run_and_resume_reach_the_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    program = __main__.Program(
        config_class=Toy,
        main=lambda config, *, resume: calls.append((config, resume)),
        recipes=RECIPES,
        plan=lambda config: f"the plan of {config.name}",
        resumable=True,
    )
    monkeypatch.setitem(__main__.COMMANDS, "toy", __main__.Command(load=lambda: program, help="a toy"))
    assert __main__.main(["toy", "toy-small", "--dry-run"]) == 0
    assert capsys.readouterr().out == cli.dump_yaml(SMALL) + "# the plan of small\n"
    assert calls == []
    assert __main__.main(["toy", "toy-small", "--resume"]) == 0
    assert __main__.main(["toy", "toy-small", "--name", "x"]) == 0
    assert calls == [(SMALL, True), (replace(SMALL, name="x"), False)]
    assert __main__.main(["toy", "toy-small", "--help"]) == 0
    assert "Peak learning rate." in capsys.readouterr().out
    plain = __main__.Program(config_class=Optim, main=calls.append)
    monkeypatch.setitem(__main__.COMMANDS, "plain", __main__.Command(load=lambda: plain, help="no recipe"))
    assert __main__.main(["plain", "--lr", "7"]) == 0
    assert calls[-1] == Optim(lr=7.0)
    assert __main__.main(["plain", "--lr", "0"]) == 2
    assert capsys.readouterr().err == "whet: error: whet plain: lr=0.0, expected > 0\n"


@dataclass(frozen=True, kw_only=True)
class Words:
    """Words that need no option."""

    models: tuple[str, ...]
    """All of them."""
    name: str = ""
    """One of them."""


def test_words_without_an_option() -> None:
    def models(*argv: str) -> Words:
        return cli.parse("whet toy", Words, {}, argv, positional="models").config

    assert models("a", "b", "--name", "x") == Words(models=("a", "b"), name="x")
    assert models("--name", "x", "--models", "a") == Words(models=("a",), name="x")
    with pytest.raises(UserError, match="needs a MODEL after it"):
        models()
    one = cli.parse("whet toy", Words, {}, ["x", "--models", "a"], positional="name").config
    assert one == Words(models=("a",), name="x")
    with pytest.raises(UserError, match="unexpected argument 'y'"):
        cli.parse("whet toy", Words, {}, ["x", "y", "--models", "a"], positional="name")


# What the machine refuses.


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
            "out of memory",
        ),
        (RuntimeError("std::bad_alloc"), "out of memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "out of memory"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "no further process or thread"),
        (RuntimeError("can't start new thread"), "no further process or thread"),
        (RuntimeError("unable to start watchdog thread"), "no further process or thread"),
        (RuntimeError("a fault of ours"), ""),
        (ValueError("out of memory"), ""),
        (OSError(errno.ENOENT, "No such file or directory"), ""),
    ],
)
def test_a_bound_of_the_machine_is_one_line(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.exhausted(error).startswith(said)
    assert bool(cli.exhausted(error)) == bool(said)

    def fail() -> None:
        raise error

    if said:
        assert cli.guard(fail) == 2
        assert capsys.readouterr().err.startswith(f"whet: error: {said}")


@pytest.mark.parametrize("step", [0, 40])
def test_who_runs_out_of_memory_hears_what_was_saved(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: Kept, *, resume: bool) -> None:
        if step:
            saved = Path(config.out, "checkpoints", f"step_{step:08d}")
            saved.mkdir(parents=True)
            (saved / "manifest.json").touch()
        raise MemoryError

    toy = cli.Program(
        config_class=Kept, main=train, recipes={"toy": lambda: Kept(out="x")}, resumable=True, shared=True
    )
    monkeypatch.setitem(__main__.COMMANDS, "toy", __main__.Command(load=lambda: toy, help=""))
    assert __main__.main(["toy", "toy", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("whet: error: out of memory")
    assert said.count("\n") == 1
    saved = f"; step 40 is saved in {tmp_path}/run: --resume goes on from it\n"
    assert said.endswith(saved if step else "; no step was saved\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_as_dev_null(closed: str, tmp_path: Path) -> None:
    """The file that is opened next must not become what is printed to."""
    code = "from whet.__main__ import keep_streams; keep_streams(); import sys; file = open(sys.argv[1], 'w')"
    code += "; print('out'); print('err', file=sys.stderr); sys.stdin.read(); sys.stdout.isatty(); file.write('mine')"
    path = tmp_path / "file"
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code, str(path)]
    assert subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, check=False).returncode == 0
    assert path.read_text() == "mine"


@pytest.mark.parametrize("module", ["fcntl", "resource", "termios"])
def test_another_system_is_one_line(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert __main__.main(["rl", "demo"]) == 2
    assert capsys.readouterr().err == "whet: error: whet runs on Linux and macOS; on Windows use WSL2\n"
    assert __main__.main(["--help"]) == 0
    with pytest.raises(UserError, match="on Windows use WSL2"):
        _ = install.NoPosix().flock


@pytest.mark.ci
def test_every_module_can_be_imported_without_posix_modules() -> None:
    code = """
import importlib, pkgutil, sys
import psutil  # the one for Windows needs none of them
sys.modules |= dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios"))
import whet
names = [found.name for found in pkgutil.walk_packages(whet.__path__, "whet.")]
for name in names:
    if ".triton" not in name and not name.endswith("__main__"):
        importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_without_docstrings_has_them_from_the_source(tmp_path: Path) -> None:
    source = "from dataclasses import dataclass\n@dataclass\nclass Toy:\n    'A toy.'\n    name: str\n"
    (tmp_path / "toys.py").write_text(source)
    code = "import toys; from whet import cli; print(toys.Toy.__doc__ + '|' + cli._documentation(toys.Toy))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}
    for level, said in (("-O", "A toy.|A toy.\n"), ("-OO", "Toy(name: str)|A toy.\n")):
        words = [sys.executable, level, "-c", code]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
        assert done.stdout == said


@pytest.mark.parametrize("word", ["~no-such-user/model", "~no-such-user"])
def test_the_home_of_nobody_is_a_folder_that_is_not_there(word: str) -> None:
    assert user_path(word) == Path(word)
    assert user_path("~/model") == Path(os.environ["HOME"]) / "model"
