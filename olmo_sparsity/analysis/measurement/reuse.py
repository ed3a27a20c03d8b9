"""Reuse another measurement: its losses, its targets, or the units that its model ranked.

    losses_of    the losses, if model, text and windows are the same
    targets_of   the targets, and with them the ranked units, if the text is the same
    settings_of  the settings under which those units were ranked
    Choices      the ranked units, in place of a selector's own

Why evaluate units that another model ranked: a unit that lowers the loss of one model by chance
lowers that of another no more than any other unit does. So recovery by such units needs no placebo;
it is called transfer. If the other model has another tokenizer, `match_targets` and `match_choices`
find its targets and units by the characters of the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.recovery_tables import RankingLabels
from olmo_sparsity.analysis.measurement.targets import given_targets
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.results import Results, read_results
from olmo_sparsity.analysis.results.tables import to_json_value
from olmo_sparsity.analysis.results.target_rows import KEYS
from olmo_sparsity.analysis.results.view import num_of
from olmo_sparsity.analysis.selectors.influence import Choice, find_selector
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.streams import VERSION
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.windows import NOTHING, Units, Windows, span_width

RANKING_KEYS = [*KEYS, "units", "selector"]
"""The columns that tell one ranking of the document's own units from others."""


@dataclass(frozen=True)
class Matched:
    """Targets and ranked units of another measurement, as places in this one's documents."""

    targets: pd.DataFrame
    influence: pd.DataFrame
    counts: dict[str, int] = field(default_factory=dict)
    """With another tokenizer: how many targets and units are left out, and why; see
    docs/measure.md."""

    has_other_windows: bool = False
    """Whether the other measurement cut or sampled the text in another way. Then only the blocks of
    its targets need losses here."""

    def __str__(self) -> str:
        counts = self.counts
        text = (
            f"another tokenizer chose the targets: {counts['targets']:,} of "
            f"{num_of(counts['of_targets'], 'target')} matched; "
            f"{counts['targets_in_other_text']:,} lie in other text, "
            f"{counts['targets_cut_otherwise']:,} are not whole tokens here, "
            f"{counts['targets_outside_windows']:,} have no full window before them"
        )
        if "of_units" in counts:
            text += (
                f", {counts['targets_with_few_units']:,} have too few units left; of "
                f"{num_of(counts['of_units'], 'unit')}, {counts['units_cut_otherwise']:,} are not "
                f"units here and {counts['units_not_distant']:,} are not distant here"
            )
        return f"{text} (docs/measure.md)"


def is_other_tokenizer(results: Results, documents: Documents) -> bool:
    """Return whether the other measurement has read the same text in other tokens."""
    for number, tokens in results.tokens.sort_values("place").groupby("document"):
        document = _document(documents, int(number))
        size = min(len(tokens), len(document.tokens))
        has_same_tokens = np.array_equal(tokens.token_id[:size], document.tokens[:size])
        if not has_same_tokens and _is_same_text(list(tokens.text), document.texts):
            return True
    return False


def _document(documents: Documents, number: int) -> Document:
    """Return a document, or an empty one if there are fewer here."""
    return documents[number] if number < len(documents) else Document(NOTHING)


def match_targets(results: Results, documents: Documents, windows: Windows) -> Matched:
    """Find the targets of the other measurement in the tokens of these documents. Only targets in
    the documents' own distant context are matched, as unrelated texts differ."""
    targets = results.targets[results.targets.distant_part == "document"]
    texts_of = _texts_of(results)
    # `other_target`: a target's place in the other measurement; `target` becomes its place here.
    parts = [targets[:0].assign(other_target=0)]
    num_in_other_text = 0
    for number, rows in targets.groupby("document"):
        texts = texts_of[int(number)]
        document = _document(documents, int(number))
        if not _is_same_text(texts, document.texts):
            num_in_other_text += rows.target.nunique()
            continue
        place_B = boundaries(texts, document.texts)
        parts.append(
            rows.assign(
                other_target=rows.target, target=place_B[rows.target], end=place_B[rows.end]
            )
        )
    matched = pd.concat(parts)

    # A boundary that is none here is −1: the target begins or ends inside a token.
    is_cut = (matched.target < 0) | (matched.end <= matched.target)
    # A target needs a full window before it, and all its tokens in one block.
    is_early = matched.target < windows.first_target
    is_split = windows.start_of(matched.target) != windows.start_of(matched.end - 1)
    is_outside = ~is_cut & (is_early | is_split)
    is_kept = ~is_cut & ~is_outside

    by_target = matched.assign(cut=is_cut, outside=is_outside)
    by_target = by_target.drop_duplicates(["document", "other_target"])
    kept = matched[is_kept]
    counts = {
        "targets": len(kept.drop_duplicates(KEYS)),
        "of_targets": len(by_target) + num_in_other_text,
        "targets_in_other_text": num_in_other_text,
        "targets_cut_otherwise": int(by_target.cut.sum()),
        "targets_outside_windows": int(by_target.outside.sum()),
    }
    return Matched(kept, results.influence[:0], counts)


def match_choices(results: Results, documents: Documents, settings: Settings) -> Matched:
    """Find the targets of the other measurement, and the units that it ranked for them, in the
    tokens of these documents.

    Units that are distant there may lie in the local window here, and are left out. The others move
    up in rank. A target with fewer units than the largest k is left out. Units of unrelated texts
    are not matched.
    """
    kinds_of_tokens = [kind for kind in results.meta.units if span_width(kind) is not None]
    if kinds_of_tokens:
        raise ConfigError(
            f"choices: its units, {', '.join(kinds_of_tokens)}, are tokens of another tokenizer; "
            "measure it again with --units words, sentences, paragraphs or your own"
        )
    windows = settings.windows
    num_needed = max(settings.ks)
    matched_targets = match_targets(results, documents, windows)
    rows = _match_units(results, documents, settings, matched_targets.targets)

    # A unit is distant if it lies between the first distant token and the local window of the
    # target's block.
    start = windows.start_of(rows.target)
    is_unit = rows.distant_first.notna()
    is_distant = rows.distant_first >= windows.first_distant(start)
    is_distant &= rows.distant_end <= start - windows.short
    counts = matched_targets.counts | {
        "of_units": len(rows),
        "units_cut_otherwise": int((~is_unit).sum()),
        "units_not_distant": int((is_unit & ~is_distant).sum()),
    }
    # Units that are not distant here leave gaps in the ranks.
    rows = rows[is_distant].astype({"distant_first": int, "distant_end": int})
    rows = rows.sort_values([*RANKING_KEYS, "rank"])
    rows = rows.assign(rank=rows.groupby(RANKING_KEYS).cumcount() + 1)
    rows = rows[rows["rank"] <= num_needed]

    # A target is kept if each of its rankings has as many units as are needed: if as many rows as
    # there are rankings of a target have the last rank that is needed.
    num_full_rankings = rows[rows["rank"] == num_needed].groupby(KEYS).size()
    num_rankings = len(settings.units) * len(settings.selectors)
    kept_keys = num_full_rankings.index[num_full_rankings == num_rankings]
    targets = matched_targets.targets
    targets = targets[pd.MultiIndex.from_frame(targets[KEYS]).isin(kept_keys)]
    rows = rows[pd.MultiIndex.from_frame(rows[KEYS]).isin(kept_keys)]
    counts["targets_with_few_units"] = counts["targets"] - len(kept_keys)
    counts["targets"] = len(kept_keys)
    return Matched(targets, rows, counts)


def _match_units(
    results: Results, documents: Documents, settings: Settings, targets: pd.DataFrame
) -> pd.DataFrame:
    """Return the ranked units of matched targets, with the places of both in this measurement's
    tokens. The places of a unit are NaN if its characters are not a unit in these tokens."""
    ranked = results.influence
    ranked = ranked[(ranked.distant_part == "document") & (ranked.control == "own")]
    ranked = ranked[ranked.selector.isin(settings.selectors)]
    ranked = ranked.rename(columns={"target": "other_target"})
    places = targets[["document", "other_target", "target"]].drop_duplicates()
    ranked = ranked.merge(places, on=["document", "other_target"])
    texts_of = _texts_of(results)
    parts = [ranked[:0]]
    for (number, kind), rows in ranked.groupby(["document", "units"]):
        texts = texts_of[int(number)]
        units = _units(documents[int(number)], str(kind))
        begin, stop = characters(texts, rows.distant_first.to_numpy(), rows.distant_end.to_numpy())
        rows = rows.drop(columns=["distant_first", "distant_end"])
        parts.append(rows.assign(begin=begin, stop=stop).merge(units, "left"))
    return pd.concat(parts)


def boundaries(from_texts: Sequence[str], to_texts: Sequence[str]) -> np.ndarray:
    """Map boundaries between the tokens of one tokenization to those of another.

    Boundary i lies before token i, and the last one after the last token. Return for each boundary
    of `from_texts` the boundary of `to_texts` at the same character, or −1 if there is none.
    """
    from_bounds = np.cumsum([0, *map(len, from_texts)])
    to_bounds = np.cumsum([0, *map(len, to_texts)])
    place = np.searchsorted(to_bounds, from_bounds)
    # A boundary behind the end of the other text is at no character of it: −1.
    is_same = np.append(to_bounds, -1)[place] == from_bounds
    # Tokens that share a character have their boundary inside it. Of several boundaries at one
    # place of the text only the first lies between characters.
    is_first = np.diff(from_bounds, prepend=-1) > 0
    return np.where(is_same & is_first, place, -1)


def characters(
    texts: Sequence[str], first: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each span of tokens (`first` to `end` − 1) its first character and one past its
    last, without white space around it."""
    bounds = np.cumsum([0, *map(len, texts)])
    text = "".join(texts)
    visible = np.array([place for place, letter in enumerate(text) if not letter.isspace()])
    visible_or_end = np.append(visible, len(text)).astype(int)
    begin = visible_or_end[np.searchsorted(visible, bounds[first])]
    index_of_last = np.searchsorted(visible, bounds[end]) - 1
    stop = np.where(index_of_last >= 0, visible_or_end[index_of_last] + 1, 0)
    return begin, stop


def _units(document: Document, kind: str) -> pd.DataFrame:
    """Return all units of a document by their characters (`begin`, `stop`) and tokens, without
    those that are white space alone."""
    units = document.units(kind, 0, len(document.tokens))
    begin, stop = characters(document.texts, units.first, units.end)
    columns = {"begin": begin, "stop": stop, "distant_first": units.first, "distant_end": units.end}
    table = pd.DataFrame(columns)
    return table[table.begin < table.stop]


def _texts_of(results: Results) -> dict[int, list[str]]:
    """Return the texts of the tokens of each document, by its number."""
    tokens = results.tokens.sort_values(["document", "place"])
    return {int(number): list(rows.text) for number, rows in tokens.groupby("document")}


def _is_same_text(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether two texts are the same, as far as both go: a model that takes fewer tokens
    ends a document earlier."""
    # A text may end inside a character, which decodes to the replacement character.
    first_text = "".join(first).rstrip("\ufffd")
    second_text = "".join(second).rstrip("\ufffd")
    if not first_text or not second_text:
        return False
    return first_text.startswith(second_text) or second_text.startswith(first_text)


CHOICE_KEYS = ["document", "units", "selector", "control", "target"]
"""The columns that tell one ranking of units from others."""

WINDOW_SETTINGS = ("long", "short", "stride")
"""Settings that the other measurement determines if both have one tokenizer."""

SHARED_WITH_TARGETS = (*WINDOW_SETTINGS, "draws", "seed")
"""Settings that `targets` takes from the other measurement where the user passed none, besides the
prefix: with others, there are no placebo targets."""

FREE_SETTINGS = {*WINDOW_SETTINGS, "prefix_ids", "ks", "sample", "blocks"}
"""Settings that may be passed with `choices`. The other measurement determines all others."""


def read_other(option: str, other: Any) -> Results | None:
    """Return another measurement, passed as results or as the folder that holds them. `option`: the
    name of the argument, for the error."""
    if isinstance(other, str | Path):
        return read_results(other)
    if other is not None and not isinstance(other, Results):
        raise ConfigError(f"{option}={other!r:.80} must be what measure returned, or its folder")
    return other


def with_settings_of_targets(
    other: Results, settings: Settings, typed: Collection[str], prefix: str
) -> Settings:
    """Return settings with the windows, stride, draws and seed of the measurement whose targets are
    evaluated, so that its placebo targets are evaluated, too. Say which are taken. `typed`: the
    settings that the user passed, which stay; `prefix`: the option."""
    stored = other.meta.windows | other.meta.controls | {"seed": other.meta.seed}
    options = dict(settings.changed_options)
    taken = []
    for name in SHARED_WITH_TARGETS:
        if name in typed or stored.get(name) is None:
            continue
        # Also where the value is equal, as `quick` would change it.
        options[name] = stored[name]
        if stored[name] != getattr(settings, name):
            taken.append(f"{name}={stored[name]}")
    if "prefix_ids" not in typed and prefix == "auto":
        options["prefix_ids"] = tuple(stored.get("prefix", ()))
    if taken:
        say(f"targets: {', '.join(taken)}, as in the other measurement")
    shared = Settings(**options)
    shared.check()
    return shared


def _differing_settings(other: Results, settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, among those that decide which targets have losses and which
    text is the placebo's: name → the value here, and the other's."""
    current = to_json_value(asdict(settings.windows)) | {
        "seed": settings.seed,
        "draws": settings.draws,
        "sample": settings.sample,
        "random_streams": VERSION,
    }
    meta = other.meta
    stored = {"seed": meta.seed} | meta.windows | meta.controls
    stored["random_streams"] = meta.identity["random_streams"]
    return {
        name: (value, stored.get(name))
        for name, value in current.items()
        if stored.get(name) != value
    }


def _is_same_data(other: Results, documents: Documents) -> bool:
    return bool(other.meta.data.get("fingerprint") == documents.fingerprint)


def with_blocks_of(other: Results, documents: Documents, settings: Settings) -> Settings:
    """Return settings with the sample of the other measurement, if all else that decides on blocks
    is the same; otherwise the settings as they are. So the blocks of its targets have losses
    here."""
    with_same_sample = replace(settings, sample=other.meta.windows["sample"])
    if not _is_same_data(other, documents) or _differing_settings(other, with_same_sample):
        return settings
    return with_same_sample


def losses_of(
    other: Results, model: LoadedModel, documents: Documents, settings: Settings
) -> dict[int, pd.DataFrame]:
    """Return the losses of another measurement, by document. DataError if other losses would be
    computed here."""
    meta = other.meta
    if meta.targets.get("only_named"):
        raise DataError("losses: only the blocks of named targets have them; measure without `at`")
    differing = list(_differing_settings(other, settings))
    if not _is_same_data(other, documents):
        differing.insert(0, "text")
    if meta.model.get("fingerprint") != model.fingerprint:
        differing.insert(0, "model")
    elif meta.dtype != model.dtype:
        differing.insert(0, "dtype")
    if differing:
        raise DataError(
            f"losses: they are of another {', '.join(differing)}; pass those of the same, "
            "or omit losses"
        )
    by_document = other.losses.groupby("document", sort=False)
    return {int(number): rows.drop(columns="document") for number, rows in by_document}


def targets_of(
    other: Results, documents: Documents, settings: Settings, with_units: bool = False
) -> Matched:
    """Return the targets of another measurement of the same text, as places in these documents.
    `with_units`: whether the units that it ranked are used, too."""
    windows = settings.windows
    num_ranked = other.influence["rank"].max()
    if with_units and max(settings.ks) > num_ranked:
        raise ConfigError(
            f"ks: {max(settings.ks)} is more than the {num_ranked} units that the other "
            "measurement ranked; pass smaller ks"
        )

    if _is_same_data(other, documents):
        if with_units:
            # `settings_of` has taken the other's settings, so that all its targets are targets
            # here.
            targets = other.targets[other.targets.distant_part == "document"]
            return Matched(targets, other.influence)
        differing = _differing_settings(other, settings)
        targets = given_targets(other.targets, windows, not differing)
        # Another sample leaves out blocks, but the placebo of the remaining ones is the same.
        differences = [
            f"{name}={value} (the other has {other_value})"
            for name, (value, other_value) in differing.items()
            if name != "sample"
        ]
        if differences:
            say(f"no placebo targets, so no net excess, because of {', '.join(differences)}")
        return Matched(targets, other.influence, has_other_windows=bool(differing))

    if not is_other_tokenizer(other, documents):
        text = f"{other.meta.data.get('source')}, which differs from {documents.name}"
        raise DataError(f"the targets were chosen in {text}; pass the same text and its options")
    if with_units:
        matched = match_choices(other, documents, settings)
    else:
        matched = match_targets(other, documents, windows)
    if not len(matched.targets):
        raise DataError(f"no target of the other measurement remains: {matched}")
    say(str(matched))
    return matched


@dataclass(frozen=True)
class Choices:
    """The units that another model ranked for each target, in the document and in an unrelated
    text."""

    ranked: dict[tuple[Any, ...], np.ndarray]
    """Values of `CHOICE_KEYS` → an array with a row for each rank: first place of the unit, one
    past its last, influence."""

    fingerprint: str
    """A hash of the places of all units, by rank, which identifies the choices."""

    model: dict[str, Any]
    """Name and fingerprint of the model that chose."""

    has_unrelated: bool
    """Whether units of unrelated texts were ranked, too."""

    @staticmethod
    def of(results: Results, matched: Matched) -> Choices:
        """Take the ranked units of targets in the documents' own distant context, and those of the
        first unrelated text."""
        influence = matched.influence[matched.influence.distant_part == "document"]
        if not len(influence):
            raise DataError("the other measurement has no ranked units; measure it again")
        columns = ["distant_first", "distant_end", "influence"]
        # Rows of one ranking are neighbours, in the order of rank. They are split where the next
        # ranking begins.
        rows = influence.sort_values([*CHOICE_KEYS, "rank"])
        is_first_rank = ~rows.duplicated(CHOICE_KEYS).to_numpy()
        keys = rows.loc[is_first_rank, CHOICE_KEYS].itertuples(index=False, name=None)
        groups = np.split(rows[columns].to_numpy(float), np.flatnonzero(is_first_rank)[1:])
        ranked = dict(zip(keys, groups, strict=True))
        places = rows[[*CHOICE_KEYS, "distant_first", "distant_end"]]
        digest = hashlib.sha256(places.to_csv(index=False).encode())
        model = {name: results.meta.model.get(name) for name in ("name", "fingerprint")}
        has_unrelated = bool((influence.control == "unrelated").any())
        return Choices(ranked, digest.hexdigest(), model, has_unrelated)

    def pick(
        self,
        document: int,
        labels: RankingLabels,
        targets: Sequence[int],
        units: Units,
        offset: int,
    ) -> Choice:
        """Return the ranked units of targets, as a selector would.

        Args:
            document: Number of the document.
            labels: Kind of units, selector and control.
            targets: Places of the targets in the document.
            units: All distant units of the block, by their index among the distant tokens.
            offset: Place of the first distant token in the document.
        """
        all_bounds = zip(units.first, units.end, strict=True)
        unit_of_bounds = {bounds: unit for unit, bounds in enumerate(all_bounds)}
        unit_TK = []
        influence_TK = []
        for target in targets:
            key = (document, labels.units, labels.selector, labels.control, target)
            first_K, end_K, influence_K = self.ranked[key].T
            bounds = zip(first_K.astype(int) - offset, end_K.astype(int) - offset, strict=True)
            unit_TK.append([unit_of_bounds[pair] for pair in bounds])
            influence_TK.append(influence_K)
        chosen_TK = np.array(unit_TK)
        score_TU = np.zeros((len(chosen_TK), len(units)))
        np.put_along_axis(score_TU, chosen_TK, np.array(influence_TK), axis=1)
        return Choice(chosen_TK, np.array(influence_TK), score_TU)


def settings_of(results: Results, passed: dict[str, Any], has_other_tokenizer: bool) -> Settings:
    """Return the settings of the other measurement, so that windows, targets and unrelated texts
    agree. `passed`: the settings of this call that are not defaults. `has_other_tokenizer`: the
    other's windows are counted in other tokens, so that those of this call hold."""
    meta = results.meta
    free_settings = FREE_SETTINGS
    if not has_other_tokenizer:
        free_settings = FREE_SETTINGS - {*WINDOW_SETTINGS}
    determined = [name for name in passed if name not in free_settings]
    if determined:
        names = ", ".join(sorted(determined))
        raise ConfigError(f"{names}: `choices` takes this from the other measurement; omit it")
    if meta.identity["random_streams"] != VERSION and not has_other_tokenizer:
        raise DataError("choices: their unrelated texts differ from today's; measure again")

    windows = meta.windows
    if has_other_tokenizer:
        names_of_windows = {*WINDOW_SETTINGS, "prefix_ids"}
        window_settings = {n: value for n, value in passed.items() if n in names_of_windows}
    else:
        window_settings = {name: windows[name] for name in WINDOW_SETTINGS}
        window_settings["prefix_ids"] = tuple(windows["prefix"])
        window_settings["sample"] = windows["sample"]
    settings = Settings(
        **window_settings,
        distant_states=windows["distant_states"],
        replacements=windows.get("replacements"),
        units=tuple(meta.units),
        selectors=tuple(name for name in meta.selectors if find_selector(name).draws == 1),
        ks=tuple(np.atleast_1d(passed.get("ks", meta.ks)).tolist()),
        control=meta.controls["control"],
        draws=1,
        halves=0,
        seed=meta.seed,
    )
    settings.check()
    return settings
