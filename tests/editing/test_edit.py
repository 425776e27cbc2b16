"""Edits of a model that knows facts: written, generalised, local, undone bit by bit, stored, composed, traced."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from patient import EATS, HOMES, LIVES, PEOPLE, SHAPE, TASTES, fresh, patient, says, trained

from whet.editing.editor import Editor, MethodConfig, _Counted, report_of
from whet.editing.facts import Fact, read_facts
from whet.editing.memory import solve
from whet.editing.methods import TuneConfig, mean_keys
from whet.editing.record import Record
from whet.editing.sites import Reader, chosen_memories
from whet.editing.statistics import digest_of, digests_of, gather_moments
from whet.editing.targets import TargetConfig
from whet.editing.trace import answer_id, attention_maps, attribution, causal_trace, locate, logit_lens
from whet.generate.policy import Policy
from whet.types import UserError

PROSE = " ".join(f"{text} ." for text in (f"{p} is a friend" for p in PEOPLE)) + " Hello there ."
CITIES = ("Rome", "Oslo", "Lima", "Kyiv", "Bern")

pytestmark = pytest.mark.ci  # it trains its patient


def facts(count: int = 3) -> list[Fact]:
    """Return edits that move people to another city, with the two other ways to ask, and neighbours."""
    rows: list[dict[str, Any]] = []
    for n, person in enumerate(PEOPLE[:count]):
        new = CITIES[(CITIES.index(HOMES[person]) + 1 + n % 3) % 5]
        others = PEOPLE[count : count + 4]
        rows.append(
            {
                "subject": person,
                "prompt": LIVES[2],
                "target": new,
                "true": HOMES[person],
                "paraphrases": [template.replace("{}", person) for template in LIVES[:2]],
                "neighbours": [
                    {"prompt": LIVES[2].replace("{}", other), "answer": HOMES[other]} for other in others
                ],
            }
        )
    return read_facts(rows)


@pytest.fixture
def editor(tmp_path: Path) -> Editor:
    made = Editor(patient(), "patient", cache=tmp_path / "cache")
    made.set_prose(PROSE, 10_000)
    return made


def state(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}


def assert_same(policy: Policy, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_the_patient_knows_its_facts() -> None:
    """What the other tests stand on."""
    policy = patient()
    for template in LIVES:
        assert says(policy, [template.replace("{}", p) for p in PEOPLE]) == list(HOMES.values())
    for template in EATS:
        assert says(policy, [template.replace("{}", p) for p in PEOPLE]) == list(TASTES.values())


@pytest.mark.parametrize("method", ["memit", "rome", "r-rome", "alphaedit", "ft", "lora"])
def test_every_method_writes_facts_and_undo_is_bitwise(editor: Editor, method: Any, tmp_path: Path) -> None:
    before, wanted = state(editor.policy), facts(3 if method in ("memit", "alphaedit", "lora") else 1)
    layers = () if method == "lora" else (0, 1) if method in ("memit", "alphaedit") else (0,)
    tune = TuneConfig(steps=40, lr=1e-2, bound=0.2 if method == "ft" else 5e-4, rank=4)
    config = MethodConfig(
        method=method,
        layers=layers,
        num_contexts=2,
        context_tokens=3,
        prose_weight=2.0,
        tune=tune,
        null_share=0.2,
    )
    old = editor.measure(wanted)
    batch = editor.write(wanted, config)
    content = report_of(wanted, old, editor.measure(wanted))
    assert says(editor.policy, [fact.text for fact in wanted]) == [fact.target for fact in wanted]
    metrics = content["metrics"]
    assert metrics["efficacy"]["before"] == 0.0
    assert metrics["efficacy"]["after"]["mean"] == 1.0
    assert metrics["efficacy_accuracy"]["after"]["mean"] == 1.0
    assert metrics["first_token_p"]["after"]["mean"] > 0.5
    changed = {n for n, t in editor.policy.model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == set(batch.deltas) == set(batch.norms)
    if method != "ft":
        assert all(d.left_DR.shape[1] <= max(4, len(wanted)) for d in batch.deltas.values())
    if method in ("memit", "r-rome"):  # what lies beside is left alone
        assert metrics["neighbourhood"]["after"]["mean"] >= 0.75
    (tmp_path / "saved").mkdir()
    editor.record.write(tmp_path / "saved")
    again = Record.read(tmp_path / "saved")
    copy = patient()
    for one in again.batches:
        one.apply(copy.model)
    assert digest_of(copy.model) == batch.digest == digest_of(editor.policy.model)
    editor.undo()
    assert_same(editor.policy, before)
    again.remove(copy.model, ())
    assert_same(copy, before)


def test_batches_in_a_row_and_one_taken_out(editor: Editor) -> None:
    start, wanted = state(editor.policy), facts(4)
    config = MethodConfig(
        layers=(0, 1), num_contexts=0, prose_weight=0.2, target=TargetConfig(steps=40, clamp=2.0)
    )
    editor.write(wanted[:2], config)
    middle = state(editor.policy)
    editor.write(wanted[2:], config)
    asked = [fact.text for fact in wanted]
    assert says(editor.policy, asked) == [fact.target for fact in wanted]  # the first two are still there
    (warning,) = editor.check(wanted[:1], config)
    assert "batch 1 made" in warning
    editor.undo((2,))
    assert_same(editor.policy, middle)
    editor.write(wanted[2:], config)
    editor.undo((1,))
    assert says(editor.policy, asked[2:]) == [fact.target for fact in wanted[2:]]
    assert says(editor.policy, asked[:2]) == [fact.true for fact in wanted[:2]]
    with pytest.raises(UserError, match="batch 3: there are batches 1 to 1"):
        editor.undo((3,))
    editor.undo()
    assert_same(editor.policy, start)


def test_a_fact_that_is_written_again_is_not_held_where_it_was(editor: Editor) -> None:
    wanted = facts(3)
    weak = MethodConfig(
        layers=(1,), num_contexts=0, prose_weight=6.0, target=TargetConfig(steps=10, clamp=0.5)
    )
    first, second = editor.write(wanted, weak), editor.write(wanted[1:], weak)
    earlier = editor.record.earlier_keys
    assert torch.equal(earlier()[1], torch.cat([first.keys[1][:1], second.keys[1]]))
    assert torch.equal(earlier(wanted[1:2])[1], torch.cat([first.keys[1][:1], second.keys[1][1:]]))
    assert len(earlier(wanted)[1]) == 0
    # The second batch keeps the first fact's key where it is, and no other.
    (moment,) = editor._moments(chosen_memories(editor.policy.model, (1,)), 0).values()
    keys, other = second.keys[1].double(), first.keys[1][:1].double()
    wanted_EF = solve(6.0 * moment + keys.t() @ keys + other.t() @ other, keys.t()).t()
    (delta,) = second.deltas.values()
    worst = float((delta.right_RF.double() - wanted_EF).norm() / wanted_EF.norm())
    assert worst < 1e-5  # stored in float32
    editor.undo()


@pytest.mark.parametrize("method", ["memit", "alphaedit"])
def test_facts_that_are_to_stay_hold_their_keys(editor: Editor, method: Any) -> None:
    """They are keys whose values do not change, as those of earlier edits are; and nothing else differs."""
    wanted = facts(3)
    config = MethodConfig(
        method=method,
        layers=(1,),
        num_contexts=2,
        context_tokens=3,
        prose_weight=0.5,
        null_share=0.9,
        target=TargetConfig(steps=10),
    )
    staying = read_facts([{"subject": p, "prompt": LIVES[2]} for p in PEOPLE[3:9]], needs_target=False)
    (memory,) = chosen_memories(editor.policy.model, (1,))
    held_EF = mean_keys(editor.reader, [memory], staying, editor._contexts_of(config, 0))[1]

    def moved(kept: list[Fact]) -> float:
        editor.set_kept(kept)
        batch = editor.write(wanted, config)
        (delta,) = batch.deltas.values()
        assert batch.settings["kept"] == len(kept)
        if method == "memit" and kept:
            (moment,) = editor._moments([memory], 0).values()
            keys = batch.keys[1].double()
            expected = solve(0.5 * moment + keys.t() @ keys + held_EF.t() @ held_EF, keys.t()).t()
            assert float((delta.right_RF.double() - expected).norm() / expected.norm()) < 1e-5
        editor.undo()
        change_DF = delta.left_DR.double() @ delta.right_RF.double()
        return float((held_EF @ change_DF.t()).norm())

    assert moved(staying) < 0.3 * moved([])
    editor.set_kept([*staying, *wanted[:1]])
    with pytest.raises(UserError, match=r"fact 1: '.*' is to stay, and fact 1 writes it; take it out"):
        editor.check(wanted, config)
    with pytest.raises(UserError, match="keep: read by memit and alphaedit, not by rome; leave it out"):
        editor.check(wanted, replace(config, method="rome"))


def test_what_did_not_take_is_written_again(editor: Editor, monkeypatch: pytest.MonkeyPatch) -> None:
    start, wanted = state(editor.policy), facts(5)
    weak: dict[str, Any] = {"layers": (0, 1), "num_contexts": 0, "prose_weight": 6.0}
    target = TargetConfig(steps=40, clamp=0.75)

    def missed() -> list[str]:
        scores = editor.measure(wanted).scores
        return [f.text for f, one in zip(wanted, scores, strict=True) if not one.prompt.new.is_greedy]

    editor.write(wanted, MethodConfig(**weak, target=target))
    left = missed()
    assert 0 < len(left) < len(wanted)
    editor.undo()
    batches = editor.write_all(wanted, MethodConfig(**weak, target=target, passes=4))
    assert len(batches) > 1
    assert [fact.text for fact in batches[1].facts] == left
    assert len(missed()) < len(left)
    assert batches[1].warnings == ()
    editor.undo()
    assert_same(editor.policy, start)
    traced: list[int] = []
    monkeypatch.setattr("whet.editing.editor.locate", lambda *_, **__: (traced.append(1) or 1, None))
    del weak["layers"]
    assert len(editor.write_all(wanted, MethodConfig(**weak, target=target, passes=2))) == 2
    assert len(traced) == 1  # what is written again goes into the same layers


def test_a_changed_model_is_not_undone(editor: Editor) -> None:
    editor.write(facts(1), MethodConfig(layers=(0, 1), num_contexts=0))
    editor.record.check(editor.policy.model, "here")
    with torch.no_grad():
        next(iter(editor.policy.model.parameters()))[0, 0] += 1
    with pytest.raises(UserError, match="here: its weights or its config are not those of its edits.json"):
        editor.record.check(editor.policy.model, "here")
    with pytest.raises(UserError, match="the folder was changed"):
        editor.undo()


def test_another_config_is_another_model(editor: Editor) -> None:
    """The same weights with another rotary base compute other keys: neither statistics nor records are shared."""
    config = MethodConfig(layers=(1,), num_contexts=0, target=TargetConfig(steps=2))
    editor.write(facts(1), config)
    other = fresh(replace(SHAPE, rope_theta=37.0))
    other.model.load_state_dict(patient().model.state_dict())
    assert digests_of(other.model)[1] == digests_of(patient().model)[1]
    with pytest.raises(UserError, match="here: its weights or its config are not those"):
        Record(model="patient", digest=editor.record.digest).check(other.model, "here")
    second = Editor(other, "other", cache=editor._cache)
    second.set_prose(PROSE, 10_000)
    memories = chosen_memories(other.model, (1,))
    cached = second._moments(memories, 0)[1]
    fresh_C = gather_moments(
        second.reader, memories, second._windows, model_digest="none", folder=Path(str(editor._cache)) / "new"
    )[1]
    torch.testing.assert_close(cached, fresh_C, rtol=0, atol=0)
    # Records of before name the weights alone, and stay valid.
    Record(model="patient", digest=digests_of(patient().model)[1]).check(patient().model, "here")
    editor.record.digest = digests_of(patient().model)[1]
    editor.undo()
    assert_same(editor.policy, trained())


def test_statistics_are_kept_and_taken_up_again(editor: Editor, monkeypatch: pytest.MonkeyPatch) -> None:
    from whet.editing import statistics
    from whet.editing.sites import chosen_memories

    memories = chosen_memories(editor.policy.model, (0, 1))
    windows = statistics.windows_of(editor.policy, PROSE, 10_000)[:1]
    windows = [windows[0][n : n + 6] for n in range(0, 36, 6)]
    folder = editor._cache
    assert folder is not None
    keys = torch.cat([_keys(editor.policy, window, memories[1].module) for window in windows]).double()
    reader = Reader(editor.policy, budget=12)
    options: dict[str, Any] = {"model_digest": "m", "folder": folder}
    monkeypatch.setattr(statistics, "SAVE_EVERY_S", 0.0)
    real, calls = Reader.hidden, []

    def breaking(self: Reader, rows: Any) -> torch.Tensor:
        calls.append(len(rows))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, rows)

    monkeypatch.setattr(Reader, "hidden", breaking)
    with pytest.raises(KeyboardInterrupt):
        statistics.gather_moments(reader, memories, windows, **options)
    found = statistics.gather_moments(reader, memories, windows, **options)
    assert sum(calls) == 6 + 2  # three passes of two windows, one of them again
    torch.testing.assert_close(found[1], keys.t() @ keys / len(keys), rtol=1e-6, atol=1e-9)
    statistics.gather_moments(reader, memories, windows, **options)
    assert sum(calls) == 8
    statistics.gather_moments(reader, memories, windows, **(options | {"model_digest": "other"}))
    assert sum(calls) == 14


def _keys(policy: Policy, ids: Any, module: torch.nn.Module) -> torch.Tensor:
    found: list[torch.Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: found.append(args[0][: len(ids)].clone()))
    with torch.no_grad():
        policy.model.logits(torch.tensor([ids]))
    handle.remove()
    return found[0]


def test_gathering_statistics_says_how_far_it_is(editor: Editor) -> None:
    told: dict[str, Any] = {}

    def tell(phase: str, detail: Any = None) -> None:
        told[phase] = detail

    memories = chosen_memories(editor.policy.model, (0,))
    editor._moments(memories, 0, tell)
    count = len(editor._windows)
    assert told["statistics"]().startswith(f"{count} of {count} windows of prose, 0:00 left")
    counted = _Counted(40, "windows")
    assert counted.text() == "0 of 40 windows"
    counted.advance(20)  # were there before
    counted._began -= 5.0
    counted.advance(5)
    assert counted.text() == "25 of 40 windows, 0:15 left"


def test_tracing_finds_the_layer_of_a_planted_fact(editor: Editor) -> None:
    """R-ROME writes a fact into one layer: there the feed-forward part brings the answer back, more than elsewhere."""
    fact = facts(1)[0]
    for layer in (0, 1):
        editor.write([fact], MethodConfig(method="r-rome", layers=(layer,), num_contexts=2, context_tokens=3))
        planted = read_facts([{"subject": fact.subject, "prompt": fact.prompt, "target": fact.target}])[0]
        found = causal_trace(editor.reader, planted, window=1, noise=3.0, num_samples=8)
        assert found.answer.strip() == fact.target
        assert found.clean > 0.5 > found.corrupted
        mlp = found.effects["mlp"][:, found.subject[1]]
        assert int(mlp.argmax()) == layer, mlp
        # All that follows from the clean stream behind the last layer, at the last token, is the clean answer.
        assert float(found.effects["hidden"][-1, -1]) == pytest.approx(
            found.clean - found.corrupted, abs=1e-5
        )
        best, _ = locate(
            editor.reader, [Fact(subject=fact.subject, prompt=fact.prompt, target="", true=fact.target)]
        )
        assert best == layer
        editor.undo()


def test_lens_and_attribution_are_the_models_own_numbers() -> None:
    policy = patient()
    reader, fact = Reader(policy), facts(1)[0]
    ids = policy.tokenizer.encode(fact.text)
    from whet.editing.sites import mark_subject

    wanted = answer_id(
        reader,
        Fact(subject=fact.subject, prompt=fact.prompt, target="", true=fact.true),
        mark_subject(policy.tokenizer, fact.prompt, fact.subject),
    )
    assert policy.tokenizer.token_text(wanted).strip() == fact.true
    logits = policy.model.logits(torch.tensor([ids]))[0]
    lens = logit_lens(reader, ids, wanted)
    shares = logits[:, : policy.tokenizer.vocab_size].softmax(-1)
    torch.testing.assert_close(lens.answer[-1], shares[:, wanted], rtol=1e-4, atol=1e-6)
    assert lens.words[-1][-1].strip() == fact.true
    parts = attribution(reader, ids, wanted)
    total = parts.pop("total")
    assert total == pytest.approx(float(logits[-1, wanted]), rel=1e-4)
    assert sum(parts.values()) == pytest.approx(total, rel=1e-4)
    maps = attention_maps(reader, ids)
    assert set(maps) == set(range(4))
    for probs in maps.values():
        torch.testing.assert_close(probs.sum(-1), torch.ones(4, len(ids)), rtol=0, atol=1e-5)
        assert float(probs.triu(1).abs().max()) == 0.0


def test_record_as_json(editor: Editor, tmp_path: Path) -> None:
    editor.write(facts(2), MethodConfig(layers=(0, 1), num_contexts=0))
    editor.record.write(tmp_path, {"metrics": {}, "table": []})
    content = json.loads((tmp_path / "edits.json").read_text())
    (batch,) = content["batches"]
    assert batch["layers"] == [0, 1]
    assert batch["facts"][0]["subject"] == PEOPLE[0]
    assert batch["ranks"] == dict.fromkeys(batch["norms"], 2)
    (tmp_path / "edits.json").write_text("{}")
    with pytest.raises(UserError, match="malformed record of edits"):
        Record.read(tmp_path)


def test_layers_are_found_where_none_are_given(editor: Editor) -> None:
    """The patient brings its answers back at the first layer; MEMIT takes it and the one behind it."""
    wanted = facts(3)
    best, effects = locate(editor.reader, wanted)
    assert best == max(range(3), key=lambda layer: effects[layer])
    for method, count in (("memit", 2), ("r-rome", 1), ("ft", 1), ("lora", 0)):
        layers = editor.layers_for(wanted, MethodConfig(method=method))  # pyright: ignore[reportArgumentType]
        assert len(layers) == count
        assert count == 0 or best in layers
        assert all(0 <= layer < 3 for layer in layers)  # the last one is read by nobody
