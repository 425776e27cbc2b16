"""Tiny models with images, of random weights, by transformers and by whet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.model.config import ModelConfig
from whet.model.families import from_hf
from whet.model.transformer import LanguageModel
from whet.model.vision.ids import key_of, with_placeholder
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


def gemma3() -> Any:
    import transformers

    text = {**TEXT, "sliding_window": 12, "num_hidden_layers": 3, "query_pre_attn_scalar": 16}
    text["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=16,
        image_token_index=IMAGE_ID,
        boi_token_index=92,
        eoi_token_index=93,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def llava(tower: dict[str, Any], text: dict[str, Any], **more: Any) -> Any:
    import transformers

    tower, text = {**TOWER, **tower}, {**TEXT, **text}
    config = transformers.LlavaConfig(
        text_config=text, vision_config=tower, image_token_index=IMAGE_ID, image_seq_length=64, **more
    )
    return transformers.LlavaForConditionalGeneration(config)


def idefics(kind: str, text: dict[str, Any]) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, **text}, vision_config=TOWER, image_token_id=IMAGE_ID, scale_factor=2
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 35,  # three pixels more than whole patches
    "patch_size": 4,
}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False}
CASES = {
    "qwen3_vl": lambda: qwen3_vl({}, {}),
    "qwen3_vl_moe": lambda: qwen3_vl(EXPERTS, {}, "Qwen3VLMoe"),
    "qwen2_5_vl": qwen2_5_vl,
    "gemma3": gemma3,
    "llava": lambda: llava({"model_type": "clip_vision_model"}, {"model_type": "llama"}),
    "llava-siglip": lambda: llava(
        SIGLIP,
        {"model_type": "qwen3", "tie_word_embeddings": True},
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        projector_hidden_act="quick_gelu",
        multimodal_projector_bias=False,
    ),
    "smolvlm": lambda: idefics("SmolVLM", {"model_type": "llama", "pad_token_id": 0}),
    "idefics3": lambda: idefics("Idefics3", {"model_type": "mistral", "pad_token_id": 0}),
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
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 35, "width": 35}},
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 40},
        "crop_size": {"height": 35, "width": 35},
    },
    "llava-siglip": {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 35, "width": 35},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.4, 0.5],
        "resample": 3,
    },
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 90},
        "max_image_size": {"longest_edge": 35},
    },
}
PROCESSORS["idefics3"] = {**PROCESSORS["smolvlm"], "do_image_splitting": False}


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
            elif not parameter.any():  # Gemma's projection
                parameter.normal_(0, 0.1)
            else:
                parameter.mul_(3.0)
    reference.save_pretrained(folder)
    as_published(folder)
    kind = family(name)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))
    model, _ = load_model(folder)
    return Case(name, model, reference, processor(kind), folder)


def as_published(folder: Path) -> None:
    """Give a folder the names and the experts' order of the published ones, which transformers changes as it reads."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tower = "vision_tower."  # its files were written when CLIP and SigLIP had a module between
    tensors = {k.replace(tower, f"{tower}vision_model.", 1): v for k, v in tensors.items()}
    turned = {k: v.transpose(1, 2).contiguous() if ".experts." in k else v for k, v in tensors.items()}
    save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})


def family(name: str) -> str:
    return "qwen" if name.startswith("qwen") else name


def processor(kind: str) -> Any:
    import importlib

    modules = {
        "Qwen2VL": "qwen2_vl",
        "Gemma3": "gemma3",
        "CLIP": "clip",
        "Siglip": "siglip",
        "SmolVLM": "smolvlm",
    }
    data = dict(PROCESSORS[kind])
    name = data.pop("image_processor_type").removesuffix("ImageProcessor")
    module = modules[name]
    found = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(found, f"{name}ImageProcessorPil")(**data)


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
            own = add(case.model, pictures[-1])
            view = case.model.images.grid(key_of(own[0])).view
            for first in range(0, len(own), view):
                ids += [92, *own[first : first + view], 93]
    return Prompt(ids, pictures)


def inputs(case: Case, prompt: Prompt) -> dict[str, Any]:
    ids = torch.tensor([with_placeholder(prompt.ids, IMAGE_ID)])
    found: dict[str, Any] = {"input_ids": ids}
    if prompt.pictures:
        types = {"qwen": "mm_token_type_ids", "gemma3": "token_type_ids"}
        if family(case.name) in types:
            found[types[family(case.name)]] = (ids == IMAGE_ID).int()
        pictures = [prompt.pictures] if case.name in ("smolvlm", "idefics3") else prompt.pictures
        found |= dict(case.processor(pictures, return_tensors="pt"))
        found.pop("num_crops", None)
    return found


def logits(case: Case, prompt: Prompt, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    case.reference.model.rope_deltas = None
    found = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(case, prompt).items()}
    return case.reference(**found).logits[0]


def their_patches(case: Case, pixels: np.ndarray) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return the patches of a picture by transformers' processor, and the rows and columns of its tiles."""
    if family(case.name) == "qwen":
        found = case.processor([pixels], return_tensors="pt")
        _, rows, columns = found["image_grid_thw"][0].tolist()
        return found["pixel_values"], (rows, columns)
    has_tiles = case.name in ("smolvlm", "idefics3")
    options = {"return_row_col_info": True} if has_tiles else {}
    found = case.processor([[pixels]] if has_tiles else [pixels], return_tensors="pt", **options)
    views = found["pixel_values"].reshape(-1, 3, *found["pixel_values"].shape[-2:])
    if has_tiles:
        assert found["pixel_attention_mask"].all()
    tiles = (found["rows"][0][0], found["cols"][0][0]) if has_tiles else (0, 0)
    side = case.model.config.vision.patch_size
    cut = views.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5)
    return cut.reshape(-1, 3 * side**2), tiles


def make_config(name: str) -> ModelConfig:
    return from_hf(CASES[name]().config.to_dict())


MARKS = {
    "qwen": (
        "<|image_pad|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|video_pad|>",
    ),
    "gemma3": (
        "<image_soft_token>",
        "<start_of_image>",
        "<end_of_image>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<bos>",
    ),
    "llava": ("<image>",),
    "idefics3": (
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        "<end_of_utterance>",
        "<|im_start|>",
    ),
}


def tokenizer_folder(kind: str, folder: Path, template: str) -> Path:
    """Write a small tokenizer with merges (line breaks, too) and a chat template."""
    import json

    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator(["\n\n\n\n\nuser\n\n\nassistant\n"] * 9 + ["the color is\n\n\n"] * 9, trainer)
    marks = MARKS[kind] + tuple(f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4))
    made.add_special_tokens([tokenizers.AddedToken(mark, special=True, normalized=False) for mark in marks])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    names = (
        {"image_token": marks[0], "boi_token": marks[1], "eoi_token": marks[2]} if kind == "gemma3" else {}
    )
    data = {
        "chat_template": template,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": marks[0],
        **names,
    }
    if kind == "gemma3":
        data["bos_token"] = "<bos>"
    (folder / "tokenizer_config.json").write_text(json.dumps(data))
    return folder


def their_processor(case: Case, folder: Path, template: str) -> Any:
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    vision = case.model.config.vision
    length = case.model.images.grid(key_of(add(case.model, picture(40, 40))[0])).view
    options: dict[str, Any] = {"chat_template": template}
    if family(case.name) == "qwen":
        kind = "Qwen2_5_VLProcessor" if case.name == "qwen2_5_vl" else "Qwen3VLProcessor"
    elif case.name == "gemma3":
        kind, options = "Gemma3Processor", options | {"image_seq_length": length}
    elif case.name.startswith("llava"):
        kind, options = "LlavaProcessor", options | {"patch_size": vision.patch_size}
        options["num_additional_image_tokens"] = int(vision.has_class)
        options["vision_feature_select_strategy"] = "default" if vision.has_class else "full"
    else:
        kind, options = "Idefics3Processor", options | {"image_seq_len": length}
    return getattr(transformers, kind)(image_processor=case.processor, tokenizer=tokenizer, **options)
