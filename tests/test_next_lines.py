"""What a command prints as the next one is run as it stands: for each program, schema and kind of data."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from test_bring_your_own import make_model

from whet import __main__

QUESTIONS = [f"Tom has {a} apples and buys {b}. How many?" for a in range(1, 9) for b in range(1, 6)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "rows": [{"question": text, "answer": str(n)} for n, text in enumerate(QUESTIONS)],
    "named": [{"frage": text, "antwort": str(n)} for n, text in enumerate(QUESTIONS)]
    + [{"frage": "", "antwort": "1"}],
    "solved": [
        {"question": text, "solution": "We add.", "answer": str(n)} for n, text in enumerate(QUESTIONS)
    ],
    "chats": [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Some."}]}
        for text in QUESTIONS
    ],
    "texts": [{"text": text} for text in QUESTIONS],
    "pairs": [{"prompt": text, "chosen": "Some.", "rejected": "Who knows?"} for text in QUESTIONS],
}
SHORT = "--optim.warmup-steps 0 --num-steps 1 "
RL = f"{SHORT} --num-prompts 2 --group-size 2 --sampling.max-new-tokens 8"
FIT = f"{SHORT} --batch-size 2"
LORA = "--lora.rank 2 --optim.lr 1e-3"
NAMED = "--task.prompt frage --task.answer antwort --task.max-bad-rows 1"
SMALL = {
    "compare": "--eval.num-problems 2 --eval.num-samples 1 --eval.sampling.max-new-tokens 8",
    "compare --prompts": "--prompt-samples 1 --sampling.max-new-tokens 8",
    "rl": RL,
    "report": "",
    "chat": "",
}
"""What the printed commands are made small with."""


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None) -> Path:
    """A folder with a model and every kind of data."""
    make_model(tmp_path / "model")
    for name, rows in ROWS.items():
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "pay.py").write_text("def pay(problem, completion):\n    return len(set(completion)) / 9\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """Run a command line that has to end well; return what it printed."""
    status = __main__.main(shlex.split(line)[1:])
    out = capsys.readouterr()
    assert status == 0, f"{line}\n{out.out[-1000:]}{out.err}"
    return out.out


def next_lines(out: str) -> list[str]:
    """Return the commands that a command printed as the next ones."""
    (line,) = (line for line in out.splitlines() if line.startswith("next: "))
    return line.removeprefix("next: ").split(" | ")


def small(line: str) -> str:
    """Make a printed command small."""
    kind = line.split()[1]
    return f"{line} {SMALL['compare --prompts' if kind == 'compare' and '--prompts' in line else kind]}"


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "begun",
    [
        *(f"rl own --data rows.jsonl --policy.schema {schema} {RL}" for schema in ("boxed", "none", "r1")),
        f"rl own --data pairs.jsonl --rewards format 0.1 --reward pay.py:pay {RL} {LORA} "
        "--policy.template base --policy.system-prompt none",
        f"rl own --data named.jsonl {NAMED} --policy.tags-as-tokens {RL}",
        *(f"sft own --data {name}.jsonl {FIT}" for name in ("solved", "chats", "texts")),
        f"sft own --data named.jsonl {NAMED} --policy.schema hashes {FIT} {LORA}",
        f"dpo own --data pairs.jsonl {FIT}",
        f"dpo own --data pairs.jsonl --loss reward {FIT}",
    ],
)
def test_the_next_lines_of_a_run_work_as_they_stand(
    begun: str, at_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = next_lines(said(capsys, f"whet {begun} --model model --out run"))
    assert any(
        line.startswith(("whet compare model run", "whet rl own --reward-model run")) for line in lines
    )
    for line in lines:
        more = next_lines(out) if "next: " in (out := said(capsys, small(line))) else []
        for again in more:  # of an RL run by the reward model
            said(capsys, small(again))


@pytest.mark.parametrize("option", ["", "--eval.policy.schema boxed"])
def test_what_cannot_be_compared_is_refused_before_anything_is_sampled(
    option: str, at_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that were trained to different schemas are asked as each was, unless one schema is given to all."""
    for name, schema in (("a", "boxed"), ("b", "hashes")):
        said(
            capsys, f"whet rl own --model model --data rows.jsonl --policy.schema {schema} {RL} --out {name}"
        )
    with monkeypatch.context() as patch:
        if not option:
            patch.setattr("whet.eval.evaluate.evaluate", lambda *_, **__: pytest.fail("sampled"))
        line = f"compare a b --task jsonl --data rows.jsonl --out both {option} {SMALL['compare']}"
        status = __main__.main(line.split())
    err = capsys.readouterr().err
    assert status == (0 if option else 2), err
    if not option:
        assert "not comparable: protocol.schema.answer_place" in err
        assert "--eval.policy.schema" in err
        assert not (at_home / "both").exists()


def test_a_run_that_is_resumed_elsewhere_says_where_its_paths_begin(
    at_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said(capsys, f"whet sft own --model {at_home}/model --data solved.jsonl {FIT} --out run")
    (at_home / "deeper").mkdir()
    monkeypatch.chdir(at_home / "deeper")
    assert __main__.main(["sft", "../run", "--resume", "--num-steps", "2"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"the run was started in {at_home}, where its paths begin: cd there" in err
