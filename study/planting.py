"""Measure how well selectors find dependencies that are planted into held-out documents:

python -m study.planting MODEL --long N --short N --out OUT [options of `olmo-sparsity measure`]

MODEL was trained with data.planted. OUT becomes a measurement of the documents with marks and,
after them, of the same ones without; OUT_planted.csv tells of each selector how well it recovers
the gap, and its `hit_rate`: the share of the planted tokens in its first k units.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity import Windows, load_model, measure, open_documents
from olmo_sparsity.analysis.inputs.documents import Document, Documents
from olmo_sparsity.analysis.measurement.plan import MeasureRequest
from olmo_sparsity.analysis.models.load import LoadedModel
from olmo_sparsity.analysis.results.statistics import (
    GROUPS,
    KEYS,
    interval,
    resample_weights,
    summarize,
)
from olmo_sparsity.command.cli import build_parser
from olmo_sparsity.config.run import load_saved_config
from olmo_sparsity.data.planting import Planting
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.settings import given_options
from olmo_sparsity.streams import stream
from study.command import enter, run_command

READ = ("field", "group_field", "split_at", "control_tokens")
LOADED = ("device", "dtype", "device_map")
SHOWN = [*GROUPS[1:], "hit_rate", "recovery", "foreign", "excess", "excess_low", "excess_high"]


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
            rows.append((units, selector, k, *rate))
    return pd.DataFrame(rows, columns=[*GROUPS[1:], "hit_rate", "hit_low", "hit_high"])


def measure_planted(
    model: str, out: Path, *, long: int, short: int, text: str | None = None, **options: Any
) -> pd.DataFrame:
    """Return the summary of the documents with marks. `options`: of `measure`."""
    loaded = load_model(model, **{n: options.pop(n) for n in LOADED if n in options})
    reading = {n: options.pop(n) for n in (*READ, "max_documents") if n in options}
    seed = options.get("seed", 0)
    documents, planted = open_planted(loaded, text, Windows(long, short), seed=seed, **reading)
    results = measure(loaded, documents, at=-1, long=long, short=short, out=out, **options)
    targets = results.targets[results.targets.document.isin(planted.document)]
    hits = hit_rates(results.influence, planted, results.meta.ks)
    summary = summarize(results.losses, targets, results.recovery)
    return summary.merge(hits, how="left", on=GROUPS[1:])


def run(options: argparse.Namespace, words: list[str]) -> None:
    measured = build_parser().parse_args(["measure", options.model, *options.words])
    names = MeasureRequest.names() | {"text"}
    given = given_options(measured, names - {"model", "documents", "out", "at", "shard", "command"})
    if not (isinstance(given.get("long"), int) and "short" in given):
        raise ConfigError("planting requires --long N and --short N")
    found = measure_planted(options.model, Path(measured.out), **given)
    found.to_csv(f"{measured.out}_planted.csv", index=False)
    print(found[SHOWN].round(2).to_string(index=False))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m study.planting", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="--option …")
    return run_command(parser, run, words, again="goes on")


if __name__ == "__main__":
    enter(main)
