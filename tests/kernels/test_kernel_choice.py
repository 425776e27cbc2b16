"""Which kernels are used: never what was measured to be slower, the same again on resume, and said in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from needs import needs

from whet.generate import kernel_speed
from whet.generate.engine import Engine
from whet.generate.rows import Request
from whet.generate.sampling import SamplingParams
from whet.kernels import dispatch
from whet.kernels.cpu import build
from whet.kernels.dispatch import Choice
from whet.model.config import ModelConfig
from whet.model.transformer import init_weights
from whet.model.weights import build_model
from whet.telemetry.provenance import write_environment

pytestmark = needs("kernels")

SHAPE = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=64,
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WHET_KERNELS", "auto")
    before = dispatch.current()
    dispatch.take(None)
    yield
    dispatch.take(before)


@pytest.mark.parametrize(
    ("ratios", "used"),
    [
        ({"product": 1.2, "attention": 2.0, "decode": 3.0}, {"product", "attention", "decode"}),
        ({"product": 0.03, "attention": 0.04, "decode": 0.1}, set()),
        # A decoding step in one call consists of the other two: without them it would give other bits than training.
        ({"product": 0.5, "attention": 2.0, "decode": 3.0}, {"attention"}),
        ({"product": 2.0, "attention": 0.5, "decode": 3.0}, {"product"}),
        ({"product": 0.94, "attention": 1.25, "decode": 0.2}, {"attention"}),
        # Alone it has to be worth it in a whole step.
        ({"product": 0.47, "attention": 1.12, "decode": 2.8}, set()),
        ({"product": 0.95, "attention": 1.0, "decode": 0.2}, {"product", "attention"}),
        ({"product": 1.0}, {"product"}),
    ],
)
def test_what_is_slower_is_not_used(ratios: dict, used: set) -> None:
    assert Choice.of(ratios).used == used


def test_it_is_said_in_words() -> None:
    name = f"C++ {build.instruction_set()}"
    assert (
        dispatch.describe(Choice.of({"product": 2.0, "attention": 4.5, "decode": 3.0}))
        == f"{name}, 3.0x PyTorch"
    )
    assert dispatch.describe(Choice.of({"product": 0.8, "attention": 0.8})) == f"PyTorch ({name} was 0.8x)"
    assert dispatch.describe(Choice.of({"product": 0.5, "attention": 1.12, "decode": 2.8})) == (
        f"PyTorch ({name}: product 0.5x, attention 1.1x, decode 2.8x, too little in a whole step)"
    )
    assert dispatch.describe(Choice.of({})) == f"PyTorch ({name} has no kernels for this shape)"
    partly = dispatch.describe(Choice.of({"product": 2.0, "attention": 0.5, "decode": 3.0}))
    assert partly == (
        f"{name}, 2.0x PyTorch; attention: PyTorch (C++ was 0.5x); "
        "decode: PyTorch (C++ was 3.0x, but needs the others)"
    )


def test_measured_once_kept_beside_the_library_and_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[ModelConfig] = []

    def measure(shape: ModelConfig, dtype: torch.dtype) -> dict:
        calls.append(shape)
        return {"product": 1.5, "attention": 2.0, "decode": 3.0}

    monkeypatch.setattr(kernel_speed, "measure", measure)
    monkeypatch.setattr(build, "folder", lambda: tmp_path)
    for _ in range(2):
        dispatch.take(None)
        kernel_speed.choose_kernels(SHAPE, torch.float32, CPU)
        assert chosen().ratios["decode"] == 3.0
    assert len(calls) == 1, "the second process reads what the first one measured"
    kernel_speed.choose_kernels(SHAPE, torch.bfloat16, CPU)
    assert len(calls) == 1, "the first model of a process decides for all of them"
    dispatch.take(None)
    (tmp_path / kernel_speed.FILE).write_text('{"broken": 1')
    kernel_speed.choose_kernels(SHAPE, torch.float32, CPU)
    assert len(calls) == 2, "what cannot be read is measured again"


@pytest.mark.parametrize("first", [0.9, 0.1])
def test_what_is_refused_is_measured_again_and_the_median_counts(
    first: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ratios, used = iter([first, 1.1, 1.2, 9.0]), []
    monkeypatch.setattr(kernel_speed, "measure", lambda *_: ALL | {"product": next(ratios)})
    monkeypatch.setattr(build, "folder", lambda: tmp_path)
    for _ in range(4):
        dispatch.take(None)
        kernel_speed.choose_kernels(SHAPE, torch.float32, CPU)
        assert kernel_speed.expected_kernels(SHAPE, torch.float32) == chosen().used
        used.append(dispatch._uses("product"))
    assert used == [False, False, True, True]
    assert next(ratios) == 9.0, "three measurements are enough"


def chosen() -> Choice:
    choice = dispatch.current()
    assert choice is not None
    return choice


ALL = {"product": 2.0, "attention": 2.0, "decode": 3.0}


def test_an_absurd_ratio_is_neither_stored_nor_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ratios = iter([176.8, 93.8, 1.5])
    monkeypatch.setattr(kernel_speed, "measure", lambda *_: ALL | {"product": next(ratios)})
    monkeypatch.setattr(build, "folder", lambda: tmp_path)
    for _ in range(2):
        dispatch.take(None)
        kernel_speed.choose_kernels(SHAPE, torch.float32, CPU)
        assert chosen().used == set(ALL)
        assert dispatch.describe() == f"C++ {build.instruction_set()}, 2.4x PyTorch"
        assert "product" not in dispatch.record()["ratios"]
        assert not (tmp_path / kernel_speed.FILE).exists()
    dispatch.take(None)
    kernel_speed.choose_kernels(SHAPE, torch.float32, CPU)
    assert "1.5" in (tmp_path / kernel_speed.FILE).read_text()


@pytest.mark.parametrize(
    "stored",
    [
        "[{}]",
        "[[]]",
        "[]",
        "{}",
        "[null]",
        json.dumps([{"product": 2.0}]),
        json.dumps([ALL | {"product": 0}]),
        json.dumps([ALL | {"product": -1.0}]),
        json.dumps([ALL | {"product": True}]),
        json.dumps([ALL | {"product": 93.8}]),
        json.dumps([ALL]).replace("2.0", "1e400"),
        json.dumps([ALL]).replace("2.0", "NaN"),
        json.dumps([ALL]).replace("2.0", "9" * 400),
        "[" * 100_000,
        "another processor",
    ],
)
def test_what_is_no_measurement_of_this_machine_is_measured_again(
    stored: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = kernel_speed._name(kernel_speed.small(SHAPE), torch.float32)
    file = tmp_path / kernel_speed.FILE
    if stored == "another processor":
        file.write_text(json.dumps({name: [ALL]}))
        monkeypatch.setattr(build, "processor_name", lambda: "VAX 9000")
    else:
        file.write_text(f'{{"{name}": {stored}}}')
    monkeypatch.setattr(kernel_speed, "measure", lambda *_: ALL | {"product": 1.25})
    monkeypatch.setattr(build, "folder", lambda: tmp_path)
    assert kernel_speed.expected_kernels(SHAPE, torch.float32) == set(ALL)
    kernel_speed.choose_kernels(SHAPE, torch.float32, CPU)
    assert chosen().ratios["product"] == 1.25
    assert "PyTorch" in dispatch.describe()
    name = kernel_speed._name(kernel_speed.small(SHAPE), torch.float32)
    assert json.loads(file.read_text())[name] == [ALL | {"product": 1.25}]


def test_where_nothing_can_be_stored_no_file_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / kernel_speed.FILE / "x").mkdir(parents=True)
    monkeypatch.setattr(kernel_speed, "measure", lambda *_: ALL)
    monkeypatch.setattr(build, "folder", lambda: tmp_path)
    kernel_speed.choose_kernels(SHAPE, torch.float32, CPU)
    assert chosen().ratios == ALL
    assert [path.name for path in tmp_path.iterdir()] == [kernel_speed.FILE]


@pytest.mark.parametrize("slow", [(), ("ours",), ("theirs",), ("ours", "theirs"), ("ours at first",)])
def test_a_busy_machine_changes_no_ratio(slow: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes 1 ms and PyTorch 2 ms, but where a side is slow, 3 of 4 runs take 40 times as long.

    At first: every run of the first 0.35 s. Then the kernel would be refused, and is measured for longer.
    """
    clock, runs = [0.0], {"ours": 0, "theirs": 0}

    def work() -> None:
        side = "ours" if dispatch._uses("product") else "theirs"
        runs[side] += 1
        is_disturbed = side in slow and runs[side] % 4
        is_disturbed = is_disturbed or (f"{side} at first" in slow and clock[0] < 0.35)
        clock[0] += (0.001 if side == "ours" else 0.002) * (40 if is_disturbed else 1)

    monkeypatch.setattr(kernel_speed.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(kernel_speed, "_work", lambda *_: {"product": [work]})
    ratios = kernel_speed.measure(kernel_speed.small(SHAPE), torch.float32)
    assert ratios["product"] == pytest.approx(2.0)
    assert clock[0] < 1.3 * kernel_speed.BUDGET_S


def test_a_real_measurement_is_short_and_positive() -> None:
    ratios = kernel_speed.measure(kernel_speed.small(SHAPE), torch.float32, budget_s=0.1)
    assert set(ratios) == {"product", "attention", "decode"}
    assert all(0.001 < ratio < 1000 for ratio in ratios.values())


def test_a_resumed_run_keeps_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.take(Choice.of({"product": 2.0, "attention": 0.5, "decode": 3.0}))
    facts = write_environment(tmp_path)
    identity = dispatch.identity()
    assert identity.endswith("without attention, decode")
    assert facts["kernels"] == dispatch.describe()
    dispatch.take(None)
    dispatch.restore(tmp_path)
    assert dispatch.identity() == identity
    kernel_speed.choose_kernels(SHAPE, torch.float32, CPU)
    assert dispatch.identity() == identity, "nothing is measured where a run has its kernels"
    dispatch.take(None)
    monkeypatch.setenv("WHET_KERNELS", "cpp")
    dispatch.restore(tmp_path)
    assert dispatch.describe().endswith("; as when the run began, not WHET_KERNELS=cpp")
    assert dispatch.identity() == identity
    dispatch.take(None)
    (tmp_path / "environment.json").write_text(
        json.dumps(
            facts | {"kernels_used": facts["kernels_used"] | {"ratios": {"product": 0, "decode": "fast"}}}
        )
    )
    dispatch.restore(tmp_path)
    assert dispatch.describe().startswith("C++")
    dispatch.take(None)
    facts["kernels_used"]["library"] = "C++, of another machine"
    (tmp_path / "environment.json").write_text(json.dumps(facts))
    dispatch.restore(tmp_path)
    assert dispatch.current() is None


@pytest.mark.parametrize("used", [set(), {"product"}, {"attention"}, {"product", "attention"}])
def test_any_part_of_the_kernels_samples_what_it_scores(used: set) -> None:
    """Every choice keeps the promise: the sampler's log-probabilities are the trainer's, bit for bit."""
    from whet.algo.packing import TrainingSequence, pack
    from whet.generate.scoring import score_micro_batch

    model = build_model(SHAPE)
    init_weights(model, 0)
    with dispatch.taken(Choice(frozenset(used))):
        assert dispatch.runs_cpp(model.head_weight) == ("product" in used)
        requests = [Request(prompt_ids=tuple(range(1, n)), seeds=(n, n + 50)) for n in (3, 9, 20)]
        drawn = Engine(model, stop_ids=()).generate(requests, SamplingParams(max_new_tokens=17))
        sequences = [
            TrainingSequence(prompt_ids=r.prompt_ids, completion_ids=c.ids, sampler_logprobs=c.logprobs)
            for r, row in zip(requests, drawn, strict=True)
            for c in row
        ]
        (micro,) = pack(sequences, token_budget=2**20, device=CPU).micro_batches
        with torch.no_grad():
            scored, _ = score_micro_batch(model, micro)
    assert torch.equal(scored, micro.sampler_logprobs_M)


def test_the_doctor_shows_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from whet.inspect.doctor import doctor

    ratios = {"product": 0.5, "attention": 2.0, "decode": 3.0}
    monkeypatch.setattr(doctor, "measure", lambda shape, dtype: ratios)
    doctor.main(doctor.DoctorConfig(check=("kernels",)))
    said = " ".join(capsys.readouterr().out.split())
    assert "1024 bfloat16 0.5x 2.0x 3.0x" in said
    assert "slower ones are not used" in said
    monkeypatch.setattr(build, "library", lambda: None)
    with pytest.raises(SystemExit) as ended:
        doctor.main(doctor.DoctorConfig(check=("kernels",)))
    assert ended.value.code == 1
    assert "kernels: PyTorch (" in capsys.readouterr().out
