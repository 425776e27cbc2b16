"""`whet chess`: the terminal, UCI and the page, with a stand-in that answers as a model would."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

chess = pytest.importorskip("chess", reason="python-chess is not installed: the extra chess")

from chess import engine as chess_engine  # noqa: E402
from chess_model import TINY  # noqa: E402

from whet import __version__  # noqa: E402
from whet.eval.chess.games import Reply  # noqa: E402
from whet.generate.policy import PolicyConfig, load_policy  # noqa: E402
from whet.report.boards import board_sources, draw_board  # noqa: E402
from whet.report.pictures import picture_of  # noqa: E402
from whet.report.samples import clean  # noqa: E402
from whet.serve.chess.chess import ChessConfig, Terminal  # noqa: E402
from whet.serve.chess.reply import evaluation_of, played  # noqa: E402
from whet.serve.chess.table import Table  # noqa: E402
from whet.serve.chess.uci import Front, Uci  # noqa: E402
from whet.tasks.chess.formats import policy_answer, policy_prompt  # noqa: E402
from whet.types import UserError  # noqa: E402

CONFIG = ChessConfig(policy=PolicyConfig(init="model"))
WRITTEN = policy_answer(["e7e5", "c7c5"], [-0.3, -0.41], "e7e5")


class Model:
    """Answers 1. e4 with e5, and everything else with a move that does not exist."""

    def ask(self, boards: Sequence[Any]) -> list[Reply]:
        return [
            Reply("e7e5", WRITTEN)
            if board.fen().startswith("rnbqkbnr/pppppppp/8/8/4P3")
            else Reply("", "B: e9e9")
            for board in boards
        ]


def test_terminal() -> None:
    lines: list[str] = []
    game = Terminal(Model(), CONFIG, lines.append)  # type: ignore[arg-type]
    game.run(["e5", "e2e4", "/fen", "Nf3", "/quit", "d4"])
    assert "'e5' is no legal move here" in lines[1]
    assert lines[2].startswith("it thinks: e7e5 c7c5 E: -0.3 -0.41")
    assert lines[3] == "it plays e5"
    assert lines[5] == "rnbqkbnr/pppp1ppp/8/4p3/4P3/8/PPPP1PPP/RNBQKBNR w KQkq - 0 2"
    assert lines[7] == "nothing it named is legal (no move in UCI notation); any move is played"
    assert len(game.board.move_stack) == 4  # d4 came after /quit
    game.handle("/undo")
    assert len(game.board.move_stack) == 2
    game.handle("/side")
    assert not game.is_white
    assert len(game.board.move_stack) == 3  # now it is the model's turn
    assert lines[-1].splitlines()[0].replace(".", "").replace(" ", "").isupper()  # White is at the top


def test_uci() -> None:
    lines: list[str] = []
    engine = Uci(Model(), "whet model", 0, lines.append)  # type: ignore[arg-type]
    engine.run(
        [
            "uci",
            "isready",
            "setoption name MultiPV value 5",
            "position startpos moves e2e4",
            "go movetime 100",
            "quit",
            "isready",
        ]
    )
    assert lines[0].splitlines() == [
        "id name whet model",
        f"id author whet {__version__}",
        "option name Hash type spin default 16 min 1 max 33554432",
        "option name Threads type spin default 1 min 1 max 1024",
        "option name Move Overhead type spin default 10 min 0 max 5000",
        "option name MultiPV type spin default 1 min 1 max 5",
        "option name Ponder type check default false",
        "uciok",
    ]
    assert lines[1:] == [
        "readyok",
        "info depth 1 multipv 1 score cp -30 pv e7e5",
        "info depth 1 multipv 2 score cp -41 pv c7c5",
        "bestmove e7e5",
    ]
    lines.clear()
    engine.run(["position startpos moves e2e5", "go"])
    assert lines[0].startswith("info string position: ")
    assert lines[1:] == ["bestmove 0000"]
    lines.clear()
    engine.run(
        [
            "position fen 6k1/5ppp/8/8/8/8/8/R3K3 w - - 0 1",
            "go",
            "position fen 7k/5Q2/6K1/8/8/8/8/8 b - - 0 1",
        ]
    )
    (move,) = [line.split()[1] for line in lines if line.startswith("bestmove")]
    assert chess.Board("6k1/5ppp/8/8/8/8/8/R3K3 w - - 0 1").is_legal(chess.Move.from_uci(move))
    assert any("nothing it named is legal" in line for line in lines)
    lines.clear()
    engine.run(["go"])
    assert lines == ["bestmove (none)"]  # stalemate


AFTER_E4 = "position startpos moves e2e4"


class Naming:
    """Answers every position with one text."""

    def __init__(self, text: str, move: str) -> None:
        self._reply = Reply(move, text)

    def ask(self, boards: Sequence[Any]) -> list[Reply]:
        return [self._reply for _ in boards]


def say(*commands: str, model: Any = None) -> list[str]:
    """What the engine writes."""
    lines: list[str] = []
    Uci(model or Model(), "whet model", 0, lines.append).run(["setoption name MultiPV value 5", *commands])
    return lines


def test_uci_waits_for_stop_where_it_is_to_think_on() -> None:
    thought = ["info depth 1 multipv 1 score cp -30 pv e7e5", "info depth 1 multipv 2 score cp -41 pv c7c5"]
    assert say(AFTER_E4, "go infinite") == thought
    assert say(AFTER_E4, "go infinite", "isready", "stop", "stop") == [*thought, "readyok", "bestmove e7e5"]
    assert say(AFTER_E4, "go ponder wtime 1", "ponderhit") == [*thought, "bestmove e7e5"]
    assert say(AFTER_E4, "go ponder", "stop", "ponderhit") == [*thought, "bestmove e7e5"]
    assert say(AFTER_E4, "stop", "ponderhit") == []


def test_uci_restricts_its_move() -> None:
    line = "info depth 1 multipv 1 score cp -41 pv c7c5"
    assert say(AFTER_E4, "go searchmoves a7a6 c7c5 wtime 5") == [
        line,
        "info string its best move is not among searchmoves; a candidate is played",
        "bestmove c7c5",
    ]
    assert say(AFTER_E4, "go searchmoves a7a6 b7b6 depth 3")[-2:] == [
        "info string nothing it named is among searchmoves; the first of them is played",
        "bestmove a7a6",
    ]
    assert say(AFTER_E4, "go searchmoves c7c5 e7e5")[-1] == "bestmove e7e5"
    assert say(AFTER_E4, "go searchmoves e2e4")[0].startswith(
        "info string searchmoves: none of them is legal"
    )
    assert say(AFTER_E4, "go searchmoves e2e4")[-1] == "bestmove e7e5"


def test_uci_sends_legal_lines_once_with_the_played_move_first() -> None:
    moves = ["d2d4", "e2e5", "e2e4", "d2d4", "g1f3"]
    model = Naming(policy_answer(moves, [0.5, 9.0, 0.3, 7.0, 0.4], "e2e4"), "e2e4")
    lines = [
        "info depth 1 multipv 1 score cp 30 pv e2e4",
        "info depth 1 multipv 2 score cp 50 pv d2d4",
        "info depth 1 multipv 3 score cp 40 pv g1f3",
    ]
    assert say("go", model=model) == [*lines, "bestmove e2e4"]
    assert say("setoption name MultiPV value 2", "go", model=model) == [*lines[:2], "bestmove e2e4"]
    assert say("setoption name multipv value 1", "go", model=model) == [*lines[:1], "bestmove e2e4"]
    told: list[str] = []
    Uci(model, "whet model", 0, told.append).run(["go"])  # type: ignore[arg-type]
    assert told == [*lines[:1], "bestmove e2e4"]
    alone = Naming(policy_answer(["d2d4"], [0.5], "a2a3"), "a2a3")  # its move has no evaluation
    assert say("go", model=alone) == [
        "info depth 1 multipv 1 pv a2a3",
        "info depth 1 multipv 2 score cp 50 pv d2d4",
        "bestmove a2a3",
    ]


def test_uci_options() -> None:
    for name in ("Hash", "Threads", "Move Overhead", "Ponder"):
        assert say(f"setoption name {name} value 1") == []
    assert say("setoption name Style value Risky") == ["info string there is no option 'Style'"]
    for value in ("0", "6", "many", "9" * 5000):
        (told,) = say(f"setoption name MultiPV value {value}")
        assert told.startswith("info string MultiPV: expected 1 to 5")


@pytest.mark.parametrize(
    "position",
    [
        "fen kk6/8/8/8/8/8/8/KK6 w - - 0 1",
        "fen 8/8/8/8/8/8/8/8 w - - 0 1",
        "fen nonsense",
        "startpos moves 0000",
        "startpos moves e2e4 e2e4",
        "",
    ],
)
def test_uci_refuses_positions_that_cannot_be_played_on(position: str) -> None:
    told, *rest = say(f"position {position}", "go", AFTER_E4, "go")
    assert told.startswith("info string position: ")
    assert (rest[0], rest[-1]) == ("bestmove 0000", "bestmove e7e5")


def test_uci_is_answered_while_the_model_is_loaded() -> None:
    """Also in pieces, and beside bytes that are no UTF-8."""
    written: list[str] = []
    data = iter([b"uc", b"i\nisready\n\xff\xfe go\r\nuci", b""])
    front = Front(lambda: next(data), written.append)
    front.begin("whet model")
    assert list(front) == ["isready", "\ufffd\ufffd go\r"]  # what it ends with
    assert [text.splitlines()[-1] for text in written] == ["uciok", "uciok"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: they name no legal move."""
    folder = tmp_path_factory.mktemp("tiny")
    load_policy(TINY, seed=0).save(folder)
    return folder


@pytest.mark.ci
def test_python_chess_plays_and_analyses(tiny: Path) -> None:
    """Its engine module speaks with the process: its handshake, a limited move, an analysis that it stops."""
    words = [
        sys.executable,
        "-m",
        "whet",
        "chess",
        str(tiny),
        "--uci",
        "--max-new-tokens",
        "8",
        "--tries",
        "1",
    ]
    board = chess.Board()
    with chess_engine.SimpleEngine.popen_uci(words, timeout=120) as engine:
        assert engine.id["name"] == f"whet {tiny.name}"
        assert {"Hash", "Threads", "Move Overhead", "MultiPV", "Ponder"} == engine.options.keys()
        engine.configure({"Hash": 8, "Threads": 2, "Move Overhead": 100})
        played = engine.play(board, chess_engine.Limit(time=0.1), info=chess_engine.INFO_ALL)
        assert played.info["pv"] == [played.move]
        assert played.move in board.legal_moves
        only = [chess.Move.from_uci("h2h3")]
        assert engine.play(board, chess_engine.Limit(time=0.1), root_moves=only).move == only[0]
        with engine.analysis(board) as analysis:  # go infinite
            assert analysis.get()
            analysis.stop()
            best = analysis.wait().move
            assert best in board.legal_moves


@pytest.mark.ci
def test_what_loading_stops_at_is_told_to_the_program_and_to_the_user(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "whet", "chess", str(tmp_path / "none"), "--uci"]
    done = subprocess.run(words, input=b"uci\nisready\n", capture_output=True, timeout=120, check=False)
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 2
    assert lines[lines.index("uciok") + 1].startswith("info string ")
    assert "none" in lines[-1]
    assert "readyok" not in lines
    assert done.stderr.decode().count("\n") == 1


@pytest.mark.ci
def test_the_terminal_reads_bytes_that_are_no_utf8(tiny: Path) -> None:
    words = [sys.executable, "-m", "whet", "chess", str(tiny), "--max-new-tokens", "8"]
    done = subprocess.run(
        words, input=b"\xff\xfe\n/fen\n/quit\n", capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "is no legal move here" in done.stdout.decode()
    assert chess.STARTING_FEN in done.stdout.decode()


def test_a_move_that_passes_is_none() -> None:
    lines: list[str] = []
    game = Terminal(Model(), CONFIG, lines.append)  # type: ignore[arg-type]
    for word in ("0000", "--", "Z0"):
        game.handle(word)
        assert lines[-1].startswith(f"'{word}' is no legal move here")
    assert not game.board.move_stack


REPEATED = ["g1f3", "g8f6", "f3g1", "f6g8"] * 4


def test_a_game_that_is_over_takes_no_further_move() -> None:
    lines: list[str] = []
    game = Terminal(Model(), CONFIG, lines.append)  # type: ignore[arg-type]
    for move in REPEATED:
        game.board.push_uci(move)
    for word in ("e2e4", "e4"):
        game.handle(word)
        assert lines[-1] == "the game is over (fivefold repetition: 1/2-1/2); type /new or /undo"
    table = Table(Model(), chess.STARTING_FEN)  # type: ignore[arg-type]
    found = table.answer({"moves": REPEATED, "side": "white"})
    assert (found["end"], found["legal"]) == ("fivefold repetition: 1/2-1/2", [])
    with pytest.raises(UserError, match=r"^the game is over \(fivefold repetition: 1/2-1/2\)$"):
        table.answer({"moves": REPEATED, "side": "white", "move": "e2e4"})
    old = Table(Model(), "8/5k2/8/2Q5/8/1K6/8/8 w - - 150 120")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^the game is over \(seventyfive moves: 1/2-1/2\)$"):
        old.answer({"moves": [], "side": "white", "move": "c5c4"})


def test_a_legal_candidate_replaces_an_illegal_best_move() -> None:
    board = chess.Board()
    text = policy_answer(["e2e4", "d2d4"], [0.3, 0.2], "e2e5")
    assert played(board, Reply("e2e4", text, True), 0) == (
        "e2e4",
        "its best move 'e2e5' is illegal (not how the piece moves); a candidate is played",
    )
    assert evaluation_of(policy_answer(["e2e4", "d2d4"], [0.3, 0.2], "e2e4")) == "+0.3"
    assert evaluation_of("nonsense") == ""


def test_it_says_how_often_the_model_was_asked() -> None:
    board = chess.Board()
    assert played(board, Reply("e2e4", "B: e2e4", num_asked=2), 0) == (
        "e2e4",
        "asked 2 times: nothing that it named before is legal",
    )
    _, note = played(board, Reply("", "B: e9e9", num_asked=4), 0)
    assert note == "asked 4 times: nothing it named is legal (no move in UCI notation); any move is played"


def test_page() -> None:
    testclient = pytest.importorskip("starlette.testclient")
    from whet.serve.api import Board, make_board_app

    board = Board(Table(Model(), chess.STARTING_FEN), title="whet chess: model")  # type: ignore[arg-type]
    app = make_board_app(board, hosts=frozenset({"testserver"}))
    client = testclient.TestClient(app)
    assert "whet chess: model" in client.get("/").text
    first = client.post("/play", json={"moves": [], "side": "white", "move": None}).json()
    assert (first["moves"], first["end"], len(first["legal"])) == ([], "", 20)
    second = client.post("/play", json={"moves": [], "side": "white", "move": "e2e4"}).json()
    assert second["moves"] == ["e2e4", "e7e5"]
    assert (second["said"], second["value"], second["names"]) == (WRITTEN, "-0.3", "1. e4 e5")
    assert base64.b64decode(second["board"].partition(",")[2]).startswith(b"<svg")
    for body in (
        {"moves": ["e2e5"]},
        {"moves": "e2e4"},
        [],
        {"moves": ["e2e4"] * 601},
        {"moves": [], "move": 7},
    ):
        answer = client.post("/play", json=body)
        assert (answer.status_code, list(answer.json())) == (400, ["error"]), body
    assert client.post("/play", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert client.post("/play", content=b"x", headers={"content-type": "application/json"}).status_code == 400
    long = b"[" * 5_000_000
    assert client.post("/play", content=long, headers={"content-type": "application/json"}).status_code == 413
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403


def test_boards_stand_beside_completions() -> None:
    fen = chess.STARTING_FEN
    gold = policy_answer(["e2e4", "d2d4"], [0.3, 0.2], "e2e4")
    row = {
        "prompt": policy_prompt(fen),
        "answer": gold,
        "completion": policy_answer(["d2d4", "a1a5"], [0, 1], "d2d4"),
    }
    (source,) = clean(row)["images"]
    drawn = picture_of(source)
    svg = base64.b64decode(drawn["src"].removeprefix("data:image/svg+xml;base64,")).decode()
    assert svg.startswith("<svg")
    assert svg.count('class="arrow"') >= 6  # a line and a head for each of three moves
    environment = f"A: {fen}+e2e4+e2e4+"
    after = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
    assert len(board_sources(environment, "", f"{after}+0.001+0+0")) == 2
    (listed,) = board_sources("L: 8/P6k/8/8/8/8/7K/8 w - - 0 1+", "", " a7a8qQ h2h3K h2h4K")
    colours = json.loads(listed.removeprefix("chess:"))[1]
    assert colours.keys() == {"a7a8", "h2h3", "h2h4"}
    svg = base64.b64decode(draw_board(listed)["src"].partition(",")[2]).decode()
    assert svg.count('class="arrow"') >= 6
    assert board_sources("47+85=", "132", "x") == []
    assert "src" not in draw_board('chess:["nonsense", {}]')
    assert "src" not in draw_board("chess:" + "[" * 5000)
    assert "src" not in draw_board(f'chess:["{fen}", {{"e2e4": "url(x)"}}]')
    assert clean({"prompt": "P: <script>alert(1)</script> M:", "completion": "x"})["images"] != [""]
