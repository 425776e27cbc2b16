"""The environment that CI proves the README's commands in has what a bare machine has, and no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from email import message_from_string
from pathlib import Path

import bare
import pytest

LOOK = """
import json, os, shutil, socket, sys
def reaches(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as it:
        return it.connect_ex((address, 9)) == 0
def writes(folder):
    try:
        return bool(open(os.path.join(folder, "trial"), "w"))
    except OSError:
        return False
programs = [name for name in sys.argv[1:] if shutil.which(name)]
files = [path for path in ("/usr/bin/gcc", "/usr/bin/git") if os.access(path, os.X_OK)]
print(json.dumps([programs, files, os.getcwd(), os.environ["LANG"], writes(os.environ["HOME"]), writes("."),
    reaches("192.0.2.1"), reaches("127.0.0.1"), shutil.which("python3") is not None]))
"""


def test_what_a_bare_machine_does_not_have_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    link = tmp_path / "environment"
    link.symlink_to(sys.prefix)
    asked = [sys.executable, bare.__file__, "--tree", str(tmp_path), "--venv", str(link), "--"]
    command = [sys.executable, "-c", LOOK, *bare.HIDDEN.split(), "sh", "gcc-12"]
    done = subprocess.run([*asked, *command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said, line = done.stdout.strip().splitlines()
    programs, files, place, language, home, here, network, loopback, python = json.loads(line)
    assert programs == ["sh"]
    assert (language, here, loopback, python) == ("C", True, True, True)
    assert " " in Path(place).name
    assert not Path(place).exists()  # removed with all that was written there
    if "no namespaces" not in said:  # otherwise the line says that PATH alone hides programs
        assert not files
        assert not home
        assert not network


def test_the_status_is_the_commands(tmp_path: Path) -> None:
    asked = [sys.executable, bare.__file__, "--tree", str(tmp_path), "--venv", sys.prefix, "--", "sh", "-c"]
    assert subprocess.run([*asked, "exit 3"], capture_output=True, timeout=60, check=False).returncode == 3


def test_an_environment_that_is_not_bare_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare, "HIDDEN", "sh no-such-program")
    found = bare._found({"PATH": os.environ["PATH"]}, by_path_alone=True)
    assert found == ["sh"]


@pytest.mark.ci
def test_the_source_distribution_has_what_a_clone_has(tmp_path: Path) -> None:
    bare.copy_tree(bare.ROOT, tree := tmp_path / "tree")
    code = "from setuptools import build_meta; print(build_meta.build_sdist(r'../dist'))"
    (tmp_path / "dist").mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, timeout=120, check=True)
    (archive,) = (tmp_path / "dist").glob("whet_rl-*.tar.gz")
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    bare.copy_tree(bare.ROOT, clone := tmp_path / "clone")
    files = {str(path.relative_to(clone)) for path in clone.rglob("*") if path.is_file()}
    assert len(files) > 900
    assert files - packed <= {".gitignore"}
    with tarfile.open(archive) as file:
        (name,) = (name for name in file.getnames() if name.count("/") == 1 and name.endswith("PKG-INFO"))
        content = file.extractfile(name)
        assert content is not None
        facts = message_from_string(content.read().decode())
    assert facts["Name"] == "whet-rl"
    assert "Operating System :: POSIX :: Linux" in facts.get_all("Classifier", [])
    assert "](docs/" not in facts.get_payload()  # relative links lead nowhere on an index's page
