"""Types below 8 bits in GGUF: which one each matrix gets, as in llama.cpp's own quantiser, and its codes, which the
llama.cpp inside xllamacpp computes."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from typing import Any

import numpy as np

from whet.install import install_command
from whet.model.config import ModelConfig
from whet.types import UserError

K_TYPES: dict[str, tuple[int, str]] = {
    "q2_k": (10, "Q2_K"),
    "q3_k_m": (12, "Q3_K"),
    "q4_k_s": (14, "Q4_K"),
    "q4_k_m": (15, "Q4_K"),
    "q5_k_m": (17, "Q5_K"),
    "q6_k": (18, "Q6_K"),
}
"""llama.cpp's number of a whole file's type (LLAMA_FTYPE_MOSTLY_...), and the type of most of its matrices."""
K_BLOCK, BLOCK = 256, 32
SHORT = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What llama.cpp takes where blocks of 256 do not fill a row; its blocks have 32."""
LAYERS_70B = 80
"""Where values are so small a part that llama.cpp gives them 5 bits."""
MANY_EXPERTS = 8
"""Where attention is so small a part that llama.cpp gives it 5 and 8 bits (Mixtral)."""


def k_type(label: str, num_columns: int, kind: str, config: ModelConfig) -> str:
    """Return the type of a matrix in a file of a K type: what llama.cpp's quantiser gives it (`llama_tensor_get_type`
    in its src/llama-quant.cpp), for the families that are written here.

    Args:
        label: The matrix's name in GGUF.
        num_columns: Length of its rows.
        kind: A name of `K_TYPES`.
        config: The model's shape.
    """
    part = label.split(".")[-2]
    if part == "output" or (part == "token_embd" and config.tie_embeddings):
        found = "Q6_K"
    elif label.startswith("blk."):
        found = _in_layer(part, int(label.split(".")[1]), kind, config)
    else:
        found = K_TYPES[kind][1]
    if num_columns % K_BLOCK and found in SHORT:
        found = SHORT[found]
    return found if num_columns % BLOCK == 0 else "F16"


def _in_layer(part: str, layer: int, kind: str, config: ModelConfig) -> str:
    """Return the type of a layer's matrix: values and the last product, on which most depends, get more bits."""
    count, usual = config.num_layers, K_TYPES[kind][1]
    # The first and last eighth of the layers, and every third one between them.
    is_finer = layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2
    has_many = config.block.experts is not None and config.block.experts.count == MANY_EXPERTS
    finer = "Q6_K" if is_finer else usual
    more = {"q4_k_m": finer, "q5_k_m": finer}
    if part in ("attn_v", "attn_qkv"):
        more["q2_k"] = "Q4_K" if config.num_heads >= 4 * config.num_kv_heads else "Q3_K"
        more["q3_k_m"] = "Q5_K" if layer < 2 else "Q4_K"
        more["q4_k_s"] = "Q5_K" if layer < 4 else usual
        found = more.get(kind, usual)
        if count == LAYERS_70B and found in ("Q3_K", "Q4_K"):
            found = "Q5_K"
        return "Q8_0" if has_many else found
    if part == "attn_k" and has_many:
        return "Q8_0"
    if part == "attn_output":
        if has_many:
            return usual if kind in ("q5_k_m", "q6_k") else "Q5_K"
        return {"q2_k": "Q3_K", "q3_k_m": "Q4_K"}.get(kind, usual)
    if part.startswith("ffn_down"):
        more["q2_k"] = "Q3_K"
        more["q3_k_m"] = "Q5_K" if layer < count // 16 else "Q4_K"
        more["q4_k_s"] = "Q5_K" if layer < count // 8 else usual
        return more.get(kind, usual)
    return usual


def refuse(kind: str) -> None:
    """Refuse a type where what computes its codes is missing.

    Raises:
        UserError: If it is.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        raise UserError(
            f"dtype = {kind}: llama.cpp computes its codes: {install_command('llama')}; f32, f16, bf16 and q8_0 do not "
            "need it"
        )
    if not hasattr(_library(), "ggml_quantize_chunk"):
        raise UserError(
            f"dtype = {kind}: this build of xllamacpp does not show llama.cpp's quantiser; take q8_0, or f16 and "
            "llama.cpp's llama-quantize on that file"
        )


@cache
def _library() -> Any:
    """Return llama.cpp's library, which is linked into xllamacpp's module."""
    import xllamacpp as module  # pyright: ignore[reportMissingImports]

    package: Any = module  # compiled: its types are not known
    return ctypes.CDLL(package.xllamacpp.__file__)


def encode(values: np.ndarray, number: int, num_bytes: int, importance: np.ndarray | None) -> np.ndarray:
    """Return the codes of a matrix.

    Args:
        values: float32 [rows, columns], or [experts, rows, columns].
        number: ggml's number of the type.
        num_bytes: Of the codes of all rows.
        importance: Weight of each input, float32 [columns], or of experts one row after the other; None for all alike.

    Returns:
        uint8 [num_bytes].
    """
    library = _library()
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    matrices = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, *values.shape[-2:])
    count, rows, columns = matrices.shape
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32).reshape(count, -1)
    codes = np.empty((count, num_bytes // count), np.uint8)
    for place, matrix in enumerate(matrices):
        weighed = None if weights is None else weights[place].ctypes.data_as(ctypes.c_void_p)
        done = library.ggml_quantize_chunk(
            ctypes.c_int(number),
            matrix.ctypes.data_as(ctypes.c_void_p),
            codes[place].ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(0),
            ctypes.c_int64(rows),
            ctypes.c_int64(columns),
            weighed,
        )
        assert done == codes.shape[1]
    return codes.reshape(-1)
