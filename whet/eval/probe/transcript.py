"""A completion token by token: position, id and text of each, control tokens marked, thinking and answer counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.text import Text

from whet.model.text.tokenizer import Tokenizer
from whet.rewards.steps.audit import audit_steps
from whet.schema import ResponseSchema

Part = Literal["prompt", "thinking", "answer", "other"]
STYLES: dict[Part, str] = {"prompt": "dim", "thinking": "cyan", "answer": "bold green", "other": ""}
SPECIAL_STYLE = "bold magenta"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token of a transcript.

    Attributes:
        position: Its position in the whole sequence, 0-based.
        id: Its id.
        text: Its text, with leading space; untrusted.
        is_special: Whether it is a control token.
        part: prompt; thinking or answer (without their tags); other: tags, and text outside of both.
    """

    position: int
    id: int
    text: str
    is_special: bool
    part: Part

    def __str__(self) -> str:
        """Write `[  4] id= 5006  ' cars'`, a control token between stars; control characters are escaped."""
        shown = repr(self.text)
        return f"[{self.position:3}] id={self.id:5}  {f'*** {shown[1:-1]} ***' if self.is_special else shown}"


@dataclass(frozen=True, slots=True)
class Transcript:
    """A prompt and a completion, token by token.

    Attributes:
        rows: All tokens in order.
        text: The completion's text; untrusted.
        false_steps: Equations of the completion with wrong arithmetic, as written.
    """

    rows: tuple[TokenRow, ...]
    text: str
    false_steps: tuple[str, ...]

    def count(self, part: Part | Literal["generated"]) -> int:
        """Count the tokens of a part; generated: all tokens after the prompt."""
        return sum(row.part == part or (part == "generated" and row.part != "prompt") for row in self.rows)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield (line, rich style) of the transcript, without line ends inside a line."""
        for title, is_prompt in (("PROMPT", True), ("GENERATED", False)):
            rows = [row for row in self.rows if (row.part == "prompt") == is_prompt]
            yield f"--- {title} TOKENS ({_tokens(len(rows))}) ---", "bold"
            for row in rows:
                yield str(row), SPECIAL_STYLE if row.is_special else STYLES[row.part]
            yield "", ""
        yield f"Decoded: {repr(self.text)[1:-1]}", ""
        yield "", ""
        thinking, answer = self.count("thinking"), self.count("answer")
        yield (
            (
                f"Stats: {self.count('generated')} generated tokens total, {thinking} thinking "
                f"token{'s' * (thinking != 1)}, {answer} answer token{'s' * (answer != 1)}."
            ),
            "",
        )
        for step in self.false_steps:
            yield f"Wrong arithmetic: {repr(step)[1:-1]}", "red"

    def render(self) -> Text:
        """Return the transcript for a terminal: plain text with styles, never markup."""
        return Text("\n").join(Text(line, style=style) for line, style in self.lines())


def transcribe(
    tokenizer: Tokenizer, schema: ResponseSchema, prompt_ids: Sequence[int], completion_ids: Sequence[int]
) -> Transcript:
    """Break a completion down token by token.

    Args:
        tokenizer: Decodes the tokens and knows which are control tokens.
        schema: Its tags separate thinking and answer, whether or not they are single tokens.
        prompt_ids: Prompt tokens.
        completion_ids: Generated tokens, including the stop token.

    Returns:
        The transcript. Thinking that is never closed runs to the end of the completion; the answer is the one that the
        parser takes: the last closed block after the thinking.
    """
    texts = [tokenizer.token_text(index) for index in completion_ids]
    whole = "".join(texts)
    thinking, answer = _spans(whole, schema)
    rows = [
        TokenRow(place, index, tokenizer.token_text(index), index in tokenizer.special_ids, "prompt")
        for place, index in enumerate(prompt_ids)
    ]
    start = 0
    for index, text in zip(completion_ids, texts, strict=True):
        part: Part = "thinking" if start in thinking else "answer" if start in answer else "other"
        rows.append(TokenRow(len(rows), index, text, index in tokenizer.special_ids, part))
        start += len(text)
    false = [step.text for step in audit_steps(whole) if step.verdict == "false"]
    return Transcript(tuple(rows), tokenizer.decode_completion(prompt_ids, completion_ids), tuple(false))


def _spans(text: str, schema: ResponseSchema) -> tuple[range, range]:
    """Return the character ranges of thinking and answer, without their tags."""
    if not schema.has_thinking:
        opened = closed = -1
    else:
        opened, closed = text.find(schema.think_open), text.find(schema.think_close)
    is_open = opened >= 0 and (closed < 0 or opened < closed)
    if not is_open and not schema.opening_in_prompt:
        thinking = range(0)
    else:
        thinking = range(
            opened + len(schema.think_open) if is_open else 0, len(text) if closed < 0 else closed
        )
    after = closed + len(schema.think_close) if closed >= 0 else 0
    if schema.answer_place != "tag":
        answer = schema.parse(text).answer or ""
        start = text.rfind(answer, after) if answer else -1
        return thinking, range(start, start + len(answer)) if start >= 0 else range(0)
    end = text.rfind(schema.answer_close, after)
    start = text.rfind(schema.answer_open, after, max(end, after))
    if start < 0:
        return thinking, range(0)
    start += len(schema.answer_open)
    return thinking, range(start, text.find(schema.answer_close, start))


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"
