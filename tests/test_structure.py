"""Imports point one way: the tool never imports the reproduction, and there are no circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "olmo_sparsity"
MODULES = sorted(PACKAGE.glob("**/*.py"))

GROUND = {"errors", "extend", "conform", "runtime", "io", "folders", "drawing", "settings"} | {
    "streams"
}
TOOL = {*GROUND, "analysis"}
MODELS = {*TOOL, "config", "data", "model"}
# What each package may import, besides itself. The command line may import everything.
ALLOWED = {
    "errors": set(),
    "extend": {"errors"},
    "conform": set(),
    "runtime": {"errors"},
    "io": {"errors", "conform", "runtime"},
    "folders": {"errors", "conform", "runtime", "io"},
    "drawing": {"errors", "io"},
    "streams": set(),
    "settings": {"errors", "conform", "io"},
    "analysis": GROUND,
    "config": TOOL,
    "data": {*TOOL, "config"},  # neither of these two knows the other
    "model": {*TOOL, "config"},
    "training": MODELS,
    "experiment": {*MODELS, "training"},
}
# The packages of the tool, each of which imports only those above it.
ORDER = [
    *("settings", "inputs", "kernels", "engines", "models", "results", "report", "scoring"),
    *("selectors", "measurement", "tracking", "explain", "attribution", "api"),
]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


EXCEPT = {
    f"olmo_sparsity.{name}": {f"olmo_sparsity.{other}" for other in others}
    for name, others in {
        # One line in a method, so that a result draws its own figure.
        "analysis.results.results": {"analysis.report.figures"},
        # `--help` reads the settings, and takes no numpy.
        "analysis.settings": {"analysis.inputs.windows"},
    }.items()
}
"""Imports against the order, each with its reason."""

NAMES = {name_of(path): path for path in MODULES if path.stem != "__init__"}


def imports_of(name: str) -> set[str]:
    """Return modules of the package that a module imports: at once, in a function, for types."""
    found = imports(NAMES[name])
    found = found | {other.rpartition(".")[0] for other in found}
    return found & NAMES.keys() - {name}


@cache
def graph() -> dict[str, set[str]]:
    return {name: imports_of(name) - EXCEPT.get(name, set()) for name in NAMES}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_packages_import_only_what_lies_below(path: Path) -> None:
    package = name_of(path).split(".")[1:2]
    if package and package[0] in ALLOWED:
        found = imports(path)
        assert not any(name.split(".")[0] == "analysis" for name in found)
        ours = {name.split(".")[1] for name in found if name.startswith("olmo_sparsity.")}
        packages = {inner.stem for inner in PACKAGE.iterdir()}
        assert ours & packages <= {*ALLOWED[package[0]], package[0]}


def test_the_package_never_imports_the_study() -> None:
    for path in MODULES:
        found = {name.split(".")[0] for name in imports(path)}
        assert not found & {"study", "benchmarks", "tests"}, name_of(path)


@pytest.mark.parametrize("name", ORDER)
def test_packages_of_the_tool_import_only_those_above_them(name: str) -> None:
    folder = PACKAGE / "analysis" / name
    above = {*takewhile(lambda other: other != name, ORDER), name}
    for path in folder.glob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]:
        for found in graph().get(name_of(path), set()):
            if found.startswith("olmo_sparsity.analysis."):
                assert found.split(".")[2] in above, f"{name_of(path)} imports {found}"


def test_no_package_of_the_tool_has_more_than_ten_modules() -> None:
    assert {path.name for path in (PACKAGE / "analysis").iterdir()} - {"__pycache__"} == {
        *("__init__.py", "settings.py", "api.py"),
        *ORDER[1:-1],
    }
    for folder in (PACKAGE / "analysis").iterdir():
        assert len({*folder.glob("*.py")} - {folder / "__init__.py"}) <= 10, folder


def test_no_circle_of_imports() -> None:
    TopologicalSorter(graph()).prepare()  # CycleError names the circle


def test_exceptions_are_needed() -> None:
    for name, exceptions in EXCEPT.items():
        assert exceptions <= imports_of(name), name


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
        ("olmo_sparsity.experiment.jobs, olmo_sparsity.data.tokens", "datasets olmo pandas torch"),
        (
            "olmo_sparsity.analysis.explain.explanation, "
            "olmo_sparsity.analysis.measurement.measurement",
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
