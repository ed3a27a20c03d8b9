"""Write an explanation to a file: as JSON, or as a Parquet table of its distant units.

    ExplainedText → `to_dict`, `to_json`   everything except the model
                  → `save`                 x.json: the same; x.parquet: a row for each distant unit

Two rows of the Parquet table, with the columns of a unit and those of its target:

    target  rank  first  end  text       nats  …  target_end  target_text  loss_short  …
        61     1     12   14  " Ayrton"  7.90             63  " Ayrton"          9.10
        61     2     40   41  " brave"   0.30             63  " Ayrton"          9.10

The keys of the JSON are a format that others read, so a name stays when the code's name changes.
`Explanation` calls these functions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olmo_sparsity.analysis.explain.explained_text import ExplainedText
from olmo_sparsity.analysis.results.json_values import to_json_value
from olmo_sparsity.base.files import write_atomically, writing
from olmo_sparsity.base.path_options import check_suffix, path_of

_STORED_SETTINGS = ("units", "selector", "k", "distant_states", "replacements", "seed")
"""Settings that the JSON file holds under their own names."""

_STORED_TABLES = ("influence", "recovery")
"""The tables of `recover` that the JSON file holds."""


def to_dict(explained: ExplainedText) -> dict[str, Any]:
    """Return everything except the model, as values that `to_json_value` turns into JSON."""
    settings = explained.settings
    check = explained.checked
    # The tables of the check hold the rows of the explanation and those of the unrelated texts.
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
    """Write an explanation to a file, such that a reader sees all of it or none.

    Args:
        explained: The explanation.
        path: The file. `.json` holds everything; `.parquet` has a row for each distant unit, with
            the columns of its target.
    """
    check_suffix("path", path, ".json", ".parquet")
    file = path_of("path", path)
    if file.suffix == ".json":
        write_atomically(file, to_json(explained))
        return
    # Units have columns `text` and `end`, too, so those of targets get other names.
    targets = explained.targets.rename(columns={"text": "target_text", "end": "target_end"})
    rows = explained.distant.merge(targets, on="target")
    file.parent.mkdir(parents=True, exist_ok=True)
    with writing(file) as partial:
        rows.to_parquet(partial)
