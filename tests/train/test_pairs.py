"""Where preference pairs come from: rollouts that were judged, and the rows of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whet.eval.grade import Grade
from whet.generate.policy import PolicyConfig, load_policy
from whet.train.data.harvest import choose
from whet.train.data.pairs import Pairing, read_pairs
from whet.types import Problem, Sample, UserError

PROBLEM = Problem(uid="u", task="arithmetic", prompt="1+1=", answer="2")


def judged(text: str, index: int, *, correct: bool, perfect: bool = True) -> tuple[Sample, Grade]:
    sample = Sample(
        uid="u",
        index=index,
        prompt_ids=(1,),
        completion_ids=(index + 1, 2),
        sampler_logprobs=(),
        text=text,
        finish_reason="stop",
    )
    return sample, Grade("2" if correct else "3", correct, "perfect" if perfect else "malformed", 0)  # type: ignore[arg-type]


def test_right_is_paired_with_wrong() -> None:
    row = [
        judged("a", 0, correct=True),
        judged("b", 1, correct=False),
        judged("a", 2, correct=True),  # the same text again
        judged("c", 3, correct=True, perfect=False),  # right in bad format: on neither side
        judged("d", 4, correct=False, perfect=False),
        judged("e", 5, correct=True),
    ]
    found = Pairing(100, 0)(PROBLEM, row)
    assert {(pair.chosen, pair.rejected) for pair in found} == {
        ("a", "b"),
        ("a", "d"),
        ("e", "b"),
        ("e", "d"),
    }
    assert len(found) == 4
    first = next(pair for pair in found if (pair.chosen, pair.rejected) == ("a", "d"))
    assert (first.prompt_ids, first.chosen_ids, first.rejected_ids) == ((1,), (1, 2), (5, 2))
    few = Pairing(2, 0)(PROBLEM, row)
    assert len(few) == 2
    assert few == Pairing(2, 0)(PROBLEM, row)
    assert set(few) <= set(found)
    chosen = {tuple(p.chosen + p.rejected for p in Pairing(1, seed)(PROBLEM, row)) for seed in range(40)}
    assert len(chosen) == 4  # every pair has its chance


def test_choose() -> None:
    assert choose(3, 5, "x") == [0, 1, 2]
    counts = [0] * 10
    for seed in range(2000):
        for index in choose(10, 3, seed):
            counts[index] += 1
    # 2000 draws at probability 0.3: one standard deviation is 20.
    assert min(counts) > 500
    assert max(counts) < 700


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


GOOD = {"prompt": "1+1=", "chosen": "</think><answer>2</answer>", "rejected": "</think><answer>3</answer>"}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_all_forms_of_a_row_mean_the_same(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    policy = load_policy(tiny_policy, seed=0)
    asked, better, worse = GOOD["prompt"], GOOD["chosen"], GOOD["rejected"]
    rows = [
        GOOD,
        {"prompt": [user(asked)], "chosen": [assistant(better)], "rejected": [assistant(worse)]},
        {"chosen": [user(asked), assistant(better)], "rejected": [user(asked), assistant(worse)]},
        {"prompt": asked, "chosen": [user(asked), assistant(better)], "rejected": worse},
        {"prompt": asked, "chosen": "<think>" + better, "rejected": "<think>" + worse},
    ]
    pairs, left_out = read_pairs(write(tmp_path / "p.jsonl", *rows), policy, 0)
    assert left_out == 0
    problem = Problem(uid="", task="", prompt=asked, answer="2")
    for pair in pairs:
        assert pair.prompt_ids == policy.prompt_ids(problem)
        assert pair.chosen_ids == policy.solution(problem)[0]
        assert policy.tokenizer.decode(pair.rejected_ids) == worse
        assert pair.uid == pairs[0].uid


def test_text_that_no_tag_ends_gets_the_end_token(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    policy = load_policy(tiny_policy, seed=0)
    path = write(tmp_path / "p.jsonl", {"prompt": "1+1=", "chosen": "2", "rejected": "3"})
    (pair,), _ = read_pairs(path, policy, 0)
    assert pair.chosen_ids == (*policy.tokenizer.encode("2"), policy.tokenizer.eos_id)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "no 'rejected'"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "'chosen' is a number, expected text"),
        ({"prompt": " ", "chosen": "b", "rejected": "c"}, "'prompt' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are the same"),
        ({"chosen": "b", "rejected": "c"}, "no 'prompt', and 'chosen' does not begin with it"),
        (
            {"prompt": "a", "chosen": [], "rejected": "c"},
            "'chosen' does not end with a message of the assistant",
        ),
        ({"prompt": "a", "chosen": [user("b")], "rejected": "c"}, "'chosen' does not end with a message"),
        ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, "'chosen' holds something else than messages"),
        (
            {"prompt": "a", "chosen": [{"role": "assistant"}], "rejected": "c"},
            "'chosen', assistant: no 'content'",
        ),
        (
            {"prompt": "a", "chosen": [user("z"), assistant("b")], "rejected": "c"},
            "do not both begin with the messages of the prompt",
        ),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [assistant("c")]},
            "do not both begin with the messages of the prompt",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": [user("z"), assistant("c")]},
            "do not both begin with the messages of the prompt",
        ),
        (["a", "b", "c"], "expected an object"),
    ],
)
def test_bad_rows_are_named(row: Any, message: str, tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    policy = load_policy(tiny_policy, seed=0)
    path = write(tmp_path / "p.jsonl", GOOD, row)
    with pytest.raises(UserError, match=rf"p\.jsonl line 2: .*{message}.* with --max-bad-rows 1"):
        read_pairs(path, policy, 0)
    assert len(read_pairs(path, policy, 1)[0]) == 1
