"""A judge in the run: asked in batches, kept in the folder, watched by held-out right answers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.rewards.judge.judge import JudgeConfig
from whet.train import rl
from whet.train.optim.step import OptimConfig
from whet.train.rl import train
from whet.train.rl_config import RLConfig
from whet.train.setup import local_model
from whet.types import UserError

pytestmark = pytest.mark.usefixtures("few_problems")


class Patient(ThreadingHTTPServer):
    """Takes connections that come together; with the usual queue of 5 a busy machine resets some."""

    request_queue_size = 128


class Server:
    """Gives 10 to a text that closes an answer, else the number of its characters modulo 7."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.lock = threading.Lock()
        self.is_broken = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.num_requests += 1
                system, user = (message["content"] for message in body["messages"])
                nonce = re.search(r"BEGIN (\w+)", system)
                assert nonce
                graded = user.split(f"BEGIN {nonce[1]}\n", 1)[1].split(f"\nEND {nonce[1]}")[0]
                score = 10 if graded.endswith("</answer>") else len(graded) % 7
                reply = json.dumps({"score": score})
                data = json.dumps(
                    {"choices": [{"message": {"content": reply}, "finish_reason": "stop"}]}
                ).encode()
                self.send_response(401 if outer.is_broken else 200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = Patient(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def make_config(policy: PolicyConfig, folder: Path, url: str, **changes: Any) -> RLConfig:
    return replace(
        RLConfig(
            out=str(folder),
            policy=policy,
            rewards={"judge": 1.0, "correct": 0.0, "format": 0.25},
            judge=JudgeConfig(url=url, model="m"),
            validation_problems=2,
            validate_every=2,
            sampling=SamplingParams(max_new_tokens=14),
            optim=OptimConfig(lr=1e-3, token_budget=400),
            num_steps=4,
            num_prompts=4,
            group_size=4,
            save_every=2,
        ),
        **changes,
    )


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_resumed_run_counts_the_judge_s_requests_on(
    tiny_policy: PolicyConfig, tmp_path: Path, server: Server
) -> None:
    config = make_config(tiny_policy, tmp_path, server.url, num_steps=2)
    train(config)
    train(replace(config, num_steps=4), resume=True)
    counts = [row["rl/judge_requests"] for row in rows(tmp_path, "metrics.jsonl")]
    assert 0 < counts[1] < counts[2]
    assert server.num_requests <= counts[-1]


@pytest.mark.ci
def test_a_run_with_a_judge(tiny_policy: PolicyConfig, tmp_path: Path, server: Server) -> None:
    train(make_config(tiny_policy, tmp_path / "a", server.url))
    samples = rows(tmp_path / "a", "samples.jsonl")
    assert len(samples) == 64
    for row in samples:
        text = row["completion"]
        score = 10 if text.endswith("</answer>") else len(text) % 7
        assert row["rewards"]["judge"] == pytest.approx(score / 10)
        assert row["reward"] == pytest.approx(row["rewards"]["judge"] + 0.25 * row["rewards"]["format"])
    last = rows(tmp_path / "a", "metrics.jsonl")[-1]
    # A connection that was refused under load is a request, too, and one that the server never saw.
    assert (
        last["rl/judge_requests"] - last["rl/judge_retries"]
        <= server.num_requests
        <= last["rl/judge_requests"]
    )
    assert last["rl/judge_unscorable"] == last["rl/judge_failures"] == 0
    texts = {(row["uid"], row["completion"]) for row in samples}
    assert last["rl/judge_cache_hits"] >= len(samples) - len(texts)  # equal ones are asked once
    # A second run of the same seed asks nothing anew where it may read the first one's cache.
    before = server.num_requests
    config = make_config(tiny_policy, tmp_path / "b", server.url)
    train(replace(config, judge=replace(config.judge, cache=str(tmp_path / "a" / "judge.jsonl"))))
    assert server.num_requests == before
    assert [row["reward"] for row in rows(tmp_path / "b", "samples.jsonl")] == [
        row["reward"] for row in samples
    ]


@pytest.mark.ci
def test_divergence_stops_the_run(
    tiny_policy: PolicyConfig, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    gold = iter([0.5, 0.52, 0.51, 0.5, 0.53, 0.52, *[0.1] * 6])
    validate = {"validate_every": 1, "num_steps": 12}
    monkeypatch.setattr(rl, "validate", lambda *_: {"eval/pass@1": next(gold), "eval/greedy": 0.5})
    rising = iter(range(1000))
    advance = rl.rollout_metrics

    def metrics(*arguments: Any) -> dict[str, float]:
        return advance(*arguments) | {"rl/reward/judge": 0.2 + 0.05 * next(rising)}

    monkeypatch.setattr(rl, "rollout_metrics", metrics)
    with pytest.raises(
        UserError, match=r"step \d+: the judge's reward rises .* pass@1 fell .* checkpoints/best"
    ):
        train(make_config(tiny_policy, tmp_path, server.url, **validate))
    assert 7 < len(rows(tmp_path, "metrics.jsonl")) < 12


def test_a_judge_that_cannot_be_had_costs_nothing(
    tiny_policy: PolicyConfig, tmp_path: Path, server: Server
) -> None:
    server.is_broken = True
    with pytest.raises(UserError, match="401"):
        train(make_config(tiny_policy, tmp_path / "a", server.url))
    server.is_broken = False
    train(make_config(tiny_policy, tmp_path / "a", server.url, num_steps=1))  # the folder is free again


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"judge": JudgeConfig()}, "rewards.judge needs judge.model"),
        ({"validation_problems": 0}, "rewards.judge needs validation_problems"),
        ({"rewards": {"correct": 1.0}}, "judge.* is read with rewards.judge only"),
    ],
)
def test_settings(tiny_policy: PolicyConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.").replace("*", r"\*")):
        make_config(tiny_policy, Path("x"), "http://localhost:1/v1", **changes)


def test_a_model_of_our_own_as_judge(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    long = replace(
        tiny_policy, tokenizer="bytes", alphabet="", model=replace(tiny_policy.model, max_positions=2048)
    )
    load_policy(long, seed=0).save(tmp_path)
    config = JudgeConfig(url="local", model=str(tmp_path), max_reply_tokens=5)
    ask = local_model(config)
    replies = ask([("12", "34"), ("1", "2"), ("12", "34")])
    assert len(replies) == 3
    assert replies[0] == replies[2]  # greedy
    assert all(isinstance(reply, str) for reply in replies)
    with pytest.raises(UserError, match="gave no score to a perfect or an empty completion"):
        train(make_config(tiny_policy, tmp_path / "run", "local", judge=config))
