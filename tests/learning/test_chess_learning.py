"""Lines of chess are learned from random weights, and GRPO with the rules as verifier runs on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

chess = pytest.importorskip("chess", reason="python-chess is not installed: the extra chess")

from whet.eval.measure import evaluate  # noqa: E402
from whet.generate.policy import PolicyConfig  # noqa: E402
from whet.generate.sampling import SamplingParams  # noqa: E402
from whet.recipes import rl as rl_recipes  # noqa: E402
from whet.recipes import sft as sft_recipes  # noqa: E402
from whet.tasks.base import TaskConfig, load_task  # noqa: E402
from whet.train import rl, sft  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SHAPE = {"hidden_size": 96, "intermediate_size": 256, "num_layers": 2, "num_heads": 4}
SHAPE |= {"num_kv_heads": 4, "head_dim": 24}


@pytest.mark.slow
def test_boards_are_learned_and_groups_have_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    task = TaskConfig(name="chess-env", num_problems=32)
    problems = load_task(task).problems("train")
    start = sft_recipes.chess_boards()
    config = replace(
        start,
        out=str(tmp_path / "sft"),
        policy=replace(start.policy, model=replace(start.policy.model, **SHAPE), num_threads=2),
        task=task,
        optim=replace(start.optim, lr=4e-3, muon_lr=4e-3, warmup_steps=10),
        num_steps=130,
        batch_size=16,
        validation_problems=0,
        save_every=130,
    )
    policy = sft.train(config)
    params = SamplingParams(temperature=1.0, max_new_tokens=112)

    def measured(of: object) -> tuple[float, float]:
        result = evaluate(of, load_task(task), problems, num_samples=2, sampling=params, seed=0)  # type: ignore[arg-type]
        items = [(p, done.grade.answer or "") for p, done in zip(problems, result.greedy, strict=True)]
        metrics, _ = load_task(task).measures(items)  # type: ignore[attr-defined]
        return metrics["env_similarity"].mean, metrics["env_flags"].mean

    similarity, flags = measured(policy)
    assert similarity > 0.5  # of random text 0.2
    assert flags > 0.6
    again = rl_recipes.chess()
    reinforced = replace(
        again,
        out=str(tmp_path / "rl"),
        policy=PolicyConfig(init=str(tmp_path / "sft"), num_threads=2),
        task=task,
        rewards={"chess": 1.0, "chess_fen": 0.0},
        optim=replace(again.optim, lr=1e-4, warmup_steps=1),
        algo=replace(again.algo, kl="none", kl_coef=0.0, kl_target=None),
        num_steps=3,
        num_prompts=4,
        validation_problems=0,
        save_every=3,
    )
    rl.train(reinforced)
    rows = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    paid = [row["rl/reward_mean"] for row in rows if "rl/reward_mean" in row]
    assert len(paid) == 3
    assert all(0 < value < 1 for value in paid)  # neither nothing nor everything is right: there is a signal
    assert all(row["rl/groups_with_signal"] > 0 for row in rows if "rl/reward_mean" in row)
