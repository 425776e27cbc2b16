"""`whet merge`: equal to peft's `add_weighted_adapter`, in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs

from whet.compress.merge import MergeConfig, merge
from whet.model.config import ModelConfig
from whet.model.lora import merge as rules
from whet.model.lora.files import find_model, read_adapter
from whet.model.lora.side import LoRAConfig
from whet.model.lora.trained import Base, Trained
from whet.model.transformer import init_weights
from whet.model.weights import build_model, load_model, save_model
from whet.types import UserError

needs_peft = needs("peft")
IDS = torch.tensor([[3, 14, 15, 9, 2, 6, 5], [35, 8, 9, 7, 9, 3, 2]])
WEIGHTS = (0.7, -0.4, 1.3)
LORAS = {
    "a": LoRAConfig(rank=4),
    "b": LoRAConfig(rank=4, alpha=3.0, targets=("q_proj", "up_proj")),
    "c": LoRAConfig(rank=4, rslora=True, layers="1"),
    "narrow": LoRAConfig(rank=2, targets=("q_proj",)),
    "dora": LoRAConfig(rank=4, dora=True),
    "saved": LoRAConfig(rank=4, modules_to_save=("model.norm",)),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merging")
    shape = ModelConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2
    )
    shape = replace(shape, head_dim=8, max_positions=32, init_std=0.2)
    for name in ("base", "other"):
        model = build_model(shape)
        init_weights(model, seed=len(name))
        save_model(model, folder / name)
    for seed, (name, lora) in enumerate(LORAS.items()):
        write(folder / "base", folder / name, lora, seed)
    write(folder / "other", folder / "elsewhere", LORAS["a"], 9)
    return folder


def write(base: Path, folder: Path, lora: LoRAConfig, seed: int) -> None:
    model, _ = load_model(base)
    adapters = Trained(model, lora, base=Base.of(str(base), base), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in adapters.named_parameters():
            parameter.add_(torch.empty(parameter.shape).normal_(0, 0.2, generator=generator))
    adapters.write(folder)


def logits(folder: Path) -> torch.Tensor:
    base, adapter = find_model(str(folder))
    model, _ = load_model(base)
    assert adapter is not None
    adapter.apply(adapter.fit(model))
    with torch.no_grad():
        return model.logits(IDS)


def peft_logits(home: Path, names: str, method: str, density: float) -> torch.Tensor:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(home / "base")
    wrapped = peft.PeftModel.from_pretrained(model, str(home / names[0]), adapter_name=names[0])
    for name in names[1:]:
        wrapped.load_adapter(str(home / name), adapter_name=name)
    options: dict[str, Any] = {"density": density} if method == "ties" else {}
    wrapped.add_weighted_adapter(list(names), list(WEIGHTS), "merged", combination_type=method, **options)
    wrapped.set_adapter("merged")
    with torch.no_grad():
        return wrapped(IDS).logits


@needs_peft
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("method", ["cat", "linear", "ties"])
def test_a_merged_adapter_is_that_of_peft(method: str, home: Path, tmp_path: Path) -> None:
    density: dict[str, Any] = {"density": 0.4} if method == "ties" else {}
    adapters = tuple(str(home / name) for name in "abc")
    merge(MergeConfig(adapters=adapters, weights=WEIGHTS, method=method, out=str(tmp_path / "m"), **density))
    wanted = peft_logits(home, "abc", method, 0.4)
    # Float32 sums in another order move logits of size 10 by some 1e-5; the methods differ by 0.1 and more.
    torch.testing.assert_close(logits(tmp_path / "m"), wanted, atol=1e-4, rtol=0)
    assert json.loads((tmp_path / "m" / "adapter_config.json").read_text())["r"] == (
        12 if method == "cat" else 4
    )


@needs_peft
@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties"])
def test_pruning_rules_give_the_numbers_of_peft(method: rules.Method) -> None:
    from peft.utils import merge_utils

    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(6, 7, generator=generator) for _ in WEIGHTS]
    torch.manual_seed(3)
    wanted = getattr(merge_utils, method)(tensors, torch.tensor(WEIGHTS), 0.4)
    found = rules.RULES[method](tensors, WEIGHTS, 0.4, torch.Generator().manual_seed(3))
    assert torch.equal(found, wanted)


def test_cat_is_the_exact_sum_of_any_ranks(home: Path, tmp_path: Path) -> None:
    adapters = [read_adapter(home / name) for name in ("a", "narrow")]
    pairs = rules.merge_adapters(adapters, (0.5, 2.0))
    for name, pair in pairs.items():
        wanted = sum(
            weight * adapter.pairs[name].scaling * adapter.pairs[name].b_FR @ adapter.pairs[name].a_RD
            for adapter, weight in zip(adapters, (0.5, 2.0), strict=True)
            if name in adapter.pairs
        )
        torch.testing.assert_close(pair.b_FR @ pair.a_RD, wanted, atol=1e-6, rtol=1e-5)
    words = [str(home / "a"), str(home / "narrow")]
    lines = merge(MergeConfig(adapters=tuple(words), weights=(1.0, -1.0), out=str(tmp_path / "deep" / "m")))
    assert lines[-1].startswith("next: whet chat ")
    # A merged adapter finds its base, and taking itself away again leaves the base.
    merge(MergeConfig(adapters=(words[0], words[0]), weights=(1.0, -1.0), out=str(tmp_path / "none")))
    base, _ = load_model(home / "base")
    with torch.no_grad():
        torch.testing.assert_close(logits(tmp_path / "none"), base.logits(IDS), atol=1e-5, rtol=0)
    assert not torch.allclose(logits(tmp_path / "deep" / "m"), logits(tmp_path / "none"), atol=0.01)


def test_the_seed_chooses_what_dare_keeps(home: Path) -> None:
    adapters = [read_adapter(home / name) for name in "ab"]
    name = next(iter(adapters[1].pairs))
    drawn = [
        rules.merge_adapters(adapters, (1.0, 1.0), method="dare_ties", density=0.5, seed=seed)[name].a_RD
        for seed in (0, 0, 1)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "other base": ("a elsewhere", {}, "not trained on the same base"),
    "ranks": ("a narrow", {"method": "linear"}, "has ranks 2 and 4"),
    "dora": ("a dora", {}, "whose lengths do not add up"),
    "saved": ("saved a", {}, "is a whole tensor"),
    "one": ("a", {}, "two or more"),
    "weights": ("a b", {"weights": (1.0,)}, "weights: got 1 for 2"),
    "zero": ("a b", {"weights": (1.0, 0.0)}, "other than 0"),
    "density": ("a b", {"method": "ties", "density": 0.0}, "above 0"),
    "unread density": ("a b", {"density": 0.3}, "density is read with"),
    "unread seed": ("a b", {"method": "ties", "seed": 1}, "seed is read with"),
    "there": ("a b", {"out": "."}, "exists already"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused_in_one_line(case: str, home: Path, tmp_path: Path) -> None:
    names, options, message = REFUSED[case]
    settings = {"out": str(tmp_path / "out"), **options}
    with pytest.raises((UserError, ValueError)) as refusal:
        merge(MergeConfig(adapters=tuple(str(home / name) for name in names.split()), **settings))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_numbers_whose_sum_is_0_are_elected_as_positive() -> None:
    """As peft: `torch.where(sum >= 0, 1, -1)`; of 3 and -3 the 3 stays, and it is divided by the one that agrees."""
    found = rules._elected(torch.tensor([[3.0, -2.0, 0.5], [-3.0, -4.0, -2.5]]), (1.0, 0.5))
    assert found.tolist() == [3.0, (-2.0 - 2.0) / 2, -1.25]
