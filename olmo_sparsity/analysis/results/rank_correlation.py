"""Compute Spearman's rank correlation of many pairs of rows at once.

    rank_correlations([[1, 2, 3], [1, 2, 3]], [[10, 20, 90], [3, 2, 1]])    # [1.0, −1.0]

SciPy's `spearmanr` takes one pair at a time, and SciPy is too large for it (docs/development.md).

Dimension key: N items of a list (rows), Q values of an item.
"""

from __future__ import annotations

import numpy as np
import pandas as pd


def rank_correlations(
    x_NQ: np.ndarray, y_NQ: np.ndarray, of_equal_values: float = np.nan
) -> np.ndarray:
    """Return Spearman's correlation of each row of x with the same row of y.

    Args:
        x_NQ: Rows of values.
        y_NQ: As many rows.
        of_equal_values: The result where all values of a row are equal, so that there is no
            correlation.
    """

    def centred_ranks(rows_NQ: np.ndarray) -> np.ndarray:
        ranks_NQ = pd.DataFrame(rows_NQ).rank(axis=1).to_numpy()
        return ranks_NQ - ranks_NQ.mean(1, keepdims=True)

    x_ranks_NQ = centred_ranks(x_NQ)
    y_ranks_NQ = centred_ranks(y_NQ)
    scale_N = np.sqrt((x_ranks_NQ**2).sum(1) * (y_ranks_NQ**2).sum(1))
    products_N = (x_ranks_NQ * y_ranks_NQ).sum(1)
    # 0 / 0 is computed for rows of equal values, too, and replaced.
    with np.errstate(invalid="ignore"):
        return np.where(scale_N == 0, of_equal_values, products_N / scale_N)
