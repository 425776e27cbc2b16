"""GGUF, llama.cpp's format: its names of tensors and architectures, and a file of it read as a model folder.

What llama.cpp computes for an architecture is fixed in its source; here is what whet reads and writes of it, through
the `gguf` package. A file is read once: `gguf_folder` writes what it has as a folder of the Hugging Face layout into
the cache, in float32, and everything else reads that.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.config import cache_folder, temporary_folder
from whet.install import install_command
from whet.model.config import ModelConfig
from whet.model.families import from_hf, to_hf
from whet.model.gpt2 import GPT2
from whet.model.names import as_stored
from whet.model.text.gguf import tokenizer_files
from whet.model.transformer import LanguageModel, LlamaLike
from whet.storage.commit import save_tensors
from whet.types import UserError

PERMUTED = ("llama", "granite", "smollm3")
"""Architectures that turn channels 2 i and 2 i + 1 together: rows of q and k are sorted for it."""
FACTORS: dict[str, tuple[str, ...]] = {"llama": ("rope_freqs",), "granite": ("rope_freqs",)}
FACTORS["phi3"] = ("rope_factors_long", "rope_factors_short")
"""Tensors in which an architecture reads a divisor of each rotary frequency. Phi-3 has them for contexts longer and
shorter than the original; whet has one of the two for all, and writes it as both."""
FUSED = ("phi3",)
"""Architectures whose gate and up projections are one tensor, `ffn_up`."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What llama.cpp computes for one of its architectures."""

    name: str
    """Its name there."""
    flags: frozenset[str] = frozenset()
    """Fields of `Block` that it has an equivalent of; any other that is not the default is refused."""
    has_sandwich: bool = False
    """Whether norms follow attention and the feed-forward part, beside those before."""
    window_every: int = 0
    """One layer of so many sees all positions, the others a window; 0 where all see all."""
    biases: frozenset[str] = frozenset()
    """Parts of a layer that may have biases."""
    is_square: bool = False
    """Whether heads times head_dim is the width."""
    has_part_ropes: bool = False
    """Whether a part of each head's channels may turn, the first ones."""
    is_tied: bool = False
    """Whether the head is the table of embeddings: a file with another one does not load."""
    wide_layers: int = 0
    """Number of layers at which scores are divided by sqrt(width / heads) in place of sqrt(head_dim)."""


ROPES = frozenset({"ropes", "layers"})
EXPERTS = ROPES | {"experts", "expert_names"}
GEMMA = ROPES | {"norm_offset", "embedding_scale", "activation"}
GEMMA2 = GEMMA | {"norms", "query_scale", "attention_cap", "logit_cap"}
SCALES = frozenset({"query_scale", "embedding_scale", "residual_scale", "logit_scale"})
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj"})
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(name="llama", flags=ROPES, biases=ATTENTION | {"o_proj", "mlp"}),
    "mistral": Architecture(name="llama", flags=ROPES),
    "mixtral": Architecture(name="llama", flags=EXPERTS),
    "qwen2": Architecture(name="qwen2", flags=ROPES, biases=ATTENTION, is_square=True),
    "qwen3": Architecture(name="qwen3", flags=ROPES),
    "qwen3_moe": Architecture(name="qwen3moe", flags=EXPERTS | {"qk_norm"}),
    "smollm3": Architecture(name="smollm3", flags=ROPES),
    "phi3": Architecture(name="phi3", flags=ROPES, is_square=True, has_part_ropes=True),
    "granite": Architecture(name="granite", flags=ROPES | SCALES, biases=frozenset({"o_proj", "mlp"})),
    "gemma": Architecture(name="gemma", flags=GEMMA, is_tied=True),
    "gemma2": Architecture(
        name="gemma2", flags=GEMMA2, has_sandwich=True, window_every=2, wide_layers=46, is_tied=True
    ),
    "gemma3_text": Architecture(
        name="gemma3", flags=GEMMA2 | {"qk_norm"}, has_sandwich=True, window_every=6, wide_layers=62
    ),
    "gpt2": Architecture(name="gpt2"),
}
"""By model_type: what was checked in llama.cpp (tests/compress/export)."""

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
NO_CAP = 1e6
"""A cap that does nothing: c tanh(x / c) is x in float32."""
EMBEDDINGS, HEAD = "token_embd.weight", "output.weight"
TABLES = ("model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight")
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
SANDWICHED = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def import_gguf() -> Any:
    """Import the `gguf` package; UserError says how to install it."""
    try:
        import gguf
    except ImportError:
        raise UserError(f"GGUF files need the gguf package: {install_command('gguf')}") from None
    return gguf


def model_type(config: ModelConfig) -> str:
    """Return the name that config.json has for a model's family."""
    return json.loads(config.source or "{}").get("model_type", config.family)


def split_name(name: str) -> tuple[int, str, str]:
    """Return the layer, the part of it and the end ('weight') of a parameter's name."""
    words = name.split(".")
    return int(words[2]), ".".join(words[3:-1]), words[-1]


def neighbours(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Sort the rows of q or k so that the channels i and i + head_dim / 2, which turn together, are neighbours."""
    halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def scaled(part: str, tensor: torch.Tensor, config: ModelConfig, arch: Architecture) -> torch.Tensor:
    """Fold a scale of the queries that llama.cpp does not have into what the queries come from last."""
    scale = config.block.query_scale
    if arch.wide_layers and config.num_layers == arch.wide_layers:
        scale *= math.sqrt(config.hidden_size // config.num_heads / config.head_dim)
    last = "self_attn.q_norm" if config.qk_norm else "self_attn.q_proj"
    if scale == 1.0 or part != last or arch.name == "granite":
        return tensor
    return tensor * scale


class File:
    """A GGUF file: its keys, and its tensors in float32.

    Args:
        path: The file.

    Attributes:
        facts: Its keys with their values.
        unread: Names of the tensors that nobody has asked for.

    Raises:
        UserError: If the `gguf` package is missing, or cannot read the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._gguf = path, import_gguf()
        try:
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise UserError(f"{path}: not a GGUF file: it does not begin with GGUF")
            reader = self._gguf.GGUFReader(str(path))
            self.facts = {name: field.contents() for name, field in reader.fields.items()}
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None
        except UserError:
            raise
        except Exception as error:  # a damaged file may be anything to the package
            raise UserError(
                f"{path}: the gguf package cannot read it ({type(error).__name__}: {str(error)[:160]}): a download "
                "that broke off?"
            ) from None
        self._entries = {tensor.name: tensor for tensor in reader.tensors}
        self.unread = set(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __call__(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        if name not in self._entries:
            raise UserError(f"{self._path}: no tensor {name!r}, which its architecture has")
        entry = self._entries[name]
        self.unread.discard(name)
        try:
            found = self._gguf.quants.dequantize(entry.data, entry.tensor_type)
        except NotImplementedError:
            kind = getattr(entry.tensor_type, "name", entry.tensor_type)
            raise UserError(
                f"{self._path}: the gguf package does not read {name!r}, of type {kind}: take the model in another type"
            ) from None
        return torch.from_numpy(np.array(found, dtype=np.float32))

    def rows(self, name: str) -> int:
        """Return the number of a matrix's rows; 0 where there is none."""
        return int(self._entries[name].shape[-1]) if name in self._entries else 0

    def types(self) -> Counter[str]:
        """Count the matrices by their type."""
        return Counter(t.tensor_type.name for t in self._entries.values() if len(t.shape) > 1)


def read_back(path: Path, model: LanguageModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's parameters as a GGUF file has them, rounded by its type: what writing it undone gives.

    Args:
        path: The file.
        model: The model, for names and shapes.
    """
    return parameters(File(path), model)


def parameters(stored: File, model: LanguageModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's parameters, as `read_back`."""
    config = model.config
    arch = ARCHITECTURES[model_type(config)]
    names = LAYER | (SANDWICHED if arch.has_sandwich else {})
    for name, parameter in model.named_parameters():
        if name in TOP:
            tensor = stored(TOP[name])
            if name in TABLES and len(tensor) < len(parameter):
                tensor = torch.cat((tensor, parameter.detach()[len(tensor) :].float().cpu()))
        else:
            layer, part, end = split_name(name)
            tensor = _unmapped(stored, f"blk.{layer}", part, end, names, arch, config)
            if config.family == "gpt2" and end == "weight" and tensor.dim() == 2:
                tensor = tensor.t()
        if config.block.norm_offset and name.endswith("norm.weight"):
            tensor = tensor - config.block.norm_offset
        yield name, tensor.reshape(parameter.shape).to(parameter.dtype).contiguous()


def _unmapped(
    stored: File,
    block: str,
    part: str,
    end: str,
    names: Mapping[str, str],
    arch: Architecture,
    config: ModelConfig,
) -> torch.Tensor:
    """Return one parameter of a layer from the stored tensors."""
    if part == "mlp.experts":
        if end == "gate_up_proj":
            halves = (stored(f"{block}.ffn_{half}_exps.weight") for half in ("gate", "up"))
            return torch.cat(tuple(halves), dim=1)
        return stored(f"{block}.ffn_down_exps.weight")
    if arch.name in FUSED and part in ("mlp.gate_proj", "mlp.up_proj"):
        return stored(f"{block}.ffn_up.{end}").chunk(2)[part == "mlp.up_proj"]
    joined = f"{block}.attn_qkv.{end}"
    if part in QKV and joined in stored:  # as llama.cpp's own converter writes Phi-3
        sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
        tensor = stored(joined).split(sizes)[QKV.index(part)]
    else:
        tensor = stored(f"{block}.{names[part]}.{end}")
    if arch.name in PERMUTED and part in ("self_attn.q_proj", "self_attn.k_proj"):
        pairs = tensor.reshape(-1, config.head_dim // 2, 2, *tensor.shape[1:])
        tensor = pairs.transpose(1, 2).reshape(tensor.shape)
    unit = scaled(part, torch.ones(()), config, arch)
    return tensor / unit


# --- a file as a model folder ---------------------------------------------------------------------------------------

FORMAT = 1
"""Version of the folders in the cache; another one makes every file be read again."""
UNREAD = frozenset({"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"})
"""Keys of an architecture that change nothing."""
KINDS = {arch.name: kind for kind, arch in reversed(ARCHITECTURES.items())}
"""The model_type of each of llama.cpp's architectures; Mixtral is a llama with experts there."""
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def gguf_folder(path: Path) -> Path:
    """Return a folder of the Hugging Face layout with what a GGUF file has: weights in float32, tokenizer, template.

    It is written once, into the cache, and found again by the file's content, wherever the file is.

    Args:
        path: The file.

    Raises:
        UserError: If the file is not there or damaged, or has an architecture, a tokenizer or a tensor that whet does
            not read.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    found = path.stat()
    mark = f"{path.resolve()} {found.st_size} {found.st_mtime_ns} {FORMAT}"
    bases = [base() / "gguf" for base in (cache_folder, temporary_folder)]
    # Which content a file had when it was last read: its digest takes a second for each 0.3 to 1 GB.
    notes = [base / f".{hashlib.sha256(mark.encode()).hexdigest()[:16]}" for base in bases]
    known = next((note.read_text() for note in notes if note.is_file()), "")
    if not known:
        with path.open("rb") as file:
            known = f"{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}-{FORMAT}"
    for base, note in zip(bases, notes, strict=True):
        if folder := next(base.glob(f"*-{known}/config.json"), None):
            with suppress(OSError):
                note.write_text(known)
            return folder.parent
    name = f"{path.stem[:80]}-{known}"
    stored, reason = File(path), ""
    for base in bases:
        try:
            base.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(prefix=".part-", dir=base))
            break
        except OSError as error:
            reason = error.strerror
    else:
        raise UserError(f"{bases[0]}: {reason}: set XDG_CACHE_HOME to a folder that can be written")
    types = ", ".join(kind for kind, _ in stored.types().most_common(2))
    print(f"reading {path} ({types}) once: its model folder is {base / name}", file=sys.stderr, flush=True)
    try:
        _write(stored, part, str(path))
        try:
            part.rename(base / name)
        except OSError:  # another process was faster
            if not (base / name / "config.json").is_file():
                raise
    except OSError as error:
        raise UserError(f"{base}: {error.strerror or error}") from None
    except UserError:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # Keys may have values of any kind, and tensors any shape.
        raise UserError(f"{path}: its keys and tensors make no model: {str(error)[:200]!r}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return base / name


def _write(stored: File, folder: Path, where: str) -> None:
    """Write a file's model into a folder."""
    facts = stored.facts
    config = from_hf(hf_config(stored, where), where=where)
    tokenizer, settings = tokenizer_files(facts, where)
    with torch.device("meta"):
        model = GPT2(config) if config.family == "gpt2" else LlamaLike(config)
    tensors = as_stored(dict(parameters(stored, model)), config)
    read = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
    if left := sorted(stored.unread - read):
        raise UserError(
            f"{where}: tensor {left[0]!r} is none of a {model_type(config)} model that whet knows"
        )
    ids = {
        role: facts.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "eot", "eom", "padding")
    }
    ends = tuple(dict.fromkeys(int(i) for role in ("eos", "eot", "eom") if (i := ids[role]) is not None))
    shape = to_hf(config, bos_id=ids["bos"], eos_ids=ends, dtype="float32", pad_id=ids["padding"])
    named = {"bos_token_id": ids["bos"], "eos_token_id": list(ends), "pad_token_id": ids["padding"]}
    texts = {"config.json": shape, "generation_config.json": named, "tokenizer.json": tokenizer}
    for name, content in (texts | {"tokenizer_config.json": settings}).items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    save_tensors(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def hf_config(stored: File, where: str) -> dict[str, Any]:
    """Return a file's shape as config.json has it.

    Raises:
        UserError: If a key is missing, or says what whet does not compute.
    """
    facts = stored.facts
    arch, kind = str(facts.get("general.architecture")), str(facts.get("general.type", "model"))
    if kind != "model":
        raise UserError(f"{where}: holds no whole model, but a part of the kind {kind[:40]!r}")
    if int(facts.get("split.count", 1)) > 1:
        raise UserError(f"{where}: one of several files; join them with llama-gguf-split --merge")
    if arch not in KINDS:
        raise UserError(
            f"{where}: architecture {arch[:40]!r} is not read here; expected one of {', '.join(KINDS)}: take the "
            "model's folder from the hub"
        )

    read = set(UNREAD)

    def fact(name: str, default: Any = None) -> Any:
        read.add(name)
        value = facts.get(f"{arch}.{name}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UserError(f"{where}: {arch}.{name} differs from layer to layer, which is not read here")
            value = value[0]
        if value is None:
            raise UserError(f"{where}: key {arch}.{name} is missing")
        return value

    found = _shape(arch, stored, fact, where)
    keys = {key.removeprefix(f"{arch}.") for key in facts if key.startswith(f"{arch}.")}
    if left := [f"{arch}.{key}" for key in sorted(keys - read)]:
        raise UserError(
            f"{where}: {', '.join(left[:8])}: not known here, and may change what the model computes"
        )
    return found


def _shape(arch: str, stored: File, fact: Any, where: str) -> dict[str, Any]:
    """Return the sizes of an architecture, and what `_ropes` and `_family` have of it."""
    heads, width = int(fact("attention.head_count")), int(fact("embedding_length"))
    sizes: dict[str, Any] = {
        "model_type": "mixtral" if arch == "llama" and fact("expert_count", 0) else KINDS[arch],
        "vocab_size": stored.rows(EMBEDDINGS),
        "tie_word_embeddings": HEAD not in stored,
    }
    num_kv_heads = int(fact("attention.head_count_kv", heads))
    if arch == "gpt2":
        return sizes | {
            "n_embd": width,
            "n_head": heads,
            "n_layer": int(fact("block_count")),
            "n_positions": int(fact("context_length")),
            "n_inner": int(fact("feed_forward_length")),
            "layer_norm_epsilon": fact("attention.layer_norm_epsilon"),
        }
    sizes |= {
        "hidden_size": width,
        "intermediate_size": int(fact("feed_forward_length")),
        "num_hidden_layers": int(fact("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": int(fact("attention.key_length", width // max(heads, 1))),
        "max_position_embeddings": int(fact("context_length")),
        "rms_norm_eps": fact("attention.layer_norm_rms_epsilon"),
    }
    if fact("attention.value_length", sizes["head_dim"]) != sizes["head_dim"]:
        raise UserError(f"{where}: values have another width than keys, which is not read here")
    return sizes | _ropes(stored, fact, sizes["head_dim"], where) | _family(arch, stored, fact, sizes)


def _family(arch: str, stored: File, fact: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one architecture has beside the sizes of all."""
    if arch in ("llama", "granite", "smollm3"):
        more = {"attention_bias": "blk.0.attn_q.bias" in stored or "blk.0.attn_output.bias" in stored}
        more["mlp_bias"] = "blk.0.ffn_up.bias" in stored
        if sizes["model_type"] == "mixtral":
            return {
                "intermediate_size": int(fact("expert_feed_forward_length", sizes["intermediate_size"])),
                "num_local_experts": fact("expert_count"),
                "num_experts_per_tok": fact("expert_used_count"),
            }
        if arch != "granite":
            return more
        return more | {
            "embedding_multiplier": fact("embedding_scale", 1.0),
            "residual_multiplier": fact("residual_scale", 1.0),
            "logits_scaling": fact("logit_scale", 1.0),
            "attention_multiplier": fact("attention.scale", 1 / math.sqrt(sizes["head_dim"])),
        }
    if arch == "qwen3moe":
        return {
            "num_experts": fact("expert_count"),
            "num_experts_per_tok": fact("expert_used_count"),
            "moe_intermediate_size": fact("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    if arch == "phi3":
        return {"sliding_window": int(fact("attention.sliding_window", 0)) or None}
    if not arch.startswith("gemma"):
        return {}
    found: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"}
    if arch == "gemma":
        return found
    heads, wide = sizes["num_attention_heads"], ARCHITECTURES[KINDS[arch]].wide_layers
    is_wide = sizes["num_hidden_layers"] == wide
    found["query_pre_attn_scalar"] = sizes["hidden_size"] // heads if is_wide else sizes["head_dim"]
    found["sliding_window"] = int(fact("attention.sliding_window", 4096 if arch == "gemma2" else 1024))
    usual = (50.0, 30.0) if arch == "gemma2" else (0.0, 0.0)
    for name, default in zip(("attn_logit_softcapping", "final_logit_softcapping"), usual, strict=True):
        cap = float(fact(name, default))
        found[name] = cap if 0 < cap < NO_CAP else None
    return found


def _ropes(stored: File, fact: Any, head_dim: int, where: str) -> dict[str, Any]:
    """Return the rotary positions in the terms of config.json."""
    theta, context = float(fact("rope.freq_base", 10000.0)), int(fact("context_length"))
    turned, kind = int(fact("rope.dimension_count", head_dim)), str(fact("rope.scaling.type", "none"))
    arch = str(stored.facts["general.architecture"])
    if turned != head_dim and not ARCHITECTURES[KINDS[arch]].has_part_ropes:
        raise UserError(f"{where}: {turned} of a head's {head_dim} channels turn, which is not read here")
    factor = float(fact("rope.scaling.factor", 1.0))
    original = int(fact("rope.scaling.original_context_length", context))
    amplitude = float(fact("rope.scaling.attn_factor", 1.0))
    found: dict[str, Any] = {"rope_type": "default"}
    divisors = [
        stored(f"{name}.weight").tolist() for name in FACTORS.get(arch, ()) if f"{name}.weight" in stored
    ]
    if divisors:
        found = {"short_factor": divisors[-1], "long_factor": divisors[0], "attention_factor": amplitude}
        found |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        if arch != "phi3" and amplitude == 1.0 and _is_llama3(divisors[0], theta, head_dim):
            found = {"rope_type": "llama3", **LLAMA3, "factor": max(divisors[0])}
    elif kind == "linear":
        found = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        amplitude *= 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        found = {"rope_type": "yarn", "factor": factor, "attention_factor": amplitude}
        found["original_max_position_embeddings"] = original
    elif kind != "none":
        raise UserError(f"{where}: rotary positions are scaled as {kind[:40]!r}, which is not read here")
    if arch == "gemma3":
        local = float(fact("rope.freq_base_swa", 10000.0))
        scaling = {"rope_scaling": found} if kind != "none" else {}
        return {"rope_theta": theta, "rope_local_base_freq": local, **scaling}
    if arch == "phi3":
        found["partial_rotary_factor"] = turned / head_dim
        return {
            "rope_parameters": found | {"rope_theta": theta},
            "original_max_position_embeddings": original,
        }
    return {"rope_parameters": found | {"rope_theta": theta}}


def _is_llama3(divisors: list[float], theta: float, head_dim: int) -> bool:
    """Say whether divisors of the frequencies are Llama 3's, whose settings a file does not have."""
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    waves = (2 * math.pi * theta ** (2 * i / head_dim) for i in range(head_dim // 2))
    smooth = (
        min(1.0, max(0.0, (LLAMA3["original_max_position_embeddings"] / wave - low) / (high - low)))
        for wave in waves
    )
    theirs = [1 / ((1 - s) / max(divisors) + s) for s in smooth]
    return len(theirs) == len(divisors) and all(
        abs(a - b) <= 1e-6 * a for a, b in zip(divisors, theirs, strict=True)
    )
