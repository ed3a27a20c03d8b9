"""Tables of README and docs are those of the stored results, and these can be made again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

from docs.write_tables import (
    NET_EXCESS,
    RESULTS,
    ROOT,
    TABLES,
    read_meta,
    read_summary,
    span,
    write_tables,
)
from olmo_sparsity.tasks.experiment import fixed_settings, list_trials, with_defaults
from olmo_sparsity.tasks.results import read_results
from olmo_sparsity.tasks.settings import load_settings

PAGES = {str(path.relative_to(ROOT)): path.read_text()
         for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}  # fmt: skip


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- table:" in PAGES[page]])
def test_tables_are_those_of_the_stored_results(page: str) -> None:
    assert write_tables(PAGES[page]) == PAGES[page], "run `python docs/write_tables.py`"


def test_every_table_that_can_be_written_is() -> None:
    written = set(re.findall(r"<!-- table: (\w+)", "".join(PAGES.values())))
    assert written == set(TABLES)


def test_no_seed_that_learnt_is_no_range() -> None:
    assert [span([]), span([0.5]), span([0.75, 0.5])] == ["–", "0.500", "0.500–0.750"]


# --- tasks ----------------------------------------------------------------------------------------

STORED_TASKS = sorted((RESULTS / "tasks").glob("*/accuracy.parquet"))


@pytest.mark.parametrize("path", STORED_TASKS, ids=lambda path: path.parent.name)
def test_the_page_says_how_each_task_result_was_made(path: Path) -> None:
    rows, meta = read_results(path.parent)
    # How many at a time changes nothing in what comes out.
    command = re.sub(r" --num_workers=[0-9]+", "", meta["command"])
    assert f"\n{command}\n" in PAGES["docs/results_tasks.md"]
    few = {"long_rope": 2, "k10": 1, "k12": 1, "k12_longer": 1}  # as its page says
    name = path.parent.name.removeprefix("sparse_parity_neox_")
    assert len({row.seed for row in rows}) >= few.get(name, 3)
    assert all(row.seed > 0 for row in rows), "settings were chosen on seed 0"


@pytest.mark.parametrize("path", STORED_TASKS, ids=lambda path: path.parent.name)
def test_the_command_of_a_stored_result_still_asks_for_it(path: Path) -> None:
    rows, meta = read_results(path.parent)
    program, command, config, *overrides = shlex.split(meta["command"])
    settings = load_settings(config, overrides)
    assert (program, command) == ("olmo-sparsity", "task")
    assert fixed_settings(settings) == with_defaults(meta["settings"])
    found = {(row.scheme, row.train_k, row.seed) for row in rows}
    assert found == {(t.scheme, t.train_k, t.seed) for t in list_trials(settings)}


# --- the headline, from the rows of its targets ---------------------------------------------------


@pytest.mark.parametrize(
    ("name", "units"),
    [(n, units) for of in NET_EXCESS.values() for n in of for units in read_meta(n)["units"]],
)
def test_the_headline_follows_from_the_stored_rows(name: str, units: str) -> None:
    """Net excess of add_one from four stored tables, with no code of the package."""
    folder = RESULTS / "measurements" / name
    losses, targets, recovery = (
        pd.read_parquet(folder / f"{table}.parquet") for table in ("losses", "targets", "recovery")
    )
    key, rows = ["document", "target"], recovery[recovery.units == units]
    rows = rows[(rows.selector == "add_one")].merge(losses, on=key)
    rows = rows.merge(targets[targets.target_set == "gap"], on=[*key, "far_part"])
    for k, at_k in rows.groupby("k"):
        excess, parts = {}, {}
        for part, long in (("document", "loss_long"), ("placebo", "placebo_loss_long")):
            some = at_k[at_k.far_part == part]
            # Three foreign draws of a target are one third each.
            lost = some.groupby(["control", *key]).loss_set.mean().unstack("control")
            gap = some.set_index(key).eval(f"loss_short - {long}").groupby(level=key).first()
            excess[part] = (lost.foreign - lost.own).sum() / gap.sum()
            parts[part] = pd.DataFrame({"gap": gap, "nats": lost.foreign - lost.own})
        stored = read_summary(name, "gap", units).loc["add_one", k]
        assert excess["document"] == pytest.approx(stored.excess, abs=1e-4)
        assert excess["document"] - excess["placebo"] == pytest.approx(stored.net, abs=1e-4)
        # At equal gaps: to each target of the placebo the five own ones around it.
        own = parts["document"].sort_values("gap", kind="stable")
        below = [(own.gap < gap).sum() - 2 for gap in parts["placebo"].gap]
        around = pd.concat([own[min(max(n, 0), len(own) - 5) :][:5] for n in below])
        of_equal = around.nats.sum() / around.gap.sum()
        assert of_equal - excess["placebo"] == pytest.approx(stored.net_equal, abs=1e-3)
