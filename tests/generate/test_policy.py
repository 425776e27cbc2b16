"""Policy: prompts, demonstrations and texts of each template; what is saved asks the same question again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.algo.packing import TrainingSequence, pack
from whet.generate.engine import Request
from whet.generate.policy import Policy, PolicyConfig, load_policy, resolve_device
from whet.generate.probe import ProbeResult, probe_policy
from whet.generate.sampling import SamplingParams
from whet.model.config import ModelConfig
from whet.model.text.template import BASE_TEMPLATE, PLAIN_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model, save_model
from whet.schema import SCHEMAS, ResponseSchema
from whet.types import Problem, UserError

SHAPE = ModelConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=192,
)
BYTES = PolicyConfig(tokenizer="bytes", model=SHAPE, template="plain")
LETTERS = PolicyConfig(
    tokenizer="characters", alphabet="0123456789+=", model=SHAPE, template="plain", tags_as_tokens=True
)
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[bot]{% endif %}"
)
PROBLEM = Problem(uid="u", task="arithmetic", prompt="12+5=", answer="17", solution="2+5=7")
EOS = 256  # of the byte tokenizer: bytes 0 to 255, <eos>, <pad>, tags
SYSTEM = (
    "You are given a problem. Think about the problem and write your working between <think> and </think>. "
    "Then write your final answer as a single number between <answer> and </answer>."
)


def octets(text: str) -> list[int]:
    return list(text.encode())


def chat_folder(folder: Path, *, rows: int = 258, template: str | None = CHAT) -> Path:
    """A model folder as the hub has them: byte tokenizer, chat template, no protocol.json."""
    tokenizer = Tokenizer.bytes()
    if template is None:
        tokenizer.chat_template = None
    else:
        tokenizer = tokenizer.with_template(template)
    model = build_model(replace(SHAPE, vocab_size=rows))
    init_weights(model, seed=1)
    save_model(model, folder, eos_ids=(EOS,))
    tokenizer.save(folder)
    return folder


# --- config ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "policy.init is empty (random weights): give policy.tokenizer"),
        ({"init": "x", "max_rows": 0}, "policy.max_rows = 0: expected 1 or more"),
        ({"init": "x", "num_threads": -1}, "policy.num_threads = -1: expected 0"),
        ({"tokenizer": "characters"}, "policy.tokenizer = characters needs policy.alphabet"),
        (
            {"tokenizer": "bytes", "alphabet": "ab"},
            "policy.alphabet is read with policy.tokenizer = characters",
        ),
        ({"init": "x", "alphabet": "ab"}, "policy.alphabet is read with"),
        ({"tokenizer": "bytes", "padded_vocab_size": 300}, "policy.padded_vocab_size is read with"),
    ],
)
def test_config_names_field_and_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^policy") as caught:
        PolicyConfig(**options)
    assert message in str(caught.value)


def test_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("tpu9", "cpu:x", ""):
        with pytest.raises(UserError, match="expected auto, cpu, cuda"):
            resolve_device(name)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no usable CUDA device"):
            resolve_device("cuda:0")


# --- prompts -----------------------------------------------------------------------------------------------


def test_plain_prompts_are_the_question_and_the_opening_tag() -> None:
    policy = load_policy(BYTES, seed=0)
    assert policy.prompt_ids(PROBLEM) == tuple(octets("12+5=<think>"))
    assert not policy.system_prompt
    reasoning = load_policy(replace(BYTES, schema="reasoning_answer"), seed=0)
    assert reasoning.prompt_ids(PROBLEM) == tuple(octets("12+5="))  # its opening tag is the model's to write


def test_tags_as_tokens_are_one_id_each() -> None:
    policy = load_policy(LETTERS, seed=0)
    # <pad> <eos> <unk>, the four tags, then the alphabet from 7 on: '1' is 8, '2' is 9, '+' 17, '5' 12, '=' 18.
    assert policy.prompt_ids(PROBLEM) == (8, 9, 17, 12, 18, 3)
    assert policy.solution(PROBLEM)[0] == (9, 17, 12, 18, 14, 4, 5, 8, 14, 6)
    assert set(policy.stop_ids) == {1, 6}
    assert policy.stop_strings == ()
    assert policy.model.config.vocab_size == 19


def test_base_prompts_are_question_and_answer() -> None:
    policy = load_policy(replace(BYTES, template="base"), seed=0)
    assert policy.prompt_ids(PROBLEM) == tuple(octets(f"{SYSTEM}\n\nQuestion: 12+5=\nAnswer:\n<think>"))
    bare = load_policy(replace(BYTES, template="base", system_prompt=False), seed=0)
    assert bare.prompt_ids(PROBLEM) == tuple(octets("Question: 12+5=\nAnswer:\n<think>"))


NO_SYSTEM = {
    # As Gemma 1 and 2, Mistral 7B v0.1, templates that only know their roles, and some that leave the message out.
    "refused": "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + CHAT,
    "alternating": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHAT,
    "unknown role": "{% for m in messages %}{{ {'user': '', 'assistant': ''}[m.role] + '' }}{% endfor %}"
    + CHAT,
    "dropped": CHAT.replace("in messages %}", "in messages if m.role != 'system' %}"),
}


@pytest.mark.parametrize("kind", NO_SYSTEM)
def test_the_instruction_goes_into_the_question_where_there_is_no_system_role(
    kind: str, tmp_path: Path
) -> None:
    folder = chat_folder(tmp_path / "model", template=NO_SYSTEM[kind])
    policy = load_policy(PolicyConfig(init=str(folder), schema="think_answer"), seed=0)
    assert policy.prompt_ids(PROBLEM) == tuple(octets(f"[user]{SYSTEM}\n\n12+5=\n[bot]<think>"))
    own = load_policy(PolicyConfig(init=str(folder), system_prompt="Be brief.", schema="none"), seed=0)
    assert own.prompt_ids(PROBLEM) == tuple(octets("[user]Be brief.\n\n12+5=\n[bot]"))
    silent = load_policy(PolicyConfig(init=str(folder), system_prompt=False, schema="none"), seed=0)
    assert silent.prompt_ids(PROBLEM) == tuple(octets("[user]12+5=\n[bot]"))
    # What is given is the template's to leave out, as in transformers; what it refuses goes into the question.
    told = [
        {"role": "system", "content": "Hi."},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ]
    before = [{"type": "text", "text": "Hi.\n\n"}] if kind != "dropped" else []
    assert silent.chat_text(told) == f"[user]{[*before, *told[1]['content']]}\n[bot]"
    policy.save(tmp_path / "saved")
    again = load_policy(PolicyConfig(init=str(tmp_path / "saved")), seed=0)
    assert again.prompt_ids(PROBLEM) == policy.prompt_ids(PROBLEM)


def test_chat_prompts_use_the_template_of_the_model(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path)
    expected = tuple(octets(f"[system]{SYSTEM}\n[user]12+5=\n[bot]<think>"))
    for template in ("chat", "auto"):
        chosen = PolicyConfig(init=str(folder), template=template, schema="think_answer")
        assert load_policy(chosen, seed=0).prompt_ids(PROBLEM) == expected
        asked = load_policy(replace(chosen, schema="inherit"), seed=0).prompt_ids(PROBLEM)
        assert asked == tuple(octets("[user]12+5=\n[bot]")), "a template without thinking is asked as it is"
    plain = load_policy(PolicyConfig(init=str(folder), template="plain"), seed=0)
    assert plain.prompt_ids(PROBLEM) == tuple(octets("12+5=<think>"))


def test_without_a_template_auto_means_base(tmp_path: Path) -> None:
    folder = str(chat_folder(tmp_path, template=None))
    assert load_policy(PolicyConfig(init=folder), seed=0).tokenizer.chat_template == BASE_TEMPLATE
    with pytest.raises(UserError, match="policy.template = chat: the tokenizer has no chat template"):
        load_policy(PolicyConfig(init=folder, template="chat"), seed=0)


# --- demonstrations and texts ------------------------------------------------------------------------------


def test_demonstrations_end_with_what_ends_a_response() -> None:
    policy = load_policy(BYTES, seed=0)
    text = "2+5=7</think><answer>17</answer>"
    # '</answer>' is nine bytes here, which no id ends: the end of text follows.
    assert policy.solution(PROBLEM)[0] == (*octets(text), EOS)
    assert policy.solution(PROBLEM, thinking="")[0] == (*octets("</think><answer>17</answer>"), EOS)
    assert policy.stop_ids == (EOS,)
    assert policy.stop_strings == ("</answer>",)
    for made in (policy, load_policy(LETTERS, seed=0)):
        assert made.solution(PROBLEM)[0][-1] in made.stop_ids


@pytest.mark.parametrize("config", [BYTES, LETTERS], ids=["bytes", "characters"])
def test_texts_keep_the_closing_tag_and_drop_the_end(config: PolicyConfig, tmp_path: Path) -> None:
    """Also after save and load, where the closing tag's id comes back as one more end-of-text id."""
    fresh = load_policy(config, seed=0)
    fresh.save(tmp_path)
    loaded = load_policy(PolicyConfig(init=str(tmp_path)), seed=1)
    text = "2+5=7</think><answer>17</answer>"
    for policy in (fresh, loaded):
        prompt = policy.prompt_ids(PROBLEM)
        body = policy.tokenizer.encode(text)
        eos = policy.tokenizer.eos_id
        assert eos is not None
        assert policy.completion_text(prompt, body) == text
        assert policy.completion_text(prompt, [*body, eos]) == text
        assert policy.completion_text(prompt, body[:3]) == text[:3]
        assert policy.completion_text(prompt, [eos]) == ""
        assert policy.completion_text(prompt, []) == ""
        assert (
            policy.schema.parse(policy.completion_text(prompt, policy.solution(PROBLEM)[0])).verdict
            == "perfect"
        )
    assert loaded.stop_ids == fresh.stop_ids
    assert loaded.stop_strings == fresh.stop_strings
    assert loaded.solution(PROBLEM)[0] == fresh.solution(PROBLEM)[0]


def test_only_one_final_end_is_dropped() -> None:
    policy = load_policy(BYTES, seed=0)
    assert policy.completion_text((1,), [*octets("a"), EOS, *octets("b"), EOS]) == "a<eos>b"


# --- save and load -----------------------------------------------------------------------------------------


FIRST_FIELDS = {
    *(
        "think_open",
        "think_close",
        "answer_open",
        "answer_close",
        "opening_in_prompt",
        "answer_type",
        "tools",
    ),
    *("tool_open", "tool_close", "result_open", "result_close"),
}


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("template", ["plain", "base"])
def test_what_is_saved_asks_the_same_again(schema: Any, template: Any, tmp_path: Path) -> None:
    policy = load_policy(replace(BYTES, schema=schema, template=template), seed=3)
    policy.save(tmp_path)
    stored = json.loads((tmp_path / "protocol.json").read_text())
    assert ResponseSchema(**stored["schema"]) == SCHEMAS[schema]
    assert set(stored["schema"]) >= FIRST_FIELDS  # what earlier versions wrote, and they read nothing else
    if schema in ("think_answer", "reasoning_answer", "working_out_solution"):
        assert set(stored["schema"]) == FIRST_FIELDS
    assert stored["template"] == {"plain": PLAIN_TEMPLATE, "base": BASE_TEMPLATE}[template]
    again = load_policy(PolicyConfig(init=str(tmp_path)), seed=4)
    assert again.protocol() == policy.protocol()
    assert again.schema == SCHEMAS[schema]
    assert again.prompt_ids(PROBLEM) == policy.prompt_ids(PROBLEM)
    for (name, ours), (_, loaded) in zip(
        policy.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert torch.equal(ours, loaded), name


@pytest.mark.parametrize(
    ("template", "schema", "stops"),
    [
        ("base", "hashes", ("\nQuestion:",)),
        ("base", "think_answer", ("</answer>", "\nQuestion:")),
        ("base", "none", ()),  # the whole text counts
        ("plain", "hashes", ()),
    ],
)
def test_a_base_model_stops_before_it_asks_itself_a_question(template: Any, schema: Any, stops: Any) -> None:
    assert load_policy(replace(BYTES, schema=schema, template=template), seed=3).stop_strings == stops


def test_what_is_saved_can_be_overruled(tmp_path: Path) -> None:
    load_policy(replace(BYTES, schema="reasoning_answer", template="base"), seed=3).save(tmp_path)
    other = load_policy(PolicyConfig(init=str(tmp_path), schema="think_answer", template="plain"), seed=0)
    assert other.schema == SCHEMAS["think_answer"]
    assert other.prompt_ids(PROBLEM) == tuple(octets("12+5=<think>"))
    bare = load_policy(PolicyConfig(init=str(tmp_path), system_prompt=False), seed=0)
    assert bare.prompt_ids(PROBLEM) == tuple(octets("Question: 12+5=\nAnswer:\n"))


def test_no_system_prompt_stays_so(tmp_path: Path) -> None:
    load_policy(replace(BYTES, template="base", system_prompt=False), seed=3).save(tmp_path)
    assert not load_policy(PolicyConfig(init=str(tmp_path)), seed=0).system_prompt


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "malformed"),
        ('{"schema": {"think_open": "<a>", "color": 1}, "template": "", "system_prompt": true}', "malformed"),
        ('{"schema": [1], "template": "", "system_prompt": true}', "malformed"),
        ('{"schema": {"think_open": ""}, "template": "", "system_prompt": true}', "malformed"),
        (
            '{"schema": {"opening_in_prompt": {}}, "template": "", "system_prompt": true}',
            "expected true or false",
        ),
        ('{"schema": {"instruction": 3}, "template": "", "system_prompt": true}', "a text, got 3"),
        (
            '{"schema": {"think_open": {}, "think_close": []}, "template": "", "system_prompt": true}',
            "think_open is a text, got {}",
        ),
        ('{"schema": {"tools": [{}]}, "template": "", "system_prompt": true}', "tools are names"),
        ('{"schema": {}, "system_prompt": true}', "malformed"),
    ],
)
def test_a_broken_protocol_is_a_user_error(tmp_path: Path, text: str, message: str) -> None:
    folder = chat_folder(tmp_path)
    (folder / "protocol.json").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_policy(PolicyConfig(init=str(folder)), seed=0)
    assert "protocol.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_random_weights_follow_the_seed() -> None:
    one, same, other = (load_policy(BYTES, seed=seed).model.head_weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


# --- vocabularies ------------------------------------------------------------------------------------------


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path, rows=257)
    with pytest.raises(UserError, match="the tokenizer has 258 ids, the model 257 rows"):
        load_policy(PolicyConfig(init=str(folder)), seed=0)


def test_new_tags_grow_the_model_and_padding_is_never_sampled(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path)
    before = load_policy(PolicyConfig(init=str(folder)), seed=0).model.head_weight
    config = PolicyConfig(
        init=str(folder), tags_as_tokens=True, padded_vocab_size=320, schema="reasoning_answer"
    )
    policy = load_policy(config, seed=0)
    assert policy.tokenizer.vocab_size == policy.model.num_valid_tokens == 262
    assert policy.model.config.vocab_size == 320
    assert torch.equal(policy.model.head_weight[:258], before)
    assert policy.tokenizer.encode("<reasoning></reasoning><answer></answer>") == [258, 259, 260, 261]
    with torch.no_grad():
        policy.model.head_weight[262:] *= 1000  # rows that would win half of all draws
    requests = [Request(prompt_ids=policy.prompt_ids(PROBLEM), seeds=tuple(range(40)))]
    (row,) = policy.engine().generate(requests, SamplingParams(max_new_tokens=8))
    assert max(max(done.ids) for done in row) < 262
    # Nor does the trainer give those rows any probability.
    drawn = TrainingSequence(prompt_ids=requests[0].prompt_ids, completion_ids=row[0].ids)
    logprobs_M, _ = policy.score(pack([drawn], token_budget=999).micro_batches[0])
    assert logprobs_M.tolist() == pytest.approx(row[0].logprobs, abs=1e-5)  # float32
    policy.model.num_valid_tokens = 320  # control
    (row,) = policy.engine().generate(requests, SamplingParams(max_new_tokens=8))
    assert max(max(done.ids) for done in row) >= 262
    policy.save(tmp_path / "again")
    again = load_policy(PolicyConfig(init=str(tmp_path / "again")), seed=0)
    assert (again.model.config.vocab_size, again.model.num_valid_tokens) == (320, 262)
    assert again.stop_ids == policy.stop_ids == (EOS, 261)


def test_tags_grow_just_enough_or_must_fit(tmp_path: Path) -> None:
    folder = str(chat_folder(tmp_path))
    assert load_policy(PolicyConfig(init=folder, tags_as_tokens=True), seed=0).model.config.vocab_size == 262
    with pytest.raises(UserError, match="need 262 embedding rows; there are 260"):
        load_policy(PolicyConfig(init=folder, tags_as_tokens=True, padded_vocab_size=260), seed=0)


def test_padding_of_random_weights_is_never_sampled() -> None:
    policy = load_policy(replace(LETTERS, padded_vocab_size=64), seed=0)
    assert (policy.model.config.vocab_size, policy.model.num_valid_tokens) == (64, 19)


# --- engine and probe --------------------------------------------------------------------------------------


def test_the_engine_stops_at_the_closing_tag_of_bytes() -> None:
    """A policy whose tag is several tokens: the text is looked at, and cut after the tag."""
    policy = load_policy(replace(BYTES, model=replace(SHAPE, tie_embeddings=False)), seed=0)
    close = octets("</answer>")
    with (
        torch.no_grad()
    ):  # wire it to say "</answer></answer>...": each letter's row points at the next letter's
        for name, parameter in policy.model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        table = policy.model.get_parameter("model.embed_tokens.weight")
        for channel, (letter, successor) in enumerate(zip(close, [*close[1:], close[0]], strict=True)):
            table[letter, channel] = 1.0
            policy.model.head_weight[successor, channel] = 1.0
    requests = [Request(prompt_ids=tuple(close[-1:]), seeds=(1, 2))]
    (row,) = policy.engine().generate(requests, SamplingParams(temperature=0.0, max_new_tokens=40))
    assert [list(done.ids) for done in row] == [close, close]
    assert {done.finish_reason for done in row} == {"stop"}
    assert [len(done.logprobs) for done in row] == [9, 9]
    assert policy.completion_text(requests[0].prompt_ids, row[0].ids) == "</answer>"


@pytest.mark.parametrize("config", [BYTES, LETTERS], ids=["bytes", "characters"])
@pytest.mark.usefixtures("whole_start")
def test_the_probe_finds_float32_exact(config: PolicyConfig) -> None:
    result = probe_policy(load_policy(config, seed=0), SamplingParams(temperature=0.7))
    assert result == ProbeResult(exact=True, max_gap=0.0)
    assert str(result).startswith("exact: sampler and trainer log-probabilities are bitwise equal")


@pytest.mark.usefixtures("whole_start")
def test_the_probe_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a trainer that scores at another temperature than the sampler's is no match."""
    plain = Policy.score

    def warmer(self: Policy, micro: Any, *, temperature: float) -> Any:
        return plain(self, micro, temperature=temperature * 1.01)

    monkeypatch.setattr(Policy, "score", warmer)
    result = probe_policy(load_policy(BYTES, seed=0))
    assert not result.exact
    assert 1e-6 < result.max_gap < 1
    assert str(ProbeResult(False, 0.00123)).startswith("approx: max |delta log-prob| 1.2e-03")


@pytest.mark.usefixtures("whole_start")
def test_the_probe_fits_a_short_context() -> None:
    policy = load_policy(replace(BYTES, model=replace(SHAPE, max_positions=12)), seed=0)
    assert probe_policy(policy).exact


def test_a_task_words_the_instruction() -> None:
    policy = load_policy(replace(BYTES, template="base"), seed=0)
    number = policy.prompt_ids(PROBLEM)
    policy.expect("program")
    assert "your final Python program" in policy.tokenizer.decode(policy.prompt_ids(PROBLEM))
    assert policy.prompt_ids(PROBLEM) != number


def test_what_the_alphabet_lacks_is_named() -> None:
    made = PolicyConfig(tokenizer="characters", alphabet="01+=", template="plain", tags_as_tokens=True)
    policy = load_policy(made, seed=0)
    with pytest.raises(
        UserError, match=r"does not know '78', 40% of the problems' tokens: give it another policy.alphabet"
    ):
        policy.check_alphabet([replace(PROBLEM, prompt="78=0", answer="1")])
    policy.check_alphabet([replace(PROBLEM, prompt="10=0", answer="1", solution="7")])
    with pytest.raises(UserError, match="'7'"):
        policy.check_alphabet([replace(PROBLEM, prompt="10=0", answer="1", solution="7")], solutions=True)
