"""What a rule finds, beside what was planted."""

from dataclasses import replace
from pathlib import Path

import pandas as pd

from docs.planted_pairs import choosing_the_planted, compare
from olmo_sparsity import measure

ASKED = {"planted": True, "max_documents": 24, "long": 40, "short": 8, "stride": 16, "draws": 1}


def test_a_rule_is_compared_with_what_was_planted(trained: Path) -> None:
    found = measure(trained, **ASKED, selectors=["add_one", "pairs"], ks=[1, 2], min_gap=0.0)
    assert found is not None
    table = compare(found, str(trained), ASKED["max_documents"])
    of_planted = choosing_the_planted(found).influence
    own = of_planted[(of_planted.control == "own") & (of_planted["rank"] <= 2)]
    chosen = own.groupby(["document", "selector"]).far_first.agg(set)
    planted = found.planted.groupby("document").place.agg(set)
    for (document, _), places in chosen.items():
        assert document not in planted or places == planted[document]
    # A rule whose choice is the planted pair does as well, and finds it.
    again = compare(replace(found, influence=of_planted), str(trained), ASKED["max_documents"])
    assert (again.found == 1).all()
    pd.testing.assert_series_equal(again.loss_set_of_planted, table.loss_set_of_planted)
    # `pairs` tries few pairs, of a model that was never taught one: some choices differ.
    assert (table.found < 1).all()
    assert table.as_good.between(0, 1).all()
    as_good = table.loss_set <= table.loss_set_of_planted
    assert (table.as_good[as_good] > 0).all()
