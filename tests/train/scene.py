"""Where the matrix starts: its cases, a tiny policy, and off-policy groups with every oddity of real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from unittest.mock import patch

import torch
from padded import SEEN, score_rows

from whet.algo.config import AlgoConfig, OffPolicyConfig, ValueConfig
from whet.algo.corrections import Correction
from whet.algo.kept import encode_kept
from whet.generate.policy import Policy
from whet.model.config import ModelConfig
from whet.model.families import from_hf
from whet.model.text.tokenizer import Tokenizer
from whet.model.vision.ids import key_of
from whet.model.vision.store import Picture
from whet.model.weights import build_model
from whet.recipes.rl import ALGORITHMS
from whet.schema import ResponseSchema
from whet.train.optim.step import OptimConfig
from whet.types import Group, Problem, Sample

TEMPERATURE, MAX_LENGTH, GROUP_SIZE, SEED = 0.7, 12, 4, 2
REWARD_WEIGHTS = {"correct": 1.0, "format": 0.5}
LR = 0.01
# A large eps makes AdamW's first step depend on the size of the gradient, not on its sign alone.
OPTIM = OptimConfig(lr=LR, eps=0.3, max_grad_norm=2.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of one row of the matrix."""

    algo: AlgoConfig
    off_policy: OffPolicyConfig = OffPolicyConfig()
    value: ValueConfig = ValueConfig(lr=LR)
    is_filtered: bool = False
    has_images: bool = False


def _corrected(correction: Correction, low: float | None, high: float | None, **algo: object) -> Case:
    """Decoupled PPO with a correction, and a second update so that its ratio leaves 1."""
    return Case(
        algo=AlgoConfig(aggregation="sequence_mean", uninformative="keep", num_minibatches=2, **algo),
        off_policy=OffPolicyConfig(proximal="recomputed", correction=correction, low=low, high=high),
    )


def _cases() -> dict[str, Case]:
    grpo, ppo = ALGORITHMS["grpo"](), ALGORITHMS["ppo"]()
    variants = {
        "kl k1_reward": replace(grpo, kl="k1_reward", kl_coef=0.3),
        "kl log": replace(grpo, kl="log"),
        "kl k2_loss": replace(grpo, kl="k2_loss", kl_coef=0.3),
        "kl k3_loss": replace(grpo, kl="k3_loss", kl_coef=0.3),
        "kl k3_unbiased": replace(grpo, kl="k3_unbiased", kl_coef=0.3),
        "entropy bonus": replace(grpo, entropy_coef=0.05),
        "entropy top 20 %": replace(ALGORITHMS["dapo"](), entropy_top_share=0.2),
        "dual clip": replace(grpo, dual_clip=1.3),
        "overlong filter": AlgoConfig(overlong="filter"),
        "prompt mean": AlgoConfig(aggregation="prompt_mean"),
        "batch scale": AlgoConfig(scale="batch"),
        "mean scale (MaxRL)": AlgoConfig(scale="mean"),
        "population std, clipped": AlgoConfig(std_ddof=0, advantage_clip=0.8),
        "2 x 2 updates": replace(grpo, num_minibatches=2, num_epochs=2),
        "gspo 2 x 2 updates": replace(ALGORITHMS["gspo"](), num_minibatches=2, num_epochs=2),
        "everything": AlgoConfig(
            whiten=True,
            kl="k3_unbiased",
            kl_coef=0.2,
            entropy_coef=0.03,
            entropy_top_share=0.5,
            overlong="filter",
            aggregation="prompt_mean",
            dual_clip=1.4,
            num_minibatches=2,
            num_epochs=2,
        ),
    }
    cases = {name: Case(algo=build()) for name, build in ALGORITHMS.items()}
    cases |= {name: Case(algo=algo) for name, algo in variants.items()}
    cases |= {
        "decoupled": _corrected("none", None, None),
        "token_truncate": _corrected("token_truncate", None, 1.2),
        "token_mask": _corrected("token_mask", 0.7, 1.3),
        "sequence_truncate": _corrected("sequence_truncate", None, 1.5, ratio="sequence"),
        "sequence_mask": _corrected("sequence_mask", 0.4, 2.0),
        "geometric_mask": _corrected("geometric_mask", 0.9, 1.1, kl="k1_reward", kl_coef=0.1),
        "k3_mask": _corrected("k3_mask", None, 0.05, whiten=True),
    }
    cases["ppo gae, kl in reward"] = Case(
        algo=replace(ppo, kl="k1_reward", kl_coef=0.1),
        off_policy=OffPolicyConfig(proximal="recomputed"),
        value=ValueConfig(lr=LR / 2, gamma=0.95, lam=0.8, clip=0.02),
    )
    for name in ("grpo", "everything", "decoupled", "k3_mask", "kl k3_loss", "ppo gae, kl in reward"):
        cases[f"filters: {name}"] = replace(cases[name], is_filtered=True)
    for name in ("grpo", "everything"):
        cases[f"images: {name}"] = replace(cases[name], has_images=True)
    return cases


CASES = _cases()


@contextmanager
def islands_as(dtype: torch.dtype) -> Iterator[None]:
    """Lift the model's float32 islands (norms, rotary, softmax) to float64 where the model is in float64."""
    lifted = torch.Tensor.double if dtype == torch.float64 else torch.Tensor.float
    with patch.object(torch.Tensor, "float", lifted):
        yield


def seeing(shape: ModelConfig, token: int) -> ModelConfig:
    """Give the decoder the eyes of a LLaVA: a tower of CLIP's shape, 4 tokens an image."""
    text = {"model_type": "llama", "vocab_size": shape.vocab_size, "hidden_size": 16, "intermediate_size": 24}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    tower = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "patch_size": 4}
    tower |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "projection_dim": 8}
    told = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": token,
    }
    text |= {"max_position_embeddings": 64, "rms_norm_eps": shape.norm_eps, "rope_theta": shape.rope_theta}
    return from_hf(told | {"text_config": text, "vision_config": tower, "tie_word_embeddings": True})


def images_of(policy: Policy) -> list[tuple[int, ...]]:
    """Ids of two images, which the definition reads by what the model's tower makes of them."""
    store = policy.model.images
    assert store is not None
    pixels = torch.randint(
        0, 256, (2, 8, 8, 3), generator=torch.Generator().manual_seed(3), dtype=torch.uint8
    ).numpy()
    found = [store.add(Picture.of(picture.tobytes(), picture)) for picture in pixels]
    with torch.no_grad():
        for ids in found:
            (features,) = store.features([key_of(ids[0])], policy.model.visual)
            SEEN.update(zip(ids, features.tokens_ID, strict=True))
    return found


def make_policy(dtype: torch.dtype = torch.float64, *, has_images: bool = False) -> Policy:
    """A two-layer model with clearly non-uniform outputs; one that sees has its tower frozen."""
    marks = [*ResponseSchema().tags, *(["<image>"] if has_images else [])]
    tokenizer = Tokenizer.characters("0123456789+=,", marks)
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_positions=64,
    )
    if has_images:
        shape = seeing(shape, tokenizer.encode("<image>")[0])
    model = build_model(shape).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    policy = Policy(model.to(dtype), tokenizer, ResponseSchema())
    if has_images:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith("visual."))
        images_of(policy)
    return policy


@torch.no_grad()
def nudge(module: torch.nn.Module, seed: int) -> None:
    """Move the weights a little, so that ratios leave 1, the KL to the old weights 0, and the critic's head 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(module.named_parameters()):
        if "visual." not in name:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


@cache
def make_groups(is_filtered: bool = False, has_images: bool = False) -> tuple[Group, ...]:
    """Off-policy groups of odd lengths, with unscorable, truncated and zero-advantage samples, and equal rewards.

    With filters, every token was drawn from itself and a random set of others, of any size.
    """
    policy, generator = make_policy(has_images=has_images), torch.Generator().manual_seed(1)
    shown = images_of(policy) if has_images else []
    filters = torch.Generator().manual_seed(2)
    nudge(policy.model, 7)

    def ids(low: int, high: int) -> tuple[int, ...]:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(0, policy.tokenizer.vocab_size, (count,), generator=generator).tolist())

    # Rewards of the two kinds; the second group's last two samples have the mean of their group, but for rounding.
    scores = [
        [(1, 1), (0, 1), (0, 0), (1, 0)],
        [(0.55, 0), (0.05, 0), (0.3, 0), (0, 0.6)],
        [(0, 1)] * GROUP_SIZE,
    ]
    scores += [
        [(1, 1), (1, 1), (0, 1), (0, 0)],
        [(0, 1), (0, 0), (0, 1), (1, 0)],
        [(0, 0), (1, 1), (0, 1), (0, 1)],
    ]
    groups = []
    for number, row in enumerate(scores):
        prompt, samples = ids(1, 9), []
        # No image, one, the other, or both, amid the text.
        for place, image in enumerate(shown):
            if (number + 1) >> place & 1:
                prompt = (*prompt[: place + 1], *image, *prompt[place + 1 :])

        def kept(completion: Sequence[int]) -> tuple[str, ...]:
            size, width = policy.tokenizer.vocab_size, -(-policy.tokenizer.vocab_size // 16) * 16
            chance = torch.rand(len(completion), 1, generator=filters)
            sets = torch.rand(len(completion), width, generator=filters) < chance
            sets[:, size:] = False
            sets[range(len(completion)), completion] = True
            return tuple(encode_kept(sets)) if is_filtered else ()

        for index, pair in enumerate(row):
            rewards = dict(zip(REWARD_WEIGHTS, map(float, pair), strict=True))
            is_lost = (number, index) == (0, 0)
            completion = ids(1, MAX_LENGTH)
            samples.append(
                Sample(
                    uid=str(number),
                    index=index,
                    prompt_ids=prompt,
                    completion_ids=completion,
                    sampler_logprobs=(),
                    kept=kept(completion),
                    text="",
                    finish_reason="length" if (number, index) in ((1, 0), (4, 3)) else "stop",
                    rewards=rewards,
                    reward=None if is_lost else sum(w * rewards[n] for n, w in REWARD_WEIGHTS.items()),
                )
            )
        problem = Problem(uid=str(number), task="arithmetic", prompt=f"{number}+5=", answer=f"{number + 5}")
        groups.append(Group(problem=problem, samples=tuple(samples)))
    everyone = [sample for group in groups for sample in group.samples]
    with torch.no_grad():
        weights = dict(policy.model.named_parameters())
        logps, _ = score_rows(policy.model.config, weights, everyone, TEMPERATURE)
    drawn = iter(logps)

    def sampled(sample: Sample) -> Sample:
        logp_T = next(drawn)
        noise_T = 0.3 * torch.randn(logp_T.shape, generator=generator, dtype=torch.float64)
        return replace(sample, sampler_logprobs=tuple((logp_T + noise_T).tolist()))

    return tuple(replace(group, samples=tuple(map(sampled, group.samples))) for group in groups)


def shuffled(groups: Sequence[Group]) -> list[Group]:
    """Other orders of groups, and of samples in them."""
    generator = torch.Generator().manual_seed(5)

    def permuted(items: Sequence) -> list:
        return [items[place] for place in torch.randperm(len(items), generator=generator).tolist()]

    return permuted([replace(group, samples=tuple(permuted(group.samples))) for group in groups])


def shares(groups: Sequence[Group], rank: int, mode: int) -> list[Group]:
    """Return a rank's groups: even shares, uneven ones, or all of them on one of two ranks."""
    if mode == 0:
        return list(groups[rank::2])
    end = len(groups) - 2 if mode == 1 else len(groups)
    return list((groups[:end], groups[end:])[rank])
