"""The same pairs through TRL's own loss methods, on transformers' models with padding, and through whet's step.

Both compute in float32; 1e-5 of a tensor's largest gradient is what two float32 forward passes differ by.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late import Late

from whet.generate.policy import Policy, PolicyConfig
from whet.generate.reward_model import RewardModel, conversation_ids
from whet.model.text.tokenizer import Tokenizer
from whet.model.weights import as_reward_model, load_model
from whet.schema import ResponseSchema
from whet.train.data.pairs import Pair, singles, with_partners
from whet.train.dpo import DPOConfig, train_step, with_reference
from whet.train.optim.step import OptimConfig
from whet.types import UserError

peer: Any = Late("trl_peer", reason="TRL is not installed: pip install 'whet-rl[peers]'")
# Importing TRL takes ten seconds of every process.
pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore")]

OPTIM = OptimConfig(token_budget=40)
PAIRS_PER_STEP = 5


def make_pairs(*, chosen_length: int = 0, prompt_length: int = 0) -> list[Pair]:
    """Pairs of odd lengths, or of one length where a loss of TRL's depends on it."""
    generator = torch.Generator().manual_seed(3)

    def ids(low: int, high: int) -> tuple[int, ...]:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(0, peer.PAD, (count,), generator=generator).tolist())

    return [
        Pair(
            uid=str(number),
            prompt="",
            chosen="",
            rejected="",
            prompt_ids=ids(prompt_length or 1, prompt_length + 1 if prompt_length else 7),
            chosen_ids=ids(chosen_length or 1, chosen_length + 1 if chosen_length else 12),
            rejected_ids=ids(1, 12),
            margin=0.1 * number,
        )
        for number in range(PAIRS_PER_STEP)
    ]


@dataclass(frozen=True)
class Start:
    """A model in both programs, its reference in ours, and the pairs' reference log-probabilities."""

    model: Any
    policy: Policy

    def referred(self, pairs: list[Pair]) -> list[Pair]:
        return with_reference(self.policy, pairs, OPTIM)

    def nudged(self) -> Policy:
        """The policy with the weights of `model`, which is not the reference any more."""
        with torch.no_grad():
            theirs = dict(self.model.named_parameters())
            for name, parameter in self.policy.model.named_parameters():
                parameter.copy_(theirs[name])
        return self.policy


@pytest.fixture
def start(tmp_path: Path) -> Start:
    reference, model = peer.tiny_model(), peer.tiny_model()
    reference.save_pretrained(tmp_path)
    peer.nudge(model, 7)
    loaded, _ = load_model(tmp_path)
    tokenizer = Tokenizer.characters("0123456789+=,", ResponseSchema().tags)
    return Start(model, Policy(loaded, tokenizer, ResponseSchema()))


def padded(
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention and completion mask of (prompt, completion), padded on the right."""
    width = max(len(a) + len(b) for a, b in rows)
    ids = torch.full((len(rows), width), peer.PAD)
    seen, trained = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(rows):
        both = len(prompt) + len(completion)
        ids[row, :both] = torch.tensor([*prompt, *completion])
        seen[row, :both] = 1
        trained[row, len(prompt) : both] = 1
    return ids, seen, trained


def scored(model: Any) -> Any:
    """What TRL's patched models return: log-probabilities of the labels from transformers' logits."""

    def run(*, input_ids: Any, attention_mask: Any, labels: Any, **_: Any) -> Any:
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        wanted = labels[:, 1:]
        logps = logits.log_softmax(-1).gather(2, wanted.clamp(min=0)[..., None])[..., 0] * (wanted != -100)
        zeros = torch.zeros_like(logps)
        return SimpleNamespace(log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    return run


def trainer(**options: Any) -> Any:
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    shared = {"model": torch.nn.Identity(), "accelerator": accelerator, "aux_loss_enabled": False}
    counted = {"_metrics": defaultdict(lambda: defaultdict(list)), "_total_train_tokens": 0, "_tp_size": 1}
    return SimpleNamespace(**shared, **counted, **options)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(loss: torch.Tensor, model: Any, policy: Policy, pairs: list[Pair], config: DPOConfig) -> None:
    """Backpropagate TRL's loss in its model, ours in the policy: equal loss, equal gradients."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    expected = gradients(model)
    result = train_step(policy, pairs, config)
    found = gradients(policy.model)
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert found.keys() == expected.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    assert scale > 1e-3
    assert max(float((found[name] - expected[name]).abs().max()) for name in found) < 1e-5 * scale


def make_config(**changes: Any) -> DPOConfig:
    policy = PolicyConfig(tokenizer="bytes")
    return replace(DPOConfig(out="unused", policy=policy, optim=OPTIM), **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sigmoid", {}),
        ("ipo", {"loss": "ipo", "per_token": True}),
        ("hinge", {"loss": "hinge"}),
        ("robust", {"loss": "robust", "label_smoothing": 0.1}),
        ("apo_zero", {"loss": "apo_zero"}),
        ("apo_down", {"loss": "apo_down"}),
        ("sigmoid_norm", {"per_token": True}),
    ],
)
def test_pairs(name: str, changes: dict[str, Any], start: Start) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    pairs = start.referred(make_pairs())
    ids, seen, trained = padded(
        [(p.prompt_ids, p.chosen_ids) for p in pairs] + [(p.prompt_ids, p.rejected_ids) for p in pairs]
    )
    theirs = trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_types=[name],
        loss_weights=[1.0],
        beta=0.3,
        label_smoothing=changes.get("label_smoothing", 0.0),
    )
    inputs = {"input_ids": ids, "attention_mask": seen, "completion_mask": trained}
    inputs["ref_chosen_logps"] = torch.tensor([pair.ref_chosen_logprob for pair in pairs])
    inputs["ref_rejected_logps"] = torch.tensor([pair.ref_rejected_logprob for pair in pairs])
    loss = DPOTrainer._compute_loss(theirs, scored(start.model), inputs, False)
    compare(loss, start.model, start.nudged(), pairs, make_config(beta=0.3, **changes))


@pytest.mark.parametrize("order", [0, 4])
def test_kto(order: int, start: Start) -> None:
    """Unequal numbers of both labels, weighted; the mismatched completions are ours, in TRL's batch."""
    from trl.trainer.kto_trainer import KTOTrainer

    pairs = make_pairs()
    mixed = [*singles(pairs[:3]), replace(pairs[3], rejected_ids=()), replace(pairs[4], rejected_ids=())]
    completions = start.referred(with_partners(mixed[order:] + mixed[:order], 64))
    rows = [(p.prompt_ids, p.chosen_ids or p.rejected_ids) for p in completions]
    ids, seen, trained = padded(rows)
    other, other_seen, other_trained = padded([(p.prompt_ids, p.kl_ids) for p in completions])
    inputs = {
        "input_ids": ids,
        "attention_mask": seen,
        "completion_mask": trained,
        "KL_input_ids": other,
        "KL_attention_mask": other_seen,
        "KL_completion_mask": other_trained,
        "label": torch.tensor([bool(p.chosen_ids) for p in completions]),
        "ref_logps": torch.tensor([p.ref_chosen_logprob + p.ref_rejected_logprob for p in completions]),
        "ref_KL_logps": torch.tensor([p.ref_kl_logprob for p in completions]),
    }
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.7}
    options = {"calculate_KL": True, "precompute_ref_logps": True, "loss_type": "kto", "beta": 0.3}
    theirs = trainer(**options, **weights)
    theirs._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, theirs)
    loss = KTOTrainer._compute_loss(theirs, scored(start.model), inputs, False)
    config = make_config(loss="kto", beta=0.3, **weights)
    policy = start.nudged()
    compare(loss, start.model, policy, completions, config)
    metrics, named = train_step(policy, completions, config).metrics, theirs._metrics["train"]
    for ours, name in (("kl", "kl"), ("chosen_reward", "rewards/chosen"), ("margin", "rewards/margins")):
        assert metrics[f"dpo/{ours}"] == pytest.approx(named[name][0], rel=1e-4)


def test_orpo(start: Start) -> None:
    """Prompts of one token and chosen completions of one length: then TRL's first term is the paper's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    pairs = make_pairs(chosen_length=6, prompt_length=1)
    batch: dict[str, Any] = {}
    for side in ("chosen", "rejected"):
        ids, seen, trained = padded([(p.prompt_ids, getattr(p, f"{side}_ids")) for p in pairs])
        batch |= {f"{side}_input_ids": ids, f"{side}_attention_mask": seen}
        batch[f"{side}_labels"] = ids.masked_fill(trained == 0, -100)
    theirs = trainer(beta=0.3, is_encoder_decoder=False, padding_value=peer.PAD)
    theirs.concatenated_inputs, theirs.get_batch_logps = (
        ORPOTrainer.concatenated_inputs,
        ORPOTrainer.get_batch_logps,
    )
    theirs.concatenated_forward = partial(ORPOTrainer.concatenated_forward, theirs)
    theirs.odds_ratio_loss = partial(ORPOTrainer.odds_ratio_loss, theirs)
    run = lambda tokens, **kind: start.model(input_ids=tokens, **kind)  # noqa: E731
    loss, _ = ORPOTrainer.get_batch_loss_metrics(theirs, run, batch)
    compare(loss, start.model, start.nudged(), pairs, make_config(loss="orpo", beta=0.3))


@pytest.fixture
def scorers(start: Start, tmp_path: Path) -> tuple[Any, Policy, Path]:
    """A reward model of ours with a head that is not 0, as transformers loads it, and its folder."""
    from transformers import AutoModelForSequenceClassification

    policy = start.nudged()
    policy.model = as_reward_model(policy.model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        head = policy.model.get_parameter("score.weight")
        head.copy_(torch.randn(head.shape, generator=generator))
    folder = tmp_path / "reward"
    policy.save(folder)
    return AutoModelForSequenceClassification.from_pretrained(folder), policy, folder


def test_reward_model(scorers: tuple[Any, Policy, Path]) -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    model, policy, _ = scorers
    pairs = make_pairs()
    ids, seen, _ = padded(
        [(p.prompt_ids, p.chosen_ids) for p in pairs] + [(p.prompt_ids, p.rejected_ids) for p in pairs]
    )
    # Padding of ours is <pad>, 0, which transformers looks for; the ids of the pairs are made without it.
    ids = torch.where(seen == 1, torch.where(ids == 0, 5, ids), 0)
    pairs = [
        replace(pair, **{
            name: tuple(index or 5 for index in getattr(pair, name))
            for name in ("prompt_ids", "chosen_ids", "rejected_ids")
        })
        for pair in pairs
    ]  # fmt: skip
    theirs = trainer(args=SimpleNamespace(center_rewards_coefficient=0.05))
    theirs.model = model
    inputs = {"input_ids": ids, "attention_mask": seen, "margin": torch.tensor([p.margin for p in pairs])}
    loss = RewardTrainer.compute_loss(theirs, model, inputs)
    compare(loss, model, policy, pairs, make_config(loss="reward", center_coef=0.05))


def test_scores_are_those_of_transformers(scorers: tuple[Any, Policy, Path]) -> None:
    model, policy, folder = scorers
    ours = RewardModel(str(folder), device=torch.device("cpu"))
    replies = [
        ([{"role": "user", "content": f"{n}+{n}="}], f"<think></think>{2 * n}"[: 9 + n]) for n in range(6)
    ]
    found = ours.score(replies)
    for (messages, reply), score in zip(replies, found, strict=True):
        ids = conversation_ids(policy.tokenizer, messages, reply)
        with torch.no_grad():
            alone = float(model(input_ids=torch.tensor([ids])).logits[0, 0])
        assert score == pytest.approx(alone, abs=1e-4)
    assert len({round(score or 0.0, 3) for score in found}) == 6
    with pytest.raises(UserError, match="a reward model, which scores texts and writes none"):
        load_model(folder)


def test_a_reward_model_of_transformers_is_loaded(start: Start, tmp_path: Path) -> None:
    """Its padding is a token that texts end with: the score is of the last other token, as there."""
    from transformers import Qwen2ForSequenceClassification

    config = start.model.config
    config.num_labels, config.pad_token_id = 1, 7
    theirs = Qwen2ForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    start.policy.tokenizer.save(tmp_path / "theirs")
    ours = RewardModel(str(tmp_path / "theirs"), device=torch.device("cpu"))
    # 0 is id 7 of this tokenizer.
    replies = [([{"role": "user", "content": "1+9="}], text) for text in ("10", "1", "1000", "12")]
    rows = [conversation_ids(ours.tokenizer, *reply) for reply in replies]
    assert rows[0][-1] == 7
    for ids, score in zip(rows, ours.score(replies), strict=True):
        with torch.no_grad():
            alone = float(theirs(input_ids=torch.tensor([ids])).logits[0, 0])
        assert score == pytest.approx(alone, abs=1e-4)
    with pytest.raises(UserError, match="a language model; expected a reward model"):
        RewardModel(str(tmp_path), device=torch.device("cpu"))
