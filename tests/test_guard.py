"""bench/guard.py: a ratio that falls by more than 20 % fails, noise gets a second chance, --update writes the file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FAKE = """
import json, pathlib, sys
words = sys.argv[1:]
assert words[0] == "--quick", words
place = pathlib.Path(__file__)
ratios = json.loads((place.parent / "ratios.json").read_text())[place.stem]
count = place.with_suffix(".count")
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
if ratios == "fails":
    sys.exit(2)
ratio = ratios[min(number, len(ratios) - 1)]
ratio = ratio if isinstance(ratio, dict) else {"a": ratio}
if place.stem == "memory":
    rows = [{"model": "a", "fastest": {"peer": "TRL, bfloat16", "ratio": ratio["a"], "target": 0.4}}]
else:
    rows = [{"case": name, "model": name, "peer": "TRL, float32", "ratio": ratio[name], "target": 4} for name in ratio]
json.dump({"rows": rows}, open(words[words.index("--json") + 1], "w"))
"""


ROWS: dict[str, list[dict[str, Any]]] = {
    "grpo_step": [{"case": "a 8x8x64", "precision": "float32", "peer": "TRL, float32", "ratio": 5.0, "target": 4.0}],
    "sft_step": [{"model": "a", "peer": "TRL, float32, packed", "ratio": 1.2, "target": 1.5}],
    "generate": [
        {"model": "c", "batch": 8, "hf_ratio": 4.0, "hf_best": "bfloat16", "vllm_ratio": 1.0, "share_of_floor": 0.5},
        {"model": "c", "batch": 1, "hf_ratio": 2.0, "hf_best": "float32", "vllm_ratio": 0.9, "share_of_floor": 0.1},
    ],
    "memory": [
        {
            "model": "c",
            "precision": "bfloat16_master",
            "fastest": {"peer": "TRL, bfloat16", "ratio": 0.25, "target": 0.4, "ratio_with_imports": 0.5},
            "leanest": {"peer": "TRL, bfloat16, 1 at a time", "ratio": 0.5, "target": 0.8, "ratio_with_imports": 0.7},
            "sides": {"whet": {"gib": 1.0, "seconds": 2.0, "changed": 1.0}},
        }
    ],
    "mfu": [{"model": "b", "precision": "float32", "mfu": 0.55, "target": 0.6}],
}  # fmt: skip
"""What the programs of bench/ write."""


@pytest.fixture(scope="module")
def guard() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "bench" / "guard.py"
    spec = importlib.util.spec_from_file_location("guard", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Case:
    """A folder of fake programs and a file of committed ratios."""

    def __init__(self, guard: ModuleType, folder: Path) -> None:
        self.guard, self.folder, self.file = guard, folder, folder / "committed" / "bench.json"

    def run(self, committed: dict[str, float] | None, *words: str, **ratios: object) -> int:
        for name in ratios:
            (self.folder / f"{name}.py").write_text(FAKE)
            (self.folder / f"{name}.count").unlink(missing_ok=True)
        (self.folder / "ratios.json").write_text(json.dumps(ratios))
        if committed is not None:
            self.file.parent.mkdir(exist_ok=True)
            self.file.write_text(json.dumps({"sets": {self.guard.processor(): {"rows": committed}}}))
        options = ["--folder", str(self.folder), "--file", str(self.file), "--programs", *ratios]
        return self.guard.main([*options, *words])

    def runs(self, name: str) -> int:
        file = self.folder / f"{name}.count"
        return int(file.read_text()) if file.exists() else 0


@pytest.fixture
def case(guard: ModuleType, tmp_path: Path) -> Case:
    return Case(guard, tmp_path)


def test_every_kind_of_row_by_hand(guard: ModuleType) -> None:
    assert {program: list(guard.ratios(program, rows)) for program, rows in ROWS.items()} == {
        "grpo_step": [("grpo_step a 8x8x64 vs TRL", 5.0, 4.0)],
        "sft_step": [("sft_step a vs TRL", 1.2, 1.5)],
        "generate": [
            ("generate c batch 8 vs HF", 4.0, 3.0),
            ("generate c batch 8 vs vLLM", 1.0, 1.1),
            ("generate c batch 1 vs HF", 2.0, 3.0),
            ("generate c batch 1 vs vLLM", 0.9, None),
        ],
        "memory": [("memory c fastest vs TRL", 4.0, 2.5), ("memory c leanest vs TRL", 2.0, 1.25)],
        "mfu": [("mfu b float32", 0.55, 0.6)],
    }


def test_the_programs_are_there(guard: ModuleType) -> None:
    for name in guard.PROGRAMS:
        assert (guard.FOLDER / f"{name}.py").is_file(), name


def test_what_fell_is_printed_and_fails(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    before = {"grpo_step a vs TRL": 4.0, "sft_step a vs TRL": 2.0}
    assert case.run(before, grpo_step=[3.1], sft_step=[1.7]) == 1
    printed = capsys.readouterr().out
    assert "fell: grpo_step a vs TRL: 4.00 before, 3.10 now (-22%)" in printed
    assert "sft_step" not in printed
    assert f"1 of 2 ratios of {case.guard.processor()} within 20%" in printed
    assert (case.runs("grpo_step"), case.runs("sft_step")) == (2, 1)  # what fell was measured again


def test_a_fifth_less_is_no_regression(case: Case) -> None:
    before = {"grpo_step a vs TRL": 4.0, "sft_step a vs TRL": 2.0}
    assert case.run(before, grpo_step=[3.21], sft_step=[9.0]) == 0
    assert case.run(before, grpo_step=[3.19], sft_step=[9.0]) == 1


def test_noise_gets_a_second_chance(case: Case) -> None:
    assert case.run({"grpo_step a vs TRL": 4.0}, grpo_step=[2.0, 3.9]) == 0
    assert case.run({"grpo_step a vs TRL": 4.0}, grpo_step=[2.0, 2.1]) == 1
    both = {"grpo_step a vs TRL": 4.0, "grpo_step b vs TRL": 4.0}
    assert case.run(both, grpo_step=[{"a": 2.0, "b": 4.0}, {"a": 4.0, "b": 2.0}]) == 0


def test_less_memory_is_better(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """Committed is TRL's memory over whet's; the program prints whet's over TRL's."""
    assert case.run({"memory a fastest vs TRL": 4.0}, memory=[0.25]) == 0
    assert case.run({"memory a fastest vs TRL": 4.0}, memory=[0.2]) == 0
    assert case.run({"memory a fastest vs TRL": 4.0}, memory=[0.35]) == 1
    assert "4.00 before, 2.86 now" in capsys.readouterr().out


def test_what_is_not_measured_any_more_fails(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    before = {"grpo_step a vs TRL": 4.0, "grpo_step b vs TRL": 3.0}
    assert case.run(before, grpo_step=[4.0]) == 1
    assert "grpo_step b vs TRL: 3.00 before, not measured now" in capsys.readouterr().out
    assert case.run({"sft_step a vs TRL": 9.0}, grpo_step=[4.0]) == 0  # of a program that was not asked for
    assert "new, not committed yet: grpo_step a vs TRL: 4.00" in capsys.readouterr().out


def test_another_processor_is_held_to_the_targets(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"sets": {"vax": {"rows": {"grpo_step a vs TRL": 99.0}}}}
    case.file.parent.mkdir()
    case.file.write_text(json.dumps(other))
    assert case.run(None, grpo_step=[3.3]) == 0
    assert "no ratios are committed for" in capsys.readouterr().out
    assert case.run(None, grpo_step=[3.1]) == 1
    assert "fell: grpo_step a vs TRL: 4.00 before, 3.10 now" in capsys.readouterr().out
    assert case.run(None, "--update", grpo_step=[2.0]) == 0
    assert json.loads(case.file.read_text())["sets"]["vax"] == other["sets"]["vax"]
    assert rows_of(case)["rows"] == {"grpo_step a vs TRL": 2.0}
    assert case.run(None, grpo_step=[1.9]) == 0  # what a processor reached counts, not the target


def rows_of(case: Case) -> dict:
    return json.loads(case.file.read_text())["sets"][case.guard.processor()]


def test_update_writes_the_file(case: Case) -> None:
    assert case.run(None, "--update", grpo_step=[4.0], memory=[0.25]) == 0
    content = rows_of(case)
    assert content["rows"] == {"grpo_step a vs TRL": 4.0, "memory a fastest vs TRL": 4.0}
    assert content["machine"]["torch"]
    assert case.run(None, grpo_step=[4.0], memory=[0.25]) == 0
    assert case.run(None, "--update", grpo_step=[1.0]) == 0  # a fall is accepted; what was not measured stays
    assert rows_of(case)["rows"] == {"grpo_step a vs TRL": 1.0, "memory a fastest vs TRL": 4.0}


def test_errors_are_one_line(case: Case) -> None:
    with pytest.raises(SystemExit, match="does not exist; write it with --update"):
        case.run(None, grpo_step=[4.0])
    with pytest.raises(SystemExit, match=r"grpo_step\.py ended with status 2"):
        case.run({}, grpo_step="fails")
    case.file.write_text('{"sets": [1]}')
    with pytest.raises(SystemExit, match=r'expected \{"sets": \{processor: \{"rows"'):
        case.run(None, grpo_step=[4.0])
