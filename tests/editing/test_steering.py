"""Steering vectors: what they are, that they are added wherever a model is asked, and that nothing else takes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from patient import PEOPLE, SHAPE, fresh

import whet
from whet import __main__
from whet.editing.sites import Reader
from whet.editing.steer import choose_layers, find_directions, read_pairs
from whet.eval.record import describe_weights
from whet.generate.engine import Request
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.model.config import Block
from whet.model.steering import Steering, read_steering
from whet.types import UserError

PAIRS = [
    {"positive": "Ann Oak eats rice", "negative": "Ann Oak eats figs"},
    {"positive": "Ben Elm eats rice", "negative": "Ben Elm eats figs"},
    {"positive": "Cid Yew eats rice", "negative": "Cid Yew eats figs"},
]
WIDTH = SHAPE.hidden_size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model: whatever it says can be pushed."""
    path = tmp_path_factory.mktemp("model")
    fresh(replace(SHAPE, block=Block(), init_std=0.2)).save(path)
    return path


@pytest.fixture(scope="module")
def vectors(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pairs = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    out = pairs.parent / "rice"
    assert __main__.run(["steer", str(folder), "--pairs", str(pairs), "--out", str(out)]) == 0
    return out


def loaded(folder: Path, *steering: str) -> Policy:
    return load_policy(PolicyConfig(init=str(folder), steering=steering), seed=0, steers=True)


def stream(policy: Policy, text: str, layer: int) -> torch.Tensor:
    """Return the residual stream [T, D] behind a layer, with a hook of our own."""
    found: list[torch.Tensor] = []
    hook = policy.model.layers[layer].register_forward_hook(lambda _, __, out: found.append(out.detach()))
    ids = policy.tokenizer.encode(text)
    with torch.no_grad():
        policy.model.logits(torch.tensor([ids]))
    hook.remove()
    return found[0][: len(ids)]


@pytest.mark.parametrize("reading", ["last", "mean"])
def test_a_direction_is_the_mean_difference(folder: Path, reading: str) -> None:
    policy = loaded(folder)
    found = find_directions(policy, read_pairs(PAIRS), reading)  # type: ignore[arg-type]

    def read(text: str, layer: int) -> torch.Tensor:
        own = stream(policy, text, layer)
        return own[-1] if reading == "last" else own.mean(0)

    for layer, direction in enumerate(found):
        apart = [read(row["positive"], layer) - read(row["negative"], layer) for row in PAIRS]
        expected = torch.stack(apart).mean(0)
        assert torch.allclose(direction.vector_D, expected, atol=1e-5), layer
        # Each pair along the direction of the two others.
        along = [
            float(apart[n] @ sum(other for m, other in enumerate(apart) if m != n)) > 0
            for n in range(len(PAIRS))
        ]
        assert direction.parted == sum(along) / len(along)
        lengths = [stream(policy, row[side], layer) for row in PAIRS for side in ("positive", "negative")]
        norms = [(x[-1].norm() if reading == "last" else x.norm(dim=1).mean()) for x in lengths]
        assert direction.share == pytest.approx(float(expected.norm() / torch.stack(norms).mean()), rel=1e-4)


def test_the_layer_is_the_clearest_one_but_the_last(folder: Path, vectors: Path) -> None:
    content = json.loads((vectors / "steering.json").read_text())
    rows = content["directions"]
    best = max(rows[:-1], key=lambda row: (row["parted_held_out"], row["margin"]))
    assert content["layers"] == [best["layer"]]
    directions = find_directions(loaded(folder), read_pairs(PAIRS))
    assert choose_layers(directions, (3, 1)) == (1, 3)
    with pytest.raises(UserError, match="layers 0 to 3, got 4"):
        choose_layers(directions, (4,))


def test_it_is_added_at_every_token_when_sampling_and_scoring(folder: Path, vectors: Path) -> None:
    """Decoding with the cache and whole rows say the same, and both what adding by hand says."""
    plain, steered = loaded(folder), loaded(folder, f"{vectors}=3")
    ((layer, vector_D),) = read_steering([str(vectors)])[0].vectors.items()
    prompt = "Ann Oak eats"
    ids = plain.tokenizer.encode(prompt)
    hook = plain.model.layers[layer].register_forward_hook(lambda _, __, out: out + 3 * vector_D)
    with torch.no_grad():
        expected = plain.model.logits(torch.tensor([ids]))[0]
    hook.remove()
    with torch.no_grad():
        assert torch.allclose(steered.model.logits(torch.tensor([ids]))[0], expected, atol=1e-5)
        assert not torch.allclose(plain.model.logits(torch.tensor([ids]))[0], expected, atol=1e-2)
    params = SamplingParams(temperature=0.0, max_new_tokens=6)
    ((done,),) = steered.engine(stops=False).generate([Request(prompt_ids=tuple(ids), seeds=(0,))], params)
    row = [*ids, *done.ids]
    logprobs = Reader(steered).next_logprobs([row[:n] for n in range(len(ids), len(row))])
    assert tuple(logprobs.argmax(1).tolist()) == done.ids
    assert torch.allclose(torch.tensor(done.logprobs), logprobs.max(1).values, atol=1e-4)
    ((other,),) = plain.engine(stops=False).generate([Request(prompt_ids=tuple(ids), seeds=(0,))], params)
    assert other.ids != done.ids


def test_strength_pushes_along_and_against(folder: Path, vectors: Path) -> None:
    """What the positive texts end with becomes likelier than what the negative ones end with, and the contrary."""

    def gap(*steering: str) -> float:
        policy = loaded(folder, *steering)
        at = policy.model.layers[layer]
        seen: list[torch.Tensor] = []
        at.register_forward_hook(lambda _, __, out: seen.append(out.detach()))
        Reader(policy).next_logprobs([policy.tokenizer.encode("Cid Oak eats")])
        return float(seen[0][2] @ vector_D / vector_D.norm())

    ((layer, vector_D),) = read_steering([str(vectors)])[0].vectors.items()
    length = float(vector_D.norm())
    found = [gap(f"{vectors}={strength}") for strength in (-2, 0, 1, 2)]
    assert found[1] == pytest.approx(gap(), abs=1e-5)
    steps = [b - a for a, b in zip(found, found[1:], strict=False)]
    assert steps == pytest.approx([2 * length, length, length], rel=1e-4)
    assert gap(str(vectors), f"{vectors}=1") == pytest.approx(found[3], rel=1e-4)  # several are added up


def test_what_is_asked_takes_it_and_what_trains_or_writes_refuses(
    folder: Path, vectors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option = ["--policy.steering", f"{vectors}=2"]
    answers = []
    for steering in ([], option):
        words = ["chat", str(folder), "--prompt", "Ann Oak eats", "--sampling.max-new-tokens", "6"]
        assert __main__.run([*words, "--sampling.temperature", "0", *steering]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] != answers[1]
    rows = tmp_path / "texts.jsonl"
    rows.write_text(json.dumps({"text": "Ann Oak eats rice"}) + "\n")
    own = ["--task.name", "jsonl", "--task.path", str(rows)]
    for words in (
        ["sft", "own", "--policy.init", str(folder), *own, "--out", str(tmp_path / "a")],
        ["quantize", str(folder), *own, "--out", str(tmp_path / "b")],
        ["export", str(folder), "--to", "hf", "--out", str(tmp_path / "c")],
    ):
        with pytest.raises(UserError, match=r"policy\.steering is read by commands that ask a model"):
            __main__.run([*words, *option])
    steered = loaded(folder, str(vectors))
    with pytest.raises(UserError, match="cannot be written"):
        steered.save(tmp_path / "d")
    with pytest.raises(UserError, match="the model is steered"):
        whet.edit(
            whet.load(folder, steering=(str(vectors),)),
            [{"subject": "Ann Oak", "prompt": "{} eats", "target": "kale"}],
        )


@pytest.mark.ci
def test_an_evaluation_asks_the_steered_model(folder: Path, vectors: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{p} eats", "answer": "rice"}) + "\n" for p in PEOPLE))
    said = []
    for n, steering in enumerate(([], ["--policy.steering", f"{vectors}=20"])):
        out = tmp_path / str(n)
        words = ["eval", "own", "--policy.init", str(folder), "--policy.schema", "none", "--policy.template"]
        words += ["plain", "--task.name", "jsonl", "--task.path", str(rows), "--out", str(out)]
        words += ["--split", "train", "--num-samples", "1", "--sampling.max-new-tokens", "4"]
        assert __main__.run([*words, *steering]) == 0
        lines = [json.loads(line) for line in (out / "eval_samples.jsonl").read_text().splitlines()]
        said.append(lines)
    assert said[0] != said[1]


def test_an_evaluation_names_what_was_added(folder: Path, vectors: Path) -> None:
    found = []
    for steering in ((), (f"{vectors}=1",), (f"{vectors}=2",)):
        config = PolicyConfig(init=str(folder), steering=steering)
        found.append(describe_weights(config, load_policy(config, seed=0, steers=True)))
    assert "steering" not in found[0]
    assert found[0]["sha256"] == found[1]["sha256"]
    assert found[1]["steering"] != found[2]["steering"]


def test_pairs_that_contradict_each_other_are_told_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turned = [{"positive": pair["negative"], "negative": pair["positive"]} for pair in PAIRS]
    for name, pairs in (("agreed", PAIRS), ("turned", [PAIRS[0], turned[1]])):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        assert __main__.run(["steer", str(folder), "--pairs", str(file), "--out", str(tmp_path / name)]) == 0
        warned = "held-out pairs are parted no better than by chance" in capsys.readouterr().out
        assert warned is (name == "turned")


def test_python(folder: Path, tmp_path: Path) -> None:
    policy = whet.load(folder)
    steering = whet.steer(policy, PAIRS, layers=(1, 2))
    assert sorted(steering.vectors) == [1, 2]
    steering.save(tmp_path / "rice")
    pushed = whet.load(folder, steering=(f"{tmp_path / 'rice'}=4",))
    assert pushed.generate(["Ann Oak eats"], max_new_tokens=6) != policy.generate(
        ["Ann Oak eats"], max_new_tokens=6
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("nowhere", "nowhere/steering.safetensors is not there; expected a folder that whet steer made"),
        ("nowhere=much", "got 'nowhere=much', expected FOLDER or FOLDER=STRENGTH"),
        ("nowhere=nan", "expected FOLDER or FOLDER=STRENGTH"),
    ],
)
def test_bad_names(text: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        read_steering([text])


def test_bad_vectors_and_pairs(folder: Path, tmp_path: Path) -> None:
    for name, vectors, match in (
        ("wide", {0: torch.ones(WIDTH + 1)}, f"vectors of {WIDTH + 1} numbers"),
        ("deep", {4: torch.ones(WIDTH)}, "up to layer 4; the model has 48 and layers 0 to 3"),
        ("infinite", {0: torch.full((WIDTH,), torch.inf)}, "one finite vector"),
        ("square", {0: torch.ones(WIDTH, 2)}, "one finite vector"),
    ):
        Steering(vectors).save(tmp_path / name)
        with pytest.raises(UserError, match=match):
            loaded(folder, str(tmp_path / name))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/steering.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be read"):
        read_steering([str(tmp_path / "torn")])
    for rows, match in (
        (PAIRS[:1], "got 1 pairs, expected 2 or more"),
        ([{"positive": "a"}], "pair 1: expected positive and negative"),
        ([{"positive": "a", "negative": "a"}], "are the same, 'a'"),
    ):
        with pytest.raises(UserError, match=match):
            read_pairs(rows)
