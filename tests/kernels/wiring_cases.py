"""What `WHET_KERNELS=triton` changes in models, head and sampling: numbers within rounding, drawn tokens the same."""

from __future__ import annotations

import pytest
import torch

from whet.algo.logprobs import token_logprobs
from whet.algo.packing import TrainingSequence, pack
from whet.generate.engine import Completion, Engine, Request
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import score_micro_batch
from whet.kernels.mode import VARIABLE
from whet.model.config import Family, ModelConfig
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model

PARAMS = SamplingParams(temperature=0.8, max_new_tokens=5)  # the interpreter takes a second each


def make_model(family: Family = "qwen3") -> LanguageModel:
    shape = ModelConfig(
        family=family,
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=64,
    )
    model = build_model(shape)
    init_weights(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    model.num_valid_tokens = 47
    return model


def sample(model: LanguageModel, engine: Engine | None = None) -> list[list[Completion]]:
    """Draw ragged rows, several of a prompt, more than fit at once."""
    requests = [
        Request(prompt_ids=tuple(range(3, 3 + length)), seeds=(length, length + 50), max_new_tokens=limit)
        for length, limit in ((4, 5), (1, 2), (11, 5), (7, 3))
    ]
    return (engine or Engine(model, stop_ids=(5,), max_rows=5)).generate(requests, PARAMS)


def gradients(model: LanguageModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Score sequences and take the gradient of their log-probabilities and entropies."""
    rows = [TrainingSequence(prompt_ids=(1, 2, 3), completion_ids=tuple(range(4, 4 + n))) for n in (5, 9)]
    (micro,) = pack(rows, token_budget=64).micro_batches
    model.zero_grad()
    logprobs, entropies = score_micro_batch(model, micro, temperature=0.7)
    (logprobs * torch.linspace(-1, 1, logprobs.shape[0]) + 0.1 * entropies).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat((logprobs, entropies)).detach(), found


def check_wiring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the eager path with the wired one; the kernels of `dispatch.KERNELS` serve the CPU here."""
    model = make_model()
    plain, (numbers, grads) = sample(model), gradients(model)
    monkeypatch.setenv(VARIABLE, "triton")
    engine = Engine(model, stop_ids=(5,), max_rows=5)
    for _ in range(2):  # the rows of the first session serve the second
        wired = sample(model, engine)
        for mine, theirs in zip(wired, plain, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert (one.ids, one.finish_reason) == (other.ids, other.finish_reason)
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert engine._static is not None
    again, wired_grads = gradients(model)
    torch.testing.assert_close(again, numbers, rtol=1e-5, atol=1e-5)
    assert wired_grads.keys() == grads.keys()
    for name, grad in grads.items():
        scale = float(grad.abs().max())
        torch.testing.assert_close(wired_grads[name], grad, rtol=1e-4, atol=1e-5 * max(1.0, scale))
    empty = token_logprobs(torch.zeros(0, 32), model.head_weight, torch.zeros(0, dtype=torch.int64))
    assert empty[0].shape == (0,)
