"""Folders and files of every family in the programs that people read them with, and the table of docs/export.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import runtime_cases as cases
from needs import READERS, needs

from whet.compress.export import gguf, runtimes
from whet.compress.export.export import ExportConfig, export
from whet.generate.policy import Policy, PolicyConfig
from whet.model.families import from_hf
from whet.model.text.tokenizer import Tokenizer
from whet.schema import SCHEMAS
from whet.types import UserError

SLOW = [pytest.param(name, marks=[pytest.mark.slow, needs(name)]) for name in READERS]


def test_the_page_has_every_family_and_what_each_runtime_does_with_it() -> None:
    assert {cases.KINDS[name] for name in cases.VARIANTS} == set(gguf.ARCHITECTURES)  # each runs in llama.cpp
    found, wanted = (cases.NUMBER.sub("#", text) for text in (cases.committed(), cases.table({})))
    assert found == wanted, "docs/export.md is stale: python tests/compress/export/runtime_cases.py"
    assert "#" not in cases.committed()
    for name in cases.KINDS:
        if cases.KINDS[name] not in gguf.ARCHITECTURES:
            case = cases.family_cases.CASES[name.removeprefix("case ")]
            with pytest.raises(UserError, match="is not written here"):
                gguf.architecture(from_hf({"model_type": case.model_type} | case.config))


def test_numbers_are_rounded_up_to_one_digit() -> None:
    assert [cases.rounded_up(number) for number in (0.0, 3.01e-7, 9.2e-5, 0.004)] == [
        "0",
        "4e-7",
        "1e-4",
        "4e-3",
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[int]]]:
    """Every model as whet saves it."""
    return cases.write_folders(tmp_path_factory.mktemp("folders"))


@pytest.mark.parametrize("reader", [pytest.param("transformers", marks=[pytest.mark.ci]), *SLOW])
def test_a_folder_has_our_probabilities_or_the_page_says_otherwise(
    reader: str, folders: dict[str, tuple[str, list[int]]]
) -> None:
    for name, found in cases.read_folders(reader, folders).items():
        assert cases.found_verdict(found) == cases.verdict(reader, name).partition(":")[0], (name, found)


@pytest.mark.parametrize("reader", SLOW)
def test_an_export_passes_its_report_in_an_older_reader(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", READERS[reader])
    monkeypatch.setattr(runtimes, "missing", lambda runtime: "")  # it is missing in this process alone
    Policy(cases.make("llama, llama3"), Tokenizer.bytes(), SCHEMAS["think_answer"]).save(tmp_path / "model")
    report = export(
        ExportConfig(
            policy=PolicyConfig(init=str(tmp_path / "model"), device="cpu"),
            to="mlx" if reader == "mlx-lm" else "hf",
            dtype="f32",
            out=str(tmp_path / "out"),
            num_prompts=3,
            max_new_tokens=6,
        )
    )
    assert report["verdict"] == "passed", report["failures"]
    assert report["checked_by"].startswith(reader)
