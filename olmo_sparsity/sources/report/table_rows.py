"""Name what the rows of an `Attribution`'s tables hold, for the modules that show them.

A row of a pandas table has no type of its own. Functions that take one are annotated with one of
these, so that a reader sees which columns it has. docs/sources.md explains all columns.

    `Attribution.statements`   StatementRow   made by statement_rows.py
    `Attribution.matrix`       MatrixRow      made by tables.py
"""

from __future__ import annotations

from typing import Any, Protocol

from olmo_sparsity.sources.verdicts.verdict import VerdictKind


class StatementRow(Protocol):
    """The verdict on a statement, for example:

    text      It was opened in June 1921.
    nats      9.6
    kind      one
    sources   (reasoning 2,)
    origins   (bridge.txt,)
    verdict   rests on reasoning 2 (gives 9.2 nats; beats 2 of 2 decoys)
    by_word   by word, in nats: June +3.1, 1921. +5.0; less than 1: It was opened in
    """

    Index: Any
    """The index of the statement, in rows that `itertuples` yields."""

    text: str
    nats: float
    """Nats that all sources give together."""

    kind: VerdictKind
    sources: tuple[str, ...]
    """What the verdict names: sources, and sentences of the reasoning."""

    origins: tuple[str, ...]
    """The sources that are named, or that a named sentence of the reasoning relies on."""

    open: tuple[str, ...]
    """Sources that are neither named nor excluded."""

    verdict: str
    by_word: str
    """How the nats are spread over the words; empty if it rests on no source."""


class MatrixRow(Protocol):
    """Both effects of one source on one statement, in nats, and how many decoys have less."""

    gives: float
    beyond_gives: int
    lost: float
    beyond_lost: int
