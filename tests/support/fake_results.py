"""A measurement that never happened, with numbers that could have: for figures and pages.

Losses follow a rule that is easy to check by eye: a name that stood far back and not near has a
large gap, its last distant occurrence is its most influential token, own units recover more than
unrelated ones, unrelated ones more than random ones, and those of the placebo hardly more than
unrelated.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.parts import Parts
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.reported import STUDENT
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.schemas import SCHEMAS
from olmo_sparsity.analysis.results.statistics import GROUPS, mean_lds, summarize
from olmo_sparsity.analysis.results.stored_results import complete_summary
from olmo_sparsity.analysis.results.target_rows import distant_part_losses, half_of, with_ends
from olmo_sparsity.text.windows import Windows

LONG, SHORT, STRIDE = 192, 32, 16
KS = (1, 2, 4, 8, 16)
WIDTHS = {"tokens": 1, "span:4": 4}
UNITS = tuple(WIDTHS)
DOCUMENTS = tuple(range(10))
THRESHOLD = 0.9

# How much of the gap k own units recover in the end, and unrelated ones; the random control is low.
SELECTORS = {
    "add_one": (1.08, 0.72),
    "gradient": (0.86, 0.41),
    "attention": (0.62, 0.33),
    "random": (0.08, 0.05),
    "nearest": (0.15, 0.10),
}
SEEING = ("add_one", "gradient")
"""Selectors that find the target's token where it stood before."""
_NAMES = ("Marrow", "Ilse", "Tamsin", "Orrin", "Bexley", "Quill", "Sorrel", "Hask")
_SENTENCES = (
    "In the spring of {year} the ferry from {a} still ran on Sundays.",
    "{b} kept the lamp on the pier and wrote down every boat that came.",
    "Nobody in the harbour had seen the old captain since the storm.",
    "There was rain in the morning, and the gulls sat low along the wall.",
    "{a} said that {b} would not come back before the ice had gone.",
    "It cost {year} crowns to mend the mast, and the village had forty.",
    "The children carried stones to the beach and built a small white house.",
    "At night {a} read the letters again, slowly, as if they were new.",
    "They spoke of nothing else for weeks; then they spoke of it no more.",
    "When the wind turned, {b} put out the lamp and went home by the mill.",
)


@cache
def fake_words(document: int) -> tuple[str, ...]:
    """The tokens of a document: words with the space before them, and punctuation."""
    rng = np.random.default_rng(document)
    a, b = rng.choice(_NAMES, 2, replace=False)
    text = ""
    while len(text) < 2600:
        paragraph = " ".join(str(rng.choice(_SENTENCES)) for _ in range(5))
        text += paragraph.format(a=a, b=b, year=1870 + document) + "\n\n"
    return tuple(re.findall(r" ?\w+|[^\w]", text))


def losses_rows(document: int) -> dict[str, dict]:
    words = np.array(fake_words(document))
    rng = np.random.default_rng(100 + document)
    ids = np.unique(words, return_inverse=True)[1]
    targets = np.arange(LONG, len(words))
    gaps, recurring = rng.normal(0, 0.06, len(targets)), np.zeros(len(targets), dtype=bool)
    for row, t in enumerate(targets):
        is_name = words[t].strip() in _NAMES or words[t].strip().isdigit()
        is_near = words[t] in words[t - SHORT : t]
        recurring[row] = words[t] in words[t - LONG : t - SHORT] and not is_near
        if recurring[row]:
            gaps[row] += rng.gamma(4, 0.55) if is_name else rng.gamma(1.2, 0.35)
    placebo = rng.normal(0, 0.06, len(targets))
    placebo += rng.gamma(4, 0.4, len(targets)) * (rng.random(len(targets)) < 0.02)
    loss_short = rng.gamma(1.5, 1.2, len(targets)) + 0.02 + np.maximum(gaps, placebo)
    losses = {
        "target": targets,
        "token_id": ids[targets],
        "loss_short": loss_short,
        "loss_long": loss_short - gaps,
        "placebo_loss_long": loss_short - placebo,
        **dict.fromkeys(("bigram", "placebo_bigram"), recurring),
    }
    return {"losses": losses, "documents": {"name": [f"{document}.txt"]}}


def recovery_rows(document: int, targets: pd.DataFrame, losses: pd.DataFrame) -> dict:
    words, other = np.array(fake_words(document)), fake_words(document + 1)
    rng = np.random.default_rng(200 + document)
    losses = distant_part_losses(losses).set_index(["target", "distant_part"])
    influence, recovery, lds = [], [], []
    asked = targets[["target", "distant_part"]].drop_duplicates()
    for (t, part), units in product(asked.itertuples(index=False), UNITS):
        start, width = Windows(LONG, SHORT, STRIDE).start_of(t), WIDTHS[units]
        distant = np.arange(start - LONG, start - SHORT)
        again = distant[words[distant] == words[t]][:-3:-1]
        is_own = part == "document"
        loss_short, gap = losses.loc[(t, part), ["loss_short", "gap"]]
        for selector, (own, unrelated) in SELECTORS.items():
            if is_own:
                lds.append((t, units, selector, own - unrelated))
            for control in ("own", "unrelated"):
                about = (t, part, units, selector, control)
                first = rng.permutation(distant[: len(distant) + 1 - width])[: max(KS)]
                if control == "own" and is_own and selector in SEEING and rng.random() < 0.7:
                    first = np.array([*again, *np.setdiff1d(first, again)])[: max(KS)]
                text = words if control == "own" and is_own else other
                level = own if control == "own" and is_own else unrelated
                for i, place in enumerate(first):
                    said, nats = "".join(text[place : place + width]), level * gap * 0.62**i
                    influence.append((*about, i + 1, place, place + width, said, nats))
                if control == "own" and not is_own:
                    level = 0.3 * own + 0.7 * unrelated
                for draw in range(3 if control == "unrelated" or selector == "random" else 1):
                    noise = rng.normal(1, 0.25)
                    for k in KS:
                        left = gap * (1 - level * (1 - 0.55**k) * noise)
                        lost = loss_short - 0.8 * left if control == "own" else None
                        loss = loss_short - gap + left
                        recovery.append((*about, draw, k, k * width, loss, lost))
    ids = np.unique(words, return_inverse=True)[1]
    tokens = [(place, ids[place], word) for place, word in enumerate(words)]
    cost = [(units, s, 410 * len(asked), len(asked)) for units, s in product(UNITS, SELECTORS)]
    rows = {
        "influence": influence,
        "recovery": recovery,
        "costs": cost,
        "tokens": tokens,
        "lds": lds,
    }
    return {name: pd.DataFrame(r, columns=SCHEMAS[name].names[1:]) for name, r in rows.items()}


META = Meta(
    model={"name": "runs/quick", "fingerprint": "5f0c", "num_parameters": 3_412_992, "trained": {}},
    data={"source": "embedded", "fingerprint": "77aa"},
    dtype="float32",
    windows={"long": LONG, "short": SHORT, "stride": STRIDE, "distant_states": "isolated"},
    units=list(UNITS),
    selectors=list(SELECTORS),
    ks=list(KS),
    targets={"threshold": THRESHOLD, "share": 0.01, "min_gap": 0.1},
    induction={"loss_first": 4.31, "loss_repeated": 1.12, "drop": 3.19, "has_induction": True},
    longppl={"key_share": 0.02, "num_key_tokens": 40, "longppl": 2.5, "ppl": 9.1},
    counts={"documents_measured": len(DOCUMENTS), "documents_too_short": 2},
    versions={"torch": "2.8.0"},
    commit="0123abc",
    command=["olmo-sparsity", "measure", "runs/quick"],
)


def write_fake_results(folder: Path, meta: Meta = META) -> None:
    parts = Parts(folder, {"model": META.model, "windows": META.windows})
    for document in DOCUMENTS:
        parts.add("losses", document, losses_rows(document))
    parts.flush()
    losses = parts.read("losses")
    rows = distant_part_losses(losses[losses.document.map(half_of) == "report"])
    chosen = {
        "gap": rows[rows.gap >= THRESHOLD],
        "bigram": rows[rows.bigram].groupby(["document", "distant_part"]).head(4),
    }
    targets = pd.concat([some.assign(target_set=name) for name, some in chosen.items()])
    columns = SCHEMAS["targets"].names
    targets = with_ends(targets)[columns].sort_values(columns, ignore_index=True)
    for document, some in targets.groupby("document"):
        rows = recovery_rows(int(document), some, losses[losses.document == document])
        parts.add("recovery", int(document), rows)
    parts.flush()
    recovery = parts.read("recovery")
    summary = summarize(losses, targets, recovery).assign(token_forwards_per_target=410.0)
    summary = summary.merge(mean_lds(targets, parts.read("lds")), how="left", on=GROUPS[:3])
    tables = {
        "losses": losses,
        "targets": targets,
        "recovery": recovery,
        "influence": parts.read("influence"),
    }
    meta = dataclasses.replace(meta, intervals=STUDENT)
    summary = complete_summary(summary, tables, meta)
    parts.write_final_tables({"targets": targets, "summary": summary}, meta)


def one_document(words: list[str], distant_of: dict[int, list[int]], meta: Meta) -> Results:
    """Results of one document with given text: target → its influential places, first is most."""
    tables = {name: pd.DataFrame(columns=schema.names) for name, schema in SCHEMAS.items()}
    targets = pd.DataFrame({"document": 1, "target": list(distant_of)})
    tables["targets"] = targets.assign(distant_part="document", target_set="gap")
    tables["losses"] = targets.assign(
        token_id=0, loss_short=3.0, loss_long=1.0, placebo_loss_long=3.0
    )
    about = {"distant_part": "document", "units": "tokens", "selector": "add_one", "control": "own"}
    ranked = [
        (t, rank, distant)
        for t, places in distant_of.items()
        for rank, distant in enumerate(places)
    ]
    influence = pd.DataFrame(ranked, columns=["target", "rank", "distant_first"])
    tables["influence"] = influence.assign(
        document=1,
        **about,
        rank=influence["rank"] + 1,
        distant_end=influence.distant_first + 1,
        distant_text=[words[distant] for distant in influence.distant_first],
        influence=2.0 * 0.5 ** influence["rank"],
    )
    recovery = targets.merge(pd.DataFrame({"k": KS}), how="cross")
    tables["recovery"] = recovery.assign(**about, draw=0, loss_set=3.0 - 0.1 * recovery.k)
    tokens = {"document": 1, "place": range(len(words)), "token_id": 0, "text": words}
    return Results(**tables | {"tokens": pd.DataFrame(tokens)}, meta=meta)
