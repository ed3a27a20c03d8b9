"""What a measurement takes from another: losses of the same model; what another model chose."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_sparsity import measure, transfer
from olmo_sparsity.analysis.interpretation import InterpretationName
from olmo_sparsity.analysis.measurement.matching import (
    is_other_tokenizer,
    match_targets,
)
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.planning import make_plan
from olmo_sparsity.analysis.measurement.request import MeasureRequest
from olmo_sparsity.analysis.measurement.reused_targets import MatchCounts, UnitCounts
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results import reported
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.summary import describe
from olmo_sparsity.analysis.results.target_rows import KEYS
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.json_text import with_crc, without_crc
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.text.windows import Windows
from tests.support.brute import READINGS, Brute, behind
from tests.support.measurements import VOCAB, planned, untrained

WINDOWS = Windows(16, 6, 8)
AT: dict[str, Any] = {"long": WINDOWS.long, "short": WINDOWS.short, "stride": WINDOWS.stride}
OPTIONS: dict[str, Any] = {"share": 0.3, "min_gap": 0.0, "draws": 2, "halves": 0, "ks": (1, 2)}
OPTIONS |= {"units": ("tokens", "span:3"), "selectors": ("add_one", "random")}
OPTIONS |= {"sets": ("gap", "bigram", "every")}
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
    return {seed: measure(model_of(seed), documents, WINDOWS, **OPTIONS) for seed in (0, 1)}


def evaluated(seed: int, documents: Documents, choices: Results, **options: Any) -> Results:
    return measure(model_of(seed), documents, choices=choices, **options)


@pytest.mark.accept
@READINGS
def test_recovery_is_that_of_the_others_units_by_brute_force(
    documents: Documents, distant_states: InterpretationName
) -> None:
    """Every row: plain forwards over the tokens that the other model's table names, in the document
    and behind an unrelated text."""
    changed = {"distant_states": distant_states, "units": ("tokens", "span:3"), "draws": 1}
    given = measure(model_of(0), documents, WINDOWS, **OPTIONS | changed)
    judged, model = evaluated(1, documents, given, ks=(1, 2)), model_of(1).model
    controls = Controls(documents, WINDOWS, num_draws=1)
    columns = ["document", "target", "distant_part", "units", "selector", "control"]
    ranked = {key: rows.sort_values("rank") for key, rows in given.influence.groupby(columns)}
    known: dict[Any, Brute] = {}
    for row in judged.recovery.itertuples():
        key = tuple(getattr(row, name) for name in columns)
        if (one := (row.document, row.target, row.control)) not in known:
            document, start = documents[row.document], int(WINDOWS.start_of(row.target))
            end = min(start + WINDOWS.stride, len(document.tokens))
            block, text = WINDOWS.block(document.tokens, start, end), document.tokens
            if row.control == "unrelated":
                text = behind(text, block, controls.unrelated(document, block, 0))
            known[one] = Brute(model, text, WINDOWS, row.target, distant_states)
        brute, chosen = known[one], ranked[key][: row.k]
        bounds = zip(
            chosen.distant_first - brute.origin, chosen.distant_end - brute.origin, strict=True
        )
        places = {place for first, stop in bounds for place in range(first, stop)}
        assert row.num_tokens == len(places)
        assert row.loss_set == pytest.approx(brute.loss(places), abs=2e-5)
        if row.control == "own":
            rest = {*range(len(brute.distant))} - places
            assert row.loss_without == pytest.approx(brute.loss(rest), abs=2e-5)
    counts = judged.recovery.groupby(["units", "selector", "control"]).size()
    expected = product(("tokens", "span:3"), ["add_one"], ("own", "unrelated"))
    assert set(counts.index) == set(expected)
    assert len(set(counts)) == 1


@pytest.mark.accept
def test_both_directions_are_averaged(
    documents: Documents, found: dict[int, Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reported, "MIN_DOCUMENTS", 3)  # so many are measured
    one, other = evaluated(1, documents, found[0]), evaluated(0, documents, found[1])
    mean = transfer(one, other).set_index(SHARED)
    for names, row in mean.iterrows():
        values = [r.summary.set_index(SHARED).loc[names] for r in (one, other)]
        expected = np.mean([v.excess_nats for v in values])
        assert row.excess_nats == pytest.approx(expected, nan_ok=True)
        assert row.num_targets == sum(v.num_targets for v in values)
    assert "by add one, selected with m0, recovers" in describe(one)
    own = evaluated(0, documents, found[0])
    same = transfer(own, own).set_index(SHARED)
    alone = own.summary.set_index(SHARED)
    for name in ("recovery", "recovery_low", "recovery_high", "removal", "removal_low"):
        np.testing.assert_allclose(
            same[name], alone[name.removeprefix("recovery_")].loc[same.index]
        )
    assert same.recovery_low.notna().any()
    with pytest.raises(DataError, match="evaluated its own choices"):
        transfer(one, found[1])
    with pytest.raises(DataError, match="m0 evaluated what m0 chose, not m1"):
        transfer(own, one)


def test_settings_are_those_of_the_other_measurement(
    documents: Documents, found: dict[int, Results], tmp_path: Path
) -> None:
    others = replace(documents, items=[*documents.items[1:]])
    for match, text, given in (
        ("control, units", documents, {"control": "matched", "units": "words"}),
        ("ks", documents, {"ks": (1, 4)}),
        ("at and choices", documents, {"at": "w"}),
        ("differs", others, {}),
    ):
        with pytest.raises((ConfigError, DataError), match=match):
            evaluated(1, text, found[0], **given)
    named = evaluated(1, documents, found[0], out=tmp_path).meta.targets
    assert named.keys() == {"given", "choices", "chosen_by"}
    with pytest.raises(ConfigError, match="choices"):  # a folder of other choices
        evaluated(1, documents, found[1], out=tmp_path)


def test_choices_of_a_control_alone_are_refused(documents: Documents) -> None:
    """The default selector was evaluated in its place, and its units were not there."""
    drawn = measure(model_of(0), documents, WINDOWS, **OPTIONS | {"selectors": "random"})
    with pytest.raises(DataError, match=r"drew its units at random \(random\)"):
        evaluated(1, documents, drawn)


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ({"at": "w"}, {"share": 0.1}),
        ({"at": "w"}, {"sample": 1.0}),
        ({"prompt_field": "p"}, {"sets": ("gap",)}),
        ({"at": "w"}, {"min_gap": 0.1}),
        ({"targets": "results/a"}, {"min_gap": 0.1}),
        ({"prompt_field": "p"}, {"min_gap": 0.1}),
    ],
)
def test_a_default_that_is_typed_without_effect_is_refused(
    given: dict[str, Any], typed: dict[str, Any]
) -> None:
    (name,) = typed
    options = given | typed | {"typed": (*given, *typed)}
    with pytest.raises(ConfigError, match=f"{name} cannot be combined with {next(iter(given))}"):
        MeasureRequest.of(model="demo", **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"share": "all"}, "share=all takes any gap"),
        ({"sets": ("bigram", "every")}, "sets=bigram,every"),
    ],
)
def test_a_smallest_gap_that_chooses_nothing_is_refused(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"min_gap=0.5 has no effect .{reason}"):
        MeasureRequest.of(model="demo", min_gap=0.5, **options)


@pytest.mark.parametrize("options", [{"share": 1.0}, {"targets": True}])
def test_a_measurement_of_an_earlier_version_with_an_idle_smallest_gap_resumes(
    documents: Documents, found: dict[int, Results], tmp_path: Path, options: dict[str, Any]
) -> None:
    """Earlier versions accepted `min_gap` there, and stored it."""
    given = AT | OPTIONS | {"sets": ("gap",), "selectors": "nearest", "units": "tokens"} | options
    del given["min_gap"]
    if "targets" in given:
        given |= {"targets": found[0]}
        del given["share"], given["sets"]
    first = measure(model_of(1), documents, out=tmp_path / "now", **given)
    stored = without_crc(json.loads((tmp_path / "now" / "identity.json").read_text()))
    stored["settings"]["min_gap"] = 0.25
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "identity.json").write_text(json.dumps(with_crc(stored)))
    second = measure(model_of(1), documents, out=tmp_path / "earlier", **given)
    pd.testing.assert_frame_equal(first.summary, second.summary)


def test_a_smallest_gap_that_chooses_targets_is_another_measurement(
    documents: Documents, tmp_path: Path
) -> None:
    given = AT | OPTIONS | {"selectors": "nearest", "units": "tokens"}
    measure(model_of(1), documents, out=tmp_path, **given)
    with pytest.raises(ConfigError, match="min_gap"):
        measure(model_of(1), documents, out=tmp_path, **given | {"min_gap": 0.01})


def test_a_default_that_is_typed_does_not_yield_to_choices(
    documents: Documents, found: dict[int, Results]
) -> None:
    request = MeasureRequest.of(
        model=model_of(1), documents=documents, choices=found[0], seed=0, typed=("seed",)
    )
    with pytest.raises(ConfigError, match="seed: `choices` takes this from the other"):
        make_plan(request)


def refuse(*_: Any) -> None:
    raise AssertionError("losses are computed again")


@pytest.mark.accept
@pytest.mark.parametrize("asked", ["isolated", "choices"])
def test_losses_of_the_same_model_are_not_computed_again(
    documents: Documents, found: dict[int, Results], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    few = OPTIONS | {"units": "tokens", "selectors": "nearest", "ks": 1, "draws": 1}
    first = measure(model_of(0), documents, WINDOWS, **few)
    options = AT | few | {"distant_states": "isolated", "control": "matched"}
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


WORDS = ["amber", "basalt", "cedar", "dune", "elm", "fox", "gem", "heron", "ivy", "kelp", "moss"]
LARGE: dict[str, Any] = {"long": "all", "short": 6, "stride": 4}
SMALL: dict[str, Any] = {"long": "all", "short": 20, "stride": 32}
FEW: dict[str, Any] = {"selectors": "add_one", "draws": 1, "halves": 0}
CHOSEN: dict[str, Any] = {"share": 0.3, "min_gap": 0.0, "sets": "gap", "max_targets": "all"}


def texts() -> list[str]:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 40)).replace("elm", "elm,\n") for _ in range(8)]
    return [*texts, "é" + texts[0][::-1]]


def tokenizer_of(size: int, crosses_words: bool) -> Tokenizer:
    """`crosses_words`: tokens may begin in one word and end in the next."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=not crosses_words)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, max_token_length=9
    )
    tokenizer.train_from_iterator(
        [t[i : i + 40] for t in texts() for i in range(0, 200, 30)], trainer
    )
    return tokenizer


def reader_of(name: str, size: int, crosses_words: bool = False) -> LoadedModel:
    tokenizer = tokenizer_of(size, crosses_words)
    shape = {"vocab_size": tokenizer.get_vocab_size(), "max_sequence_length": 512}
    return LoadedModel(
        untrained(size, architecture="gpt_neox", **shape), tokenizer, name, 0, None, name
    )


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    return reader_of("small", 270)


@pytest.fixture(scope="module")
def large() -> LoadedModel:
    return reader_of("large", 330, crosses_words=True)


@pytest.fixture(scope="module")
def of_large(large: LoadedModel) -> Results:
    return measure(large, texts(), units="words", ks=(1, 2), **LARGE, **FEW, **CHOSEN)


@pytest.fixture(scope="module")
def of_small(small: LoadedModel, of_large: Results) -> Results:
    return measure(small, texts(), targets=of_large, units="words", ks=(1, 2, 4, 5), **SMALL, **FEW)


def by_character(document: Document) -> list[int]:
    """The number of the token of each character."""
    return [i for i, text in enumerate(document.texts) for _ in text]


def span_of(tokens: list[int], begin: int, end: int) -> tuple[int, int] | None:
    """Tokens with exactly these characters."""
    first, last = tokens[begin], tokens[end - 1]
    is_exact = (begin == 0 or tokens[begin - 1] != first) and tokens[end : end + 1] != [last]
    return (first, last + 1) if is_exact else None


def test_targets_are_the_same_characters(
    small: LoadedModel, large: LoadedModel, of_large: Results, of_small: Results
) -> None:
    here, there = (open_documents(texts(), model) for model in (small, large))
    expected, cut, outside = set(), 0, 0
    for target in of_large.targets.query(
        "distant_part == 'document' and target_set == 'gap'"
    ).itertuples():
        number = int(target.document)
        begin = len("".join(there[number].texts[: target.target]))
        end = begin + len(there[number].texts[target.target])
        span = span_of(by_character(here[number]), begin, end)
        first = SMALL["short"] * 2
        if span is None:
            cut += 1
        elif span[0] < first or (span[0] - first) // 32 != (span[1] - 1 - first) // 32:
            outside += 1
        else:
            expected.add((number, *span))
    found = set(of_small.targets[["document", "target", "end"]].itertuples(index=False, name=None))
    assert found == expected
    assert (of_small.targets.end - of_small.targets.target).max() > 1
    matched = of_small.meta.targets["matched"]
    assert (matched["targets_cut_otherwise"], matched["targets_outside_windows"]) == (cut, outside)
    assert matched["targets"] + cut + outside == matched["of_targets"]
    assert outside > 0


@pytest.fixture(scope="module")
def judged(large: LoadedModel, of_small: Results, tmp_path_factory: Any) -> Results:
    out = tmp_path_factory.mktemp("judged")
    return measure(large, texts(), choices=of_small, ks=(1, 2, 4), out=out, **LARGE)


def test_the_judge_sees_the_words_that_the_other_model_chose(
    small: LoadedModel, large: LoadedModel, of_small: Results, judged: Results
) -> None:
    """For each target: its characters and those of the words that the small model ranked; then the
    large model's tokens of each, and its losses with the first k that are distant."""
    here, there = (open_documents(texts(), model) for model in (large, small))
    scorer, windows = Scorer(large.model), Settings(**LARGE).windows
    expected: dict[tuple[int, int, int], tuple[float, float]] = {}
    num_units, num_cut, num_near = 0, 0, 0
    for target in of_small.targets.itertuples():
        number, document = int(target.document), here[int(target.document)]
        text, tokens = texts()[number], by_character(document)
        bounds = np.cumsum([0, *map(len, there[number].texts)])
        span = span_of(tokens, bounds[target.target], bounds[target.end])
        assert span is not None, "all come from the large model"
        start = int(windows.start_of(span[0]))
        words = []
        ranked = of_small.influence.query(
            f"document == {number} and target == {target.target} and control == 'own'"
        )
        for unit in ranked.sort_values("rank").itertuples():
            begin, end = bounds[unit.distant_first], bounds[unit.distant_end]
            begin += len(text[begin:end]) - len(text[begin:end].lstrip())
            end = begin + len(text[begin:end].rstrip())
            num_units += 1
            places = range(tokens[begin], tokens[end - 1] + 1)
            if "".join(document.texts[p] for p in places).strip() != text[begin:end] or not places:
                num_cut += 1
            elif places[-1] >= start - windows.short:
                num_near += 1
            else:
                # White space that is a token of its own belongs to the word behind it.
                first = places[0]
                while first and document.texts[first - 1].isspace():
                    first -= 1
                words.append(range(first, places[-1] + 1))
        if len(words) < 4:
            continue
        block = windows.block(document.tokens, start, min(start + 4, len(document.tokens)))
        context, inside = scorer.context(block), (span[0] - start, span[1] - start)
        for k in (1, 2, 4):
            distant = np.unique(np.concatenate([list(word) for word in words[:k]]))
            others = np.setdiff1d(np.arange(block.num_distant), distant)
            losses = scorer.losses([context.set_row(some, inside) for some in (distant, others)])
            expected[number, span[0], k] = float(losses[0].sum()), float(losses[1].sum())
    rows = judged.recovery.set_index(["document", "target", "k"])
    assert set(rows.index) == expected.keys()
    assert len(expected) >= 3 * 5
    for key, losses in expected.items():
        found = rows.loc[key, ["loss_set", "loss_without"]]
        np.testing.assert_allclose(found.to_numpy(float), losses, atol=1e-4)
    assert set(judged.recovery.control) == {"own"}, "no unrelated text"
    assert judged.summary.excess.isna().all()
    matched = judged.meta.targets["matched"]
    counted = [matched[n] for n in ("of_units", "units_cut_otherwise", "units_not_distant")]
    assert counted == [num_units, num_cut, num_near]
    assert min(num_cut, num_near) > 0
    assert matched["targets"] == len(expected) // 3
    assert matched["targets"] + matched["targets_with_few_units"] == matched["of_targets"]


def test_tokens_of_another_tokenizer_are_no_units_here(
    small: LoadedModel, large: LoadedModel, of_large: Results, of_small: Results
) -> None:
    by_tokens = replace(of_small, meta=replace(of_small.meta, units=["words", "span:3", "tokens"]))
    for match, choices, given in (
        ("span:3, tokens", by_tokens, {"ks": 1}),
        ("ks", of_small, {"ks": 6}),
        ("seed, units", of_small, {"units": "sentences", "seed": 3}),
        ("no target", of_small, {"ks": 1, "short": 40}),
    ):
        with pytest.raises((ConfigError, DataError), match=match):
            measure(large, texts(), choices=choices, **LARGE | given)


@pytest.mark.parametrize("number", [1, 3, 7])
def test_a_document_that_reads_otherwise_is_left_out_and_counted(
    small: LoadedModel, of_large: Results, number: int
) -> None:
    """One of them, such as one with a control token, does not refuse all others."""
    read, windows = texts(), Windows(**SMALL)
    read[number] = "<s>" + read[number]
    some = open_documents(read, small)
    assert is_other_tokenizer(of_large, some)
    found = match_targets(of_large, some, windows)
    chosen = of_large.targets.query("distant_part == 'document'").drop_duplicates(KEYS)
    assert found.match_counts is not None
    assert found.match_counts.of_targets == len(chosen)
    assert found.match_counts.targets_in_other_text == (chosen.document == number).sum() > 0
    whole = match_targets(of_large, open_documents(texts(), small), windows)
    assert whole.match_counts is not None
    assert whole.match_counts.targets_in_other_text == 0
    expected = whole.targets[whole.targets.document != number]
    pd.testing.assert_frame_equal(found.targets, expected)


def test_targets_of_a_sample_are_evaluated_in_its_blocks(
    documents: Documents, found: dict[int, Results]
) -> None:
    """Losses of other blocks are not computed, and the placebo stays."""
    there = measure(model_of(0), documents, WINDOWS, sample=0.5, **OPTIONS)
    how = {name: OPTIONS[name] for name in ("draws", "halves", "ks", "units", "selectors")}
    here = measure(model_of(1), documents, WINDOWS, targets=there, **how)
    pd.testing.assert_frame_equal(here.losses[KEYS], there.losses[KEYS])
    pd.testing.assert_frame_equal(here.targets, there.targets)
    assert "placebo" in set(here.targets.distant_part)
    assert 0 < len(here.losses) < len(found[1].losses)


def test_targets_bring_their_windows_blocks_and_draws_also_with_quick(
    documents: Documents, found: dict[int, Results], capsys: pytest.CaptureFixture[str]
) -> None:
    """`quick` alone has other blocks and draws, and a table without placebo."""
    there = found[0]
    units = {"units": ("tokens",), "selectors": ("add_one",), "ks": (1,)}
    same = planned(model_of(1), documents, targets=there, quick=True, **units)
    assert same.settings.windows == Plan.of(model_of(1), documents, Settings(**AT)).settings.windows
    assert (same.settings.draws, same.settings.sample) == (2, there.meta.windows["sample"])
    assert same.fixed_targets is not None
    assert "placebo" in set(same.fixed_targets.table.distant_part)
    said = capsys.readouterr().err
    assert "long=16, short=6, stride=8, draws=2, as in the other measurement" in said
    assert "no placebo" not in said


def test_an_option_that_the_user_passed_stays_and_is_said_to_differ(
    documents: Documents, found: dict[int, Results], capsys: pytest.CaptureFixture[str]
) -> None:
    units = {"units": ("tokens",), "selectors": ("add_one",), "ks": (1,)}
    other = planned(model_of(1), documents, targets=found[0], quick=True, stride=4, **units)
    assert (other.settings.stride, other.settings.long, other.settings.draws) == (4, 16, 2)
    assert other.fixed_targets is not None
    assert "placebo" not in set(other.fixed_targets.table.distant_part)
    said = capsys.readouterr().err
    assert "no net excess, because of stride=4 (the other has 8)" in said


def test_what_another_tokenizer_leaves_of_the_targets_is_a_sentence() -> None:
    counts = MatchCounts(
        targets=14,
        of_targets=16,
        targets_in_other_text=0,
        targets_cut_otherwise=2,
        targets_outside_windows=0,
    )
    assert str(counts) == (
        "another tokenizer chose the targets: 14 of 16 targets matched; 0 lie in other text, 2 are "
        "not whole tokens here, 0 have no full window before them (docs/measure.md)"
    )
    units = UnitCounts(
        of_units=32, units_cut_otherwise=3, units_not_distant=1, targets_with_few_units=1
    )
    assert "1 have too few units left; of 32 units, 3 are not units here and 1 are not" in str(
        replace(counts, units=units)
    )
