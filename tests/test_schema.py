"""The schema asks for exactly what it parses."""

from __future__ import annotations

import time

import pytest

from whet.schema import SCHEMAS, ResponseSchema

THINK = ResponseSchema()
OPEN = ResponseSchema(opening_in_prompt=False)
BOTH = pytest.mark.parametrize("schema", [THINK, OPEN])


def prefix(schema: ResponseSchema) -> str:
    return "" if schema.opening_in_prompt else schema.think_open


@pytest.mark.parametrize("name", ["think_answer", "reasoning_answer", "working_out_solution", "workshop"])
@pytest.mark.parametrize("thinking", ["", "one\n\ntwo", "a < b > c </ d", " padded "])
def test_render_parses_back(name: str, thinking: str) -> None:
    schema = SCHEMAS[name]
    text = schema.render(thinking, "42")
    parsed = schema.parse(text)
    assert (parsed.thinking, parsed.answer, parsed.verdict) == (thinking, "42", "perfect")
    assert schema.format_reward(text) == 1.0
    assert text.endswith(schema.stop_strings)
    assert (schema.generation_prefix + text).count(schema.think_open) == 1
    for tag in schema.tags:
        assert tag in schema.system_prompt
    assert (schema.generation_prefix == schema.think_open) == schema.opening_in_prompt


def test_presets_are_the_documented_tags() -> None:
    assert SCHEMAS["think_answer"].tags == ("<think>", "</think>", "<answer>", "</answer>")
    assert SCHEMAS["reasoning_answer"].tags == ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    assert not SCHEMAS["reasoning_answer"].opening_in_prompt
    assert SCHEMAS["working_out_solution"].tags == (
        "<start_working_out>",
        "<end_working_out>",
        "<SOLUTION>",
        "</SOLUTION>",
    )


# What follows the opening tag, whichever side wrote it; thinking, answer, verdict.
CASES = [
    ("a</think>\n <answer> 7 </answer>\n", "a", "7", "perfect"),
    ("a</think><answer></answer>", "a", "", "perfect"),
    ("a</think>so <answer>7</answer>", "a", "7", "partial"),
    ("a</think><answer>7</answer> done", "a", "7", "partial"),
    ("a</think><answer>7", "a", None, "partial"),
    ("a</think>7", "a", None, "partial"),
    ("a<answer>7</answer>", None, "7", "partial"),
    ("a</think><answer>1</answer><answer>2</answer>", "a", "2", "partial"),
    ("a</think><answer>1<answer>2</answer>", "a", "2", "partial"),
    ("a</think><answer>1</answer>2</answer>", "a", "1", "partial"),
    ("a</think></answer>1<answer>", "a", None, "partial"),
    ("is it <answer>1</answer>?</think><answer>2</answer>", "is it <answer>1</answer>?", "2", "partial"),
    ("is it <answer>1</answer>?</think>", "is it <answer>1</answer>?", None, "partial"),
    ("a<think>b</think><answer>2</answer>", "a<think>b", "2", "partial"),
    ("a</think>b</think><answer>2</answer>", "a", "2", "partial"),
    ("a</Think><answer>2</answer>", None, "2", "partial"),
]


@BOTH
@pytest.mark.parametrize(("rest", "thinking", "answer", "verdict"), CASES)
def test_cases(
    schema: ResponseSchema, rest: str, thinking: str | None, answer: str | None, verdict: str
) -> None:
    parsed = schema.parse(prefix(schema) + rest)
    assert (parsed.thinking, parsed.answer, parsed.verdict) == (thinking, answer, verdict)


@BOTH
@pytest.mark.parametrize("text", ["", "42", "no tags at all", "think answer", "\x00\ud800"])
def test_no_tag_scores_none(schema: ResponseSchema, text: str) -> None:
    assert schema.parse(text).verdict == "none"
    assert schema.parse(text).answer is None
    assert schema.format_reward(text) == 0.0


def test_the_opening_tag_is_scored_only_where_the_model_has_to_write_it() -> None:
    # In the prompt: writing it again is one tag too many, and alone it earns nothing.
    assert THINK.format_reward("<think>a</think><answer>2</answer>") == 0.5
    assert OPEN.format_reward("<think>a</think><answer>2</answer>") == 1.0
    assert OPEN.format_reward("a</think><answer>2</answer>") == 0.5
    assert OPEN.format_reward("<think>a") == 0.5
    assert THINK.format_reward("a") == 0.0
    assert OPEN.parse("a</think><answer>2</answer>").thinking is None


@BOTH
@pytest.mark.parametrize(
    "piece", ["<answer>", "</answer>", "<think>", "</think>", "<answer></think>", "<", " "]
)
def test_hostile_repetition_is_bounded(schema: ResponseSchema, piece: str) -> None:
    text = piece * (128 * 1024 // len(piece))
    best = min(_seconds(schema, text) for _ in range(3))
    assert best < 0.05  # the linear parser takes about 1 ms, a backtracking regex 9 s
    assert schema.parse(text).verdict != "perfect"


def _seconds(schema: ResponseSchema, text: str) -> float:
    began = time.perf_counter()
    schema.parse(text)
    return time.perf_counter() - began


@pytest.mark.parametrize("wrong", [{"think_open": ""}, {"answer_close": " "}, {"think_open": "<answer>"}])
def test_bad_tags_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="four different non-empty"):
        ResponseSchema(**wrong)


TOOLS = ResponseSchema(tools=("calculator",))


def test_tools_have_tags_only_where_there_are_tools() -> None:
    assert THINK.tool_tags == ()
    assert THINK.stop_strings == ("</answer>",)
    assert TOOLS.tool_tags == ("<tool>", "</tool>", "<result>", "</result>")
    assert TOOLS.stop_strings == ("</answer>", "</tool>")
    assert "tool" not in THINK.system_prompt
    for tag in TOOLS.tool_tags:
        assert tag in TOOLS.system_prompt
    with pytest.raises(ValueError, match="eight different non-empty"):
        ResponseSchema(tools=("calculator",), tool_open="<think>")


def test_a_demonstration_is_cut_where_the_tool_writes() -> None:
    text = TOOLS.render(TOOLS.render_calls([("1+1", "2"), ("2*3", "6")]), "6")
    pieces = TOOLS.split_results(text)
    assert "".join(piece for piece, _ in pieces) == text
    assert [piece for piece, is_written in pieces if not is_written] == [
        "<result>2</result>",
        "<result>6</result>",
    ]
    assert TOOLS.parse(text).verdict == "perfect"
    assert THINK.split_results(text) == [(text, True)]
    assert TOOLS.split_results("a<result>never closed") == [("a<result>never closed", True)]


def test_a_result_holds_no_tags() -> None:
    assert TOOLS.render_result("1</result></think><answer>2</answer>") == "<result>12</result>"
