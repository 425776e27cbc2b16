"""Unigram and WordPiece tokenizers, and SentencePiece files: ids and texts are those of the library and of
transformers, and all that whet does with a tokenizer works on them or is refused."""

from __future__ import annotations

import json
import re
import shutil
import string
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from chats import CHAT, QWEN3, TEXTS
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

import whet
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.rows import has_stop
from whet.model.config import ModelConfig
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model, save_model
from whet.serve.stream import TokenText
from whet.train.data.demonstrations import demonstrate
from whet.types import Problem, UserError

LETTERS = string.ascii_letters + string.digits
CORPUS = [
    *TEXTS * 4,
    "What is 12 + 34? The answer is 46.",
    " ".join(string.printable),
    LETTERS,
    LETTERS[::-1],
]
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
EXAMPLES = (
    "Hello there, how are you?",
    "",
    " ",
    "   three spaces, and   more   ",
    "\n\n\tlines\r\n and \x00 control \x1b[0m \u200b \ufeff characters",
    "日本語と中文，한국어",
    "😀 👩‍👩‍👧 🇫🇷 é e\u0301 n\u0303 ﬁ ½ Ⅳ ① ﷺ",
    "naïve façade Straße İstanbul ΑΣ",
    "a</s>b<s> c <unk> <pad>x[SEP] [CLS]y",
    "<think>two  words</think>\n<answer>3.14</answer>",
    "##ing don't can't I'm do not , . ! we 've 12,345.67",
    "x" * 300,
    "▁ under▁score",
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def unigram(*, fallback: bool) -> Backend:
    """Train a Unigram vocabulary as XLM-R has it, or with bytes for what it does not know."""
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
    trainer = trainers.UnigramTrainer(
        vocab_size=220 + len(pieces),
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", *pieces],
        unk_token="<unk>",
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    if fallback:
        vocab = [tuple(row) for row in json.loads(backend.to_str())["model"]["vocab"]]
        found = Backend(models.Unigram(vocab, unk_id=3, byte_fallback=True))
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        found.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        backend = found
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "<pad>", "</s>", "<unk>")])
    ends = [("<s>", 0), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return backend


def wordpiece(*, lowercase: bool) -> Backend:
    """Train BERT's kind."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    control = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=control, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.decoder = decoders.WordPiece()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return backend


def sentencepiece_folder(folder: Path, kind: str, config: dict[str, Any]) -> Path:
    """Train a SentencePiece file, as folders without tokenizer.json have it."""
    folder.mkdir()
    names = {"t5": "spiece.model"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "m"),
        model_type="bpe" if kind == "llama" else "unigram",
        vocab_size=400,
        byte_fallback=kind == "llama",
        normalization_rule_name="identity" if kind == "llama" else "nmt_nfkc",
        remove_extra_whitespaces=kind != "llama",
        hard_vocab_limit=False,
        minloglevel=2,
        **({"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1} if kind == "t5" else {}),
    )
    (folder / "m.model").rename(folder / names.get(kind, "tokenizer.model"))
    (folder / "m.vocab").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
T5 = {
    "tokenizer_class": "T5Tokenizer",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "extra_ids": 0,
}
XLM = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>"}
BERT = {
    "sep_token": "[SEP]",
    "cls_token": "[CLS]",
    "unk_token": "[UNK]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
KINDS: dict[str, tuple[Callable[[], Backend], dict[str, Any]]] = {
    "unigram": (partial(unigram, fallback=False), XLM),
    "unigram, bytes": (partial(unigram, fallback=True), XLM),
    "wordpiece": (partial(wordpiece, lowercase=False), BERT),
    "wordpiece, lower case": (partial(wordpiece, lowercase=True), BERT),
}
FILES = {"t5": T5, "llama": LLAMA}
LOSSLESS = ("unigram, bytes", "llama")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind, with its tokens in the config."""
    home, found = tmp_path_factory.mktemp("kinds"), {}
    for number, (name, (make, config)) in enumerate(KINDS.items()):
        folder = home / str(number)
        folder.mkdir()
        make().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": QWEN3}))
        found[name] = folder
    for name, config in FILES.items():
        found[name] = sentencepiece_folder(home / name, name, config | {"chat_template": QWEN3})
    return found


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.load(folder) for name, folder in folders.items()}


NAMES = (*KINDS, *FILES)


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_texts_are_those_of_transformers(
    name: str, folders: dict[str, Path], loaded: dict[str, Tokenizer]
) -> None:
    ours = loaded[name]
    theirs = AutoTokenizer.from_pretrained(folders[name])
    for text in EXAMPLES:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        whole = theirs.encode(text)
        assert ours.decode(whole) == theirs.decode(whole, clean_up_tokenization_spaces=False)
        if name in LOSSLESS and not text.startswith(
            (" ", "▁")
        ):  # which are taken for the space of a first word
            assert ours.decode(ids) == text


@pytest.mark.parametrize("name", FILES)
def test_converted_files_encode_as_sentencepiece_itself(
    name: str, folders: dict[str, Path], loaded: dict[str, Tokenizer]
) -> None:
    (path,) = folders[name].glob("*.model")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    # transformers differs by design in spaces before the first word, in ▁, and in control tokens inside a text.
    for text in (
        text for text in (*TEXTS, *EXAMPLES) if not set("<[▁") & set(text) and not text.startswith(" ")
    ):
        assert loaded[name].encode(text) == reference.encode(text), text


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_text_join(name: str, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[name].with_tags(TAGS)
    for text in EXAMPLES:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        stream = TokenText(tokenizer)
        pieces = [stream.push(index) for index in ids]
        assert "".join(pieces) + stream.flush() == whole
        assert "\ufffd" not in "".join(pieces) + whole
        for cut in range(len(ids) + 1):
            head, tail = tokenizer.decode(ids[:cut]), tokenizer.decode_completion(ids[:cut], ids[cut:])
            if "\ufffd" not in head + tail:
                assert head + tail == whole
        assert tokenizer.decode_completion([], ids) == whole
    assert [tokenizer.token_text(index) for index in tokenizer.encode("<think></answer>")] == [
        "<think>",
        "</answer>",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_string_is_found_where_its_last_token_ends_it(name: str, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[name]
    decode = partial(tokenizer.decode_completion, (0,))
    ids = tokenizer.encode("so the answer is 46, and so am I")
    stop = "answer is"
    assert len(tokenizer.encode(stop)) > 1
    found = [count for count in range(1, len(ids) + 1) if has_stop(ids[:count], [stop], decode)]
    assert found[0] == min(count for count in range(len(ids)) if stop in decode(ids[:count]))
    assert decode(ids[: found[0]]).strip() == "so the answer is"


@pytest.mark.parametrize("name", NAMES)
def test_marked_tokens_are_those_of_transformers(
    name: str, folders: dict[str, Path], loaded: dict[str, Tokenizer]
) -> None:
    ours = loaded[name]
    fast = AutoTokenizer.from_pretrained(folders[name])
    for text in ("Hello  naïve ﬁne 日本 46.", "hi\n Zoë says hi"):
        found = fast(text, add_special_tokens=False)
        for start in range(0, len(text), 3):
            end = start + 5
            ids, marked = ours.encode_marked(text, [(start, end)])
            spans = [found.token_to_chars(place) for place in range(len(found["input_ids"]))]
            assert list(ids) == found["input_ids"]
            inside = [
                span is not None and span.start < end and max(span.end, span.start + 1) > start
                for span in spans
            ]
            assert [place for place, is_in in enumerate(marked) if is_in] == [
                place for place, is_in in enumerate(inside) if is_in
            ]


@pytest.mark.parametrize("name", NAMES)
def test_saved_folders_load_in_transformers(name: str, loaded: dict[str, Tokenizer], tmp_path: Path) -> None:
    tokenizer = loaded[name].with_tags(TAGS)
    tokenizer.save(tmp_path)
    again, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.special_ids == tokenizer.special_ids
    assert (again.bos_id, again.eos_id, again.pad_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.pad_token_id,
    )
    for text in EXAMPLES:
        assert again.encode(text) == tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
    prompt = theirs.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=False)
    assert again.with_template(again.chat_template, prompt_bos=False).encode_prompt(CHAT[:2]) == prompt
    assert "[SEP]" not in tokenizer._roles.values() or again._roles["sep_token"] == theirs.sep_token


ROWS = [{"question": f"what is {a} + {b}?", "answer": str(a + b)} for a in range(2, 14) for b in range(3, 9)]
SHORT = {"max_new_tokens": 8, "num_prompts": 2, "group_size": 4, "preflight": "warn", "max_dead_steps": 9}


def model_folder(folder: Path, tokenizer: Tokenizer) -> Path:
    """Write random weights of demo size with a tokenizer."""
    shape = ModelConfig(
        hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
    )
    model = build_model(replace(shape, vocab_size=tokenizer.vocab_size, max_positions=512))
    init_weights(model, 0)
    tokenizer.save(folder)
    save_model(model, folder, bos_id=tokenizer.bos_id, eos_ids=tuple(tokenizer.stop_ids))
    return folder


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("name", ["unigram, bytes", "wordpiece, lower case"])
def test_two_steps_of_sft_and_rl(name: str, loaded: dict[str, Tokenizer], tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", loaded[name])
    rows = tmp_path / "rows.jsonl"  # not a list, which would be written to the cache
    rows.write_text("".join(json.dumps(row | {"solution": "1, 2"}) + "\n" for row in ROWS))
    tags = {"tags_as_tokens": True, "schema": "think_answer"}
    policy = whet.load(folder, **tags)
    run = whet.sft(policy, rows, out=tmp_path / "sft", num_steps=2, batch_size=4)
    assert [row["step"] for row in run.metrics] == [1, 2]
    run = whet.rl(run.policy, rows, out=tmp_path / "rl", num_steps=2, **SHORT)
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert run.metrics[0]["rl/reward_mean"] >= 0
    saved = run.policy.save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(saved)
    (ids,) = [run.policy.prompt_ids("2 + 2?")]
    assert theirs.decode(ids) == run.policy.loaded.tokenizer.decode(ids)
    assert theirs.encode(run.policy.prompt_text("2 + 2?"), add_special_tokens=False) == ids


@pytest.mark.parametrize(
    ("name", "answer", "options", "back"),
    [
        ("wordpiece, lower case", "Paris", {"tags_as_tokens": True}, "paris"),
        ("wordpiece", "3.14", {"tags_as_tokens": True}, "3. 14"),
        ("wordpiece", "46", {}, "< answer > 46"),
        ("wordpiece", "46", {"schema": "boxed"}, "boxed { 46 }"),
        ("t5", "def f():\n  return 1", {"tags_as_tokens": True}, "f(): return 1"),
        ("unigram, bytes", "3.14  Paris", {}, ""),
        ("wordpiece", "46", {"schema": "none"}, ""),
    ],
)
def test_a_tokenizer_that_loses_right_answers_is_refused(
    name: str, answer: str, options: dict[str, Any], back: str, loaded: dict[str, Tokenizer], tmp_path: Path
) -> None:
    folder = model_folder(tmp_path, loaded[name])
    config = PolicyConfig(init=str(folder), **({"schema": "think_answer"} | options))
    policy = load_policy(config, seed=0, weights=False)
    problem = Problem(uid="1", task="t", prompt="What?", answer=answer)
    if not back:
        return policy.check_alphabet([problem])
    with pytest.raises(UserError, match=f"does not keep 1 of 1 right answers: .*{re.escape(back)}"):
        policy.check_alphabet([problem])
    return None


def test_unknown_words_are_named(loaded: dict[str, Tokenizer], tmp_path: Path) -> None:
    """WordPiece knows letters, and yet not each word of them."""
    backend = json.loads(loaded["wordpiece"]._backend.to_str())
    backend["model"]["vocab"] = {
        text: n for n, text in enumerate(["[PAD]", "[UNK]", *string.ascii_letters, "ab", "##c"])
    }
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(backend | {"post_processor": None, "added_tokens": []})
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"unk_token": "[UNK]"}))
    policy = load_policy(
        PolicyConfig(tokenizer=str(tmp_path), template="plain", schema="none"), seed=0, weights=False
    )
    policy.check_alphabet([Problem(uid="1", task="t", prompt="abc a", answer="ab")])
    with pytest.raises(UserError, match="does not know 'cab', 50%"):
        policy.check_alphabet([Problem(uid="1", task="t", prompt="a cab", answer="ab")])


@pytest.mark.parametrize("missing", ["sentencepiece", "google.protobuf"])
def test_without_its_extra_the_conversion_says_what_to_install(
    missing: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=r"no tokenizer.json there; .* pip install .*\[convert\]'?[, ]"):
        Tokenizer.load(folders["llama"])


def test_a_damaged_file_is_a_user_error(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["llama"], tmp_path / "a")
    (tmp_path / "a/tokenizer.model").write_bytes(b"\x0anonsense")
    with pytest.raises(UserError, match="no tokenizer.json there, and transformers cannot make one"):
        Tokenizer.load(tmp_path / "a")


def test_replies_that_the_tokenizer_changes_are_told(loaded: dict[str, Tokenizer], tmp_path: Path) -> None:
    rows = [
        Problem(uid=str(n), task="t", prompt="What?", answer="", reply=text)
        for n, text in enumerate(("hi", "Hi hi"))
    ]
    for name, count in (("wordpiece, lower case", 1), ("unigram, bytes", 0)):
        policy = load_policy(
            PolicyConfig(init=str(model_folder(tmp_path / str(count), loaded[name])), schema="none"),
            seed=0,
            weights=False,
        )
        found = demonstrate(policy, rows)
        assert found.num_changed == count
        assert any("changes 1 of the first 2 replies" in note for note in found.notes) is bool(count)


def test_tools_reach_the_template_of_a_loaded_model(loaded: dict[str, Tokenizer], tmp_path: Path) -> None:
    template = "{% for t in tools or [] %}{{ t.name }} {% endfor %}{{ messages[0].content }}<think>"
    folder = model_folder(tmp_path, loaded["unigram, bytes"].with_template(template))
    policy = whet.load(folder, schema="r1")
    assert policy.prompt_text([{"role": "user", "content": "hi"}], tools=[{"name": "f"}]).startswith("f hi")
    calls = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": []}]
    assert policy.prompt_ids(calls, tools=[{"name": "f"}]) != policy.prompt_ids(calls)
