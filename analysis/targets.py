"""Which targets are asked about: chosen by their gap, those of another measurement, or planted.

Place in the flow: losses → **what to choose** → questions.

Whatever is fitted (the gap threshold, which tokens are rare) is fitted on the documents with an
even index and used on those with an odd one, so that no target is reported for a reason that its
own noise gave. Where nothing is fitted, all documents are reported.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from analysis.losses import ContextLosses
from analysis.planted import PLANTED, REMOVED
from analysis.results import read_results
from analysis.sources import Source
from analysis.windows import Windows
from olmo_sparsity.errors import ConfigError, DataError

COMMON_SHARE = 0.8
"""The most frequent types that together make up this share of the text are not rare."""

ZERO_GAP_NATS = 0.01

Half = Literal["threshold", "report"]


class TargetChooser(Protocol):
    def half(self, number: int) -> Half: ...

    def choose(
        self,
        number: int,
        document: np.ndarray,
        losses: ContextLosses,
        windows: Windows,
        generator: np.random.Generator,
    ) -> dict[str, np.ndarray]:
        """target set → indices into the targets of the document with this number."""
        ...


def half_of(document: int) -> Half:
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
        raise ConfigError(
            f"--targets={text} is neither `all`, nor like `top10%`, nor a folder of results"
        )
    return share


def gap_threshold(gaps: np.ndarray, share: float, min_gap: float) -> float:
    """From which gap on a target is chosen: in the top share, and no less than min_gap."""
    if share == 1.0:
        return -np.inf
    return max(float(np.quantile(gaps, 1 - share)), min_gap)


@dataclass(frozen=True)
class GapTargets:
    """Targets with a large gap; beside them those chosen by content, and some with no gap."""

    min_gap: float
    """Chosen by gap: at least this, the larger of the quantile and --min-gap."""

    common_tokens: frozenset[int]

    @staticmethod
    def fit(
        losses: Sequence[ContextLosses],
        documents: Sequence[np.ndarray],
        share: float,
        min_gap: float,
    ) -> GapTargets:
        """From the documents of the threshold half."""
        gaps = np.concatenate([part.gap for part in losses])
        types, counts = np.unique(np.concatenate(documents), return_counts=True)
        order = np.argsort(-counts, kind="stable")
        before = np.cumsum(counts[order]) - counts[order]
        common = types[order][before < COMMON_SHARE * counts.sum()]
        return GapTargets(gap_threshold(gaps, share, min_gap), frozenset(common.tolist()))

    def half(self, number: int) -> Half:
        return half_of(number)

    def choose(
        self,
        number: int,
        document: np.ndarray,
        losses: ContextLosses,
        windows: Windows,
        generator: np.random.Generator,
    ) -> dict[str, np.ndarray]:
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


@dataclass(frozen=True)
class GivenTargets:
    """The targets of another measurement of the same text, so that two models answer the same."""

    places: dict[int, dict[str, np.ndarray]]
    """document → target set → targets."""

    fingerprint: str

    @staticmethod
    def read(folder: Path, source: Source) -> GivenTargets:
        results = read_results(folder)
        if results.meta["data"]["fingerprint"] != source.fingerprint:
            raise DataError(
                f"--targets={folder} was measured on {results.meta['data']['source']}, other text "
                f"than {source.name}, or of another tokenizer; give the same --text and "
                "--max-documents, and a model that shares the tokenizer"
            )
        chosen = results.recovery[["document", "target", "target_set"]].drop_duplicates()
        places: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
        for (number, name), rows in chosen.groupby(["document", "target_set"]):
            places[number][name] = np.sort(rows.target.to_numpy())
        digest = hashlib.sha256(chosen.to_csv(index=False).encode()).hexdigest()
        return GivenTargets(dict(places), digest)

    def half(self, number: int) -> Half:
        return "report" if number in self.places else "threshold"

    def choose(
        self,
        number: int,
        document: np.ndarray,
        losses: ContextLosses,
        windows: Windows,
        generator: np.random.Generator,
    ) -> dict[str, np.ndarray]:
        """A longer window leaves the first targets of a document without a full one."""
        return {
            name: np.flatnonzero(np.isin(losses.target, targets))
            for name, targets in self.places[number].items()
        }


@dataclass(frozen=True)
class PlantedTargets:
    """The one target of each document that something is planted for."""

    num_planted: int
    """Documents from this number on are without the planted tokens."""

    def half(self, number: int) -> Half:
        return "report"

    def choose(
        self,
        number: int,
        document: np.ndarray,
        losses: ContextLosses,
        windows: Windows,
        generator: np.random.Generator,
    ) -> dict[str, np.ndarray]:
        last = np.array([len(losses.target) - 1])
        return {PLANTED if number < self.num_planted else REMOVED: last}
