"""The columns of the tables are those of the page on formats."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from olmo_sparsity.analysis.results.statistics import losses_of_targets
from olmo_sparsity.analysis.results.tables import SCHEMAS
from olmo_sparsity.errors import DataError

ROOT = Path(__file__).parents[3]


def test_the_format_document_names_every_column() -> None:
    text = (ROOT / "docs/formats.md").read_text()
    for name, schema in SCHEMAS.items():
        section = text.split(f"### `{name}.parquet`")[1].split("\n##")[0]
        documented = re.findall(r"^\| `(\w+)` \| (\w+) \|", section, flags=re.MULTILINE)
        assert documented == [(field.name, str(field.type)) for field in schema], name


def test_losses_of_a_target_of_several_tokens_are_all_there() -> None:
    losses = pd.DataFrame({"document": 1, "target": [3, 4, 5], "loss_short": [1.0, 2.0, 4.0]})
    targets = pd.DataFrame({"document": 1, "target": [3, 5], "end": [5, 6]})
    assert losses_of_targets(losses, targets).loss_short.tolist() == [3.0, 2.0, 4.0]
    with pytest.raises(DataError, match="lacks tokens of targets"):
        losses_of_targets(losses[:1], targets)
