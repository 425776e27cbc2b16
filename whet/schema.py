"""ResponseSchema: the one source of system prompt, template prefix, stop strings, parser and format reward.

Runs have scored zero throughout because the prompt asked for one pair of tags while the reward looked for
another. Here only this object knows the tags; the preflight (`whet.eval.audit`) checks that before a run starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

AnswerType = Literal["number", "text", "choice", "vector", "yes_no", "program"]
FormatVerdict = Literal["perfect", "partial", "none"]

CALLS = "calls"
"""Label in a problem's `meta`: JSON list of the (input, result) pairs that solve it with the tools."""

ANSWER_TYPE_WORDS: dict[str, str] = {
    "number": "your final answer as a single number",
    "text": "your final answer",
    "choice": "the letter of your choice",
    "vector": "your final answer as a list of numbers",
    "yes_no": "yes or no",
    "program": "your final Python program",
}


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """What the parser found in one completion.

    Attributes:
        thinking: Text of the thinking block; None when the block is not closed.
        answer: Text of the answer block, stripped; None when there is none.
        verdict: 'perfect' (exactly one thinking block, then one answer block, nothing else but white space),
            'partial' (at least one scored tag is there) or 'none'.
    """

    thinking: str | None
    answer: str | None
    verdict: FormatVerdict


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseSchema:
    """Tag names and answer type of a response: thinking block, then answer block.

    Attributes:
        think_open: Opening tag of the thinking block.
        think_close: Closing tag of the thinking block.
        answer_open: Opening tag of the answer block.
        answer_close: Closing tag of the answer block; it ends the response.
        opening_in_prompt: True when the generation prompt already ends with `think_open`; the tag is then not
            scored.
        answer_type: What the answer block holds; it words the system prompt.
        tools: Names of the tools that the model may call while it thinks; without any, the tool tags mean nothing.
        tool_open: Opening tag of a call.
        tool_close: Closing tag of a call; generation stops there until the tool has answered.
        result_open: Opening tag of what the tool answered.
        result_close: Closing tag of what the tool answered.
    """

    think_open: str = "<think>"
    think_close: str = "</think>"
    answer_open: str = "<answer>"
    answer_close: str = "</answer>"
    opening_in_prompt: bool = True
    answer_type: AnswerType = "number"
    tools: tuple[str, ...] = ()
    tool_open: str = "<tool>"
    tool_close: str = "</tool>"
    result_open: str = "<result>"
    result_close: str = "</result>"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", tuple(self.tools))
        tags = (*self.tags, *self.tool_tags)
        if not all(isinstance(tag, str) and tag.strip() for tag in tags) or len(set(tags)) != len(tags):
            count = "eight" if self.tools else "four"
            raise ValueError(
                f"schema tags must be {count} different non-empty strings, got {str(tags)[:200]}"
            )

    @property
    def tags(self) -> tuple[str, str, str, str]:
        """The four tags in the order in which a perfect response has them."""
        return (self.think_open, self.think_close, self.answer_open, self.answer_close)

    @property
    def tool_tags(self) -> tuple[str, ...]:
        """The tags of calls and results; empty without tools."""
        if not self.tools:
            return ()
        return (self.tool_open, self.tool_close, self.result_open, self.result_close)

    @property
    def system_prompt(self) -> str:
        """The instruction that asks for exactly what the parser accepts."""
        calls = ""
        if self.tools:
            names, one = ", ".join(name.rpartition(":")[2] for name in self.tools), len(self.tools) == 1
            calls = (
                f"While you think you may call a tool ({names}): write "
                f"{self.tool_open}{'' if one else 'name: '}input{self.tool_close} and read what it answers between "
                f"{self.result_open} and {self.result_close}. "
            )
        return (
            "You are given a problem. Think about the problem and write your working between "
            f"{self.think_open} and {self.think_close}. {calls}"
            f"Then write {ANSWER_TYPE_WORDS[self.answer_type]} between {self.answer_open} and "
            f"{self.answer_close}."
        )

    @property
    def generation_prefix(self) -> str:
        """Text that the generation prompt ends with: the opening tag, or nothing."""
        return self.think_open if self.opening_in_prompt else ""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings at which generation stops: the end of a response and, with tools, of a call."""
        return (self.answer_close, self.tool_close) if self.tools else (self.answer_close,)

    def find_call(self, text: str) -> str | None:
        """Return the input of the tool call that ends a turn; None if the turn ends otherwise."""
        if not self.tools or not text.endswith(self.tool_close):
            return None
        start = text.rfind(self.tool_open)
        return None if start < 0 else text[start + len(self.tool_open) : -len(self.tool_close)].strip()

    def render_result(self, text: str) -> str:
        """Wrap a tool's output in result tags; tags inside it are removed, so that it cannot close a block."""
        for tag in (*self.tags, *self.tool_tags):
            text = text.replace(tag, "")
        return f"{self.result_open}{text}{self.result_close}"

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

    def render(self, thinking: str, answer: str) -> str:
        """Write the ideal completion: what follows `generation_prefix`, up to the closing answer tag."""
        opening = "" if self.opening_in_prompt else self.think_open
        return f"{opening}{thinking}{self.think_close}{self.answer_open}{answer}{self.answer_close}"

    def render_calls(self, calls: Sequence[Sequence[str]]) -> str:
        """Write the thinking of a demonstration that calls tools: (input, result) after (input, result)."""
        return "".join(
            f"{self.tool_open}{asked}{self.tool_close}{self.render_result(result)}" for asked, result in calls
        )

    def parse(self, completion: str) -> ParsedResponse:
        """Parse a completion in linear time, whatever it contains.

        The answer is the text of the *last closed* answer block after the thinking was closed, so that tags
        quoted in the thinking do not count. A completion that a stop string cut right after `answer_close`
        parses as perfect.

        Args:
            completion: Decoded generated text, without the prompt.

        Returns:
            Thinking, answer and the format verdict.
        """
        body = completion if not self.opening_in_prompt else self.think_open + completion
        counts = [body.count(tag) for tag in self.tags]
        close = body.find(self.think_close)
        start = body.find(self.think_open)
        opened = 0 <= start < close
        thinking = body[start + len(self.think_open) : close] if opened else None
        after = body[close + len(self.think_close) :] if close >= 0 else body
        answer = _last_block(after, self.answer_open, self.answer_close)
        if counts == [1, 1, 1, 1] and thinking is not None and answer is not None and self._is_tight(body):
            return ParsedResponse(thinking, answer, "perfect")
        scored = completion if self.opening_in_prompt else body
        found = any(tag in scored for tag in self.tags)
        return ParsedResponse(thinking, answer, "partial" if found else "none")

    def _is_tight(self, body: str) -> bool:
        """Say whether only white space stands outside the two blocks (each tag is known to occur once)."""
        before, _, rest = body.partition(self.think_open)
        _, _, rest = rest.partition(self.think_close)
        between, opened, rest = rest.partition(self.answer_open)
        _, closed, after = rest.partition(self.answer_close)
        return bool(opened and closed) and not (before.strip() or between.strip() or after.strip())

    def format_reward(self, completion: str) -> float:
        """Score the format alone: 1 for perfect, 0.5 for partial, 0 for none."""
        return {"perfect": 1.0, "partial": 0.5, "none": 0.0}[self.parse(completion).verdict]


def _last_block(text: str, opening: str, closing: str) -> str | None:
    """Return the stripped text of the last closed opening...closing block, or None. Linear time."""
    start = text.rfind(opening, 0, max(text.rfind(closing), 0))
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.find(closing, start)].strip()


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
}
