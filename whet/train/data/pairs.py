"""Preferences: pairs of the policy's own right and wrong completions, or the rows of a file or hub data set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from whet.generate.policy import Policy
from whet.generate.reward_model import Messages, conversation_ids
from whet.generate.sampling import sequence_seed
from whet.ranks.collectives import all_reduce_sum, shard
from whet.tasks.hub import find_parts, read_hub
from whet.tasks.read import ENDINGS, BadRow, Check, Row, is_hub_name, read_file, text_fault
from whet.tasks.sets import PAIR_SETS
from whet.train.data.demonstrations import learn_ends
from whet.train.data.harvest import Judged, choose, distinct, is_right
from whet.types import Problem, UserError, problem_uid

ROLES = ("system", "user", "assistant")
LABELS = {"true": True, "1": True, "false": False, "0": False}
"""Labels of single completions as CSV files spell them, in lower case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two completions of one prompt, the first better than the second; or one, by itself desirable or undesirable.

    Attributes:
        uid: Identifies the prompt.
        prompt: The question, for display.
        chosen: Text of the better completion, for display.
        rejected: Text of the worse one.
        prompt_ids: Tokens of the prompt.
        chosen_ids: Tokens of the better completion, including its end; for rollouts the sampled ones. Empty for an
            undesirable completion by itself.
        rejected_ids: Tokens of the worse one; empty for a desirable completion by itself.
        ref_chosen_logprob: Summed log-probability of chosen_ids under the starting policy, nats.
        ref_rejected_logprob: The same for rejected_ids.
        margin: By how much a reward model should prefer the better one; 0 where unknown.
        kl_ids: A completion of another prompt, from which KTO estimates the KL; empty for other losses.
        ref_kl_logprob: Summed log-probability of kl_ids after this prompt under the starting policy, nats.
    """

    uid: str
    prompt: str
    chosen: str
    rejected: str
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    ref_chosen_logprob: float = 0.0
    ref_rejected_logprob: float = 0.0
    margin: float = 0.0
    kl_ids: tuple[int, ...] = ()
    ref_kl_logprob: float = 0.0

    def as_problem(self) -> Problem:
        """Return its texts as a problem, for hashes of the data."""
        return Problem(uid=self.uid, task="dpo", prompt=self.prompt, answer=f"{self.chosen}\0{self.rejected}")

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads: the prompt precedes each completion."""
        sides = [ids for ids in (self.chosen_ids, self.rejected_ids) if ids]
        return len(sides) * len(self.prompt_ids) + sum(map(len, sides))

    @property
    def partner(self) -> Pair:
        """The mismatched completion after this prompt, as a completion by itself."""
        return replace(self, chosen_ids=self.kl_ids, rejected_ids=())

    @classmethod
    def from_row(cls, row: Row) -> Pair:
        """Create a pair from the result of `as_row`, read back from JSON.

        Raises:
            UserError: If it is malformed.
        """
        try:
            values: Row = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
            return cls(**values)
        except TypeError:
            raise UserError("pairs.jsonl is not what the run wrote; start a new run") from None

    def as_row(self) -> dict[str, Any]:
        """Return the pair as JSON values."""
        return asdict(self)


def is_held_out(uid: str, seed: int, share: float) -> bool:
    """Say whether a prompt's pairs are for validation: all pairs of a prompt are in the same split."""
    return sequence_seed("held out", seed, uid) / 2**63 < share


class Pairing:
    """Pairs right with wrong completions, and counts both.

    Args:
        limit: Most pairs per problem.
        seed: Seed of the choice among all pairs of a problem.
    """

    def __init__(self, limit: int, seed: int) -> None:
        self._limit, self._seed = limit, seed
        self._num_samples = self._num_right = 0

    def __call__(self, problem: Problem, judged: Judged) -> list[Pair]:
        """Pair the completions of one problem: right ones in perfect format against wrong ones; each text once."""
        self._num_samples += len(judged)
        self._num_right += sum(graded.is_correct for _, graded in judged)
        right = distinct([sample for sample, graded in judged if is_right(graded)])
        wrong = distinct([sample for sample, graded in judged if not graded.is_correct])
        both = list(product(right, wrong))
        return [
            Pair(
                uid=problem.uid,
                prompt=problem.prompt,
                chosen=both[index][0].text,
                rejected=both[index][1].text,
                prompt_ids=both[index][0].prompt_ids,
                chosen_ids=both[index][0].completion_ids,
                rejected_ids=both[index][1].completion_ids,
            )
            for index in choose(len(both), self._limit, self._seed, problem.uid)
        ]

    def none_found(self) -> UserError:
        """Return the error for no pairs on any rank, with its remedy."""
        total, right = map(int, all_reduce_sum(self._num_samples, self._num_right))
        if right == total:
            return UserError(
                f"no pairs: all {total:,} completions are right; use harder problems or a higher sampling.temperature"
            )
        if right == 0:
            return UserError(
                f"no pairs: none of {total:,} completions is right; start from a better model (whet sft first), or "
                "use easier problems"
            )
        return UserError(
            f"no pairs: {right:,} of {total:,} completions are right, but no problem has both a wrong one and a right "
            "one in perfect format; raise num_samples or sampling.temperature"
        )


def is_on_hub(source: str) -> bool:
    """Say whether a source of pairs names a hub data set, and no file that is there or has an ending that is read."""
    named = source in PAIR_SETS or is_hub_name(source) and not source.endswith(ENDINGS)
    return named and not Path(source).exists()


def read_pair_rows(
    source: str, *, split: str = "", max_bad_rows: int = 0, check: Check | None = None
) -> tuple[list[tuple[int, Row]], list[BadRow]]:
    """Read rows of preference pairs from a file or from the hub.

    Args:
        source: A .jsonl, .jsonl.gz, .json, .csv, .tsv or .parquet file, a name of `PAIR_SETS`, or a hub name.
        split: Split of the hub data set; '' for the one called train, or the only one.
        max_bad_rows: Bad rows that are tolerated.
        check: Says what is wrong with a row.

    Returns:
        Number and row of the good rows, and the bad rows.

    Raises:
        UserError: If there is no such file or data set, or too many rows are bad.
    """
    if not is_on_hub(source):
        return read_file(Path(source), required=(), max_bad_rows=max_bad_rows, check=check)
    if source in PAIR_SETS:
        part = PAIR_SETS[source].parts["train"]
        part = replace(part, split=split) if split else part
    else:
        part = next(iter(find_parts(source, split=split).values()))
    return read_hub(part, required=(), max_bad_rows=max_bad_rows, check=check)


def singles(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Split pairs into a desirable and an undesirable completion each; completions by themselves stay."""
    for pair in pairs:
        if pair.chosen_ids:
            yield replace(pair, rejected="", rejected_ids=())
        if pair.rejected_ids:
            yield replace(pair, chosen="", chosen_ids=())


def with_partners(completions: Sequence[Pair], room: int) -> list[Pair]:
    """Give each completion's prompt the completion of the next one of another prompt, in a circle.

    Args:
        completions: Completions by themselves, of all ranks.
        room: Positions of the model; what does not fit after the prompt is cut off.

    Raises:
        UserError: If all have the same prompt.
    """
    found: list[Pair] = []
    for place, one in enumerate(completions):
        following = (completions[(place + step) % len(completions)] for step in range(1, len(completions)))
        other = next((pair for pair in following if pair.uid != one.uid), None)
        if other is None:
            raise UserError(
                "loss = kto estimates a KL from completions of other prompts: expected 2 prompts or more"
            )
        ids = other.chosen_ids or other.rejected_ids
        found.append(replace(one, kl_ids=ids[: room - len(one.prompt_ids)]))
    return found


def read_pairs(
    path: str,
    policy: Policy,
    max_bad_rows: int,
    bad_rows: list[BadRow] | None = None,
    *,
    split: str = "",
    singly: bool = False,
    whole: bool = False,
) -> tuple[list[Pair], int]:
    """Read this rank's rows of a file or hub data set with prompt, chosen and rejected.

    Each is text, or a list of chat messages in TRL's format. If chosen and rejected start with the prompt's messages,
    these are removed; without a prompt their common initial messages are the prompt. Further columns are ignored.

    Args:
        path: What `read_pair_rows` takes.
        policy: Renders and encodes prompts by its protocol.
        max_bad_rows: Bad rows that are tolerated.
        bad_rows: Collects the skipped rows.
        split: Split of a hub data set.
        singly: Read single completions: also rows with prompt, completion and label (true: desirable).
        whole: Encode whole conversations, for a reward model, in place of prompts and what follows.

    Returns:
        The pairs that fit in the context, and the number of those that do not.

    Raises:
        UserError: If the file cannot be read, or a row is bad, with its line.
    """

    def fault(row: Row) -> str | None:
        return found if isinstance(found := _contents(row, singly=singly), str) else None

    try:
        rows, left_out = read_pair_rows(path, split=split, max_bad_rows=max_bad_rows, check=fault)
    except UserError as error:  # the reader's remedy names the task's option
        text = str(error).replace("--task.path", "--pairs").replace("--task.split", "--pairs-split")
        text = text.replace("--task.", "--")
        raise UserError(text) from None
    if bad_rows is not None:
        bad_rows += left_out
    contents = [found for _, row in rows if not isinstance(found := _contents(row, singly=singly), str)]
    encode = encode_conversations if whole else _encode
    for messages, *_ in contents:
        if len(messages) == 1:
            policy.check_prompt(messages[0]["content"])
    if not whole and policy.turn_end is not None:
        for line in learn_ends(policy, frozenset({policy.turn_end})):
            print(f"whet: {line}", flush=True)
    pairs = [encode(policy, *contents[index]) for index in shard(len(contents))]
    if singly:
        pairs = list(singles(pairs))
    room = policy.model.config.max_positions
    kept = [
        pair
        for pair in pairs
        if (pair.chosen_ids or pair.rejected_ids)
        and (singly or (pair.chosen_ids and pair.rejected_ids))
        and len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids)) <= room
    ]
    return kept, len(pairs) - len(kept)


def _uid(messages: Messages) -> str:
    return problem_uid("pairs", "\x00".join(f"{item['role']}\x00{item['content']}" for item in messages))


def _encode(policy: Policy, messages: Messages, chosen: str, rejected: str, margin: float = 0.0) -> Pair:
    """Encode a row: prompt in the policy's protocol, completions as its continuation."""
    prefix = policy.schema.generation_prefix

    def completion_ids(text: str) -> tuple[int, ...]:
        if not text:
            return ()
        ids = policy.tokenizer.encode(policy.tokenizer.quoted(text.removeprefix(prefix), by_assistant=True))
        end = policy.turn_end
        return tuple(ids if end is None or ids[-1:] and ids[-1] in policy.stop_ids else [*ids, end])

    return Pair(
        uid=_uid(messages),
        prompt=messages[-1]["content"],
        chosen=chosen,
        rejected=rejected,
        prompt_ids=policy.chat_ids(messages),
        chosen_ids=completion_ids(chosen),
        rejected_ids=completion_ids(rejected),
        margin=margin,
    )


def encode_conversations(
    policy: Policy, messages: Messages, chosen: str, rejected: str, margin: float = 0.0
) -> Pair:
    """Encode a row for a reward model: both whole conversations; what they begin with together is the prompt."""
    both = [conversation_ids(policy.tokenizer, messages, text) for text in (chosen, rejected)]
    most = min(map(len, both)) - 1
    common = next((n for n in range(most) if both[0][n] != both[1][n]), most)
    common = max(common, 1)  # a sequence needs a token before those that it is scored on
    return Pair(
        uid=_uid(messages),
        prompt=messages[-1]["content"],
        chosen=chosen,
        rejected=rejected,
        prompt_ids=tuple(both[0][:common]),
        chosen_ids=tuple(both[0][common:]),
        rejected_ids=tuple(both[1][common:]),
        margin=margin,
    )


def _contents(row: Row, *, singly: bool) -> tuple[Messages, str, str, float] | str:
    """Return (prompt, chosen, rejected, margin) of a row, or what is wrong with it; '' for a completion that is not
    there."""
    if singly and "label" in row:
        return _labelled(row)
    parts: dict[str, Messages] = {}
    for name, last in (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant")):
        if name == "prompt" and name not in row:
            continue
        found = _messages(row, name, last)
        if isinstance(found, str):
            return found
        parts[name] = found
    before, other = parts["chosen"][:-1], parts["rejected"][:-1]
    prompt = parts.get("prompt", before)
    if not prompt:
        return "no 'prompt', and 'chosen' does not begin with it"
    if any(part and part != prompt for part in (before, other)) or not ("prompt" in parts or other):
        return "'chosen' and 'rejected' do not both begin with the messages of the prompt"
    chosen, rejected = parts["chosen"][-1]["content"], parts["rejected"][-1]["content"]
    margin = row.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not math.isfinite(margin):
        return "'margin' is not a finite number"
    same = "'chosen' and 'rejected' are the same"
    return same if chosen == rejected else (prompt, chosen, rejected, float(margin))


def _labelled(row: Row) -> tuple[Messages, str, str, float] | str:
    """Return a row with prompt, completion and label, as `_contents` does."""
    prompt, completion = _messages(row, "prompt", "user"), _messages(row, "completion", "assistant")
    if isinstance(prompt, str) or isinstance(completion, str):
        return prompt if isinstance(prompt, str) else str(completion)
    if completion[:-1] and completion[:-1] != prompt:
        return "'completion' does not begin with the messages of the prompt"
    label = LABELS.get(str(row["label"]).lower())
    if label is None:
        return f"'label' is {str(row['label'])[:40]!r}, expected true (desirable) or false"
    text = completion[-1]["content"]
    return (prompt, text, "", 0.0) if label else (prompt, "", text, 0.0)


def _messages(row: Row, name: str, last: str) -> Messages | str:
    """Return a column as messages that end with role `last`, or what is wrong with it."""
    value = row.get(name)
    if not isinstance(value, list):
        return text_fault(row, name) or [{"role": last, "content": row[name]}]
    messages: Messages = []
    for item in value:
        if not isinstance(item, dict) or item.get("role") not in ROLES:
            return f"{name!r} holds something else than messages with a role of {', '.join(ROLES)}"
        if fault := text_fault(item, "content"):
            return f"{name!r}, {item['role']}: {fault}"
        messages.append({"role": item["role"], "content": item["content"]})
    if not messages or messages[-1]["role"] != last:
        return f"{name!r} does not end with a message of the {last}"
    return messages
