"""Tiny models with images, of random weights, by transformers and by whet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.model.config import ModelConfig
from whet.model.families import from_hf
from whet.model.transformer import LanguageModel
from whet.model.vision.ids import with_placeholder
from whet.model.vision.store import Picture
from whet.model.weights import load_model

IMAGE_ID, VOCABULARY = 90, 96
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
QWEN = {
    "image_token_id": IMAGE_ID,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
QWEN_TOWER = {
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 40,
    "patch_size": 4,
    "out_hidden_size": 32,
}


def rope(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **more}}


def qwen3_vl(text: dict[str, Any], tower: dict[str, Any], kind: str = "Qwen3VL") -> Any:
    import transformers

    own = rope(mrope_section=[3, 3, 2], mrope_interleaved=True)
    tower = {
        "depth": 3,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 2],
        **QWEN_TOWER,
        **tower,
    }
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, **own, **text}, vision_config=tower, **QWEN
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def qwen2_5_vl() -> Any:
    import transformers

    text = {name: value for name, value in TEXT.items() if name != "head_dim"}
    text |= rope(mrope_section=[1, 2, 1]) | {"rms_norm_eps": 1e-6}
    tower = {"depth": 3, "window_size": 24, "fullatt_block_indexes": [1], **QWEN_TOWER}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=tower, **QWEN)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES = {
    "qwen3_vl": lambda: qwen3_vl({}, {}),
    "qwen3_vl_moe": lambda: qwen3_vl(EXPERTS, {}, "Qwen3VLMoe"),
    "qwen2_5_vl": qwen2_5_vl,
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 16 * 16, "longest_edge": 96 * 96},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


@dataclass
class Case:
    name: str
    model: LanguageModel
    reference: Any
    processor: Any
    folder: Path


@dataclass
class Prompt:
    ids: list[int]
    pictures: list[np.ndarray]


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def make(name: str, folder: Path) -> Case:
    import json

    torch.manual_seed(0)
    reference = CASES[name]().eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 1:  # norms and biases, which start at 1 and 0 and would hide a mistake
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3.0)
    reference.save_pretrained(folder)
    if name == "qwen3_vl_moe":
        as_published(folder)
    kind = family(name)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))
    model, _ = load_model(folder)
    return Case(name, model, reference, processor(kind), folder)


def as_published(folder: Path) -> None:
    """Store experts as the published files of Qwen3-VL do: transformers turns them as it reads."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    turned = {k: v.transpose(1, 2).contiguous() if ".experts." in k else v for k, v in tensors.items()}
    save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})


def family(name: str) -> str:
    return "qwen" if name.startswith("qwen") else name


def processor(kind: str) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    data = {key: value for key, value in PROCESSORS[kind].items() if key != "image_processor_type"}
    return {"qwen": Qwen2VLImageProcessorPil}[kind](**data)


def add(model: LanguageModel, pixels: np.ndarray) -> tuple[int, ...]:
    assert model.images is not None
    return model.images.add(Picture.of(pixels.tobytes() + str(pixels.shape).encode(), pixels))


def prompt(case: Case, parts: list[Any]) -> Prompt:
    ids: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, str):
            ids += [ord(letter) - ord("a") + 1 for letter in part]
        else:
            pictures.append(picture(*part))
            ids += [92, *add(case.model, pictures[-1]), 93]
    return Prompt(ids, pictures)


def inputs(case: Case, prompt: Prompt) -> dict[str, Any]:
    ids = torch.tensor([with_placeholder(prompt.ids, IMAGE_ID)])
    found: dict[str, Any] = {"input_ids": ids}
    if prompt.pictures:
        found |= {"mm_token_type_ids": (ids == IMAGE_ID).int()} if family(case.name) == "qwen" else {}
        found |= dict(case.processor(prompt.pictures, return_tensors="pt"))
    return found


def logits(case: Case, prompt: Prompt) -> torch.Tensor:
    case.reference.model.rope_deltas = None
    return case.reference(**inputs(case, prompt)).logits[0]


def make_config(name: str) -> ModelConfig:
    return from_hf(CASES[name]().config.to_dict())
