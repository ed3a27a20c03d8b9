"""Tests of olmo_sparsity. A killed owner's folder is taken over after a second, not minutes."""

from olmo_sparsity.base import locks

locks.REFRESH_S = 0.1
locks.STALE_S = 1.0
