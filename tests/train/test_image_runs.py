"""Runs on prompts with images: killed ones resume to the bit, ranks train as one process, and what is trained."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gloo import run_ranks
from seeing import png, save_model, uri

from whet.algo.config import AlgoConfig, OffPolicyConfig
from whet.config import dump_yaml
from whet.generate.backends.base import SamplerConfig
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.model.lora.side import LoRAConfig
from whet.model.vision.ids import is_image
from whet.ranks.ray import ClusterConfig
from whet.storage.checkpoint import saved_steps
from whet.tasks.base import TaskConfig
from whet.train import rl, sft
from whet.train.optim.safety import SafetyConfig
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig
from whet.train.rollout.overlap import OverlapConfig
from whet.train.sft import SFTConfig
from whet.types import Problem, UserError

TIMES = (
    "_seconds",
    "_per_second",
    "time_s",
    "_gib",
    "hardware/utilisation/cpu",
    "hardware/memory_gib/cpu",
    "rl/overlap",
)
TOWER = LoRAConfig(rank=2, targets=("all-linear", "visual.*"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees, and rows that show it images of any size: in the rows, and in files beside them."""
    torch.set_num_threads(1)
    where = tmp_path_factory.mktemp("runs")
    save_model(where / "model")
    images = [uri(9), uri(30, 200, size=(16, 24)), uri(1, 9, 70), "beside.png", [uri(5), uri(77)]]
    (where / "beside.png").write_bytes(png(uri(200, size=(24, 16))))
    # The same few images in every step: what was computed of them with earlier weights must not be used again.
    rows = [
        {
            "question": f"{'abcdefghij'[n % 10]}{'abcdefghij'[n // 10]}=",
            "answer": str(n % 7),
            "solution": f"{n % 3}",
            "image": images[n % 5],
        }
        for n in range(40)
    ]
    (where / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return where


def common(folder: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return {
        "out": str(out),
        "policy": PolicyConfig(init=str(folder / "model"), max_rows=64),
        "task": TaskConfig(name="jsonl", path=str(folder / "rows.jsonl")),
        "optim": OptimConfig(lr=1e-2, warmup_steps=1, token_budget=100),
        "num_steps": 4,
        "save_every": 2,
        "safety": SafetyConfig(background=False),
    } | changes


def rl_config(folder: Path, out: Path, **changes: Any) -> RLConfig:
    settings: dict[str, Any] = {
        "rewards": {"format": 0.5, "repetition": 0.3, "cosine_length": 0.5},
        "sampling": SamplingParams(max_new_tokens=10),
        "algo": AlgoConfig(uninformative="keep"),
        "num_prompts": 4,
        "group_size": 3,
        "preflight": "warn",
    }
    return RLConfig(**common(folder, out) | settings | changes)


def sft_config(folder: Path, out: Path, **changes: Any) -> SFTConfig:
    settings = {"batch_size": 6, "validation_problems": 2, "validate_every": 2}
    return SFTConfig(**common(folder, out) | settings | changes)


def train(config: RLConfig | SFTConfig, **options: Any) -> None:
    (rl if isinstance(config, RLConfig) else sft).train(config, **options)  # pyright: ignore[reportArgumentType]


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in row.items() if not name.endswith(TIMES)} for row in rows]


def files_of(out: Path, step: int = 4) -> dict[str, bytes]:
    """Weights and the optimizer's state, byte for byte."""
    checkpoint = out / "checkpoints" / f"step_{step:08d}"
    found = {str(p.relative_to(checkpoint)): p.read_bytes() for p in checkpoint.rglob("*.safetensors")}
    assert "training/optimizer.safetensors" in found
    return found


KILLER = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from whet.config import load_yaml
kind, path, step = sys.argv[1:]
if kind == "rl":
    from whet.train import rl as program
    from whet.train.objective.objective import Objective as owner
    from whet.train.rl_config import RLConfig as config
    name = "update"
else:
    from whet.train import sft as program
    from whet.train.sft import SFTConfig as config
    owner, name = program, "train_step"
original, calls = getattr(owner, name), 0
def killing(*arguments, **options):
    global calls
    calls += 1
    if calls == int(step):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **options)
setattr(owner, name, killing)
program.train(load_yaml(Path(path), config))
"""
RUNS = {
    "sft": (sft_config, {}),
    "sft, tower": (sft_config, {"train_vision": True}),
    "rl": (rl_config, {}),
    "rl, tower": (rl_config, {"train_vision": True}),
    "rl, lora": (rl_config, {"lora": LoRAConfig(rank=2)}),
    "rl, lora on the tower, 4 bits": (rl_config, {"lora": TOWER, "quantize": "nf4"}),
    "rl, stale": (
        rl_config,
        {"off_policy": OffPolicyConfig(staleness=2, proximal="recomputed", correction="token_mask")},
    ),
    "rl, overlapped": (
        rl_config,
        {"overlap": OverlapConfig(mode="async"), "off_policy": OffPolicyConfig(staleness=1)},
    ),
}
OFTEN = "sft, tower"


def configured(name: str, folder: Path, out: Path) -> RLConfig | SFTConfig:
    make, changes = RUNS[name]
    config = make(folder, out)
    asked = {key: changes[key] for key in ("train_vision", "quantize") if key in changes}
    others = {key: value for key, value in changes.items() if key not in asked}
    return replace(config, policy=replace(config.policy, **asked), **others)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != OFTEN)) for name in RUNS]
)
def test_killed_and_resumed_it_ends_as_if_it_had_not_been(name: str, folder: Path, tmp_path: Path) -> None:
    """Weights, optimizer, metrics and samples: bitwise, after a SIGKILL between two checkpoints."""
    straight = configured(name, folder, tmp_path / "straight")
    train(straight)
    broken = replace(straight, out=str(tmp_path / "broken"))
    (tmp_path / "config.yaml").write_text(dump_yaml(broken))
    kind = "rl" if isinstance(straight, RLConfig) else "sft"
    process = subprocess.run(
        [sys.executable, "-c", KILLER, kind, str(tmp_path / "config.yaml"), "4"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr[-2000:]
    assert saved_steps(tmp_path / "broken") == [2]
    train(broken, resume=True)
    first, second = tmp_path / "straight", tmp_path / "broken"
    assert files_of(first) == files_of(second)
    assert files_of(first) != files_of(first, 2)
    for file in ("metrics.jsonl", "samples.jsonl"):
        for one, other in zip(rows_of(first / file), rows_of(second / file), strict=True):
            assert {k: (one.get(k), other.get(k)) for k in one | other if one.get(k) != other.get(k)} == {}, (
                file
            )
    if kind == "rl":
        assert len(rows_of(first / "samples.jsonl")) == 4 * 12
        stale = {"off_policy", "overlap"} & RUNS[name][1].keys()
        rows = [row for row in rows_of(first / "metrics.jsonl") if row["stage"] == "rl"]
        gaps = [row["rl/logprob_gap_max"] for row in rows if "rl/logprob_gap_max" in row]
        assert gaps if stale else set(gaps) == {0.0}


def moved(config: RLConfig | SFTConfig) -> set[str]:
    """Train, and return which parts of the model are other than at first."""
    train(config)
    before = load_policy(config.policy, seed=0).model.state_dict()
    after = load_policy(PolicyConfig(init=config.out), seed=0, merge=True).model.state_dict()
    assert len(before) > 40
    found = {name for name, weight in before.items() if not torch.equal(after[name], weight)}
    return {"tower" if name.startswith("visual.") else "decoder" for name in found}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"decoder"}),
        ({"train_vision": True}, {"decoder", "tower"}),
        ({"lora": LoRAConfig(rank=2)}, {"decoder"}),
        ({"lora": LoRAConfig(rank=2), "train_vision": True}, {"decoder", "tower"}),
        ({"lora": TOWER}, {"decoder", "tower"}),
        ({"lora": replace(TOWER, targets=("visual.*",))}, {"tower"}),
    ],
    ids=["whole", "whole and tower", "lora", "lora and whole tower", "lora on both", "lora on the tower"],
)
def test_what_is_trained(changes: dict[str, Any], expected: set[str], folder: Path, tmp_path: Path) -> None:
    config = sft_config(folder, tmp_path / "run", num_steps=2)
    asked = {key: changes[key] for key in ("train_vision",) if key in changes}
    others = {key: value for key, value in changes.items() if key not in asked}
    assert moved(replace(config, policy=replace(config.policy, **asked), **others)) == expected


def bench() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "bench" / "ranks_equal.py"
    spec = importlib.util.spec_from_file_location("ranks_equal", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def work(folder: str, jobs: list[tuple[str, str]]) -> None:
    warnings.simplefilter("ignore")
    equal = bench()
    for program, layout in jobs:
        equal.run(program, layout, Path(folder) / "base", Path(folder) / layout / program)


@pytest.mark.ci
@pytest.mark.parametrize(
    "jobs",
    [
        [("sft, images, tower", "replicate")],
        pytest.param(
            [
                ("sft, images", "replicate"),
                ("grpo, images, lora and tower", "fsdp"),
                ("grpo, images", "fsdp, layer by layer"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["short", "others"],
)
def test_two_ranks_train_as_one_process(jobs: list[tuple[str, str]], tmp_path: Path) -> None:
    """In float64, where the order of sums shows in the last digits alone."""
    equal = bench()
    base = equal.make_bases(tmp_path)
    for program, _ in jobs:
        equal.run(program, "replicate", base, tmp_path / "one" / program)
    assert run_ranks(2, work, str(tmp_path), jobs) == [None] * 2
    for program, layout in jobs:
        pair = tmp_path / "one" / program, tmp_path / layout / program
        assert equal.difference(*(equal.checked(base, out) for out in pair)) < 1e-10


def count_images(policy: Policy) -> int:
    shown = Problem(uid="a", task="t", prompt="a", answer="1", images=(uri(9, size=(48, 32)),))
    return sum(map(is_image, policy.prompt_ids(shown)))


@pytest.mark.parametrize(
    "changes",
    [
        {"sampler": SamplerConfig(kind="openai", url="http://127.0.0.1:1/v1")},
        {"sampler": SamplerConfig(kind="vllm")},
        {"cluster": ClusterConfig(rollout_workers=2)},
    ],
    ids=["openai", "vllm", "workers"],
)
def test_samplers_that_images_do_not_reach_are_refused(
    changes: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="the model sees, and images reach only the engine"):
        rl.check(rl_config(folder, tmp_path / "run", **changes), False)


def test_images_are_made_smaller_where_asked(folder: Path, tmp_path: Path) -> None:
    """At most so many tokens, in what is trained, saved and evaluated; other limits are other protocols."""
    init = str(folder / "model")
    whole, small = (load_policy(PolicyConfig(init=init, max_image_tokens=n), seed=0) for n in (0, 5))
    assert count_images(whole) == 6 * 4
    assert (
        count_images(small) == 2 * 1
    )  # 16 x 8 pixels: the largest of about that ratio with at most 5 tokens
    assert "max_image_tokens" not in whole.protocol()
    assert small.protocol()["max_image_tokens"] == 5
    config = sft_config(folder, tmp_path / "run", num_steps=1, lora=LoRAConfig(rank=2))
    train(replace(config, policy=replace(config.policy, max_image_tokens=5)))
    small.save(tmp_path / "whole")
    for place in (tmp_path / "run", tmp_path / "whole"):
        assert count_images(load_policy(PolicyConfig(init=str(place)), seed=0)) == 2
        assert count_images(load_policy(PolicyConfig(init=str(place), max_image_tokens=24), seed=0)) == 24
    load_policy(PolicyConfig(tokenizer="bytes"), seed=0).save(tmp_path / "blind")
    with pytest.raises(UserError, match="max_image_tokens = 5: the model reads text alone"):
        load_policy(PolicyConfig(init=str(tmp_path / "blind"), max_image_tokens=5), seed=0)
    with pytest.raises(ValueError, match="max_image_tokens = -1"):
        PolicyConfig(init=init, max_image_tokens=-1)
