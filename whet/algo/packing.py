"""Packs a step's sequences into micro-batches of flat tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, compress
from typing import Any

import torch

from whet.algo.kept import join_experts, join_kept
from whet.algo.losses import Aggregation, aggregation_weight
from whet.ranks.collectives import all_gather_values, exchange_json, joined, rank
from whet.ranks.context import Sharing, deal, split
from whet.types import Batch, MicroBatch, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSequence:
    """One sequence to train on: prompt, then completion; all completion tokens are trained, or those of a mask.

    The columns (names in `_T`) have one number per trained token; an absent one takes the default in brackets.

    Attributes:
        prompt_ids: Ids that are only conditioned on (at least one).
        completion_ids: Ids that follow it.
        trained: True for completion tokens that are trained; empty for all. The rest (tool output) is context only.
        advantage: Advantage of every trained token (0 in supervised training), unless there are `advantages_T`.
        group: Name of its prompt's group, which has `num_group_tokens` trained tokens.
        num_group_tokens: Trained tokens of all counted sequences of the group.
        sampler_logprobs: Log-probabilities of the trained tokens at sampling time; empty in supervised training.
        kept: What the sampler's filters left to draw each trained token from; empty without filters.
        allowed: What the rules of the task allow in place of each trained token (`encode_kept`), '' where that is not
            known; empty where it is not of any.
        experts: The sampler's experts in the prompt and in the completion; empty where they are not recorded.
        turn_rewards: (index of a trained token, reward) paid before the end; part of `advantage`.
        advantages_T: Advantage of each token [advantage].
        proximal_logprobs_T: Recomputed log-probabilities before the update [sampler_logprobs].
        ref_logprobs_T: Log-probabilities under the reference [0].
        teacher_logprobs_T: Log-probabilities under a teacher; they become part of the advantages.
        policy_weights_T: Factor of the policy loss [1].
        start_values_T: Value estimates before the update [0].
        returns_T: Their targets [0].
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    trained: tuple[bool, ...] = ()
    advantage: float = 0.0
    group: str = ""
    num_group_tokens: int = 0
    sampler_logprobs: tuple[float, ...] = ()
    kept: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    turn_rewards: tuple[tuple[int, float], ...] = ()
    advantages_T: torch.Tensor | None = None
    proximal_logprobs_T: torch.Tensor | None = None
    ref_logprobs_T: torch.Tensor | None = None
    teacher_logprobs_T: torch.Tensor | None = None
    policy_weights_T: torch.Tensor | None = None
    start_values_T: torch.Tensor | None = None
    returns_T: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def num_trained(self) -> int:
        """Tokens that the loss counts."""
        return sum(self.trained) if self.trained else len(self.completion_ids)


Family = list[tuple[int, TrainingSequence]]
"""Sequences of one prompt, each with its index in the packed list."""
DIGEST_NUMBERS = 2


@dataclass(frozen=True, slots=True)
class Outline:
    """What a sequence's place in the micro-batches depends on.

    Attributes:
        prompt: Equal for equal prompts: the prompt itself, or its hash.
        num_prompt: Tokens of the prompt.
        num_completion: Tokens after it.
        num_trained: Tokens that the loss counts.
    """

    prompt: Hashable
    num_prompt: int
    num_completion: int
    num_trained: int

    @classmethod
    def of(cls, sequence: TrainingSequence) -> Outline:
        """Return that of a sequence."""
        # A prompt that was read twice may have gone to other experts (on a GPU): then it is computed twice, too.
        key = sequence.prompt_ids, sequence.experts[:1]
        return cls(key, len(sequence.prompt_ids), len(sequence.completion_ids), sequence.num_trained)

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads."""
        return self.num_prompt + self.num_completion


def split_by_budget(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Group sequences into bins of at most `token_budget` tokens: best fit decreasing.

    Similar lengths end up together.

    Args:
        lengths: Tokens of each sequence.
        token_budget: Largest sum of a bin; a longer single sequence gets its own bin.

    Returns:
        Indices of each bin; every index occurs once.
    """
    bins: list[tuple[int, list[int]]] = []
    # Ties are broken by index, so that the same sequences always give the same micro-batches (and the same bits).
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        fitting = [number for number, (used, _) in enumerate(bins) if used + length <= token_budget]
        if fitting:
            best = max(fitting, key=lambda number: bins[number][0])
            used, members = bins[best]
            members.append(index)
            bins[best] = (used + length, members)
        else:
            bins.append((length, [index]))
    return [members for _, members in bins]


def pack(
    sequences: Sequence[TrainingSequence],
    *,
    token_budget: int,
    aggregation: Aggregation = "token_mean",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    sharing: Sharing | None = None,
) -> Batch:
    """Pack a step's sequences into micro-batches; token weights do not depend on the split.

    A prompt shared by several sequences of a micro-batch is computed once. Each sequence attends to the same tokens as
    alone, so every number is the same.

    Args:
        sequences: All sequences of this rank's step.
        token_budget: Tokens per micro-batch.
        aggregation: Decides the tokens' weights.
        device: Where the tensors go.
        dtype: Dtype of weights, advantages and log-probabilities.
        sharing: How all ranks, which must all call then, deal out their sequences; None: each trains on its own.

    Returns:
        The batch, with the counts for the denominators (of all ranks' sequences, where they deal them out).

    Raises:
        ValueError: If a prompt is empty (its first completion token would have no predecessor).
    """
    outlines = [Outline.of(sequence) for sequence in sequences]
    homes: list[tuple[int, int]] = []
    if sharing is not None:
        outlines, homes = _everyones(outlines)
    # Sequences without a trained token have no loss: they are not run, and not counted.
    trained = [index for index, outline in enumerate(outlines) if outline.num_trained]
    if any(not outlines[index].num_prompt for index in trained):
        raise ValueError(
            "a training sequence has an empty prompt: expected at least one token before the completion"
        )
    # Families, not sequences, are packed: those of one prompt share its rows only within a micro-batch.
    limit = token_budget
    if sharing is not None:  # no prompt keeps one group busy while others have nothing
        limit = min(limit, sum(outlines[index].num_tokens for index in trained) // sharing.num_groups)
    families = _families({index: outlines[index] for index in trained}, limit)
    num_rows = [_num_rows([outlines[index] for index in family]) for family in families]
    if sharing is None:
        bins = split_by_budget(num_rows, token_budget)
        found = dict(enumerate(sequences))
    else:
        work = [_work([outlines[index] for index in family], sharing) for family in families]
        dealt = deal(num_rows, work, token_budget, sharing.num_groups)
        bins = dealt[sharing.group]
        wanted = [[index for own in parts for place in own for index in families[place]] for parts in dealt]
        found = _exchange(sequences, homes, wanted, sharing)
    micro_batches = tuple(
        _micro_batch(
            [[(index, found[index]) for index in families[place]] for place in members],
            aggregation,
            torch.device(device),
            dtype,
        )
        for members in bins
    )
    if sharing is not None:
        micro_batches = tuple(split(micro, sharing) for micro in micro_batches)
    return Batch(
        micro_batches=micro_batches,
        num_trained_tokens=sum(outlines[index].num_trained for index in trained),
        num_trained_sequences=len(trained),
    )


def _everyones(outlines: Sequence[Outline]) -> tuple[list[Outline], list[tuple[int, int]]]:
    """Return the outlines of all ranks' sequences, in the order in which these were dealt out, and where each one is:
    its rank, and its place there. 40 bytes a sequence travel, whatever its length."""
    rows = []
    for own in outlines:
        digest = hashlib.blake2b(repr(own.prompt).encode(), digest_size=8 * DIGEST_NUMBERS).digest()
        numbers = [
            int.from_bytes(digest[at : at + 8], "little", signed=True) for at in range(0, len(digest), 8)
        ]
        rows.append([*numbers, own.num_prompt, own.num_completion, own.num_trained])
    width = DIGEST_NUMBERS + 3
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, width)
    counts = all_gather_values(torch.tensor([len(rows)])).tolist()
    everything = all_gather_values(table.flatten()).reshape(-1, width).tolist()
    ends = list(accumulate(counts))
    places = [[(home, place) for place in range(count)] for home, count in enumerate(counts)]
    homes = joined(places)
    found = []
    for home, place in homes:
        *digest, num_prompt, num_completion, num_trained = everything[ends[home] - counts[home] + place]
        found.append(Outline(tuple(digest), num_prompt, num_completion, num_trained))
    return found, homes


def _exchange(
    sequences: Sequence[TrainingSequence],
    homes: Sequence[tuple[int, int]],
    wanted: Sequence[Sequence[int]],
    sharing: Sharing,
) -> dict[int, TrainingSequence]:
    """Send each sequence to the ranks that train on it, and return those that came to this one, by index.

    Args:
        sequences: This rank's.
        homes: Rank and place of each index.
        wanted: Indices that each group of ranks trains on.
        sharing: How ranks are grouped.
    """
    own = {index: place for index, (home, place) in enumerate(homes) if home == rank()}
    parcels: list[list[Any]] = []
    for group in wanted:
        parcel = [[index, _as_json(sequences[own[index]])] for index in group if index in own]
        parcels += [parcel] * sharing.context  # all ranks of a group have the same micro-batches
    return {index: _of_json(row) for parcel in exchange_json(parcels) for index, row in parcel}


def _as_json(sequence: TrainingSequence) -> dict[str, Any]:
    """Return what is not a default; floats are written so that they are read back bitwise."""
    values = ((item, getattr(sequence, item.name)) for item in fields(sequence))
    return {
        item.name: value.tolist() if isinstance(value, torch.Tensor) else value
        for item, value in values
        if value is not None and value != item.default
    }


def _of_json(row: dict[str, Any]) -> TrainingSequence:
    values: dict[str, Any] = {}
    for name, value in row.items():
        if name.endswith("_T"):
            values[name] = torch.tensor(value, dtype=torch.float64)
        elif name == "turn_rewards":
            values[name] = tuple(map(tuple, value))
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
    return TrainingSequence(**values)


def _work(family: Sequence[Outline], sharing: Sharing) -> float:
    """Return the work of a family's sequences, whose prompt is computed once."""
    length = family[0].num_prompt
    return sharing.costs.of(0, length) + sum(sharing.costs.of(length, own.num_completion) for own in family)


def _num_rows(family: Sequence[Outline]) -> int:
    """Return the tokens of a family's sequences with their prompt stored once."""
    return family[0].num_prompt + sum(own.num_completion for own in family)


def _families(outlines: Mapping[int, Outline], token_budget: int) -> list[list[int]]:
    """Group sequences of one prompt, as many as fit into a micro-batch; long ones first.

    Args:
        outlines: The sequences, by index.
        token_budget: Tokens of a micro-batch.

    Returns:
        The indices of each family.
    """
    by_prompt: dict[Hashable, list[int]] = {}
    for index, outline in outlines.items():
        by_prompt.setdefault(outline.prompt, []).append(index)
    families: list[list[int]] = []
    for members in by_prompt.values():
        # A family that exceeds the budget is split; every part then stores the prompt once more.
        ordered = sorted(members, key=lambda index: (-outlines[index].num_tokens, index))
        family = [ordered[0]]
        num_rows = outlines[ordered[0]].num_tokens
        for index in ordered[1:]:
            own = outlines[index]
            if num_rows + own.num_completion > token_budget:
                families.append(family)
                family, num_rows = [], own.num_prompt
            family.append(index)
            num_rows += own.num_completion
        families.append(family)
    return families


def _lay_out(families: Sequence[Family]) -> tuple[list[int], list[int], list[int], tuple[Segment, ...]]:
    """Return the tokens, each trained token's scoring row, the trained tokens, and the segments."""
    tokens: list[int] = []
    source: list[int] = []
    targets: list[int] = []
    segments: list[Segment] = []
    for family in families:
        prompt_ids = family[0][1].prompt_ids
        prompt_row, prompt_length = len(tokens), len(prompt_ids)
        tokens.extend(prompt_ids)

        # A shared prompt is a segment of its own, before those that attend to it: attention relies on that order.
        is_shared = len(family) > 1
        if is_shared:
            segments.append(Segment(prompt_row, prompt_length, 0, 0))

        for _, sequence in family:
            first_row, length = len(tokens), len(sequence.completion_ids)
            # A token's hidden state predicts the next one: the last prompt row scores the first completion token.
            predecessors = [prompt_row + prompt_length - 1, *range(first_row, first_row + length - 1)]
            # Context such as a tool's output is read, but is no target: rows and targets drop the same tokens.
            is_trained = sequence.trained or (True,) * length
            source.extend(compress(predecessors, is_trained))
            targets.extend(compress(sequence.completion_ids, is_trained))
            tokens.extend(sequence.completion_ids)
            if is_shared:
                segments.append(Segment(first_row, length, prompt_row, prompt_length))
            else:
                segments.append(Segment(prompt_row, prompt_length + length, 0, 0))
    return tokens, source, targets, tuple(segments)


def _experts(families: Sequence[Family]) -> list[tuple[str, int]]:
    """Return the sampler's experts of each run of tokens, and its length, in the order of `_lay_out`."""
    runs: list[tuple[str, int]] = []
    for family in families:
        first = family[0][1]
        prompt, _ = first.experts or ("", "")
        runs.append((prompt, len(first.prompt_ids)))
        for _, sequence in family:
            _, own = sequence.experts or ("", "")
            runs.append((own, len(sequence.completion_ids)))
    return runs


def _micro_batch(
    families: Sequence[Family],
    aggregation: Aggregation,
    device: torch.device,
    dtype: torch.dtype,
) -> MicroBatch:
    """Lay out families as one micro-batch; every column (`_M`) has one number per trained token, in the same order."""
    tokens, source, targets, segments = _lay_out(families)
    sequences = [item for family in families for item in family]
    rows: list[int] = []
    weights: list[float] = []
    for row, (_, sequence) in enumerate(sequences):
        count = sequence.num_trained
        # The counts are the sequence's and its group's own, never the micro-batch's: the split must not show.
        weight = aggregation_weight(count, sequence.num_group_tokens, aggregation)
        rows.extend([row] * count)
        weights.extend([weight] * count)

    def column(name: str, fill: float) -> torch.Tensor:
        """Concatenate a column of all sequences; one that lacks it takes its default."""
        parts = []
        for _, sequence in sequences:
            part = getattr(sequence, name)
            if part is None:
                default = sequence.advantage if name == "advantages_T" else fill
                part = torch.full((sequence.num_trained,), default, dtype=dtype)
            parts.append(part.to(device=device, dtype=dtype))
        return torch.cat(parts)

    # Float32 first: that is what the sampler computed.
    logprobs = [p for _, s in sequences for p in s.sampler_logprobs or [0.0] * s.num_trained]
    sampler_M = torch.tensor(logprobs, dtype=torch.float32).to(device=device, dtype=dtype)
    kept = [row for _, sequence in sequences for row in sequence.kept]
    assert len(kept) in (0, len(targets)), "some tokens were drawn with filters, others without"
    is_ruled = any(sequence.allowed for _, sequence in sequences)
    allowed = [row for _, s in sequences for row in s.allowed or [""] * s.num_trained] if is_ruled else []
    experts = _experts(families) if any(sequence.experts for _, sequence in sequences) else None
    is_recomputed = sequences[0][1].proximal_logprobs_T is not None  # all sequences of a step, or none
    long = {"dtype": torch.int64, "device": device}
    return MicroBatch(
        tokens_N=torch.tensor(tokens, **long),
        segments=segments,
        source_M=torch.tensor(source, **long),
        targets_M=torch.tensor(targets, **long),
        sequence_M=torch.tensor(rows, **long),
        indices_B=tuple(index for index, _ in sequences),
        weights_M=torch.tensor(weights, dtype=dtype, device=device),
        advantages_M=column("advantages_T", 0.0),
        sampler_logprobs_M=sampler_M,
        proximal_logprobs_M=column("proximal_logprobs_T", 0.0) if is_recomputed else sampler_M,
        ref_logprobs_M=column("ref_logprobs_T", 0.0),
        policy_weights_M=column("policy_weights_T", 1.0),
        start_values_M=column("start_values_T", 0.0),
        returns_M=column("returns_T", 0.0),
        kept=join_kept(kept, device) if kept else None,
        allowed=join_kept(allowed, device) if allowed else None,
        experts_NX=None if experts is None else join_experts(experts, device),
    )
