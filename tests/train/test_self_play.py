"""Self-play: problems come from games that the policy's own moves play, and a checkpoint holds them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from needs import needs

chess = pytest.importorskip("chess", reason="python-chess is not installed: the extra chess")

from chess_model import TINY  # noqa: E402

from whet.algo.config import OffPolicyConfig  # noqa: E402
from whet.generate.policy import PolicyConfig  # noqa: E402
from whet.generate.sampling import SamplingParams  # noqa: E402
from whet.tasks.base import TaskConfig, load_task  # noqa: E402
from whet.train import rl  # noqa: E402
from whet.train.rl_config import RLConfig  # noqa: E402
from whet.train.rollout import self_play  # noqa: E402
from whet.train.rollout.order import data_order  # noqa: E402
from whet.train.rollout.self_play import GAME, SelfPlayConfig, SelfPlayOrder  # noqa: E402
from whet.types import Group, Problem, Sample, Task, UserError  # noqa: E402

needs_engine = needs("stockfish")
MIXED = TaskConfig(
    name="mixture", weights={"chess-policy": 1.0, "chess-env": 1.0}, num_problems=24, nodes=100
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def order_of(task: Task, **options: float) -> SelfPlayOrder:
    config = SelfPlayConfig(**{"share": 1.0, "num_games": 2, "max_plies": 8, "buffer_size": 6} | options)  # type: ignore[arg-type]
    return SelfPlayOrder(data_order(task, task.problems("train"), 0), config, task, 0)


def answered(problems: list[Problem], texts: list[str] | None = None) -> list[Group]:
    """Groups that write the gold answer in their second sample."""
    return [
        Group(
            problem=problem,
            samples=tuple(
                Sample(
                    uid=problem.uid,
                    index=index,
                    prompt_ids=(),
                    completion_ids=(),
                    sampler_logprobs=(),
                    text=text,
                    finish_reason="stop",
                )
                for index, text in enumerate(texts or ["no move", problem.answer])
            ),
        )
        for problem in problems
    ]


@needs_engine
def test_games_go_on_by_the_policys_moves() -> None:
    task = load_task(MIXED)
    order = order_of(task)
    seen: dict[str, list[str]] = {}
    for step in range(8):
        problems = [problem for _, problem in order.next(8)]
        assert order.cursor == 8 * (step + 1)
        for problem in problems:
            if GAME in problem.meta:
                seen.setdefault(problem.meta[GAME], []).append(problem.meta["fen"])
                assert problem.meta["kind"] == "policy"
                assert task.is_correct(problem, problem.answer) is True  # Stockfish labelled it
        order.observe(answered(problems))
    assert seen.keys() == {"0", "1"}
    moved = 0
    for fens in seen.values():
        for before, after in zip(fens, fens[1:], strict=False):
            board = chess.Board(before)
            nexts = []
            for move in list(board.legal_moves):
                board.push(move)
                nexts.append(board.fen())
                board.pop()
            moved += after in nexts
    assert moved >= 8  # nearly every step, but where a game ended
    buffered = {position.fen for position in order._buffer}  # pyright: ignore[reportPrivateUsage]
    assert len(buffered) == 6  # the oldest are gone
    values = order.metrics()
    assert values["rl/self_play_moves"] >= moved
    assert values["rl/self_play_games"] >= 1
    # What a checkpoint holds gives the same problems.
    other = order_of(task)
    other.cursor = order.cursor
    other.load_state(order.state())
    assert other.wait_seconds == order.wait_seconds > 0
    assert other.next(8) == order.next(8)


@needs_engine
def test_an_illegal_move_ends_a_game_and_a_share_of_0_leaves_problems_alone() -> None:
    task = load_task(MIXED)
    order = order_of(task)
    order.observe(answered([problem for _, problem in order.next(8)], ["B: e9e9", ""]))
    assert order.metrics()["rl/self_play_games"] == 2
    assert order.metrics()["rl/self_play_buffer"] == 0
    own = data_order(task, task.problems("train"), 0).next(8)
    assert order_of(task, share=0.0).next(8) == own


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="has no lines of chess's policy"):
        order_of(load_task(TaskConfig(name="chess-env", num_problems=24)))
    config = {"out": "x", "policy": PolicyConfig(init="x")}
    with pytest.raises(ValueError, match="self_play.share with overlap"):
        RLConfig(**config, self_play=SelfPlayConfig(share=0.5), off_policy=OffPolicyConfig(staleness=1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is read with self_play.share above 0 only"):
        RLConfig(**config, self_play=SelfPlayConfig(num_games=2))  # type: ignore[arg-type]


def legal_by_text(problem: Problem, text: str) -> str:
    """A move for any text, so that games of random weights go on, and differ where a text does."""
    moves = sorted(move.uci() for move in chess.Board(problem.meta["fen"]).legal_moves)
    return moves[zlib.crc32(text.encode()) % len(moves)]


def play_run(out: str, *, kill_after: int = 0, resume: bool = False) -> None:
    """Train four steps of self-play on random weights; kill the process while a step is trained on, if asked."""
    config = RLConfig(
        out=out,
        policy=replace(TINY, num_threads=1),
        task=MIXED,
        self_play=SelfPlayConfig(share=0.8, num_games=2),
        rewards={"chess": 1.0},
        sampling=SamplingParams(max_new_tokens=40),
        num_steps=4,
        num_prompts=4,
        group_size=2,
        save_every=1,
    )
    observe, number = SelfPlayOrder.observe, 0

    def counted(self: SelfPlayOrder, groups: Sequence[Group]) -> None:
        nonlocal number
        observe(self, groups)
        number += 1
        if number == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_play, "move_of", legal_by_text)
        patch.setattr(SelfPlayOrder, "observe", counted)
        rl.train(config, resume=resume)


def told(out: Path) -> list[dict[str, float]]:
    """What a run's log says of games, by step, but for what was waited."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: row[name] for name in row if name.startswith("rl/self_play")}
        for row in rows
        if "rl/self_play_games" in row
    ]


@needs_engine
@pytest.mark.slow
def test_a_killed_run_ends_bitwise_as_the_one_that_was_not(tmp_path: Path) -> None:
    play_run(str(tmp_path / "whole"))
    program = "import sys; sys.path += sys.argv[2:]; import test_self_play as t; t.play_run(sys.argv[1], kill_after=3)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "killed"), str(Path(__file__).parents[1])],
        cwd=Path(__file__).parent,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    play_run(str(tmp_path / "killed"), resume=True)
    whole, killed = (
        (tmp_path / name / "checkpoints/step_00000004/model.safetensors").read_bytes()
        for name in ("whole", "killed")
    )
    assert whole == killed
    assert told(tmp_path / "whole") == told(tmp_path / "killed")
    assert (
        told(tmp_path / "whole")[-1]["rl/self_play_moves"] >= 4
    )  # games went on, so there was a state to keep
