"""Find the sequences that a run reads, in their order: from one corpus, or from several by weight.

    order = find_order(shards, length=1024, batch_size=512, seed=0, order="stored", weights=…)
    order.find(0)            # SequencePlace(epoch=0, index_in_text=48_213): what the run reads
    first order.count_reads(20)    # {"web": 0.01, "code": 0.002}: how often 20 batches read each
    corpus

batches.py asks for each sequence of a run by its index in the run, from 0. The answer depends on
the index, the seed and the sizes of the corpora alone. So it is the same on any number of
processes, and a resumed run needs no state.

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

    def find(self, index_in_run: int) -> SequencePlace:
        """Return where in the text the sequence is that the run reads at this index."""

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

    def find(self, epoch: int, index_in_epoch: int) -> int:
        """Return the index in the corpus of the sequence that an epoch reads at this index."""
        if self._last_order is None or self._last_order.epoch != epoch:
            order = order_epoch(self.order, self.num_sequences, self.seed, epoch)
            self._last_order = _OrderOfEpoch(epoch, order)
        return int(self._last_order.order[index_in_epoch])


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

    def find(self, index_in_run: int) -> SequencePlace:
        epoch, index_in_epoch = divmod(index_in_run, self.steps_per_epoch * self.batch_size)
        return SequencePlace(epoch, self._epochs.find(epoch, index_in_epoch))

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

    def find(self, index_in_run: int) -> SequencePlace:
        corpus, num_before = self._corpus_of(index_in_run)
        epoch, index_in_epoch = divmod(num_before, self._epochs[corpus].num_sequences)
        index_in_corpus = self._epochs[corpus].find(epoch, index_in_epoch)
        return SequencePlace(epoch, self._first_index[corpus] + index_in_corpus)

    def count_reads(self, num_batches: int) -> dict[str, float]:
        counts = self._count(num_batches * self.batch_size)
        reads = {}
        for (name, size), count in zip(self.sizes.items(), counts, strict=True):
            reads[name] = count / size if size else 0.0
        return reads

    def _corpus_of(self, index_in_run: int) -> _ReadFrom:
        """Return the corpus of a sequence of the run, and how many of its sequences were read
        before."""
        start_of_stretch = 0
        # How many sequences of each corpus the stretches before this one have read. Without them a
        # corpus would begin anew in each stretch.
        num_earlier = [0] * len(self.sizes)
        for stretch in self.stretches:
            if stretch.end is None or index_in_run < stretch.end:
                corpus, num_before = stretch.corpus_of(index_in_run - start_of_stretch)
                return _ReadFrom(corpus, num_earlier[corpus] + num_before)
            counts = stretch.count(stretch.end - start_of_stretch)
            num_earlier = _add(num_earlier, counts)
            start_of_stretch = stretch.end
        raise AssertionError("the last stretch has no end")

    def _count(self, num_sequences: int) -> list[int]:
        """Return how many of the first `num_sequences` of the run are from each corpus."""
        start_of_stretch = 0
        totals = [0] * len(self.sizes)
        for stretch in self.stretches:
            end = num_sequences if stretch.end is None else min(num_sequences, stretch.end)
            if end <= start_of_stretch:
                break
            counts = stretch.count(end - start_of_stretch)
            totals = _add(totals, counts)
            start_of_stretch = end
        return totals


class _ReadFrom(NamedTuple):
    """The corpus that a sequence is read from, and how often it was read before."""

    corpus: int
    """The index of the corpus, in the order of the weights."""

    num_before: int
    """How many earlier sequences, of the stretch or of the run, are from the same corpus."""


def _add(counts: list[int], more_counts: list[int]) -> list[int]:
    """Return the sums of the counts of each corpus."""
    return [first + second for first, second in zip(counts, more_counts, strict=True)]


class _Stretch:
    """Sequences with the same weights, with indices from 0 (see the module)."""

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

    def corpus_of(self, index_in_stretch: int) -> _ReadFrom:
        """Return the corpus of a sequence of the stretch, and how many sequences of the stretch
        before it are from the same corpus."""
        index = index_in_stretch
        for corpus, fraction in enumerate(self.fractions):
            num_before = _floor(fraction, index)
            if _floor(fraction, index + 1) > num_before:
                return _ReadFrom(corpus, num_before)
            # It is not of this corpus. Among the sequences of the other corpora it has a smaller
            # index, as those of this corpus before it do not count.
            index -= num_before
        raise AssertionError("the last corpus of a weight takes all that is left")

    def count(self, num_sequences: int) -> list[int]:
        """Return how many of the first `num_sequences` of the stretch are from each corpus."""
        num_left = num_sequences  # for this corpus and the ones after it
        counts = []
        for fraction in self.fractions:
            num_of_corpus = _floor(fraction, num_left)
            counts.append(num_of_corpus)
            num_left -= num_of_corpus
        return counts


def _floor(fraction: Fraction, factor: int) -> int:
    """Return floor(factor · fraction), computed in whole numbers."""
    return factor * fraction.numerator // fraction.denominator
