"""The pool of Stockfish: deterministic, cached, mirrored; a process that hangs is replaced."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from needs import needs

chess = pytest.importorskip("chess", reason="python-chess is not installed: the extra chess")

from whet.tasks.chess import stockfish  # noqa: E402
from whet.tasks.chess.scoring import Line  # noqa: E402
from whet.tasks.chess.stockfish import EngineError, Stockfish  # noqa: E402

needs_engine = needs("stockfish")
FENS = (
    chess.STARTING_FEN,
    "r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5N2/PPPP1PPP/RNBQK2R b KQkq - 3 3",
    "8/5k2/8/2Q5/8/1K6/8/8 w - - 3 50",
    "7k/8/6K1/8/8/8/8/7R b - - 0 1",
)


@needs_engine
def test_lines_are_deterministic_cached_and_mirrored(tmp_path: Path) -> None:
    boards = [chess.Board(fen) for fen in FENS]
    cache = str(tmp_path / "lines.sqlite")
    with Stockfish(400, num_processes=2, cache_path=cache) as pool:
        first = pool.lines(boards)
        assert pool.num_searched == len(FENS)
        assert pool.lines(boards) == first
        turned = pool.lines([board.mirror() for board in boards])
        assert pool.num_searched == len(FENS)  # mirrored positions are the same search
        values = pool.values([(boards[2], first[2][0].move)])
    for board, own, other in zip(boards, first, turned, strict=True):
        assert [line.cp for line in own] == [line.cp for line in other]
        assert all(board.is_legal(chess.Move.from_uci(line.move)) for line in own)
        assert all(board.mirror().is_legal(chess.Move.from_uci(line.move)) for line in other)
        assert own == sorted(own, key=lambda line: -line.cp)
    assert len(first[3]) == 1  # one legal move
    assert values[0] > 300  # a queen more
    with Stockfish(400, num_processes=1, cache_path="") as other_pool:
        assert other_pool.lines(list(reversed(boards))) == first[::-1]  # in another order, in one process
    with Stockfish(400, num_processes=1, cache_path=cache) as again:
        assert again.lines(boards) == first
        assert again.num_searched == 0
    with Stockfish(500, num_processes=1, cache_path=cache) as deeper:
        deeper.lines(boards[:1])
        assert deeper.num_searched == 1  # other nodes are another entry


ENGINE = """for line in sys.stdin:
    if line.startswith("uci\\n"):
        print("id name Odd 1\\noption name Threads type spin default 1 min 1 max 8", flush=True)
        print("option name Hash type spin default 1 min 1 max 8", flush=True)
        print("option name MultiPV type spin default 1 min 1 max 8\\nuciok", flush=True)
    elif line.startswith("isready"):
        print("readyok", flush=True)
    elif line.startswith("quit"):
        break
    elif line.startswith("go"):
"""
HANGING = """#!/usr/bin/env python3
import os, sys
first = not os.path.exists({flag!r})
if first:
    open({flag!r}, "w").close()
{engine}        if {always} or first:
            continue
        print("info depth 1 multipv 1 score cp 13 nodes 1 pv e2e4\\nbestmove e2e4", flush=True)
"""


@pytest.mark.ci
@pytest.mark.parametrize("always", [False, True])
def test_a_process_that_hangs_is_killed_and_replaced(tmp_path: Path, always: bool) -> None:
    program = tmp_path / "engine"
    program.write_text(HANGING.format(engine=ENGINE, flag=str(tmp_path / "flag"), always=always))
    program.chmod(0o755)
    with Stockfish(10, num_processes=1, path=str(program), cache_path="", deadline_s=1.0) as pool:
        if always:
            with pytest.raises(EngineError, match="failed 3 times"):
                pool.lines([chess.Board()])
            assert pool.num_restarts == 3
        else:
            assert pool.lines([chess.Board()])[0][0].cp == 13
            assert pool.num_restarts == 1


SAYING = """#!/usr/bin/env python3
import sys
{engine}        for number, moves in enumerate({lines!r}, 1):
            print(f"info depth 1 multipv {{number}} score cp 13 nodes 1 pv {{moves}}", flush=True)
        print("bestmove e2e4", flush=True)
"""


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["e2e5"], "'e2e5', which is illegal"),
        (["e2e4 e7e5", "e2e4 c7c5"], "'e2e4' twice"),
        (["e2e4 zzzz"], "'zzzz', which is no move"),
        ([""], "a line without moves"),
        ([], "no move, and there are legal ones"),
    ],
)
def test_an_engine_that_names_what_cannot_be_is_not_believed(
    tmp_path: Path, lines: list[str], told: str
) -> None:
    program, cache = tmp_path / "engine", tmp_path / "lines.sqlite"
    program.write_text(SAYING.format(engine=ENGINE, lines=lines))
    program.chmod(0o755)
    pool = Stockfish(10, num_processes=1, path=str(program), cache_path=str(cache))
    with pool, pytest.raises(EngineError) as caught:
        pool.lines([chess.Board()])
    for part in (str(program), chess.STARTING_FEN, told):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    with sqlite3.connect(cache) as file:
        assert file.execute("SELECT count(*) FROM lines").fetchone() == (0,)


@pytest.fixture
def working(tmp_path: Path) -> str:
    """A program that names 1. e4 and 1. d4."""
    program = tmp_path / "working"
    program.write_text(SAYING.format(engine=ENGINE, lines=["e2e4 e7e5", "d2d4"]))
    program.chmod(0o755)
    return str(program)


def test_a_cached_value_that_we_do_not_write_is_searched_again(tmp_path: Path, working: str) -> None:
    cache = tmp_path / "lines.sqlite"
    board = chess.Board()
    values = (
        *('[[["e2e4"],1e999]]', "[" * 100_000, "[[[],5]]", "[]", "[5]", "null", "", None, b"\xff", 7),
        *('[[["e2e5"],5]]', '[[["e2e4"],5],[["e2e4"],4]]', '[[["e2e4","x"],5]]', '[["e2e4",5]]'),
        *('{"e2e4": 5}', '[[["e2e4"],"5"]]', "[[[5],5]]"),
    )
    with Stockfish(10, num_processes=1, path=working, cache_path=str(cache)) as pool:
        (right,) = pool.lines([board])
        for number, value in enumerate(values, 2):
            with sqlite3.connect(cache) as file:
                file.execute("UPDATE lines SET value = ?", (value,))
            file.close()
            assert pool.lines([board]) == [right], value
            assert pool.lines([board]) == [right]  # what is found takes the place of the damaged value
            assert pool.num_searched == number


@pytest.mark.parametrize("damage", ["pages", "schema", "text"])
def test_a_damaged_cache_counts_as_empty(tmp_path: Path, working: str, damage: str) -> None:
    cache = tmp_path / "lines.sqlite"
    boards = [chess.Board()]
    with Stockfish(10, num_processes=1, path=working, cache_path=str(cache)) as pool:
        right = pool.lines(boards)
    if damage == "text":
        cache.write_text("no database")
    else:
        with sqlite3.connect(cache) as file:
            if damage == "schema":
                file.execute("DROP TABLE lines")
                file.execute("CREATE TABLE lines (other TEXT)")
            else:
                file.executemany(
                    "INSERT INTO lines VALUES (?, ?)", [(f"{n:05}", "x" * 500) for n in range(2000)]
                )
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        file.close()
    if damage == "pages":
        data = cache.read_bytes()
        cache.write_bytes(data[:8192] + b"\xff" * (len(data) - 8192))
    with Stockfish(10, num_processes=1, path=working, cache_path=str(cache)) as pool:
        assert pool.lines(boards) == right
        assert pool.lines(boards) == right
        assert pool.num_searched == 1  # the second time from memory


def test_entries_of_earlier_versions_are_still_read(tmp_path: Path, working: str) -> None:
    cache = tmp_path / "lines.sqlite"
    with sqlite3.connect(cache) as file:
        file.execute("CREATE TABLE lines (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
        name = "Odd 1|10|5|rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0"
        file.execute("INSERT INTO lines VALUES (?, ?)", (name, '[[["g1f3", "d7d5"], 7]]'))
    file.close()
    with Stockfish(10, num_processes=1, path=working, cache_path=str(cache)) as pool:
        assert pool.lines([chess.Board()]) == [[Line(("g1f3", "d7d5"), 7)]]
        assert pool.num_searched == 0


def test_a_missing_program_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("WHET_STOCKFISH", raising=False)
    monkeypatch.setattr(stockfish, "PLACES", ())
    with pytest.raises(
        EngineError, match="Stockfish is not installed; install it: apt-get install stockfish"
    ):
        Stockfish()
    monkeypatch.setenv("WHET_STOCKFISH", "/nowhere/stockfish")
    with pytest.raises(EngineError, match="'/nowhere/stockfish' is not there"):
        Stockfish()
    program = Path(os.devnull)
    with pytest.raises(EngineError):
        Stockfish(path=str(program)).lines([chess.Board()])
