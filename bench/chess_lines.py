"""Print how many positions of chess are searched, and lines scored, in a second: with and without pool and cache; and
what a training step waits for Stockfish where it is searched beside the step, and where it is not.

python bench/chess_lines.py [--count 200] [--nodes 2000] [--processes 2] [--json FILE]

Rounds of one process, of several, and of the cache alternate, so that a machine busy with other work slows all of them.
Processor time, of Python and of Stockfish, is printed besides: it changes little under load.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from whet.tasks.chess.board import play, read_board
from whet.tasks.chess.formats import environment_answer, policy_answer, read_policy, read_step
from whet.tasks.chess.positions import drawn_move, made
from whet.tasks.chess.scoring import policy_parts, step_parts, total
from whet.tasks.chess.stockfish import Stockfish
from whet.tasks.made.draft import Draw

if TYPE_CHECKING:
    import chess

NUM_ROUNDS = 3
NUM_STEPS, NUM_GAMES, STEP_S = 20, 4, 0.25
"""Steps of the overlap's measurement, positions that each brings (one a game), and seconds of processor time that a
step computes: the recipe's takes several."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    positions = made(given.count * NUM_ROUNDS + 2 * NUM_STEPS * NUM_GAMES, seed=99)
    boards = [read_board(position.fen) for position in positions]
    rates: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}

    def timed(name: str, count: int, work: Callable[[], object]) -> None:
        began, used = time.perf_counter(), time.process_time()
        work()
        rates.setdefault(name, []).append(count / (time.perf_counter() - began))
        processor.setdefault(name, []).append(1000 * (time.process_time() - used) / count)

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
                before = children_seconds()
                with Stockfish(given.nodes, num_processes=size, cache_path=path) as pool:
                    pool.lines([read_board("8/8/8/8/8/2k5/8/K6R w - - 0 1")])  # starts
                    timed(
                        name,
                        len(part),
                        lambda pool=pool, part=part, found=found: found.append(pool.lines(part)),
                    )
                processor.setdefault(f"{name}: Stockfish", []).append(
                    1000 * (children_seconds() - before) / len(part)
                )
            lines_of = found[-1]
            texts = [
                policy_answer([x.move for x in lines], [x.pawns for x in lines], lines[0].move)
                for lines in lines_of
            ]
            scored = list(zip(part, lines_of, texts, strict=True))
            timed(
                "policy's lines scored",
                len(part),
                lambda scored=scored: [
                    total("chess", "policy", policy_parts(board, lines, read_policy(text)))
                    for board, lines, text in scored
                ],
            )
            truths = [
                play(board, drawn_move(board, Draw("bench", n), for_training=False))
                for n, board in enumerate(part)
            ]
            answers = [environment_answer(t.fen, t.reward, t.terminated, t.truncated) for t in truths]
            stepped = list(zip(truths, answers, strict=True))
            timed(
                "environment's lines scored",
                len(part),
                lambda stepped=stepped: [
                    total("chess", "environment", step_parts(truth, read_step(text)))
                    for truth, text in stepped
                ],
            )
    print(f"{given.nodes} nodes, five lines; medians of {NUM_ROUNDS} rounds of {given.count} (range)")
    for name, values in rates.items():
        print(
            f"{name:28} {statistics.median(values):10,.0f} /s ({min(values):,.0f} to {max(values):,.0f}); "
            f"processor time of each {statistics.median(processor[name]):.2f} ms"
            + (
                f", Stockfish's (its start included) {statistics.median(processor[f'{name}: Stockfish']):.2f} ms"
                if f"{name}: Stockfish" in processor
                else ""
            )
        )
    waits = overlap(boards[-2 * NUM_STEPS * NUM_GAMES :], given.nodes)
    for name, seconds in waits.items():
        print(f"a step of {STEP_S:g} s {name:24} waits {1000 * seconds / NUM_STEPS:8.1f} ms for Stockfish")
    if given.json:
        Path(given.json).write_text(
            json.dumps(
                {"rates": rates, "processor_ms": processor, "wait_s": waits, "nodes": given.nodes}, indent=1
            )
            + "\n"
        )


def children_seconds() -> float:
    """Return the processor time of children that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def overlap(boards: Sequence[chess.Board], nodes: int) -> dict[str, float]:
    """Return the seconds that steps wait for Stockfish: searched before each step, and beside the step before it.

    A step is what self-play does: positions of its games are known once its moves are played, and their lines are
    needed when the next rollout is scored.
    """
    torch.set_num_threads(1)
    matrix = torch.randn(256, 256)

    def compute() -> None:
        end = time.process_time() + STEP_S
        while time.process_time() < end:
            matrix @ matrix

    waits = {"searched before it": 0.0, "searched beside it": 0.0}
    with Stockfish(nodes, num_processes=1, cache_path="") as pool:
        pool.lines([read_board("8/8/8/8/8/2k5/8/K6R w - - 0 1")])  # starts
        for place, name in enumerate(waits):
            for step in range(NUM_STEPS):
                first = (place * NUM_STEPS + step) * NUM_GAMES
                asked = [pool.submit(board) for board in boards[first : first + NUM_GAMES]]
                if place:
                    compute()
                began = time.perf_counter()
                for future in asked:
                    future.result()
                waits[name] += time.perf_counter() - began
                if not place:
                    compute()
    return waits


if __name__ == "__main__":
    main()
