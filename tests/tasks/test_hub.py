"""Data sets of the hub: every named one from recorded rows, what the real package says, streaming, and errors."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import hub
import pytest
from needs import SHARED, needs

import whet
from whet.install import install_command
from whet.tasks.base import OPTIONS, ROW_SETS, TaskConfig, load_task
from whet.tasks.hub import Part, read_hub
from whet.tasks.jsonl import Jsonl
from whet.tasks.math import MATH, last_box
from whet.tasks.sets import HUB_SETS, MATH_SUBJECTS, PAIR_SETS
from whet.train.data.pairs import read_pair_rows
from whet.types import Problem, Task, UserError

DATA = SHARED / "data/math"


def all_of(task: Task) -> list[Problem]:
    return [problem for split in ("train", "dev", "test") for problem in task.problems(split)]


def named(patch: pytest.MonkeyPatch, name: str, **options: Any) -> list[Problem]:
    hub.install(patch)
    return sorted(all_of(load_task(TaskConfig(name=name, **options))), key=lambda p: int(p.meta["line"]))


@pytest.mark.parametrize("name", HUB_SETS)
def test_every_named_set_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name alone, from rows of its schema; a gold answer is right, another is not."""
    there = hub.install(monkeypatch)
    task = load_task(TaskConfig(name=name))
    problems = all_of(task)
    assert problems
    assert len({problem.uid for problem in problems}) == len(problems)
    loaded = {(path, split) for path, _, split in there.calls}
    assert loaded == {(part.path, part.split) for part in HUB_SETS[name].parts.values()}
    for problem in problems:
        assert problem.task == name
        assert problem.answer or problem.reply or not getattr(task, "needs_gold", True)
        if problem.answer:
            assert task.is_correct(problem, problem.answer)
            assert not task.is_correct(problem, "7919")
        assert not task.is_correct(problem, "")
        assert "<think>" not in problem.solution


def test_the_table_is_what_is_recorded() -> None:
    """Every part of the table is there in the recorded rows, under the same configuration and split."""
    recorded = hub.recorded()
    parts = [part for one in (*HUB_SETS.values(), *PAIR_SETS.values()) for part in one.parts.values()]
    for part in parts:
        for config in part.configs or ("default",):
            configs = recorded[part.path]
            assert part.split in configs.get(config, next(iter(configs.values()))), part
    assert {part.path for part in parts} == set(recorded)
    assert set(ROW_SETS) < set(HUB_SETS) < set(OPTIONS)


def test_gsm8k(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = named(monkeypatch, "gsm8k")
    assert problems[0].answer in ("72", "18")
    assert {p.meta["file"] for p in problems} == {"openai/gsm8k"}


def test_math_is_all_seven_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows have no answer column: it is the last box; the row that boxes nothing is left out and counted."""
    there = hub.install(monkeypatch)
    task = MATH()
    train = [*task.problems("train"), *task.problems("dev")]
    assert [config for _, config, _ in there.calls] == list(MATH_SUBJECTS)
    assert len({p.meta["subject"] for p in train}) == 7
    assert len(train) == 14
    assert [row.reason for row in task.bad_rows] == ["'answer' is empty"]
    assert all(p.answer == last_box(p.solution) != "" for p in train)
    assert len(task.problems("test")) == 4
    assert there.calls[-1][0] == "HuggingFaceH4/MATH-500"
    old = MATH("EleutherAI/hendrycks_math")  # as recipes of earlier versions have it
    assert [p.uid for p in old.problems("train")] == [p.uid for p in task.problems("train")]


def test_last_box() -> None:
    assert last_box(r"\boxed{1} or \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert last_box(r"\boxed{\text{a \{b\}}}") == r"\text{a \{b\}}"
    assert last_box(r"so $\boxed 5$.") == "5"
    assert last_box(r"\fbox{7}") == "7"
    assert last_box(r"\boxed{") == last_box("no box") == ""


@needs("shared/data/math")
def test_the_last_box_is_the_published_answer() -> None:
    rows = [json.loads(line) for line in (DATA / "MATH_train.jsonl").read_text().splitlines()]
    rows += json.loads((DATA / "math500_test.json").read_text())
    assert len(rows) == 8000
    assert all(last_box(row["solution"]) == row["answer"] for row in rows)


def test_dapo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its instruction is taken off, and rows that are repeated a hundred times count once."""
    problems = named(monkeypatch, "dapo_math")
    assert [(p.prompt, p.answer, p.messages) for p in problems] == [
        ("What is $3^4$?", "81", ()),
        ("What is $5!$?", "120", ()),
    ]


def test_openr1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reasoning of the first generation that is whole and right; proofs have no answer."""
    problems = named(monkeypatch, "openr1_math")
    assert [(p.answer, p.solution) for p in problems] == [
        ("15", "7 and 8 are 15."),
        ("-3", "6 less 9 is -3."),
        ("22", "It is $22$."),  # no generation is both: the published solution
    ]
    assert len(named(monkeypatch, "openr1_math", config="extended")) == 1
    assert len(named(monkeypatch, "openr1_math", config="all", split="extended")) == 1


def test_openmathreasoning_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = named(monkeypatch, "openmathreasoning", max_rows=3)
    assert hub.Stream.num_read == 3
    assert [(p.answer, p.solution) for p in problems][0] == ("156", "12 times 13 is 156.")
    assert len(named(monkeypatch, "openmathreasoning")) == 4  # bounded without being told to
    assert hub.Stream.num_read == 4
    assert [p.answer for p in named(monkeypatch, "openmathreasoning", split="tir")] == ["1024"]


def test_numina(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = named(monkeypatch, "numina_math")
    assert [p.answer for p in problems] == ["81", r"\frac{5}{6}"]


def test_amc_numbers_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [p.answer for p in named(monkeypatch, "amc")] == ["49", "144", "2.5"]


def test_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = named(monkeypatch, "ultrachat")
    chats = {p.prompt: (len(p.messages), p.reply, p.answer) for p in (first, second, third)}
    assert chats == {
        "And a soft one?": (3, "Five minutes are enough.", ""),
        "Name a river.": (0, "The Danube.", ""),
        "How deep is it?": (3, "About 251 metres.", ""),
    }
    boxed, system = named(monkeypatch, "tulu3")
    assert (boxed.reply, boxed.answer) == (r"3 times 4 is $\boxed{12}$.", "")  # a chat stays as it is
    assert [m.role for m in system.messages] == ["system", "user", "assistant", "user"]


def test_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    there = hub.install(monkeypatch)
    for source in ("ultrafeedback", "HuggingFaceH4/ultrafeedback_binarized"):
        if source == "ultrafeedback":
            rows, bad = read_pair_rows(source)
            assert [row["chosen"][-1]["content"] for _, row in rows] == [
                "The capital of France is Paris.",
                "Large.",
            ]
            assert bad == []
        else:
            with pytest.raises(UserError, match="choose one with --task.split"):
                read_pair_rows(source)
    assert there.calls == [("HuggingFaceH4/ultrafeedback_binarized", "default", "train_prefs")]


def test_any_other_set(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"{n}+1?", "answer": n + 1} for n in range(40)]
    hub.install(
        monkeypatch,
        owner__both={"default": {"train": rows[:30], "test": rows[30:]}},
        owner__one={"default": {"everything": rows}},
        owner__odd={"default": {"train_a": rows, "train_b": rows[:1]}},
        owner__multi={"a": {"train": rows[:1]}, "b": {"train": rows[1:3]}},
    )

    def counts(**options: Any) -> list[int]:
        task = load_task(TaskConfig(name=options.pop("name", "hub"), **options))
        return [len(task.problems(split)) for split in ("train", "dev", "test")]

    both = counts(path="owner/both")
    assert (both[0] + both[1], both[2]) == (30, 10)
    assert counts(path="owner/one") == [35, 3, 2]  # by the hash of each prompt
    assert sum(counts(path="owner/odd", split="train_a")) == 40
    assert sum(counts(path="owner/multi", config="b")) == 2
    other = counts(path="owner/both", name="jsonl")  # a task's name enters the hash of its problems
    assert (other[0] + other[1], other[2]) == (30, 10)
    assert sum(counts(path="owner/one", max_rows=7)) == 7
    assert sum(counts(path="openai/gsm8k")) == 7  # the table knows its configuration
    assert sum(counts(path="openai/gsm8k", config="socratic", split="train")) == 1


def test_what_the_hub_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": "1+1?", "answer": "2"}]
    hub.install(
        monkeypatch,
        owner__multi={"a": {"train": rows}, "b": {"train": rows}},
        owner__odd={"default": {"train_a": rows, "train_b": rows}},
        owner__one={"default": {"train": rows}},
    )

    def fault(path: str, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            load_task(TaskConfig(name="hub", path=path, **options)).problems("train")
        return str(caught.value)

    assert fault("owner/multi") == (
        "data set 'owner/multi' has several configurations: choose one of a, b with --task.config"
    )
    assert fault("owner/multi", config="c") == (
        "data set 'owner/multi' has no configuration 'c': choose one of a, b with --task.config"
    )
    assert fault("owner/multi", split="train") == fault("owner/multi")
    for options in ({}, {"max_rows": 3}):
        assert fault("owner/one", split="dev", **options) == (
            "data set 'owner/one' has no split 'dev': choose one of train with --task.split"
        )
    assert fault("owner/odd") == (
        "data set 'owner/odd' has the splits train_a, train_b: choose one with --task.split"
    )
    assert fault("owner/none") == (
        "data set 'owner/none': could not be loaded from the hub "
        "(Dataset 'owner/none' doesn't exist on the Hub or cannot be accessed.)"
    )
    assert "is a gated dataset on the Hub. You must be authenticated" in fault("owner/gated")
    assert "Couldn't reach 'owner/far' on the Hub" in fault("owner/far")
    assert "Dataset scripts are no longer supported" in fault("livecodebench/code_generation_lite")
    assert fault("owner/one", prompt="ask").startswith("owner/one train: no column 'ask'")
    with pytest.raises(UserError, match="task.split is for data sets of the hub"):
        Jsonl(Path(__file__), split="train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert fault("owner/one") == (
        f"data set 'owner/one': no such folder; to read it from the hub, {install_command('hf')}"
    )


def test_the_network_may_fail_while_rows_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = hub.install(monkeypatch)

    def broken(*_: Any, **__: Any) -> Any:
        yield {"q": "x"}
        raise ConnectionError("the connection was reset")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", broken)
    with pytest.raises(UserError, match=r"could not be loaded from the hub \(the connection was reset\)"):
        read_hub(Part(path="owner/any", split="train"), required=["q"], max_rows=5)
    assert there.calls == []


def as_folder(folder: Path, configs: dict[str, hub.Splits]) -> Path:
    """Write a set as a folder that the real package loads: a file a split, and a card that lists configurations."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            path = folder / config / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            lines += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder


def without_nulls(value: Any) -> Any:
    """The real package adds columns that other rows have, as null."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def told(call: Any) -> str:
    """Return an error's type and text, without the name of the set; '' for none."""
    try:
        call()
    except Exception as error:
        return re.sub(r"Example of usage.*", "", f"{type(error).__name__}: {error}", flags=re.DOTALL)
    return ""


@pytest.mark.ci
def test_the_stand_in_is_true(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real package gives the same rows and the same errors."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(importlib.import_module("datasets.config"), "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    recorded = hub.recorded()
    chosen = ("EleutherAI/hendrycks_math", "open-r1/OpenR1-Math-220k", "google/IFEval")
    chosen += ("BytedTsinghua-SIA/DAPO-Math-17k",)
    for path in chosen:
        configs = {
            name: {split: rows for split, rows in splits.items() if rows}
            for name, splits in recorded[path].items()
        }
        fake = hub.Hub({"x/set": configs})
        folder = str(as_folder(tmp_path / path.replace("/", "_"), configs))
        name = list(configs)[-1]
        split = next(iter(configs[name]))
        for streaming in (False, True):
            options: Any = {"split": split, "streaming": streaming}
            theirs = list(datasets.load_dataset(folder, name, **options))
            assert without_nulls(theirs) == without_nulls(list(fake.load_dataset("x/set", name, **options)))
            for config, wanted in ((None, split), ("none", split), (name, "none")):
                options["split"] = wanted
                real = told(
                    lambda f=folder, c=config, o=dict(options): list(datasets.load_dataset(f, c, **o))
                )
                ours = told(lambda h=fake, c=config, o=dict(options): list(h.load_dataset("x/set", c, **o)))
                assert real == ours, (path, config, wanted, streaming)
        for config in (None, name, "none"):
            real = told(lambda f=folder, c=config: datasets.get_dataset_split_names(f, c))
            assert real == told(lambda h=fake, c=config: h.get_dataset_split_names("x/set", c))
        assert datasets.get_dataset_split_names(folder, name) == fake.get_dataset_split_names("x/set", name)
    assert issubclass(datasets.exceptions.DatasetNotFoundError, FileNotFoundError)
    # A copy of the hub's folder on disk is read by its configurations, too.
    task = Jsonl(tmp_path / "open-r1_OpenR1-Math-220k", config="extended")
    assert [p.answer for p in all_of(task)] == ["-3"]


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"{n}+1?", "answer": n + 1} for n in range(30)]
    hub.install(monkeypatch, owner__one={"default": {"train": rows}}, owner__multi={"a": {}, "b": {}})
    task = whet.Task.from_hub("owner/one", prompt="question", answer="answer")
    same = whet.Task.from_rows("owner/one")
    assert [[len(one.problems(split)) for split in ("train", "dev", "test")] for one in (task, same)] == [
        [25, 3, 2]
    ] * 2
    assert len(whet.Task.from_hub("openai/gsm8k", config="main", split="test").problems("train")) == 3
    assert len(whet.Task.from_hub("gsm8k").problems("test")) == 3
    assert whet.Task.from_hub("owner/one", max_rows=5).config.max_rows == 5
    with pytest.raises(UserError, match="not a hub name such as"):
        whet.Task.from_hub("no-owner")
    with pytest.raises(UserError, match="task.prompt is not read by task gsm8k"):
        whet.Task.from_hub("gsm8k", prompt="q")
