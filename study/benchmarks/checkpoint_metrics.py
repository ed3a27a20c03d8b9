"""Which number tells checkpoints apart: long-context metrics by signal over noise.

    python -m study.benchmarks.checkpoint_metrics OUT.parquet RUN… --text TEXT --evaluator RUN
    python -m study.benchmarks.checkpoint_metrics OUT.parquet --table [--figure FIGURE.png]

A RUN is the folder of a run named TREATMENT_SEED (`rope_201`): six of its checkpoints, at equal
distances, are read on three disjoint draws of 32 documents of 1,024 tokens. Numbers: those of
`track`; `long_loss`, the mean loss of the last 512 tokens, and `long_ppl_keys`, that of LongPPL's
key tokens by the evaluator's last checkpoint; `needle`, how often the value of a statement in the
document is the most probable of four, and `recall`, the same where all four are stated, of other
names; `gzip`, bits a character, which knows nothing of the model. OUT.parquet grows by one
checkpoint at a time; the same command goes on. OUT.csv: signal over noise of each number.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from olmo_sparsity import load_model, track
from olmo_sparsity.analysis.results.statistics import LCL_NATS, LSD_NATS
from olmo_sparsity.analysis.scoring.logprobs import ModelLogprobs
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.base.drawing import BLUE, RED, save
from olmo_sparsity.base.files import writing
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.models.prompts import Prompt
from study.benchmarks.evidence import read_texts
from study.command import enter, run_command

LONG, LOCAL, DOCUMENTS, DRAWS, CHECKPOINTS = 1024, 64, 32, 3, 6
NAMES = ("Anna", "James", "Maria", "Peter")
VALUES, VALUE_TOKENS, ASKED = 4, 4, "\n{} was born in"
SYLLABLES = ("bar", "den", "fol", "gri", "kar", "lum", "mor", "nev", "pol", "ras", "tis", "vel")
CELL = ["treatment", "step"]
FLOOR, CEILING = 1.5 / VALUES, 0.95
"""A needle below or above these in every cell says nothing about checkpoints."""


def log_p(engine: ModelLogprobs, prompts: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    return engine.score([Prompt(before, after) for before, after in prompts])


def key_tokens(engine: ModelLogprobs, documents: list[np.ndarray]) -> list[np.ndarray]:
    """Find, in the last 512 tokens of each, those that the evaluator predicts, but not from the
    `LOCAL` tokens before them."""
    half = range(LONG // 2, LONG, LOCAL)
    long = log_p(engine, [(tokens[:1], tokens[1:]) for tokens in documents])
    short = log_p(engine, [(x[a - LOCAL : a], x[a : a + LOCAL]) for x in documents for a in half])
    pairs = zip(long, np.array(short).reshape(len(documents), -1), strict=True)
    return [(a[-LONG // 2 :] - b > LSD_NATS) & (-a[-LONG // 2 :] < LCL_NATS) for a, b in pairs]


def values_of(model: LoadedModel) -> list[np.ndarray]:
    """Names that do not exist, of four tokens each."""
    rng, found = stream(0, "values"), dict[tuple[int, ...], None]()
    while len(found) < VALUES:
        ids = model.encode([" " + "".join(rng.choice(SYLLABLES, 3)).capitalize()])[0]
        if len(ids) == VALUE_TOKENS:
            found[*ids] = None
    return [np.array(ids) for ids in found]


def recall_of(
    model: LoadedModel, engine: ModelLogprobs, documents: list[np.ndarray], num: int, draw: int
) -> float:
    """How often the right value is the most probable of all, of `num` statements in a document."""
    values, (end,) = values_of(model), model.encode([".\n"])[0][:1]
    asked = [model.encode([ASKED.format(name)])[0] for name in NAMES]
    room = LONG - VALUE_TOKENS - len(asked[0]) - sum(len(x) + VALUE_TOKENS + 1 for x in asked[:num])
    prompts, right = list[tuple[np.ndarray, np.ndarray]](), list[int]()
    for number, tokens in enumerate(documents):
        rng = stream(0, "needle", draw, number)
        given, which = rng.choice(VALUES, num, replace=False), int(rng.integers(num))
        places = np.sort(rng.integers(LOCAL, room - LOCAL, num))
        parts = np.split(tokens[:room], places)
        for i in range(num):
            parts[i] = np.concatenate([parts[i], asked[i], values[given[i]], [end]])
        text = np.concatenate([*parts, asked[which]]).astype(int)
        prompts += [(text, value) for value in values]
        right.append(int(given[which]))
    found = np.array([of.sum() for of in log_p(engine, prompts)]).reshape(-1, VALUES)
    return float((found.argmax(1) == right).mean())


def numbers_of(
    model: LoadedModel, texts: list[str], keys: list[np.ndarray], draw: int
) -> dict[str, float]:
    engine = ModelLogprobs(Scorer(model.model))
    documents = [np.array(ids[:LONG]) for ids in model.encode(texts)]
    late = [x[-LONG // 2 :] for x in log_p(engine, [(x[:1], x[1:]) for x in documents])]
    of_keys = np.concatenate([x[of] for x, of in zip(late, keys, strict=True)])
    shown = "".join(model.tokenizer.decode(x.tolist()) for x in documents).encode()
    found = track(model, text=texts, long=LONG, local=LOCAL, documents=len(texts)).numbers
    return {
        "long_loss": -float(np.mean(late)),
        "long_ppl_keys": -float(of_keys.mean()),
        "needle": recall_of(model, engine, documents, 1, draw),
        "recall": recall_of(model, engine, documents, len(NAMES), draw),
        "gzip": 8 * len(gzip.compress(shown)) / len(shown),
    } | dict(zip("track " + found.number, found.value, strict=True))


def checkpoints_of(run: Path) -> list[tuple[int, Path]]:
    found = sorted((int(path.name[4:]), path) for path in run.glob("checkpoints/step*"))
    last = found[-1][0]
    wanted = {last * (i + 1) // CHECKPOINTS for i in range(CHECKPOINTS)}
    return [pair for pair in found if pair[0] in wanted]


def draws_of(model: LoadedModel, texts: list[str]) -> Iterator[list[str]]:
    long = [text for text in texts if len(model.encode([text])[0]) >= LONG]
    if len(long) < DRAWS * DOCUMENTS:
        raise SystemExit(
            f"{len(long)} documents of {LONG:,} tokens; {DRAWS * DOCUMENTS} are needed"
        )
    order = stream(0, "draws").permutation(len(long))
    for draw in range(DRAWS):
        yield [long[i] for i in order[draw * DOCUMENTS : (draw + 1) * DOCUMENTS]]


def measure(out: Path, text: Path, evaluator: Path, runs: list[Path]) -> None:
    judge = load_model(checkpoints_of(evaluator)[-1][1])
    draws = list(draws_of(judge, read_texts([text])))
    engine = ModelLogprobs(Scorer(judge.model))
    keys = [key_tokens(engine, [np.array(x[:LONG]) for x in judge.encode(of)]) for of in draws]
    rows = pd.read_parquet(out) if out.exists() else pd.DataFrame(columns=["run", *CELL])
    for run in runs:
        treatment, seed = run.name.rsplit("_", 1)
        for step, path in checkpoints_of(run):
            if ((rows.run == run.name) & (rows.step == step)).any():
                continue
            model = load_model(path)
            of_step = [
                {"run": run.name, "treatment": treatment, "seed": int(seed), "step": step}
                | {"draw": draw, "number": name, "value": value}
                for draw, (texts, of_keys) in enumerate(zip(draws, keys, strict=True))
                for name, value in numbers_of(model, texts, of_keys, draw).items()
            ]
            rows = pd.concat([rows, pd.DataFrame(of_step)], ignore_index=True)
            with writing(out) as partial:
                rows.to_parquet(partial)


# --- signal over noise ----------------------------------------------------------------------------


def ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each number: spread over the references' checkpoints, distance of PoSE from RoPE,
    each over the spread between seeds and draws; how often PoSE is on its right side of RoPE."""
    return pd.DataFrame([{"number": name} | _ratios(of) for name, of in rows.groupby("number")])


def _ratios(rows: pd.DataFrame) -> dict[str, float]:
    cells = rows.groupby(CELL).value
    noise = np.sqrt(cells.var().groupby("treatment").mean())
    mean = cells.mean().unstack("step")
    apart = mean.loc["pose"] - mean.loc["rope"]
    both = np.hypot(noise["pose"], noise["rope"]) / np.sqrt(2)
    quarter = rows[rows.step == min(mean.columns, key=lambda step: abs(step - max(mean) / 4))]
    by_seed = quarter.pivot(index="draw", columns=["treatment", "seed"], values="value")
    pose, rope = by_seed["pose"], by_seed["rope"]
    sides = np.sign(pose.to_numpy()[:, :, None] - rope.to_numpy()[:, None, :])
    level = mean.to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "checkpoints": float(mean.loc["reference"].std() / noise["reference"]),
            "treatments": float(np.sqrt((apart**2).mean()) / both),
            "right_order": float((sides == np.sign(apart.iloc[-1])).mean()),
            **{f"{name}_end": float(of.iloc[-1]) for name, of in mean.iterrows()},
            "lowest": float(level.min()),
            "highest": float(level.max()),
        }


def verdicts(found: pd.DataFrame) -> dict[str, str]:
    """By the rules registered in study/records/thresholds.md."""
    table = found.set_index("number")

    def at_least(columns: list[str], other: str, times: float) -> str:
        if other != "long_loss" and not (
            table.highest[other] > FLOOR and table.lowest[other] < CEILING
        ):
            return "void"
        ours, theirs = table.loc["track net_gain", columns], table.loc[other, columns]
        return "yes" if (ours >= times * theirs).all() else "no"

    both = ["checkpoints", "treatments"]
    order = table.right_order["track net_gain"] >= 0.95
    return {
        "W1": at_least(both, "needle", 3),
        "W2": at_least(both, "recall", 3),
        "W3": at_least(both, "long_loss", 1.5),
        "W4": "yes" if order else "no",
    }


def draw(found: pd.DataFrame) -> Figure:
    """Both ratios of each number, the best by the smaller of both above."""
    best = ["checkpoints", "treatments"]
    found = found.dropna(subset=best).set_index("number")
    found = found.loc[found[best].min(axis=1).sort_values().index]
    figure = Figure(figsize=(5.2, 0.2 * len(found) + 0.8), layout="constrained")
    axes = figure.subplots()
    for column, color in zip(best, (BLUE, RED), strict=True):
        axes.plot(found[column], found.index, "o", color=color, markersize=4, label=column)
    axes.set(xscale="log", xlabel="signal over noise")
    axes.set_xticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower right")
    return figure


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--evaluator", type=Path)
    parser.add_argument("--table", action="store_true", help="print what OUT.parquet holds")
    parser.add_argument("--figure", type=Path, help="a picture of the table")

    def run(options: argparse.Namespace, _: list[str]) -> None:
        if not options.table:
            measure(options.out, options.text, options.evaluator, options.runs)
        found = ratios(pd.read_parquet(options.out)).round(4)
        found.to_csv(options.out.with_suffix(".csv"), index=False)
        print(found.to_string(index=False), verdicts(found), sep="\n")
        if options.figure:
            save(lambda: draw(found), options.figure)

    return run_command(parser, run, words, again="the same command goes on")


if __name__ == "__main__":
    enter(main)
