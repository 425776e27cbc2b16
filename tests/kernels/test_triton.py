"""The Triton kernels without a GPU: run in Triton's interpreter, and compiled for an H200.

The interpreter sees values, the compiler what the interpreter cannot: types, layouts, registers. tests/gpu runs the
same checks for real.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.6' (Linux)")

HERE = Path(__file__).parent
CPU_LIMIT_S = 200
"""The interpreter takes 35 s. Of processor time, since a busy machine may take any time on the clock."""
pytestmark = pytest.mark.timeout(1500)


def run(*command: str, **variables: str) -> str:
    """Run Python in a process of its own and return what it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_"))}
    paths = os.pathsep.join((str(HERE.parents[1]), str(HERE.parent)))
    environment = kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S)),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        pytest.param("not models_head", 45, id="kernels", marks=pytest.mark.ci),
        pytest.param("models_head", 1, id="model", marks=pytest.mark.slow),
    ],
)
def test_in_the_interpreter(chosen: str, count: int) -> None:
    words = ("-m", "pytest", "--noconftest", "--tb=short", "-k", chosen, str(HERE / "interpreted.py"))
    summary = run(*words, TRITON_INTERPRET="1").splitlines()[-1]
    assert summary.split()[1] in ("passed", "passed,"), summary
    assert "skipped" not in summary
    assert int(summary.split()[0]) >= count


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.ci
def test_kernels_compile_for_hopper(dtype: str, tmp_path: Path) -> None:
    printed = run(str(HERE / "compile_for_hopper.py"), dtype, TRITON_CACHE_DIR=str(tmp_path))
    assert {line.split()[0] for line in printed.splitlines()} == {
        "_split", "_merge", "_forward", "_backward", "_rms_forward", "_rms_backward", "_swiglu_forward",
        "_swiglu_backward", "_dequantize",
    }  # fmt: skip
