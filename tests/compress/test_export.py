"""`whet export`: what is written is what was trained, and a report that fails where it is not."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeing
import tokenizers
import torch
from needs import SHARED, needs, require
from safetensors.torch import load_file, save_file

from whet.compress.export import export as program
from whet.compress.export import gguf, importance, parity, runtimes
from whet.compress.export import vocabulary as vocabulary_module
from whet.compress.export.export import ExportConfig, export, main, next_steps
from whet.compress.export.kquants import K_TYPES, k_type
from whet.compress.export.ollama import ollama_writes, read_modelfile
from whet.compress.export.prompt import go_template, modelfile, unlike_ollama, whole_template
from whet.compress.export.vocabulary import CONTROL, USER_DEFINED, Vocabulary, express
from whet.generate.policy import Policy, PolicyConfig, load_policy, own_sampling
from whet.model.config import ModelConfig, RopeScaling
from whet.model.families import from_hf
from whet.model.gguf import read_back
from whet.model.quant import packed_parts
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model
from whet.schema import SCHEMAS
from whet.tasks.base import TaskConfig, load_task
from whet.types import UserError

STORIES = SHARED / "data/models/stories260k"
needs_gguf = needs("gguf")
needs_llama = needs("xllamacpp", "gguf")  # bench/export_parity.py makes the whole table
needs_mlx = needs("mlx", "mlx_lm")
SHAPE = ModelConfig(
    vocab_size=258,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=512,
    init_std=0.2,
    rope_scaling=RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
    ),
)


def make(config: ModelConfig = SHAPE, schema: str = "think_answer") -> Policy:
    """Make a random policy on bytes, with some rows that are no token's."""
    model = build_model(config)
    init_weights(model, 0)
    return Policy(model.eval(), Tokenizer.bytes(), SCHEMAS[schema])


quiet_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    place = tmp_path_factory.mktemp("export") / "model"
    make().save(place)
    return place


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer requests in this process: the runtimes are real, and starting one takes seconds."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        runtimes.answer(Path(command[-1]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(parity.processes, "run", run)


def config(folder: Path, out: Path, to: str, **more: Any) -> ExportConfig:
    policy = PolicyConfig(init=str(folder), device="cpu", **more.pop("policy", {}))
    return ExportConfig(policy=policy, out=str(out), to=to, num_prompts=3, max_new_tokens=6, **more)  # pyright: ignore


def adapter(place: Path, base: Path, scale: float = 0.1, width: int = 32) -> Path:
    """Write an adapter of rank 2 on q_proj of a base, as peft does."""
    place.mkdir()
    tensors = {}
    generator = torch.Generator().manual_seed(1)
    for layer in range(2):
        for side, shape in (("A", (2, width)), ("B", (32, 2))):
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight"
            tensors[name] = torch.empty(shape).normal_(0, scale, generator=generator)
    save_file(tensors, place / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    facts |= {"base_model_name_or_path": str(base), "task_type": "CAUSAL_LM"}
    (place / "adapter_config.json").write_text(json.dumps(facts))
    return place


@pytest.mark.ci
def test_hf_answers_as_the_model_and_its_template_asks_as_whet_does(folder: Path, tmp_path: Path) -> None:
    report = export(config(folder, tmp_path / "out", "hf", dtype="f32"))
    assert report["verdict"] == "passed"
    assert report["runtime"]["prompts_equal"] == 1.0
    assert report["kl"] < 1e-9
    assert report["top1_agreement"] == report["greedy_equal"] == 1.0
    assert json.loads((tmp_path / "out" / program.REPORT).read_text())["kl"] == report["kl"]
    # whet reads the folder as before: the whole template is for others.
    again = export(config(tmp_path / "out", tmp_path / "again", "hf", dtype="f32"))
    first, second = ((tmp_path / name / "chat_template.jinja").read_text() for name in ("out", "again"))
    assert again["verdict"] == "passed"
    assert first == second


@pytest.mark.ci
def test_what_answers_otherwise_fails_with_status_1(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "whole_template", lambda policy: policy.tokenizer.chat_template)
    with pytest.raises(SystemExit) as ended:
        main(config(folder, tmp_path / "template", "hf", dtype="f32"))
    assert ended.value.code == 1
    assert "its template or tokenizer asks otherwise" in capsys.readouterr().out
    monkeypatch.undo()
    save = Policy.save

    def spoiled(self: Policy, place: Path, **more: Any) -> None:
        save(self, place, **more)
        tensors = load_file(place / "model.safetensors")
        tensors["model.norm.weight"][0] += 0.5
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(Policy, "save", spoiled)
    report = export(config(folder, tmp_path / "weights", "hf", dtype="f32"))
    assert report["verdict"] == "failed"
    assert any("KL" in line for line in report["failures"])


CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<s>You help.</s>{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_model(place: Path, template: str | None = CHATML, *, rows: int = SHAPE.vocab_size) -> Path:
    """Write a chat model as a hub has it: nothing in it knows of whet."""
    policy = make(replace(SHAPE, vocab_size=rows), schema="none")
    policy.tokenizer = policy.tokenizer.with_template(template)
    policy.save(place)
    (place / "protocol.json").unlink()
    return place


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "to", ["hf", pytest.param("gguf", marks=needs_gguf), pytest.param("ollama", marks=needs_gguf)]
)
def test_a_chat_model_leaves_with_the_template_that_it_had(to: str, tmp_path: Path) -> None:
    source, out = chat_model(tmp_path / "model"), tmp_path / "out"
    report = export(config(source, out, to, dtype="f32"))
    assert report["verdict"] != "failed", report["failures"]
    if to == "hf":
        assert (out / "chat_template.jinja").read_text() == CHATML
        return
    import gguf as package

    reader = package.GGUFReader(str(out / "model.gguf"))
    assert reader.get_field("tokenizer.chat_template").contents() == CHATML
    if to == "ollama":
        read = read_modelfile((out / "Modelfile").read_text())
        template, stops = dict(read)["TEMPLATE"], [value for name, value in read if name == "stop"]
        assert "SYSTEM" not in dict(read)
        assert stops == ["<eos>"]
        talk = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        for chat in (talk[:1], talk, [{"role": "system", "content": "Be brief."}, *talk]):
            assert ollama_writes(template, chat) == Tokenizer.load(source).render(chat)


@needs_gguf
@pytest.mark.parametrize(
    ("stored", "written", "ollama"),
    [
        ({}, {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0}, (0.7, 0.95, 0, 1)),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}, (0.6, 1, 20, 1)),
        (
            {"do_sample": False, "repetition_penalty": 1.1},
            {"do_sample": False, "repetition_penalty": 1.1},
            (0, 1, 0, 1.1),
        ),
    ],
)
def test_other_programs_sample_what_was_exported_as_whet_chats_with_it(
    stored: dict[str, Any], written: dict[str, Any], ollama: tuple[float, ...], tmp_path: Path
) -> None:
    """Where the model's makers say nothing, whet's own sampling of chats is written; checkpoints say nothing."""
    source = chat_model(tmp_path / "model")
    ids = json.loads((source / "generation_config.json").read_text())
    assert set(ids) == {"bos_token_id", "eos_token_id"}
    (source / "generation_config.json").write_text(json.dumps(ids | stored))
    chat = own_sampling(load_policy(PolicyConfig(init=str(source)), seed=0, plain=True))
    for to in ("hf", "ollama"):
        export(config(source, tmp_path / to, to, dtype="f32"))
    folder = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert folder == ids | written
    assert own_sampling(load_policy(PolicyConfig(init=str(tmp_path / "hf")), seed=0, plain=True)) == chat
    names = ("temperature", "top_p", "top_k", "repeat_penalty")
    read = dict(read_modelfile((tmp_path / "ollama/Modelfile").read_text()))
    assert tuple(float(read[name]) for name in names) == ollama
    assert (chat.temperature, chat.top_p, chat.top_k) == ollama[:3]


@quiet_peft
def test_a_run_on_chats_leaves_as_one_and_an_adapter_of_it(tmp_path: Path) -> None:
    plain = load_policy(PolicyConfig(init=str(chat_model(tmp_path / "model"))), seed=0, plain=True)
    plain.save(tmp_path / "run")  # as `whet sft own` on chats does: protocol.json names no schema
    assert (tmp_path / "run/protocol.json").is_file()
    export(config(tmp_path / "run", tmp_path / "out", "hf", dtype="f32"))
    place = adapter(tmp_path / "lora", tmp_path / "run")
    export(config(place, tmp_path / "peft", "adapter"))
    for name in ("out", "peft"):
        assert (tmp_path / name / "chat_template.jinja").read_text() == CHATML
        assert json.loads((tmp_path / name / program.REPORT).read_text())["runtime"]["prompts_equal"] == 1.0


def test_a_base_model_leaves_without_a_template(tmp_path: Path) -> None:
    source = chat_model(tmp_path / "model", None)
    assert not (source / "chat_template.jinja").exists()
    report = export(config(source, tmp_path / "out", "hf", dtype="f32"))
    assert report["verdict"] == "passed", report["failures"]
    assert not (tmp_path / "out/chat_template.jinja").exists()
    assert modelfile(make(), "m", 8, {}, has_template=False)[0].startswith(
        'FROM ./m\nTEMPLATE """{{ .Prompt }}"""'
    )


def test_a_template_that_whet_would_change_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def own_schema(settings: PolicyConfig, **options: Any) -> Policy:
        return load_policy(replace(settings, schema="think_answer"), **options)

    monkeypatch.setattr(program, "load_policy", own_schema)
    report = export(config(chat_model(tmp_path / "model"), tmp_path / "out", "hf", dtype="f32"))
    assert report["verdict"] == "failed"
    assert any("asks otherwise" in line for line in report["failures"])


@quiet_peft
def test_rows_without_a_token_are_left_out_or_fail(tmp_path: Path) -> None:
    source = chat_model(tmp_path / "model", rows=SHAPE.vocab_size + 64)  # random: a fifth of the probability
    report = export(config(source, tmp_path / "out", "hf", dtype="f32"))
    assert report["verdict"] == "passed", report["failures"]
    assert report["runtime"]["tokenless"] == 0.0
    assert "64 rows of the vocabulary" in report["notes"][0]
    table = load_file(tmp_path / "out/model.safetensors")["model.embed_tokens.weight"]
    assert table.equal(
        load_file(source / "model.safetensors")["model.embed_tokens.weight"][: SHAPE.vocab_size]
    )
    report = export(config(adapter(tmp_path / "lora", source), tmp_path / "peft", "adapter"))
    assert report["verdict"] == "failed"
    assert any("no token's have" in line for line in report["failures"])


@quiet_peft
def test_a_model_that_sees_leaves_whole_and_its_adapter(tmp_path: Path) -> None:
    model = seeing.save_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = "model.language_model.embed_tokens.weight"
    tensors[name][json.loads((model / "config.json").read_text())["image_token_id"]] = (
        0  # whet never draws it
    )
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    lora = seeing.save_adapter(model, tmp_path / "lora")
    for place, to in ((model, "hf"), (lora, "adapter"), (lora, "merged")):
        own = config(place, tmp_path / to, to, dtype="f32")
        report = export(replace(own, task="arithmetic"))
        assert report["verdict"] == "passed", report["failures"]


@quiet_peft
def test_the_adapter_that_leaves_is_peft_s_and_a_merged_one_is_the_sum(folder: Path, tmp_path: Path) -> None:
    place = adapter(tmp_path / "lora", folder)
    report = export(config(place, tmp_path / "peft", "adapter"))
    assert report["verdict"] == "passed"
    assert report["checked_by"].startswith("peft")
    assert report["runtime"]["logprob_difference"] < 1e-5
    merged = export(config(place, tmp_path / "merged", "merged", dtype="bf16"))
    base, lora = load_file(folder / "model.safetensors"), load_file(place / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    a, b = (lora[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    want = (base[f"{name}.weight"] + 2.0 * b @ a).bfloat16()
    assert load_file(tmp_path / "merged/model.safetensors")[f"{name}.weight"].equal(want)
    assert 0 < merged["cast"]["error_of_change"] < 0.5
    with pytest.raises(UserError, match="no adapter to merge"):
        export(config(tmp_path / "merged", tmp_path / "twice", "merged"))
    assert not (tmp_path / "twice").exists()


@needs_gguf
def test_an_adapter_leaves_with_a_file_for_llama_cpp(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf as package

    monkeypatch.setattr(runtimes, "missing", lambda _: "peft")
    place = adapter(tmp_path / "lora", folder)
    report = export(config(place, tmp_path / "out", "adapter"))
    assert not any(program.LORA in note for note in report["notes"])
    stored = {t.name: t.data for t in package.GGUFReader(str(tmp_path / "out" / program.LORA)).tensors}
    names = [f"blk.{layer}.attn_q.weight.lora_{side}" for layer in range(2) for side in "ab"]
    assert sorted(stored) == names
    own = load_file(place / "adapter_model.safetensors")
    for name in names[::2]:
        layer = name.split(".")[1]
        wanted = own[f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight"]
        np.testing.assert_array_equal(stored[name], wanted)


@needs_mlx
def test_mlx_answers_as_the_model(folder: Path, tmp_path: Path) -> None:
    report = export(config(folder, tmp_path / "out", "mlx", dtype="f32"))
    assert report["verdict"] == "passed", report["failures"]
    assert report["checked_by"].startswith("mlx-lm")
    assert report["kl"] < 1e-9
    assert report["greedy_equal"] == report["runtime"]["prompts_equal"] == 1.0


@quiet_peft
def test_a_base_without_generation_config_stops_where_config_json_says(folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    (base / "generation_config.json").unlink()
    facts = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(facts | {"eos_token_id": make().tokenizer.eos_id}))
    report = export(config(adapter(tmp_path / "lora", base), tmp_path / "peft", "adapter"))
    assert report["checked_by"].startswith("peft")
    assert report["verdict"] == "passed", report["failures"]


def test_the_report_of_own_data_is_filled_up_from_its_train_split(folder: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(30)]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(TaskConfig(name=str(path)))
    test = [problem.prompt for problem in task.problems("test")]
    assert 0 < len(test) < 16
    own = replace(config(folder, tmp_path / "out", "hf", task=str(path)), num_prompts=16)
    policy = make(schema="none")
    asked = [chat[-1]["content"] for chat in program.prompts(own, policy)]
    assert len(set(asked)) == 16
    assert set(test) <= set(asked)
    assert (
        len(program.prompts(own, policy, split="train", count=64)) < 30
    )  # the test split is not measured on


def test_an_adapter_on_a_quantised_base_leaves_as_what_was_trained(folder: Path, tmp_path: Path) -> None:
    place = adapter(tmp_path / "lora", folder)
    (place / "base.json").write_text(
        json.dumps({"name": str(folder), "quantize": "nf4"})
    )  # as a run notes it
    merged = export(config(place, tmp_path / "merged", "merged", dtype="f32"))
    assert merged["verdict"] == "passed"  # by transformers, against the engine on the NF4 base
    alone = export(config(place, tmp_path / "adapter", "adapter"))
    assert alone["verdict"] == "not checked"
    assert "few bits" in alone["runtime"]["not_checked"]
    assert alone["stored"]["logprob_difference"] == 0.0
    again = load_policy(PolicyConfig(init=str(tmp_path / "adapter")), seed=0)
    assert len(packed_parts(again.model)) == 14
    again = load_policy(PolicyConfig(init=str(tmp_path / "merged")), seed=0)
    assert not packed_parts(again.model)


@needs_gguf
def test_matrices_in_few_bits_that_leave_in_eight_are_noted(folder: Path, tmp_path: Path) -> None:
    place = adapter(tmp_path / "lora", folder)
    (place / "base.json").write_text(json.dumps({"name": str(folder), "quantize": "nf4"}))
    noted = "matrices in few bits are written in q8_0; --dtype q4_k_m makes a smaller file"
    for source, is_noted in ((place, True), (folder, False)):
        wide = export(config(source, tmp_path / f"gguf-{is_noted}", "gguf"))
        assert any(noted in note for note in wide["notes"]) is is_noted


@pytest.mark.parametrize("schema", ["think_answer", "boxed", "hashes"])
@pytest.mark.parametrize("place", ["system", "user"])
def test_one_template_writes_the_whole_prompt(schema: str, place: str) -> None:
    policy = make(schema=schema)
    policy.schema = replace(policy.schema, instruction_in=place)  # pyright: ignore[reportArgumentType]
    policy.tokenizer = policy.tokenizer.with_template(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    whole = policy.tokenizer.with_template(whole_template(policy))
    talk = [{"role": "user", "content": 'a "quoted"\nquestion'}]
    assert whole.render(talk) == policy.chat_text(talk)
    talk += [{"role": "assistant", "content": "é"}, {"role": "user", "content": "b"}]
    assert whole.render(talk) == policy.chat_text(talk)
    go, notes = go_template(policy)
    assert not notes
    own = policy.schema.system_prompt
    assert ollama_writes(go, talk, own) == policy.chat_text(talk)
    told = [{"role": "system", "content": "Be brief."}, *talk]
    assert ollama_writes(go, told, own) == policy.chat_text(told)


def test_ollama_reads_back_what_the_modelfile_holds() -> None:
    policy = make()
    policy.schema = replace(
        policy.schema, instruction='Say "yes".\n\n{{ Think }} first.', instruction_in="system"
    )
    policy.stop_strings = ("\n\n", 'say "no"', "\\n", '"', 'three """ quotes')
    policy.tokenizer = policy.tokenizer.with_template(
        '{% for m in messages %}{{ m[\'role\'] }}: {{ m[\'content\'] }}{{ "{{" }}"""\n{% endfor %}'
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    text, notes = modelfile(policy, "model.gguf", 512, {"temperature": 0.7})
    read = read_modelfile(text)
    assert read[0] == ("FROM", "./model.gguf")
    assert dict(read)["SYSTEM"] == policy.schema.system_prompt
    assert [value for name, value in read if name == "stop"][:4] == ["\n\n", 'say "no"', "\\n", '"']
    assert ("num_ctx", "512") in read
    assert ("temperature", "0.7") in read
    assert any("three quotes" in note for note in notes)
    template = dict(read)["TEMPLATE"]
    assert template == go_template(policy)[0]
    written = template.replace('{{ "{{" }}', "{{").replace('{{ "\\"\\"\\"" }}', '"""')
    assert '{{ if eq .Role "user" }}user: {{ .Content }}{{"""\n{{ end }}' in written


IM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITES = (
    "{% for m in messages %}{% if m['role'] == 'system' %}[{{ m['content'] }}]{% else %}"
    "<{{ m['role'] if loop.last else 'past' }}>{{ m['content'] }}{% endif %}{% endfor %}"
)
DROPS = (
    "{% for m in messages %}{% if m['role'] != 'system' %}<{{ m['role'] }}>{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)


def with_bos(template: str, bos: str, *, adds_bos: bool, prompt_bos: bool | None = None) -> Policy:
    policy = make(schema="none")
    tokenizer = Tokenizer.bytes([bos])
    tokenizer = Tokenizer(
        tokenizers.Tokenizer.from_str(tokenizer.backend_text()),
        roles={"bos_token": bos, "eos_token": "<eos>", "pad_token": "<pad>"},
        adds_bos=adds_bos,
        chat_template=template,
        prompt_bos=prompt_bos,
    )
    policy.tokenizer = tokenizer
    return policy


@pytest.mark.parametrize(
    ("template", "bos", "adds_bos", "prompt_bos", "leads"),
    [
        (IM, "<|im_start|>", False, None, False),  # SmolLM2: ChatML's first word is BOS
        ("<s>" + IM, "<s>", True, None, True),
        ("<s>" + IM, "<s>", False, None, False),
        (IM, "<s>", True, None, False),  # BOS before plain texts, none in prompts
        (IM, "<s>", True, True, True),
        (REWRITES, "<s>", True, True, True),
        ("<s>" + REWRITES, "<s>", False, None, False),
    ],
)
def test_ollama_and_llama_cpp_ask_with_the_bos_that_whet_asks_with(
    template: str, bos: str, adds_bos: bool, prompt_bos: bool | None, leads: bool
) -> None:
    policy = with_bos(template, bos, adds_bos=adds_bos, prompt_bos=prompt_bos)
    facts = express(policy.tokenizer, 259, (256,)).with_template(template).facts
    assert facts["ggml.add_bos_token"] is leads
    go, _ = go_template(policy)
    user = {"role": "user", "content": "Hi"}
    for talk in ([user], [{"role": "system", "content": "Be brief."}, user]):
        # Both put BOS before what their templates give, where the file says so.
        asked = policy.tokenizer.encode(leads * bos + ollama_writes(go, talk))
        assert asked == list(policy.chat_ids(talk))
    text, _ = modelfile(policy, "m", 8, {})
    assert unlike_ollama(policy, text, [[user]]) == []
    told = unlike_ollama(
        policy, text.replace("TEMPLATE " + '"' * 3, "TEMPLATE " + '"' * 3 + "a"), [[user]] * 2
    )
    assert "differs on 2 of 2 prompts with a question" in told[0]


@needs_gguf
def test_a_modelfile_that_asks_otherwise_fails_the_export(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(*given: Any, **named: Any) -> tuple[str, list[str]]:
        text, notes = modelfile(*given, **named)
        return text.replace('TEMPLATE """', 'TEMPLATE """a'), notes

    monkeypatch.setattr(runtimes, "missing", lambda _: "xllamacpp")  # which reads no Modelfile
    monkeypatch.setattr(program, "modelfile", spoiled)
    report = export(config(folder, tmp_path / "out", "ollama", dtype="f32"))
    assert "differs on 3 of 3 prompts with a question" in report["failures"][0]
    assert report["verdict"] == "failed"


REFUSES = IM.replace(
    "{% for m in",
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}{% for m in",
)


@pytest.mark.parametrize("schema", ["none", "think_answer", "boxed", "hashes"])
@pytest.mark.parametrize("template", [None, DROPS, REFUSES, REWRITES, IM])
def test_a_modelfile_asks_with_the_schema_s_own_instruction_once(schema: str, template: str | None) -> None:
    policy = make(schema=schema)
    if template is not None:
        policy.tokenizer = policy.tokenizer.with_template(template)
    user = {"role": "user", "content": "Hi"}
    text, _ = modelfile(policy, "m", 8, {})
    assert unlike_ollama(policy, text, [[user]]) == []
    read = dict(read_modelfile(text))
    told = ollama_writes(read["TEMPLATE"], [{"role": "system", "content": "Be brief."}, user])
    is_heard = template not in (None, DROPS) or schema != "none"
    assert ("Be brief." in told) is is_heard  # and then in place of the schema's own


def test_a_system_message_that_the_template_drops_is_dropped_and_noted() -> None:
    policy = with_bos(DROPS, "<s>", adds_bos=False)
    go, notes = go_template(policy)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert ollama_writes(go, talk) == policy.chat_text(talk) == "<user>Hi"
    assert any("drops system messages" in note for note in notes)


def test_neighbouring_channels_turn_as_halves_did() -> None:
    q, angles = torch.randn(16, 5, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    k = torch.randn(16, 5, dtype=torch.float64)

    def scores(turn: Callable[[torch.Tensor], torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
        first, second = (turn(row.view(2, 8, 5)) for row in rows)
        return torch.einsum("hcx,hcy->hxy", first, rows[1].view(2, 8, 5)) + 0 * second.sum()

    def halves(x: torch.Tensor) -> torch.Tensor:
        a, b, c, s = x[:, :4], x[:, 4:], angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), dim=1)

    def pairs(x: torch.Tensor) -> torch.Tensor:
        a, b, c, s = x[:, ::2], x[:, 1::2], angles.cos()[:, None], angles.sin()[:, None]
        return torch.stack((a * c - b * s, b * c + a * s), dim=2).flatten(1, 2)

    assert scores(halves, q, k).allclose(scores(pairs, gguf.neighbours(q, 8), gguf.neighbours(k, 8)))


def test_divisors_are_those_of_the_reader() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    data = {
        "model_type": "mistral",
        "vocab_size": 8,
        "hidden_size": 32,
        "intermediate_size": 8,
        "head_dim": 8,
    }
    data |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    data |= {"rope_scaling": scaling | {"original_max_position_embeddings": 64}, "rope_theta": 10000.0}
    found = from_hf(data | {"sliding_window": None, "max_position_embeddings": 512})
    divisors = gguf.rope_divisors(found)
    assert divisors is not None
    assert divisors[0] == 1
    assert divisors[-1] == pytest.approx(8)


SMALL = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 10000.0}
SMALL |= {"max_position_embeddings": 256, "rms_norm_eps": 1e-5, "initializer_range": 0.2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "type": "longrope",
    "short_factor": [1 + i / 9 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
}
PHI = {
    "model_type": "phi3",
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
    "rope_scaling": LONG,
}


def test_scaled_ropes_go_as_divisors_or_as_llama_cpp_s_own() -> None:
    given = gguf.metadata(from_hf(SMALL | {"model_type": "qwen2", "rope_scaling": YARN}))
    assert given["rope.scaling.type"] == "yarn"
    assert given["rope.scaling.factor"] == 4.0
    assert given["rope.scaling.original_context_length"] == 64
    assert given["rope.scaling.attn_factor"] == pytest.approx(1.0)
    sharp = gguf.metadata(
        from_hf(SMALL | {"model_type": "qwen3", "rope_scaling": YARN | {"attention_factor": 1.5}})
    )
    assert sharp["rope.scaling.attn_factor"] == pytest.approx(1.5 / (0.1 * np.log(4) + 1))
    llama = from_hf(SMALL | {"model_type": "llama", "rope_scaling": YARN})
    assert "rope.scaling.type" not in gguf.metadata(llama)
    assert gguf.metadata(llama)["rope.scaling.attn_factor"] == pytest.approx(0.1 * np.log(4) + 1)
    found = dict(gguf.tensors(build(llama)))["rope_freqs.weight"]
    assert found.tolist() == pytest.approx(llama.block.ropes[0].divisors)
    long = YARN | {"original_max_position_embeddings": 2048}
    gguf.metadata(from_hf(SMALL | {"model_type": "qwen2", "rope_scaling": long}))
    for rope in (long | {"beta_fast": 8.0}, long | {"truncate": False}):
        with pytest.raises(UserError, match="scaling of rotary positions of the kind yarn"):
            gguf.metadata(from_hf(SMALL | {"model_type": "qwen2", "rope_scaling": rope}))


def build(config: ModelConfig) -> Any:
    model = build_model(config)
    init_weights(model, 0)
    return model


@needs_gguf
def test_phi_3_has_one_tensor_of_gate_and_up_and_two_of_factors(tmp_path: Path) -> None:
    model = build(from_hf(SMALL | PHI))
    found = dict(gguf.tensors(model))
    mlp = model.get_submodule("model.layers.0.mlp")
    assert found["blk.0.ffn_up.weight"].equal(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
    assert "blk.0.ffn_gate.weight" not in found
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        assert found[name].tolist() == pytest.approx(LONG["short_factor"])
    facts = gguf.metadata(model.config)
    assert facts["rope.dimension_count"] == 12
    assert facts["context_length"] == 64  # the short factors end there
    vocabulary = express(Tokenizer.bytes(), model.num_valid_tokens, ()).with_template("T")
    gguf.write_gguf(model, vocabulary, tmp_path / "m.gguf", "f32", name="my-Phi-3.5")
    again = dict(read_back(tmp_path / "m.gguf", model))
    assert all(again[name].equal(parameter) for name, parameter in model.named_parameters())
    import gguf as package

    name = package.GGUFReader(str(tmp_path / "m.gguf")).get_field("general.name").contents()
    assert name == "my-phi.5"  # llama.cpp would look for Phi-3's tokens


def test_the_name_says_that_special_tokens_take_spaces() -> None:
    def added(text: str, index: int, *, rstrip: bool) -> dict[str, Any]:
        return {"id": index, "content": text, "special": True, "rstrip": rstrip, "lstrip": False}

    tokens = [added(text, i, rstrip=False) for i, text in enumerate(("<unk>", "<s>", "<|endoftext|>"))]
    tokens += [added("</s>", 3, rstrip=True), added("<|user|>", 4, rstrip=True)]
    assert vocabulary_module._strips({"added_tokens": tokens})
    assert not vocabulary_module._unstripped({"added_tokens": tokens}, True)
    other = [*tokens[:4], added("<|user|>", 4, rstrip=False)]
    assert not vocabulary_module._strips({"added_tokens": other})
    assert not vocabulary_module._strips(  # llama.cpp would strip the spaces after it
        {"added_tokens": [*tokens, added("<think>", 5, rstrip=False) | {"special": False}]}
    )
    assert "'</s>'" in vocabulary_module._unstripped({"added_tokens": other}, False)[0]
    assert Vocabulary(facts={}, strips=True).model_name("mini") == "phi-3 mini"


def test_llama_cpp_shows_the_tags_of_a_response() -> None:
    tags = ("<think>", "</answer>")
    kinds = express(Tokenizer.bytes(tags), 260, (256, 259)).with_template("T").facts["ggml.token_type"]
    assert kinds[256:] == [CONTROL, CONTROL, USER_DEFINED, USER_DEFINED]


@needs_llama
@pytest.mark.parametrize(
    "shape",
    [PHI, {"model_type": "qwen2", "rope_scaling": YARN}, {"model_type": "llama", "rope_scaling": YARN}],
)
def test_llama_cpp_turns_scaled_ropes_as_we_do(shape: dict[str, Any], tmp_path: Path) -> None:
    model = build(from_hf(SMALL | shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    Policy(model.eval(), Tokenizer.bytes(), SCHEMAS["none"]).save(tmp_path / "phi3")
    report = export(config(tmp_path / "phi3", tmp_path / "out", "gguf", dtype="f32"))
    assert report["verdict"] == "passed"
    assert report["kl"] < 1e-9


def test_sentencepiece_scores_give_the_tokenizer_s_own_ids() -> None:
    require("shared/data/models/stories260k")
    tokenizer = Tokenizer.load(STORIES)
    facts = express(tokenizer, tokenizer.vocab_size, tuple(tokenizer.stop_ids)).facts
    score = dict(zip(facts["ggml.tokens"], facts["ggml.scores"], strict=True))
    place = {text: index for index, text in enumerate(facts["ggml.tokens"])}
    for text in ("Once upon a time, there was a little girl named Lily.", "the  big\ndog's é"):
        parts = list("▁" + text.replace(" ", "▁"))
        while True:  # llama.cpp: the neighbours whose joined token scores highest, leftmost first
            joined = [
                (score[a + b], -i)
                for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
                if a + b in score
            ]
            if not joined:
                break
            at = -max(joined)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids = [
            index
            for part in parts
            for index in ([place[part]] if part in place else [place[f"<0x{b:02X}>"] for b in part.encode()])
        ]
        assert ids == tokenizer.encode(text)


def test_characters_are_bytes_joined_by_merges() -> None:
    tokenizer = Tokenizer.characters("ab é€", ["<think>"])
    found = express(tokenizer, tokenizer.vocab_size, (1,))
    facts, texts = found.facts, found.facts["ggml.tokens"]
    assert facts["ggml.eos_token_id"] == 1
    assert facts["ggml.token_type"][3] == USER_DEFINED
    assert texts[3] == "<think>"
    assert texts[4:7] == ["a", "b", "Ġ"]
    assert len(texts[8]) == 3
    assert f"{texts[8][:2]} {texts[8][2]}" in facts["ggml.merges"]
    assert found.notes


@needs_gguf
def test_a_refusal_comes_before_a_weight_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: Any, **__: Any) -> Policy:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(program, "load_policy", none)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    gemma = tmp_path / "gemma"
    shutil.copytree(folder, gemma)
    (gemma / "config.json").write_text(
        json.dumps(SMALL | {"model_type": "gemma", "tie_word_embeddings": False, "eos_token_id": 256})
    )
    (tmp_path / "text").write_text("no GGUF")
    for settings, words in (
        (
            config(folder, tmp_path / "k", "gguf", dtype="q4_k_m"),
            "dtype = q4_k_m: llama.cpp computes its codes",
        ),
        (config(gemma, tmp_path / "g", "gguf"), "no head of its own"),
        (config(folder, tmp_path / "m", "merged"), "no adapter to merge"),
        (config(folder, tmp_path / "a", "adapter"), "no adapter in it"),
        (config(folder, gemma, "hf"), "exists already"),
    ):
        for run in (export, lambda given: program.check(given, False)):
            with pytest.raises(UserError, match=words):
                run(settings)
        assert not Path(settings.out).exists() or settings.out == str(gemma)
    program.check(config(folder, tmp_path / "fine", "hf"), False)
    assert "it would start" in capsys.readouterr().out
    assert "NOT CHECKED: transformers is not installed" in program.plan(
        config(folder, tmp_path / "fine", "hf")
    )


def test_a_model_without_an_end_names_one_that_is_no_ordinary_token() -> None:
    def without(roles: dict[str, str]) -> Tokenizer:
        backend = tokenizers.Tokenizer.from_str(Tokenizer.bytes().backend_text())
        return Tokenizer(backend, roles=roles, chat_template=None)

    found = express(without({"pad_token": "<pad>"}), 258, ())
    assert found.facts["ggml.eos_token_id"] == 257
    assert any("no token ends a text" in note for note in found.notes)
    assert express(without({"bos_token": "<eos>"}), 258, ()).facts["ggml.eos_token_id"] == 256
    assert express(without({}), 258, (7,)).facts["ggml.eos_token_id"] == 7
    with pytest.raises(UserError, match="no token that ends a text"):
        express(without({}), 258, ())


def test_a_report_that_no_runtime_checked_claims_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "missing", lambda _: "transformers")
    report = export(config(folder, tmp_path / "out", "hf", dtype="f32"))
    assert report["verdict"] == "not checked"
    assert report["kl"] is report["top1_agreement"] is report["greedy_equal"] is report["checked_by"] is None
    assert report["stored"]["kl"] == 0
    text = "\n".join(program.lines(report))
    assert "NOT CHECKED in the program that it is for: transformers is not installed" in text
    assert "checked by" not in text


@pytest.mark.parametrize(("kind", "has_note"), [("mistral", True), ("gemma3_text", False)])
def test_windows_that_mlx_lm_does_not_have_are_noted(
    kind: str, has_note: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "missing", lambda _: "mlx_lm")
    shape = from_hf(SMALL | {"model_type": kind, "sliding_window": 32})
    Policy(build(shape).eval(), Tokenizer.bytes(), SCHEMAS["none"]).save(tmp_path / "model")
    report = export(config(tmp_path / "model", tmp_path / "out", "mlx"))
    assert any("no windows for this family" in note for note in report["notes"]) is has_note


def test_what_llama_cpp_has_not_is_refused() -> None:
    block = replace(SHAPE.block, has_sinks=True)
    with pytest.raises(UserError, match="has_sinks"):
        gguf.architecture(replace(SHAPE, block=block))
    with pytest.raises(UserError, match="reward model"):
        gguf.architecture(replace(SHAPE, is_reward=True))
    with pytest.raises(UserError, match="olmo2 model is not written here"):
        gguf.architecture(replace(SHAPE, source='{"model_type": "olmo2"}'))
    with pytest.raises(ValueError, match="no such file"):
        config(STORIES, Path("out"), "gguf", dtype="q4_k_m", imatrix="file.dat")
    with pytest.raises(ValueError, match="below 8 bits only"):
        config(STORIES, Path("out"), "gguf", imatrix="auto")


@needs_gguf
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_a_file_read_back_is_the_model_but_for_rounding(kind: str, tmp_path: Path) -> None:
    import gguf as package

    policy = make(replace(SHAPE, vocab_size=264))  # six rows are no token's
    vocabulary = express(policy.tokenizer, policy.model.num_valid_tokens, policy.stop_ids).with_template("T")
    gguf.write_gguf(policy.model, vocabulary, tmp_path / "m.gguf", kind)  # pyright: ignore[reportArgumentType]
    reader = package.GGUFReader(str(tmp_path / "m.gguf"))
    assert reader.get_field("tokenizer.chat_template").contents() == "T"
    assert reader.get_field("llama.attention.head_count_kv").contents() == 2
    table = next(t for t in reader.tensors if t.name == "token_embd.weight")
    assert list(table.shape) == [32, policy.tokenizer.vocab_size]
    for name, tensor in read_back(tmp_path / "m.gguf", policy.model):
        own = policy.model.get_parameter(name).detach()
        largest = own.abs().amax(-1, keepdim=True)
        bound = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.5 / 127 + 2**-11}[kind]
        assert bool(((tensor - own).abs() <= bound * largest).all()), name


@needs_llama
def test_llama_cpp_answers_as_stories260k(tmp_path: Path) -> None:
    report = export(config(STORIES, tmp_path / "out", "ollama", dtype="f32"))
    assert report["verdict"] == "passed"
    assert report["kl"] < 1e-9
    assert report["greedy_equal"] == 1.0
    assert "PARAMETER stop" in (tmp_path / "out/Modelfile").read_text()


MEASURED = """
import sys, threading, time
from pathlib import Path

import gguf, transformers  # imported now: they are no memory of an export's
import torch

from whet.compress.export import export as program
from whet.compress.export import runtimes
from whet.generate.policy import PolicyConfig

def own_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024

def watch():
    global most
    while True:
        most = max(most, own_mib())
        time.sleep(0.001)

torch.set_num_threads(1)
runtimes.missing = lambda runtime: runtime  # it has a process of its own
first = most = own_mib()
threading.Thread(target=watch, daemon=True).start()
policy = PolicyConfig(init=sys.argv[1], device="cpu")
program.export(program.ExportConfig(policy=policy, to=sys.argv[2], out=sys.argv[3], num_prompts=2, max_new_tokens=4))
print(most - first)
"""
"""Prints what an export took at most of a process's own memory, in MiB: RssAnon, in which mapped files do not count."""


@pytest.mark.ci
@needs("linux", "gguf")
@pytest.mark.parametrize("to", ["gguf", "merged"])
def test_an_export_has_one_model_in_memory(to: str, tmp_path: Path) -> None:
    policy = make(replace(SHAPE, hidden_size=1024, intermediate_size=3072))
    size = sum(parameter.numel() for parameter in policy.model.parameters()) * 4 / 2**20
    policy.save(tmp_path / "model", dtype=torch.bfloat16)
    place = tmp_path / "model" if to == "gguf" else adapter(tmp_path / "lora", tmp_path / "model", width=1024)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(place), to, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Weights in float32, and the kernels' copies of them or, while it merges, those before, and a few tensors: 2.1 and
    # 2.6 times their size. A second model makes it 3.1, copies that are kept 2.9 and 3.4.
    assert float(done.stdout.splitlines()[-1]) < 2.75 * size


def write_imatrix(importances: importance.Importance, path: Path) -> None:
    """Write what llama.cpp's llama-imatrix writes."""
    import gguf as package

    writer = package.GGUFWriter(str(path), "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 1)
    for name, values in importances.items():
        writer.add_tensor(name + importance.SUMS, np.asarray(values, dtype=np.float32).reshape(1, -1))
        writer.add_tensor(name + importance.COUNTS, np.ones((1, 1), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@needs_gguf
def test_importance_is_the_mean_square_of_a_matrix_s_inputs(tmp_path: Path) -> None:
    policy = make(replace(SHAPE, num_layers=1, rope_scaling=None))
    prompts = [(5, 6, 7), (9, 8)]
    found = importance.measure(policy, prompts, 4)
    tokens = [*prompts[0], *prompts[1]]
    for ids, said in zip(prompts, parity.greedy(policy, prompts, 4), strict=True):
        assert len(said) >= 1
        tokens += said
        del ids
    parameters = {name: p.detach().double() for name, p in policy.model.named_parameters()}
    x = parameters["model.embed_tokens.weight"][tokens]
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + SHAPE.norm_eps)
    want = (x * parameters["model.layers.0.input_layernorm.weight"]).square().mean(0)
    for part in "qkv":
        np.testing.assert_allclose(found[f"blk.0.attn_{part}.weight"], want, rtol=1e-5)
    assert found.keys() == {
        *(f"blk.0.attn_{part}.weight" for part in ("q", "k", "v", "output")),
        *(f"blk.0.ffn_{part}.weight" for part in ("gate", "up", "down")),
        "token_embd.weight",  # the head, tied
    }
    write_imatrix(found, tmp_path / "imatrix.gguf")
    again = importance.read(tmp_path / "imatrix.gguf")
    assert all(np.array_equal(again[name], values) for name, values in found.items())
    shapes = {label: tensor.shape for label, tensor in gguf.tensors(policy.model)}
    importance.check(found, shapes, "here")
    for change, words in (
        ({"blk.7.attn_q.weight": want.numpy()}, "no matrix of this model"),
        ({"blk.0.attn_q.weight": want.numpy()[1:]}, "has 31 numbers, expected 32"),
        ({"blk.0.attn_q.weight": want.numpy() * np.nan}, "not finite"),
    ):
        with pytest.raises(UserError, match=words):
            importance.check(found | change, shapes, "here")
    (tmp_path / "text").write_text("no GGUF")
    with pytest.raises(UserError, match="not a readable GGUF file"):
        importance.read(tmp_path / "text")


FINER = "6644644644644666", "6655655655655666"
MIXTURES = {
    "q2_k": ("4" * 16, "3" * 16, "3"),
    "q3_k_m": ("55" + "4" * 14, "5" + "4" * 15, "4"),
    "q4_k_s": ("5555" + "4" * 12, "55" + "4" * 14, "4"),
    "q4_k_m": (FINER[0], FINER[0], "4"),
    "q5_k_m": (FINER[1], FINER[1], "5"),
    "q6_k": ("6" * 16, "6" * 16, "6"),
}
"""Bits of attn_v and ffn_down in 16 layers, and of attn_output: what llama_model_quantize of llama.cpp 0.5 writes."""


@pytest.mark.parametrize("kind", MIXTURES)
def test_more_bits_go_where_llama_cpp_s_quantiser_puts_them(kind: str) -> None:
    shape = replace(SHAPE, hidden_size=256, num_heads=8, num_kv_heads=2, num_layers=16, tie_embeddings=False)

    def found(part: str, config: ModelConfig = shape, layers: int = 16, columns: int = 256) -> str:
        return "".join(k_type(f"blk.{i}.{part}.weight", columns, kind, config)[1] for i in range(layers))

    values, last, output = MIXTURES[kind]
    usual = K_TYPES[kind][1][1]
    assert found("attn_v") == found("attn_qkv") == values
    assert found("ffn_down") == found("ffn_down_exps") == last
    assert found("attn_output", layers=1) == output
    assert found("attn_q") == found("attn_k") == found("ffn_up") == usual * 16
    assert k_type("output.weight", 256, kind, shape) == "Q6_K"
    assert k_type("token_embd.weight", 256, kind, shape) == K_TYPES[kind][1]
    assert k_type("token_embd.weight", 256, kind, replace(shape, tie_embeddings=True)) == "Q6_K"
    short = {"2": "Q4_0", "3": "Q4_0", "4": "Q5_0", "5": "Q5_1", "6": "Q8_0"}
    assert k_type("blk.0.attn_q.weight", 288, kind, shape) == short[usual]
    assert k_type("blk.0.attn_q.weight", 80, kind, shape) == "F16"
    deep = replace(shape, num_layers=80)
    assert set(found("attn_v", deep, 80)) <= {"5", "6"}
    experts = from_hf({"model_type": "mixtral", "num_local_experts": 8} | SMALL)
    assert found("attn_v", experts, 1) == found("attn_k", experts, 1) == "8"
    assert found("attn_output", experts, 1) == ("6" if kind == "q6_k" else "5")


@pytest.mark.ci
@needs_llama
def test_fewer_bits_by_llama_cpp_s_quantiser(tmp_path: Path) -> None:
    shape = replace(SHAPE, hidden_size=256, intermediate_size=288, head_dim=64, num_layers=1)
    make(shape).save(tmp_path / "wide")
    errors = {}
    for name in ("", "auto", "one"):
        weights = tmp_path / "one.gguf"
        if name == "one":  # of each row of q_proj the first 16 inputs alone matter
            spiked = np.where(np.arange(256) < 16, 1.0, 1e-6).astype(np.float32)
            write_imatrix({"blk.0.attn_q.weight": spiked}, weights)
        given = str(weights) if name == "one" else name
        settings = config(tmp_path / "wide", tmp_path / f"q4{name}", "gguf", dtype="q4_k_m", imatrix=given)
        report = export(settings)
        assert report["checked_by"].startswith("llama.cpp")
        assert report["runtime"]["prompts_equal"] == 1.0
        assert any("Q4_K" in note for note in report["notes"])
        assert any("blocks of 256 do not fill" in note for note in report["notes"])  # 288 inputs of down_proj
        # The runtime multiplies the weights that are stored, and rounds their inputs to 8 bits.
        assert report["runtime"]["kl"] < 2 * report["stored"]["kl"] + 1e-3
        model = load_policy(PolicyConfig(init=str(tmp_path / "wide"), device="cpu"), seed=0).model
        label = "model.layers.0.self_attn.q_proj.weight"
        stored = dict(read_back(tmp_path / f"q4{name}/model.gguf", model))[label]
        errors[name] = (stored - model.get_parameter(label)).detach()[:, :16].square().mean().item()
    assert errors["one"] < 0.85 * errors[""]


def test_what_rounding_alone_does_is_told_from_what_the_runtime_adds(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = parity.Thresholds(kl=0.0, top1=0.0)
    monkeypatch.setattr(parity, "THRESHOLDS", {"bf16": strict, "f32": strict})
    rounded = export(config(folder, tmp_path / "bf16", "hf", dtype="bf16"))
    assert rounded["thresholds"]["kl"] == 2 * rounded["stored"]["kl"]
    assert any("rounding the weights to bf16 alone changes more" in note for note in rounded["notes"])
    monkeypatch.setattr(parity, "ROUNDING_KL", 0.0)
    coarse = export(config(folder, tmp_path / "coarse", "hf", dtype="bf16"))
    assert coarse["verdict"] == "failed"
    exact = export(config(folder, tmp_path / "f32", "hf", dtype="f32"))
    assert exact["stored"]["kl"] == 0  # the runtime's order of sums is all that differs
    assert not any("alone changes" in note for note in exact["notes"])


def test_differences_of_distributions_are_the_formula_s() -> None:
    ours = np.log(np.array([[0.5, 0.25, 0.25, 1e9]]))
    theirs = np.log(np.array([[0.25, 0.5, 0.25, 1.0]]))
    reference = parity.Reference([(1,)], [[]], [(0,)], [ours], 1)
    found = parity.differences(reference, [theirs], [(1,)], 3)
    assert found["kl"] == pytest.approx(0.25 * np.log(2))
    assert found["top1_agreement"] == found["top1_to_ties"] == 0
    assert found["greedy_equal"] == 0
    theirs[0, 0] = np.log(0.24)  # the top tokens are still others: 0.25 and 0.5 are no near tie
    ours[0, 1] = np.log(0.48)
    found = parity.differences(reference, [theirs], [(1,)], 3)
    assert found["top1_agreement"] == 0
    assert found["top1_to_ties"] == 1


def test_log_probabilities_that_are_not_given_are_ours() -> None:
    ours = np.log(np.array([[0.5, 0.25, 0.2, 0.05]]))
    theirs = np.log(np.array([[0.25, 0.5, np.nan, np.nan]]))  # a runtime gives the likeliest alone
    reference = parity.Reference([(1,)], [[]], [(0,)], [ours], 1)
    found = parity.differences(reference, [theirs], [(0,)], 4)
    # Among the first two, which have 0.75 of our probability, 2/3 and 1/3 stand against 1/3 and 2/3.
    assert found["kl"] == pytest.approx(0.75 * np.log(2) / 3)
    assert parity.differences(reference, [ours * [[1, 1, np.nan, 1]]], [(0,)], 4)["kl"] == 0


def test_greedy_text_of_rounded_weights_decides_nothing_but_their_probabilities_do() -> None:
    seen = {
        "kl": 0.00465,
        "top1_to_ties": 0.98,
        "greedy_equal_to_ties": 0.5,
    }  # SmolLM2-135M in q8_0, llama.cpp
    assert parity.failures(seen, parity.THRESHOLDS["q8_0"]) == []
    assert len(parity.failures(seen, parity.THRESHOLDS["f32"])) == 3
    bf16 = parity.THRESHOLDS["bf16"]
    rounding = {"kl": 0.014, "top1_to_ties": 0.97}  # the same in bf16, by rounding alone, in our own engine
    limits = bf16.eased(rounding)
    assert (limits.kl, limits.top1) == (0.028, pytest.approx(0.92))
    assert parity.failures(seen | {"kl": 0.015}, limits) == []
    assert len(parity.failures(seen | {"kl": 0.03}, limits)) == 1
    assert bf16.eased({"kl": 0.06, "top1_to_ties": 0.97}) == bf16  # too coarse a type, and said so


def test_texts_that_part_at_a_near_tie_are_counted_apart() -> None:
    likely = np.log(np.array([[0.4, 0.39, 0.21], [0.6, 0.3, 0.1]]))
    said = [(0, 0), (0, 0), (0, 0), (0, 0)]
    reference = parity.Reference([(1,)] * 4, [[]] * 4, said, [likely] * 4, 2)
    theirs = [(0, 0), (1, 2), (0, 1), (0,)]  # equal; a near tie; none; only ends
    found = parity.differences(reference, [likely] * 4, theirs, 3)
    assert found["greedy_equal"] == 0.25
    assert found["greedy_equal_to_ties"] == 0.5
    assert found["first_gaps"] == [
        pytest.approx(np.log(0.4 / 0.39), abs=1e-4),
        pytest.approx(np.log(2), abs=1e-4),
        None,
    ]


def test_failures_are_a_line_for_each_thing_that_is_not_the_same() -> None:
    limits = parity.Thresholds(kl=0.1, top1=0.9, greedy=0.5)
    good = {"kl": 0.1, "top1_to_ties": 0.9, "greedy_equal_to_ties": 0.5}
    fine = {"prompts_equal": 1.0, "stops_equal": 1.0, "stops_missing": []}
    assert parity.failures(good, limits) == parity.failures(good | fine, limits) == []
    for name, value, said in (
        ("kl", 0.2, "KL 0.2 nats"),
        ("kl", float("nan"), "KL nan nats"),  # not a number is not below anything
        ("top1_to_ties", 0.8, "the same top token, up to near ties, at 80.0%"),
        ("greedy_equal_to_ties", 0.4, "equal greedy text, up to near ties, on 40.0%"),
        ("tokenless", 0.02, "rows that are no token's have 2.0% of the probability"),
        ("prompts_equal", 0.5, "the same prompt tokens on 50.0%"),
        ("stops_equal", 0.5, "it stops where we do on 50.0%"),
        ("stops_missing", ["<end>"], "it does not stop at '<end>'"),
    ):
        (line,) = parity.failures(good | fine | {name: value}, limits)
        assert line.startswith(said)


def test_logits_are_taken_at_the_places_that_predict_the_completion() -> None:
    class Echo:
        """A model whose logits say which token stands there."""

        def logits(self, ids_BT: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(ids_BT, 9)

    class Stub:
        model, device = Echo(), "cpu"

    found = parity.next_logits(Stub(), (1, 2, 3), (7, 8))  # type: ignore[arg-type]
    assert found.argmax(-1).tolist() == [3, 7]  # 7 follows 3, 8 follows 7


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("hf", ["whet serve 'my out'", "vllm serve 'my out'"]),
        ("merged", ["whet serve 'my out'", "vllm serve 'my out'"]),
        ("adapter", ["whet serve 'my out'"]),
        ("gguf", ["whet chat 'my out/model.gguf'", "llama-cli -m 'my out/model.gguf'"]),
        (
            "ollama",
            [
                "whet chat 'my out/model.gguf'",
                "ollama create my-out -f 'my out/Modelfile' && ollama run my-out",
            ],
        ),
        ("mlx", ["whet serve 'my out'", "mlx_lm.generate --model 'my out' --prompt 'Who are you?'"]),
    ],
)
def test_each_export_names_what_one_does_with_it(
    kind: Any, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ExportConfig(policy=PolicyConfig(init="model"), to=kind, out="my out")
    monkeypatch.setattr("whet.storage.folder.as_typed", lambda: "whet")
    monkeypatch.setattr("whet.storage.folder.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert next_steps(config) == "next: " + "\n      ".join(steps)
    monkeypatch.setattr("shutil.which", lambda name: None)
    for said, step in zip(next_steps(config).removeprefix("next: ").split("\n      "), steps, strict=True):
        program = step.split(" ")[0]
        assert said == step + f"   # {program} is not installed here" * (program != "whet")
        assert shlex.split(said, comments=True) == shlex.split(step)
    monkeypatch.setattr("whet.storage.folder.find_spec", lambda name: None)  # whet serve needs an extra
    first, *_ = next_steps(config).removeprefix("next: ").split("\n")
    assert ("   # first: " in first) == first.startswith("whet serve")
    assert shlex.split(first, comments=True) == shlex.split(steps[0])
