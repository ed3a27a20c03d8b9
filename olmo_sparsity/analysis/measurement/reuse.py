"""Reuse another measurement: its losses, its targets, or the units that its model ranked. A unit
that lowers a loss of one model by chance lowers that of another no more than any other unit does,
so recovery by ranked units needs no placebo."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.targets import given_targets
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.results import Results, read_results
from olmo_sparsity.analysis.results.statistics import KEYS
from olmo_sparsity.analysis.results.tables import plain
from olmo_sparsity.analysis.selectors.influence import Choice, find_selector
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.streams import VERSION
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.windows import Units, Windows, span_width

RANKED_BY = [*KEYS, "units", "selector"]


@dataclass(frozen=True)
class Matched:
    """Targets and ranked units of another measurement, as places in this one's documents."""

    targets: pd.DataFrame
    influence: pd.DataFrame
    counts: dict[str, int] = field(default_factory=dict)
    """What is left out, with another tokenizer; see docs/measure.md."""

    def __str__(self) -> str:
        counts = [f"{number:,} {name.replace('_', ' ')}" for name, number in self.counts.items()]
        return f"another tokenizer chose the targets: {', '.join(counts)} (docs/measure.md)"


def is_other_tokenizer(results: Results, documents: Documents) -> bool:
    """Return whether a document with targets has the same text here, in other tokens."""
    for number, there in results.tokens.sort_values("place").groupby("document"):
        here = documents[int(number)] if number < len(documents) else Document(np.array([]))
        size = min(len(there), len(here.tokens))
        is_same = np.array_equal(there.token_id[:size], here.tokens[:size])
        if not is_same and _is_same_text(list(there.text), here.texts):
            return True
    return False


def match_targets(results: Results, documents: Documents, windows: Windows) -> Matched:
    """Match the targets with the documents' own distant context."""
    targets = results.targets[results.targets.far_part == "document"]
    matched, texts_of, num_elsewhere = [targets[:0].assign(there=0)], _texts_of(results), 0
    for number, rows in targets.groupby("document"):
        texts = texts_of[int(number)]
        here = documents[int(number)] if number < len(documents) else Document(np.array([]))
        if not _is_same_text(texts, here.texts):
            num_elsewhere += rows.target.nunique()
            continue
        place_B = boundaries(texts, here.texts)
        of_here = {"target": place_B[rows.target], "end": place_B[rows.end]}
        matched.append(rows.assign(there=rows.target, **of_here))
    found = pd.concat(matched)
    is_cut = (found.target < 0) | (found.end <= found.target)
    start = windows.start_of(found.target)
    is_outside = ~is_cut & (
        (found.target < windows.first_target) | (start != windows.start_of(found.end - 1))
    )
    by_target = found.assign(cut=is_cut, outside=is_outside).drop_duplicates(["document", "there"])
    kept = found[~is_cut & ~is_outside]
    counts = {
        "targets": len(kept.drop_duplicates(KEYS)),
        "of_targets": len(by_target) + num_elsewhere,
        "targets_in_other_text": num_elsewhere,
        "targets_cut_otherwise": int(by_target.cut.sum()),
        "targets_outside_windows": int(by_target.outside.sum()),
    }
    return Matched(kept, results.influence[:0], counts)


def match_choices(results: Results, documents: Documents, settings: Settings) -> Matched:
    """Match targets, and the units that rank first among those that are distant here, too, as many
    as `ks` needs. A target for which fewer remain is left out. Units of unrelated texts are not
    matched."""
    if tokens := [kind for kind in results.meta.units if span_width(kind) is not None]:
        remedy = "rank --units words, sentences, paragraphs or your own there"
        raise ConfigError(f"choices: {', '.join(tokens)} are of another tokenizer; {remedy}")
    windows, most = settings.windows, max(settings.ks)
    found, texts_of = match_targets(results, documents, windows), _texts_of(results)
    ranked = results.influence
    ranked = ranked[(ranked.far_part == "document") & (ranked.control == "own")]
    ranked = ranked[ranked.selector.isin(settings.selectors)]
    of_here = found.targets[["document", "there", "target"]].drop_duplicates()
    ranked = ranked.rename(columns={"target": "there"}).merge(of_here, on=["document", "there"])
    matched = [ranked[:0]]
    for (number, kind), rows in ranked.groupby(["document", "units"]):
        texts = texts_of[int(number)]
        units = _units(documents[int(number)], str(kind))
        keys = characters(texts, rows.far_first.to_numpy(), rows.far_end.to_numpy())
        rows = rows.drop(columns=["far_first", "far_end"])
        matched.append(rows.assign(begin=keys[0], stop=keys[1]).merge(units, "left"))
    rows = pd.concat(matched)
    start = windows.start_of(rows.target)
    is_unit = rows.far_first.notna()
    is_far = rows.far_first >= windows.first_far(start)
    is_far &= rows.far_end <= start - windows.short
    counts = found.counts | {
        "of_units": len(rows),
        "units_cut_otherwise": int((~is_unit).sum()),
        "units_not_distant": int((is_unit & ~is_far).sum()),
    }
    rows = rows[is_far].astype({"far_first": int, "far_end": int}).sort_values([*RANKED_BY, "rank"])
    rows = rows.assign(rank=rows.groupby(RANKED_BY).cumcount() + 1)
    rows = rows[rows["rank"] <= most]
    num_full = rows[rows["rank"] == most].groupby(KEYS).size()
    full = num_full.index[num_full == len(settings.units) * len(settings.selectors)]
    targets, rows = (
        table[pd.MultiIndex.from_frame(table[KEYS]).isin(full)] for table in (found.targets, rows)
    )
    counts |= {"targets": len(full), "targets_with_few_units": counts["targets"] - len(full)}
    return Matched(targets, rows, counts)


def boundaries(there: Sequence[str], here: Sequence[str]) -> np.ndarray:
    """Return for each boundary between tokens there (before the first, …, after the last) the one
    here at the same character, or −1. Tokens that share a character have their boundary inside it:
    only the first boundary at a character is one of characters."""
    bounds, others = (np.cumsum([0, *map(len, texts)]) for texts in (there, here))
    place = np.searchsorted(others, bounds)
    is_same = np.append(others, -1)[place] == bounds
    is_first = np.diff(bounds, prepend=-1) > 0
    return np.where(is_same & is_first, place, -1)


def characters(
    texts: Sequence[str], first: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first character of each span of tokens and one past its last, without white space
    around it."""
    bounds = np.cumsum([0, *map(len, texts)])
    text = "".join(texts)
    solid = np.array([i for i, letter in enumerate(text) if not letter.isspace()] + [len(text)])
    begin = solid[np.searchsorted(solid[:-1], bounds[first])]
    last = np.searchsorted(solid[:-1], bounds[end]) - 1
    return begin, np.where(last >= 0, solid[last] + 1, 0)


def _units(document: Document, kind: str) -> pd.DataFrame:
    """All units of a document that are more than white space, by their characters."""
    units = document.units(kind, 0, len(document.tokens))
    begin, stop = characters(document.texts, units.first, units.end)
    columns = {"begin": begin, "stop": stop, "far_first": units.first, "far_end": units.end}
    table = pd.DataFrame(columns)
    return table[table.begin < table.stop]


def _texts_of(results: Results) -> dict[int, list[str]]:
    """The text of each token, by document."""
    tokens = results.tokens.sort_values(["document", "place"])
    return {int(number): list(rows.text) for number, rows in tokens.groupby("document")}


def _is_same_text(there: Sequence[str], here: Sequence[str]) -> bool:
    """Return whether one text begins the other: a shorter context ends a document earlier."""
    one, other = ("".join(texts).rstrip("\ufffd") for texts in (there, here))
    return bool(one) and bool(other) and (one.startswith(other) or other.startswith(one))


OF_CHOICE = ["document", "units", "selector", "control", "target"]
OF_WINDOWS = ("long", "short", "stride")
"""Settings that the other measurement determines if both have one tokenizer."""

FREE = {*OF_WINDOWS, "prefix_ids", "ks", "sample", "blocks"}
"""It always determines all others."""


def read_other(name: str, given: Any) -> Results | None:
    """`name`: the option that names the other measurement."""
    if isinstance(given, str | Path):
        return read_results(given)
    if given is not None and not isinstance(given, Results):
        raise ConfigError(f"{name}={given} must be another measurement or its folder")
    return given


def _differences(given: Results, settings: Settings) -> list[str]:
    """Settings that decide which targets have losses and which text is the placebo's."""
    ours = plain(asdict(settings.windows)) | {"seed": settings.seed, "draws": settings.draws}
    ours |= {"sample": settings.sample, "random_streams": VERSION}
    meta = given.meta
    theirs = {"seed": meta.seed} | meta.windows | meta.controls
    theirs["random_streams"] = meta.identity["random_streams"]
    return [name for name, value in ours.items() if theirs.get(name) != value]


def with_blocks_of(given: Results, documents: Documents, settings: Settings) -> Settings:
    """Sample the blocks of the other measurement, if it cut and drew the same text likewise."""
    same = replace(settings, sample=given.meta.windows["sample"])
    is_same = given.meta.data.get("fingerprint") == documents.fingerprint
    return same if is_same and not _differences(given, same) else settings


def losses_of(
    given: Results, model: LoadedModel, documents: Documents, settings: Settings
) -> dict[int, pd.DataFrame]:
    """The losses of each document there, which must be what would be computed here."""
    meta = given.meta
    if meta.targets.get("only_named"):
        raise DataError("losses: only the blocks of named targets have them; measure without `at`")
    differ = _differences(given, settings)
    if meta.data.get("fingerprint") != documents.fingerprint:
        differ.insert(0, "text")
    if meta.model.get("fingerprint") != model.fingerprint:
        differ.insert(0, "model")
    elif meta.dtype != model.dtype:
        differ.insert(0, "dtype")
    if differ:
        raise DataError(f"losses: they are of another {', '.join(differ)}; pass matching ones")
    by_document = given.losses.groupby("document", sort=False)
    return {int(number): rows.drop(columns="document") for number, rows in by_document}


def targets_of(
    given: Results, documents: Documents, settings: Settings, with_units: bool = False
) -> Matched:
    """The targets of another measurement of the same text; `with_units`: and what it ranked."""
    windows = settings.windows
    most = given.influence["rank"].max()
    if with_units and max(settings.ks) > most:
        raise ConfigError(f"ks: the other measurement ranked {most} units")
    if given.meta.data.get("fingerprint") == documents.fingerprint:
        targets = given.targets[given.targets.far_part == "document"]
        if not with_units:
            differ = _differences(given, settings)
            targets = given_targets(given.targets, windows, not differ)
            if differ:
                names = ", ".join(name for name in differ if name != "sample")
                say(f"no placebo targets, so no net excess: {names} differ from the other's")
        return Matched(targets, given.influence)
    if not is_other_tokenizer(given, documents):
        source = f"{given.meta.data.get('source')}, which differs from {documents.name}"
        raise DataError(f"the targets were chosen in {source}; pass the same text and its options")
    matched = (
        match_choices(given, documents, settings)
        if with_units
        else match_targets(given, documents, windows)
    )
    if not len(matched.targets):
        raise DataError(f"no target of the other measurement remains: {matched}")
    say(str(matched))
    return matched


@dataclass(frozen=True)
class Choices:
    """The ranked units of each target, in the document and in an unrelated text."""

    ranked: dict[tuple[Any, ...], np.ndarray]  # `OF_CHOICE` → (first, end, influence) by rank
    fingerprint: str
    model: dict[str, Any]  # name and fingerprint of the model that chose
    has_unrelated: bool  # whether units of unrelated texts were ranked, too

    @staticmethod
    def of(results: Results, matched: Matched) -> Choices:
        """Keep units of documents' own distant context, and of the first unrelated text."""
        own = matched.influence[matched.influence.far_part == "document"]
        if not len(own):
            raise DataError("the other measurement has no ranked units; measure it again")
        columns = ["far_first", "far_end", "influence"]
        rows = own.sort_values([*OF_CHOICE, "rank"])
        is_first = ~rows.duplicated(OF_CHOICE).to_numpy()  # of the ranks of a target
        keys = rows.loc[is_first, OF_CHOICE].itertuples(index=False, name=None)
        groups = np.split(rows[columns].to_numpy(float), np.flatnonzero(is_first)[1:])
        ranked = dict(zip(keys, groups, strict=True))
        digest = hashlib.sha256(rows[[*OF_CHOICE, *columns[:2]]].to_csv(index=False).encode())
        model = {name: results.meta.model.get(name) for name in ("name", "fingerprint")}
        has_unrelated = bool((own.control == "foreign").any())
        return Choices(ranked, digest.hexdigest(), model, has_unrelated)

    def pick(
        self, document: int, about: dict[str, Any], starts: Sequence[int], units: Units, offset: int
    ) -> Choice:
        """`starts`: places of the targets; `offset`: place of the first distant token."""
        numbers = {pair: i for i, pair in enumerate(zip(units.first, units.end, strict=True))}
        unit_TK, influence_TK = [], []
        for start in starts:
            key = (document, about["units"], about["selector"], about["control"], start)
            first_K, end_K, influence_K = self.ranked[key].T
            bounds = zip(first_K.astype(int) - offset, end_K.astype(int) - offset, strict=True)
            unit_TK.append([numbers[pair] for pair in bounds])
            influence_TK.append(influence_K)
        chosen_TK = np.array(unit_TK)
        score_TU = np.zeros((len(chosen_TK), len(units)))
        np.put_along_axis(score_TU, chosen_TK, np.array(influence_TK), axis=1)
        return Choice(chosen_TK, np.array(influence_TK), score_TU)


def settings_of(results: Results, given: dict[str, Any], is_other: bool) -> Settings:
    """Take the other measurement's settings, so that windows, targets and unrelated texts agree.
    `is_other`: windows are in tokens of another tokenizer, and those given here hold."""
    meta = results.meta
    if wrong := [n for n in given if n not in FREE or (n in OF_WINDOWS and not is_other)]:
        names = ", ".join(sorted(wrong))
        raise ConfigError(f"{names}: `choices` takes this from the other measurement; omit it")
    if meta.identity["random_streams"] != VERSION and not is_other:
        raise DataError("choices: their unrelated texts differ from today's; measure again")
    windows = meta.windows
    of_windows = {name: windows[name] for name in OF_WINDOWS}
    of_windows |= {"prefix_ids": tuple(windows["prefix"]), "sample": windows["sample"]}
    if is_other:
        of_windows = {n: given[n] for n in (*OF_WINDOWS, "prefix_ids") if n in given}
    settings = Settings(
        **of_windows,
        far_states=windows["far_states"],
        replacements=windows.get("replacements"),
        units=tuple(meta.units),
        selectors=tuple(name for name in meta.selectors if find_selector(name).draws == 1),
        ks=tuple(np.atleast_1d(given.get("ks", meta.ks)).tolist()),
        control=meta.controls["control"],
        draws=1,
        halves=0,
        seed=meta.seed,
    )
    settings.check()
    return settings
