"""Training on episodes: tools in the loop, rewards turn by turn, and rewards of the user's own."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.algo.config import AlgoConfig, ValueConfig
from whet.algo.packing import TrainingSequence, pack
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import score_micro_batch
from whet.recipes.models import calculator_policy
from whet.recipes.rl import ALGORITHMS
from whet.tasks.made.arithmetic import Arithmetic
from whet.train import setup
from whet.train.objective.advantage import token_advantages, training_sequences
from whet.train.optim.step import OptimConfig
from whet.train.rl import train
from whet.train.rl_config import RLConfig
from whet.train.sft import demonstration
from whet.types import Group, Problem, Sample, Turn, UserError

pytestmark = pytest.mark.usefixtures("few_problems")


def make_config(policy: PolicyConfig, folder: Path, **changes: Any) -> RLConfig:
    return replace(
        RLConfig(
            out=str(folder),
            policy=policy,
            sampling=SamplingParams(max_new_tokens=24),
            optim=OptimConfig(lr=1e-3, beta2=0.99, token_budget=200),
            num_steps=3,
            num_prompts=4,
            group_size=4,
        ),
        **changes,
    )


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture
def caller(tiny_policy: PolicyConfig) -> PolicyConfig:
    """A tiny policy with a calculator, which random text calls now and then."""
    shape = replace(tiny_policy.model, max_positions=96)
    return replace(tiny_policy, model=shape, tools=("calculator",), alphabet="0123456789+=,eor: ")


def test_a_run_with_a_tool_stays_on_policy(caller: PolicyConfig, tmp_path: Path) -> None:
    policy = train(make_config(caller, tmp_path, sampling=SamplingParams(max_new_tokens=80), group_size=12))
    found = rows(tmp_path, "samples.jsonl")
    called = [row for row in found if row["num_turns"] > 1]
    assert len(called) > 5
    assert all(0 < row["num_read_tokens"] < row["num_completion_tokens"] <= 80 for row in called)
    assert all(row["num_read_tokens"] == 0 for row in found if row["num_turns"] == 1)
    assert all("<result>error" in row["completion"] for row in called)
    for row in rows(tmp_path, "metrics.jsonl"):
        assert ("rl/turns" in row) == any(sample["step"] == row["step"] for sample in called)
        # What a tool wrote has no log-probability: counted, it would be a ratio of about 1/25, not of 1.
        assert row["rl/ratio_drift"] < 1e-4
    assert policy.schema.tools == ("calculator",)
    again = load_policy(PolicyConfig(init=str(tmp_path)), seed=0)
    assert again.schema == policy.schema
    assert load_policy(PolicyConfig(init=str(tmp_path), tools=("none",)), seed=0).schema.tools == ()


def test_a_demonstration_is_trained_where_the_model_writes() -> None:
    policy = load_policy(calculator_policy(), seed=0)
    problem = Problem(
        uid="a",
        task="t",
        prompt="12*34=",
        answer="408",
        solution="long",
        meta={"calls": '[["12*34", "408"]]'},
    )
    sequence = demonstration(policy, problem)
    ids = torch.tensor(sequence.completion_ids)
    written = policy.tokenizer.decode(ids[torch.tensor(sequence.trained)].tolist())
    assert written == "<tool>12*34</tool></think><answer>408</answer>"
    assert policy.tokenizer.decode(sequence.completion_ids).count("<result>408</result>") == 1
    without = load_policy(replace(calculator_policy(), tools=(), alphabet="long0123456789*="), seed=0)
    assert without.tokenizer.decode(demonstration(without, problem).completion_ids).startswith("long")


def test_tokens_that_are_only_read_have_no_gradient_and_no_weight() -> None:
    """Three ways to train the same two tokens: alone behind a long prompt, and marked inside a completion."""
    policy = load_policy(calculator_policy(), seed=0)
    ids = tuple(policy.tokenizer.encode("12*34=408"))

    def gradient(sequences: Sequence[TrainingSequence]) -> tuple[torch.Tensor, int]:
        batch = pack(sequences, token_budget=1000, aggregation="sequence_mean")
        (micro,) = batch.micro_batches
        logprobs_M, _ = score_micro_batch(policy.model, micro)
        policy.model.zero_grad()
        (logprobs_M * micro.weights_M).sum().backward()
        grads = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
        return torch.cat(grads), batch.num_trained_tokens

    plain, count = gradient([TrainingSequence(prompt_ids=ids[:7], completion_ids=ids[7:])])
    masked = TrainingSequence(prompt_ids=ids[:3], completion_ids=ids[3:], trained=(False,) * 4 + (True,) * 2)
    marked, same_count = gradient([masked])
    assert count == same_count == 2
    torch.testing.assert_close(marked, plain, rtol=1e-5, atol=1e-7)
    nothing = TrainingSequence(prompt_ids=ids[:3], completion_ids=ids[3:], trained=(False,) * 6)
    assert pack([nothing], token_budget=10).num_trained_sequences == 0


def an_episode(rewards: tuple[float, ...], total: float) -> Sample:
    """Two turns of 2 and 3 tokens with 2 tokens of the environment's between."""
    return Sample(
        uid="a",
        index=0,
        prompt_ids=(1,),
        completion_ids=(5, 6, 7, 7, 8, 9, 10),
        sampler_logprobs=(-1.0, -2.0, 0.0, 0.0, -3.0, -4.0, -5.0),
        trained=(True, True, False, False, True, True, True),
        turn_ends=(2, 5),
        turn_rewards=rewards,
        text="",
        finish_reason="stop",
        reward=total,
        advantage=total,
    )


def test_a_critic_learns_when_a_turn_paid() -> None:
    algo = replace(ALGORITHMS["ppo"](), whiten=False)
    group = Group(
        problem=Problem(uid="a", task="t", prompt="", answer=""), samples=(an_episode((0.25, 1.0), 2.0),)
    )
    (sequence,) = training_sequences([group], algo)
    assert sequence.sampler_logprobs == (-1.0, -2.0, -3.0, -4.0, -5.0)
    assert (sequence.num_trained, sequence.num_tokens, sequence.num_group_tokens) == (5, 8, 5)
    started = replace(sequence, start_values_T=torch.zeros(5), ref_logprobs_T=torch.zeros(5))
    (filled,) = token_advantages([started], algo, ValueConfig(gamma=1.0, lam=1.0), 0.0)
    assert filled.returns_T is not None
    # 0.25 is paid at the end of the first turn, the rest at the very end.
    assert filled.returns_T.tolist() == pytest.approx([2.0, 2.0, 1.75, 1.75, 1.75])
    (outcome,) = training_sequences([group], AlgoConfig())
    assert outcome.turn_rewards == ()  # a group baseline compares sums


class Counting:
    """Asks for the next number, pays half a point for each turn."""

    def reset(self, problem: Problem) -> Any:
        return [0]

    def step(self, states: Sequence[Any], texts: Sequence[str]) -> list[Turn]:
        turns = []
        for state in states:
            state[0] += 1
            turns.append(Turn(observation="1+" if state[0] < 3 else None, reward=0.5))
        return turns


def test_an_environment_pays_turn_by_turn(
    caller: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arithmetic, "environment", Counting(), raising=False)
    config = make_config(replace(caller, tools=()), tmp_path, rewards={"correct": 1.0, "episode": 2.0})
    train(replace(config, algo=ALGORITHMS["ppo"]()))
    found = rows(tmp_path, "samples.jsonl")
    assert {row["num_turns"] for row in found} > {1}
    for row in found:
        paid = row["rewards"]["episode"]
        turns = row["num_turns"] if row["finish_reason"] == "stop" else row["num_turns"] - 1
        assert paid in (0.5 * turns, 0.5 * row["num_turns"])
        assert row["reward"] == pytest.approx(row["rewards"]["correct"] + 2.0 * paid)
    assert all("rl/reward/episode" in row for row in rows(tmp_path, "metrics.jsonl"))


MINE = """
import time

def even(problem, completion):
    return float(len(completion) % 2 == 0) if completion else 0.0

def picky(problem, completion):
    if len(completion) % 3 == 0:
        return None
    if len(completion) % 7 == 1:
        raise ValueError("no thanks")
    return len(problem.prompt) * 1.0

async def slow(problem, completion):
    import asyncio
    await asyncio.sleep(0.001)
    return 0.25

def words(problem, completion):
    return "good"

def broken(problem, completion):
    raise KeyError("always")
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_rewards_of_the_users_own(tiny_policy: PolicyConfig, tmp_path: Path, mine: Path) -> None:
    rewards = (f"{mine}:even=0.5", f"{mine}:slow")
    train(make_config(tiny_policy, tmp_path / "run", reward=rewards))
    found = rows(tmp_path / "run", "samples.jsonl")
    assert len(found) == 48
    for row in found:
        parts = row["rewards"]
        assert parts["even"] == float(len(row["completion"]) % 2 == 0 and row["completion"] != "")
        assert parts["slow"] == 0.25
        expected = parts["correct"] + 0.1 * parts["format"] + 0.5 * parts["even"] + parts["slow"]
        assert row["reward"] == pytest.approx(expected)
    for row in rows(tmp_path / "run", "metrics.jsonl"):
        assert {"rl/reward/even", "rl/reward/slow", "rl/signal/even"} <= row.keys()
        assert row["rl/reward_failures"] == 0


def test_what_a_reward_cannot_score_is_left_out_and_counted(
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    mine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(setup, "preflight", lambda *arguments, **options: [])
    train(make_config(tiny_policy, tmp_path / "run", reward=(f"{mine}:picky",)))
    found = rows(tmp_path / "run", "samples.jsonl")
    failed = [row for row in found if len(row["completion"]) % 3 and len(row["completion"]) % 7 == 1]
    assert failed
    for row in found:
        size = len(row["completion"])
        is_scored = size % 3 != 0 and size % 7 != 1
        assert (row["reward"] is not None) == is_scored
        assert (row["advantage"] is not None) == is_scored
    last = rows(tmp_path / "run", "metrics.jsonl")[-1]
    assert last["rl/reward_failures"] == len(failed)
    told = re.findall(
        r"(reward 'picky' gave no score (?:once|\d+ times) so far.*no thanks.*)", capsys.readouterr().out
    )
    warned = [row["text"] for row in rows(tmp_path / "run", "warnings.jsonl")]  # which the report shows
    assert [text for text in warned if "picky" in text] == told != []
    assert not math.isnan(last["rl/loss"])


def test_tools_and_environments_that_are_not_there(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    for tools, message in (
        (("calculater",), "tool 'calculater': expected calculator, python or path.py:function"),
        (("calculator", "calculator"), "tool 'calculator' is given twice"),
    ):
        with pytest.raises(UserError, match=message):
            train(make_config(replace(tiny_policy, tools=tools), tmp_path / "run"))
    with pytest.raises(UserError, match="task arithmetic has no environment that pays"):
        train(make_config(tiny_policy, tmp_path / "run", rewards={"correct": 1.0, "episode": 1.0}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{mine}:broken", "reward 'broken' gives a perfect completion of problem .* no score: .*always"),
        ("{mine}:words", "no score: returned str 'good', expected None or a number"),
        ("{mine}:nosuch", "nosuch"),
        ("nowhere.py:f", "no file 'nowhere.py'; check --reward"),
        ("mine:even", "expected path.py:function"),
        ("{mine}:even=lots", "'lots' is not a weight"),
        ("{mine}:even=inf", "expected a weight from -1e.09 to 1e.09"),
    ],
)
def test_mistakes_in_own_rewards(
    tiny_policy: PolicyConfig, tmp_path: Path, mine: Path, text: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(make_config(tiny_policy, tmp_path / "run", reward=(text.format(mine=mine),)))
    assert not (tmp_path / "run").exists()


def test_a_function_in_a_config_is_refused_with_what_to_write(
    tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    def shorter(problem: object, text: str) -> float:
        return -float(len(text))

    wanted = r"reward=\('test_episodes.py:shorter',\), or call whet.rl\(rewards=\[shorter\]\)"
    with pytest.raises(UserError, match=wanted):
        train(make_config(tiny_policy, tmp_path / "run", reward=(shorter,)))
    assert not (tmp_path / "run").exists()


def test_two_rewards_of_one_name(tiny_policy: PolicyConfig, tmp_path: Path, mine: Path) -> None:
    with pytest.raises(UserError, match="reward 'even' is given twice"):
        train(make_config(tiny_policy, tmp_path / "run", reward=(f"{mine}:even", f"{mine}:even=2")))
