"""The pool of Stockfish: deterministic, cached, mirrored; a process that hangs is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

chess = pytest.importorskip("chess", reason="python-chess is not installed: the extra chess")

from whet.tasks.chess import stockfish  # noqa: E402
from whet.tasks.chess.stockfish import EngineError, Stockfish, find_stockfish  # noqa: E402

needs_engine = pytest.mark.skipif(
    not find_stockfish(), reason="Stockfish is not installed: apt-get install stockfish"
)
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


HANGING = """#!/usr/bin/env python3
import os, sys
first = not os.path.exists({flag!r})
if first:
    open({flag!r}, "w").close()
for line in sys.stdin:
    if line.startswith("uci\\n"):
        print("id name Slow 1\\noption name Threads type spin default 1 min 1 max 8", flush=True)
        print("option name Hash type spin default 1 min 1 max 8", flush=True)
        print("option name MultiPV type spin default 1 min 1 max 8\\nuciok", flush=True)
    elif line.startswith("isready"):
        print("readyok", flush=True)
    elif line.startswith("go"):
        if {always} or first:
            continue
        print("info depth 1 multipv 1 score cp 13 nodes 1 pv e2e4\\nbestmove e2e4", flush=True)
    elif line.startswith("quit"):
        break
"""


@pytest.mark.ci
@pytest.mark.parametrize("always", [False, True])
def test_a_process_that_hangs_is_killed_and_replaced(tmp_path: Path, always: bool) -> None:
    program = tmp_path / "engine"
    program.write_text(HANGING.format(flag=str(tmp_path / "flag"), always=always))
    program.chmod(0o755)
    with Stockfish(10, num_processes=1, path=str(program), cache_path="", deadline_s=1.0) as pool:
        if always:
            with pytest.raises(EngineError, match="failed 3 times"):
                pool.lines([chess.Board()])
            assert pool.num_restarts == 3
        else:
            assert pool.lines([chess.Board()])[0][0].cp == 13
            assert pool.num_restarts == 1


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
