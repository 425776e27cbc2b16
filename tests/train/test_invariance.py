"""The loss and its gradient do not depend on micro-batches, order, padding or the number of ranks.

The model runs in float64 throughout (its float32 islands are lifted), so that 1e-10 separates rounding from
mistakes: sums of a few hundred terms of size 1 differ by 1e-13, a lost or doubled token by 1e-3. Run as a script,
this file is one rank.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from whet.algo.packing import TrainingSequence
from whet.generate.policy import Policy
from whet.model.config import ModelConfig
from whet.model.tokenizer import Tokenizer
from whet.model.transformer import LanguageModel, rotary_tables
from whet.model.weights import build_model
from whet.schema import ResponseSchema
from whet.train.objective import AlgoConfig, Objective
from whet.train.sft import train_step
from whet.train.step import OptimConfig, Optimizer
from whet.types import Group, Problem, Sample

TEMPERATURE = 0.7
MAX_LENGTH = 12
WIDE = 10**6
CLOSE = {"rtol": 1e-10, "atol": 1e-10}

ALGOS = {
    "grpo": AlgoConfig(aggregation="sequence_mean", uninformative="keep"),
    "dr_grpo": AlgoConfig(aggregation="constant", uninformative="keep"),
    "dapo_kl_entropy": AlgoConfig(clip_high=0.28, kl="k2", kl_coef=0.3, entropy_coef=0.05),
    "k3_masked": AlgoConfig(kl="k3", kl_coef=0.1, mask_truncated=True),
}


def make_policy() -> Policy:
    """A two-layer model with clearly non-uniform outputs, in float64."""
    tokenizer = Tokenizer.characters("0123456789+=,", ResponseSchema().tags)
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_positions=64,
    )
    model = build_model(shape).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return Policy(model, tokenizer, ResponseSchema())


def nudge(model: LanguageModel, seed: int) -> None:
    """Move the weights a little, so that ratios leave 1 and the KL to the old weights leaves 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def make_groups(vocab: int) -> list[Group]:
    """Groups of odd lengths with one unscorable, one truncated and one zero-advantage sample."""
    generator = torch.Generator().manual_seed(1)

    def ids(low: int, high: int) -> tuple[int, ...]:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())

    groups = []
    for number in range(4):
        prompt, samples = ids(1, 9), []
        for index in range(3):
            completion = ids(1, MAX_LENGTH)
            logprobs = (-3.2 + 0.6 * torch.randn(len(completion), generator=generator)).tolist()
            samples.append(
                Sample(
                    uid=str(number),
                    index=index,
                    prompt_ids=prompt,
                    completion_ids=completion,
                    sampler_logprobs=tuple(logprobs),
                    text="",
                    finish_reason="length" if (number, index) == (1, 0) else "stop",
                    reward=0.0,
                    advantage=[1.25, -0.75, -0.5][index],
                )
            )
        groups.append(Group(problem=make_problem(number), samples=tuple(samples)))
    first, last = groups[0].samples[0], groups[3].samples[2]
    unscorable, zero = replace(first, reward=None, advantage=None), replace(last, advantage=0.0)
    groups[0] = replace(groups[0], samples=(unscorable, *groups[0].samples[1:]))
    groups[3] = replace(groups[3], samples=(*groups[3].samples[:2], zero))
    return groups


def make_problem(number: int) -> Problem:
    return Problem(uid=str(number), task="arithmetic", prompt=f"{number}+5=", answer=f"{number + 5}")


class Recorder(Optimizer):
    """Keeps the gradients instead of stepping."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model, OptimConfig())
        self.model = model
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self, lr: float) -> float:
        self.gradients = take_gradients(self.model)
        return 1.0


def take_gradients(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Return the gradients and clear them."""
    taken = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def objective_step(
    algo: AlgoConfig, groups: Sequence[Group], token_budget: int
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    policy = make_policy()
    objective = Objective(
        policy,
        algo,
        temperature=TEMPERATURE,
        max_length=MAX_LENGTH,
        token_budget=token_budget,
        autocast=None,
    )
    nudge(policy.model, 7)
    recorder = Recorder(policy.model)
    metrics = objective.update(groups, recorder, 1e-3)
    return metrics, recorder.gradients


def sft_step(indices: Sequence[int], token_budget: int) -> tuple[float, dict[str, torch.Tensor]]:
    policy = make_policy()
    samples = [s for group in make_groups(policy.tokenizer.vocab_size) for s in group.samples]
    sequences = [
        TrainingSequence(prompt_ids=samples[i].prompt_ids, completion_ids=samples[i].completion_ids)
        for i in indices
    ]
    loss, trained, read = train_step(policy, sequences, OptimConfig(token_budget=token_budget))
    assert trained == sum(len(s.completion_ids) for s in samples)
    assert read == trained + sum(len(s.prompt_ids) for s in samples)
    return loss, take_gradients(policy.model)


def padded_logits(model: LanguageModel, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """An independent forward: right-padded rows [B, T], a dense mask, one matrix product per projection."""
    config, weights = model.config, dict(model.named_parameters())
    longest = max(len(row) for row in rows)
    tokens_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    heads, kv_heads, channels = config.num_heads, config.num_kv_heads, config.head_dim
    exponents = torch.arange(0, channels, 2, dtype=torch.float64) / channels
    angles = torch.arange(longest, dtype=torch.float64)[:, None] / config.rope_theta**exponents
    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None, :]
    blocked = torch.ones(longest, longest, dtype=torch.bool).triu(1)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name]

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[name].T

    def rotate(x_BTHC: torch.Tensor) -> torch.Tensor:
        left, right = x_BTHC[..., : channels // 2], x_BTHC[..., channels // 2 :]
        turned = torch.complex(left, right) * turn
        return torch.cat((turned.real, turned.imag), -1)

    x = weights["model.embed_tokens.weight"][tokens_BT]
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}."
        y = norm(x, name + "input_layernorm.weight")
        q = rotate(project(y, name + "self_attn.q_proj.weight").unflatten(-1, (heads, channels)))
        k = rotate(project(y, name + "self_attn.k_proj.weight").unflatten(-1, (kv_heads, channels)))
        v = project(y, name + "self_attn.v_proj.weight").unflatten(-1, (kv_heads, channels))
        k, v = (z.repeat_interleave(heads // kv_heads, dim=2) for z in (k, v))
        scores = torch.einsum("bqhc,bkhc->bhqk", q, k) / channels**0.5
        probs = scores.masked_fill(blocked, float("-inf")).softmax(-1)
        out = torch.einsum("bhqk,bkhc->bqhc", probs, v).flatten(2)
        x = x + project(out, name + "self_attn.o_proj.weight")
        y = norm(x, name + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(project(y, name + "mlp.gate_proj.weight"))
        x = x + project(gate * project(y, name + "mlp.up_proj.weight"), name + "mlp.down_proj.weight")
    return norm(x, "model.norm.weight") @ weights["model.embed_tokens.weight"].T


def reference_objective(algo: AlgoConfig, groups: Sequence[Group]) -> tuple[float, dict[str, torch.Tensor]]:
    """The objective token by token from its definition, with the independent forward."""
    policy = make_policy()
    model = policy.model
    frozen = copy.deepcopy(model)
    nudge(model, 7)
    samples = [
        s
        for group in groups
        for s in group.samples
        if s.advantage is not None and not (algo.mask_truncated and s.finish_reason == "length")
    ]
    rows = [(*s.prompt_ids, *s.completion_ids) for s in samples]
    log_probs = torch.log_softmax(padded_logits(model, rows) / TEMPERATURE, -1)
    with torch.no_grad():
        ref_log_probs = torch.log_softmax(padded_logits(frozen, rows) / TEMPERATURE, -1)
    per_sequence = []
    for row, sample in enumerate(samples):
        terms = []
        for t, token in enumerate(sample.completion_ids):
            at = (row, len(sample.prompt_ids) - 1 + t)
            logp = log_probs[at][token]
            # The engine keeps sampler log-probabilities in float32.
            ratio = (logp - float(torch.tensor(sample.sampler_logprobs[t], dtype=torch.float32))).exp()
            advantage = sample.advantage or 0.0
            bounded = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
            loss = torch.maximum(-ratio * advantage, -bounded * advantage)
            delta = logp - ref_log_probs[at][token]
            if algo.kl == "k2":
                loss = loss + algo.kl_coef * delta**2 / 2
            if algo.kl == "k3":
                loss = loss + algo.kl_coef * (torch.exp(-delta) + delta - 1)
            entropy = -(log_probs[at].exp() * log_probs[at]).sum()
            terms.append(loss - algo.entropy_coef * entropy)
        per_sequence.append(torch.stack(terms))
    if algo.aggregation == "sequence_mean":
        # Token weights 1/length are kept in float32.
        weights = [float(torch.tensor(1 / len(terms), dtype=torch.float32)) for terms in per_sequence]
        total = sum(w * terms.sum() for w, terms in zip(weights, per_sequence, strict=True)) / len(samples)
    elif algo.aggregation == "token_mean":
        total = torch.cat(per_sequence).mean()
    else:
        total = torch.cat(per_sequence).sum() / (len(samples) * MAX_LENGTH)
    assert isinstance(total, torch.Tensor)
    total.backward()
    return float(total.detach()), take_gradients(model)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert gradient.dtype == torch.float64
        torch.testing.assert_close(gradient, expected[name], **CLOSE, msg=lambda text, n=name: f"{n}: {text}")


def lift_to_float64() -> None:
    """Turn the model's float32 islands (norms, rotary, softmax) into float64."""
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def float64_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def test_the_islands_are_lifted() -> None:
    assert rotary_tables(make_policy().model.config, torch.device("cpu"))[0].dtype == torch.float64


@pytest.mark.parametrize("name", ALGOS)
def test_objective_equals_the_padded_reference(name: str) -> None:
    groups = make_groups(make_policy().tokenizer.vocab_size)
    loss, expected = reference_objective(ALGOS[name], groups)
    metrics, gradients = objective_step(ALGOS[name], groups, WIDE)
    assert metrics["rl/clip_high"] > 0  # the case is not trivial: both clips are active
    assert metrics["rl/clip_low"] > 0
    assert metrics["rl/loss"] == pytest.approx(loss, rel=1e-10)
    assert_same(gradients, expected)


@pytest.mark.parametrize("name", ALGOS)
@pytest.mark.parametrize("token_budget", [1, 23, 60])
def test_objective_does_not_depend_on_micro_batches_and_order(name: str, token_budget: int) -> None:
    groups = make_groups(make_policy().tokenizer.vocab_size)
    metrics, expected = objective_step(ALGOS[name], groups, WIDE)
    shuffled = [replace(group, samples=group.samples[::-1]) for group in (groups[2], *groups[:2], groups[3])]
    for order in (groups, shuffled):
        split_metrics, gradients = objective_step(ALGOS[name], order, token_budget)
        assert_same(gradients, expected)
        assert split_metrics == pytest.approx(metrics, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("token_budget", [1, 23, WIDE])
def test_sft_does_not_depend_on_micro_batches_and_order(token_budget: int) -> None:
    policy = make_policy()
    samples = [s for group in make_groups(policy.tokenizer.vocab_size) for s in group.samples]
    rows = [(*s.prompt_ids, *s.completion_ids) for s in samples]
    log_probs = torch.log_softmax(padded_logits(policy.model, rows), -1)
    scores = [
        log_probs[row, len(s.prompt_ids) - 1 + t, token]
        for row, s in enumerate(samples)
        for t, token in enumerate(s.completion_ids)
    ]
    expected = -torch.stack(scores).mean()
    expected.backward()
    reference = take_gradients(policy.model)
    for order in (range(12), [5, 0, 11, 3, 9, 1, 7, 2, 10, 4, 8, 6]):
        loss, gradients = sft_step(order, token_budget)
        assert loss == pytest.approx(float(expected.detach()), rel=1e-10)
        assert_same(gradients, reference)


def run_rank(folder: Path, rank: int, world: int) -> None:
    """Do this rank's share of every step and save loss and gradients."""
    lift_to_float64()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    results: dict[str, torch.Tensor] = {}
    groups = make_groups(make_policy().tokenizer.vocab_size)
    for name, algo in ALGOS.items():
        # Even shares, uneven ones, and a rank that has nothing to do.
        end = {"grpo": 3, "dr_grpo": 4}.get(name)
        shares = groups[rank::world] if end is None else (groups[:end], groups[end:])[rank]
        metrics, gradients = objective_step(algo, shares, 23)
        results |= {f"{name}/{key}": value for key, value in gradients.items()}
        both = [metrics["rl/loss"], metrics["rl/logprob_gap_max"]]
        results[f"{name}/loss"] = torch.tensor(both, dtype=torch.float64)
    results |= sft_results(rank, world)
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()


def sft_results(rank: int, world: int) -> dict[str, torch.Tensor]:
    policy = make_policy()
    samples = [s for group in make_groups(policy.tokenizer.vocab_size) for s in group.samples]
    mine = [
        TrainingSequence(prompt_ids=s.prompt_ids, completion_ids=s.completion_ids)
        for s in samples[rank::world]
    ]
    loss, trained, read = train_step(policy, mine, OptimConfig(token_budget=23))
    found = {f"sft/{key}": value for key, value in take_gradients(policy.model).items()}
    return found | {"sft/loss": torch.tensor([loss, trained, read], dtype=torch.float64)}


def test_two_ranks_do_the_step_of_one(tmp_path: Path) -> None:
    world = 2
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path), str(rank), str(world)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(world))
    groups = make_groups(make_policy().tokenizer.vocab_size)
    for name, algo in ALGOS.items():
        metrics, expected = objective_step(algo, groups, WIDE)
        for results in (first, second):
            assert_same({key: results[f"{name}/{key}"] for key in expected}, expected)
            loss, gap = results[f"{name}/loss"].tolist()
            assert loss == pytest.approx(metrics["rl/loss"], rel=1e-10)
            assert gap == pytest.approx(metrics["rl/logprob_gap_max"], rel=1e-10)
    alone = sft_results(0, 1)
    for results in (first, second):
        assert_same({key: results[key] for key in alone}, alone)


if __name__ == "__main__":
    code = 1
    try:
        run_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
        code = 0
    except BaseException as error:
        print(f"rank {sys.argv[2]}: {error!r}")
        raise
    finally:
        # An ordinary exit after gloo collectives aborts now and then.
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
