"""The page of an answer: all numbers, no script, and text that stays text."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from olmo_sparsity import Segment
from olmo_sparsity.analysis.attribution.statements import Attribution
from olmo_sparsity.analysis.results.view import number
from olmo_sparsity.errors import ConfigError
from tests.support.hostile import HOSTILE
from tests.support.sources import SOURCES, asked, with_verdicts


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.seen if name == tag]


@pytest.fixture
def found() -> Attribution:
    return with_verdicts(asked())


def written(found: Attribution, folder: Path) -> str:
    found.to_html(folder / "new" / "answer.html")
    return (folder / "new" / "answer.html").read_text()


def test_every_statement_has_its_verdict_and_numbers(found: Attribution, tmp_path: Path) -> None:
    page = written(found, tmp_path)
    with pytest.raises(ConfigError, match=r"answer\.txt must end in \.html"):
        found.to_html(tmp_path / "answer.txt")
    assert [tag["id"] for tag in Tags(page).of("input")] == ["s0", "s1", "s2"]
    panels = page.split('<section class="panel"')[1:]
    for panel, row in zip(panels, found.statements.itertuples(), strict=True):
        assert row.verdict[1:] in panel
        for cell in found.matrix.loc[row.Index].itertuples():
            for value in (cell.gives, cell.lost):
                assert f"<td>{number(value)}</td>" in panel
    matrix = page[page.index('<div class="card wide matrix"') :].split("</table>")[0]
    shown = re.findall(r"<td[^>]*>(.*?)</td>", matrix)
    assert shown == [number(v, 1) for v in found.matrix[["gives", "lost"]].max(axis=1)]
    marks = re.findall(r"<sup>(.*?)</sup>", page)
    assert marks == ["1", "1 or 3", "1 + 2"]
    assert page.count(found.error_rate) == 1


def test_the_prompt_is_shown_with_what_relies_on_it(tmp_path: Path) -> None:
    a, b, c = (Segment(*item) for item in SOURCES.items())
    given = {"sources": ["w33 w34", a, "w35", b, c], "question": "w20 w21"}
    page = written(with_verdicts(asked(**given)), tmp_path).split("What precedes the answer")[1]
    shown = re.findall(r'<p class="quoted[ soft]*">(.*?)</p>', page)
    assert shown == ["w33 w34", a.text, "w35", b.text, c.text, "w20 w21"]
    details = Tags(page).of("details")
    assert [tag["id"] for tag in details] == ["source0", "source1", "source2"]
    assert "changes nothing" not in page  # of the three statements each source has one
    assert page.count("statement 1, 2, 3 relies on it") == 1


def test_nothing_runs_and_nothing_is_loaded(found: Attribution, tmp_path: Path) -> None:
    names = [f"{i} {text}" for i, text in enumerate(HOSTILE)]
    found.prompt.names[:] = ["".join(names[0:6]), "".join(names[6:12]), "".join(names[12:])]
    found.layout.document.__dict__["texts"] = np.resize(
        HOSTILE, len(found.layout.document.tokens)
    ).tolist()
    page = written(found, tmp_path)
    tags = Tags(page)
    assert not tags.of("script")
    assert not tags.of("img")
    for _, attributes in tags.seen:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    style = page.split("<style>")[1].split("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = [tag["content"] for tag in tags.of("meta") if "http-equiv" in tag]
    assert policy is not None
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    assert page.count("<style>") == page.count("</style>") == 1
