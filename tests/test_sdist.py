"""What a release to PyPI holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_source_release_has_the_package_without_results_docs_and_tests(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "olmo_sparsity", tree / "olmo_sparsity")
    for name in ("docs/index.md", "study/results/losses.parquet", "tests/test_it.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"README.md", "olmo_sparsity/py.typed", "olmo_sparsity/configs/quick.yaml"} <= names
    assert "olmo_sparsity/analysis/__init__.py" in names
    assert not [name for name in names if name.startswith(("docs", "study", "tests"))]
