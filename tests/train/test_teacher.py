"""On-policy distillation: its formulas, a run that is pulled to a teacher, and teachers that cannot be had."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.algo.config import AlgoConfig
from whet.algo.logprobs import reverse_kl
from whet.algo.losses import teacher_gains
from whet.algo.packing import TrainingSequence, pack
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.model.lora.side import LoRAConfig
from whet.recipes.rl import distill
from whet.train import rl
from whet.train.objective.teacher import ServerTeacher, TeacherConfig, load_teacher
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig
from whet.types import UserError

KINDS = ["sampled", "full"]


def test_gains_by_hand() -> None:
    policy_M = torch.tensor([-1.0, -0.5, -60.0], dtype=torch.float64, requires_grad=True)
    gains_M = teacher_gains(policy_M, torch.tensor([-0.25, -2.5, -1.0], dtype=torch.float64), 0.5)
    assert gains_M.tolist() == [0.375, -1.0, 10.0]  # the last difference is clamped to 20
    assert not gains_M.requires_grad


def heads(rows: int = 7, vocab: int = 13, valid: int = 11) -> tuple[list[torch.Tensor], int]:
    """Hidden states and heads of a policy and a wider teacher with more rows, float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, 4), (vocab, 4), (rows, 6), (vocab + 5, 6)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes], valid


def test_reverse_kl_is_the_sum_over_the_vocabulary() -> None:
    (hidden, weight, teacher, teacher_weight), valid = heads()
    logp = (hidden @ weight.T / 0.7)[:, :valid].log_softmax(-1)
    logq = (teacher @ teacher_weight.T / 0.7)[:, :valid].log_softmax(-1)
    expected = (logp.exp() * (logp - logq)).sum(-1)
    for chunk in (None, 1, 3):
        found = reverse_kl(
            hidden, weight, teacher, teacher_weight, temperature=0.7, num_valid=valid, chunk=chunk
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    same = reverse_kl(hidden, weight, hidden, weight, temperature=1.0, num_valid=valid)
    assert same.abs().max() < 1e-14


def test_reverse_kl_of_capped_logits() -> None:
    (hidden, weight, teacher, teacher_weight), valid = heads()
    logp = (1.5 * torch.tanh(hidden @ weight.T / 1.5) / 0.7)[:, :valid].log_softmax(-1)
    logq = (3.0 * torch.tanh(teacher @ teacher_weight.T / 3.0) / 0.7)[:, :valid].log_softmax(-1)
    caps = {"cap": 1.5, "teacher_cap": 3.0}
    found = reverse_kl(hidden, weight, teacher, teacher_weight, temperature=0.7, num_valid=valid, **caps)
    torch.testing.assert_close(found, (logp.exp() * (logp - logq)).sum(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("chunk", [None, 3])
def test_reverse_kl_by_finite_differences(chunk: int | None, cap: float) -> None:
    (hidden, weight, teacher, teacher_weight), valid = heads()

    def run(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return reverse_kl(
            hidden,
            weight,
            teacher,
            teacher_weight,
            temperature=0.7,
            num_valid=valid,
            chunk=chunk,
            cap=cap,
            teacher_cap=2 * cap,
        )

    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-6)


def test_sampled_gains_have_the_gradient_of_the_whole_divergence() -> None:
    """Exact expectation over the vocabulary instead of samples: both kinds pull the same way."""
    (hidden, weight, teacher, teacher_weight), valid = heads()
    hidden.requires_grad_()
    logp = (hidden @ weight.T)[:, :valid].log_softmax(-1)
    logq = (teacher @ teacher_weight.T)[:, :valid].log_softmax(-1)
    gains = teacher_gains(logp, logq, 0.5)
    (sampled,) = torch.autograd.grad(-(logp.exp().detach() * gains * logp).sum(), hidden)
    whole = reverse_kl(hidden, weight, teacher, teacher_weight, temperature=1.0, num_valid=valid)
    (full,) = torch.autograd.grad(0.5 * whole.sum(), hidden)
    torch.testing.assert_close(sampled, full, rtol=1e-10, atol=1e-12)


def student(halfway: Any, folder: Path) -> PolicyConfig:
    """The half-taught policy with noise on its weights."""
    policy = load_policy(halfway.policy, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator) * parameter.std())
    policy.save(folder)
    return replace(halfway.policy, init=str(folder))


def make_config(halfway: Any, folder: Path, **changes: Any) -> RLConfig:
    config = RLConfig(
        out=str(folder / "run"),
        policy=student(halfway, folder / "student"),
        task=halfway.task,
        rewards={"correct": 0.0},
        sampling=SamplingParams(max_new_tokens=12),
        algo=distill(),
        teacher=TeacherConfig(init=halfway.policy.init),
        optim=OptimConfig(lr=1e-3, warmup_steps=1, token_budget=200),
        num_steps=12,
        num_prompts=16,
        group_size=1,
        save_every=6,
    )
    return replace(config, **changes)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_the_teacher_alone_pulls_the_policy_to_itself(kind: Any, halfway: Any, tmp_path: Path) -> None:
    config = make_config(halfway, tmp_path, num_prompts=32, num_steps=24)
    rl.train(replace(config, teacher=replace(config.teacher, kind=kind)))
    rows = metrics(tmp_path / "run")
    first, last = (sum(row["rl/teacher_kl"] for row in part) for part in (rows[:4], rows[-4:]))
    assert last < 0.6 * first  # 0.02 to 0.29 of it, for four seeds, two kernels and both kinds
    # Sampler and trainer agree bitwise on a CPU, so the ratio is exactly 1.
    assert all(row["rl/ratio_drift"] == 0 for row in rows)
    assert all(row["rl/groups_with_signal"] > 20 for row in rows)  # of 32, since some problems come twice
    assert all("rl/kl" not in row for row in rows)


@pytest.mark.ci
def test_adapters_alone_are_pulled_to_the_teacher(halfway: Any, tmp_path: Path) -> None:
    # Three steps of 16 prompts are too few to tell: one long tail makes them 0.3 to 4.6 times the first, by the seed.
    config = make_config(halfway, tmp_path, lora=LoRAConfig(rank=8), num_prompts=32, num_steps=20)
    config = replace(config, optim=replace(config.optim, lr=1e-2))
    start = load_policy(config.policy, seed=0).model
    policy = rl.train(config)
    rows = metrics(tmp_path / "run")
    first, last = (sum(row["rl/teacher_kl"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert last < 0.8 * first
    assert all(row["rl/ratio_drift"] == 0 for row in rows)
    for name, weight in start.named_parameters():
        assert torch.equal(policy.model.get_parameter(name), weight), name


class CrashError(Exception):
    """Stands for a crash."""


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(kind: Any, halfway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rewards, with groups."""
    teacher = TeacherConfig(init=halfway.policy.init, kind=kind, coef=0.5)
    algo = AlgoConfig(uninformative="keep")
    config = make_config(halfway, tmp_path, teacher=teacher, algo=algo, group_size=2, num_prompts=4)
    config = replace(config, rewards={"correct": 1.0}, num_steps=4, save_every=2)
    rl.train(config)
    update, calls = rl.update, []

    def fail(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise CrashError
        return update(*arguments)

    broken = replace(config, out=str(tmp_path / "broken"))
    with monkeypatch.context() as patch:
        patch.setattr(rl, "update", fail)
        with pytest.raises(CrashError):
            rl.train(broken)
    rl.train(broken, resume=True)
    whole, resumed = (
        (folder / "checkpoints" / "step_00000004" / "model.safetensors").read_bytes()
        for folder in (tmp_path / "run", tmp_path / "broken")
    )
    assert whole == resumed


def test_a_teacher_of_another_tokenizer_is_refused(
    halfway: Any, tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    other = load_policy(replace(tiny_policy, tokenizer="bytes", alphabet=""), seed=0)
    other.save(tmp_path)
    policy = load_policy(halfway.policy, seed=0)
    with pytest.raises(UserError, match="another tokenizer than the policy's .id 0 is '<pad>' here and"):
        load_teacher(TeacherConfig(init=str(tmp_path)), policy)
    short = load_policy(replace(tiny_policy, model=replace(tiny_policy.model, max_positions=32)), seed=0)
    short.save(tmp_path / "short")
    with pytest.raises(UserError, match="context of 32 tokens is shorter than the policy's 64"):
        load_teacher(
            TeacherConfig(init=str(tmp_path / "short")),
            load_policy(replace(tiny_policy, model=tiny_policy.model), seed=0),
        )


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"init": "a", "url": "b"}, "give one teacher"),
        ({"url": "http://x/v1"}, "a server needs both"),
        ({"url": "http://x/v1", "model": "m", "kind": "full"}, "a server gives no whole distribution"),
        ({"init": "a", "coef": 0.0}, "teacher.coef = 0.0: expected above 0"),
        ({"coef": 0.5}, "teacher.coef is read with a teacher only"),
        ({"init": "a", "concurrency": 4}, "teacher.concurrency is read with teacher.url only"),
    ],
)
def test_wrong_teachers(teacher: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TeacherConfig(**teacher)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algo": AlgoConfig()}, "algo.uninformative = drop with a teacher"),
        (
            {
                "teacher": TeacherConfig(url="http://x/v1", model="m"),
                "sampling": SamplingParams(temperature=0.7),
            },
            "a server scores at temperature 1",
        ),
        (
            {
                "algo": AlgoConfig(uninformative="keep", ratio="sequence", surrogate="geometric"),
                "group_size": 2,
            },
            "a teacher gives one per token",
        ),
    ],
)
def test_wrong_combinations(changes: dict[str, Any], message: str, tiny_policy: PolicyConfig) -> None:
    options: dict[str, Any] = {
        "teacher": TeacherConfig(init="x"),
        "algo": distill(),
        "group_size": 1,
    } | changes
    with pytest.raises(ValueError, match=message):
        RLConfig(out="x", policy=tiny_policy, **options)


class Vllm(BaseHTTPRequestHandler):
    """vLLM's /v1/completions as far as the teacher asks it: the same answers, the same refusals."""

    policy: Policy
    shift = 0
    told: tuple[str | None, str | None]

    def do_POST(self) -> None:
        type(self).told = (self.headers["Authorization"], self.headers["x-stainless-read-timeout"])
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self.answer(404, {"detail": "Not Found"})
        if body["model"] != "teacher":
            error = f"The model `{body['model']}` does not exist."
            return self.answer(404, {"error": {"message": error, "type": "NotFoundError", "code": 404}})
        ids, policy = body["prompt"], self.policy
        if not isinstance(ids, list) or not all(0 <= index < policy.tokenizer.vocab_size for index in ids):
            return self.answer(400, {"error": {"message": "Token id is out of vocabulary", "code": 400}})
        row = TrainingSequence(prompt_ids=tuple(ids[:1]), completion_ids=tuple(ids[1:]))
        (micro,) = pack([row], token_budget=10**6).micro_batches
        with torch.no_grad():
            logprobs = policy.score(micro)[0].tolist()
        entries = [
            {str(i): {"logprob": p, "rank": 1, "decoded_token": policy.tokenizer.token_text(i + self.shift)}}
            for i, p in zip(ids[1:], logprobs, strict=True)
        ]
        choice = {"index": 0, "text": "1", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        if "prompt_logprobs" in body:
            choice |= {"prompt_logprobs": [None, *entries]}
        usage = {"prompt_tokens": len(ids), "total_tokens": len(ids) + 1, "completion_tokens": 1}
        kind = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "teacher"}
        return self.answer(200, {**kind, "choices": [choice], "usage": usage})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(tiny_policy: PolicyConfig) -> Iterator[tuple[str, type[Vllm]]]:
    pytest.importorskip("openai")
    roomy = replace(
        tiny_policy, tokenizer="bytes", alphabet="", model=replace(tiny_policy.model, max_positions=256)
    )
    handler = type("Handler", (Vllm,), {"policy": load_policy(roomy, seed=1)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/v1", handler
        running.shutdown()
        thread.join()


def test_a_server_scores_what_a_teacher_here_does(
    server: tuple[str, type[Vllm]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = server
    policy = handler.policy
    monkeypatch.setenv("MY_TEACHERS_KEY", "secret")
    config = TeacherConfig(url=url, model="teacher", api_key_env="MY_TEACHERS_KEY", timeout_s=77.0)
    teacher = ServerTeacher(config, policy.tokenizer, policy.schema.tags)
    assert handler.told == ("Bearer secret", "77.0")
    rows = [
        TrainingSequence(prompt_ids=(49, 50), completion_ids=(51, 52, 53), trained=(True, False, True)),
        TrainingSequence(prompt_ids=(60,), completion_ids=(61,)),
    ]
    first, second = teacher.score(rows)
    (micro,) = pack([replace(rows[0], trained=()), rows[1]], token_budget=100).micro_batches
    with torch.no_grad():
        here = dict(zip(micro.indices_B, policy.score(micro)[0].split([3, 1]), strict=True))
    torch.testing.assert_close(first, here[0][[0, 2]])
    torch.testing.assert_close(second, here[1])


def test_a_server_that_is_no_such_teacher(server: tuple[str, type[Vllm]]) -> None:
    url, handler = server
    tokenizer = handler.policy.tokenizer
    with pytest.raises(UserError, match="status 404: .*The model `other` does not exist"):
        ServerTeacher(TeacherConfig(url=url, model="other"), tokenizer, ())
    handler.shift = 1
    with pytest.raises(UserError, match="another tokenizer than the policy's: its token ids read"):
        ServerTeacher(TeacherConfig(url=url, model="teacher"), tokenizer, ())
    with pytest.raises(UserError, match="no connection"):
        ServerTeacher(TeacherConfig(url="http://127.0.0.1:9/v1", model="teacher"), tokenizer, ())


def test_a_kl_that_is_only_measured_stops_the_run(halfway: Any, tmp_path: Path) -> None:
    """The same weights as without a reference, since it has no weight; and a limit that ends the run."""
    plain = make_config(halfway, tmp_path, teacher=TeacherConfig(), rewards={"correct": 1.0}, group_size=4)
    plain = replace(plain, algo=AlgoConfig(uninformative="keep"), num_steps=3, num_prompts=4)
    measured = replace(plain, out=str(tmp_path / "measured"), algo=replace(plain.algo, kl="log", kl_stop=9.0))
    one, other = rl.train(plain), rl.train(measured)
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    rows = metrics(tmp_path / "measured")
    assert rows[0]["rl/kl"] == 0
    assert rows[-1]["rl/kl"] > 0
    assert "rl/kl" not in metrics(tmp_path / "run")[-1]
    stopped = replace(measured, out=str(tmp_path / "stopped"), algo=replace(measured.algo, kl_stop=1e-9))
    with pytest.raises(UserError, match=r"step 2: the KL to the reference is .* above algo.kl_stop = 1e-09"):
        rl.train(stopped)
