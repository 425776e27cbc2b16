"""What each kind of server is asked, and how it answers: `whet serve`, vLLM, SGLang.

All take token ids and give token ids with their log-probabilities; names, defaults and the ways to bring new weights
differ. What a completion has to be is checked in one place, `whet.generate.backends.server`.

Source of the requests: vLLM 0.32 (entrypoints/serve: completions, lora, rlhf), SGLang 0.5 (srt/managers/io_struct.py,
srt/sampling/sampling_params.py, srt/managers/schedule_batch.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whet.generate.policy import Policy
from whet.generate.rows import Request
from whet.generate.sampling import SamplingParams
from whet.model.quant import packed_parts
from whet.types import UserError

WHET_CHOICES = 64
"""Samples of a prompt in one request to `whet serve`: they share its prefill."""
MOST_BARRED = 4096
"""Rows of the vocabulary without a token of the tokenizer that a request can exclude one by one."""

Post = Callable[[str, Mapping[str, Any]], Any]
"""Sends an object to a path of the server."""


class RefusedError(UserError):
    """A server's refusal, with its status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Raw:
    """A completion as a server gave it, unchecked.

    Attributes:
        ids: Its tokens.
        logprobs: A log-probability for each.
        reason: Why it ended; 'stop' and 'length' are those of `Completion`.
        kept: What filters left to draw each token from; empty where the server does not say.
    """

    ids: Any
    logprobs: Any
    reason: Any
    kept: Any = ()


class Dialect(ABC):
    """How one kind of server is spoken to.

    Args:
        policy: The policy, as it starts.
        model: Name of the policy at the server.
    """

    choices = 1
    """Samples in one request; more than one where each can have its own seed."""
    tells_filters = False
    """Whether its answers say what filters left of each token's distribution."""
    wants_plain = True
    """Whether it reads only the plainest adapters, see `Trained.check_plain`."""
    takes_broadcasts = False
    """Whether it joins a group (`whet.ranks.broadcast`) and takes weights from it."""
    tells_versions = False
    """Whether it says with each completion which weights it drew with."""
    reads_stored = True
    """Whether it knows tensors by the names that files have, which are not always the parameters'."""
    weights_remedy = "use whet serve, vLLM or SGLang"
    """What to do where it takes no weights."""
    adapter_remedy = weights_remedy

    def __init__(self, policy: Policy, model: str) -> None:
        self._policy, self._model = policy, model

    def check(self) -> None:
        """Refuse a policy of which this server cannot have a copy.

        Raises:
            UserError: With what to use instead.
        """
        check_copy(self._policy)

    @abstractmethod
    def ask(
        self, request: Request, seeds: tuple[int, ...], limit: int, params: SamplingParams, adapter: str
    ) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a request for samples of a prompt.

        Args:
            request: The prompt.
            seeds: A seed for each sample; at most `choices`.
            limit: Most tokens of a sample.
            params: How they are drawn.
            adapter: Name of the adapter to draw with; '' for the model alone.
        """

    @abstractmethod
    def read(self, answer: Mapping[str, Any]) -> list[Raw]:
        """Return the samples of an answer, in the order of the seeds.

        Raises:
            UserError: If something of it is missing, without the server's name.
        """

    @abstractmethod
    def put_weights(self, post: Post, folder: Path, version: int) -> None:
        """Let the server read its weights from a folder."""

    def join(self, post: Post, address: str, port: int, size: int, name: str, backend: str) -> None:
        """Let the server join a group, as ranks 1 and above; it answers when all have met."""
        body = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": size}
        post("/init_weights_update_group", body | {"group_name": name, "backend": backend})

    def receive(self, post: Post, tensors: Mapping[str, torch.Tensor], name: str, version: int) -> None:
        """Let the server take these tensors from a group; it answers when it has them."""
        body = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": name,
        }
        version_too = {"weight_version": str(version)} if self.tells_versions else {}
        self._took(post("/update_weights_from_distributed", body | version_too), version)

    def _took(self, told: Mapping[str, Any], version: int) -> None:
        """Check what a server says of new weights.

        Raises:
            UserError: If it did not take them.
        """
        if not told.get("success", False):
            raise UserError(f"it did not take the weights: {str(told.get('message'))[:200]}")

    @abstractmethod
    def put_adapter(self, post: Post, name: str, folder: Path) -> None:
        """Let the server read an adapter from a folder; requests then name it. One it has already is left as it is."""

    @abstractmethod
    def drop_adapter(self, post: Post, name: str) -> None:
        """Let the server forget an adapter."""


class Whet(Dialect):
    """`whet serve`: the engine's own bits."""

    choices, tells_filters, wants_plain = WHET_CHOICES, True, False
    takes_broadcasts, reads_stored = True, False
    weights_remedy = adapter_remedy = "start whet serve with --weight-updates"

    def check(self) -> None:
        """Refuse a quantised policy, unless adapters are trained beside its matrices: the server has those, too."""
        if self._policy.trained is None:
            super().check()

    def ask(
        self, request: Request, seeds: tuple[int, ...], limit: int, params: SamplingParams, adapter: str
    ) -> tuple[str, dict[str, Any]]:
        """Ask for all samples at once, each with its seed."""
        return "/v1/completions", {
            "model": self._model,
            "prompt": list(request.prompt_ids),
            "n": len(seeds),
            "max_tokens": limit,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "stop": list(self._policy.stop_strings),
            "stop_token_ids": list(self._policy.stop_ids),
            "return_token_ids": True,
            "seeds": list(seeds),
        }

    def read(self, answer: Mapping[str, Any]) -> list[Raw]:
        """Read choices with `sampled_logprobs` and `kept`."""
        return [
            Raw(
                _ids_of(choice),
                choice.get("sampled_logprobs"),
                choice.get("finish_reason"),
                choice.get("kept") or (),
            )
            for choice in _choices(answer)
        ]

    def put_weights(self, post: Post, folder: Path, version: int) -> None:
        """Replace its weights between two completions."""
        post("/update_weights_from_disk", {"model_path": str(folder)})

    def put_adapter(self, post: Post, name: str, folder: Path) -> None:
        """Replace the adapter that stands beside its weights: it is one model, not several."""
        post("/update_weights_from_disk", {"model_path": str(folder)})

    def drop_adapter(self, post: Post, name: str) -> None:
        """Do nothing: the next one takes its place."""


class Vllm(Dialect):
    """vLLM's server."""

    weights_remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
    adapter_remedy = (
        "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment and --enable-lora"
    )

    def __init__(self, policy: Policy, model: str) -> None:
        super().__init__(policy, model)
        self._barred = barred_ids(policy)

    def ask(
        self, request: Request, seeds: tuple[int, ...], limit: int, params: SamplingParams, adapter: str
    ) -> tuple[str, dict[str, Any]]:
        """Ask for one sample: its own ends and defaults are those of the model's files, ours are the policy's."""
        (seed,) = seeds
        body: dict[str, Any] = {
            "model": adapter or self._model,  # an adapter is a model of its own
            "prompt": list(request.prompt_ids),
            "n": 1,
            "max_tokens": limit,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": 1.0,
            "seed": seed,
            "stop": list(self._policy.stop_strings),
            "stop_token_ids": list(self._policy.stop_ids),
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "logprobs": 0,
        }
        if self._barred:
            body["logit_bias"] = {str(index): bias for index, bias in self._barred.items()}
        return "/v1/completions", body

    def read(self, answer: Mapping[str, Any]) -> list[Raw]:
        """Read choices with `logprobs.token_logprobs`."""
        return [
            Raw(
                _ids_of(choice),
                (choice.get("logprobs") or {}).get("token_logprobs"),
                choice.get("finish_reason"),
            )
            for choice in _choices(answer)
        ]

    def put_weights(self, post: Post, folder: Path, version: int) -> None:
        """Reload in place, and forget what was computed with the old ones."""
        post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        post("/reset_prefix_cache", {})

    def put_adapter(self, post: Post, name: str, folder: Path) -> None:
        """Load it beside the one before, under a name of its own: caches of prefixes go by the name."""
        _unless_there(lambda: post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}))

    def drop_adapter(self, post: Post, name: str) -> None:
        """Unload it."""
        post("/v1/unload_lora_adapter", {"lora_name": name})


class Sglang(Dialect):
    """SGLang's server, by its own /generate: its completions of OpenAI's kind hold no token ids."""

    takes_broadcasts = tells_versions = True
    weights_remedy = "use an SGLang that has /update_weights_from_disk"
    adapter_remedy = "start SGLang with --enable-lora --max-lora-rank and --lora-target-modules all"

    def __init__(self, policy: Policy, model: str) -> None:
        super().__init__(policy, model)
        self._barred = barred_ids(policy)
        self._version: str | None = None

    def ask(
        self, request: Request, seeds: tuple[int, ...], limit: int, params: SamplingParams, adapter: str
    ) -> tuple[str, dict[str, Any]]:
        """Ask for one sample. `ignore_eos` stays off: with it SGLang ignores `stop_token_ids`, too."""
        (seed,) = seeds
        sampling: dict[str, Any] = {
            "max_new_tokens": limit,
            "temperature": params.temperature,
            "top_k": params.top_k or -1,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "n": 1,
            "stop": list(self._policy.stop_strings),
            "stop_token_ids": list(self._policy.stop_ids),
            "ignore_eos": False,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "sampling_seed": seed % 2**31,  # an int32 there; heeded with --enable-deterministic-inference
        }
        if self._barred:
            sampling["logit_bias"] = {str(index): bias for index, bias in self._barred.items()}
        body = {"input_ids": list(request.prompt_ids), "sampling_params": sampling, "return_logprob": True}
        return "/generate", body | ({"lora_path": adapter} if adapter else {})

    def read(self, answer: Mapping[str, Any]) -> list[Raw]:
        """Read `meta_info`: a log-probability, an id and a text for each token, why it ended, and which weights."""
        meta = answer.get("meta_info")
        if not isinstance(meta, dict):
            raise UserError(f"expected meta_info in its answer, got {str(answer)[:200]!r}")
        told, ended = meta.get("output_token_logprobs"), meta.get("finish_reason")
        if not isinstance(told, list) or not all(isinstance(row, list) and len(row) >= 2 for row in told):
            raise UserError("its answers hold no token ids (meta_info.output_token_logprobs)")
        ended = ended if isinstance(ended, dict) else {}
        matched = ended.get("matched")
        if ended.get("type") == "stop" and isinstance(matched, int) and matched not in self._policy.stop_ids:
            raise UserError(
                f"it ended a completion at token {matched}, which ends none of the policy's ({self._policy.stop_ids}): "
                "start it with the policy's own folder"
            )
        weights = meta.get("weight_version")
        if self._version is not None and weights is not None and str(weights) != self._version:
            raise UserError(
                f"it drew with weights {str(weights)[:40]!r}, expected {self._version!r}: does another run push, too?"
            )
        return [Raw([row[1] for row in told], [row[0] for row in told], ended.get("type"))]

    def put_weights(self, post: Post, folder: Path, version: int) -> None:
        """Reload in place; it waits for requests under way, and forgets what was computed with the old ones."""
        told = post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(version)})
        self._took(told, version)

    def _took(self, told: Mapping[str, Any], version: int) -> None:
        super()._took(told, version)
        self._version = str(version)

    def put_adapter(self, post: Post, name: str, folder: Path) -> None:
        """Load it beside the one before, under a name of its own."""
        _unless_there(lambda: post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}))

    def drop_adapter(self, post: Post, name: str) -> None:
        """Unload it, when no request has it any more."""
        post("/unload_lora_adapter", {"lora_name": name})


DIALECTS: dict[str, type[Dialect]] = {"whet": Whet, "vllm": Vllm, "sglang": Sglang}
"""By `owned_by` of the models that a server lists; others are asked as vLLM is."""


def check_copy(policy: Policy) -> None:
    """Refuse a policy of which other engines than whet's cannot have a copy.

    Raises:
        UserError: With what to use instead.
    """
    if packed_parts(policy.model):
        raise UserError(
            "sampler.kind with a quantised policy: only whet's own engine computes it; use sampler.kind = engine, or, "
            "where adapters are trained (lora.rank), whet serve with the same --policy.quantize"
        )
    if policy.trained is not None:
        policy.trained.check_plain()


def barred_ids(policy: Policy) -> dict[int, float]:
    """Return a bias for each row of the vocabulary without a token, which the trainer leaves out of its distribution.

    Raises:
        UserError: If there are more than a request can hold.
    """
    vocabulary, rows = policy.tokenizer.vocab_size, policy.model.config.vocab_size
    if rows - vocabulary > MOST_BARRED:
        raise UserError(
            f"sampler.kind: the model has {rows - vocabulary} rows without a token of its tokenizer, more than the "
            f"{MOST_BARRED} that a request can exclude; use sampler.kind = engine"
        )
    return dict.fromkeys(range(vocabulary, rows), -100.0)


def _choices(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the choices of a completion of OpenAI's kind, in their order."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(
        isinstance(choice, dict) and isinstance(choice.get("index"), int) for choice in choices
    ):
        raise UserError(f"expected choices in its answer, got {str(answer)[:200]!r}")
    return sorted(choices, key=lambda choice: choice["index"])


def _ids_of(choice: Mapping[str, Any]) -> list[Any]:
    ids = choice.get("token_ids")
    if not isinstance(ids, list):
        raise UserError(
            "its answers hold no token ids (choices[].token_ids); whet serve, SGLang and vLLM since 0.10.2 give them; "
            "of other servers, such as llama.cpp's, only text can be had, which is not what was sampled"
        )
    return ids


def _unless_there(load: Callable[[], Any]) -> None:
    """Load an adapter of a name that is ours alone: where it is there already, an answer was lost on its way."""
    try:
        load()
    except RefusedError as error:
        if error.status != 400 or "already" not in str(error):
            raise
