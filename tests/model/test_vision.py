"""Models that see: parity with transformers, ids of images, positions, caches."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import trl
import vision_cases as cases
from late import Late
from safetensors.torch import load_file, save_file
from seeing import save_model as save_seeing
from seeing import uri

from whet.generate.cache import CacheSize, Decode, KVCache, Prefill
from whet.kernels import dispatch
from whet.kernels.cpu.ops import CHANNELS
from whet.model.attention import Packed
from whet.model.config import has_own_rules
from whet.model.families import from_hf
from whet.model.lora.files import read_adapter
from whet.model.lora.side import LoRAConfig, attach, choose
from whet.model.lora.trained import Base, Trained
from whet.model.quant import places
from whet.model.text.template import render_template
from whet.model.text.tokenizer import Tokenizer
from whet.model.vision.ids import IMAGE, digest_of, image_ids, is_image, key_of, keys_in, place_of
from whet.model.vision.pixels import read_preprocessing
from whet.model.vision.reading import read_picture
from whet.model.vision.store import ImageStore, Picture
from whet.model.weights import load_model, save_model
from whet.types import Segment, UserError

peft = Late("peft", reason="PEFT is not installed: pip install 'whet-rl[peft]'")
FLOAT, DOUBLE = 1e-4, 1e-6
"""Both sides compute in another order; logits are of the order 1. Tables of positions are float32 in float64, too."""
PROMPTS = {
    "one image": ["a", (40, 56), "bc"],
    "several images": ["ab", (32, 32), (64, 40), "c", (24, 80), "d"],
    "odd sizes": [(33, 47), "ab", (97, 31), "c"],
    "no image": ["abc"],
    "across two blocks of queries": ["a" * 121, (40, 56), "bcd" * 10],
    "several turns": ["ab", (40, 40), "cde", "f", (16, 64), "gh", (40, 40), "i"],
}


@pytest.fixture(scope="module", params=cases.CASES)
def case(request, tmp_path_factory):
    return cases.make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.some(16)
@pytest.mark.parametrize("name", PROMPTS)
def test_logits_equal_transformers(case, name):
    prompt = cases.prompt(case, PROMPTS[name])
    with torch.no_grad():
        ours = case.model.logits(torch.tensor([prompt.ids]))[0]
        theirs = cases.logits(case, prompt)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < FLOAT


def test_logits_equal_transformers_in_float64(case):
    if case.name.endswith("moe"):
        return  # transformers' product of all experts has no float64
    prompt = cases.prompt(case, PROMPTS["several turns"])
    model, _ = load_model(case.folder, dtype=torch.float64)
    model.images = case.model.images
    with torch.no_grad():
        theirs = cases.logits(
            replace(case, reference=copy.deepcopy(case.reference).double()), prompt, torch.float64
        )
        assert (model.logits(torch.tensor([prompt.ids]))[0] - theirs).abs().max() < DOUBLE


def test_ids():
    ids = image_ids(0x3FFFFFFFFFFF, 65536)
    assert ids[0] == IMAGE | 0x3FFFFFFFFFFF << 16
    assert ids[-1] == 2**63 - 1
    assert all(map(is_image, (ids[0], ids[-1])))
    assert not is_image(2**31)
    assert (key_of(ids[77]), place_of(ids[77])) == (0x3FFFFFFFFFFF, 77)
    assert keys_in([5, *image_ids(7, 2), 3, *image_ids(4, 1), *image_ids(7, 2)]) == (7, 4)
    with pytest.raises(ValueError, match="65,537"):
        image_ids(1, 65537)


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_are_theirs_up_to_one_shift(case, name):
    """The last text has its place in the sequence as its position."""
    prompt = cases.prompt(case, PROMPTS[name])
    tokens, place = torch.tensor(prompt.ids), torch.arange(len(prompt.ids))
    rows = case.model.images.rows(tokens, place, [Segment(0, len(tokens), 0, 0)], case.model.visual)
    if cases.family(case.name) != "qwen":
        assert rows is None or rows.positions_N3 is None
        return
    ours = place[:, None].repeat(1, 3) if rows is None else rows.positions_N3
    inputs = cases.inputs(case, prompt)
    grid = inputs.get("image_grid_thw")
    if grid is None:
        assert torch.equal(ours, place[:, None].repeat(1, 3))
        return
    theirs, _ = case.reference.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], grid)
    shift = ours - theirs[:, 0].T
    assert shift.unique().numel() == 1
    assert shift[0, 0] > 0
    assert ours[-1].tolist() == [len(tokens) - 1] * 3
    assert ours.min() >= 0


@pytest.mark.some(3)
def test_an_image_has_the_same_bits_in_any_company(case):
    alone = cases.prompt(case, ["a", (40, 56), "bc"])
    many = [cases.prompt(case, PROMPTS[name]) for name in PROMPTS]
    prompts = [many[1].ids, alone.ids, many[3].ids, many[4].ids]
    with torch.no_grad():
        lengths = [len(ids) for ids in prompts]
        tokens = torch.tensor([token for ids in prompts for token in ids])
        places = torch.cat([torch.arange(length) for length in lengths])
        together = case.model(tokens, places, Packed(lengths, tokens.device)).split(lengths)
        for ids, rows in zip(prompts, together, strict=True):
            own = torch.tensor(ids)
            fresh, _ = load_model(case.folder)
            fresh.images = case.model.images
            assert torch.equal(fresh(own, torch.arange(len(own)), Packed([len(own)], own.device)), rows)


def test_a_shared_prompt_has_the_bits_of_a_whole_sequence(case):
    prompt = cases.prompt(case, ["ab", (40, 56), "cd", (32, 24), "e"]).ids
    own, other = [3, 4, 5, 6, 7], [8, 9]
    whole = [torch.tensor([*prompt, *more]) for more in (own, other)]
    tokens = torch.tensor([*prompt, *own, *other])
    start = len(prompt)
    segments = [
        Segment(0, start, 0, 0),
        Segment(start, len(own), 0, start),
        Segment(start + len(own), len(other), 0, start),
    ]
    places = torch.cat([torch.arange(s.shared, s.shared + s.length) for s in segments])
    with torch.no_grad():
        packed = case.model(tokens, places, Packed(segments, tokens.device))
        for ids, segment in zip(whole, segments[1:], strict=True):
            alone = case.model(ids, torch.arange(len(ids)), Packed([len(ids)], ids.device))
            assert torch.equal(packed[segment.start : segment.start + segment.length], alone[start:])
            assert torch.equal(packed[:start], alone[:start])


@pytest.mark.some(3)
def test_features_are_kept_until_the_tower_changes(case):
    model, _ = load_model(case.folder)
    ids = torch.tensor(cases.prompt(cases.Case("", model, None, None, case.folder), ["a", (32, 32), "b"]).ids)
    calls = []
    model.visual.register_forward_hook(lambda *_: calls.append(1))
    context = lambda: Packed([len(ids)], ids.device)  # noqa: E731
    places = torch.arange(len(ids))
    first = model(ids, places, context())
    assert first.requires_grad
    assert torch.equal(model(ids, places, context()), first)
    assert len(calls) == 1
    with torch.inference_mode():
        assert torch.equal(model(ids, places, context()), first)
        assert len(calls) == 1
    with torch.no_grad():
        next(model.visual.parameters()).mul_(1.5)
        assert not torch.equal(model(ids, places, context()), first)
        assert len(calls) == 2
    assert not any(p.requires_grad for p in model.visual.parameters())
    model.visual.requires_grad_(True)
    model(ids, places, context()).square().sum().backward()
    assert len(calls) == 3
    assert all(p.grad.any() for p in list(model.visual.children())[-1].parameters())
    assert torch.equal(model(ids, places, context()), model(ids, places, context()))
    assert len(calls) == 5


def test_images_computed_together_are_those_alone(case, monkeypatch):
    """Every family's tower; the largest group is bounded, and sizes are not mixed."""
    model, _ = load_model(case.folder)
    store, tower = ImageStore(model.images.preprocessing), model.visual.double()
    pixels = [np.random.default_rng(seed).integers(0, 256, (40, 56, 3), dtype=np.uint8) for seed in range(5)]
    keys = [key_of(store.add(Picture.of(one.tobytes(), one))[0]) for one in pixels]
    with torch.no_grad():
        alone = [store._encoded([key], tower, torch.device("cpu"))[0] for key in keys]
        together = store._encoded(keys, tower, torch.device("cpu"))
    for ours, theirs in zip(together, alone, strict=True):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert not torch.allclose(alone[0][0], alone[1][0], atol=1e-3)
    parameters = list(tower.parameters())
    assert [len(group) for group in store._groups(keys, parameters)] == [
        1
    ] * 5  # PyTorch's products in float64
    monkeypatch.setattr(dispatch, "runs_cpp", lambda *_: True)
    monkeypatch.setattr("whet.model.vision.store.PATCHES_TOGETHER", 3 * len(store.patches(keys[0])))
    other = cases.picture(120, 30)
    keys.insert(1, key_of(store.add(Picture.of(other.tobytes(), other))[0]))
    groups = list(store._groups(keys, parameters))
    assert sorted(key for group in groups for key in group) == sorted(keys)
    assert all(len({store.grid(key) for key in group}) == 1 for group in groups)
    assert max(map(len, groups)) == 3


@pytest.mark.parametrize("is_trained", [False, True])
def test_small_images_are_computed_together_with_the_same_bits(tmp_path, is_trained):
    model, _ = load_model(save_seeing(tmp_path / "m"))
    model.visual.requires_grad_(is_trained)
    grown = [uri(colour, size=(32, 16)) for colour in range(4)]
    keys = [key_of(model.images.add(read_picture(source))[0]) for source in (uri(1), *grown, uri(2, 3))]
    calls = []
    model.visual.register_forward_hook(lambda *_: calls.append(1))
    together = model.images.features(keys, model.visual)
    has_kernels = dispatch.runs_cpp(torch.zeros(1, 16))
    assert len(calls) == (2 if has_kernels else 6)  # 2 x 4 tokens for five of them
    fresh = ImageStore(model.images.preprocessing)
    for source, ours in zip((uri(1), *grown, uri(2, 3)), together, strict=True):
        (alone,) = fresh.features([key_of(fresh.add(read_picture(source))[0])], model.visual)
        assert torch.equal(ours.tokens_ID, alone.tokens_ID)
        assert all(torch.equal(a, b) for a, b in zip(ours.deep, alone.deep, strict=True))
        # What is kept is of its own size, or the cache's limit would be one of numbers that are not counted.
        assert is_trained or ours.tokens_ID.untyped_storage().nbytes() == ours.tokens_ID.nbytes
    assert ours.tokens_ID.requires_grad == is_trained


def test_what_is_refused(case):
    model, _ = load_model(case.folder)
    made = cases.Case("", model, None, None, case.folder)
    ids = cases.prompt(made, ["a", (32, 32), "b"]).ids
    assert model.images is not None
    model.images.check(ids)
    with pytest.raises(UserError, match="the question: image .* tokens in one piece, of which"):
        model.images.check([*ids[:5], 1, 2], "the question")
    with pytest.raises(UserError, match="is not known to this model"):
        model.images.check(image_ids(5, 4))
    data = b"one file"
    pixels = cases.picture(32, 32)
    model.images.add(Picture.of(data, pixels))
    forged = digest_of(data)[:6] + bytes(26)
    with pytest.raises(UserError, match="two images have the key"):
        model.images.add(Picture(forged, 32, 32, lambda: pixels))


def test_the_cache_is_bounded(case):
    model, _ = load_model(case.folder)
    assert model.images is not None
    store = ImageStore(model.images.preprocessing, max_bytes=1)
    model.images = store
    ids = cases.prompt(cases.Case("", model, None, None, case.folder), [(32, 32), "a", (32, 48), "b"]).ids
    with torch.no_grad():
        first = model.logits(torch.tensor([ids]))
        assert torch.equal(model.logits(torch.tensor([ids])), first)
    assert len(store._cache) == 1


def test_two_threads_that_make_the_same_count_it_once(case):
    """A server's requests read patches while the model runs."""
    model = case.model
    store = ImageStore(model.images.preprocessing)
    other = torch.zeros(4)

    def make():  # while this thread makes them, another does
        store._kept(("patches", 1), lambda: (other,))
        return (torch.zeros(4),)

    store._kept(("patches", 1), make)
    assert store._num_bytes == other.nbytes


@pytest.mark.some(3)
def test_a_folder_is_written_as_it_was_read(case, tmp_path: Path):
    save_model(case.model, tmp_path)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path, case.folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again, config = load_model(tmp_path)
    assert config == case.model.config
    assert again.images.preprocessing == case.model.images.preprocessing
    prompt = cases.prompt(case, PROMPTS["one image"])
    again.images = case.model.images
    assert torch.equal(
        again.logits(torch.tensor([prompt.ids])), case.model.logits(torch.tensor([prompt.ids]))
    )
    reference = type(case.reference).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        theirs = cases.logits(cases.Case(case.name, case.model, reference, case.processor, tmp_path), prompt)
        assert torch.equal(theirs, cases.logits(case, prompt))


def sizes(count: int) -> list[tuple[int, int]]:
    """Return sizes from 5 pixels on: transformers takes an array of fewer rows for one of channels."""
    generator = np.random.default_rng(0)
    return [tuple(int(n) for n in generator.integers(5, 150, 2)) for _ in range(count)]


@pytest.mark.some(3)
def test_a_picture_is_made_into_their_patches(case):
    """On 200 sizes: the layout exactly, and pixels to the last bit (both resize with Pillow, in uint8)."""
    for height, width in sizes(200):
        pixels = cases.picture(height, width)
        theirs, layout = cases.their_patches(case, pixels)
        key = key_of(cases.add(case.model, pixels)[0])
        grid, side = case.model.images.grid(key), case.model.config.vision.merge
        is_qwen = cases.family(case.name) == "qwen"
        assert layout == ((grid.rows * side, grid.columns * side) if is_qwen else grid.tiles)
        assert torch.equal(case.model.images.patches(key), theirs)


def test_without_pillow_the_error_names_the_extra(case, monkeypatch):
    model, _ = load_model(case.folder)
    ids = cases.add(model, cases.picture(32, 40))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"images need Pillow: .*pip install .*\[vision\]'"):
        model.images.patches(key_of(ids[0]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"patch_size": 5}, "patch_size = '5' is not supported; expected 4"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std .* expected positive numbers"),
        ({"image_mean": [0.5]}, "image_mean .* expected three numbers"),
        ({"size": {"shortest_edge": 400, "longest_edge": 300}}, "pixels from 400 to 300: expected a range"),
        ({"do_normalize": False}, "do_normalize"),
    ],
)
def test_unusable_preprocessing_is_refused(changed, message):
    vision = cases.make_config("qwen3_vl").vision
    with pytest.raises(UserError, match=f"here: {message}"):
        read_preprocessing({**cases.PROCESSORS["qwen"], **changed}, vision, "here")


def test_impossible_pictures_are_refused(case):
    for height, width in ((1, 201), (0, 5)):
        with pytest.raises(UserError, match=f"an image of {width} x {height} pixels"):
            case.model.images.add(Picture(bytes(32), height, width, lambda: cases.picture(1, 1)))


def test_adapters_and_few_bits_leave_the_tower_alone(case):
    model, _ = load_model(case.folder)
    assert not [name for name in places(model) if name.startswith("visual.")]
    for text in ("all-linear", "q_proj", "*.self_attn.*", "*"):
        chosen = choose(model, LoRAConfig(rank=2, targets=(text,)))
        assert chosen
        assert not [target.name for target in chosen if target.name.startswith("visual.")]
    both = choose(model, LoRAConfig(rank=2, targets=("q_proj", "visual.*"), layers="0"))
    assert {target.name.partition(".")[0] for target in both} == {"model", "visual"}
    prompt = torch.tensor([cases.prompt(replace(case, model=model), PROMPTS["one image"]).ids])
    before = model.logits(prompt)
    attach(model, LoRAConfig(rank=2), both, seed=0)
    assert torch.equal(model.logits(prompt), before)  # B starts at 0
    for name, parameter in model.named_parameters():
        if name.startswith("visual.") and name.endswith("lora_B"):
            torch.nn.init.constant_(parameter, 0.1)
    assert not torch.equal(model.logits(prompt), before)  # the features were not taken from the cache


CHAT = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {
        "role": "user",
        "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "the color\n\nis?"}],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\n\nand the color of this?"}]},
]
TEMPLATE = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = {
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "gemma3": "gemma3",
    "llava": "llava_next",
    "llava-siglip": "llava_next",
    "smolvlm": "smolvlm",
    "idefics3": "idefics3",
}


def test_a_chat_with_images_has_the_ids_of_their_processor(case, tmp_path, monkeypatch):
    """Their public templates, of a tokenizer in which line breaks beside an image merge with others."""
    text = (TEMPLATE / f"{TEMPLATES[case.name]}.jinja").read_text()
    kind = {"smolvlm": "idefics3"}.get(case.name, case.name.partition("-")[0])
    folder = cases.tokenizer_folder(kind if kind in cases.MARKS else "qwen", tmp_path / "text", text)
    # Without torchvision transformers has no processor of films, which theirs insist on.
    monkeypatch.setattr(transformers.ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    processor = cases.their_processor(case, folder, text)
    pictures = [cases.picture(*size) for size in ((40, 56), (37, 21), (80, 33))]
    rendered = processor.apply_chat_template(CHAT, add_generation_prompt=True)
    groups = [pictures] if case.name in ("smolvlm", "idefics3") else pictures
    theirs = processor(text=rendered, images=groups, add_special_tokens=False)["input_ids"]
    theirs = list(theirs[0] if isinstance(theirs[0], list) else theirs)

    tokenizer = Tokenizer.load(folder)
    marks = [tokenizer.encode(mark)[0] for mark in cases.MARKS[kind if kind in cases.MARKS else "qwen"][:3]]
    own = {"start_id": marks[1], "end_id": marks[2]} if case.name == "gemma3" else {}
    vision = replace(case.model.config.vision, token_id=marks[0], **own)
    store = ImageStore(replace(case.model.images.preprocessing, vision=vision))
    keys = [store.add(Picture.of(picture.tobytes(), picture))[0] for picture in pictures]
    keys = [key_of(token) for token in keys]
    values = {"messages": CHAT, "add_generation_prompt": True, "bos_token": "<bos>"}
    ours = render_template(text, values)
    assert ours == rendered
    ids = store.named(tokenizer.encode(store.expanded(ours, keys, tokenizer.token_text)), keys)
    assert store.readable(ids) == theirs
    assert keys_in(ids) == tuple(keys)
    store.check(ids)
    with pytest.raises(UserError, match="3 image placeholders .* for 2 images"):
        store.expanded(ours, keys[:2], tokenizer.token_text)
    with pytest.raises(UserError, match="placeholder tokens .* for images of"):
        store.named(theirs[1:], keys[:2])


OLD_NAMES = {
    "qwen3_vl": ("model.language_model.", "model."),
    "qwen2_5_vl": ("visual.", "model.visual."),
    "gemma3": ("language_model.model.", "model.language_model."),
    "llava": ("vision_tower.vision_model.", "model.vision_tower."),
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_other_names_of_the_same_tensors(name, tmp_path):
    case = cases.make(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    new, old = OLD_NAMES[name]
    renamed = {old + k.removeprefix(new) if k.startswith(new) else k: v for k, v in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    again, _ = load_model(tmp_path)
    assert all(torch.equal(p, case.model.get_parameter(n)) for n, p in again.named_parameters())


def test_the_first_files_of_qwen2_5_vl(tmp_path):
    """The decoder's keys stand among the others, and the rope is of a kind of its own."""
    case = cases.make("qwen2_5_vl", tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    text = data.pop("text_config")
    own = text.pop("rope_parameters")
    for key in ("model_type", "layer_types", "sliding_window"):
        text.pop(key)
    text |= {
        "rope_theta": own["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": own["mrope_section"]},
    }
    data["vision_config"] |= {"in_chans": 3, "spatial_patch_size": 4}
    (tmp_path / "config.json").write_text(json.dumps({**text, **data}))
    model, config = load_model(tmp_path)
    assert (config.vision, config.block) == (case.model.config.vision, case.model.config.block)
    save_model(model, tmp_path / "again")
    again, config = load_model(tmp_path / "again")
    assert config.vision == case.model.config.vision
    reference = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "again").eval()
    prompt = cases.prompt(replace(case, model=again), PROMPTS["one image"])
    with torch.no_grad():
        theirs = cases.logits(replace(case, reference=reference), prompt)
        assert (again.logits(torch.tensor([prompt.ids]))[0] - theirs).abs().max() < FLOAT


@pytest.mark.parametrize(
    ("name", "place", "changed", "message"),
    [
        (
            "qwen3_vl",
            "vision_config",
            {"out_hidden_size": 48},
            "out_hidden_size = 48: expected hidden_size = 32",
        ),
        ("qwen3_vl", "vision_config", {"num_position_embeddings": 17}, "expected a square number"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [3]}, "expected 0 to 2"),
        ("qwen3_vl", "vision_config", {"foo": 1}, "key 'foo' is not known"),
        ("qwen3_vl", "text_config", {"rope_parameters": {"mrope_section": [1, 2, 3]}}, "with the sum 8"),
        ("qwen3_vl", "text_config", {"model_type": "llama"}, "text_config of model_type 'llama'"),
        ("qwen2_5_vl", "vision_config", {"window_size": 4}, "window_size = 4"),
        ("gemma3", "", {"mm_tokens_per_image": 10}, "expected a square number"),
        ("llava", "", {"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        (
            "llava",
            "",
            {"vision_feature_select_strategy": "full"},
            "expected 'default' for a clip_vision_model",
        ),
        ("llava", "vision_config", {"model_type": "pixtral"}, "'pixtral' is not supported"),
        ("smolvlm", "", {"scale_factor": 3}, "scale_factor = 3: expected a divisor of 8 patches"),
        ("smolvlm", "vision_config", {"num_attention_heads": 3}, "a width of 32 in 3 heads"),
    ],
)
def test_what_would_not_be_computed_is_refused(name, place, changed, message):
    data = json.loads(cases.CASES[name]().config.to_json_string(use_diff=False))
    (data[place] if place else data).update(changed)
    with pytest.raises(UserError, match=message):
        from_hf(data)


def test_prefill_and_decoding_have_the_trainers_bits(case):
    """Completion tokens need not know of images: position and place are one."""
    model = case.model
    prompts = [cases.prompt(case, PROMPTS[name]).ids for name in ("several images", "no image", "odd sizes")]
    lengths, drawn = [len(ids) for ids in prompts], [[5, 6, 7], [8, 9, 1], [2, 3, 4]]
    size = CacheSize(rows=3, prompt=max(lengths), completion=4, context=4096, prompts=3)
    has_kernel = dispatch.runs_cpp(torch.empty(0, model.config.head_dim), operation="attention")
    is_tiled = has_kernel and model.config.head_dim in CHANNELS and not has_own_rules(model.config)
    cache = KVCache(
        model.config, size, torch.float32, torch.device("cpu"), is_tiled=is_tiled
    )  # as the engine does
    tokens = torch.tensor([token for ids in prompts for token in ids])
    places = torch.cat([torch.arange(length) for length in lengths])
    with torch.inference_mode():
        homes = cache.place(prompts, [[0], [1], [2]])
        read = model(tokens, places, Prefill(cache, homes, lengths, "exact")).split(lengths)
        cache.give(homes, [[0], [1], [2]], lengths)
        steps = []
        for step in range(3):
            at = torch.tensor(lengths) + step
            context = Decode(cache, at, cache.capacity, "exact")
            steps.append(model(torch.tensor([ids[step] for ids in drawn]), at, context))
    with torch.no_grad():
        for row, (prompt, own) in enumerate(zip(prompts, drawn, strict=True)):
            ids = torch.tensor([*prompt, *own])
            whole = model(ids, torch.arange(len(ids)), Packed([len(ids)], ids.device))
            assert torch.equal(whole[: len(prompt)], read[row])
            assert torch.equal(whole[len(prompt) :], torch.stack([hidden[row] for hidden in steps]))


@pytest.mark.some(3)
def test_gradients_are_finite_differences(case):
    """Of the decoder's and of the tower's parameters, in float64, along one random direction."""
    model, _ = load_model(case.folder, dtype=torch.float64)
    prompt = torch.tensor([cases.prompt(replace(case, model=model), PROMPTS["several images"]).ids])
    model.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(prompt.shape[1], model.config.vocab_size, generator=generator, dtype=torch.float64)

    def loss() -> torch.Tensor:
        return (torch.log_softmax(model.logits(prompt)[0], -1) * weights).sum() / len(weights)

    loss().backward()
    steps = {}
    for name, parameter in model.named_parameters():
        steps[name] = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    for is_tower in (False, True):
        moved = {n: p for n, p in model.named_parameters() if n.startswith("visual.") == is_tower}
        slope = sum(float((p.grad * steps[n]).sum()) for n, p in moved.items() if p.grad is not None)
        sides = []
        with torch.no_grad():
            for sign in (1, -2):
                for name, parameter in moved.items():
                    parameter.add_(steps[name], alpha=sign * 1e-5)
                sides.append(float(loss()))
            for name, parameter in moved.items():
                parameter.add_(steps[name], alpha=1e-5)
        assert abs(slope) > 1e-2
        assert abs((sides[0] - sides[1]) / 2e-5 - slope) < 1e-4 * max(1.0, abs(slope))


@pytest.mark.some(2)
# Any other warning is an error: peft warns of tensors that are missing.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "gemma3", "smolvlm"])
def test_adapters_have_the_names_that_peft_reads(name, tmp_path):
    """Of the decoder and of the tower; written by us, read by peft into transformers' model, and by us again."""
    case = cases.make(name, tmp_path / "base")
    targets = ("q_proj", "down_proj", "visual.*")
    trained = Trained(
        case.model, LoRAConfig(rank=2, targets=targets), base=Base.of(str(case.folder), case.folder), seed=0
    )
    with torch.no_grad():
        for number, (_, parameter) in enumerate(trained.named_parameters()):
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.05
            )
    trained.write(tmp_path / "adapter")
    prompt = cases.prompt(case, PROMPTS["several images"])
    with torch.no_grad():
        ours = case.model.logits(torch.tensor([prompt.ids]))[0]
        plain = cases.logits(case, prompt)
        case.reference = peft.PeftModel.from_pretrained(case.reference, str(tmp_path / "adapter")).eval()
        case.reference.model.rope_deltas = None
        theirs = case.reference(**cases.inputs(case, prompt)).logits[0]
        assert (plain - theirs).abs().max() > 0.01
        assert (ours - theirs).abs().max() < FLOAT
        again, _ = load_model(case.folder)
        again.images = case.model.images
        adapter = read_adapter(tmp_path / "adapter")
        again = adapter.fit(again)
        adapter.apply(again)
        assert torch.equal(again.logits(torch.tensor([prompt.ids]))[0], ours)
