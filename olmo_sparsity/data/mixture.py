"""Find the sequence that a run reads at each place: from one corpus, or from several by weight.

batches.py numbers the sequences that a run reads, from 0, and asks for each by `RunOrder.find`. The
answer depends on the number, the seed and the sizes of the corpora alone. So it is the same on any
number of processes, and a resumed run needs no state.

With several corpora, a *stretch* is a part of the run with the same weights. Let w be the first
corpus's share of the weights. Sequence n of the stretch is read from the first corpus if

    floor((n + 1) · w) > floor(n · w).

Then floor(n · w) of the n sequences before it are from this corpus, too. The other n − floor(n · w)
are shared out among the other corpora in the same way, and so on. So each corpus has its share of
any sequences in a row, up to one or two, and no sequence before n needs to be looked at. With w =
1/4 for A and 3/4 for B, sequences 0 … 7 are from B B B A B B B A.

Shares are fractions, as floating-point numbers would drift over 10^12 sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.data.order import EpochOrder, Order, order_epoch
from olmo_sparsity.data.shards import TokenShards


@dataclass(frozen=True)
class Weights:
    """Weights of corpora in a stretch of batches."""

    by_corpus: Mapping[str, float]
    """The weight of each corpus, by its name."""

    until: int | None
    """The number of batches of the run before the end of the stretch. None: the run has no later
    stretch."""


class SequencePlace(NamedTuple):
    """Where a sequence of a run is read."""

    epoch: int
    index_in_text: int
    """Number of the sequence in the text, cut into sequences."""


class RunOrder(Protocol):
    """The order of all sequences that a run reads."""

    def find(self, number: int) -> SequencePlace:
        """Return where the sequence with this number is read."""

    def count_reads(self, num_batches: int) -> dict[str, float]:
        """Return how often the first `num_batches` batches read each corpus, by its name. A single
        corpus has an empty name."""


def find_order(
    shards: TokenShards,
    *,
    length: int,
    batch_size: int,
    seed: int,
    order: Order,
    weights: Sequence[Weights] = (),
) -> RunOrder:
    """Return the order of a run on these shards. Raise DataError if they are too short."""
    if not shards.corpora:
        num_sequences = shards.count_sequences(length)
        if num_sequences < batch_size:
            raise DataError(
                f"{shards.paths[0].parent} holds {num_sequences} sequences of {length} "
                f"tokens, below {batch_size=}; prepare more text, or lower training.batch_size or "
                "training.length"
            )
        return OneCorpus(num_sequences, batch_size=batch_size, seed=seed, order=order)
    sizes = {name: corpus.count_sequences(length) for name, corpus in shards.corpora.items()}
    for name, size in sizes.items():
        if size == 0 and any(stretch.by_corpus[name] > 0 for stretch in weights):
            raise DataError(
                f"the corpus {name} holds no sequence of {length} tokens; prepare more of it, set "
                "its weight to 0, or lower training.length"
            )
    return SeveralCorpora(sizes, weights, batch_size=batch_size, seed=seed, order=order)


class _Epochs:
    """The order of the sequences of one corpus in each epoch. The order that was used last is kept,
    so that each epoch is shuffled once."""

    def __init__(self, num_sequences: int, seed: int, order: Order) -> None:
        self.num_sequences = num_sequences
        self.seed = seed
        self.order = order
        self._epoch = -1
        self._order: EpochOrder | None = None

    def find(self, epoch: int, place: int) -> int:
        """Return the sequence at a place of an epoch."""
        if self._order is None or self._epoch != epoch:
            self._order = order_epoch(self.order, self.num_sequences, self.seed, epoch)
            self._epoch = epoch
        return int(self._order[place])


class OneCorpus:
    """The order of a run that reads one corpus. An epoch ends with its last full batch, as OLMo's
    does."""

    def __init__(self, num_sequences: int, *, batch_size: int, seed: int, order: Order) -> None:
        self.steps_per_epoch = num_sequences // batch_size
        self.batch_size = batch_size
        self._epochs = _Epochs(num_sequences, seed, order)

    def find(self, number: int) -> SequencePlace:
        epoch, place = divmod(number, self.steps_per_epoch * self.batch_size)
        return SequencePlace(epoch, self._epochs.find(epoch, place))

    def count_reads(self, num_batches: int) -> dict[str, float]:
        return {"": num_batches / self.steps_per_epoch}


class SeveralCorpora:
    """The order of a run that reads several corpora by weight. Each corpus has epochs of its own,
    which end with its last sequence, anywhere in a batch. An index counts the sequences of all
    corpora, in their order: position IDs and transforms are seeded by it."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        weights: Sequence[Weights],
        *,
        batch_size: int,
        seed: int,
        order: Order,
    ) -> None:
        self.sizes = sizes
        self.batch_size = batch_size
        self.stretches = [_Stretch(sizes, stretch, batch_size) for stretch in weights]
        self._epochs: list[_Epochs] = []
        self._first_index: list[int] = []
        num_in_corpora_before = 0
        for size in sizes.values():
            self._epochs.append(_Epochs(size, seed, order))
            self._first_index.append(num_in_corpora_before)
            num_in_corpora_before += size

    def find(self, number: int) -> SequencePlace:
        corpus, num_before = self._corpus_of(number)
        epoch, place = divmod(num_before, self._epochs[corpus].num_sequences)
        index_in_corpus = self._epochs[corpus].find(epoch, place)
        return SequencePlace(epoch, self._first_index[corpus] + index_in_corpus)

    def count_reads(self, num_batches: int) -> dict[str, float]:
        counts = self._count(num_batches * self.batch_size)
        reads = {}
        for (name, size), count in zip(self.sizes.items(), counts, strict=True):
            reads[name] = count / size if size else 0.0
        return reads

    def _corpus_of(self, number: int) -> _PlaceInCorpus:
        """Return the corpus of a sequence of the run."""
        start_of_stretch = 0
        num_earlier = [0] * len(self.sizes)  # in the stretches before
        for stretch in self.stretches:
            if stretch.end is None or number < stretch.end:
                corpus, num_before = stretch.corpus_of(number - start_of_stretch)
                return _PlaceInCorpus(corpus, num_earlier[corpus] + num_before)
            counts = stretch.count(stretch.end - start_of_stretch)
            num_earlier = [a + b for a, b in zip(num_earlier, counts, strict=True)]
            start_of_stretch = stretch.end
        raise AssertionError("the last stretch has no end")

    def _count(self, number: int) -> list[int]:
        """Return how many of the first `number` sequences are from each corpus."""
        start_of_stretch = 0
        totals = [0] * len(self.sizes)
        for stretch in self.stretches:
            end = number if stretch.end is None else min(number, stretch.end)
            if end <= start_of_stretch:
                break
            counts = stretch.count(end - start_of_stretch)
            totals = [a + b for a, b in zip(totals, counts, strict=True)]
            start_of_stretch = end
        return totals


class _PlaceInCorpus(NamedTuple):
    """The place of a sequence among those of its corpus."""

    corpus: int
    """Number of the corpus, in the order of the weights."""

    num_before: int
    """How many earlier sequences, of the stretch or of the run, are from the same corpus."""


class _Stretch:
    """Sequences with the same weights, numbered from 0 (see the module)."""

    def __init__(self, sizes: Mapping[str, int], weights: Weights, batch_size: int) -> None:
        self.end = None if weights.until is None else weights.until * batch_size
        # 0.1 means a tenth, not the binary number next to it.
        exact = [Fraction(repr(float(weights.by_corpus[name]))) for name in sizes]
        self.shares: list[Fraction] = []
        """The share of each corpus in the sequences that the corpora before it leave."""

        rest = sum(exact, Fraction(0))
        for weight in exact:
            self.shares.append(weight / rest if rest else Fraction(0))
            rest -= weight

    def corpus_of(self, number: int) -> _PlaceInCorpus:
        """Return the corpus of a sequence of the stretch."""
        for corpus, share in enumerate(self.shares):
            num_before = _floor(share, number)
            if _floor(share, number + 1) > num_before:
                return _PlaceInCorpus(corpus, num_before)
            number -= num_before  # its number among the sequences of the other corpora
        raise AssertionError("the last corpus of a weight takes all that is left")

    def count(self, number: int) -> list[int]:
        """Return how many of the first `number` sequences are from each corpus."""
        counts = []
        for share in self.shares:
            counts.append(_floor(share, number))
            number -= counts[-1]
        return counts


def _floor(share: Fraction, number: int) -> int:
    """Return floor(number · share), in whole numbers."""
    return number * share.numerator // share.denominator
