"""Does a score of documents choose better training text? A small model, documents made worse.

    python -m study.benchmarks.choose_text pool FOLDER --texts WIKIPEDIA NOVELS C4
    python -m study.benchmarks.choose_text rescore FOLDER --scorer MODEL
    python -m study.benchmarks.choose_text train FOLDER [--seeds 1 2 3] [--steps N]
    python -m study.benchmarks.choose_text lengths FOLDER --texts WIKIPEDIA

`pool` splits the documents of each text by a hash of their author, or of themselves: half of them
for the pool, half to judge by. It cuts the pool into documents of equal length, makes half of them
worse (`KINDS`), and scores all with `olmo_sparsity.score`. Writes scores.csv: how well each score
tells whole documents from the others. `rescore` scores the first documents of the pool with a
larger model, too: scores_large.csv. `train` chooses half of the tokens of each text by each of
`CHOICES`, trains the model of configs/prose.yaml on them, from the weights of a stored model (seed
N from prose_seedN), with sequences of 512 tokens and PoSE up to 2,048, and evaluates it on the
other half: runs.csv, a row for each model. Interrupted, it goes on with the row that is missing.
`lengths` scores documents to judge by, whole and cut: lengths.csv. Then

    python -m study.pages.keep_results FOLDER/runs.csv choose_text_runs  (likewise scores, lengths)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from olmo_sparsity import load_model, score
from olmo_sparsity.analysis.inputs.records import CorpusConfig, TextRecord, read_file
from olmo_sparsity.analysis.inputs.sentences import sentence_starts
from olmo_sparsity.analysis.inputs.vocabulary import IGNORED
from olmo_sparsity.analysis.kernels.losses import repetition_losses, token_losses
from olmo_sparsity.analysis.models.load import LoadedModel
from olmo_sparsity.analysis.results.statistics import interval, rank_correlations, resample_weights
from olmo_sparsity.config.run import load_config
from olmo_sparsity.data.tokens import prepare
from olmo_sparsity.streams import stream
from olmo_sparsity.training.loop import Outcome, train
from study.benchmarks.evidence import losses_of

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "study/results/models"
CHARACTERS, PIECE = 4000, 500
"""Length of a document of the pool (about 1,650 tokens), and of the pieces that documents are
joined from."""

KINDS = ("whole", "joined", "whole", "shuffled", "whole", "boilerplate")
"""Kinds that the documents of a text have in turn. joined: pieces of different documents; shuffled:
its own paragraphs in random order; boilerplate: its first piece in place of every second one."""

CHOICES = ("random_a", "random_b", "gzip", "gain", "key_share", "net_gain", "both", "whole")
"""gzip: the middle half by compression; both: by net_gain, without the fifth that compresses best;
whole: by the known kind. Two random choices for each seed show what chance does."""

SCORED: dict[str, Any] = {"contexts": (512,), "local": 128, "blocks": 3}
LARGE: dict[str, Any] = {"contexts": (256,), "local": 64, "blocks": 3, "prefix": "\n"}
"""As many characters in the larger vocabulary of SmolLM2, which needs a first token."""

OF_LARGE = {f"{name}_large": name for name in ("net_gain", "gain", "key_share")}
SCORES = ("net_gain", "gain", "key_share", "gzip", "gzip_middle", "recurs", "spread", *OF_LARGE)
LENGTHS, NUM_LENGTHS = (1200, 1900, 2900, 8000), 100
"""Characters and number of cut documents: contexts of 256, 512, 896 and 896 tokens fit into it."""

LONG, NUM_LONG = 8000, 40
"""Characters and number, for each text, of whole documents to judge by."""

EDGES = {"loss_beginning": 0, "loss_1x": 256, "loss_2x": 512, "loss_4x": 1024}
"""Tokens where the stretches of a document begin; the last ends at 2,048."""

NEEDLE, DISTANCES = "\nThe number of the house in Willow Lane is", (400, 900, 1800)
"""The sentence before a number, and how many tokens separate its two occurrences."""

STEPS = 250
SETTINGS = [
    "--data.corpus.source=files",
    "--data.corpus.hub_name=null",
    "--data.corpus.hub_config=null",
    "--data.corpus.max_documents=null",
    f"--data.tokenizer.name={MODELS / 'prose_seed1/tokenizer.json'}",
    "--data.tokenizer.train_vocab=null",
    "--training.length=512",
    "--training.batch_size=8",
    "--positions.target_length=2048",
    "--model.max_sequence_length=2048",
    "--optimizer.warmup_steps=50",
    "--evaluation.interval_steps=null",
    "--evaluation.length=512",
    "--evaluation.num_sequences=8",
    "--checkpoint.interval_steps=null",
]


# --- documents ------------------------------------------------------------------------------------


def halves(path: Path) -> tuple[list[str], list[str]]:
    """The documents of a text, no author of the first half in the second, but for one."""
    config = CorpusConfig("files", group_field="author" if "novels" in path.name else None)
    found = [one for one in read_file(path, config) if isinstance(one, TextRecord)]
    texts = [one.text for one in sorted(found, key=lambda one: (one.group_hash, one.text))]
    return texts[: len(texts) // 2], texts[len(texts) // 2 :]


def cut(texts: list[str], seed: int) -> list[str]:
    """Documents of equal length, in random order."""
    starts = [(t, i) for t in texts for i in range(0, len(t) - CHARACTERS + 1, CHARACTERS)]
    order = stream(seed, "pool").permutation(len(starts))
    return [starts[i][0][starts[i][1] :][:CHARACTERS] for i in order]


def make(documents: list[str], seed: int) -> Iterator[dict[str, str]]:
    """A row for each document, of its kind. No text is used twice."""
    joined = [i for i in range(len(documents)) if KINDS[i % len(KINDS)] == "joined"]
    for i, text in enumerate(documents):
        kind, pieces = KINDS[i % len(KINDS)], range(0, len(text), PIECE)
        if kind == "joined":
            own = joined.index(i)
            others = [documents[joined[(own + n) % len(joined)]] for n in range(len(pieces))]
            text = "".join(o[p : p + PIECE] for o, p in zip(others, pieces, strict=True))
        elif kind == "shuffled":
            text = shuffled(text, stream(seed, "paragraphs", i))
        elif kind == "boilerplate":
            text = "".join(text[(p if p // PIECE % 2 else 0) :][:PIECE] for p in pieces)
        yield {"kind": kind, "text": text}


def shuffled(text: str, draws: np.random.Generator) -> str:
    """The paragraphs of a text in another order; of fewer than four, its sentences."""
    parts = [part for part in text.split("\n") if part.strip()]
    if len(parts) < 4:
        starts = sorted({0, *sentence_starts(text)})
        parts = [text[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
    return "\n".join(parts[i] for i in draws.permutation(len(parts)))


def write(rows: list[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(path: Path) -> pd.DataFrame:
    return pd.DataFrame(json.loads(line) for line in path.read_text("utf-8").splitlines())


def write_pool(folder: Path, texts: list[Path], scorer: str, most: int, seed: int) -> None:
    pool, long = [], []
    for path in texts:
        own, others = halves(path)
        pool += [{"of": path.name, **row} for row in make(cut(own, seed)[:most], seed)]
        enough = [text for text in others if len(text) >= LONG]
        long += [{"of": path.name, "text": text[:LONG]} for text in enough[:NUM_LONG]]
    order = stream(seed, "order").permutation(len(pool))
    mixed = [pool[i] for i in order]
    scored = zip(mixed, score(scorer, mixed, **SCORED), strict=True)
    write([document | scores for document, scores in scored], folder / "pool.jsonl")
    write(long, folder / "long.jsonl")


def rescore(folder: Path, scorer: str, most: int) -> None:
    """Add the scores of another model to the first documents of the pool."""
    rows = read(folder / "pool.jsonl")[:most]
    own = pd.DataFrame(score(load_model(scorer, dtype="bf16"), list(rows.text), **LARGE))
    rows[[*OF_LARGE]] = own[[*OF_LARGE.values()]].to_numpy()
    aurocs(rows).assign(documents=len(rows)).to_csv(folder / "scores_large.csv", index=False)


# --- scores ---------------------------------------------------------------------------------------


def keys(rows: pd.DataFrame) -> pd.DataFrame:
    """The scores, larger for documents that are to be chosen."""
    found = rows[[name for name in SCORES if name in rows]].astype(float)
    found["gzip"] = -rows.gzip
    found["gzip_middle"] = -(rows.gzip.rank(pct=True) - 0.5).abs()
    return found


def aurocs(rows: pd.DataFrame) -> pd.DataFrame:
    """The chance that a whole document has the larger score, and how much net_gain's is above."""
    is_whole, lines = (rows.kind == "whole").to_numpy(), []
    for kind in dict.fromkeys(KINDS[1::2]):
        is_other, areas = (rows.kind == kind).to_numpy(), {}
        weights = [
            resample_weights(int(some.sum()), i) for i, some in enumerate((is_whole, is_other))
        ]
        for name, key in keys(rows).fillna(-np.inf).items():
            first, second = key.to_numpy()[is_whole, None], key.to_numpy()[None, is_other]
            above = (first > second) + 0.5 * (first == second)
            drawn_R = np.einsum("rk,rk->r", weights[0] @ above, weights[1]) / above.size
            areas[name] = np.array([above.mean(), *drawn_R])
            more_R = areas["net_gain"] - areas[name]
            line = {"kind": kind, "score": name}
            for column, values_R in (("auroc", areas[name]), ("more", more_R)):
                ends = interval(values_R[1:], values_R[0])
                line |= dict(zip((column, f"{column}_low", f"{column}_high"), ends, strict=True))
            lines.append(line | {"mean": rows[name][is_other].mean() if name in rows else None})
    return pd.DataFrame(lines).round(4)


def lengths(texts: list[str], scorer: str) -> pd.DataFrame:
    """Spearman's of scores with length: the same documents cut, and whole documents."""
    options: dict[str, Any] = {"contexts": (256, 512, 896), "local": 128, "blocks": 2}
    cuts = pd.DataFrame(score(scorer, [t[:n] for t in texts for n in LENGTHS], **options))
    whole, lines = pd.DataFrame(score(scorer, texts, **options)), []
    for name in (name for name in SCORES if name in cuts):
        values = cuts[name].astype(float).to_numpy().reshape(len(texts), len(LENGTHS))
        some = values[~np.isnan(values).any(1)]
        own_D = rank_correlations(some, np.tile(LENGTHS, (len(some), 1)), 0.0)
        both = whole[["tokens", name]].dropna().rank().to_numpy(float)
        weights = resample_weights(len(both))
        line = {"score": name, "documents": len(texts), "cut_documents": len(some)}
        ends = interval(resample_weights(len(own_D)) @ own_D / len(own_D), own_D.mean())
        line |= dict(zip(("cut", "cut_low", "cut_high"), ends, strict=True))
        drawn = [np.cov(both.T, aweights=w) for w in (np.ones(len(both)), *weights)]
        over_R = np.array([c[0, 1] / np.sqrt(c[0, 0] * c[1, 1]) for c in drawn])
        ends = interval(over_R[1:], over_R[0])
        line |= dict(zip(("over", "over_low", "over_high"), ends, strict=True))
        lines.append(
            line | {f"at_{n}": m for n, m in zip(LENGTHS, np.nanmean(values, 0), strict=True)}
        )
    return pd.DataFrame(lines).round(4)


# --- choices --------------------------------------------------------------------------------------


def choose(pool: pd.DataFrame, choice: str, seed: int) -> pd.DataFrame:
    """Half of the tokens of each text, the documents with the largest keys."""
    parts = []
    for name, rows in pool.groupby("of"):
        by = keys(rows).assign(whole=rows.kind == "whole", gzip=keys(rows).gzip_middle)
        by["both"] = by.net_gain.where(rows.gzip.rank(pct=True) > 0.2)
        ties = stream(seed, choice, str(name)).random(len(rows))
        key = ties if choice.startswith("random") else by[choice].to_numpy(float)
        order = np.lexsort((ties, np.where(np.isnan(key), np.inf, -key)))
        tokens = rows.tokens.to_numpy()[order]
        parts.append(rows.iloc[order[np.cumsum(tokens) <= tokens.sum() / 2]])
    return pd.concat(parts).sample(frac=1, random_state=seed)


def train_on(chosen: pd.DataFrame, run: Path, seed: int, steps: int) -> None:
    text = run.with_suffix(".jsonl")
    write([{"text": text} for text in chosen.text], text)
    given = [
        f"--data.corpus.path={text}",
        f"--data.folder={run}_data",
        f"--run_folder={run}",
        f"--init_from={MODELS}/prose_seed{seed}",
        f"--seed={seed}",
        f"--training.num_steps={steps}",
        f"--optimizer.cooldown_steps={steps // 4}",
    ]
    config = load_config(ROOT / "configs/prose.yaml", [*SETTINGS, *given])
    prepare(config.data)
    if train(config) is not Outcome.FINISHED:
        raise SystemExit("stopped; run the same command to go on")


@torch.no_grad()
def judge(run: Path, folder: Path) -> dict[str, float]:
    """Losses of whole held-out documents by position, what repetition gives, and net_gain."""
    text, edges = folder / "long.jsonl", [*EDGES.values(), 2048]
    losses = losses_of(str(run), str(text), edges, 10**6).iloc[:, -len(EDGES) :].mean()
    model, texts = load_model(str(run)), list(read(text).text)
    passages = [torch.tensor(ids[:256]) for ids in model.encode(texts)]
    twice = repetition_losses(lambda *some: token_losses(model.model, *some), torch.stack(passages))
    scored = pd.DataFrame(score(model, texts, contexts=(1024,), local=128))
    return dict(zip(EDGES, losses, strict=True)) | {
        "loss_far": losses.iloc[1:].mean(),
        "needle": needle(model, texts[:NUM_LONG]),
        "induction": float((twice[:, 0] - twice[:, 1]).mean()),
        "net_gain": scored.net_gain.mean(),
    }


def needle(model: LoadedModel, texts: list[str]) -> float:
    """By how many nats a token a number is predicted better if the text has said it, than if it has
    said another."""
    draws, drops = stream(0, "needle"), []
    for text in texts:
        right, other = (f" {number}." for number in draws.integers(10_000, 100_000, size=2))
        filler, before, answer, *stated = model.encode(
            [text, NEEDLE, right, NEEDLE + right, NEEDLE + other]
        )
        for distance in DISTANCES:
            losses = []
            for needle in stated:
                ids = torch.tensor([*needle, *filler[:distance], *before, *answer])[None]
                labels = ids.roll(-1, 1)
                labels[:, : -len(answer) - 1], labels[:, -1] = IGNORED, IGNORED
                places = torch.arange(ids.shape[1])[None]
                nll = token_losses(model.model, ids, places, labels)
                losses.append(nll.sum().item() / len(answer))
            drops.append(losses[1] - losses[0])
    return float(np.mean(drops))


def run_all(folder: Path, seeds: list[int], choices: list[str], steps: int) -> None:
    pool, table = read(folder / "pool.jsonl"), folder / "runs.csv"
    for seed in seeds:
        for choice in choices:
            done = pd.read_csv(table) if table.exists() else pd.DataFrame()
            this = {"choice": choice, "seed": seed, "steps": steps}
            if len(done) and (done[[*this]] == [*this.values()]).all(1).any():
                continue
            chosen, run = choose(pool, choice, seed), folder / f"runs/{choice}_{seed}_{steps}"
            train_on(chosen, run, seed, steps)
            line = this | {"tokens": int(chosen.tokens.sum())}
            line |= {kind: (chosen.kind == kind).mean() for kind in sorted({*KINDS})}
            line |= judge(run, folder)
            pd.concat([done, pd.DataFrame([line]).round(5)]).to_csv(table, index=False)
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", choices=("pool", "rescore", "train", "lengths"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=Path, nargs="+", default=[])
    parser.add_argument("--scorer", default=str(MODELS / "prose_seed1"))
    parser.add_argument("--most", type=int, default=1150, help="documents of a text in the pool")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--choices", nargs="+", default=list(CHOICES))
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = given.folder
    if given.part == "pool":
        write_pool(folder, given.texts, given.scorer, given.most, seed=0)
        aurocs(read(folder / "pool.jsonl")).to_csv(folder / "scores.csv", index=False)
    elif given.part == "rescore":
        rescore(folder, given.scorer, given.most)
    elif given.part == "lengths":
        texts = [text for path in given.texts for text in halves(path)[1] if len(text) >= LONG]
        lengths(texts[:NUM_LENGTHS], given.scorer).to_csv(folder / "lengths.csv", index=False)
    else:
        run_all(folder, given.seeds, given.choices, given.steps)


if __name__ == "__main__":
    main()
