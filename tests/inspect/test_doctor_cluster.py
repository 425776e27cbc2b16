"""`whet doctor cluster`: two ranks see each other's files and clocks; each kind of trouble is told with its remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gloo import run_ranks

from whet.inspect.doctor import cluster
from whet.inspect.doctor.cluster import Facts, Link, check_cluster, problems, shared_folder
from whet.ranks.collectives import rank

FACTS = Facts(
    whet="0.1.0",
    code="ab",
    python="3.11.7",
    torch="2.13.0",
    host="a",
    cpus=8,
    memory_gib=64.0,
    gpus=("H100",),
)


def checked(folder: str) -> tuple[bool, str, str]:
    cluster.NUMBERS = 1 << 10
    cluster.SLOW_GB_PER_S = 0.0
    own = f"{folder}/{rank()}"  # a folder that only one rank sees
    return check_cluster(folder), shared_folder(Path(own), wait_s=0.2), own


@pytest.mark.ci
def test_two_ranks_share_a_folder_or_are_told_that_they_do_not(tmp_path: Path) -> None:
    for number, (is_well, wrong, own) in enumerate(run_ranks(2, checked, str(tmp_path))):
        assert is_well
        assert wrong == f"does not show what rank {1 - number} wrote"
        assert not list(Path(own).iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_one_process_checks_what_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_cluster(str(tmp_path))
    said = capsys.readouterr().out
    assert "one rank: start it with torchrun" in said
    assert "no problem found" in said
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not check_cluster(str(blocked))
    assert "problem: the folder cannot be written" in capsys.readouterr().out


def test_each_kind_of_trouble_has_its_remedy() -> None:
    other = replace(FACTS, host="b")
    assert problems([FACTS, other], [Link("gloo", 1e-4, 1.0)]) == []
    changes = {
        "torch is 2.13.0 on rank 0, but 2.12.0 on rank 1: install the same torch": {"torch": "2.12.0"},
        "code is ab on rank 0, but cd on rank 1: copy the same source": {"code": "cd"},
        "the clock of rank 1 differs by -3.0 s: synchronise it": {"clock_s": -3.0},
        "the folder cannot be written, as rank 1 sees it: give --folder": {"folder": "cannot be written"},
        "ranks see [0, 1] GPUs": {"gpus": ()},
    }
    for text, change in changes.items():
        (line,) = problems([FACTS, replace(other, **change)], [])
        assert line.startswith(text), line
    (line,) = problems([FACTS], [Link("nccl", 2e-2, 40.0)])
    assert "NCCL_SOCKET_IFNAME" in line


def test_fields_of_other_checks_are_refused() -> None:
    from whet.inspect.doctor.doctor import DoctorConfig  # not in the ranks above, which it would slow down

    with pytest.raises(ValueError, match="ranks is not read by the check kernels"):
        DoctorConfig(check=("kernels",), ranks=2)
    with pytest.raises(ValueError, match="address is read with ranks only"):
        DoctorConfig(check=("cluster",), address="auto")
