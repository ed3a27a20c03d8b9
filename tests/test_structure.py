"""Imports point one way, late imports included: from a floor to floors below it, in no circle."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import olmo_sparsity

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "olmo_sparsity"
MODULES = sorted(PACKAGE.glob("**/*.py"))

FLOORS: dict[str, set[str]] = {
    "base": set(),
    "config": {"base"},
    "text": {"base", "config"},
    "models": {"base", "config", "text"},
    "data": {"base", "config", "text", "models"},
    "training": {"base", "config", "text", "models", "data"},
    "analysis": {"base", "config", "text", "models"},
    "sources": {"base", "config", "text", "models", "analysis"},
    # The only package that knows both halves, and nothing of the second product.
    "experiment": {"base", "config", "text", "models", "data", "training", "analysis"},
}
"""What each package may import besides itself. The command line and the public names may import
everything."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


NAMES = {name_of(path): path for path in MODULES if path.stem != "__init__"}


def imports_of(name: str) -> set[str]:
    """Return modules of the package that a module imports: at once, in a function, for types."""
    direct = imports(NAMES[name])
    parents = {other.rpartition(".")[0] for other in direct}
    return (direct | parents) & NAMES.keys() - {name}


@cache
def graph() -> dict[str, set[str]]:
    return {name: imports_of(name) for name in NAMES}


def reached_from(start: str) -> set[str]:
    """Return all modules that importing `start` may import, at once or later."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += graph()[name]
    return reached


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_only_floors_below_it(floor: str) -> None:
    for name in NAMES:
        package = name.split(".")[1]
        if package != floor:
            continue
        for imported in graph()[name]:
            assert imported.split(".")[1] in {floor, *FLOORS[floor]}, f"{name} imports {imported}"


def test_every_package_is_a_floor() -> None:
    packages = {name.split(".")[1] for name in NAMES if name.count(".") > 1}
    assert packages - {"sources"} == {*FLOORS, "command"} - {"sources"}, "which can be left out"


WITHOUT_EDITABLE_INSTALL = """
import sys
# An editable install finds modules of the clone that the copied package lacks.
is_editable = lambda finder: getattr(finder, "__module__", "").startswith("__editable__")
sys.meta_path[:] = [finder for finder in sys.meta_path if not is_editable(finder)]
"""

WITHOUT_SOURCES = """
import importlib.util
import olmo_sparsity
from olmo_sparsity import explain, load_model
assert importlib.util.find_spec("olmo_sparsity.sources") is None
assert not {"attribute", "check", "Answer", "Segment"} & {*olmo_sparsity.__all__}
assert not hasattr(olmo_sparsity, "attribute")
assert callable(explain)
try:
    load_model("http://127.0.0.1:1", tokenizer="demo")
except Exception as error:
    print(error)
from olmo_sparsity.__main__ import entry
entry(["--help"])
"""


def test_sources_can_be_taken_away(tmp_path: Path) -> None:
    """In a copy of the package that lacks them."""
    left_out = shutil.ignore_patterns("sources", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=left_out)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EDITABLE_INSTALL + WITHOUT_SOURCES],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "needs olmo_sparsity.sources, which this installation lacks" in done.stdout
    commands = set(re.findall(r"^    (\w+)", done.stdout, re.MULTILINE))
    assert {"train", "measure", "explain", "experiment"} <= commands
    assert "attribute" not in commands


def test_only_the_command_attribute_needs_sources_when_it_is_imported() -> None:
    for name, path in NAMES.items():
        body = ast.parse(path.read_text()).body
        at_once = [node.module or "" for node in body if isinstance(node, ast.ImportFrom)]
        if any(module.startswith("olmo_sparsity.sources") for module in at_once):
            is_of_sources = name.startswith("olmo_sparsity.sources.")
            assert is_of_sources or name == "olmo_sparsity.command.attribute", name


def test_training_reaches_no_analysis_no_server_and_no_gguf() -> None:
    for name in reached_from("olmo_sparsity.training.loop"):
        assert not name.startswith(("olmo_sparsity.analysis.", "olmo_sparsity.sources."))
        assert "gguf" not in name


def test_analysis_reaches_neither_training_nor_sources() -> None:
    for start in NAMES:
        if start.startswith("olmo_sparsity.analysis."):
            for name in reached_from(start):
                assert not name.startswith(("olmo_sparsity.training.", "olmo_sparsity.sources."))


def modules_on_map(package: Path) -> set[str]:
    """Return the modules that the docstring of a package names."""
    docstring = ast.get_docstring(parsed(package / "__init__.py")) or ""
    return set(re.findall(r"(\w+\.py)", docstring))


def test_the_map_of_a_package_names_modules_that_exist() -> None:
    existing = {module.name for module in MODULES}
    for path in MODULES:
        if path.stem == "__init__":
            assert modules_on_map(path.parent) <= existing, path.parent


TRAINING = (
    *("processes", "optimizer", "engines", "run_folder", "metrics", "checkpoints", "evaluation"),
    *("estimate", "setup", "after_step"),
)
"""Folders of training: each may import those before it."""


def test_folders_of_training_import_folders_above_them() -> None:
    existing = {path.parent.name for path in (PACKAGE / "training").glob("*/__init__.py")}
    assert existing == {*TRAINING}
    for name in NAMES:
        if not name.startswith("olmo_sparsity.training.") or name.count(".") < 3:
            continue
        room = name.split(".")[2]
        for imported in graph()[name]:
            if imported.startswith("olmo_sparsity.training.") and imported.count(".") > 2:
                other = imported.split(".")[2]
                assert TRAINING.index(other) <= TRAINING.index(room), f"{name} imports {imported}"


PACKAGES_WITH_A_MAP = (
    *("base", "config", "text", "command", "data", "data/preparation"),
    *("experiment", "training"),
    *(f"training/{room}" for room in TRAINING),
    *("models", "models/gguf", "models/huggingface", "models/identity", "models/olmo"),
    *("sources", "sources/gate", "sources/prompt", "sources/reading", "sources/report"),
    *("sources/servers", "sources/verdicts"),
)


@pytest.mark.parametrize("package", PACKAGES_WITH_A_MAP)
def test_the_map_of_a_package_names_all_of_its_modules(package: str) -> None:
    existing = {path.name for path in (PACKAGE / package).glob("[!_]*.py")}
    assert existing <= modules_on_map(PACKAGE / package)


def test_the_package_never_imports_the_study() -> None:
    for path in MODULES:
        found = {name.split(".")[0] for name in imports(path)}
        assert not found & {"study", "benchmarks", "tests"}, name_of(path)


def test_no_circle_of_imports() -> None:
    TopologicalSorter(graph()).prepare()  # CycleError names the circle


def test_type_checkers_and_programs_find_the_same_public_names() -> None:
    statements = ast.walk(ast.parse((PACKAGE / "__init__.py").read_text()))
    imported = {
        alias.asname: (node.module or "").removeprefix("olmo_sparsity.")
        for node in statements
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    }
    assert imported == olmo_sparsity._MODULE_OF_NAME
    for name in imported.keys() - {"OLMoCoreLosses"}:  # OLMo-core may not be installed
        assert getattr(olmo_sparsity, name).__name__ == name


def test_no_public_name_hides_a_package() -> None:
    assert not {*olmo_sparsity.__all__} & {*FLOORS, "command"}


def test_tests_import_no_tests() -> None:
    """Tests share helpers through tests/support."""
    for path in ROOT.glob("tests/**/*.py"):
        shared = [name for name in imports(path) if ".test_" in name]
        assert not shared, f"{path} imports {shared}"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("olmo_sparsity", "numpy olmo pandas torch"),
        ("olmo_sparsity.__main__ as m; m.entry(['--help'])", "numpy olmo pandas torch"),
        ("olmo_sparsity.experiment.jobs, olmo_sparsity.data.prepare", "datasets olmo pandas torch"),
        (
            "olmo_sparsity.analysis.explain.answer, olmo_sparsity.analysis.measurement.measurement",
            "accelerate datasets matplotlib olmo",
        ),
        (
            "olmo_sparsity.analysis.report.figures, olmo_sparsity.analysis.report.report, "
            "study.theory.results",
            "olmo torch",
        ),
    ],
)
def test_nothing_heavy_is_imported_where_it_is_not_used(code: str, heavy: str) -> None:
    names = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    words = [sys.executable, "-c", f"{names}; import {code}"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    loaded = set(done.stderr.split())
    assert "olmo_sparsity" in loaded
    assert not {*heavy.split(), "transformers"} & loaded
