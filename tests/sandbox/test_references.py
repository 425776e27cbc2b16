"""The reference solutions of HumanEval and MBPP pass their tests, and simple mutants of each fail."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from needs import SHARED, require

from whet.sandbox.programs import Sandbox, TestsVerdict

DATA = SHARED / "data/code"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as sandbox:
        yield sandbox


def he_verdict(sandbox: Sandbox, row: dict[str, Any], body: str) -> TestsVerdict:
    entry = row["entry_point"]
    test = f"{row['test']}\ncheck({entry})"
    return sandbox.run_tests(
        row["prompt"] + body, [test], setup=row["prompt"], names=[entry], timeout_s=15.0, memory_mib=512
    )


@pytest.mark.slow
def test_humaneval_references_pass_and_mutants_fail(sandbox: Sandbox) -> None:
    path = DATA / "HumanEval.jsonl.gz"
    require("shared/data/code")
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    with ThreadPoolExecutor(2) as pool:
        gold = list(pool.map(lambda row: he_verdict(sandbox, row, row["canonical_solution"]), rows))
        mutants = {
            body: list(pool.map(lambda row, body=body: he_verdict(sandbox, row, body), rows))
            for body in ("    pass\n", "    return 0\n", "    return []\n", "    import sys; sys.exit(0)\n")
        }
    assert len(gold) == 164
    assert [row["task_id"] for row, v in zip(rows, gold, strict=True) if v.status != "ok"] == []
    for verdicts in mutants.values():
        assert [row["task_id"] for row, v in zip(rows, verdicts, strict=True) if v.status == "ok"] == []


@pytest.mark.slow
def test_mbpp_references_pass_and_mutants_fail(sandbox: Sandbox) -> None:
    path = DATA / "mbpp.jsonl"
    require("shared/data/code")
    rows = [json.loads(line) for line in path.read_text().splitlines()]

    def judge(row: dict[str, Any], code: str) -> TestsVerdict:
        names = re.findall(r"^(?:def|class)\s+(\w+)", row["code"], re.MULTILINE)
        return sandbox.run_tests(
            code, row["test_list"], setup=row["test_setup_code"], names=names, timeout_s=15.0, memory_mib=512
        )

    def mutate(row: dict[str, Any]) -> str:
        """Return the program with every function's answer wrapped."""
        return row["code"] + "".join(
            f"\n{name} = lambda *a, **k: ('wrong',)"
            for name in re.findall(r"^def\s+(\w+)", row["code"], re.MULTILINE)
        )

    with ThreadPoolExecutor(2) as pool:
        gold = list(pool.map(lambda row: judge(row, row["code"]), rows))
        wrong = list(pool.map(lambda row: judge(row, mutate(row)), rows))
    failed = {row["task_id"] for row, v in zip(rows, gold, strict=True) if v.status != "ok"}
    assert failed <= {123, 367, 927}  # known to be slow or broken
    assert [row["task_id"] for row, v in zip(rows, wrong, strict=True) if v.status == "ok"] == []
