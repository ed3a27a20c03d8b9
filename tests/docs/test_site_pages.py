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
    elsewhere = {
        "index",
        "slurm",
        "benchmarks",
        "benchmarks_record",
        "claims",
        "contributing",
        "changelog",
    }
    built = {str(path.relative_to(site).with_suffix("")) for path in site.glob("**/*.html")}
    made = ("figures/", "gallery/")
    assert pages | elsewhere == {page for page in built if not page.startswith(made)} - {"404"}
    title = (ROOT / "README.md").read_text().splitlines()[2].strip("*")
    assert title in (site / "index.html").read_text()


def test_the_pages_of_the_gallery_are_made_by_the_commands_beside_them(site: Path) -> None:
    asked = re.findall(r"--html (gallery/\w+\.html)", (ROOT / "docs/gallery.md").read_text())
    shown = (site / "gallery.html").read_text()
    assert len(asked) == shown.count(">The page</a>") == 4
    for name in asked:
        assert f'href="{name}"' in shown
        assert "<title>" in (site / name).read_text()
    answer = (site / "gallery/sources.html").read_text()
    for verdict in ("rests on bridge.txt", "rests on mill.txt", "rests on no source"):
        assert verdict in answer
    for name, depend in (("encyclopedia", "1 of 1"), ("code", "1 of 2"), ("novel", "1 of 1")):
        assert f"{depend} targets depend on" in (site / f"gallery/{name}.html").read_text()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    tags = r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)"
    for page in site.glob("**/*.html"):
        assert not re.findall(tags, page.read_text()), page.name
    for sheet in site.glob("**/*.css"):
        assert not re.findall(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//", sheet.read_text())
