"""How often 95% intervals of net excess hold the truth when few documents are measured.

`python -m study.coverage [--draws N]` takes stored measurements as the population: their net excess
is the truth. It draws documents from one with replacement, computes net excess and its interval by
the package's own statistics, as `measure` stores it (percentile bootstrap) and prints it (stretched
to Student's t below 25 documents), and counts the intervals that hold the truth.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.statistics import beyond_controls, with_t_intervals
from study.pages.stored import read_meta, rule_of, stored_rows
from study.tables_of_rows import markdown

POPULATIONS = {
    "Wikipedia": "prose_wikipedia_contextual_seed1",
    "C4": "prose_c4_contextual_seed2",
    "Python, four targets a file": "packages_seed4_contextual",
    "novels, SmolLM2": "smollm2_novels",
}
SIZES = (5, 8, 12, 20, 25, 40)


def population(name: str) -> pd.DataFrame:
    """Rows of `pair` of targets of large gap, one unit, by the form of add_one that was used."""
    rows = stored_rows(name)
    rows = rows[(rows.target_set == "gap") & (rows.k == 1) & (rows.selector == rule_of(name))]
    return rows[rows.units == read_meta(name)["units"][0]]


def parts(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    return rows[rows.far_part == "document"], rows[rows.far_part == "placebo"]


def draw(rows: pd.DataFrame, num: int, draws: int, seed: int = 0) -> Iterator[pd.DataFrame]:
    """Yield `draws` samples of so many documents that about `num` carry placebo targets."""
    of_document = dict(list(rows.groupby("document")))
    numbers = np.array(list(of_document))
    num_drawn = round(num * len(numbers) / parts(rows)[1].document.nunique())
    generator = np.random.default_rng(seed)
    for _ in range(draws):
        chosen = generator.choice(numbers, num_drawn)
        yield pd.concat([of_document[n].assign(document=i) for i, n in enumerate(chosen)])


def coverage(rows: pd.DataFrame, num: int, draws: int) -> dict[str, float]:
    """Return the share of intervals that hold the truth, and their mean width."""
    own, placebo = parts(rows)
    truth = [(part.own - part.foreign).sum() / part.gap.sum() for part in (own, placebo)]
    found = []
    for sample in draw(rows, num, draws):
        own, placebo = parts(sample)
        if min(own.document.nunique(), placebo.document.nunique()) > 2:
            counts = {
                "num_documents": own.document.nunique(),
                "num_placebo_documents": placebo.document.nunique(),
            }
            found.append({**beyond_controls(own, placebo), **counts})
    summary = pd.DataFrame(found)
    shares: dict[str, float] = {}
    for name, table in (("before", summary), ("after", with_t_intervals(summary))):
        holds = table.net_low.le(truth[0] - truth[1]) & table.net_high.ge(truth[0] - truth[1])
        shares |= {name: holds.mean(), f"width_{name}": (table.net_high - table.net_low).mean()}
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=400)
    draws = parser.parse_args().draws
    lines = [["population", "documents with placebo targets", "bootstrap", "t-based"]]
    lines[0] += ["width", "width, t"]
    for called, name in POPULATIONS.items():
        rows = population(name)
        for num in (size for size in SIZES if size <= parts(rows)[1].document.nunique()):
            found = coverage(rows, num, draws)
            shown = (found[key] for key in ("before", "after", "width_before", "width_after"))
            lines.append([called, str(num), *(f"{number:.2f}" for number in shown)])
    print(markdown(lines))


if __name__ == "__main__":
    main()
