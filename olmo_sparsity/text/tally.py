"""Count the records of a corpus: read, bad and left out.

    tally.add(TextRecord("It opened in 1921.", …))
    tally.add(BadRecord("malformed line", "a.jsonl:2"))
    tally.add(LeftOut("empty document", "a.jsonl:3"))
    tally.describe()     # "1 x empty document (first: a.jsonl:3), 1 x malformed line (first: …)"
    tally.check(0.01)    # DataError: 1 of the first 3 records are bad

Bad records are mistakes of the input, and too many of them stop a command; records that are left
out are valid. Messages show the counts, and the manifest of prepared text stores them.
"""

from __future__ import annotations

from dataclasses import dataclass

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.schema import option
from olmo_sparsity.text.records import BadRecord, Record, TextRecord

CHECK_EVERY_RECORDS = 100_000
"""Readers check the fraction of bad records each time so many more are counted, so that a bad input
fails early."""


@dataclass
class Tally:
    """Counts of records read, bad and left out. Manifests store it under the names of its
    fields."""

    num_records: int = 0
    """The number of all records, good ones included."""

    bad: dict[str, int] = option({})
    """The number of bad records of each kind."""

    first: dict[str, str] = option({})
    """The file and line of the first record of each kind that is bad or left out."""

    left_out: dict[str, int] = option({})
    """The number of valid records that were left out for each reason."""

    def add(self, record: Record) -> None:
        """Count a record."""
        self.num_records += 1
        if not isinstance(record, TextRecord):
            counts = self.bad if isinstance(record, BadRecord) else self.left_out
            counts[record.kind] = counts.get(record.kind, 0) + 1
            self.first.setdefault(record.kind, record.where)

    def merge(self, later: Tally) -> None:
        """Add the counts of records that follow those counted so far."""
        self.num_records += later.num_records
        for counts, added in ((self.bad, later.bad), (self.left_out, later.left_out)):
            for kind, count in added.items():
                counts[kind] = counts.get(kind, 0) + count
        # Of a kind that both have, the first record is among the earlier ones.
        self.first = later.first | self.first

    @property
    def num_bad(self) -> int:
        return sum(self.bad.values())

    def describe(self) -> str:
        """Return the kinds of bad and left-out records with their numbers, the most frequent
        first."""
        # A record is bad or left out, so the kinds of both differ.
        counts = self.bad | self.left_out
        kinds = sorted(counts, key=lambda kind: (-counts[kind], kind))
        return ", ".join(f"{counts[kind]:,} x {kind} (first: {self.first[kind]})" for kind in kinds)

    def check(self, max_bad_share: float) -> None:
        """Raise DataError if more than this fraction of the records is bad."""
        if self.num_bad > max_bad_share * self.num_records:
            raise DataError(
                f"{self.num_bad:,} of the first {self.num_records:,} records are bad, more than "
                f"{max_bad_share=:.1%}: {self.describe()}; repair the source, or allow more with "
                "data.corpus.max_bad_share in a config"
            )
