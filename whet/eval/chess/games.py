"""Games of a policy: against Stockfish at a fixed skill, and against a random mover, many at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.generate.engine import Request
from whet.generate.policy import Policy
from whet.generate.rows import Completion
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.stats import Interval, share_interval
from whet.tasks.chess.board import find_move, library
from whet.tasks.chess.formats import Layout, policy_prompt, read_policy, reason_prompt
from whet.tasks.chess.measures import elo_interval
from whet.tasks.chess.positions import OPENINGS
from whet.tasks.chess.stockfish import DEADLINE_S, INSTALL, EngineError, end_process, require_stockfish
from whet.tasks.made.draft import Draw
from whet.types import Problem, UserError

if TYPE_CHECKING:
    import chess

RANDOM = "random"
MAX_TRIES = 100
Mover = Callable[[Sequence["chess.Board"]], list[str]]
"""Chooses a move in each of several positions; '' or an illegal one gives the game up."""
Generate = Callable[[Sequence[Request], SamplingParams], Sequence[Sequence[Completion]]]
"""Draws every sample of every request, as `whet.generate.engine.Engine.generate` does."""


@dataclass(frozen=True, kw_only=True)
class GamesConfig:
    """Games that an evaluation of chess plays."""

    num_games: int = 0
    """Games against each opponent, half of them with White, in pairs from the same opening; 0 for none."""
    skills: tuple[int, ...] = (0,)
    """Stockfish's skill levels (0 to 20) that are played, besides a random mover."""
    nodes: int = 1000
    """Nodes that Stockfish searches for a move."""
    max_plies: int = 200
    """Longest game; then it is a draw."""
    tries: int = 1
    """How often the policy is asked for a move: where nothing that it wrote is legal it is asked again, and draws
    another line; then the game is lost."""

    def __post_init__(self) -> None:
        if self.num_games < 0 or self.num_games % 2:
            raise ValueError(f"games.num_games = {self.num_games}: expected an even number, 0 for none")
        for skill in self.skills:
            if not 0 <= skill <= 20:
                raise ValueError(f"games.skills = {skill}: expected 0 to 20")
        if self.nodes < 1 or self.max_plies < 1:
            raise ValueError("games.nodes and games.max_plies: expected 1 or more")
        if not 1 <= self.tries <= MAX_TRIES:
            raise ValueError(f"games.tries = {self.tries}: expected 1 to {MAX_TRIES}")


@dataclass(frozen=True, slots=True)
class Reply:
    """A policy's move.

    Attributes:
        move: The move in UCI notation; '' where nothing that it wrote can be played.
        text: All that it wrote.
        is_second: Whether its best move was illegal, and a legal one of its candidates is played.
        num_asked: How often it was asked.
    """

    move: str
    text: str
    is_second: bool = False
    num_asked: int = 1


class Player:
    """A policy at the board: it is asked as it was trained, in lines of the policy or in words.

    Args:
        policy: The policy; one whose schema has a thinking block is asked in words.
        max_new_tokens: Longest completion.
        temperature: 0 plays the likeliest completion.
        seed: Seed of sampling.
        layout: How the policy's prompt is padded.
        tries: How often it is asked where nothing that it wrote can be played; again at the temperature, or at 1
            where that is 0.
        generate: Draws its lines; None for an engine of its own.

    Attributes:
        in_words: Whether it is asked in words.
        num_again: Moves for which it had to be asked again.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_new_tokens: int = 144,
        temperature: float = 0.0,
        seed: int = 0,
        layout: Layout = "padded",
        tries: int = 1,
        generate: Generate | None = None,
    ) -> None:
        self._policy, self._tries = policy, tries
        self.num_again = 0
        self._params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
        self._generate = generate or policy.engine().generate
        # An engine serves one thread at a time; who gives another way to draw lines sees to that.
        self._lock = threading.Lock() if generate is None else nullcontext()
        self._seed = seed
        self._layout: Layout = layout
        self.in_words = policy.schema.has_thinking

    def ask(self, boards: Sequence[chess.Board]) -> list[Reply]:
        """Return the policy's moves in positions, all in one batch; where it names none, ask again."""
        replies = self._asked(boards, self._params, 1)
        again = replace(self._params, temperature=self._params.temperature or 1.0)
        for number in range(2, self._tries + 1):
            left = [place for place, reply in enumerate(replies) if not reply.move]
            if not left:
                break
            self.num_again += len(left) if number == 2 else 0
            for place, reply in zip(left, self._asked([boards[p] for p in left], again, number), strict=True):
                replies[place] = reply
        return replies

    def _asked(self, boards: Sequence[chess.Board], params: SamplingParams, number: int) -> list[Reply]:
        prompts = []
        for board in boards:
            side = "White" if board.turn else "Black"
            text = (
                reason_prompt(board.fen(), side)
                if self.in_words
                else policy_prompt(board.fen(), self._layout)
            )
            problem = Problem(uid=text, task="chess", prompt=text, answer="")
            prompts.append(self._policy.prompt_ids(problem))
        room = self._policy.model.config.max_positions
        longest = max(map(len, prompts), default=0)
        params = replace(params, max_new_tokens=max(1, min(params.max_new_tokens, room - longest)))
        words = ("chess", self._seed) if number == 1 else ("chess", self._seed, number)
        requests = [
            Request(prompt_ids=prompt, seeds=(sequence_seed(*words, board.fen()),))
            for prompt, board in zip(prompts, boards, strict=True)
        ]
        with self._lock:
            done = self._generate(requests, params)
        replies = []
        for board, prompt, (one,) in zip(boards, prompts, done, strict=True):
            text = self._policy.tokenizer.decode_completion(prompt, one.ids)
            for stop in self._policy.stop_ids:
                text = text.removesuffix(self._policy.tokenizer.token_text(stop))
            replies.append(replace(self._read(board, text), num_asked=number))
        return replies

    def _read(self, board: chess.Board, text: str) -> Reply:
        answer = self._policy.schema.parse(text).answer or ""
        if self.in_words:
            return Reply(answer if find_move(board, answer) else "", text)
        said = read_policy(answer)
        if find_move(board, said.best):
            return Reply(said.best, text)
        legal = next((move for move in said.moves if find_move(board, move)), "")
        return Reply(legal, text, bool(legal))

    def __call__(self, boards: Sequence[chess.Board]) -> list[str]:
        """Return the moves alone."""
        return [reply.move for reply in self.ask(boards)]


def random_mover(seed: int) -> Mover:
    """Return a mover that plays any legal move, the same in the same position."""

    def choose(boards: Sequence[chess.Board]) -> list[str]:
        return [
            Draw("random mover", seed, board.fen()).one([move.uci() for move in board.legal_moves])
            for board in boards
        ]

    return choose


class Opponent:
    """Stockfish at a fixed skill: weaker than at its best, and (by its own choice) not the same each time.

    Args:
        skill: Its skill level.
        nodes: Nodes for a move.

    Raises:
        EngineError: If it is not there, or fails.
    """

    def __init__(self, skill: int, nodes: int) -> None:
        self._path, self._skill, self._nodes = require_stockfish(), skill, nodes
        self._loop = asyncio.new_event_loop()
        self._engine: Any = None

    def __call__(self, boards: Sequence[chess.Board]) -> list[str]:
        """Return its moves, all by one process, which starts with the first and goes on until `close`."""
        try:
            return self._loop.run_until_complete(self._choose(boards))
        except (TimeoutError, OSError, library().engine.EngineError) as error:
            raise EngineError(f"{self._path} failed ({str(error)[:200] or 'no answer'}); {INSTALL}") from None

    async def _choose(self, boards: Sequence[chess.Board]) -> list[str]:
        chess = library()
        if self._engine is None:
            _, self._engine = await asyncio.wait_for(chess.engine.popen_uci(self._path), DEADLINE_S)
            await self._engine.configure({"Skill Level": self._skill, "Threads": 1})
        limit = chess.engine.Limit(nodes=self._nodes)
        found = []
        for board in boards:
            played = await asyncio.wait_for(self._engine.play(board, limit, game=object()), DEADLINE_S)
            found.append(played.move.uci() if played.move else "")
        return found

    def start(self) -> None:
        """Start the process, if it does not run: so that one finds that it does before it is needed.

        Raises:
            EngineError: If it does not start.
        """
        self([])

    def close(self) -> None:
        """End the process."""
        if not self._loop.is_closed():
            if self._engine is not None:
                self._loop.run_until_complete(end_process(self._engine))
            self._loop.close()


@dataclass(slots=True)
class Game:
    """A game.

    Attributes:
        board: Where it stands.
        is_white: Whether the policy has White.
        start: The position after its opening.
        result: 1, 0.5 or 0 points for the policy; None while it is played.
        reason: How it ended.
    """

    board: Any
    is_white: bool
    start: Any
    result: float | None = None
    reason: str = ""

    def pgn(self, name: str, opponent: str, number: int) -> str:
        """Write it as PGN."""
        chess = library()
        game = chess.pgn.Game.from_board(self.board)
        names = (name, opponent) if self.is_white else (opponent, name)
        points = {None: "*", 0.5: "1/2-1/2"}.get(self.result) or (
            "1-0" if (self.result == 1) == self.is_white else "0-1"
        )
        game.headers.update(
            Event="whet eval chess", Round=str(number), White=names[0], Black=names[1], Result=points
        )
        game.headers["Termination"] = self.reason
        return f"{game}\n"


def check_opponents(config: GamesConfig) -> None:
    """Find out whether the opponents of games can be started.

    Raises:
        EngineError: If one cannot.
    """
    for skill in config.skills if config.num_games else ():
        opponent = Opponent(skill, config.nodes)
        try:
            opponent.start()
        finally:
            opponent.close()


def metric_names(config: GamesConfig) -> tuple[str, ...]:
    """Return the names of the metrics that `measure_games` returns."""
    if not config.num_games:
        return ()
    labels = (RANDOM, *(f"stockfish_{skill}" for skill in config.skills))
    return tuple(f"{what}_{label}" for label in labels for what in ("score", "elo"))


def play_games(
    policy: Mover,
    opponent: Mover,
    config: GamesConfig,
    *,
    seed: int = 0,
    on_move: Callable[[int], None] | None = None,
) -> list[Game]:
    """Play games side by side: each opening twice, with White and with Black.

    Args:
        policy: Chooses the policy's moves.
        opponent: Chooses the other side's.
        config: How many, and how long.
        seed: Seed of the openings.
        on_move: Called with the number of games that are still played, after each ply.
    """
    games: list[Game] = []
    for number in range(config.num_games):
        draw = Draw("chess match", seed, number // 2)
        board = library().Board()
        for text in draw.one(OPENINGS).split()[:4]:
            board.push_uci(text)
        games.append(Game(board, number % 2 == 0, board.fen()))
    for _ in range(config.max_plies):
        going = [game for game in games if game.result is None]
        if not going:
            break
        ours_to_move = [game.board.turn == game.is_white for game in going]
        for ours in (True, False):
            turn = [game for game, is_ours in zip(going, ours_to_move, strict=True) if is_ours == ours]
            if not turn:
                continue
            moves = (policy if ours else opponent)([game.board for game in turn])
            for game, move in zip(turn, moves, strict=True):
                _push(game, move, ours)
        if on_move is not None:
            on_move(len(going))
    for game in games:
        if game.result is None:
            game.result, game.reason = 0.5, f"drawn after {config.max_plies} plies"
    return games


def _push(game: Game, move: str, ours: bool) -> None:
    """Play a move, or end the game where it is none, or the last."""
    found = find_move(game.board, move)
    if found is None:
        game.result, game.reason = (0.0 if ours else 1.0), "illegal move" if ours else "resigned"
        return
    game.board.push(found)
    outcome = game.board.outcome(claim_draw=True)
    if outcome is not None:
        won = outcome.winner == game.is_white
        game.result = 0.5 if outcome.winner is None else float(won)
        game.reason = outcome.termination.name.lower().replace("_", " ")


def measure_games(
    player: Player, config: GamesConfig, folder: Path, *, name: str, seed: int = 0
) -> tuple[dict[str, Interval], dict[str, Any]]:
    """Play all opponents, and write games.pgn.

    Args:
        player: The policy.
        config: Games and opponents.
        folder: Folder of the evaluation.
        name: What the policy is called.
        seed: Seed of openings and of the random mover.

    Returns:
        Share of the points against each, `score_random`, `score_stockfish_0` ..., and `elo_random` ..., the rating that
        they say above the opponent's, with intervals over pairs of games of one opening; how the games ended, and for
        how many moves the policy had to be asked again.
    """
    metrics: dict[str, Interval] = {}
    details: dict[str, Any] = {}
    texts: list[str] = []
    opponents: dict[str, Mover] = {RANDOM: random_mover(seed)}
    opponents |= {f"stockfish_{skill}": Opponent(skill, config.nodes) for skill in config.skills}
    for label, opponent in opponents.items():
        before = player.num_again
        try:
            games = play_games(player, opponent, config, seed=seed)
        finally:
            if isinstance(opponent, Opponent):
                opponent.close()
        results = [game.result or 0.0 for game in games]
        pairs = [(a + b) / 2 for a, b in zip(results[::2], results[1::2], strict=True)]
        metrics[f"score_{label}"] = share_interval(pairs)
        metrics[f"elo_{label}"] = elo_interval([0.0] * len(pairs), pairs, seed)
        reasons = [game.reason for game in games]
        details[label] = {
            "points": sum(results),
            "games": len(games),
            "ends": {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)},
            "asked_again": player.num_again - before,
        }
        texts += [game.pgn(name, label.replace("_", " skill "), place) for place, game in enumerate(games, 1)]
    try:
        (folder / "games.pgn").write_text("\n".join(texts), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}/games.pgn: cannot be written ({error.strerror})") from None
    return metrics, details
