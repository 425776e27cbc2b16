"""Prompts as templates of public models write them: transformers' text and ids, openings, values and date."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_policy import BYTES, SHAPE

import whet
from whet.eval.grade import grade
from whet.generate.policy import PolicyConfig, load_policy
from whet.model.text.template import BASE_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model, save_model
from whet.rewards.base import build_rewards
from whet.schema import SCHEMAS, STEP_BY_STEP
from whet.tasks.base import answers_of
from whet.tasks.gsm8k import GSM8K
from whet.tasks.made.arithmetic import Arithmetic
from whet.train.session import written_date
from whet.types import Problem, UserError

# The parts of public templates that differ from model to model, with their text cut to the point.
CHATML = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif %}{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN3 = CHATML.replace(
    "assistant\\n' }}{%- endif %}",
    "assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}",
)
R1_DISTILL = (
    "{{bos_token}}{%- for message in messages %}{%- if message['role'] == 'user' %}{{'<User>' + message['content']}}"
    "{%- elif message['role'] == 'system' %}{{ message['content'] }}{%- else %}"
    "{{'<Assistant>' + message['content'].split('</think>')[-1] + eos_token}}{%- endif %}{%- endfor %}"
    "{% if add_generation_prompt %}{{'<Assistant><think>\\n'}}{% endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}'
    "{%- endif %}{%- endif %}{{- 'Today Date: ' + date_string + '\\n\\n' }}{%- for message in messages %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] | trim }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
NO_BOS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
MISTRAL = (  # the system message goes to the last user message, so that a reply changes what stands before it
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}"
    "{%- for message in rest %}{%- if message.role == 'user' %}"
    "{{- '[INST]' + (system + '\\n\\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}"
    "{%- else %}{{- message.content + eos_token }}{%- endif %}{%- endfor %}"
)
GPT_OSS = (
    "{%- for message in messages %}{%- if message.role == 'assistant' %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}{%- else %}"
    "{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if reasoning_effort is defined %}{{- 'Reasoning: ' + reasoning_effort }}{%- endif %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "qwen3": QWEN3,
    "r1": R1_DISTILL,
    "llama": LLAMA,
    "no_bos": NO_BOS,
    "mistral": MISTRAL,
    "gpt_oss": GPT_OSS,
}
USER = [{"role": "user", "content": "What is 2+2?"}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    *USER,
]
MARKED = [CHAT[0], {"role": "user", "content": "Hi <think>"}, *CHAT[2:]]
"""With a control token among the user's words: text, as `split_special_tokens` has it."""


def folder_of(folder: Path, template: str | None, *, adds_bos: bool = False) -> Path:
    """A model folder as the hub has them: no protocol.json."""
    tags = ("<s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    made = Tokenizer.bytes(tags)
    tokenizer = Tokenizer(
        made._backend,
        roles={"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<s>"},
        adds_bos=adds_bos,
        chat_template=template,
    )
    model = build_model(replace(SHAPE, vocab_size=tokenizer.vocab_size))
    init_weights(model, seed=1)
    save_model(model, folder, eos_ids=(256,))
    tokenizer.save(folder)
    return folder


@pytest.mark.some(6)
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_plain_model_is_asked_as_in_transformers(tmp_path: Path, name: str, adds_bos: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_of(tmp_path, TEMPLATES[name], adds_bos=adds_bos)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), whet.load(folder)
    options: dict[str, Any] = {"add_generation_prompt": True}
    for messages in (USER, CHAT):
        text = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert ours.prompt_text(messages) == text
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        assert ours.prompt_ids(messages) == list(ids)
    text = theirs.apply_chat_template(MARKED, tokenize=False, **options)
    assert ours.prompt_text(MARKED) == text
    before, words, after = text.partition("Hi <think>")
    pieces = [(before, False), (words, True), (after, False)]  # of bytes: no token joins two of them
    found = [theirs.encode(t, add_special_tokens=False, split_special_tokens=split) for t, split in pieces]
    assert ours.prompt_ids(MARKED) == sum(found, [])
    assert ours.prompt_ids("What is 2+2?") == ours.prompt_ids(USER)
    if name == "qwen3":
        text = theirs.apply_chat_template(USER, tokenize=False, enable_thinking=False, **options)
        assert ours.prompt_text(USER, enable_thinking=False) == text
        assert text.endswith("<think>\n\n</think>\n\n")
        other = whet.load(folder, template_values={"enable_thinking": False})
        assert other.prompt_text(USER) == text


@pytest.mark.parametrize(
    ("name", "schema", "ending"),
    [
        ("chatml", "think_answer", "<|im_start|>assistant\n<think>"),
        ("chatml", "r1", "<|im_start|>assistant\n<think>"),
        ("chatml", "boxed", "<|im_start|>assistant\n"),
        ("chatml", "none", "<|im_start|>assistant\n"),
        ("r1", "think_answer", "<Assistant><think>\n"),
        ("r1", "r1", "<Assistant><think>\n"),
        ("r1", "boxed", "<Assistant><think>\n"),
        ("r1", "inherit", "put your final answer within \\boxed{}.<Assistant><think>\n"),
        ("qwen3", "inherit", "<|im_start|>assistant\n<think>"),
        ("chatml", "inherit", "<|im_start|>assistant\n"),
        ("chatml", "anywhere", "<|im_start|>assistant\n"),
        ("gpt_oss", "inherit", "<|start|>assistant"),
    ],
)
def test_what_the_template_opens_is_not_opened_again(
    tmp_path: Path, name: str, schema: str, ending: str
) -> None:
    policy = load_policy(PolicyConfig(init=str(folder_of(tmp_path, TEMPLATES[name])), schema=schema), seed=0)
    problem = Problem(
        uid="a", task="t", prompt="2+2=", answer="4", solution="<think>\nwell\n</think>\n\nso \\boxed{4}"
    )
    prompt = policy.tokenizer.decode(policy.prompt_ids(problem))
    assert prompt.endswith(ending)
    assert prompt.rpartition("2+2=")[2].count("<think>") == ("<think>" in ending)
    ids, _ = policy.solution(problem)
    text = policy.completion_text(policy.prompt_ids(problem), ids)
    parsed = policy.schema.parse(text)
    assert (parsed.verdict, parsed.answer) == ("perfect", "4") or schema == "none"
    assert "<think>\n\nwell" not in prompt + text  # the template breaks the line already
    policy.save(tmp_path / "saved")
    again = load_policy(PolicyConfig(init=str(tmp_path / "saved")), seed=0)
    assert again.prompt_ids(problem) == policy.prompt_ids(problem)
    assert again.schema == policy.schema


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("r1", {"schema": "reasoning_answer"}, "thinking is <reasoning>, but the model's template opens it"),
        ("gpt_oss", {"schema": "think_answer"}, "<think> cannot stand in the prompt"),
        ("qwen3", {"schema": "r1", "template_values": {"enable_thinking": False}}, "has closed it already"),
        ("chatml", {"template_values": {"enable_thinking": False}}, "does not read it"),
        ("chatml", {"template_values": {"messages": "a"}}, "does not read it"),
        ("chatml", {"schema": "thnk"}, "expected one of think_answer"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    folder = folder_of(tmp_path, TEMPLATES[name])
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        load_policy(PolicyConfig(init=str(folder), **options), seed=0)
    assert "\n" not in str(caught.value)


def test_the_date_of_a_prompt_does_not_change_overnight(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hub", LLAMA)
    policy = load_policy(PolicyConfig(init=str(folder)), seed=0, date="2020-02-03")
    assert policy.chat_text(USER).startswith("<s>Today Date: 03 Feb 2020")
    policy.save(tmp_path / "run" / "checkpoints" / "step_1")
    again = load_policy(PolicyConfig(init=str(tmp_path / "run" / "checkpoints" / "step_1")), seed=0)
    assert again.chat_text(USER) == policy.chat_text(USER)
    assert written_date(tmp_path / "run") == "2020-02-03"  # what a resume asks with
    assert written_date(tmp_path) == ""
    today = datetime.date.today().strftime("%d %b %Y")
    assert today in load_policy(PolicyConfig(init=str(folder)), seed=0).chat_text(USER)


def test_the_system_prompt_is_the_schemas_or_ones_own_or_none(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hub", CHATML)

    def system(init: Path, value: bool | str, schema: str = "think_answer") -> str:
        policy = load_policy(PolicyConfig(init=str(init), schema=schema, system_prompt=value), seed=0)
        if value == "Be wise.":
            policy.save(tmp_path / "saved")
        text = policy.tokenizer.decode(policy.prompt_ids(Problem(uid="a", task="t", prompt="?", answer="4")))
        return text.partition("<|im_start|>system\n")[2].partition("<|im_end|>")[0]

    default = "You are a helpful assistant."  # the template's, as its makers trained it
    assert system(folder, True) == SCHEMAS["think_answer"].request
    assert system(folder, False) == system(folder, "none") == default
    assert system(folder, "Be wise.") == "Be wise."
    assert system(tmp_path / "saved", True, "inherit") == "Be wise."
    assert system(folder, True, "r1") == default  # its instruction goes to the user's message
    assert system(folder, True, "numeric_answer") == SCHEMAS["numeric_answer"].request


def test_a_plain_model_that_is_saved_has_no_schema_that_nobody_chose(tmp_path: Path) -> None:
    plain = load_policy(PolicyConfig(init=str(folder_of(tmp_path / "hub", CHATML))), seed=0, plain=True)
    assert plain.schema == SCHEMAS["none"]
    plain.save(tmp_path / "saved")
    assert "schema" not in json.loads((tmp_path / "saved" / "protocol.json").read_text())
    saved = PolicyConfig(init=str(tmp_path / "saved"))
    assert load_policy(saved, seed=0, plain=True).chat_text(USER) == plain.chat_text(USER)
    assert load_policy(saved, seed=0).schema == plain.for_tasks().schema == SCHEMAS["anywhere"]
    assert plain.for_tasks().chat_text(USER) == plain.chat_text(USER)


SAID = Problem(uid="a", task="t", prompt="Tom had 12 apples and got 6. How many has he?", answer="18")


@pytest.mark.parametrize("schema", ["inherit", "none", "anywhere"])
def test_a_chat_model_that_knows_no_tags_is_asked_plainly_and_read_anywhere(
    tmp_path: Path, schema: str
) -> None:
    """In training as in evaluation: `correct` pays what a reading of all places counts."""
    folder = folder_of(tmp_path / "hub", CHATML)
    policy, task = load_policy(PolicyConfig(init=str(folder), schema=schema), seed=0), Arithmetic()
    plain = load_policy(PolicyConfig(init=str(folder)), seed=0, plain=True)
    policy.expect(*answers_of(task))
    assert policy.prompt_ids(SAID) == plain.prompt_ids(SAID)
    texts = {"So Tom has 18 apples now.": 1.0, "12 + 6 = 18": 1.0, "So Tom has 17 apples now.": 0.0, "": 0.0}
    (correct,) = build_rewards({"correct": 1.0}, policy.schema, task)
    assert correct.function is not None
    for text, paid in texts.items():
        assert correct.function(SAID, text) == paid
        for answer_from in ("schema", "anywhere"):
            (graded,) = grade(policy, task, [(SAID, text, ())], answer_from=answer_from)  # type: ignore[arg-type]
            assert graded.is_correct == bool(paid)
    told = "prompts: the model's chat template, schema anywhere"
    told += ", the default for it" if schema == "inherit" else ""
    assert policy.describe_prompts() == f"{told}; answers are read wherever they stand"
    # What is saved is asked and read so again.
    policy.save(tmp_path / "saved")
    again = load_policy(PolicyConfig(init=str(tmp_path / "saved")), seed=0)
    again.expect(*answers_of(task))
    assert again.protocol() == policy.protocol()
    assert again.is_default == (schema == "inherit")
    assert again.describe_prompts() == policy.describe_prompts()


@pytest.mark.parametrize("trained_on", ["rows", "published"])
def test_a_published_data_set_is_asked_with_an_instruction_of_base_and_run_alike(
    tmp_path: Path, trained_on: str
) -> None:
    """Nobody chose a schema: the task decides, whatever task the run was trained on."""
    folder, rows, published = folder_of(tmp_path / "hub", CHATML), Arithmetic(), GSM8K("openai/gsm8k")
    base = load_policy(PolicyConfig(init=str(folder)), seed=0)
    base.expect(*answers_of(published if trained_on == "published" else rows))
    base.save(tmp_path / "run")
    run = load_policy(PolicyConfig(init=str(tmp_path / "run")), seed=0)
    for task, name in ((published, "step_by_step"), (rows, "anywhere")):
        for policy in (base, run):
            policy.expect(*answers_of(task))
            assert policy.schema == SCHEMAS[name]
            assert (STEP_BY_STEP in policy.chat_text(USER)) == (task is published)
        assert base.protocol() == run.protocol()
    base.expect(*answers_of(published))
    told = (
        "schema step_by_step, the default for it on a published data set; answers are read in \\boxed{}, else"
    )
    assert told in base.describe_prompts()
    (correct,) = build_rewards({"correct": 1.0}, base.schema, published)
    texts = {
        "So he has \\boxed{18}, not 17.": 1.0,
        "So he has 18.": 1.0,
        "So he has \\boxed{17} and 18.": 0.0,
    }
    for text, paid in texts.items():
        assert correct.function is not None
        assert correct.function(SAID, text) == paid
    # What the user says is not changed, and programs are no text with a box in it.
    for given in ({"schema": "anywhere"}, {"system_prompt": "Be brief."}):
        own = load_policy(PolicyConfig(init=str(tmp_path / "run"), **given), seed=0)  # type: ignore[arg-type]
        own.expect(*answers_of(published))
        assert own.schema.answer_place == "anywhere"
        assert STEP_BY_STEP not in own.chat_text(USER)
    run.expect("program")
    assert run.schema.answer_place == "whole"


@pytest.mark.parametrize(("schema", "type_"), [("inherit", "program"), ("none", "program"), ("none", "text")])
def test_what_no_gold_answer_judges_is_read_whole(tmp_path: Path, schema: str, type_: Any) -> None:
    policy = load_policy(PolicyConfig(init=str(folder_of(tmp_path, CHATML)), schema=schema), seed=0)
    policy.expect("number")
    policy.expect(type_, False)
    assert policy.schema.parse(" return 1\n2 is all ").answer == "return 1\n2 is all"
    policy.expect("choice")
    assert policy.schema.parse("I take (B), not 3 of them").answer == "B"


def test_a_model_whose_template_has_thinking_keeps_its_tags_and_so_do_protocols(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hub", QWEN3)
    policy = load_policy(PolicyConfig(init=str(folder)), seed=0)
    policy.expect("number")
    assert policy.schema == SCHEMAS["think_answer"]
    told = "schema think_answer, the default for it; answers are read between <answer> and </answer>"
    assert policy.describe_prompts().endswith(told)
    chat = folder_of(tmp_path / "chat", CHATML)
    load_policy(PolicyConfig(init=str(chat), schema="boxed"), seed=0).save(tmp_path / "run")
    kept = load_policy(PolicyConfig(init=str(tmp_path / "run")), seed=0)
    kept.expect("number")
    assert kept.schema == SCHEMAS["boxed"]
    told = kept.describe_prompts(is_read_anywhere=True)
    assert told.endswith("schema boxed; answers are read in \\boxed{}, else wherever they stand")
    base = load_policy(replace(BYTES, template="base"), seed=0)
    assert "Question and Answer, schema think_answer" in base.describe_prompts()


def test_a_protocol_keeps_its_schema_in_chats_too(tmp_path: Path) -> None:
    load_policy(replace(BYTES, template="base"), seed=3).save(tmp_path)
    policy = load_policy(PolicyConfig(init=str(tmp_path)), seed=0, plain=True)
    assert policy.schema == SCHEMAS["think_answer"]
    assert policy.chat_text(USER).endswith("Question: What is 2+2?\nAnswer:\n<think>")


def test_thinking_is_told_apart_in_plain_chats_of_a_model_that_thinks(tmp_path: Path) -> None:
    opened = load_policy(PolicyConfig(init=str(folder_of(tmp_path / "a", R1_DISTILL))), seed=0, plain=True)
    assert opened.schema.opening_in_prompt
    assert opened.schema.parse("well</think>Four.").answer == "Four."
    written = load_policy(PolicyConfig(init=str(folder_of(tmp_path / "b", QWEN3))), seed=0, plain=True)
    assert written.schema.parse("<think>well</think>Four.").answer == "Four."
    assert written.chat_text(USER).endswith("assistant\n")
    mute = PolicyConfig(init=str(tmp_path / "b"), template_values={"enable_thinking": False})
    assert (
        load_policy(mute, seed=0).schema == SCHEMAS["boxed"]
    )  # asked to think and forbidden to would not do


def test_earlier_protocols_ask_as_they_did(tmp_path: Path) -> None:
    """Before, a BOS was put before every prompt of a tokenizer that puts one before texts."""
    folder = folder_of(tmp_path / "new", NO_BOS, adds_bos=True)
    policy = load_policy(PolicyConfig(init=str(folder)), seed=0)
    policy.save(tmp_path / "saved")
    path = tmp_path / "saved" / "protocol.json"
    facts = json.loads(path.read_text())
    assert facts.pop("prompt_bos") is False
    bos = policy.tokenizer.bos_id
    again = load_policy(PolicyConfig(init=str(tmp_path / "saved")), seed=0)
    assert again.chat_ids(USER) == policy.chat_ids(USER)
    assert policy.chat_ids(USER)[0] != bos
    path.write_text(json.dumps(facts))
    earlier = load_policy(PolicyConfig(init=str(tmp_path / "saved")), seed=0)
    assert earlier.chat_ids(USER) == (bos, *policy.chat_ids(USER))
    base = load_policy(PolicyConfig(init=str(folder), template="base"), seed=0)
    assert base.tokenizer.chat_template == BASE_TEMPLATE
    assert base.chat_ids(USER)[0] == bos  # whet's own template leaves it to the tokenizer


def test_a_program_has_no_place_in_a_box(tmp_path: Path) -> None:
    policy = load_policy(replace(BYTES, schema="boxed"), seed=0)
    with pytest.raises(UserError, match="cannot hold a program"):
        policy.expect("program")
