"""Supervised fine-tuning: what is trained, and exact resume."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.algo.kept import join_kept, keep_only
from whet.algo.packing import TrainingSequence, pack
from whet.config import dump_yaml
from whet.generate.policy import PolicyConfig, load_policy
from whet.storage.checkpoint import saved_steps
from whet.tasks.base import TaskConfig
from whet.tasks.made.arithmetic import Arithmetic
from whet.train import fit, sft
from whet.train.optim.safety import SafetyConfig
from whet.train.optim.step import OptimConfig, Optimizer
from whet.train.rollout.order import EpochOrder
from whet.train.sft import SFTConfig, is_empty, main, plan, train, train_step
from whet.types import Allowed, Problem, UserError

pytestmark = pytest.mark.usefixtures("few_problems")

MACHINE = ("time_s", "_per_second", "_gib", "hardware/utilisation/cpu", "hardware/memory_gib/cpu")
"""Ends of the names of what a machine adds: two equal runs differ in them."""


def make_config(tiny_policy: PolicyConfig, folder: Path, **changes: Any) -> SFTConfig:
    return replace(
        SFTConfig(
            out=str(folder),
            policy=tiny_policy,
            optim=OptimConfig(lr=3e-3, warmup_steps=2, token_budget=100, weight_decay=0.1),
            num_steps=12,
            batch_size=4,
            empty_thinking_share=0.5,
            validation_problems=6,
            validate_every=4,
            save_every=6,
        ),
        **changes,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.endswith(MACHINE)} for row in rows]


def final_files(folder: Path, step: int) -> dict[str, bytes]:
    """Weights and optimizer state, byte for byte, and everything else that the run remembers."""
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    names = ("model.safetensors", "training/optimizer.safetensors")
    files = {name: (checkpoint / name).read_bytes() for name in names}
    files["best"] = (folder / "checkpoints" / "best" / "model.safetensors").read_bytes()
    state = json.loads((checkpoint / "training" / "state.json").read_text())
    state["last"] = {name: value for name, value in state["last"].items() if not name.endswith(MACHINE)}
    return files | {"state": json.dumps(state).encode()}


class CrashError(Exception):
    """Stands for a crash."""


def fail_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise CrashError
        return function(*arguments, **options)

    return wrapped


@pytest.mark.some(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16_master"])
def test_resume_is_exact(
    precision: str, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tiny_policy, tmp_path / "straight")
    config = replace(config, optim=replace(config.optim, precision=precision))  # type: ignore[arg-type]
    train(config)
    broken = replace(config, out=str(tmp_path / "broken"))
    with monkeypatch.context() as patch:
        patch.setattr(sft, "train_step", fail_at(10, sft.train_step))
        with pytest.raises(CrashError):
            train(broken)
    assert len(metrics(tmp_path / "broken")) == 9
    assert saved_steps(tmp_path / "broken") == [6]
    policy = train(broken, resume=True)
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "straight")
    assert final_files(tmp_path / "broken", 12) == final_files(tmp_path / "straight", 12)
    assert policy.model.head_weight.dtype == (torch.float32 if precision == "float32" else torch.bfloat16)


def test_time_and_peak_memory_go_on_where_a_resumed_run_left_them(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tiny_policy, tmp_path)
    begin = sft.begin

    def begun_earlier(*arguments: Any, **options: Any) -> Any:
        tracking = begin(*arguments, **options)
        tracking.began -= 5000
        return tracking

    with monkeypatch.context() as patch:
        patch.setattr(sft, "begin", begun_earlier)
        patch.setattr(fit, "step_metrics", lambda *_: {"sft/peak_memory_gib": 900.0})
        patch.setattr(sft, "train_step", fail_at(10, sft.train_step))
        with pytest.raises(CrashError):
            train(config)
    train(config, resume=True)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    times = [row["run_time_s"] for row in rows]
    assert times == sorted(times)
    assert 5000 < times[0] < times[-1] < 10_000
    assert {row["sft/peak_memory_gib"] for row in rows} == {900.0}


KILLER = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from whet.config import load_yaml
from whet.tasks.made import arithmetic
from whet.tasks.made.arithmetic import Arithmetic
from whet.train import sft
arithmetic.NUM_PROBLEMS = 6000
problems = Arithmetic.problems
Arithmetic.problems = lambda self, split: problems(self, split)[:200]  # as the fixture few_problems does
original, calls = sft.train_step, 0
def train_step(*arguments, **options):
    global calls
    calls += 1
    if calls == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **options)
sft.train_step = train_step
sft.train(load_yaml(Path(sys.argv[1]), sft.SFTConfig))
"""


@pytest.mark.ci
def test_resume_after_sigkill_in_another_process(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    config = make_config(tiny_policy, tmp_path / "straight")
    train(config)
    broken = replace(config, out=str(tmp_path / "broken"))
    (tmp_path / "config.yaml").write_text(dump_yaml(broken))
    process = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path / "config.yaml")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    train(broken, resume=True)
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "straight")
    assert final_files(tmp_path / "broken", 12) == final_files(tmp_path / "straight", 12)


def test_resume_before_the_first_checkpoint_and_after_the_last(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tiny_policy, tmp_path / "straight")
    train(config)
    broken = replace(config, out=str(tmp_path / "broken"))
    with monkeypatch.context() as patch:
        patch.setattr(sft, "train_step", fail_at(3, sft.train_step))
        with pytest.raises(CrashError):
            train(broken)
    for _ in range(2):  # the second time there is nothing left to do
        train(broken, resume=True)
        assert metrics(tmp_path / "broken") == metrics(tmp_path / "straight")
        assert final_files(tmp_path / "broken", 12) == final_files(tmp_path / "straight", 12)


def test_an_old_folder_is_never_written_to(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    config = make_config(tiny_policy, tmp_path / "run", num_steps=2)
    train(config)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"already exists.*--resume"):
        train(config)
    with pytest.raises(UserError, match=r"line \d+ has 'batch_size: 4', you gave 'batch_size: 5'"):
        train(replace(config, batch_size=5), resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.some(1)
@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_finished_run_goes_on_for_more_steps(
    schedule: Any, tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one run of all the steps, where the learning rate does not depend on how many there are."""
    config = make_config(tiny_policy, tmp_path / "a", num_steps=4, save_every=4)
    config = replace(config, optim=replace(config.optim, schedule=schedule))
    train(config)
    longer = replace(config, num_steps=8)
    train(longer, resume=True)
    said = capsys.readouterr().out
    train(longer, resume=True)  # as config.yaml has it now
    assert "num_steps: 8\n" in (tmp_path / "a/config.yaml").read_text()
    if schedule == "constant":
        straight = replace(longer, out=str(tmp_path / "b"))
        train(straight)
        weights = [final_files(tmp_path / name, 8)["model.safetensors"] for name in ("a", "b")]
        assert weights[0] == weights[1]
        assert "whet: 4 steps become 8, as if they had been 8 from the start" in said
    else:  # from 3e-3 at step 2 to a tenth at step 7: at step 4 (0.1 + 0.9 x 3/5) of it are left
        assert "is planned anew over all 8, so the learning rate goes on at 0.0019" in said
    with pytest.raises(UserError, match=r"num_steps = 7: .* has done 8 steps already"):
        train(replace(config, num_steps=7), resume=True)
    with pytest.raises(UserError, match="batch_size"):  # nothing else may differ
        train(replace(longer, num_steps=9, batch_size=5), resume=True)
    assert "num_steps: 8\n" in (tmp_path / "a/config.yaml").read_text()


def test_what_a_resumed_run_warns_of_can_be_changed(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warm-up longer than the run is told at its start; a resume refuses another one, and names the way to it."""
    config = make_config(tiny_policy, tmp_path / "run", num_steps=1, save_every=1)
    config = replace(config, optim=replace(config.optim, warmup_steps=10))
    train(config)
    assert "set --optim.warmup-steps 0" in capsys.readouterr().out
    longer = replace(config, num_steps=2)
    other = replace(longer, optim=replace(config.optim, warmup_steps=0))
    with pytest.raises(UserError, match=r"you gave 'warmup_steps: 0'; .*--model \S+/run --out FOLDER"):
        train(other, resume=True)
    train(longer, resume=True)
    assert "warmup-steps" not in capsys.readouterr().out
    policy = PolicyConfig(init=str(tmp_path / "run"))
    train(replace(other, policy=policy, out=str(tmp_path / "further")))


@pytest.mark.parametrize("refused", ["data", "step", "damaged"])
def test_a_refused_resume_leaves_the_folder_as_it_was(
    refused: str, tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    """Also of what is written at every start: number of steps, environment, heartbeat, provenance."""
    rows = tmp_path / "rows.jsonl"
    text = "".join(json.dumps({"question": f"{n}+1", "solution": f"{n + 1}"}) + "\n" for n in range(40))
    rows.write_text(text)
    config = make_config(tiny_policy, tmp_path / "run", num_steps=1, validation_problems=0)
    config = replace(config, task=TaskConfig(name="jsonl", path=str(rows)), empty_thinking_share=0.0)
    train(config)
    if refused != "step":
        rows.write_text(text.replace("+1", "+2"))
    if refused == "damaged":
        (tmp_path / "run/provenance.json").write_text("{}")

    def files() -> dict[Path, tuple[bytes, int]]:
        found = (path for path in (tmp_path / "run").rglob("*") if path.is_file())
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in found}

    before = files()
    message = "no checkpoint of that step" if refused == "step" else "what the run reads has changed"
    with pytest.raises(UserError, match=message):
        train(replace(config, num_steps=3), resume=7 if refused == "step" else True)
    assert files() == before
    rows.write_text(text)
    train(replace(config, num_steps=3), resume=True)
    assert "num_steps: 3\n" in (tmp_path / "run/config.yaml").read_text()
    assert saved_steps(tmp_path / "run") == [1, 3]


def test_nothing_to_resume(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        train(make_config(tiny_policy, tmp_path / "missing"), resume=True)
    assert not (tmp_path / "missing").exists()


def test_main_writes_the_run_folder(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tiny_policy, tmp_path / "run", num_steps=3)
    main(config)
    run = tmp_path / "run"
    assert "done:" in capsys.readouterr().out
    assert (run / "config.yaml").read_text() == dump_yaml(config)
    summary = json.loads((run / "summary.json").read_text())
    rows = metrics(run)
    assert summary["loss"] == rows[-1]["sft/loss"]
    assert summary["left_out"] == 0
    assert summary["best_validation_loss"] == rows[-1]["sft/validation_loss"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert (run / "report.md").is_file()
    assert "12" in plan(config).split()  # demonstrations in all


@pytest.mark.ci
def test_it_overfits_eight_rows(tiny_policy: PolicyConfig) -> None:
    policy = load_policy(tiny_policy, seed=0)
    rows = [sft.demonstration(policy, problem) for problem in Arithmetic().problems("train")[::25]]
    assert len(rows) == 8
    config = OptimConfig(lr=1e-2)
    optimizer = Optimizer(policy.model, config)
    losses = []
    for _ in range(250):
        losses.append(train_step(policy, rows, config)[0])
        optimizer.step(config.lr)
    # At first every token is about as likely; the weights' spread of 0.02 moves that by a few hundredths.
    assert losses[0] == pytest.approx(math.log(policy.tokenizer.vocab_size), abs=0.1)
    assert losses[-1] < 0.05


def test_rows_that_are_no_token_s_count_in_the_loss(tiny_policy: PolicyConfig) -> None:
    """Other programs draw from all rows: cross-entropy over all of them, by PyTorch.

    Reinforcement weighs what the sampler drew, which are tokens: the other rows are no part of that policy, and stay.
    """
    policy = load_policy(tiny_policy, seed=0)
    policy.model.num_valid_tokens -= 3  # as with a vocabulary of which the last rows are no token's
    row = TrainingSequence(prompt_ids=(3, 4, 5), completion_ids=(6, 7, 8))
    loss = train_step(policy, [row], OptimConfig())[0]
    head = policy.model.head_weight
    assert head.grad is not None
    assert bool((head.grad[-3:] != 0).all(1).all())
    logits = policy.model.logits(torch.tensor([[3, 4, 5, 6, 7]]))[0, 2:]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([6, 7, 8]))
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    head.grad = None
    (micro,) = pack([row], token_budget=100, device="cpu").micro_batches
    logprobs_M, _ = policy.score(micro)
    logprobs_M.sum().backward()
    grad_VD = policy.model.head_weight.grad
    assert grad_VD is not None
    assert bool((grad_VD[-3:] == 0).all())
    expected_M = logits[:, :-3].log_softmax(-1)[range(3), [6, 7, 8]]
    torch.testing.assert_close(logprobs_M.detach(), expected_M.detach(), rtol=1e-5, atol=1e-5)


def test_only_the_completion_is_trained(tiny_policy: PolicyConfig) -> None:
    policy = load_policy(tiny_policy, seed=0)
    problem = Arithmetic().problems("train")[0]
    row = sft.demonstration(policy, problem)
    assert policy.tokenizer.decode(row.prompt_ids).endswith(problem.prompt + "<think>")
    assert policy.tokenizer.decode(row.completion_ids) == (
        f"{problem.solution}</think><answer>{problem.answer}</answer>"
    )
    empty = sft.demonstration(policy, problem, empty=True)
    assert policy.tokenizer.decode(empty.completion_ids) == f"</think><answer>{problem.answer}</answer>"
    assert empty.prompt_ids == row.prompt_ids
    loss, trained, read, _ = train_step(policy, [row], OptimConfig())
    assert (trained, read) == (len(row.completion_ids), row.num_tokens)
    # The loss is the completion's alone: cutting the last token off changes it by that token's score only.
    cut = TrainingSequence(prompt_ids=row.prompt_ids, completion_ids=row.completion_ids[:-1])
    moved = TrainingSequence(
        prompt_ids=(*row.prompt_ids, *row.completion_ids[:-1]), completion_ids=row.completion_ids[-1:]
    )
    parts = [train_step(policy, [part], OptimConfig())[0] for part in (cut, moved)]
    # Three float32 sums of some twenty numbers of size 3.
    assert loss * trained == pytest.approx(parts[0] * (trained - 1) + parts[1], abs=1e-4)


def test_prompt_tokens_get_no_gradient_as_targets(tiny_policy: PolicyConfig) -> None:
    # Untied head: its row of a token has a gradient through softmax from every trained position, but the pull
    # towards a token, -(1 - p) times a hidden state, comes from targets only. With a head of zeros p = 1/V for all.
    config = replace(tiny_policy, model=replace(tiny_policy.model, tie_embeddings=False))
    policy = load_policy(config, seed=0)
    row = TrainingSequence(prompt_ids=(1, 2, 3), completion_ids=(5, 6))
    head = policy.model.head_weight
    assert isinstance(head, torch.nn.Parameter)
    with torch.no_grad():
        head.zero_()
    train_step(policy, [row], OptimConfig())
    assert head.grad is not None
    rest = [index for index in range(head.shape[0]) if index not in (5, 6)]
    # All tokens but the two targets, prompt tokens included, are pushed away alike.
    for index in rest[1:]:
        torch.testing.assert_close(head.grad[index], head.grad[rest[0]], rtol=1e-5, atol=1e-7)  # float32
    for index in (5, 6):
        assert float((head.grad[index] - head.grad[rest[0]]).norm()) > 0.1


USER_TASK = """from whet.tasks.made.arithmetic import Arithmetic
class Mine(Arithmetic):
    def allowed(self, problem):
        return {rule}
"""


class Ruled(Arithmetic):
    """Arithmetic whose answers may as well be one more, or any of three others."""

    def allowed(self, problem: Problem) -> list[Allowed]:
        return [Allowed(0, [problem.answer, str(int(problem.answer) + 1), "7", "71", "4321"])]


class Letters(Arithmetic):
    """Rules that allow a 1 in place of any answer."""

    def allowed(self, problem: Problem) -> list[Allowed]:
        return [Allowed(0, ["1", problem.answer])]


class Nothing(Arithmetic):
    """Rules that do not know the answer."""

    def allowed(self, problem: Problem) -> list[Allowed]:
        return [Allowed(0, ["x", "y"])]


def test_what_the_rules_allow_in_place_of_each_token(tiny_policy: PolicyConfig) -> None:
    policy = load_policy(tiny_policy, seed=0)
    problem = replace(Arithmetic().problems("train")[0], answer="432", solution="432")
    row = sft.demonstration(policy, problem, rules=Ruled())
    vocab = policy.model.config.vocab_size
    sets = ~keep_only(
        torch.zeros(len(row.allowed), vocab), join_kept(row.allowed, torch.device("cpu"))
    ).isinf()
    spelt = [{policy.tokenizer.decode([i]) for i in own.nonzero()[:, 0].tolist()} for own in sets]
    at = len(row.completion_ids) - 4  # the thinking and the tags before it may be nothing else
    assert [len(own) for own in spelt] == [vocab] * at + [2, 1, 2, vocab]
    assert spelt[at : at + 3] == [{"4", "7"}, {"3"}, {"2", "3"}]
    # Nothing is known behind a text that may end where the answer goes on.
    longer = sft.demonstration(policy, replace(problem, answer="71"), rules=Ruled())
    assert [bool(own) for own in longer.allowed[-4:]] == [False, True, False, False]
    assert sft.demonstration(policy, problem).allowed == ()
    # A tag behind the answer holds its letter, too.
    (row,) = [sft.demonstration(policy, replace(problem, answer="a"), rules=Letters())]
    assert [bool(own) for own in row.allowed] == [False] * (len(row.allowed) - 2) + [True, False]
    with pytest.raises(UserError, match=r"allowed\(\) gives .* at character 0 of the answer '9', where none"):
        sft.demonstration(policy, replace(problem, answer="9"), rules=Nothing())


@pytest.mark.parametrize("budget", [1000, 30])
def test_the_loss_of_rules_against_an_oracle(budget: int, tiny_policy: PolicyConfig) -> None:
    """Loss and gradients are those of the definition in float64, and of finite differences, however it is cut."""
    policy = load_policy(tiny_policy, seed=0)
    policy.model.double()
    problems, coef = Ruled().problems("train")[:5], 0.7
    rows = [sft.demonstration(policy, problem, rules=Ruled()) for problem in problems[:4]]
    rows.append(sft.demonstration(policy, problems[4]))  # of which nothing is known
    vocab, device = policy.model.config.vocab_size, torch.device("cpu")
    sets = [
        ~keep_only(torch.zeros(len(r.allowed), vocab), join_kept(r.allowed, device)).isinf() for r in rows
    ]
    count = sum(len(row.completion_ids) for row in rows)

    def definition() -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for row, own in zip(rows, sets, strict=True):
            ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
            scores = policy.model.logits(ids)[0].log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
            total = total - scores.gather(1, torch.tensor(row.completion_ids)[:, None]).sum()
            for one, may in zip(scores, own, strict=False):
                total = total - coef * one[may].logsumexp(0)
        return total / count

    optim = OptimConfig(token_budget=budget)
    loss, _, _, found = train_step(policy, rows, optim, allowed_coef=coef)
    named = {name: p for name, p in policy.model.named_parameters() if p.grad is not None}
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    expected = definition()
    wanted = torch.autograd.grad(expected, list(named.values()))
    for (name, gradient), other in zip(gradients.items(), wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-11, msg=name)
    ruled = sum(bool(text) for row in rows for text in row.allowed)
    outside = found["sft/outside_rules"]
    assert outside > 1
    assert loss + coef * outside * ruled / count == pytest.approx(float(expected.detach()), rel=1e-10)
    policy.model.zero_grad()
    assert train_step(policy, rows, optim)[0] == pytest.approx(loss, rel=1e-12)
    generator = torch.Generator().manual_seed(0)
    ways = {name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in named.items()}
    ends = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            for name, p in named.items():
                p += step * ways[name]
            ends.append(float(definition()))
    slope = sum(float((gradients[name] * ways[name]).sum()) for name in named)
    assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(slope, rel=1e-6)


@pytest.mark.ci
def test_a_run_learns_what_its_rules_allow(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tiny_policy, tmp_path / "run", allowed_coef=1.0)
    with pytest.raises(UserError, match="allowed_coef is not read: arithmetic has no rules"):
        train(config)
    for name, rule, message in (
        ("silent", "[]", "allowed_coef is not read: arithmetic has no rules"),
        ("broken", "1 / 0", r"broken.py line 4: allowed\(\) failed: ZeroDivisionError"),
        ("strange", "[(0, 'ab')]", r"strange.py: allowed\(\) returned \(0, ab\), expected pairs"),
    ):
        file = tmp_path / f"{name}.py"
        file.write_text(USER_TASK.format(rule=rule))
        with pytest.raises(UserError, match=message):
            train(replace(config, task=TaskConfig(name=f"{file}:Mine")))
    monkeypatch.setattr(sft, "load_task", lambda config: Ruled())
    ends = {}
    for coef in (1e-6, 3.0):
        out = tmp_path / str(coef)
        train(replace(config, out=str(out), allowed_coef=coef, num_steps=40))
        logged = [row["sft/outside_rules"] for row in metrics(out) if "sft/outside_rules" in row]
        assert len(logged) == 40
        ends[coef] = sum(logged[-5:]) / 5
    assert ends[3.0] < 0.92 * ends[1e-6]


def test_empty_thinking_share(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    problems = [replace(p, uid=f"{p.uid}{i}") for p in Arithmetic().problems("train") for i in range(10)]
    for share in (0.0, 0.3, 1.0):
        config = make_config(tiny_policy, tmp_path, empty_thinking_share=share)
        drawn = [is_empty(config, 0, problem) for problem in problems]
        # 2000 independent draws: one standard deviation is at most 0.011.
        assert sum(drawn) / 2000 == pytest.approx(share, abs=0.045 if 0 < share < 1 else 0)
        assert drawn == [is_empty(config, 0, problem) for problem in problems]
    config = make_config(tiny_policy, tmp_path)
    assert [is_empty(config, 0, p) for p in problems] != [is_empty(config, 1, p) for p in problems]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_reaches_the_trainer(
    share: float, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TrainingSequence] = []
    original = sft.train_step

    def record(policy: Any, sequences: Any, *rest: Any, **options: Any) -> Any:
        seen.extend(sequences)
        return original(policy, sequences, *rest, **options)

    monkeypatch.setattr(sft, "train_step", record)
    config = make_config(tiny_policy, tmp_path / "run", num_steps=3, empty_thinking_share=share)
    policy = train(config)
    order = EpochOrder(Arithmetic().problems("train"), config.seed).next(12)
    expected = [policy.solution(problem, thinking="" if share else None)[0] for _, problem in order]
    assert [sequence.completion_ids for sequence in seen] == expected


def test_demonstrations_that_do_not_fit_are_left_out_with_a_note(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "1+1=", "answer": "2", "solution": "1+1" * count} for count in (1, 2, 30)]
    rows += [{"prompt": f"{n}+1=", "answer": str(n + 1), "solution": "1"} for n in range(60)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = load_policy(tiny_policy, seed=0)
    task = TaskConfig(name="jsonl", path=str(data))
    config = make_config(tiny_policy, tmp_path / "run", task=task, num_steps=1)
    problems = sft.load_task(task).problems("train")
    long = [problem for problem in problems if len(problem.solution) == 90]
    kept = sft.demonstrate(policy, problems).problems
    assert kept == [problem for problem in problems if problem not in long]
    train(config)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["train_problems"], summary["left_out"]) == (len(kept), len(long))
    if long:
        assert f"1 of {len(problems)} demonstrations do not fit" in capsys.readouterr().out


def test_a_warning_below_four_demonstrations(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for count in (3, 4):
        (folder := tmp_path / f"data{count}").mkdir()
        for name, size in (("train", 2 * count), ("test", 1)):
            rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "solution": "1"} for n in range(size)]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = TaskConfig(name="jsonl", path=str(folder))
        problems = sft.load_task(task).problems("train")
        (folder / "train.jsonl").write_text(
            "".join(
                json.dumps({"prompt": p.prompt, "answer": p.answer, "solution": p.solution}) + "\n"
                for p in problems[:count]
            )
        )
        train(make_config(tiny_policy, tmp_path / f"run{count}", task=task, num_steps=1))
        said = capsys.readouterr().out
        assert ("3 demonstrations: learnt by heart" in said) == (count == 3)
        assert "4 demonstrations: learnt" not in said


def test_no_demonstration_fits(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    small = replace(tiny_policy, model=replace(tiny_policy.model, max_positions=8))
    with pytest.raises(UserError, match="no demonstration fits in the context of 8 tokens"):
        train(make_config(small, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Optimizer, "step", lambda self, lr, loss: float("nan"))
    with pytest.raises(
        UserError, match=r"step 4: sft/grad_norm nan, .* left out, 4 in a row: lower optim.lr"
    ):
        train(make_config(tiny_policy, tmp_path / "run"))
    assert saved_steps(tmp_path / "run") == []
    assert [row["sft/skipped"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.ci
def test_a_step_that_is_not_finite_is_left_out_and_counted(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Optimizer.step, [0]

    def poisoned(self: Optimizer, lr: float, *, loss: float) -> float:
        calls[0] += 1
        if calls[0] in (2, 3, 5):
            self._named[0][1].grad = torch.full_like(self._named[0][1], torch.nan)
        return original(self, lr, loss=loss)

    monkeypatch.setattr(Optimizer, "step", poisoned)
    config = make_config(tiny_policy, tmp_path / "run", num_steps=6, save_every=3)
    train(replace(config, safety=SafetyConfig(max_skipped=2)))
    rows = metrics(tmp_path / "run")
    assert [row.get("sft/skipped") for row in rows] == [None, 1, 2, None, 1, None]
    assert all(math.isfinite(row["sft/loss"]) for row in rows)
    counts = [json.loads(final_files(tmp_path / "run", step)["state"])["skipped"] for step in (3, 6)]
    assert counts == [2, 0]
    # A run that is gone on with knows how many were left out in a row before it.
    monkeypatch.setattr(Optimizer, "step", lambda self, lr, loss: float("inf"))
    with pytest.raises(UserError, match=r"step 4: sft/grad_norm inf.*3 in a row"):
        train(replace(config, safety=SafetyConfig(max_skipped=2)), resume=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_steps": 0},
        {"batch_size": 0},
        {"save_every": 0},
        {"empty_thinking_share": 1.5},
        {"allowed_coef": -1.0},
    ],
)
def test_wrong_settings(wrong: dict[str, float], tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} = .*expected"):
        make_config(tiny_policy, tmp_path, **wrong)
