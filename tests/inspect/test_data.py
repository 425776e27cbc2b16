"""The data report: planted repetitions, contradictions and overlaps are found, and nothing else is."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from needs import SHARED, needs

from whet import __main__, cli
from whet.generate.policy import PolicyConfig, load_policy
from whet.inspect.data import data
from whet.inspect.data.data import DataReportConfig, find_repeated, main, show
from whet.inspect.data.overlap import compare, fold, fold_prompts, ngrams, shared_ngrams
from whet.model.text.tokenizer import Tokenizer
from whet.tasks.base import TaskConfig
from whet.tasks.jsonl import Jsonl
from whet.tasks.made.arithmetic import Arithmetic
from whet.types import Message, Problem, UserError

DATA = SHARED / "data"
needs_data = needs("shared/data")


def problems(*prompts: str, answers: str = "") -> list[Problem]:
    return [
        Problem(uid=f"{index}", task="t", prompt=prompt, answer=answers.split()[index] if answers else "1")
        for index, prompt in enumerate(prompts)
    ]


def letters(count: int, first: int = 0) -> str:
    """Distinct words."""
    return " ".join(chr(97 + n // 26) + chr(97 + n % 26) for n in range(first, first + count))


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("Tom has  3 apples.\nHow many?", "tom has 3 APPLES: how many", True),
        ("He’s “fast”, isn't he?", "he's 'fast' isn't he", True),
        ("It costs $1,000", "it costs 1000", True),
        ("\uff11\uff12 \ufb01sh", "12 fish", True),  # full-width digits and a ligature
        ("a well-known number", "a well known number", True),
        ("$x-1$", "$x+1$", False),
        ("\\sqrt{2+3}", "\\sqrt{2}+3", False),
        ("2.5 cups", "25 cups", False),
        ("3 - 2", "3 2", False),
        ("a<b", "a>b", False),
        ("48+24=", "48+25=", False),
    ],
)
def test_fold(one: str, other: str, is_same: bool) -> None:
    assert (fold(one) == fold(other)) == is_same
    first, second = fold_prompts(problems(one, other)).keys["text"]
    assert (first == second) == is_same


def test_words_and_templates() -> None:
    texts = fold_prompts(problems("Tom + 3 apples", "tom - 4,000 apples", "tom + 4.5 APPLES", "日本語"))
    assert texts.num_words.tolist() == [3, 3, 3, 3]
    assert texts.owner_N.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert len(set(texts.keys["text"])) == 4
    template = texts.keys["template"]
    assert template[0] == template[2] != template[1]
    rows = texts.words_N["template"].reshape(4, 3)
    assert np.array_equal(rows[0], rows[1])
    assert not np.array_equal(*texts.words_N["text"].reshape(4, 3)[:2])


def brute_force(held: list[Problem], train: list[Problem], n: int) -> list[float]:
    """Share of shared n-grams by sets of tuples of words."""

    def grams(problem: Problem) -> list[tuple[str, ...]]:
        words = problem.prompt.split()
        return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]

    known = {gram for problem in train for gram in grams(problem)}
    rows = [[gram in known for gram in grams(problem)] for problem in held]
    return [sum(row) / len(row) if row else float("nan") for row in rows]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_shared_ngrams_equals_brute_force(n: int) -> None:
    rng = random.Random(n)
    words = ["ab", "cd", "ef", "gh"]

    def make(count: int) -> list[Problem]:
        return problems(*(" ".join(rng.choices(words, k=rng.randrange(1, 12))) for _ in range(count)))

    held, train = make(200), make(12)
    expected = brute_force(held, train, n)
    assert np.array_equal(
        shared_ngrams(fold_prompts(held), fold_prompts(train), "text", n), expected, equal_nan=True
    )
    assert len(set(expected)) > 4


def test_ngrams_do_not_cross_texts() -> None:
    texts = fold_prompts(problems("a b", "c d", "", "e"))
    assert ngrams(texts, "text", 2)[1].tolist() == [0, 1]
    assert ngrams(texts, "text", 9)[1].tolist() == []


def test_ngrams_of_numbers_alone_say_nothing() -> None:
    texts = fold_prompts(problems("1 2 3 4", "sum 1 2 all"))
    assert ngrams(texts, "template", 4)[1].tolist() == [1]
    assert ngrams(texts, "text", 4)[1].tolist() == [0, 1]


def test_compare() -> None:
    train = problems(letters(40), letters(40, first=100), "One plus 2?", letters(12, first=300))
    held = problems(
        f"{letters(30)} {letters(10, first=200)}",  # 28 13-grams, 18 of them shared
        "one plus 2",  # too short for n-grams, but whole
        "one plus 3",
        letters(60, first=400),
        f"{letters(12, first=300)} {letters(8, first=500)}",  # 20 words: 13 8-grams, 5 shared, and no 13-gram
        letters(40, first=100).upper(),
    )
    options = {"ngram": 13, "short_ngram": 8, "num_pairs": 10}
    found = compare(fold_prompts(held), fold_prompts(train), "text", **options)
    expected = [18 / 28, 1.0, float("nan"), 0.0, 5 / 13, 1.0]
    assert np.array_equal(found.score, expected, equal_nan=True)
    assert found.is_equal.tolist() == [False, True, False, False, False, True]
    assert found.pairs == [(1, 2), (5, 1), (0, 0), (4, 3)]
    template = compare(fold_prompts(held), fold_prompts(train), "template", **options | {"num_pairs": 3})
    assert template.is_equal.tolist() == [False, True, True, False, False, True]
    assert template.pairs == [(1, 2), (2, 2), (5, 1)]


def test_one_question_about_other_images_is_another_question() -> None:
    """Whole and by n-grams: sets that ask the same of every image do not overlap with themselves."""
    text = f"How many of 7? {letters(20)}"
    first, second, third = (
        replace(p, images=(image,)) for p, image in zip(problems(text, text, text), "aba", strict=True)
    )
    found = compare(
        fold_prompts([second, third]), fold_prompts([first]), "text", ngram=13, short_ngram=8, num_pairs=9
    )
    assert found.score.tolist() == [0.0, 1.0]
    assert found.is_equal.tolist() == [False, True]
    assert find_repeated(Arithmetic(), [first, second], fold_prompts([first, second])) == []
    (group,) = find_repeated(Arithmetic(), [first, third], fold_prompts([first, third]))
    assert len(group.problems) == 2


def test_a_conversation_is_compared_as_a_whole() -> None:
    """ "Go on." after another talk is another question; one that repeats a talk of the training rows is not."""
    talk, other = (f"{letters(20)} {word}" for word in ("one", "two"))

    def asked(uid: str, *turns: str) -> Problem:
        roles = ("system", "user", "assistant", "user")
        messages = tuple(Message(role=role, content=text) for role, text in zip(roles, turns, strict=True))
        return Problem(uid=uid, task="t", prompt=turns[-1], answer=uid, messages=messages)

    train = [asked("a", "Be brief.", "Tell a story", talk, "Go on.")]
    held_out = [
        asked("b", "Be brief.", "Tell a tale of seven whales and their songs", other[::-1], "Go on."),
        asked("c", "Be brief.", "Tell a story", talk, "Go on."),
        asked("d", "Be long.", "Tell a story", talk, "Go on."),
        asked("e", "Be brief.", "Tell a story", talk, "And then?"),
    ]
    found = compare(*map(fold_prompts, (held_out, train)), "text", ngram=13, short_ngram=8, num_pairs=9)
    assert found.is_equal.tolist() == [False, True, False, False]
    assert found.score[0] == 0
    assert (found.score[2:] > 0.5).all()
    assert find_repeated(Arithmetic(), held_out, fold_prompts(held_out)) == []


def test_repeated_and_contradicting() -> None:
    given = problems("a b", "A b.", "c", "c!", "d", "C", answers="7 8 9 09 3 9.0")
    found = find_repeated(Arithmetic(), given, fold_prompts(given))
    assert [[problem.uid for problem in group.problems] for group in found] == [["0", "1"], ["2", "3", "5"]]
    assert [group.answers for group in found] == [["7", "8"], ["9"]]


def write(folder: Path, train: list[dict[str, Any]], test: list[dict[str, Any]]) -> TaskConfig:
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return TaskConfig(name="jsonl", path=str(folder))


@pytest.fixture
def task(tmp_path: Path) -> TaskConfig:
    rows = [
        {"prompt": f"{letters(3, first=index)} {index}", "answer": str(index), "solution": "s"}
        for index in range(99)
    ]
    planted = {"prompt": "Is | this *bold* [red]red[/red]\x1b[31m?", "answer": "5"}
    train = [*rows, planted, planted, planted | {"answer": "6"}]
    return write(tmp_path, train, [planted, {"prompt": "nothing like it", "answer": "1"}])


def test_report(task: TaskConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    main(DataReportConfig(out=str(out), task=task))
    content = json.loads((out / "report.json").read_text())
    sizes = [content["splits"][split]["problems"] for split in ("train", "dev", "test")]
    assert sum(sizes[:2]) == 101
    assert sizes[2] == 2
    assert content["repeated_rows"] == 1
    assert [content["splits"][split]["contradicting"] for split in ("train", "dev", "test")] == [1, 0, 0]
    assert content["splits"]["train"]["extra_copies"] == 1
    (repeated,) = content["splits"]["train"]["repeated"]
    assert (repeated["copies"], repeated["answers"]) == (2, ["5", "6"])
    lengths = content["splits"]["test"]["prompt_length"]
    assert (lengths["50"], lengths["100"]) == (15, len("Is | this *bold* [red]red[/red]x[31m?"))
    overlap = content["overlap"]["test"]["text"]
    assert (overlap["equal"], overlap["overlapping"], overlap["too_short"]) == (1, 1, 1)
    assert overlap["pairs"][0]["train_answer"] == "5"
    printed = capsys.readouterr().out
    markdown = (out / "report.md").read_text()
    assert "[red]red[/red]" in printed.replace("\n", "")
    assert "\x1b[31m" not in printed
    assert "\x1b" not in markdown
    assert r"Is \| this \*bold\*" in markdown
    assert (out / "prompt_lengths.png").read_bytes().startswith(b"\x89PNG")
    assert cli.load_yaml(out / "config.yaml", DataReportConfig).task == task
    with pytest.raises(UserError, match="already exists"):
        main(DataReportConfig(out=str(out), task=task))


def test_a_problem_is_shown_as_the_model_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": f"{n}+1=", "answer": str(n + 1), "solution": f"{n} and 1\nare {n + 1}"} for n in range(9)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--policy.tokenizer", "bytes", "--policy.schema", "r1", "--policy.template", "base"]
    words += ["--task.path", str(path), "--out", str(tmp_path / "report")]
    main(cli.parse("whet data", DataReportConfig, {}, ["jsonl", *words], positional="task.name").config)
    first = Jsonl(path).problems("train")[0]
    asked = (
        f"Question: {first.prompt}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    )
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert content["unit"] == "tokens"
    assert len(content["rendered"]) == 2
    read, trained = content["rendered"][0]
    assert (read["trained"], trained["trained"]) == (False, True)
    assert read["text"] == f"{asked}\nAnswer:\n<think>"
    assert trained["text"] == f"{first.solution}</think>\n\n\\boxed{{{first.answer}}}<eos>"
    assert read["ids"] == list(read["text"].encode())
    assert trained["ids"] == [*trained["text"].removesuffix("<eos>").encode(), 256]
    said = capsys.readouterr().out
    assert f"{read['text']}⟦{trained['text']}⟧\n{read['ids'][0]} " in said


def test_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    rows = [{"prompt": f"{letters(9)} {index}", "answer": "1"} for index in range(40)]
    task = write(tmp_path / "data", rows, [rows[0], rows[1], {"prompt": "of its own", "answer": "2"}])
    words = ["data", "--task.name", "jsonl", "--task.path", task.path]
    assert __main__.main([*words, "--out", str(tmp_path / "a")]) == 0
    assert __main__.main([*words, "--out", str(tmp_path / "b"), "--fail-on-overlap"]) == 2
    error = capsys.readouterr().err
    assert "2 of 3 test prompts overlap with train; see" in error
    assert (tmp_path / "b" / "report.md").is_file()
    clean = write(
        tmp_path / "data",
        [{"prompt": letters(9, first=20 * n + 20), "answer": "1"} for n in range(30)],
        rows[:1],
    )
    options = ["--out", str(tmp_path / "c"), "--fail-on-overlap"]
    assert __main__.main(["data", "--task.name", "jsonl", "--task.path", clean.path, *options]) == 0


def test_a_tokenizer_counts_tokens(task: TaskConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        main(DataReportConfig(out=str(tmp_path / "out"), task=task, tokenizer=str(tmp_path / "none")))
    assert not (tmp_path / "out").exists()


@needs_data
@pytest.mark.ci
def test_real_data_take_seconds(tmp_path: Path) -> None:
    began = time.perf_counter()
    config = TaskConfig(name="math", path=str(DATA / "math"))
    main(DataReportConfig(out=str(tmp_path / "m"), task=config, tokenizer=str(DATA / "tokenizers/gpt2")))
    assert time.perf_counter() - began < 30
    content = json.loads((tmp_path / "m" / "report.json").read_text())
    assert content["unit"] == "tokens"
    assert content["splits"]["train"]["extra_copies"] == 2
    assert content["overlap"]["test"]["text"]["equal"] == 0
    assert content["overlap"]["test"]["text"]["pairs"][0]["train_prompt"].startswith(
        "How many ways are there to put 5"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ngram": 5}, "ngram = 5, short_ngram = 8: expected 1 <= short_ngram <= ngram"),
        ({"short_ngram": 0}, "expected 1 <= short_ngram"),
        ({"overlap_share": 0.0}, "overlap_share = 0.0: expected above 0, at most 1"),
        ({"num_shown": -1}, "num_shown = -1: expected 0 or more"),
    ],
)
def test_config_says_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataReportConfig(**options)


def test_conversations_are_shown_as_they_are_learnt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    template += "{{ '<assistant>' if add_generation_prompt }}"
    Tokenizer.bytes().with_template(template).save(tmp_path / "tokenizer")
    asked = (Message(role="user", content="hi"), Message(role="assistant", content="no"))
    asked = (*asked, Message(role="user", content="*b*\x1b[31m"))
    rows = [
        Problem(uid="1", task="t", prompt="b", answer="", messages=asked, reply="yés"),
        Problem(uid="2", task="t", prompt="", answer="", reply="ab"),
    ]
    policy = load_policy(PolicyConfig(tokenizer=str(tmp_path / "tokenizer")), seed=0, weights=False)
    chat, text = show(policy, rows)
    assert [(piece["trained"], piece["text"]) for piece in chat] == [
        (False, "<user>hi<eos>\n<assistant>"),
        (True, "no<eos>"),
        (False, "\n<user>*b*\x1b[31m<eos>\n<assistant>"),
        (True, "yés<eos>"),
        (False, "\n"),
    ]
    assert chat[3]["ids"] == [*"yés".encode(), 256]
    assert [(piece["trained"], piece["ids"]) for piece in text] == [(False, [97]), (True, [98, 256])]
    data._print_rendered([chat])
    shown = capsys.readouterr().out
    assert "<assistant>⟦no<eos>⟧\n<user>*b*" in shown
    assert "⟦121 195 169 115 256⟧" in shown
    assert "\x1b[31m" not in shown
    assert "    <user>hi<eos>\n    <assistant>⟦no<eos>⟧\n" in "\n\n".join(data._rendered_markdown([chat]))
