"""Diagnosis of a step's inputs: machine, tokenizer, parameters, and the forward pass."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace

import psutil
import torch
import torch.nn.functional as F

from whet.algo.kept import join_kept, keep_only
from whet.algo.logprobs import COLUMN_QUANTUM
from whet.algo.packing import TrainingSequence, pack
from whet.inspect.diagnose.step import Component, Subject
from whet.inspect.memory.phases import GIB, parameter_sizes
from whet.kernels.cpu.build import reason
from whet.model.config import ModelConfig
from whet.model.quant import places
from whet.model.transformer import SIDE_NAMES
from whet.model.vision.ids import is_image
from whet.telemetry.provenance import describe_environment
from whet.train.optim.precision import has_bfloat16
from whet.train.optim.step import AUTOCAST, PARAMETERS

GPT2_PROMPT = "P: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1    M:"
GPT2_IDS = (
    "47 25 374 46803 80 74 9374 81 14 381 381 381 381 14 23 14 23 14 23 14 23 14 10246 10246 10246 10246 14 49 "
    "32819 48 42 15766 49 266 509 48 74 80 532 657 352 220 220 220 337 25"
)
"""The 46 ids of that prompt under GPT-2's published merges, and the id that identifies that vocabulary."""
GPT2_END = (50_256, "<|endoftext|>")
PACKING = {"float32": 1e-4} | dict.fromkeys((*AUTOCAST, *PARAMETERS), 0.1)
"""Largest accepted difference of a log-probability, in nats, if only the other sequences of the micro-batch differ: the
order of a sum may change, so it is rounding of the precision."""
CAUSAL = 1e-5
"""The same if only later tokens differ: no sum changes."""
FEW, JUNK = 6, 16
RESIDUAL = ("o_proj.weight", "down_proj.weight", "c_proj.weight")


def environment(subject: Subject) -> Component:
    """Record machine, versions, switches, and the weights under test."""
    part, run, policy = Component("Environment"), subject.run, subject.policy
    device, optim = policy.device, run.optim
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = "cpu", psutil.virtual_memory().total
    weights = run.policy.init or f"random, seed {run.seed}"
    part.headline = f"{name}, {optim.precision}; weights: {weights}"
    part.facts = {
        "weights": weights,
        "device": name,
        "device memory, bytes": memory,
        "device memory, GiB": memory / GIB,
        "CUDA": torch.version.cuda,  # pyright: ignore[reportAttributeAccessIssue]
        "precision": optim.precision,
        "mixed precision": optim.precision != "float32",
        "torch.compile": optim.compile,
        "checkpointing": optim.checkpoint_layers,
        "tokens per micro-batch": optim.token_budget,
        "attention": subject.attention,
        "CPU kernels": reason(),
        "seed": run.seed,
        **describe_environment(),
    }
    if device.type == "cuda" and optim.precision.startswith("bfloat16"):
        native = has_bfloat16(device)
        part.check("bfloat16 in hardware", native, native, "yes: emulated it is slow", otherwise="warn")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    free = load < cores + 0.5
    told = f"{load:.1f} on {cores} cores"
    part.check("load of the machine", free, told, f"at most {cores}: others slow it", otherwise="warn")
    return part


def tokenizer(subject: Subject) -> Component:
    """Encode and decode the step's texts, and GPT-2's golden prompt if the tokenizer is GPT-2's."""
    part, tokens = Component("Tokenizer"), subject.policy.tokenizer
    problem, ids = subject.problems[0], list(subject.sequences[0].prompt_ids)
    texts = [text for p in subject.problems for text in (p.prompt, p.solution, p.answer) if text]
    texts += [s.text for group in subject.groups for s in group.samples if "\ufffd" not in s.text]
    broken = [text for text in texts if tokens.decode(tokens.encode(text)) != text]
    count = sum(len(tokens.encode(text)) for text in texts)
    per_token = sum(map(len, texts)) / max(count, 1)
    part.headline = f"vocabulary {tokens.vocab_size:,}, {per_token:.2f} characters a token"
    part.facts = {
        "vocabulary": tokens.vocab_size,
        "characters per token": per_token,
        "first prompt": problem.prompt[:200],
        "first prompt, tokens": len(ids),
        "first prompt, ids": ids[:64],
        "first prompt, by token": [tokens.token_text(index) for index in ids[:64]],
    }
    found = f"{len(texts) - len(broken)} of {len(texts)}" + (f"; not {broken[0][:60]!r}" if broken else "")
    part.check("decode(encode(text)) == text", not broken, found, "all texts of the step")
    # Ids of images are above all vocabularies.
    largest = max(n for s in subject.sequences for n in s.prompt_ids + s.completion_ids if not is_image(n))
    valid = subject.policy.model.num_valid_tokens
    part.check("ids in the vocabulary", largest < valid, f"largest {largest}", f"below {valid}")
    if tokens.vocab_size > GPT2_END[0] and tokens.token_text(GPT2_END[0]) == GPT2_END[1]:
        golden, got = GPT2_IDS.split(), [str(index) for index in tokens.encode(GPT2_PROMPT)]
        right = sum(a == b for a, b in zip(golden, got, strict=False))
        name = "GPT-2's ids of a chess prompt (the stock merges)"
        part.check(name, got == golden, f"{len(got)} ids, {right} as published", f"{len(golden)} ids")
    return part


def parameters(subject: Subject) -> Component:
    """Count the parameters and measure their norms; random weights are compared with their initial distribution."""
    part, model, run = Component("Parameters"), subject.policy.model, subject.run
    named = dict(model.named_parameters())
    count, norms = sum(p.numel() for p in named.values()), {n: _norm(p) for n, p in named.items()}
    total = math.hypot(*norms.values())
    is_tied = all(
        p is model.head_weight for n, p in named.items() if n.endswith(("wte.weight", "embed_tokens.weight"))
    )
    part.headline = f"{count:,} in {len(named)} tensors{', head tied' if is_tied else ''}, norm {total:.2f}"
    sizes = parameter_sizes(model.config)
    # Adapters stand beside the shape's own matrices; some of these may be stored in few bits.
    own = [p.numel() for name, p in named.items() if not name.endswith(SIDE_NAMES)]
    own += [place.shape.numel() for place in places(model).values() if place.packs]
    part.facts = {
        "parameters": count,
        "tensors": len(named),
        "trained tensors": sum(p.requires_grad for p in named.values()),
        "head is the embedding": is_tied,
        "dtype": str(next(iter(named.values())).dtype).removeprefix("torch."),
        "norm of all": total,
        "norm of the embedding": norms[
            next(n for n in named if n.endswith(("wte.weight", "embed_tokens.weight")))
        ],
    }
    found = f"{sum(own):,} in {len(own)} tensors"
    part.check(
        "as the shape says",
        (sum(own), len(own)) == (sum(sizes), len(sizes)),
        found,
        f"{sum(sizes):,} in {len(sizes)}",
    )
    part.check(
        "head tied as the shape says",
        is_tied == model.config.tie_embeddings,
        is_tied,
        model.config.tie_embeddings,
    )
    bad = [name for name, p in named.items() if not bool(p.isfinite().all())]
    part.check("finite", not bad, bad[:3] or "all", "all")
    if not run.policy.init:
        std = model.config.init_std
        law = f"N(0, {std:g}), residual projections divided by sqrt(2 x {model.config.num_layers}); norms 1, biases 0"
        expected = _drawn_norm(named, model.config)
        part.facts |= {"drawn by": law, "norm that the law gives": expected}
        part.check("norm by the law of random weights", abs(total / expected - 1) < 0.01, total, expected)
    part.tables["Every tensor"] = [
        {
            "tensor": name,
            "shape": " x ".join(map(str, p.shape)),
            "norm": norms[name],
            "std": float(p.detach().float().std(correction=0)),
            "largest": float(p.detach().abs().max()),
        }
        for name, p in named.items()
    ]
    return part


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().norm())


def _drawn_norm(named: dict[str, torch.nn.Parameter], shape: ModelConfig) -> float:
    """Return the expected norm of random weights: matrices N(0, std), vectors 1, biases 0."""
    squares = 0.0
    for name, p in named.items():
        if p.dim() >= 2:
            factor = 1 / (2 * shape.num_layers) if name.endswith(RESIDUAL) else 1.0
            squares += p.numel() * shape.init_std**2 * factor
        elif not name.endswith("bias"):
            squares += p.numel()
    return math.sqrt(squares)


def forward(subject: Subject) -> Component:
    """Check logits and log-probabilities, and that a token's score does not depend on what it must not."""
    part, run = Component("Forward"), subject.run
    rows = subject.scores()
    scores = [p for row in rows for p in row]
    mean, uniform = sum(scores) / len(scores), -math.log(subject.policy.model.num_valid_tokens)
    logits_BTV = _logits(subject, subject.sequences[:2])
    finite = bool(logits_BTV.isfinite().all()) and all(map(math.isfinite, scores))
    part.facts = {
        "logits, shape": list(logits_BTV.shape),
        "logits, least": float(logits_BTV.min()),
        "logits, largest": float(logits_BTV.max()),
        "logits, mean": float(logits_BTV.mean()),
        "logits, std": float(logits_BTV.std()),
        "log-probability of a trained token, mean": mean,
        "of a uniform guess, -ln V": uniform,
        "trained tokens": len(scores),
    }
    low, high, std = (part.facts[f"logits, {name}"] for name in ("least", "largest", "std"))
    part.headline = (
        f"logits {list(logits_BTV.shape)} in [{low:.2f}, {high:.2f}], std {std:.3f}; mean log-prob {mean:.3f}"
    )
    part.check("finite", finite, finite, True)
    if run.policy.init:
        is_random = isinstance(mean, float) and abs(mean - uniform) < 0.05
        expected = f"not that of random weights, -ln V = {uniform:.3f}"
        part.check(
            "the weights know something",
            not is_random,
            f"mean log-prob {mean:.3f}",
            expected,
            otherwise="warn",
        )
    few = [s for s in subject.sequences if s.num_trained][:FEW]
    limit = PACKING[run.optim.precision]
    plain = _gap(_scored_plainly(subject, few), subject.scores(few))
    part.check("log-probs against a plain softmax", plain <= limit, _nats(plain), f"at most {limit:g}")
    alone = subject.scores(few, token_budget=1)
    for name, others in _company(subject, few).items():
        gap = _gap(alone, others)
        part.check(f"the same {name}", gap <= limit, _nats(gap), f"at most {limit:g}")
    leak, moved = _future(subject, few[0])
    part.facts |= {"largest change by later tokens, nats": leak, "by earlier ones, nats": moved}
    part.check("later tokens change nothing (causal)", leak <= CAUSAL, _nats(leak), f"at most {CAUSAL:g}")
    part.check("earlier tokens change something", moved > 0, _nats(moved), "above 0", otherwise="warn")
    return part


@torch.no_grad()
def _logits(subject: Subject, sequences: Sequence[TrainingSequence]) -> torch.Tensor:
    """Return logits [B, T, V] of sequences, cut to the shortest one's length; an image is cut nowhere, since it is read
    whole or not at all."""
    length = min(s.num_tokens for s in sequences)
    rows = [(s.prompt_ids + s.completion_ids)[:length] for s in sequences]
    if any(len(s.prompt_ids) > length and is_image(s.prompt_ids[length]) for s in sequences):
        rows = [sequences[0].prompt_ids + sequences[0].completion_ids]
    device, dtype = subject.policy.device, subject.policy.autocast
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        return subject.policy.model.logits(torch.tensor(rows).to(device)).float()


def _scored_plainly(subject: Subject, sequences: Sequence[TrainingSequence]) -> list[list[float]]:
    """Score trained tokens by a float64 softmax over whole rows of logits."""
    rows: list[list[float]] = []
    for sequence in sequences:
        logits_TV = _logits(subject, [sequence])[0].double() / subject.temperature
        logits_TV[:, subject.policy.model.num_valid_tokens :] = float("-inf")
        logits_TV = F.pad(logits_TV, (0, -logits_TV.shape[1] % COLUMN_QUANTUM), value=float("-inf"))
        trained = sequence.trained or [True] * len(sequence.completion_ids)
        places = [place for place, is_trained in enumerate(trained) if is_trained]
        scored_MV = logits_TV[[len(sequence.prompt_ids) - 1 + place for place in places]]
        if sequence.kept:
            keep_only(scored_MV, join_kept(sequence.kept, scored_MV.device))
        logprobs_MV = scored_MV.log_softmax(-1)
        rows.append([float(logprobs_MV[m, sequence.completion_ids[n]]) for m, n in enumerate(places)])
    return rows


def _company(subject: Subject, few: Sequence[TrainingSequence]) -> dict[str, list[list[float]]]:
    """Score sequences packed with different other sequences; return the scores of their own tokens."""
    found = {
        "packed with others behind": subject.scores(few, token_budget=2**30),
        "packed with others in front": subject.scores(few[::-1], token_budget=2**30)[::-1],
    }
    room = subject.policy.model.config.max_positions - max(s.num_tokens for s in few)
    if min(room, JUNK) > 0:
        padded = [
            replace(
                s,
                completion_ids=s.completion_ids + s.completion_ids[:1] * min(room, JUNK),
                trained=(*(s.trained or (True,) * len(s.completion_ids)), *(False,) * min(room, JUNK)),
            )
            for s in few
        ]
        found["padded behind"] = subject.scores(padded, token_budget=1)
    return found


def _future(subject: Subject, sequence: TrainingSequence) -> tuple[float, float]:
    """Return the largest effect of later tokens on a row (0 if the model is causal), and of earlier tokens.

    All tokens of text from a position on are changed, at three positions, and then the first one alone; images stay,
    since they are read whole or not at all. Rows are compared by their entropies: the log-probability of the row
    before the change is useless, because its target changed.
    """
    ids = sequence.prompt_ids + sequence.completion_ids
    model = subject.policy.model
    is_text = [not is_image(token) for token in ids]

    def changed(first: int, end: int) -> list[int]:
        found = list(ids)
        for place in range(first, end):
            if is_text[place]:
                step = 1 + ((ids[place] + 1) % model.num_valid_tokens == model.undrawn_id)
                found[place] = (ids[place] + step) % model.num_valid_tokens
        return found

    def entropies(tokens: Sequence[int]) -> dict[int, float]:
        whole = TrainingSequence(
            prompt_ids=tuple(tokens[:1]), completion_ids=tuple(tokens[1:]), trained=tuple(is_text[1:])
        )
        (micro,) = pack([whole], token_budget=1, device=subject.policy.device).micro_batches
        found = subject.policy.score(micro, attention=subject.attention)[1].tolist()
        rows = [place for place, follows in enumerate(is_text[1:]) if follows]
        return dict(zip(rows, found, strict=True))

    base = entropies(ids)

    leak = 0.0
    for place in {max(1, len(ids) * quarter // 4) for quarter in (1, 2, 3)}:
        later = entropies(changed(place, len(ids)))
        leak = max([leak, *(_gap([[base[row]]], [[later[row]]]) for row in base if row < place)])

    first = is_text.index(True)
    moved = entropies(changed(first, first + 1))
    return leak, max((_gap([[base[row]]], [[moved[row]]]) for row in base if row > first), default=0.0)


def _gap(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Return the largest difference; infinite if numbers are missing or not finite."""
    gaps = [abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)


def _nats(value: float) -> str:
    return f"{value:.2g} nats"
