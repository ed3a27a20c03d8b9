"""Losses of statements made up from the effects of texts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from olmo_sparsity.sources.verdicts.losses import StatementLosses

PARTLY_EVALUATED_SIZES = [(1, 2), (2, 2), (3, 4), (4, 5), (5, 2), (6, 4), (7, 8)]
"""Numbers of sources and of decoys, with few and with many sources, one round and several."""


def of_effects(own_TS: np.ndarray, decoys_TSD: np.ndarray) -> StatementLosses:
    """Return losses where each text lowers the loss of a statement by its own effect, whatever else
    is shown. `own_TS`: effects of the sources; `decoys_TSD`: of their decoys."""
    source_TS1 = own_TS[..., None]
    all_sources_T11 = source_TS1.sum(1, keepdims=True)
    all_decoys_T1D = decoys_TSD.sum(1, keepdims=True)
    return StatementLosses(
        all_T=-own_TS.sum(-1),
        decoys_TD=-all_decoys_T1D[:, 0],
        among_TSD=-(all_decoys_T1D - decoys_TSD + source_TS1),
        without_TSD=-(all_sources_T11 - source_TS1 + decoys_TSD),
    )


def partly_evaluated(num_sources: int, draws: int) -> StatementLosses:
    """Losses of three statements, in which decoys of some sources were not evaluated, or only the
    first ones."""
    generator = np.random.default_rng(num_sources)
    own = generator.normal(size=(3, num_sources)) * 3
    losses = of_effects(own, generator.normal(size=(3, num_sources, draws)))
    losses = replace(losses, all_T=losses.all_T + 20, decoys_TD=losses.decoys_TD + 20)
    losses.without_TSD[:] += 20
    losses.among_TSD[:] += 20
    losses.among_TSD[:, -1, 1:] = np.nan
    if num_sources > 2:
        losses.without_TSD[:, 0, 2:] = np.nan
        losses.decoys_TD[0, 1:] = np.nan
        losses.among_TSD[0, :, 1:] = np.nan
        losses.among_TSD[:, 1] = np.nan
    return losses
