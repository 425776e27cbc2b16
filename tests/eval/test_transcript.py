"""Token-level transcripts: a published one to the letter, counts by hand, and texts that want to be markup."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from whet.eval.probe.transcript import transcribe
from whet.model.text.tokenizer import Tokenizer
from whet.schema import SCHEMAS, ResponseSchema

SCHEMA = ResponseSchema()

# Golden: ids and layout as the source of this repository's issue published them (its row S4-24).
PROMPT = (
    "If there are 3 cars in the parking lot and 2 more cars arrive, how many cars are in the parking lot?"
)
PROMPT_IDS = (
    "1532 612 389 513 5006 287 262 7647 1256 290 362 517 5006 9240 11 703 867 5006 389 287 262 7647 1256 30"
)
THINKING = "There are 3 * 2 = 6 cars\nThere are 6 * 4 = 24 cars\nThere are 24 - 6 = 19 cars left"
THINKING_IDS = (
    "1858 389 513 1635 362 796 718 5006 198 1858 389 718 1635 604 796 1987 5006 198 "
    "1858 389 1987 532 718 796 678 5006 1364"
)
GOLDEN = r"""--- PROMPT TOKENS (24 tokens) ---
[  0] id= 1532  'If'
[  1] id=  612  ' there'
[  2] id=  389  ' are'
[  3] id=  513  ' 3'
[  4] id= 5006  ' cars'
[  5] id=  287  ' in'
[  6] id=  262  ' the'
[  7] id= 7647  ' parking'
[  8] id= 1256  ' lot'
[  9] id=  290  ' and'
[ 10] id=  362  ' 2'
[ 11] id=  517  ' more'
[ 12] id= 5006  ' cars'
[ 13] id= 9240  ' arrive'
[ 14] id=   11  ','
[ 15] id=  703  ' how'
[ 16] id=  867  ' many'
[ 17] id= 5006  ' cars'
[ 18] id=  389  ' are'
[ 19] id=  287  ' in'
[ 20] id=  262  ' the'
[ 21] id= 7647  ' parking'
[ 22] id= 1256  ' lot'
[ 23] id=   30  '?'

--- GENERATED TOKENS (32 tokens) ---
[ 24] id=50257  *** <think> ***
[ 25] id= 1858  'There'
[ 26] id=  389  ' are'
[ 27] id=  513  ' 3'
[ 28] id= 1635  ' *'
[ 29] id=  362  ' 2'
[ 30] id=  796  ' ='
[ 31] id=  718  ' 6'
[ 32] id= 5006  ' cars'
[ 33] id=  198  '\n'
[ 34] id= 1858  'There'
[ 35] id=  389  ' are'
[ 36] id=  718  ' 6'
[ 37] id= 1635  ' *'
[ 38] id=  604  ' 4'
[ 39] id=  796  ' ='
[ 40] id= 1987  ' 24'
[ 41] id= 5006  ' cars'
[ 42] id=  198  '\n'
[ 43] id= 1858  'There'
[ 44] id=  389  ' are'
[ 45] id= 1987  ' 24'
[ 46] id=  532  ' -'
[ 47] id=  718  ' 6'
[ 48] id=  796  ' ='
[ 49] id=  678  ' 19'
[ 50] id= 5006  ' cars'
[ 51] id= 1364  ' left'
[ 52] id=50258  *** </think> ***
[ 53] id=50259  *** <answer> ***
[ 54] id= 1129  '19'
[ 55] id=50260  *** </answer> ***

Decoded: <think>There are 3 * 2 = 6 cars\nThere are 6 * 4 = 24 cars\nThere are 24 - 6 = 19 cars left</think><answer>19</answer>

Stats: 32 generated tokens total, 27 thinking tokens, 1 answer token.
Wrong arithmetic: 24 - 6 = 19"""  # noqa: E501 (as it was published; the last line is ours)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def test_the_published_transcript_to_the_letter(gpt2_folder: Path) -> None:
    tokenizer = Tokenizer.load(gpt2_folder).with_tags(SCHEMA.tags, padded_vocab_size=50304)
    assert tokenizer.encode(PROMPT) == numbers(PROMPT_IDS)
    assert tokenizer.encode(THINKING) == numbers(THINKING_IDS)
    written = [50257, *numbers(THINKING_IDS), 50258, 50259, 1129, 50260]
    assert tokenizer.encode(f"<think>{THINKING}</think><answer>19</answer>") == written
    transcript = transcribe(tokenizer, SCHEMA, numbers(PROMPT_IDS), written)
    assert [transcript.count(part) for part in ("prompt", "generated", "thinking", "answer")] == [
        *(24, 32, 27, 1)
    ]
    assert "\n".join(line for line, _ in transcript.lines()) == GOLDEN
    assert transcript.render().plain == GOLDEN


def test_the_published_layout_where_its_tokenizer_is_missing() -> None:
    spelling = {
        int(index): ast.literal_eval(shown) if shown[0] in "'\"" else shown.strip("* ")
        for index, shown in re.findall(r"id= *(\d+)  (.*)", GOLDEN)
    }
    fake = SimpleNamespace(
        token_text=spelling.__getitem__,
        special_ids=frozenset(range(50257, 50261)),
        decode_completion=lambda _, ids: "".join(map(spelling.__getitem__, ids)),
    )
    written = [50257, *numbers(THINKING_IDS), 50258, 50259, 1129, 50260]
    transcript = transcribe(cast(Tokenizer, fake), SCHEMA, numbers(PROMPT_IDS), written)
    assert transcript.render().plain == GOLDEN


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tags are tokens", "tags are spelt"])
@pytest.mark.parametrize(
    ("completion", "schema", "thinking", "answer"),
    [
        ("abc</think><answer>42</answer>", "think_answer", "abc", "42"),
        ("</think><answer>7</answer>", "think_answer", "", "7"),
        ("never closed", "think_answer", "never closed", ""),
        ("a</think>b", "think_answer", "a", ""),
        ("a</think><answer>1</answer>b<answer>23</answer>c", "think_answer", "a", "23"),
        ("a<answer>1</answer>b</think><answer>2</answer>", "think_answer", "a<answer>1</answer>b", "2"),
        ("a</think><answer>never closed", "think_answer", "a", ""),
        ("<think>ab</think> <answer>9</answer>", "think_answer", "ab", "9"),
        ("a</reasoning><answer>9</answer>", "reasoning_answer", "", "9"),
        ("<reasoning>a</reasoning><answer>9</answer>", "reasoning_answer", "a", "9"),
        ("</answer></think></answer>", "think_answer", "</answer>", ""),
        ("", "think_answer", "", ""),
    ],
)
def test_parts_are_what_the_parser_takes(
    completion: str, schema: str, thinking: str, answer: str, as_tokens: bool
) -> None:
    tags = SCHEMAS[schema].tags if as_tokens else ()
    tokenizer = Tokenizer.bytes(tags)
    ids = tokenizer.encode(completion)
    transcript = transcribe(tokenizer, SCHEMAS[schema], tokenizer.encode("1+1="), ids)
    found = {
        part: "".join(r.text for r in transcript.rows if r.part == part) for part in ("thinking", "answer")
    }
    assert found == {"thinking": thinking, "answer": answer}
    parsed = SCHEMAS[schema].parse(completion)
    assert answer == (parsed.answer or "")
    # The parser leaves a tag that the prompt has written already in the thinking; here it is a tag.
    assert parsed.thinking is None or thinking == parsed.thinking.removeprefix("<think>")
    assert transcript.count("prompt") == 4
    assert transcript.count("generated") == len(ids)
    assert [row.position for row in transcript.rows] == list(range(4 + len(ids)))
    assert "".join(row.text for row in transcript.rows) == "1+1=" + completion
    assert transcript.text == completion


def test_hostile_text_stays_text() -> None:
    text = "[red]x[/red]\x1b[2J\x07\u202e\n</think>"
    tokenizer = Tokenizer.bytes(("\x1b[2Jtag\n",))
    transcript = transcribe(tokenizer, SCHEMA, [], tokenizer.encode(text + "\x1b[2Jtag\n"))
    stream = io.StringIO()
    Console(file=stream, force_terminal=False, width=300).print(transcript.render())
    shown = stream.getvalue()
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown
    assert "[red]x[/red]" in shown  # no markup was read
    assert r"*** \x1b[2Jtag\n ***" in shown
    assert all("\n" not in line for line, _ in transcript.lines())


def test_control_tokens_and_parts_have_styles_of_their_own() -> None:
    tokenizer = Tokenizer.bytes(SCHEMA.tags)
    transcript = transcribe(tokenizer, SCHEMA, [49], tokenizer.encode("2</think><answer>3</answer>"))
    styles = {line.split("  ")[-1]: style for line, style in transcript.lines() if line.startswith("[")}
    assert styles["*** </think> ***"] == styles["*** </answer> ***"] == "bold magenta"
    assert len({styles["'1'"], styles["'2'"], styles["'3'"], "bold magenta"}) == 4
