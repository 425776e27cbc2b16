"""Self-play: problems come from games that the policy's own moves play, and a checkpoint holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

chess = pytest.importorskip("chess", reason="python-chess is not installed: the extra chess")

from whet.algo.config import OffPolicyConfig  # noqa: E402
from whet.generate.policy import PolicyConfig  # noqa: E402
from whet.generate.sampling import SamplingParams  # noqa: E402
from whet.model.config import ModelConfig  # noqa: E402
from whet.tasks.base import TaskConfig, load_task  # noqa: E402
from whet.tasks.chess.stockfish import find_stockfish  # noqa: E402
from whet.train import rl  # noqa: E402
from whet.train.rl_config import RLConfig  # noqa: E402
from whet.train.rollout.order import data_order  # noqa: E402
from whet.train.rollout.self_play import GAME, SelfPlayConfig, SelfPlayOrder  # noqa: E402
from whet.types import Group, Problem, Sample, Task, UserError  # noqa: E402

needs_engine = pytest.mark.skipif(
    not find_stockfish(), reason="Stockfish is not installed: apt-get install stockfish"
)
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


@needs_engine
@pytest.mark.ci
def test_a_run_plays_itself_and_resumes(tmp_path: Path) -> None:
    shape = ModelConfig(
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        max_positions=256,
    )
    config = RLConfig(
        out=str(tmp_path / "run"),
        policy=PolicyConfig(model=shape, tokenizer="boards", schema="none", template="plain"),
        task=MIXED,
        self_play=SelfPlayConfig(share=0.8, num_games=2),
        rewards={"chess": 1.0},
        sampling=SamplingParams(max_new_tokens=100),
        num_steps=2,
        num_prompts=4,
        group_size=2,
        save_every=1,
    )
    rl.train(config)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"rl/self_play_games"' in text
    assert '"rl/engine_wait_seconds"' in text
