"""Measure how well selectors find dependencies that are planted into held-out documents:

python -m study.planting MODEL --long N --short N --out OUT [options of `olmo-sparsity measure`]

MODEL was trained with data.planted. OUT becomes a measurement of the target sets `planted` and
`planted_removed` (the same text without marks), with `hit_rate` in its summary: of the planted
tokens, the share in the selector's first k units. `planted.parquet` holds their places.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from olmo_sparsity import Windows, load_model, measure, open_documents, read_results
from olmo_sparsity.analysis.inputs.documents import Document, Documents
from olmo_sparsity.analysis.measurement.plan import MeasureRequest
from olmo_sparsity.analysis.models.load import LoadedModel
from olmo_sparsity.analysis.results.results import FILES, Results
from olmo_sparsity.analysis.results.statistics import (
    GROUPS,
    KEYS,
    interval,
    mean_lds,
    pair,
    resample_weights,
    summarize_pairs,
)
from olmo_sparsity.analysis.results.summary import format_summary
from olmo_sparsity.analysis.results.tables import SCHEMAS, to_table, write_table
from olmo_sparsity.command.cli import build_parser
from olmo_sparsity.config.run import load_saved_config
from olmo_sparsity.data.planting import Planting
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.io import MANIFEST, write_manifest
from olmo_sparsity.settings import given_options
from olmo_sparsity.streams import stream
from study.command import enter, run_command

SETS = {
    "planted": "planted dependency",
    "planted_removed": "planted dependency, taken out",
}

LEARNED_NATS = 0.5
"""Least mean gap from planted tokens at which a selector can find them."""

READ = ("field", "group_field", "split_at", "control_tokens")
LOADED = ("device", "dtype", "device_map")


# --- text -----------------------------------------------------------------------------------------


def plant_dependencies(
    documents: Documents, planting: Planting, windows: Windows, seed: int = 0
) -> tuple[Documents, pd.DataFrame]:
    """Cut each document that is long enough to one target with its long window, in two versions:
    with K marks at random far places that determine the target, and, after all of those, without
    them. The places are a table of `document` and `place`."""
    long, num_far = windows.first_target, windows.num_far
    if len(planting.marks_KM) > num_far:
        raise DataError(f"long={long} has {num_far} distant tokens, fewer than are planted")
    with_marks, without, of_document = list[Document](), list[Document](), list[pd.DataFrame]()
    for document in documents:
        if len(document.tokens) <= long:
            continue
        text = document.tokens[: long + 1]
        generator = stream(seed, "planted", document.number)
        planted, places_K = planting.plant(text, generator, 0, num_far, long - 1)
        bare = np.where(np.isin(np.arange(len(text)), places_K), planting.clear(text), planted)
        group = document.group or f"document {document.number}"
        same = replace(document, group=group, tokens=planted, may_replace=False)
        of_document.append(pd.DataFrame({"document": len(with_marks), "place": places_K}))
        with_marks.append(same)
        without.append(replace(same, tokens=bare, may_replace=True))
    if len(with_marks) < 2:
        raise DataError(f"{documents.name}: {len(with_marks)} documents are longer than {long=}")
    items = [replace(d, number=number) for number, d in enumerate([*with_marks, *without])]
    name = f"{documents.name}, {len(planting.marks_KM)} tokens planted"
    left = len(documents) - len(with_marks)
    places = pd.concat(of_document, ignore_index=True)
    return replace(documents, name=name, items=items, num_too_short=left), places


def open_planted(
    model: LoadedModel,
    text: str | None,
    windows: Windows,
    max_documents: int | None = None,
    seed: int = 0,
    **reading: Any,
) -> tuple[Documents, pd.DataFrame]:
    """Plant what the model was trained on into a text (None: what its run held out)."""
    config, tokenizer = Path(model.name) / "config.yaml", model.tokenizer
    if tokenizer is None or not config.exists():
        raise DataError(f"model={model.name} is not a run trained with data.planted")
    planting = Planting.of(load_saved_config(config).data.planted, tokenizer)
    documents = open_documents(text, model, max_documents, **reading)
    return plant_dependencies(documents, planting, windows, seed)


# --- results --------------------------------------------------------------------------------------


def summarize_planted(
    losses: pd.DataFrame, targets: pd.DataFrame, recovery: pd.DataFrame, seed: int = 0
) -> pd.DataFrame:
    """`summarize`, of any results. Texts without marks have no gap, so their recovery is in units
    of the mean gap with marks."""
    rows = pair(losses, targets, recovery)
    removed = rows.target_set == "planted_removed"
    rows.loc[removed, "gap"] = rows.gap[rows.target_set == "planted"].mean()
    return summarize_pairs(rows, seed)


def hit_rates(
    influence: pd.DataFrame, planted: pd.DataFrame, ks: list[int], seed: int = 0
) -> pd.DataFrame:
    """The share of a target's planted tokens that are in the selector's first k units."""
    num_planted = planted.groupby("document").size()
    own = influence[(influence.control == "own") & influence.document.isin(num_planted.index)]
    rows = []
    for (units, selector), ranked in own.groupby(["units", "selector"]):
        marked = ranked.merge(planted, on="document")
        marked = marked[(marked.far_first <= marked.place) & (marked.place < marked.far_end)]
        best = marked.groupby([*KEYS, "place"])["rank"].min()
        documents = num_planted.reindex(ranked.document.unique())
        for k in ks:
            hits = best[best <= k].groupby("document").size().reindex(documents.index, fill_value=0)
            shares_D = (hits / documents).to_numpy()
            resampled_R = resample_weights(len(shares_D), seed) @ shares_D / len(shares_D)
            rate = interval(resampled_R, shares_D.mean())
            rows.append(("planted", units, selector, k, *rate))
    return pd.DataFrame(rows, columns=[*GROUPS, "hit_rate", "hit_low", "hit_high"])


def as_planted(results: Results, planted: pd.DataFrame) -> Results:
    """Name the target sets by whether the document holds marks, and summarize them."""
    has_marks = results.targets.document.isin(planted.document)
    sets = np.where(has_marks, "planted", "planted_removed")
    targets = results.targets.assign(target_set=sets)
    cost = ["units", "selector", "token_forwards_per_target"]
    summary = summarize_planted(results.losses, targets, results.recovery)
    summary = summary.merge(results.summary[cost].drop_duplicates(), how="left", on=cost[:2])
    hits = hit_rates(results.influence, planted, results.meta.ks)
    summary = summary.merge(hits, how="left", on=GROUPS)
    summary = summary.merge(mean_lds(targets, results.lds), how="left", on=GROUPS[:3])
    return replace(results, targets=targets, summary=summary)


def write_planted(measured: Path, planted: pd.DataFrame, out: Path) -> Results:
    """Write a measurement of planted documents to `out`, with `planted.parquet`."""
    results = as_planted(read_results(measured), planted)
    (out / MANIFEST).unlink(missing_ok=True)
    for name in FILES:
        shutil.copy(measured / name, out / name)
    for name in ("targets", "summary"):
        rows = getattr(results, name)
        columns = {column: rows[column].tolist() for column in SCHEMAS[name].names}
        table = to_table(name, columns, name)
        for column in rows.columns.difference(table.column_names, sort=False):
            table = table.append_column(column, pa.array(rows[column], from_pandas=True))
        write_table(out / f"{name}.parquet", table)
    planted.to_parquet(out / "planted.parquet", index=False)
    write_manifest(out, [*FILES, "planted.parquet"])
    return results


def describe_planted(results: Results) -> str:
    """The summary as text."""
    gap = results.losses.loss_short - results.losses.loss_long
    sets = results.targets.set_index("document").target_set
    nats = gap[results.losses.document.map(sets) == "planted"].mean()
    lines = [f"planted tokens lower the loss by {nats:.2f} nats"]
    if nats < LEARNED_NATS:
        lines.append("this model does not use the planted tokens, so no selector can find them")
        return "\n".join(lines)
    for name, title in SETS.items():
        rows = results.summary[results.summary.target_set == name]
        lines.append(format_summary(rows, title))
        if name == "planted":
            found = rows.pivot(index=["selector", "units"], columns="k", values="hit_rate")
            lines += ["planted tokens found, by k", found.round(2).to_string()]
    return "\n".join(lines)


# --- the command ----------------------------------------------------------------------------------


def measure_planted(
    model: str, out: Path, *, long: int, short: int, text: str | None = None, **options: Any
) -> Results:
    """`options`: of `measure`. The same call resumes."""
    loaded = load_model(model, **{n: options.pop(n) for n in LOADED if n in options})
    reading = {n: options.pop(n) for n in (*READ, "max_documents") if n in options}
    seed = options.get("seed", 0)
    documents, planted = open_planted(loaded, text, Windows(long, short), seed=seed, **reading)
    measured = out / "measured"
    measure(loaded, documents, at=-1, long=long, short=short, out=measured, **options)
    return write_planted(measured, planted, out)


def run(options: argparse.Namespace, words: list[str]) -> None:
    measured = build_parser().parse_args(["measure", options.model, *options.words])
    names = MeasureRequest.names() | {"text"}
    given = given_options(measured, names - {"model", "documents", "out", "at", "shard", "command"})
    if not (isinstance(given.get("long"), int) and "short" in given):
        raise ConfigError("planting requires --long N and --short N")
    print(describe_planted(measure_planted(options.model, Path(measured.out), **given)))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m study.planting", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="--option …")
    return run_command(parser, run, words, again="goes on")


if __name__ == "__main__":
    enter(main)
