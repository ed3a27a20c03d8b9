"""Match questions and statements of two runs, this one and an earlier one.

Place in the flow: stored answers of both runs (answers.py) → **`match_questions`,
`match_statements`** → baseline.py, which compares the verdicts of each pair.

A questions file is edited between two runs: questions are added, moved and reworded, and a model
writes answers in other words. So items are matched by what they have in common, from the most to
the least. Statements of one answer, for example:

    earlier                        now                            matched by
    It opened in 1921.             It opened in 1921.             equal text
    Anna Weiss opened it.          Anna Weiss has opened it.      similar text
    Tickets cost 4 euros.          Dogs are not allowed.          nothing: one is gone, one is new
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from olmo_sparsity.sources.gate.answers import StoredAnswer, StoredStatement

MIN_SIMILARITY = 0.6
"""Fraction of letters in common (`difflib.SequenceMatcher.ratio`) from which a statement counts as
another one reworded. It is the value that difflib recommends, and that its `get_close_matches` has
as a default."""

T = TypeVar("T")


class Pair(NamedTuple, Generic[T]):
    """The same item in both runs."""

    new: T
    earlier: T


@dataclass(frozen=True)
class Matches(Generic[T]):
    """Pairs of items, and the items that have no partner."""

    pairs: list[Pair[T]]
    only_new: list[T]
    only_earlier: list[T]


def match_questions(
    answers: Sequence[StoredAnswer], earlier_answers: Sequence[StoredAnswer]
) -> Matches[StoredAnswer]:
    """Match questions by their text, or else by their id."""
    return match_by_keys(
        answers,
        earlier_answers,
        # A file may ask the same question several times, of other sources. These are told apart by
        # what else is equal: first everything, then less and less.
        lambda answer: (answer.asked, answer.texts, tuple(sorted(answer.source_texts.items()))),
        lambda answer: (answer.asked, answer.texts),
        lambda answer: (answer.asked, answer.id),
        lambda answer: answer.asked,
        # A reworded question keeps its id. A question without an id gets a key of its own, so that
        # it is equal to no other.
        lambda answer: answer.id or object(),
    )


def match_statements(
    statements: Sequence[StoredStatement], earlier_statements: Sequence[StoredStatement]
) -> Matches[StoredStatement]:
    """Match statements of one answer: first by equal text, then reworded ones by similar text."""
    equal = match_by_keys(statements, earlier_statements, lambda statement: statement.text)
    if len(statements) == len(earlier_statements) == 1:
        # The only statement of an answer is the same one, in whatever words.
        reworded = match_by_keys(equal.only_new, equal.only_earlier, lambda statement: None)
    else:
        reworded = _match_similar(equal.only_new, equal.only_earlier)
    return Matches(
        pairs=[*equal.pairs, *reworded.pairs],
        only_new=reworded.only_new,
        only_earlier=reworded.only_earlier,
    )


def match_by_keys(
    new_items: Sequence[T], earlier_items: Sequence[T], *keys: Callable[[T], Any]
) -> Matches[T]:
    """Match items with an equal first key, in their order, then the rest by the second key, and so
    on. Each item gets one partner at most. `keys`: functions that return the key of an item, the
    most specific one first."""
    pairs: list[Pair[T]] = []
    unmatched_new = [*new_items]
    unmatched_earlier = [*earlier_items]
    for key in keys:
        earlier_by_key: defaultdict[Any, list[T]] = defaultdict(list)
        for item in unmatched_earlier:
            earlier_by_key[key(item)].append(item)

        without_partner: list[T] = []
        for item in unmatched_new:
            candidates = earlier_by_key[key(item)]
            if candidates:
                # Of several equal items, the first of both runs are paired, and so on.
                pairs.append(Pair(item, candidates.pop(0)))
            else:
                without_partner.append(item)

        unmatched_new = without_partner
        unmatched_earlier = [*chain.from_iterable(earlier_by_key.values())]
    return Matches(pairs, unmatched_new, unmatched_earlier)


class _Similarity(NamedTuple):
    """How similar two statements are. Sorted, the most similar pairs come first, and pairs that are
    equally similar are in the order of the answers."""

    negative_ratio: float
    """Fraction of letters in common, times −1."""

    new_index: int
    earlier_index: int


def _match_similar(
    statements: Sequence[StoredStatement], earlier_statements: Sequence[StoredStatement]
) -> Matches[StoredStatement]:
    """Match statements of similar text: the most similar pair first, then the most similar pair of
    those that are left."""
    similarities: list[_Similarity] = []
    for i, statement in enumerate(statements):
        for j, earlier in enumerate(earlier_statements):
            # With `autojunk`, frequent letters of texts above 200 letters would not count.
            matcher = SequenceMatcher(None, statement.text, earlier.text, autojunk=False)
            # `quick_ratio` is an upper bound that is cheap.
            if matcher.quick_ratio() >= MIN_SIMILARITY:
                similarities.append(_Similarity(-matcher.ratio(), i, j))

    # The index of the earlier statement, by the index of the new one.
    partners: dict[int, int] = {}
    for negative_ratio, i, j in sorted(similarities):
        is_free = i not in partners and j not in partners.values()
        if is_free and -negative_ratio >= MIN_SIMILARITY:
            partners[i] = j

    return Matches(
        pairs=[Pair(statements[i], earlier_statements[j]) for i, j in sorted(partners.items())],
        only_new=[statement for i, statement in enumerate(statements) if i not in partners],
        only_earlier=[
            earlier for j, earlier in enumerate(earlier_statements) if j not in partners.values()
        ],
    )
