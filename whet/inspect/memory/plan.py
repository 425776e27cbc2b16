"""`whet plan RECIPE`: predicts the memory of each phase of a run before it starts, and what fits."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from whet import processes
from whet.cli import Program, passed_words
from whet.config import Removed, load_yaml, user_path
from whet.generate.kernel_speed import choose_kernels, expected_kernels
from whet.generate.policy import INHERIT, PolicyConfig, load_policy, resolve_device
from whet.inspect.memory.meter import compare, measure
from whet.inspect.memory.phases import (
    COPIES,
    GIB,
    Phase,
    Workload,
    adapted_bytes,
    fit,
    parameter_sizes,
    peak,
    phases,
    sharded_budget,
)
from whet.kernels import eager
from whet.kernels.cpu import build
from whet.model.attention import AttentionKind
from whet.model.config import TOWER, ModelConfig
from whet.model.families import RopeFactors, from_hf
from whet.model.files import find_files, is_hub_name, read_json
from whet.model.lora.adapter import CONFIG
from whet.model.lora.files import find_model
from whet.model.lora.side import with_tower
from whet.model.quant import QUANTIZATION
from whet.model.text.boards import boards
from whet.model.text.tokenizer import Tokenizer
from whet.model.weights import model_folder
from whet.schema import find_schema
from whet.telemetry.display import escape_controls, open_display
from whet.train.fit import FIT_ATTENTION
from whet.train.optim.precision import resolve_precision
from whet.train.optim.step import dtypes, parameter_dtype
from whet.train.rl_config import RLConfig
from whet.train.session import train_adapters
from whet.train.sft import SFTConfig
from whet.types import UserError

PROMPT_TOKENS = 256
IMAGE_SIDE = 512
"""Pixels of a side of the image that is planned for, where a tower reads any size."""
WHET = (sys.executable, "-m", "whet")


def _qwen25(width: int, feed: int, layers: int, heads: int, kv_heads: int, *, context: int) -> ModelConfig:
    is_large = width > 2048
    return ModelConfig(
        family="qwen2",
        vocab_size=152_064 if is_large else 151_936,
        hidden_size=width,
        intermediate_size=feed,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        max_positions=context,
        tie_embeddings=not is_large,
    )


# Shapes of the recipes' starting models, so that a plan needs no network; other names are looked up on the hub.
SHAPES: dict[str, ModelConfig] = {
    "Qwen/Qwen2.5-0.5B": _qwen25(896, 4864, 24, 14, 2, context=32_768),
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen25(896, 4864, 24, 14, 2, context=32_768),
    "Qwen/Qwen2.5-1.5B": _qwen25(1536, 8960, 28, 12, 2, context=131_072),
    "Qwen/Qwen2.5-3B": _qwen25(2048, 11_008, 36, 16, 2, context=32_768),
    "Qwen/Qwen2.5-7B": _qwen25(3584, 18_944, 28, 28, 4, context=131_072),
    "openai-community/gpt2": ModelConfig(
        family="gpt2",
        vocab_size=50_257,
        hidden_size=768,
        intermediate_size=3072,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        max_positions=1024,
    ),
    # As their config.json says.
    "Qwen/Qwen3-VL-8B-Instruct": from_hf(
        {
            "model_type": "qwen3_vl",
            "image_token_id": 151_655,
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "vocab_size": 151_936,
                "hidden_size": 4096,
                "intermediate_size": 12_288,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "hidden_act": "silu",
                "attention_bias": False,
                "max_position_embeddings": 262_144,
                "rms_norm_eps": 1e-6,
                "rope_theta": 5_000_000,
                "rope_scaling": {
                    "rope_type": "default",
                    "mrope_interleaved": True,
                    "mrope_section": [24, 20, 20],
                },
            },
            "vision_config": {
                "model_type": "qwen3_vl",
                "depth": 27,
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_heads": 16,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "out_hidden_size": 4096,
                "num_position_embeddings": 2304,
                "deepstack_visual_indexes": [8, 16, 24],
                "hidden_act": "gelu_pytorch_tanh",
            },
        }
    ),
}

CHECKPOINT, MASTER = "--optim.checkpoint-layers", "--optim.precision bfloat16_master"
BOTH: dict[str, Any] = {"checkpoint": "layer", "precision": "bfloat16_master"}
# Options that reduce memory, cheapest first.
OPTIONS: dict[str, dict[str, Any]] = {
    "--kept-gib 0": {"kept_gib": 0.0},
    CHECKPOINT: {"checkpoint": "layer"},
    MASTER: {"precision": "bfloat16_master"},
    f"{CHECKPOINT} {MASTER}": BOTH,
    f"{CHECKPOINT} {MASTER} --optim.adam-bits 8": BOTH | {"adam_bits": 8},
    f"{CHECKPOINT} {MASTER} --optim.offload-state": BOTH | {"offload_state": True},
    f"{CHECKPOINT} {MASTER} --optim.offload-state --optim.offload-inputs": BOTH
    | {"offload_state": True, "offload_inputs": True},
}
IN_SHARDS: dict[str, dict[str, Any]] = {
    **{words: OPTIONS[words] for words in (CHECKPOINT, MASTER, f"{CHECKPOINT} {MASTER}")},
    f"{CHECKPOINT} {MASTER} --parallel.gather layer": BOTH | {"gathers_whole": False},
    f"{CHECKPOINT} {MASTER} --parallel.offload": BOTH | {"offloads_shards": True},
    f"{CHECKPOINT} {MASTER} --parallel.offload --parallel.gather layer": BOTH
    | {"offloads_shards": True, "gathers_whole": False},
}
"""The same for weights in shards, whose moments are not in 8 bits, and which have their own way into host memory."""

CARDS_GB, CARD_TOKENS, CARD_RANK, CARD_SHARE = (8, 16, 24), 1024, 16, 0.9
"""Cards, tokens of the one sequence in a micro-batch, rank of adapters, and what of a card is not fragments."""
FULL: dict[str, dict[str, Any]] = {
    "--optim.precision float32": {"precision": "float32", "checkpoint": "layer"},
    "--optim.precision bfloat16_master": BOTH,
    "... --optim.adam-bits 8": BOTH | {"adam_bits": 8},
}
"""Ways to train all weights; layers are recomputed in each."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Peak memory of a recipe by phase, before it runs, and how much of it fits a device."""

    recipe: str
    """Recipe, .yaml file or run folder, as the program accepts it; with --of model a folder or hub name."""
    of: Literal["rl", "sft", "model", "cards"] = "rl"
    """Program of the recipe; model only prints the sharded budget, cards which ways to train a model fit 8, 16 and 24
    GB."""
    set: tuple[str, ...] = ()
    """Fields of the recipe that are overridden; written as its own options are: --policy.init MODEL."""
    length: int = 0
    """Longest sequence, prompt and completion, in tokens; 0 takes 256 for the prompt, its images' tokens and the
    recipe's longest completion (sft: a whole micro-batch), within the context."""
    image_tokens: int = 0
    """Tokens of the images of a prompt, for a model that sees; 0 takes one of 512 x 512 pixels, or of the one size that
    its tower reads."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device to plan for; auto takes the recipe's."""
    memory_gib: float = 0.0
    """Memory of the device in GiB: suggests the largest rows and micro-batches that fit; 0 suggests none."""
    num_devices: int = 1
    """Devices, with one rank on each: the plan is that of one, which has its part of a step's sequences, and with
    parallel.kind = fsdp its share of the weights."""
    measure: bool = False
    """Run one step of the longest sequences here and print predicted against measured memory."""

    RENAMED = dict.fromkeys(
        ("cluster", "card", "flops_share", "memory_share", "tokens", "sim", "plot", "json"),
        Removed(None, "time a few steps of a run with --cluster.rollout-workers instead"),
    )

    def __post_init__(self) -> None:
        counts = (("length", 0), ("image_tokens", 0), ("memory_gib", 0), ("num_devices", 1))
        for name, least in counts:
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} = {getattr(self, name)}: expected {least} or more")
        is_set = bool(self.set or self.image_tokens or self.memory_gib or self.measure)
        if self.measure and self.num_devices > 1:
            raise ValueError(
                f"num_devices = {self.num_devices} with measure: the step runs in one process; leave one out"
            )
        if self.of == "model" and (is_set or self.length):
            raise ValueError(
                "of = model reads num_devices only: leave out set, length, image_tokens, memory_gib and measure"
            )
        if self.of == "cards" and (is_set or self.num_devices != 1):
            raise ValueError(
                "of = cards reads length only: leave out set, image_tokens, memory_gib, measure and num_devices"
            )


def main(config: PlanConfig) -> None:
    """Print the plan."""
    if config.of == "model":
        print(_budget_text(find_shape(config.recipe), config.num_devices))
        return
    if config.of == "cards":
        shape = find_shape(config.recipe)
        print(_cards_text(shape, config.length or min(CARD_TOKENS, shape.max_positions)))
        return
    run = read_recipe(config)
    policy = None
    if config.measure:
        merge = not run.lora.rank
        policy = load_policy(run.policy, seed=run.seed, merge=merge, **dtypes(run.optim.precision))
        if run.lora.rank:
            train_adapters(policy, run)
        if config.device not in ("auto", policy.device.type):
            raise UserError(
                f"device = {config.device} with measure: the step runs on {policy.device.type}; leave it out"
            )
    shape = policy_shape(run.policy) if policy is None else policy.model.config
    if config.device == "cpu" or (config.device == "auto" and _device_type(run.policy) == "cpu"):
        choose_kernels(shape, parameter_dtype(run.optim.precision), torch.device("cpu"))  # as the run will
    work = workload(run, shape, config, num_ranks=config.num_devices)
    predicted = phases(work)
    print(_headline(config, work))
    print(_table(predicted))
    if config.memory_gib:
        print(f"\n{_advice(work, config.memory_gib)}")
    print(f"\n{_budget_text(shape, config.num_devices)}")
    if policy is not None:
        with open_display("plan · measure a step of the longest sequences", 1, ()) as display:
            display.begin("the step")
            measured = measure(run, policy, work)
            display.update(1, {})
        print(f"\n{compare(predicted, measured)}")


def read_recipe(config: PlanConfig, command: Sequence[str] = WHET) -> RLConfig | SFTConfig:
    """Have the program resolve recipe and overrides, as printed by --print-config.

    Args:
        config: What to plan.
        command: The command that runs whet.

    Raises:
        UserError: With the program's message, if it refuses.
    """
    words = [*command, config.of, config.recipe, *passed_words(config.set), "--print-config"]
    result = processes.run(words, capture_output=True, text=True, errors="replace")
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
        said = escape_controls(lines[-1].strip().removeprefix("whet: error: "))
        said = said.replace(f": whet {config.of} own ", ": own ")  # in the place of this command's RECIPE
        raise UserError(f"whet {config.of} refuses: {said}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(result.stdout, encoding="utf-8")
        run = load_yaml(path, RLConfig) if config.of == "rl" else load_yaml(path, SFTConfig)
    return resolve_precision(run, policy_shape)


def find_shape(source: str, rope_factors: RopeFactors = "auto") -> ModelConfig:
    """Return the shape of a model without its weights.

    Args:
        source: Model folder, run folder or hub name.
        rope_factors: Of ropes that change with length (`PolicyConfig`).

    Raises:
        UserError: If its config.json cannot be loaded.
    """
    if source in SHAPES:
        return SHAPES[source]
    try:
        if (
            "/" in source
            and is_hub_name(source)
            and not source.startswith("runs/")
            and not Path(source).exists()
        ):
            path = find_files(source, ["config.json"])["config.json"]
        else:
            path = _stored_base(source) / "config.json"
    except UserError as error:
        known = (name for name in SHAPES if name.rpartition("/")[2].lower() in source.lower())
        start = next(known, "FOLDER, or a hub name")
        raise UserError(f"{error}; to plan before it exists: --policy.init {start}") from None
    return from_hf(read_json(path), where=str(path), rope_factors=rope_factors)


def policy_shape(policy: PolicyConfig) -> ModelConfig:
    """Return the shape of a policy's model, with its vocabulary grown as far as the config determines."""
    if policy.init:
        shape = find_shape(policy.init, policy.rope_factors)
        return replace(shape, vocab_size=max(shape.vocab_size, policy.padded_vocab_size))
    schema = find_schema("think_answer" if policy.schema == INHERIT else policy.schema)
    schema = replace(schema, tools=() if policy.tools == ("none",) else policy.tools)
    tags = (*schema.tags, *schema.tool_tags) if policy.tags_as_tokens else ()
    if policy.tokenizer == "characters":
        tokenizer = Tokenizer.characters(policy.alphabet, tags)
    elif policy.tokenizer == "bytes":
        tokenizer = Tokenizer.bytes(tags)
    elif policy.tokenizer == "boards":
        tokenizer = boards(tags)
    else:
        tokenizer = Tokenizer.load(policy.tokenizer)
    return replace(policy.model, vocab_size=max(tokenizer.vocab_size, policy.padded_vocab_size))


def workload(
    run: RLConfig | SFTConfig, shape: ModelConfig, config: PlanConfig, *, num_ranks: int = 1
) -> Workload:
    """Return the workload of one rank of a run with sequences of maximum length.

    Args:
        run: The recipe.
        shape: Its model's.
        config: Lengths and device.
        num_ranks: Ranks that share a step's sequences, and the weights where these are sharded.

    Raises:
        UserError: If a length leaves no room for a prompt, or exceeds the context.
    """
    device = config.device if config.device != "auto" else _device_type(run.policy)
    context, budget = shape.max_positions, run.optim.token_budget
    whole = default_image_tokens(shape)
    seen = config.image_tokens or min(whole, run.policy.max_image_tokens or whole)
    if config.image_tokens and shape.vision is None:
        raise UserError(f"image_tokens = {config.image_tokens}: the model reads text alone; leave it out")
    longest = PROMPT_TOKENS + seen + run.sampling.max_new_tokens if isinstance(run, RLConfig) else budget
    length = config.length or min(context, longest)
    least = 2 if isinstance(run, SFTConfig) else 1 + min(run.sampling.max_new_tokens, context - 1)
    if not least + config.image_tokens <= length <= context:
        raise UserError(
            f"length = {length}: expected {least + config.image_tokens} to the context's {context} tokens"
        )
    seen = min(seen, length - least)
    trains_tower = run.policy.train_vision or any(name.startswith(TOWER) for name in run.lora.targets)
    parallel, shards = run.parallel, 1
    if parallel.kind == "fsdp":
        shards = num_ranks // parallel.replicas
        if not shards or num_ranks % parallel.replicas:
            raise UserError(
                f"parallel.replicas = {parallel.replicas}: expected a divisor of the {num_ranks} ranks"
            )
    shared = Workload(
        num_shards=shards,
        is_resharded=parallel.reshard,
        gathers_whole=parallel.gather == "whole",
        num_ahead=parallel.prefetch,
        offloads_shards=parallel.offload,
        shape=shape,
        precision=run.optim.precision,
        device=device,
        attention=FIT_ATTENTION,
        has_kernels=device == "cpu" and build.library() is not None,
        kernels=expected_kernels(shape, parameter_dtype(run.optim.precision)),
        checkpoint=run.optim.checkpoint_kind if run.optim.checkpoint_layers else None,
        offload_inputs=run.optim.offload_inputs,
        optimizer=run.optim.optimizer,
        adam_bits=run.optim.adam_bits,
        offload_state=run.optim.offload_state,
        length=length,
        num_trained=length - 1,
        widens=device == "cpu" and not eager.has_bfloat16_products(),
        num_sequences=0,
        token_budget=budget,
        quantize=run.policy.quantize,
        kinds=stored_kinds(run.policy.init),
        lora=with_tower(run.lora) if run.policy.train_vision else run.lora,
        image_tokens=seen,
        trains_tower=trains_tower,
    )
    if isinstance(run, SFTConfig):
        count = -(-run.batch_size // num_ranks)
        return replace(
            shared, num_sequences=count, num_trained=length - 1 - seen, num_images=run.num_steps * count
        )
    prompts = -(-run.num_prompts // num_ranks)
    algo, samples = run.algo, prompts * run.group_size
    automatic: AttentionKind = "exact" if device == "cpu" else "fast"
    has_reference, has_critic = algo.kl != "none", algo.baseline == "value"
    is_measured = run.off_policy.proximal == "recomputed" or algo.entropy_top_share < 1
    rows = min(run.policy.max_rows, samples)
    keeps = run.overlap.mode == "off" and not run.off_policy.staleness and parallel.kind != "fsdp"
    return replace(
        shared,
        attention=automatic if run.policy.attention == "auto" else run.policy.attention,
        num_trained=least - 1,
        num_sequences=-(-samples // algo.num_minibatches),
        group_size=run.group_size,
        rows=rows,
        num_prompts=-(-rows // run.group_size),
        overlap=run.overlap.mode,
        has_reference=has_reference,
        has_critic=has_critic,
        has_measuring=has_reference or has_critic or is_measured,
        has_entropy=algo.has_entropy_bonus,
        temperature=run.sampling.temperature,
        num_requests=prompts,
        num_images=run.num_steps * prompts,
        kept_gib=run.kept_gib if keeps else 0.0,
    )


def default_image_tokens(shape: ModelConfig) -> int:
    """Return the tokens of an image of 512 x 512 pixels, or of the one size that a tower reads; 0 for a model without
    a tower."""
    vision = shape.vision
    return (
        0 if vision is None else ((vision.image_size or IMAGE_SIDE) // vision.patch_size // vision.merge) ** 2
    )


def _stored_base(source: str) -> Path:
    """Return the folder of a model on this machine, of an adapter its base's."""
    own = user_path(source)
    folder = own if (own / CONFIG).is_file() else model_folder(source)
    is_adapter = (folder / CONFIG).is_file() and not (folder / "config.json").is_file()
    return find_model(source, weights=False)[0] if is_adapter else folder


def stored_kinds(init: str) -> tuple[tuple[str, str], ...]:
    """Return the kind of each matrix of a folder that `whet quantize` wrote, or of an adapter's base; none for other
    models."""
    if not init or not user_path(init).exists():
        return ()
    path = _stored_base(init) / QUANTIZATION
    if not path.is_file():
        return ()
    layers = read_json(path).get("layers")
    if not isinstance(layers, dict):
        raise UserError(f"{path}: no layers in it; write the folder again with whet quantize")
    return tuple((str(name), str(kind)) for name, kind in layers.items())


def _device_type(policy: PolicyConfig) -> str:
    try:
        return resolve_device(policy.device).type
    except UserError:  # the device is on another machine: plans are made in advance
        return "cuda"


def _headline(config: PlanConfig, work: Workload) -> str:
    sampled = f", {work.rows:,} rows decoded together" if work.rows else ""
    seen = f", {work.image_tokens:,} of images" if work.image_tokens else ""
    several = f", one of {config.num_devices} devices" if config.num_devices > 1 else ""
    several += f", weights in {work.num_shards} shares" if work.num_shards > 1 else ""
    return (
        f"whet {config.of} {config.recipe} on {work.device}, {work.precision}, {work.attention} attention{several}\n"
        f"sequences of {work.length:,} tokens{seen}{sampled}; {work.num_sequences:,} sequences per update, "
        f"{work.micro_sequences:,} in a micro-batch\n"
    )


def _table(found: Sequence[Phase]) -> str:
    """Format the parts by phase, in GiB, and name the largest phase."""
    names = list(dict.fromkeys(name for phase in found for name in phase.parts))
    lines = [f"{'GiB':<18}" + "".join(f"{phase.name:>16}" for phase in found)]
    for name in names:
        cells = (
            f"{phase.parts[name] / GIB:16.3f}" if name in phase.parts else f"{'-':>16}" for phase in found
        )
        lines.append(f"{name:<18}" + "".join(cells))
    lines.append(f"{'in all':<18}" + "".join(f"{phase.total / GIB:16.3f}" for phase in found))
    fullest = max(found, key=lambda phase: phase.total)
    lines.append(f"\npeak: {fullest.total / GIB:.3f} GiB ({fullest.total:,} bytes), in: {fullest.name}")
    if COPIES in names:
        needed = max(phase.total - phase.parts.get(COPIES, 0) for phase in found) / GIB
        lines.append(
            f"{COPIES} are made of as much as half of the free memory holds; without them {needed:.3f} GiB"
        )
    return "\n".join(lines)


def _advice(work: Workload, memory_gib: float) -> str:
    """Return what fits, or else the option that would make it fit."""
    found = fit(work, int(memory_gib * GIB))
    if found is not None:
        rows = f" --policy.max-rows {found.rows}" if work.rows else ""
        return f"fits {memory_gib:g} GiB with at most: --optim.token-budget {found.token_budget}{rows}"
    for words, options in (OPTIONS if work.num_shards == 1 else IN_SHARDS).items():
        if "offload" in words and work.device != "cuda":
            continue
        if (found := fit(replace(work, **options), int(memory_gib * GIB))) is not None:
            rows = f" --policy.max-rows {found.rows}" if work.rows else ""
            return (
                f"fits {memory_gib:g} GiB only with {words} --optim.token-budget {found.token_budget}{rows}"
            )
    least = replace(work, rows=min(work.rows, 1), token_budget=work.length, kept_gib=0.0)
    need = max(phase.total for phase in phases(least)) / GIB
    return f"does not fit {memory_gib:g} GiB: one row and one sequence per micro-batch need {need:.1f} GiB already"


def cards(shape: ModelConfig, length: int) -> dict[str, int]:
    """Return the bytes that fine-tuning takes on a GPU, by how it is done: one sequence a micro-batch.

    Args:
        shape: The model.
        length: Tokens of the sequence.
    """
    work = Workload(
        shape=shape,
        precision="float32",
        device="cuda",
        attention="fast",
        length=length,
        num_trained=length - 1,
        num_sequences=2,
        token_budget=length,
    )
    found = {f"all weights {words}": peak(replace(work, **options)) for words, options in FULL.items()}
    found[f"LoRA, rank {CARD_RANK}"] = adapted_bytes(work, CARD_RANK, is_quantised=False)
    found[f"QLoRA, rank {CARD_RANK}, NF4"] = adapted_bytes(work, CARD_RANK, is_quantised=True)
    return found


def _cards_text(shape: ModelConfig, length: int) -> str:
    if not 2 <= length <= shape.max_positions:
        raise UserError(f"length = {length}: expected 2 to the context's {shape.max_positions} tokens")
    lines = [f"fine-tuning on {length:,} tokens at a time, layers recomputed; a tenth of a card is left free"]
    lines.append(f"{'':<64}{'GB':>7}" + "".join(f"{gb:>5} GB" for gb in CARDS_GB))
    for name, size in cards(shape, length).items():
        fits = "".join(f"{'yes' if size <= CARD_SHARE * gb * 10**9 else 'no':>8}" for gb in CARDS_GB)
        lines.append(f"{name:<64}{size / 10**9:7.1f}{fits}")
    return "\n".join(lines)


def _budget_text(shape: ModelConfig, num_devices: int) -> str:
    count = sum(parameter_sizes(shape))
    letter, unit, power = ("B", "GB", 9) if count >= 10**8 else ("M", "MB", 6)
    lines = [
        f"{count / 10**power:.2f} {letter} parameters ({count:,}); textbook budget, sharded over {num_devices} "
        f"device{'s' * (num_devices > 1)}, in {unit} (10^{power} bytes) on each:"
    ]
    budget = sharded_budget(count, num_devices)
    lines += [f"  {name:<28}{value / 10**power:7.2f}" for name, value in budget.items()]
    return "\n".join(lines)


PROGRAM = Program(
    config_class=PlanConfig, main=main, positional="recipe", passes={"rl": RLConfig, "sft": SFTConfig}
)
