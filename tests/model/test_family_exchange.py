"""Every family in other programs: adapters in peft, both ways; the exported folder in transformers; each with a chat
template in the shape of its published one."""

from __future__ import annotations

import json
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import family_cases as cases
import pytest
import torch
import transformers
from chats import CHAT, OTHERS, SHAPES, THOUGHT, TOOLS, said
from needs import needs
from safetensors import safe_open
from test_public_templates import WEATHER

from whet.compress.export import parity, runtimes
from whet.compress.export.export import ExportConfig, export
from whet.generate.policy import PolicyConfig
from whet.model.families import FAMILIES, from_hf
from whet.model.lora.adapter import EXPERT_ENDS
from whet.model.lora.files import read_adapter
from whet.model.lora.side import LoRAConfig, targets_of
from whet.model.lora.trained import Base, Trained
from whet.model.names import module_name, own_names
from whet.model.transformer import LanguageModel
from whet.model.weights import build_model, load_model

needs_peft = needs("peft")

TEMPLATES = {
    "llama": "llama3.1",
    "qwen2": "qwen2.5, own system",
    "qwen3": "qwen3",
    "gpt2": "",
    "mistral": "mistral, system last",
    "ministral": "mistral, tools",
    "ministral3": "ministral 3",
    "phi3": "phi3",
    "smollm3": "smollm3, tools",
    "granite": "granite",
    "gemma": "gemma 1",
    "gemma2": "gemma 1",
    "gemma3_text": "gemma",
    "gemma4_text": "gemma",
    "olmo2": "olmo2",
    "olmo3": "chatml on a base model",
    "glm": "glm4",
    "glm4": "glm4",
    "qwen3_5_text": "qwen3.5",
    "qwen3_5_moe_text": "qwen3.5",
    "qwen3_next": "qwen3",
    "qwen3_moe": "qwen3",
    "mixtral": "mistral 7b",
    "olmoe": "tulu3",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4.5",
    "deepseek_v3": "deepseek-r1",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
}
"""The shape of each family's published template (`chats.py`); '' for none."""
FIRST = {case.model_type: name for name, case in reversed(cases.CASES.items())}
CLOSE = 1e-4
MATRICES = torch.nn.Linear | transformers.pytorch_utils.Conv1D
IDS = torch.tensor([cases.ids_of(20, seed=1)])
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "question": (said("Say hi"), {}),
    "system": (CHAT[:-1], {}),
    "tools": (CHAT[:2], {"tools": [WEATHER]}),
    "calls": (TOOLS[:3], {"tools": [WEATHER]}),
    "thoughts": ([*THOUGHT, *said("Sure?")], {}),
    "inline thoughts": (said("Why?", "<think>\nwhy\n</think>\n\nSo.", "And?"), {}),
    "no thinking": (said("Say hi"), {"enable_thinking": False}),
    "not asked": (CHAT, {"add_generation_prompt": False}),
}


class Made(NamedTuple):
    """A family's tiny model, as transformers saves it."""

    folder: Path
    model: Any
    logits: torch.Tensor


QUICK = {
    "llama",
    "gpt2",
    "phi3",
    "gemma",
    "glm4",
    "qwen3_next",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "lfm2_moe",
}
"""Families that differ in how modules are named, joined or prompted; the others are like one of them."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=() if kind in QUICK else pytest.mark.ci) for kind in FAMILIES],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A random model of a family with a tokenizer and a chat template."""
    kind = request.param
    folder, case = tmp_path_factory.mktemp(kind), cases.CASES[FIRST[kind]]
    shape = (SHAPES | OTHERS).get(TEMPLATES[kind])
    tokenizer = (shape or SHAPES["qwen2.5"]).tokenizer()
    ends = {
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": None,
    }
    model = cases.make(replace(case, config=case.config | ends), folder)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._backend,
        **tokenizer._roles,
        chat_template=shape.template if shape else None,
    )
    theirs.save_pretrained(str(folder))
    with torch.no_grad():
        return Made(folder, model, model(IDS, use_cache=False).logits)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Answer in this process what takes seconds in another: runtimes, and the trial of templates that are known."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        runtimes.answer(Path(command[-1]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(parity.processes, "run", run)
    monkeypatch.setattr("whet.model.text.tokenizer.try_template", lambda source, calls: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's advice on tied tables and Conv1D
        yield


def test_each_family_has_a_case_and_a_template() -> None:
    assert FIRST.keys() == TEMPLATES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_matrix_has_the_name_of_transformers_module(kind: str) -> None:
    case = cases.CASES[FIRST[kind]]
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
        ours = build_model(from_hf(json.loads(config.to_json_string())))
    expected = {name for name, module in theirs.named_modules() if isinstance(module, MATRICES)}
    expected |= {name for name, _ in theirs.named_parameters() if name.endswith(EXPERT_ENDS)}
    found: dict[str, set[str]] = {}
    for target in targets_of(ours):
        name, parts = module_name(target.name, ours.config)
        found.setdefault(name, set()).add(target.name)
        assert not parts or target.name in parts
        end = "" if target.is_expert else ".weight"
        assert own_names(name + end, ours.config) == tuple(each + end for each in parts or (target.name,))
        assert own_names(target.name + end, ours.config) == (target.name + end,)
    assert found.keys() == expected - {"lm_head"}


@pytest.mark.parametrize(("wrapper", "name"), [("mistral3", "ministral3"), ("gemma4", "gemma4")])
def test_a_text_part_has_the_names_inside_the_model_with_images(wrapper: str, name: str) -> None:
    case = cases.CASES[name]
    text = transformers.AutoConfig.for_model(case.model_type, **case.config)
    config = transformers.AutoConfig.for_model(wrapper, text_config=text.to_dict())
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(config)
        ours = build_model(from_hf(json.loads(config.to_json_string())))
    found = {module_name(target.name, ours.config)[0] for target in targets_of(ours)}
    language = {
        n for n, m in theirs.named_modules() if isinstance(m, MATRICES) and "language_model.layers" in n
    }
    assert found == language
    assert {own_names(f"{name}.weight", ours.config) for name in found} == {
        (f"{target.name}.weight",) for target in targets_of(ours)
    }


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(IDS)


def with_adapters(model: Any) -> set[str]:
    """Return the modules that have adapters in peft."""
    return {name for name, module in model.named_modules() if len(getattr(module, "lora_A", ()))}


@pytest.mark.some(5)
@needs_peft
def test_peft_has_every_module_that_we_trained(made: Made, tmp_path: Path) -> None:
    import peft

    model, _ = load_model(made.folder)
    experts = ("experts.gate_up_proj", "experts.down_proj") if model.config.block.experts else ()
    settings = LoRAConfig(rank=3, alpha=5.0, targets=("all-linear", *experts))
    base = Base.of(str(made.folder), made.folder)
    trained = Trained(model, settings, base=base, seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in trained.named_parameters():
            parameter.add_(torch.empty(parameter.shape).normal_(0, 0.1, generator=generator))
    trained.write(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        stored = {name.partition(".lora_")[0] for name in file.keys()}  # noqa: SIM118
    count = sum(isinstance(m, MATRICES) for n, m in made.model.named_modules() if n != "lm_head")
    count += sum(name.endswith(experts) for name, _ in made.model.named_parameters()) if experts else 0
    theirs = peft.PeftModel.from_pretrained(made.model, str(tmp_path)).eval()
    try:
        assert with_adapters(theirs) == stored
        assert len(stored) == count
        with torch.no_grad():
            expected = theirs(IDS, use_cache=False).logits
        assert (expected - made.logits).abs().max() > 0.1
        torch.testing.assert_close(logits(model), expected, atol=CLOSE, rtol=CLOSE)
    finally:
        theirs.unload()
    adapter = read_adapter(tmp_path)
    again = adapter.fit(load_model(made.folder)[0])
    adapter.apply(again)
    assert torch.equal(logits(again), logits(model))
    other, _ = load_model(made.folder)
    restored = Trained(other, settings, base=base, seed=1)
    restored.restore(tmp_path)
    for (name, ours), (_, own) in zip(restored.named_parameters(), trained.named_parameters(), strict=True):
        assert torch.equal(ours, own), name


@needs_peft
def test_we_have_every_module_that_peft_trained(made: Made, tmp_path: Path) -> None:
    import peft

    generator = torch.Generator().manual_seed(5)
    theirs = peft.get_peft_model(
        made.model, peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules="all-linear")
    ).eval()
    try:
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.1, generator=generator))
            expected = theirs(IDS, use_cache=False).logits
        theirs.save_pretrained(str(tmp_path))
        count = len(with_adapters(theirs))
    finally:
        theirs.unload()
    adapter = read_adapter(tmp_path)
    assert len(adapter.pairs) == count > 7
    model = adapter.fit(load_model(made.folder)[0])
    adapter.apply(model)
    assert (expected - made.logits).abs().max() > 0.1
    torch.testing.assert_close(logits(model), expected, atol=CLOSE, rtol=CLOSE)


def rendered(folder: Path) -> dict[str, str]:
    """Render all conversations with transformers; what a template refuses is the error's name."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    found = {}
    for name, (messages, values) in CONVERSATIONS.items():
        given = {"add_generation_prompt": True, **values}
        try:
            found[name] = tokenizer.apply_chat_template(messages, tokenize=False, **given)
        except Exception as error:  # of the template, or of jinja2
            found[name] = type(error).__name__
    return found


@pytest.mark.some(5)
def test_an_exported_model_answers_and_is_asked_as_before(made: Made, tmp_path: Path) -> None:
    report = export(
        ExportConfig(
            policy=PolicyConfig(init=str(made.folder), device="cpu"),
            out=str(tmp_path / "out"),
            dtype="f32",
            num_prompts=1,
            max_new_tokens=2,
        )
    )
    assert report["verdict"] == "passed", report["failures"]
    before, after = rendered(made.folder), rendered(tmp_path / "out")
    assert after == before
    assert before["question"] == "ValueError" or "Say hi" in before["question"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    with torch.no_grad():
        found = theirs.eval()(IDS, use_cache=False).logits
    torch.testing.assert_close(found, made.logits, atol=CLOSE, rtol=CLOSE)
