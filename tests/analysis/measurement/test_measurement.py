"""A whole measurement: resumed, shared, controlled."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from olmo_sparsity import measure
from olmo_sparsity.analysis.measurement.measurement import run
from olmo_sparsity.analysis.measurement.parts import Parts
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.summing_up import sum_up_partial
from olmo_sparsity.analysis.measurement.text_evaluation import TextEvaluator
from olmo_sparsity.analysis.measurement.unfinished import UnfinishedDocument
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.conclusion import conclude
from olmo_sparsity.analysis.results.stored_results import read_results
from olmo_sparsity.analysis.results.summary import describe
from olmo_sparsity.analysis.scoring.induction import repetition_drop
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.models.load import wrap_model
from olmo_sparsity.text.documents import Document, Documents
from tests.support.explanations import WORDS, make_model, make_tokenizer
from tests.support.measurements import FEW, SETTINGS, VOCAB, loaded, measured_into, untrained

PATIENCE = "olmo_sparsity.analysis.measurement.sharing.PATIENCE_S"

pytestmark = pytest.mark.usefixtures("no_waiting_for_disks")
TABLES = ("losses", "targets", "influence", "recovery", "lds", "tokens", "costs", "summary")


@pytest.fixture(scope="module")
def model() -> Any:
    return untrained()


@pytest.fixture(scope="module")
def documents() -> Documents:
    generator = np.random.default_rng(0)
    lengths = generator.integers(10, 40, 12)
    return Documents.of([generator.integers(0, VOCAB, length) for length in lengths])


@pytest.fixture(scope="module")
def measured(model: Any, documents: Documents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    measured_into(folder, model, documents)
    return folder


def assert_same_tables(one: Path, other: Path) -> None:
    for name in TABLES:
        pd.testing.assert_frame_equal(
            getattr(read_results(one), name), getattr(read_results(other), name)
        )


@pytest.fixture(scope="module")
def long_enough(documents: Documents) -> list[int]:
    """Numbers of the documents that have a target."""
    return [document.number for document in documents if len(document.tokens) > 16]


def test_all_tokens_behind_a_full_window_have_losses(
    measured: Path, documents: Documents, long_enough: list[int]
) -> None:
    results = read_results(measured)
    assert results.losses.document.unique().tolist() == long_enough
    assert len(results.losses) == sum(len(documents[i].tokens) - 16 for i in long_enough)


def test_targets_are_of_every_second_document(measured: Path, long_enough: list[int]) -> None:
    results = read_results(measured)
    odd = {number for number in long_enough if number % 2}
    assert set(results.targets.document) <= odd
    assert set(results.reported.document) == odd


def test_meta_says_what_was_measured(measured: Path, long_enough: list[int]) -> None:
    results = read_results(measured)
    assert results.meta.counts == {
        "documents_measured": len(long_enough),
        "documents_left": 0,
        "documents_too_short": 12 - len(long_enough),
        "documents_trained_on": 0,
    }
    assert results.meta.induction["has_induction"] is False


def test_the_summary_has_a_row_for_each_selector_and_kind_of_units(measured: Path) -> None:
    summary = read_results(measured).summary
    assert set(summary.selector) == set(SETTINGS.selectors)
    assert set(summary.units) == {"tokens", "span:3"}
    assert set(summary.target_set) == {"gap"}
    np.testing.assert_allclose(summary.net, summary.excess - summary.placebo)
    np.testing.assert_allclose(summary.excess_nats, summary.excess * summary.gap)


def test_every_selector_ranks_each_unrelated_text(measured: Path) -> None:
    results = read_results(measured)
    counts = results.recovery.groupby(["selector", "control"]).draw.nunique()
    assert (counts.xs("unrelated", level="control") == SETTINGS.draws).all()


def test_tokens_of_spans_that_overlap_count_once(measured: Path) -> None:
    recovery = read_results(measured).recovery
    spans = recovery[recovery.units == "span:3"]
    assert (spans[spans.k == 1].num_tokens == 3).all()
    assert spans.num_tokens.between(spans.k + 2, 3 * spans.k).all()


@pytest.mark.accept
def test_a_killed_measurement_is_summed_up_and_resumes_to_the_same_tables(
    model: Any,
    documents: Documents,
    measured: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, plan = read_results(measured), Plan.of(loaded(model), documents, SETTINGS)
    really, calls = Parts.add, []

    def run_until(num_calls: int) -> None:
        def add(self: Parts, phase: str, document: int, tables: dict) -> None:
            if len(calls) == num_calls:
                raise KeyboardInterrupt
            calls.append((phase, document))
            really(self, phase, document, tables)

        monkeypatch.setattr(Parts, "add", add)
        with suppress(KeyboardInterrupt):
            run(plan, tmp_path)

    with pytest.raises(DataError, match="holds no finished documents yet"):
        sum_up_partial(plan, tmp_path)
    run_until(4)
    run_until(num_losses := whole.losses.document.nunique())
    with pytest.raises(DataError, match="no target was evaluated yet"):
        sum_up_partial(plan, tmp_path)
    run_until(num_losses + 2)
    part = sum_up_partial(plan, tmp_path)
    finished = {document for phase, document in calls if phase == "recovery"}
    assert part.missing.startswith(f"partial: {whole.targets.document.nunique() - 2} of ")
    assert part.missing in describe(part)
    assert set(part.targets.document) == finished
    expected = whole.recovery[whole.recovery.document.isin(finished)].reset_index(drop=True)
    pd.testing.assert_frame_equal(part.recovery, expected)
    run_until(-1)
    assert len(calls) == len(set(calls)), "a finished document was measured again"
    assert_same_tables(tmp_path, measured)
    assert not read_results(tmp_path).missing


@pytest.mark.accept
@pytest.mark.parametrize("long", ["all", 16])
def test_a_stop_in_the_middle_of_a_document_loses_no_finished_text(
    model: Any, tmp_path: Path, long: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.random.default_rng(1).integers(0, VOCAB, (4, 60))
    settings = replace(FEW, long=long, short=6, stride=8, share=0.5, draws=2, max_targets="all")
    plan = Plan.of(loaded(model), Documents.of(list(tokens)), settings)
    really, num_evaluated = TextEvaluator.evaluate, []

    def run_until(num_texts: int, folder: Path) -> int:
        """Stop before the text of this number. Return how many were evaluated."""
        num_evaluated.clear()

        def evaluate(self: TextEvaluator, text: Any) -> None:
            if len(num_evaluated) == num_texts:
                raise KeyboardInterrupt
            num_evaluated.append(1)
            really(self, text)

        monkeypatch.setattr(TextEvaluator, "evaluate", evaluate)
        with suppress(KeyboardInterrupt):
            run(plan, folder)
        return len(num_evaluated)

    num_all = run_until(-1, tmp_path / "whole")
    monkeypatch.setattr(UnfinishedDocument, "is_due", True)  # after each text
    assert run_until(3, tmp_path / "stopped") == 3
    assert run_until(2, tmp_path / "stopped") == 2
    assert run_until(-1, tmp_path / "stopped") == num_all - 5 > 5
    whole, stopped = (read_results(tmp_path / name) for name in ("whole", "stopped"))
    for name in set(TABLES) - {"costs"}:  # the states of a text are computed again
        pd.testing.assert_frame_equal(getattr(stopped, name), getattr(whole, name))
    assert not list(tmp_path.glob("stopped/parts/unfinished/*"))


@pytest.mark.accept
@pytest.mark.parametrize("launched", [False, True], ids=["shards", "one launch"])
def test_two_processes_share_a_folder_and_do_no_loss_twice(
    model: Any,
    documents: Documents,
    measured: Path,
    tmp_path: Path,
    launched: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One after the other. Of two shards the first cannot wait for the second, and measures what it
    needs. Of one launch the second is lost, and what it did not do is done by the first."""
    monkeypatch.setattr(PATIENCE, 0.0)
    compute_losses = Plan.compute_losses
    counted = []

    def count_and_compute(plan: Plan, number: int) -> Any:
        counted.append(number)
        return compute_losses(plan, number)

    monkeypatch.setattr(Plan, "compute_losses", count_and_compute)

    def process(index: int) -> Any:
        if not launched:
            return measured_into(tmp_path, model, documents, shard=(index, 2))
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", str(1 - index))
        return measured_into(tmp_path, model, documents)

    assert process(0) is None
    assert launched or "the last to finish writes the results" in capsys.readouterr().err
    assert process(1) is not None
    assert sorted(counted) == read_results(measured).losses.document.unique().tolist()
    assert_same_tables(tmp_path, measured)


def test_the_threshold_is_that_of_all_shards_also_for_the_first_to_run(
    model: Any,
    documents: Documents,
    measured: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shard 1 of three has a third of the documents of either half."""
    monkeypatch.setattr(PATIENCE, 0.0)
    for index in (1, 2, 0):
        measured_into(tmp_path, model, documents, shard=(index, 3))
    assert_same_tables(tmp_path, measured)


def test_no_target_is_an_error_and_not_an_empty_table(
    model: Any, documents: Documents, tmp_path: Path
) -> None:
    plan = Plan.of(loaded(model), documents, replace(SETTINGS, min_gap=1000.0))
    for do in (run, sum_up_partial):
        with pytest.raises(DataError, match=r"the threshold 1000\.00;"):
            do(plan, tmp_path)
        assert not any((tmp_path / "parts/recovery").iterdir())  # known before any is evaluated


def test_blocks_that_are_all_drawn_from_one_long_document_are_named(
    model: Any, tmp_path: Path
) -> None:
    """More text would not help: the largest gap of no token is nan."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 4000)
    documents = Documents.of([tokens, *(tokens[i : i + 20] for i in range(5))])
    plan = Plan.of(loaded(model), documents, replace(FEW, blocks=1))
    with pytest.raises(DataError, match="another document, which is much longer; raise blocks"):
        run(plan, tmp_path)


@pytest.mark.accept
@pytest.mark.parametrize(("seed", "units"), [(1, "tokens"), (2, "span:4")])
def test_random_weights_have_excess_on_chosen_targets_but_no_net_excess(
    seed: int, units: str, tmp_path: Path
) -> None:
    """Choosing targets by their own gap makes an excess out of nothing; the placebo has it too."""
    model = untrained(seed, vocab_size=256, architecture="gpt_neox")
    generator = np.random.default_rng(seed)
    words = generator.zipf(1.3, size=(60, 60)) % 256  # as in text, few types are most tokens
    windows = {"long": 32, "short": 8, "stride": 28}
    settings = replace(FEW, **windows, units=(units,), share=Settings.share, draws=1, halves=0)
    results = measured_into(tmp_path, model, Documents.of(list(words)), settings)
    summary = results.summary.set_index(["target_set", "k"])
    gap, others = summary.loc["gap"], summary.drop(index="gap", level="target_set")
    assert gap.num_documents.min() >= 25
    assert (gap.excess_low > 0).all(), "no excess to explain: the test has no force"
    assert (gap.net_low <= 0).all()
    assert (gap.net_high >= 0).all()
    others = others[others.num_documents >= 20]
    misses = (others.net_nats_low > 0) | (others.net_nats_high < 0)
    assert misses.sum() <= 2, "of ten intervals of 95%, three miss in 1 of 90 trials"


@pytest.mark.parametrize(("first", "repeated", "copies"), [(2.9, 2.2, True), (5.9, 5.2, False)])
def test_the_check_asks_for_a_share_of_the_loss(
    first: float, repeated: float, copies: bool, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    losses = torch.tensor([[first, repeated]])
    monkeypatch.setattr(
        "olmo_sparsity.analysis.scoring.induction.repetition_losses", lambda *_: losses
    )
    found = repetition_drop(Scorer(model), [Document(np.arange(20))], 20)
    assert found["has_induction"] == copies


def test_units_that_are_all_distant_text_are_told_and_give_no_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each document is one paragraph, in lines."""
    rng = np.random.default_rng(0)
    texts = ["\n".join(rng.choice(WORDS, 40)) for _ in range(24)]
    options: dict[str, Any] = {"units": "paragraphs", "ks": 1, "short": 8, "selectors": "add_one"}
    found = measure(
        wrap_model(make_model(), make_tokenizer()), texts, share=0.3, min_gap=0.0, **options
    )
    assert "no document has more than 1 paragraph of distant text" in capsys.readouterr().err
    assert set(found.summary.share_all) == {1.0}
    assert "no verdict: at 100% of the targets these are all distant tokens" in conclude(found)
    assert "*1" in describe(found)


@pytest.mark.parametrize("long", ["all", 32])
def test_a_prefix_longer_than_the_model_takes_is_named(long: Any) -> None:
    texts = [" ".join(WORDS) for _ in range(4)]
    with pytest.raises(ConfigError, match=r"prefix \(300 tokens\) .* more than the 256 positions"):
        measure(wrap_model(make_model(), make_tokenizer()), texts, prefix="w1 " * 300, long=long)


def test_a_long_document_is_measured_in_parts_and_both_are_counted(tmp_path: Path) -> None:
    """`demo` takes few tokens; without `split_long` it reads the beginning alone."""
    boats = ("boat", "sail", "mast", "keel", "oar")
    for name in boats:
        lines = [f"In {1900 + i} the {name} of number {i * 7} came home.\n\n" for i in range(110)]
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    options: dict[str, Any] = {"short": 32, "stride": 16, "blocks": 1, "max_targets": 1}
    options |= {"ks": (1,), "selectors": ("random",), "share": "all"}
    results = measure("demo", str(tmp_path), split_long=True, out=tmp_path / "out", **options)
    parts = results.meta.data["parts"]
    assert list(parts) == [str(tmp_path / f"{name}.txt") for name in sorted(boats)]
    assert min(map(len, parts.values())) > 1
    assert sum(map(len, parts.values())) == results.meta.counts["documents_measured"]
    said = describe(results)
    assert f"5 documents in {sum(map(len, parts.values()))} parts (--split-long)" in said
    own = results.targets[results.targets.distant_part == "document"]
    assert results.summary.num_documents.max() <= 5 < own.document.nunique()
    with pytest.raises(ConfigError, match="with long=64 nothing of a long document is left out"):
        measure("demo", str(tmp_path), split_long=True, long=64)
