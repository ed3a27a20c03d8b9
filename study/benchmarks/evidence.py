"""Steps of study/Makefile that are not commands of the package:

python -m study.benchmarks.evidence cut FOLDER OUT.jsonl
python -m study.benchmarks.evidence begin TEXT OUT.jsonl [--characters N] [--only-long] [--skip N]
python -m study.benchmarks.evidence losses TEXT OUT.csv MODEL…
python -m study.benchmarks.evidence gains OUT.csv RESULTS…
python -m study.benchmarks.evidence collect OUT.csv RESULTS…
python -m study.benchmarks.evidence agreement OUT.csv RESULTS…
"""

from __future__ import annotations

import argparse
import json
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from olmo_sparsity import read_results
from olmo_sparsity.analysis.results.loss_statistics import LCL_NATS, LSD_NATS
from olmo_sparsity.base.streams import stream
from olmo_sparsity.config.text import CorpusConfig, DataConfig
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.models.load import load_model
from olmo_sparsity.models.losses import token_losses
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.text.record_files import read_file
from olmo_sparsity.text.records import TextRecord

# --- texts ----------------------------------------------------------------------------------------


def cut(folder: Path, out: Path, num_characters: int) -> int:
    """Write the beginnings of held-out documents as a text, and return how many are as long.

    Measuring a document takes as long as it has windows; one target of each needs its beginning.
    """
    shards = open_shards(DataConfig(folder=str(folder)), "heldout")
    documents = (shards.document(index) for index in range(len(shards)))
    texts = [shards.tokenizer.decode(tokens.tolist()) for tokens in documents]
    long = [{"text": text[:num_characters]} for text in texts if len(text) >= num_characters]
    out.write_text("".join(json.dumps(row) + "\n" for row in long), encoding="utf-8")
    return len(long)


def read_texts(paths: list[Path]) -> list[str]:
    records = chain.from_iterable(read_file(path, CorpusConfig("files")) for path in paths)
    return [record.text for record in records if isinstance(record, TextRecord)]


def begin(
    text: Path, out: Path, num_characters: int, only_long: bool = False, skip: int = 0
) -> int:
    """Write the beginning of each document of a text, so that all count about equally.

    `only_long` leaves out shorter documents, `skip` the first of the others. The Python files of a
    folder are in random order."""
    least, paths = num_characters if only_long else 0, [text]
    if text.is_dir():
        found = sorted(text.rglob("*.py"))
        paths = [found[i] for i in stream(0, "files").permutation(len(found))]
    texts = [text for text in read_texts(paths) if len(text) >= least][skip:]
    rows = (json.dumps({"text": text[:num_characters]}) + "\n" for text in texts)
    out.write_text("".join(rows), encoding="utf-8")
    return len(texts)


def gains(folders: list[Path]) -> pd.DataFrame:
    """Return the loss reductions by distant text, a row for each document: sums over its measured
    targets. Key tokens are those of LongPPL; `small` counts gains of at most 0.1 nats."""
    tables = {}
    for folder in folders:
        losses = pd.read_parquet(folder / "losses.parquet")
        gain = losses.loss_short - losses.loss_long
        key = (gain > LSD_NATS) & (losses.loss_long < LCL_NATS)
        unrelated = losses.loss_short - losses.placebo_loss_long
        counted = pd.DataFrame(
            {
                "targets": 1,
                "gain": gain,
                "gain_unrelated": unrelated,
                "key": key.astype(int),
                "key_unrelated": (unrelated > LSD_NATS) & (losses.placebo_loss_long < LCL_NATS),
                "small": gain <= 0.1,
            }
        )
        tables[folder.name] = counted.groupby(losses.document).sum()
    return pd.concat(tables, names=["measurement"]).reset_index()


FIRST, LENGTH, BATCH = 150, 32, 64


def losses_of(model: str, text: str, edges: list[int], num_documents: int) -> pd.DataFrame:
    """Return the mean loss of each document between two positions, reading it once from its
    beginning; documents of fewer tokens are left out."""
    loaded = load_model(model)
    places_1L = torch.arange(edges[-1] - 1)[None]
    rows = []
    documents = open_documents(text, loaded, num_documents)
    for document in (document for document in documents if len(document.tokens) >= edges[-1]):
        tokens_1L = torch.from_numpy(document.tokens[: edges[-1]].astype(np.int64))[None]
        with torch.no_grad():  # nll_L[i] is of token i + 1
            losses_1L = token_losses(loaded.model, tokens_1L[:, :-1], places_1L, tokens_1L[:, 1:])
        nll_L = losses_1L[0].double()
        means = {f"{a}-{b}": nll_L[max(a - 1, 0) : b - 1].mean().item() for a, b in pairwise(edges)}
        rows.append({"model": Path(model).name, "document": document.number, **means})
    return pd.DataFrame(rows)


# --- measurements ---------------------------------------------------------------------------------

COLUMNS = [
    *("target_set", "units", "selector", "k", "recovery", "low", "high"),
    *("unrelated", "unrelated_low", "unrelated_high", "excess", "excess_low", "excess_high"),
    *("excess_nats", "excess_nats_low", "excess_nats_high"),
    *("removal", "removal_low", "removal_high", "gap", "num_targets", "num_documents"),
]


def collect(folders: list[Path]) -> pd.DataFrame:
    """Return the summaries, with the name, induction check and commit of each measurement."""
    tables = []
    for folder in sorted(folders):
        results = read_results(folder)
        table = results.summary.reset_index()[COLUMNS]
        table.insert(0, "measurement", folder.name)
        check, model = results.meta.induction, results.meta.model
        table["induction_share"] = check["drop"] / check["loss_first"]
        table["positions"] = model["trained"].get("positions", "unknown")
        table["seed"] = model["trained"].get("seed", 0)
        table["drop"], table["loss_long"] = check["drop"], results.losses.loss_long.mean()
        table["num_parameters"], table["commit"] = model["num_parameters"], results.meta.commit
        tables.append(table)
    return pd.concat(tables).round(4)


def agreement(folders: list[Path]) -> pd.DataFrame:
    """Of each two measurements, over the targets of both: the rank correlation of the effects of
    units, and the share of targets with the same best unit; means over documents."""
    effects, rows, key = {}, [], ["document", "target"]
    for folder in folders:
        ranked = pd.read_parquet(folder / "influence.parquet")
        ranked = ranked[(ranked.control == "own") & (ranked.distant_part == "document")]
        effects[folder.name] = ranked.pivot_table("influence", key, "distant_first")
    for one, other in combinations(effects, 2):
        a, b = effects[one].align(effects[other], join="inner")
        of = {"correlation": a.rank(axis=1).corrwith(b.rank(axis=1), axis=1)}
        of["same"] = (a.idxmax(axis=1) == b.idxmax(axis=1)).astype(float)
        found = pd.DataFrame(of).groupby("document").mean()
        row: dict[str, Any] = {"one": one, "other": other, "targets": len(a), **found.mean()}
        drawn = (found.sample(frac=1, replace=True, random_state=n) for n in range(999))
        draws = pd.concat(of_draw.mean() for of_draw in drawn)
        for name in of:
            row[f"{name}_low"], row[f"{name}_high"] = draws[name].quantile([0.025, 0.975])
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    steps = parser.add_subparsers(dest="step", required=True)

    def step(name: str, *arguments: str) -> argparse.ArgumentParser:
        added = steps.add_parser(name)
        for argument in arguments:
            several = {"nargs": "+"} if argument.endswith("s") and argument != "results" else {}
            added.add_argument(argument, **several)
        return added

    step("cut", "folder", "out").add_argument("--characters", type=int, default=4000)
    beginning = step("begin", "text", "out")
    beginning.add_argument("--characters", type=int, default=6000)
    beginning.add_argument("--only-long", action="store_true", help="leave out shorter documents")
    beginning.add_argument("--skip", type=int, default=0, help="leave out the first N")
    by_position = step("losses", "text", "out", "models")
    by_position.add_argument("--edges", type=int, nargs="+", default=[0, 256, 512, 1024, 2048])
    by_position.add_argument("--num-documents", type=int, default=100)
    of_results = {"gains": gains, "collect": collect, "agreement": agreement}
    for name in of_results:
        step(name, "out", "folders")
    asked = parser.parse_args()
    out = Path(asked.out)
    if asked.step == "cut":
        print(f"{cut(Path(asked.folder), out, asked.characters)} documents")
    elif asked.step == "begin":
        out.parent.mkdir(parents=True, exist_ok=True)
        num = begin(Path(asked.text), out, asked.characters, asked.only_long, asked.skip)
        print(f"{num} documents")
    elif asked.step == "losses":
        tables = [losses_of(m, asked.text, asked.edges, asked.num_documents) for m in asked.models]
        pd.concat(tables).round(4).to_csv(out, index=False)
    else:
        table = of_results[asked.step](list(map(Path, asked.folders))).round(4)
        table.to_csv(out, index=False)


if __name__ == "__main__":
    main()
