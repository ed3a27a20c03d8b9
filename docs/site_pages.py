"""A hook of mkdocs: pages from elsewhere in the repository, and links between all of them.

A page is kept once, where GitHub shows it; the site has README.md as its home page. Links are
written for the repository, and are resolved there. The commands of gallery.md are run.
"""

from __future__ import annotations

import io
import posixpath
import re
import shlex
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from olmo_sparsity.command.cli import main

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    **{f"study/tables/{path.name}": f"tables/{path.name}" for path in ROOT.glob("study/tables/*")},
    "README.md": "index.md",
    "olmo_sparsity/slurm/README.md": "slurm.md",
    "benchmarks/README.md": "benchmarks.md",
    "study/records/benchmarks.md": "benchmarks_record.md",
    "study/claims.md": "claims.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r'(?<=\]\()(?![a-z]+:|#)[^)#\s]+|(?<=src=")[^"]+')
_COMMAND = re.compile(r"```bash\n(olmo-sparsity .*? --html (gallery/\w+\.html))\n```", re.DOTALL)


def gallery(folder: Path) -> dict[str, str]:
    """The pages that the commands of gallery.md make."""
    pages = {}
    for command, page in _COMMAND.findall((ROOT / "docs/gallery.md").read_text("utf-8")):
        made = folder / Path(page).name
        words = shlex.split(command.replace(page, str(made)).replace("\\\n", ""))[1:]
        with chdir(ROOT), redirect_stdout(io.StringIO()):
            if main(words) != 0:
                raise RuntimeError(f"failed: {command}")
        pages[page] = made.read_text("utf-8")
    return pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        for page, content in gallery(Path(folder)).items():
            files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    on_site = page.file.src_uri
    if on_site.startswith("tables/"):  # these are wide
        page.meta["hide"] = ["toc"]
    if on_site == "gallery.md":
        markdown = _COMMAND.sub(r"\g<0>\n\n[The page](\2)", markdown)
    source = {page: source for source, page in ELSEWHERE.items()}.get(on_site, f"docs/{on_site}")

    def rewrite(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link.group()))
        page = ELSEWHERE.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(page, posixpath.dirname(on_site))

    return _LINK.sub(rewrite, markdown)
