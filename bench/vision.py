"""Time a GRPO step on questions about images beside TRL's, and the prefill of prompts that share an image.

python bench/vision.py [--quick] [--repeats 7] [--json FILE]

A small Qwen3-VL with random weights (4 layers of width 128, a tower of 2 layers of width 128; 1.8 million parameters),
one image of 224 x 224 pixels and 32 to 96 words a prompt.

- step: as in `grpo_step.py`, on the same weights, images, prompts and rewards; the tower is frozen on both sides.
  Before anything is timed, the prompts' ids and the gradients of one step on the same samples are compared.
- prefill: one image of 448 x 448 pixels and 64 words, sampled G times, one new token each: whet encodes image and
  prompt once, transformers' `generate` G times. Each side and G in a process of its own; time of a second
  call, with another image, and what the peak of the process is above its memory after loading.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpo_step
import memory
import sides
import torch

from whet import processes
from whet.generate.rows import Request
from whet.generate.sampling import SamplingParams
from whet.train.optim.step import OptimConfig, Optimizer
from whet.types import Problem

CASES = (grpo_step.Case("seeing", 8, 8, 64, 3.0), grpo_step.Case("seeing", 4, 16, 64, 3.0))
GROUPS = (1, 4, 16, 64)
SIDE, LARGE = 224, 448
WORDS = 1019
MARKS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", sides.EOS)
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %} "
)
PEERS_TEMPLATE = TEMPLATE + "0"  # the word that whet's opening tag becomes


def save_seeing(folder: Path) -> Path:
    """Write the model as transformers does, with a tokenizer of number words and the marks of images."""
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    home = folder / "seeing"
    text = {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 480,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    tower = {
        "depth": 2,
        "hidden_size": 128,
        "intermediate_size": 480,
        "num_heads": 4,
        "patch_size": 16,
        "out_hidden_size": 128,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        image_token_id=WORDS,
        vision_start_token_id=WORDS + 1,
        vision_end_token_id=WORDS + 2,
        video_token_id=WORDS + 3,
    )
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(home)
    fast = Fast(models.WordLevel(sides.words(WORDS), unk_token="0"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    fast.save(str(home / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "eos_token": sides.EOS,
        "pad_token": "0",
    }
    (home / "tokenizer_config.json").write_text(json.dumps(about))
    pixels = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 2**24},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (home / "preprocessor_config.json").write_text(json.dumps(pixels))
    return home


def load_peer(home: Path) -> tuple[Any, Any]:
    """Load the model and its processor with transformers."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        home, dtype=torch.float32, attn_implementation="sdpa"
    )
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(home, padding_side="left")
    images = Qwen2VLImageProcessorPil.from_pretrained(home)
    # Without torchvision transformers has no processor of films, which it insists on.
    transformers.ProcessorMixin.check_argument_for_proper_class = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    processor = transformers.Qwen3VLProcessor(images, tokenizer, chat_template=PEERS_TEMPLATE)
    return model, processor


def draw(folder: Path, count: int, side: int) -> list[Path]:
    """Draw images of noise."""
    from PIL import Image

    found = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randint(0, 256, (side, side, 3), generator=generator, dtype=torch.uint8)
        found.append(folder / f"{side}-{number}.png")
        Image.fromarray(pixels.numpy()).save(found[-1])
    return found


def messages(path: Path, text: str) -> list[dict[str, Any]]:
    """Ask as TRL does: the image, then the words."""
    from PIL import Image

    parts = [
        {"type": "image", "image": Image.open(path).convert("RGB")},
        {"type": "text", "text": f" {text}"},
    ]
    return [{"role": "user", "content": parts}]


def problems(images: list[Path], texts: list[str]) -> list[Problem]:
    """Ask as whet does."""
    return [
        Problem(uid=f"{n}", task="words", prompt=f" {text}", answer="none", images=(str(image),))
        for n, (image, text) in enumerate(zip(images, texts, strict=True))
    ]


def frozen(peer: tuple[Any, Any]) -> tuple[Any, Any]:
    """Freeze the peer's tower, as whet's is."""
    for parameter in peer[0].model.visual.parameters():
        parameter.requires_grad_(False)
    return peer


def same_inputs_and_gradients(
    home: Path, case: grpo_step.Case, images: list[Path], texts: list[str]
) -> float:
    """Check that both sides see the same prompts; return the relative distance of their gradients."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parity"))
    import trl_peer

    side = grpo_step.WhetSide(home, case, texts, "float32", problems=problems(images, texts))
    groups = side.sample()
    gradients: dict[str, torch.Tensor] = {}

    class Keep(Optimizer):
        """Keeps gradients instead of using them."""

        def step(self, lr: float, *, loss: float = 0.0) -> float:
            for name, parameter in side.policy.model.named_parameters():
                if parameter.grad is not None:
                    gradients[name] = parameter.grad.clone()
            return 0.0

    side.objective.update(groups, Keep(side.policy.model, OptimConfig()), grpo_step.LR)
    peer = frozen(load_peer(home))
    trainer = grpo_step.trl_trainer(home, case, texts, kind="float32", after=lambda: None, steps=1, peer=peer)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    order = [int(group.problem.uid) for group in groups]
    ids, _, fields = trainer._tokenize_prompts([messages(images[n], texts[n]) for n in order])
    store = side.policy.model.images
    assert store is not None
    samples = [s for group in groups for s in group.samples]
    readable = [tuple(store.readable(group.samples[0].prompt_ids)) for group in groups]
    assert readable == [tuple(row) for row in ids], "both sides must read the same ids"
    trl_peer.PAD = 0
    inputs: dict[str, Any] = trl_peer.padded_inputs(samples, [s.advantage for s in samples])
    width = inputs["prompt_ids"].shape[1]
    rows = [row for row in readable for _ in range(case.group_size)]
    inputs["prompt_ids"] = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    full = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    fields = {name: torch.as_tensor(value) for name, value in fields.items() if name != "mm_token_type_ids"}
    grid = fields["image_grid_thw"].repeat_interleave(case.group_size, 0)
    patches = fields["pixel_values"].view(len(groups), -1, fields["pixel_values"].shape[-1])
    inputs |= {
        "pixel_values": patches.repeat_interleave(case.group_size, 0).flatten(0, 1),
        "image_grid_thw": grid,
        "num_images": [1] * len(samples),
        "mm_token_type_ids": (full == WORDS).int(),
    }
    inputs.pop("old_per_token_logps")
    _, theirs, _ = trl_peer.loss_and_gradients(trainer, inputs)
    theirs = {name.replace("language_model.", ""): grad for name, grad in theirs.items()}
    assert set(gradients) == set(theirs), set(gradients) ^ set(theirs)
    gap = sum(float((gradients[name] - grad).double().square().sum()) for name, grad in theirs.items())
    return math.sqrt(gap / sum(float(grad.double().square().sum()) for grad in theirs.values()))


def run_step(home: Path, case: grpo_step.Case, folder: Path, repeats: int) -> dict[str, Any]:
    """Compare inputs and gradients, then time both sides' steps alternately."""
    from PIL import Image

    drawn = sides.draw_prompts(case.num_prompts, 32, 96, WORDS)
    texts, images = [" ".join(map(str, ids)) for ids in drawn], draw(folder, case.num_prompts, SIDE)
    few = grpo_step.Case(case.model, case.num_prompts, case.group_size, 16, 0.0)
    gap = same_inputs_and_gradients(home, few, images, texts)
    side = grpo_step.WhetSide(home, case, texts, "float32", problems=problems(images, texts))
    ours: list[float] = []
    trainer = grpo_step.trl_trainer(
        home,
        case,
        texts,
        kind="float32",
        after=lambda: ours.append(side.step()),
        steps=repeats + 1,
        peer=frozen(load_peer(home)),
        prompts={
            "prompt": [[{"role": "user", "content": f" {text}"}] for text in texts],
            "image": [Image.open(path).convert("RGB") for path in images],
        },
        generation_kwargs={"suppress_tokens": list(range(WORDS, WORDS + len(MARKS)))},
    )
    trainer.train()
    theirs = trainer.clock.seconds[1:]
    sampled, trained = (statistics.median(phase) for phase in zip(*side.phases[1:], strict=True))
    return {
        "case": str(case),
        "gradient gap": gap,
        "peer_seconds": statistics.median(theirs),
        "whet_seconds": statistics.median(ours[1:]),
        "sample_seconds": sampled,
        "train_seconds": trained,
        "target": case.target,
        **sides.paired(theirs, ours[1:]),
    }


def prefill(side: str, home: Path, group: int, images: list[Path], text: str) -> tuple[float, float]:
    """Sample one token G times after a prompt with an image; return seconds and the peak in MiB above the start."""
    if side == "whet":
        policy = sides.load_whet(home, dtype=torch.float32, max_rows=group)
        asked = problems(images, [text] * len(images))

        def run(number: int) -> None:
            ids = policy.prompt_ids(asked[number])
            requests = [Request(prompt_ids=ids, seeds=tuple(range(100 * number, 100 * number + group)))]
            policy.engine().generate(requests, SamplingParams(max_new_tokens=1))
    else:
        sides.default_allocator()
        model, processor = load_peer(home)

        def run(number: int) -> None:
            found = processor.apply_chat_template(
                [messages(images[number], text)] * group,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
            with torch.no_grad():
                model.generate(**found, max_new_tokens=1, do_sample=True)

    before = memory.resident()
    run(0)
    memory.note_peak()
    began = time.perf_counter()
    run(1)
    return time.perf_counter() - began, 1024 * (memory.peaks[0] - before)


def run_prefill(
    home: Path, images: list[Path], text: str, repeats: int, groups: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Run both sides alternately in processes of their own."""
    rows = []
    for group in groups:
        found: dict[str, list[tuple[float, float]]] = {"whet": [], "transformers": []}
        for _ in range(repeats):
            for side, results in found.items():
                words = [
                    sys.executable,
                    __file__,
                    "--child",
                    side,
                    str(home),
                    str(group),
                    text,
                    *map(str, images),
                ]
                output = processes.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
                line = next(line for line in output.splitlines() if line.startswith("RESULT "))
                results.append(tuple(json.loads(line[7:])))
        theirs, ours = ([run[0] for run in found[side]] for side in ("transformers", "whet"))
        rows.append(
            {
                "group": group,
                "peer_seconds": statistics.median(theirs),
                "whet_seconds": statistics.median(ours),
                "peer_mib": statistics.median(run[1] for run in found["transformers"]),
                "whet_mib": statistics.median(run[1] for run in found["whet"]),
                **sides.paired(theirs, ours),
            }
        )
    return rows


def main() -> None:
    """Print a line per case."""
    if "--child" in sys.argv:
        side, home, group, text, *images = sys.argv[2:]
        sides.quiet()
        print(
            "RESULT",
            json.dumps(prefill(side, Path(home), int(group), [Path(image) for image in images], text)),
        )
        return
    arguments = sides.parser(__doc__, devices=("cpu",)).parse_args()
    sides.start(arguments)
    repeats = arguments.repeats or (3 if arguments.quick else 7)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home, rows = save_seeing(folder), []
        for case in CASES[:1] if arguments.quick else CASES:
            rows.append(row := run_step(home, case, folder, repeats))
            print(
                f"GRPO step with images {row['case']}: TRL {row['peer_seconds']:.2f} s, whet "
                f"{row['whet_seconds']:.2f} s ({row['sample_seconds']:.2f} sample + {row['train_seconds']:.2f} train), "
                f"{sides.times(row)} (target "
                f"{row['target']:g}x), medians of {repeats} alternating steps; gradients differ by "
                f"{row['gradient gap']:.0e}",
                flush=True,
            )
        images, (ids,) = draw(folder, 2, LARGE), sides.draw_prompts(1, 64, 64, WORDS)
        groups = GROUPS[:2] if arguments.quick else GROUPS
        for row in run_prefill(home, images, " ".join(map(str, ids)), min(repeats, 5), groups):
            rows.append(row)
            print(
                f"prefill of {row['group']:>2} samples: transformers {row['peer_seconds']:.2f} s, "
                f"{row['peer_mib']:.0f} MiB; whet {row['whet_seconds']:.2f} s, {row['whet_mib']:.0f} MiB; "
                f"{sides.times(row)}",
                flush=True,
            )
    sides.finish(arguments, rows)


if __name__ == "__main__":
    main()
