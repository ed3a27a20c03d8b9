"""The house: imports point one way, and README draws the folders as they are."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each part may import of this project, besides itself and the ground they all stand on.
_GROUND = (
    "drawing ending errors files json_files launch lock manifest nested progress rows versions"
)
GROUND = {f"olmo_sparsity.{name}" for name in _GROUND.split()}
CONFIG = {f"olmo_sparsity.config{part}" for part in ("", "_check", "_file", "_names")}
TRAINING = {*CONFIG, "olmo_sparsity.data", "olmo_sparsity.model"}
ALLOWED = {
    **{name: {"olmo_sparsity.errors"} - {name} for name in GROUND},
    "olmo_sparsity.rows": {
        f"olmo_sparsity.{name}" for name in ("errors", "files", "json_files", "manifest")
    },
    "olmo_sparsity.arguments": {"olmo_sparsity.errors"},
    "olmo_sparsity.drawing": {"olmo_sparsity.errors", "olmo_sparsity.files"},
    "olmo_sparsity.files": {"olmo_sparsity.launch"},
    "olmo_sparsity.lock": {f"olmo_sparsity.{name}" for name in ("errors", "files", "launch")},
    "olmo_sparsity.manifest": {
        f"olmo_sparsity.{name}" for name in ("errors", "files", "json_files")
    },
    **dict.fromkeys(CONFIG, CONFIG),
    "olmo_sparsity.data": CONFIG,  # neither of these two knows the other
    "olmo_sparsity.model": CONFIG,
    "olmo_sparsity.training": TRAINING,
    "olmo_sparsity.tasks": {*TRAINING, "olmo_sparsity.training"},
    "olmo_sparsity.theory": {*TRAINING, "olmo_sparsity.training"},
    "olmo_sparsity.jobs": set(),
    "olmo_sparsity.sweep": {*TRAINING, "olmo_sparsity.training", "olmo_sparsity.jobs"},
    "olmo_sparsity.experiments": {*CONFIG, "olmo_sparsity.jobs", "olmo_sparsity.sweep"},
    "analysis": TRAINING,  # never training itself; only the command line knows everything
}


def part_of(module: str) -> str:
    names = module.split(".")
    return names[0] if names[0] != "olmo_sparsity" else ".".join(names[:2])


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {part_of(name) for name in found if name.split(".")[0] in ("olmo_sparsity", "analysis")}


def test_imports_point_one_way() -> None:
    for path in [*ROOT.glob("olmo_sparsity/**/*.py"), *ROOT.glob("analysis/**/*.py")]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        part = part_of(module)
        if module in ("olmo_sparsity", "olmo_sparsity.cli"):
            continue
        ground = set() if part in GROUND else GROUND
        wrong = imports_of(path) - ALLOWED[part] - ground - {part, "olmo_sparsity.__version__"}
        assert not wrong, f"{module} imports {wrong}"


def test_modules_stay_small() -> None:
    for path in [*ROOT.glob("olmo_sparsity/**/*.py"), *ROOT.glob("analysis/*.py")]:
        assert len(path.read_text().splitlines()) <= 425, path


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("olmo_sparsity.cli as cli; cli.main(['--help'])", "numpy olmo omegaconf pandas torch"),
        ("analysis.figures, analysis.report, olmo_sparsity.theory.figure", "olmo torch"),
    ],
)
def test_help_and_figures_import_nothing_heavy(code: str, heavy: str) -> None:
    names = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    words = [sys.executable, "-c", f"{names}; import {code}"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    loaded = set(done.stderr.split())
    assert "olmo_sparsity.errors" in loaded
    assert not {*heavy.split(), "transformers"} & loaded
