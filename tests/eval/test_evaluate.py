"""Evaluation: scripted completions give metrics that were worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from whet.eval.evaluate import EvalConfig, fitting_problems, main, plan, take_problems
from whet.eval.grade import Grade, Judged, grade
from whet.eval.measure import EvalResult, evaluate
from whet.eval.metrics import breakdown
from whet.eval.record import write_result
from whet.eval.show import print_result
from whet.generate.engine import Completion, Request
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.schema import SCHEMAS
from whet.tasks.base import TaskConfig
from whet.tasks.made.arithmetic import Arithmetic
from whet.types import Problem, UserError

TASK = Arithmetic()
FIRST = Problem(uid="a", task="arithmetic", prompt="47+85=", answer="132")
SECOND = Problem(uid="b", task="arithmetic", prompt="10+11=", answer="21")
RIGHT, SHORT = "7+5=12,1+4+8=13</think><answer>132</answer>", "</think><answer>132</answer>"
WRONG, OTHER, NONE = "1</think><answer>7</answer>", "</think><answer>8</answer>", "1+1+1+1+1"

SCRIPT = {
    FIRST.prompt: ([RIGHT, SHORT, WRONG, NONE], RIGHT),
    SECOND.prompt: ([OTHER, OTHER, "</think><answer>21</answer>", WRONG], NONE),
}


class Scripted:
    """An engine that says what the script says."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.calls: list[tuple[Sequence[Request], SamplingParams]] = []

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, *, on_ended: object = None
    ) -> list[list[Completion]]:
        self.calls.append((requests, params))
        prompts = {self.policy.prompt_ids(p): SCRIPT[p.prompt] for p in (FIRST, SECOND)}
        result = []
        for request in requests:
            samples, greedy = prompts[request.prompt_ids]
            texts = [greedy] if params.temperature == 0 else samples[: len(request.seeds)]
            result.append([self.complete(text) for text in texts])
        return result

    def complete(self, text: str) -> Completion:
        ids = tuple(self.policy.tokenizer.encode(text))
        stopped = ids[-1] in self.policy.stop_ids
        return Completion(
            ids=ids,
            logprobs=(-0.5,) * (len(ids) - 1) + (-1.5,),
            finish_reason="stop" if stopped else "length",
        )


@pytest.fixture
def policy(tiny_policy: PolicyConfig) -> Policy:
    return load_policy(tiny_policy, seed=0)


def run(policy: Policy, monkeypatch: pytest.MonkeyPatch, num_samples: int = 4) -> tuple[EvalResult, Scripted]:
    engine = Scripted(policy)
    monkeypatch.setattr(policy, "engine", lambda: engine)
    sampling = SamplingParams(temperature=0.7, top_k=5, max_new_tokens=40)
    result = evaluate(policy, TASK, [FIRST, SECOND], num_samples=num_samples, sampling=sampling, seed=0)
    return result, engine


def test_metrics_by_hand(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    result, engine = run(policy, monkeypatch)
    means = {name: interval.mean for name, interval in result.metrics.items()}
    # RIGHT has 15 thinking tokens and, with three tags and three digits, 21 in all; SHORT 0 and 6; WRONG 1 and 5;
    # NONE never closes its thinking: 9 and 9. OTHER 0 and 4; the answer 21: 0 and 5.
    assert means == pytest.approx(
        {
            "pass@1": (2 / 4 + 1 / 4) / 2,
            "pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,  # 1 - C(4 - c, 2) / C(4, 2) for c = 2 and 1
            "pass@4": 1.0,
            "maj@4": (1 + 0) / 2,  # 132, 132, 7, -: right;  8, 8, 21, 7: wrong
            "greedy": (1 + 0) / 2,
            "format": (3 / 4 + 4 / 4) / 2,
            "truncated": (1 / 4 + 0) / 2,
            "thinking_tokens": ((15 + 0 + 1 + 9) / 4 + (0 + 0 + 0 + 1) / 4) / 2,
            "completion_tokens": ((21 + 6 + 5 + 9) / 4 + (4 + 4 + 5 + 5) / 4) / 2,
        }
    )
    assert all(interval.low <= interval.mean <= interval.high for interval in result.metrics.values())
    (requests, sampled), (once, greedy) = engine.calls
    assert sampled.temperature == 0.7
    assert (greedy.temperature, greedy.top_k, greedy.max_new_tokens) == (0.0, 0, 40)
    assert [len(request.seeds) for request in once] == [1, 1]
    assert len({seed for request in requests for seed in request.seeds}) == 8


def test_one_sample_has_neither_pass_at_k_nor_majority(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result, _ = run(policy, monkeypatch, num_samples=1)
    assert {name for name in result.metrics if "@" in name} == {"pass@1"}
    print_result({"tiny": result.metrics}, 2, 1)
    told = capsys.readouterr().out
    assert "50.0" in told
    assert "thinking" in told
    # Of a plain chat all tokens are the same number twice: it does not think.
    plain = result.metrics | {"thinking_tokens": result.metrics["completion_tokens"]}
    print_result({"plain": plain}, 2, 1)
    told = capsys.readouterr().out
    assert "completion" in told
    assert "thinking" not in told


def test_files(policy: Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result, _ = run(policy, monkeypatch)
    write_result(tmp_path, result, label="tiny", identity={"split": "test"})
    content = json.loads((tmp_path / "eval.json").read_text())
    assert content["label"] == "tiny"
    assert (content["num_problems"], content["num_samples"]) == (2, 4)
    assert content["identity"] == {"split": "test"}
    assert content["metrics"]["pass@1"]["mean"] == pytest.approx(0.375)
    assert set(content["metrics"]) == set(result.metrics)
    assert {"mean", "low", "high"} <= set(content["metrics"]["pass@1"])
    rows = [json.loads(line) for line in (tmp_path / "eval_samples.jsonl").read_text().splitlines()]
    assert [(row["uid"], row["sample"]) for row in rows] == [
        (uid, sample) for uid in "ab" for sample in ("greedy", 0, 1, 2, 3)
    ]
    assert rows[4] == {
        "uid": "a",
        "prompt": "47+85=",
        "gold": "132",
        "meta": {},
        "sample": 3,
        "text": NONE,
        "answer": None,
        "correct": False,
        "format": "none",
        "thinking_tokens": 9,
        "completion_tokens": 9,
        "finish_reason": "length",
        "answer_from": None,
        "num_turns": 1,
        "completion_ids": policy.tokenizer.encode(NONE),
        "logprobs": [-0.5] * 8 + [-1.5],
        "mean_logprob": pytest.approx(-5.5 / 9, abs=1e-6),
        "answer_logprob": None,
        "hedges": 0,
        "revisions": 0,
        "rewards": {},
        "reward": None,
    }
    # RIGHT: the tokens of "132" are the three before the closing tag; only the last token costs 1.5 nats.
    assert (rows[0]["answer_logprob"], rows[0]["mean_logprob"]) == (
        -0.5,
        pytest.approx(-(20 * 0.5 + 1.5) / 21, abs=1e-6),
    )
    assert content["tokens"] == {
        "prompt": 2 * sum(len(policy.prompt_ids(problem)) for problem in (FIRST, SECOND)),
        "completion": sum(row["completion_tokens"] for row in rows),
    }
    assert (content["requests"], content["hardware"], content["model"]) == (10, None, None)
    assert sum(row["correct"] for row in rows if row["sample"] != "greedy") == 3


def test_grade_takes_the_answer_block_unless_told_otherwise(policy: Policy) -> None:
    text = "1+1=2, so the answer is 132"
    ids = policy.tokenizer.encode("1+1=2")
    (strict,) = grade(policy, TASK, [(FIRST, text, ids)])
    assert (strict.answer, strict.is_correct, strict.verdict) == (None, False, "none")
    assert strict.thinking_tokens == len(ids)
    # Thinking that is cut off has no answer; a model that ends without closing what the prompt opened knows no tag.
    (open_,) = grade(policy, TASK, [(FIRST, text, ids)], answer_from="anywhere")
    assert (open_.answer, open_.is_correct, open_.answer_step) == (None, False, None)
    ended = [*ids, policy.stop_ids[0]]
    (lenient,) = grade(policy, TASK, [(FIRST, text, ended)], answer_from="anywhere")
    assert (lenient.answer, lenient.is_correct, lenient.answer_step) == ("132", True, "phrase")
    for thought in ("<think>it is 132", r"<think>\boxed{132}", "7</think>... <think>the answer is 132"):
        (graded,) = grade(policy, TASK, [(FIRST, thought, ended)], answer_from="anywhere")
        assert graded.answer is None, thought
    # In a plain chat the whole text is the answer, in which evaluation may look for it.
    plain = Policy(policy.model, policy.tokenizer, SCHEMAS["none"])
    (whole,) = grade(plain, TASK, [(FIRST, text, ids)])
    assert (whole.answer, whole.answer_step) == (text, "schema")
    (found,) = grade(plain, TASK, [(FIRST, text, ids)], answer_from="anywhere")
    assert (found.answer, found.is_correct, found.answer_step) == ("132", True, "phrase")
    # A program is all that follows the thinking, whatever numbers it or the words around it have.
    task = SimpleNamespace(
        name="code", answer_type="program", is_correct=lambda problem, answer: "add" in answer
    )
    text = "</think>```python\ndef add(a, b):\n    return a + b\n```\nIt adds 2 numbers."
    (program,) = grade(policy, task, [(FIRST, text, ids)], answer_from="anywhere")
    assert (program.answer, program.is_correct, program.answer_step) == (text[8:], True, "whole")
    task = SimpleNamespace(
        name="choice", answer_type="choice", is_correct=lambda problem, answer: answer == "B"
    )
    (letter,) = grade(policy, task, [(FIRST, "</think>I take (B), that is 5.", ids)], answer_from="anywhere")
    assert (letter.answer, letter.answer_step) == ("B", "letter")
    task = SimpleNamespace(
        name="yes_no", answer_type="yes_no", is_correct=lambda problem, answer: answer == "No"
    )
    (word,) = grade(policy, task, [(FIRST, "</think>No, 21 is 3 * 7.", ids)], answer_from="anywhere")
    assert (word.answer, word.answer_step) == ("No", "verdict")
    # A block of the run's own schema is what counts, even where another number stands in a box.
    other = Policy(policy.model, policy.tokenizer, SCHEMAS["working_out_solution"])
    text = r"1<end_working_out><SOLUTION>7</SOLUTION> \boxed{132}"
    (block,) = grade(other, TASK, [(FIRST, text, [])], answer_from="anywhere")
    assert (block.answer, block.is_correct) == ("7", False)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("12</think><answer>132</answer>", 2),
        ("<think>12</think><answer>132</answer>", 2),  # between the tags, where a model opens them itself
        ("12</think>132", 2),  # closed, whether an answer follows or not
        ("12</think>", 2),
        ("12<answer>132</answer>", 7),  # never closed: all of it
    ],
)
def test_thinking_ends_where_it_is_closed(policy: Policy, text: str, tokens: int) -> None:
    (graded,) = grade(policy, TASK, [(FIRST, text, policy.tokenizer.encode(text))])
    assert graded.thinking_tokens == tokens


def test_work_is_what_the_model_read_and_wrote(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is read once for its samples and once for the greedy completion; what a tool wrote is not written."""

    class Helped(Scripted):
        def complete(self, text: str) -> Completion:
            done = super().complete(text)
            return replace(done, trained=(False, *[True] * (len(done.ids) - 1)))

    engine = Helped(policy)
    monkeypatch.setattr(policy, "engine", lambda: engine)
    sampling = SamplingParams(temperature=0.7, max_new_tokens=40)
    found = evaluate(policy, TASK, [FIRST, SECOND], num_samples=4, sampling=sampling, seed=0)
    read = sum(len(policy.prompt_ids(problem)) for problem in (FIRST, SECOND))
    texts = [text for samples, greedy in SCRIPT.values() for text in (*samples, greedy)]
    written = sum(len(policy.tokenizer.encode(text)) - 1 for text in texts)
    assert (found.work.requests, found.work.prompt_tokens) == (10, 2 * read)
    assert found.work.completion_tokens == written


def test_problems_are_a_fixed_sample(policy: Policy) -> None:
    every = take_problems(TASK, "test", 0)
    assert [p.uid for p in every] == sorted(p.uid for p in TASK.problems("test"))
    assert take_problems(TASK, "test", 10) == every[:10]
    with pytest.raises(UserError, match=r"split 'nonsense'"):
        take_problems(TASK, "nonsense", 10)


def test_only_problems_that_fit(policy: Policy) -> None:
    long = replace(FIRST, prompt="1+" * 20)
    assert fitting_problems(policy, [FIRST, long], min_new_tokens=40) == [FIRST]
    with pytest.raises(
        UserError, match=r"no prompt fits: the context holds 64 tokens, .* completions need 40"
    ):
        fitting_problems(policy, [long], min_new_tokens=40)
    assert fitting_problems(policy, [], min_new_tokens=40) == []


def test_nothing_to_evaluate(policy: Policy) -> None:
    with pytest.raises(UserError, match="no problems"):
        evaluate(policy, TASK, [], num_samples=1, sampling=SamplingParams(), seed=0)


def make_config(tiny_policy: PolicyConfig, folder: Path) -> EvalConfig:
    return EvalConfig(
        out=str(folder),
        policy=tiny_policy,
        task=TaskConfig(),
        num_problems=3,
        num_samples=2,
        sampling=SamplingParams(max_new_tokens=12),
    )


@pytest.mark.ci
def test_main_is_reproducible(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        main(make_config(tiny_policy, tmp_path / name))
    assert "accuracy is near zero" in capsys.readouterr().out
    first, second = (json.loads((tmp_path / name / "eval.json").read_text()) for name in ("first", "second"))
    for content in (first, second):
        for name in ("seconds", "generation_seconds", "hardware"):  # of this run, not of the model
            del content[name]
    assert first == second
    texts = [(tmp_path / name / "eval_samples.jsonl").read_text() for name in ("first", "second")]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 3 * (2 + 1)
    assert first["identity"]["split"] == "test"
    assert (tmp_path / "first" / "report.md").is_file()
    with pytest.raises(UserError, match="already exists"):
        main(make_config(tiny_policy, tmp_path / "first"))


def test_config_refuses_what_makes_no_sense(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    config = make_config(tiny_policy, tmp_path)
    assert "3 of arithmetic/test" in plan(config)
    for wrong in (
        {"num_samples": 0},
        {"num_problems": -1},
        {"precision": "float8"},
        {"sampling": SamplingParams(temperature=0.0)},
    ):
        with pytest.raises(ValueError, match="expected"):
            replace(config, **wrong)  # type: ignore[arg-type]


def test_pass_at_1_by_label(policy: Policy) -> None:
    def judged(is_correct: bool) -> Judged:
        return Judged("", 1, "stop", Grade("1", is_correct, "perfect", 1))

    labels = [{"level": "1"}, {"level": "2", "subject": "a"}, {"level": "2", "subject": "a"}, {}]
    problems = [replace(FIRST, uid=str(n), meta=meta) for n, meta in enumerate(labels)]
    right = [[True, True], [True, False], [False, False], [True, True]]
    samples = [[judged(value) for value in row] for row in right]
    found = breakdown(problems, samples)
    assert set(found) == {"level"}  # one subject is no breakdown
    assert {value: interval.mean for value, interval in found["level"].items()} == {"1": 1.0, "2": 0.25}


def test_an_answer_that_nobody_could_judge_gives_no_score(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arithmetic, "is_correct", lambda self, problem, answer: None)
    with pytest.raises(UserError, match="10 of 10 answers could not be judged, so there is no score"):
        run(policy, monkeypatch)
