"""The notebooks run from top to bottom, on what a reader has: nothing but the package."""

from __future__ import annotations

import json
import linecache
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from whet.config import cache_folder

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = ("adapters", "editing", "baseline_eval", "baseline_analysis", "python_api")


def read(name: str) -> dict[str, Any]:
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))


def run(name: str, folder: Path, **variables: str) -> str:
    """Execute a notebook with a kernel of its own and return its printed text; kernels and pytest share no settings."""
    target = folder / f"{name}.ipynb"
    code = (
        "import sys, nbformat, nbclient\n"
        "notebook = nbformat.read(sys.argv[1], 4)\n"
        "nbformat.validate(notebook)\n"
        "nbclient.NotebookClient(notebook, timeout=240, kernel_name='python3').execute()\n"
        "nbformat.write(notebook, sys.argv[2])\n"
    )
    environment = (
        os.environ | {"OMP_NUM_THREADS": "1", "WHET_NOTEBOOKS": str(folder), "NO_COLOR": "1"} | variables
    )
    command = [sys.executable, "-c", code, str(NOTEBOOKS / f"{name}.ipynb"), str(target)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = [
        output for cell in json.loads(target.read_text())["cells"] for output in cell.get("outputs", ())
    ]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return f"{pictures} pictures\n" + "\n".join(map("".join, texts))


SHORT = {
    r"num_steps=\d+": "num_steps=2",
    r"batch_size=\d+": "batch_size=4",
    r"num_samples=\d+": "num_samples=2",
}
SHORT |= {r"NUM_SAMPLES = 60, 8": "NUM_SAMPLES = 4, 2", r"num_problems=100": "num_problems=4"}
SHORT |= {
    r"num_prompts=\d+": "num_prompts=2",
    r"group_size=\d+": "group_size=2",
    r"\(10, 100\)": "(10, 100, 7)",
}


LATER = (pytest.param("adapters", marks=pytest.mark.slow), pytest.param("editing", marks=pytest.mark.ci))


@pytest.mark.ci
@pytest.mark.parametrize("name", ["python_api", *LATER])
def test_every_cell_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells in this process, with steps and samples cut to a few: what a changed API breaks is seen at once."""
    monkeypatch.setenv("WHET_NOTEBOOKS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("whet.report.markdown.draw_figures", lambda series, folder: [])
    space: dict[str, Any] = {"__name__": name}
    for number, cell in enumerate(read(name)["cells"]):
        code, place = "".join(cell["source"]), f"<{name} {number}>"
        for long, short in SHORT.items():
            code = re.sub(long, short, code)
        if cell["cell_type"] == "code":
            # As a notebook does it: the source of a reward is looked up there.
            linecache.cache[place] = (len(code), None, code.splitlines(keepends=True), place)
            exec(compile(code, place, "exec"), space)
    if name == "python_api":
        assert (tmp_path / "python_api" / "model" / "model.safetensors").is_file()


@pytest.mark.ci
def test_both_notebooks_run_one_after_the_other(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    first = run("baseline_eval", tmp_path)
    assert "60 held-out problems x 8" in first
    assert first.count("gold") == 9
    summary = json.loads((tmp_path / "eval" / "eval.json").read_text())
    second = run("baseline_analysis", tmp_path)
    assert second.startswith("4 pictures\n")  # the curve, lengths, consistency, and letters have levels
    for k, value in summary["pass@k"].items():
        assert f"pass@{k:<3} {value['mean']:6.1%}" in second
    for name, key in (("always right", "always"), ("mixed", "mixed"), ("always wrong", "never")):
        assert f"{round(60 * summary['consistency'][key]['mean']):>5}   " in next(
            line for line in second.splitlines() if line.startswith(name)
        )
    for level, value in summary["pass@1 by"]["level"].items():
        assert f"level {level}: {value['mean']:.1%}" in second


@pytest.mark.slow
def test_the_python_notebook_teaches_a_model_and_measures_it(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cache = (
        tmp_path / "cache" / "whet"
    )  # rows and rewards go to a place of this test; the kernels are built already
    cache.mkdir(parents=True)
    (cache / "kernels").symlink_to(cache_folder() / "kernels")
    told = run("python_api", tmp_path, XDG_CACHE_HOME=str(cache.parent))
    assert told.startswith("1 pictures\n")  # the curves
    gain = re.search(r"pass@1 (\d+)% -> (\d+)%, at least \+(\d+)%", told)
    assert gain is not None
    before, after, least = map(int, gain.groups())
    # Half of the worked solutions leave the working out, so about half is right; then nearly every sum is worked.
    assert 35 <= before <= 75
    assert after >= 85
    assert 10 <= least <= after - before
    assert "is higher by" in told
    folder = tmp_path / "python_api"
    assert len((folder / "rl" / "metrics.jsonl").read_text().splitlines()) == 20
    assert (folder / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_notebook_of_editing_moves_somebody_and_back(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    told = run("editing", tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert told.startswith("1 pictures\n")
    assert "efficacy: 0% before, 100% after" in told
    assert "bitwise as before: True" in told


@pytest.mark.slow
def test_the_notebook_of_adapters_teaches_two_skills_and_exports_one(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("transformers")
    told = run("adapters", tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    rates = re.search(r"'base': '(\d+)%', 'worker': '(\d+)%', 'guesser': '(\d+)%'", told)
    assert rates is not None
    base, worker, guesser = map(int, rates.groups())
    assert worker >= base + 15
    assert guesser <= base - 15
    few_bits = re.search(r"pass@1 in few bits: (\d+)%", told)
    assert few_bits is not None
    assert int(few_bits.group(1)) >= base + 10
    assert "largest drift 0.0" in told
    assert "'verdict': 'passed'" in told


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebooks_have_no_outputs(name: str) -> None:
    notebook = read(name)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < 20_000


def test_the_folder_holds_nothing_else() -> None:
    assert sorted(path.stem for path in NOTEBOOKS.iterdir() if not path.name.startswith(".")) == sorted(NAMES)
