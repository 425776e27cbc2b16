"""The page of `whet chess RUN --page` in a real browser: clicked moves, typed moves, sides, and what it must not do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from report.chromium import Tab, launch

chess = pytest.importorskip("chess", reason="python-chess is not installed: the extra chess")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from whet.eval.chess.games import Reply  # noqa: E402
from whet.serve.api import Board, make_board_app  # noqa: E402
from whet.serve.chess.table import Table  # noqa: E402
from whet.tasks.chess.formats import policy_answer  # noqa: E402

HOSTILE = "<img/src=x/onerror=window.__hacked=1>"  # one word: a candidate beside the best move


class Model:
    """Plays the first legal move by name, and writes markup around it."""

    def ask(self, boards: Sequence[Any]) -> list[Reply]:
        found = []
        for board in boards:
            move = min(move.uci() for move in board.legal_moves)
            found.append(Reply(move, policy_answer([move, HOSTILE], [0.25, 0.1], move)))
        return found


@pytest.fixture
def address() -> Iterator[str]:
    board = Board(Table(Model(), chess.STARTING_FEN), title=f"whet chess: model {HOSTILE}")  # type: ignore[arg-type]
    app = make_board_app(board, hosts=frozenset({"127.0.0.1"}))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(20)


def click(tab: Tab, column: int, row: int) -> None:
    """Click the middle of a square, counted from the left and from above."""
    box = tab.page.locator("#board").bounding_box()
    assert box is not None
    side = box["width"] / 8
    tab.page.mouse.click(box["x"] + (column + 0.5) * side, box["y"] + (row + 0.5) * side)


def shows(tab: Tab, selector: str, text: str) -> None:
    tab.page.locator(selector, has_text=text).wait_for()


@pytest.mark.ci
def test_moves_are_clicked_and_typed_and_the_model_answers(address: str, tmp_path: Any) -> None:
    with launch() as browser:
        tab = Tab(browser)
        tab.page.goto(address)
        shows(tab, "#state", "your move")
        click(tab, 4, 6)  # e2, with White below
        click(tab, 4, 4)
        shows(tab, "#names", "1. e4 a5")
        shows(tab, "#said", HOSTILE)  # as text
        shows(tab, "#note", "it says +0.25 for itself")
        tab.page.locator("#move").fill("g1f3")
        tab.page.locator("#move-form button[type=submit]").click()
        shows(tab, "#names", "2. Nf3")
        tab.page.locator("#move").fill("g1f3")
        tab.page.locator("#move-form button[type=submit]").click()
        shows(tab, "#state", "'g1f3' is not a legal move")
        slips = [slip for slip in tab.slips if "400" not in slip]  # the browser notes the refusal
        tab.page.locator("#undo").click()
        tab.page.locator("#names").filter(has_not_text="Nf3").wait_for()
        tab.page.locator("#black").click()
        shows(tab, "#names", "1. a3")  # the model has White, and begins
        click(tab, 3, 6)  # with Black below, e7 is the fourth from the left
        click(tab, 3, 4)
        shows(tab, "#names", "1. a3 e5 2.")
        assert not tab.is_hacked()
        assert slips == []
        for width in (1280, 400):
            tab.show(dark=True, width=width)
            assert tab.overflow() <= 0
        tab.shoot(tmp_path, "chess")
        tab.close()
