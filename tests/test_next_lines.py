"""What a command prints as the next one is run as it stands: for each program, schema and kind of data."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import shlex
import signal
import typing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import seeing
import torch
from needs import program as found_program
from test_bring_your_own import CHATML, make_model, own_shape

import whet
from whet import __main__, cli
from whet.compress.export import export
from whet.config import groups, leaves
from whet.install import as_typed
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model, load_model, save_model
from whet.storage.checkpoint import saved_steps
from whet.storage.folder import next_line
from whet.train import sft
from whet.train.session import TrainStep
from whet.types import UserError

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
    "sevens": [{"question": f"{text} Say 7.", "answer": "7"} for text in QUESTIONS],
    "few": [{"question": f"{text} Say 7.", "answer": "7"} for text in QUESTIONS[:12]],
    "choice": [
        {"question": text, "choices": ["7", str(n + 8)], "answer": "A"} for n, text in enumerate(QUESTIONS)
    ],
    "yes_no": [{"question": f"{text} Some?", "answer": "yes"} for text in QUESTIONS],
    "code": [{"prompt": f"{text} Let f be 7.", "tests": ["assert f == 7"]} for text in QUESTIONS],
    "images": [{"question": text, "image": "seven.png", "answer": "7"} for text in QUESTIONS],
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
    "sft": FIT,
    "report": "",
    "chat": "",
    "eval": "--num-problems 2 --num-samples 1 --sampling.max-new-tokens 8",
    "audit": "--num-problems 3",
    "export": "--num-prompts 1",
    "serve": "--dry-run",
}
"""What the printed commands are made small with."""
TELLS: dict[str, str] = {
    "compress/export/export.py:next_steps": (
        "test_next_lines.py:test_the_next_lines_of_exports_answer_as_the_model"
    ),
    "compress/merge.py:merge": "test_next_lines.py:test_the_next_lines_of_other_programs_work_as_they_stand",
    "compress/merge.py:_merge_models": "test_next_lines.py:test_the_next_lines_of_other_programs_work_as_they_stand",
    "compress/quantize/quantize.py:main": (
        "test_next_lines.py:test_the_next_lines_of_other_programs_work_as_they_stand"
    ),
    "editing/edit.py:main": "editing/test_edit_program.py:test_the_next_lines_work_as_they_stand",
    "editing/steer.py:main": "test_next_lines.py:test_the_next_lines_of_other_programs_work_as_they_stand",
    "eval/evaluate.py:main": "test_next_lines.py:test_the_next_lines_of_other_programs_work_as_they_stand",
    "inspect/data/data.py:main": "test_next_lines.py:test_the_next_lines_of_other_programs_work_as_they_stand",
    "train/session.py:finish": "train/test_rft.py:test_a_finished_run_goes_on_for_more_rounds",
    "train/session.py:next_steps": "test_next_lines.py:test_the_next_lines_of_a_run_work_as_they_stand",
    "train/session.py:stop_if_asked": "test_next_lines.py:test_a_run_that_was_stopped_goes_on_with_its_line",
}
"""Each function that tells a person what to type next, and the test that runs what it tells."""


LONGER = RL.replace("max-new-tokens 8", "max-new-tokens 24")
SURE: dict[str, tuple[str, str]] = {
    "think_answer": (f"rl own --data sevens.jsonl {LONGER}", "so</think><answer>7</answer>"),
    "hashes": (f"rl own --data sevens.jsonl --policy.schema hashes {LONGER}", "so####7"),
    "step_by_step": (f"rl own --data sevens.jsonl --policy.schema step_by_step {LONGER}", "It's 7."),
    "anywhere": (f"rl own --data sevens.jsonl --policy.schema anywhere {LONGER}", "It's 7."),
    "choice": (f"rl own --task choice --data choice.jsonl --policy.schema boxed {LONGER}", "\\boxed{A}"),
    "yes_no": (f"rl own --task yes_no --data yes_no.jsonl --policy.schema none {LONGER}", "Yes."),
    "code": (
        f"rl own --task code --data code.jsonl --task.held-out 0.2 --policy.schema none {LONGER}",
        "f=7",
    ),
    "images": (f"rl own --data images.jsonl --policy.schema none {LONGER}", "7"),
    "mixture": (
        "rl own --task mixture --task.weights jsonl:a 1 choice 2 --task.paths.jsonl:a sevens.jsonl "
        f"--task.paths.choice choice.jsonl --policy.schema none {LONGER}",
        "7",
    ),
    "few": (f"rl own --data few.jsonl --policy.schema none {LONGER}", "7"),
    "rft": (
        "rft demo --data sevens.jsonl --rounds 1 --steps-per-round 1 --num-samples 1 --batch-size 2 "
        "--optim.warmup-steps 0 --sampling.max-new-tokens 24",
        "so</think><answer>7</answer>",
    ),
}
"""Runs of a model that answers every question right, and its answer: what is measured of it has to be 100 %."""


def make_sure(folder: Path, text: str, *, sees: bool = False) -> None:
    """Write a model whose every reply is one text without repeated tokens: of each it knows the next."""
    tags = [*re.findall(r"</?\w+>|####", text), "<think>", "<image>", "<|im_start|>", "<|im_end|>"]
    roles = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    tokens = Tokenizer(Tokenizer.bytes(tags)._backend, roles=roles, chat_template=CHATML)
    if sees:
        seeing.save_model(folder, tokenizer=tokens, max_positions=512, tied=False)
        model, _ = load_model(folder)
    else:
        model = build_model(own_shape(tokens, hidden_size=128, tie_embeddings=False))
        init_weights(model, 0)
    begins, *chain = [tokens.encode(each)[0] for each in ("\n", *re.findall(r"</?\w+>|####|.", text))]
    chain.append(tokens.encode("<|im_end|>")[0])
    with torch.no_grad():
        for name, weight in model.named_parameters():  # layers add next to nothing
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= 1e-3
        rows = model.get_parameter("model.embed_tokens.weight")
        rows /= rows.norm(dim=1, keepdim=True)
        model.head_weight.zero_()
        for before, after in [(begins, chain[0]), *pairwise(chain), (tokens.encode("<think>")[0], chain[0])]:
            model.head_weight[after] += 9 * rows[before]
    tokens.save(folder)
    save_model(model, folder, bos_id=None, eos_ids=tuple(tokens.stop_ids))


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
    """Return the commands that a command printed as the next ones, and the one that gives a run more steps."""
    (line,) = re.findall(r"^next: .*(?:\n      .*)*", out, re.MULTILINE)
    more = [line.removeprefix("more steps: ") for line in out.splitlines() if line.startswith("more steps: ")]
    return [*line.removeprefix("next: ").split("\n      "), *more]


def small(line: str) -> str:
    """Make a printed command small."""
    kind = line.split()[1]
    if "--resume" in line:
        return line
    more = SMALL["compare --prompts" if kind == "compare" and "--prompts" in line else kind]
    limit = "--eval.sampling.max-new-tokens"
    if limit in line:  # the run's own, which is small
        more = re.sub(rf"{limit} \d+ ?", "", more)
    return f"{line} {more}"


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
        out = said(capsys, small(line))
        for again in next_lines(out) if line.startswith("whet rl own") else []:  # by the reward model
            said(capsys, small(again))


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", SURE)
def test_the_next_lines_measure_what_a_run_was_trained_on(
    case: str, at_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, text = SURE[case]
    make_sure(at_home / "sure", text, sees=case == "images")
    (at_home / "seven.png").write_bytes(seeing.png(seeing.uri(7)))
    lines = next_lines(said(capsys, f"whet {begun} --model sure --out run"))
    kinds = {shlex.split(line)[1]: line for line in lines if "--resume" not in line}
    assert list(kinds) == ["chat", "report", "compare"]
    for line in lines:
        monkeypatch.setattr("sys.stdin", io.StringIO("How many?\n"))
        out = said(capsys, small(line))
        if line == kinds["chat"]:
            *_, answer = filter(None, re.split(r"<[^>]*>|####", text))
            assert answer in out, out
        if line == kinds["compare"] and "--prompts" not in line:
            assert re.search(r"^ pass@1 +100\.0 +100\.0 ", out, re.MULTILINE), out
            assert out.count("\ntruncated 0.0 %\n") == 2
    assert ("--prompts" in kinds["compare"]) == (case == "few")


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_the_next_lines_of_exports_answer_as_the_model(
    at_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sure(at_home / "sure", "It's 7.")
    said(
        capsys, f"whet sft own --data chats.jsonl {FIT} --lora.rank 2 --optim.lr 2e-5 --model sure --out run"
    )
    for kind in get_args(export.Kind):
        model = "run" if kind in ("merged", "adapter") else "sure"
        out = said(capsys, f"whet export {model} --to {kind} --out 'my {kind}' --num-prompts 1")
        asked = []
        for line in next_lines(out):
            words = shlex.split(line, comments=True)
            if words[0] != "whet":  # another program, which a machine may have
                assert found_program(words[0]) or line.endswith(f"   # {words[0]} is not installed here")
                continue
            monkeypatch.setattr("sys.stdin", io.StringIO("How many?\n"))
            out = said(capsys, small(line))
            asked.append(words[1])
            assert words[1] == "serve" or "It's 7." in out
        assert asked == (["chat"] if kind in ("gguf", "ollama") else ["serve"])


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "begun",
    [
        "eval own --model model --data rows.jsonl --num-problems 2 --num-samples 1 --sampling.max-new-tokens 8 "
        "--out 'my out'",
        f"sft own --model model --data solved.jsonl {FIT} {LORA} --out a && merge a a --out 'my out'",
        f"sft own --model model --data solved.jsonl {FIT} --out a && merge a --base model --out 'my out'",
        "quantize model --data solved.jsonl --budget 6bits --num-calibration 4 --num-held-out 4 --num-problems 1 "
        "--num-samples 1 --methods rtn --sampling.max-new-tokens 8 --out 'my out'",
        "steer model --pairs poles.jsonl --out 'my out'",
        f"data named.jsonl {NAMED} --out 'my out'",
        f"data named.jsonl --model model {NAMED} --out 'my out'",
        *(f"data {kind}.jsonl --model model --out 'my out'" for kind in ("chats", "texts")),
    ],
)
def test_the_next_lines_of_other_programs_work_as_they_stand(
    begun: str, at_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    poles = [{"positive": f"Good day {n}.", "negative": f"Bad day {n}."} for n in range(12)]
    (at_home / "poles.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in poles))
    *_, out = [said(capsys, f"whet {line}") for line in begun.split(" && ")]
    for line in next_lines(out):
        said(capsys, small(line))


@pytest.mark.ci
def test_a_run_that_was_stopped_goes_on_with_its_line(
    at_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(step: TrainStep) -> None:
        if step.step == 1:
            signal.raise_signal(signal.SIGINT)

    fit = FIT.replace("--num-steps 1", "--num-steps 3")
    words = shlex.split(f"sft own --model model --data solved.jsonl {fit} --out 'my out'")
    with monkeypatch.context() as patch:
        patch.setattr("whet.train.sft.train", partial(sft.train, on_step=stop))
        assert __main__.main(words) == 130
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "go on with: " in line)
    assert line.endswith("; go on with: whet sft 'my out' --resume")
    said(capsys, line.partition("go on with: ")[2])
    assert saved_steps(at_home / "my out")[-1] == 3


@pytest.mark.ci
def test_every_line_to_type_is_run_by_a_test() -> None:
    """And has no words in it that stand for something."""
    root, found = Path(whet.__file__).parent, set[str]()
    for path in root.rglob("*.py"):
        if path.name == "folder.py":  # where such a line is put together
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            inside = list(ast.walk(node))
            texts = [
                one.value for one in inside if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            calls = [
                one for one in inside if isinstance(one, ast.Call) and ast.unparse(one.func) == "next_line"
            ]
            if calls or any(re.search(r"^(next|more steps): |go on with: ", text) for text in texts):
                found.add(f"{path.relative_to(root)}:{node.name}")
                for told in [ast.unparse(call) for call in calls]:
                    assert not re.search(r"\b[A-Z][A-Z_]{2,}\b|\.\.\.", told), told
    assert found == TELLS.keys()
    tests = Path(__file__).parent
    for place in set(TELLS.values()):
        file, _, name = place.partition(":")
        assert f"def {name}(" in (tests / file).read_text(encoding="utf-8"), place


STANDS_FOR = {
    **dict.fromkeys(("RUN", "MODEL", "OTHER", "FOLDER", "FILE", "A", "B", "NAME", "KEY", "N"), "name"),
    "'A QUESTION'": "'Who are you?'",
    "TEXT": "text",
    "OWNER/NAME": "me/name",
    "FILE|HUB_NAME": "rows.jsonl",
    "sft|dpo|rl|eval": "sft",
    "{option}": "--policy.steering calm=1",  # of the expressions in messages
    "{check}": "kernels",
    "{self._name}": "wandb",
    "{' '.join(names.values())[:160]}": "me/a me/b",
}
"""What stands in messages for the user's own words, and a word of a user."""
PROSE = "only|below|tries|takes|one|name|goes|starts|and|or|needs|has|is|in|to|makes|ended|pushes|alone|gives|trains"
"""Words of a message behind an option that are no value of it."""
OTHERS = {
    "__main__.py": "--max-restarts --field --completion --version",  # of torchrun; whet's own
    "cli.py": "--field --group.field --flag --no-flag --set --program --against --recipe",  # examples, and gone
    "compress/export/export.py": "--model --prompt",  # of mlx_lm.generate
    "eval/audit/audit.py": "--preflight",  # of whet rl, whose preflight it is
    "generate/backends/dialects.py": "--enable-lora --max-lora-rank --lora-target-modules",  # of vLLM, SGLang
    "generate/backends/vllm.py": "--served-model-name",
    "generate/probe.py": "--logprobs-mode",
    "inspect/profile/profile.py": (  # of Nsight
        "--sample --cpuctxsw --capture-range --nvtx --clock-control --profile-from-start --launch-count --trace "
        "--capture-range-end --force-overwrite"
    ),
    "kernels/cpu/toolchain.py": "--version",  # of the compiler
    "model/files.py": "--no-deps",  # of pip
    "model/gguf.py": "--merge",  # of llama-gguf-split
    "telemetry/provenance.py": "--untracked-files",  # of git
    "sandbox/launch.py": "--unshare-",  # of bubblewrap
    "serve/hub.py": "--policy.init",  # of all that read what was pulled
}
"""Options in a file's messages that belong to another program, or to all of whet's."""


def messages(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the texts of a file but for its docstrings, with their lines; what is put into them is `{...}`."""
    nodes = list(ast.walk(tree))
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    inside |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = []
    for node in nodes:
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (
                str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"  # type: ignore[attr-defined]
                for part in node.values
            )
            found.append((node.lineno, "".join(parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, node.value))
    return found


VALUE = rf"(?!(?:{PROSE})\b)(?:'[^']*'|\{{[^}}]*\}}|[^\s,;()`'\"{{}}-][^\s,;()`'\"{{}}]*)"
WORD = (
    rf"--[a-z][\w.-]*(?: {VALUE})?|'[^']*'|\{{[^}}]*\}}|[\w.-]+/[\w./-]*\w|[A-Z][A-Z_/|]*(?![\w.])|own|hang"
)


def lines_to_type(text: str) -> list[str]:
    """Return the command lines in a text, those that are more than a program's name, with words for what varies."""
    for word, stands in STANDS_FOR.items():
        text = re.sub(rf"(?<![\w/|]){re.escape(word)}(?![\w/|])", stands, text)
    text = re.sub(r"\{[^}]*\}", "name", text)
    programs = "|".join(__main__.COMMANDS)
    found = []
    for match in re.finditer(rf"(?<![\w-])whet (?:{programs})(?![\w-])", text):
        mark, rest = text[: match.start()][-1:], text[match.end() :]
        if mark and mark in "'`\"":
            rest = rest.partition(mark)[0]
        else:  # as far as options, or what stands for something, show that it is no prose
            told = re.match(rf"(?: (?:{WORD}|name|me/name))*", rest)
            rest = told[0] if told else ""
        line = f"{match[0]}{rest}".rstrip(" .")
        if len(shlex.split(line)) > 2:
            found.append(line)
    return found


def parsed(line: str) -> str:
    """Return '' where the command line's own parser takes a line, else what it says."""
    _, name, *words = shlex.split(line)
    program = __main__.COMMANDS[name].load()
    try:
        cli.parse(
            f"whet {name}",
            program.config_class,
            program.recipes,
            words,
            resumable=program.resumable,
            has_steps=program.shared,
            presets=program.presets,
            positional=program.positional,
            passes=program.passes,
        )
    except (UserError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.ci
def test_lines_in_messages_are_taken_by_the_command_line() -> None:
    root = Path(whet.__file__).parent
    found: dict[str, str] = {}
    for path in root.rglob("*.py"):
        for number, text in messages(ast.parse(path.read_text(encoding="utf-8"))):
            found |= {line: f"{path.relative_to(root)}:{number}" for line in lines_to_type(text)}
    assert len(found) > 20
    told = {f"{place}: {line}": parsed(line) for line, place in found.items()}
    # What a program can do is said without a model.
    assert not {line: said for line, said in told.items() if said and ": no model: " not in said}


@pytest.mark.ci
def test_options_in_messages_are_options() -> None:
    """Those of a program's own file are its own; the others some program's; values are choices that there are."""
    programs = {name: command.load() for name, command in __main__.COMMANDS.items()}
    options: dict[str, dict[str, Any]] = {}
    for name, program in programs.items():
        known: dict[str, Any] = {"--dry-run": bool, "--print-config": bool, "--help": bool}
        known |= {"--resume": bool} if program.resumable else {}
        known |= {"--restarts": int} if program.shared else {}
        for config in (program.config_class, *program.passes.values()):
            fields = leaves(config)
            known |= {cli._flag(place): hint for place, hint in fields.items()}
            known |= {cli._flag(place): str for place in groups(config)}
            for short, places in cli.SHORT.items():
                known |= dict([(short, fields[place]) for place in places if place in fields][:1])
            for place, hint in fields.items():  # as a program with a group of its own spells it
                if place.startswith("eval."):
                    known.setdefault(cli._flag(place.removeprefix("eval.")), hint)
        options[name] = known
    own: dict[str, list[str]] = {}
    for name, program in programs.items():
        own.setdefault(inspect.getfile(inspect.unwrap(program.main)), []).append(name)
    root, wrong = Path(whet.__file__).parent, []
    for path in root.rglob("*.py"):
        others = OTHERS.get(str(path.relative_to(root)), "").split()
        for number, text in messages(ast.parse(path.read_text(encoding="utf-8"))):
            names = own.get(str(path), list(programs))
            if not re.search(r"[^\w.-]", text):  # a word that a program hands on
                continue
            if re.search(rf"whet (?!(?:{'|'.join(names)})\b)(?:{'|'.join(programs)})\b", text):
                names = list(programs)
            some = [options[name] for name in names]
            for option, value in re.findall(
                rf"(?<![\w\-<!])(--[a-z][\w-]*(?:\.[\w-]+)*)(?:[ =]({VALUE}))?", text
            ):
                kinds = [known[option] for known in some if option in known]
                choices = [get_args(kind) for kind in kinds if get_origin(kind) is typing.Literal]
                if option not in others and (
                    not kinds
                    or (
                        len(choices) == len(kinds)
                        and re.fullmatch(r"[a-z]\w*", value)
                        and not any(value in each for each in choices)
                    )
                ):
                    wrong.append(f"{path.relative_to(root)}:{number}: {option} {value}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.ci
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


def test_a_command_is_printed_by_its_path_where_the_shell_does_not_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "my env" / "bin" / "whet"
    program.parent.mkdir(parents=True)
    monkeypatch.setattr("sys.executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", "/usr/bin")
    assert as_typed("chat", "a b") == f"'{program.with_name('python')}' -m whet chat 'a b'"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert as_typed("chat", "a b") == f"'{program}' chat 'a b'"
    monkeypatch.chdir(program.parent)
    assert as_typed("report") == f"'{program}' report"
    monkeypatch.chdir(tmp_path)
    assert (
        next_line("whet report x", "ollama run x") == "next: 'my env/bin/whet' report x\n      ollama run x"
    )
    monkeypatch.setenv("PATH", str(program.parent))
    assert next_line(["whet", "report", "x"]) == "next: whet report x"
