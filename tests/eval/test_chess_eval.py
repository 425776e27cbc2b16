"""`whet eval chess`: what it writes, its games, and its exit status."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from needs import needs

chess = pytest.importorskip("chess", reason="python-chess is not installed: the extra chess")

from chess import pgn  # noqa: E402
from chess_model import TINY  # noqa: E402

from whet import __main__ as program  # noqa: E402
from whet.eval import evaluate as evaluation  # noqa: E402
from whet.eval.chess.games import (  # noqa: E402
    GamesConfig,
    Opponent,
    Player,
    Reply,
    measure_games,
    play_games,
    random_mover,
)
from whet.eval.metrics import headline_names  # noqa: E402
from whet.generate.policy import PolicyConfig, load_policy  # noqa: E402
from whet.generate.sampling import SamplingParams  # noqa: E402
from whet.tasks.chess import task  # noqa: E402
from whet.tasks.chess.stockfish import EngineError  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    load_policy(TINY, seed=0).save(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    fens = [{"fen": chess.STARTING_FEN, "best": "e2e4"}, {"fen": "8/5k2/8/2Q5/8/1K6/8/8 b - - 3 50"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in fens))
    return path


@pytest.mark.ci
def test_what_it_writes_and_its_exit_status(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(nodes: int) -> None:
        raise EngineError("Stockfish is not installed")

    monkeypatch.setattr(task, "shared", missing)
    words = [
        "eval",
        "chess",
        "--policy.init",
        str(model),
        "--task.path",
        str(rows),
        "--sampling.max-new-tokens",
        "8",
    ]
    out = tmp_path / "eval"
    assert program.main([*words, "--out", str(out)]) == 0
    found = json.loads((out / "eval.json").read_text())
    assert (found["legal"], found["best_move"], found["env_exact"]) == (0.0, 0.0, 0.0)
    assert found["metrics"]["legal"]["high"] < 1
    assert found["details"]["num_positions"] == found["details"]["num_steps"] == 2
    assert found["num_problems"] == 4
    own = task.Chess("chess").metric_names
    assert found["metrics"].keys() <= {*headline_names(found["num_samples"]), *own}
    assert found["metrics"].keys() >= {"pass@1", "format", "completion_tokens"}
    assert {"pass@2", "pass@3", "pass@8", "maj@8"} < {*headline_names(8, [3])}
    assert "maj@1" not in headline_names(1)
    for number, (require, status) in enumerate(
        (("legal 0.9", 1), ("env_exact 0.999", 2), ("legal 0.5 env_exact 0.5", 2), ("legal 0", 0))
    ):
        other = [*words, "--out", str(tmp_path / str(number)), "--require", *require.split()]
        assert program.main(other) == status, require
    # Data of our own needs Stockfish: a failure of the system, not of the model.
    alone = ["eval", "chess", "--policy.init", str(model), "--out", str(tmp_path / "none")]
    assert program.main(alone) == evaluation.ENGINE_FAILED


@pytest.mark.parametrize(
    ("words", "program_file", "status", "told"),
    [
        (["--require", "nosuch", "1"], "", 2, "require.nosuch: task chess has no such metric"),
        (["--require", "legl", "1"], "", 2, "did you mean 'legal'?"),
        (["--require", "score_random", "1"], "", 2, "require.score_random: task chess has no such"),
        (["--games.num-games", "2"], "/nope", 3, "'/nope' is not there"),
        (["--games.num-games", "2"], "/bin/false", 3, "/bin/false failed"),
    ],
)
def test_what_cannot_be_had_is_told_before_the_first_completion(
    words: list[str],
    program_file: str,
    status: int,
    told: str,
    model: Path,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if program_file:
        monkeypatch.setenv("WHET_STOCKFISH", program_file)
    monkeypatch.setattr(task.Chess, "engine", None)
    out = tmp_path / "eval"
    start = ["eval", "chess", "--policy.init", str(model), "--task.path", str(rows), "--out", str(out)]
    assert program.main([*start, *words]) == status
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_games_are_fair_and_end_by_the_rules(tmp_path: Path) -> None:
    config = GamesConfig(num_games=4, max_plies=30)
    games = play_games(random_mover(1), random_mover(2), config)
    assert [game.is_white for game in games] == [True, False, True, False]
    assert games[0].start == games[1].start
    assert games == play_games(random_mover(1), random_mover(2), config)
    assert all(game.result == 0.5 and game.reason == "drawn after 30 plies" for game in games)
    read = pgn.read_game(StringIO(games[0].pgn("model", "random", 1)))
    assert read is not None
    assert read.end().board().fen() == games[0].board.fen()

    def illegal(boards: Sequence[Any]) -> list[str]:
        return ["e2e5" for _ in boards]

    lost = play_games(illegal, random_mover(2), config)
    assert [(game.result, game.reason) for game in lost] == [(0.0, "illegal move")] * 4
    won = play_games(random_mover(1), illegal, config)
    assert all(game.result == 1.0 for game in won)

    def fool(boards: Sequence[Any]) -> list[str]:
        """The fool's mate, in the four plies after the opening's four."""
        return [_mating(board) for board in boards]

    mated = play_games(fool, random_mover(2), GamesConfig(num_games=8, max_plies=300))
    assert {game.result for game in mated} >= {1.0}
    assert "checkmate" in {game.reason for game in mated}


def test_a_policy_is_asked_again_where_it_names_no_legal_move(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line is the likeliest; others are drawn, each with a seed of its own, for those boards alone."""
    player = Player(load_policy(PolicyConfig(init=str(model)), seed=0), max_new_tokens=8, tries=3)
    seen: list[tuple[int, float, int]] = []
    asked = player._asked

    def watched(boards: Sequence[Any], params: Any, number: int) -> list[Reply]:
        seen.append((len(boards), params.temperature, number))
        replies = asked(boards, params, number)
        if number == 2:
            replies[0] = Reply("e2e4", "B: e2e4", num_asked=2)
        return replies

    monkeypatch.setattr(player, "_asked", watched)
    first, second = player.ask([chess.Board(), chess.Board("8/5k2/8/2Q5/8/1K6/8/8 b - - 3 50")])
    assert seen == [(2, 0.0, 1), (2, 1.0, 2), (1, 1.0, 3)]  # random weights name no legal move
    assert (first.move, first.num_asked) == ("e2e4", 2)
    assert (second.move, second.num_asked) == ("", 3)
    assert player.num_again == 2
    texts = {asked([chess.Board()], player._params, number)[0].text for number in (1, 2, 3)}
    assert len(texts) == 1  # at temperature 0 seeds do not matter
    drawn = {asked([chess.Board()], SamplingParams(max_new_tokens=8), number)[0].text for number in (1, 2, 3)}
    assert len(drawn) == 3
    with pytest.raises(ValueError, match="tries = 0"):
        GamesConfig(tries=0)


def test_games_say_a_rating(tmp_path: Path) -> None:
    """With every opponent at 0, half a win and half a loss before the games: 400 log10 of the odds."""

    class Fool:
        num_again = 0

        def __call__(self, boards: Sequence[Any]) -> list[str]:
            return [_mating(board) for board in boards]

    config = GamesConfig(num_games=6, max_plies=120, skills=())
    metrics, details = measure_games(Fool(), config, tmp_path, name="fool")  # type: ignore[arg-type]
    points = details["random"]["points"] / 2  # of three pairs
    share = (points + 0.5) / 4
    assert metrics["score_random"].mean == pytest.approx(points / 3)
    assert metrics["elo_random"].mean == pytest.approx(400 * math.log10(share / (1 - share)), abs=0.01)
    assert metrics["elo_random"].low <= metrics["elo_random"].mean <= metrics["elo_random"].high
    assert (tmp_path / "games.pgn").read_text().count("[Event ") == 6


@needs("stockfish")
def test_an_opponent_is_one_process_until_it_is_closed() -> None:
    opponent = Opponent(0, 50)
    first = opponent([chess.Board(), chess.Board()])
    pid = opponent._engine.transport.get_pid()  # pyright: ignore[reportPrivateUsage]
    assert all(chess.Board().is_legal(chess.Move.from_uci(move)) for move in first)
    assert len(opponent([chess.Board("8/5k2/8/2Q5/8/1K6/8/8 w - - 3 50")])) == 1
    assert opponent._engine.transport.get_pid() == pid  # pyright: ignore[reportPrivateUsage]
    opponent.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    opponent.close()  # once more does nothing


def _mating(board: Any) -> str:
    """A move that mates, or takes the most, else the first."""
    moves = list(board.legal_moves)
    for move in moves:
        board.push(move)
        mates = board.is_checkmate()
        board.pop()
        if mates:
            return move.uci()
    worth = {1: 1, 2: 3, 3: 3, 4: 5, 5: 9}
    return max(
        moves,
        key=lambda move: (
            worth.get(getattr(board.piece_at(move.to_square), "piece_type", 0), 0) + 9 * bool(move.promotion)
        ),
    ).uci()
