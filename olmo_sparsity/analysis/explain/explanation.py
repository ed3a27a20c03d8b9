"""The result of `explain`: targets with their far units, shown, checked, kept in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.explain.check import Check, check
from olmo_sparsity.analysis.explain.prompt import Prepared
from olmo_sparsity.analysis.inputs.documents import Document
from olmo_sparsity.analysis.inputs.windows import Windows
from olmo_sparsity.analysis.models.load import LoadedModel, using
from olmo_sparsity.analysis.report.report import note, subtitle, write_page
from olmo_sparsity.analysis.results.results import Meta, Results
from olmo_sparsity.analysis.results.summary import describe_noise
from olmo_sparsity.analysis.results.tables import SCHEMAS, plain
from olmo_sparsity.analysis.results.view import Shown, escape, spell
from olmo_sparsity.analysis.settings import AskSettings
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.io import refuse_suffix, write_atomically

NOT_CHECKED = "Not checked against unrelated texts:"
WHY_CHECK = "any text lowers a loss by something. Use --check, or check() in Python."

_KEPT = ("units", "selector", "k", "far_states", "seed")


@dataclass
class Explanation:
    """Shows as the text with highlighted far units in a notebook, as a list in a terminal."""

    prepared: Prepared = field(repr=False)
    targets: pd.DataFrame
    """target, end (tokens), text, loss_short, loss_long, gap."""

    far: pd.DataFrame
    """target, rank, first, end, text of a far unit; nats: the fall in loss when it alone is added;
    loss_set: the loss with it and all units before it in rank; loss_without: the loss with the long
    window without these."""

    tables: dict[str, pd.DataFrame] = field(repr=False)
    """The tables of `recover`, as in a measurement (docs/formats.md)."""

    foreign: Any = field(repr=False, default="builtin:embedded")
    checked: Check | None = None
    token_forwards: int = 0
    """Token-forwards of the explanation, without the check."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"prepared": self.prepared.without_model(), "foreign": None}

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
    def settings(self) -> AskSettings:
        return self.prepared.settings

    @property
    def chosen_by_gap(self) -> bool:
        """Targets were chosen by their outcome instead of named."""
        return self.prepared.spans is None

    @property
    def results(self) -> Results:
        """The same as tables of a measurement of one document. Its targets are in no target set."""
        settings, check, texts = self.settings, self.checked, self.document.texts
        tokens = {"place": range(len(texts)), "token_id": self.document.tokens, "text": texts}
        tables = {"tokens": pd.DataFrame(tokens), "losses": self.targets}
        # The tables of the check hold the text's own distant tokens and the unrelated texts.
        tables |= {n: (check or self).tables[n] for n in ("influence", "recovery")}
        meta = Meta(
            model=self._about_model,
            windows=asdict(self.windows) | {"far_states": settings.far_states},
            units=[settings.units],
            selectors=[settings.selector],
            seed=settings.seed,
            controls={"draws": check.draws} if check else {},
            targets={"chosen_by_gap": self.chosen_by_gap},
        )
        empty = {name: pd.DataFrame(columns=schema.names) for name, schema in SCHEMAS.items()}
        given = {name: rows.assign(document=0) for name, rows in tables.items()}
        return Results(**empty | given, meta=meta)

    @property
    def _about_model(self) -> dict[str, Any]:
        return {n: getattr(self.model, n) for n in ("name", "num_parameters", "batch_noise")}

    def top(self, n: int | None = None) -> pd.DataFrame:
        """The first n units of every target."""
        if n is not None and n < 1:
            raise ConfigError(f"top({n}): pass a number of units of at least 1")
        rows = self.far[self.far["rank"] <= (n or self.settings.k)]
        rows = rows.assign(unit=rows["first"].astype(str) + "–" + (rows["end"] - 1).astype(str))
        single = rows["end"] - rows["first"] == 1
        rows.loc[single, "unit"] = rows["first"].astype(str)
        rows = rows.assign(back=rows.target - rows["first"]).rename(columns={"first": "place"})
        return rows[
            ["target", "rank", "unit", "text", "place", "back", "nats", "loss_set", "loss_without"]
        ]

    def check(self, draws: int = 8, foreign: Any = None) -> Check:
        """Evaluate the same targets with unrelated texts in place of the distant context.
        `foreign`: these texts (default: those given to `explain`)."""
        if foreign is not None:
            self.foreign = foreign
        if self.prepared.scorer is None:
            raise ConfigError("check() needs the model, which was not kept; call explain again")
        with using(self.model):
            self.prepared.refuse_changed_model()
            self.checked = check(self.prepared, self.targets, self.foreign, draws)
        return self.checked

    def to_dict(self) -> dict[str, Any]:
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
            **{name: getattr(settings, name) for name in _KEPT},
            "chosen_by_gap": self.chosen_by_gap,
            "token_forwards": self.token_forwards,
            "targets": self.targets.to_dict("records"),
            "far": self.far.to_dict("records"),
            "check": self.checked.to_dict() if self.checked else None,
            "tables": {
                name: (self.checked or self).tables[name].to_dict("list")
                for name in ("influence", "recovery")
            },
        }

    def to_html(self, path: str | Path) -> None:
        settings, check, results = self.settings, self.checked, self.results
        how = f"{settings.units} ranked by {spell(settings.selector)} · text of "
        slots = {
            "subtitle": escape(subtitle(results, f"{how}{len(self.document.tokens):,} tokens")),
            "note": check.note if check else note(False, NOT_CHECKED, WHY_CHECK),
            "headline": "",
            "shown": "",
            "numbers_title": "Against unrelated texts",
            "numbers": check.html if check else "",
        }
        parts = {"explanation", "numbers"} if check else {"explanation"}
        write_page(Path(path), results, [0], slots, parts)

    def save(self, path: str | Path) -> None:
        """Write .json, or .parquet: a row for each far unit, with the columns of its target."""
        refuse_suffix("path", path, ".json", ".parquet")
        if Path(path).suffix == ".json":
            return write_atomically(Path(path), to_json(self))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        targets = self.targets.rename(columns={"text": "target_text", "end": "target_end"})
        self.far.merge(targets, on="target").to_parquet(path)

    @property
    def shown(self) -> Shown:
        return Shown(self.document.texts, self.targets, self.far, self.windows.short)

    def describe(self, bold: bool = False) -> str:
        """For a terminal. `bold`: whether it understands ANSI codes."""
        checked = "" if self.checked is None else str(self.checked)
        parts = (self.shown.describe(bold), describe_noise(self._about_model), checked)
        return "\n\n".join(filter(None, parts))

    def __repr__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        return self.shown._repr_html_()


def to_json(explanation: Explanation) -> str:
    return json.dumps(plain(explanation.to_dict()), ensure_ascii=False, indent=1)
