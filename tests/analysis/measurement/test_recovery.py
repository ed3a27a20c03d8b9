"""What is recovered of one document, against brute force."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from olmo_sparsity.analysis.interpretation import InterpretationName
from olmo_sparsity.analysis.measurement.recovery import recover
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.scoring.replaced import scorer_of
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.load import wrap_model
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.distant_text import DistantText
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.windows import Windows
from tests.support.brute import (
    CPU,
    ONE_FAMILY,
    OURS,
    READINGS,
    VOCAB,
    Brute,
    behind,
    tiny,
    units_of,
)
from tests.support.explanations import make_model


@pytest.fixture(scope="module", params=[*OURS, "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


RECOVERED = Windows(16, 6, 4)
TARGETS = {"document": np.array([17, 19, 26]), "placebo": np.array([16, 19])}  # of two blocks


@pytest.fixture(scope="module")
def documents() -> Documents:
    generator = np.random.default_rng(2)
    return Documents.of([generator.integers(0, VOCAB, 30 + 2 * i) for i in range(7)])


def recovered(scorer: Scorer, documents: Documents, **changed: Any) -> dict[str, Any]:
    options = {
        "targets": TARGETS,
        "units": ("tokens", "span:3"),
        "ks": (1, 2),
        "selectors": ("add_one", "gradient", "random"),
    } | changed
    controls = Controls(documents, RECOVERED, num_draws=3)
    return recover(scorer, documents[1], RECOVERED, controls=controls, **options)


BY = ["target", "distant_part", "units", "selector", "control"]
SELECTORS = ("add_one", "gradient", "random")


class Recovered:
    """The tables of one document with one interpretation, and brute force for their rows."""

    def __init__(self, model: Any, documents: Documents, distant_states: Any) -> None:
        self.tables = recovered(Scorer(model, CPU, distant_states=distant_states), documents)
        self.model = model
        self.document = documents[1]
        self.distant_states = distant_states
        self.controls = Controls(documents, RECOVERED, num_draws=3)
        self.blocks = {block.start: block for block in RECOVERED.blocks(self.document.tokens)}
        self.brute_of = cache(self._brute_of)

    def _brute_of(self, target: int, part: str, draw: int = 0) -> Brute:
        """`part`: `document`, `placebo` or `unrelated`, put in its place by hand."""
        block = self.blocks[target - (target - 16) % 4]
        text = self.document.tokens
        if part == "placebo":
            text = behind(text, block, self.controls.placebo(self.document, block))
        elif part == "unrelated":
            text = behind(text, block, self.controls.unrelated(self.document, block, draw))
        return Brute(self.model, text, RECOVERED, target, self.distant_states)

    def brute_of_row(self, row: Any) -> Brute:
        is_own = row.control == "own"
        return self.brute_of(row.target, row.distant_part if is_own else "unrelated", row.draw)

    def ranked(self, row: Any) -> pd.DataFrame:
        """The units of the ranking that a row of `recovery` is of."""
        values = {name: getattr(row, name) for name in BY}
        return rows_of(self.tables["influence"], **values)


@pytest.fixture(scope="module", params=["isolated", "contextual"])
def evaluated(request: pytest.FixtureRequest, model: Any, documents: Documents) -> Recovered:
    return Recovered(model, documents, request.param)


@ONE_FAMILY
def test_every_target_has_a_ranking_for_each_selector_and_kind_of_units(
    evaluated: Recovered,
) -> None:
    rankings = evaluated.tables["influence"].groupby(BY)
    # Five targets of the distant parts, two kinds of units, three selectors, own and unrelated.
    assert len(rankings) == 5 * 2 * 3 * 2
    assert {key[:2] for key in rankings.groups} == {
        (target, part) for part, targets in TARGETS.items() for target in targets.tolist()
    }
    assert all(rows["rank"].tolist() == [1, 2] for _, rows in rankings)


@ONE_FAMILY
def test_the_first_unit_of_add_one_is_the_best_by_brute_force(evaluated: Recovered) -> None:
    rows = rows_of(evaluated.tables["recovery"], selector="add_one", k=1)
    assert len(rows) == 5 * 2 * (1 + 3)  # own once, and each draw of an unrelated text
    for row in rows.itertuples():
        brute = evaluated.brute_of_row(row)
        best = min(brute.loss(unit) for unit in units_of(row.units)[1])
        assert row.loss_set == pytest.approx(best, abs=2e-5)


@ONE_FAMILY
def test_what_is_recovered_is_the_loss_of_the_chosen_set(evaluated: Recovered) -> None:
    """Of each distant part, and of the unrelated texts put in its place by hand."""
    rows = rows_of(evaluated.tables["recovery"], draw=0)
    assert len(rows) == 5 * 2 * 3 * 2 * 2
    for row in rows.itertuples():
        brute = evaluated.brute_of_row(row)
        places: set[int] = set()
        for unit in evaluated.ranked(row)[: row.k].itertuples():
            places.update(range(unit.distant_first - brute.origin, unit.distant_end - brute.origin))
        assert row.num_tokens == len(places)
        assert row.loss_set == pytest.approx(brute.loss(places), abs=2e-5)
        without = brute.loss({*range(10)} - places) if row.control == "own" else np.nan
        assert row.loss_without == pytest.approx(without, abs=2e-5, nan_ok=True)


@ONE_FAMILY
def test_the_text_of_a_unit_is_that_of_its_places(evaluated: Recovered) -> None:
    for row in rows_of(evaluated.tables["recovery"], draw=0, k=1).itertuples():
        document = evaluated.brute_of_row(row).document
        for unit in evaluated.ranked(row).itertuples():
            distant = document[unit.distant_first : unit.distant_end]
            assert unit.distant_text == " ".join(str(token) for token in distant)


@ONE_FAMILY
def test_only_random_selectors_are_drawn_several_times_for_the_document(
    evaluated: Recovered,
) -> None:
    draws = evaluated.tables["recovery"].groupby(["control", "selector"]).draw.nunique()
    assert draws.to_dict() == {
        ("own", "add_one"): 1,
        ("own", "gradient"): 1,
        ("own", "random"): 3,
        **{("unrelated", selector): 3 for selector in SELECTORS},
    }


@ONE_FAMILY
def test_a_selector_costs_what_it_takes_for_the_documents_own_text_once(
    evaluated: Recovered,
) -> None:
    costs = evaluated.tables["costs"]
    num_targets = costs.groupby(["units", "selector"]).num_targets.sum().drop("all")
    assert num_targets.tolist() == [3] * 2 * 3


@ONE_FAMILY
@READINGS
@pytest.mark.parametrize("kind", ["tokens", "span:3"])
def test_lds_is_the_rank_correlation_with_the_losses_of_random_halves(
    model: Any, documents: Documents, distant_states: InterpretationName, kind: str
) -> None:
    selectors = ("add_one", "gradient", "add_one_screened", "nearest")
    scorer = Scorer(model, CPU, distant_states=distant_states)
    given = {"units": kind, "selectors": selectors, "num_halves": 7, "seed": 3}
    tables = recovered(scorer, documents, **given)
    document, (_, by_hand) = documents[1], units_of(kind)
    found = tables["lds"].set_index(["target", "selector"]).lds
    targets = TARGETS["document"].tolist()
    assert len(found) == len(targets) * len(selectors)
    for target in targets:
        brute = Brute(model, document.tokens, RECOVERED, target, distant_states)
        start = target - (target - 16) % 4
        kept = units_of(kind)[0].halves(7, stream(3, "halves", document.number, start))
        distant = [{j for unit in np.flatnonzero(row) for j in by_hand[unit]} for row in kept]
        falls = pd.Series([brute.loss([]) - brute.loss(places) for places in distant])
        for selector in ("add_one", "gradient"):
            predicted = pd.Series(kept @ brute.influences(selector, by_hand))
            expected = np.corrcoef(predicted.rank(), falls.rank())[0, 1]
            assert found[target, selector] == pytest.approx(expected, abs=1e-6)
        # It evaluates all of so few units.
        assert found[target, "add_one_screened"] == pytest.approx(found[target, "add_one"])
    spent = tables["costs"].query("selector == 'halves'")
    assert spent.num_targets.sum() == len(targets)
    assert (spent.token_forwards > 0).all()


LATER = Windows("all", 6, 4, min_distant=5)


@pytest.mark.accept
@READINGS
def test_the_whole_document_before_a_target(
    model: Any, documents: Documents, distant_states: InterpretationName
) -> None:
    """One pass, in parts of a few tokens, against a plain forward of every prefix: losses of the
    document and behind an unrelated text, recovery and removal."""
    document, windows = documents[1], LATER
    controls = Controls(documents, windows, num_draws=1)
    scorer = Scorer(model, CPU, distant_states=distant_states, batch_tokens=7)
    losses = context_losses(scorer, document, windows, controls)
    assert losses.target.tolist() == list(range(6 + 5, len(document.tokens)))
    blocks = {block.start: block for block in windows.blocks(document.tokens)}
    for row in losses.itertuples():
        start = int(windows.start_of(row.target))
        other = behind_all(document.tokens, controls.placebo(document, blocks[start]))
        for text, found in ((document.tokens, row.loss_long), (other, row.placebo_loss_long)):
            brute = Brute(model, text, windows, row.target, start=start)
            assert found == pytest.approx(brute.loss(range(len(brute.distant))), abs=1e-5)
        assert row.loss_short == pytest.approx(brute.loss([]), abs=1e-5)
    some = [blocks[15], blocks[23]]
    pd.testing.assert_frame_equal(
        context_losses(Scorer(model, CPU, batch_tokens=7), document, windows, controls, some),
        losses[losses.target.isin([*range(15, 19), *range(23, 27)])].reset_index(drop=True),
        atol=1e-5,
    )
    found = recover(
        scorer, document, windows, {"document": np.array([13, 22]), "placebo": np.array([22])},
        ks=(1, 3), selectors="add_one_screened", controls=controls,
    )  # fmt: skip
    num_seen = 0
    for row in rows_of(found["recovery"], control="own").itertuples():
        start = int(windows.start_of(row.target))
        text = document.tokens
        if row.distant_part == "placebo":
            text = behind_all(text, controls.placebo(document, blocks[start]))
        brute = Brute(model, text, windows, row.target, distant_states, start=start)
        ranked = rows_of(
            found["influence"], target=row.target, distant_part=row.distant_part, control="own"
        )
        chosen = ranked.distant_first[: row.k].tolist()
        rest = sorted({*range(len(brute.distant))} - {*chosen})
        assert row.loss_set == pytest.approx(brute.loss(chosen), abs=1e-5)
        assert row.loss_without == pytest.approx(brute.loss(rest), abs=1e-5)
        num_seen += 1
    assert num_seen == 3 * 2
    shared = [  # states of the first target's distant text are a part of the last one's
        recover(scorer, document, windows, {"document": np.array(targets)}, ks=(1,),
                selectors="add_one_screened", controls=controls)["costs"]
        .query("selector == 'shared'").token_forwards.sum()
        for targets in ([13, 22], [22])
    ]  # fmt: skip
    assert shared[0] == shared[1]


GROUPS = [(0, 1), (1, 2), (2, 3), (3, 5), (5, 6), (6, 7), (7, 8), (8, 10)]
"""Ten units, halved until there are more than four groups."""


def test_reliability_is_the_agreement_of_two_halves_of_the_texts() -> None:
    """Spearman–Brown of the rank correlation, of groups of five units or more."""
    generator = np.random.default_rng(10)
    documents = Documents.of([generator.integers(3, 45, 30) for _ in range(9)])
    document, windows, model = documents[1], Windows(16, 6, 4), make_model()
    controls = Controls(documents, windows, num_draws=1)
    whole = wrap_model(model, whole_prompts=True)
    for num_texts, num_found in ((1, 0), (2, 4), (4, 4)):
        settings = Settings(distant_states="replaced", replacements=num_texts)
        scorer = scorer_of(whole, settings, None).of_document(document, controls)
        given = {"ks": (1,), "selectors": "nearest", "controls": controls}
        found = recover(scorer, document, windows, [*range(16, 20)], **given)["lds"]
        assert len(found) == num_found
    for row in found.itertuples():
        assert (row.units, row.selector) == ("tokens", "unrelated texts")
        block, falls = windows.block(document.tokens, 16, 20), []
        texts = [controls.replacement(document, block, draw).tokens_F for draw in range(4)]
        for half in (texts[::2], texts[1::2]):
            losses = []
            for first, end in ((0, 0), *GROUPS):
                of_texts = []
                for text in half:
                    distant = text.copy()
                    distant[first:end] = block.distant_F[first:end]
                    tokens = torch.tensor([[*distant, *document.tokens[10 : row.target + 1]]])
                    with torch.no_grad():
                        log_p = model(tokens).logits[0, -2].log_softmax(-1)
                    of_texts.append(-float(log_p[tokens[0, -1]]))
                losses.append(np.mean(of_texts))
            falls.append(pd.Series(losses[0] - np.array(losses[1:])).rank())
        r = np.corrcoef(*falls)[0, 1]
        assert row.lds == pytest.approx(max(-1, 2 * r / (1 + r)), abs=1e-6)
    assert min(found.lds) == pytest.approx(-1)


@ONE_FAMILY
def test_targets_need_a_full_window_and_a_place_in_the_document(
    model: Any, documents: Documents
) -> None:
    scorer, document = Scorer(model, CPU), documents[1]
    for wrong in ([15], [32], [[16, 16]], [[31, 33]], [[19, 17]]):
        with pytest.raises(DataError, match="targets: "):
            recover(scorer, document, RECOVERED, np.array(wrong), ks=(1,))
    found = recover(scorer, document, RECOVERED, np.array([[16, 18], [31, 32]]), ks=(1, 2))
    assert found["recovery"].target.tolist() == [16, 16, 31, 31]
    assert not len(found["lds"])
    drawn = [recover(scorer, document, RECOVERED, [16, 20], ks=(2,), selectors="random", **seed)
             for seed in ({}, {"seed": 0}, {"seed": 1})]  # fmt: skip
    first, same, other = (tables["influence"].distant_first.tolist() for tables in drawn)
    assert first == same != other


def behind_all(document: np.ndarray, text: DistantText) -> np.ndarray:
    return np.concatenate([text.tokens_F, document[len(text.tokens_F) :]])


def rows_of(table: Any, **values: Any) -> Any:
    for name, value in values.items():
        table = table[table[name] == value]
    return table
