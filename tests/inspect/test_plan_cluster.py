"""`whet plan --cluster`: the queue against closed forms, costs against what they were made from, and the answer."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from whet import __main__
from whet.config import dump_yaml
from whet.inspect.cluster.cluster import SimConfig, goodput, make_plan, rows_of
from whet.inspect.cluster.costs import CARDS, Found, card_costs, fit_costs, recorded_costs
from whet.inspect.cluster.simulation import (
    Costs,
    Load,
    Machines,
    Result,
    decode_steps,
    drawing_s,
    parts_of,
    simulate,
)
from whet.inspect.memory import plan
from whet.inspect.memory.plan import SHAPES, PlanConfig
from whet.ranks.ray import ClusterConfig
from whet.recipes import rl as rl_recipes
from whet.types import UserError

EVEN = Load(groups=((100,) * 4,), num_prompts=4)
"""16 sequences of 100 tokens."""


def run(
    costs: Costs, load: Load = EVEN, machines: Machines | None = None, steps: int = 10, seed: int = 0
) -> Result:
    return simulate(costs, load, machines or Machines(), num_steps=steps, seed=seed)


def test_without_variance_a_step_is_the_sum_of_its_parts() -> None:
    costs = Costs(
        decode_s=0.01,
        row_s=0.001,
        call_s=0.5,
        reward_s=0.01,
        update_s=0.3,
        token_s=0.0001,
        push_s=0.2,
        rest_s=0.1,
    )
    result = run(costs, machines=Machines(workers=2))
    # Two workers, two parts each, of four sequences.
    part = 0.5 + 100 * 0.01 + 400 * 0.001
    step = 0.2 + 2 * part + 16 * 0.01 + 0.3 + 1600 * 0.0001 + 0.1
    assert result.seconds == pytest.approx(10 * step, rel=1e-12)
    assert result.seconds_per_step == pytest.approx(step, rel=1e-12)
    assert result.wait_s == pytest.approx(10 * (2 * part + 0.16), rel=1e-12)
    assert result.drawn_s == pytest.approx(10 * 4 * part, rel=1e-12)
    assert result.ages == {0: 10 * 1600}
    assert result.tokens == 16_000


def test_ranks_that_sample_themselves_call_nobody() -> None:
    costs = Costs(
        decode_s=0.01, row_s=0.001, call_s=5.0, push_s=7.0, fetch_s=9.0, token_s=0.001, reduce_s=4.0
    )
    one = run(costs, machines=Machines(trainers=1, workers=0))
    assert one.seconds == pytest.approx(10 * (1.0 + 1.6 + 1.6), rel=1e-12)
    # Two ranks have half of the rows each, and add up their gradients: half of a ring's limit.
    two = run(costs, machines=Machines(trainers=2, workers=0))
    assert two.seconds == pytest.approx(10 * (1.0 + 0.8 + 0.8 + 2.0), rel=1e-12)


@pytest.mark.parametrize(("draw", "train"), [(0.01, 0.003), (0.01, 0.001), (0.002, 0.003)])
@pytest.mark.parametrize("staleness", [1, 2])
def test_ahead_of_training_the_slower_side_sets_the_pace(draw: float, train: float, staleness: int) -> None:
    load = replace(EVEN, staleness=staleness)
    result = run(Costs(decode_s=draw, token_s=train), load, Machines(workers=2), steps=40)
    rollout, update = 2 * 100 * draw, 1600 * train
    assert result.seconds_per_step == pytest.approx(max(rollout, update), rel=1e-9)
    assert set(result.ages) == set(range(staleness + 1))
    # All but the first rollouts are as old as they may be.
    assert result.ages[staleness] == (40 - staleness) * 1600


def test_processes_that_share_a_core_take_turns() -> None:
    costs = Costs(decode_s=0.01)
    alone = run(costs, machines=Machines(workers=4))
    shared = run(costs, machines=Machines(workers=4, cores=1.0))
    assert alone.seconds == pytest.approx(10 * 2 * 1.0)
    assert shared.seconds == pytest.approx(4 * alone.seconds, rel=1e-12)
    assert run(costs, machines=Machines(workers=4, cores=4.0)).seconds == pytest.approx(alone.seconds)
    # One core for training and sampling at a time: the sum of both, as if in turn.
    both = run(
        Costs(decode_s=0.01, token_s=0.001),
        replace(EVEN, staleness=1),
        Machines(workers=1, cores=1.0),
        steps=200,
    )
    assert both.seconds_per_step == pytest.approx(2 * 1.0 + 1.6, rel=0.02)


def test_a_long_tail_holds_up_the_group_as_order_statistics_say() -> None:
    """The longest of n exponential lengths is H(n) times their mean on average."""
    draw = random.Random(0)
    groups = tuple(
        tuple(max(1, math.ceil(draw.expovariate(1 / 1000))) for _ in range(8)) for _ in range(4000)
    )
    load = Load(groups=groups, num_prompts=1)
    # Half of a group each, as two parts: the expected longest of four.
    result = run(Costs(decode_s=0.001), load, Machines(workers=1), steps=2000)
    harmonic = sum(1 / number for number in range(1, 5))
    assert result.seconds / 2000 == pytest.approx(2 * harmonic, rel=0.03)


def test_failures_cost_what_a_restarted_job_costs() -> None:
    """Work w that begins again at each failure (rate r, restart R) takes (1/r + R)(e^(rw) - 1) on average."""
    # A step is one part, so a failure of either process, the worker or the trainer, undoes just this part.
    load = Load(groups=((100,),), num_prompts=1, save_every=1)
    machines = Machines(workers=1, mtbf_s=20.0, restart_s=0.5)
    rate = 2 / 20.0
    result = simulate(Costs(decode_s=0.01), load, machines, num_steps=4000, seed=1)
    assert result.seconds / 4000 == pytest.approx((1 / rate + 0.5) * (math.exp(rate) - 1), rel=0.02)
    assert result.num_lost > 100
    assert result.lost_s + result.drawn_s <= result.capacity_s
    assert result.down_s == pytest.approx(
        0.5 * result.num_failed / 2, rel=0.2
    )  # half of them are the trainer's


def test_a_lost_trainer_goes_back_to_its_checkpoint() -> None:
    costs = Costs(decode_s=0.01, token_s=0.001)
    machines = Machines(workers=2, mtbf_s=400.0, restart_s=10.0)
    often = run(costs, replace(EVEN, save_every=2), machines, steps=200, seed=3)
    seldom = run(costs, replace(EVEN, save_every=50), machines, steps=200, seed=3)
    assert 0 < often.num_undone < seldom.num_undone
    assert often.seconds < seldom.seconds
    assert len(often.step_s) == often.steps == 200
    assert often.step_s == sorted(often.step_s)
    assert sum(often.ages.values()) == often.tokens == 200 * 1600
    total = often.train_s + often.wait_s + often.sync_s + often.save_s + often.down_s
    assert total == pytest.approx(often.seconds, rel=1e-9)


def test_late_work_is_repeated_by_idle_workers() -> None:
    costs = Costs(decode_s=0.1)
    machines = Machines(workers=8, straggler_share=0.02, straggler_factor=1000.0)
    result = run(costs, machines=machines, steps=50)
    calm = run(costs, machines=Machines(workers=8), steps=50)
    assert result.num_repeated >= 5
    assert result.seconds < 3 * calm.seconds  # in place of a thousand times for one step in four
    assert result.lost_s > 0


def test_unfinished_sequences_go_on_with_new_weights() -> None:
    load = replace(EVEN, staleness=2, partial=True)
    costs = Costs(decode_s=0.01, token_s=0.0005)
    partial, whole = (
        run(costs, one, Machines(workers=2), steps=40) for one in (load, replace(load, partial=False))
    )
    assert sum(partial.ages.values()) == pytest.approx(sum(whole.ages.values()), rel=0.01)
    mean = {
        name: sum(a * n for a, n in r.ages.items()) / r.ages.total()
        for name, r in (("p", partial), ("w", whole))
    }
    assert mean["p"] < mean["w"] - 0.5


def test_new_weights_divide_a_sequence_where_they_meet_it() -> None:
    """Drawing takes 1 s, training 0.4: each sequence begins as training does, and has the old weights for 0.4 of it."""
    load = Load(groups=((100,),), num_prompts=1, staleness=1, partial=True)
    result = run(Costs(decode_s=0.01, update_s=0.4), load, Machines(workers=1), steps=5)
    assert result.seconds == pytest.approx(5 + 0.4)
    assert result.ages == {0: 100 + 4 * 60, 1: 4 * 40}


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    load = Load(groups=((10, 200), (50, 60)), num_prompts=8, staleness=1)
    machines = Machines(workers=4, mtbf_s=300.0, straggler_share=0.1)
    results = [run(Costs(decode_s=0.01, token_s=0.001), load, machines, 30, seed) for seed in (5, 5, 6)]
    assert results[0] == results[1] != results[2]


def test_decoding_fills_the_rows_of_sequences_that_end() -> None:
    assert decode_steps([3, 5, 2], 8) == 5
    # The row of 3 goes on with 2, so both rows are free after 5 steps, and 4 more follow.
    assert decode_steps([3, 5, 2, 4], 2) == 9
    assert drawing_s(
        [3, 5], Costs(decode_s=1, row_s=10, call_s=100, prompt_s=1000), replace(EVEN, prompt_tokens=2)
    ) == (100 + 5 + 80 + 2000)


def test_parts_are_those_that_workers_are_dealt() -> None:
    found = parts_of(4, 4, 2)
    assert sorted(sample for part in found for sample in part) == list(range(16))
    assert [len(part) for part in found] == [4, 4, 4, 4]
    assert sorted(len(part) for part in parts_of(1, 8, 2)) == [2, 2, 2, 2]


def test_costs_are_found_again_and_never_negative() -> None:
    features = [(1.0, steps, rows) for steps in (10, 50, 90) for rows in (100, 400, 900)]
    true = (0.5, 0.01, 0.002)
    found, error = fit_costs(
        features, [sum(a * b for a, b in zip(row, true, strict=True)) for row in features]
    )
    assert found == pytest.approx(true, rel=1e-9)
    assert error < 1e-9
    found, _ = fit_costs([(1.0, 10.0), (1.0, 20.0), (1.0, 30.0)], [3.0, 2.0, 1.0])
    assert found[1] == 0.0
    assert found[0] > 0


FOUND = Found(
    worker=Costs(decode_s=0.01, row_s=0.0001, token_s=0.0005, update_s=0.1),
    own=Costs(decode_s=0.01, row_s=0.0001, token_s=0.0005, update_s=0.1),
    groups=((48, 30, 20, 48, 47, 26, 26, 26), (10, 12, 48, 20, 22, 21, 20, 40)),
    prompt_tokens=0.0,
    source="a test",
)


def test_the_best_split_is_the_fastest_and_its_sentence_names_the_bottleneck() -> None:
    recipe = rl_recipes.demo()
    made = make_plan(recipe, FOUND, 8, SimConfig())
    assert [(row.trainers, row.workers) for row in made.rows] == [(8, 0), (1, 7), (2, 6), (4, 4)]
    assert made.best.steps_per_hour == max(row.steps_per_hour for row in made.rows)
    assert all(sum(row.shares.values()) == pytest.approx(1.0) for row in made.rows)
    dear = replace(FOUND, worker=replace(FOUND.worker, token_s=0.05), own=replace(FOUND.own, token_s=0.05))
    assert make_plan(recipe, dear, 8, SimConfig()).best.bottleneck == "training"
    slow = replace(FOUND, worker=replace(FOUND.worker, decode_s=1.0), own=replace(FOUND.own, decode_s=1.0))
    assert make_plan(recipe, slow, 8, SimConfig()).best.bottleneck == "sampling"
    late = replace(FOUND, worker=replace(FOUND.worker, push_s=9.0))
    assert next(row for row in rows_of(late, recipe, 2) if row.workers).bottleneck == "weight sync"


def test_a_thousand_workers_take_seconds_and_faults_cost_something() -> None:
    recipe = replace(rl_recipes.demo(), save_every=1)
    sim = SimConfig(
        workers=1000, trainers=8, prompts=1000, steps=4, mtbf_h=0.3, straggler_share=0.01, restart_s=5.0
    )
    made = make_plan(recipe, FOUND, 2, sim)
    assert made.sim is not None
    _, calm, harsh = made.sim
    assert 0.05 < goodput(calm, harsh) < 1
    assert harsh.result.num_failed > 0
    assert calm.result.num_failed == calm.result.lost_s == 0


def test_a_card_computes_with_its_data_sheet() -> None:
    recipe, shape = rl_recipes.demo(), SHAPES["Qwen/Qwen2.5-0.5B"]
    options = {"tokens": 24.0, "prompt_tokens": 100.0}
    one = card_costs("h100", shape, recipe, flops_share=0.4, memory_share=0.6, **options)
    parameters = 494_032_768
    assert one.worker.decode_s == pytest.approx(2 * parameters / (3.35e12 * 0.6))
    assert one.worker.token_s == pytest.approx(6 * parameters / (989e12 * 0.4))
    half = card_costs("h100", shape, recipe, flops_share=0.2, memory_share=0.6, **options)
    assert half.worker.token_s == pytest.approx(2 * one.worker.token_s)
    lengths = [length for group in one.groups for length in group]
    assert max(lengths) <= recipe.sampling.max_new_tokens
    assert sum(lengths) / len(lengths) == pytest.approx(24, rel=0.15)  # what is above the limit is cut
    assert set(CARDS) == {"a100", "h100", "h200", "l40s", "rtx4090"}


def record(folder: Path, **changes: object) -> Path:
    """A run folder whose times follow costs that are known."""
    folder.mkdir()
    recipe = replace(rl_recipes.demo(), num_prompts=2, group_size=2, **changes)  # pyright: ignore[reportArgumentType]
    (folder / "config.yaml").write_text(dump_yaml(recipe))
    rows, samples, now = [], [], 0.0
    for step in range(1, 13):
        lengths = [(10 + 7 * step % 31, 20 + 5 * step % 23), (40 - step, 5 + 11 * step % 19)]
        flat = [length for group in lengths for length in group]
        generate = 0.02 * max(flat) + 0.003 * sum(flat)
        train = 0.5 + 0.001 * (sum(flat) + 40)
        now += generate + train + 0.04 + 0.25
        rows.append(
            {
                "stage": "rl",
                "step": step,
                "time_s": now,
                "rl/generate_seconds": generate,
                "rl/reward_seconds": 0.04,
                "rl/train_seconds": train,
                "rl/train_tokens_per_second": (sum(flat) + 40) / train,
            }
        )
        samples += [
            {"step": step, "uid": str(place), "num_completion_tokens": length}
            for place, group in enumerate(lengths)
            for length in group
        ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folder


def test_a_record_gives_its_costs_back(tmp_path: Path) -> None:
    found = recorded_costs(record(tmp_path / "run"), rl_recipes.demo())
    costs = found.worker
    assert (costs.decode_s, costs.row_s) == pytest.approx((0.02, 0.003), rel=1e-6)
    assert costs.update_s == pytest.approx(0.5, rel=1e-6)
    assert costs.rest_s == pytest.approx(0.25, rel=1e-6)
    assert costs.reward_s == pytest.approx(0.01)
    assert len(found.groups) == 24
    folder = record(tmp_path / "w", cluster=ClusterConfig(rollout_workers=1))
    with pytest.raises(UserError, match="its times overlap"):
        recorded_costs(folder, rl_recipes.demo())


@pytest.mark.ci
def test_the_command_prints_the_answer_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["plan", str(record(tmp_path / "run")), "--cluster", "--num-devices", "2"]
    plot = tmp_path / "plan.png"
    assert __main__.main([*words, "--sim.workers", "4", "--sim.mtbf-h", "1", "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("best split of 2: ")
    assert "is the bottleneck" in out.splitlines()[0]
    assert "goodput" in out
    assert plot.stat().st_size > 5000
    monkeypatch.setattr(plan, "read_recipe", lambda config: rl_recipes.demo())  # a process of its own
    assert __main__.main([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["best"] in content["splits"]
    assert __main__.main([*words[:3], "--num-devices", "1"]) == 2
    assert "expected 2 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"card": "h100"}, "card is read with cluster only"),
        ({"sim": SimConfig(workers=4)}, "sim is read with cluster only"),
        ({"cluster": True, "num_devices": 4, "of": "sft"}, "expected rl"),
        ({"cluster": True, "num_devices": 4, "memory_gib": 8.0}, "leave it out"),
        ({"cluster": True, "num_devices": 4, "flops_share": 0.5}, "flops_share is read with card only"),
        ({"cluster": True, "num_devices": 4, "flops_share": 1.5, "card": "h100"}, "up to 1"),
        ({"cluster": True, "num_devices": 4, "measure": True, "card": "h100"}, "leave one out"),
    ],
)
def test_options_that_nothing_reads_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanConfig(recipe="demo", **fields)  # pyright: ignore[reportArgumentType]


def test_nothing_is_made_up_where_no_times_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "read_recipe", lambda config: rl_recipes.demo())
    with pytest.raises(UserError, match="nothing says what its steps take"):
        plan.main(PlanConfig(recipe="demo", cluster=True, num_devices=4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 5}, "read with sim.workers"),
        ({"workers": 5, "trainers": 2}, "multiple of sim.trainers"),
        ({"workers": 5, "straggler_share": 2.0}, "expected 0 to 1"),
        ({"workers": 5, "mtbf_h": -1.0}, "0 or more"),
    ],
)
def test_simulations_that_mean_nothing_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimConfig(**fields)  # pyright: ignore[reportArgumentType]
