"""Where preference pairs come from: rollouts that were judged, and the rows of a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hub
import pytest

from whet.eval.grade import Grade
from whet.generate.policy import PolicyConfig, load_policy
from whet.train.data.harvest import choose
from whet.train.data.pairs import Pairing, read_pairs, with_partners
from whet.types import Problem, Sample, UserError

ULTRAFEEDBACK = "HuggingFaceH4/ultrafeedback_binarized"
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


def test_ordinary_pairs_are_prompted_without_the_schema(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    """No instruction and no opening tag where neither the config nor the model's folder has a schema."""
    roomy = replace(tiny_policy.model, max_positions=512)
    chat = replace(
        tiny_policy, tokenizer="bytes", alphabet="", template="base", schema="inherit", model=roomy
    )
    chat = replace(chat, tags_as_tokens=False)
    row = {"prompt": [user("a"), assistant("b"), user("c")], "chosen": "d", "rejected": "e"}
    path = write(tmp_path / "p.jsonl", row)
    plain = load_policy(chat, seed=0, plain=True)
    ((pair,), left_out) = read_pairs(path, plain, 0)
    assert left_out == 0
    assert plain.tokenizer.decode(pair.prompt_ids) == "Question: a\nAnswer:\nb\n\nQuestion: c\nAnswer:\n"
    asked = load_policy(chat, seed=0)
    ((pair,), _) = read_pairs(path, asked, 0)
    assert asked.tokenizer.decode(pair.prompt_ids).endswith("Answer:\n<think>")


def test_system_messages_are_kept(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    chat = replace(tiny_policy, tokenizer="bytes", alphabet="", template="base", schema="inherit")
    policy = load_policy(replace(chat, tags_as_tokens=False), seed=0, plain=True)
    row = {"prompt": [{"role": "system", "content": "Be brief."}, user("a")], "chosen": "b", "rejected": "c"}
    ((pair,), _) = read_pairs(write(tmp_path / "p.jsonl", row), policy, 0)
    assert policy.tokenizer.decode(pair.prompt_ids) == "Be brief.\n\nQuestion: a\nAnswer:\n"


def test_every_kind_of_file_means_the_same(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    policy = load_policy(tiny_policy, seed=0)
    turns = [
        {"prompt": GOOD["prompt"], **{n: [user("1+1="), assistant(GOOD[n])] for n in ("chosen", "rejected")}}
    ]
    (expected,), _ = read_pairs(write(tmp_path / "p.jsonl", *turns), policy, 0)
    (tmp_path / "p.json").write_text(json.dumps(turns))
    parquet.write_table(pyarrow.Table.from_pylist(turns), tmp_path / "p.parquet")
    (tmp_path / "p.csv").write_text(
        "prompt,chosen,rejected\n" + ",".join(GOOD[n] for n in ("prompt", "chosen", "rejected")) + "\n"
    )
    for name in ("p.json", "p.parquet", "p.csv"):
        assert read_pairs(str(tmp_path / name), policy, 0) == ([expected], 0), name


def test_hub_pairs_come_from_their_split(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row in the schema of HuggingFaceH4/ultrafeedback_binarized, which has no split 'train'."""
    both = {name: [user("1+1="), assistant(GOOD[name])] for name in ("chosen", "rejected")}
    row = {"prompt": "1+1=", **both, "messages": both["chosen"], "score_chosen": 8.5, "score_rejected": 6.0}
    hub.install(monkeypatch, owner__pairs={"default": {"train_prefs": [row], "test_prefs": [row]}})
    policy = load_policy(tiny_policy, seed=0)
    (found,), _ = read_pairs("owner/pairs", policy, 0, split="train_prefs")
    (expected,), _ = read_pairs(write(tmp_path / "p.jsonl", GOOD), policy, 0)
    assert found == expected
    with pytest.raises(UserError, match="train_prefs, test_prefs: choose one with --pairs-split"):
        read_pairs("owner/pairs", policy, 0)
    long = replace(tiny_policy, model=replace(tiny_policy.model, max_positions=4096))
    fits, left_out = read_pairs("ultrafeedback", load_policy(long, seed=0), 0)
    assert (len(fits), left_out) == (len(hub.recorded()[ULTRAFEEDBACK]["default"]["train_prefs"]), 0)


def test_single_completions(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    policy = load_policy(tiny_policy, seed=0)
    rows = [
        {"prompt": "1+1=", "completion": GOOD["chosen"], "label": True},
        {"prompt": [user("1+2=")], "completion": [user("1+2="), assistant(GOOD["rejected"])], "label": "0"},
        {**GOOD, "prompt": "1+3="},
    ]
    found, left_out = read_pairs(write(tmp_path / "p.jsonl", *rows), policy, 0, singly=True)
    assert left_out == 0
    sides = [(bool(one.chosen_ids), bool(one.rejected_ids), one.prompt) for one in found]
    assert sides == [
        (True, False, "1+1="),
        (False, True, "1+2="),
        (True, False, "1+3="),
        (False, True, "1+3="),
    ]
    assert found[0].chosen_ids == found[2].chosen_ids
    assert found[0].num_tokens == len(found[0].prompt_ids) + len(found[0].chosen_ids)
    matched = with_partners(found, 64)
    assert [one.kl_ids for one in matched] == [
        found[1].rejected_ids,
        found[2].chosen_ids,
        found[0].chosen_ids,  # not the other completion of its own prompt
        found[0].chosen_ids,
    ]
    assert len(with_partners(found, len(found[0].prompt_ids) + 2)[0].kl_ids) == 2
    with pytest.raises(UserError, match="expected 2 prompts or more"):
        with_partners(found[2:], 64)
    bad = {"prompt": "1+1=", "completion": "2", "label": "good"}
    with pytest.raises(UserError, match="'label' is 'good', expected true"):
        read_pairs(write(tmp_path / "q.jsonl", bad), policy, 0, singly=True)
    with pytest.raises(UserError, match="no 'chosen'"):
        read_pairs(write(tmp_path / "q.jsonl", rows[0]), policy, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "no 'rejected'"),
        ({**GOOD, "margin": "much"}, "'margin' is not a finite number"),
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
