"""Which targets are asked about. Chosen by their gap, by content, or for having no gap.

Place in the flow: losses of the threshold half → **what to choose** → questions on the other half.

Whatever is fitted (the gap threshold, which tokens are rare) is fitted on the documents with an
even index and used on those with an odd one, so that no target is reported for a reason that its
own noise gave.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.losses import ContextLosses
from analysis.windows import Windows
from olmo_sparsity.errors import ConfigError, DataError

COMMON_SHARE = 0.8
"""The most frequent types that together make up this share of the text are not rare."""

ZERO_GAP_NATS = 0.01


def half_of(document: int) -> str:
    return "report" if document % 2 else "threshold"


def parse_share(text: str) -> float:
    """`all` → 1.0, `top10%` → 0.1."""
    if text == "all":
        return 1.0
    try:
        share = float(text.removeprefix("top").removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not (text.startswith("top") and text.endswith("%") and 0 < share <= 1):
        raise ConfigError(f"--targets={text} is neither `all` nor like `top10%`")
    return share


def gap_threshold(gaps: np.ndarray, share: float, min_gap: float) -> float:
    """From which gap on a target is chosen: in the top share, and no less than min_gap."""
    if share == 1.0:
        return -np.inf
    return max(float(np.quantile(gaps, 1 - share)), min_gap)


@dataclass(frozen=True)
class TargetChooser:
    min_gap: float
    """Chosen by gap: at least this, the larger of the quantile and --min-gap."""

    common_tokens: frozenset[int]

    @staticmethod
    def fit(
        losses: list[ContextLosses], documents: list[np.ndarray], share: float, min_gap: float
    ) -> TargetChooser:
        gaps = np.concatenate([part.gap for part in losses]) if losses else np.empty(0)
        if len(gaps) == 0:
            raise DataError(
                "no document with an even index is longer than the long window, so no threshold "
                "can be fixed; give more or longer text, or lower --long"
            )
        types, counts = np.unique(np.concatenate(documents), return_counts=True)
        order = np.argsort(-counts, kind="stable")
        before = np.cumsum(counts[order]) - counts[order]
        common = types[order][before < COMMON_SHARE * counts.sum()]
        return TargetChooser(gap_threshold(gaps, share, min_gap), frozenset(common.tolist()))

    def choose(
        self,
        document: np.ndarray,
        losses: ContextLosses,
        windows: Windows,
        generator: np.random.Generator,
    ) -> dict[str, np.ndarray]:
        """target set → indices into the document's targets."""
        gap = losses.gap
        by_gap = np.flatnonzero(gap >= self.min_gap)
        flat = np.flatnonzero(np.abs(gap) < ZERO_GAP_NATS)
        flat = np.sort(generator.permutation(flat)[: len(by_gap)])
        content = [
            index
            for index, token in enumerate(losses.token_id.tolist())
            if token not in self.common_tokens
            and self._only_far(document, windows, int(losses.target[index]), token)
        ]
        return {
            "gap": by_gap,
            "content": np.array(content, dtype=np.int64),
            "zero_gap": flat,
        }

    @staticmethod
    def _only_far(document: np.ndarray, windows: Windows, target: int, token: int) -> bool:
        """The token stands among the target's far tokens and not in its short window."""
        start = target - (target - windows.long) % windows.stride
        near = document[start - windows.short : target]
        far = document[start - windows.long : start - windows.short]
        return token in far and token not in near
