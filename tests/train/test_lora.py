"""Training of adapters: sampler and trainer agree bitwise, resumes are exact, peft reads what is written."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs
from safetensors.torch import load_file

from whet.algo.config import AlgoConfig
from whet.algo.packing import TrainingSequence, pack
from whet.generate.engine import Request
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.kernels import dispatch, eager
from whet.model.config import ModelConfig
from whet.model.lora.adapter import Adapter
from whet.model.lora.files import find_model, read_adapter
from whet.model.lora.side import LoRAConfig, choose, sides_of, targets_of
from whet.model.lora.trained import Base, Trained
from whet.model.quant import packed_parts
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model, load_model, save_model
from whet.recipes.models import demo_policy
from whet.report.markdown import write_report
from whet.train import rl, sft
from whet.train.objective.reference import Reference
from whet.train.optim.step import OptimConfig, Optimizer
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.types import UserError

needs_peft = needs("peft")
SHAPE = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=32,
    init_std=0.2,
)
SHAPES = {
    "llama": replace(SHAPE, tie_embeddings=False, attention_bias=True),
    "tied": SHAPE,
    "gpt2": replace(SHAPE, family="gpt2", num_kv_heads=4),
}
MIXTURE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}
IDS = torch.tensor([[3, 14, 15, 9, 2, 6, 5], [35, 8, 9, 7, 9, 3, 2]])
CLOSE = 1e-5
"""float32 sums in another order move logits of size 1 to 10 by some 1e-6; a wrong scaling moves them by 0.1."""


def make_base(folder: Path, kind: str) -> Path:
    if kind == "mixture":
        import transformers

        torch.manual_seed(1)
        config = transformers.Qwen3MoeConfig(**MIXTURE, initializer_range=0.2)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder
    model = build_model(SHAPES[kind])
    init_weights(model, seed=1)
    save_model(model, folder)
    return folder


def trained(base: Path, **settings: Any) -> tuple[LanguageModel, Trained]:
    """Return a model whose adapters have been trained: every tensor of theirs is random."""
    model, _ = load_model(base)
    adapters = Trained(model, LoRAConfig(**settings), base=Base.of(str(base), base), seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in adapters.named_parameters():
            noise = torch.empty(parameter.shape).normal_(0, 0.2, generator=generator)
            parameter.add_(noise)
    return model, adapters


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(IDS)


WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"rank": 4}),
    "odd rank, layers": (
        "tied",
        {"rank": 3, "alpha": 5.0, "layers": "1", "targets": ("q_proj", "*.mlp.up*")},
    ),
    "rslora": ("tied", {"rank": 4, "rslora": True}),
    "dora": ("llama", {"rank": 4, "dora": True}),
    "pissa": ("tied", {"rank": 4, "init": "pissa"}),
    "pissa, rslora": ("tied", {"rank": 4, "init": "pissa", "rslora": True}),
    "pissa, dora": ("llama", {"rank": 4, "init": "pissa", "dora": True}),
    "saved": ("llama", {"rank": 4, "modules_to_save": ("lm_head", "model.norm")}),
    "tied saved": ("tied", {"rank": 4, "modules_to_save": ("embed_tokens",)}),
    "gpt2": ("gpt2", {"rank": 4}),
    "experts": ("mixture", {"rank": 2, "targets": ("all-linear", "gate_up_proj", "down_proj")}),
    "one of the experts'": ("mixture", {"rank": 2, "targets": ("q_proj", "experts.down_proj")}),
    "pissa of experts": ("mixture", {"rank": 2, "targets": ("gate_up_proj",), "init": "pissa"}),
}


@pytest.mark.some(2)
@needs_peft
@pytest.mark.parametrize("case", WRITTEN)
def test_peft_and_we_read_what_was_trained_with_equal_logits(case: str, tmp_path: Path) -> None:
    import peft
    import transformers

    kind, settings = WRITTEN[case]
    base = make_base(tmp_path / "base", kind)
    before = logits(load_model(base)[0])
    model, adapters = trained(base, **settings)
    ours = logits(model)
    assert (ours - before).abs().max() > 0.1
    adapters.write(tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
        theirs = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, ours, atol=CLOSE, rtol=CLOSE)

    folder, adapter = find_model(str(tmp_path / "adapter"))
    assert folder == base.resolve()
    assert adapter is not None
    again = adapter.fit(load_model(folder)[0])
    adapter.apply(again)
    torch.testing.assert_close(logits(again), ours, atol=CLOSE, rtol=CLOSE)
    merged = adapter.fit(load_model(folder)[0])
    lost = adapter.merge(merged)
    assert lost.share < 1e-5
    torch.testing.assert_close(logits(merged), ours, atol=CLOSE, rtol=CLOSE)
    with pytest.raises(UserError, match="merged into this model already"):
        adapter.merge(merged)

    restored, other = trained(base, **settings)
    with torch.no_grad():
        for _, parameter in other.named_parameters():
            parameter.zero_()
    other.restore(tmp_path / "adapter")
    for (name, mine), (_, its) in zip(restored.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(mine, its), name


@needs_peft
def test_experts_of_peft_are_read(tmp_path: Path) -> None:
    import peft
    import transformers

    base = make_base(tmp_path / "base", "mixture")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False
        )
        theirs = peft.get_peft_model(model, config).eval()
        theirs.save_pretrained(str(tmp_path / "adapter"))
        with torch.no_grad():
            wanted = theirs(IDS).logits
    adapter = read_adapter(tmp_path / "adapter")
    ours = adapter.fit(load_model(base)[0])
    adapter.apply(ours)
    torch.testing.assert_close(logits(ours), wanted, atol=CLOSE, rtol=CLOSE)


def loss(model: LanguageModel) -> torch.Tensor:
    return model.logits(IDS).double().square().sum() * 1e-3


@needs_peft
@pytest.mark.parametrize("settings", [{"rank": 3}, {"rank": 4, "dora": True}])
def test_gradients_are_those_of_peft(settings: dict[str, Any], tmp_path: Path) -> None:
    import peft
    import transformers

    base = make_base(tmp_path / "base", "llama")
    model, adapters = trained(base, **settings)
    adapters.write(tmp_path / "adapter")
    loss(model).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
        theirs = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"), is_trainable=True).eval()
    (theirs(IDS).logits.double().square().sum() * 1e-3).backward()
    named = dict(theirs.named_parameters())
    count = 0
    for name, parameter in adapters.named_parameters():
        key = name.replace(".side.", ".").replace("magnitude", "lora_magnitude_vector")
        wanted = named[f"base_model.model.{key}.default.weight"].grad
        assert parameter.grad is not None
        assert wanted is not None
        gap = (parameter.grad - wanted).norm() / wanted.norm()
        assert gap < 1e-4, (name, float(gap))  # float32 sums in another order
        count += 1
    assert count == 14 * (3 if settings.get("dora") else 2)
    assert all(p.grad is None for name, p in model.named_parameters() if ".side." not in name)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("settings", [{"rank": 3}, {"rank": 4, "init": "pissa"}])
def test_gradients_are_finite_differences(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = build_model(SHAPES[kind]).double()
    init_weights(model, seed=1)
    Trained(model, LoRAConfig(**settings), base=Base("", tmp_path), seed=0)
    target, side = next(sides_of(model))
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(5, target.shape[1], generator=generator, dtype=torch.float64, requires_grad=True)

    def value() -> torch.Tensor:  # of a layer alone: norms and attention are float32 in any model
        return target.module(x).sin().sum()

    with torch.no_grad():
        side.lora_B.normal_(0, 0.3, generator=generator)
    value().backward()
    for tensor in (x, side.lora_A, side.lora_B):
        assert tensor.dtype == torch.float64
        assert tensor.grad is not None
        way = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        slope, ends = float((tensor.grad * way).sum()), []
        for sign in (1, -1):
            with torch.no_grad():
                tensor.add_(way, alpha=sign * 1e-5)
                ends.append(float(value()))
                tensor.sub_(way, alpha=sign * 1e-5)
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)
    assert target.module.get_parameter("weight").grad is None


@pytest.mark.parametrize("rank", [1, 3, 16, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("either")
def test_low_rank_products_do_not_depend_on_the_other_rows(rank: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rank)
    x, y = (torch.randn(40, width, generator=generator).to(dtype) for width in (48, 24))
    a, b = torch.randn(rank, 48, generator=generator), torch.randn(24, rank, generator=generator)
    whole = dispatch.run(eager.low_rank, x, y, a, b, 0.7)
    wanted = (y.double() + 0.7 * x.double() @ a.double().T @ b.double().T).to(dtype)
    torch.testing.assert_close(whole, wanted, atol=1e-3, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4)
    for count in (8, 16, 32):  # whoever runs PyTorch's products pads rows to multiples of 8
        assert torch.equal(dispatch.run(eager.low_rank, x[:count], y[:count], a, b, 0.7), whole[:count])
    torch.set_num_threads(2)
    assert torch.equal(dispatch.run(eager.low_rank, x, y, a, b, 0.7), whole)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's policy, tiny and random, kept in a folder."""
    folder = tmp_path_factory.mktemp("lora") / "base"
    shape = replace(SHAPE, vocab_size=ModelConfig.vocab_size, max_positions=64, init_std=0.3)
    load_policy(replace(demo_policy(), model=shape), seed=0).save(folder)
    return folder


LORA = LoRAConfig(rank=3, lr_ratio=4.0)


def rl_config(base: Path, out: Path, **changes: Any) -> RLConfig:
    config = RLConfig(
        out=str(out),
        policy=PolicyConfig(init=str(base), max_rows=64),
        lora=LORA,
        sampling=SamplingParams(max_new_tokens=8),
        optim=OptimConfig(lr=3e-3, warmup_steps=1, schedule="constant"),
        algo=AlgoConfig(kl="k3_loss", kl_coef=0.1, uninformative="keep"),
        num_steps=4,
        num_prompts=2,
        group_size=4,
        save_every=2,
    )
    return replace(config, **changes)


def sft_config(base: Path, out: Path, **changes: Any) -> SFTConfig:
    config = SFTConfig(
        out=str(out),
        policy=PolicyConfig(init=str(base), max_rows=64),
        lora=LORA,
        optim=OptimConfig(lr=3e-3, warmup_steps=1),
        num_steps=4,
        batch_size=4,
        validation_problems=4,
        validate_every=2,
        save_every=2,
    )
    return replace(config, **changes)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def with_random_sides(
    base: Path, dtype: torch.dtype, lora: LoRAConfig, autocast: Any = None, quantize: Any = "none"
) -> Policy:
    config = PolicyConfig(init=str(base), max_rows=64, quantize=quantize)
    policy = load_policy(config, seed=0, dtype=dtype, autocast=autocast)
    policy.trained = Trained(policy.model, lora, base=Base("", base), seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, side in sides_of(policy.model):
            side.lora_B.normal_(0, 0.3, generator=generator)
    return policy


@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("dtype", "autocast", "lora", "threads", "quantize"),
    [
        (torch.float32, None, LoRAConfig(rank=3), 1, "none"),
        (torch.float32, None, LoRAConfig(rank=16, dora=True), 2, "none"),
        (torch.bfloat16, None, LoRAConfig(rank=20), 1, "none"),
        (torch.bfloat16, None, LoRAConfig(rank=3, dora=True), 2, "none"),
        (torch.float32, torch.bfloat16, LoRAConfig(rank=3, init="pissa"), 2, "none"),
        (torch.float32, None, LoRAConfig(rank=3), 2, "nf4"),
        (torch.bfloat16, None, LoRAConfig(rank=20, dora=True), 1, "nf4"),
        (torch.float32, torch.bfloat16, LoRAConfig(rank=3, init="pissa"), 1, "int8"),
    ],
)
@pytest.mark.usefixtures("either")
def test_the_sampler_gives_the_trainers_logprobs_bitwise(
    base: Path, dtype: torch.dtype, autocast: Any, lora: LoRAConfig, threads: int, quantize: str
) -> None:
    torch.set_num_threads(threads)
    policy = with_random_sides(base, dtype, lora, autocast, quantize)
    assert bool(packed_parts(policy.model)) == (quantize != "none")
    prompts = [policy.chat_ids([{"role": "user", "content": text}]) for text in ("1+2=?", "13+29=?", "7*8=?")]
    requests = [Request(prompt_ids=ids, seeds=tuple(range(5))) for ids in prompts]
    drawn = policy.engine(stops=False, trains=True).generate(requests, SamplingParams(max_new_tokens=9))
    sequences = [
        TrainingSequence(prompt_ids=ids, completion_ids=done.ids)
        for ids, row in zip(prompts, drawn, strict=True)
        for done in row
    ]
    logprobs = [value for row in drawn for done in row for value in done.logprobs]
    for budget in (40, 4096):
        found: dict[int, list[float]] = {}
        for micro in pack(sequences, token_budget=budget, device=policy.device).micro_batches:
            scored_M, _ = policy.score(micro)  # with gradients, as in training
            assert scored_M.requires_grad
            parts = scored_M.split(torch.bincount(micro.sequence_M).tolist())
            found |= {index: part.tolist() for index, part in zip(micro.indices_B, parts, strict=True)}
        assert [value for index in sorted(found) for value in found[index]] == logprobs


@pytest.mark.ci
@pytest.mark.usefixtures("few_problems")
def test_rl_trains_adapters_alone_on_policy_and_resumes_exactly(base: Path, tmp_path: Path) -> None:
    policy = rl.train(rl_config(base, tmp_path / "whole"))
    rows = rows_of(tmp_path / "whole")
    assert [row["rl/ratio_drift"] for row in rows] == [0.0] * 4
    assert rows[0]["rl/kl"] == 0.0
    assert rows[-1]["rl/kl"] > 0.0
    stored, _ = load_model(base)
    for name, weight in stored.named_parameters():
        assert torch.equal(policy.model.get_parameter(name), weight), name
    assert all(side.lora_B.any() for _, side in sides_of(policy.model))
    step = tmp_path / "whole/checkpoints/step_00000004"
    assert not (step / "model.safetensors").exists()
    state = load_file(step / "training/optimizer.safetensors")
    assert all(".side.lora_" in name for name in state)

    names = ("adapter_model.safetensors", "training/optimizer.safetensors")
    wanted = [(step / name).read_bytes() for name in names]
    shutil.rmtree(step)
    rl.train(rl_config(base, tmp_path / "whole"), resume=True)
    assert [(step / name).read_bytes() for name in names] == wanted


@pytest.mark.ci
@pytest.mark.usefixtures("few_problems")
@pytest.mark.usefixtures("few_problems")
def test_rl_on_a_quantised_base_is_on_policy_and_read_with_that_base(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = rl_config(base, tmp_path / "run", num_steps=2, save_every=2)
    policy = rl.train(replace(config, policy=replace(config.policy, quantize="nf4")))
    assert [row["rl/ratio_drift"] for row in rows_of(tmp_path / "run")] == [0.0] * 2
    assert len(packed_parts(policy.model)) == 14  # it stays in 4 bits
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        wanted = policy.model.logits(ids)
        again = load_policy(PolicyConfig(init=str(tmp_path / "run")), seed=0)
        assert torch.equal(again.model.logits(ids), wanted)
        # Merged, it is what was trained: the rounded base and the adapter, not the base before it was rounded.
        merged = load_policy(PolicyConfig(init=str(tmp_path / "run")), seed=0, merge=True)
        assert not packed_parts(merged.model)
        assert torch.allclose(merged.model.logits(ids), wanted, atol=1e-5)
        whole, _ = load_model(base)
        assert not torch.allclose(whole.logits(ids), wanted, atol=1e-3)
    with pytest.raises(UserError, match="quantised base.*whet export RUN --to merged"):
        again.save(tmp_path / "saved")
    # Trained on, it stays on that base; so does an adapter of a dense one that is trained on beside NF4.
    more = rl_config(tmp_path / "run", tmp_path / "more", num_steps=1, save_every=1)
    assert "adapter of" not in capsys.readouterr().out
    assert packed_parts(rl.train(more).model)
    assert f"whet: lora: the adapter of {tmp_path / 'run'} goes on" in capsys.readouterr().out
    dense = sft.train(sft_config(base, tmp_path / "dense", num_steps=1, save_every=1))
    assert not packed_parts(dense.model)
    late = rl_config(tmp_path / "dense", tmp_path / "late", num_steps=1, save_every=1)
    rl.train(replace(late, policy=replace(late.policy, quantize="nf4")))
    for name in ("more", "late"):
        assert packed_parts(load_policy(PolicyConfig(init=str(tmp_path / name)), seed=0).model), name


def test_training_that_merges_an_adapter_says_how_it_goes_on(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {"num_steps": 1, "save_every": 1}
    sft.train(sft_config(base, tmp_path / "first", **short))
    capsys.readouterr()
    sft.train(sft_config(tmp_path / "first", tmp_path / "second", lora=LoRAConfig(), **short))
    said = "whet: all weights are trained (--lora.rank 3 trains the adapter on)\n"
    assert said in capsys.readouterr().out
    # A dry run says so, too, and finds what the run would stop at.
    sft.check(sft_config(tmp_path / "first", tmp_path / "third", lora=LoRAConfig(), **short), resume=False)
    assert said in capsys.readouterr().out
    for check in (sft.check, lambda config, resume: sft.train(config)):
        with pytest.raises(
            UserError, match=r"lora.rank = 5: .*, which has rank 3; give that, or merge it first"
        ):
            check(
                sft_config(tmp_path / "first", tmp_path / "third", lora=replace(LORA, rank=5)), resume=False
            )


@pytest.mark.ci
def test_a_run_of_adapters_is_read_wherever_a_model_is_named(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import whet

    home = tmp_path / "first"
    shutil.copytree(base, home / "base")
    run = home / "run"
    policy = sft.train(sft_config(home / "base", run, lora=replace(LORA, modules_to_save=("embed_tokens",))))
    said = capsys.readouterr().out
    assert "rank 3 beside 14 matrices: q_proj x 2" in said
    assert "numbers are trained" in said
    assert (run / "checkpoints/best/adapter_model.safetensors").is_file()
    changes = json.loads((run / "weights.json").read_text())
    assert f"weights: {changes['changed']:.1%} of {changes['numbers']:,} weights changed" in said
    assert 0 < changes["beyond_bfloat16"] < changes["changed"] < 1
    assert json.loads((run / "summary.json").read_text())["weights_changed"] == changes["changed"]
    assert "| weights that changed | " in write_report(run).read_text()
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        wanted = policy.model.logits(ids)
        for again in (
            load_policy(PolicyConfig(init=str(run)), seed=0),
            load_policy(PolicyConfig(init=str(home / "base"), adapter=str(run)), seed=0),
            whet.load(run).loaded,
            whet.load(home / "base", adapter=run).loaded,
        ):
            assert isinstance(again.adapter, Adapter)
            assert torch.equal(again.model.logits(ids), wanted)
            with again.adapter.off(again.model):
                plain, _ = load_model(home / "base")
                assert torch.equal(again.model.logits(ids), plain.logits(ids))
    # Trained on: the same adapter, from where it is; the new run's KL is one to that start.
    more = rl.train(rl_config(run, tmp_path / "more", num_steps=1, save_every=1))
    assert rows_of(tmp_path / "more")[0]["rl/kl"] == 0.0
    assert more.trained is not None
    facts = json.loads((tmp_path / "more/checkpoints/step_00000001/adapter_config.json").read_text())
    assert facts["base_model_name_or_path"] == str(home / "base")
    assert facts["r"] == 3
    # Both moved together are found; one that has changed, or is missing, is said.
    home.rename(tmp_path / "second")
    moved = tmp_path / "second"
    assert find_model(str(moved / "run"))[0] == moved / "base"
    with pytest.raises(UserError, match="its base is missing.*policy.adapter"):
        find_model(str(tmp_path / "more"))
    config = json.loads((moved / "base/config.json").read_text())
    (moved / "base/config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(UserError, match="has changed since"):
        find_model(str(moved / "run"))
    with pytest.warns(UserWarning, match="no longer, the model"):
        find_model(str(moved / "base"), str(moved / "run"))


def test_the_reference_shares_the_base_and_has_no_adapter_at_first(base: Path) -> None:
    policy = with_random_sides(base, torch.float32, LoRAConfig(rank=4))
    kept = Reference(policy.model, AlgoConfig(kl="k3_loss", kl_coef=0.1)).model
    shared = {id(p) for p in policy.model.parameters() if not p.requires_grad}
    own = [p for p in kept.parameters() if id(p) not in shared]
    assert len(own) == 2 * 14
    ids = torch.tensor([[1, 2, 3]])
    start = policy.model.logits(ids).detach()
    with torch.no_grad():
        for _, side in sides_of(policy.model):
            side.lora_B.zero_()
    assert torch.equal(kept.logits(ids), start)
    off = Reference(policy.model, AlgoConfig(kl="k3_loss", kl_coef=0.1)).model
    assert not list(sides_of(off))
    assert all(id(p) in shared for p in off.parameters())
    assert len(list(sides_of(policy.model))) == 14
    moving = Reference(policy.model, AlgoConfig(kl="k3_loss", kl_coef=0.1, ref_ema=0.5))
    assert len(moving.tensors()) == 2 * 14
    with torch.no_grad():
        for _, side in sides_of(policy.model):
            side.lora_B.fill_(1.0)
    moving.follow(policy.model, 1)
    assert all(bool((side.lora_B == 0.5).all()) for _, side in sides_of(moving.model))


def test_b_learns_at_its_own_rate(base: Path) -> None:
    policy = with_random_sides(base, torch.float32, LoRAConfig(rank=4, lr_ratio=8.0))
    optimizer = Optimizer(policy.model, OptimConfig(lr=1e-3, max_grad_norm=1e9))
    _, side = next(sides_of(policy.model))
    before = side.lora_A.detach().clone(), side.lora_B.detach().clone()
    for part in (side.lora_A, side.lora_B):
        part.grad = torch.ones_like(part)
    optimizer.step(1e-3)
    # AdamW's first step is the learning rate.
    torch.testing.assert_close(
        before[0] - side.lora_A, torch.full_like(before[0], 1e-3), atol=1e-6, rtol=1e-4
    )
    torch.testing.assert_close(
        before[1] - side.lora_B, torch.full_like(before[1], 8e-3), atol=1e-6, rtol=1e-4
    )


def test_targets_are_ends_of_names_patterns_and_layers(base: Path) -> None:
    model, _ = load_model(base)

    def names(**settings: Any) -> list[str]:
        return [target.name for target in choose(model, LoRAConfig(rank=2, **settings))]

    assert names() == [target.name for target in targets_of(model)]
    assert len(names()) == 14
    assert names(targets=("q_proj",), layers="1") == ["model.layers.1.self_attn.q_proj"]
    assert len(names(targets=("*.self_attn.*",))) == 8
    for settings, message in (
        ({"targets": ("k_porj",)}, "did you mean 'k_proj'"),
        ({"targets": ("lm_head",)}, "modules_to_save"),
        ({"layers": "1-2"}, "layers 0 to 1, not 2"),
    ):
        with pytest.raises(UserError, match=message):
            names(**settings)
    with pytest.raises(UserError, match="q_proj gets an adapter"):
        Trained(model, LoRAConfig(rank=2, modules_to_save=("self_attn",)), base=Base("", base), seed=0)
    with pytest.raises(UserError, match="tied to the embeddings"):
        Trained(model, LoRAConfig(rank=2, modules_to_save=("lm_head",)), base=Base("", base), seed=0)


REFUSED: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "random weights": (
        lambda base, out: replace(
            sft_config(base, out),
            policy=PolicyConfig(tokenizer="bytes", model=replace(SHAPE, vocab_size=ModelConfig.vocab_size)),
        ),
        "starts from random weights",
    ),
    "fields without a rank": (
        lambda base, out: sft_config(base, out, lora=LoRAConfig(dora=True)),
        "lora.dora is read with lora.rank",
    ),
    "no range": (lambda base, out: LoRAConfig(rank=2, layers="3-1"), "such as 8-15"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused(case: str, base: Path, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    with pytest.raises((UserError, ValueError), match=message):
        sft.check(make(base, tmp_path / "out"), False)  # pyright: ignore[reportArgumentType]


def test_merging_into_16_bits_loses_most_of_a_young_adapter_and_says_so(base: Path, tmp_path: Path) -> None:
    policy = with_random_sides(base, torch.float32, LoRAConfig(rank=4))
    assert policy.trained is not None
    with torch.no_grad():
        for _, side in sides_of(policy.model):
            side.lora_B.mul_(1e-4)
    policy.save(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter")
    wide, narrow = (load_model(base, dtype=dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    assert adapter.fit(wide) is wide
    assert adapter.merge(wide).share < 1e-2
    lost = adapter.merge(narrow)
    assert 0.5 < lost.share <= lost.worst
    assert f"{lost.share:.2%}" in str(lost)
