"""What fine-tuning learns from a problem: a worked solution, the assistant's turns of a conversation, or a plain
text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from typing import Any, Literal, NamedTuple

import numpy as np

from whet.algo.kept import encode_ids
from whet.algo.packing import TrainingSequence
from whet.generate.policy import MAX_UNKNOWN_SHARE, NUM_CHECKED, Policy
from whet.model.text.chat import Passage, render_passages
from whet.model.text.tokenizer import Tokenizer
from whet.schema import ANSWER_SENTENCE
from whet.types import Allowed, Message, Problem, RuledTask, UserError

Kind = Literal["solution", "chat", "text"]
Turns = Literal["all", "last"]
TooLong = Literal["skip", "cut"]

TOOLS, TOOL_CALLS = "tools", "tool_calls"
"""Labels in a problem's `meta`: JSON lists of the functions that a conversation may call, and of the calls of its
reply."""
MARK = "\ue000"
"""Stands for an answer, to find its place."""
FEW = 4
"""Demonstrations below which a warning is due."""
TURNS, CUT = "turns", "cut"
"""Labels that `demonstrate` adds: which messages of a conversation are learnt, and that a text is cut to the
context."""


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """What is learnt from a split.

    Attributes:
        problems: One for each training sequence: a conversation whose turns need several texts is there once for each.
        longest: Tokens of the longest sequence.
        num_left_out: Rows that do not fit in the context.
        num_cut: Rows of which only the beginning fits, and is learnt.
        num_thoughtless: Sequences of which the chat template does not write the thinking.
        end_ids: Control tokens that end the learnt turns.
        num_endless: Sequences with a learnt turn that no such token ends.
        num_changed: Replies that come back changed from the tokenizer, among the first few hundred.
        num_extended: Worked solutions that did not end with their answer, among the first few hundred: a sentence that
            has it is learnt at their end.
    """

    problems: list[Problem]
    longest: int = 0
    num_left_out: int = 0
    num_cut: int = 0
    num_thoughtless: int = 0
    end_ids: frozenset[int] = frozenset()
    num_endless: int = 0
    num_changed: int = 0
    num_extended: int = 0

    @property
    def notes(self) -> list[str]:
        """What to tell before training."""
        count, notes = len(self.problems), []
        if self.num_cut:
            notes.append(f"{self.num_cut:,} rows are cut to the context, conversations at whole turns")
        if self.num_thoughtless:
            notes.append(
                f"{self.num_thoughtless:,} of {count:,} conversations have thinking that the chat template does not "
                "write: it is not learnt (to learn it, write it into the reply)"
            )
        if self.num_endless:
            notes.append(
                f"warning: in {self.num_endless:,} of {count:,} conversations the template's generation blocks leave "
                "out the token that ends a turn: the model does not learn to stop"
            )
        if self.num_changed:
            notes.append(
                f"warning: the tokenizer changes {self.num_changed:,} of the first {min(count, NUM_CHECKED):,} replies "
                "(letter case, spaces, rare characters): what is learnt is what it keeps"
            )
        if self.num_extended:
            first = min(count, NUM_CHECKED)
            notes.append(
                f"{self.num_extended:,} of the first {first:,} rows have no solution that ends with its answer: "
                f'"{ANSWER_SENTENCE}..." is learnt at its end (whet data shows it)'
            )
        if count < FEW:
            notes.append(
                f"warning: {count} demonstration{'s' * (count != 1)}: learnt by heart, not as a format; priming takes "
                "hundreds, and at least 4"
            )
        return notes


def kind_of(problem: Problem) -> Kind:
    """Say what is learnt from a problem.

    Raises:
        UserError: If there is nothing to learn: neither a reply nor an answer.
    """
    if problem.reply or TOOL_CALLS in problem.meta or TURNS in problem.meta:
        return "chat" if problem.prompt or problem.messages else "text"
    if problem.answer:
        return "solution"
    raise UserError(
        f"{_place(problem)}: nothing to learn from {problem.prompt[:40]!r}: expected a reply or an answer "
        "(pairs with 'chosen' and 'rejected' are for: whet dpo)"
    )


def _place(problem: Problem) -> str:
    """Say where a row stands."""
    named = [problem.meta[name] for name in ("file", "line") if name in problem.meta]
    return ", line ".join(named) if named else f"row {problem.uid}"


def conversation(problem: Problem) -> list[Message]:
    """Return a problem's whole conversation; it ends with its reply."""
    reply = Message(
        role="assistant",
        content=problem.reply,
        thinking=problem.solution,
        tool_calls=problem.meta.get(TOOL_CALLS, ""),
    )
    return [*(problem.messages or (Message(role="user", content=problem.prompt),)), reply]


def render_conversation(
    tokenizer: Tokenizer, problem: Problem, *, stop_ids: Sequence[int] = ()
) -> list[Passage]:
    """Render a problem's conversation, each turn in the context in which it would have been written.

    A schema's instruction and tags stay out: a reply is learnt verbatim.

    Args:
        tokenizer: The tokenizer, with its chat template.
        problem: The conversation, and its tools in `meta`.
        stop_ids: Further ids that end a turn.
    """
    messages = tokenizer.quoted_messages([message.as_dict() for message in conversation(problem)])
    values: dict[str, Any] = {}
    if problem.meta.get(TOOLS):
        values["tools"] = json.loads(problem.meta[TOOLS])
    return render_passages(tokenizer, messages, values=values, stop_ids=stop_ids)


def demonstration(
    policy: Policy, problem: Problem, *, empty: bool = False, rules: RuledTask | None = None
) -> TrainingSequence:
    """Turn a problem of `demonstrate` into its training sequence.

    Args:
        policy: Renders and encodes it.
        problem: The problem; of a conversation that needs several texts its last one is taken.
        empty: Learn the worked solution with empty thinking.
        rules: Its task, where what that allows is to be learnt, too.
    """
    kind = kind_of(problem)
    if kind == "chat":
        passage = render_conversation(policy.tokenizer, problem, stop_ids=policy.stop_ids)[-1]
        return _encode(policy, passage, _learnt(problem, passage))
    if kind == "text":
        ids = policy.tokenizer.encode_document(problem.reply)
        ids = ids[: policy.model.config.max_positions] if CUT in problem.meta else ids
        # Nothing comes before the first token that it could be learnt from.
        return TrainingSequence(prompt_ids=ids[:1], completion_ids=ids[1:])
    thinking = "" if empty else None
    ids, trained = policy.solution(problem, thinking=thinking)
    places = () if rules is None else rules.allowed(problem)
    allowed = _allowed(policy, problem, places, thinking, ids) if places else ()
    allowed = tuple(compress(allowed, trained)) if trained else allowed
    return TrainingSequence(
        prompt_ids=policy.prompt_ids(problem), completion_ids=ids, trained=trained, allowed=allowed
    )


def _allowed(
    policy: Policy, problem: Problem, places: Sequence[Allowed], thinking: str | None, ids: Sequence[int]
) -> tuple[str, ...]:
    """Return what may stand in place of each token of a worked answer (`TrainingSequence.allowed`).

    A text that is allowed is followed as far as it has the answer's own tokens; a place whose text the tokenizer joins
    with what stands around it is left out.

    Args:
        policy: Its tokenizer.
        problem: The problem.
        places: What its task allows.
        thinking: The demonstration's, as `Policy.solution` takes it.
        ids: The demonstration's ids.

    Raises:
        UserError: If an answer's own text is not among those that are allowed in its place.
    """
    text = policy.solution_text(problem, thinking)
    spans = policy.tokenizer.spans(text)
    if [index for index, _, _ in spans] != list(ids[: len(spans)]):
        return ()  # a tool's results are read piece by piece
    # A tag behind the answer may hold its letters, too.
    head, _, tail = policy.solution_text(replace(problem, answer=MARK), thinking).partition(MARK)
    is_there = text == head + problem.answer + tail
    before = len(head) if is_there else text.rfind(problem.answer)  # the solution ended with it
    vocab = policy.model.config.vocab_size
    found = [""] * len(ids)
    for first, texts in places:
        start = before + first
        own = max((own for own in texts if own and text.startswith(own, start)), key=len, default=None)
        if own is None:
            raise UserError(
                f"{_place(problem)}: allowed() gives {[*texts][:3]} at character {first} of the answer "
                f"{problem.answer[:40]!r}, where none of them stands; the answer's own text must be among them"
            )
        at = [n for n, (_, a, b) in enumerate(spans) if a < start + len(own) and b > start]
        lead = text[spans[at[0]][1] : start]
        written = _encoded(policy.tokenizer, lead + own)
        if written != tuple(ids[at[0] : at[-1] + 1]):
            continue
        rivals = {_encoded(policy.tokenizer, lead + other) for other in texts}
        for n, index in enumerate(written):
            if any(len(rival) == n for rival in rivals):
                break  # what follows an allowed text that ends here is not known
            found[at[0] + n] = encode_ids(np.array(sorted({rival[n] for rival in rivals})), vocab)
            rivals = {rival for rival in rivals if rival[n] == index}
    return tuple(found)


@lru_cache(maxsize=65_536)
def _encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text))


def sequences_of(policy: Policy, problem: Problem) -> list[TrainingSequence]:
    """Return all that is learnt from a row, whatever its length: one sequence, or several of a conversation."""
    return [part.sequence for part in _unfold(policy, problem, "all")]


def demonstrate(
    policy: Policy, problems: Sequence[Problem], *, turns: Turns = "all", too_long: TooLong = "skip"
) -> Demonstrations:
    """Find what is learnt from problems: one training sequence each, or several of a conversation.

    Args:
        policy: Renders and encodes; its context is the room.
        problems: The rows.
        turns: Which of the assistant's turns are learnt.
        too_long: What happens to a conversation or text that does not fit: it is left out, or loses its last turns (a
            text its end) until it fits. Worked solutions are never cut: they would lose their answer.

    Raises:
        UserError: If a row has nothing to learn, the chat template fails, or the tokenizer cannot spell the rows.
    """
    solved = [problem for problem in problems if kind_of(problem) == "solution"]
    if solved:
        policy.check_alphabet(solved, solutions=True)
    room = policy.model.config.max_positions
    kept: list[Problem] = []
    ends: set[int] = set()
    longest = left_out = cut = thoughtless = endless = checked = unknown = changed = 0
    for problem in problems:
        try:
            parts = _unfold(policy, problem, turns)
        except UserError as error:
            raise UserError(f"{_place(problem)}: {error}") from None
        if too_long == "cut":
            whole = parts
            while _num_tokens(parts) > room:
                parts = _shorten(policy, parts[-1].problem, turns)
            cut += bool(parts) and parts is not whole
        if not parts or _num_tokens(parts) > room:
            left_out += 1
            continue
        for part in parts:
            kept.append(part.problem)
            longest = max(longest, part.sequence.num_tokens)
            thoughtless += part.is_thoughtless
            last = policy.tokenizer.last_control(part.sequence.completion_ids)
            if last is not None and (kind_of(problem) == "solution" or last == policy.turn_end):
                ends.add(last)
            if kind_of(problem) == "chat":
                found = _end_ids(policy, part.sequence)
                endless += None in found
                ends |= {index for index in found if index is not None}
            if kind_of(problem) != "solution" and len(kept) <= NUM_CHECKED:
                checked += part.sequence.num_tokens
                changed += not policy.tokenizer.keeps(problem.reply)
                ids = (*part.sequence.prompt_ids, *part.sequence.completion_ids)
                unknown += ids.count(policy.tokenizer.unk_id) if policy.tokenizer.unk_id is not None else 0
    if unknown > MAX_UNKNOWN_SHARE * checked:
        raise UserError(
            f"the tokenizer does not know {unknown / checked:.0%} of the rows' tokens: use another tokenizer"
        )
    shown = solved[:NUM_CHECKED] if policy.schema.answer_place == "anywhere" else []
    extended = sum(policy.solution_text(p).endswith(ANSWER_SENTENCE + p.answer) for p in shown)
    extended -= sum(p.solution.endswith(ANSWER_SENTENCE + p.answer) for p in shown)
    return Demonstrations(
        kept, longest, left_out, cut, thoughtless, frozenset(ends), endless, changed, extended
    )


def learn_ends(policy: Policy, end_ids: frozenset[int]) -> list[str]:
    """Let generation stop at the tokens that end learnt turns, in the saved model, too; return what to tell."""
    new = sorted(end_ids - set(policy.stop_ids))
    if not new:
        return []
    policy.tokenizer.stop_ids |= end_ids
    policy.stop_ids = tuple(sorted({*policy.stop_ids, *new}))
    names = " and ".join(policy.tokenizer.token_text(index) for index in new)
    return [f"{names}: ends the learnt turns, so the saved model stops there, too"]


class _Part(NamedTuple):
    """One training sequence of a row, and the problem that `demonstration` makes it of."""

    problem: Problem
    sequence: TrainingSequence
    is_thoughtless: bool = False


def _num_tokens(parts: Sequence[_Part]) -> int:
    """Return the tokens of the longest sequence of a row."""
    return max((part.sequence.num_tokens for part in parts), default=0)


def _unfold(policy: Policy, problem: Problem, turns: Turns) -> list[_Part]:
    """Return what is learnt from a row."""
    if kind_of(problem) != "chat":
        return [_Part(problem, demonstration(policy, problem))]
    messages = conversation(problem)
    if not problem.messages:
        policy.check_prompt(problem.prompt)
    passages = render_conversation(policy.tokenizer, problem, stop_ids=policy.stop_ids)
    parts = []
    for passage in passages if turns == "all" else passages[-1:]:
        written = [turn for turn, spans in passage.turns.items() if spans and messages[turn].is_learnt]
        learnt = written if turns == "all" else [turn for turn in written if turn == len(messages) - 1]
        if learnt:
            texts = {turn: "".join(passage.text[slice(*s)] for s in passage.turns[turn]) for turn in learnt}
            texts = {turn: policy.tokenizer.plain(text) for turn, text in texts.items()}
            lost = any(messages[turn].thinking.strip() not in text for turn, text in texts.items())
            parts.append(_Part(_until(problem, learnt), _encode(policy, passage, learnt), lost))
    return parts


def _until(problem: Problem, learnt: Sequence[int]) -> Problem:
    """Return a conversation up to the last of some turns, marked with those that are learnt."""
    messages = conversation(problem)
    before, reply = messages[: learnt[-1]], messages[learnt[-1]]
    meta = {name: value for name, value in problem.meta.items() if name != TOOL_CALLS}
    meta |= {TURNS: " ".join(map(str, learnt))} | ({TOOL_CALLS: reply.tool_calls} if reply.tool_calls else {})
    is_whole = len(before) == len(messages) - 1
    return replace(
        problem,
        uid=problem.uid if is_whole else f"{problem.uid}-{len(before)}",
        prompt=next((m.content for m in reversed(before) if m.role == "user"), problem.prompt),
        answer=problem.answer if is_whole else "",
        messages=tuple(before),
        reply=reply.content,
        solution=reply.thinking,
        meta=meta,
    )


def _shorten(policy: Policy, problem: Problem, turns: Turns) -> list[_Part]:
    """Return what is learnt from a row without its last turn, or from the beginning of a text; [] for nothing."""
    kind = kind_of(problem)
    if kind == "text" and CUT not in problem.meta:
        return _unfold(policy, replace(problem, meta={**problem.meta, CUT: "context"}), turns)
    messages = conversation(problem) if kind == "chat" else []
    earlier = [
        index for index, m in enumerate(messages[:-1]) if index and m.role == "assistant" and m.is_learnt
    ]
    return _unfold(policy, _until(problem, earlier[-1:]), turns) if earlier else []


def _learnt(problem: Problem, passage: Passage) -> list[int]:
    """Return the turns of a passage that are learnt: all, unless the problem says which."""
    messages = conversation(problem)
    named = [int(turn) for turn in problem.meta.get(TURNS, "").split()]
    return named or [turn for turn in passage.turns if messages[turn].is_learnt]


def _encode(policy: Policy, passage: Passage, learnt: Sequence[int]) -> TrainingSequence:
    """Encode the whole text at once; everything before the first learnt token is the prompt."""
    ids, trained = policy.tokenizer.encode_marked(passage.text, passage.spans(learnt), cuts=True)
    first = max(trained.index(True), 1)
    rest = trained[first:]
    return TrainingSequence(
        prompt_ids=ids[:first], completion_ids=ids[first:], trained=() if all(rest) else rest
    )


def _end_ids(policy: Policy, sequence: TrainingSequence) -> set[int | None]:
    """Return the control tokens that end the learnt turns; None for a turn that ends without one."""
    found: set[int | None] = set()
    trained = sequence.trained or (True,) * len(sequence.completion_ids)
    last: int | None = None
    for index, is_trained, goes_on in zip(
        sequence.completion_ids, trained, (*trained[1:], False), strict=True
    ):
        if is_trained and policy.tokenizer.token_text(index).strip():
            last = index if index in policy.tokenizer.special_ids else None
        if is_trained and not goes_on:
            found.add(last)
    return found
