"""What a rule finds, beside what was planted."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from docs.planted_pairs import choosing_the_planted, compare
from olmo_sparsity import measure

MAX_DOCUMENTS = 12
ASKED = {
    "planted": True,
    "max_documents": MAX_DOCUMENTS,
    "long": 40,
    "short": 8,
    "stride": 16,
    "draws": 1,
    "min_gap": 0.0,
}


def test_a_rule_is_compared_with_what_was_planted(trained: Path) -> None:
    found = measure(trained, **ASKED, selectors=["add_one", "pairs"], ks=[1, 2])
    assert found is not None

    def compared(**tables: pd.DataFrame) -> pd.DataFrame:
        return compare(replace(found, **tables), str(trained), MAX_DOCUMENTS)

    of_planted = choosing_the_planted(found).influence
    own = of_planted[(of_planted.control == "own") & (of_planted["rank"] <= 2)]
    planted = found.planted.groupby("document").place.agg(set)
    for (document, _), places in own.groupby(["document", "selector"]).far_first.agg(set).items():
        assert document not in planted or places == planted[document]
    rounded = found.recovery.assign(loss_set=found.recovery.loss_set + 1e-6)
    same = compared(influence=of_planted, recovery=rounded)
    assert (same[["found", "as_good"]] == 1).all(axis=None)
    assert (compared().found < 1).all()  # nobody taught this model
    for nats, share in ((-100, 1), (100, 0)):
        changed = found.recovery.assign(loss_set=found.recovery.loss_set + nats)
        assert (compared(recovery=changed).as_good == share).all()
    one, other = compared().loss_set_of_planted  # whatever a rule chose
    assert one == pytest.approx(other, abs=1e-4)


def test_what_it_cannot_compare_is_refused(trained: Path) -> None:
    asked = {"units": ["tokens", "span:2"], "selectors": ["add_one"], "ks": [1, 2]}
    found = measure(trained, **ASKED, **asked)
    assert found is not None
    with pytest.raises(SystemExit, match="tokens alone"):
        compare(found, str(trained), MAX_DOCUMENTS)
