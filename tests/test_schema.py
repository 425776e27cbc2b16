"""The schema asks for exactly what it parses."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from whet.schema import SCHEMAS, ResponseSchema, find_schema
from whet.types import UserError

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
    nested = (
        "1</res</think>ult></</result>think>2"  # what is removed must not join what is left to another tag
    )
    assert TOOLS.render_result(nested) == "<result>12</result>"


# --- places of the answer ------------------------------------------------------------------------------------

R1, BOXED, HASHES, NONE = (SCHEMAS[name] for name in ("r1", "boxed", "hashes", "none"))
GPT_OSS = SCHEMAS["gpt_oss"]
ANYWHERE = ResponseSchema(answer_place="anywhere")
LENIENT = ResponseSchema(fallback="boxed")
LOOSE = ResponseSchema(fallback="anywhere")

PLACES = [
    # schema, completion, thinking, answer, verdict
    (R1, "a</think>\n\nSo \\boxed{7}.", "a", "7", "perfect"),
    (R1, "\\boxed{3}?</think>\\boxed{\\frac{1}{2}}", "\\boxed{3}?", "\\frac{1}{2}", "perfect"),
    (R1, "a</think>so 7", "a", None, "partial"),
    (R1, "is it \\boxed{7}? no, wait", None, None, "partial"),
    (R1, "a<think>b</think>\\boxed{7}", "a<think>b", "7", "partial"),
    (R1, "a</think>b</think>\\boxed{7}", "a", "7", "partial"),
    (R1, "7", None, None, "none"),
    (BOXED, "so \\boxed{7}", None, "7", "perfect"),
    (BOXED, "<think>a</think>\\boxed{7}", None, "7", "perfect"),
    (BOXED, "\\boxed{1} no, \\boxed{7}", None, "7", "perfect"),
    (BOXED, "\\boxed{7", None, "7", "partial"),  # read, but not in perfect format
    (BOXED, "so 7", None, None, "none"),
    (HASHES, "a\n#### 1,234", None, "1,234", "perfect"),
    (HASHES, "a\n####", None, None, "partial"),
    (HASHES, "so 7", None, None, "none"),
    (ANYWHERE, "a</think>the answer is 7.", "a", "7", "perfect"),
    (ANYWHERE, "the answer is 7", None, None, "none"),
    (NONE, " Hello <think>. ", None, "Hello <think>.", "perfect"),
    (NONE, " \n", None, None, "none"),
    (LENIENT, "so \\boxed{7}", None, None, "none"),  # thinking is open
    (LENIENT, "a</think>so \\boxed{7}", "a", "7", "partial"),
    (LENIENT, "a</think>no, <think>\\boxed{7}", "a", None, "partial"),
    (LENIENT, "a</think><answer>8</answer> \\boxed{7}", "a", "8", "partial"),
    (LENIENT, "so 7", None, None, "none"),
    (LOOSE, "so it is 7", None, None, "none"),
    (LOOSE, "a</think>so it is 7", "a", "7", "partial"),
    (HASHES, "a\n#### 7\n\nQuestion: b\n#### 8", None, "7", "perfect"),
    (BOXED, "\\boxed{7}\n\nQuestion: b\nAnswer: \\boxed{8}", None, "7", "perfect"),
    (
        GPT_OSS,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>",
        "a",
        "7",
        "perfect",
    ),
    (GPT_OSS, "<|channel|>final<|message|>7<|return|>", None, None, "partial"),
]


@pytest.mark.parametrize(("schema", "text", "thinking", "answer", "verdict"), PLACES)
def test_places(
    schema: ResponseSchema, text: str, thinking: str | None, answer: str | None, verdict: str
) -> None:
    parsed = schema.parse(text)
    assert (parsed.thinking, parsed.answer, parsed.verdict) == (thinking, answer, verdict)


TRACE = "<think>\nwell\n</think>\n\nIt is \\boxed{42}."
RENDERED = [
    # schema, worked solution, completion
    ("think_answer", "well", "well</think><answer>42</answer>"),
    ("think_answer", TRACE, "\nwell\n</think><answer>42</answer>"),
    ("think_answer", "<think>well</think><answer>42</answer>", "well</think><answer>42</answer>"),
    ("reasoning_answer", TRACE, "<reasoning>\nwell\n</reasoning><answer>42</answer>"),
    ("r1", "well", "well</think>\n\n\\boxed{42}"),
    ("r1", TRACE, "\nwell\n</think>\n\nIt is \\boxed{42}."),
    ("r1", "well\n</think>\n\nIt is 42.", "well\n</think>\n\nIt is 42.\n\n\\boxed{42}"),
    ("boxed", "well", "well\n\n\\boxed{42}"),
    ("boxed", "It is \\boxed{42}.", "It is \\boxed{42}."),
    ("boxed", "First \\boxed{41}.", "First \\boxed{41}.\n\n\\boxed{42}"),
    ("boxed", "", "\\boxed{42}"),
    ("hashes", "well", "well\n#### 42"),
    ("hashes", "well\n#### 42", "well\n#### 42"),
    ("none", "well", "well\n\n42"),
    ("none", "so 42", "so 42"),
    ("none", "", "42"),
]


@pytest.mark.parametrize(("name", "solution", "completion"), RENDERED)
def test_a_worked_solution_is_rendered_once(name: str, solution: str, completion: str) -> None:
    schema = SCHEMAS[name]
    assert schema.render(solution, "42") == completion
    parsed = schema.parse(completion)
    assert parsed.verdict == "perfect"
    if name != "none":
        assert parsed.answer == "42"


@pytest.mark.parametrize("solution", ["Cela fait 2 800 kg en tout.", "So it is 2,800.", "28 x 100 = 2800"])
def test_a_solution_that_ends_with_its_answer_in_another_spelling_is_left_as_it_is(solution: str) -> None:
    assert SCHEMAS["anywhere"].render(solution, "2\u202f800") == solution
    assert (
        SCHEMAS["anywhere"].render("Cela fait 800 kg.", "2 800") == "Cela fait 800 kg.\n\nThe answer is 2 800"
    )


def test_the_words_of_the_seeds() -> None:
    assert SCHEMAS["numeric_answer"].system_prompt == (
        "You are a helpful assistant. You must first provide your reasoning in <reasoning> tags, and then your "
        "numeric answer in <answer> tags."
    )
    assert SCHEMAS["workshop"].system_prompt == (
        "You are given a problem. Think about the problem and provide your working out. Place it between "
        "<start_working_out> and <end_working_out>. Then, provide your solution between <SOLUTION></SOLUTION>"
    )
    assert BOXED.system_prompt == R1.request == (
        "Please reason step by step, and put your final answer within \\boxed{}."
    )  # fmt: skip
    assert THINK.system_prompt == (
        "You are given a problem. Think about the problem and write your working between <think> and </think>. Then "
        "write your final answer as a single number between <answer> and </answer>."
    )


def test_where_the_instruction_goes() -> None:
    user = [{"role": "user", "content": "1+1="}]
    own = [{"role": "system", "content": "Be brief."}, *user]
    assert NONE.messages(user) == user
    assert THINK.messages(user) == [{"role": "system", "content": THINK.request}, *user]
    assert THINK.messages(user, has_system=False) == THINK.messages(own)[1:] == user
    asked = f"1+1=\n{R1.request}"
    assert R1.messages(user) == [{"role": "user", "content": asked}]
    assert R1.messages([{"role": "user", "content": asked}]) == R1.messages(user)  # not asked for twice
    both = ResponseSchema(system="You are wise.", answer_place="boxed")
    assert both.system_prompt == f"You are wise. {both.request}"
    assert user == [{"role": "user", "content": "1+1="}]


def test_schemas_without_tags_stop_at_the_end_of_the_text() -> None:
    assert R1.stop_strings == BOXED.stop_strings == NONE.stop_strings == ()
    assert ResponseSchema(stop=("\n\n",)).stop_strings == ("</answer>", "\n\n")
    assert (R1.tags, BOXED.tags, NONE.marks) == (("<think>", "</think>"), (), ())
    assert R1.marks == ("</think>", "\\boxed{")
    assert not BOXED.opening_in_prompt


@pytest.mark.some(30)
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize(
    "piece", ["<think>", "</think>", "<answer>", "\\boxed{", "}", "####", "\\boxed{}", "$"]
)
def test_a_megabyte_is_read_in_linear_time(name: str, piece: str) -> None:
    def seconds(size: int) -> float:
        return min(_seconds(SCHEMAS[name], piece * (size // len(piece))) for _ in range(2))

    assert seconds(1 << 20) < 0.5  # about 30 ms; a quadratic reader takes minutes


def test_a_schema_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "preset: r1\nthink_open: <plan>\nthink_close: </plan>\ninstruction: Plan, then box {answer} in \\boxed{}.\n"
        "instruction_in: system\nsystem: You are wise.\nstop: ['\\n\\n\\n']\n"
    )
    schema = find_schema(str(path))
    assert (
        schema.system_prompt
        == "You are wise. Plan, then box your final answer as a single number in \\boxed{}."
    )
    assert schema.parse("a</plan>\\boxed{7}").verdict == "perfect"
    assert schema.answer_place == "boxed"
    assert schema.stop_strings == ("\\n\\n\\n",)
    assert ResponseSchema(**schema.as_dict()) == schema


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("answer_place: box", "field 'answer_place': got 'box', expected one of 'tag', 'boxed'"),
        ("answer_plce: boxed", "unknown field 'answer_plce', did you mean 'answer_place'"),
        ("preset: r2", "preset = 'r2': expected one of think_answer"),
        ("think_open: ''", "both thinking tags empty"),
        ("stop: ['']", "stop strings must be non-empty"),
        ("think_open: <answer>", "four different non-empty"),
    ],
)
def test_a_bad_schema_file_is_a_user_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        find_schema(str(tmp_path / "mine.yaml"))
    assert "mine.yaml" in str(caught.value)
    with pytest.raises(UserError, match="did you mean 'boxed'"):
        find_schema("boxd")
