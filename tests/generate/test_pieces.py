"""A text that is read in pieces has the bits of one that is read in one go, in every family."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
import family_cases as cases

from whet.generate import engine as engine_module
from whet.generate.engine import Engine, Request
from whet.generate.rows import Job
from whet.generate.sampling import SamplingParams
from whet.model.attention import Packed
from whet.model.weights import load_model

FEW = ("llama", "gpt_oss", "qwen3_5", "lfm2")
"""Tiles, windows and sinks, a recurrence, a convolution."""
LENGTH = 270


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.ci) for name in cases.CASES]
)
def test_pieces_have_the_bits_of_the_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PIECE_TOKENS", 128)
    cases.make(cases.CASES[name], tmp_path)
    model = load_model(tmp_path)[0].eval()
    ids, params = tuple(cases.ids_of(LENGTH)), SamplingParams(max_new_tokens=6)
    request = Request(prompt_ids=ids, seeds=(1, 2))
    engine = Engine(model, stop_ids=(), max_rows=3)
    (expected,) = engine.generate([request], params)
    jobs = [Job(request=request, seed=seed, params=params) for seed in request.seeds]
    with engine.session(engine.room(3, LENGTH, 6)) as rows:
        whole = model(torch.tensor(ids), torch.arange(LENGTH), Packed([LENGTH], engine.device))
        reading, hidden = engine.begin(ids), []
        while not reading.is_read:
            hidden.append(engine.read(reading))
        assert len(hidden) == 3
        assert torch.equal(torch.cat(hidden), whole)
        engine.admit_read(rows, reading, jobs)
        while rows.jobs:
            engine.decode(rows)
            engine.harvest(rows)
    assert [job.completion for job in jobs] == expected
