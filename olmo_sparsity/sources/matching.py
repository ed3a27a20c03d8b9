"""Match the questions and statements of a run with those of an earlier run.

Place in the flow: stored answers of both runs (answers.py) → **`match_questions`,
`match_statements`** → baseline.py, which compares the verdicts of each pair.

A questions file is edited between two runs: questions are added, moved and reworded, and a model
writes answers in other words. So items are matched by what they have in common, from the most to
the least: `match_by_keys` pairs items with an equal first key, then the rest by the second key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from olmo_sparsity.sources.answers import StoredAnswer, StoredStatement

MIN_SIMILARITY = 0.6
"""Share of letters in common (`difflib.SequenceMatcher.ratio`) from which a statement counts as
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
    rows: Sequence[StoredStatement], earlier_rows: Sequence[StoredStatement]
) -> Matches[StoredStatement]:
    """Match statements of one answer by their text, then those that were reworded."""
    equal = match_by_keys(rows, earlier_rows, lambda row: row.text)
    if len(rows) == len(earlier_rows) == 1:
        # The only statement of an answer is the same one, in whatever words.
        reworded = match_by_keys(equal.only_new, equal.only_earlier, lambda row: None)
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
    on."""
    pairs = list[Pair[T]]()
    unmatched_new = [*new_items]
    unmatched_earlier = [*earlier_items]
    for key in keys:
        earlier_by_key = defaultdict[Any, list[T]](list)
        for item in unmatched_earlier:
            earlier_by_key[key(item)].append(item)

        without_partner = list[T]()
        for item in unmatched_new:
            candidates = earlier_by_key[key(item)]
            if candidates:
                pairs.append(Pair(item, candidates.pop(0)))
            else:
                without_partner.append(item)

        unmatched_new = without_partner
        unmatched_earlier = [*chain.from_iterable(earlier_by_key.values())]
    return Matches(pairs, unmatched_new, unmatched_earlier)


class _Similarity(NamedTuple):
    """How similar two statements are. Sorted, the most similar come first, then in their order."""

    negative_ratio: float
    """Share of letters in common, times −1."""

    row: int
    earlier_row: int


def _match_similar(
    rows: Sequence[StoredStatement], earlier_rows: Sequence[StoredStatement]
) -> Matches[StoredStatement]:
    """Match statements of similar text, the most similar first."""
    similarities = list[_Similarity]()
    for i, row in enumerate(rows):
        for j, earlier_row in enumerate(earlier_rows):
            # With `autojunk`, frequent letters of texts above 200 letters would not count.
            matcher = SequenceMatcher(None, row.text, earlier_row.text, autojunk=False)
            # `quick_ratio` is an upper bound that is cheap.
            if matcher.quick_ratio() >= MIN_SIMILARITY:
                similarities.append(_Similarity(-matcher.ratio(), i, j))

    # By the number of a new statement, the number of its earlier one.
    partners = dict[int, int]()
    for negative_ratio, i, j in sorted(similarities):
        is_free = i not in partners and j not in partners.values()
        if is_free and -negative_ratio >= MIN_SIMILARITY:
            partners[i] = j

    return Matches(
        pairs=[Pair(rows[i], earlier_rows[j]) for i, j in sorted(partners.items())],
        only_new=[row for i, row in enumerate(rows) if i not in partners],
        only_earlier=[row for j, row in enumerate(earlier_rows) if j not in partners.values()],
    )
