"""IFEval: each instruction followed and not, beside the implementation of lm-eval, and rows that cannot be judged."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import hub
import pytest
from needs import require

from whet.tasks.base import TaskConfig, check_gold, load_task
from whet.tasks.ifeval import ARGUMENTS, CHECKS, LANGUAGE, MAX_CHARACTERS, IFEval, count_sentences
from whet.types import UserError

GOOD = "Cats are small.\n\nThey sleep a lot.\n\nThey hunt mice."
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["cat", "Mice"]}, [GOOD], ["cats", ""]),
    (
        "keywords:frequency",
        {"keyword": "they", "relation": "at least", "frequency": 2},
        [GOOD, "they, THEY"],
        ["they"],
    ),
    (
        "keywords:frequency",
        {"keyword": "they", "relation": "less than", "frequency": 2},
        ["they", "x"],
        [GOOD],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["cat", "dog"]},
        ["concatenate cats"],
        ["A Dog.", "cat"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_relation": "at least", "let_frequency": 3},
        ["Eee"],
        ["ee", "x"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***a***b***"],
        ["a", "a****** b"],
    ),
    (
        "length_constraints:number_words",
        {"relation": "at least", "num_words": 3},
        ["one two-three", "a b c"],
        ["a b"],
    ),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, ["a b"], ["a b c"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "they"},
        [GOOD, "a\n\n'They, x\n\nb"],
        ["They\n\nb\n\nc", "a\n\nthey", "a\n\nthey\n\nb\n\nc"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[a] [b]", "[][x]"],
        ["[a]", "[a\n] [b"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["x\nP. S. y", "p.s. z"], ["PS: y"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S y"], ["P.S. y"]),
    ("detectable_content:postscript", {"postscript_marker": "N.B."}, ["n.b. y"], ["nothing"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", " - a\n* b"],
        ["* a", "** a\n* b", "- a\n- b\n- c"],
    ),
    ("detectable_format:constrained_response", {}, ["My answer is yes."], ["My answer is yes", "yes"]),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* *b*", "**a** *b*"],
        ["*a*", "** **", "*a\nb*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1 a\nSection 2 b"],
        ["Section 1 a", "Sections"],
    ),
    ("detectable_format:json_format", {}, ['{"a": 1}', "```json\n[1]\n```"], ["{a}", "Here: {}"]),
    ("detectable_format:title", {}, ["<<A title>>\nx"], ["<< >>", "<<a\n>>", "<a>"]),
    (
        "combination:two_responses",
        {},
        ["a******b", "a\n******\nb\n******"],
        ["a", "a******a", "a******b******c"],
    ),
    ("combination:repeat_prompt", {"prompt_to_repeat": " Say hi. "}, ["say hi. Hi!"], ["Hi! Say hi."]),
    ("startend:end_checker", {"end_phrase": "The End."}, ["x the end.", '"Thus, the end."'], ["the end. x"]),
    ("startend:quotation", {}, ['"a"', ' "" '], ['"', '"a', "'a'"]),
    ("change_case:english_capital", {}, ["CATS SLEEP."], ["Cats", "1"]),
    ("change_case:english_lowercase", {}, ["cats sleep."], ["Cats", "1"]),
    ("punctuation:no_comma", {}, ["a b"], ["a, b"]),
]
OURS: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "keywords:letter_frequency",
        {"letter": "!", "let_relation": "less than", "let_frequency": 2},
        ["a!"],
        ["!!"],
    ),
    (
        "length_constraints:number_sentences",
        {"relation": "at least", "num_sentences": 3},
        [GOOD, "One. Two! Three?"],
        ["One. Two.", "Mr. Smith met Dr. Jones. He left."],
    ),
    (
        "length_constraints:number_sentences",
        {"relation": "less than", "num_sentences": 2},
        ["One only"],
        ["Go. Then stop."],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 2},
        ["NASA and ESA", "WELL-KNOWN A"],
        ["Nasa ESA", ""],
    ),
]
"""Judged by rules of ours, where the original has NLTK's models, or draws a letter where none is given."""


def row(*checks: tuple[str, dict[str, Any]], prompt: str = "p") -> dict[str, Any]:
    return {
        "key": 1,
        "prompt": prompt,
        "instruction_id_list": [name for name, _ in checks],
        "kwargs": [kwargs for _, kwargs in checks],
    }


def task_of(folder: Path, *rows: dict[str, Any], **options: Any) -> IFEval:
    folder.joinpath("test.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return IFEval(folder / "test.jsonl", **options)


@pytest.mark.parametrize(("name", "kwargs", "right", "wrong"), [*CASES, *OURS])
def test_each_instruction(name: str, kwargs: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert CHECKS[name](text, kwargs), (name, text)
    for text in wrong:
        assert not CHECKS[name](text, kwargs), (name, text)


def test_every_instruction_has_a_case() -> None:
    assert {name for name, *_ in (*CASES, *OURS)} == set(CHECKS) == set(ARGUMENTS)
    assert len(CHECKS) == 24


def test_the_same_verdicts_as_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """An independent implementation, Google's own as lm-eval has it; its detector of languages always says English."""
    stubs: dict[str, dict[str, Any]] = {
        "langdetect": {"detect": lambda text: "en", "LangDetectException": Exception},
        "immutabledict": {"immutabledict": dict},
        "nltk": {
            "download": lambda *_: True,
            "data": types.SimpleNamespace(find=lambda name: name),
            "tokenize": types.SimpleNamespace(
                RegexpTokenizer=lambda pattern: types.SimpleNamespace(
                    tokenize=lambda text: re.findall(pattern, text)
                )
            ),
        },
    }
    for name, content in stubs.items():
        module: Any = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    require("lm_eval")
    found = importlib.util.find_spec("lm_eval")
    assert found is not None
    assert found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0])
    for name, place in (
        ("lm_eval", ""),
        ("lm_eval.tasks", "tasks"),
        ("lm_eval.tasks.ifeval", "tasks/ifeval"),
    ):
        package: Any = types.ModuleType(name)  # its own __init__ imports transformers, which takes 15 s
        package.__path__ = [str(folder / place)]
        monkeypatch.setitem(sys.modules, name, package)
    registry = importlib.import_module("lm_eval.tasks.ifeval.instructions_registry")
    assert set(registry.INSTRUCTION_DICT) == {*CHECKS, LANGUAGE}
    texts = [text for _, _, right, wrong in (*CASES, *OURS) for text in (*right, *wrong) if text.strip()]
    compared = 0
    for name, kwargs, _, _ in CASES:
        instruction = registry.INSTRUCTION_DICT[name](name)
        instruction.build_description(**kwargs)
        for text in texts:
            theirs = bool(instruction.check_following(text))
            assert CHECKS[name](text, kwargs) == theirs, (name, kwargs, text)
            compared += 1
    assert compared > 1500


def test_sentences() -> None:
    assert count_sentences("It costs 3.50 today. Really? Yes!") == 3
    assert count_sentences('He said "Go." Then he went.') == 2
    assert count_sentences("e.g. this, i.e. that. Done") == 2
    assert count_sentences("No full stop at all") == 1


def test_all_instructions_must_be_followed(tmp_path: Path) -> None:
    both = row(("punctuation:no_comma", {}), ("keywords:existence", {"keywords": ["cat"], "num_words": None}))
    task = task_of(tmp_path, both)
    (problem,) = [p for split in ("train", "dev", "test") for p in task.problems(split)]
    assert (problem.prompt, problem.answer) == ("p", "")
    assert task.is_correct(problem, "a cat")
    assert task.followed(problem, "a, cat") == [False, True]
    for answer in ("a, cat", "a dog", "", "  ", None, "cat " * MAX_CHARACTERS):
        assert not task.is_correct(problem, answer)
    check_gold(task, [problem], "it is compared")  # no gold answer is needed


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(("keywords:rhyme", {})), "instruction 'keywords:rhyme' is unknown"),
        (row(("keywords:existence", {})), "instruction 'keywords:existence' lacks 'keywords'"),
        (
            row(("length_constraints:number_words", {"relation": "exactly", "num_words": 3})),
            "instruction 'length_constraints:number_words': relation 'exactly', expected 'less than' or 'at least'",
        ),
        (row(), "'instruction_id_list' and 'kwargs' are not lists of one length"),
        ({"prompt": "p"}, "'instruction_id_list' and 'kwargs' are not lists of one length"),
    ],
)
def test_rows_that_cannot_be_verified(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        task_of(tmp_path, bad).problems("test")
    assert str(caught.value).startswith(f"test.jsonl line 1: {message}; fix the row")


def test_the_published_set(monkeypatch: pytest.MonkeyPatch) -> None:
    hub.install(monkeypatch)
    task = load_task(TaskConfig(name="ifeval"))
    assert isinstance(task, IFEval)
    assert task.problems("train") == []
    first, second = task.problems("test")
    assert task.num_left_out == 1  # it asks for German
    assert task.is_correct(first, "Rain falls.\n***\nIt stops.")
    assert not task.is_correct(first, "Rain falls, and stops.")
    assert task.is_correct(second, "A cat has whiskers and fur.")


def test_hostile_responses_are_judged_in_time() -> None:
    texts = [
        piece * (MAX_CHARACTERS // len(piece))
        for piece in ("*", "[", "<<", "***", "\n", ". ", "a ", '."', "A.")
    ]
    began = time.perf_counter()
    for name, kwargs, _, _ in (*CASES, *OURS):
        for text in texts:
            CHECKS[name](text, kwargs)
    assert time.perf_counter() - began < 20  # measured: 1 s
