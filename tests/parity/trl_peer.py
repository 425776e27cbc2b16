"""TRL's own GRPOTrainer on a tiny random model: batches and settings go in, its real methods run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from whet.types import Sample

# As many as whet's tokenizer of digits has: whet never scores rows of the head beyond those.
VOCAB = 20
PAD = VOCAB - 2


def tiny_model(seed: int = 0) -> Qwen2ForCausalLM:
    """A two-layer Qwen2 with clearly non-uniform outputs."""
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attn_implementation="eager",
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def nudge(model: torch.nn.Module, seed: int) -> None:
    """Move the weights a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def make_trainer(
    model: Qwen2ForCausalLM,
    num_rows: int,
    group_size: int,
    max_length: int,
    reward_funcs: Sequence[Callable[..., list[float | None]]] = (),
    **settings: Any,
) -> GRPOTrainer:
    """Build the trainer on the CPU, in float32; `settings` are fields of GRPOConfig."""
    words = {str(number): number for number in range(PAD)} | {"<pad>": PAD, "<eos>": PAD + 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        activation_checkpointing=False,
        per_device_train_batch_size=num_rows,
        num_generations=group_size,
        max_completion_length=max_length,
        **settings,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=list(reward_funcs) or [lambda **columns: [0.0] * num_rows],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["1"] * num_rows}),
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def padded_inputs(samples: Sequence[Sample], advantages: Sequence[float]) -> dict[str, torch.Tensor]:
    """Return a generation batch as TRL lays it out: prompts padded left, completions right."""
    longest = max(len(s.prompt_ids) for s in samples), max(len(s.completion_ids) for s in samples)

    def left(row: Sequence[int], fill: int) -> list[int]:
        return [fill] * (longest[0] - len(row)) + list(row)

    def right(row: Sequence[Any], fill: float) -> list[Any]:
        return list(row) + [fill] * (longest[1] - len(row))

    return {
        "prompt_ids": torch.tensor([left(s.prompt_ids, PAD) for s in samples]),
        "prompt_mask": torch.tensor([left([1] * len(s.prompt_ids), 0) for s in samples]),
        "completion_ids": torch.tensor([right(s.completion_ids, PAD) for s in samples]),
        "completion_mask": torch.tensor([right([1] * len(s.completion_ids), 0) for s in samples]),
        "old_per_token_logps": torch.tensor([right(s.sampler_logprobs, 0.0) for s in samples]),
        "advantages": torch.tensor(advantages, dtype=torch.float32),
        "num_items_in_batch": torch.tensor(float(sum(len(s.completion_ids) for s in samples))),
    }


def score(trainer: GRPOTrainer, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return log-probabilities of the completions by TRL's own method."""
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        width = inputs["completion_ids"].shape[1]
        return trainer._get_per_token_logps_and_entropies(trainer.model, tokens, seen, width)[0]


def with_sampler(trainer: GRPOTrainer, inputs: dict[str, torch.Tensor], seed: int) -> None:
    """Let the samples come from a policy some tenths of a nat away."""
    logps = score(trainer, inputs)
    noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(seed))
    inputs["old_per_token_logps"] = logps + 0.3 * noise


def with_reference(trainer: GRPOTrainer, inputs: dict[str, torch.Tensor], model: Qwen2ForCausalLM) -> None:
    """Score the batch under a reference's weights, put into the trainer's model for the moment."""
    present = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(model.state_dict())
    inputs["ref_per_token_logps"] = score(trainer, inputs)
    trainer.model.load_state_dict(present)


def loss_and_gradients(
    trainer: GRPOTrainer, inputs: dict[str, torch.Tensor], num_micro: int = 1
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Run TRL's loss over a generation batch in micro-batches, as gradient accumulation does.

    Returns:
        Summed loss, summed gradients by name, and the metrics as TRL's log averages them.
    """
    trainer.current_gradient_accumulation_steps = num_micro
    trainer.args.steps_per_generation = num_micro
    trainer._metrics["train"].clear()
    trainer.model.zero_grad(set_to_none=True)
    rows = inputs["prompt_ids"].shape[0]
    total = 0.0
    for start in range(0, rows, rows // num_micro):
        part = {
            name: whole if num_micro == 1 or whole.dim() == 0 else whole[start : start + rows // num_micro]
            for name, whole in inputs.items()
        }
        loss = trainer._compute_loss(trainer.model, part)
        loss.backward()
        total += float(loss.detach())
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    metrics = {name: sum(values) / len(values) for name, values in trainer._metrics["train"].items()}
    return total, gradients, metrics
