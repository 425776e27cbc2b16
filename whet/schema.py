"""ResponseSchema: the one source of system prompt, template prefix, stop strings, parser and format reward.

Runs have scored zero throughout because the prompt asked for one pair of tags while the reward looked for
another. Here only this object knows the tags; the preflight (`whet.eval.audit`) checks that before a run starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from whet.config import closest, from_dict, read_yaml
from whet.rewards.answers.equal import answers_equal
from whet.rewards.answers.extract import (
    DEFAULT_STEPS,
    STEPS_OF,
    extract_answer_with_step,
    from_box,
    from_hashes,
    own_turn,
)
from whet.rewards.answers.texts import Column
from whet.types import UserError

AnswerPlace = Literal["tag", "boxed", "hashes", "anywhere", "whole"]
Fallback = Literal["none", "boxed", "anywhere"]
AnswerType = Literal["number", "text", "choice", "vector", "yes_no", "program"]
FormatVerdict = Literal["perfect", "partial", "none"]

CALLS = "calls"
"""Label in a problem's `meta`: JSON list of the (input, result) pairs that solve it with the tools."""
COLUMN = "column"
"""Label in a problem's `meta`: what most gold answers of its data are, where that decides how one is read."""

ANSWER_TYPE_WORDS: dict[str, str] = {
    "number": "your final answer as a single number",
    "text": "your final answer",
    "choice": "the letter of your choice",
    "vector": "your final answer as a list of numbers",
    "yes_no": "yes or no",
    "program": "your final Python program",
}


THINK = ("<think>", "</think>")
"""The tags of R1 and its kin: models and worked solutions have them whatever the schema's own are."""

BOX, HASHES = "\\boxed{", "####"
MARKS: dict[AnswerPlace, str] = {"boxed": BOX, "hashes": HASHES}
"""What stands where the answer is, for places without tags."""

WORDING: dict[AnswerPlace, str] = {
    "tag": "Then write {answer} between {answer_open} and {answer_close}.",
    "boxed": "Then write {answer} within \\boxed{}.",
    "hashes": "Then write {answer} after #### on a line of its own, which ends your response.",
    "anywhere": "Then write {answer}.",
    "whole": "",
}
"""The end of the default instruction."""


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """What the parser found in one completion.

    Attributes:
        thinking: Text of the thinking block; None when the block is not closed, or the schema has none.
        answer: The answer, stripped; None when there is none.
        verdict: 'perfect' (exactly one thinking block, then the answer in its place; with answer tags, exactly one
            answer block and nothing else but white space), 'partial' (at least one scored tag or mark is there) or
            'none'.
    """

    thinking: str | None
    answer: str | None
    verdict: FormatVerdict


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseSchema:
    """How a response is asked for and read: the thinking block, then the answer in its place."""

    think_open: str = "<think>"
    """Opening tag of the thinking block; empty, as `think_close`, for responses without such a block."""
    think_close: str = "</think>"
    """Closing tag of the thinking block."""
    answer_open: str = "<answer>"
    """Opening tag of the answer block, for the answer place 'tag'."""
    answer_close: str = "</answer>"
    """Closing tag of the answer block; it ends the response."""
    opening_in_prompt: bool = True
    """Whether the generation prompt already ends with `think_open`; the tag is then not scored."""
    answer_type: AnswerType = "number"
    """What the answer is; it words the instruction."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the model may call while it thinks; without any, the tool tags mean nothing."""
    tool_open: str = "<tool>"
    """Opening tag of a call."""
    tool_close: str = "</tool>"
    """Closing tag of a call; generation stops there until the tool has answered."""
    result_open: str = "<result>"
    """Opening tag of what the tool answered."""
    result_close: str = "</result>"
    """Closing tag of what the tool answered."""
    answer_place: AnswerPlace = "tag"
    """Where the answer is: in its tags, in the last box, after the last ####, wherever evaluation finds one
    (anywhere), or the whole text after the thinking."""
    fallback: Fallback = "none"
    """Where else an answer counts if its place has none: the last box of the text, or anywhere. The format does not."""
    system: str = ""
    """Text of the system message, before the instruction if that goes there."""
    instruction: str | None = None
    """What asks for the format; {think_open}, {think_close}, {answer_open}, {answer_close}, {answer} (such as "your
    final answer as a single number") and {tools} are filled in. None for the default wording, empty for nothing."""
    instruction_in: Literal["system", "user"] = "system"
    """Message that the instruction goes to: the system message, or the end of the first user message."""
    stop: tuple[str, ...] = ()
    """Further texts at which generation stops."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", tuple(self.tools))
        object.__setattr__(self, "stop", tuple(self.stop))
        # A protocol.json is not checked against the types.
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(one.default, str) and not isinstance(value, str):
                raise ValueError(f"schema: {one.name} is a text, got {value!r:.40}")
        if not all(isinstance(name, str) for name in self.tools):
            raise ValueError(f"schema: tools are names, got {self.tools!r:.40}")
        if not self.think_open and not self.think_close:
            object.__setattr__(self, "opening_in_prompt", False)
        elif not self.think_open or not self.think_close:
            raise ValueError(
                "schema tags must be four different non-empty strings, or both thinking tags empty, got "
                f"{str((self.think_open, self.think_close))[:200]}"
            )
        if not isinstance(self.opening_in_prompt, bool):
            raise ValueError(
                f"schema: opening_in_prompt = {self.opening_in_prompt!r:.40}: expected true or false"
            )
        if not isinstance(self.instruction, str | None):
            raise ValueError(f"schema: instruction is a text, got {self.instruction!r:.40}")
        tags = (*self.tags, *self.tool_tags)
        if not all(isinstance(tag, str) and tag.strip() for tag in tags) or len(set(tags)) != len(tags):
            count = {2: "two", 4: "four", 6: "six", 8: "eight"}.get(len(tags), "")
            raise ValueError(
                f"schema tags must be {count} different non-empty strings, got {str(tags)[:200]}"
            )
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"schema stop strings must be non-empty, got {str(self.stop)[:200]}")
        choices = ((self.answer_place, WORDING), (self.fallback, get_args(Fallback)))
        for value, table in choices:
            if value not in table:
                raise ValueError(f"schema: got {value!r:.40}, expected one of {', '.join(table)}")
        if self.instruction_in not in ("system", "user"):
            raise ValueError(f"schema: instruction_in = {self.instruction_in!r:.40}: expected system or user")

    @property
    def has_thinking(self) -> bool:
        """Whether a response has a thinking block of its own."""
        return bool(self.think_open)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags in the order in which a perfect response has them: of the thinking and of the answer, if any."""
        thinking = (self.think_open, self.think_close) if self.think_open else ()
        return (*thinking, self.answer_open, self.answer_close) if self.answer_place == "tag" else thinking

    @property
    def marks(self) -> tuple[str, ...]:
        """What the format's scores count in a completion: tags that the model writes, and the mark of the answer."""
        mark = MARKS.get(self.answer_place)
        return (*self.tags[self.opening_in_prompt :], *((mark,) if mark else ()))

    @property
    def tool_tags(self) -> tuple[str, ...]:
        """The tags of calls and results; empty without tools."""
        if not self.tools:
            return ()
        return (self.tool_open, self.tool_close, self.result_open, self.result_close)

    @property
    def request(self) -> str:
        """The instruction, filled in: it asks for exactly what the parser accepts; '' for none."""
        calls = ""
        if self.tools:
            names, one = ", ".join(name.rpartition(":")[2] for name in self.tools), len(self.tools) == 1
            calls = (
                f"While you think you may call a tool ({names}): write "
                f"{self.tool_open}{'' if one else 'name: '}input{self.tool_close} and read what it answers between "
                f"{self.result_open} and {self.result_close}. "
            )
        text = self.instruction
        if text is None:
            working = " between {think_open} and {think_close}" if self.think_open else ""
            text = (
                f"You are given a problem. Think about the problem and write your working{working}. "
                f"{{tools}}{WORDING[self.answer_place]}"
            )
        elif "{tools}" not in text:
            text, calls = f"{text} {{tools}}".strip() if calls else text, calls.strip()
        values = {
            "think_open": self.think_open,
            "think_close": self.think_close,
            "answer_open": self.answer_open,
            "answer_close": self.answer_close,
            "answer": ANSWER_TYPE_WORDS[self.answer_type],
            "tools": calls,
        }
        for (
            name,
            value,
        ) in values.items():  # not str.format: an instruction may contain other braces, as \\boxed{}
            text = text.replace(f"{{{name}}}", value)
        return text.strip()

    @property
    def system_prompt(self) -> str:
        """Text of the system message, with the instruction if it goes there; '' for no message."""
        parts = (self.system, self.request if self.instruction_in == "system" else "")
        return " ".join(part for part in parts if part)

    def messages(
        self, messages: Sequence[Mapping[str, Any]], *, has_system: bool = True
    ) -> list[dict[str, Any]]:
        """Return a conversation as it is asked: with the system message and the instruction.

        Args:
            messages: Maps with 'role' and 'content'; a system message among them replaces the schema's own.
            has_system: Whether to add the schema's system message.
        """
        asked = [dict(message) for message in messages]
        if self.instruction_in == "user" and (request := self.request):
            first = next((message for message in asked if message["role"] == "user"), None)
            if first is not None and isinstance(first["content"], str) and request not in first["content"]:
                first["content"] = f"{first['content']}\n{request}"
        if has_system and self.system_prompt and all(message["role"] != "system" for message in asked):
            asked.insert(0, {"role": "system", "content": self.system_prompt})
        return asked

    @property
    def generation_prefix(self) -> str:
        """Text that the generation prompt ends with, written by the template or after it: the opening tag, or
        nothing."""
        return self.think_open if self.opening_in_prompt else ""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings at which generation stops: the closing answer tag, own ones and, with tools, the end of a call."""
        closing = (self.answer_close,) if self.answer_place == "tag" else ()
        return (*closing, *((self.tool_close,) if self.tools else ()), *self.stop)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as protocol.json has them; what came later is left out where it says nothing."""
        default = ResponseSchema()
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for place, field in enumerate(fields(self))
            if (value := getattr(self, field.name)) != getattr(default, field.name)
            or place < NUM_FIRST_FIELDS
        }

    def find_call(self, text: str) -> str | None:
        """Return the input of the tool call that ends a turn; None if the turn ends otherwise."""
        if not self.tools or not text.endswith(self.tool_close):
            return None
        start = text.rfind(self.tool_open)
        return None if start < 0 else text[start + len(self.tool_open) : -len(self.tool_close)].strip()

    def render_result(self, text: str) -> str:
        """Wrap a tool's output in result tags; tags inside it are removed, so that it cannot close a block."""
        return f"{self.result_open}{self.without_tags(text)}{self.result_close}"

    def without_tags(self, text: str) -> str:
        """Remove the schema's tags, also those that appear once others are removed."""
        tags = tuple(tag for tag in (*self.tags, *self.tool_tags) if tag)
        if not any(tag in text for tag in tags):
            return text
        longest, ends = max(map(len, tags)), {tag[-1] for tag in tags}
        kept: list[str] = []
        for letter in text:
            kept.append(letter)
            if letter in ends:
                end = "".join(kept[-longest:])
                if lengths := [len(tag) for tag in tags if end.endswith(tag)]:
                    del kept[-max(lengths) :]
        return "".join(kept)

    def split_results(self, text: str) -> list[tuple[str, bool]]:
        """Cut a demonstration into (piece, whether the model writes it): the model only reads tool results."""
        if not self.tools:
            return [(text, True)]
        pieces: list[tuple[str, bool]] = []
        while (start := text.find(self.result_open)) >= 0:
            end = text.find(self.result_close, start)
            if end < 0:
                break
            end += len(self.result_close)
            pieces += [(text[:start], True), (text[start:end], False)]
            text = text[end:]
        return [*pieces, (text, True)]

    def render(self, thinking: str, answer: str, column: Column = "") -> str:
        """Write the ideal completion: what follows `generation_prefix`, up to the answer in its place.

        Args:
            thinking: The worked solution. In one that has a thinking block (the schema's, or `<think>` as R1 writes
                it), that block is the thinking, and what follows it stands before a boxed or marked answer.
            answer: The gold answer; not written twice where the solution ends with it in its place.
            column: What the data set's answers are, as the grader reads them: `8,4` ends with `8,40`.
        """
        if not self.think_open:
            return self._with_answer(thinking, answer, column)
        written = ""
        for opening, closing in (self.tags[:2], THINK):
            head, found, rest = thinking.partition(closing)
            if found:
                thinking, written = head.partition(opening)[2] if opening in head else head, rest
                break
        if self.answer_place == "tag":
            block = self.answer_open + answer + self.answer_close
            thinking, end = thinking.removesuffix(block), block
        else:
            end = self._with_answer(written.strip(), answer, column)
            end = f"\n\n{end}" if end else ""
        opening = "" if self.opening_in_prompt else self.think_open
        return f"{opening}{thinking}{self.think_close}{end}"

    def _with_answer(self, text: str, answer: str, column: Column) -> str:
        """End a text with the answer in its place, unless it ends with it already, in any spelling (`2 800`)."""
        found = self._find(text) if text else None
        if found is not None and (found == answer.strip() or answers_equal(found, answer, column=column)):
            return text
        ends = {
            "tag": f"{self.answer_open}{answer}{self.answer_close}",
            "boxed": f"{BOX}{answer}}}",
            "hashes": f"{HASHES} {answer}",
            "anywhere": f"{ANSWER_SENTENCE}{answer}",
            "whole": answer,
        }
        gap = {"tag": "", "hashes": "\n"}.get(self.answer_place, "\n\n") if text else ""
        if self.answer_place == "whole" and text.rstrip().endswith(answer):
            return text
        return f"{text}{gap}{ends[self.answer_place]}"

    def render_calls(self, calls: Sequence[Sequence[str]]) -> str:
        """Write the thinking of a demonstration that calls tools: (input, result) after (input, result)."""
        return "".join(
            f"{self.tool_open}{asked}{self.tool_close}{self.render_result(result)}" for asked, result in calls
        )

    def parse(self, completion: str) -> ParsedResponse:
        """Parse a completion in linear time, whatever it contains.

        An answer in tags is the text of the *last closed* answer block after the thinking was closed, so that tags
        quoted in the thinking do not count; while the thinking is not closed, any closed block counts. In another place
        it is the last one after the thinking; thinking that was opened and not closed has none, neither there nor by
        `fallback`. Where the model goes on to ask itself a new question, the completion ends. A completion that a stop
        string cut right after `answer_close` parses as perfect.

        Args:
            completion: Decoded generated text, without the prompt.

        Returns:
            Thinking, answer and the format verdict.
        """
        return _parsed(self, completion)

    def _parse(self, completion: str) -> ParsedResponse:
        body = self.generation_prefix + completion
        close, start = (body.find(tag) if tag else -1 for tag in (self.think_close, self.think_open))
        thinking = body[start + len(self.think_open) : close] if 0 <= start < close else None
        after = self.after_thinking(completion)
        answer = self._find(body if after is None and self.answer_place == "tag" else after or "")
        is_closed = self.answer_place != "boxed" or from_box(after or "", closed=True) is not None
        is_perfect = answer is not None and is_closed and self._is_tight(body)
        if answer is None and after is not None:
            closed = body if body.endswith(after) else body[: body.rfind(self.think_open)]
            answer = self._fall_back(after) or self._fall_back(closed)
        if is_perfect:
            return ParsedResponse(thinking, answer, "perfect")
        found = any(mark in completion for mark in (*self.tags, *self.marks))
        return ParsedResponse(thinking, answer, "partial" if found else "none")

    def after_thinking(self, completion: str) -> str | None:
        """Return what follows the thinking, all of a completion without any; None while thinking is open."""
        body = self.generation_prefix + completion
        if not self.think_open:
            return body
        close = body.find(self.think_close)
        if close < 0:
            return None if self.think_open in body else body
        rest = body[close + len(self.think_close) :]
        reopened = rest.rfind(self.think_open)
        return rest[:reopened] if reopened > rest.rfind(self.think_close) else rest

    def _find(self, text: str) -> str | None:
        """Return the answer in its place, or None."""
        text = own_turn(text)
        match self.answer_place:
            case "tag":
                return _last_block(text, self.answer_open, self.answer_close)
            case "boxed":
                return from_box(text)
            case "hashes":
                return from_hashes(text)
            case "anywhere":
                return self._anywhere(text)
            case "whole":
                return text.strip() or None

    def _anywhere(self, text: str) -> str | None:
        """Return the answer wherever it stands, by the kind that the task has; a program is all of the text."""
        if self.answer_type == "program":
            return text.strip() or None
        return extract_answer_with_step(text, STEPS_OF.get(self.answer_type, DEFAULT_STEPS))[0]

    def _fall_back(self, text: str) -> str | None:
        """Return the answer where `fallback` looks for it, or None."""
        match self.fallback:
            case "none":
                return None
            case "boxed":
                return from_box(text)
            case "anywhere":
                return self._anywhere(text)

    def _is_tight(self, body: str) -> bool:
        """Say whether each tag occurs once, in its order, and only white space stands outside the two blocks."""
        if any(body.count(tag) != 1 for tag in self.tags):
            return False
        before, _, rest = body.partition(self.think_open) if self.think_open else ("", "", body)
        closed = True
        if self.think_open:
            _, closed, rest = rest.partition(self.think_close)
        if self.answer_place != "tag":
            return bool(closed) and not before.strip()
        between, opened, rest = rest.partition(self.answer_open)
        _, ended, after = rest.partition(self.answer_close)
        if not self.think_open:  # the working stands before the answer
            between = ""
        return bool(closed and opened and ended) and not (before.strip() or between.strip() or after.strip())

    def format_reward(self, completion: str) -> float:
        """Score the format alone: 1 for perfect, 0.5 for partial, 0 for none."""
        return {"perfect": 1.0, "partial": 0.5, "none": 0.0}[self.parse(completion).verdict]


@lru_cache(maxsize=256)
def _parsed(schema: ResponseSchema, completion: str) -> ParsedResponse:
    """Parse once what the verdict, each reward and the record ask about, one after the other."""
    return schema._parse(completion)


def _last_block(text: str, opening: str, closing: str) -> str | None:
    """Return the stripped text of the last closed opening...closing block, or None. Linear time."""
    start = text.rfind(opening, 0, max(text.rfind(closing), 0))
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.find(closing, start)].strip()


NUM_FIRST_FIELDS = 11
"""Fields that every protocol.json has: think_open to result_close."""

ANSWER_SENTENCE = "The answer is "
"""Ends a demonstration whose solution does not end with its answer, where answers are read anywhere."""
STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."

SCHEMAS: dict[str, ResponseSchema] = {
    "think_answer": ResponseSchema(),
    "reasoning_answer": ResponseSchema(
        think_open="<reasoning>", think_close="</reasoning>", opening_in_prompt=False
    ),
    "working_out_solution": ResponseSchema(
        think_open="<start_working_out>",
        think_close="<end_working_out>",
        answer_open="<SOLUTION>",
        answer_close="</SOLUTION>",
    ),
    # The prompt of Unsloth's GRPO notebooks, verbatim.
    "workshop": ResponseSchema(
        think_open="<start_working_out>",
        think_close="<end_working_out>",
        answer_open="<SOLUTION>",
        answer_close="</SOLUTION>",
        instruction="You are given a problem. Think about the problem and provide your working out. Place it between "
        "{think_open} and {think_close}. Then, provide your solution between {answer_open}{answer_close}",
    ),
    # The prompt of poornachandra24/grpo-vision-reasoning, verbatim.
    "numeric_answer": ResponseSchema(
        think_open="<reasoning>",
        think_close="</reasoning>",
        opening_in_prompt=False,
        instruction="You are a helpful assistant. You must first provide your reasoning in <reasoning> tags, and then "
        "your numeric answer in <answer> tags.",
    ),
    # DeepSeek-R1 and its distilled models: no system message, as their model card recommends.
    "r1": ResponseSchema(answer_place="boxed", instruction=STEP_BY_STEP, instruction_in="user"),
    # Qwen2.5-Math's prompt: for instruct models as they are.
    "boxed": ResponseSchema(think_open="", think_close="", answer_place="boxed", instruction=STEP_BY_STEP),
    # The same request, for models that may not know a box: an answer elsewhere counts, too.
    "step_by_step": ResponseSchema(
        think_open="",
        think_close="",
        answer_place="boxed",
        fallback="anywhere",
        instruction=STEP_BY_STEP,
    ),
    "hashes": ResponseSchema(think_open="", think_close="", answer_place="hashes"),
    "gpt_oss": ResponseSchema(
        think_open="<|channel|>analysis<|message|>",
        think_close="<|end|>",
        answer_open="<|start|>assistant<|channel|>final<|message|>",
        answer_close="<|return|>",
        opening_in_prompt=False,
        instruction="Think about the problem. Then write {answer}, and nothing else, as your final message.",
    ),
    # A plain chat, for models that were never trained to a format: nothing is asked or appended.
    "anywhere": ResponseSchema(think_open="", think_close="", answer_place="anywhere", instruction=""),
    "none": ResponseSchema(think_open="", think_close="", answer_place="whole", instruction=""),
}
"""Name -> schema."""

Schema = ResponseSchema
"""Its name in `import whet`."""

PRESET = "preset"
"""Key of a schema file that names the preset which its other fields change."""


def find_schema(name: str) -> ResponseSchema:
    """Return a schema by name, or from a YAML file of its fields.

    Args:
        name: A name of `SCHEMAS`, or the path of a file; its field `preset` names the schema that the others change
            (default: think_answer).

    Raises:
        UserError: If there is no such schema, or the file is malformed.
    """
    if name in SCHEMAS:
        return SCHEMAS[name]
    if not name.endswith((".yaml", ".yml")):
        hint = f", did you mean {match!r}?" if (match := closest(name, list(SCHEMAS))) else ""
        raise UserError(
            f"schema = {name!r:.80}: expected one of {', '.join(SCHEMAS)}, or a .yaml file of your own{hint}"
        )
    given = dict(read_yaml(Path(name)))
    preset = given.pop(PRESET, "think_answer")
    if preset not in SCHEMAS:
        raise UserError(f"{name}: preset = {preset!r:.80}: expected one of {', '.join(SCHEMAS)}")
    return from_dict(ResponseSchema, SCHEMAS[preset].as_dict() | given, where=name)
