"""Tests of olmo_sparsity. A killed owner's folder is taken over after a second, not minutes."""

from olmo_sparsity.base import folders

folders.REFRESH_S, folders.STALE_S = 0.1, 1.0
