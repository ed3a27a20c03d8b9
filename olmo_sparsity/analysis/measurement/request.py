"""A call of `measure`, checked: the first thing made of it, and what all that follows takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from olmo_sparsity.analysis.inputs.documents import Documents
from olmo_sparsity.analysis.inputs.windows import Windows
from olmo_sparsity.analysis.measurement.targets import At
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.selectors.selector import find_selector
from olmo_sparsity.analysis.settings import QUICK, ModelOptions, Request, Settings, TextOptions
from olmo_sparsity.errors import ConfigError

Other = Results | str | Path | None
"""Another measurement, or its folder."""


@dataclass(frozen=True, kw_only=True)
class MeasureRequest(Request):
    model: Any
    documents: Any = None
    windows: Windows | None = None
    """In place of long, short and stride; None in a request that is checked."""

    out: str | Path | None = None
    shard: tuple[int, int] = (0, 1)
    """The i-th of n processes that measure into one folder."""

    targets: Other = None
    choices: Other = None
    losses: Other = None
    at: At | None = None
    quick: bool = False
    command: tuple[str, ...] = ()
    """The words of the command line, which the results keep."""

    settings: Settings = field(default_factory=Settings)
    reading: TextOptions = field(default_factory=TextOptions)
    loading: ModelOptions = field(default_factory=ModelOptions)

    def checked(self) -> Self:
        """Also put `windows` and what `quick` means into the settings."""
        index, of = self.shard if isinstance(self.shard, tuple) and len(self.shard) == 2 else (0, 0)
        if not 0 <= index < of:
            raise ConfigError(f"shard={self.shard} must be (i, n) with 0 <= i < n")
        is_read = not isinstance(self.documents, Documents)
        if not is_read and self.reading != TextOptions():
            raise ConfigError(
                "field, group_field, prompt_field, target_field, split_at and max_documents are "
                "for text that is read here; leave them out"
            )
        self._check_one_selects_targets()
        settings, reading = self._with_windows(), self.reading
        if self.quick:
            quick = {name: value for name, value in QUICK.items() if name != "max_documents"}
            settings = Settings(**quick | settings.given)
            if is_read and reading.max_documents is None:
                reading = replace(reading, max_documents=QUICK["max_documents"])
        if self.choices is None:  # these determine the settings
            settings.check()
        for name in settings.selectors:
            find_selector(name)
        return replace(self, windows=None, settings=settings, reading=reading)

    def _check_one_selects_targets(self) -> None:
        """Named options, or the text."""
        named = [n for n in ("at", "choices", "targets") if getattr(self, n) is not None]
        of_text = [n for n in ("prompt_field", "target_field") if getattr(self.reading, n)][:1]
        if isinstance(self.documents, Documents) and self.documents.have_targets:
            of_text = ["records of prompt and target"]
        # Choices are of the same text, read the same way.
        others = [name for name in named if name != "choices"]
        quick = ["quick"] if self.quick and self.choices is not None else []
        for says in ([*quick, *named], [*others, *of_text]):
            if len(says) > 1:
                raise ConfigError(f"{' and '.join(says)} all select targets: pass one of them")

    def _with_windows(self) -> Settings:
        windows, given = self.windows, self.settings.given
        if windows is None:
            return self.settings
        if not isinstance(windows, Windows):
            raise ConfigError(f"windows={windows} must be Windows(long, short, stride)")
        if windows.long == "all":
            raise ConfigError('with long="all", pass long, short and stride as options of measure')
        twice = {"long", "short", "stride"} & given.keys()
        if windows.prefix and self.loading.prefix != "auto":
            twice |= {"prefix"}
        if twice:
            names = ", ".join(sorted(twice))
            raise ConfigError(f"{names} cannot be combined with windows; omit it")
        sizes = {name: getattr(windows, name) for name in ("long", "short", "stride")}
        return Settings(**given | sizes, prefix_ids=windows.prefix)
