"""Define the result of `explain`: targets with their distant units, to be shown, checked and saved.

request.py computes it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.explain.check import Check, compare_with_unrelated
from olmo_sparsity.analysis.explain.prepared import Prepared
from olmo_sparsity.analysis.options import (
    ExplainSettings,
    is_whole_number,
)
from olmo_sparsity.analysis.report.report import note, subtitle, write_page
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.notes import describe_noise, describe_sink
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.tables import SCHEMAS, to_json_value
from olmo_sparsity.analysis.results.view import Shown, escape, num_of, sentence, spell
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.files import check_suffix, path_of, write_atomically
from olmo_sparsity.base.renamed import OldAttribute, accepts_old_names
from olmo_sparsity.models.loaded import LoadedModel, using
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.windows import Windows

NOT_CHECKED = "Not checked against unrelated texts:"
WHY_CHECK = "any text lowers a loss by something. Use --check, or check() in Python."

_STORED_SETTINGS = ("units", "selector", "k", "distant_states", "replacements", "seed")
"""Settings that the JSON file holds under their own names."""


@dataclass
class Explanation:
    """The targets of one text, with the distant units that reduce their losses most.

    A notebook shows it as text with highlighted units, a terminal as a list.

        explanation = explain(model, tokenizer, text=text, at="Ayrton")
        explanation.top(3)              # a table: the first three units of each target
        explanation.check(draws=8)      # the same with unrelated texts: is it more than chance?
        explanation.to_html("page.html")
    """

    prepared: Prepared = field(repr=False)
    targets: pd.DataFrame
    """A row for each target: target, end (its first token, and one past its last), text,
    loss_short, loss_long, gap."""

    distant: pd.DataFrame
    """A row for each distant unit of a target: target, rank, first, end, text; `nats`, by which the
    loss falls when the unit alone is added to the local window; `loss_set`, the loss with this unit
    and all that rank before it; `loss_without`, the loss with the long window without these."""

    tables: dict[str, pd.DataFrame] = field(repr=False)
    """The tables of `recover`, as in a measurement (docs/measure.md)."""

    unrelated: Any = field(repr=False, default="builtin:embedded")
    """The unrelated texts of `check`."""

    checked: Check | None = None
    """The result of the last call of `check`; None before the first."""

    sink: dict[str, Any] = field(default_factory=dict, repr=False)
    """The sink check; empty if a prefix precedes the text."""

    token_forwards: int = 0
    """Token-forwards that the explanation took, without the check."""

    far = OldAttribute("distant")
    """The earlier name of `distant`."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"prepared": self.prepared.without_model(), "unrelated": None}

    @property
    def model(self) -> LoadedModel:
        return self.prepared.model

    @property
    def document(self) -> Document:
        return self.prepared.document

    @property
    def windows(self) -> Windows:
        return self.prepared.windows

    @property
    def settings(self) -> ExplainSettings:
        return self.prepared.settings

    @property
    def chosen_by_gap(self) -> bool:
        """Return whether targets were chosen by their gaps, and not named."""
        return self.prepared.spans is None

    @property
    def results(self) -> Results:
        """Return the explanation as a measurement of one document, whose targets are in no target
        set. So a page can be written as for a measurement."""
        settings = self.settings
        check = self.checked
        texts = self.document.texts
        tokens = {"place": range(len(texts)), "token_id": self.document.tokens, "text": texts}
        # The tables of the check hold the text's own distant tokens and the unrelated texts.
        evaluated = self.tables if check is None else check.tables
        tables = {
            "tokens": pd.DataFrame(tokens),
            "losses": self.targets,
            "influence": evaluated["influence"],
            "recovery": evaluated["recovery"],
        }
        meta = Meta(
            model=self._model_meta,
            windows=asdict(self.windows) | {"distant_states": settings.distant_states},
            units=[settings.units],
            selectors=[settings.selector],
            seed=settings.seed,
            controls={"draws": check.draws} if check else {},
            targets={"chosen_by_gap": self.chosen_by_gap},
        )
        empty = {name: pd.DataFrame(columns=schema.names) for name, schema in SCHEMAS.items()}
        filled = {name: rows.assign(document=0) for name, rows in tables.items()}
        return Results(**empty | filled, meta=meta)

    @property
    def reliability(self) -> float | None:
        """Return how well two halves of the unrelated texts agree on the units, where such texts
        replace distant text: the mean over targets. None otherwise."""
        lds = self.tables["lds"].lds
        return float(lds.mean()) if len(lds) else None

    @property
    def _model_meta(self) -> dict[str, Any]:
        names = ("name", "num_parameters", "batch_noise")
        return {name: getattr(self.model, name) for name in names}

    def top(self, n: int | None = None) -> pd.DataFrame:
        """Return a table of the first n units of every target (default: all k)."""
        if n is not None and (not is_whole_number(n) or n < 1):
            raise ConfigError(f"top({n!r}): n must be a whole number of at least 1")
        rows = self.distant[self.distant["rank"] <= (n or self.settings.k)]
        rows = rows.assign(unit=rows["first"].astype(str) + "–" + (rows["end"] - 1).astype(str))
        is_token = rows["end"] - rows["first"] == 1
        rows.loc[is_token, "unit"] = rows["first"].astype(str)
        rows = rows.assign(back=rows.target - rows["first"]).rename(columns={"first": "place"})
        numbers = ["place", "back", "nats", "loss_set", "loss_without"]
        return rows[["target", "rank", "unit", "text", *numbers]]

    @accepts_old_names
    def check(self, draws: int = 8, unrelated: Any = None) -> Check:
        """Evaluate the same targets with `draws` unrelated texts in place of the distant context.
        `unrelated`: the texts to draw from (default: those that were passed to `explain`)."""
        if unrelated is not None:
            self.unrelated = unrelated
        if self.prepared.scorer is None:
            raise ConfigError("check() needs the model, which was not kept; call explain again")
        with using(self.model):
            self.prepared.check_model_unchanged()
            self.checked = compare_with_unrelated(
                self.prepared, self.targets, self.unrelated, draws
            )
        return self.checked

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the model, as values that JSON can hold."""
        settings = self.settings
        return {
            "model": self.model.name,
            "fingerprint": self.model.weights_sha256,
            "num_parameters": self.model.num_parameters,
            "batch_noise": self.model.batch_noise,
            "text": "".join(self.document.texts),
            "texts": self.document.texts,
            "token_ids": self.document.tokens.tolist(),
            "windows": asdict(self.windows),
            **{name: getattr(settings, name) for name in _STORED_SETTINGS},
            "chosen_by_gap": self.chosen_by_gap,
            "reliability": self.reliability,
            "sink": self.sink,
            "token_forwards": self.token_forwards,
            "targets": self.targets.to_dict("records"),
            # The name of the file's format, which is older than the word "distant".
            "far": self.distant.to_dict("records"),
            "check": self.checked.to_dict() if self.checked else None,
            "tables": {
                name: (self.checked or self).tables[name].to_dict("list")
                for name in ("influence", "recovery")
            },
        }

    def to_html(self, path: str | Path) -> None:
        """Write an HTML page that needs no other file."""
        settings = self.settings
        check = self.checked
        results = self.results
        method = (
            f"{settings.units} ranked by {spell(settings.selector)} · text of "
            f"{len(self.document.tokens):,} tokens"
        )
        slots = {
            "subtitle": escape(subtitle(results, method)),
            "note": self._notes,
            "headline": "",
            "shown": "",
            "numbers_title": "Against unrelated texts",
            "numbers": check.html if check else "",
        }
        parts = {"explanation", "numbers"} if check else {"explanation"}
        write_page(path_of("path", path), results, [0], slots, parts)

    @property
    def _notes(self) -> str:
        """Return HTML of the check's verdict, and of warnings."""
        notes = [self.checked.note if self.checked else note(False, NOT_CHECKED, WHY_CHECK)]
        for warning in (describe_sink(self.sink), self._describe_few_units()):
            if warning:
                notes.append(note(False, sentence(warning)))
        return "".join(notes)

    def _describe_few_units(self) -> str:
        """Return a warning if the k units of a target are all its distant tokens; empty if no
        target has so few."""
        windows = self.windows
        rows = self.tables["recovery"]
        # Further draws are those of units chosen at random, and of unrelated texts.
        num_chosen = rows[rows.draw == 0].groupby("target").num_tokens.max()
        starts = num_chosen.index.to_numpy()
        num_distant = np.array([windows.tokens_before(start) - windows.short for start in starts])
        num_with_all = int((num_chosen.to_numpy() >= num_distant).sum())
        if not num_with_all:
            return ""
        return (
            f"warning: at {num_with_all} of {num_of(len(num_chosen), 'target')} the units are all "
            "distant tokens, so that their loss says nothing about which matter; pass a smaller k"
        )

    def save(self, path: str | Path) -> None:
        """Write .json, or .parquet: a row for each distant unit, with the columns of its target."""
        check_suffix("path", path, ".json", ".parquet")
        path = path_of("path", path)
        if path.suffix == ".json":
            return write_atomically(path, to_json(self))
        path.parent.mkdir(parents=True, exist_ok=True)
        targets = self.targets.rename(columns={"text": "target_text", "end": "target_end"})
        self.distant.merge(targets, on="target").to_parquet(path)

    @property
    def shown(self) -> Shown:
        """Return what a notebook and a terminal show."""
        return Shown(self.document.texts, self.targets, self.distant, self.windows.short)

    def describe(self, bold: bool = False) -> str:
        """Return the explanation for a terminal. `bold`: whether it understands ANSI codes."""
        parts = [self.shown.describe(bold)]
        if self.reliability is not None:
            parts.append(f"reliability of the unrelated texts: {self.reliability:.2f} (two halves)")
        parts += [
            describe_sink(self.sink),
            self._describe_few_units(),
            describe_noise(self._model_meta),
        ]
        if self.checked is not None:
            parts.append(str(self.checked))
        return "\n\n".join(filter(None, parts))

    def __repr__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        return self.shown._repr_html_()


def to_json(explanation: Explanation) -> str:
    """Return an explanation as the text of a JSON file."""
    return json.dumps(to_json_value(explanation.to_dict()), ensure_ascii=False, indent=1)
