"""A measurement that never happened, with numbers that could have: for figures and pages.

Losses follow a rule that is easy to check by eye: a name that stood far back and not near has a
large gap, its last far occurrence is its most influential token, own tokens recover more than
foreign ones, foreign ones more than random ones.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.results import Results, ResultWriter, consolidate, read_results

LONG, SHORT, STRIDE = 192, 32, 16
KS = (1, 2, 4, 8, 16)
DOCUMENTS = tuple(range(10))
THRESHOLD = 0.9

# How much of the gap k own tokens recover in the end, and foreign ones; the random control is low.
SELECTORS = {
    "add_one": (1.08, 0.72),
    "divergence": (0.86, 0.41),
    "attention": (0.62, 0.33),
    "random": (0.08, 0.05),
    "nearest": (0.15, 0.10),
}
KINDS = {  # share among the selected, base share, excess
    "equal to the target": (0.46, 0.01, 0.52),
    "same word family": (0.08, 0.01, 0.31),
    "capitalised name": (0.17, 0.05, 0.35),
    "number": (0.03, 0.01, 0.28),
    "function word": (0.12, 0.45, 0.06),
    "other": (0.14, 0.47, 0.11),
}
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


def document_rows(document: int) -> dict:
    words = fake_words(document)
    if len(words) <= LONG:
        return {}
    rng = np.random.default_rng(100 + document)
    vocabulary = {word: i for i, word in enumerate(sorted(set(words)))}
    ids = np.array([vocabulary[word] for word in words])
    targets = np.arange(LONG, len(words))
    far_places = {int(t): np.arange(t - LONG, t - SHORT) for t in targets}
    gaps = rng.normal(0, 0.06, len(targets))
    for row, t in enumerate(targets):
        near = set(words[t - SHORT : t])
        is_name = words[t].strip() in _NAMES or words[t].strip().isdigit()
        if words[t] not in near and words[t] in words[t - LONG : t - SHORT]:
            gaps[row] += rng.gamma(4, 0.55) if is_name else rng.gamma(1.2, 0.35)
    loss_long = rng.gamma(1.5, 1.2, len(targets)) + 0.02
    rows: dict[str, dict[str, list]] = {
        "tokens": {
            "place": list(range(len(words))),
            "token_id": ids.tolist(),
            "text": list(words),
        },
        "losses": {
            "target": targets.tolist(),
            "token_id": ids[targets].tolist(),
            "loss_long": loss_long.tolist(),
            "loss_short": (loss_long + gaps).tolist(),
            "half": ["threshold" if document % 2 else "report"] * len(targets),
        },
        "influence": {
            name: [] for name in ("target", "selector", "control", "rank", "far_position",
                                  "far_token_id", "influence")
        },
        "recovery": {
            name: [] for name in ("target", "target_set", "selector", "control", "draw", "k",
                                  "loss_set", "kl_set", "kl_short")
        },
        "costs": {"selector": [], "token_forwards": [], "num_targets": []},
    }  # fmt: skip
    if document % 2:
        return {"tokens": rows["tokens"], "losses": rows["losses"]}
    zero = [row for row in np.flatnonzero(abs(gaps) < 0.05)][:4]
    chosen = [(row, "gap") for row in np.flatnonzero(gaps >= THRESHOLD)]
    for row, target_set in [*chosen, *((row, "zero_gap") for row in zero)]:
        t = int(targets[row])
        for selector, (own, foreign) in SELECTORS.items():
            for control, level in (("own", own), ("foreign", foreign)):
                order = rng.permutation(far_places[t])[: max(KS)]
                same = [p for p in far_places[t] if words[p] == words[t]][-2:]
                if control == "own" and selector in ("add_one", "divergence") and same:
                    rest = [p for p in order if p not in same]
                    order = np.array([*same[::-1], *rest])[: max(KS)]
                strength = level * gaps[row] * 0.62 ** np.arange(len(order))
                _append(
                    rows["influence"], t, selector, control,
                    rank=range(1, len(order) + 1), far_position=order.tolist(),
                    far_token_id=ids[order].tolist(), influence=strength.tolist(),
                )  # fmt: skip
                for draw in range(3 if control == "foreign" or selector == "random" else 1):
                    shares = level * (1 - 0.55 ** np.array(KS)) * rng.normal(1, 0.12)
                    loss_set = loss_long[row] + gaps[row] * (1 - shares)
                    _append(
                        rows["recovery"], t, selector, control, target_set=target_set, draw=draw,
                        k=KS, loss_set=np.maximum(loss_set, 1e-3).tolist(),
                        kl_set=(1 - shares * 0.8).tolist(), kl_short=[1.0] * len(KS),
                    )  # fmt: skip
    for selector in SELECTORS:
        cost = len(chosen) * (5440 if selector == "add_one" else 410)
        for name, value in zip(rows["costs"], (selector, cost, len(chosen)), strict=True):
            rows["costs"][name].append(value)
    return rows


def _append(table: dict[str, list], target: int, selector: str, control: str, **more: Any) -> None:
    lists = {name: value for name, value in more.items() if not isinstance(value, int | str)}
    num_rows = len(next(iter(lists.values())))
    constants = {"target": target, "selector": selector, "control": control}
    constants |= {name: value for name, value in more.items() if name not in lists}
    for name, value in {**lists, **{n: [v] * num_rows for n, v in constants.items()}}.items():
        table[name] += list(value)


def _summary() -> dict[str, dict[str, list]]:
    summary: dict[str, list] = {name: [] for name in SUMMARY_COLUMNS}
    for target_set in ("gap", "zero_gap"):
        for selector, levels in SELECTORS.items():
            for control, level in zip(("own", "foreign"), levels, strict=True):
                for k in KS:
                    share = level * (1 - 0.55**k)
                    excess = share - levels[1] * (1 - 0.55**k)
                    spread = 0.05 + 0.02 / k
                    own = control == "own"
                    row: tuple = (
                        target_set,
                        selector,
                        control,
                        k,
                        share,
                        share - spread,
                        share + spread,
                    )
                    interval = (excess, excess - spread, excess + spread)
                    row += (*interval, *(0.75 * x for x in interval)) if own else (None,) * 6
                    row += (
                        0.8 * share,
                        *(None,) * 3,
                        0.75,
                        127 if target_set == "gap" else 20,
                        5,
                        5440.0 if selector == "add_one" else 410.0,
                    )
                    for name, value in zip(SUMMARY_COLUMNS, row, strict=True):
                        summary[name].append(value)
    dependencies: dict[str, list] = {name: [] for name in DEPENDENCY_COLUMNS}
    for selector, scale in (("add_one", 1.0), ("divergence", 1.15)):
        for kind, (share, base, excess) in KINDS.items():
            e, times = excess * scale, share / base
            kind_row: tuple = ("gap", selector, kind, share, base, times, times * 0.8, times * 1.25)
            kind_row += (e, e - 0.07, e + 0.08, int(127 * share))
            for name, value in zip(DEPENDENCY_COLUMNS, kind_row, strict=True):
                dependencies[name].append(value)
    return {"summary": summary, "dependencies": dependencies}


SUMMARY_COLUMNS = (
    *("target_set", "selector", "control", "k", "recovery", "low", "high", "excess", "excess_low"),
    *("excess_high", "excess_nats", "excess_nats_low", "excess_nats_high"),
    *("kl_removed", "hit_rate", "hit_low", "hit_high", "gap", "num_targets"),
    *("num_documents", "token_forwards_per_target"),
)
DEPENDENCY_COLUMNS = (
    *("target_set", "selector", "kind", "share", "base_share", "enrichment", "low", "high"),
    *("excess_recovery", "excess_low", "excess_high", "num_targets"),
)
SUMMARY = _summary()
META: dict[str, Any] = {
    "model": {"name": "runs/quick", "fingerprint": "5f0c", "num_parameters": 3_412_992},
    "data": {"source": "embedded", "fingerprint": "77aa", "tokenizer_fingerprint": "01d2"},
    "windows": {"long": LONG, "short": SHORT, "stride": STRIDE, "far_states": "isolated"},
    "selectors": list(SELECTORS),
    "ks": list(KS),
    "seed": 0,
    "targets": {"threshold": THRESHOLD},
    "gate": {"loss_first": 4.31, "loss_repeated": 1.12, "drop": 3.19, "has_induction": True},
    "longppl": {"key_share": 0.02, "num_key_tokens": 40, "longppl": 2.5, "ppl": 9.1},
    "counts": {"documents_measured": len(DOCUMENTS), "documents_too_short": 2},
    "versions": {"torch": "2.8.0"},
    "commit": "0123abc",
    "command": "olmo-sparsity measure runs/quick --text embedded",
    "timings": {"total_s": 41.0},
}


def write_fake_results(folder: Path, meta: dict | None = None) -> None:
    writer = ResultWriter(folder, {"model": META["model"], "windows": META["windows"]})
    for document in DOCUMENTS:
        writer.write(document, document_rows(document))
    writer.close()
    consolidate(folder, SUMMARY, META if meta is None else meta)


def fake_results(folder: Path, meta: dict | None = None) -> Results:
    write_fake_results(folder, meta)
    return read_results(folder)


def one_document(words: list[str], far_of: dict[int, list[int]], meta: dict) -> Results:
    """Results of one document with given text: target → its influential places, first is most."""
    rows: dict[str, list] = {"target": [], "rank": [], "far_position": [], "influence": []}
    for target, places in far_of.items():
        rows["target"] += [target] * len(places)
        rows["rank"] += range(1, len(places) + 1)
        rows["far_position"] += places
        rows["influence"] += [2.0 * 0.5**rank for rank in range(len(places))]
    influence = pd.DataFrame(rows).assign(
        document=0, selector="add_one", control="own", far_token_id=0
    )
    targets = list(far_of)
    losses = pd.DataFrame({"document": 0, "target": targets, "token_id": 0})
    losses["loss_long"], losses["loss_short"], losses["half"] = 1.0, 3.0, "report"
    recovery = pd.DataFrame(
        [(0, t, k, 3.0 - 0.1 * k) for t in targets for k in KS],
        columns=["document", "target", "k", "loss_set"],
    ).assign(
        target_set="gap", selector="add_one", control="own", draw=0, kl_set=np.nan, kl_short=np.nan
    )
    tokens = pd.DataFrame({"place": range(len(words)), "text": words}).assign(
        document=0, token_id=0
    )
    return Results(
        tokens=tokens, planted=tokens[:0][["document", "place"]], losses=losses,
        influence=influence, recovery=recovery,
        costs=pd.DataFrame({"document": [0], "selector": ["add_one"]}),
        summary=pd.DataFrame(SUMMARY["summary"]), dependencies=pd.DataFrame(
            {name: [] for name in DEPENDENCY_COLUMNS}
        ), meta=meta,
    )  # fmt: skip
