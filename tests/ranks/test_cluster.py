"""What Ray's groups and settings are made of, without Ray: environments as torchrun sets them, and what is refused."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet import __main__
from whet.ranks.ray import ClusterConfig, environments, open_ray
from whet.types import UserError


def test_ranks_have_the_environment_that_torchrun_sets() -> None:
    found = environments(
        [
            ("n1", "10.0.0.1", 4001, ["0"]),
            ("n1", "10.0.0.1", 4002, ["3"]),
            ("n2", "10.0.0.2", 4003, ["1"]),
        ]
    )
    assert [(e["RANK"], e["LOCAL_RANK"], e["LOCAL_WORLD_SIZE"], e["GROUP_RANK"]) for e in found] == [
        ("0", "0", "2", "0"),
        ("1", "1", "2", "0"),
        ("2", "0", "1", "1"),
    ]
    assert {(e["WORLD_SIZE"], e["MASTER_ADDR"], e["MASTER_PORT"]) for e in found} == {
        ("3", "10.0.0.1", "4001")
    }
    assert [e["CUDA_VISIBLE_DEVICES"] for e in found] == ["0,3", "0,3", "1"]
    (alone,) = environments([("n1", "10.0.0.1", 1, [])])
    assert "CUDA_VISIBLE_DEVICES" not in alone
    assert alone["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"partial": True}, "cluster.partial is read with cluster.rollout_workers only"),
        ({"max_restarts": 1}, "cluster.max_restarts is read with cluster.trainer_ranks only"),
        ({"address": "auto"}, "cluster.address is read with"),
        ({"trainer_ranks": 4, "rollout_workers": 3}, "3 for 4 trainer ranks"),
        ({"rollout_workers": 2, "min_workers": 3}, "expected at most rollout_workers = 2"),
        ({"rollout_workers": 2, "slow_factor": 0.5}, "expected 1 or more"),
        ({"rollout_workers": -1}, "expected 0 or more"),
        ({"rollout_workers": 1, "wait_s": 0.0}, "above 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterConfig(**fields)


RECIPES = Path(__file__).parents[2] / "docs/cluster"


def commands(text: str) -> list[list[str]]:
    """The words after `whet` of all commands in a text."""
    joined = re.sub(r"\\\\\n\s*", "", text)
    found = re.findall(r"(?m)^\s*(?:RESTARTS=\d )?(?:launch|whet) ((?:doctor|rl) .*?)(?: &)?$", joined)
    return [shlex.split(re.sub(r'"?\$\{?RESUME.*', "", line).replace('"$RUN"', "runs/x")) for line in found]


@pytest.mark.parametrize("path", sorted(RECIPES.iterdir()), ids=lambda path: path.name)
def test_recipes_of_several_machines_are_well_formed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = path.read_text()
    scripts = [text]
    if path.suffix == ".yaml":
        content = yaml.safe_load(text)
        scripts = [content[name] for name in ("setup", "run") if name in content]
        if "spec" in content:
            spec = content["spec"]
            scripts = ["whet " + spec["entrypoint"].removeprefix("whet ")]
            assert (content["apiVersion"], content["kind"]) == ("ray.io/v1", "RayJob")
            (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
            for pod in (spec["rayClusterSpec"]["headGroupSpec"], group):
                template = pod["template"]["spec"]
                volumes = {volume["name"] for volume in template["volumes"]}
                (container,) = template["containers"]
                assert {mount["name"] for mount in container["volumeMounts"]} == volumes
                assert container["resources"]["requests"] == container["resources"]["limits"]
        else:
            assert set(content) <= {
                "name",
                "num_nodes",
                "resources",
                "file_mounts",
                "workdir",
                "setup",
                "run",
            }
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script.encode(), check=True)
    found = [words for script in scripts for words in commands(script)]
    assert [words[0] for words in found][-1] == "rl"
    for words in found:
        __main__.run([*words, "--print-config"])
    if path.name == "kuberay.yaml":
        shown = yaml.safe_load(capsys.readouterr().out)
        gpus = sum(group["replicas"] for group in spec["rayClusterSpec"]["workerGroupSpecs"]) * 4
        cluster = shown["cluster"]
        asked = cluster["trainer_ranks"] * cluster["trainer_gpus"]
        assert asked + cluster["rollout_workers"] * cluster["worker_gpus"] <= gpus


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"needs Ray: .*\[ray\]"), open_ray("elsewhere:1", cpus=1):
        pass


def test_amds_package_without_its_library_gets_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray 2.60 fails on import with amdsmi 7.0.2 and no ROCm."""
    (tmp_path / "ray.py").write_text("raise KeyError('libamd_smi.so')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"amdsmi .* pip uninstall amdsmi"), open_ray("elsewhere:1", cpus=1):
        pass
