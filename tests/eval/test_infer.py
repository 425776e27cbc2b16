"""Many images and prompts to many runs, adapters on and off: what is drawn, judged, kept and shown."""

from __future__ import annotations

import base64
import io
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from seeing import png, save_adapter, save_model, uri

from whet.eval.compare import asked
from whet.eval.compare.asked import OwnProblems, own_problem
from whet.eval.compare.infer import InferConfig, main, plan, read_problems
from whet.generate.policy import PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.report.pictures import MAX_AS_IT_IS, MAX_SIDE, Pictures, picture_of
from whet.telemetry.hardware import Device, HardwareMonitor
from whet.types import UserError

SHORT = SamplingParams(temperature=0.7, max_new_tokens=8)
PLAIN = PolicyConfig(init="RUN", max_rows=4, system_prompt=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("infer")
    save_model(folder / "model")
    save_model(folder / "other", seed=1)
    save_adapter(folder / "model", folder / "adapter")
    images = folder / "images"
    images.mkdir()
    for place in range(3):
        (images / f"{place}.png").write_bytes(png(uri(40 * place, 200)))
    (images / "notes.md").write_text("no image")
    return folder


def infer(models: Path, out: Path, *runs: str, **options: Any) -> dict[str, Any]:
    options = {"prompt": ("ab=",), "sampling": SHORT, "num_samples": 1, "policy": PLAIN} | options
    main(InferConfig(runs=tuple(str(models / run) for run in runs), out=str(out), **options))
    return json.loads((out / "infer.json").read_text())


def drawn(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def page_data(out: Path, name: str) -> Any:
    page = (out / "infer.html").read_text()
    return json.loads(page.partition(f'id="data-{name}">')[2].partition("</script>")[0])


def test_every_image_is_shown_to_every_run_with_every_prompt(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    images, prompts = (str(models / "images"),), ("ab=", "ab=", "abc=")
    content = infer(models, out, "adapter", "other", images=images, prompt=prompts)
    assert [row["name"] for row in content["models"]] == ["model", "adapter", "other"]
    rows = {name: drawn(out, name) for name in ("model", "adapter", "other")}
    for name, own in rows.items():
        assert len(own) == 3 * 2 * 2  # images, different prompts, greedy and one sample
        assert {row["model"] for row in own} == {name}
        assert all(row["completion_tokens"] == len(row["completion_ids"]) for row in own)
        assert all(row["correct"] is None and row["gold"] is None for row in own)
    asked_of = [[(row["uid"], row["images"], row["prompt"]) for row in own] for own in rows.values()]
    assert asked_of[0] == asked_of[1] == asked_of[2]
    assert len({row["images"][0] for row in rows["model"]}) == 3
    texts = {name: [row["text"] for row in own] for name, own in rows.items()}
    assert texts["model"] != texts["adapter"]
    assert len(set(texts["model"])) > 2, "another image, another answer"
    weights = {row["name"]: row["model"] for row in content["models"]}
    assert weights["adapter"]["adapter"]
    assert not weights["model"]["adapter"]

    # Switched off, the adapter leaves the base as it is: the base alone draws the same.
    infer(models, tmp_path / "base", "model", images=images, prompt=prompts)
    assert [row["completion_ids"] for row in drawn(tmp_path / "base", "model")] == [
        row["completion_ids"] for row in rows["model"]
    ]

    shown = page_data(out, "transcripts")
    assert [problem["prompt"] for problem in shown] == ["ab=", "abc="] * 3
    assert [problem["images"] for problem in shown] == [[0], [0], [1], [1], [2], [2]]
    assert all(picture["src"].startswith("data:image/png;base64,") for picture in page_data(out, "pictures"))


def test_adapters_on_or_off_alone(models: Path, tmp_path: Path) -> None:
    for which, name in (("on", "adapter"), ("off", "model")):
        content = infer(models, tmp_path / which, "adapter", adapters=which)
        assert [row["name"] for row in content["models"]] == [name]
    both = infer(models, tmp_path / "both", "model", "adapter")
    assert [row["name"] for row in both["models"]] == ["model", "adapter-without-adapter", "adapter"]


def test_lists_have_prompts_and_answers_and_vectors_are_judged(models: Path, tmp_path: Path) -> None:
    rows = [
        {"image": "0.png", "answer": 3},
        {"images": ["1.png", "2.png"], "prompt": "a=", "answer": [60, 270.5]},
    ]
    listed = models / "images" / "list.jsonl"
    listed.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    config = InferConfig(images=(str(listed),), prompt=("ab=",), answer="7")
    one, two = read_problems(config)
    assert (one.prompt, one.answer, len(one.images)) == ("ab=", "3", 1)
    assert (two.prompt, two.answer, len(two.images)) == ("a=", "[60, 270.5]", 2)
    (models / "images" / "list.txt").write_text("2.png\n\n0.png\n")
    (models / "asked.jsonl").write_text('{"prompt": "a=", "answer": "5"}\n{"prompt": "b="}\n')
    config = InferConfig(
        images=(str(models / "images" / "list.txt"),), prompt=(str(models / "asked.jsonl"),), answer="7"
    )
    found = [(Path(p.images[0]).name, p.prompt, p.answer) for p in read_problems(config)]
    assert found == [("2.png", "a=", "5"), ("2.png", "b=", "7"), ("0.png", "a=", "5"), ("0.png", "b=", "7")]
    content = infer(models, tmp_path / "out", "adapter", images=(str(listed),))
    assert content["tables"][0]["rows"][0]["metric"] == "pass@1"
    assert {row["correct"] for row in drawn(tmp_path / "out", "adapter")} <= {True, False}
    listed.unlink()

    # S0-07: the vector in any layout, and never its sum.
    seed = own_problem("logprobs * Advantages?", "[60, 270, 90, 180]")
    versions = [own_problem(f"Which {gold}?", gold) for gold in ("1.2.3", "1.10", "v2.0")]
    assert not OwnProblems(versions).is_correct(versions[1], "1.1")
    assert OwnProblems(versions[1:2]).is_correct(versions[1], "1.1")
    task = OwnProblems([seed])
    assert all(
        task.is_correct(seed, text) for text in ("60\n270\n90\n180", "60, 270, 90, 180", "[60 270 90 180]")
    )
    assert not any(
        task.is_correct(seed, text) for text in ("600", "60, 90, 270, 180", "60, 270, 90", None, "")
    )


def test_text_alone_and_one_model(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = infer(models, tmp_path / "out", "other", answer="1", num_samples=2)
    assert content["tables"] == []
    (row,) = content["summary"]
    assert row["completions"] == "2"
    assert row["right"].endswith("of 2")
    assert 0 < float(row["token probability"]) < 1
    out = capsys.readouterr().out
    assert "token probability" in out
    assert "not recorded: " in out, "which sensors are missing, and why"


def test_after_an_interruption_everything_drawn_is_kept_and_shown(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, count = asked.Asked._keep, 0

    def interrupted(self: asked.Asked, chunk: Any) -> None:
        nonlocal count
        keep(self, chunk)
        count += 1
        if count == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(asked.Asked, "_keep", interrupted)
    with pytest.raises(KeyboardInterrupt, match="on its page"):
        infer(models, tmp_path / "out", "adapter", images=(str(models / "images"),), num_samples=3)
    assert [len(drawn(tmp_path / "out", name)) for name in ("model", "adapter")] == [12, 8]
    assert len(page_data(tmp_path / "out", "transcripts")) == 2, "what both have"


def test_energy_is_of_the_window_of_the_drawing(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def devices() -> list[Device]:
        return [Device("gpu0", "MI300X", "gpu", {"power_w": lambda: 500.0})]

    monkeypatch.setattr(asked, "HardwareMonitor", partial(HardwareMonitor, sources={"amd": devices}))
    monkeypatch.setattr(asked, "INTERVAL_S", 0.0005)
    content = infer(models, tmp_path / "out", "other", images=(str(models / "images"),))
    rows = {row["name"]: row["values"][0] for row in content["hardware"]}
    joules = 500.0 * rows["window"]
    assert rows["energy per request"] == pytest.approx(joules / 6, rel=0.02)
    assert rows["energy per token"] == pytest.approx(joules / rows["tokens written"], rel=0.02)
    assert content["models"][0]["devices"] == "MI300X"


def test_mistakes_get_one_line_before_anything_is_written(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    image = str(models / "images" / "0.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.png").write_text("<html>")
    whole = png(uri(*range(0, 240, 7)))
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    cut = f"data:image/png;base64,{base64.b64encode(whole[: len(whole) // 2]).decode()}"
    (tmp_path / "torn.jsonl").write_text('{"image": "a.png"\n')
    (tmp_path / "none.jsonl").write_text('{"picture": "a.png"}\n')
    (tmp_path / "out.jsonl").write_text(json.dumps({"image": "../secret.png"}) + "\n")
    (tmp_path / "blank.txt").write_text("\n")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"runs": ()}, "name runs"),
        ({"runs": ("all",)}, "no run with a model"),
        ({"runs": ("nowhere/at/all",)}, "no such run or folder"),
        ({"prompt": ()}, "give --prompt"),
        ({"prompt": (), "images": (image,)}, "images without a prompt"),
        ({"prompt": ("questions.txt",)}, "no such file"),
        ({"images": ("nothing.png",)}, "cannot be read"),
        ({"images": ("empty",)}, "no image in empty"),
        ({"images": ("bad.png",)}, "not an image"),
        ({"images": ("cut.png",)}, "broken .*truncated"),
        ({"images": (cut,)}, "broken .*truncated"),
        ({"images": (f"file://{tmp_path}/gone.png",)}, "cannot be read"),
        ({"images": ("torn.jsonl",)}, "line 1: not a JSON object"),
        ({"images": ("none.jsonl",)}, "expected `image`"),
        ({"images": ("out.jsonl",)}, "outside of .* --image-root"),
        ({"images": ("blank.txt",)}, "lists none"),
        ({"images": ("missing.jsonl",)}, "no such file"),
        ({"images": ("http://127.0.0.1:1/a.png",)}, "--image-urls public"),
        ({"images": (uri(3, size=(256, 256)),), "prompt": ("a" * 100,)}, "tokens, images included"),
    ]
    for options, message in cases:
        asked_for = {"runs": (str(models / "model"),), "prompt": ("ab=",), "policy": PLAIN} | options
        with pytest.raises(UserError, match=message) as caught:
            main(InferConfig(out=str(tmp_path / "o"), **asked_for))
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "o").exists(), message
    greedy = SamplingParams(temperature=0.0)
    for options in ({"sampling": greedy}, {"num_samples": 0}, {"policy": PolicyConfig(init="x")}):
        with pytest.raises(ValueError, match="expected|name the models"):
            InferConfig(**options)
    config = InferConfig(
        runs=(f"{models / 'model'},{models / 'other'}",),
        images=(f"{image},{image}", f"file://{image}"),
        prompt=("a",),
    )
    assert re.search(r"questions +1\n", plan(config)), "an image that is given twice is asked about once"


def test_a_text_model_says_that_it_cannot_see(
    models: Path, tmp_path: Path, tiny_policy: PolicyConfig
) -> None:
    from whet.generate.policy import load_policy

    load_policy(tiny_policy, seed=0).save(tmp_path / "blind")
    with pytest.raises(UserError, match="reads text alone"):
        infer(tmp_path, tmp_path / "out", "blind", images=(str(models / "images"),))
    assert not (tmp_path / "out").exists()


def test_pictures_of_pages_are_pixels_within_bounds(tmp_path: Path) -> None:
    import numpy as np
    from PIL import Image

    assert picture_of(uri(1))["src"] == uri(1)
    noise = np.random.default_rng(0).integers(0, 255, (900, 1200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "big.png")
    found = picture_of(str(tmp_path / "big.png"))
    assert found["src"].startswith("data:image/jpeg;base64,")
    assert len(found["src"]) < 2**20
    assert Image.open(io.BytesIO(png(found["src"]))).size == (MAX_SIDE, MAX_SIDE * 900 // 1200)
    for source in (
        "https://example.org/a.png", "data:image/svg+xml;base64,PHN2Zz4=", "data:text/html,<script>1</script>",
        "nowhere.png", "\x00", 'data:image/png;base64,AAAA" onerror="x', "/dev/zero", "a" * 5000,
        "data:image/png;base64," + "A" * MAX_AS_IT_IS,
    ):  # fmt: skip
        assert "src" not in picture_of(source), source[:50]
        assert len(picture_of(source)["note"]) <= 300
    (tmp_path / "run" / "images").mkdir(parents=True)
    (tmp_path / "run" / "images" / "a.png").write_bytes(png(uri(5)))
    assert picture_of("images/a.png", tmp_path / "run")["src"].startswith("data:image/png;base64,")
    assert "src" not in picture_of("../big.png", tmp_path / "run"), "not of the run, and not where this runs"
    assert Pictures(tmp_path / "run").shown == []
    pictures = Pictures(max_characters=len(uri(1)) + 10)
    assert pictures.numbers([uri(1), uri(2), uri(1)]) == [0, 1, 0]
    assert "many images" in pictures.shown[1]["note"]


def test_the_command_line(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from whet.__main__ import main as whet

    words = ["infer", "--runs", f"{models / 'model'},{models / 'other'}", "--images", str(models / "images")]
    words += [
        "--prompt",
        "ab=",
        "--sampling.max-new-tokens",
        "4",
        "--num-samples",
        "1",
        "--policy.max-rows",
        "8",
    ]
    words += ["--policy.system-prompt", "none", "--out", str(tmp_path / "out")]
    assert whet([*words, "--dry-run"]) == 0
    assert not (tmp_path / "out").exists()
    assert whet(words) == 0
    assert (tmp_path / "out" / "infer.html").is_file()
    assert "page: " in capsys.readouterr().out
    assert whet([*words[:-1], str(tmp_path / "again"), "--images", "x"]) == 2
