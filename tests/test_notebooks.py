"""The notebooks run from top to bottom, on what a reader has: nothing but the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = ("baseline_eval", "baseline_analysis")


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
