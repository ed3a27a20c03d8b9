"""Write an explanation as JSON, or as a Parquet table of its distant units.

    to_dict, to_json   everything but the model
    save               a file .json of the same, or .parquet with a row for each distant unit

The keys of the JSON are a format that others read: an earlier name stays when the code's changes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olmo_sparsity.analysis.explain.explained_text import ExplainedText
from olmo_sparsity.analysis.results.tables import to_json_value
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.path_options import check_suffix, path_of

_STORED_SETTINGS = ("units", "selector", "k", "distant_states", "replacements", "seed")
"""Settings that the JSON file holds under their own names."""

_STORED_TABLES = ("influence", "recovery")
"""The tables of `recover` that the JSON file holds."""


def to_dict(explained: ExplainedText) -> dict[str, Any]:
    """Return everything but the model, as values that JSON can hold."""
    settings = explained.settings
    check = explained.checked
    # The tables of the check hold the same rows, and those of the unrelated texts.
    tables = explained.tables if check is None else check.tables
    return {
        "model": explained.model.name,
        "fingerprint": explained.model.weights_sha256,
        "num_parameters": explained.model.num_parameters,
        "batch_noise": explained.model.batch_noise,
        "text": "".join(explained.document.texts),
        "texts": explained.document.texts,
        "token_ids": explained.document.tokens.tolist(),
        "windows": explained.windows.as_stored(),
        **{name: getattr(settings, name) for name in _STORED_SETTINGS},
        "chosen_by_gap": explained.chosen_by_gap,
        "reliability": explained.reliability,
        "sink": explained.sink,
        "token_forwards": explained.token_forwards,
        "targets": explained.targets.to_dict("records"),
        # The name of the file's format, which is older than the word "distant".
        "far": explained.distant.to_dict("records"),
        "check": None if check is None else check.to_dict(),
        "tables": {name: tables[name].to_dict("list") for name in _STORED_TABLES},
    }


def to_json(explained: ExplainedText) -> str:
    """Return an explanation as the text of a JSON file."""
    return json.dumps(to_json_value(to_dict(explained)), ensure_ascii=False, indent=1)


def save(explained: ExplainedText, path: str | Path) -> None:
    """Write an explanation to a file. Its suffix chooses the format: .json holds everything;
    .parquet has a row for each distant unit, with the columns of its target."""
    check_suffix("path", path, ".json", ".parquet")
    path = path_of("path", path)
    if path.suffix == ".json":
        write_atomically(path, to_json(explained))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Units have columns of the same names.
    targets = explained.targets.rename(columns={"text": "target_text", "end": "target_end"})
    explained.distant.merge(targets, on="target").to_parquet(path)
