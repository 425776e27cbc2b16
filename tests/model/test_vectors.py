"""Task vectors: closed forms on small weights, and whole models from the command line."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).parent.parent / "editing"))
from patient import SHAPE, fresh

from whet import __main__
from whet.model.config import Block
from whet.model.vectors import combine, parse_scales
from whet.types import UserError

BASE = {
    "model.layers.0.w": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "model.layers.1.w": torch.zeros(4),
    "head": torch.ones(4),
}
FIRST = {
    "model.layers.0.w": torch.tensor([2.0, 2.0, 2.0, 8.0]),
    "model.layers.1.w": torch.full((4,), 2.0),
    "head": torch.full((4,), 3.0),
}
SECOND = {
    "model.layers.0.w": torch.tensor([0.0, 2.5, 5.0, 6.0]),
    "model.layers.1.w": torch.ones(4),
    "head": torch.ones(4),
}


def close(found: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


def test_adding_all_of_one_gives_it_and_negating_mirrors_it() -> None:
    name = "model.layers.0.w"
    close(combine(BASE, [FIRST], [1.0])[name], [2, 2, 2, 8])
    close(combine(BASE, [FIRST], [-1.0])[name], [0, 2, 4, 0])
    close(combine(BASE, [FIRST, SECOND], [0.5, 2.0])[name], [1.0 + 0.5 - 2, 2 + 1, 3 - 0.5 + 4, 4 + 2 + 4])


def test_ties_elects_signs_among_the_largest() -> None:
    # Differences 1 0 -1 4 and -1 .5 2 2; the half that is largest: (1 or -1) 4, and 2 2; signs + of both sums.
    found = combine(BASE, [FIRST, SECOND], [1.0, 1.0], method="ties", density=0.5)["model.layers.0.w"]
    close(found[2:], [3 + 2, 4 + (4 + 2) / 2])


def test_dare_keeps_the_expected_sum() -> None:
    many = {"w": torch.zeros(20_000)}
    found = combine(many, [{"w": torch.ones(20_000)}], [1.0], method="dare_linear", density=0.1)["w"]
    assert set(found.tolist()) == {0.0, 10.0}
    assert float(found.mean()) == pytest.approx(1.0, abs=0.1)  # 4.7 standard deviations of .021


def test_scales_by_layer() -> None:
    scales = parse_scales(["0=0.5", "1-3=0", "outside=2"])
    assert scales == {0: 0.5, 1: 0.0, 2: 0.0, 3: 0.0, None: 2.0}
    with pytest.raises(UserError, match="layer_scales: the model has layers 0 to 1, got 2"):
        combine(BASE, [FIRST], [1.0], scales=scales)
    scales = parse_scales(["0=0.5", "1-1=0", "outside=2"])
    found = combine(BASE, [FIRST], [1.0], scales=scales)
    close(found["model.layers.0.w"], [1.5, 2, 2.5, 6])
    close(found["model.layers.1.w"], [0, 0, 0, 0])
    close(found["head"], [5, 5, 5, 5])
    with pytest.raises(ValueError, match="layer_scales: got 'x=1'"):
        parse_scales(["x=1"])
    with pytest.raises(ValueError, match="layer_scales: got '1=1.2.3'"):
        parse_scales(["1=1.2.3"])
    for wrong in ("5-3=1", "7-99999999999=0.5"):
        with pytest.raises(ValueError, match=f"got '{wrong}', expected ascending layers below 1,024"):
            parse_scales([wrong])


def test_other_shapes_are_refused() -> None:
    with pytest.raises(UserError, match="model 1 differs from the base in head"):
        combine(BASE, [FIRST | {"head": torch.ones(5)}], [1.0])


def test_whole_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, tuned, out = (tmp_path / name for name in ("base", "tuned", "out"))
    for seed, folder in enumerate((base, tuned)):
        folder.mkdir()
        fresh(replace(SHAPE, block=Block()), seed=seed).save(folder)
    words = ["merge", str(tuned), "--base", str(base), "--weights", "-1", "--out", str(out)]
    assert __main__.run([*words, "--layer-scales", "0-1=0.5", "2-3=0"]) == 0
    assert "-1 x (" in capsys.readouterr().out
    before, after, merged = (load_file(folder / "model.safetensors") for folder in (base, tuned, out))
    for name, tensor in merged.items():
        scale = 0.5 if "layers.0." in name or "layers.1." in name else 0.0 if "layers." in name else 1.0
        torch.testing.assert_close(tensor, before[name] - scale * (after[name] - before[name]))
    with pytest.raises((UserError, SystemExit), match="layer_scales is read with --base only"):
        __main__.run(["merge", str(base), str(tuned), "--out", str(tmp_path / "x"), "--layer-scales", "0=1"])
