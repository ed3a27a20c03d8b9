"""The site is built without a broken link, and reading it asks no other host for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("material", reason="pip install -c constraints.txt -e '.[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = {path.stem for path in ROOT.glob("docs/*.md")}
    pages |= {f"tables/{path.stem}" for path in ROOT.glob("study/tables/*.md")}
    pages |= {"index", "accept_example", "benchmarks", "benchmarks_record", "claims"}
    pages |= {"longer", "study_tasks"}  # of study/
    built = {str(path.relative_to(site).with_suffix("")) for path in site.glob("**/*.html")}
    shown = {page for page in built if not page.startswith("figures/")}
    assert pages | {"contributing", "changelog", "404"} == shown
    title = (ROOT / "README.md").read_text().splitlines()[2].strip("*")
    assert title in (site / "index.html").read_text()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    tags = r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)"
    for page in site.glob("**/*.html"):
        assert not re.findall(tags, page.read_text()), page.name
    for sheet in site.glob("**/*.css"):
        assert not re.findall(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//", sheet.read_text())
