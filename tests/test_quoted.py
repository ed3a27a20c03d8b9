"""What README, natural_language.md, results.md and the rows of paper_map.md quote is stored.

Tables are written from the results (docs/write_tables.py). Sentences that quote are made here from
them and looked for on their page. Whatever other decimal stands in the prose of the first three
must stand in a table of the same section, be one seed's accuracy there, or be named below as not
stored; an interval must stand there whole. (Pages full of tables hold many numbers of two digits:
this finds what nobody measured, a sentence of SENTENCES what has changed.)
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from analysis.ladder import rank_correlation
from analysis.summary import INDUCTION_NATS
from docs.write_tables import (
    COPIES,
    RESULTS,
    ROOT,
    TABLES,
    read_kinds,
    read_ladder,
    read_losses,
    read_meta,
    read_summary,
    share_of_own_word,
    shown,
    write_tables,
)
from olmo_sparsity.tasks.experiment import fixed_settings, list_trials
from olmo_sparsity.tasks.results import read_results
from olmo_sparsity.tasks.settings import load_settings

PAGES = {str(path.relative_to(ROOT)): path.read_text()
         for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}  # fmt: skip
README, NATURAL, TASKS = "README.md", "docs/natural_language.md", "docs/results.md"
PAPER_MAP = {
    line.split(" | ")[0].removeprefix("| "): line
    for line in PAGES["docs/paper_map.md"].splitlines()
    if re.match(r"\| [A-Z]\d+ \|", line)
}
"""By claim: N1, …"""


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- table:" in PAGES[page]])
def test_tables_are_those_of_the_stored_results(page: str) -> None:
    assert write_tables(PAGES[page]) == PAGES[page], "run `python docs/write_tables.py`"


def test_every_table_that_can_be_written_is() -> None:
    written = set(re.findall(r"<!-- table: (\w+)", "".join(PAGES.values())))
    assert written == set(TABLES)


# --- tasks ----------------------------------------------------------------------------------------

STORED_TASKS = sorted((RESULTS / "tasks").glob("*/accuracy.parquet"))


@pytest.mark.parametrize("path", STORED_TASKS, ids=lambda path: path.parent.name)
def test_the_page_says_how_each_task_result_was_made(path: Path) -> None:
    rows, meta = read_results(path.parent)
    assert f"<!-- table: task {path.parent.name} -->" in PAGES[TASKS]
    # How many at a time changes nothing in what comes out.
    assert f"{re.sub(r' --num_workers=[0-9]+', '', meta['command'])}\n" in PAGES[TASKS]
    assert len({row.seed for row in rows}) >= 3
    assert all(row.seed > 0 for row in rows), "settings were chosen on seed 0"


@pytest.mark.parametrize("path", STORED_TASKS, ids=lambda path: path.parent.name)
def test_the_command_of_a_stored_result_still_asks_for_it(path: Path) -> None:
    rows, meta = read_results(path.parent)
    program, command, config, *overrides = shlex.split(meta["command"])
    settings = load_settings(config, overrides)
    assert (program, command) == ("olmo-sparsity", "task")
    assert json.loads(json.dumps(fixed_settings(settings))) == meta["settings"]
    found = {(row.scheme, row.train_k, row.seed) for row in rows}
    assert found == {(t.scheme, t.train_k, t.seed) for t in list_trials(settings)}


# --- sentences ------------------------------------------------------------------------------------

Sentences = Iterator[tuple[str, str]]
"""A page, or a claim of paper_map.md, and what it must say."""


def mean(name: str, scheme: str, k: int | None, length: int) -> str:
    """Exact match over seeds, as prose writes it: .957"""
    rows, _ = read_results(RESULTS / "tasks" / name)
    asked = (scheme, k, length)
    found = [row.exact_match for row in rows if (row.scheme, row.test_k, row.length) == asked]
    return f"{sum(found) / len(found):.3f}".removeprefix("0")


def sentences_on_tasks() -> Sentences:
    pose, rope = (
        [mean("needle_quick", scheme, None, length) for length in (200, 500)]
        for scheme in ("pose", "rope")
    )
    said = f"{pose[0]} with PoSE at 200 tokens and {pose[1]} at 500, "
    yield README, f"{said}against {rope[0]} and {rope[1]} with RoPE alone"
    quick = {
        (scheme, k): mean("sparse_parity_quick", scheme, k, 200)
        for scheme in ("pose", "rope")
        for k in (2, 4)
    }
    yield README, f"k = 2 {quick['pose', 2]} against {quick['rope', 2]}, k = 4 {quick['pose', 4]}"
    yield README, f"against {quick['rope', 4]} (six seeds"
    learnt, reach = 0, 0
    for name in ("sparse_parity_quick", "sparse_parity_k_train"):
        rows, _ = read_results(RESULTS / "tasks" / name)
        right = {(r.scheme, r.train_k, r.seed, r.test_k, r.length): r.exact_match for r in rows}
        for scheme, most, seed in sorted({(r.scheme, r.train_k or 0, r.seed) for r in rows}):
            if scheme == "pose" and right[scheme, most, seed, most, 50] >= 0.99:
                learnt += 1
                ks = range(2, most + 1, 2)
                far = [right[scheme, most, seed, k, 200] for k in ks]
                reach += min(far) >= 0.9
                assert all(right[scheme, most, seed, k, 200] > 0.68 for k in ks)
    assert (learnt, reach) == (9, 4)  # said in words
    yield README, "on each of nine models that learnt the task, nine in ten right for every k"
    yield README, "≤ K_train on four of them"
    grown = [mean("sparse_parity_2000", scheme, 4, 200) for scheme in ("pose", "rope")]
    yield README, f"growing k, {grown[0]} against {grown[1]} after a shorter training"
    chains = [mean("variable_assignment_quick", scheme, 50, 50) for scheme in ("ppc", "pose")]
    yield README, f"{chains[0]} of chains of fifty with PPC, in {chains[1]} with RoPE + PoSE"
    rows, _ = read_results(RESULTS / "tasks/variable_assignment_quick")
    by_seed = sorted(
        r.exact_match for r in rows if (r.scheme, r.test_k, r.length) == ("ppc", 50, 50)
    )
    assert by_seed[1:] == [1.0, 1.0]
    said = f"{by_seed[0]:.3f} on one seed of three, .99 was wanted".removeprefix("0")
    yield README, f"partly on variable assignment ({said})"
    rope = [mean("scratchpad_parity_solved", "rope", None, length) for length in (10, 20, 40)]
    yield README, f"RoPE alone has {rope[0]} of 10 bits, {rope[1]} of 20 and {rope[2]} of 40"
    yield README, f"{mean('addition_quick', 'coupled', None, 100)} of sums of 100 digits"


def sentences_on_the_claim() -> Sentences:
    with_context, alone = (read_summary(f"induction_{far}") for far in ("contextual", "isolated"))
    own, foreign = (with_context.loc["add_one", control] for control in ("own", "foreign"))
    assert 0.95 <= own.recovery[4] <= 1.1  # said in words
    first = own.recovery[1]
    yield README, f"gives back {first:.2f} of what they all give, four as much as all"
    yield README, f"of another text, the best one gives {foreign.recovery[1]:.2f}."
    without = alone.loc["add_one", "own", 1].recovery
    of_another = alone.loc["add_one", "foreign", 1].recovery
    yield (
        README,
        f"without its context gives back {without:.2f}, of another text {of_another:.2f} (",
    )
    said = f"one of 64 gives back {shown(own.loc[1], 'recovery', '.2f')}, of another text "
    said += f"{shown(foreign.loc[1], 'recovery', '.2f')}; eight, beyond those of another text, "
    yield README, f"{said}{shown(own.loc[8], 'excess')} (0.5 was wanted)"
    shown_alone = shown(alone.loc["add_one", "own", 8], "excess")
    yield README, f"not where they are shown alone ({shown_alone})"
    nothing = read_summary("induction_contextual", "zero_gap").loc["add_one", "own", 1]
    yield NATURAL, f"show nothing: an excess of {shown(nothing, 'excess')} at k = 1"
    losses = {name: read_losses(f"{name}_contextual") for name in COPIES}
    price = [losses[name].loss_long["mean"] for name in COPIES]
    said = f"{price[0]:.2f} nats a token with the long window, "
    how = "after a school and half the text, "
    yield README, f"Copying has a price: {said}{how}against {price[1]:.2f} of the other"
    yield (
        NATURAL,
        f"The price: {said}where the model that was not taught to copy has {price[1]:.2f}",
    )
    meta, gap = read_meta("induction_contextual"), losses["induction"].diff(axis=1).iloc[0, -1]
    drop, threshold = f"{meta['gate']['drop']:.2f}", meta["targets"]["threshold"]
    yield NATURAL, f"a drop of {drop} nats on repeated passages"
    yield NATURAL, f"{own.num_targets[1]} targets in {own.num_documents[1]} documents"
    yield README, f"these numbers are of {own.num_targets[1]} targets"
    tables = ("stages_contextual", "ladder_contextual", "ladder_isolated", "beyond_contextual")
    few = [count for name in tables for count in read_ladder(name, 1).num_documents]
    said = f"{own.num_documents[1]} of them in the first table, {min(few)} to {max(few)} where"
    yield README, said
    yield NATURAL, f"at least {threshold:.2f} nats, {own.gap[1]:.2f} in the mean;"
    yield NATURAL, f"over all targets the mean gap is {abs(gap):.2f}"
    kinds = read_kinds("induction_contextual")
    words = kinds.num_targets[["equal", "same_family"]].sum()
    again = f"{kinds.excess_recovery['equal']:.2f}".lstrip("0")
    said = f"where the chosen token is the target's own word, it gives {again} of the gap beyond"
    yield README, said
    yield NATURAL, f"on {words} of the {own.num_targets[1]} targets the first choice is"
    excess = {
        (selector, k): shown(with_context.loc[selector, "own", k], "excess")
        for selector in ("add_one", "divergence", "random")
        for k in (1, 8)
    }
    said = f"{excess['add_one', 8]} at k = 8, recovery {own.recovery[8]:.2f} against "
    said += f"{foreign.recovery[8]:.2f}; at k = 1 {excess['add_one', 1]}, {first:.2f} against "
    yield "N1", f"{said}{foreign.recovery[1]:.2f}. Shown alone: {shown_alone}"
    yield "N1", f"taught to copy (drop {drop} nats)"
    said = f"{excess['add_one', 1]} at k = 1 against {excess['random', 1]} for `random`, "
    said += f"{excess['add_one', 8]} at k = 8 against {excess['random', 8]}; `divergence` "
    yield "N2", f"{said}{excess['divergence', 1]} and {excess['divergence', 8]}"
    said = f"a drop of {drop} nats; with their context {excess['add_one', 8]}, alone {shown_alone}"
    yield "N7", said
    nats = {}
    for name, far in ((name, far) for name in COPIES for far in ("contextual", "isolated")):
        nats[name, far] = shown(
            read_summary(f"{name}_{far}").loc["add_one", "own", 8], "excess_nats", ".2f"
        )
    said = f"on the same targets {nats['induction', 'contextual']} nats with context against "
    said += f"{nats['no_induction', 'contextual']}, alone {nats['induction', 'isolated']} against "
    yield "N7", f"{said}{nats['no_induction', 'isolated']}"
    of_kind = [
        {kind: shown(row, "enrichment", ".2f") for kind, row in read_kinds(name).iterrows()}
        for name in ("induction_contextual", "induction_isolated", "quick_exact_128")
    ]
    said = "with their context: equal {equal}; names {name}.".format(**of_kind[0])
    said += " Shown alone, on the same model {equal} and {name},".format(**of_kind[1])
    yield "N4", f"{said} on one that fails the gate {{equal}} and {{name}}".format(**of_kind[2])


def sentences_on_the_claim_made_again() -> Sentences:
    with_context, alone = (read_summary(f"induction_again_{far}").loc["add_one"]
                           for far in ("contextual", "isolated"))  # fmt: skip
    own = with_context.loc["own"]
    drop = read_meta("induction_again_contextual")["gate"]["drop"]
    yield NATURAL, f"a drop of {drop:.2f} nats, {own.num_targets[1]} targets"
    foreign = with_context.loc["foreign", 1].recovery
    said = f"gives back {own.recovery[1]:.2f}, an unrelated text's {foreign:.2f}; excess at k = 8 "
    said += f"{shown(own.loc[8], 'excess')} with context, "
    yield NATURAL, f"{said}{shown(alone.loc['own', 8], 'excess')} alone"


def sentences_on_stages() -> Sentences:
    rows = read_ladder("stages_contextual", 1)
    value, low, high = rank_correlation(rows["drop"], rows.excess)
    yield "N9", f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"
    passes = rows["drop"] >= INDUCTION_NATS
    assert (sum(~passes), sum(passes)) == (10, 11)  # said in words
    failing, passing = rows.excess[~passes].max(), rows.excess[passes].min()
    for page in (README, NATURAL):
        said = f"an excess of at most {failing:.2f}, the eleven that pass it {passing:.2f} and more"
        yield page, said


def sentences_on_why_excess_falls() -> Sentences:
    small = [f"stages_600_seed{seed}" for seed in (1, 2, 3)]
    names = (*small, "induction_contextual")
    shares = [f"{share_of_own_word(name):.2f}" for name in names]
    excess = [read_kinds(name) for name in names]
    said = f"{shares[0]}, {shares[1]} and {shares[2]} against {shares[3]}; where it is the target's"
    equal = [shown(kinds.loc["equal"], "excess_recovery", ".2f") for kinds in excess]
    said += f" own word, excess {equal[0]}, {equal[1]} and {equal[2]} against {equal[3]}."
    yield "N11", said
    spans = {}
    for kind in ("name", "other"):
        found = [kinds.excess_recovery[kind] for kinds in excess]
        spans[kind] = f"{min(found[:3]):.2f} to {max(found[:3]):.2f} against {found[3]:.2f}"
    yield "N11", f"names {spans['name']}, other words {spans['other']}"
    short = re.compile(r"\b0(?=\.)")
    yield NATURAL, short.sub("", f"names {spans['name']}, other words {spans['other']}")
    first = [f"{kinds.excess_recovery['equal']:.2f}" for kinds in excess]
    said = f"the excess is {first[0]}, {first[1]} and {first[2]} against {first[3]}:"
    yield NATURAL, short.sub("", said)
    said = f"{shares[0]}, {shares[1]} and {shares[2]} of the smaller models' chosen targets and "
    yield NATURAL, short.sub("", f"{said}{shares[3]} of the larger one's")


def sentences_on_the_ladder() -> Sentences:
    for far, k in (("isolated", 8), ("contextual", 8), ("contextual", 1)):
        rows = read_ladder(f"ladder_{far}", k)
        assert len(rows) == 24
        value, low, high = rank_correlation(rows["drop"], rows.excess)
        yield "N6", f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"
    one, eight = (
        {
            positions: [f"{mean:.2f}" for mean in some.groupby("num_parameters").excess.mean()]
            for positions, some in read_ladder("ladder_contextual", k).groupby("positions")
        }
        for k in (1, 8)
    )
    said = f"with PoSE {', '.join(eight['pose'])} from 0.4M to 6.6M, with RoPE alone "
    yield "N6", said + ", ".join(eight["contiguous"])
    yield "N6", f"{', '.join(one['pose'])} and {', '.join(one['contiguous'])} ("
    pose, rope = ([mean.lstrip("0") for mean in one[name]] for name in ("pose", "contiguous"))
    said = f"one far token gives {pose[0]} and {rope[0]} beyond the control at 0.4M parameters, "
    yield NATURAL, f"{said}{pose[3]} and {rope[3]} at 6.6M"
    at_8 = [", ".join(mean.lstrip("0") for mean in eight[name]) for name in eight]
    yield NATURAL, f"(k = 8 with context: {at_8[1]} with PoSE, {at_8[0]} with RoPE alone)"
    said = f"{pose[0]}, {pose[1]}, {pose[2]} and {pose[3]} at 0.4M, 1.2M, 2.7M and 6.6M parameters"
    yield README, said
    said = f"{pose[0]} at 0.4M parameters, {pose[1]} at 1.2M, {pose[2]} at 2.7M and {pose[3]} at "
    yield README, f"{said}6.6M with PoSE, and {rope[0]}, {rope[1]}, {rope[2]} and {rope[3]} with"
    for k in (2, 4, 8):  # said in words: above N1's threshold
        rows = read_ladder("ladder_contextual", k)
        assert rows.excess.min() >= 0.5
        assert rows.excess_low.min() > 0.3
    rows = read_ladder("ladder_contextual", 1).set_index(["num_parameters", "seed", "positions"])
    excess = rows.excess.unstack()
    apart = (excess.pose - excess.contiguous).groupby("num_parameters").mean()
    nats = (rows.excess * rows.gap).unstack()
    assert (excess.pose > excess.contiguous).sum() == 11
    assert (nats.pose > nats.contiguous).all()
    said = f"by {apart.iloc[0]:.2f} in the mean at 0.4M and {apart.iloc[-1]:.2f} at 6.6M"
    yield NATURAL, re.sub(r"\b0(?=\.)(?!\.4M)", "", said)
    readings = []
    for far in ("contextual", "isolated"):
        rows = read_ladder(f"ladder_{far}", 8)
        rows = rows[(rows.positions == "pose") & rows.model.str.contains("2.7M", regex=False)]
        readings.append([shown(row, "excess") for _, row in rows.sort_values("seed").iterrows()])
    assert len(readings[0]) == 3
    pairs = zip(*readings, strict=True)
    yield "N8", ", ".join(f"{here} and {alone}" for here, alone in pairs)


def sentences_beyond_the_training_length() -> Sentences:
    rows = read_ladder("beyond_contextual", 1)
    at = rows.set_index(["seed", "positions"]).sort_index()
    for seed in (1, 2, 3):
        pose, rope = (at.loc[seed, positions] for positions in ("pose", "contiguous"))
        nats_of_both = [shown(row, "excess", scale=row.gap) for row in (pose, rope)]
        yield "N10", " against ".join(nats_of_both)
    means = rows.groupby("positions")[["recovery", "loss_long"]].mean()
    said = f"one far token of 192 gives back {means.recovery['pose']:.2f} of the gap"
    yield README, said
    nats = (at.gap * at.excess).unstack()
    rope = f"{nats['contiguous'].min():.1f} to {nats['contiguous'].max():.1f} nats beyond it"
    assert f"{nats['pose'].min():.1f}" == f"{nats['pose'].max():.1f}"
    yield README, f"{nats['pose'].min():.1f} nats beyond another document's; with RoPE alone {rope}"
    rope = rope.removesuffix(" nats beyond it")
    yield README, f"{nats['pose'].min():.1f} nats more than of another text; with RoPE alone {rope}"
    costs = means.loss_long
    yield README, f"{costs['contiguous']:.2f} nats a token instead of {costs['pose']:.2f}."
    costs = at.loss_long.unstack().agg(lambda row: row["contiguous"] - row["pose"], axis=1)
    said = f"costs it {costs.min():.1f} to {costs.max():.1f} nats a token against PoSE"
    yield NATURAL, said


def sentences_on_reviews() -> Sentences:
    numbers, losses = {}, {}
    for claim, text in (("N13", "repeats"), ("N14", "running")):
        names = [f"reviews_{text}_seed{seed}" for seed in (1, 2, 3)]
        numbers[text] = [read_summary(name).loc["add_one", "own", 8] for name in names]
        losses[text] = [read_losses(name).loss_long["mean"] for name in names]
        drops = listed([f"{read_meta(name)['gate']['drop']:.2f}" for name in names])
        excess = listed([shown(row, "excess") for row in numbers[text]])
        yield claim, f"drops of {drops} nats; excess at k = 8 {excess}"
        yield NATURAL, f"a drop of {drops} nats"
        if text == "repeats":
            yield NATURAL, f"excess at k = 8 is {excess}"
            again = listed([f"{read_kinds(name).excess_recovery['equal']:.2f}" for name in names])
            own = listed([f"{share_of_own_word(name):.2f}" for name in names])
            there = f"{share_of_own_word('induction_contextual'):.2f}"
            short = re.compile(r"\b0(?=\.)")
            yield NATURAL, short.sub("", f"the excess at k = 1 is {again}, as on Wikipedia")
            yield NATURAL, short.sub("", f"such words are {own} of the targets, and {there} there")
    found = sorted(row.excess for row in numbers["repeats"])
    yield README, f"on film reviews {found[0]:+.2f} to {found[2]:+.2f} on three seeds"
    # Said in words: missed on two seeds, every interval above 0.3; better by over a nat; the last
    # model of running text has more than half of a gap that is half as large.
    assert sum(excess >= 0.5 for excess in found) == 1
    assert min(row.excess_low for row in numbers["repeats"]) > 0.3
    assert min(losses["repeats"]) - max(losses["running"]) > 1
    assert numbers["running"][2].excess > 0.5
    assert max(row.excess for row in numbers["running"][:2]) < 0.5
    gaps = [numbers[text][2].gap for text in ("running", "repeats")]
    assert 0.4 < gaps[0] / gaps[1] < 0.6


def listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def sentences_on_models_that_do_not_copy() -> Sentences:
    drop = read_meta("quick_exact_128")["gate"]["drop"]
    yield NATURAL, f"a drop of {drop:.2f} nats"
    losses = {model: read_losses(f"quick_{model}_256") for model in ("rope", "pose")}
    cost = losses["rope"].loss_long["mean"] - losses["pose"].loss_long["mean"]
    yield NATURAL, f"RoPE alone loses {cost:.2f} nats a token against PoSE"
    gaps = {
        model: some.loss_short["mean"] - some.loss_long["mean"] for model, some in losses.items()
    }
    count = losses["rope"].loss_long["count"]
    said = (
        f"a mean gap of {gaps['rope']:.3f} over all {count:,.0f} targets; PoSE {gaps['pose']:.3f}"
    )
    yield NATURAL, said
    yield README, f"costs RoPE alone {-gaps['rope']:.3f} nats against its own short one"
    nats = {}
    for model, size in ((model, size) for model in ("rope", "pose") for size in (128, 256)):
        row = read_summary(f"quick_{model}_{size}").loc["add_one", "own", 8]
        nats[model, size] = f"{row.excess * row.gap:.2f}"
    assert nats["rope", 256] == nats["pose", 256]
    yield NATURAL, f"{nats['rope', 256]} each"
    yield NATURAL, f"it is {nats['rope', 128]} and {nats['pose', 128]}"
    drops = [read_meta(f"quick_{m}_{size}")["gate"]["drop"] for m, size in nats]
    yield NATURAL, f"drops between {min(drops):.2f} and {max(drops):+.2f} nats"


def sentences_on_planted_text() -> Sentences:
    found = []
    for far in ("contextual", "isolated"):
        here, gone = (
            read_summary(f"planted_{far}", targets).loc["add_one", "own", 2]
            for targets in ("planted", "planted_removed")
        )
        said = f"{shown(here, 'hit_rate', '.2f')}, {{}}{shown(here, 'excess')}, {{}}"
        found.append(said + shown(gone, "excess", "+.3f"))
    said = f"found {found[0].format('excess ', 'taken out ')}; shown alone "
    yield "N5", said + found[1].format("", "")
    yield README, f"they lower its loss there by {here.gap:.2f} nats"
    with_context, alone = (
        read_summary(f"planted_{far}", "planted")[["hit_rate", "excess"]].xs(2, level="k")
        for far in ("contextual", "isolated")
    )
    apart = (with_context - alone).abs().max().max()
    yield README, f"the same within {math.ceil(apart * 100) / 100:.2f}"


SENTENCES = [
    sentences_on_tasks,
    sentences_on_the_claim,
    sentences_on_the_claim_made_again,
    sentences_on_stages,
    sentences_on_the_ladder,
    sentences_on_why_excess_falls,
    sentences_beyond_the_training_length,
    sentences_on_reviews,
    sentences_on_models_that_do_not_copy,
    sentences_on_planted_text,
]


def plain(text: str) -> str:
    """However its lines are broken, and without emphasis."""
    return " ".join(text.replace("**", "").replace("−", "-").split())


@pytest.mark.parametrize("sentences", SENTENCES)
def test_sentences_quote_what_was_measured(sentences: Callable[[], Sentences]) -> None:
    stale = [
        f"{page}: {sentence}"
        for page, sentence in sentences()
        if plain(sentence) not in plain((PAGES | PAPER_MAP)[page])
    ]
    assert not stale, "\n".join(["not found:", *stale])


# --- every other decimal --------------------------------------------------------------------------

NOT_STORED = {
    README: [],
    NATURAL: [],
    TASKS: [
        "in 1,000 steps (loss 0.69); at 0.1",
        "stood at a loss of .37 and .33 (k = 2: .75 and .80)",
        "the interval begins at 0.981",
        "loss of tokens and IDs .27 and .11",
        "seeds 0 and 4) against .004 and .333",
        "last 100 steps .000 and .002",
        "seed 11 (2e-3) crawled to .07",
        "3.3 times the longest",
        "| 1 (a random start only) | 1.000 | 1.000 | .020 | .000 |",
        "| 2 | 1.000 | .975 | .950 | .830 | | 4 | .975 | .835 | .635 | .105 |",
        "seed 1 of PoSE stood at .76",
        "up to 150 and .925 at 200",
    ],
}
"""Said of runs that are not kept, or of settings."""


def prose_and_tables(section: str) -> tuple[str, str]:
    """What people wrote, and the tables that were written from results."""
    written = re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL)
    tables = "\n".join(written.findall(section))
    prose = re.sub(r"(Theorem|Proposition) \d\.\d", " ", written.sub(" ", section))
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", prose, flags=re.DOTALL)
    return plain(prose), tables


def test_what_is_not_stored_is_still_said() -> None:
    for page, snippets in NOT_STORED.items():
        assert not [said for said in snippets if plain(said) not in plain(PAGES[page])]


def accuracies(section: str) -> Iterator[float]:
    """Of every seed, in the results that the section's tables are made of."""
    for name in re.findall(r"<!-- table: task (\w+)", section):
        for row in read_results(RESULTS / "tasks" / name)[0]:
            yield from (row.exact_match, row.token_accuracy)
            if row.id_accuracy is not None:
                yield row.id_accuracy


@pytest.mark.parametrize("page", NOT_STORED)
def test_every_decimal_in_prose_is_accounted_for(page: str) -> None:
    text = PAGES[page]
    if page == README:
        text = text[: text.index("## Quick start")] + text[text.index("## Results so far") :]
        text = text[: text.index("## The paper's settings")]
    quoting = [s for function in SENTENCES for where, s in function() if where == page]
    quoting = sorted(map(plain, [*quoting, *NOT_STORED[page]]), key=len, reverse=True)
    unfounded = []
    for section in re.split(r"^(?=##+ )", text, flags=re.MULTILINE):
        prose, tables = prose_and_tables(section)
        for said in quoting:
            prose = prose.replace(said, " ")
        known = [*map(float, re.findall(r"\d*\.?\d+", tables)), *accuracies(section)]
        for found in re.finditer(r"[-+]?\d*\.\d+ \[[^]]*\]", prose):
            if found[0] not in tables:
                unfounded.append(found[0])
        for found in re.finditer(r"(?<![\w.])(\d*\.\d+)(?!M\b)(?![\d.]*\d)", prose):
            half = 0.5 * 10.0 ** -len(found[1].split(".")[1])
            if not any(math.isclose(v, float(found[1]), abs_tol=half * 1.0001) for v in known):
                unfounded.append(prose[max(0, found.start() - 60) : found.end() + 20])
    assert not unfounded, "\n".join(["stands in no table of its section:", *unfounded])
