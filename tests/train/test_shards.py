"""Models in shards over gloo ranks: what is trained, saved and resumed is what one process makes."""

from __future__ import annotations

import importlib.util
import json
import shutil
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
from safetensors.torch import load_file

from whet.algo.config import OffPolicyConfig
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.model.config import ModelConfig
from whet.ranks.collectives import all_reduce_sum, rank, world_size
from whet.ranks.fsdp import ParallelConfig, evened, gathered, is_share, local, sharding, whole_copies
from whet.recipes.models import demo_policy
from whet.storage.checkpoint import not_finite
from whet.train import rl, sft
from whet.train.optim.safety import SafetyConfig, TokenBudget
from whet.train.optim.step import OptimConfig, Optimizer, shard_layers
from whet.train.rl_config import RLConfig
from whet.train.rollout.overlap import OverlapConfig
from whet.train.sft import SFTConfig
from whet.types import UserError

SHAPE = ModelConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
)
FSDP = ParallelConfig(kind="fsdp")
pytestmark = pytest.mark.ci


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


def test_ranks_that_share_a_model_train_as_one_process(tmp_path: Path) -> None:
    equal = bench()
    base = equal.make_bases(tmp_path)
    jobs = [
        ("sft, muon", "fsdp, kept between passes"),
        ("ppo, a rank without tokens", "fsdp, layer by layer"),
        ("grpo, refill", "replicate"),
    ]
    for program, _ in jobs:
        equal.run(program, "replicate", base, tmp_path / "one" / program)
    assert run_ranks(2, work, str(tmp_path), jobs) == [None, None]
    for program, layout in jobs:
        pair = tmp_path / "one" / program, tmp_path / layout / program
        assert equal.difference(*(equal.checked(base, out) for out in pair)) < 1e-12


def tiny(out: Path, **changes: Any) -> SFTConfig:
    settings: dict[str, Any] = {
        "policy": replace(demo_policy(), model=SHAPE, max_rows=64),
        "parallel": FSDP,
        "optim": OptimConfig(lr=1e-3, warmup_steps=1, token_budget=100),
        "num_steps": 4,
        "save_every": 2,
        "batch_size": 6,
        "num_problems": 60,
        "validation_problems": 0,
        "safety": SafetyConfig(background=False, deterministic="warn"),
    }
    return SFTConfig(out=str(out), **settings | changes)


def train(out: str, resume: int = 0, deterministic: str = "warn", **layout: Any) -> None:
    warnings.simplefilter("ignore")
    config = tiny(Path(out), parallel=ParallelConfig(**layout) if layout else FSDP)
    safety = replace(config.safety, deterministic=deterministic)
    sft.train(replace(config, safety=safety), resume=resume or False)


def train_replicated(out: str, resume: int, deterministic: str) -> None:
    train(out, resume, deterministic, kind="replicate")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoints" / "step_00000004" / "model.safetensors")


def train_compiled(out: str) -> None:
    warnings.simplefilter("ignore")
    config = tiny(Path(out))
    compiled = replace(config.optim, compile=True, compile_backend="aot_eager")  # without Inductor's minute
    sft.train(replace(config, optim=compiled))


@pytest.mark.slow  # tracing takes longer than a collective waits, on a busy machine
def test_layers_in_shards_can_be_compiled(tmp_path: Path) -> None:
    assert run_ranks(2, train, str(tmp_path / "plain")) == [None, None]
    assert run_ranks(2, train_compiled, str(tmp_path / "compiled")) == [None, None]
    assert_equal(weights(tmp_path / "compiled"), weights(tmp_path / "plain"), exactly=False)


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    """Bitwise with as many, up to rounding with others, from what one process and what several wrote."""
    run, kept = tmp_path / "run", tmp_path / "kept"
    assert run_ranks(2, train, str(run)) == [None, None]
    expected = weights(run)
    assert (run / "checkpoints" / "step_00000002" / "training" / "optimizer").is_dir()
    shutil.copytree(run, kept)
    for ranks in (3, 1, 2):
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        shutil.rmtree(run / "checkpoints" / "step_00000004")
        assert run_ranks(ranks, train, str(run), 2) == [None] * ranks
        assert_equal(weights(run), expected, exactly=ranks == 2)
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    for kind, text in run_ranks(2, train_replicated, str(run), 2, "strict"):
        assert kind == "UserError"
        assert "saved with parallel.kind = fsdp, resumed with replicate: not bitwise" in text
    assert run_ranks(2, train_replicated, str(run), 2, "warn") == [None, None]
    assert_equal(weights(run), expected, exactly=False)
    shutil.rmtree(run)
    assert run_ranks(1, train, str(run)) == [None]
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    assert run_ranks(2, train, str(run), 2) == [None, None]  # from what one process wrote
    assert_equal(weights(run), expected, exactly=False)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "sft/loss" in row] == [1, 2, 3, 4]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, exactly: bool) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if exactly:
            assert torch.equal(found[name], tensor), name
        else:
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-6)


def policy_of() -> Any:
    return load_policy(replace(demo_policy(), model=SHAPE), seed=0)


def shares() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    policy = policy_of()
    model = policy.model
    numbers = sum(p.numel() for p in model.parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    kinds = [type(part) for part in (model, *model.layers)]
    shard_layers(model, FSDP)
    shard_layers(model, FSDP)  # once is enough
    optimizer = Optimizer(model, OptimConfig())
    mine = sum(local(p).numel() for p in model.parameters())
    state = sum(tensor.numel() for tensor in optimizer.held())
    with gathered(model, None), gathered(model):
        is_plain = [type(part) for part in (model, *model.layers)] == kinds
        same = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        alone = (
            float(model.logits(torch.tensor([[1, 2, 3]])).detach().sum()) if rank() else 0.0
        )  # no collective in it
    copies = whole_copies(dict(model.named_parameters()))
    torch.nn.init.constant_(local(model.head_weight), float("nan") if rank() else 1.0)
    return {
        "share": mine / numbers,
        "state": state / numbers,
        "plain": is_plain and same,
        "again": all(map(is_share, model.parameters())) and sharding(model) is not None,
        "alone": alone,
        "whole": all(torch.equal(copies[name], before[name]) for name in before)
        if not rank()
        else len(copies),
        "evened": [len(evened(range(rank() + 1), model)), evened([0], torch.nn.Linear(1, 1))],
        "bad": not_finite(dict(model.named_parameters())),
    }


def test_a_rank_holds_its_share_and_gathers_the_rest() -> None:
    first, second = run_ranks(2, shares)
    expected = float(policy_of().model.logits(torch.tensor([[1, 2, 3]])).detach().sum())
    assert (first.pop("alone"), second.pop("alone")) == (0.0, pytest.approx(expected, rel=1e-6))
    assert first.pop("share") + second.pop("share") == 1.0
    assert first.pop("state") + second.pop("state") == pytest.approx(2.0, abs=0.01)  # two moments
    assert first.pop("whole") is True
    assert second.pop("whole") == len(list(policy_of().model.parameters()))
    bad = {"plain": True, "again": True, "evened": [2, [0]], "bad": "model.embed_tokens.weight"}
    assert first == second == bad


def refused() -> list[str]:
    """Return what is said of everything that needs the whole model."""
    warnings.simplefilter("ignore")

    def full(_: int) -> None:
        raise MemoryError

    model = policy_of().model
    said = []
    for layout in (replace(FSDP, replicas=3), replace(FSDP, offload=True)):
        with pytest.raises(UserError) as caught:
            shard_layers(model, layout)
        said.append(str(caught.value))
    shard_layers(model, FSDP)
    with pytest.raises(UserError) as caught:
        Optimizer(model, OptimConfig(adam_bits=8))
    said.append(str(caught.value))
    with pytest.raises(UserError) as caught:
        TokenBudget(100, model.parameters()).run(full, 10)
    return [*said, str(caught.value)]


def test_what_needs_the_whole_is_refused() -> None:
    beginnings = [
        "parallel.replicas = 3: expected a divisor of the 2 ranks",
        "parallel.offload = true on a CPU",
        "optim.adam_bits = 8 with parallel.kind = fsdp",
        "out of memory with 100 tokens in a micro-batch, which ranks that share a model or micro-bat",
    ]
    for found in run_ranks(2, refused):
        assert [text[: len(start)] for text, start in zip(found, beginnings, strict=True)] == beginnings


def test_settings_that_nothing_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="reshard is read with parallel.kind = fsdp only"):
        ParallelConfig(reshard=False)
    with pytest.raises(ValueError, match="parallel.replicas = 0: expected 1 or more"):
        replace(FSDP, replicas=0)
    policy = PolicyConfig(init="base")
    overlap: dict[str, Any] = {
        "overlap": OverlapConfig(mode="async"),
        "off_policy": OffPolicyConfig(staleness=1),
    }
    with pytest.raises(ValueError, match="overlap.mode = async with parallel.kind = fsdp"):
        RLConfig(out="", policy=policy, parallel=FSDP, **overlap)


def in_turn() -> list[Any]:
    """Ranks that do unequal numbers of passes, with collectives between them."""
    warnings.simplefilter("ignore")
    policy = policy_of()
    model, tokens = policy.model, torch.tensor([[1, 2, 3]])
    expected = model.logits(tokens).detach()
    shard_layers(model, replace(FSDP, gather="layer"))
    right = []
    with gathered(model), torch.inference_mode():
        for _ in range(2 + rank()):
            right.append(torch.equal(model.logits(tokens), expected))
        right.append(all_reduce_sum(float(world_size())))
        right += [torch.equal(model.logits(tokens), expected) for _ in range(3 - rank())]
        held = [is_share(p) for p in model.layers.parameters()]
    loss = model.logits(tokens).square().sum()
    loss.backward()  # what was gathered in inference mode can be trained
    return [all(right), all(held), all(p.grad is not None for p in model.parameters())]


def test_weights_are_gathered_layer_by_layer_while_any_rank_computes() -> None:
    assert run_ranks(2, in_turn) == [[True, True, True]] * 2


def sampled(out: str, gather: str) -> list[tuple[int, ...]]:
    warnings.simplefilter("ignore")
    config = RLConfig(
        out=out,
        policy=replace(demo_policy(), model=SHAPE, max_rows=64),
        parallel=ParallelConfig(kind="fsdp", gather=gather),  # pyright: ignore[reportArgumentType]
        rewards={"repetition": 1.0, "cosine_length": 1.0},
        sampling=SamplingParams(max_new_tokens=8),
        optim=OptimConfig(lr=1e-3, warmup_steps=1),
        num_steps=2,
        num_prompts=4,
        group_size=4,
        preflight="warn",
        validation_problems=3,
        validate_every=1,
    )
    found = [sample.completion_ids for step in rl.steps(config) for g in step.groups for sample in g.samples]
    return [tuple(ids) for ids in found]


@pytest.mark.slow
def test_the_ratio_is_exactly_one_however_weights_are_gathered(tmp_path: Path) -> None:
    """`Trust` stops a run whose sampler and trainer differ in a single bit."""
    whole = run_ranks(2, sampled, str(tmp_path / "whole"), "whole")
    assert whole == run_ranks(2, sampled, str(tmp_path / "layer"), "layer")
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rl/ratio_drift"] for row in rows if "rl/loss" in row] == [0.0, 0.0]


LOAD = """
import json, struct, sys
from functools import partial
from pathlib import Path
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from whet.model.config import ModelConfig
from whet.model.families import to_hf
from whet.model.weights import build_model, load_model, save_model
from whet.ranks.fsdp import ParallelConfig, whole_copies
from whet.train.optim.step import shard_layers

folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
shape = ModelConfig(**json.loads(sys.argv[3]))
with torch.device("meta"):
    model = build_model(shape)
folder.mkdir(parents=True)
(folder / "config.json").write_text(json.dumps(to_hf(shape, bos_id=None, eos_ids=(), dtype="bfloat16")))
files = {}  # one for each layer, and one for the rest
for name, parameter in model.named_parameters():
    file = "layer_" + name.split(".")[2] if ".layers." in name else "rest"
    files.setdefault(file + ".safetensors", {})[name] = parameter
for file, parameters in files.items():
    header, end = {}, 0
    for name, parameter in parameters.items():
        size = 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / file).open("wb") as opened:  # all zeros, which take no disk
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end)
index = {name: file for file, parameters in files.items() for name in parameters}
(folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


shard = None
if ranks > 1:
    number = 0 if len(sys.argv) > 4 else ranks // 2  # rank 0 writes
    torch.distributed.init_process_group("fake", rank=number, world_size=ranks, store=FakeStore())
    config = ParallelConfig(kind="fsdp")
    with torch.device("meta"):  # what PyTorch imports for it is not counted
        shard_layers(build_model(ModelConfig(num_layers=1)), config, torch.device("cpu"))
    shard = partial(shard_layers, config=config, device=torch.device("cpu"))
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
model, _ = load_model(folder, shard=shard)
if len(sys.argv) > 4:
    weights = whole_copies(dict(model.named_parameters()))
    save_model(model, folder / "saved", weights=weights, shard_bytes=int(sys.argv[4]))
print(json.dumps({"weights": 4 * sum(p.numel() for p in model.parameters()), "peak": status("VmHWM") - before}))
"""


def peak_of_loading(folder: Path, ranks: int, shape: dict[str, int], file_bytes: int = 0) -> tuple[int, int]:
    """Return the bytes of a model in float32 and the most that one of some ranks holds while it loads it, and saves it
    in files of some size."""
    more = [str(file_bytes)] if file_bytes else []
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), str(ranks), json.dumps(shape), *more],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["weights"], found["peak"]


@pytest.mark.slow
def test_no_rank_ever_holds_the_whole_model(tmp_path: Path) -> None:
    """Its rows in float32, what it reads of the file, and little more; the whole takes one process all of it."""
    shape = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096, "num_layers": 6}
    shape |= {"num_heads": 16, "num_kv_heads": 8, "head_dim": 64}
    weights, peak = peak_of_loading(tmp_path / "one", 1, shape)
    assert weights > 400e6
    assert peak > weights
    weights, peak = peak_of_loading(tmp_path / "eighth", 8, shape)
    assert weights / 8 < peak < 1.5 * weights / 8 + 32e6
    # Rank 0 gathers the whole of it once, to write it.
    weights, peak = peak_of_loading(tmp_path / "saved", 8, shape, file_bytes=40_000_000)
    assert weights < peak < weights * 9 / 8 + 40e6
