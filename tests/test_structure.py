"""Imports point one way, and nothing heavy is imported where it is not used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"

# What each room may import, besides itself. The command line may import everything.
GROUND = {"errors", "process", "disk"}
MODELS = {*GROUND, "config", "data", "model"}
ALLOWED = {
    "errors": set(),
    "process": {"errors"},
    "disk": {"errors", "process"},
    "config": GROUND,
    "data": {*GROUND, "config"},  # neither of these two knows the other
    "model": {*GROUND, "config"},
    "training": MODELS,
    "tasks": {*MODELS, "training"},
    "theory": {*MODELS, "training"},
    "jobs": {*MODELS, "training"},
    "analysis": MODELS,  # never training itself
}
PACKAGE = ROOT / "olmo_sparsity"
ROOMS = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
MODULES = [*PACKAGE.glob("**/*.py"), *ROOT.glob("analysis/**/*.py")]


def names_imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_of(path: Path) -> set[str]:
    """The rooms whose modules it imports."""
    found = names_imported(path)
    assert not any(name.split(".")[0] == "analysis" for name in found), path
    ours = {name.split(".")[1] for name in found if name.startswith("olmo_sparsity.")}
    return ours & ROOMS


def test_imports_point_one_way() -> None:
    for path in MODULES:
        parts = path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT).with_suffix("").parts
        if parts[0] not in ("__init__", "__main__", "command"):
            wrong = imports_of(path) - ALLOWED[parts[0]] - {parts[0]}
            assert not wrong, f"{path} imports {wrong}"


def test_no_circle_of_imports() -> None:
    """Of modules while they are imported. What a method draws or writes with it may import itself,
    and types are named on both sides."""

    def imported_at_once(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if not isinstance(child, ast.FunctionDef | ast.Lambda):
                yield child
                yield from imported_at_once(child)

    of: dict[str, set[str]] = {}
    for path in MODULES:
        parts = path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT).with_suffix("").parts
        nodes = imported_at_once(ast.parse(path.read_text()))
        found = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        names = {
            f"{n.module}{tail}" for n in found for tail in ("", *(f".{a.name}" for a in n.names))
        }
        of[".".join(("olmo_sparsity", *parts))] = names
    sorted_modules = TopologicalSorter({name: names & of.keys() for name, names in of.items()})
    assert len(list(sorted_modules.static_order())) == len(MODULES)  # else CycleError names it


# --- tests ----------------------------------------------------------------------------------------


def test_tests_import_no_tests() -> None:
    """What they share is in tests/support."""
    for path in TESTS.glob("**/*.py"):
        shared = [name for name in names_imported(path) if ".test_" in name]
        assert not shared, f"{path} imports {shared}"


def test_the_folder_analysis_is_no_second_package() -> None:
    words = [sys.executable, "-c", "import analysis"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.endswith(
        "ImportError: this folder is the package olmo_sparsity.analysis; "
        "from olmo_sparsity import explain\n"
    )


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("olmo_sparsity", "numpy olmo omegaconf pandas torch"),
        ("olmo_sparsity.__main__ as m; m.entry(['--help'])", "numpy olmo omegaconf pandas torch"),
        (
            "olmo_sparsity.analysis.explanation, olmo_sparsity.analysis.measurement",
            "accelerate datasets matplotlib olmo omegaconf",
        ),
        (
            "olmo_sparsity.analysis.figures, olmo_sparsity.analysis.report, "
            "olmo_sparsity.theory.figure",
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
