"""Documents with a far dependency of known place, and whether a selector finds it.

Place in the flow: held-out documents → **documents with known truth** → questions → hit rates.

Each document that is long enough is cut to one target with its long window and appears twice. In
the first, K marks stand at random far places and determine the target (data/planted.py); in the
second everything is the same but the marks, so that there is nothing to find. Candidates of the
foreign control come from documents of the second kind, never from the same text.

Dimension key: K planted tokens, F far tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pandas as pd

from analysis.recovery import KEYS, interval, resample_weights
from analysis.sources import Source
from analysis.windows import Windows
from olmo_sparsity.config import PlantedConfig
from olmo_sparsity.data.planted import Planting
from olmo_sparsity.errors import DataError
from olmo_sparsity.model.load import LoadedModel

PLANTED, REMOVED = "planted", "planted_removed"
"""Target sets."""


def plant_source(
    source: Source, config: PlantedConfig, loaded: LoadedModel, windows: Windows, seed: int
) -> Source:
    """The documents with something planted, then the same ones without the marks."""
    if loaded.tokenizer is None:
        raise DataError(
            f"'{loaded.name}' has no tokenizer beside it, which --planted needs to choose its "
            "tokens; put its tokenizer.json there"
        )
    if config.num_tokens > windows.num_far:
        raise DataError(f"--planted: {config.num_tokens} tokens are more than the far ones")
    planting = Planting.of(config, loaded.tokenizer)
    with_marks, without, places = [], [], []
    for number, document in enumerate(source.documents):
        if len(document) <= windows.long:
            continue
        text = document[: windows.long + 1]
        generator = np.random.default_rng([seed, number])
        planted, places_K = planting.plant(text, generator, 0, windows.num_far, windows.long - 1)
        bare = np.where(np.isin(np.arange(len(text)), places_K), planting.clear(text), planted)
        with_marks.append(planted)
        without.append(bare)
        places.append(places_K)
    if len(with_marks) < 2:
        raise DataError(
            f"{source.name}: {len(with_marks)} documents are longer than --long={windows.long}, "
            "and --planted needs two; give more or longer text, or lower --long"
        )
    documents = [*with_marks, *without]
    digest = hashlib.sha256(source.fingerprint.encode())
    for planted in documents:
        digest.update(planted.astype("<u4").tobytes())
    return replace(
        source,
        name=f"{source.name}, {config.num_tokens} tokens planted",
        fingerprint=digest.hexdigest(),
        documents=documents,
        planted=places,
        num_too_short=len(source.documents) - len(with_marks),
    )


def hit_rates(
    influence: pd.DataFrame, planted: pd.DataFrame, ks: tuple[int, ...], seed: int = 0
) -> pd.DataFrame:
    """Of the planted tokens of a target, how many are among the selector's first k?"""
    truth = planted.rename(columns={"place": "far_position"})
    num_planted = truth.groupby("document").size()
    own = influence[(influence.control == "own") & influence.document.isin(num_planted.index)]
    found = own.merge(truth.assign(hit=1), on=["document", "far_position"], how="left")
    rows = []
    for selector, some in found.groupby("selector"):
        for k in ks:
            first = some[some["rank"] <= k]
            hits = first.groupby(KEYS).hit.sum().groupby("document").mean()
            shares_D = (hits / num_planted.reindex(hits.index)).to_numpy()
            weights_RD = resample_weights(len(shares_D), seed)
            resampled_R = weights_RD @ shares_D / len(shares_D)
            rate, low, high = interval(resampled_R, shares_D.mean())
            rows.append((PLANTED, selector, "own", k, rate, low, high))
    columns = ["target_set", "selector", "control", "k", "hit_rate", "hit_low", "hit_high"]
    return pd.DataFrame(rows, columns=columns)
