"""The teacher of on-policy distillation: another model of this machine, or a server that scores given tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from whet.algo.packing import TrainingSequence
from whet.generate.policy import Policy
from whet.install import install_command
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import LanguageModel
from whet.model.weights import load_model, model_folder
from whet.types import UnreadError, UserError

PROBE = "The quick brown fox jumps over the lazy dog, 0123456789 times: x = (a + b) * c?\n"
"""Text that a server's tokenizer has to read as ours does."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """On-policy distillation: the policy's own samples, pulled towards what a teacher would have written."""

    init: str = ""
    """The teacher: run folder, Hugging Face folder or hub name, with the policy's tokenizer; empty for none."""
    url: str = ""
    """Address of a server with vLLM's completions endpoint (it ends before /completions), in place of `init`."""
    model: str = ""
    """Name of the teacher at the server."""
    kind: Literal["sampled", "full"] = "sampled"
    """sampled: coef (log teacher - log policy) of each sampled token is added to its advantage; full: the divergence
    over the whole vocabulary is in the loss, exactly (a teacher on this machine only)."""
    coef: float = 1.0
    """Weight of the divergence beside rewards, above 0; with all rewards at weight 0 the teacher teaches alone."""
    concurrency: int = 16
    """Requests to a server under way at once."""
    timeout_s: float = 120.0
    """Seconds for one request to a server."""
    api_key_env: str = "OPENAI_API_KEY"
    """Variable of the environment with the server's key, where it has one."""

    def __post_init__(self) -> None:
        if self.init and self.url:
            raise ValueError("teacher.init and teacher.url: give one teacher")
        if bool(self.url) != bool(self.model):
            raise ValueError("teacher.url and teacher.model: a server needs both")
        if not 0 < self.coef < math.inf:
            raise ValueError(f"teacher.coef = {self.coef}: expected above 0")
        if self.concurrency < 1:
            raise ValueError(f"teacher.concurrency = {self.concurrency}: expected 1 or more")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"teacher.timeout_s = {self.timeout_s}: expected above 0")
        if self.url and self.kind == "full":
            raise ValueError(
                "teacher.kind = full with teacher.url: a server gives no whole distribution; use sampled"
            )
        unread = () if self.is_given else ("kind", "coef", "concurrency", "timeout_s", "api_key_env")
        unread = ("concurrency", "timeout_s", "api_key_env") if self.init else unread
        for name in unread:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                reader = "teacher.url" if self.init else "a teacher"
                raise UnreadError(f"teacher.{name} is read with {reader} only; leave it out", name)

    @property
    def is_given(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.init or self.url)


def load_teacher(config: TeacherConfig, policy: Policy) -> LanguageModel | ServerTeacher | None:
    """Load the teacher's model, or connect to its server; None without one.

    Raises:
        UserError: If it cannot be had, or has another tokenizer than the policy.
    """
    if not config.is_given:
        return None
    if config.url:
        return ServerTeacher(config, policy.tokenizer, policy.schema.tags)
    folder = model_folder(config.init)
    if difference := policy.tokenizer.difference(Tokenizer.load(folder)):
        raise UserError(
            f"teacher.init {config.init}: another tokenizer than the policy's ({difference}); distillation compares "
            "token by token: choose a teacher of the same family and tags"
        )
    model, shape = load_model(folder, dtype=policy.model.head_weight.dtype, device=policy.device)
    if shape.max_positions < policy.model.config.max_positions:
        raise UserError(
            f"teacher.init {config.init}: its context of {shape.max_positions} tokens is shorter than the policy's "
            f"{policy.model.config.max_positions}; choose another teacher"
        )
    model.num_valid_tokens = policy.tokenizer.vocab_size
    return model.requires_grad_(False)


class ServerTeacher:
    """A teacher behind an address: asked for the log-probabilities of whole sequences of token ids.

    Args:
        config: Address, name and limits.
        tokenizer: The policy's.
        tags: Texts besides the probe that both tokenizers must read alike.

    Raises:
        UserError: If the server cannot be reached, gives no log-probabilities of prompts, or has another tokenizer.
    """

    def __init__(self, config: TeacherConfig, tokenizer: Tokenizer, tags: Sequence[str]) -> None:
        try:
            import openai
        except ImportError:
            raise UserError(f"a teacher at a server needs openai: {install_command('judge')}") from None
        self._config = config
        key = os.environ.get(config.api_key_env, "")
        left_out = ("OpenAI-Organization", "OpenAI-Project", *(() if key else ("Authorization",)))
        self._headers = dict.fromkeys(left_out, cast(str, openai.Omit()))
        self._client = openai.OpenAI(
            base_url=config.url.rstrip("/"),
            api_key=key or "none",
            timeout=config.timeout_s,
            http_client=openai.DefaultHttpxClient(trust_env=False, follow_redirects=False),
        )
        ids = tokenizer.encode(PROBE + "".join(tags))
        read = "".join(self._entries(ids)[0])
        if read.strip() != tokenizer.decode_completion(ids[:1], ids[1:]).strip():
            raise UserError(
                f"teacher.url {config.url}: another tokenizer than the policy's: its token ids read {read[:60]!r} "
                "there; choose a teacher of the same family and tags"
            )

    def score(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """Return the log-probabilities of each sequence's trained tokens, float32.

        Raises:
            UserError: If a request fails for good.
        """
        with ThreadPoolExecutor(self._config.concurrency) as pool:
            return list(pool.map(self._score, sequences))

    def _score(self, sequence: TrainingSequence) -> torch.Tensor:
        _, logprobs = self._entries([*sequence.prompt_ids, *sequence.completion_ids])
        own = logprobs[len(sequence.prompt_ids) - 1 :]
        trained = sequence.trained or (True,) * len(own)
        return torch.tensor([p for p, is_trained in zip(own, trained, strict=True) if is_trained])

    def _entries(self, ids: Sequence[int]) -> tuple[list[str], list[float]]:
        """Return text and log-probability of all ids but the first, as the server reads them."""
        import openai

        where = f"teacher.url {self._config.url}"
        try:
            answer = self._client.completions.create(
                model=self._config.model,
                prompt=list(ids),
                max_tokens=1,
                temperature=1.0,
                extra_body={"prompt_logprobs": 0},
                extra_headers=self._headers,
            )
        except openai.APIStatusError as error:
            raise UserError(f"{where}: status {error.status_code}: {error.response.text[:200]!r}") from None
        except openai.APIConnectionError as error:
            raise UserError(
                f"{where}: no connection ({error.__cause__ or error}); start the server, or fix the address"
            ) from None
        found: Any = (answer.choices[0].model_extra or {}).get("prompt_logprobs") if answer.choices else None
        if not isinstance(found, list):
            raise UserError(
                f"{where}: no prompt_logprobs in its answer; vLLM's completions endpoint gives them"
            )
        try:
            entries = [row[str(index)] for row, index in zip(found[1:], ids[1:], strict=True)]
            return [str(entry["decoded_token"]) for entry in entries], [
                float(entry["logprob"]) for entry in entries
            ]
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{where}: its prompt_logprobs are not those of the {len(ids)} ids that were sent"
            ) from None
