"""The parity report: the exported artefact, in its own runtime, against the model that was trained."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet import processes
from whet.compress.export import runtimes
from whet.generate.policy import Policy
from whet.generate.rows import Request
from whet.generate.sampling import SamplingParams
from whet.install import install_command
from whet.model.text.tokenizer import Tokenizer
from whet.types import UserError

Chat = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """What an export must reach; each depends on how its weights are stored."""

    kl: float
    """Largest mean Kullback-Leibler divergence of the next token, ours from theirs, in nats."""
    top1: float
    """Least share of positions whose most likely token is the same, or one that we find nearly as likely."""
    greedy: float = 0.0
    """Least share of prompts with equal greedy text, up to near ties. One token that rounding turns changes all that
    follow, so of rounded weights it says nothing about whether the file is right."""

    def eased(self, rounding: Mapping[str, Any]) -> Thresholds:
        """Return the limits of a runtime for weights of which rounding alone, in our engine, changes more than usual.

        Args:
            rounding: Our engine's differences with the stored weights.
        """
        if not rounding["kl"] <= ROUNDING_KL:
            return self
        top1 = min(self.top1, rounding["top1_to_ties"] - ROUNDING_TOP1)
        return replace(self, kl=max(self.kl, 2 * rounding["kl"]), top1=top1)


THRESHOLDS: dict[str, Thresholds] = {
    "f32": Thresholds(kl=1e-6, top1=0.995, greedy=0.95),
    "f16": Thresholds(kl=1e-3, top1=0.98),
    "bf16": Thresholds(kl=1e-2, top1=0.95),
    "q8_0": Thresholds(kl=1e-2, top1=0.95),
}
"""By type of the weights. float32 leaves the order of sums, so near ties alone may fall otherwise; the others round
weights and, in llama.cpp, what they are multiplied with."""
ROUNDING_KL, ROUNDING_TOP1 = 5e-2, 0.05
"""Of rounding alone: the largest KL that a sound model was seen to have is 1.4e-2 (SmolLM2-135M, made of 4 bits, in
bf16). Beyond the first the verdict says that the type is too coarse; the second is what a runtime may add to it."""
GELU_KL = 1e-4
"""Of float32 in llama.cpp for models with GELU, which it takes from a table in float16."""
LOOSE = Thresholds(kl=0.5, top1=0.7)
"""Of 4 and 5 bits: they change the text, and the report says how much."""


TOKENLESS = 1e-2
"""Largest mean probability of rows that are no token's, which other programs may draw."""
LINES = (
    "It's 3:45 p.m.; they'll've paid $1,234.56 (or 7%)!",
    "  two  spaces\tand a tab \n\n\n and lines\r\n",
    " a leading space",
    "def f(x):\n    return x**2  # ²",
    "2 + 2 = 4, 12345678901234567890, ½, ٣٤٥",
    "Übergröße naïve façade Ærøskøbing",
    "cafe\u0301 and café",
    "हिन्दी में लिखा हुआ पाठ",
    "ภาษาไทยไม่มีช่องว่าง",
    "نصّ عربيّ مُشكَّل",
    "日本語の文章と中文、한국어",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈",
    "HTTPServerError camelCase snake_case SCREAMING_CASE",
    "https://example.com/a?b=c&d=%20#e",
    '<b>bold</b> \\frac{1}{2} {"key": [1, null]}',
    "зачем Ελληνικά שלום",
    "…—–“quotes”\u00a0\u200b\u3000end",
    "",
)
"""Texts at which tokenizers that are nearly the same part."""
LOAD_ERROR = "error loading model: "
NEAR_TIE = 0.1
"""Nats between two tokens that count as nearly equally likely: where texts part there, rounding alone decides."""


@dataclass(slots=True)
class Reference:
    """Our engine's side, taken before the model is changed for the export.

    Attributes:
        prompts: Tokens of each prompt.
        chats: Messages of each prompt.
        said: Our greedy completion of each, with its stop token.
        logits: Our logits [tokens of the completion, V] for each.
        max_new_tokens: Longest completion.
        has_template: Whether prompts are conversations through a chat template, which the artefact must have, too.
    """

    prompts: list[tuple[int, ...]]
    chats: list[Chat]
    said: list[tuple[int, ...]]
    logits: list[np.ndarray]
    max_new_tokens: int
    has_template: bool = True


def take(
    policy: Policy, chats: Sequence[Chat], max_new_tokens: int, source: Tokenizer | None = None
) -> Reference:
    """Answer the prompts with our engine.

    Args:
        policy: The policy, as it was trained: an adapter is applied, not merged.
        chats: The prompts.
        max_new_tokens: Longest completion.
        source: Tokenizer of the model's own files, where nothing says that it is asked otherwise than by the chat
            template in them: prompts are written by that one. None: they are the policy's.
    """
    has_template = source is None or source.chat_template is not None
    if source is not None and has_template:
        prompts = [tuple(source.encode_prompt(chat)) for chat in chats]
    else:
        prompts = [policy.chat_ids(chat) for chat in chats]
    said = greedy(policy, prompts, max_new_tokens)
    logits = [next_logits(policy, ids, completion) for ids, completion in zip(prompts, said, strict=True)]
    return Reference(prompts, list(chats), said, logits, max_new_tokens, has_template)


def greedy(policy: Policy, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> list[tuple[int, ...]]:
    """Return our engine's greedy completions."""
    requests = [Request(prompt_ids=ids, seeds=(0,)) for ids in prompts]
    drawn = policy.engine().generate(requests, SamplingParams(temperature=0, max_new_tokens=max_new_tokens))
    return [row[0].ids for row in drawn]


def next_logits(policy: Policy, ids: Sequence[int], said: Sequence[int]) -> np.ndarray:
    """Return our logits [len(said), V] of a completion's tokens."""
    with torch.no_grad():
        row = torch.tensor([[*ids, *said][:-1]], device=policy.device)
        return policy.model.logits(row)[0, len(ids) - 1 :].float().cpu().numpy()


def differences(
    reference: Reference, logits: Sequence[np.ndarray], said: Sequence[Sequence[int]], num_valid: int
) -> dict[str, Any]:
    """Compare another side's logits and greedy completions with ours.

    Args:
        reference: Ours.
        logits: Theirs, at our completions' tokens.
        said: Their greedy completions.
        num_valid: Ids that the tokenizer has.

    Returns:
        Among others `top1_to_ties`, the share of positions where their likeliest token is ours, or nearly as likely to
        us; `greedy_equal`, the share of equal texts; `greedy_equal_to_ties`, those counted in whose first
        difference is between tokens that we find nearly equally likely; `first_gaps`, by how many nats we prefer our
        token there, for each text that differs, None where one text only ends; `tokenless`, the mean probability that
        the other side gives to rows that are no token's.
    """
    kls, agree, ties, largest, tokenless = [], [], [], 0.0, []
    for ours, theirs in zip(reference.logits, logits, strict=True):
        theirs = _completed(theirs, ours)
        tokenless.append(mass_beyond(theirs, num_valid))
        ours, theirs = (side[:, :num_valid].astype(np.float64) for side in (ours, theirs))
        p, q = _log_softmax(ours), _log_softmax(theirs)
        kls.append((np.exp(p) * (p - q)).sum(-1))
        agree.append(ours.argmax(-1) == theirs.argmax(-1))
        chosen = np.take_along_axis(ours, theirs.argmax(-1)[:, None], axis=-1)[:, 0]
        ties.append(ours.max(-1) - chosen <= NEAR_TIE)
        largest = max(largest, float(np.abs(p - q).max()))
    kl = np.concatenate(kls)
    equal = [tuple(a) == tuple(b) for a, b in zip(reference.said, said, strict=True)]
    gaps = [
        _first_gap(ours[:, :num_valid].astype(np.float64), a, b)
        for ours, a, b, is_equal in zip(reference.logits, reference.said, said, equal, strict=True)
        if not is_equal
    ]
    num_ties = sum(gap <= NEAR_TIE for gap in gaps)
    return {
        "kl": max(float(kl.mean()), 0.0),
        "kl_max": max(float(kl.max()), 0.0),
        "logprob_difference": largest,
        "top1_agreement": float(np.concatenate(agree).mean()),
        "top1_to_ties": float(np.concatenate(ties).mean()),
        "greedy_equal": sum(equal) / len(equal),
        "num_greedy_equal": sum(equal),
        "greedy_equal_to_ties": (sum(equal) + num_ties) / len(equal),
        "first_gaps": [round(gap, 4) if math.isfinite(gap) else None for gap in sorted(gaps)],
        "tokenless": float(np.concatenate(tokenless).mean()),
        "num_positions": len(kl),
    }


def _completed(theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Fill the logits that a runtime does not give, which are NaN, with ours, moved to the level of those that it
    gives: what differs is judged on the given ones, its likeliest."""
    is_given = ~np.isnan(theirs)
    if is_given.all():
        return theirs
    sides = (
        np.where(is_given, side[:, : theirs.shape[1]].astype(np.float64), -np.inf) for side in (theirs, ours)
    )
    level_theirs, level_ours = (np.logaddexp.reduce(side, axis=-1, keepdims=True) for side in sides)
    return np.where(is_given, theirs, ours[:, : theirs.shape[1]] + level_theirs - level_ours)


def mass_beyond(logits: np.ndarray, num_valid: int) -> np.ndarray:
    """Return the probability [rows] of ids at and above `num_valid`."""
    if logits.shape[1] <= num_valid:
        return np.zeros(len(logits))
    return np.exp(_log_softmax(logits.astype(np.float64))[:, num_valid:]).sum(-1)


def _first_gap(logits: np.ndarray, ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Return by how many nats we prefer our token to theirs where two texts part; infinity where one only ends."""
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if place is None or theirs[place] >= logits.shape[1]:
        return math.inf
    return float(logits[place, ours[place]] - logits[place, theirs[place]])


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def stored(policy: Policy, reference: Reference) -> dict[str, Any]:
    """Compare a policy with the weights as the export stores them, in our own engine: what rounding alone changes."""
    logits = [
        next_logits(policy, ids, said) for ids, said in zip(reference.prompts, reference.said, strict=True)
    ]
    said = greedy(policy, reference.prompts, reference.max_new_tokens)
    return differences(reference, logits, said, policy.tokenizer.vocab_size)


def ask(
    policy: Policy,
    reference: Reference,
    runtime: str,
    path: Path,
    *,
    base: str = "",
    dtype: str = "float32",
    context: int = 0,
) -> dict[str, Any]:
    """Ask the artefact in its own runtime, in a process of its own.

    Args:
        policy: For what a prompt and its end are.
        reference: Our side.
        runtime: A name of `runtimes.MODULES`.
        path: The artefact.
        base: An adapter's base.
        dtype: Dtype of the weights in memory, for transformers.
        context: Longest sequence in tokens, for llama.cpp.

    Returns:
        The differences, and what of the prompts and stops is not the same; {'not_checked': why} where it is missing.

    Raises:
        UserError: If the runtime cannot load the artefact.
    """
    absent = runtimes.missing(runtime)
    if absent:
        how = install_command(runtimes.EXTRAS[runtime])
        return {"not_checked": f"{absent} is not installed: {how}"}
    pairs = zip(reference.prompts, reference.chats, reference.said, strict=True)
    request = {
        "runtime": runtime,
        "path": str(path),
        "base": base,
        "dtype": dtype,
        "context": context,
        "max_new_tokens": reference.max_new_tokens,
        "stop_strings": policy.stop_strings,
        "stop_ids": list(policy.stop_ids),
        "has_template": reference.has_template,
        "lines": LINES,
        "prompts": [{"ids": ids, "messages": chat, "said": said} for ids, chat, said in pairs],
    }
    with tempfile.TemporaryDirectory(prefix="whet-export-") as name:
        folder = Path(name)
        (folder / runtimes.REQUEST).write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, runtimes.__file__, name]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = processes.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode or not (folder / runtimes.ANSWER).is_file():
            told = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            # llama.cpp's own words come before the exception.
            reason = next((line.split(LOAD_ERROR)[1] for line in told if LOAD_ERROR in line), told[-1])
            raise UserError(f"{path}: {runtime} cannot run it: {reason[:300]}")
        answer: Mapping[str, Any] = json.loads((folder / runtimes.ANSWER).read_text(encoding="utf-8"))
        logits = [np.load(folder / f"{number}.npy") for number in range(len(reference.prompts))]
    said = [tuple(row["greedy"]) for row in answer["rows"]]
    rendered = [tuple(row["rendered"]) for row in answer["rows"]]
    # Where one text is the start of the other, they differ in where they stop alone.
    alike = [
        len(ours) == len(theirs)
        for ours, theirs in zip(reference.said, said, strict=True)
        if ours[: len(theirs)] == theirs[: len(ours)]
    ]
    return {
        **differences(reference, logits, said, policy.tokenizer.vocab_size),
        "runtime": answer["version"],
        "prompts_equal": sum(a == b for a, b in zip(rendered, reference.prompts, strict=True))
        / len(rendered),
        "stops_equal": sum(alike) / len(alike) if alike else 1.0,
        "stops_missing": [
            policy.tokenizer.token_text(i) for i in policy.stop_ids if i not in answer["stop_ids"]
        ],
        "lines_unlike": [
            line
            for line, ids in zip(LINES, answer.get("lines", ()), strict=False)
            if ids != policy.tokenizer.encode(line)
        ],
        "num_stopped": sum(bool(ids) and ids[-1] in policy.stop_ids for ids in reference.said),
    }


def failures(found: Mapping[str, Any], limits: Thresholds) -> list[str]:
    """Return what keeps an export from passing, a line each."""
    lines = []
    if not found["kl"] <= limits.kl:
        lines.append(f"KL {found['kl']:.3g} nats a token: expected at most {limits.kl:g}")
    if found["top1_to_ties"] < limits.top1:
        share = found["top1_to_ties"]
        lines.append(f"the same top token, up to near ties, at {share:.1%}: expected {limits.top1:.1%}")
    if found["greedy_equal_to_ties"] < limits.greedy:
        share = found["greedy_equal_to_ties"]
        lines.append(f"equal greedy text, up to near ties, on {share:.1%}: expected {limits.greedy:.0%}")
    if found.get("tokenless", 0.0) > TOKENLESS:
        lines.append(
            f"rows that are no token's have {found['tokenless']:.1%} of the probability, and other programs draw them: "
            f"expected at most {TOKENLESS:.0%}; train longer, or export with --to hf, which then leaves them out"
        )
    if found.get("prompts_equal", 1.0) < 1.0:
        share = found["prompts_equal"]
        lines.append(f"the same prompt tokens on {share:.1%}: its template or tokenizer asks otherwise")
    if found.get("stops_equal", 1.0) < 1.0:
        lines.append(f"it stops where we do on {found['stops_equal']:.1%} of the texts that are equal so far")
    if found.get("stops_missing"):
        lines.append(f"it does not stop at {', '.join(map(repr, found['stops_missing']))}")
    return lines
