"""State that some ranks wrote is read by other numbers of ranks, equal to the last bit; no pickle on its way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from whet.ranks.collectives import rank, world_size
from whet.storage.checkpoint import commit_sharded, load_sharded, save_sharded
from whet.storage.commit import verify_folder
from whet.types import UserError


def state(*, filled: bool) -> dict[str, torch.Tensor]:
    """A module's parameters, moments like AdamW's and what is the same on all ranks; zeros to be loaded into."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False))
    full = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        own = parameter.detach()
        if isinstance(own, DTensor):
            assert own.to_local().shape[0] < own.shape[0], "it is not sharded"
        tensors[name] = own.clone()
        tensors[f"second/{name}"] = own * own + 1
    tensors |= {
        "same/half": torch.arange(9).bfloat16(),
        "same/steps": torch.tensor(7.0),
        "same/none": torch.zeros(0, 3),
        "same/flags": torch.tensor([True, False]),
        "same/count": torch.tensor(2**40 + 1),
        "same/big": torch.arange(3000.0),
    }
    if not filled:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    else:
        assert all(torch.equal(whole(tensors[name]), tensor) for name, tensor in full.items())
    return tensors


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save(folder: str) -> None:
    save_sharded(Path(folder), state(filled=True))


def load(folder: str, target: str = "") -> list[str]:
    """Return the tensors that differ; write on what was read to another folder."""
    read, expected = state(filled=False), state(filled=True)
    load_sharded(Path(folder), read)
    if target:
        save_sharded(Path(target), read)
    return [name for name in expected if not torch.equal(whole(read[name]), whole(expected[name]))]


def folders(parent: Path, count: int) -> list[Path]:
    found = [parent / str(number) for number in range(count)]
    for folder in found:
        folder.mkdir()
    return found


@pytest.mark.ci
def test_two_ranks_then_three_then_one(tmp_path: Path) -> None:
    two, three = folders(tmp_path, 2)
    assert run_ranks(2, save, str(two)) == [None, None]
    assert run_ranks(3, load, str(two), str(three)) == [[], [], []]
    assert load(str(three)) == []
    for folder in (two, three):
        files = [path.name for path in folder.iterdir()]
        assert all(name.endswith(".safetensors") for name in files), files
        places: dict[str, list[str]] = {}
        for name in files:
            with safe_open(folder / name, "pt") as opened:
                assert json.loads(opened.metadata()["DCP_SHARDING_INFO"])
                for key in opened.keys():  # noqa: SIM118 - it is no mapping
                    places.setdefault(key, []).append(name)
        assert all(len(found) == 1 for key, found in places.items() if key.startswith("same/")), (
            "written once"
        )
        assert len(places["0.weight"]) == len(files), "written by all"


@pytest.mark.ci
def test_one_rank_then_two(tmp_path: Path) -> None:
    (one,) = folders(tmp_path, 1)
    save(str(one))
    assert load(str(one)) == []
    assert run_ranks(2, load, str(one)) == [[], []]


def damage(folder: str, how: str) -> None:
    read = state(filled=False)
    if how == "shape":
        read["same/half"] = torch.zeros(8).bfloat16()
    if how == "dtype":
        read["same/half"] = torch.zeros(9)
    if how == "missing":
        read["same/more"] = torch.zeros(1)
    load_sharded(Path(folder), read)


OTHER = {
    "shape": "expected torch.bfloat16 [8]",
    "dtype": "expected torch.float32 [9]",
    "missing": "has no tensor 'same/more'",
}


@pytest.mark.ci
def test_other_state_is_refused(tmp_path: Path) -> None:
    (folder,) = folders(tmp_path, 1)
    save(str(folder))
    for how, said in OTHER.items():
        with pytest.raises(UserError) as caught:
            damage(str(folder), how)
        assert said in str(caught.value)
    for kind, text in run_ranks(2, damage, str(folder), "shape"):
        assert kind == "UserError"
        assert OTHER["shape"] in text


@pytest.mark.ci
def test_a_lost_part_is_not_taken_for_zeros(tmp_path: Path) -> None:
    (folder,) = folders(tmp_path, 1)
    run_ranks(2, save, str(folder))
    next(iter(sorted(folder.iterdir()))).unlink()
    with pytest.raises(UserError, match="has no tensor|with"):
        load(str(folder))


def commit(final: str, how: str) -> Any:
    def write(folder: Path) -> None:
        assert rank() == 0
        if how == "full":
            raise OSError(28, "No space left on device")
        (folder / "state.json").write_text("{}")

    commit_sharded(Path(final), "training", state(filled=True), write)


def test_a_folder_of_all_ranks_is_committed_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "step"
    for kind, text in run_ranks(2, commit, str(final), "full"):
        assert kind == "DiskFullError"
        assert "No space left" in text
    assert list(tmp_path.iterdir()) == []
    assert run_ranks(2, commit, str(final), "whole") == [None, None]
    verify_folder(final)
    assert run_ranks(3, load, str(final / "training")) == [[], [], []]
    assert {path.suffix for path in final.rglob("*") if path.is_file()} == {".json", ".safetensors"}
