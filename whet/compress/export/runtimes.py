"""An exported artefact in its own runtime, in a process of its own: what another program would answer.

The process reads request.json and writes answer.json and a file of logits for each prompt. It uses nothing of whet.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

MODULES = {
    "llama.cpp": ("llama_cpp",),
    "transformers": ("transformers",),
    "peft": ("peft", "transformers"),
    "mlx": ("mlx_lm", "mlx"),
}
"""What each runtime imports."""
EXTRAS = {"llama.cpp": "llama", "transformers": "convert", "peft": "peft", "mlx": "mlx"}
"""whet's extra that installs it."""
REQUEST, ANSWER = "request.json", "answer.json"
GGML_F32 = 0
"""llama.cpp keeps keys and values in float16 by default; here they are as whet has them."""


class Runtime(Protocol):
    """A loaded artefact."""

    version: str
    stop_ids: list[int]

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation's prompt."""
        ...

    def logits(self, ids: Sequence[int], start: int) -> np.ndarray:
        """Return float32 logits [len(ids) - start, V] of the tokens from `start` on."""
        ...

    def greedy(self, ids: Sequence[int], max_new_tokens: int, stops: Sequence[str]) -> list[int]:
        """Return the most likely continuation, to where the artefact stops."""
        ...


def missing(runtime: str) -> str:
    """Return the first module that a runtime lacks here; '' if it can run."""
    return next((name for name in MODULES[runtime] if importlib.util.find_spec(name) is None), "")


class LlamaCpp:
    """A GGUF file in llama.cpp.

    Args:
        path: The file.
        context: Longest sequence in tokens.
    """

    def __init__(self, path: str, context: int) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports]
        from llama_cpp.llama_chat_format import (  # pyright: ignore[reportMissingImports]
            Jinja2ChatFormatter,
        )

        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._api, kinds = llama_cpp, {"type_k": GGML_F32, "type_v": GGML_F32}
        threads = {"n_threads": 1, "n_threads_batch": 1}
        self._llm: Any = llama_cpp.Llama(
            path, n_ctx=context, n_batch=context, logits_all=True, verbose=False, **kinds, **threads
        )
        self._vocab = self._llm._model.vocab
        rows = self._llm.n_vocab()
        self.stop_ids = [i for i in range(rows) if llama_cpp.llama_vocab_is_eog(self._vocab, i)]
        source = self._llm.metadata.get("tokenizer.chat_template", "")
        texts = {
            role: "" if index < 0 else str(llama_cpp.llama_vocab_get_text(self._vocab, index).decode())
            for role, index in (("bos", self._llm.token_bos()), ("eos", self._llm.token_eos()))
        }
        self._format = Jinja2ChatFormatter(source, texts["eos"], texts["bos"]) if source else None

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Render through the file's template, and tokenize as llama-cpp-python's chats do."""
        if self._format is None:
            return []
        text = self._format(messages=messages).prompt
        return list(self._llm.tokenize(text.encode(), add_bos=False, special=True))

    def logits(self, ids: Sequence[int], start: int) -> np.ndarray:
        """Evaluate the whole sequence at once."""
        self._llm.reset()
        self._llm.eval(list(ids[:-1]))
        return np.array(self._llm.scores[start - 1 : len(ids) - 1], dtype=np.float32)

    def greedy(self, ids: Sequence[int], max_new_tokens: int, stops: Sequence[str]) -> list[int]:
        """Draw token by token, to an end-of-generation token or a stop string."""
        self._llm.reset()
        self._llm.eval(list(ids))
        found: list[int] = []
        text = b""
        while len(found) < max_new_tokens:
            token = int(np.argmax(self._llm.scores[self._llm.n_tokens - 1]))
            found.append(token)
            text += self._llm._model.token_to_piece(token, special=True)
            if self._api.llama_vocab_is_eog(self._vocab, token) or any(s.encode() in text for s in stops):
                break
            self._llm.eval([token])
        return found


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
        "llama.cpp": lambda: LlamaCpp(path, request["context"]),
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
    (folder / ANSWER).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    answer(Path(sys.argv[1]))
