"""Print how many positions of chess are searched, and lines scored, in a second: with and without pool and cache.

python bench/chess_lines.py [--count 200] [--nodes 2000] [--processes 2] [--json FILE]

Rounds of one process, of several, and of the cache alternate, so that a machine busy with other work slows all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from whet.tasks.chess.board import play, read_board
from whet.tasks.chess.formats import environment_answer, policy_answer, read_policy, read_step
from whet.tasks.chess.positions import drawn_move, made
from whet.tasks.chess.scoring import policy_parts, step_parts, total
from whet.tasks.chess.stockfish import Stockfish
from whet.tasks.made.draft import Draw

NUM_ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    boards = [read_board(position.fen) for position in made(given.count * NUM_ROUNDS, seed=99)]
    rates: dict[str, list[float]] = {}

    def timed(name: str, count: int, seconds: float) -> None:
        rates.setdefault(name, []).append(count / seconds)

    with tempfile.TemporaryDirectory() as folder:
        cache = str(Path(folder) / "lines.sqlite")
        for number in range(NUM_ROUNDS):
            part = boards[number * given.count : (number + 1) * given.count]
            found = []
            for name, size, path in (
                ("searched, 1 process", 1, ""),
                (f"searched, {given.processes} processes", given.processes, ""),
                ("searched once, kept", given.processes, cache),
                ("from the cache", given.processes, cache),
            ):
                with Stockfish(given.nodes, num_processes=size, cache_path=path) as pool:
                    pool.lines([read_board("8/8/8/8/8/2k5/8/K6R w - - 0 1")])  # starts
                    began = time.perf_counter()
                    found = pool.lines(part)
                    timed(name, len(part), time.perf_counter() - began)
            texts = [
                policy_answer([x.move for x in lines], [x.pawns for x in lines], lines[0].move)
                for lines in found
            ]
            began = time.perf_counter()
            for board, lines, text in zip(part, found, texts, strict=True):
                total("chess", "policy", policy_parts(board, lines, read_policy(text)))
            timed("policy's lines scored", len(part), time.perf_counter() - began)
            truths = [play(board, drawn_move(board, Draw("bench", n))) for n, board in enumerate(part)]
            answers = [environment_answer(t.fen, t.reward, t.terminated, t.truncated) for t in truths]
            began = time.perf_counter()
            for truth, text in zip(truths, answers, strict=True):
                total("chess", "environment", step_parts(truth, read_step(text)))
            timed("environment's lines scored", len(part), time.perf_counter() - began)
    print(f"{given.nodes} nodes, five lines; medians of {NUM_ROUNDS} rounds of {given.count} (range)")
    for name, values in rates.items():
        print(f"{name:28} {statistics.median(values):10,.0f} /s ({min(values):,.0f} to {max(values):,.0f})")
    if given.json:
        Path(given.json).write_text(json.dumps(rates, indent=1) + "\n")


if __name__ == "__main__":
    main()
