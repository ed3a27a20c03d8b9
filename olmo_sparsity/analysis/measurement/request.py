"""Hold a call of `measure`, and check which of its options go together.

    MeasureRequest.of(model="runs/mine", documents="text.txt", long=64, quick=True)
        .settings.long            # 64, as passed
        .settings.draws           # 1, as `quick` says
        .reading.max_documents    # 30, as `quick` says
        .typed                    # ("long",)

    MeasureRequest.of(…, at="Ayrton", share=0.5)    # ConfigError: `at` selects the targets

The function and the command `measure` make a request, and planning.py answers it. Only options are
checked here. planning.py reads the model and the text, and checks what depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from olmo_sparsity.analysis.measurement.at import At
from olmo_sparsity.analysis.options import (
    QUICK,
    SELECTION_SETTINGS,
    ModelOptions,
    Settings,
    TextOptions,
)
from olmo_sparsity.analysis.request import Request
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.selectors.influence import find_selector
from olmo_sparsity.analysis.shard import ALL_DOCUMENTS, Shard
from olmo_sparsity.base.errors import ConfigError, check_type
from olmo_sparsity.base.path_options import path_of
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.windows import Windows

OtherMeasurement = Results | str | Path | None
"""Another measurement, or its folder."""


@dataclass(frozen=True, kw_only=True)
class MeasureRequest(Request):
    """A call of `measure`, or of its command."""

    model: Any
    tokenizer: Any = None
    documents: Any = None
    windows: Windows | None = None
    """In place of long, short and stride; None in a request that is checked."""

    out: str | Path | None = None
    shard: tuple[int, int] = ALL_DOCUMENTS
    """The i-th of n processes that measure into one folder; a `Shard` in a request that is
    checked."""

    targets: OtherMeasurement = None
    """Evaluate the targets of this measurement."""

    choices: OtherMeasurement = None
    """Evaluate the targets of this measurement with the units that its model ranked."""

    losses: OtherMeasurement = None
    """Reuse the losses of this measurement, which has the same model, text and windows."""

    at: At | None = None
    """Evaluate the tokens with these names."""

    quick: bool = False
    """Measure a few blocks of a few documents."""

    command: tuple[str, ...] = ()
    """The words of the command line, which the results keep."""

    typed: tuple[str, ...] = ()
    """Names of settings that the user passed, also with their defaults, as far as is known."""

    settings: Settings = field(default_factory=Settings)
    reading: TextOptions = field(default_factory=TextOptions)
    loading: ModelOptions = field(default_factory=ModelOptions)

    @property
    def passed_settings(self) -> set[str]:
        """Return the names of the settings that the user passed. A function does not know which of
        its defaults were passed."""
        typed = {item.name for item in fields(Settings)} & set(self.typed)
        return typed | self.settings.changed_options.keys()

    def checked(self) -> Self:
        """Check the request, and put `windows` and what `quick` means into the settings."""
        shard = self._checked_shard()
        check_type("quick", self.quick, bool, "True or False")
        if self.out is not None:
            path_of("out", self.out)
        self._check_reading()
        self._check_one_selects_targets()
        self._check_options_are_used()
        self._check_min_gap_is_used()
        settings = self._settings_with_windows()
        self._check_split_long(settings)

        # Before `quick` adds its own; a function does not know which of its defaults were passed.
        typed = tuple(sorted({*self.typed, *settings.changed_options}))
        reading = self.reading
        if self.quick:
            settings = _quick_settings(settings)
            if self._reads_text and reading.max_documents is None:
                reading = replace(reading, max_documents=QUICK["max_documents"])

        # The settings of `choices` are not known yet: the other measurement has them.
        if self.choices is None:
            settings.check()
        for name in settings.selectors:
            find_selector(name, settings.interpretation)
        return replace(
            self, shard=shard, windows=None, settings=settings, reading=reading, typed=typed
        )

    def _checked_shard(self) -> Shard:
        """Return the shard. Raise ConfigError if it is not a number below the number of shards."""
        is_pair = isinstance(self.shard, tuple) and len(self.shard) == 2
        if not is_pair or not 0 <= self.shard[0] < self.shard[1]:
            raise ConfigError(f"shard={self.shard} must be (i, n) with 0 <= i < n")
        return Shard(*self.shard)

    @property
    def _reads_text(self) -> bool:
        """Return whether text is read here. Otherwise `documents` are tokens already."""
        return not isinstance(self.documents, Documents)

    def _check_reading(self) -> None:
        """Raise ConfigError if an option of reading text was passed, and no text is read."""
        if not self._reads_text and self.reading != TextOptions():
            names = "field, group_field, prompt_field, …, max_documents and min_tokens"
            raise ConfigError(f"{names} are for text that is read here; leave them out")

    @property
    def _selecting_options(self) -> list[str]:
        """Return the names of the passed options that select targets."""
        return [name for name in ("at", "choices", "targets") if getattr(self, name) is not None]

    def _selections_of_text(self) -> list[str]:
        """Return what makes the text itself name its targets, as words for an error: an option, or
        the records that were passed. Return an empty list if the text names none."""
        if isinstance(self.documents, Documents) and self.documents.have_targets:
            return ["records of prompt and target"]
        if self.reading.prompt_field:
            return ["prompt_field"]
        if self.reading.target_field:
            return ["target_field"]
        return []

    def _check_one_selects_targets(self) -> None:
        """Raise ConfigError if two options select targets."""
        options = self._selecting_options
        if self.quick and self.choices is not None:
            # `quick` selects blocks, and the other measurement has done so, too.
            options = ["quick", *options]

        # `choices` may be passed with records that name targets, as its measurement has read the
        # same records and has their targets.
        options_without_choices = [name for name in self._selecting_options if name != "choices"]
        options_and_text = options_without_choices + self._selections_of_text()
        for selections in (options, options_and_text):
            if len(selections) > 1:
                names = " and ".join(selections)
                raise ConfigError(f"{names} all select targets: pass one of them")

    def _check_options_are_used(self) -> None:
        """Raise ConfigError if a setting was passed that has no effect, as another option selects
        the targets. A setting that was typed with its default counts, too."""
        selections = [*self._selecting_options, *self._selections_of_text()]
        without_effect = sorted(self.passed_settings.intersection(SELECTION_SETTINGS))
        if selections and without_effect:
            names = ", ".join(without_effect)
            raise ConfigError(f"{names} cannot be combined with {selections[0]}; omit it")

    def _check_min_gap_is_used(self) -> None:
        """Raise ConfigError if `min_gap` was passed, and no target is chosen by the size of its
        gap."""
        settings = self.settings
        if "min_gap" not in self.passed_settings or settings.uses_min_gap:
            return
        if "gap" in settings.sets:
            reason = "share=all takes any gap"
        else:
            reason = f"sets={','.join(settings.sets)}"
        raise ConfigError(
            f"min_gap={settings.min_gap:g} has no effect ({reason}); omit it, or pass a "
            "share below all with sets=gap"
        )

    def _check_split_long(self, settings: Settings) -> None:
        """Raise ConfigError if `split_long` is set where documents are read in full anyway, or
        where it would cut a prompt off its target."""
        if not self.reading.split_long:
            return
        if self.choices is None and settings.long != "all":
            raise ConfigError(
                f"split_long is for long=all; with long={settings.long} nothing of a long document "
                "is left out: omit split_long"
            )
        if self.reading.prompt_field or self.reading.target_field:
            raise ConfigError("split_long would cut a prompt off its target: omit it")

    def _settings_with_windows(self) -> Settings:
        """Return the settings with the lengths of `windows`, if it was passed. Raise ConfigError if
        they were passed twice."""
        windows = self.windows
        changed = self.settings.changed_options
        if windows is None:
            return self.settings
        if not isinstance(windows, Windows):
            raise ConfigError(f"windows={windows} must be Windows(long, short, stride)")
        if windows.has_all:
            # `Windows` has more fields then, which the options determine.
            raise ConfigError('with long="all", pass long, short and stride as options of measure')

        repeated = {"long", "short", "stride"} & changed.keys()
        if windows.prefix and self.loading.prefix != "auto":
            repeated |= {"prefix"}
        if repeated:
            names = ", ".join(sorted(repeated))
            raise ConfigError(f"{names} cannot be combined with windows; omit it")
        sizes = {name: getattr(windows, name) for name in ("long", "short", "stride")}
        return Settings(**changed | sizes, prefix_ids=windows.prefix)


def _quick_settings(settings: Settings) -> Settings:
    """Return settings with those of a first look, except for the options that the user has set."""
    quick = {name: value for name, value in QUICK.items() if name != "max_documents"}
    return Settings(**quick | settings.changed_options)
