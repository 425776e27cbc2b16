"""`whet bench`: the right programs with the right words, every kind of row read right, what is missing said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whet.__main__ import COMMANDS, Command, Program, run
from whet.inspect import bench
from whet.inspect.bench import PROGRAMS, BenchConfig, Result, main, results, select, table
from whet.install import install_command
from whet.types import UserError

ROWS: dict[str, list[dict[str, Any]]] = {
    "grpo_step": [
        {
            "case": "a 8x8x64",
            "precision": "float32",
            "peer": "TRL, float32",
            "ratio": 5.0,
            "target": 4.0,
            "floor_ratio": 20.0,
            "share_of_floor": 0.25,
        }
    ],
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
            "leanest": {"peer": "TRL, bfloat16, 1 at a time", "ratio": 0.5, "target": 0.6, "ratio_with_imports": 0.7},
            "sides": {"whet": {"gib": 1.0, "seconds": 2.0, "changed": 1.0}},
        }
    ],
    "mfu": [{"model": "b", "precision": "float32", "mfu": 0.55, "target": 0.6}],
}  # fmt: skip
FAKE = """
import json, sys
words = sys.argv[1:]
file = words[words.index("--json") + 1]
print("measuring <b>", *words[: words.index("--json")], flush=True)
json.dump({{"facts": {{"words": words}}, "rows": {rows}}}, open(file, "w"))
if {fails}:
    sys.exit(3)
"""


def fake_programs(folder: Path, rows: dict[str, Any] = ROWS, fails: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "sides.py").touch()
    for name, content in rows.items():
        (folder / f"{name}.py").write_text(FAKE.format(rows=repr(content), fails=name == fails))
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The command, a bench folder of fakes, and the peers that are there."""
    there = {"trl", "hf", "vllm"}
    program = Program(config_class=BenchConfig, main=main)
    monkeypatch.setitem(COMMANDS, "bench", Command(load=lambda: program, help="bench"))
    monkeypatch.setattr(bench, "BENCH", fake_programs(tmp_path / "bench"))
    monkeypatch.setattr(bench, "is_installed", lambda peer: peer in there)
    return there


def test_every_kind_of_row_by_hand() -> None:
    (grpo,), (sft,), (memory, _), (mfu,) = (
        results(name, ROWS[name]) for name in ("grpo_step", "sft_step", "memory", "mfu")
    )
    assert grpo == Result("grpo_step", "a 8x8x64", "TRL, float32", 5.0, 4.0, 20.0, 0.25)
    assert grpo.name == "grpo_step a 8x8x64 vs TRL"
    assert (sft.is_met, grpo.is_met, memory.is_met, mfu.is_met) == (False, True, True, False)
    assert memory.ratio == 4.0  # more is better
    assert (mfu.ratio, mfu.name, mfu.peer) == (0.55, "mfu b float32", "")
    hf, vllm, first, second = results("generate", ROWS["generate"])
    assert (hf.name, hf.value, hf.target, hf.floor) == ("generate c batch 8 vs HF", 4.0, 3.0, 8.0)
    assert (vllm.name, vllm.target, vllm.is_met) == ("generate c batch 8 vs vLLM", 1.1, False)
    assert (first.is_met, second.target, second.is_met) == (
        False,
        None,
        None,
    )  # no target for vLLM at batch 1
    names = [result.name for name, rows in ROWS.items() for result in results(name, rows)]
    assert len(set(names)) == len(names)


def test_one_table_of_everything(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], installed: set[str]
) -> None:
    out = tmp_path / "out"
    assert (
        run(["bench", "--quick", "--threads", "1", "--models", "a", "--repeats", "2", "--out", str(out)]) == 0
    )
    printed = capfd.readouterr().out
    for words in (
        "measuring <b> --quick --models a --repeats 2 --threads 1\n",
        "measuring <b> --quick --models a --repeats 2 --threads 1 --against hf vllm\n",
    ):
        assert words in printed
    lines = {line[:48].strip(): line[48:].split() for line in printed.splitlines()}
    assert lines["GRPO step a 8x8x64"] == ["TRL,", "float32", "5.00x", "4.00x", "20.00x", "25", "%", "met"]
    assert lines["memory of a GRPO step c fastest"][-3:] == ["0.25x", "<=0.40x", "met"]
    assert lines["training MFU b float32"] == ["matmul", "peak", "55", "%", "60", "%", "missed"]
    content = json.loads((out / "bench.json").read_text())
    assert content["rows"]["memory c fastest vs TRL"] == 4.0
    assert content["rows"]["grpo_step a 8x8x64 vs TRL"] == 5.0
    assert content["programs"]["mfu"]["facts"]["words"][0] == "--quick"
    assert content["quick"] is True
    page = (out / "bench.html").read_text()
    assert page.count('class="badge good"') == 4
    assert page.count('class="badge bad"') == 4
    assert page.count('class="ratio"') == 9
    told = (
        "GRPO step 5.0 times as fast as TRL; SFT step 1.2 times as fast as TRL; generation 2.0 to 4.0 times as fast as "
        "transformers; generation 0.90 to 1.0 times as fast as vLLM; memory of a GRPO step 0.25 to 0.50 of TRL&#39;s."
    )
    assert f'<p class="headline">{told}</p>' in page
    assert told.replace("&#39;", "'") in printed
    # One scale for all bars of a kind of work: generation's widest is a floor of 20 (2.0 at a tenth of it).
    assert '<rect width="40.0" y="2" height="12"></rect>' in page
    assert '<rect width="20.0" y="2" height="12"></rect>' in page


def test_peers_choose_the_programs(installed: set[str]) -> None:
    assert set(select(BenchConfig())[0]) == set(PROGRAMS)
    assert select(BenchConfig(against=("hf",)))[0] == {"generate": ["--against", "hf"], "mfu": []}
    assert set(select(BenchConfig(against=("trl,hf",)))[0]) == set(PROGRAMS)
    assert select(BenchConfig(against=("trl,hf",)))[0]["generate"] == ["--against", "hf"]
    assert select(BenchConfig(programs=("mfu",), against=("trl",)))[0] == {"mfu": []}
    installed -= {"trl", "vllm"}
    chosen, notes = select(BenchConfig())
    assert set(chosen) == {"generate", "mfu"}
    assert notes[0] == f"trl is skipped: not installed; {install_command('peers')}"
    assert "VLLM_PYTHON" in notes[1]
    with pytest.raises(UserError, match="--against trl: not installed; .*pip install .*peers"):
        select(BenchConfig(against=("hf,trl",)))
    installed.clear()
    with pytest.raises(UserError, match="no program of grpo_step has a peer here: .*pip install"):
        select(BenchConfig(programs=("grpo_step",)))


def test_what_is_installed_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"trl": None, "transformers": object()}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found[name])
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    assert [bench.is_installed(peer) for peer in ("trl", "hf", "vllm")] == [False, True, False]
    monkeypatch.setenv("VLLM_PYTHON", "/opt/vllm/bin/python")
    assert bench.is_installed("vllm")


def test_a_program_that_fails_is_not_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], installed: set[str]
) -> None:
    fake_programs(tmp_path / "bench", fails="grpo_step")
    with pytest.raises(SystemExit) as ended:
        run(["bench", "--out", str(tmp_path / "out")])
    assert ended.value.code == 1
    printed = capfd.readouterr().out
    assert "grpo_step.py ended with status 3" in printed
    assert "failed: grpo_step" in printed
    content = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert content["failed"] == ["grpo_step"]
    assert set(content["programs"]) == set(PROGRAMS) - {"grpo_step"}


def test_a_wheel_says_where_the_programs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BENCH", tmp_path / "site-packages" / "bench")
    with pytest.raises(UserError, match=r"not part of the installed package .* get the repository"):
        main(BenchConfig(out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_what_is_refused() -> None:
    for options, words in (
        ({"against": ("jax",)}, "against: got jax, expected some of trl, hf, vllm"),
        ({"programs": ("x",)}, "programs: got x"),
        ({"models": "abz"}, "models = abz: expected some of a, b, c, d"),
        ({"repeats": -1}, "repeats = -1"),
    ):
        with pytest.raises(ValueError, match=words):
            BenchConfig(**options)


def test_the_programs_are_there() -> None:
    """Of this checkout: every program of the table exists and knows the words that it is given."""
    for name in (*PROGRAMS, "sides"):
        assert (bench.BENCH / f"{name}.py").is_file(), name
    assert 'add_argument("--against"' in (bench.BENCH / "generate.py").read_text()


def test_an_empty_table_has_its_head() -> None:
    assert table([]).split() == ["work", "peer", "whet", "target", "floor", "reached"]
