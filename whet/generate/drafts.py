"""Guesses of what a row draws next, read along with its last token: several tokens in one step where they are right.

What followed the last time that a sequence's last tokens stood in it (prompt lookup, Saxena 2023; n-gram speculation).
A guess never changes what is drawn: each token is drawn from its own logits with its own noise, and kept as long as
the tokens before it were the ones that were read. With arithmetic that does not depend on the batch, the numbers are
bit for bit those of one token a step.
"""

from __future__ import annotations

import torch

from whet.generate.lookup import Lookup
from whet.generate.rows import Rows, are_plain

MAX_TOKENS = 12
"""Tokens of a step with guesses: the rows that a product takes at once."""
MAX_ROWS = 4
"""More live rows than these leave too little room for guesses."""


def read_ahead(
    state: Rows, num_guesses: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Guess for the live rows.

    Args:
        state: The rows.
        num_guesses: For each row, at most.

    Returns:
        tokens [M] to read, their positions [M] and rows [M], and where each live row's begin [B + 1]; None where
        nothing is guessed: too many rows, filters, or nothing to go by.
    """
    live = len(state.jobs)
    if live > MAX_ROWS or not are_plain(state.jobs):
        return None
    room = min(num_guesses, MAX_TOKENS // live - 1)
    counts, limits = state.counts[:live].tolist(), state.limits[:live].tolist()
    done, last = state.done[:live].tolist(), state.last[:live].tolist()
    tokens: list[int] = []
    rows: list[int] = []
    first = [0]
    for row, job in enumerate(state.jobs):
        lookup = job.lookup = job.lookup or Lookup(job.request.prompt_ids)
        known = len(lookup) - len(job.request.prompt_ids)
        lookup.extend(state.tokens[row, known : counts[row]].tolist())
        guesses = [] if done[row] else lookup.guess(min(room, limits[row] - counts[row] - 1))
        tokens += [last[row], *guesses]
        rows += [row] * (1 + len(guesses))
        first.append(len(tokens))
    if len(tokens) == live:
        return None
    rows_M, first_B = torch.tensor(rows), torch.tensor(first)
    positions_M = state.positions[rows_M] + torch.arange(len(tokens)) - first_B[rows_M]
    return torch.tensor(tokens), positions_M, rows_M, first_B
