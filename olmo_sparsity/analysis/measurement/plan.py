"""Plan a measurement: read model and text, and compute the rows of one document."""

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
)
from olmo_sparsity.analysis.measurement.targets import (
    COLUMNS,
    At,
    choose_targets,
    fit_threshold,
    named_targets,
    of_document,
    sampled_blocks,
    targets_by_text,
    targets_fingerprint,
    targets_of_records,
)
from olmo_sparsity.analysis.options import (
    QUICK,
    QUICK_BLOCKS,
    ModelOptions,
    Request,
    Settings,
    TextOptions,
)
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.statistics import half_of
from olmo_sparsity.analysis.results.tables import PHASES, Columns
from olmo_sparsity.analysis.results.view import num_of
from olmo_sparsity.analysis.scoring.induction import repetition_drop
from olmo_sparsity.analysis.scoring.replaced import scorer_of
from olmo_sparsity.analysis.scoring.scorer import Scorer, context_losses
from olmo_sparsity.analysis.scoring.sink import sink_check
from olmo_sparsity.analysis.selectors.influence import find_selector
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.extend import fingerprint_of_files
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.streams import VERSION
from olmo_sparsity.config.windows import default_local
from olmo_sparsity.models.load import load_model, wrap_model
from olmo_sparsity.models.loaded import LoadedModel, identity_of, using
from olmo_sparsity.models.use import refuse_changed, state_of
from olmo_sparsity.text.documents import Controls, Document, Documents
from olmo_sparsity.text.inputs import cut_to_targets, open_documents
from olmo_sparsity.text.windows import Block, Windows, span_width

SMALLER_UNITS = "pass smaller units (a paragraph ends at a blank line, not at a line break)"
"""What to do about a text of few units."""

Other = Results | str | Path | None
"""Another measurement, or its folder."""


@dataclass(frozen=True, kw_only=True)
class MeasureRequest(Request):
    model: Any
    tokenizer: Any = None
    documents: Any = None
    windows: Windows | None = None
    """In place of long, short and stride; None in a request that is checked."""

    out: str | Path | None = None
    shard: tuple[int, int] = (0, 1)  # the i-th of n processes that measure into one folder
    targets: Other = None
    choices: Other = None
    losses: Other = None
    at: At | None = None
    quick: bool = False
    command: tuple[str, ...] = ()  # the words of the command line, which the results keep
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
            names = "field, group_field, prompt_field, …, max_documents and min_tokens"
            raise ConfigError(f"{names} are for text that is read here; leave them out")
        self._check_one_selects_targets()
        settings, reading = self._with_windows(), self.reading
        if self.quick:
            quick = dict(QUICK)
            del quick["max_documents"]  # an option of the text, below
            if settings.interpretation.replaces:
                del quick["selectors"]  # those of a first look need states
            settings = Settings(**quick | settings.given)
            if is_read and reading.max_documents is None:
                reading = replace(reading, max_documents=QUICK["max_documents"])
        if self.choices is None:  # these determine the settings
            settings.check()
        for name in settings.selectors:
            find_selector(name, settings.interpretation)
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
        if (extra := sorted(self.settings.given.keys() & OF_CHOSEN)) and (by := [*named, *of_text]):
            raise ConfigError(f"{', '.join(extra)} cannot be combined with {by[0]}; omit it")

    def _with_windows(self) -> Settings:
        windows, given = self.windows, self.settings.given
        if windows is None:
            return self.settings
        if not isinstance(windows, Windows):
            raise ConfigError(f"windows={windows} must be Windows(long, short, stride)")
        if windows.has_all:
            raise ConfigError('with long="all", pass long, short and stride as options of measure')
        twice = {"long", "short", "stride"} & given.keys()
        if windows.prefix and self.loading.prefix != "auto":
            twice |= {"prefix"}
        if twice:
            names = ", ".join(sorted(twice))
            raise ConfigError(f"{names} cannot be combined with windows; omit it")
        sizes = {name: getattr(windows, name) for name in ("long", "short", "stride")}
        return Settings(**given | sizes, prefix_ids=windows.prefix)


OF_CHOSEN = {"sets", "max_targets", "share", "sample", "blocks"}
"""Options that choose targets, and none where targets are given."""


def plan(request: MeasureRequest) -> Plan:
    """Read the model and the text of a request, and settle what is measured."""
    targets, choices, losses = (
        read_other(name, getattr(request, name)) for name in ("targets", "choices", "losses")
    )
    settings, reading, loading = request.settings, request.reading, request.loading
    interpretation = settings.interpretation
    if choices is not None:
        interpretation = interpretation_of(choices.meta.windows["distant_states"])
    replaces = interpretation.replaces
    model = load(request.model, request.tokenizer, loading, whole_prompts=replaces)
    documents = _open(request.documents, model, reading)
    is_other = choices is not None and is_other_tokenizer(choices, documents)
    if choices is not None:
        settings = settings_of(choices, settings.given, is_other)
    else:
        say_defaults_of_length(settings)
    settings = fit_to_limit(settings, model.max_positions)
    if documents.have_targets:
        documents = cut_to_targets(documents, settings.windows)
    given = next((one for one in (choices, targets, request.at) if one is not None), None)
    are_given = given is not None or documents.have_targets
    beginning = documents[0].tokens[:200].tolist()
    text = "" if model.tokenizer is None else model.tokenizer.decode(beginning, False)
    ids = tuple(model.prefix_ids(loading.prefix, text))
    if request.quick and not are_given:
        settings = _sampled(settings, model.max_positions, len(ids))
    _check_room_behind_prefix(len(ids), settings.short, model)
    if settings.windows.has_all:
        documents = within_limit(documents, model, len(ids))
    is_same = choices is not None and model.tokenizer is not None and not is_other
    if is_same and ids != settings.prefix_ids:
        both = f"token IDs {list(settings.prefix_ids)}, and '{model.name}' with {list(ids)}"
        raise DataError(f"choices were measured with prefix {both}; pass the same to both")
    settings = replace(settings, prefix_ids=settings.prefix_ids or ids)
    made = Plan.of(model, documents, settings, given, loading.batch_tokens, choices is not None)
    made.warn_of_few_units()
    return made if losses is None else made.with_losses(losses)


def load(
    model: Any, tokenizer: Any, options: ModelOptions, is_read: bool = False, **how: Any
) -> LoadedModel:
    """`is_read`: text is read by a tokenizer; `how`: of `load_model`."""
    if isinstance(model, str | Path):
        loaded = load_model(model, tokenizer=tokenizer, **how, **options.loading)
    else:
        options.refuse_for_loaded()
        loaded = wrap_model(model, tokenizer, whole_prompts=how["whole_prompts"])
    if is_read and loaded.tokenizer is None:
        raise DataError(f"'{loaded.name}' has no tokenizer; pass it as the second argument")
    return loaded


def _open(documents: Any, model: LoadedModel, options: TextOptions) -> Documents:
    if isinstance(documents, Documents):
        return documents
    given = dict(vars(options))
    return open_documents(documents, model, given.pop("max_documents"), **given)


def _check_room_behind_prefix(num_prefix: int, short: int, model: LoadedModel) -> None:
    """Raise ConfigError if no distant token fits between the prefix and the local window."""
    limit = model.max_positions
    if limit is not None and num_prefix + short >= limit:
        raise ConfigError(
            f"prefix ({num_prefix:,} tokens) and local window (short={short}) need more than the "
            f"{limit:,} positions of '{model.name}'; pass a shorter prefix, or lower short"
        )


def _sampled(settings: Settings, limit: int | None, num_prefix: int) -> Settings:
    """Measure the blocks of a first look, where neither blocks nor their number are given."""
    if "sample" in settings.given:
        return settings
    found = replace(settings, **QUICK_BLOCKS | settings.given)
    if limit is None or found.windows.has_all or "stride" in settings.given:
        return found
    longest = found.windows.tokens_before(0)
    room = limit - num_prefix - longest  # the last target of a block sees stride − 1 more
    return replace(found, stride=max(1, min(found.stride, room + 1)))


@dataclass
class Plan:
    """Model, documents and settings of a measurement, and the rows they give."""

    model: LoadedModel
    documents: Documents
    settings: Settings
    scorer: Scorer
    controls: Controls
    given: pd.DataFrame | None = None
    """Targets of another measurement, or named ones; None: they are chosen here."""

    only_named: bool = False
    """Targets were named, or match those of another tokenizer: losses of other blocks are not
    needed."""

    choices: Choices | None = None
    """Ranked units of another measurement; None: they are ranked here."""

    matched: dict[str, int] = field(default_factory=dict)
    """With another tokenizer, how many of its targets and units are evaluated and left out."""

    known: dict[int, pd.DataFrame] = field(default_factory=dict)
    """Losses of documents, of another measurement by this model."""

    known_from: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with using(self.model):
            self._state = state_of(self.model.model)

    def refuse_changed_model(self) -> None:
        refuse_changed(self.model.model, self._state, "plan")

    @staticmethod
    def of(
        model: LoadedModel,
        documents: Documents,
        settings: Settings,
        given: Results | At | None = None,
        batch_tokens: int | None = None,
        transfers: bool = False,
    ) -> Plan:
        """`transfers`: the units that `given` ranked are evaluated, too. Settings are checked."""
        windows = settings.windows
        longest = max(len(document.tokens) for document in documents)
        model.check_positions(windows.num_positions(longest))
        settings = replace(settings, sample=share_of_blocks(documents, settings), blocks=None)
        if isinstance(given, Results):
            settings = with_blocks_of(given, documents, settings)
        scorer = scorer_of(model, settings, batch_tokens)
        controls = Controls(documents, windows, settings.control, settings.draws, settings.seed)
        plan = Plan(model, documents, settings, scorer, controls)
        if isinstance(given, Results):
            matched = targets_of(given, documents, settings, transfers)
            plan.given = matched.targets[[*COLUMNS, "end"]].reset_index(drop=True)
            plan.matched = matched.counts
            plan.only_named = bool(matched.counts) or matched.has_other_windows
            if transfers:
                plan.choices = Choices.of(given, matched)
        elif given is not None:
            plan.given = named_targets(documents, given, windows)
            plan.only_named = True
        elif documents.have_targets:
            plan.given = targets_of_records(documents, windows)
        return plan

    def with_losses(self, given: Results) -> Plan:
        known = losses_of(given, self.model, self.documents, self.settings)
        about = {name: getattr(given.meta, name) for name in ("commit", "machine", "command")}
        return replace(self, known=known, known_from=about)

    @cached_property
    def measured(self) -> list[int]:
        """Numbers of the documents that have a target."""
        long = self.settings.windows.first_target
        if len(self.documents) == 1:
            least = f"is one document, and measure requires {self.settings.draws + 2}"
            raise DataError(f"text: {self.documents.name} {least}; split it (--split-at)")
        numbers = [d.number for d in self.documents if len(d.tokens) > long]
        if {half_of(number) for number in numbers} != {"threshold", "report"}:
            found = f"{len(numbers)} of {len(self.documents)} documents are longer than {long}"
            rule = "measure requires one at an even and one at an odd place"
            raise DataError(f"text: {found} tokens; {rule}: pass more, or lower long and short")
        needed = self.settings.draws + 2  # itself, the unrelated ones, and the placebo
        if self.controls.num_candidates < needed:
            found = f"{self.controls.num_candidates} documents can replace each other"
            least = f"draws={self.settings.draws} requires {needed}"
            raise DataError(f"text: {found}, and {least}; pass more documents")
        return numbers

    def warn_of_few_units(self) -> None:
        """Say which units are too few to rank: the smallest k is all units of each document, and
        recovery is 1 by construction."""
        least = min(self.settings.ks)
        for units in self.settings.units:
            if span_width(units) is not None:
                continue  # Settings.check counts these
            if not any(self._num_units(units, number) > least for number in self.measured):
                most = num_of(least, units.removesuffix("s"))
                say(
                    f"warning: no document has more than {most} of distant text, so k={least} adds "
                    f"all of it; {SMALLER_UNITS}"
                )

    def _num_units(self, units: str, number: int) -> int:
        document = self.documents[number]
        num_distant = max(1, len(document.tokens) - self.settings.short)
        return len(document.units(units, 0, num_distant))

    @property
    def fits_threshold(self) -> bool:
        return self.given is None

    def for_induction(self) -> tuple[list[Document], int]:
        """The documents of the induction check, and the length of its passages."""
        documents = [self.documents[number] for number in self.measured]
        return documents, self.settings.windows.first_target // 2

    def induction(self) -> dict[str, Any]:
        return repetition_drop(self.scorer, *self.for_induction())

    def sink(self) -> dict[str, Any]:
        """Return the sink check, or nothing where a prefix was passed or none can be tried."""
        tokenizer = self.model.tokenizer
        keeps_states = self.settings.interpretation.keeps_states
        if self.settings.prefix_ids or tokenizer is None or not keeps_states:
            return {}
        documents = [self.documents[number] for number in self.measured]
        return sink_check(self.scorer, documents, (), self.model.encode(["\n"])[0])

    def blocks(self, document: Document) -> list[Block]:
        """The blocks of a document whose losses are computed: of the sample, or with
        `only_named` those of the targets."""
        blocks = sampled_blocks(document, self.settings)
        if not self.only_named:
            return blocks
        assert self.given is not None
        named = self.given.target[self.given.document == document.number].to_numpy()
        starts = set(self.settings.windows.start_of(named).tolist())
        return [block for block in blocks if block.start in starts]

    def losses(self, number: int) -> dict[str, Columns]:
        """The rows of one document in the tables of the first phase."""
        document, losses = self.documents[number], self.known.get(number)
        if losses is None:
            windows, blocks = self.settings.windows, self.blocks(document)
            scorer = self.scorer.of_document(document, self.controls)
            losses = context_losses(scorer, document, windows, self.controls, blocks)
            if not blocks:  # none of it is in the sample
                names = PHASES["losses"]["losses"].names
                losses = pd.DataFrame({name: [] for name in names if name != "document"})
        return {"documents": {"name": [document.name]}, "losses": dict(losses)}

    def threshold(self, losses: pd.DataFrame) -> float | None:
        if not self.fits_threshold:
            return None
        half = losses[losses.document.map(half_of) == "threshold"]
        return fit_threshold(half, self.settings.share, self.settings.min_gap)

    def targets(self, losses: pd.DataFrame) -> pd.DataFrame:
        """Targets of the documents in `losses`, which must include the threshold half."""
        if self.given is not None:
            return self.given
        chosen = choose_targets(losses, self.threshold(losses), self.settings)
        by_text = self._by_text[self._by_text.document.isin(losses.document)]
        return pd.concat([chosen, by_text]).sort_values(list(chosen), ignore_index=True)

    @cached_property
    def _by_text(self) -> pd.DataFrame:
        reported = [self.documents[n] for n in self.measured if half_of(n) == "report"]
        return targets_by_text(reported, self.settings)

    def recovery(
        self, number: int, targets: pd.DataFrame, parts: Parts | None = None
    ) -> dict[str, Columns]:
        """Return the rows of one document in the tables of the second phase. `parts`: where the
        rows of a document that takes long are stored before it is finished, and taken up again."""
        document = self.documents[number]
        settings = self.settings
        document_targets = of_document(targets, document)
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
        """Processes that measure into one folder must agree in all of this."""
        files = fingerprint_of_files((*self.settings.selectors, *self.settings.units))
        return {
            **identity_of(self.model),
            "data": self.documents.fingerprint,
            "num_documents": len(self.documents),
            "random_streams": VERSION,
            "settings": asdict(self.settings),
            **({"files": files} if files else {}),
            **({"only_named": True} if self.only_named else {}),
            "targets": None if self.given is None else targets_fingerprint(self.given),
            "choices": None if self.choices is None else self.choices.fingerprint,
        }


def share_of_blocks(documents: Documents, settings: Settings) -> float:
    """The share of all blocks that `sample` or `blocks` means."""
    if settings.blocks is None:
        return settings.sample
    windows = settings.windows
    num_targets = np.array([len(d.tokens) - windows.first_target for d in documents])
    num_blocks = np.ceil(num_targets[num_targets > 0] / windows.stride)
    return min(1.0, settings.blocks * len(num_blocks) / max(num_blocks.sum(), 1))


OF_LENGTH = ("max_targets", "halves", "draws", "stride", "selectors")
"""Options whose defaults depend on `long`."""


def say_defaults_of_length(settings: Settings) -> None:
    """Say which defaults a window of fixed length changes, and to what."""
    if settings.long == "all" or settings.interpretation.replaces:
        return
    usual = Settings()
    changed = []
    for name in OF_LENGTH:
        value = getattr(settings, name)
        if name not in settings.given and value != getattr(usual, name):
            shown = ", ".join(value) if isinstance(value, tuple) else value
            of_all = getattr(usual, name)
            of_all = ", ".join(of_all) if isinstance(of_all, tuple) else of_all
            changed.append(f"{name}={shown} ({of_all})")
    if changed:
        say(f"long={settings.long} has other defaults than long=all: {'; '.join(changed)}")


def fit_to_limit(settings: Settings, limit: int | None) -> Settings:
    """With long="all", windows that are not given are at most a quarter of what the model takes."""
    is_free = settings.windows.has_all and "short" not in settings.given
    if not is_free or limit is None or limit >= 4 * settings.short:
        return settings
    stride = settings.stride if "stride" in settings.given else max(1, limit // 8)
    return replace(settings, short=default_local(settings.short, limit), stride=stride)


def within_limit(documents: Documents, model: LoadedModel, num_prefix: int) -> Documents:
    """End a document where the model's positions do, with long="all"."""
    if model.max_positions is None:
        return documents
    most = model.max_positions - num_prefix
    cut = [d for d in documents if len(d.tokens) > most]
    if not cut:
        return documents
    lost = sum(len(d.tokens) - most for d in cut)
    say(
        f"{len(cut):,} of {len(documents):,} documents are longer than the {most:,} tokens that "
        f"{model.name} takes: their last {lost:,} tokens are left out"
    )
    items = [replace(d, tokens=d.tokens[:most]) for d in documents.items]
    return replace(documents, items=items)


def share_of(numbers: list[int], index: int, of: int) -> list[int]:
    """Every of-th pair, so that each share has documents of both halves."""
    return [number for number in numbers if number // 2 % of == index]


def targets_meta(plan: Plan, threshold: float | None) -> dict[str, Any]:
    """The section `targets` of meta.json."""
    if plan.given is not None:
        about = {"only_named": plan.only_named, "matched": plan.matched}
        if plan.choices is not None:
            about |= {"choices": plan.choices.fingerprint, "chosen_by": plan.choices.model}
        given = {"given": targets_fingerprint(plan.given)}
        return given | {name: value for name, value in about.items() if value}
    return {
        "share": plan.settings.share,
        "min_gap": plan.settings.min_gap,
        "max_targets": plan.settings.max_targets,
        "threshold": threshold,
    }
