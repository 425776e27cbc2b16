"""A reward model: scores of whole conversations, one number each; ours and transformers' sequence classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from whet.algo.packing import TrainingSequence, pack
from whet.generate.scoring import score_texts
from whet.model.attention import AttentionKind
from whet.model.files import read_json
from whet.model.text.tokenizer import Tokenizer
from whet.model.weights import load_model, model_folder
from whet.types import Problem, UserError

Messages = list[dict[str, Any]]
TOKEN_BUDGET = 16384
"""Tokens that are scored together; a longer conversation is scored alone."""


def messages_of(problem: Problem) -> Messages:
    """Return the conversation that asks a problem."""
    messages = [message.as_dict() for message in problem.messages]
    return messages or [{"role": "user", "content": problem.prompt}]


def conversation_ids(tokenizer: Tokenizer, messages: Messages, reply: str) -> list[int]:
    """Return what a reward model reads: the conversation with the reply, through the tokenizer's own chat template.

    There is no generation cue and no instruction of a schema: it is what transformers' `apply_chat_template` gives.

    Args:
        tokenizer: The reward model's.
        messages: The conversation that asks.
        reply: The assistant's reply, tags included.
    """
    return tokenizer.encode_conversation([*messages, {"role": "assistant", "content": reply}])


class RewardModel:
    """A frozen reward model that scores replies in batches.

    Args:
        path: Run folder of `whet dpo --loss reward`, folder or hub name of a sequence classifier with one label.
        device: Where it computes.
        dtype: Dtype of its weights.

    Raises:
        UserError: If it cannot be loaded, is no reward model, or has no chat template.
    """

    def __init__(self, path: str, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        folder = model_folder(path)
        self.model, self._config = load_model(folder, dtype=dtype, device=device, is_reward=True)
        self.model.requires_grad_(False)
        self.tokenizer = Tokenizer.load(folder)
        if self.tokenizer.chat_template is None:
            raise UserError(
                f"{folder}: the reward model's tokenizer has no chat template to render replies with"
            )
        self._pad_id = read_json(folder / "config.json").get("pad_token_id")
        self._device = device
        self._attention: AttentionKind = "exact" if device.type == "cpu" else "fast"

    @torch.no_grad()
    def score(self, replies: Sequence[tuple[Messages, str]]) -> list[float | None]:
        """Score replies to conversations; None for what is longer than the model's context.

        Args:
            replies: Conversations that ask, each with the assistant's reply.
        """
        scores: list[float | None] = [None] * len(replies)
        sequences: dict[int, TrainingSequence] = {}
        for place, (messages, reply) in enumerate(replies):
            ids = conversation_ids(self.tokenizer, messages, reply)
            # transformers scores the last token that is not padding, also where a text ends with that very token.
            while len(ids) > 2 and ids[-1] == self._pad_id:
                ids.pop()
            if 2 <= len(ids) <= self._config.max_positions:
                # All but the last token may be shared with other replies; where it is cut changes no number.
                sequences[place] = TrainingSequence(prompt_ids=(ids[0],), completion_ids=tuple(ids[1:]))
        places = list(sequences)
        batch = pack(list(sequences.values()), token_budget=TOKEN_BUDGET, device=self._device)
        for micro in batch.micro_batches:
            found_B = score_texts(self.model, micro, attention=self._attention)
            for index, score in zip(micro.indices_B, found_B.tolist(), strict=True):
                scores[places[index]] = score
        return scores
