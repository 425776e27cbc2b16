"""`whet chess`: the terminal, UCI and the page, with a stand-in that answers as a model would."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import pytest

chess = pytest.importorskip("chess", reason="python-chess is not installed: the extra chess")

from whet.eval.chess.games import Reply  # noqa: E402
from whet.generate.policy import PolicyConfig  # noqa: E402
from whet.report.boards import board_sources, draw_board  # noqa: E402
from whet.report.pictures import picture_of  # noqa: E402
from whet.report.samples import clean  # noqa: E402
from whet.serve.chess.chess import ChessConfig, Terminal, Uci  # noqa: E402
from whet.serve.chess.page import Table, make_app  # noqa: E402
from whet.serve.chess.reply import evaluation_of, played  # noqa: E402
from whet.tasks.chess.formats import policy_answer, policy_prompt  # noqa: E402

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
    engine.run(["uci", "isready", "position startpos moves e2e4", "go movetime 100", "quit", "isready"])
    assert lines[0].splitlines() == ["id name whet model", lines[0].splitlines()[1], "uciok"]
    assert lines[1:] == [
        "readyok",
        "info depth 1 multipv 1 score cp -30 pv e7e5",
        "info depth 1 multipv 2 score cp -41 pv c7c5",
        "bestmove e7e5",
    ]
    lines.clear()
    engine.run(["position startpos moves e2e5", "go"])
    assert lines[0].startswith("info string position: ")
    assert lines[-1] == "bestmove e7e5"  # the board stays as it was
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
    app = make_app(Table(Model(), chess.STARTING_FEN), "model", "white", ["testserver"])  # type: ignore[arg-type]
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
    long = b"[" * 70_000
    assert client.post("/play", content=long, headers={"content-type": "application/json"}).status_code == 413
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400


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
