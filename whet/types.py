"""Records and protocols that every folder shares, and the legend of shape letters.

Shape letters (one letter is exactly one axis; suffixes on tensor and list names):

======  =====================================  ======  =========================================
``P``   prompts (problems) per step            ``H``   query heads
``G``   samples per prompt                     ``K``   key/value heads
``B``   rows (sequences)                       ``C``   channels per head
``T``   positions in a padded row              ``F``   feed-forward width
``N``   packed tokens (flat, no rows)          ``L``   layers
``S``   cache (key) positions                  ``R``   LoRA rank
``V``   vocabulary                             ``I``   image patches
``D``   model width                            ``M``   trained tokens (those that the loss sees)
``E``   experts                                ``X``   channels of a convolution, bytes of a record
======  =====================================  ======  =========================================
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length"]


LARGEST_REWARD = 1e9
"""Bound of a user's reward, and of a reward's weight: beyond it nothing is left of a group's other rewards, or their
squares overflow."""


def problem_uid(task: str, prompt: str, images: Sequence[str] = ()) -> str:
    """Name a problem by its content, so that splits and seeds never depend on its row number.

    Args:
        task: Name of the task.
        prompt: The question as the user wrote it.
        images: A name of each of its images, the same on every machine.

    Returns:
        16 hexadecimal digits of SHA-256 over all of them.
    """
    text = "".join((f"{task}\x00{prompt}", *(f"\x00image\x00{name}" for name in images)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a chat.

    Attributes:
        role: 'system', 'user', 'assistant' or 'tool'.
        content: What was said.
        thinking: What an assistant thought before it, where the data keeps the two apart.
        tool_calls: JSON list of an assistant's calls, as chat templates take them; '' for none.
        tool_call_id: The call that a tool answers; '' for none.
        name: The tool that answers; '' for none.
        images: Sources of the images that stand before its text (`Problem.images`).
        is_learnt: Whether fine-tuning learns it, if it is the assistant's; otherwise it is context.
    """

    role: str
    content: str
    thinking: str = ""
    tool_calls: str = ""
    tool_call_id: str = ""
    name: str = ""
    images: tuple[str, ...] = ()
    is_learnt: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "images", tuple(self.images))

    def as_dict(self) -> dict[str, Any]:
        """Return it as chat templates take it: what is empty is left out, calls are parsed."""
        value: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.images:
            parts: list[dict[str, str]] = [{"type": "image", "image": source} for source in self.images]
            value["content"] = [*parts, {"type": "text", "text": self.content}]
        if self.thinking:
            value["reasoning_content"] = self.thinking
        if self.tool_calls:
            value["tool_calls"] = json.loads(self.tool_calls)
        if self.tool_call_id:
            value["tool_call_id"] = self.tool_call_id
        if self.name:
            value["name"] = self.name
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One question with its gold answer, or one conversation with its reply.

    Example:
        >>> Problem(uid="ab12", task="arithmetic", prompt="47+85=", answer="132", solution="7+5=12 ...")

    Attributes:
        uid: Stable content hash (`problem_uid`).
        task: Name of the task that made it.
        prompt: The question as text, without any template or tags.
        answer: The gold answer as text.
        solution: Worked thinking for fine-tuning; '' means "answer directly" (an empty scratch-pad).
        messages: The whole conversation that asks, where it is more than one message of the user's: system messages,
            earlier turns, answers of tools; its last is the user's (then `prompt` is that text) or a tool's. Empty:
            `prompt` alone.
        reply: The demonstrated response, verbatim, where nothing is to be parsed (chats); '' renders `solution` and
            `answer` by the schema.
        other_answers: Further gold answers, where the data accepts several: any of them is right.
        images: Sources of the images that stand before the prompt's text: a path, or a data URI, which holds the file
            itself. Where `messages` ask, theirs are read.
        meta: Free labels such as subject, level, file and line.
    """

    uid: str
    task: str
    prompt: str
    answer: str
    solution: str = ""
    messages: tuple[Message, ...] = ()
    reply: str = ""
    other_answers: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    meta: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        read = tuple(item if isinstance(item, Message) else Message(**item) for item in self.messages)
        object.__setattr__(
            self, "messages", read
        )  # a record on disk has them as objects, and tuples as lists
        object.__setattr__(self, "other_answers", tuple(self.other_answers))
        object.__setattr__(self, "images", tuple(self.images))

    @property
    def asked(self) -> tuple[Message, ...]:
        """The messages that ask: the conversation, or the prompt with its images as one message of the user's."""
        return self.messages or (Message(role="user", content=self.prompt, images=self.images),)

    @property
    def answers(self) -> tuple[str, ...]:
        """Every gold answer: `answer`, then the others that are accepted."""
        return (self.answer, *self.other_answers)


class Allowed(NamedTuple):
    """A place of a worked answer where the rules of the task allow some texts, whichever is best.

    Attributes:
        start: The answer's first character of it.
        texts: Every allowed text, the answer's own among them.
    """

    start: int
    texts: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One completion of one problem, with everything that training and logs need.

    Example:
        >>> Sample(uid="ab12", index=0, prompt_ids=(1, 5), completion_ids=(7, 2),
        ...        sampler_logprobs=(-0.1, 0.0), text="7", finish_reason="stop")

    Attributes:
        uid: Uid of the problem.
        index: Index in its group, 0-based.
        prompt_ids: Token ids that were prefilled.
        completion_ids: Generated token ids **including the stop token**; never re-tokenised.
        sampler_logprobs: Log-probability of each generated token under the sampled distribution (fp32, nats); 0 for
            tokens that the policy did not write.
        text: Exactly the decoded completion_ids, without the final stop token.
        finish_reason: 'stop' (a stop token or string) or 'length' (cut off).
        rewards: Unweighted score of every reward function, by name.
        reward: Weighted sum; None when unscorable (then the sample leaves statistics and denominators).
        advantage: The scalar that training used; None before it is known.
        trained: True for the tokens that the policy wrote, False for a tool's or environment's; empty: all True.
        kept: Per generated token what the sampler's filters left to draw from (`whet.algo.kept`), '' for tokens that
            the policy did not write; empty without filters.
        experts: The sampler's choices of experts in the prompt and in the completion (`whet.algo.kept`); empty where
            they are not recorded.
        turn_ends: Number of policy tokens at the end of each turn; empty for one turn.
        turn_rewards: What the environment paid for each turn, times the weight of the reward 'episode', which is their
            sum; empty without one.
        versions: Per token the number of updates that made the weights it was drawn with (those of the policy's token
            before it, where another wrote it); empty where all were drawn with the weights of the sample's step.
    """

    uid: str
    index: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float | None = None
    trained: tuple[bool, ...] = ()
    kept: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    turn_ends: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()

    @property
    def num_trained(self) -> int:
        """Tokens that the policy wrote."""
        return sum(self.trained) if self.trained else len(self.completion_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All samples of one problem: the unit of group-relative advantages."""

    problem: Problem
    samples: tuple[Sample, ...]


class Segment(NamedTuple):
    """A run of tokens in a flat batch; each attends to those before it, and to a shared prefix.

    Attributes:
        start: First row.
        length: Rows.
        prefix: First row of the prefix.
        shared: Rows of the prefix; 0 where nothing is shared.
    """

    start: int
    length: int
    prefix: int
    shared: int


class Piece(NamedTuple):
    """Consecutive rows of a segment that one rank computes.

    Attributes:
        segment: Index of the segment.
        first: First of its rows.
        length: Rows.
    """

    segment: int
    first: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How the ranks of a group share a micro-batch, of which each computes some rows.

    Attributes:
        place: This rank's place in the group.
        num_ranks: Ranks of the group.
        pieces: What this rank computes, in the order of its rows.
        rows_N: int64 rows of the micro-batch that this rank computes.
        most_rows: Rows of the rank that has most.
        order_N: int64 place of each row of the micro-batch where the ranks' rows stand one after the other, each rank's
            filled up to `most_rows`.
        has_all_rows: Whether each rank computes all rows, with its part of the layers' matrices: then these are the
            rows whose tokens it scores.
    """

    place: int
    num_ranks: int
    pieces: tuple[Piece, ...]
    rows_N: torch.Tensor
    most_rows: int
    order_N: torch.Tensor
    has_all_rows: bool = False


class KeptSets(NamedTuple):
    """What filters left to draw from, for every trained token: its log-probability is renormalised over that set.

    Attributes:
        words_Z: int32 words of all sets, one after the other: ids, or as many words as have one bit per id.
        starts: First word of each set, and the end: M + 1 numbers.
    """

    words_Z: torch.Tensor
    starts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Packed sequences of one forward/backward pass: flat tokens, no padding.

    Attributes:
        tokens_N: int64 token ids of all segments, one after the other.
        segments: Where each sequence lies; a prompt that several share stands there once, as a segment before theirs.
        source_M: int64 row in [0, N) whose hidden state scores each trained token (its predecessor's row).
        targets_M: int64 trained token ids.
        sequence_M: int64 index in [0, B) of each trained token's sequence.
        indices_B: Index of each sequence in the list that was packed.
        weights_M: Per-token weight of the aggregation (1 for plain means).
        advantages_M: Per-token advantage (zeros in supervised training).
        sampler_logprobs_M: Log-probability at sampling time (zeros in supervised training).
        proximal_logprobs_M: Log-probability that the ratio starts from: the sampler's, unless it was recomputed.
        ref_logprobs_M: Log-probability under the reference (zeros without one).
        policy_weights_M: Factor of the policy loss alone: off-policy correction and token selection (ones without).
        start_values_M: Value estimates before the update (zeros without a critic).
        returns_M: Targets of the value estimates (zeros without a critic).
        kept: What the sampler's filters left to draw from; None without filters.
        allowed: What the rules of the task allow there; None where nothing is known of any token.
        experts_NX: uint8 bytes of each token's experts in the sampler, all ones where they are unknown; None where
            nothing is recorded.
        split: How ranks share it; None where this rank computes all of it.
    """

    tokens_N: torch.Tensor
    segments: tuple[Segment, ...]
    source_M: torch.Tensor
    targets_M: torch.Tensor
    sequence_M: torch.Tensor
    indices_B: tuple[int, ...]
    weights_M: torch.Tensor
    advantages_M: torch.Tensor
    sampler_logprobs_M: torch.Tensor
    proximal_logprobs_M: torch.Tensor
    ref_logprobs_M: torch.Tensor
    policy_weights_M: torch.Tensor
    start_values_M: torch.Tensor
    returns_M: torch.Tensor
    kept: KeptSets | None = None
    allowed: KeptSets | None = None
    experts_NX: torch.Tensor | None = None
    split: Split | None = None

    @property
    def is_counted(self) -> bool:
        """Whether this rank adds its loss and metrics to the step's: of the ranks that share it the first."""
        return self.split is None or self.split.place == 0

    @property
    def lengths_B(self) -> tuple[int, ...]:
        """Length of each sequence in tokens, its prompt included."""
        prompts = {segment.prefix for segment in self.segments if segment.shared}
        return tuple(s.shared + s.length for s in self.segments if s.shared or s.start not in prompts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One optimizer step's data, cut into micro-batches, with the counts that denominators are made of.

    Attributes:
        micro_batches: In the order they are run.
        num_trained_tokens: Tokens with a non-zero mask in all micro-batches of this rank.
        num_trained_sequences: Sequences with at least one trained token on this rank.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_trained_tokens: int
    num_trained_sequences: int


Reward = Callable[[Problem, str], "float | None"]
"""A reward: (problem, completion text) -> score, or None for 'unscorable'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """An environment's reply to one turn of the policy.

    Attributes:
        observation: Text for the policy to read next; None ends the episode.
        reward: What this turn earned.
        inline: True for a tool's result inside the policy's own message, False for a new message of the user's.
    """

    observation: str | None = None
    reward: float = 0.0
    inline: bool = False


class Environment(Protocol):
    """The other side of a multi-turn episode. One object plays many episodes; each keeps its own state."""

    def reset(self, problem: Problem) -> Any:
        """Begin an episode and return its state; the first observation is the problem's prompt."""
        ...

    def step(self, states: Sequence[Any], texts: Sequence[str]) -> list[Turn]:
        """Answer the newest turn of several episodes.

        Args:
            states: What `reset` returned; the environment may change it in place.
            texts: What the policy wrote in this turn, including the stop string.
        """
        ...


class Task(Protocol):
    """Data, prompt and answer check of one kind of problem.

    A task may have an attribute `answer_type` (`whet.schema.AnswerType`) that words the system prompt.
    """

    name: str

    def problems(self, split: str) -> list[Problem]:
        """Return all problems of a split ('train', 'dev' or 'test')."""
        ...

    def is_correct(self, problem: Problem, answer: str | None) -> bool | None:
        """Judge an extracted final answer.

        Args:
            problem: The problem, of this task.
            answer: Untrusted text of any length; None: nothing could be extracted.

        Returns:
            True or False; None when there is no verdict (the grader died, the sandbox did not start): the sample then
            leaves statistics and denominators, and never counts as wrong. A wrong, empty or hostile answer is False,
            and so is one that a grader needs too much time or memory for.
        """
        ...


@runtime_checkable
class ManyJudge(Protocol):
    """A task that judges a batch of answers faster than one at a time."""

    def judge_many(self, items: Sequence[tuple[Problem, str | None]]) -> list[bool | None]:
        """Judge answers as `Task.is_correct` does, in their order."""
        ...


@runtime_checkable
class RuledTask(Protocol):
    """A task that knows what its rules allow in an answer, such as all legal moves."""

    def allowed(self, problem: Problem) -> Sequence[Allowed]:
        """Return the places of a problem's answer of which that is known, in their order."""
        ...


@runtime_checkable
class PartsTask(Protocol):
    """A task whose completions have parts with scores of their own."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of all parts that it scores; empty for none."""
        ...

    def part_scores(self, problem: Problem, answer: str | None) -> Mapping[str, float]:
        """Return the score of each part, at most 1, and sums of them by name; what the problem does not have is left
        out."""
        ...


class UserError(ValueError):
    """A mistake of the user's: printed as one line, exit status 2, never a traceback.

    Attributes:
        unread: Fields of a config, dotted from its root, that nothing reads as the others are set.
    """

    unread: tuple[str, ...] = ()


class UnreadError(ValueError):
    """A config sets fields that nothing reads as its others are set.

    What the user typed is refused with the message; a recipe's default that an override made meaningless falls away
    (`whet.cli.parse`).

    Args:
        message: What to tell the user.
        fields: Their names in the class that raises.
    """

    def __init__(self, message: str, *fields: str) -> None:
        super().__init__(message)
        self.fields = fields
