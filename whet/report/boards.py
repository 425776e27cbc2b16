"""Boards beside lines of chess: what a completion says of the position that its prompt shows."""

from __future__ import annotations

import base64
import json
import re

from whet.tasks.chess.board import find_move, picture, read_board
from whet.tasks.chess.formats import NUM_LISTED, read_moves, read_policy, read_step
from whet.types import UserError

SCHEME = "chess:"
"""How the source of a board begins among the images of a sample."""
MAX_SOURCE = 1000
_POLICY = re.compile(r"P: ([^:]{10,120}?) +M:")
_ENVIRONMENT = re.compile(r"A: ([^+]{10,120})\+([^+]{1,10})\+")
_MOVES = re.compile(r"L: ([^+]{10,120})\+")
_WORDS = re.compile(r"Chess position \(FEN\): ([^\n]{10,120})\n")
CANDIDATE, BEST, GOLD, WRONG = "blue", "green", "yellow", "red"
"""Colours of arrows: a candidate; the best move of the completion, and of the engine; what is illegal."""


def board_sources(prompt: str, answer: str, completion: str) -> list[str]:
    """Return the sources of the boards of a sample; none unless its prompt is one of chess.

    Args:
        prompt: Its prompt.
        answer: The gold answer.
        completion: What was written.
    """
    if found := _POLICY.match(prompt):
        said, gold = read_policy(completion), read_policy(answer)
        moves = dict.fromkeys(said.moves[:5], CANDIDATE)
        return [_source(found[1], moves | {gold.best: GOLD} | {said.best: BEST})]
    if found := _ENVIRONMENT.match(prompt):
        after = read_step(completion).fen
        return [_source(found[1], {found[2]: BEST}), *([_source(after[:120], {})] if after else [])]
    if found := _MOVES.match(prompt):
        listed = read_moves(completion).moves[:NUM_LISTED]
        return [_source(found[1], {move[:4]: CANDIDATE for move in listed})]
    if found := _WORDS.match(prompt):
        words = completion.replace("<", " ").replace(">", " ").split()
        named = [word for word in words if re.fullmatch(r"[a-h][1-8][a-h][1-8][qrbn]?", word)]
        return [_source(found[1], {answer: GOLD} | ({named[-1]: BEST} if named else {}))]
    return []


def _source(fen: str, moves: dict[str, str]) -> str:
    drawn = {move[:5]: colour for move, colour in moves.items() if move}
    return SCHEME + json.dumps([" ".join(fen.split()), drawn])


def draw_board(source: str) -> dict[str, str]:
    """Return a board as a picture of a page: `src`, or `note` where there is none.

    Args:
        source: What `board_sources` returned, or untrusted text that begins like it.
    """
    try:
        fen, moves = json.loads(source[len(SCHEME) : MAX_SOURCE])
        board = read_board(str(fen))
        arrows = [
            (
                str(move),
                str(colour) if any(find_move(board, f"{move}{piece}") for piece in ("", "q")) else WRONG,
            )
            for move, colour in moves.items()
        ]
        if any(colour not in (CANDIDATE, BEST, GOLD, WRONG) for _, colour in arrows):
            raise ValueError("no such colour")
        drawn = picture(board.fen(), arrows=arrows)
    except (UserError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return {"name": "board", "note": str(error)[:200]}
    return {"name": fen, "src": f"data:image/svg+xml;base64,{base64.b64encode(drawn.encode()).decode()}"}
