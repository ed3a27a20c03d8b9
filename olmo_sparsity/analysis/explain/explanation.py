"""Define the result of `explain`: targets with their distant units, to be shown, checked and saved.

answer.py computes it. `Explanation` has the methods that users call. What they do is elsewhere:

    explained_text.py   ExplainedText, the plain data that `Explanation` adds methods to
    checking.py         the same targets with unrelated texts in place of the distant context
    page.py             the HTML page
    stored_form.py      JSON and Parquet
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.explain import stored_form
from olmo_sparsity.analysis.explain.check import Check
from olmo_sparsity.analysis.explain.checking import compare_with_unrelated
from olmo_sparsity.analysis.explain.explained_text import ExplainedText
from olmo_sparsity.analysis.explain.page import as_measurement, write_explanation_page
from olmo_sparsity.analysis.options import is_whole_number
from olmo_sparsity.analysis.results.notes import describe_noise
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.targets_in_text import TargetsInText
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.renamed import accepts_old_names
from olmo_sparsity.models.loaded import using


@dataclass(repr=False)
class Explanation(ExplainedText):
    """The targets of one text, with the distant units that reduce their losses most.

    A notebook shows it as text with highlighted units, a terminal as a list.

        explanation = explain(model, tokenizer, text=text, at="Ayrton")
        explanation.top(3)              # a table: the first three units of each target
        explanation.check(draws=8)      # the same with unrelated texts: is it more than chance?
        explanation.to_html("page.html")
    """

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle stores. Weights and unrelated texts may be large, and the explanation
        is shown without them."""
        return vars(self) | {"prepared": self.prepared.without_model(), "unrelated": None}

    def top(self, n: int | None = None) -> pd.DataFrame:
        """Return a table of the first n units of every target (default: all k)."""
        if n is not None and (not is_whole_number(n) or n < 1):
            raise ConfigError(f"top({n!r}): n must be a whole number of at least 1")
        rows = self.distant[self.distant["rank"] <= (n or self.settings.k)]
        # A unit is named by its tokens: "12" of one token, "12–14" of several.
        rows = rows.assign(unit=rows["first"].astype(str) + "–" + (rows["end"] - 1).astype(str))
        is_token = rows["end"] - rows["first"] == 1
        rows.loc[is_token, "unit"] = rows["first"].astype(str)
        rows = rows.assign(back=rows.target - rows["first"]).rename(columns={"first": "place"})
        numbers = ["place", "back", "nats", "loss_set", "loss_without"]
        return rows[["target", "rank", "unit", "text", *numbers]]

    @accepts_old_names
    def check(self, draws: int = 8, unrelated: Any = None) -> Check:
        """Evaluate the same targets with unrelated texts in place of the distant context.

        Args:
            draws: The number of unrelated texts.
            unrelated: The texts to draw from. Default: those that were passed to `explain`.
        """
        if unrelated is not None:
            self.unrelated = unrelated
        if self.prepared.scorer is None:
            raise ConfigError("check() needs the model, which was not kept; call explain again")
        with using(self.model):
            # With other weights, own and unrelated losses would be of two models.
            self.prepared.check_model_unchanged()
            self.checked = compare_with_unrelated(
                self.prepared, self.targets, self.unrelated, draws
            )
        return self.checked

    @property
    def results(self) -> Results:
        """Return the explanation as a measurement of one document, whose targets are in no target
        set."""
        return as_measurement(self)

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the model, as values that JSON can hold."""
        return stored_form.to_dict(self)

    def save(self, path: str | Path) -> None:
        """Write .json, or .parquet: a row for each distant unit, with the columns of its target."""
        stored_form.save(self, path)

    def to_html(self, path: str | Path) -> None:
        """Write an HTML page that needs no other file."""
        write_explanation_page(self, path)

    @property
    def shown(self) -> TargetsInText:
        """Return the targets with their units in the text, as a notebook and a terminal show
        them."""
        return TargetsInText(self.document.texts, self.targets, self.distant, self.windows.short)

    def describe(self, bold: bool = False) -> str:
        """Return the explanation as text for a terminal, with bold type if it understands ANSI
        codes."""
        paragraphs = [self.shown.describe(bold)]
        if self.reliability is not None:
            paragraphs.append(
                f"reliability of the unrelated texts: {self.reliability:.2f} (two halves)"
            )
        paragraphs += self.warnings
        paragraphs.append(describe_noise(self.model_meta))
        if self.checked is not None:
            paragraphs.append(str(self.checked))
        return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)

    def __repr__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        return self.shown._repr_html_()
