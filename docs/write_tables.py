"""The tables of README and docs, written from the stored results: `python docs/write_tables.py`.

What stands between `<!-- table: NAME ARGUMENTS -->` and `<!-- end -->` comes from docs/results and
docs/figures by the function of that name; a test says when it no longer does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.summary import FAR_STATES
from olmo_sparsity.files import write_atomically
from olmo_sparsity.tasks.results import format_table, read_results

ROOT = Path(__file__).parents[1]
RESULTS, FIGURES = ROOT / "docs/results", ROOT / "docs/figures"
POSITIONS = {"pose": "RoPE + PoSE", "contiguous": "RoPE alone", "rope": "RoPE alone"}
COPIES = {"induction": "copies", "no_induction": "does not"}
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
    found: dict[str, Any] = json.loads((RESULTS / f"measurements/{name}/meta.json").read_text())
    return found


def read_losses(name: str) -> pd.DataFrame:
    return pd.read_csv(RESULTS / f"measurements/{name}/losses.csv", index_col=0)


def read_kinds(name: str, k: int) -> pd.DataFrame:
    """What kind of token add_one chooses, by kind."""
    rows = pd.read_csv(RESULTS / f"measurements/{name}/dependencies.csv")
    rows = rows[(rows.target_set == "gap") & (rows.selector == "add_one") & (rows.k == k)]
    return rows.set_index("kind")


def recovery(name: str, units: str = "tokens") -> str:
    rows = read_summary(name, units=units)
    ks = sorted(rows.index.unique("k"))
    lines = []
    for selector in read_meta(name)["selectors"]:
        some = rows.loc[selector]
        shows = [("recovery", ".2f"), ("foreign", ".2f"), ("excess", "+.2f")]
        shows += [("placebo", "+.2f"), ("net", "+.2f")] if some.net.notna().all() else []
        for column, form in shows:
            bold = f"**{column}**" if column == shows[-1][0] else column
            said = f"`{selector}` | {bold}" if column == "recovery" else f" | {bold}"
            lines.append([said, *(shown(some.loc[k], column, form) for k in ks)])
    return table(" | ".join(["selector", "", *(f"k = {k}" for k in ks)]), lines, left=2)


NULLS = {
    "taught": ("net_induction_contextual", "net_figure2_isolated", "net_no_induction_contextual"),
    "untaught": ("net_python_contextual", "net_python_isolated"),
}


def nulls(target_set: str = "gap", of: str = "taught") -> str:
    """Beyond the foreign control, and beyond the placebo: add_one over tokens and over spans."""
    models = COPIES | {"figure2": "copies (`make figure2`)", "python": "untaught"}
    lines = []
    for name in NULLS[of]:
        model, _, far = name.removeprefix("net_").rpartition("_")
        for units in read_meta(name)["units"]:
            rows = read_summary(name, target_set, units).loc["add_one"]
            for k in (1, 4):
                row = rows.loc[k]
                line = [models[model], FAR_STATES[far], units, str(k)]
                line += [shown(row, "recovery", ".2f"), shown(row, "foreign", ".2f")]
                line += [shown(row, column) for column in ("excess", "placebo", "net", "net_nats")]
                lines.append([*line, str(row.num_targets)])
    header = "model | far tokens | units | k | recovery | foreign | excess | placebo | **net**"
    return table(f"{header} | net in nats | targets", lines, left=3)


def untaught_training() -> str:
    """What the untaught model can do at each evaluation of its training."""
    tokens_of_step = 16 * 256  # configs/python.yaml
    drops = pd.read_csv(RESULTS / "python_drop.csv").set_index("step")["drop"]
    evaluations = (RESULTS / "python_evaluations.jsonl").read_text().splitlines()
    lines = []
    for row in map(json.loads, evaluations):
        step, probe = row["step"], row["sparsity"]
        line = [f"{step * tokens_of_step / 1e6:.0f}M", f"{row['heldout'][0]['loss']:.2f}"]
        line += [f"{drops[step]:.2f}", f"{row['induction_drop']:.2f}"]
        line += [shown(probe[units], "net") for units in ("tokens", "span:4")]
        lines.append([*line, f"{probe['tokens']['gap']:.2f}"])
    header = "tokens trained | held-out loss | second reading of 32 tokens | of 128 tokens"
    return table(f"{header} | net excess of one token | of four together | gap", lines, left=0)


KINDS = {
    "equal": "equal to the target",
    "same_family": "same word family",
    "name": "capitalised name",
    "near_third": "nearest third",
    "far_third": "farthest third",
}


def kinds(name: str, k: str) -> str:
    lines = []
    for kind, row in read_kinds(name, int(k)).iterrows():
        first = shown(row, "excess_recovery")
        called = KINDS.get(kind, kind.replace("_", " "))
        line = [called, f"{row.share:.1%}", f"{row.base_share:.1%}"]
        lines.append([*line, shown(row, "enrichment", ".2f"), first, str(row.num_targets)])
    of = "the first token" if k == "1" else f"the first {k} tokens"
    header = f"kind | share of {of} | of far tokens | enrichment"
    return table(f"{header} | excess at k = {k} where it is the first | targets", lines)


def excess_of(rows: pd.DataFrame, selectors: Iterable[str]) -> list[str]:
    return [shown(rows.loc[selector, 8], "excess") for selector in selectors]


def copies(form: str = "short") -> str:
    lines = []
    for name, far in ((name, far) for name in COPIES for far in ("contextual", "isolated")):
        rows = read_summary(f"{name}_{far}")
        add_one = rows.loc["add_one", 8]
        line = [COPIES[name], FAR_STATES[far], f"{read_meta(f'{name}_{far}')['gate']['drop']:+.2f}"]
        if form == "long":
            line.append(f"{read_losses(f'{name}_{far}').loss_long['mean']:.3f}")
        line += [f"{add_one.gap:+.3f}", shown(add_one, "recovery", ".2f")]
        line += [f"{add_one.foreign:.2f}", shown(add_one, "excess")]
        if form == "long":
            line += excess_of(rows, ("random", "nearest"))
        lines.append([*line, shown(add_one, "excess_nats")])
    header = "model | far tokens | drop when repeated"
    header += " | L_long, all targets" if form == "long" else ""
    header += " | gap | recovery | foreign | excess"
    header += " | of `random` | of `nearest`" if form == "long" else ""
    return table(f"{header} | excess in nats", lines, left=2)


def with_and_without_pose() -> str:
    lines = []
    for size, model in ((size, model) for size in (128, 256) for model in ("pose", "rope")):
        name = f"quick_{model}_{size}"
        rows, meta = read_summary(name), read_meta(name)
        long = meta["windows"]["long"]
        add_one = rows.loc["add_one", 8]
        line = [f"{long} to {long + meta['windows']['stride'] - 1}", POSITIONS[model]]
        line += [f"{read_losses(name).loss_long['mean']:.3f}", f"{add_one.gap:+.3f}"]
        line += [shown(add_one, "recovery", ".2f")]
        line += [f"{add_one.foreign:.2f}"]
        lines.append(line + excess_of(rows, ("add_one", "divergence", "random", "nearest")))
    header = "long window | trained with | L_long, all targets | gap of the chosen"
    header += " | recovery of add_one | foreign | excess of add_one"
    return table(f"{header} | of `divergence` | of `random` | of `nearest`", lines, left=2)


AFTER_SCHOOL = {"repeats": "a fifth repeats", "running": "running text alone"}


def reviews() -> str:
    lines = []
    for text, seed in ((text, seed) for text in AFTER_SCHOOL for seed in (1, 2, 3)):
        name = f"reviews_{text}_seed{seed}"
        rows = read_summary(name).loc["add_one"]
        one, eight = (rows.loc[k] for k in (1, 8))
        line = [AFTER_SCHOOL[text], str(seed), f"{read_meta(name)['gate']['drop']:+.2f}"]
        line += [f"{read_losses(name).loss_long['mean']:.2f}", f"{one.gap:.2f}"]
        line += [shown(one, "recovery", ".2f"), f"{one.foreign:.2f}"]
        line += [shown(one, "excess"), shown(eight, "excess"), f"{share_of_own_word(name):.2f}"]
        lines.append(line)
    header = (
        "text after school | seed | drop when repeated | L_long | gap | recovery, k = 1 | foreign"
    )
    header += " | excess, k = 1 | excess, k = 8 | first choice is the own word"
    return table(header, lines)


def share_of_own_word(name: str) -> float:
    """Of the targets: those whose first choice is their own word or of its family."""
    rows = pd.read_csv(RESULTS / f"measurements/{name}/dependencies.csv")
    rows = read_kinds(name, int(rows.k.min()))
    own = rows.num_targets[["equal", "same_family"]].sum()
    return float(own / read_summary(name).loc["add_one", 1].num_targets)


def planted() -> str:
    name = "planted_contextual"
    here, gone = (read_summary(name, targets) for targets in ("planted", "planted_removed"))
    lines = []
    for selector in read_meta(name)["selectors"]:
        own = here.loc[selector, 2]
        removed = shown(gone.loc[selector, 2], "excess", "+.3f")
        lines.append(
            [f"`{selector}`", shown(own, "hit_rate", ".2f"), shown(own, "excess"), removed]
        )
    return table("rule | planted tokens found | excess recovery | taken out", lines)


# --- many models ----------------------------------------------------------------------------------


def read_ladder(name: str, k: int) -> pd.DataFrame:
    rows = pd.read_csv(FIGURES / f"{name}.csv")
    return rows[(rows.selector == "add_one") & (rows.k == k)]


def over_seeds(rows: pd.DataFrame) -> list[str]:
    """Means over seeds, and from the lowest to the highest where it matters."""

    def span(column: str) -> str:
        some = rows[column]
        return f"{some.mean():+.2f} [{some.min():+.2f}, {some.max():+.2f}]"

    means = (f"{rows[column].mean():.2f}" for column in ("loss_long", "gap", "recovery", "foreign"))
    return [span("drop"), *means, span("excess")]


_OVER_SEEDS = "drop when repeated | L_long | gap of the chosen | recovery | foreign | excess"


def stages() -> str:
    rows = read_ladder("stages_contextual", 1)
    steps = rows.model.str.extract(r"induction_(\d+)_seed")[0].astype(int)
    lines = [[str(at), *over_seeds(some)] for at, some in rows.groupby(steps)]
    return table(f"steps of school | {_OVER_SEEDS}", lines)


def ladder(far: str, k: str) -> str:
    lines = [
        [f"{size / 1e6:.1f}M", POSITIONS[positions], *over_seeds(some)]
        for (size, positions), some in read_ladder(f"ladder_{far}", int(k)).groupby(
            ["num_parameters", "positions"]
        )
    ]
    return table(f"parameters | positions | {_OVER_SEEDS}", lines, left=2)


def ladder_by_k(far: str) -> str:
    """Figure 2 of every size in numbers: recovery and excess, means over seeds."""
    rows = pd.read_csv(FIGURES / f"ladder_{far}.csv")
    rows = rows[rows.selector == "add_one"]
    means = rows.groupby(["num_parameters", "positions", "k"])[["recovery", "excess"]].mean()
    cells = [f"{mean.recovery:.2f}, {mean.excess:+.2f}" for mean in means.itertuples()]
    by_k = pd.Series(cells, index=means.index).unstack()
    lines = [
        [f"{size / 1e6:.1f}M", POSITIONS[positions], *cells]
        for (size, positions), cells in by_k.iterrows()
    ]
    names = " | ".join(f"k = {k}" for k in by_k.columns)
    return table(f"parameters | positions | {names}", lines, left=2)


def beyond() -> str:
    rows = read_ladder("beyond_contextual", 1).sort_values(
        ["seed", "positions"], ascending=[True, False]
    )
    lines = []
    for _, row in rows.iterrows():
        line = [str(row.seed), POSITIONS[row.positions], f"{row['drop']:+.2f}"]
        line += [f"{row[column]:.2f}" for column in ("loss_long", "gap", "recovery", "foreign")]
        lines.append([*line, shown(row, "excess"), shown(row, "excess", scale=row.gap)])
    return table(f"seed | trained with | {_OVER_SEEDS} | excess × gap", lines, left=2)


def pose_pays() -> str:
    lines = []
    for row in json.loads((RESULTS / "pose_pays.json").read_text())["ranges"]:
        (first, last), gap = row["positions"], row["rope_minus_pose"]
        line = [f"{first}–{last - 1}", f"{row['rope']:.3f}", f"{row['pose']:.3f}"]
        lines.append([*line, f"{gap['mean']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}]"])
    return table("positions | RoPE | RoPE + PoSE | RoPE − PoSE", lines)


# --- tasks and theory -----------------------------------------------------------------------------


def task(name: str) -> str:
    return format_table(read_results(RESULTS / "tasks" / name)[0])


def models(name: str, *asked: str) -> str:
    """A line per trained model. `asked`: "4@50,200" is k = 4 at those lengths, "2K@200" twice the
    largest k of training."""
    rows, meta = read_results(RESULTS / "tasks" / name)
    right = {(r.scheme, r.train_k, r.seed, r.test_k, r.length): r.exact_match for r in rows}
    columns = [
        (k, int(length)) for k, at in (a.split("@") for a in asked) for length in at.split(",")
    ]
    trained = sorted({(r.train_k or 0, r.scheme, r.seed) for r in rows})
    losses = meta.get("trial_losses", {})
    header = ["scheme", "seed", *(["loss"] if losses else [])]
    many = len({train_k for train_k, _, _ in trained}) > 1
    if many:
        header.insert(0, "trained k ≤")
    before = None
    for k, length in columns:
        header.append(f"{length}" if k == before else f"k = {k}: {length}")
        before = k
    lines = []
    for train_k, scheme, seed in trained:
        line = [str(train_k)] if many else []
        line += [scheme, str(seed)]
        line += [f"{losses[f'{scheme}_k{train_k}_seed{seed}']:.3f}"] if losses else []
        for k, length in columns:
            number = train_k * int(k[:-1] or 1) if k.endswith("K") else int(k)
            line.append(f"{right[scheme, train_k, seed, number, length]:.3f}")
        lines.append(line)
    return table(" | ".join(header), lines, left=2)


ABLATIONS = {
    "sparse_parity_2000": "nothing",
    "sparse_parity_2_chunks": "four chunks: the published two",
    "sparse_parity_unscaled": "scaled queries",
    "sparse_parity_any_cuts": "aligned cuts",
    "sparse_parity_all_k_at_once": "growing k",
    "sparse_parity_1_chunk": "growing k, and all chunks but one: a random start only",
    "sparse_parity_4_layers": "growing k; four layers instead of two",
}


def ablations() -> str:
    lines = []
    for name, taken_back in ABLATIONS.items():
        rows, _ = read_results(RESULTS / "tasks" / name)
        right = {(r.seed, r.test_k, r.length): r.exact_match for r in rows if r.scheme == "pose"}
        line = [taken_back]
        for k in (2, 4):
            learnt = [seed for seed in {r.seed for r in rows} if right[seed, k, 50] >= 0.9]
            line.append(str(len(learnt)))
            for length in (200, 500):
                found = [right[seed, k, length] for seed in learnt]
                line.append(f"{min(found):.2f}–{max(found):.2f}" if found else "")
        lines.append(line)
    at = "at 200 | at 500"
    return table(
        f"taken back | seeds that learnt k = 2 | {at} | seeds that learnt k = 4 | {at}", lines
    )


SCHEMES = {
    "ppc": "coupled, **predicted by the model** (PPC)",
    "coupled": "coupled, given",
    "rope": "RoPE",
    "pose": "RoPE + PoSE",
    "nope": "NoPE",
    "alibi": "ALiBi",
    "randomized": "randomized",
}


def scratchpad() -> str:
    """Means over seeds; schemes with the same numbers share a line."""
    rows, _ = read_results(RESULTS / "tasks/scratchpad_parity_quick")
    lines: dict[tuple[str, ...], list[str]] = {}
    for scheme, called in SCHEMES.items():
        found = [[r.exact_match for r in rows if (r.scheme, r.length) == (scheme, length)]
                 for length in (20, 100, 200)]  # fmt: skip
        lines.setdefault(tuple(f"{sum(f) / len(f):.3f}" for f in found), []).append(called)
    by_name = [(", ".join(called), *numbers) for numbers, called in lines.items()]
    return table("position IDs | 20 bits | 100 bits | 200 bits", by_name)


def theory(name: str) -> str:
    return (FIGURES / f"{name}.md").read_text(encoding="utf-8").strip()


_MEASURED = (
    untaught_training,
    recovery,
    nulls,
    kinds,
    copies,
    with_and_without_pose,
    reviews,
    planted,
)
_MANY = (stages, ladder, ladder_by_k, beyond, pose_pays)
_TASKS = (task, models, ablations, scratchpad, theory)
TABLES: dict[str, Callable[..., str]] = {
    function.__name__: function for function in (*_MEASURED, *_MANY, *_TASKS)
}


if __name__ == "__main__":
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
        before = path.read_text(encoding="utf-8")
        after = write_tables(before)
        if after != before:
            write_atomically(path, after)
            print(f"{path.relative_to(ROOT)}: tables written anew")
