"""Judge U15 to U21: which departure from the paper's model family carries the reach.

A model has reach if it is accurate at 200 tokens, four times the trained length. Each change is
made alone from both ends: in our setting to the paper's value (`ours_but_…`), in the paper's to
ours (`theirs_but_…`).
"""

from __future__ import annotations

from collections.abc import Sequence

from study.parity.models import STORED, Model, known_at, read_models
from study.parity.table import NEEDED, REACH
from study.parity.verdicts import UNFINISHED, Finding, Outcome, decide, verdict_over

CHANGES = ("queries", "chunks", "biases", "rotated", "mlp", "initial", "size", "tying")
"""In the order in which they are run, the likeliest first."""

NUM_SEEDS = 3

LEARNT = 0.95
"""A model has learnt with this accuracy at 50 tokens."""

HAS_REACH = 0.9
HAS_NONE = 0.8
"""Accuracy at 200 tokens above which a model has reach, and below which it has none."""

# What the models of a cell have in common.
HAVE_REACH = "reach"
NO_REACH = "no reach"
MIXED = "mixed"
NOT_LEARNT = "not learnt"

# What a change does for the reach: it takes it from ours, gives it to theirs, both, or neither.
CARRIES = "carries"
NEEDED_ONLY = "needed"
SUFFICES = "suffices"
NEITHER = "neither"

NEAREST_SEEDS = 5

Cells = dict[str, list[Model]]
"""The models of each cell of study/Makefile's `parity_family`, by name: ours_but_queries, say."""

ENDS = ("ours", "theirs", "gpt_neox", "gpt_neox_cooled")
CELLS = (*ENDS, *(f"{end}_but_{change}" for change in CHANGES for end in ("ours", "theirs")))


def read_cells() -> Cells:
    """Read the stored models of all cells."""
    return {cell: read_models(STORED / f"family_{cell}") for cell in CELLS}


def read_nearest() -> list[Model]:
    """Read the models of the combination nearest to the paper that has reach."""
    return read_models(STORED / "nearest")


def reach_of(models: Sequence[Model]) -> Outcome:
    """Return what the three models of a cell have in common, with what each knows at 200 tokens."""
    known_at_200 = tuple(known_at(model, 200) for model in models)
    kind = MIXED
    if len(models) < NUM_SEEDS:
        kind = UNFINISHED
    elif any(known_at(model, 50) < LEARNT for model in models):
        kind = NOT_LEARNT
    elif all(value > HAS_REACH for value in known_at_200):
        kind = HAVE_REACH
    elif all(value < HAS_NONE for value in known_at_200):
        kind = NO_REACH
    return Outcome(kind, known_at_200)


def judge(cells: Cells, nearest: list[Model], train_ks: Sequence[int]) -> dict[str, Finding]:
    """Judge U15 to U21 by the models of all cells, and of the nearest combination."""
    reach = {cell: reach_of(models) for cell, models in cells.items()}
    return {
        "U15": judge_ends(reach["ours"], reach["gpt_neox"]),
        "U16": judge_same(reach["theirs"], reach["gpt_neox"]),
        "U17": judge_cooled(reach["gpt_neox_cooled"]),
        "U18": judge_changes(reach),
        "U19": judge_queries(reach["ours_but_queries"], reach["theirs_but_queries"]),
        "U20": judge_nearest(nearest, 200, train_ks),
        "U21": judge_nearest(nearest, 500, train_ks),
    }


def judge_ends(ours: Outcome, neox: Outcome) -> Finding:
    """Judge U15: ours has reach, GPT-NeoX has none."""
    outcomes = {"ours": ours, "GPT-NeoX": neox}
    if UNFINISHED in (ours.verdict, neox.verdict):
        return Finding(UNFINISHED, outcomes)
    if ours.verdict == HAVE_REACH and neox.verdict == NO_REACH:
        return Finding("yes", outcomes)
    if neox.verdict == HAVE_REACH or ours.verdict == NO_REACH:
        return Finding("no", outcomes)
    return Finding("open", outcomes)


def judge_same(theirs: Outcome, neox: Outcome) -> Finding:
    """Judge U16: OLMo's code with GPT-NeoX's values behaves as GPT-NeoX."""
    outcomes = {"theirs": theirs, "GPT-NeoX": neox}
    kinds = {theirs.verdict, neox.verdict}
    if UNFINISHED in kinds:
        return Finding(UNFINISHED, outcomes)
    if kinds in ({HAVE_REACH}, {NO_REACH}):
        return Finding("yes", outcomes)
    if kinds == {HAVE_REACH, NO_REACH}:
        return Finding("no", outcomes)
    return Finding("open", outcomes)


def judge_cooled(cooled: Outcome) -> Finding:
    """Judge U17: with a cooldown, GPT-NeoX has reach."""
    verdicts = {HAVE_REACH: "yes", NO_REACH: "no", UNFINISHED: UNFINISHED}
    return Finding(verdicts.get(cooled.verdict, "open"), {"GPT-NeoX, cooled": cooled})


def role_of(ours_but: Outcome, theirs_but: Outcome) -> str:
    """Return what a change does for the reach, from both ends."""
    if UNFINISHED in (ours_but.verdict, theirs_but.verdict):
        return UNFINISHED
    is_needed = ours_but.verdict == NO_REACH
    suffices = theirs_but.verdict == HAVE_REACH
    if is_needed and suffices:
        return CARRIES
    if is_needed:
        return NEEDED_ONLY
    return SUFFICES if suffices else NEITHER


def judge_changes(reach: dict[str, Outcome]) -> Finding:
    """Judge U18: one change carries the reach."""
    roles = {}
    outcomes = {}
    for change in CHANGES:
        ours_but = reach[f"ours_but_{change}"]
        theirs_but = reach[f"theirs_but_{change}"]
        roles[change] = role_of(ours_but, theirs_but)
        outcomes[f"{change}: {roles[change]}; ours without"] = ours_but
        outcomes[f"{change}: {roles[change]}; theirs with"] = theirs_but
    if CARRIES in roles.values():
        return Finding("yes", outcomes)
    if UNFINISHED in roles.values():
        return Finding(UNFINISHED, outcomes)
    return Finding("no" if set(roles.values()) == {NEITHER} else "open", outcomes)


def judge_queries(ours_but: Outcome, theirs_but: Outcome) -> Finding:
    """Judge U19: the scaling of queries carries the reach."""
    outcomes = {"ours without": ours_but, "theirs with": theirs_but}
    role = role_of(ours_but, theirs_but)
    if role == UNFINISHED:
        return Finding(UNFINISHED, outcomes)
    if role == CARRIES:
        return Finding("yes", outcomes)
    if ours_but.verdict == HAVE_REACH and theirs_but.verdict == NO_REACH:
        return Finding("no", outcomes)
    return Finding("open", outcomes)


def judge_nearest(models: list[Model], length: int, train_ks: Sequence[int]) -> Finding:
    """Judge U20 and U21: the combination nearest to the paper that has reach predicts at a
    length."""
    outcomes = {}
    for train_k in train_ks:
        seeds = [model for model in models if model.train_k == train_k]
        values = [known_at(model, length) for model in seeds if model.mastered]
        finished = len(seeds) >= NEAREST_SEEDS
        outcomes[f"K_train = {train_k}"] = decide(REACH, values, finished=finished)
    return Finding(verdict_over(outcomes.values(), NEEDED), outcomes)
