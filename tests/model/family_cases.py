"""Tiny random models of every family, as transformers saves them, and what a stranger's folder is put through.

`python tests/model/family_cases.py` writes the table of docs/models.md; `test_families.py` runs the same checks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from whet.algo.logprobs import head_logits
from whet.algo.packing import TrainingSequence, pack
from whet.generate.engine import Engine, Request
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import score_micro_batch
from whet.model.attention import AttentionKind, Packed
from whet.model.transformer import LanguageModel
from whet.model.weights import load_model, save_model

CLOSE = 1e-4
LENGTHS = (1, 2, 17, 64, 129, 250)
VOCAB = 91

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 320,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BARE = {name: value for name, value in BASE.items() if name != "head_dim"}
"""Of families whose heads share the width."""
THETA = {"rope_type": "default", "rope_theta": 500.0}


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    """Return the rope of a kind, with a base that shows within 250 positions."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **more}}


YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0)
LLAMA3 = scaled(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24
)
TIED = {"tie_word_embeddings": True}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "rope_parameters": THETA}
GROUPED = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": THETA | {"partial_rotary_factor": 0.25},
}
LINEAR_MIXTURE = LINEAR | {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}
SPARSE = {name: value for name, value in BASE.items() if name != "intermediate_size"}
LFM = {name: value for name, value in BARE.items() if name != "rms_norm_eps"} | {
    "norm_eps": 1e-5,
    "hidden_size": 64,
    "layer_types": ["conv", "full_attention", "conv"],
    "rope_parameters": THETA,
}
GEMMA = BASE | TIED | {"query_pre_attn_scalar": 24, "sliding_window": 40}

GEMMA4 = (
    BASE
    | TIED
    | {
        "sliding_window": 40,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 5000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One tiny model.

    Attributes:
        family: Row of the table.
        model_type: transformers' name.
        config: Its arguments.
        models: Models that people use it for.
        rough: Size of the random weights: less where a long recurrence amplifies the last digits of float32.
    """

    family: str
    model_type: str
    config: dict[str, Any]
    models: str = ""
    rough: float = 0.2


CASES: dict[str, Case] = {
    "llama": Case(
        family="Llama",
        model_type="llama",
        config=BASE | LLAMA3,
        models="Llama 3.x, SmolLM2, R1-Distill-Llama",
    ),
    "llama-linear": Case(family="Llama", model_type="llama", config=BASE | scaled("linear", factor=3.0)),
    "llama-dynamic": Case(family="Llama", model_type="llama", config=BASE | scaled("dynamic", factor=3.0)),
    "llama-yarn": Case(family="Llama", model_type="llama", config=BASE | YARN),
    "qwen2": Case(
        family="Qwen2, Qwen2.5",
        model_type="qwen2",
        config=BASE | TIED | {"rope_parameters": THETA},
        models="Qwen2.5, R1-Distill-Qwen",
    ),
    "qwen2-window": Case(
        family="Qwen2, Qwen2.5",
        model_type="qwen2",
        config=BASE
        | {
            "use_sliding_window": True,
            "sliding_window": 40,
            "max_window_layers": 1,
            "rope_parameters": THETA,
        },
    ),
    "qwen3": Case(family="Qwen3", model_type="qwen3", config=BASE | YARN, models="Qwen3, R1-0528-Qwen3-8B"),
    "gpt2": Case(
        family="GPT-2",
        model_type="gpt2",
        config={"vocab_size": VOCAB, "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 320},
        models="GPT-2",
    ),
    "mistral": Case(
        family="Mistral",
        model_type="mistral",
        config=BASE | {"sliding_window": 40, "rope_parameters": THETA},
        models="Mistral 7B, Nemo, Small",
    ),
    "mistral-whole": Case(
        family="Mistral",
        model_type="mistral",
        config=BASE | {"sliding_window": None, "rope_parameters": THETA},
    ),
    "ministral": Case(
        family="Ministral",
        model_type="ministral",
        config=BASE
        | {
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"] + ["sliding_attention"],
        },
        models="Ministral 8B",
    ),
    "ministral3": Case(
        family="Ministral 3",
        model_type="ministral3",
        config=BASE
        | scaled(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=8.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1,
        ),
        models="Ministral 3 3B to 14B (text)",
    ),
    "phi3": Case(
        family="Phi-3, Phi-4",
        model_type="phi3",
        config=BASE | {"sliding_window": 40, "rope_parameters": THETA},
        models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    ),
    "phi3-longrope": Case(
        family="Phi-3, Phi-4",
        model_type="phi3",
        config=BASE
        | {
            "hidden_size": 64,  # its validation takes hidden_size / heads for head_dim
            "max_position_embeddings": 1200,
            "original_max_position_embeddings": 300,
            "tie_word_embeddings": True,
            **scaled(
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
                long_factor=[2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
            ),
        },
    ),
    "smollm3": Case(
        family="SmolLM3",
        model_type="smollm3",
        config=BARE | {"hidden_size": 64, "no_rope_layer_interval": 2, "rope_parameters": THETA},
        models="SmolLM3-3B",
    ),
    "granite": Case(
        family="Granite 3",
        model_type="granite",
        config=BARE
        | {
            "hidden_size": 64,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "rope_parameters": THETA,
            **TIED,
        },
        models="Granite 3.x dense",
    ),
    "gemma": Case(
        family="Gemma", model_type="gemma", config=BASE | TIED | {"rope_parameters": THETA}, models="Gemma 1"
    ),
    "gemma2": Case(
        family="Gemma 2",
        model_type="gemma2",
        config=GEMMA
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0, "rope_parameters": THETA},
        models="Gemma 2",
    ),
    "gemma3": Case(
        family="Gemma 3 (text)",
        model_type="gemma3_text",
        config=GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        models="Gemma 3 1B; the text part of 4B to 27B",
    ),
    "gemma4": Case(
        family="Gemma 4 (text)",
        model_type="gemma4_text",
        config=GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 4.0,
        },
        models="the text part of Gemma 4 E2B, E4B and 31B",
    ),
    "gemma4-small": Case(
        family="Gemma 4 (text)",
        model_type="gemma4_text",
        config=GEMMA4
        | {
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        },
    ),
    "olmo2": Case(
        family="OLMo 2",
        model_type="olmo2",
        config=BARE | {"hidden_size": 64, "rope_parameters": THETA},
        models="OLMo 2",
    ),
    "olmo3": Case(
        family="OLMo 3",
        model_type="olmo3",
        config=BARE
        | {
            "hidden_size": 64,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        models="OLMo 3",
    ),
    "glm": Case(
        family="GLM-4 (9B)",
        model_type="glm",
        config=BASE | {"rope_parameters": THETA | {"partial_rotary_factor": 0.5}, "pad_token_id": None},
        models="GLM-4-9B-0414's predecessor",
    ),
    "glm4": Case(
        family="GLM-4-0414",
        model_type="glm4",
        config=BASE | {"rope_parameters": THETA | {"partial_rotary_factor": 0.5}, "pad_token_id": None},
        models="GLM-4-0414, GLM-Z1",
    ),
    "qwen3_5": Case(
        family="Qwen3.5, Qwen3.6 dense (text)",
        model_type="qwen3_5_text",
        config=BASE | LINEAR,
        models="Qwen3.5 0.8B to 27B",
        rough=0.12,
    ),
    "qwen3_5_moe": Case(
        family="Qwen3.5, Qwen3.6 mixtures (text)",
        model_type="qwen3_5_moe_text",
        config=SPARSE | LINEAR_MIXTURE,
        models="Qwen3.5-35B-A3B to 397B-A17B",
        rough=0.12,
    ),
    "qwen3_next": Case(
        family="Qwen3-Next",
        model_type="qwen3_next",
        config=BASE | LINEAR_MIXTURE | {"mlp_only_layers": [1]},
        models="Qwen3-Next-80B-A3B",
        rough=0.12,
    ),
    "qwen3_moe": Case(
        family="Qwen3-MoE",
        model_type="qwen3_moe",
        config=BASE | MIXTURE | {"norm_topk_prob": True, "mlp_only_layers": [1], "num_experts": 6},
        models="Qwen3-30B-A3B",
    ),
    "mixtral": Case(
        family="Mixtral",
        model_type="mixtral",
        config=BASE | {"num_local_experts": 6, "num_experts_per_tok": 2, "rope_parameters": THETA},
        models="Mixtral 8x7B",
    ),
    "olmoe": Case(
        family="OLMoE",
        model_type="olmoe",
        config=BARE
        | {
            "hidden_size": 64,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "clip_qkv": 2.0,
            "rope_parameters": THETA,
        },
        models="OLMoE",
    ),
    "gpt_oss": Case(
        family="gpt-oss",
        model_type="gpt_oss",
        config=BASE
        | {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "intermediate_size": 48,
            **scaled("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, truncate=False),
        },
        models="gpt-oss 20B, 120B",
    ),
    "glm4_moe": Case(
        family="GLM-4.5",
        model_type="glm4_moe",
        config=BASE
        | GROUPED
        | {
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": THETA | {"partial_rotary_factor": 0.5},
        },
        models="GLM-4.5, 4.5-Air, 4.6",
    ),
    "deepseek_v3": Case(
        family="DeepSeek-V3",
        model_type="deepseek_v3",
        config=BARE
        | GROUPED
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            **scaled(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                beta_fast=8.0,
                mscale=1.0,
                mscale_all_dim=0.8,
            ),
        },
        models="DeepSeek-V3, R1, Moonlight",
    ),
    "lfm2": Case(
        family="LFM2",
        model_type="lfm2",
        config=LFM | {"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3},
        models="LFM2 and LFM2.5 350M to 2.6B",
    ),
    "lfm2-biased": Case(
        family="LFM2",
        model_type="lfm2",
        config=LFM
        | {
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe": Case(
        family="LFM2-MoE",
        model_type="lfm2_moe",
        config=LFM
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
        models="LFM2-8B-A1B",
    ),
    "moonlight": Case(
        family="DeepSeek-V3",
        model_type="deepseek_v3",
        config=BARE
        | GROUPED
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 8,
            "v_head_dim": 32,
            "rope_interleave": False,
            "rope_parameters": THETA,
        },
    ),
}


LEARNT = ("correction_bias", "expert_bias", "layer_scalar")
"""Buffers that a checkpoint has."""


def roughen(model: torch.nn.Module, size: float = 0.2) -> None:
    """Give every weight a size that shows in the logits; biases and norms leave their 0 and 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        tensors = [
            *model.named_parameters(),
            *(b for b in model.named_buffers() if b[0].endswith(LEARNT)),
        ]
        for _, parameter in tensors:
            noise = torch.empty(parameter.shape).normal_(0.0, size, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)


def make(case: Case, folder: Path) -> Any:
    """Save a random model as transformers does, and return it."""
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    with torch.random.fork_rng():
        torch.manual_seed(
            3
        )  # some vectors keep what they are drawn as, and an expert's choice may hang on a rounding
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    roughen(model, case.rough)
    model.save_pretrained(folder)
    return model


def their_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits [T, V] of one sequence."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def our_logits(
    model: LanguageModel, rows: Sequence[Sequence[int]], kind: AttentionKind = "exact"
) -> torch.Tensor:
    """Return whet's logits of packed rows, one below the other."""
    tokens = torch.tensor([token for row in rows for token in row])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    packed = Packed([len(row) for row in rows], torch.device("cpu"), kind)
    with torch.no_grad():
        hidden = model(tokens, positions, packed)
        cap = model.config.block.logit_cap
        valid = model.num_valid_tokens
        return head_logits(hidden, model.head_weight, temperature=1.0, num_valid=valid, cap=cap)[:, :VOCAB]


def ids_of(length: int, seed: int = 0) -> list[int]:
    """Draw token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def check_load(reference: Any, model: LanguageModel) -> float:
    """Return the largest difference of logits over all lengths, packed together, both kinds of attention."""
    rows = [ids_of(length, seed=length) for length in LENGTHS]
    expected = torch.cat([their_logits(reference, row) for row in rows])
    assert expected.std() > 0.3, "logits too small to show a difference"
    gaps = (our_logits(model, rows, kind) - expected for kind in ("exact", "fast"))
    return max(float(gap.abs().max()) for gap in gaps)


def check_save(model: LanguageModel, folder: Path) -> float:
    """Save a model, load it with transformers, and return the largest difference of logits."""
    save_model(model, folder, bos_id=1, eos_ids=(2,))
    options: dict[str, Any] = {"output_loading_info": True, "attn_implementation": "eager"}
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    theirs, info = loaded
    faults = {key: value for key, value in info.items() if value}
    assert not faults, f"transformers complains about our folder: {faults}"
    row = ids_of(200)
    gap = float((our_logits(model, [row]) - their_logits(theirs.eval(), row)).abs().max())
    again, config = load_model(folder)
    assert config == model.config
    for (name, ours), (_, loaded) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(ours, loaded), name
    return gap


def check_greedy(reference: Any, model: LanguageModel, count: int = 32) -> bool:
    """Say whether greedy generation from prompts of two lengths, decoded together, equals transformers'.

    The shorter one grows past every window (40) and every rope's first context (64).
    """
    prompts = [ids_of(35, seed=5), ids_of(70, seed=70)]
    requests = [Request(prompt_ids=tuple(prompt), seeds=(0,)) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_new_tokens=count)
    for prompt, (ours,) in zip(prompts, Engine(model, stop_ids=()).generate(requests, params), strict=True):
        ids = prompt + list(ours.ids)
        logits = their_logits(reference, ids)[len(prompt) - 1 : -1]
        # The token taken is the best one, or as good as the best to the last digits of float32.
        taken = logits.gather(1, torch.tensor(ours.ids)[:, None])[:, 0]
        if not bool((taken >= logits.amax(-1) - CLOSE).all()):
            return False
    return True


def check_gradients(reference: Any, model: LanguageModel) -> float:
    """Return the largest difference of gradients over the largest gradient, of all parameters with one name in both.

    Two sequences that share a prefix, packed as a run packs them, against each of them alone.
    """
    prompt, ends = ids_of(70, seed=1), [ids_of(60, seed=2), ids_of(33, seed=3)]
    device = torch.device("cpu")
    sequences = [TrainingSequence(prompt_ids=tuple(prompt), completion_ids=tuple(end)) for end in ends]
    (micro,) = pack(sequences, token_budget=1000, device=device).micro_batches
    assert any(segment.shared for segment in micro.segments)
    for module in (reference, model):
        module.zero_grad()
    score_micro_batch(model, micro)[0].sum().backward()
    for end in ends:
        logits = reference(torch.tensor([prompt + end]), use_cache=False).logits[0].float()
        chosen = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(end)[:, None])
        chosen.sum().backward()
    theirs, worst, seen = dict(reference.named_parameters()), 0.0, 0
    for name, parameter in model.named_parameters():
        other = theirs.get(name)
        if other is None or other.grad is None or parameter.grad is None or other.shape != parameter.shape:
            continue
        seen += 1
        first = int("embed_tokens" in name)  # transformers learns nothing for the padding token, id 0
        gap = (parameter.grad - other.grad)[first:].abs().max() / other.grad.abs().max().clamp(min=1e-3)
        worst = max(worst, float(gap))
    assert seen > 10
    return worst


def train(model: LanguageModel, *, is_rl: bool, steps: int = 2) -> float:
    """Train for some steps; return the largest |log ratio| of trainer and sampler over all tokens and steps.

    Samples of one prompt share it in the packed batch, as in a run; supervised steps have no sampler, and 0.
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    prompts, worst = [ids_of(19, seed=1), ids_of(50, seed=2)], 0.0
    for step in range(steps):
        requests = [Request(prompt_ids=tuple(p), seeds=tuple(range(8 * step, 8 * step + 3))) for p in prompts]
        # The first samples are long enough for every window and tile; the others are of weights that have moved.
        params = SamplingParams(max_new_tokens=40 if is_rl and step == 0 else 10)
        sampled = Engine(model, stop_ids=(2,)).generate(requests, params)
        sequences = [
            TrainingSequence(
                prompt_ids=request.prompt_ids,
                completion_ids=completion.ids,
                sampler_logprobs=completion.logprobs,
                advantage=float(place % 2) - 0.5,
            )
            for request, group in zip(requests, sampled, strict=True)
            for place, completion in enumerate(group)
        ]
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for micro in pack(sequences, token_budget=400, device=torch.device("cpu")).micro_batches:
            logprobs, _ = score_micro_batch(model, micro)
            gap = logprobs - micro.sampler_logprobs_M
            weight = micro.advantages_M if is_rl else torch.ones_like(logprobs)
            worst = max(worst, float(gap.detach().abs().max()))
            (-(torch.exp(gap) if is_rl else logprobs) * weight).mean().backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        assert torch.stack(norms).isfinite().all()
        optimizer.step()
        changed = zip(before, model.parameters(), strict=True)
        assert any(not torch.equal(old, new) for old, new in changed), "nothing was learnt"
    return worst


def path_of(model: LanguageModel) -> str:
    """Say what computes a decoding step on a CPU with a compiler and kernels that are fast enough."""
    engine = Engine(model, stop_ids=())
    with engine.session(engine.room(2, 8, 8)):
        if engine._layers is not None:
            return "one compiled call"
        return "compiled products and attention" if has_tiles(engine) else "compiled products"


def has_tiles(engine: Engine) -> bool:
    """Say whether the engine's cache is the compiled attention's."""
    return engine._cache is not None and engine._cache.is_tiled


COLUMNS = ("logits", "greedy text", "SFT", "RL", "saved")
HEADER = (
    f"| family | `model_type` | models | {' | '.join(COLUMNS)} | a CPU's decoding step |\n"
    f"|---|---|---|{'---|' * (len(COLUMNS) + 1)}"
)


def measure(name: str, folder: Path) -> str:
    """Put a case through everything and return its line of the table.

    Of a family's other options, greedy text and SFT are left out: logits equal transformers', and the ratio of sampler
    and trainer is exactly 1.
    """
    case = CASES[name]
    reference = make(case, folder / "theirs")
    model, _ = load_model(folder / "theirs")
    path = path_of(model)
    results = [
        check_load(reference, model) < CLOSE,
        not case.models or check_greedy(reference, model),
        not case.models or train(model, is_rl=False, steps=1) == 0.0,
        train(model, is_rl=True) == 0.0,
        check_save(model, folder / "trained") < CLOSE,
    ]
    marks = " | ".join("yes" if is_right else "NO" for is_right in results)
    return f"| {case.family} | `{case.model_type}` | {case.models} | {marks} | {path} |"


def main() -> None:
    """Write the table of docs/models.md."""
    page = Path(__file__).parents[2] / "docs" / "models.md"
    begin, end = "<!-- table -->\n", "<!-- end of table -->"
    text = page.read_text()
    head, _, rest = text.partition(begin)
    lines = []
    for name, case in CASES.items():
        if case.models:  # the first case of a family; the others are its options, which the tests run
            with tempfile.TemporaryDirectory() as folder:
                lines.append(measure(name, Path(folder)))
    table = "\n".join([HEADER, *lines])
    page.write_text(f"{head}{begin}{table}\n{end}{rest.partition(end)[2]}")


def stored_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json."""
    return json.loads((folder / "config.json").read_text())


if __name__ == "__main__":
    main()
