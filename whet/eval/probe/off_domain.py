"""Questions outside a reasoner's training domain, grading of the replies, and perplexity of a text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from whet.algo.packing import TrainingSequence, pack
from whet.generate.engine import Request
from whet.generate.policy import Policy
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.generate.scoring import score_micro_batch
from whet.rewards.answers.equal import answers_equal, is_plain_number
from whet.rewards.answers.extract import extract_answer
from whet.schema import ResponseSchema
from whet.types import Problem, UserError

# Perplexity of a text: every token is scored once, in overlapping windows of the model's context.

MAX_WINDOW = 4096
"""Window length if the context is longer: tokens further back hardly change a prediction in prose."""
TOKEN_BUDGET = 8192


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        nats: Sum of the negative log-probabilities of the scored tokens.
        num_tokens: Scored tokens.
        num_bytes: Bytes of their text.
    """

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def nats_per_token(self) -> float:
        """Mean over tokens: comparable between checkpoints with one tokenizer."""
        return self.nats / self.num_tokens

    @property
    def nats_per_byte(self) -> float:
        """Mean over bytes: comparable across tokenizers."""
        return self.nats / self.num_bytes

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(min(self.nats_per_token, 700.0))


def text_ids(policy: Policy, text: str) -> list[int]:
    """Return the tokens of bare text, after BOS if the tokenizer's prompts start with it."""
    tokenizer = policy.tokenizer
    start = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    return start + tokenizer.encode(text)


def measure_perplexity(policy: Policy, text: str, *, stride: int = 0) -> Perplexity:
    """Score a text.

    The first token is scored only after a BOS. Each window advances by `stride` tokens and scores the new ones, so that
    all but the first window's tokens are predicted from at least (window - stride) tokens.

    Args:
        policy: The model.
        text: The text; the tokenizer must be able to spell it.
        stride: New tokens of each window after the first; 0 for half a window.

    Returns:
        The sum with its counts.

    Raises:
        UserError: If the text has fewer than two tokens, or the stride is not smaller than the window.
    """
    ids = text_ids(policy, text)
    if len(ids) < 2:
        raise UserError(f"the text has {len(ids)} tokens: expected at least 2 to predict one from the other")
    has_bos = ids[0] == policy.tokenizer.bos_id and policy.tokenizer.adds_bos
    unscored = 0 if has_bos else len(policy.tokenizer.token_text(ids[0]).encode())
    window = min(policy.model.config.max_positions, MAX_WINDOW)
    if not 0 <= stride < window:
        raise UserError(
            f"stride = {stride}: expected 0 (half a window) to {window - 1}, for a window of {window}"
        )
    sequences = _windows(ids, window, stride or max(1, window // 2))
    batch = pack(sequences, token_budget=max(window, TOKEN_BUDGET), device=policy.device)
    total = 0.0
    with torch.no_grad():
        for micro in batch.micro_batches:
            logprobs_M, _ = score_micro_batch(policy.model, micro, attention=policy.attention)
            total -= float(logprobs_M.double().sum())
    return Perplexity(total, len(ids) - 1, len(text.encode()) - unscored)


def _windows(ids: Sequence[int], window: int, stride: int) -> list[TrainingSequence]:
    """Cut ids into windows that score each token except the first once."""
    found = []
    start, scored = 0, 1
    while scored < len(ids):
        end = min(start + window, len(ids))
        found.append(
            TrainingSequence(prompt_ids=tuple(ids[start:scored]), completion_ids=tuple(ids[scored:end]))
        )
        start, scored = start + stride, end
    return found


Kind = Literal["knowledge", "science", "logic", "creative", "continuation", "arithmetic"]

_SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n")
_LETTER = re.compile(r"[^\W\d_]")
_DIGIT = re.compile(r"\d")


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    """One question of the off-domain set.

    Attributes:
        kind: Kind of question. The model gets a continuation as bare text, without template or tags.
        text: The question.
        accepted: Right answers; empty if none can be checked.
        rivals: Words that must not occur next to a right answer, so that naming all candidates does not count.
    """

    kind: Kind
    text: str
    accepted: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()

    @property
    def asks_number(self) -> bool:
        """Whether a number is the right kind of answer."""
        return self.kind == "arithmetic"


PROMPTS = (
    ProbePrompt("knowledge", "Which city is the capital of Portugal?", ("Lisbon", "Lisboa"), ("Porto",)),
    ProbePrompt("knowledge", "Which ocean lies between Africa and Australia?", ("Indian",), ("Pacific", "Atlantic")),
    ProbePrompt("knowledge", "In which country is the city of Kyoto?", ("Japan",), ("China", "Korea")),
    ProbePrompt("knowledge", "Which farm animal gives us wool?", ("sheep", "lamb", "lambs"), ("cow", "pig", "hen")),
    ProbePrompt("science", "Which gas in the air do people need to breathe?", ("oxygen", "O2"), ("nitrogen",)),
    ProbePrompt("science", "Which planet is known for its wide, bright rings?", ("Saturn",), ("Jupiter", "Mars")),
    ProbePrompt("science", "What does water turn into when it freezes?", ("ice",), ("steam", "vapour", "vapor")),
    ProbePrompt("science", "Which force pulls a dropped stone down?", ("gravity", "gravitation"), ("magnetism",)),
    ProbePrompt("logic", "Ann is taller than Ben, Ben than Carl. Who is the shortest?", ("Carl",), ("Ann", "Ben")),
    ProbePrompt("logic", "All roses are flowers, and all flowers need light. Do roses need light?", ("yes",), ("no",)),
    ProbePrompt("logic", "If today is Monday, which day comes after tomorrow?", ("Wednesday",), ("Tuesday",)),
    ProbePrompt("logic", "A box is either red or green, and it is not red. What colour is it?", ("green",), ("red",)),
    ProbePrompt("creative", "Describe a quiet morning by a lake in two sentences."),
    ProbePrompt("creative", "Write a short poem about an old bicycle."),
    ProbePrompt("creative", "Invent a name for a small bakery and say why it fits."),
    ProbePrompt("creative", "Tell a very short story about a cat that is afraid of rain."),
    ProbePrompt("continuation", "The opposite of hot is", ("cold", "cool"), ("warm",)),
    ProbePrompt("continuation", "Bees fly from flower to flower and make", ("honey",), ("milk",)),
    ProbePrompt("continuation", "After a long day at work she sat down, took off her shoes, and"),
    ProbePrompt("continuation", "The lighthouse keeper looked out over the dark sea, where"),
    ProbePrompt("arithmetic", "Three friends share twelve biscuits equally. How many does each of them get?", ("4",)),
    ProbePrompt("arithmetic", "Nine people are on a bus. Five get off, two get on. How many are on it now?", ("6",)),
    ProbePrompt("arithmetic", "A book costs seven euros. How many euros do four of these books cost?", ("28",)),
    ProbePrompt("arithmetic", "Mia is eight years old. How old will she be in six years?", ("14",)),
)  # fmt: skip
KINDS: tuple[Kind, ...] = tuple(dict.fromkeys(prompt.kind for prompt in PROMPTS))


def stated_answer(text: str, schema: ResponseSchema) -> str:
    """Return a completion's answer: its answer block, or the first line after the thinking.

    Args:
        text: Any completion.
        schema: Its tags.
    """
    answer = schema.parse(text).answer
    if answer is not None:
        return answer
    said = text.rpartition(schema.think_close)[2] if schema.think_close else text
    return said.strip().partition("\n")[0].strip()


def is_right(prompt: ProbePrompt, answer: str) -> bool | None:
    """Judge a stated answer.

    Args:
        prompt: The question.
        answer: The result of `stated_answer`; untrusted.

    Returns:
        None without an accepted answer. A number must equal it. A word must occur in the first sentence, as a whole
        word, and none of the rivals may.
    """
    if not prompt.accepted:
        return None
    if prompt.asks_number:
        found = extract_answer(answer)
        return any(answers_equal(said, gold) for said in (answer, found) if said for gold in prompt.accepted)
    sentence = _SENTENCE_END.split(answer.strip(), maxsplit=1)[0]
    names = _words(prompt.accepted).search(sentence) is not None
    return names and not (prompt.rivals and _words(prompt.rivals).search(sentence))


def is_numeric(answer: str) -> bool:
    """Say whether a stated answer is a number: digits without any word, or a number with its unit."""
    return bool(_DIGIT.search(answer)) and (not _LETTER.search(answer) or is_plain_number(answer))


@cache
def _words(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, words))})\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reply:
    """One completion of one prompt.

    Attributes:
        sample: 'greedy', or the number of the sample from 0.
        text: The completion; untrusted.
        answer: Its answer, see `stated_answer`.
        is_right: None if nothing is checked.
        is_numeric: Whether the answer is a number.
        num_tokens: Its tokens, including the stop token.
        finish_reason: 'stop' or 'length'.
    """

    sample: int | str
    text: str
    answer: str
    is_right: bool | None
    is_numeric: bool
    num_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """Probe results of one model.

    Attributes:
        name: The model as it was named.
        replies: For each usable prompt, the greedy reply and then the sampled ones.
        skipped: Why a prompt was skipped, by its text.
        perplexity: Perplexity of the text; None if the tokenizer cannot spell it.
        remark: What could not be measured, in a sentence; empty if nothing.
        protocol: Prompting and sampling settings.
    """

    name: str
    replies: Mapping[ProbePrompt, Sequence[Reply]]
    skipped: Mapping[str, str]
    perplexity: Perplexity | None
    remark: str
    protocol: Mapping[str, object]


def probe_model(
    policy: Policy,
    name: str,
    text: str,
    *,
    num_samples: int,
    sampling: SamplingParams,
    stride: int,
    seed: int,
    on_finished: Callable[[int], None],
) -> ModelProbe:
    """Run all prompts that its tokenizer can spell through one model, and score a text.

    Args:
        policy: The model.
        name: Its name.
        text: The text of the perplexity.
        num_samples: Sampled completions per prompt, with the same noise for every model.
        sampling: Sampling settings.
        stride: As in `measure_perplexity`.
        seed: Seed of the samples.
        on_finished: Called with the number of completions that ended since the last call.
    """
    unknown = policy.tokenizer.unk_id
    prompts: dict[ProbePrompt, tuple[int, ...]] = {}
    skipped: dict[str, str] = {}
    for prompt in PROMPTS:
        ids = _prompt_ids(policy, prompt)
        if unknown is not None and unknown in policy.tokenizer.encode(prompt.text):
            skipped[prompt.text] = "the tokenizer cannot spell them"
        elif len(ids) >= policy.model.config.max_positions:
            skipped[prompt.text] = "the context is too short for them"
        else:
            prompts[prompt] = ids
    reasons = Counter(skipped.values()).items()
    remarks = [f"{count} of {len(PROMPTS)} prompts are skipped: {why}" for why, count in reasons]
    perplexity = None
    if unknown is not None and unknown in text_ids(policy, text):
        remarks.append("no perplexity: the tokenizer cannot spell the text")
    else:
        perplexity = measure_perplexity(policy, text, stride=stride)
    replies: dict[ProbePrompt, list[Reply]] = {prompt: [] for prompt in prompts}
    engine = policy.engine()
    greedy = SamplingParams(temperature=0.0, max_new_tokens=sampling.max_new_tokens)
    for params, samples in ((greedy, ["greedy"]), (sampling, range(num_samples))):
        requests = [
            Request(
                prompt_ids=ids,
                seeds=tuple(sequence_seed("off-domain", seed, prompt.text, sample) for sample in samples),
            )
            for prompt, ids in prompts.items()
        ]
        drawn = engine.generate(requests, params, on_ended=lambda _, row: on_finished(len(row)))
        for (prompt, ids), row in zip(prompts.items(), drawn, strict=True):
            for sample, done in zip(samples, row, strict=True):
                said = policy.completion_text(ids, done.ids)
                answer = stated_answer(said, policy.schema)
                right, numeric = is_right(prompt, answer), is_numeric(answer)
                reply = Reply(sample, said, answer, right, numeric, len(done.ids), done.finish_reason)
                replies[prompt].append(reply)
    return ModelProbe(name, replies, skipped, perplexity, "; ".join(remarks), policy.protocol())


def _prompt_ids(policy: Policy, prompt: ProbePrompt) -> tuple[int, ...]:
    """Return the tokens of a prompt; a continuation is bare text."""
    if prompt.kind == "continuation":
        return tuple(text_ids(policy, prompt.text))
    return policy.prompt_ids(Problem(uid="", task="probe", prompt=prompt.text, answer=""))
