"""The columns of the tables are those of the page on formats."""

from __future__ import annotations

import re
from pathlib import Path

from olmo_sparsity.analysis.results.tables import SCHEMAS

ROOT = Path(__file__).parents[3]


def test_the_format_document_names_every_column() -> None:
    text = (ROOT / "docs/formats.md").read_text()
    for name, schema in SCHEMAS.items():
        section = text.split(f"### `{name}.parquet`")[1].split("\n##")[0]
        documented = re.findall(r"^\| `(\w+)` \| (\w+) \|", section, flags=re.MULTILINE)
        assert documented == [(field.name, str(field.type)) for field in schema], name
