"""A table of exports against their own runtimes: llama.cpp, transformers and peft beside whet's engine.

    python bench/export_parity.py [--only] [--model NAME=FOLDER ...] [--types f32 q8_0 ...] [--why]

Two tiny models are made and trained here on arithmetic, so that their texts mean something; stories260k and
folders that are named are taken as they are. Every family has its place in tests/compress/export/runtime_cases.py.
With --why the rounding of stories260k's weights in q8_0 and bf16 is told apart from what llama.cpp does with them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import decoders, models, pre_tokenizers, trainers

from whet.compress.export import export as program
from whet.compress.export import parity
from whet.compress.export.export import ExportConfig, export
from whet.compress.export.gguf import Q8_BLOCK, stored_type
from whet.compress.export.vocabulary import PATTERNS
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.model.families import from_hf
from whet.model.gguf import read_back
from whet.model.parts import Linear
from whet.model.text.template import BASE_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model
from whet.schema import SCHEMAS

STORIES = Path(__file__).parents[2] / "shared/data/models/stories260k"
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "rope_theta": 500000.0,
    },
}
"""What the tiny models' config.json has beside the sizes."""
SPLITS = {"qwen3": "qwen2", "llama": "llama-bpe"}
"""How each one's tokenizer splits words, by llama.cpp's name."""


def texts(count: int) -> list[tuple[str, str]]:
    """Return sums with their worked results."""
    return [(f"What is {a} + {b}?", f" {a} + {b} = {a + b}.") for a in range(3, 3 + count) for b in (4, 17)][
        :count
    ]


def byte_pairs(pre: str) -> Tokenizer:
    """Train a byte-level BPE on the sums, with the split of words that llama.cpp calls `pre`."""
    pattern = next(text for text, name in PATTERNS.items() if name == pre)
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<think>"]
    trainer = trainers.BpeTrainer(
        show_progress=False,
        vocab_size=384,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([q + a for q, a in texts(60)] + ["Question: Answer:\n"] * 9, trainer)
    return Tokenizer(backend, roles={"eos_token": special[0]}, chat_template=BASE_TEMPLATE)


def make(kind: str, tokenizer: Tokenizer, steps: int) -> Policy:
    """Make a tiny model of a family, with spare rows that are no token's, and train it on the sums."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
    data = {"model_type": kind, "vocab_size": tokenizer.vocab_size + 3, "rms_norm_eps": 1e-5} | sizes
    data |= SHAPES[kind]
    model = build_model(from_hf(data))
    init_weights(model, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.05, generator=generator)
            else:  # norms and biases, so that a wrong place shows
                parameter.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))
    policy = Policy(model, tokenizer, SCHEMAS["none"], system_prompt=False)
    rows = []
    for question, said in texts(60):
        ids = [*policy.chat_ids([{"role": "user", "content": question}]), *tokenizer.encode(said)]
        rows.append([*ids, tokenizer.eos_id or 0])
    longest = max(map(len, rows))
    padded = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for step in range(steps):
        batch = padded[torch.randperm(len(rows), generator=generator)[:12]]
        logits = model.logits(batch[:, :-1].clamp(min=0))
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == steps - 1:
            print(f"# {kind}: loss {loss.item():.3f} after {steps} steps", flush=True)
    model.eval()
    return policy


def row(name: str, folder: Path, to: str, dtype: str, num_prompts: int, **more: Any) -> dict[str, Any]:
    """Export once into a folder that goes, print a row of the table and return the report."""
    with tempfile.TemporaryDirectory() as scratch:
        out = str(Path(scratch) / "out")
        policy = PolicyConfig(init=str(folder), device="cpu", **more)
        config = ExportConfig(policy=policy, to=to, dtype=dtype, out=out, num_prompts=num_prompts)  # pyright: ignore
        found = export(config)
    runtime = found["runtime"]
    print(
        f"| {name} | {to} {dtype} | {found['bytes']:,} | {found['kl']:.1e} | {found['stored']['kl']:.1e} | "
        f"{found['top1_agreement']:.1%} | {runtime.get('num_greedy_equal', '-')}/{found['num_prompts']} | "
        f"{runtime.get('greedy_equal_to_ties', 0):.0%} | "
        f"{runtime.get('prompts_equal', 0):.0%} | {runtime.get('stops_equal', 0):.0%} | {found['verdict']} |",
        flush=True,
    )
    return found


def rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Round what a matrix is multiplied with as llama.cpp's CPU code does before a product with weights of a type.

    Source: ggml-cpu's `vec_dot_type` and quantize_row_q8_0: blocks of 32, the scale in float16.
    """
    if kind == "Q8_0":
        blocks = x.unflatten(-1, (-1, Q8_BLOCK))
        most = blocks.abs().amax(-1, keepdim=True)
        codes = torch.round(blocks * torch.where(most > 0, 127 / most, 0.0))
        return (codes * (most / 127).half().float()).flatten(-2)
    types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return x.to(types[kind]).float()


@contextmanager
def inputs_rounded(policy: Policy, dtype: str) -> Iterator[None]:
    """Let our engine round the inputs of each product as llama.cpp does for a file of a type."""
    model = policy.model
    kinds = {
        name.removesuffix(".weight"): stored_type("", parameter.shape, dtype, model.config)
        for name, parameter in model.named_parameters()
    }
    hooks = []
    for name, module in model.named_modules():
        kind = kinds.get(name, "")
        if isinstance(module, Linear) and name != "lm_head":
            hooks.append(
                module.register_forward_pre_hook(lambda _, given, kind=kind: (rounded(given[0], kind),))
            )
    head = stored_type("", model.head_weight.shape, dtype, model.config)
    norm = model.get_submodule("model.norm")
    hooks.append(norm.register_forward_hook(lambda _, __, out: rounded(out, head)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def whole_greedy(policy: Policy, reference: parity.Reference) -> parity.Reference:
    """Answer a reference's prompts by whole passes, which hooks see; its logits are those of our new answers."""
    said, logits = [], []
    for ids in reference.prompts:
        found: list[int] = []
        while len(found) < reference.max_new_tokens and (not found or found[-1] not in policy.stop_ids):
            with torch.no_grad():
                found.append(int(policy.model.logits(torch.tensor([[*ids, *found]]))[0, -1].argmax()))
        said.append(tuple(found))
        logits.append(parity.next_logits(policy, ids, found))
    return replace(reference, said=said, logits=logits)


def why(dtype: str, num_prompts: int) -> None:
    """Print what of a file's differences is the rounding of its weights, and what the runtime adds."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        policy = PolicyConfig(init=str(STORIES), device="cpu")
        config = ExportConfig(
            policy=policy, to="gguf", dtype=dtype, out=str(home / "out"), num_prompts=num_prompts
        )  # pyright: ignore
        found = export(config)
        # The model whose weights are those of the file, in f32: it is exported as any other model.
        loaded = load_policy(policy, seed=0)
        file = home / "out/model.gguf"
        loaded.model.load_state_dict(dict(read_back(file, loaded.model)), strict=True)
        loaded.save(home / "dequantised")
        reference = parity.take(loaded, program.prompts(config, loaded), config.max_new_tokens)
        longest = max(map(len, reference.prompts)) + config.max_new_tokens
        beside = parity.ask(loaded, reference, "llama.cpp", file.resolve(), context=longest + 8)
        with inputs_rounded(loaded, dtype):
            alike = whole_greedy(loaded, reference)
        computed = parity.ask(loaded, alike, "llama.cpp", file.resolve(), context=longest + 8)
        policy = PolicyConfig(init=str(home / "dequantised"), device="cpu")
        exact = export(replace(config, policy=policy, dtype="f32", out=str(home / "exact")))
    for name, row in {
        "in llama.cpp, beside the model": found["runtime"],
        "its weights in our engine, beside the model": found["stored"],
        "in llama.cpp, beside its weights in our engine": beside,
        "in llama.cpp, beside its weights in our engine with inputs rounded as there": computed,
        "its weights as f32 in llama.cpp, beside our engine": exact["runtime"],
    }.items():
        count = f"{row['num_greedy_equal']}/{found['num_prompts']}"
        ties = f"{row['greedy_equal_to_ties']:.0%}"
        print(f"| {dtype}: {name} | {row['kl']:.1e} | {count} | {ties} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", default=[], help="NAME=FOLDER of a further model")
    parser.add_argument("--only", action="store_true", help="the named models alone")
    parser.add_argument("--types", nargs="*", default=["f32", "f16", "bf16", "q8_0"], help="of GGUF files")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--why", action="store_true", help="where the differences of q8_0 and bf16 come from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    program.PROMPTS = tuple(question for question, _ in texts(60))[: options.prompts]
    if options.why:
        for dtype in ("q8_0", "bf16", "f16"):
            why(dtype, options.prompts)
        return
    print(
        "| model | export | bytes | KL | KL of rounding | top-1 | greedy equal | to near ties | prompts | stops "
        "| verdict |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folders = {} if options.only else {"stories260k": STORIES}
        for kind, split in ({} if options.only else SPLITS).items():
            folders[kind] = Path(scratch) / kind
            make(kind, byte_pairs(split), options.steps).save(folders[kind])
        folders |= {name: Path(path) for name, path in (text.split("=", 1) for text in options.model)}
        exports = [("gguf", dtype) for dtype in options.types] + [("hf", "f32"), ("hf", "bf16")]
        for name, folder in folders.items():
            for to, dtype in exports:
                failed += [name] * (row(name, folder, to, dtype, options.prompts)["verdict"] != "passed")
    print(json.dumps({"failed": failed}))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
