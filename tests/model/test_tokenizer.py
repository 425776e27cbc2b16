"""Ids and prompts against published transcripts and against transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from needs import SHARED, needs, require
from tokenizers import decoders, models, normalizers

from whet.model.text.boards import boards
from whet.model.text.template import BASE_TEMPLATE, PLAIN_TEMPLATE
from whet.model.text.tokenizer import Tokenizer, _worst_growth
from whet.types import UserError

GPT2 = SHARED / "data/tokenizers/gpt2"
STORIES = SHARED / "data/models/stories260k"
needs_shared = needs("shared/data/models/stories260k")

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
TEXTS = (
    "Once upon a time",
    " leading",
    "two  spaces\n\n\ttab",
    "Zoë paid 5€ 😀",
    "",
    " ",
    "a</s>b<s> c",
    "<unk>x <think>y</think>",
)

CHESS_PROMPT = "P: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1    M:"
CHESS_IDS = (
    "47 25 374 46803 80 74 9374 81 14 381 381 381 381 14 23 14 23 14 23 14 "
    "23 14 10246 10246 10246 10246 14 49 32819 48 42 15766 49 266 509 48 74 80 532 657 "
    "352 220 220 220 337 25"
)
CARS_PROMPT = (
    "If there are 3 cars in the parking lot and 2 more cars arrive, how many cars are in the parking lot?"
)
CARS_PROMPT_IDS = (
    "1532 612 389 513 5006 287 262 7647 1256 290 362 517 5006 9240 11 703 867 5006 389 287 262 7647 1256 30"
)
CARS_REPLY = (
    "<think>There are 3 * 2 = 6 cars\nThere are 6 * 4 = 24 cars\nThere are 24 - 6 = 19 cars left</think>"
    "<answer>19</answer>"
)
CARS_REPLY_IDS = (
    "50257 1858 389 513 1635 362 796 718 5006 198 1858 389 718 1635 604 796 1987 5006 198 1858 "
    "389 1987 532 718 796 678 5006 1364 50258 50259 1129 50260"
)

CHATML = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ("user", "assistant") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
BLOCKS = """{{ 7 % 4 }}{{ '-' * 3 }}{% if tools %}T{% endif %}

{% for message in messages %}
  {% if message['role'] == 'user' %}
U: {{ message | tojson }}
    {% continue %}
  {% endif %}
  {% generation %}
A: {{ message.content }}
  {% endgeneration %}
{% endfor %}"""
MESSAGES = [{"role": "system", "content": "Think."}, {"role": "user", "content": " 1 + 1 é?\n"}]


def ids_of(text: str) -> list[int]:
    return [int(word) for word in text.split()]


@pytest.fixture(scope="module")
def gpt2(gpt2_folder: Path) -> Tokenizer:
    return Tokenizer.load(gpt2_folder).with_tags(TAGS, padded_vocab_size=50304)


@pytest.fixture(scope="module")
def stories() -> Tokenizer:
    return Tokenizer.load(STORIES)


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("transformers")


class TestGpt2:
    def test_roles(self, gpt2: Tokenizer, gpt2_folder: Path) -> None:
        assert (gpt2.bos_id, gpt2.eos_id, gpt2.pad_id, gpt2.adds_bos) == (50256, 50256, None, False)
        assert gpt2.vocab_size == 50261
        assert gpt2.special_ids == {50256, 50257, 50258, 50259, 50260}
        assert Tokenizer.load(gpt2_folder).vocab_size == 50257

    def test_chess_transcript(self, gpt2: Tokenizer) -> None:
        expected = ids_of(CHESS_IDS)
        assert len(expected) == 46
        assert gpt2.encode(CHESS_PROMPT) == expected
        assert gpt2.decode(expected) == CHESS_PROMPT
        assert [gpt2.token_text(index) for index in (46803, 32819, 10246)] == ["nb", "NB", "PP"]

    def test_cars_transcript(self, gpt2: Tokenizer) -> None:
        prompt_ids, reply_ids = ids_of(CARS_PROMPT_IDS), ids_of(CARS_REPLY_IDS)
        assert (len(prompt_ids), len(reply_ids)) == (24, 32)
        assert gpt2.encode(CARS_PROMPT) == prompt_ids
        assert gpt2.encode(CARS_REPLY) == reply_ids
        assert gpt2.decode_completion(prompt_ids, reply_ids) == CARS_REPLY
        assert [gpt2.token_text(index) for index in reply_ids[:3]] == ["<think>", "There", " are"]

    @pytest.mark.parametrize("text", TEXTS)
    def test_round_trip(self, gpt2: Tokenizer, text: str) -> None:
        assert gpt2.decode(gpt2.encode(text)) == text

    def test_partial_characters_and_unknown_ids(self, gpt2: Tokenizer) -> None:
        smile = gpt2.encode("😀")
        assert len(smile) > 1
        assert gpt2.decode(smile[:1]) == "\ufffd"
        assert gpt2.decode([*smile[:1], 50258]) == "\ufffd</think>"
        assert gpt2.decode([64, 50300, 64]) == "a\ufffda"

    def test_tags_must_fit(self, gpt2_folder: Path) -> None:
        with pytest.raises(UserError, match="need 50,261 embedding rows; there are 50,258"):
            Tokenizer.load(gpt2_folder).with_tags(TAGS, padded_vocab_size=50258)

    def test_known_tag_keeps_its_id(self, gpt2: Tokenizer) -> None:
        assert gpt2.with_tags(("</think>", "<new>")).encode("</think><new>") == [50258, 50261]

    def test_tags_with_odd_letters_stay_whole(self, gpt2: Tokenizer) -> None:
        odd = gpt2.with_tags(("<éĠ>",))
        assert odd.encode("a<éĠ>") == [64, 50261]
        assert odd.decode([64, 50261]) == "a<éĠ>"

    @pytest.mark.parametrize("whole", [False, True])
    def test_same_ids_as_transformers(self, hf: Any, gpt2_folder: Path, whole: bool) -> None:
        if whole:
            require("shared/data/tokenizers/gpt2")
        file = str((GPT2 if whole else gpt2_folder) / "tokenizer.json")
        ours, theirs = Tokenizer.load(gpt2_folder), hf.PreTrainedTokenizerFast(tokenizer_file=file)
        for text in (*TEXTS, CARS_REPLY, "x<|endoftext|> y"):
            assert ours.encode(text) == theirs.encode(text)
            assert ours.decode(ours.encode(text)) == theirs.decode(
                theirs.encode(text), clean_up_tokenization_spaces=False
            )


@needs_shared
class TestStories:
    def test_same_ids_as_transformers(self, stories: Tokenizer, hf: Any) -> None:
        theirs = hf.AutoTokenizer.from_pretrained(STORIES)
        for text in TEXTS:
            assert stories.encode(text) == theirs.encode(text, add_special_tokens=False)
            ids = theirs.encode(text)
            assert ids == [1, *stories.encode(text)]
            assert stories.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)

    def test_completion_keeps_its_first_space(self, stories: Tokenizer) -> None:
        ids = [1, *stories.encode("Once upon a time there was")]
        whole = stories.decode(ids)
        for cut in range(len(ids) + 1):
            assert stories.decode(ids[:cut]) + stories.decode_completion(ids[:cut], ids[cut:]) == whole
        assert stories.decode_completion(ids[:3], stories.encode("upon")) == " upon"
        assert stories.decode(stories.encode("upon")) == "upon"

    def test_exactly_one_bos(self, stories: Tokenizer) -> None:
        assert (stories.bos_id, stories.eos_id, stories.adds_bos) == (1, 2, True)
        silent, writing = (
            stories.with_template(PLAIN_TEMPLATE),
            stories.with_template("{{ bos_token }}" + PLAIN_TEMPLATE),
        )
        assert silent.encode_prompt(MESSAGES) == [1, *stories.encode(MESSAGES[1]["content"])]
        for tokenizer in (silent, writing):
            ids = tokenizer.encode_prompt(MESSAGES, prefix="x")
            assert ids[0] == 1
            assert ids.count(1) == 1


@pytest.mark.some(6)
@needs_shared
@pytest.mark.parametrize("template", [CHATML, LLAMA3, BLOCKS, BASE_TEMPLATE, PLAIN_TEMPLATE])
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:]])
def test_template_renders_as_in_transformers(
    stories: Tokenizer, hf: Any, template: str, messages: list[dict[str, str]]
) -> None:
    theirs = hf.AutoTokenizer.from_pretrained(STORIES)
    theirs.chat_template = template
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert stories.with_template(template).render(messages, prefix="<think>") == expected + "<think>"


def test_characters() -> None:
    tokenizer = Tokenizer.characters("0123456789+= ", TAGS)
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id, tokenizer.adds_bos) == (0, 1, None, False)
    assert tokenizer.vocab_size == 3 + 4 + 13
    assert tokenizer.encode("<think>1 +2</think>") == [3, 8, 19, 17, 9, 4]
    assert tokenizer.decode([3, 8, 19, 17, 9, 4, 1]) == "<think>1 +2</think><eos>"
    assert tokenizer.encode("1xy2") == [8, 2, 2, 9]
    assert tokenizer.special_ids == frozenset(range(7))
    with pytest.raises(ValueError, match="no repetition"):
        Tokenizer.characters("aa")


def test_bytes_are_lossless() -> None:
    tokenizer = Tokenizer.bytes(TAGS)
    text = "".join(map(chr, range(0x250))) + " 😀Ġ<think>\r\n\x00"
    ids = tokenizer.encode(text)
    assert [index for index in ids if index < 256] == list(text.replace("<think>", "").encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.encode("<think>"), tokenizer.vocab_size) == (
        256,
        257,
        [258],
        262,
    )
    assert tokenizer.stop_ids == {256}


def test_lone_surrogate_is_a_user_error() -> None:
    with pytest.raises(UserError, match="lone surrogate at character 1"):
        Tokenizer.bytes().encode("a\ud800")


def test_save_then_load_and_transformers(tmp_path: Path, hf: Any) -> None:
    made = [Tokenizer.characters("0123456789+= ", TAGS), Tokenizer.bytes(TAGS).with_template(CHATML)]
    if STORIES.is_dir():
        made += [Tokenizer.load(STORIES).with_template(LLAMA3), Tokenizer.load(GPT2).with_tags(TAGS)]
    for index, tokenizer in enumerate(made):
        folder = tmp_path / str(index)
        tokenizer.save(folder)
        again, theirs = Tokenizer.load(folder), hf.AutoTokenizer.from_pretrained(folder)
        assert again.fingerprint == tokenizer.fingerprint
        assert (again.bos_id, again.eos_id, again.pad_id) == (
            theirs.bos_token_id,
            theirs.eos_token_id,
            theirs.pad_token_id,
        )
        assert (again.adds_bos, again.special_ids, again.stop_ids) == (
            tokenizer.adds_bos,
            tokenizer.special_ids,
            tokenizer.stop_ids,
        )
        assert again.chat_template == tokenizer.chat_template == theirs.chat_template
        text = "<think>12 + 34 = 46</think><answer>46</answer>"
        start = [again.bos_id] if again.adds_bos else []
        assert start + again.encode(text) == start + tokenizer.encode(text) == theirs.encode(text)
        assert again.decode(again.encode(text)) == theirs.decode(
            again.encode(text), clean_up_tokenization_spaces=False
        )


def made_with_tags(gpt2_folder: Path) -> list[Tokenizer]:
    return [
        Tokenizer.characters("0123456789+= ", TAGS),
        Tokenizer.words([*"0123456789"], TAGS),
        Tokenizer.bytes(TAGS).with_template(CHATML),
        boards(TAGS),
        Tokenizer.load(gpt2_folder).with_tags(TAGS).with_tags(("<note>",)),
    ]


def test_other_programs_show_the_tags(gpt2_folder: Path, tmp_path: Path, hf: Any) -> None:
    for index, tokenizer in enumerate(made_with_tags(gpt2_folder)):
        folder = tmp_path / str(index)
        tokenizer.save(folder)
        again, theirs = Tokenizer.load(folder), hf.AutoTokenizer.from_pretrained(folder)
        text = "11</think><answer>114</answer>"
        ids = again.encode(text)
        assert ids == tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert theirs.decode([*ids, theirs.eos_token_id], skip_special_tokens=True) == text
        again.save(tmp_path / "again")
        assert (tmp_path / "again/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_tags_are_control_tokens_here_after_saving_and_in_runs_of_old(
    gpt2_folder: Path, tmp_path: Path
) -> None:
    """As they were saved before: special in tokenizer.json, and not named in tokenizer_config.json."""
    for index, tokenizer in enumerate(made_with_tags(gpt2_folder)):
        new, old = tmp_path / f"{index}", tmp_path / f"{index}-old"
        tokenizer.save(new)
        tokenizer.save(old)
        (old / "tokenizer.json").write_text(tokenizer._backend.to_str(pretty=True))
        config = json.loads((old / "tokenizer_config.json").read_text())
        del config["whet_tags"]
        (old / "tokenizer_config.json").write_text(json.dumps(config))
        for again in map(Tokenizer.load, (new, old)):
            assert again.fingerprint == tokenizer.fingerprint
            assert again.special_ids == tokenizer.special_ids
            assert set(tokenizer.encode("".join(TAGS))) <= again.special_ids
            assert again.quoted("1</think>") == tokenizer.quoted("1</think>") != "1</think>"
            assert again.encode(again.quoted("1</think>")) == tokenizer.encode(tokenizer.quoted("1</think>"))


def test_tags_that_a_model_brings_stay_what_they_are(tmp_path: Path) -> None:
    """Qwen3's <think> is an ordinary added token, another model's a special one."""
    backend = Tokenizer.bytes()._backend
    backend.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    backend.add_special_tokens([tokenizers.AddedToken("</think>", special=True, normalized=False)])
    Tokenizer(backend, roles={}).with_tags(TAGS).save(tmp_path)
    rows = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    assert {row["content"]: row["special"] for row in rows[2:]} == {
        "<think>": False, "</think>": True, "<answer>": False, "</answer>": False
    }  # fmt: skip


@pytest.mark.parametrize("tags", ["<think>", [1], {"<think>": True}])
def test_malformed_tags_are_a_user_error(tags: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="whet_tags"):
        Tokenizer.load(write_folder(tmp_path, tokenizer_config={"whet_tags": tags}))


def write_folder(folder: Path, **files: Any) -> Path:
    Tokenizer.characters("abc").save(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_stop_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, generation_config={"eos_token_id": [2, 3]}))
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (1, {1, 2, 3})
    tokenizer.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").stop_ids == {1, 2, 3}


def test_roles_fall_back(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        tokenizer_config={},
        special_tokens_map={"eos_token": {"content": "<unk>"}},
        config={"bos_token_id": 0},
    )
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.adds_bos) == (2, 0, False)


@needs_shared
@pytest.mark.parametrize(("by_config", "by_processor"), [(False, False), (False, True), (True, False)])
def test_who_adds_bos(tmp_path: Path, hf: Any, by_config: bool, by_processor: bool) -> None:
    content = json.loads((STORIES / "tokenizer.json").read_text())
    content["post_processor"] = content["post_processor"] if by_processor else None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": by_config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.adds_bos is (by_config or by_processor)
    tokenizer.save(tmp_path)
    again, theirs = Tokenizer.load(tmp_path), hf.AutoTokenizer.from_pretrained(tmp_path)
    assert again.adds_bos is tokenizer.adds_bos is (theirs.encode("a")[0] == 1)
    assert again.fingerprint == tokenizer.fingerprint


def test_named_templates(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        tokenizer_config={
            "chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
        },
    )
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer.load(folder).chat_template == "d"


def test_named_templates_are_chosen_as_in_transformers(tmp_path: Path, hf: Any) -> None:
    """Command-R and Hermes have one for tools, Command-R one for documents."""
    texts = {
        "default": "d{{ messages[0].content }}",
        "tool_use": "t{{ tools[0].name }}",
        "rag": "r{{ documents[0].x }}",
    }
    rows = [{"name": name, "template": text} for name, text in texts.items()]
    listed = write_folder(tmp_path / "listed", tokenizer_config={"chat_template": rows, "eos_token": "<eos>"})
    (listed / "chat_template.jinja").unlink()
    Tokenizer.load(listed).save(tmp_path / "files")
    asked, tools, documents = [{"role": "user", "content": "hi"}], [{"name": "f"}], [{"x": "1"}]
    for folder in (listed, tmp_path / "files"):
        ours, theirs = Tokenizer.load(folder), hf.AutoTokenizer.from_pretrained(folder)
        assert {"default": ours.chat_template, **ours.named_templates} == theirs.chat_template == texts
        calls = ({}, {"tools": tools}, {"chat_template": "rag", "documents": documents})
        for values, expected in zip(calls, ("dhi", "tf", "r1"), strict=True):
            assert ours.render(asked, values=values) == expected
            assert theirs.apply_chat_template(asked, tokenize=False, **values) == expected
        assert ours.render_turn(asked, cue=False, values={"tools": tools})[0] == "tf"
        assert ours.with_template(PLAIN_TEMPLATE).render(asked, values={"tools": tools}) == "hi"
        assert (
            ours.with_template(ours.chat_template, values={"documents": "x"}).named_templates
            == ours.named_templates
        )
    with pytest.raises(
        UserError, match="chat_template = 'chat': the model's templates are default, rag, tool_use"
    ):
        ours.render(asked, values={"chat_template": "chat"})


def test_a_processors_template_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template={"chat_template": "p"})
    assert Tokenizer.load(folder).chat_template == PLAIN_TEMPLATE
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer.load(folder).chat_template == "p"


def test_a_prompt_may_go_on_with_the_last_message() -> None:
    tokenizer = Tokenizer.bytes().with_template(CHATML)
    said = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is"}]
    text = tokenizer.render(said, prefix="<think>", values={"continue_final_message": True})
    assert text.endswith("<|im_start|>assistant\nIt is")
    cueless = tokenizer.render(said[:1], prefix="<think>", values={"add_generation_prompt": False})
    assert cueless.endswith("1+1?<|im_end|>\n")
    with pytest.raises(UserError, match="changes the last message's content"):
        tokenizer.with_template("nothing").render(said, values={"continue_final_message": True})
    with pytest.raises(UserError, match="no generation cue after it"):
        tokenizer.render(said, values={"continue_final_message": True, "add_generation_prompt": True})
    with pytest.raises(UserError, match="the last message's thinking has no text"):
        tokenizer.render(said, values={"continue_final_message": "thinking"})


TOKEN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"additional_special_tokens": ["<x>", "b"]}},
        {
            "tokenizer_config": {
                "extra_special_tokens": [{"content": "<x>", "__type": "AddedToken", **TOKEN}, "b"]
            }
        },
        {"tokenizer_config": {"extra_special_tokens": {"image_token": "<x>", "boi_token": "b"}}},
        {"tokenizer_config": {}, "special_tokens_map": {"additional_special_tokens": ["<x>", "b"]}},
        {
            "tokenizer_config": {
                "added_tokens_decoder": {"6": {"content": "<x>", **TOKEN}, "4": {"content": "b", **TOKEN}}
            }
        },
        {"tokenizer_config": {"additional_special_tokens": ["b"]}, "added_tokens": {"<x>": 6}},
        {"tokenizer_config": {"mask_token": "b", "additional_special_tokens": ["<x>"]}},
    ],
)
def test_tokens_of_the_configs_alone_are_tokens(tmp_path: Path, hf: Any, files: dict[str, Any]) -> None:
    """Else they would be split as text; one that tokenizer.json knows as an ordinary token becomes a control token."""
    content = files["tokenizer_config"] | {"eos_token": "<eos>", "unk_token": "<unk>"}
    folder = write_folder(tmp_path / "a", **(files | {"tokenizer_config": content}))
    ours, theirs = Tokenizer.load(folder), hf.AutoTokenizer.from_pretrained(folder)
    assert ours.encode("ab<x>c") == theirs.encode("ab<x>c") == [3, 4, 6, 5]
    assert 4 in ours.special_ids
    ours.save(tmp_path / "b")
    assert Tokenizer.load(tmp_path / "b").encode("a<x>") == [3, 6]


def test_a_token_without_its_id_is_refused(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"9": {"content": "<x>", **TOKEN}}}
    with pytest.raises(UserError, match="token '<x>' has id 9, and would get 6"):
        Tokenizer.load(write_folder(tmp_path, tokenizer_config=config))
    config = {"added_tokens_decoder": {"9": "<x>"}}
    with pytest.raises(UserError, match="malformed added tokens"):
        Tokenizer.load(write_folder(tmp_path, tokenizer_config=config))


def test_a_decoder_whose_words_end_late_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(
        json.dumps(content | {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}})
    )
    with pytest.raises(UserError, match="depends on the next token \\(BPEDecoder"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"auto_map": {"AutoTokenizer": "x.Y"}}}, "remote code"),
        ({"tokenizer_config": {"eos_token": "<none>"}}, "eos_token '<none>' is not in tokenizer.json"),
        ({"tokenizer_config": [1]}, "expected a JSON object, got list"),
        ({"tokenizer": {"model": 1}}, "not a tokenizer"),
    ],
)
def test_bad_folder_is_a_user_error(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Tokenizer.load(write_folder(tmp_path, **files))


def test_broken_and_oversized_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="not JSON"):
        Tokenizer.load(folder)
    monkeypatch.setattr("whet.model.files.MAX_FILE_BYTES", 10)
    with pytest.raises(UserError, match="expected at most 10"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer.json"):
        Tokenizer.load(folder)


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    folder = write_folder(tmp_path)

    def download(name: str, file: str, **_: Any) -> str:
        if name == "owner/far":
            raise LocalEntryNotFoundError("no network")
        if name == "owner/empty" or not (folder / file).is_file():
            raise EntryNotFoundError("404")
        return str(folder / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert Tokenizer.load("owner/near").encode("abc") == [3, 4, 5]
    with pytest.raises(
        UserError, match=r"'owner/far': no such folder, and cannot be had from the hub \(no network\)"
    ):
        Tokenizer.load("owner/far")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owners" / "far").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no network\); did you mean the folder 'owners/far'\?$"):
        Tokenizer.load("owner/far")
    with pytest.raises(UserError, match="has no tokenizer.json"):
        Tokenizer.load("owner/empty")
    with pytest.raises(UserError, match="not a hub name"):
        Tokenizer.load("../nowhere/at/all")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "not a tokenizer"),
        ({"model": {"type": "WordLevel", "vocab": {"<eos>": 1}, "unk_token": "zz"}}, "not a tokenizer"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 1}, "unk_token": "zz"}}, "cannot encode 'b'"),
    ],
)
def test_faults_of_the_library_are_user_errors(change: dict, message: str, tmp_path: Path) -> None:
    Tokenizer.characters("ab").save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"added_tokens": []} | change))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=message):
        Tokenizer.load(tmp_path).encode("b")


def long(kind: str, name: str, step: dict[str, Any], count: int = 6) -> dict[str, Any]:
    """Return a part of a tokenizer.json: a step several times, each time in a sequence of its own."""
    return {kind: {"type": "Sequence", name: [{"type": "Sequence", name: [step]}] * count}}


SWAP = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TWICE: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 3,
}
TWICE |= {"pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (long("normalizer", "normalizers", SWAP), "normalizer could make a text"),
        (
            long("normalizer", "normalizers", SWAP | {"pattern": {"Regex": ""}, "content": "aaa"}),
            "normalizer could",
        ),
        (long("normalizer", "normalizers", {"type": "Prepend", "prepend": "a" * 50}), "normalizer could"),
        (long("decoder", "decoders", SWAP), "decoder could make a text"),
        (long("pre_tokenizer", "pretokenizers", BYTES, 9), "pre_tokenizer could make a text 512 times"),
        (long("post_processor", "processors", TWICE, 30), "post_processor could make a text"),
        (
            {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "a|" * 20_000},
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
            "pre_tokenizer has a pattern of over 16,384 characters",
        ),
    ],
)
def test_a_tokenizer_that_multiplies_text_is_refused(
    change: dict[str, Any], part: str, tmp_path: Path
) -> None:
    """It would end the whole process: the library panics where memory cannot be had."""
    Tokenizer.characters("ab").save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | change))
    with pytest.raises(UserError, match=f"tokenizer.json: {part}"):
        Tokenizer.load(tmp_path)


def replaced(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    """Return replacements of fixed texts, and of regular expressions where they begin with a slash."""
    return [
        {
            "type": "Replace",
            "pattern": {"Regex": old[1:]} if old.startswith("/") else {"String": old},
            "content": new,
        }
        for old, new in pairs
    ]


@pytest.mark.parametrize(
    ("steps", "worst", "growth"),
    [
        (replaced(*((letter, letter * 9) for letter in "abcdefgh")), "a", 9),  # none meets another's
        (replaced(("a", "bb"), ("b", "cc"), ("c", "dd")), "a", 8),  # each meets the one before it
        (replaced(("c", "dd"), ("b", "cc"), ("a", "bb")), "a", 2),
        (replaced(*[("aa", "a")] * 90), "b", 1),
        (replaced(*[(r"/\s+", " ")] * 90), "b", 1),
        (replaced(*[("/(?<=[ab])(?=[ab])", "-")] * 50), "ab", 2),  # one of them finds a place
        (replaced(*[("/(?<=[ab])(?=[ab])", "a")] * 6), "ab", 2**6),  # what is written asks for more
        (replaced(*[("/(?<=[ab])(?=[ab-])", "-")] * 50), "ab", 51),
    ],
)
def test_the_worst_growth_of_replacements_is_bounded(
    steps: list[dict[str, Any]], worst: str, growth: int
) -> None:
    """Against the library on the worst text: the bound is not below what happens, and not far above it."""
    node = {"type": "Sequence", "normalizers": steps}
    backend = tokenizers.Tokenizer(models.BPE())
    content = json.loads(backend.to_str()) | {"normalizer": node}
    normalizer = tokenizers.Tokenizer.from_str(json.dumps(content)).normalizer
    text = worst * 200
    got = len(normalizer.normalize_str(text)) / len(text)
    assert got == pytest.approx(growth, rel=0.02)
    assert got <= _worst_growth(steps) <= growth * 1.01


def test_a_tokenizer_of_many_steps_that_never_meet_is_read(tmp_path: Path) -> None:
    boards().save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == boards().fingerprint


def test_a_panic_over_a_text_is_a_user_error(tmp_path: Path) -> None:
    Tokenizer.bytes().save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": split}))
    with pytest.raises(UserError, match=r"tokenizer.json cannot encode 'aaa.*retry-limit"):
        Tokenizer.load(tmp_path).encode("a" * 30 + "!")


@pytest.mark.ci
def test_a_padding_of_terabytes_does_not_end_the_process(tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    Tokenizer.characters("ab").save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"padding": padding}))
    code = (
        "import sys; from whet.model.text.tokenizer import Tokenizer; "
        "print(Tokenizer.load(sys.argv[1]).encode('ab'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{Tokenizer.characters('ab').encode('ab')}\n"), done.stderr


def test_lone_surrogate_in_a_config_is_a_user_error(tmp_path: Path) -> None:
    Tokenizer.characters("ab").save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(r'{"bos_token": "\ud800"}')
    with pytest.raises(UserError, match="not JSON"):
        Tokenizer.load(tmp_path)


def test_a_part_of_a_character_has_its_bytes() -> None:
    """By the definition of UTF-8: the bytes of all tokens, one after the other, are those of the text."""
    text = "a 中😀é\ufffd."
    for tokenizer in (Tokenizer.bytes(("<think>",)), byte_fallback()):
        rows = [tokenizer.token_bytes(index) for index in tokenizer.encode(text)]
        assert b"".join(bytes(row or ()) for row in rows).removeprefix(b" ") == text.encode()
    assert Tokenizer.bytes().token_bytes(0xE4) == [0xE4]
    assert Tokenizer.bytes(("<think>",)).token_bytes(258) == list(b"<think>")


def byte_fallback() -> Tokenizer:
    """A tokenizer with `<0xE4>` for a byte, as Llama 2's."""
    words = {"<unk>": 0, "▁": 1, "a": 2, ".": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend, roles={"unk_token": "<unk>"})
