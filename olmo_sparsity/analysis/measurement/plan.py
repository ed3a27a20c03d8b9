"""Plan a measurement: read model and text, settle what is measured, and compute one document.

    MeasureRequest → `plan` → Plan → .losses(number), .targets(losses), .recovery(number, targets)

`plan` reads nothing but the model and the text, and computes no losses. The methods of `Plan` do
the work for one document at a time, and write nothing. measurement.py calls them for all documents,
and stores what they return."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.measurement.parts import Parts
from olmo_sparsity.analysis.measurement.recovery import recover
from olmo_sparsity.analysis.measurement.reuse import (
    Choices,
    is_other_tokenizer,
    losses_of,
    read_other,
    settings_of,
    targets_of,
    with_blocks_of,
    with_settings_of_targets,
)
from olmo_sparsity.analysis.measurement.targets import (
    COLUMNS,
    At,
    choose_targets,
    fit_threshold,
    named_targets,
    sampled_blocks,
    targets_by_text,
    targets_fingerprint,
    targets_of_document,
    targets_of_records,
)
from olmo_sparsity.analysis.options import (
    ALL_DOCUMENTS,
    QUICK,
    QUICK_BLOCKS,
    ModelOptions,
    Request,
    Settings,
    Shard,
    TextOptions,
)
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.tables import PHASES, Columns
from olmo_sparsity.analysis.results.target_rows import half_of
from olmo_sparsity.analysis.results.view import num_of
from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.scoring.induction import repetition_drop
from olmo_sparsity.analysis.scoring.replaced import scorer_of
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.scoring.sink import sink_check
from olmo_sparsity.analysis.selectors.influence import find_selector
from olmo_sparsity.base.errors import ConfigError, DataError, check_type
from olmo_sparsity.base.extend import fingerprint_of_files
from olmo_sparsity.base.files import path_of
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.streams import VERSION
from olmo_sparsity.config.windows import default_local
from olmo_sparsity.models.load import load_model, wrap_model
from olmo_sparsity.models.loaded import LoadedModel, identity_of, using
from olmo_sparsity.models.use import check_unchanged, state_of
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.inputs import cut_to_targets, open_documents
from olmo_sparsity.text.split import split_long_documents
from olmo_sparsity.text.windows import Block, Windows, span_width

SMALLER_UNITS = "pass smaller units (a paragraph ends at a blank line, not at a line break)"
"""What to do about a text of few units."""

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
    choices: OtherMeasurement = None
    losses: OtherMeasurement = None
    at: At | None = None
    quick: bool = False
    command: tuple[str, ...] = ()  # the words of the command line, which the results keep
    typed: tuple[str, ...] = ()
    """Names of settings that the user passed, also with their defaults, as far as is known."""

    settings: Settings = field(default_factory=Settings)
    reading: TextOptions = field(default_factory=TextOptions)
    loading: ModelOptions = field(default_factory=ModelOptions)

    def checked(self) -> Self:
        """Check the request, and put `windows` and what `quick` means into the settings."""
        shard = self._checked_shard()
        check_type("quick", self.quick, bool, "True or False")
        if self.out is not None:
            path_of("out", self.out)
        is_text = not isinstance(self.documents, Documents)
        if not is_text and self.reading != TextOptions():
            names = "field, group_field, prompt_field, …, max_documents and min_tokens"
            raise ConfigError(f"{names} are for text that is read here; leave them out")
        self._check_one_selects_targets()
        settings = self._with_windows()
        self._check_split_long(settings)
        # Before `quick` adds its own; a function does not know which of its defaults were passed.
        typed = tuple(sorted({*self.typed, *settings.changed_options}))
        reading = self.reading
        if self.quick:
            settings = _quick_settings(settings)
            if is_text and reading.max_documents is None:
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
        is_pair = isinstance(self.shard, tuple) and len(self.shard) == 2
        if not is_pair or not 0 <= self.shard[0] < self.shard[1]:
            raise ConfigError(f"shard={self.shard} must be (i, n) with 0 <= i < n")
        return Shard(*self.shard)

    def _check_one_selects_targets(self) -> None:
        """Raise ConfigError if two options select targets, or if an option is set that only has an
        effect where targets are chosen here."""
        options = [name for name in ("at", "choices", "targets") if getattr(self, name) is not None]
        of_text = self._targets_of_text()
        selecting_options = list(options)
        if self.quick and self.choices is not None:
            # `quick` selects blocks, and the other measurement has done so, too.
            selecting_options.insert(0, "quick")
        # Choices are of the same text, read the same way, so that they agree with its records.
        beside_text = [name for name in options if name != "choices"] + of_text
        for selections in (selecting_options, beside_text):
            if len(selections) > 1:
                names = " and ".join(selections)
                raise ConfigError(f"{names} all select targets: pass one of them")

        selections = [*options, *of_text]
        without_effect = sorted(self.settings.changed_options.keys() & SELECTION_SETTINGS)
        if selections and without_effect:
            names = ", ".join(without_effect)
            raise ConfigError(f"{names} cannot be combined with {selections[0]}; omit it")

    def _check_split_long(self, settings: Settings) -> None:
        """Raise ConfigError if documents are to be split where nothing of them is left out."""
        if not self.reading.split_long:
            return
        if self.choices is None and settings.long != "all":
            raise ConfigError(
                f"split_long is for long=all; with long={settings.long} nothing of a long document "
                "is left out: omit split_long"
            )
        if self.reading.prompt_field or self.reading.target_field:
            raise ConfigError("split_long would cut a prompt off its target: omit it")

    def _targets_of_text(self) -> list[str]:
        """Return how the text itself names its targets, in words for an error; nothing if it does
        not."""
        if isinstance(self.documents, Documents) and self.documents.have_targets:
            return ["records of prompt and target"]
        if self.reading.prompt_field:
            return ["prompt_field"]
        if self.reading.target_field:
            return ["target_field"]
        return []

    def _with_windows(self) -> Settings:
        """Return the settings with the lengths of `windows`."""
        windows = self.windows
        changed = self.settings.changed_options
        if windows is None:
            return self.settings
        if not isinstance(windows, Windows):
            raise ConfigError(f"windows={windows} must be Windows(long, short, stride)")
        if windows.has_all:
            raise ConfigError('with long="all", pass long, short and stride as options of measure')
        repeated = {"long", "short", "stride"} & changed.keys()
        if windows.prefix and self.loading.prefix != "auto":
            repeated |= {"prefix"}
        if repeated:
            names = ", ".join(sorted(repeated))
            raise ConfigError(f"{names} cannot be combined with windows; omit it")
        sizes = {name: getattr(windows, name) for name in ("long", "short", "stride")}
        return Settings(**changed | sizes, prefix_ids=windows.prefix)


SELECTION_SETTINGS = {"sets", "max_targets", "share", "sample", "blocks"}
"""Settings by which targets are chosen here. They have no effect where another option selects the
targets."""


def _quick_settings(settings: Settings) -> Settings:
    """Return settings with those of a first look, except for the options that the user has set."""
    quick = {name: value for name, value in QUICK.items() if name != "max_documents"}
    return Settings(**quick | settings.changed_options)


def plan(request: MeasureRequest) -> Plan:
    """Read the model and the text of a request, and settle what is measured."""
    targets = read_other("targets", request.targets)
    choices = read_other("choices", request.choices)
    losses = read_other("losses", request.losses)
    loading = request.loading
    interpretation = request.settings.interpretation
    if choices is not None:
        interpretation = interpretation_of(choices.meta.windows["distant_states"])
    model = load(request.model, request.tokenizer, loading, whole_prompts=interpretation.replaces)
    documents = _open(request.documents, model, request.reading)
    if request.reading.split_long:
        documents = _split_long(documents, model, loading.prefix)

    # The other measurement of `choices` determines most settings: units were ranked under them.
    has_other_tokenizer = choices is not None and is_other_tokenizer(choices, documents)
    if choices is None:
        settings = request.settings
        if targets is not None and not is_other_tokenizer(targets, documents):
            settings = with_settings_of_targets(targets, settings, request.typed, loading.prefix)
        say_defaults_of_length(settings)
    else:
        settings = settings_of(choices, request.settings.changed_options, has_other_tokenizer)
    settings = fit_to_limit(settings, model.max_positions)
    if documents.have_targets:
        documents = cut_to_targets(documents, settings.windows)
    prefix_ids = _prefix_of(documents, model, loading.prefix)
    # A checked request has one of these at most.
    selections = [other for other in (choices, targets, request.at) if other is not None]
    selection = selections[0] if selections else None

    if request.quick and selection is None and not documents.have_targets:
        settings = _with_quick_blocks(settings, model.max_positions, len(prefix_ids))
    _check_room_behind_prefix(len(prefix_ids), settings.short, model)
    if settings.windows.has_all:
        documents = within_limit(documents, model, len(prefix_ids))
    if choices is not None and not has_other_tokenizer:
        _check_same_prefix(settings.prefix_ids, prefix_ids, model)
    settings = replace(settings, prefix_ids=settings.prefix_ids or prefix_ids)
    planned = Plan.of(
        model,
        documents,
        settings,
        selection,
        batch_tokens=loading.batch_tokens,
        transfers=choices is not None,
    )
    planned.warn_of_few_units()
    return planned if losses is None else planned.with_losses(losses)


def _split_long(documents: Documents, model: LoadedModel, prefix: str) -> Documents:
    """Return documents of at most as many tokens as the model takes behind its prefix."""
    if model.max_positions is None:
        raise ConfigError(f"split_long: '{model.name}' has no limit of length; omit it")
    num_prefix = len(_prefix_of(documents, model, prefix))
    return split_long_documents(documents, model.max_positions - num_prefix, model.name)


def _check_same_prefix(
    other_prefix_ids: tuple[int, ...], prefix_ids: tuple[int, ...], model: LoadedModel
) -> None:
    """Raise DataError if choices were ranked after another prefix. A model without a tokenizer has
    no prefix of its own, and takes that of the choices."""
    if model.tokenizer is not None and prefix_ids != other_prefix_ids:
        raise DataError(
            f"choices were measured with the prefix {list(other_prefix_ids)} (token IDs), and "
            f"'{model.name}' has {list(prefix_ids)}; pass the same prefix to both"
        )


def _prefix_of(documents: Documents, model: LoadedModel, prefix: str) -> tuple[int, ...]:
    """Return the token IDs of the prefix."""
    # What a tokenizer puts before a text may depend on how the text begins.
    beginning = documents[0].tokens[:200].tolist()
    text = "" if model.tokenizer is None else model.tokenizer.decode(beginning, False)
    return tuple(model.prefix_ids(prefix, text))


def load(
    model: Any, tokenizer: Any, options: ModelOptions, is_read: bool = False, **how: Any
) -> LoadedModel:
    """Open a model by its name, or wrap one in memory. `is_read`: whether its tokenizer reads text,
    so that it must have one. `how`: more arguments of `load_model`."""
    if isinstance(model, str | Path):
        loaded = load_model(model, tokenizer=tokenizer, **how, **options.loading)
    else:
        options.check_unset_for_loaded()
        loaded = wrap_model(model, tokenizer, whole_prompts=how["whole_prompts"])
    if is_read and loaded.tokenizer is None:
        raise DataError(f"'{loaded.name}' has no tokenizer; pass it as the second argument")
    return loaded


def _open(documents: Any, model: LoadedModel, options: TextOptions) -> Documents:
    """Return documents as they are, or read them from text."""
    if isinstance(documents, Documents):
        return documents
    keywords = dict(vars(options))
    max_documents = keywords.pop("max_documents")
    # The length of parts depends on the prefix, which depends on the text.
    del keywords["split_long"]
    return open_documents(documents, model, max_documents, **keywords)


def _check_room_behind_prefix(num_prefix: int, short: int, model: LoadedModel) -> None:
    """Raise ConfigError if no distant token fits between the prefix and the local window."""
    limit = model.max_positions
    if limit is not None and num_prefix + short >= limit:
        raise ConfigError(
            f"prefix ({num_prefix:,} tokens) and local window (short={short}) need more than the "
            f"{limit:,} positions of '{model.name}'; pass a shorter prefix, or lower short"
        )


def _with_quick_blocks(settings: Settings, limit: int | None, num_prefix: int) -> Settings:
    """Return settings with the blocks of a first look, unless the user has set which blocks to
    measure. `limit`: the number of positions that the model takes."""
    if "sample" in settings.changed_options:
        return settings
    quick = replace(settings, **QUICK_BLOCKS | settings.changed_options)
    if limit is None or quick.windows.has_all or "stride" in settings.changed_options:
        return quick
    # The last target of a block sees stride − 1 tokens more than the first.
    room = limit - num_prefix - quick.windows.tokens_before(0)
    return replace(quick, stride=max(1, min(quick.stride, room + 1)))


@dataclass
class Plan:
    """Holds model, documents and settings of a measurement, and computes the rows of a document.

    A plan knows what is settled before anything is computed: the documents, already cut to what the
    model takes; the settings, with defaults filled in; the scorer; the unrelated texts; and the
    targets, where they are not chosen here. Its methods compute one document at a time, so that
    processes can share the documents. They write nothing, and depend on no other document but
    through the losses from which targets are chosen.

        planned = plan(MeasureRequest.of(model="runs/mine", documents="text.txt", long=64))
        losses = join_documents({n: planned.losses(n)["losses"] for n in planned.measured})
        targets = planned.targets(losses)
        tables = planned.recovery(1, targets)  # recovery, influence, lds, costs, tokens
    """

    model: LoadedModel
    documents: Documents
    settings: Settings
    scorer: Scorer
    controls: Controls
    fixed_targets: pd.DataFrame | None = None
    """Targets of another measurement, or named ones. None: targets are chosen by the losses."""

    only_named: bool = False
    """Whether only the blocks of `fixed_targets` need losses: targets were named, or match those of
    another tokenizer."""

    choices: Choices | None = None
    """Ranked units of another measurement. None: units are ranked here."""

    matched: dict[str, int] = field(default_factory=dict)
    """With choices in other tokens: how many of their targets and units are evaluated, and how many
    left out for which reason."""

    reused_losses: dict[int, pd.DataFrame] = field(default_factory=dict)
    """Losses that another measurement with this model has computed, by document."""

    reused_from: dict[str, Any] = field(default_factory=dict)
    """Commit, machine and command of that measurement."""

    def __post_init__(self) -> None:
        with using(self.model):
            self._state = state_of(self.model.model)

    def check_model_unchanged(self) -> None:
        """Raise DataError if the model is not what it was when the plan was made."""
        check_unchanged(self.model.model, self._state, "plan")

    @staticmethod
    def of(
        model: LoadedModel,
        documents: Documents,
        settings: Settings,
        selection: Results | At | None = None,
        *,
        batch_tokens: int | None = None,
        transfers: bool = False,
    ) -> Plan:
        """Make a plan of checked settings. `selection`: another measurement, whose targets are
        evaluated, or names of targets. `transfers`: whether the units that the other measurement
        ranked are evaluated, too."""
        windows = settings.windows
        longest = max(len(document.tokens) for document in documents)
        model.check_positions(windows.num_positions(longest))
        settings = replace(settings, sample=share_of_blocks(documents, settings), blocks=None)
        if isinstance(selection, Results):
            settings = with_blocks_of(selection, documents, settings)
        scorer = scorer_of(model, settings, batch_tokens)
        controls = Controls(documents, windows, settings.control, settings.draws, settings.seed)
        plan = Plan(model, documents, settings, scorer, controls)
        if isinstance(selection, Results):
            matched = targets_of(selection, documents, settings, transfers)
            plan.fixed_targets = matched.targets[[*COLUMNS, "end"]].reset_index(drop=True)
            plan.matched = matched.counts
            plan.only_named = bool(matched.counts) or matched.has_other_windows
            if transfers:
                plan.choices = Choices.of(selection, matched)
        elif selection is not None:
            plan.fixed_targets = named_targets(documents, selection, windows)
            plan.only_named = True
        elif documents.have_targets:
            plan.fixed_targets = targets_of_records(documents, windows)
        return plan

    def with_losses(self, other: Results) -> Plan:
        """Return the plan with the losses of another measurement, so that they are not computed
        again."""
        losses = losses_of(other, self.model, self.documents, self.settings)
        origin = {name: getattr(other.meta, name) for name in ("commit", "machine", "command")}
        return replace(self, reused_losses=losses, reused_from=origin)

    @cached_property
    def measured(self) -> list[int]:
        """Return the numbers of the documents that have a target. DataError if they are too few for
        thresholds and controls."""
        name = self.documents.name
        draws = self.settings.draws
        num_needed = draws + 2  # a document itself, the unrelated ones, and the placebo
        if len(self.documents) == 1:
            raise DataError(
                f"text: {name} is one document, and measure requires {num_needed}; split it "
                "(--split-at)"
            )
        long = self.settings.windows.first_target
        numbers = [document.number for document in self.documents if len(document.tokens) > long]

        # Thresholds are fitted on one half of the documents, and used on the other.
        if {half_of(number) for number in numbers} != {"threshold", "report"}:
            raise DataError(
                f"text: {len(numbers)} of {len(self.documents)} documents are longer than {long} "
                "tokens; measure requires one at an even and one at an odd place: pass more, or "
                "lower long and short"
            )
        if self.controls.num_candidates < num_needed:
            raise DataError(
                f"text: {self.controls.num_candidates} documents can replace each other, and "
                f"draws={draws} requires {num_needed}; pass more documents"
            )
        return numbers

    def warn_of_few_units(self) -> None:
        """Warn of kinds of units of which no document has more than the smallest k. All distant
        text is then added, and recovery is 1 by construction."""
        smallest_k = min(self.settings.ks)
        for units in self.settings.units:
            if span_width(units) is not None:
                continue  # Settings.check counts these
            if not any(self._num_units(units, number) > smallest_k for number in self.measured):
                all_units = num_of(smallest_k, units.removesuffix("s"))  # 1 paragraph, 2 paragraphs
                say(
                    f"warning: no document has more than {all_units} of distant text, so "
                    f"k={smallest_k} adds all of it; {SMALLER_UNITS}"
                )

    def _num_units(self, units: str, number: int) -> int:
        """Return the number of distant units of the last target of a document."""
        document = self.documents[number]
        num_distant = max(1, len(document.tokens) - self.settings.short)
        return len(document.units(units, 0, num_distant))

    @property
    def fits_threshold(self) -> bool:
        """Return whether targets are chosen by a threshold that the losses determine."""
        return self.fixed_targets is None

    def induction_texts(self) -> tuple[list[Document], int]:
        """Return the documents whose passages the induction check repeats, and the length of a
        passage. A passage and its repetition fit into a long window."""
        documents = [self.documents[number] for number in self.measured]
        return documents, self.settings.windows.first_target // 2

    def induction(self) -> dict[str, Any]:
        """Return the induction check: by how much the loss falls on a repeated passage."""
        documents, length = self.induction_texts()
        return repetition_drop(self.scorer, documents, length)

    def sink(self) -> dict[str, Any]:
        """Return the result of the sink check: whether the model needs a prefix. Return nothing if
        a prefix was passed, or if none can be tried."""
        tokenizer = self.model.tokenizer
        keeps_states = self.settings.interpretation.keeps_states
        if self.settings.prefix_ids or tokenizer is None or not keeps_states:
            return {}
        documents = [self.documents[number] for number in self.measured]
        return sink_check(self.scorer, documents, (), self.model.encode(["\n"])[0])

    def blocks(self, document: Document) -> list[Block]:
        """Return the blocks of a document whose losses are computed: those of the sample, or with
        `only_named` those among them that hold a target."""
        blocks = sampled_blocks(document, self.settings)
        if not self.only_named:
            return blocks
        targets = self.fixed_targets
        assert targets is not None
        named = targets.target[targets.document == document.number].to_numpy()
        starts = set(self.settings.windows.start_of(named).tolist())
        return [block for block in blocks if block.start in starts]

    def losses(self, number: int) -> dict[str, Columns]:
        """Return the rows of one document in the tables of the first phase."""
        document = self.documents[number]
        losses = self.reused_losses.get(number)
        if losses is None:
            windows = self.settings.windows
            blocks = self.blocks(document)
            scorer = self.scorer.of_document(document, self.controls)
            losses = context_losses(scorer, document, windows, self.controls, blocks)
            if not blocks:  # the sample has none of this document, but it counts as measured
                names = PHASES["losses"]["losses"].names
                losses = pd.DataFrame({name: [] for name in names if name != "document"})
        return {"documents": {"name": [document.name]}, "losses": dict(losses)}

    def threshold(self, losses: pd.DataFrame) -> float | None:
        """Return the smallest gap of a target. None: any gap makes a target, or targets are not
        chosen here."""
        if not self.fits_threshold:
            return None
        half = losses[losses.document.map(half_of) == "threshold"]
        return fit_threshold(half, self.settings.share, self.settings.min_gap)

    def targets(self, losses: pd.DataFrame) -> pd.DataFrame:
        """Return the targets of the documents in `losses`, which must include the threshold
        half."""
        if self.fixed_targets is not None:
            return self.fixed_targets
        chosen = choose_targets(losses, self.threshold(losses), self.settings)
        by_text = self._by_text[self._by_text.document.isin(losses.document)]
        return pd.concat([chosen, by_text]).sort_values(list(chosen), ignore_index=True)

    @cached_property
    def _by_text(self) -> pd.DataFrame:
        """Return the targets that the text alone determines, in the documents of the report
        half."""
        numbers = [number for number in self.measured if half_of(number) == "report"]
        return targets_by_text([self.documents[number] for number in numbers], self.settings)

    def recovery(
        self, number: int, targets: pd.DataFrame, parts: Parts | None = None
    ) -> dict[str, Columns]:
        """Return the rows of one document in the tables of the second phase. `parts`: the folder in
        which the finished targets of a long document are stored, so that the next start does not
        evaluate them again."""
        document = self.documents[number]
        settings = self.settings
        document_targets = targets_of_document(targets, document)
        unfinished = None if parts is None else parts.unfinished(number, document_targets)
        has_controls = self.choices is None or self.choices.has_unrelated
        recovered = recover(
            self.scorer.of_document(document, self.controls),
            document,
            settings.windows,
            document_targets,
            units=settings.units,
            selectors=settings.selectors,
            ks=settings.ks,
            controls=self.controls if has_controls else None,
            num_halves=settings.halves,
            seed=settings.seed,
            choices=self.choices,
            unfinished=unfinished,
        )
        tables: dict[str, Columns] = {name: dict(rows) for name, rows in recovered.items()}
        tables["tokens"] = {
            "place": np.arange(len(document.tokens)),
            "token_id": document.tokens,
            "text": document.texts,
        }
        return tables

    def identity(self) -> dict[str, Any]:
        """Return everything that processes must share to measure into one folder."""
        targets = self.fixed_targets
        identity: dict[str, Any] = {
            **identity_of(self.model),
            "data": self.documents.fingerprint,
            "num_documents": len(self.documents),
            "random_streams": VERSION,
            "settings": asdict(self.settings),
        }
        # Earlier versions did not write these keys. They are left out where they say nothing, so
        # that folders of earlier versions can be resumed.
        files = fingerprint_of_files((*self.settings.selectors, *self.settings.units))
        if files:
            identity["files"] = files
        if self.only_named:
            identity["only_named"] = True
        identity["targets"] = None if targets is None else targets_fingerprint(targets)
        identity["choices"] = None if self.choices is None else self.choices.fingerprint
        return identity


def share_of_blocks(documents: Documents, settings: Settings) -> float:
    """Return the share of all blocks to measure, which `sample` gives itself, and `blocks` as a
    number of blocks of each document, on average."""
    if settings.blocks is None:
        return settings.sample
    windows = settings.windows
    num_targets_D = np.array([len(d.tokens) - windows.first_target for d in documents])
    num_blocks_D = np.ceil(num_targets_D[num_targets_D > 0] / windows.stride)
    num_wanted = settings.blocks * len(num_blocks_D)
    return min(1.0, num_wanted / max(num_blocks_D.sum(), 1))


OPTIONS_WITH_DEFAULTS_OF_LENGTH = ("max_targets", "halves", "draws", "stride")
"""Options whose defaults depend on `long`."""


def say_defaults_of_length(settings: Settings) -> None:
    """Print which defaults differ from those of long="all" because the window has a fixed
    length."""
    if settings.long == "all" or settings.interpretation.replaces:
        return
    usual = Settings()
    changed = []
    for name in OPTIONS_WITH_DEFAULTS_OF_LENGTH:
        value = getattr(settings, name)
        usual_value = getattr(usual, name)
        if name not in settings.changed_options and value != usual_value:
            changed.append(f"{name}={value} ({usual_value})")
    if changed:
        say(f"long={settings.long} has other defaults than long=all: {'; '.join(changed)}")


def fit_to_limit(settings: Settings, limit: int | None) -> Settings:
    """Return settings that suit a model with few positions: with long="all" the default local
    window is at most a quarter of them."""
    has_default_windows = settings.windows.has_all and "short" not in settings.changed_options
    if not has_default_windows or limit is None or limit >= 4 * settings.short:
        return settings
    stride = settings.stride if "stride" in settings.changed_options else max(1, limit // 8)
    return replace(settings, short=default_local(settings.short, limit), stride=stride)


def within_limit(documents: Documents, model: LoadedModel, num_prefix: int) -> Documents:
    """Return documents without the tokens beyond the model's last position. With long="all" a
    forward reads a whole document, so it must end there."""
    if model.max_positions is None:
        return documents
    max_tokens = model.max_positions - num_prefix
    too_long = [document for document in documents if len(document.tokens) > max_tokens]
    if not too_long:
        return documents
    num_left_out = sum(len(document.tokens) - max_tokens for document in too_long)
    say(
        f"{len(too_long):,} of {len(documents):,} documents are longer than the {max_tokens:,} "
        f"tokens that {model.name} takes: their last {num_left_out:,} tokens are left out; "
        "pass --split-long to read them in parts"
    )
    items = [replace(document, tokens=document.tokens[:max_tokens]) for document in documents.items]
    return replace(documents, items=items)


def targets_meta(plan: Plan, threshold: float | None) -> dict[str, Any]:
    """Return the section `targets` of meta.json: how the targets were chosen, and, for targets of
    another measurement, by which model."""
    if plan.fixed_targets is not None:
        section: dict[str, Any] = {"given": targets_fingerprint(plan.fixed_targets)}
        if plan.only_named:
            section["only_named"] = True
        if plan.matched:
            section["matched"] = plan.matched
        if plan.choices is not None:
            section["choices"] = plan.choices.fingerprint
            section["chosen_by"] = plan.choices.model
        return section
    return {
        "share": plan.settings.share,
        "min_gap": plan.settings.min_gap,
        "max_targets": plan.settings.max_targets,
        "threshold": threshold,
    }
