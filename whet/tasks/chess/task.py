"""The tasks of chess: `chess-policy`, `chess-env`, `chess-moves`, `chess-reason`, and `chess`, which evaluates policy
and environment on the same positions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from whet.schema import AnswerType
from whet.stats import Interval
from whet.tasks.chess.board import (
    Transition,
    find_move,
    listed_move,
    phase_of,
    play,
    position_key,
    read_board,
)
from whet.tasks.chess.files import read_positions
from whet.tasks.chess.formats import (
    NUM_CANDIDATES,
    NUM_LISTED,
    Layout,
    environment_answer,
    environment_prompt,
    moves_answer,
    moves_prompt,
    policy_answer,
    policy_prompt,
    read_moves,
    read_policy,
    read_step,
    reason_prompt,
    reason_solution,
)
from whet.tasks.chess.measures import METRICS, Said, measures_of
from whet.tasks.chess.positions import Position, checked, drawn_move, made, mates
from whet.tasks.chess.scoring import (
    PARTS,
    SHAPED,
    TOTALS,
    Kind,
    Line,
    best_moves,
    moves_parts,
    policy_parts,
    reason_parts,
    step_parts,
    total,
)
from whet.tasks.chess.stockfish import NODES, EngineError, Stockfish, shared
from whet.tasks.made.draft import DEV_PERCENT, TEST_PERCENT, Draw
from whet.tasks.read import BadRow, check_split, split_of
from whet.types import Allowed, Problem, problem_uid

if TYPE_CHECKING:
    import chess

KINDS: dict[str, tuple[Kind, ...]] = {
    "chess-policy": ("policy",),
    "chess-env": ("environment",),
    "chess-moves": ("moves",),
    "chess-reason": ("reason",),
    "chess": ("policy", "environment"),
}
"""What each task asks about a position."""
NUM_POSITIONS = {
    "chess-policy": 6000,
    "chess-env": 12_000,
    "chess-moves": 6000,
    "chess-reason": 2000,
    "chess": 3000,
}
CHECK_IN = 3
"""Of so many positions to train on one is replaced by the position after a check, where there is one: four in a hundred
are such, too few to learn what may be played then (docs/LOG.md)."""
KEPT_MOVES = 4
"""Moves of each of the engine's lines that a problem keeps."""


class Chess:
    """Problems about positions: 5 % are 'dev', 8 % 'test', by hash of the position, whichever side it is seen from.

    Attributes:
        name: Name of the task.
        answer_type: 'text'.
        part_names: Parts that `part_scores` returns.
        metric_names: Metrics that `measures` may return.
        needs_gold: False where Stockfish is missing: then a row without a best move has none.
        layout: How the policy's prompt is padded.
        bad_rows: Rows of the user's file that were skipped.
        seconds_per_answer: Limit of one judgement.
    """

    answer_type: AnswerType = "text"
    seconds_per_answer = 2.0

    def __init__(
        self,
        name: str,
        path: str = "",
        *,
        num_problems: int = 0,
        seed: int = 0,
        nodes: int = 0,
        layout: Layout = "padded",
        max_bad_rows: int = 0,
    ) -> None:
        """Describe the task; positions are made or read when a split is requested.

        Args:
            name: A name of `KINDS`.
            path: File of positions (`read_positions`); '' for positions of our own making.
            num_problems: Positions, all splits together; 0 for the task's default.
            seed: Seed of the positions.
            nodes: Nodes that Stockfish searches of each; 0 means 2,000, and no Stockfish where rules alone are asked.
            layout: How the policy's prompt is padded.
            max_bad_rows: Bad rows that are tolerated.

        Raises:
            UserError: If python-chess is missing.
        """
        self.name, self._kinds, self._path = name, KINDS[name], path
        self.layout: Layout = layout
        self._count, self._seed = num_problems or NUM_POSITIONS[name], seed
        self._nodes, self._max_bad_rows = nodes or NODES, max_bad_rows
        self._has_games = nodes > 0
        self._splits: dict[str, list[Problem]] = {}
        self.part_names = tuple(dict.fromkeys(part for kind in self._kinds for part in PARTS[kind]))
        self.metric_names = tuple(dict.fromkeys(name for kind in self._kinds for name in METRICS[kind]))
        self.needs_gold = name != "chess"
        self.bad_rows: list[BadRow] = []

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of a split; of the task `chess` all positions of a file are 'test': it only evaluates.

        Raises:
            UserError: If Stockfish is needed and missing, or the file cannot be read.
        """
        check_split(split)
        if not self._splits:
            self._splits = self._made()
        return list(self._splits[split])

    @property
    def plays(self) -> bool:
        """Whether it asks for moves, which Stockfish's lines judge."""
        return self._kinds not in (("environment",), ("moves",))

    @property
    def engine(self) -> Stockfish | None:
        """The pool; None where the rules alone are asked, or an evaluation's rows do without.

        Raises:
            EngineError: If it is needed and missing.
        """
        if not self.plays:
            return None
        try:
            return shared(self._nodes)
        except EngineError:
            if self.name == "chess" and self._path:
                return None
            raise

    def _made(self) -> dict[str, list[Problem]]:
        engine = self.engine
        if self._path:
            positions, self.bad_rows = read_positions(self._path, self._max_bad_rows)
        else:
            positions = _with_checks(
                made(self._count, self._seed, shared(self._nodes) if self._has_games else engine)
            )
        boards = [read_board(position.fen) for position in positions]
        lines: list[list[Line]] = [[] for _ in boards]
        if engine is not None:
            lines = _with_best(engine, positions, boards, engine.lines(boards))
        splits: dict[str, list[Problem]] = {"train": [], "dev": [], "test": []}
        seen: set[str] = set()
        for position, board, own in zip(positions, boards, lines, strict=True):
            key = position_key(board)
            place = _place(key)
            if self.name == "chess" and self._path:
                place = "test"
            for kind in self._kinds:
                problem = make_problem(
                    kind,
                    self.name,
                    position,
                    board,
                    own,
                    layout=self.layout,
                    key=key,
                    for_training=place == "train",
                )
                if problem.uid not in seen:
                    seen.add(problem.uid)
                    splits[place].append(problem)
        return splits

    def is_correct(self, problem: Problem, answer: str | None) -> bool:
        """Judge a completion: the best move is one of the best, or mates; an environment's four fields are exact; all
        moves of a line of moves are right.

        Without an engine and without a known best move, any legal one counts.
        """
        if answer is None:
            return False
        if problem.meta["kind"] == "environment":
            parts = self.part_scores(problem, answer)
            return all(parts[name] == 1 for name in ("format", "fen", "reward", "flags"))
        if problem.meta["kind"] == "moves":
            return self.part_scores(problem, answer)["pieces"] == 1
        move = move_of(problem, answer)
        good = accepted(problem)
        if move in good or not good:
            return find_move(board_of(problem.meta["fen"]), move) is not None
        return False

    def part_scores(self, problem: Problem, answer: str | None) -> Mapping[str, float]:
        """Return the score of each part of a completion (`whet.tasks.chess.scoring`), and their sums by name."""
        return _scored(
            problem.meta["kind"],
            problem.meta["fen"],
            problem.meta.get("move", ""),
            problem.meta.get("lines", "[]"),
            problem.meta.get("best", ""),
            answer or "",
        )

    def allowed(self, problem: Problem) -> Sequence[Allowed]:
        """Return the legal moves wherever an answer names one; in a list those that it has not named yet."""
        kind, answer = problem.meta["kind"], problem.answer
        if kind == "environment":
            return ()
        board = board_of(problem.meta["fen"])
        moves = [listed_move(board, move) if kind == "moves" else move.uci() for move in board.legal_moves]
        listed, mark, best = answer.partition("B:")
        if not mark and kind != "moves":
            return (Allowed(0, moves),)
        found, left = [], list(moves)
        for word in re.finditer(r"\S+", listed.partition("E:")[0]):
            found.append(Allowed(word.start(), tuple(left)))
            left.remove(word.group())
        return [*found, Allowed(len(answer) - len(best.lstrip()), moves)] if mark else found

    def wrong_answer(self, problem: Problem) -> str:
        """Return a near miss: the worst candidate as the best move, a reward that is not paid, a piece that is none."""
        if problem.meta["kind"] == "environment":
            fen, _, terminated, truncated = problem.answer.split("+")
            return f"{fen}+0.25+{terminated}+{truncated}"
        if problem.meta["kind"] == "moves":
            return f"{problem.answer[:-1]}x"
        good = accepted(problem)
        others = [line.move for line in lines_of(problem.meta.get("lines", "[]")) if line.move not in good]
        worst = others[-1] if others else "a1a1"
        if problem.meta["kind"] == "reason":
            return worst
        return f"{problem.answer.rpartition('B:')[0]}B: {worst}" if problem.answer else worst

    def measures(self, items: Sequence[tuple[Problem, str]]) -> tuple[dict[str, Interval], dict[str, Any]]:
        """Measure greedy completions (`whet.tasks.chess.measures`).

        Args:
            items: Problems of this task, each with the answer that the schema found.

        Returns:
            Metrics with intervals, and what they are made of.
        """
        try:
            engine = shared(self._nodes)
        except EngineError:
            engine = None
        said = [
            Said(
                board=board_of(problem.meta["fen"]),
                meta=problem.meta,
                lines=lines_of(problem.meta.get("lines", "[]")),
                good=accepted(problem),
                move=move_of(problem, text),
                policy=read_policy(text),
                parts=self.part_scores(problem, text),
            )
            for problem, text in items
        ]
        return measures_of(said, engine)


def _place(key: str) -> str:
    """Return the split of a position."""
    return split_of(key, dev_percent=DEV_PERCENT, test_percent=TEST_PERCENT)


def _with_best(
    engine: Stockfish,
    positions: Sequence[Position],
    boards: Sequence[chess.Board],
    lines: Sequence[list[Line]],
) -> list[list[Line]]:
    """Put the best move that the data names among the engine's lines, in the place of the last, where it is missing:
    then the gold line's best move is one of its candidates. It has its own search, of as many nodes."""
    found = list(lines)
    missing = [
        place
        for place, (position, own) in enumerate(zip(positions, lines, strict=True))
        if position.best and position.best[0] not in [line.move for line in own]
    ]
    asked = [boards[place] for place in missing]
    searched = engine.lines(asked, [positions[place].best[0] for place in missing])
    for place, own in zip(missing, searched, strict=True):
        kept = [*found[place][: NUM_CANDIDATES - 1], *own]
        found[place] = sorted(kept, key=lambda line: -line.cp)
    return found


def _with_checks(positions: Sequence[Position]) -> list[Position]:
    """Put some of the positions to train on a move further, where that move checks; those that were made to be mated
    stay."""
    found: list[Position] = []
    for position in positions:
        after = None
        if position.source != "mate" and Draw("chess check", position.fen).below(CHECK_IN) == 0:
            board = read_board(position.fen)
            after = checked(position, board) if _place(position_key(board)) == "train" else None
        is_apart = after is not None and _place(position_key(read_board(after.fen))) == "train"
        found.append(after if after and is_apart else position)
    return found


def make_problem(
    kind: Kind,
    task: str,
    position: Position,
    board: chess.Board,
    lines: Sequence[Line],
    *,
    for_training: bool,
    layout: Layout = "padded",
    key: str = "",
) -> Problem:
    """Ask one kind of question about a position.

    Args:
        kind: The question.
        task: Name of the task.
        position: The position.
        board: The same.
        lines: The engine's lines, best first; none where they are not known.
        for_training: Whether more of the moves that we draw are illegal or mate (`drawn_move`).
        layout: How the policy's prompt is padded.
        key: What `position_key` returns; '' computes it.
    """
    fen = position.fen
    key = key or position_key(board)
    meta = {
        "kind": kind,
        "fen": fen,
        "phase": phase_of(board),
        "side": "white" if board.turn else "black",
        "source": position.source,
        "prompt_uid": problem_uid("chess", key),
        "level": position.source,
    }
    if position.rating:
        meta["rating"] = str(position.rating)
    if position.puzzle:
        meta["puzzle"] = position.puzzle
    draw = Draw("chess problem", kind, fen)
    solution = ""
    if kind == "environment":
        move = position.move or drawn_move(board, draw, for_training=for_training)
        after = play(board, move)
        meta["move"] = move
        prompt = environment_prompt(fen, move, position.history)
        answer = environment_answer(after.fen, after.reward, after.terminated, after.truncated)
        return Problem(uid=problem_uid(task, prompt), task=task, prompt=prompt, answer=answer, meta=meta)
    if kind == "moves":
        chosen = draw.shuffled(list(board.legal_moves))[:NUM_LISTED]
        answer = moves_answer([listed_move(board, move) for move in chosen])
        prompt = moves_prompt(fen)
        return Problem(uid=problem_uid(task, prompt), task=task, prompt=prompt, answer=answer, meta=meta)
    meta["lines"] = json.dumps([[line.moves[:KEPT_MOVES], line.cp] for line in lines], separators=(",", ":"))
    if position.best:
        meta["best"] = " ".join(position.best)
    if position.points:
        meta["points"] = json.dumps(position.points, separators=(",", ":"))
    good = position.best or tuple(best_moves(lines) if lines else ())
    best = good[0] if good else ""
    others: tuple[str, ...] = ()
    if kind == "policy":
        prompt = policy_prompt(fen, layout)
        shuffled = draw.shuffled(lines)
        moves, pawns = [line.move for line in shuffled], [line.pawns for line in shuffled]
        answer = policy_answer(moves, pawns, best) if lines else best
    else:
        prompt = reason_prompt(fen, "White" if board.turn else "Black")
        answer, others = best, tuple(good[1:])
        ranked = sorted(lines, key=lambda line: line.move not in good)
        solution = reason_solution([(line.moves, line.pawns) for line in ranked])
    return Problem(
        uid=problem_uid(task, prompt),
        task=task,
        prompt=prompt,
        answer=answer,
        solution=solution,
        other_answers=others,
        meta=meta,
    )


def move_of(problem: Problem, answer: str) -> str:
    """Return the best move that a completion names, as written."""
    return answer.strip() if problem.meta["kind"] == "reason" else read_policy(answer).best


def accepted(problem: Problem) -> tuple[str, ...]:
    """Return the moves that are right: those that the data names, else the engine's best; and every mate.

    Of a puzzle or a data set, other moves that mate at once are right, too.
    """
    return _accepted(problem.meta["fen"], problem.meta.get("best", ""), problem.meta.get("lines", "[]"))


@lru_cache(maxsize=4096)
def _accepted(fen: str, best: str, lines: str) -> tuple[str, ...]:
    good = best.split() or (best_moves(found) if (found := lines_of(lines)) else [])
    return tuple(dict.fromkeys([*good, *mates(board_of(fen).copy(stack=False))]))


@lru_cache(maxsize=4096)
def board_of(fen: str) -> chess.Board:
    """Return a position that is only looked at."""
    return read_board(fen)


@lru_cache(maxsize=4096)
def lines_of(text: str) -> tuple[Line, ...]:
    """Return the engine's lines that a problem keeps."""
    return tuple(Line(tuple(moves), int(cp)) for moves, cp in json.loads(text))


@lru_cache(maxsize=4096)
def _truth(fen: str, move: str) -> Transition:
    return play(board_of(fen), move)


@lru_cache(maxsize=8192)
def _scored(kind: Kind, fen: str, move: str, lines: str, best: str, answer: str) -> Mapping[str, float]:
    """Score a completion once for all rewards that ask."""
    good = _accepted(fen, best, lines) if best else ()
    if kind == "environment":
        parts = step_parts(_truth(fen, move), read_step(answer))
    elif kind == "moves":
        parts = moves_parts(board_of(fen), read_moves(answer))
    elif kind == "reason":
        parts = reason_parts(board_of(fen), lines_of(lines), answer.strip(), good)
    else:
        parts = policy_parts(board_of(fen), lines_of(lines), read_policy(answer), good)
    return {**parts, **{name: total(name, kind, parts) for name in (*TOTALS, *SHAPED)}}
