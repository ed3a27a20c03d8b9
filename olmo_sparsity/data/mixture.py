"""Find the sequences that a run reads, in their order: from one corpus, or from several by weight.

batches.py numbers the sequences that a run reads, from 0, and asks for each by `RunOrder.find`. The
answer depends on the number, the seed and the sizes of the corpora alone. So it is the same on any
number of processes, and a resumed run needs no state.

With several corpora, a *stretch* is a part of the run with the same weights. Let w be the first
corpus's weight divided by the sum of all weights. Sequence n of the stretch is read from the first
corpus if

    floor((n + 1) · w) > floor(n · w).

Then floor(n · w) of the n sequences before it are from this corpus, too. The other n − floor(n · w)
are divided among the other corpora in the same way, and so on. So each corpus gets its fraction of
any sequences in a row, up to one or two, and no sequence before n needs to be looked at. With
w = 1/4 for A and 3/4 for B:

    sequence n        0 1 2 3 4 5 6 7
    floor(n · w)      0 0 0 0 1 1 1 1     (and 2 for n = 8)
    corpus            B B B A B B B A

Fractions are exact, as floating-point numbers would drift over 10^12 sequences.
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
    """The weights of several corpora in a stretch of batches."""

    by_corpus: Mapping[str, float]
    """The weight of each corpus, by its name."""

    until: int | None
    """How many batches the run has read at the end of the stretch. None: it is the last stretch."""


class SequencePlace(NamedTuple):
    """Where a sequence of a run is in the text, and in which epoch it is read."""

    epoch: int
    index_in_text: int
    """The index of the sequence in the text, if all of it is cut into sequences."""


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
    """Return the order in which a run reads these shards. Raise DataError if they are too short.

    Args:
        length: The number of tokens of a sequence.
        weights: The weights of several corpora, for each stretch; empty for a single corpus.
    """
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
    """The order of the sequences of one corpus in each epoch."""

    def __init__(self, num_sequences: int, seed: int, order: Order) -> None:
        self.num_sequences = num_sequences
        self.seed = seed
        self.order = order
        self._last_order: _OrderOfEpoch | None = None
        """The order that was used last, so that each epoch is shuffled once."""

    def find(self, epoch: int, number: int) -> int:
        """Return the index of the sequence that an epoch reads as its `number`-th, from 0 on."""
        if self._last_order is None or self._last_order.epoch != epoch:
            order = order_epoch(self.order, self.num_sequences, self.seed, epoch)
            self._last_order = _OrderOfEpoch(epoch, order)
        return int(self._last_order.order[number])


class _OrderOfEpoch(NamedTuple):
    """The order of one epoch."""

    epoch: int
    order: EpochOrder


class OneCorpus:
    """The order of a run that reads one corpus. An epoch ends with its last full batch, as OLMo's
    does."""

    def __init__(self, num_sequences: int, *, batch_size: int, seed: int, order: Order) -> None:
        self.steps_per_epoch = num_sequences // batch_size
        self.batch_size = batch_size
        self._epochs = _Epochs(num_sequences, seed, order)

    def find(self, number: int) -> SequencePlace:
        epoch, number_in_epoch = divmod(number, self.steps_per_epoch * self.batch_size)
        return SequencePlace(epoch, self._epochs.find(epoch, number_in_epoch))

    def count_reads(self, num_batches: int) -> dict[str, float]:
        return {"": num_batches / self.steps_per_epoch}


class SeveralCorpora:
    """The order of a run that reads several corpora by weight. Each corpus has epochs of its own,
    which end with its last sequence, anywhere in a batch. The index of a sequence counts the
    sequences of all corpora, one corpus after the other: position IDs and transforms are seeded by
    it."""

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
        """The epochs of each corpus, in the order of `sizes`."""

        self._first_index: list[int] = []
        """The index of each corpus's first sequence, among the sequences of all corpora."""

        num_in_corpora_before = 0
        for size in sizes.values():
            self._epochs.append(_Epochs(size, seed, order))
            self._first_index.append(num_in_corpora_before)
            num_in_corpora_before += size

    def find(self, number: int) -> SequencePlace:
        corpus, num_before = self._corpus_of(number)
        epoch, number_in_epoch = divmod(num_before, self._epochs[corpus].num_sequences)
        index_in_corpus = self._epochs[corpus].find(epoch, number_in_epoch)
        return SequencePlace(epoch, self._first_index[corpus] + index_in_corpus)

    def count_reads(self, num_batches: int) -> dict[str, float]:
        counts = self._count(num_batches * self.batch_size)
        reads = {}
        for (name, size), count in zip(self.sizes.items(), counts, strict=True):
            reads[name] = count / size if size else 0.0
        return reads

    def _corpus_of(self, number: int) -> _NumberInCorpus:
        """Return the corpus of a sequence of the run, and how many of its sequences were read
        before."""
        start_of_stretch = 0
        # How many sequences of each corpus the stretches before this one have read. Without them a
        # corpus would begin anew in each stretch.
        num_earlier = [0] * len(self.sizes)
        for stretch in self.stretches:
            if stretch.end is None or number < stretch.end:
                corpus, num_before = stretch.corpus_of(number - start_of_stretch)
                return _NumberInCorpus(corpus, num_earlier[corpus] + num_before)
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


class _NumberInCorpus(NamedTuple):
    """The corpus of a sequence, and its number among the sequences that are read of it."""

    corpus: int
    """The index of the corpus, in the order of the weights."""

    num_before: int
    """How many earlier sequences, of the stretch or of the run, are from the same corpus."""


class _Stretch:
    """Sequences with the same weights, numbered from 0 (see the module)."""

    def __init__(self, sizes: Mapping[str, int], weights: Weights, batch_size: int) -> None:
        self.end = None if weights.until is None else weights.until * batch_size
        # 0.1 means a tenth, not the binary number next to it.
        exact = [Fraction(repr(float(weights.by_corpus[name]))) for name in sizes]
        self.fractions: list[Fraction] = []
        """For each corpus: which fraction it gets of the sequences that the corpora before it
        leave. With weights of 1/2, 1/4 and 1/4 these are 1/2, 1/2 and 1."""

        # A weight of 0 gets the fraction 0, also after the last corpus that has any.
        remaining_weight = sum(exact, Fraction(0))
        for weight in exact:
            fraction = weight / remaining_weight if remaining_weight else Fraction(0)
            self.fractions.append(fraction)
            remaining_weight -= weight

    def corpus_of(self, number: int) -> _NumberInCorpus:
        """Return the corpus of a sequence of the stretch, and how many sequences of the stretch
        before it are from the same corpus."""
        for corpus, fraction in enumerate(self.fractions):
            num_before = _floor(fraction, number)
            if _floor(fraction, number + 1) > num_before:
                return _NumberInCorpus(corpus, num_before)
            # It is none of this corpus. Among the sequences of the other corpora it has a smaller
            # number, as those of this corpus before it do not count.
            number -= num_before
        raise AssertionError("the last corpus of a weight takes all that is left")

    def count(self, number: int) -> list[int]:
        """Return how many of the first `number` sequences are from each corpus."""
        counts = []
        for fraction in self.fractions:
            num_of_corpus = _floor(fraction, number)
            counts.append(num_of_corpus)
            number -= num_of_corpus  # what is left for the other corpora
        return counts


def _floor(fraction: Fraction, number: int) -> int:
    """Return floor(number · fraction), computed in whole numbers."""
    return number * fraction.numerator // fraction.denominator
