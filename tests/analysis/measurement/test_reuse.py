"""What a measurement takes from another: losses of the same model; what another model chose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, models, processors

from olmo_sparsity import measure, transfer
from olmo_sparsity.analysis.inputs.documents import Documents
from olmo_sparsity.analysis.inputs.windows import Windows
from olmo_sparsity.analysis.models.load import LoadedModel
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.summary import describe
from olmo_sparsity.analysis.scoring.scorer import Scorer, bigrams
from olmo_sparsity.errors import ConfigError, DataError
from tests.support.measurements import VOCAB, planned, untrained

WINDOWS = Windows(16, 6, 8)
AT: dict[str, Any] = {"long": WINDOWS.long, "short": WINDOWS.short, "stride": WINDOWS.stride}
OPTIONS: dict[str, Any] = {
    "units": ("tokens", "span:3"),
    "selectors": ("add_one", "random"),
    "ks": (1, 2),
    "share": 0.3,
    "min_gap": 0.0,
    "sets": ("gap", "bigram", "every"),
    "draws": 2,
    "halves": 0,
}
SHARED = ["target_set", "units", "selector", "k"]


def model_of(seed: int) -> LoadedModel:
    return LoadedModel(
        untrained(seed, architecture="gpt_neox"), None, f"m{seed}", 0, None, f"m{seed}"
    )


@pytest.fixture(scope="module")
def documents() -> Documents:
    rng = np.random.default_rng(0)
    return Documents.of([rng.zipf(1.4, 40) % VOCAB for _ in range(7)])


@pytest.fixture(scope="module")
def found(documents: Documents) -> dict[int, Results]:
    measured = {seed: measure(model_of(seed), documents, WINDOWS, **OPTIONS) for seed in (0, 1)}
    return {seed: result for seed, result in measured.items() if result is not None}


def evaluated(seed: int, documents: Documents, choices: Results, **options: Any) -> Results:
    result = measure(model_of(seed), documents, choices=choices, **options)
    return result


def test_recovery_is_that_of_the_others_units_by_definition(
    documents: Documents, found: dict[int, Results]
) -> None:
    given, judged = found[0], evaluated(1, documents, found[0], ks=2)
    rows = judged.recovery.query("control == 'own' and units == 'tokens' and k == 2")
    scorer = Scorer(model_of(1).model)
    ranked = given.influence.query("far_part == 'document' and control == 'own'")
    for row in rows.sample(8, random_state=0).itertuples():
        tokens = documents[row.document].tokens
        start = int(WINDOWS.start_of(row.target))
        block = WINDOWS.block(tokens, start, min(start + WINDOWS.stride, len(tokens)))
        units = ranked.query(
            f"document == {row.document} and target == {row.target} and units == 'tokens'"
            " and selector == 'add_one' and rank <= 2"
        )
        places = np.sort(units.far_first.to_numpy()) - block.first
        span = (row.target - start, row.target - start + 1)
        (loss,) = scorer.losses([scorer.context(block).set_row(places, span)])
        assert row.loss_set == pytest.approx(float(loss.sum()), abs=1e-4)


def test_both_directions_are_averaged(documents: Documents, found: dict[int, Results]) -> None:
    one, other = evaluated(1, documents, found[0]), evaluated(0, documents, found[1])
    mean = transfer(one, other).set_index(SHARED)
    for names, row in mean.iterrows():
        values = [r.summary.set_index(SHARED).loc[names] for r in (one, other)]
        expected = np.mean([v.excess_nats for v in values])
        assert row.excess_nats == pytest.approx(expected, nan_ok=True)
        assert row.num_targets == sum(v.num_targets for v in values)
    assert "by add one, selected with m0, recovers" in describe(one)
    own = evaluated(0, documents, found[0])
    same, alone = transfer(own, own).set_index(SHARED), own.summary.set_index(SHARED)
    for name in ("recovery", "recovery_low", "recovery_high", "removal", "removal_low"):
        np.testing.assert_allclose(
            same[name], alone[name.removeprefix("recovery_")].loc[same.index]
        )
    assert same.recovery.notna().any()
    with pytest.raises(DataError, match="evaluated its own choices"):
        transfer(one, found[1])
    with pytest.raises(DataError, match="m0 evaluated what m0 chose, not m1"):
        transfer(own, one)


def test_settings_are_those_of_the_other_measurement(
    documents: Documents, found: dict[int, Results], tmp_path: Path
) -> None:
    others = replace(documents, items=[*documents.items[1:]])
    for match, text, given in (
        ("share, units", documents, {"share": 0.2, "units": "words"}),
        ("ks", documents, {"ks": (1, 4)}),
        ("at and choices", documents, {"at": "w"}),
        ("differs", others, {}),
    ):
        with pytest.raises((ConfigError, DataError), match=match):
            evaluated(1, text, found[0], **given)
    assert evaluated(1, documents, found[0], out=tmp_path).meta.targets.keys() == {
        "given",
        "choices",
        "chosen_by",
    }
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.post_processor = processors.BertProcessing(("w2", 2), ("w1", 1))
    with pytest.raises(DataError, match=r"prefix .*\[\] .*\[1\]"):
        measure(replace(model_of(1), tokenizer=words), documents, choices=found[0])
    with pytest.raises(ConfigError, match="choices"):  # a folder of other choices
        evaluated(1, documents, found[1], out=tmp_path)


def refuse(*_: Any) -> None:
    raise AssertionError("losses are computed again")


@pytest.mark.parametrize("asked", ["isolated", "choices"])
def test_losses_of_the_same_model_are_not_computed_again(
    documents: Documents, found: dict[int, Results], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    few = OPTIONS | {"units": "tokens", "selectors": "nearest", "ks": 1, "draws": 1}
    first = measure(model_of(0), documents, WINDOWS, **few)
    options = AT | few | {"far_states": "isolated", "control": "matched"}
    if asked == "choices":
        options = {"choices": found[1]}
    expected = measure(model_of(0), documents, **options)
    monkeypatch.setattr("olmo_sparsity.analysis.measurement.plan.context_losses", refuse)
    again = measure(model_of(0), documents, losses=first, **options)
    for name in ("losses", "targets", "recovery", "summary"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(expected, name))
    assert again.meta.token_forwards_of_last_start < expected.meta.token_forwards_of_last_start
    assert again.meta.data["losses_from"].keys() == {"commit", "machine", "command"}
    assert "losses_from" not in expected.meta.data


def test_losses_of_anything_else_are_refused(
    documents: Documents, found: dict[int, Results]
) -> None:
    one = model_of(0)

    def refused(what: str, model: LoadedModel = one, texts: Documents = documents, **others: Any):
        with pytest.raises(DataError, match=f"of another {what};"):
            planned(model, texts, losses=found[0], **AT | OPTIONS | others)

    refused("model", model_of(1))
    refused("model", replace(one, model=model_of(0).model.bfloat16()))
    refused("text", texts=replace(documents, items=[*documents.items[1:]]))
    refused("text", quick=True, texts=replace(documents, grouped_by="author"))
    refused("long, stride", long=18, stride=4)
    refused("prefix", prefix_ids=(1,))
    refused("seed, draws", seed=1, draws=1)
    refused("model, long", model_of(1), long=18)
    with pytest.raises(ConfigError, match="losses=3"):
        planned(one, documents, losses=3, **OPTIONS)


def test_a_bigram_recurs_far_away_and_not_nearby() -> None:
    tokens = np.array([7, 1, 2, 3, 1, 2, 9, 8, 1, 2, 5, 1, 2, 6, 7, 1])
    for long, short in ((8, 3), (10, 4), (6, 2)):
        windows = Windows(long, short, 3, prefix=(0,))
        for block in windows.blocks(tokens):
            found = bigrams(block)
            for i in range(block.num_targets):
                place = block.start + i
                far = tokens[block.first : block.first + block.num_far].tolist()
                near = tokens[block.first + block.num_far : place].tolist()
                pair = tokens[place - 1 : place + 1].tolist()
                expected = pair in [far[j : j + 2] for j in range(len(far))]
                expected &= pair not in [near[j : j + 2] for j in range(len(near))]
                assert found[i] == expected
