"""Facts from the layouts that people have, the subject finder, and batches that contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from whet.editing.facts import Fact, check_facts, find_subject, read_fact, read_facts
from whet.editing.sites import mark_subject, prompted, tokenisation_traps
from whet.model.text.tokenizer import Tokenizer
from whet.types import UserError

OWN = {"subject": "Paris", "prompt": "{} is in", "target": "Rome"}


def fact(**changes: Any) -> Fact:
    return Fact(**({"subject": "Paris", "prompt": "{} is in", "target": "Rome", "where": "row 1"} | changes))


def test_layouts(tmp_path: Path) -> None:
    counterfact = {
        "case_id": 1,
        "requested_rewrite": {
            "prompt": "The mother tongue of {} is",
            "relation_id": "P103",
            "target_new": {"str": "English", "id": "Q1860"},
            "target_true": {"str": "French", "id": "Q150"},
            "subject": "Danielle Darrieux",
        },
        "paraphrase_prompts": ["Danielle Darrieux, a native"],
        "neighborhood_prompts": ["The native language of Montesquieu is"],
        "generation_prompts": ["Danielle Darrieux's mother tongue is"],
    }
    flat = {
        "case_id": 3087,
        "prompt": "David Robinson professionally plays the sport",
        "target_new": "baseball",
        "subject": "David Robinson",
        "ground_truth": "basketball",
        "rephrase_prompt": "David Robinson's greatest weakness is",
        "locality_prompt": "Shaquille O'Neal plays",
        "locality_ground_truth": "basketball",
    }
    source = {"subject": "Egypt", "prompt": "The capital of egypt is", "old": "Cairo", "new": "Alexandria"}
    path = tmp_path / "facts.json"
    path.write_text(json.dumps([counterfact, flat, source]))
    first, second, third = read_facts(path)
    assert (first.text, first.target, first.true) == (
        "The mother tongue of Danielle Darrieux is",
        "English",
        "French",
    )
    assert first.paraphrases == ("Danielle Darrieux, a native",)
    assert [(n.prompt, n.answer) for n in first.neighbours] == [("The native language of Montesquieu is", "")]
    assert first.openings == ("Danielle Darrieux's mother tongue is",)
    assert second.prompt == "{} professionally plays the sport"
    assert second.neighbours[0].answer == "basketball"
    assert (third.subject, third.prompt, third.target, third.true) == (
        "egypt",
        "The capital of {} is",
        "Alexandria",
        "Cairo",
    )
    assert read_facts([one.as_dict() for one in (first, second, third)])[1].paraphrases == second.paraphrases


def test_csv_holds_several_texts_in_a_cell(tmp_path: Path) -> None:
    path = tmp_path / "facts.csv"
    path.write_text(
        "subject,prompt,target,paraphrases\nParis,{} is in,Rome,Paris lies in|You find Paris in\n"
    )
    (found,) = read_facts(path)
    assert found.paraphrases == ("Paris lies in", "You find Paris in")


@pytest.mark.parametrize(
    ("text", "subject", "found"),
    [
        ("The capital of France is", "France", "France"),
        ("The capital of france is", "France", "france"),  # case-insensitive: 27 of the source's 50 needed it
        ("Parisian life in Paris is", "Paris", "Paris"),  # a whole word before a part of one
        ("paris and Paris: Paris is", "Paris", "Paris"),
        ("AT&T (US) was founded by", "at&t (us)", "AT&T (US)"),
        ("東京は日本の", "東京", "東京"),  # no spaces between words
        ("ประเทศไทยมีเมืองหลวง", "ไทย", "ไทย"),
        ("서울은 한국의", "서울", "서울"),  # a particle follows directly
        (
            "Die Stadt Ko\u0308ln ist",
            "K\u00f6ln",
            "Ko\u0308ln",
        ),  # NFC finds NFD, and the prompt stays as it is
        ("Die Stadt K\u00f6ln ist", "ko\u0308ln", "K\u00f6ln"),
    ],
)
def test_subject_finder(text: str, subject: str, found: str) -> None:
    start, end = find_subject(text, subject, "row 1")
    assert text[start:end] == found
    assert start == text.rindex(found)


def test_subject_finder_names_what_is_wrong() -> None:
    with pytest.raises(UserError, match="row 1: subject 'art' is only a part of a word"):
        find_subject("The party is", "art", "row 1")
    with pytest.raises(UserError, match="row 1: subject 'Rome' is not in 'Paris is'; put {}"):
        find_subject("Paris is", "Rome", "row 1")
    with pytest.raises(UserError, match="only a part of a word"):
        find_subject("Cafe\u0301 is", "Cafe", "row 1")  # the accent is a part of its letter
    with pytest.raises(UserError, match="only a part of a word"):
        find_subject("Москвабад is", "Москва", "row 1")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"subject": "a", "prompt": "{} is"}, "fact 1: no target .it has subject, prompt.; expected a text"),
        ({"subject": "a", "prompt": "{} {}", "target": "b"}, "more than once"),
        (OWN | {"paraphrases": [3]}, "paraphrases holds 3"),
        (OWN | {"paraphrases": ["a", None]}, "paraphrases holds None, expected texts"),
        (OWN | {"paraphrases": 3}, "paraphrases is 3, expected a list"),
        (OWN | {"openings": [""]}, "openings holds '', expected texts"),
        (OWN | {"references": [None]}, "references holds None"),
        (OWN | {"neighbours": [{"text": "x"}]}, "neighbours holds"),
        (OWN | {"neighbours": [""]}, "neighbours holds ''"),
        (OWN | {"neighbours": [{"prompt": " "}]}, "neighbours holds"),
        (OWN | {"neighbours": ["{} is in"]}, "neighbour '{} is in' has {}, and no subject of its own"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_facts([row])


def test_the_subject_goes_into_paraphrases_and_openings_and_a_neighbours_own_into_it() -> None:
    row = {
        **OWN,
        "paraphrases": ["{} lies in", "You find Paris in"],
        "openings": ["{} is"],
        "neighbours": [{"prompt": "{} lies in", "subject": "Bonn", "answer": "Germany"}],
    }
    (found,) = read_facts([row])
    assert found.paraphrases == ("Paris lies in", "You find Paris in")
    assert found.openings == ("Paris is",)
    assert [(n.prompt, n.answer) for n in found.neighbours] == [("Bonn lies in", "Germany")]


def test_a_file_that_is_one_object_is_named_as_such(tmp_path: Path) -> None:
    relation = {
        "name": "city in country",
        "prompt_templates": ["{} is in"],
        "samples": [{"subject": "Paris"}],
    }
    path = tmp_path / "city.json"
    for indent in (1, None):
        path.write_text(json.dumps(relation, indent=indent))
        with pytest.raises(UserError, match="city.json: a relation .*LRE.*; expected rows, one fact each"):
            read_facts(path)
    path.write_text(json.dumps(OWN, indent=1))
    with pytest.raises(
        UserError, match="city.json: one JSON object, with subject, prompt, target; expected rows"
    ):
        read_facts(path)


def test_contradictions_and_repeats_are_refused() -> None:
    with pytest.raises(UserError, match="row 1 and row 2 contradict each other.*'Rome' and 'Oslo'"):
        check_facts([fact(), fact(target="Oslo", where="row 2")])
    with pytest.raises(UserError, match="row 1 and row 2 are the same edit"):
        check_facts([fact(), fact(subject="PARIS", where="row 2")])
    with pytest.raises(UserError, match="row 1 and row 2 contradict each other"):
        check_facts([fact(subject="K\u00f6ln"), fact(subject="Ko\u0308ln", target="Oslo", where="row 2")])
    assert check_facts([fact(), fact(subject="Bonn", where="row 2")]) == []


def test_warnings() -> None:
    """France gets Berlin, while Germany is to keep it: the source's own batch."""
    france = fact(subject="France", prompt="The capital of {} is", target="Berlin", true="Paris")
    germany = fact(
        subject="Germany", prompt="The capital of {} is", target="Bonn", true="Berlin", where="row 2"
    )
    (warning,) = check_facts([france, germany])
    assert warning == "row 1 gives 'France' the 'Berlin' that row 2 takes from 'Germany'"
    keeps = fact(
        subject="Spain",
        prompt="The capital of {} is",
        target="Vigo",
        true="Paris",
        neighbours=[{"prompt": "The capital of France is"}],
        where="row 3",
    )
    keeps = read_facts([keeps.as_dict()])[0]
    (warning,) = check_facts([france, keeps])
    assert "expects 'The capital of France is' to remain 'Paris', and row 1 makes it 'Berlin'" in warning
    (warning,) = check_facts([fact(true="Rome")])
    assert "what is true already" in warning


def test_last_subject_token_in_gpt2(gpt2_folder: Path) -> None:
    tokenizer = Tokenizer.load(gpt2_folder)
    for template, subject in (
        ("{} is", "There"),
        ("If {} are 3 cars in", "there"),
        ("in the {}", "parking lot"),
    ):
        marked = mark_subject(tokenizer, template, subject)
        text = template.replace("{}", subject)
        assert list(marked.ids) == tokenizer.encode(text)
        assert tokenizer.decode(marked.ids[: marked.last + 1]) == text[: text.index(subject) + len(subject)]
        own = tokenizer.decode_completion((0,), marked.ids[marked.first : marked.last + 1])
        assert own.strip() == subject
        assert not marked.ends_inside


def test_bytes_and_characters_of_several_bytes() -> None:
    tokenizer = Tokenizer.bytes()
    marked = mark_subject(tokenizer, "in {}!", "Köln")
    assert bytes(tokenizer.encode("Köln")) == "Köln".encode()
    assert marked.last == len("in Köln".encode()) - 1
    assert marked.first == 3


def test_tokenisation_traps_are_named() -> None:
    tokenizer = Tokenizer.words([" cats", "cat", " sit", "The", " on"])
    row = fact(subject="cat", prompt="The {}s sit", target="on")
    assert tokenisation_traps(tokenizer, row) == [
        "row 1: the subject 'cat' ends inside the token ' cats', which other texts about it do not have"
    ]
    (trap,) = tokenisation_traps(tokenizer, fact(subject="cat", prompt="{} sit", target="under"))
    assert trap == "row 1: the tokenizer cannot spell all of 'cat sit' or 'under'"


def test_a_target_follows_its_prompt_as_one_text(gpt2_folder: Path) -> None:
    tokenizer = Tokenizer.load(gpt2_folder)
    expected = tokenizer.encode("there are 3")
    for prompt, target in (("there are", "3"), ("there are ", "3"), ("there are", " 3")):
        found = prompted(tokenizer, prompt, target)
        assert list(found.ids) == expected
        assert found.start == 2
        assert tokenizer.decode(found.targets).strip() == "3"


@pytest.mark.parametrize(
    ("prompt", "target", "text"),
    [
        ("The Louvre is in", "Rome", "The Louvre is in Rome"),
        ("中国的首都是", "上海", "中国的首都是上海"),
        ("东京塔位于", "Paris", "东京塔位于Paris"),
        ("日本の首都は", "大阪", "日本の首都は大阪"),
        ("エッフェル塔は", "ローマにある", "エッフェル塔はローマにある"),
        ("เมืองหลวงของไทยคือ", "เชียงใหม่", "เมืองหลวงของไทยคือเชียงใหม่"),
        ("한국의 수도는", "부산", "한국의 수도는 부산"),
        ("Столица России -", "Пермь", "Столица России - Пермь"),
        ("The Chinese name of Beijing is", "北京", "The Chinese name of Beijing is 北京"),
        ("首都：", "上海", "首都：上海"),
        ("首都:", "上海", "首都:上海"),
        ("Q: Where is the Louvre?\nA:", "Rome", "Q: Where is the Louvre?\nA: Rome"),
        ("The Louvre is in\n", "Rome", "The Louvre is in\nRome"),
        ('They call it "', "Rome", 'They call it "Rome'),
        ('He said "yes" in', "Rome", 'He said "yes" in Rome'),
        ('It is called "the city"', "everywhere", 'It is called "the city" everywhere'),
        ("The Louvre (in", "Rome", "The Louvre (in Rome"),
        ("The Louvre (", "Rome", "The Louvre (Rome"),
        ("It costs $", "5", "It costs $5"),
        ("The Louvre is in Rome", ", not Paris", "The Louvre is in Rome, not Paris"),
        ("It is written in", ".NET", "It is written in .NET"),
        ("The Franco-", "Italian", "The Franco-Italian"),
        ("The year", "2024", "The year 2024"),
        # What is written counts more than what the scripts call for.
        ("中国的首都是 ", "上海", "中国的首都是 上海"),
        ("中国的首都是", " 上海", "中国的首都是 上海"),
        ('They call it " ', "Rome", 'They call it " Rome'),
    ],
)
def test_a_space_stands_where_the_texts_call_for_it(prompt: str, target: str, text: str) -> None:
    tokenizer = Tokenizer.bytes()
    found = prompted(tokenizer, prompt, target)
    assert tokenizer.decode(found.ids) == text
    assert tokenizer.decode(found.targets).strip() == target.strip()
    assert tokenizer.decode(found.ids[: found.start]) == prompt.rstrip(" ")


def test_a_fact_chooses_its_space() -> None:
    tokenizer = Tokenizer.bytes()
    for cell, text in (
        (False, "The Louvre is inRome"),
        ("FALSE", "The Louvre is inRome"),
        (True, "The Louvre is in Rome"),
        (None, "The Louvre is in Rome"),
        ("", "The Louvre is in Rome"),
    ):
        row = {"subject": "Louvre", "prompt": "The {} is in", "target": "Rome", "space": cell}
        one = read_fact(row, "row 1")
        assert tokenizer.decode(prompted(tokenizer, one.text, one.target, one.space).ids) == text
    one = read_fact({"subject": "中国", "prompt": "{}的首都是", "target": "上海", "space": True}, "row 1")
    assert tokenizer.decode(prompted(tokenizer, one.text, one.target, one.space).ids) == "中国的首都是 上海"
    assert read_fact(one.as_dict(), "again").space is True
    with pytest.raises(UserError, match="row 1: space is 'perhaps', expected true, false"):
        read_fact({"subject": "a", "prompt": "{} is", "target": "b", "space": "perhaps"}, "row 1")


def test_what_follows_without_a_space_is_tokenised_without_one() -> None:
    # As SentencePiece's: the first word of whatever is encoded gets a space, and a merge crosses the boundary.
    vocab = {
        token: index for index, token in enumerate(["<unk>", "▁", "\n", "是", "上", "海", "▁上", "是上"])
    }
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [("▁", "上"), ("是", "上")], unk_token="<unk>", fuse_unk=False)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer = Tokenizer(backend, roles={"unk_token": "<unk>"})
    assert tokenizer.encode("上海") == [vocab["▁上"], vocab["海"]]
    found = prompted(tokenizer, "是", "上海")
    assert found.ids == (vocab["▁"], vocab["是"], vocab["上"], vocab["海"])
    assert found.start == 2


def test_a_vocabulary_without_a_space_has_none_between() -> None:
    tokenizer = Tokenizer.characters("0123456789+=")
    assert tokenizer.decode(prompted(tokenizer, "3+4=", "8").ids) == "3+4=8"
