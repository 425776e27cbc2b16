"""vLLM as sampler: a server that whet starts with another Python, or an engine in this process.

The weights of both are replaced in place, under Hugging Face's names, which are whet's own. Log-probabilities are asked
for as they were drawn with (processed), so that what is left between sampler and trainer is the kernels' rounding.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from whet.generate.backends.base import SamplerConfig
from whet.generate.backends.server import (
    ServerSampler,
    barred_ids,
    exchange_folder,
    named_weights,
    write_weights,
)
from whet.generate.engine import EngineStats
from whet.generate.policy import Policy
from whet.generate.rows import Completion, OnEnded, Request
from whet.generate.sampling import SamplingParams
from whet.model.weights import as_stored
from whet.ranks.collectives import world_size
from whet.types import UserError

START_S = 900.0
"""Longest start of a server: it reads the weights, and on a GPU compiles and captures graphs."""
CLOSE_S = 20.0
LOG = "vllm.log"
NAME = "policy"


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
    }


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
    python = shutil.which(os.path.expanduser(config.python))
    if python is None:
        raise UserError(
            f"sampler.python = {config.python}: no such program; name the Python of vLLM's environment"
        )
    if world_size() > 1:
        raise UserError(
            "sampler.python with several ranks: each would start a server of its own; start one by hand and name it: "
            "sampler.kind = openai with sampler.url"
        )
    model = Path(tempfile.mkdtemp(prefix="whet-vllm-", dir=exchange_folder(config)))
    write_model(policy, model)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = engine_arguments(config, policy, model)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *words, f"--served-model-name={NAME}"]
    command += ["--host=127.0.0.1", f"--port={port}", *config.arguments]
    cache_gib = max(1, round(10 * config.memory))
    environment = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": str(cache_gib)} | os.environ
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # the endpoint that replaces weights
    environment.pop("PYTHONPATH", None)  # of our own environment
    log = (folder / LOG).open("ab")
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
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
        config: Precision and memory.
        policy: The policy, as it starts.

    Attributes:
        stats: Tokens drawn so far.
        look: Called before each call of vLLM; may raise to end it.

    Raises:
        UserError: If vLLM is not installed here, or cannot load the model.
    """

    def __init__(self, config: SamplerConfig, policy: Policy) -> None:
        # One process: the trainer's tensors are handed over as they are, and the trainer waits for vLLM anyway.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(10 * config.memory))))
        try:
            vllm: Any = importlib.import_module("vllm")  # no part of any installation of ours
        except ImportError as error:
            raise UserError(
                f"sampler.kind = vllm: vLLM is not in this environment ({error}); name the Python of one that has it "
                "with sampler.python, or install it beside whet (docs/samplers.md)"
            ) from None
        self._vllm, self._policy = vllm, policy
        self._barred = barred_ids(policy)
        self._sleeps = policy.device.type == "cuda"
        self._is_awake = True
        self.stats = EngineStats()
        self.look: Callable[[], None] = lambda: None
        threads = torch.get_num_threads()
        with tempfile.TemporaryDirectory(prefix="whet-vllm-", dir=exchange_folder(config)) as folder:
            write_model(policy, Path(folder))
            options = engine_arguments(config, policy, Path(folder))
            try:
                self._llm = vllm.LLM(**options, enable_sleep_mode=self._sleeps, seed=0)
            except Exception as error:  # of vLLM, of its configuration, of the device
                told = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
                raise UserError(f"sampler.kind = vllm: vLLM cannot load the policy: {told}") from error
        _keep_threads(threads)

    @property
    def max_positions(self) -> int:
        """Longest context in tokens, prompt and completion together."""
        return self._policy.model.config.max_positions

    def push(self, version: int, policy: Policy) -> float:
        """Copy the weights into vLLM's, by their names."""
        began = time.monotonic()
        self._wake()
        pairs = list(as_stored(named_weights(policy, unties=True), policy.model.config).items())
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
        self._llm.reset_prefix_cache()
        return time.monotonic() - began

    def generate(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        *,
        on_ended: OnEnded | None = None,
        is_streamed: bool = False,
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
        outputs = iter(self._llm.generate(prompts, settings, use_tqdm=False) if prompts else [])
        _keep_threads(threads)
        drawn = [[_completion(next(outputs).outputs[0]) for _ in request.seeds] for request in requests]
        self.stats.new_tokens += sum(len(done.ids) for row in drawn for done in row)
        self.stats.seconds += time.perf_counter() - began
        if on_ended is not None:
            for place, row in enumerate(drawn):
                on_ended(place, row)
        return drawn

    def release(self, above: int = 0) -> None:
        """Let vLLM sleep until the next call: its cache is dropped and its weights wait in the host's memory."""
        if self._sleeps and self._is_awake:
            self._llm.sleep(level=1)
            self._is_awake = False

    def close(self) -> None:
        """Drop the engine and its memory."""
        if hasattr(self, "_llm"):
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm

    def _wake(self) -> None:
        if not self._is_awake:
            self._llm.wake_up()
            self._is_awake = True


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
