"""The pages of study/tables, written from the stored results: `python -m study.pages.write_tables`.

tables.yaml gives titles, captions, which results a table shows, and for each kind of table a
template of its columns. Here are the functions that yield their rows, and a few kinds whose columns
depend on the rows. A test fails when a page no longer follows from the results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.results.intervals import Bootstrapped, elementwise, resample
from olmo_sparsity.analysis.results.student_t import FEW_FOR_BOOTSTRAP
from olmo_sparsity.analysis.results.two_measurements import net_differences
from olmo_sparsity.base.files import write_atomically
from study.benchmarks import questions, reasoning
from study.pages.stored import (
    PAGES,
    RESULTS,
    ROOT,
    SHOWN,
    measurements,
    other_table,
    others,
    read_all,
    read_by_part,
    read_counts,
    read_evaluations,
    read_meta,
    read_summary,
    scheme_losses,
    shown_part,
    stored_rows,
    task_rows,
)
from study.tasks.results import format_table
from study.theory.results import cases_table, half_width

HEAD = "<!-- Written by study/pages/write_tables.py from study/tables.yaml; change these. -->"
FEW = (
    f"†: fewer than {FEW_FOR_BOOTSTRAP} documents have targets, or placebo targets; this bootstrap "
    "interval is too narrow ([coverage](../../docs/results.md#how-far-can-intervals-be-trusted))."
)
Rows = Iterator[dict[str, Any]]


def write_page(name: str) -> str:
    page = SHOWN["pages"][name]
    written = [HEAD, f"# Tables: {page['title']}", page["about"]]
    for of in page["tables"]:
        (kind,) = of.keys() - {"title", "caption"}
        written += [f"## {of['title']}", *filter(None, [of.get("caption")]), show(kind, of[kind])]
    if any(" †" in text for text in written):
        written.insert(3, FEW)
    return "\n\n".join(written) + "\n"


def show(kind: str, given: dict[str, Any]) -> str:
    """A table of a kind: by its template, or by the function of that name."""
    if kind not in SHOWN["kinds"]:
        return str(globals()[kind](**given))
    about = SHOWN["kinds"][kind]
    columns, left = about["columns"], about.get("left", 1)
    rows = list(globals()[about["rows"]](**about.get("given", {}) | given))
    lines = [[fill(template, row) for template in columns.values()] for row in rows]
    found = [{line[i] for line in lines} for i in range(len(columns))]
    left_out = about.get("leave_out", ())
    keep = [
        i
        for i, cells in enumerate(found)
        if not ("shared" in left_out and i < left and len(cells) == 1)
        and not ("empty" in left_out and cells == {"–"})
    ]
    headers = [list(columns)[i] for i in keep]
    return table(headers, [[line[i] for i in keep] for line in lines], sum(i < left for i in keep))


def fill(template: str, row: dict[str, Any]) -> str:
    def one(match: re.Match[str]) -> str:
        name, sign, form = match.groups()
        value = row.get(name, math.nan)
        if sign is None:
            return str(value)
        if math.isnan(value):
            return "–"
        ends = [f"{row[f'{name}_{end}']:{form}}" for end in ("low", "high") if sign == "±"]
        return f"{value:{form}}" + (f" [{', '.join(ends)}]" if ends else "")

    filled = re.sub(r"\{(\w+)(?:([:±])([^}]*))?\}", one, template)
    return "–" if filled == "– †" else filled


def table(headers: list[str], lines: Iterable[Iterable[str]], left: int = 1) -> str:
    """The first columns are words, those after them numbers."""
    rows = [list(line) for line in lines]
    assert all(len(row) == len(headers) for row in rows), headers
    rule = ["---"] * left + ["---:"] * (len(headers) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in (headers, rule, *rows))


def ends(numbers: Iterable[float], form: str = ".3f") -> str:
    numbers = list(numbers)
    if not numbers:
        return "–"
    low, high = f"{min(numbers):{form}}", f"{max(numbers):{form}}"
    return low if low == high else f"{low} to {high}"


def with_ends(name: str, value: Bootstrapped) -> dict[str, float]:
    """A number with the ends of its interval."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), value.interval(), strict=True))


# --- measurements ---------------------------------------------------------------------------------

SETS = {
    "gap": "large gap",
    "gap_recurs": "… and recurs",
    "gap_new": "… and is new",
    "bigram": "bigram recurs",
    "names": "a name recurs",
    "every": "every token",
    "named": "last word",
    "planted": "planted",
}


def summaries(
    of: dict[str, str],
    sets: tuple[str, ...] = ("gap",),
    ks: tuple[int, ...] = (1,),
    rules: tuple[str, ...] = (),
) -> Rows:
    """Rows of summaries, next to an unrelated text and the placebo."""
    for target_set, (named, called) in product(sets, of.items()):
        name, shown_units, rule = shown_part(named)
        if target_set == "gap" and "gap" not in set(read_all(name).target_set):
            target_set = "named"
        windows = read_meta(name)["windows"]
        about = {"set": SETS[target_set], "called": called, **windows}
        about["far"] = interpretation_of(windows["distant_states"]).description
        for units, at, k in product(shown_units, rules or (rule,), ks):
            found = read_summary(name, target_set, units)
            if (at, k) not in found.index:
                continue
            row = found.loc[at, k].rename({"hit_low": "hit_rate_low", "hit_high": "hit_rate_high"})
            row = {**row, **about, "units": units, "rule": at, "k": k}
            if target_set != "planted":  # which has no placebo
                row |= read_counts(name, target_set, units, at, k)
                num, documents = row["num_placebo_targets"], row["num_placebo_documents"]
                few = min(row["num_documents"], documents) < FEW_FOR_BOOTSTRAP
                row["few"] = " †" if few else ""
                row["placebo_targets"] = f"{num}, {documents}" if num else "–"
            yield row


PARTS = {
    "later_piece": "continues a word",
    "begun": "begins a word",
    "first_piece": "… of several tokens",
    "whole": "… of one token",
    "word": "… of one, no function word",
    "function_word": "… of one, a function word",
    "no_word": "no word",
}


def word_parts(of: dict[str, str], sets: tuple[str, ...]) -> Rows:
    """Loss reduction by one distant token at whole words, and at pieces of words."""
    for target_set, part, (name, called) in product(sets, PARTS, of.items()):
        rows = read_by_part(name, target_set)
        if part in rows.index:
            about = {"set": SETS[target_set], "part": PARTS[part], "called": called}
            yield {**rows.loc[part], **about}


def far_parts(of: dict[str, str]) -> Rows:
    """Loss reduction by all distant tokens together, over all targets."""
    for name, called in of.items():
        meta = read_meta(name)
        means = {part: of["mean"] for part, of in measurements()[name]["mean_losses"].items()}
        drop, first = (meta["induction"][column] for column in ("drop", "loss_first"))
        about = {"called": called, "long": meta["windows"]["long"], "share": drop / first}
        about["gap"] = means["loss_short"] - means["loss_long"]
        yield {**about, **means, "drop": drop, "loss_first": first}


def gains(name: str, of: dict[str, str]) -> Rows:
    """What distant text gives to all measured tokens, chosen by nothing."""
    tables = other_table(name)
    for measured, called in of.items():
        rows = tables[tables.measurement == measured]
        counts = rows.drop(columns=["measurement", "document"]).astype(float)
        sums = dict(zip(counts.columns, resample(counts), strict=True))
        row = {"called": called, "targets": counts.targets.sum(), "documents": len(rows)}
        for column in ("gain", "gain_unrelated", "key", "key_unrelated", "small"):
            scale = 1 if column.startswith("gain") else 100
            row |= with_ends(
                column, elementwise(np.multiply, scale, sums[column]) / sums["targets"]
            )
        yield row


def gains_beside(name: str, of: dict[str, tuple[str, str]]) -> Rows:
    """The gain of one measurement minus that of another, on the documents that both read."""
    tables = other_table(name).astype({"gain": float, "targets": float})
    for called, names in of.items():
        read = tables[tables.document < min(map(num_documents_read, names))]
        sums = read.pivot(index="document", columns="measurement", values=["gain", "targets"])
        sums = sums[sums["targets"][list(names)].notna().any(axis=1)].fillna(0.0)
        first, second = (
            gain / targets
            for gain, targets in (
                resample(sums[[("gain", name), ("targets", name)]]) for name in names
            )
        )
        means = {"first": first.value, "second": second.value, "documents": len(sums)}
        yield {"called": called, **means, **with_ends("more", first - second)}


def differences(of: dict[str, list[Any]], ks: tuple[int, ...] = (1,)) -> Rows:
    """Two measurements (see `shown_part`); or, of a measurement beside itself, so many units and so
    many: with k of the first and k of the second."""
    for called, (name, other, *own_ks) in of.items():
        for k, other_k in [own_ks] if own_ks else zip(ks, ks, strict=True):
            shown_k = f"{k}" if k == other_k else f"{k} − {other_k}"
            yield {"called": called, "ks": shown_k, **difference(name, other, k, other_k)}


def difference(name: str, other: str, k: int, other_k: int) -> dict[str, float]:
    """Return a measurement minus another on the documents of both: targets of large gap, whatever
    the units and the selector. Documents are resampled for both at once."""
    num_documents = min(num_documents_read(one.partition(":")[0]) for one in (name, other))

    def rows_of(one: str, at: int) -> pd.DataFrame:
        called, units, rule = shown_part(one)
        rows = stored_rows(called)
        rows = rows[(rows.selector == rule) & (rows.document < num_documents)]
        rows = rows[(rows.k == at) & rows.units.isin(units)]
        return rows.assign(units="all", selector="add_one", k=k)

    both = rows_of(name, k), rows_of(other, other_k)
    nets = net_differences(*both).set_index(["target_set", "k"])
    own = [rows.query("distant_part == 'document' and target_set == 'gap'") for rows in both]
    documents = np.union1d(own[0].document, own[1].document)
    sums = (
        rows.groupby("document")[["own_reduction", "gap"]].sum().reindex(documents, fill_value=0.0)
        for rows in own
    )
    first, second = (reduction / gap for reduction, gap in map(resample, sums))
    return {**nets.loc["gap", k], **with_ends("recovery", first - second)}


def num_documents_read(name: str) -> int:
    """Return how many documents a measurement read, with those too short to be measured: a
    document keeps its place among them."""
    counts = read_meta(name)["counts"]
    if counts["documents_left"]:
        raise ValueError(f"{name} is partial: which documents it measured is not stored")
    return int(counts["documents_measured"] + counts["documents_too_short"])


def chosen_words(own: str, others: dict[str, tuple[str, str]]) -> Rows:
    """What one model recovers by words that another one chose, on the targets of both. `others`:
    the measurement by these words → that of their choice, and its name."""

    def rows_of(name: str, k: int) -> pd.DataFrame:
        rows = stored_rows(name)
        rows = rows[(rows.target_set == "gap") & (rows.distant_part == "document") & (rows.k == k)]
        return rows.set_index(["document", "target"])

    def cost(name: str) -> float:
        per_target = read_all(name).token_forwards_per_target.max()
        return float(per_target * read_meta(name)["model"]["num_parameters"])

    for name, (ranked, called) in {own: (own, "SmolLM2 itself"), **others}.items():
        for k in (1, 2, 4):
            best_of_own = rows_of(own, 1).own_reduction.rename("best_of_own")
            rows = rows_of(name, k).join(best_of_own, how="inner")
            columns = ["gap", "own_reduction", "best_of_own"]
            gap, reduction, best = resample(rows.groupby("document")[columns].sum())
            row = {"called": called, "k": k, "cost": cost(ranked) / cost(own), "targets": len(rows)}
            row |= with_ends("recovery", reduction / gap)
            yield row | with_ends("difference", (reduction - best) / gap)


def pairs(
    name: str, of: dict[str, dict[str, str]], sets: tuple[str, ...], ks: tuple[int, ...] = (1, 4)
) -> Rows:
    """Units that one model ranked, evaluated by another; a row for many ordered pairs: the least
    and the most of those with a gap that differs from 0, and the ends of intervals that decide.
    `measurements`: a regular expression of their names."""
    all_rows = other_table(name)
    all_rows = all_rows[all_rows.selector == "add_one"]
    for (called, asked), target_set, k in product(of.items(), sets, ks):
        rows = all_rows[all_rows.measurement.str.fullmatch(asked["measurements"])]
        rows = rows.query("units == @asked['units'] and target_set == @target_set and k == @k")
        if rows.empty:  # a control is measured on one set of targets alone
            continue
        told = rows.recovery.count()
        row = {"called": called, "set": SETS[target_set], "k": k, "gap": ends(rows.gap, ".2f")}
        row["pairs"] = f"{len(rows)}" if told in (0, len(rows)) else f"{told} of {len(rows)}"
        for number, low, high in (
            ("recovery", rows.low.min(), math.nan),
            ("unrelated", math.nan, rows.unrelated_high.max()),
            ("removal", math.nan, rows.removal_high.max()),
            ("excess_nats", rows.excess_nats_low.min(), rows.excess_nats_high.max()),
        ):
            bounds = [f"{end:.2f}" for end in (low, high) if not math.isnan(end)]
            row[number] = ends(rows[number].dropna(), ".2f")
            row[f"{number}_ends"] = ", ".join(bounds) or "–"
        yield row


def stored_table(of: str, where: str = "", names: dict[str, str] | None = None) -> Rows:
    """Rows of a benchmark's table, as they are. `names`: those of a first column, in order."""
    rows = other_table(of)
    rows = rows.query(where) if where else rows
    if names:
        first = rows.columns[0]
        rows = rows.set_index(first, drop=False).loc[list(names)].assign(called=[*names.values()])
    yield from rows.to_dict("records")


def checks_of_gpu(of: str) -> Rows:
    for row in others()[of]["rows"]:
        yield row | {"holds": "yes" if row["holds"] else "no"}


# --- training -------------------------------------------------------------------------------------


def by_position(of: dict[str, str]) -> str:
    """Held-out loss of the last evaluation, within the training length and beyond it."""
    lines = []
    for name, called in of.items():
        *_, row = read_evaluations(name)
        losses = {f"tokens {part['from']} to {part['to']}": part["loss"] for part in row["heldout"]}
        lines.append([called, *(f"{loss:.2f}" for loss in losses.values())])
    return table(["model", *losses], lines)


def first_evaluations(of: dict[str, str], least: float) -> Rows:
    """The first evaluation with an induction check of at least so many nats."""
    for name, called in of.items():
        rows = read_evaluations(name)
        yield next(row for row in rows if row["induction_drop"] >= least) | {"called": called}


def schemes(of: dict[str, str], prefix: str, seeds: list[int], longs: list[int]) -> str:
    """Models that are extended beyond their training length: the lowest to the highest of seeds."""
    losses, lines = scheme_losses(prefix, seeds), []
    for name, called in of.items():
        cells = [ends(losses.loc[name][between], ".2f") for between in losses.columns]
        trained = name.startswith("some")  # the others were not measured
        names = [f"{prefix}_{name}_seed{seed}" for seed in seeds] if trained else []

        def found(long: int, target_set: str, column: str, form: str, of: list[str] = names) -> str:
            rows = (read_summary(f"{one}_{long}", target_set) for one in of)
            return ends([row.loc["add_one_screened", 1][column] for row in rows], form)

        cells += [found(long, "bigram", "recovery", ".2f") for long in longs]
        cells.append(found(longs[-1], "bigram", "unrelated", ".2f"))
        cells += [found(longs[-1], "every", column, "+.3f") for column in ("gap", "excess_nats")]
        lines.append([*called.split(", "), *cells])
    header = ["scheme", "further steps", *(f"loss, {between}" for between in losses.columns)]
    header += [*(f"transfer, {long} far" for long in longs), "unrelated token"]
    return table([*header, "all distant tokens, nats", "one of them"], lines, left=2)


# --- tasks and theory -----------------------------------------------------------------------------


def task(of: list[str]) -> str:
    return format_table([row for name in of for row in task_rows(name)])


def by_seed(of: dict[str, str], cells: list[tuple[int, int]]) -> str:
    """`cells`: k and length."""
    lines = []
    for name, called in of.items():
        rows = task_rows(name)
        right = {(r.train_k, r.seed, r.test_k, r.length): r.exact_match for r in rows}
        for train_k, seed in sorted({key[:2] for key in right}):
            exact = (f"{right[train_k, seed, *cell]:.3f}" for cell in cells)
            lines.append([str(train_k), called, str(seed), *exact])
    names = [f"k = {k} at {length}" for k, length in cells]
    return table(["K_train", "training", "seed", *names], lines, left=3)


def theory(of: str, models: list[str]) -> str:
    """Cases of a theory experiment."""
    columns = ("eta_train", "eta_test", "bound_stated", "bound_improved")
    summary = pd.DataFrame(others()[of]["table"]).astype(dict.fromkeys(columns, float))
    return cases_table(summary, models)


# --- training text chosen by a score --------------------------------------------------------------


def areas(of: str, names: dict[str, str]) -> Rows:
    """AUROC of each score, whole documents against each kind that was made worse."""
    rows = other_table(of).set_index(["score", "kind"])
    for name, called in names.items():
        more = rows.loc[name, "joined"][["more", "more_low", "more_high"]]
        row = {"called": called, **more}
        for kind, of_kind in rows.loc[name].iterrows():
            row |= {f"{kind}{end}": of_kind[f"auroc{end}"] for end in ("", "_low", "_high")}
        yield row


def choice_differences(of: str, steps: int, between: dict[str, list[str]]) -> Rows:
    """A choice minus the mean of others, paired by seed; Student's t over seeds."""
    rows = other_table(of).query("steps == @steps").set_index(["choice", "seed"])
    for called, (first, *rest) in between.items():
        more = rows.loc[first] - rows.loc[rest].groupby("seed").mean()
        row = {"called": called, "by_seed": ", ".join(f"{n:+.4f}" for n in more.loss_far.dropna())}
        for name, of_seeds in more.dropna(axis=1, how="all").items():
            numbers = of_seeds.dropna().to_numpy()
            mean, half = numbers.mean(), half_width(numbers)
            row |= {str(name): mean, f"{name}_low": mean - half, f"{name}_high": mean + half}
        yield row


# --- sources --------------------------------------------------------------------------------------


def printed(of: str, run: str = "five") -> str:
    """What a benchmark prints of its stored rows."""
    if of == "reasoning":
        text = reasoning.table(reasoning.read(RESULTS / "reasoning.jsonl"))
    else:
        text = questions.tables(questions.read_rows(RESULTS / f"{of}.jsonl", run))
    return f"```text\n{text}\n```"


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for name in SHOWN["pages"]:
        path = PAGES / f"{name}.md"
        after = write_page(name)
        if not path.exists() or path.read_text(encoding="utf-8") != after:
            write_atomically(path, after)
            print(f"{path.relative_to(ROOT)}: written anew")
