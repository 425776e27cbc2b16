"""An exported artefact in its own runtime, in a process of its own: what another program would answer.

The process reads request.json and writes answer.json and a file of logits for each prompt. It uses nothing of whet.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

MODULES = {
    "llama.cpp": ("xllamacpp",),
    "transformers": ("transformers",),
    "peft": ("peft", "transformers"),
    "mlx": ("mlx_lm", "mlx"),
}
"""What each runtime imports."""
EXTRAS = {"llama.cpp": "llama", "transformers": "convert", "peft": "peft", "mlx": "mlx"}
"""whet's extra that installs it."""
REQUEST, ANSWER = "request.json", "answer.json"
ERRORS_ALONE = 1
NUM_PROBS = 2048
"""Log-probabilities of a place that llama.cpp is asked for: all of a large vocabulary take it half a second."""


class Runtime(Protocol):
    """A loaded artefact."""

    version: str
    stop_ids: list[int]

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation's prompt."""
        ...

    def logits(self, ids: Sequence[int], start: int) -> np.ndarray:
        """Return float32 logits [len(ids) - start, V] of the tokens from `start` on, NaN where it gives none."""
        ...

    def greedy(self, ids: Sequence[int], max_new_tokens: int, stops: Sequence[str]) -> list[int]:
        """Return the most likely continuation, to where the artefact stops."""
        ...


def missing(runtime: str) -> str:
    """Return the first module that a runtime lacks here; '' if it can run."""
    return next((name for name in MODULES[runtime] if importlib.util.find_spec(name) is None), "")


class LlamaCpp:
    """A GGUF file in llama.cpp's server, asked as its clients ask: xllamacpp has it in one wheel.

    Args:
        path: The file.
        context: Longest sequence in tokens.
        ends: Ids of which to find out whether it stops at them.
        lora: File of an adapter; '' for none.
    """

    def __init__(self, path: str, context: int, ends: Sequence[int], lora: str = "") -> None:
        import xllamacpp as module  # pyright: ignore[reportMissingImports]

        xllamacpp: Any = module  # compiled: its types are not known
        self.version = f"llama.cpp (xllamacpp {xllamacpp.__version__})"
        params: Any = xllamacpp.CommonParams()
        params.model.path, params.verbosity = path, ERRORS_ALONE
        params.n_ctx = params.n_batch = params.n_ubatch = context
        params.n_parallel = params.n_threads_http = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        # Keys and values as whet has them: float16 is llama.cpp's default. All of them, also outside windows: each
        # request goes on from the last one's.
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.swa_full, params.warmup, params.fit_params, params.ctx_shift = True, False, False, False
        params.n_gpu_layers = params.cache_ram_mib = params.n_ctx_checkpoints = 0
        if lora:
            info: Any = xllamacpp.CommonAdapterLoraInfo()
            info.path, info.scale = lora, 1.0
            params.lora_adapters = [info]
        self._server = xllamacpp.Server(params)
        self._address = self._server.listening_address.rpartition("/")[2]
        self._num_rows = int(self._ask("/v1/models")["data"][0]["meta"]["n_vocab"])
        self.stop_ids = [index for index in ends if self._next([index], force=index)["stop_type"] == "eos"]
        # A byte that begins a character has no probabilities: one of these is drawn in its place.
        pieces = self._ask("/tokenize", content="a 1.")["tokens"]
        self._plain = [*self.stop_ids, *pieces]

    def _ask(self, path: str, **body: Any) -> Any:
        # http.client heeds no proxy of the environment.
        connection = http.client.HTTPConnection(self._address)
        try:
            text = json.dumps(body) if body else None
            connection.request(
                "POST" if body else "GET", path, text, headers={"Content-Type": "application/json"}
            )
            reply = connection.getresponse()
            found = json.loads(reply.read())
        finally:
            connection.close()
        if reply.status != 200:
            raise RuntimeError(f"{path}: {str(found)[:200]}")
        return found

    def _next(self, ids: Sequence[int], *, count: int = 1, force: int | None = None, **more: Any) -> Any:
        """Continue a prompt greedily; `force` is drawn instead, the probabilities stay the model's own."""
        bias = [] if force is None else [[force, 1e9]]
        plain = {"temperature": 0, "cache_prompt": True, "return_tokens": True, "logit_bias": bias}
        return self._ask("/completion", prompt=list(ids), n_predict=count, **plain, **more)

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text as a prompt has them: with BOS where the file says so."""
        return self._ask("/tokenize", content=text, add_special=special, parse_special=special)["tokens"]

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Render through the file's template, and tokenize, as llama.cpp's chats do; [] where it cannot."""
        try:
            return self.tokenize(self._ask("/apply-template", messages=messages)["prompt"])
        except RuntimeError:
            return []

    def logits(self, ids: Sequence[int], start: int) -> np.ndarray:
        """Ask for the log-probabilities at each place: those of the `NUM_PROBS` likeliest ids, NaN for the others."""
        found = np.full((len(ids) - start, self._num_rows), np.nan, dtype=np.float32)
        for row, place in enumerate(range(start, len(ids))):
            for force in (None, *self._plain):
                reply = self._next(ids[:place], force=force, n_probs=min(self._num_rows, NUM_PROBS))
                if rows := reply.get("completion_probabilities"):
                    break
            else:
                raise RuntimeError("no probabilities in any reply")
            for entry in rows[0]["top_logprobs"]:
                found[row, entry["id"]] = entry["logprob"]
        return found

    def greedy(self, ids: Sequence[int], max_new_tokens: int, stops: Sequence[str]) -> list[int]:
        """Generate to an end-of-generation token or a stop string."""
        return list(self._next(ids, count=max_new_tokens, stop=list(stops))["tokens"])


class Transformers:
    """A model folder in transformers, alone or below an adapter in peft.

    Args:
        path: Model folder, or adapter folder.
        base: The adapter's base; '' for none.
        dtype: Dtype of the weights in memory.
    """

    def __init__(self, path: str, base: str, dtype: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        self._torch, self.version = torch, f"transformers {transformers.__version__}"
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
        config = transformers.AutoConfig.from_pretrained(base or path)
        sees = type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        kind: Any = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        self._model: Any = kind.from_pretrained(base or path, dtype=getattr(torch, dtype))
        if base:
            import peft

            self.version = f"peft {peft.__version__}, {self.version}"
            self._model = peft.PeftModel.from_pretrained(self._model, path)
        self._model.eval()
        if (Path(base or path) / "generation_config.json").is_file():
            ends = transformers.GenerationConfig.from_pretrained(base or path).eos_token_id
        else:  # transformers takes config.json's then
            ends = self._model.generation_config.eos_token_id
        self.stop_ids = [ends] if isinstance(ends, int) else list(ends or [])

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Render through the folder's template."""
        found = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(found["input_ids"])

    def logits(self, ids: Sequence[int], start: int) -> np.ndarray:
        """Evaluate the whole sequence at once."""
        with self._torch.no_grad():
            found = self._model(input_ids=self._torch.tensor([list(ids)])).logits[0]
        return found[start - 1 : len(ids) - 1].float().numpy()

    def greedy(self, ids: Sequence[int], max_new_tokens: int, stops: Sequence[str]) -> list[int]:
        """Generate as the folder's generation_config.json has it, but without sampling."""
        plain = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
        plain |= {"repetition_penalty": 1.0, "max_new_tokens": max_new_tokens, "eos_token_id": self.stop_ids}
        if stops:
            plain |= {"stop_strings": list(stops), "tokenizer": self._tokenizer}
        with self._torch.no_grad():
            inputs = self._torch.tensor([list(ids)])
            found = self._model.generate(
                input_ids=inputs, attention_mask=self._torch.ones_like(inputs), pad_token_id=0, **plain
            )
        return found[0, len(ids) :].tolist()


class Mlx:
    """A model folder in mlx-lm.

    Args:
        path: The folder.
    """

    def __init__(self, path: str) -> None:
        import mlx.core as mx  # pyright: ignore[reportMissingImports]
        import mlx_lm  # pyright: ignore[reportMissingImports]

        self._mx, self.version = mx, f"mlx-lm {getattr(mlx_lm, '__version__', '')}".strip()
        loaded: Any = mlx_lm.load(path)
        self._model, self._tokenizer = loaded[0], loaded[1]
        self.stop_ids = sorted(self._tokenizer.eos_token_ids)

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Render through the folder's template."""
        found = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return list(found["input_ids"] if hasattr(found, "keys") else found)

    def logits(self, ids: Sequence[int], start: int) -> np.ndarray:
        """Evaluate the whole sequence at once."""
        found = self._model(self._mx.array([list(ids)]))[0].astype(self._mx.float32)
        return np.array(found)[start - 1 : len(ids) - 1]

    def greedy(self, ids: Sequence[int], max_new_tokens: int, stops: Sequence[str]) -> list[int]:
        """Draw token by token, to a stop token or string."""
        found: list[int] = []
        while len(found) < max_new_tokens:
            logits = self._model(self._mx.array([[*ids, *found]]))[0, -1]
            found.append(int(self._mx.argmax(logits)))
            text = self._tokenizer.decode(found)
            if found[-1] in self.stop_ids or any(stop in text for stop in stops):
                break
        return found


def answer(folder: Path) -> None:
    """Answer the request in a folder."""
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    path, kind = request["path"], request["runtime"]
    loaders: dict[str, Callable[[], Runtime]] = {
        "llama.cpp": lambda: LlamaCpp(path, request["context"], request["stop_ids"]),
        "transformers": lambda: Transformers(path, "", request["dtype"]),
        "peft": lambda: Transformers(path, request["base"], request["dtype"]),
        "mlx": lambda: Mlx(path),
    }
    runtime = loaders[kind]()
    rows = []
    for number, prompt in enumerate(request["prompts"]):
        ids, said = prompt["ids"], prompt["said"]
        np.save(folder / f"{number}.npy", runtime.logits([*ids, *said], len(ids)))
        greedy = runtime.greedy(ids, request["max_new_tokens"], request["stop_strings"])
        rendered = runtime.render(prompt["messages"]) if request["has_template"] else ids
        rows.append({"rendered": rendered, "greedy": greedy})
    found = {"version": runtime.version, "stop_ids": runtime.stop_ids, "rows": rows}
    if isinstance(runtime, LlamaCpp):  # the others read tokenizer.json, as whet does
        found["lines"] = [runtime.tokenize(line, special=False) for line in request["lines"]]
    (folder / ANSWER).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    answer(Path(sys.argv[1]))
