"""What edits did: CounterFact's metrics, the table of the method's source, fluency, consistency and drawdown."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from whet.editing.facts import Fact
from whet.editing.sites import Prompted, Reader, prompted, start_ids
from whet.generate.engine import Request
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.stats import bootstrap_interval, mcnemar_exact, paired_interval, share_interval

GENERATED_TOKENS = 60
MIN_FACTS = 6
"""Facts that a bootstrap needs: resampling fewer says how they differ among each other, not how others would do, and
no exact paired test of five can reach p = .05 either."""
TOO_FEW = "too few facts"
CURVE_POINTS = 8
"""Points of a curve over the number of edits, at most: each costs a measurement of all facts written so far."""
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Said:
    """How a model takes one completion of one prompt.

    Attributes:
        logprob: Mean log-probability of its tokens, as CounterFact's P.
        first_p: Probability of its first token.
        first_rank: Rank of that, 1 for the likeliest.
        is_greedy: Whether every token is the likeliest one after those before it: what greedy decoding writes.
    """

    logprob: float
    first_p: float
    first_rank: int
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt with both completions.

    Attributes:
        prompt: The whole prompt.
        new: The edit's target.
        true: What was true before, or is of a neighbour; None if unknown.
        likeliest: The likeliest next token.
        likeliest_p: Its probability.
    """

    prompt: str
    new: Said
    true: Said | None
    likeliest: str
    likeliest_p: float


@dataclass(frozen=True, slots=True)
class FactScores:
    """One fact in one model.

    Attributes:
        prompt: The edit's own prompt.
        paraphrases: The same asked otherwise.
        neighbours: Prompts of other subjects.
    """

    prompt: Asked
    paraphrases: tuple[Asked, ...]
    neighbours: tuple[Asked, ...]


def score_facts(reader: Reader, facts: Sequence[Fact]) -> list[FactScores]:
    """Ask a model all prompts of some facts."""
    texts: list[tuple[str, str, str, bool | None]] = []
    for fact in facts:
        texts += [(text, fact.target, fact.true, fact.space) for text in (fact.text, *fact.paraphrases)]
        texts += [(one.prompt, fact.target, one.answer or fact.true, fact.space) for one in fact.neighbours]
    asked = _ask(reader, texts)
    found, start = [], 0
    for fact in facts:
        paraphrases = start + 1 + len(fact.paraphrases)
        end = paraphrases + len(fact.neighbours)
        found.append(
            FactScores(asked[start], tuple(asked[start + 1 : paraphrases]), tuple(asked[paraphrases:end]))
        )
        start = end
    return found


@torch.no_grad()
def _ask(reader: Reader, texts: Sequence[tuple[str, str, str, bool | None]]) -> list[Asked]:
    tokenizer = reader.policy.tokenizer
    wanted: list[Prompted] = []
    owner: list[tuple[int, str]] = []
    for n, (text, new, true, space) in enumerate(texts):
        for name, target in (("new", new), ("true", true)):
            if target:
                wanted.append(prompted(tokenizer, text, target, space))
                owner.append((n, name))
    said: dict[tuple[int, str], Said] = {}
    likeliest: dict[int, tuple[str, float]] = {}
    rows = [one.ids[:-1] for one in wanted]
    for chunk in reader.chunks(rows):
        hidden_ND = reader.hidden([rows[place] for place in chunk])
        start = 0
        for place in chunk:
            one = wanted[place]
            at = slice(start + one.start - 1, start + one.start - 1 + len(one.targets))
            logprobs = reader.logits(hidden_ND[at]).float().log_softmax(-1)
            ids = torch.tensor(one.targets, device=logprobs.device)[:, None]
            chosen = logprobs.gather(1, ids)[:, 0]
            first = logprobs[0]
            said[owner[place]] = Said(
                logprob=float(chosen.mean()),
                first_p=float(chosen[0].exp()),
                first_rank=1 + int((first > chosen[0]).sum()),
                is_greedy=bool((logprobs.argmax(-1) == ids[:, 0]).all()),
            )
            best = int(first.argmax())
            likeliest[owner[place][0]] = (tokenizer.token_text(best), float(first[best].exp()))
            start += len(rows[place])
    return [
        Asked(text, said[n, "new"], said.get((n, "true")), *likeliest[n])
        for n, (text, *_) in enumerate(texts)
    ]


def facts_of(scores: Sequence[FactScores], before: Sequence[FactScores]) -> dict[str, list[float]]:
    """Return each metric's values, one for each fact that has it: the mean over its prompts.

    Success: P(new) > P(true), of neighbours P(true) > P(new), with P the mean log-probability of the tokens, as in
    CounterFact. Magnitude: the difference of exp(those). Accuracy: greedy decoding writes the target. First token: the
    source's "efficacy" (probability) and "success" (rank 1). Neighbours kept: the likeliest token is that of before.
    """
    found: dict[str, list[float]] = {}

    def put(name: str, values: Sequence[float]) -> None:
        if values:
            found.setdefault(name, []).append(sum(values) / len(values))

    for after, old in zip(scores, before, strict=True):
        own, again, around = [after.prompt], list(after.paraphrases), list(after.neighbours)
        put("efficacy", [_success(one) for one in own if one.true])
        put("efficacy_magnitude", [_magnitude(one) for one in own if one.true])
        put("efficacy_accuracy", [float(one.new.is_greedy) for one in own])
        put("first_token_p", [one.new.first_p for one in own])
        put("first_token_rank_1", [float(one.new.first_rank == 1) for one in own])
        put("paraphrase", [_success(one) for one in again if one.true])
        put("paraphrase_magnitude", [_magnitude(one) for one in again if one.true])
        put("paraphrase_accuracy", [float(one.new.is_greedy) for one in again])
        put("neighbourhood", [1 - _success(one) for one in around if one.true])
        put("neighbourhood_magnitude", [-_magnitude(one) for one in around if one.true])
        put("neighbourhood_accuracy", [float(one.true.is_greedy) for one in around if one.true])
        kept = zip(around, old.neighbours, strict=True)
        put("neighbourhood_kept", [float(a.likeliest == b.likeliest) for a, b in kept])
    return found


def _success(one: Asked) -> float:
    assert one.true is not None
    return float(one.new.logprob > one.true.logprob)


def _magnitude(one: Asked) -> float:
    assert one.true is not None
    return math.exp(one.new.logprob) - math.exp(one.true.logprob)


def harmonic(values: Sequence[float]) -> float:
    """Return the harmonic mean; 0 where one value is 0 or below."""
    return len(values) / sum(1 / value for value in values) if values and min(values) > 0 else 0.0


def interval_of(values: Sequence[float], *, is_share: bool, seed: int = 0) -> dict[str, float | None]:
    """Return a mean with its 95 % interval over facts; low and high are None where there are too few for one."""
    if len(values) < MIN_FACTS and not (is_share and all(value in (0.0, 1.0) for value in values)):
        return {"mean": sum(values) / len(values), "low": None, "high": None}
    return asdict(share_interval(values) if is_share else bootstrap_interval(values, seed=seed))


def summarise(
    before: Sequence[FactScores], after: Sequence[FactScores], seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Return each metric before and after, with 95 % intervals over facts, and a paired test of the difference.

    Fewer than six facts: no interval but Wilson's, and no p-value but McNemar's exact one.

    Args:
        before: Scores of the model as it was.
        after: The same facts in the edited model.
        seed: Seed of the bootstrap.
    """
    old, new = facts_of(before, before), facts_of(after, before)
    found: dict[str, dict[str, Any]] = {}
    for name, values in new.items():
        is_share = not name.endswith("_magnitude")
        row: dict[str, Any] = {
            "after": interval_of(values, is_share=is_share, seed=seed),
            "before": sum(old[name]) / len(old[name]),
            "facts": len(values),
        }
        if all(value in (0.0, 1.0) for value in (*values, *old[name])):
            pairs = list(zip(old[name], values, strict=True))
            row["p_value"] = mcnemar_exact(pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0)))
            row["test"] = "McNemar"
        elif len(values) < MIN_FACTS:
            row |= {"p_value": None, "test": TOO_FEW}
        else:
            row["p_value"] = paired_interval(old[name], values)[1]
            row["test"] = "paired t"
        found[name] = row
    parts = [name for name in ("efficacy", "paraphrase", "neighbourhood") if name in new]
    if len(parts) == 3:
        means = {
            side: [sum(x[name]) / len(x[name]) for name in parts]
            for side, x in (("before", old), ("after", new))
        }
        found["score"] = {side: 100 * harmonic(values) for side, values in means.items()}
    return found


def curve_places(count: int) -> set[int]:
    """Return after which of some batches a curve has a point: all, or eight that are even in the logarithm."""
    if count <= CURVE_POINTS:
        return set(range(1, count + 1))
    return {round(count ** (n / (CURVE_POINTS - 1))) for n in range(CURVE_POINTS)}


def curve_point(before: Sequence[FactScores], now: Sequence[FactScores]) -> dict[str, Any]:
    """Return the number of facts that were written, and the mean of each metric that is a share.

    Args:
        before: Scores of the model before its first edit.
        now: The same facts at this point.
    """
    shares = {
        name: sum(values) / len(values)
        for name, values in facts_of(now, before).items()
        if not name.endswith("_magnitude")
    }
    return {"facts": len(now), "metrics": shares}


# --- what the model writes --------------------------------------------------------------------------------------


def write_openings(reader: Reader, facts: Sequence[Fact], seed: int = 0) -> list[list[str]]:
    """Let a model go on after the openings of each fact (its own prompt where it has none); sampled, top 5."""
    policy = reader.policy
    head = start_ids(policy.tokenizer)
    openings = [fact.openings or (fact.text,) for fact in facts]
    flat = [text for texts in openings for text in texts]
    room = policy.model.config.max_positions
    ids = [(*head, *policy.tokenizer.encode(text)) for text in flat]
    longest = max(map(len, ids))
    params = SamplingParams(top_k=5, max_new_tokens=max(1, min(GENERATED_TOKENS, room - longest)))
    requests = [
        Request(prompt_ids=row, seeds=(sequence_seed("opening", seed, text),))
        for row, text in zip(ids, flat, strict=True)
    ]
    rows = policy.engine(stops=False).generate(requests, params)
    said = [
        text + policy.completion_text(row, done.ids)
        for text, row, (done,) in zip(flat, ids, rows, strict=True)
    ]
    found, start = [], 0
    for texts in openings:
        found.append(said[start : start + len(texts)])
        start += len(texts)
    return found


def ngram_entropy(text: str) -> float:
    """Return CounterFact's fluency: 2/3 of the entropy of pairs of words plus 4/3 of that of triples, in bits.

    Source:
        arXiv 2202.05262, appendix G (after arXiv 1809.05972): repetition makes it small.
    """
    words = _WORD.findall(text.lower())
    return 2 / 3 * _entropy(words, 2) + 4 / 3 * _entropy(words, 3)


def _entropy(words: Sequence[str], n: int) -> float:
    counts = Counter(zip(*(words[k:] for k in range(n)), strict=False))
    total = sum(counts.values())
    return -sum(c / total * math.log2(c / total) for c in counts.values())


def consistency(texts: Sequence[str], references: Sequence[str], corpus: Sequence[str]) -> float:
    """Return the cosine of two texts' TF-IDF vectors: what was written, and texts about things of the same kind.

    Args:
        texts: What the model wrote.
        references: Texts about things of which the target is true.
        corpus: Texts that say how rare a word is.

    Source:
        arXiv 2202.05262, appendix G; smoothed inverse frequencies, as scikit-learn's defaults are.
    """
    seen = Counter(word for text in corpus for word in set(_WORD.findall(text.lower())))

    def vector(text: str) -> dict[str, float]:
        counts = Counter(_WORD.findall(text.lower()))
        return {w: c * (1 + math.log((1 + len(corpus)) / (1 + seen[w]))) for w, c in counts.items()}

    a, b = vector(" ".join(texts)), vector(" ".join(references))
    dot = sum(value * b.get(word, 0.0) for word, value in a.items())
    norms = [math.sqrt(sum(v * v for v in x.values())) for x in (a, b)]
    return dot / (norms[0] * norms[1]) if all(norms) else 0.0


def written(facts: Sequence[Fact], texts: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """Return fluency, and consistency where facts have references, one value for each fact."""
    corpus = [text for fact in facts for text in fact.references]
    found = {"fluency": [sum(map(ngram_entropy, own)) / len(own) for own in texts]}
    pairs = [(own, fact.references) for own, fact in zip(texts, facts, strict=True) if fact.references]
    if pairs:
        found["consistency"] = [consistency(own, references, corpus) for own, references in pairs]
    return found


def table_of(
    facts: Sequence[Fact], before: Sequence[FactScores], after: Sequence[FactScores]
) -> list[Mapping[str, Any]]:
    """Return the source's table: each edit with the first token's probability and rank, beside the whole target's."""
    rows = []
    for fact, old, new in zip(facts, before, after, strict=True):
        rows.append(
            {
                "prompt": fact.text,
                "subject": fact.subject,
                "true": fact.true,
                "target": fact.target,
                "before": _cell(old.prompt),
                "after": _cell(new.prompt),
                "paraphrases": [_cell(one) | {"prompt": one.prompt} for one in new.paraphrases],
                "neighbours": [
                    _cell(a) | {"prompt": a.prompt, "said_before": b.likeliest}
                    for a, b in zip(new.neighbours, old.neighbours, strict=True)
                ],
            }
        )
    return rows


def _cell(one: Asked) -> dict[str, Any]:
    return {
        "first_token_p": one.new.first_p,
        "first_token_rank": one.new.first_rank,
        "p": math.exp(one.new.logprob),
        "true_p": None if one.true is None else math.exp(one.true.logprob),
        "is_greedy": one.new.is_greedy,
        "says": one.likeliest,
        "says_p": one.likeliest_p,
    }


Advance = Callable[[int], None]
