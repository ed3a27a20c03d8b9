"""A hook of mkdocs: pages from elsewhere in the repository, and links between all of them.

A page is kept once, where GitHub shows it; the site has README.md as its home page. Links are
written for the repository, and are resolved there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    **{f"study/tables/{path.name}": f"tables/{path.name}" for path in ROOT.glob("study/tables/*")},
    "README.md": "index.md",
    "olmo_sparsity/slurm/accept_example.md": "accept_example.md",
    "benchmarks/README.md": "benchmarks.md",
    "study/records/benchmarks.md": "benchmarks_record.md",
    "study/claims.md": "claims.md",
    "study/longer.md": "longer.md",
    "study/tasks.md": "study_tasks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r'(?<=\]\()(?![a-z]+:|#)[^)#\s]+|(?<=src=")[^"]+')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    on_site = page.file.src_uri
    source = {page: source for source, page in ELSEWHERE.items()}.get(on_site, f"docs/{on_site}")

    def rewrite(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link.group()))
        page = ELSEWHERE.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(page, posixpath.dirname(on_site))

    return _LINK.sub(rewrite, markdown)
