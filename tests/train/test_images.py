"""Training on prompts with images: sampler and trainer agree bitwise, whatever is packed together, and runs resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from seeing import png, save_model, uri

import whet
from whet.algo.packing import TrainingSequence, pack
from whet.generate.engine import Request
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.model.lora.side import LoRAConfig
from whet.model.lora.trained import Base, Trained
from whet.model.vision.ids import is_image
from whet.model.weights import build_model
from whet.types import Message, Problem, UserError


def problem(text: str, *images: str, **more) -> Problem:
    return Problem(uid=f"{text}{len(images)}", task="look", prompt=text, answer="1", images=images, **more)


ONE = problem("ab=", uri(10, 200))
OTHER = problem("ab=", uri(10, 201))
MANY = problem("abc=", uri(0), uri(90, 3, 17), uri(255, 7))
NONE = problem("ab=")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("seeing") / "model")


def load(folder, **options) -> Policy:
    return load_policy(PolicyConfig(init=str(folder), **options), seed=0)


def sampled(policy: Policy, problems, num_samples: int = 3, **params):
    requests = [
        Request(prompt_ids=policy.prompt_ids(p), seeds=tuple(range(10 * n, 10 * n + num_samples)))
        for n, p in enumerate(problems)
    ]
    drawn = policy.engine(trains=True).generate(requests, SamplingParams(max_new_tokens=12, **params))
    return [
        TrainingSequence(
            prompt_ids=request.prompt_ids, completion_ids=d.ids, sampler_logprobs=d.logprobs, kept=d.kept
        )
        for request, row in zip(requests, drawn, strict=True)
        for d in row
    ]


def scored(policy: Policy, sequences, budget: int) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for micro in pack(sequences, token_budget=budget).micro_batches:
            logprobs_M = policy.score(micro)[0]
            for place, index in enumerate(micro.indices_B):
                found[index] = logprobs_M[micro.sequence_M == place]
    return [found[index] for index in range(len(sequences))]


def adapted(policy: Policy) -> Policy:
    trained = Trained(policy.model, LoRAConfig(rank=4), base=Base("", policy.folder), seed=0)
    for _, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    policy.trained = trained
    return policy


KINDS = {
    "plain": lambda folder: load(folder),
    "adapter": lambda folder: adapted(load(folder)),
    "4 bits": lambda folder: load(folder, quantize="nf4"),
    "adapter beside 4 bits": lambda folder: adapted(load(folder, quantize="nf4")),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}])
@pytest.mark.parametrize("kind", KINDS)
def test_sampler_and_trainer_agree_bitwise(folder, kind, params):
    """Alone, with others in one micro-batch, and with the prompt of a group computed once."""
    policy = KINDS[kind](folder)
    sequences = sampled(policy, [ONE, MANY, NONE, OTHER], **params)
    for budget in (1, 60, 4096):
        for sequence, logprobs in zip(sequences, scored(policy, sequences, budget), strict=True):
            assert logprobs.tolist() == list(sequence.sampler_logprobs), budget


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 1}], ids=str)
def test_the_placeholder_of_images_is_never_drawn(folder, params):
    """Even where it is the likeliest; what is drawn has its share of the whole vocabulary, as in transformers."""
    policy = load(folder)
    place = policy.model.config.vision.token_id
    with torch.no_grad():  # now the placeholder's logit is as large as any other token's, or larger
        policy.model.head_weight[place] = 3 * policy.model.head_weight.abs().amax(0)
        policy.model.head_weight[place + 1 :] *= 0.1
    sequences = sampled(policy, [ONE, MANY, NONE], 8, **params)
    with torch.no_grad():
        (micro,) = pack(sequences, token_budget=4096).micro_batches
        hidden_MD = policy.hidden(micro)
        shares = (hidden_MD @ policy.model.head_weight.T).log_softmax(-1)
    assert shares[:, place].exp().max() > 0.1
    assert all(place not in sequence.completion_ids for sequence in sequences)
    if params.get("temperature") == 0.0 or not params:
        told = torch.cat([torch.tensor(s.sampler_logprobs) for s in sequences]).sort().values
        expected = shares.gather(1, micro.targets_M[:, None]).squeeze(1).sort().values
        torch.testing.assert_close(told, expected, atol=1e-5, rtol=0)


def test_images_matter(folder):
    """Prompts of the same words with another image are other prompts, and get other answers."""
    policy = load(folder)
    one, other, none = (policy.prompt_ids(p) for p in (ONE, OTHER, NONE))
    assert len(one) == len(other)
    assert one != other
    assert [i for i in one if not is_image(i)] == list(none)
    rows = sampled(policy, [ONE, OTHER], num_samples=1, temperature=0.0)
    sequences = [replace(row, completion_ids=rows[0].completion_ids, sampler_logprobs=()) for row in rows]
    first, second = scored(policy, sequences, 4096)
    assert (first - second).abs().max() > 1e-4


def test_gradients_are_those_of_each_sequence_alone(folder):
    """The tower's, too, where it is trained; a prompt's image that a group shares counts as often as it is read."""
    policy = load(folder, train_vision=True)
    sequences = sampled(policy, [ONE, MANY, OTHER], num_samples=2)
    policy.model.double()

    def gradients(budget: int) -> dict[str, torch.Tensor]:
        policy.model.zero_grad()
        for micro in pack(sequences, token_budget=budget, dtype=torch.float64).micro_batches:
            weights_M = torch.tensor(micro.indices_B, dtype=torch.float64)[micro.sequence_M] + 1
            (policy.score(micro)[0] * weights_M).sum().backward()
        return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}

    alone, together = gradients(1), gradients(4096)
    assert any(name.startswith("visual.") for name in alone)
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        assert (value - together[name]).abs().max() <= 1e-10 * (1 + value.abs().max()), name


def test_the_tower_is_trained_where_asked_only(folder):
    for is_trained in (False, True):
        policy = load(folder, train_vision=is_trained)
        (micro,) = pack(sampled(policy, [ONE], num_samples=1), token_budget=4096).micro_batches
        policy.score(micro)[0].sum().backward()
        grads = [p.grad for name, p in policy.model.named_parameters() if name.startswith("visual.")]
        assert all((grad is not None) == is_trained for grad in grads)


def test_messages_have_images_in_any_turn(folder):
    policy = load(folder)
    messages = (
        Message(role="user", content="a", images=(uri(1),)),
        Message(role="assistant", content="b"),
        Message(role="user", content="c", images=(uri(2), uri(3))),
    )
    ids = policy.prompt_ids(problem("c", messages=messages))
    assert sum(map(is_image, ids)) == 3 * 4
    parts = [{"type": "image_url", "image_url": {"url": uri(1)}}, {"type": "text", "text": "a"}]
    openai = [{"role": "user", "content": parts}]
    assert policy.chat_ids(openai) == policy.prompt_ids(problem("a", uri(1)))


def test_images_of_messages_in_python(folder, tmp_path, monkeypatch):
    """Every form names the same file, or holds it."""
    monkeypatch.chdir(tmp_path)
    Path("a.png").write_bytes(png(uri(1)))
    policy = whet.load(folder)

    def logprobs(part):
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "a"}]}]
        return whet.logprobs(policy, messages, "b")

    expected = logprobs({"type": "image_url", "image_url": {"url": uri(1)}})
    forms = ["a.png", Path("a.png"), f"file://{tmp_path}/a.png", png(uri(1)), Image.open("a.png"), uri(1)]
    for form in forms:
        assert logprobs({"type": "image", "image": form}) == expected
    assert (
        logprobs({"type": "image", "url": "a.png"})
        == logprobs({"type": "image", "path": "a.png"})
        == expected
    )
    assert logprobs({"type": "image", "base64": uri(1).partition(",")[2]}) == expected
    assert logprobs({"type": "image", "image": uri(200)}) != expected
    with pytest.raises(UserError, match="message 0: 'image' of an image part is ndarray; expected a path"):
        logprobs({"type": "image", "image": np.zeros((16, 16, 3))})


def test_refusals(folder, tmp_path):
    policy = load(folder)
    with pytest.raises(UserError, match="2 image placeholders"):
        policy.prompt_ids(problem("a<image>b", uri(1)))
    ids = policy.prompt_ids(ONE)
    with pytest.raises(UserError, match="whole or not at all"):
        policy.engine().check(ids[:3])
    text = Policy(build_model(replace(policy.model.config, vision=None)), policy.tokenizer, policy.schema)
    with pytest.raises(UserError, match="reads text alone"):
        text.prompt_ids(ONE)
    with pytest.raises(UserError, match="reads text alone"):
        text.engine().check(ids)
    with pytest.raises(UserError, match="'image' with a path"):
        policy.chat_ids([{"role": "user", "content": [{"type": "image"}]}])
