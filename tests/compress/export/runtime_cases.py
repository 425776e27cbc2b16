"""Tiny models of every family and variant that whet writes, in the programs that read them: llama.cpp, transformers, an
older transformers, mlx-lm.

`python tests/compress/export/runtime_cases.py` writes the table of docs/export.md; `test_llama_cpp.py` and
`test_readers.py` check the same. A program that is missing keeps its column's numbers.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path += [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "model")]
import family_cases
from needs import READERS, missing

from whet.compress.export import gguf, runtimes
from whet.compress.export.runtimes import LlamaCpp
from whet.compress.export.vocabulary import express
from whet.generate.policy import Policy
from whet.model.families import from_hf
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model, load_model
from whet.schema import SCHEMAS

PAGE = Path(__file__).parents[3] / "docs/export.md"
CLOSE, GELU_TABLE = 3e-4, 0.02
"""Largest difference of a log-probability; llama.cpp takes GELU from a table in float16."""
CONTEXT, NUM_IDS, START = 128, 56, 44
SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,  # of Phi-3 and SmolLM3 transformers' own default is beyond this vocabulary
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 3.0}
TIED, UNTIED, SQUARE = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"head_dim": 16}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MIXTURE |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
PHI3 = SQUARE | {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.75}
PHI3 |= {
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1 + i / 9 for i in range(6)],
        "long_factor": [2.0 + i for i in range(6)],
    }
}
GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
GRANITE |= {"logits_scaling": 2.0, "attention_bias": False, "mlp_bias": False}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 16, "query_pre_attn_scalar": 16}
GEMMA2 = GEMMA | {"num_hidden_layers": 4}
GEMMA3 = GEMMA | {"num_hidden_layers": 7, "rope_local_base_freq": 500.0}
FULL = {"layer_types": ["full_attention"] * 7}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": TIED,
    "llama, llama3": {"rope_scaling": LLAMA3},
    "llama, yarn": {"rope_scaling": YARN},
    "llama, linear": {"rope_scaling": LINEAR},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "mistral, window": {"sliding_window": 60},
    "mistral, tied": {"sliding_window": None} | TIED,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": SQUARE,
    "qwen2, tied": SQUARE | TIED,
    "qwen2, linear": SQUARE | {"rope_scaling": LINEAR},
    "qwen2, yarn": SQUARE | {"rope_scaling": YARN},
    "qwen3": {},
    "qwen3, tied": TIED,
    "qwen3, yarn": {"rope_scaling": YARN | {"attention_factor": 1.3}},
    "qwen3_moe": MIXTURE,
    "smollm3": {"num_hidden_layers": 4},
    "smollm3, tied": {"num_hidden_layers": 4} | TIED,
    "phi3": SQUARE,
    "phi3, longrope": PHI3,
    "phi3, long factors": PHI3 | {"rope_factors": "long"},
    "granite": GRANITE,
    "granite, biases": GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "gemma": {"hidden_act": "gelu_pytorch_tanh"},
    "gemma, untied": {"hidden_act": "gelu_pytorch_tanh"} | UNTIED,
    "gemma2": GEMMA2,
    "gemma2, no caps": GEMMA2 | NO_CAPS,
    "gemma2, no cap of logits": GEMMA2 | {"final_logit_softcapping": None},
    "gemma2, no cap of scores": GEMMA2 | {"attn_logit_softcapping": None},
    "gemma2, untied": GEMMA2 | UNTIED,
    "gemma2, full": GEMMA2 | {"layer_types": ["full_attention"] * 4},
    "gemma3_text": GEMMA3,
    "gemma3_text, untied": GEMMA3 | UNTIED,
    "gemma3_text, full": GEMMA3 | FULL,
    "gemma3_text, full, linear": GEMMA3 | FULL | {"rope_scaling": LINEAR},
    "gemma3_text, linear": GEMMA3 | {"rope_scaling": LINEAR},
    "gemma3_text, cap of logits": GEMMA3 | {"final_logit_softcapping": 3.0},
    "gemma3_text, windows alone": GEMMA3 | {"layer_types": ["sliding_attention"] * 7},
    "gpt2": {},
}
"""model_type, and what its config.json has beside or instead of `SIZES`."""
REFUSED = {
    "granite, biases": "no bias 'model.layers.0.self_attn.q_proj.bias'",
    "gemma, untied": "head of its own",
    "gemma2, untied": "head of its own",
    "gemma3_text, full, linear": "rotary positions",
    "gemma3_text, windows alone": "one layer of 6 sees all",
}
"""What llama.cpp cannot compute, with a word of the refusal."""


def make(name: str) -> LanguageModel:
    """Build a model of a family with weights of which every one shows in the logits."""
    kind = name.split(",")[0]
    data = {"model_type": kind} | SIZES | VARIANTS[name]
    if kind == "gpt2":
        data |= {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256}
        data = {key: value for key, value in data.items() if key not in SIZES or key == "vocab_size"}
    model = build_model(from_hf(data))
    init_weights(model, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            # Less where a table's error grows with what it is looked up for.
            size = 0.1 if parameter.dim() == 1 else 0.08 if kind.startswith("gemma") else 0.2
            noise = torch.empty_like(parameter).normal_(0, size, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model.eval()


def difference(model: LanguageModel, path: Path, lora: str = "") -> float:
    """Return the largest difference of a log-probability between a file in llama.cpp and our engine."""
    ids = torch.randint(0, 256, (NUM_IDS,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        ours = model.logits(torch.tensor([ids[:-1]]))[0, START - 1 :].float().log_softmax(-1).numpy()
    theirs = LlamaCpp(str(path), CONTEXT, (), lora).logits(ids, START)
    assert ours.std() > 0.5, "log-probabilities too alike to show a difference"
    return float(np.abs(ours - theirs).max())


def in_llama_cpp(name: str, folder: Path) -> float:
    """Write a variant as GGUF, and return the largest difference of a log-probability in llama.cpp."""
    model, path = make(name), folder / "m.gguf"
    gguf.write_gguf(model, express(Tokenizer.bytes(), 258, (256,)), path, "f32")
    return difference(model, path)


KINDS = {name: name.split(",")[0] for name in VARIANTS}
KINDS |= {f"case {name}": case.model_type for name, case in family_cases.CASES.items()}
"""model_type of each model that folder readers get: the variants here, and the cases of docs/models.md."""
FAMILIES = {case.model_type: case.family for case in family_cases.CASES.values() if case.models}
"""The table's lines."""
READ = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
import runtimes
errors = {}
for name, (folder, ids) in json.load(sys.stdin).items():
    try:
        loaded = runtimes.Mlx(folder) if sys.argv[2] == "mlx-lm" else runtimes.Transformers(folder, "", "float32")
        np.save(Path(folder) / "theirs.npy", loaded.logits([*ids, 0], 1))
    except Exception as error:
        errors[name] = f"{type(error).__name__}: {error}"
print(json.dumps(errors))
"""
"""What a reader's process runs: logits of every folder, and what was raised."""


def write_folders(home: Path) -> dict[str, tuple[str, list[int]]]:
    """Save every model as exports of kind hf, merged and mlx do, with our log-probabilities; return folders and ids."""
    tokenizer = Tokenizer.characters("".join(chr(33 + place) for place in range(family_cases.VOCAB - 3)))
    found = {}
    for name in KINDS:
        folder = home / name.replace(" ", "_")
        if name in VARIANTS:
            policy = Policy(make(name), Tokenizer.bytes(), SCHEMAS["none"])
        else:
            family_cases.make(family_cases.CASES[name.removeprefix("case ")], home / "theirs")
            policy = Policy(load_model(home / "theirs")[0].eval(), tokenizer, SCHEMAS["none"])
        policy.save(folder)
        ids = family_cases.ids_of(min(120, policy.model.config.max_positions - 1))
        with torch.no_grad():
            ours = policy.model.logits(torch.tensor([ids]))[0, :, : policy.tokenizer.vocab_size]
        np.save(folder / "ours.npy", ours.float().log_softmax(-1).numpy())
        found[name] = (str(folder), ids)
    return found


def read_folders(reader: str, folders: dict[str, tuple[str, list[int]]]) -> dict[str, float | str]:
    """Read folders in a program; return the largest difference of a log-probability of each, or what was raised."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": READERS.get(reader, "")}
    done = subprocess.run(
        [sys.executable, "-c", READ, str(Path(runtimes.__file__).parent), reader],
        input=json.dumps(folders),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    for name, (folder, _) in folders.items():
        if name not in found:
            ours = np.load(Path(folder) / "ours.npy")
            theirs = torch.from_numpy(np.load(Path(folder) / "theirs.npy"))[:, : ours.shape[1]]
            found[name] = float(np.abs(theirs.log_softmax(-1).numpy() - ours).max())
    return found


UNREAD, OTHERWISE = "not read", "answers otherwise"
NEWER = ("ministral", "ministral3", "gemma4_text", "olmo3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
CAPPED = ("gemma2", "gemma2, no cap of logits", "gemma2, untied", "gemma2, full", "case gemma2")
MLX = {
    "no such family": ("all ministral", "all qwen3_5_text", "all qwen3_5_moe_text"),
    "other names of tensors": ("all gpt2", "all gpt_oss", "all qwen3_next"),
    "heads of another width": ("mixtral", "granite", "granite, biases", "case qwen2", "case qwen2-window")
    + ("case phi3", "case mixtral", "case gemma4", "case gemma4-small"),
    "a head of its own": ("gemma, untied", "gemma2, untied", "case lfm2-biased"),
    "no caps": ("gemma2, no caps", "gemma2, no cap of logits", "gemma2, no cap of scores"),
    "fewer than six layers": ("case gemma3",),
}
"""What mlx-lm does not read."""
MLX_OTHERWISE = {
    "no windows": ("mistral, window", "case mistral", "gemma2", "case gemma2"),
    "no attention factor": ("qwen3, yarn",),
    "the long factors always": ("phi3, longrope", "case phi3-longrope"),
    "GELU without tanh": ("gemma", "case gemma"),
    "five windows to one layer always": ("gemma3_text, full", "gemma3_text, full, linear")
    + ("gemma3_text, windows alone",),
    "no cap of logits": ("gemma3_text, cap of logits",),
    "no partial rotation": ("case glm",),
    "no clipped queries": ("case olmoe",),
    "interleaved rotation always": ("case moonlight",),
}
EXPECTED: dict[str, dict[str, str]] = {
    "transformers": {},
    "transformers 4.56": {f"all {kind}": f"{UNREAD}: no such family" for kind in (*NEWER, "lfm2_moe")}
    | dict.fromkeys(CAPPED, f"{OTHERWISE}: its default, sdpa, has no cap of scores"),
    "mlx-lm": {name: f"{UNREAD}: {why}" for why, names in MLX.items() for name in names}
    | {name: f"{OTHERWISE}: {why}" for why, names in MLX_OTHERWISE.items() for name in names},
}
"""What each reader of folders does not do, by the model's name, or 'all' and its model_type."""
COLUMNS = ("llama.cpp", *EXPECTED)
BEGIN, END = "<!-- families by runtime -->\n", "<!-- end of families by runtime -->"
NUMBER = re.compile(r"(?<=\| )(#|0|\de-\d+)(?=;| \|)")


def verdict(column: str, name: str) -> str:
    """Return what a runtime does with a model: '' for our probabilities."""
    kind = KINDS[name]
    if column != "llama.cpp":
        return EXPECTED[column].get(name) or EXPECTED[column].get(f"all {kind}", "")
    if kind not in gguf.ARCHITECTURES:
        return "refused: no GGUF of it"
    return f"refused: {name.partition(', ')[2]}" if name in REFUSED else ""


def found_verdict(found: float | str) -> str:
    """Return how a verdict begins after what a reader of folders gave."""
    return UNREAD if isinstance(found, str) else (OTHERWISE if not found < CLOSE else "")


def cell(column: str, kind: str, number: str) -> str:
    """Return a cell of the table: the largest difference, and what is another matter."""
    # What whet writes as GGUF has variants of its own, with more in them than the cases.
    has_variants = column == "llama.cpp" and kind in gguf.ARCHITECTURES
    names = [name for name in KINDS if KINDS[name] == kind and (name in VARIANTS or not has_variants)]
    found: dict[str, list[str]] = {}
    for text in dict.fromkeys(verdict(column, name) for name in names):
        what, _, why = text.partition(": ")
        found.setdefault(what, []).append(why)
    rest = [f"{what}: {', '.join(why)}" for what, why in found.items() if what]
    return "; ".join([number] * ("" in found) + rest)


def table(numbers: Mapping[tuple[str, str], str]) -> str:
    """Return the table of docs/export.md; '#' for numbers that are not given by model_type and column."""
    rows = [f"| family | `model_type` | {' | '.join(COLUMNS)} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for kind, family in FAMILIES.items():
        cells = [cell(column, kind, numbers.get((kind, column), "#")) for column in COLUMNS]
        rows.append(f"| {family} | `{kind}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def committed() -> str:
    """Return the table that docs/export.md has."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def rounded_up(number: float) -> str:
    """Return a number to one digit, upwards, so that another machine finds the same."""
    if not number:
        return "0"
    unit = 10.0 ** math.floor(math.log10(number))
    return f"{math.ceil(number / unit) * unit:.0e}".replace("e-0", "e-")


def main() -> None:
    """Write the table of docs/export.md."""
    torch.set_num_threads(1)
    numbers: dict[tuple[str, str], str] = {}
    for row in committed().splitlines():
        kind, *cells = row.strip("| ").split(" | ")[1:]
        for column, text in zip(COLUMNS, cells, strict=False):
            if match := NUMBER.match(f"| {text} |", 2):
                numbers[kind.strip("`"), column] = match[0]
    with tempfile.TemporaryDirectory() as scratch:
        worst: dict[tuple[str, str], float] = {}

        def add(column: str, name: str, found: float | str) -> None:
            print(column, "|", name, "|", found, flush=True)
            if isinstance(found, float) and not verdict(column, name):
                key = (KINDS[name], column)
                worst[key] = max(worst.get(key, 0.0), found)

        if not missing("xllamacpp", "gguf"):
            for name in VARIANTS.keys() - REFUSED.keys():
                add("llama.cpp", name, in_llama_cpp(name, Path(scratch)))
        folders = write_folders(Path(scratch))
        for reader in EXPECTED:
            if not missing(reader):
                for name, found in read_folders(reader, folders).items():
                    add(reader, name, found)
    numbers |= {key: rounded_up(number) for key, number in worst.items()}
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{table(numbers)}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
