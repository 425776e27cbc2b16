"""The house rules that a machine can check, by reading the source and by calling the command line."""

from __future__ import annotations

import ast
import gc
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import bare
import mutants
import pytest

from whet import __main__, cli, install

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "whet"
README = ROOT / "README.md"

# A name may import what stands in a row above its own, and its own folder; in the first row also what stands
# left of it. So `algo` cannot know `model`, nor `model` `algo`, nor `tasks` `generate`.
ORDER = (
    ("types", "install", "processes", "config", "cli", "stats"),
    ("kernels",),
    ("sandbox", "ranks"),
    ("storage",),
    ("telemetry",),
    ("rewards.answers",),  # text alone: the schema reads an answer as evaluation does
    ("schema",),
    ("rewards", "algo", "model"),
    ("generate", "tasks"),
    ("report",),
    ("eval",),
    (
        "editing",
    ),  # not edit, which is a function of the package; after eval: its drawdown is what eval measures
    ("train",),
    ("serve", "compress", "inspect"),
    ("recipes",),
    ("api",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

RECIPE_MODULES = (
    "whet.recipes.sft",
    "whet.recipes.rft",
    "whet.recipes.dpo",
    "whet.recipes.rl",
    "whet.recipes.evaluation",
    "whet.recipes.validation",
)


@cache
def sources() -> dict[str, ast.Module]:
    """Dotted module name -> parsed source of every module of the package."""
    found: dict[str, ast.Module] = {}
    gc.disable()  # it would look through a million nodes again and again
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    gc.enable()
    return found


def imports_of(module: str, tree: ast.Module, modules: set[str]) -> Iterator[tuple[str, int]]:
    """Yield (imported module, line) for every import, also in functions and under TYPE_CHECKING."""
    is_package = any(other.startswith(module + ".") for other in modules)
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")
                base = ".".join([*parent[: len(parent) - node.level + 1], *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in modules else base), node.lineno


def graph(trees: dict[str, ast.Module]) -> dict[str, dict[str, int]]:
    """Module -> {module of the package that it imports: line}."""
    names = set(trees)
    return {
        name: {
            target: line
            for target, line in imports_of(name, tree, names)
            if target in names and target != name
        }
        for name, tree in trees.items()
    }


def may_import(name: str, other: str) -> bool:
    if other not in RANK or RANK[other] != RANK[name]:
        return RANK.get(other, len(ORDER)) < RANK[name]
    return RANK[name] == 0 and ORDER[0].index(other) < ORDER[0].index(name)


def part_of(module: str) -> str:
    """Return the name of `ORDER` that a module belongs to."""
    inner = ".".join(module.split(".")[1:3])
    return inner if inner in RANK else module.split(".")[1]


def wrong_directions(edges: dict[str, dict[str, int]]) -> list[str]:
    wrong: list[str] = []
    for name, targets in edges.items():
        if name == "whet":
            continue
        top = part_of(name)
        if top not in RANK:
            wrong.append(f"{name}: not in ORDER; put it where it belongs")
            continue
        for target, line in targets.items():
            other = part_of(target) if "." in target else top
            if other != top and not may_import(top, other):
                wrong.append(f"{name}:{line} imports {target}")
    return wrong


def cycles(edges: dict[str, dict[str, int]]) -> list[str]:
    """Return every module that can reach itself."""
    found: list[str] = []
    for start in edges:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += edges[name]
        if start in seen:
            found.append(start)
    return found


def walk(tree: ast.AST, kinds: Any) -> Iterator[Any]:
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_dataclass_def(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def config_fields(node: ast.ClassDef) -> list[str]:
    items = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
    return [target.id for target in items if isinstance(target, ast.Name)]


def bare_fields(node: ast.ClassDef) -> list[str]:
    """Return the fields that --help would show bare: no text below them, none under 'Attributes:'."""
    attributes = (ast.get_docstring(node) or "").partition("Attributes:")[2]
    told = set(re.findall(r"^\s+(\w+):", attributes, flags=re.MULTILINE))
    for item, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            told |= {name for name in config_fields(node) if ast.unparse(item).startswith(f"{name}:")}
    return [name for name in config_fields(node) if name not in told]


def configs() -> list[tuple[str, ast.ClassDef]]:
    return [
        (module, node)
        for module, tree in sources().items()
        for node in walk(tree, ast.ClassDef)
        if node.name.endswith("Config") and is_dataclass_def(node)
    ]


def attributes_read(*trees: ast.AST) -> Counter[str]:
    """Count the attributes that are read, by name."""
    nodes = (node for tree in trees for node in walk(tree, ast.Attribute))
    return Counter(node.attr for node in nodes if isinstance(node.ctx, ast.Load))


def unread_fields(everywhere: Counter[str], owner: ast.ClassDef) -> set[str]:
    """Return the fields of a config class that no attribute access outside its body names."""
    return set(config_fields(owner)) - set(everywhere - attributes_read(owner))


def forbidden(tree: ast.Module) -> list[str]:
    """Return what a file must not contain: code from text, pickles, shells, imports by string."""
    calls = {
        "eval",
        "exec",
        "__import__",
        "torch.load",
        "os.system",
        "os.popen",
        "yaml.load",
        "import_module",
    }
    calls |= {"importlib.import_module", "yaml.unsafe_load", "yaml.full_load"}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in calls:
                found.append(f"{node.lineno}: {name}(")
            for keyword in node.keywords:
                is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("shell", "allow_pickle") and is_true:
                    found.append(f"{node.lineno}: {keyword.arg}=True")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            found += [f"{node.lineno}: import {name}" for name in names if name in PICKLES]
    return found


BEHIND_THE_WALL = (
    *("whet.sandbox.inside.child", "whet.sandbox.inside.remote", "whet.sandbox.inside.supervisor"),
    "whet.sandbox.graders.loading",
    "whet",
)
"""Modules that run inside the sandbox, or in a grader's worker: to run text is what they are for. And the package:
its public names are imported by a table."""
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def undocumented(module: str, tree: ast.Module) -> list[str]:
    """Return public names without a docstring: the module, its classes, functions and methods."""
    missing = [] if ast.get_docstring(tree) else [module]

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
                if not ast.get_docstring(node):
                    missing.append(f"{prefix}.{node.name}")
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}.{node.name}")

    visit(tree.body, module)
    return missing


def test_imports_point_left() -> None:
    assert wrong_directions(graph(sources())) == []


def test_no_import_cycles() -> None:
    edges = graph(sources())
    edges["whet"] = {}  # its public names are imported when they are first used
    assert cycles(edges) == []


def test_counts_in_the_docs_are_those_of_the_code() -> None:
    from whet.rewards.base import ELSEWHERE, REWARDS
    from whet.sandbox.attacks.attacks import all_attacks

    listed = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8").partition("## Built-in rewards")[2]
    rows = [
        line.split("|")[1] for line in listed.partition("\n\nWith ")[0].splitlines() if line.startswith("| `")
    ]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(names) == sorted({*REWARDS, *ELSEWHERE})
    assert f"| rewards | {len(REWARDS)} [built in](docs/rewards.md)" in README.read_text(encoding="utf-8")
    battery = (PACKAGE / "sandbox" / "attacks" / "battery.py").read_text(encoding="utf-8")
    checks = len(list(all_attacks())) + battery.count('"afterwards"')  # what they left behind
    graders = (ROOT / "docs" / "results" / "graders.md").read_text(encoding="utf-8")
    assert f"`whet doctor sandbox`: {checks} checks, 0 breaches" in graders


def test_rewards_and_cli_know_no_torch() -> None:
    names = set(sources())
    guilty = [
        f"{module}:{line}"
        for module, tree in sources().items()
        if module.startswith("whet.rewards.") or module in ("whet.config", "whet.cli", "whet.__main__")
        for target, line in imports_of(module, tree, names)
        if target.split(".")[0] == "torch"
    ]
    assert guilty == []


@pytest.mark.parametrize("module", ["whet", "whet.cli", "whet.__main__"])
def test_importing_the_command_line_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_config_field_is_read() -> None:
    everywhere = attributes_read(*sources().values())
    found = {f"{module}.{node.name}": unread_fields(everywhere, node) for module, node in configs()}
    unread = {name: fields for name, fields in found.items() if fields}
    assert unread == {}


def test_every_config_field_is_documented() -> None:
    bare = {f"{module}.{node.name}": names for module, node in configs() if (names := bare_fields(node))}
    assert bare == {}


def test_public_names_are_documented() -> None:
    trees = {module: tree for module, tree in sources().items() if tree.body}
    assert [name for module, tree in trees.items() for name in undocumented(module, tree)] == []


def test_inits_are_empty_and_no_drawers() -> None:
    inits = [p for p in PACKAGE.rglob("__init__.py") if p.parent != PACKAGE]
    assert [p for p in inits if p.read_text(encoding="utf-8").strip()] == []
    assert [p for p in PACKAGE.rglob("*") if p.stem in ("utils", "util", "common", "helpers", "misc")] == []


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by name alone, and which of two it then misses hangs on the number of processes."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert [name for name, count in names.items() if count > 1 and name != "conftest.py"] == []


def own_skips(tree: ast.Module) -> list[int]:
    """Return the lines on which a test itself decides what is missing, or starts a program without asking for it."""
    nodes = list(ast.walk(tree))
    names = {"pytest.skip", "pytest.mark.skip", "pytest.mark.skipif", "unittest.skip", "shutil.which"}
    found = [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr.startswith(("skip", "which"))
        and ast.unparse(node) in names
    ]
    asks = any(isinstance(node, ast.ImportFrom) and node.module == "needs" for node in nodes)
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess.") and node.args:
            words = node.args[0]
            first = words.elts[0] if isinstance(words, (ast.List, ast.Tuple)) and words.elts else None
            if isinstance(first, ast.Constant) and first.value in bare.HIDDEN.split() and not asks:
                found.append(node.lineno)
    return found


def test_one_place_decides_what_is_skipped() -> None:
    """A test that names its own reason skips for errors, too, and fails where a program is missing: see needs.py."""
    files = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if path.name not in ("needs.py", "conftest.py", "bare.py")
    ]
    names = "|".join(map(re.escape, bare.HIDDEN.split()))
    suspicious = re.compile(
        rf"pytest\.skip|mark\.skip|unittest\.skip|shutil\.which|[\[(][\"'](?:{names})[\"']"
    )
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    found = {name: own_skips(ast.parse(text)) for name, text in texts.items() if suspicious.search(text)}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_nothing_dangerous() -> None:
    found = {module: lines for module, tree in sources().items() if (lines := forbidden(tree))}
    assert {module: lines for module, lines in found.items() if module not in BEHIND_THE_WALL} == {}
    assert set(BEHIND_THE_WALL) <= set(found)
    named = {line.partition(": ")[2] for module in BEHIND_THE_WALL for line in found[module]}
    assert named == {"exec(", "importlib.import_module("}


ONE_MAKERS = (
    "amdsmi",
    "apex",
    "bitsandbytes",
    "cuda",
    "cupy",
    "flash_attn",
    "nvtx",
    "pynvml",
    "transformer_engine",
)
ONE_MAKERS += ("triton", "xformers")
"""Packages that one maker's GPUs need, or that have no build for the others."""


def of_one_maker(name: str, tree: ast.Module) -> list[str]:
    """Return imports at the top of a module that fail on another maker's machine, or on none's."""
    found = []
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"{name}: {each}" for each in names if each.partition(".")[0] in ONE_MAKERS]
    return found


FOREIGN_NAME = re.compile(
    r"pip install (?:-\S+ )*['\"]?whet(?![\w.-])|(?<![\w.-])whet\[[a-z]+\]|['\"]whet @ "
)
"""The name `whet` in an index, where it is somebody else's: what is installed is `whet-rl`."""


def test_nothing_installs_the_package_of_somebody_else() -> None:
    suffixes = {".py", ".md", ".toml", ".ipynb", ".yaml", ".yml", ".txt", ".html", ".sh", ".in", ""}
    names = ("README.md", "pyproject.toml", "Makefile", "constraints.txt", ".ci/run")
    files = [ROOT / name for name in names if (ROOT / name).is_file()]
    for folder in ("whet", "tests", "bench", "docs", "notebooks"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in suffixes]
    guilty = [
        str(path) for path in files if FOREIGN_NAME.search(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert guilty in ([], [__file__])
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == install.DISTRIBUTION
    assert FOREIGN_NAME.search("pip install whet")
    assert FOREIGN_NAME.search("pip install -U 'whet[web]'")
    assert not FOREIGN_NAME.search("pip install 'whet-rl[web]', then whet serve")


def test_no_path_of_a_users_home_raises() -> None:
    """`Path.expanduser` and `Path.home` do, where a user has no account: `whet.config.user_path` does not."""
    guilty = [
        f"{module}:{node.lineno}"
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (
            (node.attr == "expanduser" and ast.unparse(node.value) != "os.path")
            or (node.attr == "home" and ast.unparse(node.value) == "Path")
        )
    ]
    assert guilty == []


def test_nothing_needs_one_makers_gpu() -> None:
    """Only the Triton kernels are of one kind of device; they are loaded where they are asked for."""
    found = [line for name, tree in sources().items() for line in of_one_maker(name, tree)]
    assert [line for line in found if not line.startswith("whet.kernels.triton")] == []
    assert any(line.startswith("whet.kernels.triton") for line in found), (
        "the check finds those that there are"
    )


def test_the_checks_above_can_fail() -> None:
    """Each is shown a small guilty source."""
    assert own_skips(
        ast.parse("import pytest\n@pytest.mark.skipif(True, reason='')\ndef f(): pytest.skip(str(e))")
    ) == [2, 3]
    assert own_skips(ast.parse("subprocess.run(['git', 'log'])")) == [1]

    def edges(**files: str) -> dict[str, dict[str, int]]:
        return graph({name.replace("__", "."): ast.parse(text) for name, text in files.items()})

    inside = "def f():\n    from whet.model import b"
    late = edges(whet="", whet__algo="", whet__algo__a=inside, whet__model="", whet__model__b="")
    assert wrong_directions(late) == ["whet.algo.a:2 imports whet.model.b"]
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import whet.train.sft"
    right = edges(whet="", whet__eval="", whet__eval__e=typed, whet__train="", whet__train__sft="")
    assert wrong_directions(right) == ["whet.eval.e:3 imports whet.train.sft"]
    relative = edges(whet="", whet__types="from . import cli", whet__cli="from .types import X")
    assert wrong_directions(relative) == ["whet.types:1 imports whet.cli"]
    assert cycles(relative) == ["whet.types", "whet.cli"]
    assert wrong_directions(edges(whet="", whet__stray="")) == [
        "whet.stray: not in ORDER; put it where it belongs"
    ]

    guilty = "import pickle\nfrom dill import load\ntorch.load(f)\neval(x)\nmodel.eval()\n"
    guilty += "run(x, shell=True)\nyaml.load(f)"
    lines = [
        "1: import pickle",
        "2: import dill",
        "3: torch.load(",
        "4: eval(",
        "6: shell=True",
        "7: yaml.load(",
    ]
    assert sorted(forbidden(ast.parse(guilty))) == lines

    tree = ast.parse('class A:\n    """A."""\n    def f(self): ...\n    def _g(self): ...\ndef h(): ...')
    assert undocumented("m", tree) == ["m", "m.A.f", "m.h"]
    owner = "@dataclass\nclass XConfig:\n    lr: float\n    eps: float\n    def f(self): return self.eps\n"
    tree = ast.parse(owner + "config.lr\nconfig.eps = 3")
    assert unread_fields(attributes_read(tree), next(walk(tree, ast.ClassDef))) == {"eps"}
    told = 'class C:\n    """C.\n\n    Attributes:\n        a: A.\n    """\n'
    told += '    a: int\n    b: int = 1\n    """B."""\n    c: int'
    assert bare_fields(next(walk(ast.parse(told), ast.ClassDef))) == ["c"]


def readme_blocks(page: Path = README) -> Iterator[tuple[str, list[str]]]:
    """Yield (language, lines) of each fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        yield match[1], match[2].splitlines()


def readme_commands(page: Path = README) -> list[list[str]]:
    """Return the words of every `whet ...` and `make ...` line in a page's shell blocks."""
    lines = [
        line
        for language, block in readme_blocks(page)
        if language in ("sh", "bash", "console")
        for line in block
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    commands = [line.strip().removeprefix("$ ") for line in joined.splitlines()]
    return [shlex.split(line, comments=True) for line in commands if line.startswith(("whet ", "make "))]


def test_readme_commands_parse(tmp_path: Path) -> None:
    commands = readme_commands()
    assert {program for program, *_ in commands} == {"whet", "make"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, flags=re.MULTILINE))
    for program, *words in commands:
        if program == "make":
            assert {word for word in words if "=" not in word} <= targets, f"make {shlex.join(words)}"
        else:
            check_whet_command(words, tmp_path)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_commands_of_the_docs_parse(page: Path, tmp_path: Path) -> None:
    for program, *words in readme_commands(page):
        if program == "whet" and page.name != "LOG.md":  # the log quotes earlier versions
            words = words[
                : next((n for n, word in enumerate(words) if word in ("&&", "|", "&", ">", "2>&1")), None)
            ]
            check_whet_command(words, tmp_path)


def check_whet_command(words: list[str], tmp_path: Path) -> None:
    """Parse one command line as whet would, without running it; a path becomes a run folder of a recipe."""
    if not words or words[0].startswith("-"):
        assert __main__.main(words) == 0
        return
    program = __main__.COMMANDS[words[0]].load()
    rest = list(words[1:])
    if rest and program.recipes and ("/" in rest[0] or rest[0].endswith(".yaml")):
        config = next(iter(program.recipes.values()))()
        (tmp_path / "config.yaml").write_text(cli.dump_yaml(config), encoding="utf-8")
        rest[0] = str(tmp_path)
    name = f"whet {words[0]}"
    options: dict[str, Any] = {"resumable": program.resumable, "presets": program.presets}
    options |= {"positional": program.positional, "passes": program.passes}
    ending: object = 0
    try:
        cli.parse(name, program.config_class, program.recipes, rest, **options)
    except SystemExit as error:
        ending = error.code
    assert ending == 0, words


def test_every_program_loads() -> None:
    for name, command in __main__.COMMANDS.items():
        assert command.load() is not None, name


def test_every_table_of_recipes_is_checked() -> None:
    tables = {
        module
        for module, tree in sources().items()
        if module.startswith("whet.recipes.")
        and any("RECIPES" in map(ast.unparse, targets_of(node)) for node in tree.body)
    }
    assert tables == set(RECIPE_MODULES)


def targets_of(node: ast.stmt) -> list[ast.expr]:
    """Return what a statement assigns to."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


@pytest.mark.parametrize("module", RECIPE_MODULES)
def test_every_recipe_builds(module: str) -> None:
    for name, recipe in importlib.import_module(module).RECIPES.items():
        config = recipe()
        assert recipe.__doc__, name
        assert cli.from_dict(type(config), cli.to_dict(config), where=name) == config


def test_every_mutant_applies_to_the_source() -> None:
    """The table of `tests/mutants.py` is run by hand and once a week; here it is kept from growing stale."""
    table = mutants.mutants()
    assert [f"{mutant.name}: {reason}" for mutant in table if (reason := mutants.fault(mutant))] == []
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in table}) == len(table) >= 168
    guarded = {mutant.file.partition("/")[0] for mutant in table}
    assert {"algo", "train", "stats.py", "eval", "rewards", "generate", "tasks"} <= guarded
    broken = mutants.Mutant("mask", "algo/losses.py", "no such line", "", ())
    assert mutants.fault(broken) == "the old text stands there 0 times, expected once"
