"""The facts about machine and software that a number depends on, written beside it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from whet import __version__

ENVIRONMENT_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
"""The only variables that are recorded: others may hold secrets."""


def write_environment(run_dir: Path) -> dict[str, Any]:
    """Write environment.json into a run folder, once per start of a run.

    Args:
        run_dir: Run folder, made if missing.

    Returns:
        What was written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    facts = describe_environment()
    (run_dir / "environment.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="ascii")
    return facts


def describe_environment() -> dict[str, Any]:
    """Collect versions, processor, devices, threads, command line and time; None where a fact is missing."""
    import numpy
    import torch

    from whet.kernels import build, choice

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "whet": __version__,
        "git_commit": _git_commit(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "kernels": _kernels(cuda),
        "kernels_used": {
            "library": build.reason(),
            "operations": [name for name in choice.OPERATIONS if build.library() and choice.uses(name)],
            "ratios": dict(chosen.ratios) if (chosen := choice.current()) else {},
        },
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "num_torch_threads": torch.get_num_threads(),
        "cuda_device": cuda,
        "num_cuda_devices": torch.cuda.device_count(),
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT_VARIABLES},
        "argv": sys.argv,
        "start_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _kernels(cuda: str | None) -> str:
    """Say what computes: on a GPU where there is one and no CPU model was loaded."""
    from whet.kernels import choice, dispatch

    if cuda is not None and choice.current() is None:
        return f"{'Triton' if dispatch.mode() == 'triton' else 'PyTorch'} on {cuda}"
    return choice.describe()


def _git_commit(root: Path) -> str | None:
    """Return the commit of the checkout that this package runs from, '-dirty' when tracked files differ."""
    if not (root / ".git").exists():  # an installed package may lie inside somebody else's repository
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return f"{commit}-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()


def _cpu_model() -> str | None:
    """Return the marketing name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None
