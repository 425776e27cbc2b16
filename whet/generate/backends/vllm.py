"""vLLM as sampler: a server that whet starts with another Python, or an engine in this process.

The weights of both are replaced in place, under Hugging Face's names, which are whet's own. Log-probabilities are asked
for as they were drawn with (processed), so that what is left between sampler and trainer is the kernels' rounding.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from whet import processes
from whet.config import user_path
from whet.generate.backends.base import SamplerConfig
from whet.generate.backends.dialects import barred_ids, check_copy
from whet.generate.backends.server import (
    ServerSampler,
    exchange_folder,
    named_weights,
    write_weights,
)
from whet.generate.engine import EngineStats
from whet.generate.policy import Policy
from whet.generate.rows import Completion, OnEnded, Request
from whet.generate.sampling import SamplingParams
from whet.model.names import as_stored
from whet.ranks.collectives import world_size
from whet.types import UserError

START_S = 900.0
"""Longest start of a server: it reads the weights, and on a GPU compiles and captures graphs."""
CLOSE_S = 20.0
LOG = "vllm.log"
NAME = "policy"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be told to make room for."""


def engine_arguments(config: SamplerConfig, policy: Policy, folder: Path) -> dict[str, Any]:
    """Return vLLM's engine arguments for a policy whose model was written to a folder."""
    dtype = policy.autocast or policy.model.head_weight.dtype
    return {
        "model": str(folder),
        "dtype": str(dtype).removeprefix("torch.") if config.dtype == "auto" else config.dtype,
        "max_model_len": policy.model.config.max_positions,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # the folder's defaults would change the distribution
        "gpu_memory_utilization": config.memory,
        **_lora_arguments(policy),
    }


def _lora_arguments(policy: Policy) -> dict[str, Any]:
    """Return what makes room for the adapter that is trained, if there is one.

    Raises:
        UserError: If its rank is above what vLLM can have.
    """
    if policy.trained is None:
        return {}
    rank = policy.trained.written_rank
    room = next((most for most in LORA_RANKS if most >= rank), None)
    if room is None:
        raise UserError(f"lora.rank: adapters of rank {rank}; vLLM has room for {LORA_RANKS[-1]} at most")
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}


def write_model(policy: Policy, folder: Path) -> None:
    """Write what vLLM starts from: weights (see `write_weights`), configuration and tokenizer."""
    policy.save_protocol(folder)
    write_weights(policy, folder, unties=True)


def start_server(config: SamplerConfig, policy: Policy, folder: Path) -> ServerSampler:
    """Start vLLM's server with the Python of `config`, and return the sampler that asks it; closing it ends the server.

    Args:
        config: Its Python, precision, memory and further arguments.
        policy: The policy, as it starts.
        folder: Run folder: what the server says is in its vllm.log.

    Raises:
        UserError: If it does not start, with the last line that it wrote.
    """
    python = shutil.which(user_path(config.python))
    if python is None:
        raise UserError(
            f"sampler.python = {config.python}: no such program; name the Python of vLLM's environment"
        )
    if world_size() > 1:
        raise UserError(
            "sampler.python with several ranks: each would start a server of its own; start one by hand and name it: "
            "sampler.kind = openai with sampler.url"
        )
    check_copy(policy)
    model = Path(tempfile.mkdtemp(prefix="whet-vllm-", dir=exchange_folder(config)))
    write_model(policy, model)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = engine_arguments(config, policy, model)
    flags = {name: f"--{name.replace('_', '-')}" for name in options}
    words = [flags[name] if value is True else f"{flags[name]}={value}" for name, value in options.items()]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *words, f"--served-model-name={NAME}"]
    command += ["--host=127.0.0.1", f"--port={port}", *config.arguments]
    cache_gib = max(1, round(10 * config.memory))
    environment = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": str(cache_gib)} | os.environ
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # the endpoint that replaces weights
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"  # and those that replace adapters
    environment.pop("PYTHONPATH", None)  # of our own environment
    log = (folder / LOG).open("ab")
    process = processes.start(
        command, tree=True, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    log.close()

    def stop() -> None:
        _end(process)
        shutil.rmtree(model, ignore_errors=True)
        atexit.unregister(stop)

    atexit.register(stop)
    try:
        _await_health(process, port, folder / LOG)
        named = replace(config, kind="openai", url=f"http://127.0.0.1:{port}/v1", **OURS)
        return ServerSampler(named, policy, on_close=stop, unties=True)
    except BaseException:
        stop()
        raise


OURS: dict[str, Any] = {"python": "", "dtype": "auto", "memory": SamplerConfig.memory, "arguments": ()}
"""Fields that only the start of a server reads."""


def _await_health(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until the server answers.

    Raises:
        UserError: If it ends, or takes too long.
    """
    deadline = time.monotonic() + START_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(
                f"vLLM ended with status {process.returncode}: {_last_error(log)} (all of it: {log})"
            )
        with contextlib.suppress(urllib.error.URLError, OSError):
            opener.open(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        time.sleep(0.5)
    raise UserError(f"vLLM did not answer within {START_S:g} s; what it said is in {log}")


def _last_error(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it said nothing"])[-1].strip()[-300:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and the processes that it started."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSE_S)
            if sent == signal.SIGKILL:
                return


class VllmSampler:
    """vLLM in this process, beside the trainer; on a GPU it sleeps while the trainer works.

    Args:
        config: Precision, memory, and how deep it sleeps.
        policy: The policy, as it starts.

    Attributes:
        stats: Tokens drawn so far.
        look: Called before each call of vLLM; may raise to end it.

    Raises:
        UserError: If vLLM is not installed here, or cannot load the model.
    """

    def __init__(self, config: SamplerConfig, policy: Policy) -> None:
        check_copy(policy)
        # One process: the trainer's tensors are handed over as they are, and the trainer waits for vLLM anyway.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(10 * config.memory))))
        try:
            import vllm
        except ImportError as error:
            raise UserError(
                f"sampler.kind = vllm: vLLM is not in this environment ({error}); name the Python of one that has it "
                "with sampler.python, or install it beside whet (docs/samplers.md)"
            ) from None
        self._vllm, self._policy = cast(Any, vllm), policy  # no part of any installation of ours
        self._barred = barred_ids(policy)
        self._level = sleep_level(config, policy)
        self._asleep: frozenset[str] = frozenset()
        self._is_empty = False
        self.stats = EngineStats()
        self.look: Callable[[], None] = lambda: None
        self._exchange = exchange_folder(config)
        self._adapter: Any = None
        self._num_adapters = 0
        threads = torch.get_num_threads()
        with tempfile.TemporaryDirectory(prefix="whet-vllm-", dir=self._exchange) as folder:
            write_model(policy, Path(folder))
            options = engine_arguments(config, policy, Path(folder))
            try:
                self._llm = self._vllm.LLM(**options, enable_sleep_mode=self._level > 0, seed=0)
            except Exception as error:  # of vLLM, of its configuration, of the device
                told = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
                raise UserError(f"sampler.kind = vllm: vLLM cannot load the policy: {told}") from error
        _keep_threads(threads)

    @property
    def max_positions(self) -> int:
        """Longest context in tokens, prompt and completion together."""
        return self._policy.model.config.max_positions

    def push(self, version: int, policy: Policy) -> float:
        """Copy the weights into vLLM's, by their names; or let it read the adapter that is trained."""
        began = time.monotonic()
        if policy.trained is not None:
            self._wake()
            self._push_adapter(version, policy)
        else:
            # The cache stays away until the weights are there: the two copies of them need the room.
            self._wake("weights")
            self._load(policy)
            self._wake()
            self._llm.reset_prefix_cache()
        return time.monotonic() - began

    def _load(self, policy: Policy) -> None:
        """Copy a policy's weights into vLLM's."""
        pairs = list(as_stored(named_weights(policy, unties=True), policy.model.config).items())
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
        self._is_empty = False

    def _push_adapter(self, version: int, policy: Policy) -> None:
        """Let vLLM read the adapter under a number and a name of its own: its caches of prefixes go by them."""
        assert policy.trained is not None
        self._num_adapters += 1
        with tempfile.TemporaryDirectory(prefix="whet-adapter-", dir=self._exchange) as folder:
            policy.trained.write(Path(folder), is_plain=True)
            request = self._vllm.lora.request.LoRARequest(
                f"version-{version}-{self._num_adapters}", self._num_adapters, folder
            )
            if self._adapter is not None:
                self._llm.llm_engine.remove_lora(self._adapter.lora_int_id)
            try:
                is_loaded = self._llm.llm_engine.add_lora(request)
            except Exception as error:  # of vLLM: a layer that it has no adapters for, a shape
                told = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
                raise UserError(f"sampler.kind = vllm: vLLM cannot load the adapter: {told}") from error
            if not is_loaded:
                raise UserError("sampler.kind = vllm: vLLM did not load the adapter")
        self._adapter = request

    def generate(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        *,
        on_ended: OnEnded | None = None,
    ) -> list[list[Completion]]:
        """Draw every sample of every request, see `CopySampler.generate`; all are handed over at the end.

        Raises:
            UserError: If filters are asked for: vLLM does not say what they left.
        """
        if params.is_filtered:
            raise UserError(
                "sampler.kind = vllm: with sampling.top_k, top_p or min_p the trainer renormalises over what they left "
                "of each token's distribution, which vLLM does not say; leave them out"
            )
        self.look()
        if self._is_empty:  # asked again after it slept, for the same step: the weights are still those
            self._wake("weights")
            self._load(self._policy)
        self._wake()
        began = time.perf_counter()
        prompts, settings = [], []
        for request in requests:
            limit = min(params.max_new_tokens, request.max_new_tokens or params.max_new_tokens)
            limit = min(limit, self.max_positions - len(request.prompt_ids))
            for seed in request.seeds:
                prompts.append({"prompt_token_ids": list(request.prompt_ids)})
                settings.append(
                    self._vllm.SamplingParams(
                        temperature=params.temperature,
                        max_tokens=limit,
                        seed=seed,
                        logprobs=0,
                        stop=list(self._policy.stop_strings),
                        stop_token_ids=list(self._policy.stop_ids),
                        ignore_eos=True,
                        include_stop_str_in_output=True,
                        skip_special_tokens=False,
                        logit_bias=self._barred or None,
                    )
                )
        threads = torch.get_num_threads()
        asked = {"use_tqdm": False, "lora_request": self._adapter}
        outputs = iter(self._llm.generate(prompts, settings, **asked) if prompts else [])
        _keep_threads(threads)
        drawn = [[_completion(next(outputs).outputs[0]) for _ in request.seeds] for request in requests]
        self.stats.new_tokens += sum(len(done.ids) for row in drawn for done in row)
        self.stats.seconds += time.perf_counter() - began
        if on_ended is not None:
            for place, row in enumerate(drawn):
                on_ended(place, row)
        return drawn

    def release(self, above: int = 0) -> None:
        """Let vLLM sleep until the next call: its cache is dropped, and its weights wait in the host's memory (level 1)
        or are dropped, too (level 2): a step brings all of them anyway."""
        if self._level and not self._asleep:
            self._llm.sleep(level=self._level)
            self._asleep, self._is_empty = frozenset(SLEEPERS), self._level == 2

    def close(self) -> None:
        """Drop the engine and its memory."""
        if hasattr(self, "_llm"):
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm

    def _wake(self, *tags: str) -> None:
        """Give vLLM parts of its memory back; all of what is missing by default."""
        if missing := [tag for tag in tags or SLEEPERS if tag in self._asleep]:
            self._llm.wake_up(tags=missing)
            self._asleep -= set(missing)


SLEEPERS = ("weights", "kv_cache")
"""Parts of vLLM's memory that sleep."""


def sleep_level(config: SamplerConfig, policy: Policy) -> int:
    """Return how deep vLLM sleeps while the trainer works; 0 for not at all.

    Raises:
        UserError: If it would lose weights that nobody brings again.
    """
    level = config.sleep
    if policy.device.type != "cuda":
        if level:
            print(
                f"whet: warning: sampler.sleep = {level} has no effect: vLLM's CPU build has no sleep mode",
                file=sys.stderr,
                flush=True,
            )
        return 0
    if level == 2 and policy.trained is not None:
        raise UserError(
            "sampler.sleep = 2 with lora.rank: it drops the base's weights, and only adapters are brought again; use 1"
        )
    return 1 if level is None else level


def _keep_threads(count: int) -> None:
    """Give PyTorch its threads back; vLLM's CPU build takes all cores, and warns of every call that changes that."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _completion(output: Any) -> Completion:
    """Read one of vLLM's outputs."""
    ids = tuple(int(index) for index in output.token_ids)
    logprobs = tuple(float(entry[index].logprob) for index, entry in zip(ids, output.logprobs, strict=True))
    assert output.finish_reason in ("stop", "length")
    return Completion(ids=ids, logprobs=logprobs, finish_reason=output.finish_reason)
