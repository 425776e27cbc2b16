"""Shares of changed weights against counts over whole models in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import family_cases
import pytest
import torch
from seeing import save_model as save_seeing

from whet.eval.compare import compare, page
from whet.model import changes
from whet.model.changes import changed_directions, changed_weights, direction_of, summarise_directions
from whet.model.config import ModelConfig
from whet.model.lora.files import read_adapter
from whet.model.lora.side import LoRAConfig
from whet.model.lora.trained import Base, Trained
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model, load_model, save_model
from whet.types import UserError

SHAPE = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=32,
    tie_embeddings=True,
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_model(made(SHAPE), tmp_path / "base")
    return tmp_path / "base"


def made(shape: ModelConfig) -> LanguageModel:
    model = build_model(shape)
    init_weights(model, seed=1)
    return model


@pytest.mark.parametrize("slice_size", [1, 100, 2**22])
def test_counts_what_was_changed(base: Path, slice_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "SLICE", slice_size)
    model, _ = load_model(base)
    with torch.no_grad():
        weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
        weight[5, :3] += 1.0
        weight[40:43, 7] *= (
            1 + 2**-12
        )  # less than half a unit of bfloat16's last place (2^-9), if it lies well
        rounded = int(
            (
                weight.to(torch.bfloat16)
                != load_model(base)[0].get_parameter("model.layers.1.mlp.up_proj.weight").to(torch.bfloat16)
            ).sum()
        )
        model.get_parameter("model.embed_tokens.weight")[3] = 9.0
    save_model(model, base.parent / "after")
    found = changed_weights(str(base), str(base.parent / "after"))
    assert list(found.layers) == [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "layer 0",
        "layer 1",
    ]
    counts = {name: (count.changed, count.beyond_bfloat16) for name, count in found.layers.items()}
    assert 3 <= rounded < 6
    assert counts["layer 1"] == (6, rounded)
    assert counts["layer 0"] == counts["model.norm.weight"] == (0, 0)
    assert counts["model.embed_tokens.weight"] == (32, 32)
    facts = found.facts()
    assert facts["numbers"] == sum(p.numel() for p in model.parameters())
    assert facts["changed"] == pytest.approx(38 / facts["numbers"])
    assert facts["layers"]["layer 1"]["changed"] == pytest.approx(6 / found.layers["layer 1"].numbers)
    assert str(found).startswith(f"{38 / facts['numbers']:.1%} of {facts['numbers']:,} weights changed, ")
    old, new = (
        torch.cat([p.detach().double().flatten() for p in m.parameters()])
        for m in (load_model(base)[0], model)
    )
    assert facts["relative_change"] == pytest.approx(float((new - old).norm() / old.norm()))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"rank": 3}),
        ("llama", {"rank": 4, "dora": True, "layers": "1"}),
        ("llama", {"rank": 2, "modules_to_save": ("model.norm",)}),
        ("gpt2", {"rank": 3}),
    ],
)
def test_an_adapter_counts_as_merged(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_model(made(replace(SHAPE, family=family, num_kv_heads=4)), base)
    model, _ = load_model(base)
    adapters = Trained(model, LoRAConfig(**settings), base=Base.of(str(base), base), seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in adapters.named_parameters():
            parameter.add_(torch.empty(parameter.shape).normal_(0, 0.01, generator=generator))
    adapters.write(tmp_path / "adapter")

    merged, _ = load_model(base)
    adapter = read_adapter(tmp_path / "adapter")
    adapter.merge(adapter.fit(merged))
    plain = dict(load_model(base)[0].named_parameters())
    changed = rounded = 0
    for name, weight in merged.named_parameters():
        changed += int((weight != plain[name]).sum())
        rounded += int((weight.to(torch.bfloat16) != plain[name].to(torch.bfloat16)).sum())
    for before, after in ((base, tmp_path / "adapter"), (tmp_path / "adapter", base)):
        total = changed_weights(str(before), str(after)).total
        assert (total.changed, total.beyond_bfloat16) == (changed, rounded)
    assert rounded < changed
    # One that began from this adapter has changed nothing yet.
    same = changed_weights(str(base), str(tmp_path / "adapter"), adapter=str(tmp_path / "adapter"))
    assert (same.total.changed, same.skipped) == (0, ())


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("phi3", ("q_proj", "up_proj")),
        ("lfm2", ("all-linear",)),
        ("mixtral", ("experts.gate_up_proj", "experts.down_proj")),
        ("gpt_oss", ("experts.down_proj",)),
        ("seeing", ("all-linear", "visual.*.qkv")),
    ],
)
def test_an_adapter_counts_by_the_names_of_the_files(
    name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    save_seeing(base) if name == "seeing" else family_cases.make(family_cases.CASES[name], base)
    model, _ = load_model(base)
    adapters = Trained(model, LoRAConfig(rank=2, targets=targets), base=Base.of(str(base), base), seed=0)
    with torch.no_grad():
        for _, parameter in adapters.named_parameters():
            parameter.add_(0.01)
    adapters.write(tmp_path / "adapter")
    merged, _ = load_model(base)
    adapter = read_adapter(tmp_path / "adapter")
    adapter.merge(adapter.fit(merged))
    plain = dict(load_model(base)[0].named_parameters())
    changed = sum(int((weight != plain[name]).sum()) for name, weight in merged.named_parameters())
    found = changed_weights(str(base), str(tmp_path / "adapter"))
    assert found.total.changed == pytest.approx(changed, rel=1e-3)  # products of parts round otherwise
    assert changed > 0
    assert found.skipped == ()


def test_comparisons_of_models_have_them(base: Path, tmp_path: Path) -> None:
    save_model(made(replace(SHAPE, num_layers=1, vocab_size=48)), tmp_path / "other")
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    (evaluation / "eval.json").write_text("{}")
    places = [str(path) for path in (evaluation, base, base, tmp_path / "other")]
    found = compare._weights(places, ["e", "a", "b", "c"], directions=False)
    assert [(row["name"], row["against"]) for row in found] == [("b", "a"), ("c", "b")]
    assert found[0]["changed"] == 0 < found[1]["changed"]  # other draws in the layer that both have
    assert (
        found[0]["text"]
        == f"0.0% of {found[0]['numbers']:,} weights changed, 0.0% beyond bfloat16's rounding"
    )


def test_what_cannot_be_compared_is_named(base: Path, tmp_path: Path) -> None:
    save_model(made(replace(SHAPE, vocab_size=48, tie_embeddings=False)), tmp_path / "other")
    found = changed_weights(str(base), str(tmp_path / "other"))
    assert set(found.skipped) == {"lm_head.weight", "model.embed_tokens.weight"}
    assert str(found).endswith(
        "; 2 tensors not compared (in few bits, of another shape, or on one side only)"
    )
    with pytest.raises(UserError, match="nowhere"):
        changed_weights(str(base), str(tmp_path / "nowhere"))


def turned(rows: int, seed: int) -> torch.Tensor:
    """Return an orthogonal matrix."""
    drawn = torch.randn(rows, rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(drawn).Q


def test_directions_of_a_planted_change() -> None:
    """A matrix made of known singular vectors, changed along some of them."""
    left, right = turned(16, 0), turned(24, 1)
    sizes = torch.arange(16, 0, -1, dtype=torch.float64)
    weight = left @ torch.diag(sizes) @ right[:, :16].t()

    def along(*pairs: tuple[int, float]) -> torch.Tensor:
        return sum((size * torch.outer(left[:, n], right[:, n]) for n, size in pairs), torch.zeros(16, 24))

    inside = direction_of(weight, weight + along((0, 0.3), (1, 0.4)))  # 16 / 8 = 2 main directions
    assert inside is not None
    assert inside.relative == pytest.approx(0.5 / float(sizes.norm()))
    assert inside.stable_rank == pytest.approx(0.25 / 0.16)
    assert (inside.rank_90, inside.rank_full) == (2, 16)
    assert inside.overlap == pytest.approx(1.0)
    assert inside.chance == pytest.approx((2 / 16 + 2 / 24) / 2)
    outside = direction_of(weight, weight + along((7, 3.0), (9, 0.5)))
    assert outside is not None
    assert outside.overlap == pytest.approx(0.0, abs=1e-12)
    assert outside.rank_90 == 1  # 9 of 9.25
    # It reads in a main direction, and writes into another one.
    crossed = direction_of(weight, weight + torch.outer(left[:, 9], right[:, 0]))
    assert crossed is not None
    assert crossed.overlap == pytest.approx(0.5)
    assert direction_of(weight, weight) is None
    assert direction_of(torch.zeros(3, 3), torch.ones(3, 3)) is None


def test_a_random_change_overlaps_by_chance() -> None:
    generator = torch.Generator().manual_seed(3)
    weight, change = (torch.randn(64, 96, generator=generator, dtype=torch.float64) for _ in range(2))
    found = direction_of(weight, weight + change)
    assert found is not None
    # 64 x 96 independent numbers: the share's standard deviation is below 0.01.
    assert found.overlap == pytest.approx(found.chance, abs=0.03)
    assert found.rank_90 > 30


def test_directions_of_models(base: Path, tmp_path: Path) -> None:
    model, _ = load_model(base)
    with torch.no_grad():
        weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
        weight += torch.outer(torch.ones(48), torch.ones(32))
        model.get_parameter("model.layers.0.input_layernorm.weight")[3] = 9.0  # no matrix
        model.get_parameter("model.embed_tokens.weight")[3] = 9.0  # no layer
    save_model(model, tmp_path / "after")
    found = changed_directions(str(base), str(tmp_path / "after"))
    assert {layer: list(matrices) for layer, matrices in found.items()} == {"layer 1": ["mlp.up_proj"]}
    assert found["layer 1"]["mlp.up_proj"].rank_90 == 1
    assert "nine tenths of the change in 1 of 32 directions (median of 1 matrices)" in summarise_directions(
        found
    )
    assert summarise_directions({}) == ""
    places = [str(base), str(tmp_path / "after")]
    (row,) = compare._weights(places, ["a", "b"], directions=True)
    assert row["directions"]["layer 1"]["mlp.up_proj"]["rank_90"] == 1
    figures = page._changes(row)
    assert len(figures) == 4
    assert "layer 1, mlp.up_proj: 1.0000" in figures[2]["svg"]
    (row,) = compare._weights(places, ["a", "b"], directions=False)
    assert len(page._changes(row)) == 1
    (row,) = compare._weights([places[0], str(base)], ["a", "a"], directions=True)
    assert row["directions"] == {}
    assert page._changes(row) == []
