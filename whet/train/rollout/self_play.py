"""Self-play: positions that the policy's own moves lead to, kept in a buffer and asked about beside the task's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from whet.generate.sampling import sequence_seed
from whet.tasks.chess.board import find_move, library
from whet.tasks.chess.positions import OPENINGS, Position
from whet.tasks.chess.scoring import Line
from whet.tasks.chess.stockfish import Stockfish
from whet.tasks.chess.task import Chess, make_problem, move_of
from whet.tasks.made.draft import Draw
from whet.tasks.mixture import PART, Mixture
from whet.train.rollout.order import EpochOrder, MixtureOrder
from whet.types import Group, Problem, Task, UserError

GAME = "game"
"""Label in a problem's meta: the number of the game that its group's moves go on."""


@dataclass(frozen=True, kw_only=True)
class SelfPlayConfig:
    """Positions from the policy's own games, in a run on lines of chess."""

    share: float = 0.0
    """Share of the problems that come from games, once there are any; 0 for none. The source has 0.7."""
    num_games: int = 4
    """Games that go on at the same time, each by a move a step."""
    max_plies: int = 150
    """Longest game; then another begins."""
    buffer_size: int = 1000
    """Positions that are kept; the oldest go first."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"self_play.share = {self.share}: expected 0 to 1")
        for name in ("num_games", "max_plies", "buffer_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"self_play.{name} = {getattr(self, name)}: expected 1 or more")


@dataclass(slots=True)
class _Seat:
    """A game: its position and how it came there.

    Attributes:
        fen: The position.
        history: Moves before it.
        plies: Moves of the game.
        number: Games that were begun at this seat.
    """

    fen: str
    history: tuple[str, ...]
    plies: int
    number: int


class SelfPlayOrder:
    """An order of a run's problems in which some are replaced by positions of the policy's games.

    Which are replaced, and by what, is a function of the seed, the cursor and the games so far. A game's position is
    asked as any other problem; the first legal best move among its group's samples is played. Stockfish searches a new
    position while the step that led to it is trained on.

    Args:
        inner: The order of the task's own problems; its cursor counts those that are replaced, too.
        config: Games and buffer.
        task: The run's task.
        seed: The run's seed.

    Attributes:
        wait_seconds: What was waited for Stockfish so far.

    Raises:
        UserError: If the task has no lines of chess's policy.
    """

    look: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        inner: EpochOrder[Problem] | MixtureOrder[Problem],
        config: SelfPlayConfig,
        task: Task,
        seed: int,
    ) -> None:
        parts = task.parts if isinstance(task, Mixture) else {"": task}
        self._parts = {label: part for label, part in parts.items() if isinstance(part, Chess)}
        engines = [part.engine for part in self._parts.values() if part.plays]
        if not engines:
            raise UserError(
                f"self_play.share: task {task.name} has no lines of chess's policy; use chess-policy, or a mixture "
                "with it, or leave self_play out"
            )
        engine = engines[0]
        assert engine is not None
        self._engine: Stockfish = engine
        self._inner, self._config, self._seed = inner, config, seed
        self._buffer: list[Position] = []
        self._seats = [self._begun(place, 0) for place in range(config.num_games)]
        self._lines: dict[str, Future[list[Line]]] = {}
        self._num_played = self._num_finished = 0
        self.wait_seconds = 0.0
        self._search([seat.fen for seat in self._seats])

    @property
    def cursor(self) -> int:
        """Problems given out so far."""
        return self._inner.cursor

    @cursor.setter
    def cursor(self, value: int) -> None:
        """Go on from a number of problems given out."""
        self._inner.cursor = value

    @property
    def epochs(self) -> float:
        """Passes over the task's own problems, those that were replaced counted."""
        return self._inner.epochs

    def next(self, count: int) -> list[tuple[int, Problem]]:
        """Return the next problems, each with the number of its epoch."""
        first = self._inner.cursor
        drawn = self._inner.next(count)
        seats = list(range(len(self._seats)))
        found: list[tuple[int, Problem]] = []
        for place, (epoch, problem) in enumerate(drawn, first):
            part = self._parts.get(problem.meta.get(PART, ""))
            chance = sequence_seed("self-play", self._seed, place) / 2**63
            if part is None or chance >= self._config.share:
                found.append((epoch, problem))
            elif part.plays and seats:
                seat = seats.pop(0)
                position = Position(self._seats[seat].fen, self._seats[seat].history, "self-play")
                found.append((epoch, self._ask(part, problem, position, {GAME: str(seat)})))
            elif self._buffer:
                index = sequence_seed("buffer", self._seed, place) % len(self._buffer)
                found.append((epoch, self._ask(part, problem, self._buffer[index], {})))
            else:
                found.append((epoch, problem))
        return found

    def observe(self, groups: Sequence[Group]) -> None:
        """Play the moves that the groups of games wrote, and keep the positions that they lead to."""
        for group in groups:
            place = int(group.problem.meta.get(GAME, -1))
            if place < 0 or self._seats[place].fen != group.problem.meta["fen"]:
                continue
            seat = self._seats[place]
            board = library().Board(seat.fen)
            moves = (move_of(group.problem, sample.text) for sample in group.samples)
            move = next((found for text in moves if (found := find_move(board, text)) is not None), None)
            if move is not None:
                board.push(move)
                self._num_played += 1
            if move is None or not any(board.legal_moves) or seat.plies + 1 >= self._config.max_plies:
                self._num_finished += 1
                self._seats[place] = self._begun(place, seat.number + 1)
            else:
                history = (*seat.history, move.uci())[-9:]
                self._seats[place] = _Seat(board.fen(), history, seat.plies + 1, seat.number)
                self._buffer.append(Position(board.fen(), history, "self-play"))
                del self._buffer[: -self._config.buffer_size]
            self._search([self._seats[place].fen])

    def metrics(self) -> dict[str, float]:
        """Return counts of positions and games, and what was waited for Stockfish."""
        return {
            "rl/self_play_buffer": float(len(self._buffer)),
            "rl/self_play_moves": float(self._num_played),
            "rl/self_play_games": float(self._num_finished),
            "rl/engine_wait_seconds": self.wait_seconds,
        }

    def state(self) -> dict[str, Any]:
        """Return games and buffer, as JSON values, for a checkpoint."""
        return {
            "buffer": [[position.fen, list(position.history)] for position in self._buffer],
            "seats": [[seat.fen, list(seat.history), seat.plies, seat.number] for seat in self._seats],
            "counts": [self._num_played, self._num_finished],
            "wait_seconds": self.wait_seconds,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` returned."""
        self._buffer = [Position(fen, tuple(history), "self-play") for fen, history in state["buffer"]]
        self._seats = [
            _Seat(fen, tuple(history), plies, number) for fen, history, plies, number in state["seats"]
        ]
        self._num_played, self._num_finished = state["counts"]
        self.wait_seconds = float(state.get("wait_seconds", 0.0))
        self._search([seat.fen for seat in self._seats])

    def _begun(self, place: int, number: int) -> _Seat:
        """Begin a game at a seat, from some moves of an opening."""
        draw, board = Draw("self-play", self._seed, place, number), library().Board()
        for text in draw.one(OPENINGS).split()[: draw.below(7)]:
            board.push_uci(text)
        history = tuple(move.uci() for move in board.move_stack[-9:])
        return _Seat(board.fen(), history, len(board.move_stack), number)

    def _search(self, fens: Sequence[str]) -> None:
        """Let Stockfish search positions beside whatever is done next."""
        for fen in fens:
            self._lines[fen] = self._engine.submit(library().Board(fen))
        kept = {seat.fen for seat in self._seats}
        self._lines = {fen: lines for fen, lines in self._lines.items() if fen in kept}

    def _ask(self, part: Chess, drawn: Problem, position: Position, meta: Mapping[str, str]) -> Problem:
        """Ask about a position in place of a problem, in the same kind of line."""
        board = library().Board(position.fen)
        lines: list[Line] = []
        if part.plays:
            began = time.perf_counter()
            lines = (self._lines.get(position.fen) or self._engine.submit(board)).result()
            self.wait_seconds += time.perf_counter() - began
        problem = make_problem(
            drawn.meta["kind"],  # type: ignore[arg-type]
            drawn.task,
            position,
            board,
            lines,
            for_training=True,
            layout=part.layout,
        )
        own = {name: drawn.meta[name] for name in (PART,) if name in drawn.meta}
        return replace(problem, meta={**problem.meta, **own, **meta})
