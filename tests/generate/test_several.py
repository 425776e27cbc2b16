"""Several adapters beside one base: a row has the bits that it has with its adapter alone."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from needs import needs

import whet
from whet.generate.engine import Request
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.rows import Completion, Rows
from whet.generate.sampling import SamplingParams
from whet.model.config import ModelConfig
from whet.model.lora.files import named_adapters
from whet.model.lora.side import LoRAConfig
from whet.model.lora.trained import Base, Trained
from whet.recipes.models import demo_policy
from whet.serve.api import Api, make_app
from whet.serve.scheduler import Scheduler
from whet.serve.stream import ResponseText
from whet.types import UserError

KINDS = {
    "math": LoRAConfig(rank=3, targets=("q_proj", "down_proj")),
    "code": LoRAConfig(rank=16),
    "prose": LoRAConfig(rank=20, layers="1"),
}
PROMPTS = ("1+2=?", "13+29=?", "7*8=?")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base and three adapters, one of them DoRA in another folder."""
    folder = tmp_path_factory.mktemp("several")
    shape = ModelConfig(
        hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32
    )
    shape = replace(shape, max_positions=64, init_std=0.3)
    load_policy(replace(demo_policy(), model=shape), seed=0).save(folder / "base")
    for seed, (name, lora) in enumerate((KINDS | {"dora": LoRAConfig(rank=4, dora=True)}).items()):
        write_adapter(folder / "base", folder / name, lora, seed)
    return folder


def write_adapter(base: Path, folder: Path, lora: LoRAConfig, seed: int) -> None:
    policy = load_policy(PolicyConfig(init=str(base)), seed=0)
    trained = Trained(policy.model, lora, base=Base.of(str(base), base), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0, 0.3, generator=generator)
    trained.write(folder)
    policy.save_protocol(folder)


def load(home: Path, names: str, dtype: torch.dtype = torch.float32, **settings: object) -> Policy:
    text = ",".join(f"{name}={home / name}" for name in names.split())
    config = PolicyConfig(init=str(home / "base"), adapter=text, **settings)
    return load_policy(config, seed=0, dtype=dtype, several=True)


def alone(home: Path, name: str, dtype: torch.dtype, **settings: object) -> Policy:
    adapter = str(home / name) if name else ""
    config = PolicyConfig(init=str(home / "base"), adapter=adapter, **settings)
    return load_policy(config, seed=0, dtype=dtype)


def draw(policy: Policy, names: list[str], *, named: bool) -> list[list[Completion]]:
    ids = [policy.chat_ids([{"role": "user", "content": text}]) for text in PROMPTS]
    requests = [
        Request(prompt_ids=own, seeds=(1, 2), adapter=name if named else "") for name in names for own in ids
    ]
    return policy.engine(stops=False).generate(requests, SamplingParams(max_new_tokens=9))


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("dtype", "threads", "quantize", "last"),
    [
        (torch.float32, 2, "none", "prose"),
        (torch.bfloat16, 1, "none", "prose"),
        (torch.float32, 1, "nf4", "prose"),
        (torch.float32, 1, "none", "dora"),
    ],
)
@pytest.mark.usefixtures("either")
def test_a_row_of_a_mixed_batch_has_the_bits_of_its_adapter_alone(
    home: Path, dtype: torch.dtype, threads: int, quantize: str, last: str
) -> None:
    torch.set_num_threads(threads)
    names = ["math", "", "code", last]
    mixed = load(home, f"math code {last}", dtype, quantize=quantize)
    # More jobs than rows: the same prompts come with other adapters, rows join and leave a running batch.
    mixed.max_rows = 10
    drawn = draw(mixed, names, named=True)
    wanted = [draw(alone(home, name, dtype, quantize=quantize), [name], named=False) for name in names]
    assert drawn == [row for rows in wanted for row in rows]
    texts = {tuple(done.ids for done in row) for row in drawn}
    assert len(texts) == len(names) * len(PROMPTS), "each adapter writes something of its own"


@needs("kernels")
def test_the_compiled_step_knows_several_adapters(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(home, "math code")
    monkeypatch.setattr(
        type(policy.model), "forward", None
    )  # what the compiled step calls instead is not this
    assert len(draw(policy, ["math", "code"], named=True)) == 6


def test_taken_off_the_base_is_left_and_each_is_asked_in_its_own_way(home: Path, tmp_path: Path) -> None:
    for name in ("base", "math", "code"):
        shutil.copytree(home / name, tmp_path / name)
    protocol = json.loads((tmp_path / "math" / "protocol.json").read_text())
    protocol["schema"]["instruction"] = " Think twice."
    (tmp_path / "math" / "protocol.json").write_text(json.dumps(protocol))
    policy = load(tmp_path, "math code")
    assert policy.named("math").schema.instruction == " Think twice."
    assert policy.named("code").schema == policy.named("").schema == policy.schema
    assert policy.several is not None
    ids = torch.tensor([policy.chat_ids([{"role": "user", "content": "1+2=?"}])])
    with torch.no_grad():
        mixed = policy.model.logits(ids)
        with policy.several.all_rows("math"):
            math = policy.model.logits(ids)
        policy.several.remove()
        base = alone(tmp_path, "", torch.float32).model.logits(ids)
    assert torch.equal(mixed, base)
    assert torch.equal(policy.model.logits(ids), base)
    assert not torch.equal(math, base)


def test_names_come_from_the_folders_or_are_given() -> None:
    assert named_adapters("runs/a, owner/b") == {"a": "runs/a", "b": "owner/b"}
    assert named_adapters("math=runs/a,runs/code") == {"math": "runs/a", "code": "runs/code"}
    assert named_adapters("") == {}


def spoil(folder: Path, name: str) -> None:
    """Make an adapter of another base."""
    path = folder / "code" / "base.json"
    facts = json.loads(path.read_text())
    if name == "hash":
        facts["sha256"] = "0" * 64
    if name == "rounding":
        facts["quantize"] = "nf4"
    path.write_text(json.dumps(facts))
    if name == "name":
        path.unlink()
        config = json.loads((folder / "code" / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "someone/else"
        (folder / "code" / "adapter_config.json").write_text(json.dumps(config))


REFUSED = {
    "hash": "not trained on the same base: the files",
    "rounding": "policy.quantize was none and nf4",
    "name": "someone/else",
    "saved": "load it alone",
    "twice": "two adapters are called 'math'",
    "unknown": "no adapter 'chess' here; there are math, code",
    "elsewhere": "whet merge",
    "base": "is an adapter itself",
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:policy.init")
def test_what_cannot_stand_together_is_refused_in_one_line(case: str, home: Path, tmp_path: Path) -> None:
    for name in ("base", "math", "code"):
        shutil.copytree(home / name, tmp_path / name)
    if case in ("hash", "rounding", "name"):
        spoil(tmp_path, case)
    if case == "saved":
        lora = LoRAConfig(rank=3, modules_to_save=("model.norm",))
        write_adapter(tmp_path / "base", tmp_path / "whole", lora, 0)
        (tmp_path / "code").rename(tmp_path / "former")
        (tmp_path / "whole").rename(tmp_path / "code")
    with pytest.raises(UserError) as refusal:
        ask_for(case, tmp_path)
    assert REFUSED[case] in str(refusal.value)
    assert "\n" not in str(refusal.value)


def ask_for(case: str, folder: Path) -> None:
    both = f"{folder}/math,{folder}/code"
    if case == "twice":
        named_adapters(f"{folder}/math,{folder}/former/math")
    elif case == "elsewhere":
        load_policy(PolicyConfig(init=str(folder / "base"), adapter=both), seed=0)
    elif case == "base":
        load_policy(PolicyConfig(init=str(folder / "math"), adapter=both), seed=0, several=True)
    else:
        draw(load(folder, "math code"), ["chess"], named=True)


def test_the_server_takes_the_adapter_from_the_models_name(home: Path) -> None:
    """Requests for the base and two adapters run in one batch; each answers as it does when it is served alone."""
    testclient = pytest.importorskip("starlette.testclient")
    policy = load(home, "math code", max_rows=8)
    decoded: list[set[str]] = []
    with Scheduler(policy, context=60, max_waiting=20) as scheduler:
        watch(scheduler, decoded)
        app = make_app(
            Api(policy, scheduler, name="base", split_thinking=True), api_key="", hosts=frozenset()
        )
        with testclient.TestClient(app) as client, ThreadPoolExecutor(6) as threads:
            listed = client.get("/v1/models").json()["data"]
            assert [(card["id"], card.get("parent")) for card in listed] == [
                ("base", None),
                ("math", "base"),
                ("code", "base"),
            ]
            answers = {
                (name, seed): threads.submit(client.post, "/v1/chat/completions", json=body(name, seed))
                for name in ("base", "math", "code")
                for seed in (0, 1)
            }
            for (name, seed), answer in answers.items():
                got = answer.result().json()
                assert got["model"] == name
                assert got["choices"][0]["message"] == wanted_of(home, name, seed)
            refused = client.post("/v1/chat/completions", json=body("chess", 0))
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
            assert "'base', 'math', 'code'" in refused.json()["error"]["message"]
            text = {"prompt": "1+2=?", "echo": True, "max_tokens": 0, "logprobs": 0}
            scores = [
                client.post("/v1/completions", json={"model": name, **text}).json()["choices"][0]["logprobs"]
                for name in ("base", "math")
            ]
            assert scores[0]["token_logprobs"] != scores[1]["token_logprobs"]
    assert {"", "math", "code"} in decoded, "rows of different adapters are decoded in one step"
    with pytest.raises(UserError, match="--name"):
        Api(policy, scheduler, name="math", split_thinking=True)


def watch(scheduler: Scheduler, decoded: list[set[str]]) -> None:
    """Note whose rows each decoding step has; the first step waits until the others' have come."""
    engine = scheduler._engine  # pyright: ignore[reportPrivateUsage]
    decode = engine.decode

    def noted(state: Rows) -> None:
        decoded.append({job.request.adapter for job in state.jobs})
        if len(state.jobs) < 6 and not any(len(names) == 3 for names in decoded):
            time.sleep(0.02)
        decode(state)

    engine.decode = noted


def body(name: str, seed: int) -> dict[str, object]:
    messages = [{"role": "user", "content": "13+29=?"}]
    return {"model": name, "messages": messages, "seed": seed, "max_tokens": 30}


def wanted_of(home: Path, name: str, seed: int) -> dict[str, str | None]:
    """Return what the adapter alone answers."""
    policy = alone(home, "" if name == "base" else name, torch.float32)
    ids = policy.chat_ids([{"role": "user", "content": "13+29=?"}])
    request = Request(prompt_ids=ids, seeds=(seed,))
    (done,) = policy.engine().generate([request], SamplingParams(max_new_tokens=30))[0]
    piece = ResponseText(policy.schema).push(policy.completion_text(ids, done.ids), last=True)
    said = {"role": "assistant", "content": piece.answer, "refusal": None}
    return said | {"reasoning_content": piece.thinking}


def test_from_python_each_prompt_names_its_adapter(home: Path) -> None:
    policy = whet.load(home / "base", adapter={"sums": home / "math", "code": home / "code"})
    assert policy.adapters == ("sums", "code")
    mixed = policy.generate(list(PROMPTS), adapter=["sums", "", "code"], max_new_tokens=8)
    single = whet.load(home / "base", adapter=home / "math").generate(list(PROMPTS), max_new_tokens=8)
    assert mixed[0] == single[0]
    assert mixed[1] == whet.load(home / "base").generate(list(PROMPTS), max_new_tokens=8)[1]
    scores = [policy.logprobs("1+2=?", "3", adapter=name) for name in ("", "sums")]
    assert scores[1] == whet.load(home / "base", adapter=home / "math").logprobs("1+2=?", "3") != scores[0]
    with pytest.raises(UserError, match="3 prompts and 1 adapters"):
        policy.generate(list(PROMPTS), adapter=["sums"])
    assert whet.load(home / "base", adapter=[home / "math", home / "code"]).adapters == ("math", "code")
