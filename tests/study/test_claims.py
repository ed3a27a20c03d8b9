"""Claims are worded as registered, and their verdicts follow from the stored rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from study.claims import PAGE, VERDICTS, conditions, holds, read_claims, registered, write

CLAIMS = read_claims()


def test_every_claim_is_as_it_was_registered() -> None:
    records = registered()
    assert set(CLAIMS) <= set(records)
    running = set(records) - set(CLAIMS)  # a claim is on the page once it is judged
    assert all(records[name].date >= "2026-11-30" for name in running)
    for name, claim in CLAIMS.items():
        record = records[name]
        assert (claim.claim, claim.threshold) == (record.claim, record.threshold), name
        assert claim.date >= record.date, name
        assert claim.verdict in VERDICTS


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if claim.rows])
def test_a_verdict_is_yes_exactly_if_its_conditions_hold(name: str) -> None:
    claim = CLAIMS[name]
    assert list(conditions(claim))
    assert holds(claim) == (claim.verdict == "yes")
    if claim.verdict == "partly":
        assert any(condition.holds for condition in conditions(claim))


def test_a_condition_is_of_every_number_and_of_both_rows() -> None:
    row = "net_biases_seed{2,3}_contextual gap add_one 1: net"
    claim = replace(CLAIMS["P9"], rows=[f"{row} >= 0.3, net_low > 0.2"])
    found = list(conditions(claim))
    assert [(one.column, one.bound) for one in found] == [("net", 0.3)] * 2 + [("net_low", 0.2)] * 2
    assert holds(claim)
    lowest = min(one.value for one in found[:2])
    assert not holds(replace(claim, rows=[f"{row} > {lowest:.4f}"]))
    assert holds(replace(claim, rows=[f"{row} >= {lowest:.4f}"]))
    assert not holds(claim, widened=4)
    (one, other) = conditions(replace(claim, rows=[f"{row} minus {row} < 0.1"]))
    assert (one.value, other.value) == (0, 0)


def test_the_page_is_written_from_the_claims() -> None:
    assert PAGE.read_text(encoding="utf-8") == write(), "run `python -m study.claims`"
