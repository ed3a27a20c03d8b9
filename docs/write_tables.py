"""The tables of docs, written from the stored results: `python docs/write_tables.py`.

What stands between `<!-- table: NAME ARGUMENTS -->` and `<!-- end -->` comes from docs/results and
docs/figures by the function of that name; a test says when it no longer does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.statistics import net_differences, pair
from olmo_sparsity.analysis.summary import FAR_STATES
from olmo_sparsity.disk.files import write_atomically
from olmo_sparsity.tasks.results import format_cell, format_table, read_results
from olmo_sparsity.tasks.sparse_parity import SparseParity, count_relevant_ones
from olmo_sparsity.tasks.trial import draw_test_samples

ROOT = Path(__file__).parents[1]
RESULTS, FIGURES = ROOT / "docs/results", ROOT / "docs/figures"
POSITIONS = {"pose": "RoPE + PoSE", "contiguous": "RoPE alone", "rope": "RoPE alone"}
_BEGIN, _END = "<!-- table: ", "<!-- end -->"


def write_tables(page: str) -> str:
    """The same page with every table as the stored results give it."""
    before, *parts = page.split(_BEGIN)
    written = [before]
    for part in parts:
        asked, _, rest = part.partition(" -->")
        _, end, after = rest.partition(_END)
        if not end:
            raise ValueError(f"{_BEGIN}{asked} --> has no {_END}")
        name, *arguments = asked.split()
        written.append(f"{asked} -->\n\n{TABLES[name](*arguments)}\n\n{_END}{after}")
    return _BEGIN.join(written)


def table(header: str, lines: Iterable[Iterable[str]], left: int = 1) -> str:
    """The first columns are words, those after them numbers."""
    names = header.split(" | ")
    rule = ["---"] * left + ["---:"] * (len(names) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (names, rule, *lines))


_ENDS = {
    "recovery": ("low", "high"),
    "enrichment": ("low", "high"),
    "hit_rate": ("hit_low", "hit_high"),
    "excess_recovery": ("excess_low", "excess_high"),
}
"""Columns of a summary that hold a number's interval, where they are not named after it."""


def shown(row: Any, column: str, form: str = "+.2f", scale: float = 1) -> str:
    """A number of a summary with its interval."""
    if math.isnan(row[column]):
        return "–"
    low, high = _ENDS.get(column, (f"{column}_low", f"{column}_high"))
    return f"{row[column] * scale:{form}} [{row[low] * scale:{form}}, {row[high] * scale:{form}}]"


# --- measurements ---------------------------------------------------------------------------------


def read_summary(name: str, target_set: str = "gap", units: str = "tokens") -> pd.DataFrame:
    """By selector and k."""
    rows = pd.read_csv(RESULTS / f"measurements/{name}/summary.csv")
    rows = rows[(rows.target_set == target_set) & (rows.units == units)]
    return rows.set_index(["selector", "k"]).sort_index()


def read_meta(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"measurements/{name}/meta.json").read_text())


def read_evaluations(name: str) -> Iterator[dict[str, Any]]:
    """Rows of the metrics of a training run."""
    return map(json.loads, (RESULTS / f"{name}_evaluations.jsonl").read_text().splitlines())


def read_kinds(name: str, k: int) -> pd.DataFrame:
    """What kind of token add_one chooses, by kind."""
    rows = pd.read_csv(RESULTS / f"measurements/{name}/dependencies.csv")
    rows = rows[(rows.target_set == "gap") & (rows.selector == "add_one") & (rows.k == k)]
    return rows.set_index("kind")


NET_EXCESS = {
    "figure2": {
        "net_figure2_contextual": "seed 1",
        "packages_seed4_contextual": "seed 4",
        "packages_seed5_contextual": "seed 5",
        "net_figure2_isolated": "seed 1",
        "packages_seed4_isolated": "seed 4",
    },
    "other_models": {
        "packages_no_biases_seed2_contextual": "RoPE alone, 45M tokens, seed 2",
        "packages_no_biases_seed3_contextual": "RoPE alone, 45M tokens, seed 3",
        "packages_largest_contextual": "11.1M, seed 4",
        "packages_no_biases_seed2_isolated": "RoPE alone, 45M tokens, seed 2",
    },
    "first_files": {
        "net_biases_seed2_contextual": "seed 2",
        "net_biases_seed3_contextual": "seed 3",
        "net_biases_seed4_contextual": "seed 4",
        "net_biases_seed5_contextual": "seed 5",
        "net_biases_seed2_isolated": "seed 2",
        "net_biases_seed3_isolated": "seed 3",
        "net_biases_seed4_isolated": "seed 4",
        "net_biases_seed5_isolated": "seed 5",
    },
    "without_biases": {
        "net_biases_seed2_contextual": "biases",
        "net_biases_no_biases_contextual": "no biases",
    },
    "not_copying": {
        "packages_seed4_contextual": "biases",
        "packages_not_copying_contextual": "no biases",
    },
    "sizes": {
        "net_biases_small_contextual": "0.4M",
        "net_biases_seed2_contextual": "0.95M",
        "net_biases_large_contextual": "2.7M",
    },
    "largest": {
        "net_biases_seed4_bf16": "0.95M",
        "net_biases_largest_contextual": "11.1M",
        "net_biases_largest_isolated": "11.1M",
    },
    "text_only": {"net_python_contextual": "text only", "net_python_isolated": "text only"},
    "text_only_again": {
        "net_python_seed2_contextual": "seed 2",
        "net_python_seed3_contextual": "seed 3",
        "net_python_seed2_isolated": "seed 2",
        "net_python_seed3_isolated": "seed 3",
    },
    "beyond_biases": {
        "beyond_biases_seed2_480": "PoSE, seed 2",
        "beyond_biases_seed4_480": "PoSE, seed 4",
        "beyond_biases_seed5_480": "PoSE, seed 5",
        "beyond_biases_rope_480": "RoPE alone, seed 2",
        "beyond_biases_seed2_992": "PoSE, seed 2",
        "beyond_biases_seed4_992": "PoSE, seed 4",
        "beyond_biases_seed5_992": "PoSE, seed 5",
        "beyond_biases_rope_992": "RoPE alone, seed 2",
    },
    "prose": {
        "prose_seed2": "code, seed 2",
        "prose_seed3": "code, seed 3",
        "prose_mixed_seed2": "code and reviews, seed 2",
        "prose_mixed_seed3": "code and reviews, seed 3",
    },
    "prose_read": {
        "reviews_mixed_seed2": "code and reviews, seed 2",
        "reviews_mixed_seed3": "code and reviews, seed 3",
        "reviews_biases_seed4": "code alone, seed 4",
        "reviews_biases_seed5": "code alone, seed 5",
    },
    "controls": {
        "net_induction_contextual": "taught to copy",
        "net_control_isolated": "taught to copy",
        "net_no_induction_contextual": "not taught",
        "net_no_induction_isolated": "not taught",
    },
    "reviews": {
        "net_reviews_contextual_seed1": "seed 1",
        "net_reviews_contextual_seed2": "seed 2",
        "net_reviews_contextual_seed3": "seed 3",
        "net_reviews_isolated_seed1": "seed 1",
        "net_reviews_isolated_seed2": "seed 2",
        "net_reviews_isolated_seed3": "seed 3",
    },
    "beyond": {
        "beyond_python_pose_480": "RoPE + PoSE",
        "beyond_python_480": "RoPE alone",
    },
    "documents": {"documents_apart": "apart", "documents_together": "together"},
}
"""Measurements of a table, each with the name of its model."""


TARGETS = {"gap": "large gap", "gap_recurs": "… and recurs", "gap_new": "… and is new"}


DIFFERENCES = {
    "without_biases": [
        ("net_biases_seed2_contextual", "net_biases_no_biases_contextual", "biases − no biases")
    ],
    "not_copying": [
        ("packages_seed4_contextual", "packages_not_copying_contextual", "biases − no biases")
    ],
    "beyond_biases": [
        (f"beyond_biases_seed2_{long}", f"beyond_biases_rope_{long}", f"PoSE − RoPE alone, {long}")
        for long in (480, 992)
    ],
}


def differences(of: str, *ks: str) -> str:
    """Between models measured on the same documents: add_one over tokens, targets of large gap."""
    lines = []
    for *names, called in DIFFERENCES[of]:
        rows = net_differences(*map(_stored_rows, names))
        rows = rows.set_index(["target_set", "units", "selector", "k"])
        for k in ks:
            row = rows.loc["gap", "tokens", "add_one", int(k)]
            lines.append(
                [called, k, *(shown(row, name) for name in ("net", "net_equal", "net_nats"))]
            )
    names = ["of", "k", "net", "at equal gaps", "in nats"]
    return table(" | ".join(names), lines, left=2)


def _stored_rows(name: str) -> pd.DataFrame:
    folder = RESULTS / "measurements" / name
    return pair(
        *(pd.read_parquet(folder / f"{t}.parquet") for t in ("losses", "targets", "recovery"))
    )


def net_excess(of: str, target_sets: str, *ks: str) -> str:
    """Beyond the foreign control, and beyond the placebo: add_one over tokens and over spans."""
    names = ["target set", "model", "long window", "far tokens", "units", "k"]
    numbers = ["recovery", "foreign", "excess", "placebo", "**net**"]
    numbers += ["net at equal gaps", "net in nats", "targets"]
    lines = []
    for target_set, (name, model) in product(target_sets.split(","), NET_EXCESS[of].items()):
        meta = read_meta(name)
        windows = [str(meta["windows"]["long"]), FAR_STATES[meta["windows"]["far_states"]]]
        for units, k in product(meta["units"], ks):
            row = read_summary(name, target_set, units).loc["add_one", int(k)]
            line = [TARGETS[target_set], model, *windows, units, k]
            line += [shown(row, "recovery", ".2f"), f"{row.foreign:.2f}"]
            line += [f"{row[column]:+.2f}" for column in ("excess", "placebo")]
            line += [shown(row, column) for column in ("net", "net_equal", "net_nats")]
            lines.append([*line, str(row.num_targets)])
    # A name that all lines share is said in the text.
    kept = [i for i in range(len(lines[0])) if i >= len(names) or len({t[i] for t in lines}) > 1]
    header = " | ".join((names + numbers)[i] for i in kept)
    shared = len(names) + len(numbers) - len(kept)
    return table(header, [[line[i] for i in kept] for line in lines], left=len(names) - shared)


TOKENS_OF_STEP = 16 * 256
"""Of configs/python.yaml, and of figure2.yaml, which is based on it."""


def python_training(*millions: str) -> str:
    """What the text-only model can do after so many tokens of its training."""
    drops = pd.read_csv(RESULTS / "python_drop.csv").set_index("step")["drop"]
    lines = []
    for row in read_evaluations("python"):
        step, probe = row["step"], row["sparsity"]
        trained = f"{step * TOKENS_OF_STEP / 1e6:.0f}"
        line = [f"{trained}M", f"{row['heldout'][0]['loss']:.2f}", f"{drops[step]:.2f}"]
        line += [f"{row['induction_drop']:.2f}"]
        line += [shown(probe[units], "net") for units in ("tokens", "span:4")]
        if trained in millions:
            lines.append([*line, f"{probe['tokens']['gap']:.2f}"])
    if len(lines) != len(millions):
        raise ValueError(f"of {', '.join(millions)}M tokens {len(lines)} were evaluated")
    header = "tokens trained | held-out loss | drop, 32 tokens | drop, 128 tokens"
    return table(f"{header} | net excess, one token | net excess, span of 4 | gap", lines, left=0)


BIASES = {
    "seed2": "PoSE, seed 2",
    "seed3": "PoSE, seed 3",
    "seed4": "PoSE, seed 4",
    "seed5": "PoSE, seed 5",
    "largest": "PoSE, seed 4, 11.1M parameters",
    "rope": "RoPE alone, seed 2",
    "no_biases": "PoSE, seed 2, no biases",
    "no_biases_seed4": "PoSE, seed 4, no biases",
}


def biases(*steps: str) -> str:
    """The induction check while the models of configs/figure2.yaml are trained."""
    drops = [
        {row["step"]: row["induction_drop"] for row in read_evaluations(f"biases_{name}")}
        for name in BIASES
    ]
    lines = [
        [f"{step * TOKENS_OF_STEP / 1e6:.1f}M", *(f"{drop[step]:.2f}" for drop in drops)]
        for step in map(int, steps)
    ]
    return table(" | ".join(["tokens trained", *BIASES.values()]), lines, left=0)


def appears(runs: str, *millions: str) -> str:
    """The induction check and net excess of the probe while copying is learnt: after so many
    tokens of training, and the mean over all evaluations before and after."""
    names = runs.split(",")
    rows = [list(read_evaluations(name)) for name in names]
    lines = []
    for at in zip(*rows, strict=True):
        trained = f"{at[0]['step'] * TOKENS_OF_STEP / 1e6:.0f}"
        line = [f"{trained}M", *(f"{row['induction_drop']:.2f}" for row in at)]
        if trained in millions:
            lines.append([*line, *(shown(row["sparsity"]["tokens"], "net") for row in at)])
    if len(lines) != len(millions):
        raise ValueError(f"of {', '.join(millions)}M tokens {len(lines)} were evaluated")
    for called, low, high in (("below 0.3", -math.inf, 0.3), ("at least 0.8", 0.8, math.inf)):
        chosen = [[row for row in of if low <= row["induction_drop"] < high] for of in rows]
        if not any(chosen):
            continue
        means = [pd.Series(r["sparsity"]["tokens"]["net"] for r in of).mean() for of in chosen]
        lines.append([f"mean, check {called}", *[""] * len(rows), *(f"{m:+.2f}" for m in means)])
    seeds = [name.rsplit("_", 1)[1].replace("seed", "seed ") for name in names]
    header = [f"{what}, {seed}" for what in ("check", "net excess") for seed in seeds]
    return table(" | ".join(["tokens trained", *header]), lines)


KINDS = {
    "equal": "equal to the target",
    "same_family": "same word family",
    "name": "capitalised name",
    "near_third": "nearest third",
    "far_third": "farthest third",
}


def kinds(name: str) -> str:
    lines = []
    for kind, row in read_kinds(name, 1).iterrows():
        called = KINDS.get(kind, kind.replace("_", " "))
        line = [called, f"{row.share:.1%}", f"{row.base_share:.1%}"]
        line += [shown(row, "enrichment", ".2f"), shown(row, "excess_recovery")]
        lines.append([*line, str(row.num_targets)])
    header = "first choice | of targets | of far tokens | enrichment | excess there | targets"
    return table(header, lines)


SELECTED = {
    "taught, k = 1": ("induction_contextual", 1),
    "taught, k = 8": ("induction_contextual", 8),
    "taught, shown alone, k = 8": ("induction_isolated", 8),
    "not taught, shown alone, k = 8": ("quick_exact_128", 8),
}


def selectors() -> str:
    """Excess of every rule: does choosing help, and does it take the answer to choose?"""
    found = [(read_summary(name), k) for name, k in SELECTED.values()]
    lines = []
    for selector in read_meta("induction_contextual")["selectors"]:
        cells = (shown(rows.loc[selector, k], "excess") for rows, k in found)
        lines.append([f"`{selector}`", *cells])
    return table(" | ".join(["selector", *SELECTED]), lines)


REVIEWS = {"repeats": "a fifth of sequences repeats", "running": "running text alone"}


def reviews() -> str:
    lines = []
    for text, seed in product(REVIEWS, (1, 2, 3)):
        name = f"reviews_{text}_seed{seed}"
        rows = read_summary(name).loc["add_one"]
        drop, gap = read_meta(name)["induction"]["drop"], rows.gap[1]
        line = [REVIEWS[text], str(seed), f"{drop:+.2f}", f"{gap:.2f}"]
        line += [shown(rows.loc[k], "excess") for k in (1, 8)]
        lines.append([*line, f"{share_of_own_word(name):.2f}"])
    header = "text | seed | drop | gap | excess, k = 1 | excess, k = 8 | own word chosen first"
    return table(header, lines)


def share_of_own_word(name: str) -> float:
    """Of the targets: those whose first choice is their own word or of its family."""
    own = read_kinds(name, 4).num_targets[["equal", "same_family"]].sum()
    return float(own / read_summary(name).loc["add_one", 1].num_targets)


def rules() -> str:
    """What each selector finds, how well it scores all units, and what it costs."""
    rows, lines = read_summary("rules"), []
    for selector in read_meta("rules")["selectors"]:
        one, four = (rows.loc[selector, k] for k in (1, 4))
        cost = f"{one.token_forwards_per_target:,.0f}"
        values = (shown(one, "net"), shown(four, "net"), shown(four, "removal", ".2f"))
        lines.append([f"`{selector}`", *values, shown(one, "lds", ".2f"), cost])
    header = "rule | net, k = 1 | net, k = 4 | removal, k = 4 | LDS | token-forwards a target"
    return table(header, lines)


def planted() -> str:
    name = "planted_contextual"
    here, gone = (read_summary(name, targets) for targets in ("planted", "planted_removed"))
    lines = []
    for selector in read_meta(name)["selectors"]:
        own, removed = (rows.loc[selector, 2] for rows in (here, gone))
        line = [f"`{selector}`", shown(own, "hit_rate", ".2f"), shown(own, "excess")]
        lines.append([*line, shown(removed, "excess", "+.3f")])
    return table("rule | planted tokens found | excess recovery | taken out", lines)


def planted_8k() -> str:
    lines = []
    for name, what in {"planted_8k_one": "one", "planted_8k": "two, half of it each"}.items():
        for k in (1, 2):
            row = read_summary(name, "planted").loc["add_one_nested", k]
            values = [shown(row, "hit_rate", ".2f"), shown(row, "recovery", ".2f")]
            lines.append([what, str(k), *values, f"{row.foreign:.2f}", shown(row, "excess")])
    header = "planted tokens that tell the answer | k | found | recovery | foreign | excess"
    return table(header, lines)


# --- many models ----------------------------------------------------------------------------------


def read_ladder(name: str, k: int) -> pd.DataFrame:
    rows = pd.read_csv(FIGURES / f"{name}.csv")
    return rows[(rows.selector == "add_one") & (rows.k == k)]


def beyond() -> str:
    rows = read_ladder("beyond_contextual", 1).sort_values(
        ["seed", "positions"], ascending=[True, False]
    )
    lines = []
    for _, row in rows.iterrows():
        line = [str(row.seed), POSITIONS[row.positions], f"{row['drop']:+.2f}"]
        line += [f"{row[column]:.2f}" for column in ("loss_long", "gap", "recovery", "foreign")]
        lines.append([*line, shown(row, "excess"), shown(row, "excess", scale=row.gap)])
    header = "seed | positions | drop | L_long | gap | recovery | foreign | excess"
    return table(f"{header} | excess × gap, nats", lines, left=2)


def pose_pays() -> str:
    lines = []
    for row in json.loads((RESULTS / "pose_pays.json").read_text())["ranges"]:
        (first, last), gap = row["positions"], row["rope_minus_pose"]
        line = [f"{first}–{last - 1}", f"{row['rope']:.3f}", f"{row['pose']:.3f}"]
        lines.append([*line, f"{gap['mean']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}]"])
    return table("positions | RoPE | RoPE + PoSE | RoPE − PoSE", lines)


# --- tasks and theory -----------------------------------------------------------------------------


def task(*names: str) -> str:
    found = (read_results(RESULTS / "tasks" / name)[0] for name in names)
    return format_table([row for rows in found for row in rows])


LEARNT = 0.99
"""Exact match at the longest training length with k = K_train."""

SPARSE_PARITY = {
    "sparse_parity_quick": "5,000 steps",
    "sparse_parity_again": "5,000 steps, another CPU",
    "sparse_parity_k_train": "5,000 steps",
    "sparse_parity_k_train_again": "5,000 steps, another CPU",
    "sparse_parity_growing": "5,000 steps, k grows",
    "sparse_parity_2000": "2,000 steps, k grows",
}


def span(numbers: list[float]) -> str:
    if not numbers:
        return "–"
    low, high = f"{min(numbers):.3f}", f"{max(numbers):.3f}"
    return low if low == high else f"{low}–{high}"


def sparse_parity() -> str:
    """How far each trained model reaches that has learnt the training lengths."""
    lines = []
    for name, called in SPARSE_PARITY.items():
        rows, _ = read_results(RESULTS / "tasks" / name)
        right = {(r.train_k, r.scheme, r.seed, r.test_k, r.length): r.exact_match for r in rows}
        for train_k, scheme in sorted({(r.train_k, r.scheme) for r in rows}):
            seeds = sorted({r.seed for r in rows})
            found = [
                [right[train_k, scheme, seed, k, length] for seed in seeds
                 if right[train_k, scheme, seed, train_k, 50] >= LEARNT]
                for k, length in ((2, 200), (train_k, 200), (train_k, 500), (2 * train_k, 200))
            ]  # fmt: skip
            line = [str(train_k), called, SCHEMES[scheme], f"{len(found[0])} of {len(seeds)}"]
            lines.append(line + [span(of) for of in found])
    header = "K_train | training | positions | seeds that learnt it | k = 2 at 200"
    return table(f"{header} | k = K at 200 | k = K at 500 | k = 2K at 200", sorted(lines), left=3)


def counting() -> str:
    """How often a model that counts marked ones no further than 1, 2 and so on is right on the
    test samples of 50 tokens, and how many trained models are as often, to one sample, for every
    k that they are tested on."""
    paths = sorted(RESULTS.glob("tasks/sparse_parity*/accuracy.parquet"))
    stored = pd.concat({path.parent.name: pd.read_parquet(path) for path in paths}, names=["of"])
    stored = stored[stored.length == 50]
    ones = {}
    (num_samples,) = map(int, stored.num_samples.unique())
    for k in sorted(stored.test_k.unique()):
        drawn = draw_test_samples(SparseParity(), num_samples, 50, int(k))
        ones[k] = np.concatenate([count_relevant_ones(samples) for samples in drawn])
    lines = []
    for end in range(1, 7):
        right = {
            k: (np.minimum(ones_B, end) % 2 == ones_B % 2).mean() for k, ones_B in ones.items()
        }
        equal = stored.exact_match.sub(stored.test_k.map(right)).abs() < 1.5 / num_samples
        models = equal.groupby([*(stored[c] for c in ("scheme", "train_k", "seed")), "of"]).all()
        by_k = models.groupby("train_k")
        lines.append([f"{end}", *(f"{right[k]:.3f}" for k in (2, 4, 6, 8)), *map(str, by_k.sum())])
    sizes = [f"trained k ≤ {train_k}, of {count}" for train_k, count in by_k.size().items()]
    return table(" | ".join(["counts to", "k = 2", "k = 4", "k = 6", "k = 8", *sizes]), lines, 0)


ABLATIONS = {
    "sparse_parity_2000": "none",
    "sparse_parity_2_chunks": "two chunks, not four",
    "sparse_parity_any_cuts": "cuts anywhere",
    "sparse_parity_published": "PoSE as published: both, and the first chunk starts at 0",
    "sparse_parity_unscaled": "queries not scaled",
    "sparse_parity_biases": "queries not scaled, biases",
    "sparse_parity_gpt_neox": "queries not scaled, GPT-NeoX",
    "sparse_parity_quarter_rotated": "a quarter of a head rotated, not half",
    "sparse_parity_init_002": "initial weights of 0.02, not 0.1",
    "sparse_parity_rate_5e-5": "rate 5e-5, not 3e-3",
    "sparse_parity_warmup_300": "300 warm-up steps, not 100",
    "sparse_parity_width_128": "width 128, not 48",
    "sparse_parity_all_k_at_once": "every k from the first step",
    "sparse_parity_1_chunk": "… and one chunk: a random start only",
    "sparse_parity_4_layers": "… and four layers, not two",
}


def ablations() -> str:
    lines = []
    for name, change in ABLATIONS.items():
        rows, _ = read_results(RESULTS / "tasks" / name)
        right = {(r.seed, r.test_k, r.length): r.exact_match for r in rows if r.scheme == "pose"}
        line = [change]
        for k in (2, 4):
            learnt = [seed for seed in {r.seed for r in rows} if right[seed, k, 50] >= 0.9]
            line.append(str(len(learnt)))
            for length in (200, 500):
                line.append(span([right[seed, k, length] for seed in learnt]))
        lines.append(line)
    at = "at 200 | at 500"
    return table(f"change | seeds that learnt k = 2 | {at} | seeds that learnt k = 4 | {at}", lines)


SCHEMES = {
    "ppc": "coupled, predicted (PPC)",
    "coupled": "coupled, given",
    "rope": "RoPE",
    "pose": "RoPE + PoSE",
    "nope": "NoPE",
    "alibi": "ALiBi",
    "randomized": "randomized",
}
SCRATCHPAD = {
    "scratchpad_parity_quick": "the preset",
    "scratchpad_parity_solved": "three times the steps and more",
    "scratchpad_parity_unscaled": "queries not scaled",
    "scratchpad_parity_gpt_neox": "GPT-NeoX, queries not scaled",
}


def scratchpad() -> str:
    """Schemes with the same numbers share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for name, setting in SCRATCHPAD.items():
        rows, _ = read_results(RESULTS / "tasks" / name)
        for scheme, called in SCHEMES.items():
            some = [row for row in rows if row.scheme == scheme]
            if some:
                at = [[row for row in some if row.length == n] for n in (20, 40, 100, 200)]
                lines.setdefault((setting, *map(format_cell, at)), []).append(called)
    by_name = [(setting, ", ".join(called), *at) for (setting, *at), called in lines.items()]
    return table(
        "setting | position IDs | 20 bits | 40 bits | 100 bits | 200 bits", by_name, left=2
    )


def task_commands() -> str:
    """Of every stored result. How many at a time changes nothing in what comes out."""
    metas = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("tasks/*/meta.json"))]
    commands = sorted({re.sub(r" --num_workers=[0-9]+", "", meta["command"]) for meta in metas})
    return "\n".join(["```bash", *commands, "```"])


def theory(name: str) -> str:
    return (FIGURES / f"{name}.md").read_text(encoding="utf-8").strip()


def bridge() -> str:
    """The transformers of the bridge; theory_quick has the attention class beside them."""
    names = ["setting", "k", *(f"risk at {n}" for n in ("L", "2L", "4L", "8L")), "growth"]
    lines = (FIGURES / "theory_bridge.md").read_text(encoding="utf-8").splitlines()
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    found = (dict(zip(header, row, strict=False)) for row in rows)
    chosen = [row for row in found if row.get("setting", "").startswith("transformer")]
    return table(" | ".join(names), [[row[name] for name in names] for row in chosen])


# --- many GPUs ------------------------------------------------------------------------------------

# Assumptions, not measurements: NVLink inside a machine of eight, one 200 Gbit/s adapter per GPU
# between machines.
FLOPS_PER_S, NEAR_BYTES_PER_S, FAR_BYTES_PER_S = 350e12, 300e9, 25e9
GPU_BYTES, MACHINE_GPUS = 80 * 2**30, 8


def read_steps() -> pd.DataFrame:
    """A row for each config, engine and number of GPUs, with the times that are assumed."""
    steps = pd.DataFrame(json.loads((RESULTS / "scaling.json").read_text()))
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # of a ring
    given = [sum(rounds[kind] * size for kind, size in one.items()) for one in steps.given]
    steps["sent"] = given * (1 - 1 / steps.world_size)
    near = steps.world_size <= MACHINE_GPUS
    sending_s = steps.sent / np.where(near, NEAR_BYTES_PER_S, FAR_BYTES_PER_S)
    steps["step_s"] = steps.flops / FLOPS_PER_S + sending_s
    steps["computing"] = steps.flops / FLOPS_PER_S / steps.step_s
    return steps


def scaling(column: str) -> str:
    scale, digits = {"memory": (2**-30, 1), "sent": (1e-9, 2), "computing": (100, 0)}[column]
    steps = read_steps().query("engine != 'single'")
    cells = steps.set_index(["config", "engine", "world_size"])[column] * scale
    wide = cells.unstack("world_size").loc[steps.config.unique()]
    lines = [[*names, *(f"{cell:,.{digits}f}" for cell in row)] for *names, row in (
        (config, engine, row.tolist()) for (config, engine), row in wide.iterrows()
    )]  # fmt: skip
    return table(" | ".join(["config", "engine", *map(str, wide.columns)]), lines, left=2)


def engines() -> str:
    """The simplest engine that fits, and is within two points of the best that does."""
    steps, lines = read_steps(), []
    sizes = sorted(steps.world_size.unique())
    for config in steps.config.unique():
        cells = [config]
        for world_size in sizes:
            rows = steps[(steps.config == config) & (steps.world_size == world_size)]
            rows = rows[rows.memory <= GPU_BYTES]
            best = rows[rows.computing >= rows.computing.max() - 0.02].iloc[0]
            hours = best.num_steps * best.step_s / 3600
            cells.append(f"{best.engine}, {hours:,.1f} h ({best.computing:.0%})")
        lines.append(cells)
    return table(
        " | ".join(["config", *(f"{n} GPU{'s' if n > 1 else ''}" for n in sizes)]), lines, left=5
    )


TABLES: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        *(python_training, biases, appears, net_excess, differences, kinds, rules, selectors),
        *(reviews, planted, planted_8k, beyond, pose_pays, task, sparse_parity, counting),
        *(ablations, scratchpad, task_commands, theory, bridge, scaling, engines),
    )
}


if __name__ == "__main__":
    for path in sorted(ROOT.glob("docs/*.md")):
        before = path.read_text(encoding="utf-8")
        after = write_tables(before)
        if after != before:
            write_atomically(path, after)
            print(f"{path.relative_to(ROOT)}: tables written anew")
