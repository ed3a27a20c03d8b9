"""A whole measurement: resumed, shared, controlled; its targets and its summary."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from analysis.documents import Document, Documents
from analysis.estimate import MANY_TARGETS, estimate, first_look
from analysis.measurement import measure, run, sum_up_partial
from analysis.parts import Parts
from analysis.plan import Plan, share_of
from analysis.recovery import recover
from analysis.results import FILES, Meta, compare, read_results
from analysis.scoring import Reading, Scorer, repetition_drop
from analysis.settings import Settings
from analysis.sources import open_documents
from analysis.statistics import beyond_controls, half_of, longppl, summarize
from analysis.summary import describe, format_summary
from analysis.tables import joined
from analysis.targets import choose_targets, fit_thresholds, of_document, parse_share
from analysis.windows import Windows
from olmo_sparsity.config import ModelConfig, RunConfig
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.manifest import write_manifest
from olmo_sparsity.model.load import LoadedModel, build_model, load_model
from olmo_sparsity.training.loop import train

VOCAB = 40
SETTINGS = Settings(
    Windows(16, 6, 8), ("tokens", "span:3"), ("add_one", "divergence", "random"), (1, 4),
    target_share=0.3, min_gap=0.0, num_foreign=2, num_halves=4,
)  # fmt: skip
FEW = replace(SETTINGS, units=("tokens",), selectors=("add_one",))
SHAPE: dict[str, Any] = {
    "d_model": 32, "n_heads": 4, "vocab_size": VOCAB, "init_std": 0.3, "max_sequence_length": 64,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("no_waiting_for_disks")
TABLES = ("losses", "targets", "influence", "recovery", "lds", "tokens", "costs", "summary")


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(model, None, "tiny", 1, None, "weights")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return build_model(ModelConfig(**SHAPE, n_layers=2)).eval()


@pytest.fixture(scope="module")
def documents() -> Documents:
    generator = np.random.default_rng(0)
    lengths = generator.integers(10, 40, 12)
    return Documents.of([generator.integers(0, VOCAB, length) for length in lengths])


def measured_into(folder: Path, model: Any, documents: Documents, settings: Settings = SETTINGS,
                  **options: Any) -> Any:  # fmt: skip
    return run(Plan.of(loaded(model), documents, settings), folder, **options)


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


def test_results_hold_what_they_should(measured: Path, documents: Documents) -> None:
    results = read_results(measured)
    long_enough = [d.number for d in documents if len(d.tokens) > 16]
    assert results.losses.document.unique().tolist() == long_enough
    assert len(results.losses) == sum(len(documents[i].tokens) - 16 for i in long_enough)
    assert set(results.targets.document) <= {i for i in long_enough if i % 2}
    assert set(results.reported.document) == {i for i in long_enough if i % 2}
    assert results.meta.counts == {
        "documents_measured": len(long_enough),
        "documents_left": 0,
        "documents_too_short": 12 - len(long_enough),
        "documents_trained_on": 0,
    }
    assert results.meta.gate["has_induction"] is False
    summary = results.summary
    assert set(summary.selector) == set(SETTINGS.selectors)
    assert set(summary.units) == {"tokens", "span:3"}
    assert {"gap", "kl", "recurs", "new"} <= set(summary.target_set)
    gap = summary[summary.target_set == "gap"]
    columns = ["excess", "excess_low", "excess_high", "placebo", "net", "net_low", "net_high"]
    columns += ["lds", "lds_low", "lds_high"]
    assert gap[[*columns, "token_forwards_per_target"]].notna().all(axis=None)
    np.testing.assert_allclose(gap.net, gap.excess - gap.placebo)
    np.testing.assert_allclose(gap.excess, gap.recovery - gap.foreign)
    np.testing.assert_allclose(gap.excess_nats, gap.excess * gap.gap)
    counts = results.recovery.groupby(["selector", "control"]).draw.nunique()
    assert (counts.xs("foreign", level="control") == SETTINGS.num_foreign).all()
    spans = results.recovery[results.recovery.units == "span:3"]
    assert (spans[spans.k == 1].num_tokens == 3).all()
    assert spans.num_tokens.between(spans.k + 2, 3 * spans.k).all()
    assert "too few to trust" in format_summary(gap, "large gap")
    assert "an unrelated text gains as much" in describe(results)


def test_a_target_is_shown_with_its_far_units(measured: Path) -> None:
    results = read_results(measured)
    rows = results.targets[results.targets.far_part == "document"]
    shown = results.show(int(rows.document.iloc[0]), int(rows.target.iloc[0]), units="span:3", k=2)
    assert len(repr(shown).splitlines()) == 3
    assert "<mark" in shown._repr_html_()
    with pytest.raises(ConfigError, match="was not evaluated"):
        results.show(0, 1)


def test_in_memory_and_in_a_folder_are_the_same(
    model: Any, documents: Documents, measured: Path, tmp_path: Path
) -> None:
    found = measure(
        loaded(model), documents, SETTINGS.windows, units=SETTINGS.units, ks=SETTINGS.ks,
        selectors=SETTINGS.selectors, targets=SETTINGS.target_share, min_gap=0.0, num_foreign=2,
        num_halves=4,
    )  # fmt: skip
    pd.testing.assert_frame_equal(found.summary, read_results(measured).summary)
    found.plot(tmp_path / "figure2.png")
    assert (tmp_path / "figure2.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_of_ones_own_beside_results_harms_nothing(measured: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(measured, tmp_path / "copy")
    (copy / "summary.csv").write_text("mine")
    assert len(read_results(copy).recovery) == len(read_results(measured).recovery)


def test_a_killed_measurement_is_summed_up_and_resumes_to_the_same_tables(
    model: Any, documents: Documents, measured: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    whole, plan = read_results(measured), Plan.of(loaded(model), documents, SETTINGS)
    really, calls = Parts.write, []

    def run_until(num_calls: int) -> None:
        def write(self: Parts, phase: str, document: int, tables: dict) -> None:
            if len(calls) == num_calls:
                raise KeyboardInterrupt
            calls.append((phase, document))
            really(self, phase, document, tables)

        monkeypatch.setattr(Parts, "write", write)
        with suppress(KeyboardInterrupt):
            run(plan, tmp_path)

    with pytest.raises(DataError, match="holds no measurement yet"):
        sum_up_partial(plan, tmp_path)
    run_until(4)
    run_until(num_losses := whole.losses.document.nunique())
    with pytest.raises(DataError, match="no target was evaluated yet"):
        sum_up_partial(plan, tmp_path)
    run_until(num_losses + 2)
    part = sum_up_partial(plan, tmp_path)
    finished = {document for phase, document in calls if phase == "recovery"}
    left = whole.targets.document.nunique() - 2
    assert part.missing.startswith(f"partial: {left} of ")
    assert part.missing in describe(part)
    assert set(part.targets.document) == finished
    expected = whole.recovery[whole.recovery.document.isin(finished)].reset_index(drop=True)
    pd.testing.assert_frame_equal(part.recovery, expected)
    run_until(-1)
    assert len(calls) == len(set(calls)), "a finished document was measured again"
    assert_same_tables(tmp_path, measured)
    assert not read_results(tmp_path).missing


@pytest.mark.parametrize("launched", [False, True], ids=["shards", "one launch"])
def test_two_processes_share_a_folder_and_do_no_loss_twice(
    model: Any, documents: Documents, measured: Path, tmp_path: Path, launched: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One after the other. Of two shards the first cannot wait for the second, and measures what it
    needs. Of one launch the second is lost, and what it did not do is done by the first."""
    monkeypatch.setattr("analysis.measurement.PATIENCE_S", 0.0)
    really, counted = Plan.losses, []
    monkeypatch.setattr(
        Plan, "losses", lambda self, number: (counted.append(number), really(self, number))[1]
    )

    def process(index: int) -> Any:
        if not launched:
            return measured_into(tmp_path, model, documents, shard=(index, 2))
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", str(1 - index))
        return measured_into(tmp_path, model, documents)

    assert process(0) is None
    assert launched or "documents are left to the others" in capsys.readouterr().err
    assert process(1) is not None
    assert sorted(counted) == read_results(measured).losses.document.unique().tolist()
    assert_same_tables(tmp_path, measured)


def test_the_processes_of_a_shard_share_its_documents(
    model: Any, documents: Documents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    def stop(phase: str, parts: Any, numbers: list[int], *rest: Any) -> None:
        shares[-1] += numbers
        raise Stop

    monkeypatch.setattr("analysis.measurement._work", stop)
    monkeypatch.setenv("WORLD_SIZE", "2")
    measured, shares = Plan.of(loaded(model), documents, SETTINGS).measured, list[list[int]]()
    for shard in ((0, 2), (1, 2)):
        shares.append([])
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            with pytest.raises(Stop):
                measured_into(tmp_path, model, documents, shard=shard)
        assert sorted(shares[-1]) == share_of(measured, *shard)
    assert sorted(shares[0] + shares[1]) == measured


def test_tables_of_an_older_version_are_written_again(
    model: Any, documents: Documents, measured: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(measured, tmp_path / "old")
    summary = pq.read_table(folder / "summary.parquet").drop_columns(["lds"])
    pq.write_table(summary, folder / "summary.parquet")
    write_manifest(folder, FILES)
    with pytest.raises(DataError, match="run the command of its measurement again"):
        read_results(folder)
    measured_into(folder, model, documents)
    assert_same_tables(folder, measured)


def test_no_target_is_an_error_and_not_an_empty_table(
    model: Any, documents: Documents, tmp_path: Path
) -> None:
    with pytest.raises(
        DataError, match=r"large enough: the largest is [\d.]+ nats, the threshold 1000\.00\."
    ):
        measured_into(tmp_path, model, documents, replace(SETTINGS, min_gap=1000.0))
    assert not any((tmp_path / "parts/recovery").iterdir())  # known before targets are evaluated
    plan = Plan.of(loaded(model), documents, replace(SETTINGS, min_gap=1000.0))
    with pytest.raises(DataError, match="large enough"):
        sum_up_partial(plan, tmp_path)


def test_documents_that_arrive_while_targets_are_chosen_are_not_missed(
    model: Any, documents: Documents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another shard, whose documents hold the only targets, writes the last losses just then."""
    plan = Plan.of(loaded(model), documents, SETTINGS)
    gaps = {n: rows["losses"] for n in plan.measured for rows in [plan.losses(n)]}
    largest = {n: float(np.max(g["loss_short"] - g["loss_long"])) for n, g in gaps.items()}
    best = max((n for n in plan.measured if half_of(n) == "report"), key=largest.__getitem__)
    shard = int(best in share_of(plan.measured, 0, 2))
    mine = share_of(plan.measured, shard, 2)
    limit = max(largest[n] for n in mine if half_of(n) == "report")
    plan = Plan.of(loaded(model), documents, replace(SETTINGS, min_gap=(limit + largest[best]) / 2))
    other = Parts(tmp_path, plan.identity())
    choose = Plan.targets

    def slowly(self: Plan, losses: pd.DataFrame) -> pd.DataFrame:
        chosen = choose(self, losses)
        for number in set(plan.measured) - set(mine) - other.finished("losses"):
            other.write("losses", number, plan.losses(number))
        other.flush()
        return chosen

    monkeypatch.setattr("analysis.measurement._wait_for", lambda *given: None)
    monkeypatch.setattr(Plan, "targets", slowly)
    assert run(plan, tmp_path, (shard, 2)) is None


def test_another_model_or_window_in_the_same_folder_is_refused(
    model: Any, documents: Documents, measured: Path
) -> None:
    with pytest.raises(DataError, match=r"short"):
        measured_into(measured, model, documents, replace(SETTINGS, windows=Windows(16, 5)))
    other = replace(loaded(model), weights_sha256="else")
    with pytest.raises(DataError, match=r"model"):
        run(Plan.of(other, documents, SETTINGS), measured)


# --- controls -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "units"), [(1, "tokens"), (2, "span:4"), (3, "tokens")])
def test_random_weights_have_excess_on_chosen_targets_but_no_net_excess(
    seed: int, units: str, tmp_path: Path
) -> None:
    """Choosing targets by their own gap makes an excess out of nothing; the placebo has it too."""
    torch.manual_seed(seed)
    config = ModelConfig(**SHAPE | {"vocab_size": 256}, n_layers=2, architecture="gpt_neox")
    untrained = build_model(config).eval()
    generator = np.random.default_rng(seed)
    words = generator.zipf(1.3, size=(100, 60)) % 256  # as in text, few types are most tokens
    settings = Settings(
        Windows(32, 8, 28), (units,), ("add_one",), (1, 4), min_gap=0.0, num_foreign=1, num_halves=0
    )
    results = measured_into(tmp_path, untrained, Documents.of(list(words)), settings)
    summary = results.summary.set_index(["target_set", "k"])
    gap, others = summary.loc["gap"], summary.drop(index="gap", level="target_set")
    assert gap.num_documents.min() >= 40
    assert (gap.excess_low > 0).all(), "no excess to explain: the test has no force"
    assert (gap.net_low <= 0).all()
    assert (gap.net_high >= 0).all()
    others = others[others.num_documents >= 20]
    misses = (others.net_nats_low > 0) | (others.net_nats_high < 0)
    assert misses.sum() <= 1, "of ten intervals of 95%, one may miss"


def test_two_models_answer_for_the_same_targets(
    model: Any, documents: Documents, measured: Path, tmp_path: Path
) -> None:
    given = read_results(measured)
    other = replace(loaded(build_model(model.config).eval()), weights_sha256="other")
    nearest = replace(FEW, selectors=("nearest",))
    ours = run(Plan.of(other, documents, nearest, given), tmp_path)
    pd.testing.assert_frame_equal(ours.targets, given.targets)
    # A longer window keeps those of the targets that still have one.
    longer = replace(nearest, windows=Windows(20, 6, 8))
    kept = run(Plan.of(loaded(model), documents, longer, given), tmp_path / "longer").targets
    wanted = given.targets[given.targets.target >= 20]
    wanted = wanted[(wanted.far_part == "document") & wanted.target_set.isin(["gap", "kl"])]
    wanted = wanted.reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, wanted)
    with pytest.raises(DataError, match="in text or tokenizer"):
        Plan.of(loaded(model), Documents.of([np.arange(30)] * 2), SETTINGS, given)


@pytest.mark.parametrize("foreign", ["matched", "shuffled"])
def test_other_foreign_texts(
    model: Any, documents: Documents, measured: Path, tmp_path: Path, foreign: Any
) -> None:
    """Only what is foreign changes."""
    settings = replace(FEW, foreign=foreign)
    results, plain = measured_into(tmp_path, model, documents, settings), read_results(measured)
    keys = ["target_set", "units", "selector", "k"]
    both = results.summary.merge(plain.summary, on=keys, suffixes=("", "_plain"))
    assert len(both) == len(results.summary)
    np.testing.assert_allclose(both.recovery, both.recovery_plain, atol=1e-5)
    assert (both.foreign - both.foreign_plain).abs().max() > 0.01
    alike = plain.recovery.query("selector == 'add_one' and units == 'tokens'")
    assert len(results.recovery) == len(alike)


# --- the estimate ---------------------------------------------------------------------------------


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried ends with the beginnings of the documents, and not by a clock."""
    for name, value in {"LOSSES_S": 1e6, "RECOVERY_S": 1e6, "MANY_TARGETS": 48}.items():
        monkeypatch.setattr(f"analysis.estimate.{name}", value)


@pytest.mark.usefixtures("short_trials")
def test_the_estimate_of_long_documents_asks_few_of_their_targets(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    texts = Documents.of([rng.integers(0, VOCAB, 3000) for _ in range(6)])
    settings = FEW
    asked, read = [], []
    recovery, losses = Plan.recovery, Plan.losses

    def count(self: Plan, number: int, targets: pd.DataFrame) -> Any:
        asked.append(np.unique(targets.target))
        return recovery(self, number, targets)

    def follow(self: Plan, number: int) -> Any:
        read.append(len(self.documents[number].tokens))
        return losses(self, number)

    monkeypatch.setattr(Plan, "recovery", count)
    monkeypatch.setattr(Plan, "losses", follow)
    text = estimate(Plan.of(loaded(model), texts, settings))
    assert asked
    assert max(map(len, asked)) <= settings.windows.stride
    assert max(read) <= settings.windows.first_target + MANY_TARGETS
    (said,) = re.findall(r"targets +([\d,]+) with both losses", text)
    assert said.replace(",", "") == str(6 * (3000 - settings.windows.long))
    # A third of them in each reported document, and as many of the placebo: of whole documents.
    (said,) = re.findall(r"about ([\d,]+) evaluated", text)
    assert int(said.replace(",", "")) > 0.3 * 3 * (3000 - settings.windows.long)
    few = replace(settings, max_targets=5, sets=("gap",))
    rare = replace(few, max_targets=None, min_gap=100.0)
    assert "about 0 evaluated (uncertain: 0 in the sample)" in estimate(
        Plan.of(loaded(model), texts, rare)
    )
    (said,) = re.findall(r"about ([\d,]+) evaluated", estimate(Plan.of(loaded(model), texts, few)))
    assert int(said) == 3 * 5 * 2  # documents, targets, own and placebo


@pytest.mark.usefixtures("short_trials")
@pytest.mark.parametrize(
    "changed",
    [{"target_share": 0.02}, {"max_targets": 3}, {}, {"selectors": ("attention_learned",)}],
)
def test_the_estimate_of_token_forwards_is_within_a_factor_of_two(
    model: Any, tmp_path: Path, changed: dict[str, Any]
) -> None:
    rng = np.random.default_rng(1)
    texts = Documents.of([rng.integers(0, VOCAB, length) for length in (*[150] * 6, 10)])
    settings = replace(FEW, windows=Windows(24, 8, 8), **changed)
    plan, tried = (Plan.of(loaded(model), texts, settings) for _ in range(2))
    text = estimate(tried)
    assert text.startswith("induction: loss ")
    assert "1 too short" in text
    (said,) = re.findall(r"token-forwards +about ([\d.e+]+), [\d,]+ for each evaluated", text)
    run(plan, tmp_path)
    assert 0.5 < float(said) / plan.scorer.token_forwards < 2


def test_without_halves_there_is_no_lds(
    model: Any, documents: Documents, tmp_path: Path, measured: Path
) -> None:
    found = measured_into(tmp_path, model, documents, replace(FEW, num_halves=0))
    assert found.lds.empty
    assert found.summary.lds.isna().all()
    assert "lds" not in describe(found)
    assert "lds" in describe(read_results(measured))
    with pytest.raises(
        ConfigError, match=r"num_halves=3 \(--halves\): a rank correlation needs at least 4"
    ):
        replace(SETTINGS, num_halves=3).check()


def test_attention_is_fitted_on_the_half_that_is_not_reported(
    model: Any, documents: Documents, tmp_path: Path
) -> None:
    settings = replace(FEW, selectors=("attention_learned", "attention"))
    found = measured_into(tmp_path, model, documents, settings)
    assert set(found.summary.selector) == set(settings.selectors)
    assert found.meta.heads is not None
    assert found.meta.heads["token_forwards"] > 0
    fitted = np.array(found.meta.heads["weights"])
    assert fitted.shape == (8,)
    rng = np.random.default_rng(5)

    def weights(changed_half: str) -> np.ndarray:
        texts = [
            rng.integers(0, VOCAB, len(d.tokens)) if half_of(d.number) == changed_half else d.tokens
            for d in documents
        ]
        plan = Plan.of(loaded(model), Documents.of(texts), settings)
        heads = plan.fit_heads(joined({n: plan.losses(n)["losses"] for n in plan.measured}))
        return np.array(heads.weights)

    np.testing.assert_array_equal(weights("report"), fitted)
    assert np.abs(weights("threshold") - fitted).max() > 1e-3
    # Fitted once: who comes later reads the weights.
    (tmp_path / "manifest.json").unlink()
    plan, check = (Plan.of(loaded(model), documents, settings) for _ in range(2))
    run(plan, tmp_path)
    check.induction()
    assert plan.scorer.token_forwards == check.scorer.token_forwards
    np.testing.assert_array_equal(plan.scorer.head_weights, fitted)


def test_attention_is_not_fitted_where_targets_are_given(
    model: Any, documents: Documents, measured: Path
) -> None:
    settings = Settings(SETTINGS.windows, selectors=("attention_learned",), ks=(1,))
    with pytest.raises(ConfigError, match="these targets are given; take attention"):
        Plan.of(loaded(model), documents, settings, read_results(measured))
    scorer = Scorer(model)
    with pytest.raises(ConfigError, match="attention_learned has no weights"):
        recover(scorer, documents[0], SETTINGS.windows, selectors="attention_learned", ks=(1,))


def test_recover_is_what_measure_does(model: Any, documents: Documents, measured: Path) -> None:
    results = read_results(measured)
    rows = results.recovery.query("selector == 'add_one' and control == 'own'")
    rows = rows[rows.far_part == "document"]
    number = int(rows.document.iloc[0])
    here = rows[rows.document == number]
    wanted = of_document(results.targets, documents[number])["document"]
    found = recover(
        Scorer(model), documents[number], SETTINGS.windows, wanted, units=SETTINGS.units,
        ks=SETTINGS.ks,
    )["recovery"]  # fmt: skip
    keys = ["target", "units", "k"]
    both = found.merge(here[[*keys, "loss_set"]], on=keys)
    assert len(both) == len(found) == len(here)
    np.testing.assert_allclose(both.loss_set_x, both.loss_set_y, atol=1e-5)


def test_longppl_is_of_the_key_tokens() -> None:
    losses = pd.DataFrame(
        {"loss_short": [5.0, 5.0, 3.0, 4.5], "loss_long": [1.0, 2.5, 0.9, 2.5]}
    )  # key: gap above 2 and loss_long below 2
    assert longppl(losses) == {
        "key_share": 0.5,
        "num_key_tokens": 2,
        "longppl": pytest.approx(np.exp(0.95)),
        "ppl": pytest.approx(np.exp(6.9 / 4)),
    }


# --- the summary ----------------------------------------------------------------------------------


def losses_table(**columns: Any) -> pd.DataFrame:
    """Without what a test does not say: no placebo gap, no KL, everything new."""
    table = pd.DataFrame(columns)
    given = {"placebo_loss_long": table.loss_short, "kl": 1.0, "placebo_kl": 1.0,
             "stratum": "new", "placebo_stratum": "new"}  # fmt: skip
    return table.assign(**{name: value for name, value in given.items() if name not in table})


def recovery_rows(keys: list, control: str, losses: list, draw: int = 0, **more: Any) -> list[dict]:
    same = {"far_part": "document", "units": "tokens", "selector": "add_one", "k": 1,
            "num_tokens": 1, "loss_without": np.nan, "kl_set": np.nan} | more  # fmt: skip
    return [
        {"document": document, "target": target, "control": control, "draw": draw,
         "loss_set": loss} | same
        for (document, target), loss in zip(keys, losses, strict=True)
    ]  # fmt: skip


def test_recovery_is_a_ratio_of_sums_excess_is_paired_and_net_is_beyond_the_placebo() -> None:
    keys = [(1, 20), (1, 21), (3, 20)]
    losses = losses_table(
        document=[1, 1, 3], target=[20, 21, 20], loss_short=[5.0, 4.0, 3.0],
        loss_long=[1.0, 2.0, 2.0], placebo_loss_long=[3.0, 4.0, 2.0],
    )  # fmt: skip
    rows = recovery_rows(keys, "own", [2.0, 3.0, 3.0])
    rows += recovery_rows(keys, "foreign", [4.0, 4.0, 3.0])
    rows += recovery_rows(keys, "foreign", [3.0, 4.0, 3.0], draw=1)
    placebo = [(1, 20), (3, 20)]
    rows += recovery_rows(placebo, "own", [4.0, 2.0], far_part="placebo")
    rows += recovery_rows(placebo, "foreign", [4.5, 2.5], far_part="placebo")
    targets = pd.DataFrame(
        [(*key, "document", "gap") for key in keys] + [(*key, "placebo", "gap") for key in placebo],
        columns=["document", "target", "far_part", "target_set"],
    )
    recovery = pd.DataFrame(rows)
    first = recovery.eval("control == 'own' and far_part == 'document' and target == 20")
    recovery.loc[first, "loss_without"] = [3.0, 2.5]  # of document 1, and of document 3
    recovery.loc[recovery.eval("control == 'own'") & ~first, "loss_without"] = 2.0
    (row,) = summarize(losses, targets, recovery).to_dict("records")
    assert row["removal"] == pytest.approx((2.0 + 0.5 + 0.0) / 7)
    assert row["placebo_removal"] == pytest.approx((-1.0 + 0.0) / (2 + 1))
    assert row["recovery"] == pytest.approx((3 + 1 + 0) / (4 + 2 + 1))
    assert row["foreign"] == pytest.approx(1.5 / 7)
    assert row["excess"] == pytest.approx(2.5 / 7)
    assert row["gap"] == pytest.approx(7 / 3)
    assert row["excess_nats"] == pytest.approx(2.5 / 3)
    # Resamples hold the first document only, the second only, or both.
    assert row["excess_nats_low"] == pytest.approx(0)
    assert row["excess_nats_high"] == pytest.approx(2.5 / 2)
    assert (row["num_targets"], row["num_documents"], row["num_placebo_targets"]) == (3, 2, 2)
    assert row["low"] <= row["recovery"] <= row["high"]
    assert row["placebo"] == pytest.approx((0.5 + 0.5) / (2 + 1))
    assert row["net"] == pytest.approx(2.5 / 7 - 1 / 3)
    assert row["net_equal"] == pytest.approx(row["net"]), "three own targets stand around any"
    assert row["net_nats"] == pytest.approx(2.5 / 3 - 0.5)
    # Resampled together: with the first document alone .5/2 is taken from 2.5/6.
    assert row["net_high"] == pytest.approx(2.5 / 6 - 0.5 / 2)
    assert row["net_low"] == pytest.approx(0 - 0.5)


def test_at_equal_gaps_nothing_is_left_of_what_the_gap_explains() -> None:
    """Units of the own text and of the placebo give back the same share at any gap, more where it
    is larger; the own targets have larger gaps."""
    generator = np.random.default_rng(0)
    parts = {}
    for part, largest in (("own", 4.0), ("placebo", 2.0)):
        gap = generator.uniform(0.1, largest, 600)
        sums = {"own": gap**2 / 4, "foreign": 0.0, "removed": gap, "gap": gap, "targets": 1.0}
        parts[part] = pd.DataFrame(sums).assign(document=np.arange(600) // 10)
    found = beyond_controls(parts["own"], parts["placebo"])
    assert found["net_low"] > 0.3
    assert found["net_equal"] == pytest.approx(0, abs=0.01)
    assert found["net_equal_low"] < 0 < found["net_equal_high"]


def test_two_models_are_compared_on_the_same_resamples_of_documents() -> None:
    """The second model recovers a quarter of every gap less, so each resample has a difference of
    0.25, while the net excess of either varies with the documents."""
    generator = np.random.default_rng(0)
    keys = [(document, target) for document in range(1, 41, 2) for target in (20, 21)]
    gap = generator.uniform(0.5, 4.0, len(keys))
    document, target = zip(*keys, strict=True)
    losses = losses_table(
        document=document, target=target, loss_short=5.0, loss_long=5.0 - gap,
        placebo_loss_long=5.0 - gap,
    )  # fmt: skip
    targets = pd.DataFrame({"document": document, "target": target, "target_set": "gap"})
    targets = pd.concat([targets.assign(far_part=part) for part in ("document", "placebo")])
    share = generator.uniform(0.3, 1.0, len(keys))
    measured = []
    for level in (share, share - 0.25):
        rows = recovery_rows(keys, "own", 5.0 - level * gap)
        rows += recovery_rows(keys, "foreign", 5.0 - 0.1 * gap)
        for control in ("own", "foreign"):
            rows += recovery_rows(keys, control, 5.0 - 0.1 * gap, far_part="placebo")
        measured.append(
            SimpleNamespace(
                meta=Meta(data={"fingerprint": "a"}), losses=losses, targets=targets,
                recovery=pd.DataFrame(rows),
            )
        )  # fmt: skip
    (row,) = compare(*measured).to_dict("records")
    assert [row["net"], row["net_low"], row["net_high"]] == pytest.approx([0.25] * 3)
    assert row["net_nats"] == pytest.approx(0.25 * gap.mean())
    assert row["net_nats_low"] < row["net_nats"] < row["net_nats_high"]
    (alone,) = summarize(losses, targets, measured[0].recovery).to_dict("records")
    assert alone["net_high"] - alone["net_low"] > 0.1
    other = SimpleNamespace(**vars(measured[1]))
    other.recovery = other.recovery.assign(k=2)
    with pytest.raises(DataError, match="share no"):
        compare(measured[0], other)
    measured[1].meta = Meta(data={"fingerprint": "b"})
    with pytest.raises(DataError, match="other texts"):
        compare(*measured)


def test_a_set_without_a_gap_has_no_ratio() -> None:
    losses = losses_table(
        document=[1, 3], target=[9, 9], loss_short=[1.0, 1.0], loss_long=[1.5, 1.0]
    )
    rows = recovery_rows([(1, 9), (3, 9)], "own", [0.9, 0.9])
    targets = pd.DataFrame(
        {"document": [1, 3], "target": 9, "far_part": "document", "target_set": "new"}
    )
    (row,) = summarize(losses, targets, pd.DataFrame(rows)).to_dict("records")
    assert np.isnan(row["recovery"])
    assert np.isnan(row["net"])


def test_intervals_cover_as_often_as_they_say() -> None:
    """Heavy-tailed gaps and documents of very different size, as text has them; the truth is what
    a far larger sample gives."""

    def draw(generator: np.random.Generator, num_documents: int) -> pd.DataFrame:
        sizes = np.maximum(1, generator.pareto(1.5, num_documents) * 4).astype(int).clip(max=60)
        document = np.repeat(np.arange(num_documents), sizes)
        gap = 0.3 + generator.pareto(2.5, len(document))
        level = 0.5 + 0.2 * generator.standard_normal(num_documents)
        share = level[document] + 0.3 * generator.standard_normal(len(document))
        return pd.DataFrame(
            {"document": document, "target": np.arange(len(document)), "loss_short": 10.0,
             "loss_long": 10.0 - gap, "loss_set": 10.0 - gap * share}
        )  # fmt: skip

    covered = 0
    for seed in range(100):
        rows = draw(np.random.default_rng(seed), 60)
        keys = list(zip(rows.document, rows.target, strict=True))
        losses = losses_table(
            **{n: rows[n] for n in ("document", "target", "loss_short", "loss_long")}
        )
        recovery = pd.DataFrame(recovery_rows(keys, "own", rows.loss_set.tolist()))
        targets = rows[["document", "target"]].assign(far_part="document", target_set="gap")
        (row,) = summarize(losses, targets, recovery).to_dict("records")
        covered += row["low"] <= 0.5 <= row["high"]  # E[gap · share] / E[gap]
    assert 88 <= covered <= 100


# --- targets, induction, sources ------------------------------------------------------------------


def test_targets_are_chosen_as_said(model: Any) -> None:
    losses = losses_table(
        document=[0] * 5 + [1] * 5, target=[*range(6, 11)] * 2,
        loss_short=[1.0] * 10, loss_long=[0.0] * 5 + [0.4, 0.999, 0.6, 1.002, -1.0],
        kl=[0.0] * 5 + [0.1, 0.9, 0.1, 0.8, 0.1],
        placebo_loss_long=[1.0] * 5 + [1.0, 0.1, 1.0, 1.0, 1.0],
        stratum=["new"] * 5 + ["new", "recurs", "near", "near", "recurs"],
        placebo_stratum=["new"] * 10,
    )  # fmt: skip
    half = losses[losses.document == 0]
    assert fit_thresholds(half, 0.1, 0.2).gap == 1.0
    assert fit_thresholds(half, 0.1, 1.5).gap == 1.5
    assert fit_thresholds(half, 1.0, 0.2).gap is None
    thresholds = replace(fit_thresholds(half, 0.1, 0.0), gap=0.5, kl=0.8)
    found = choose_targets(losses, thresholds, share=0.2)
    assert set(found.document) == {1}
    places = found.groupby(["far_part", "target_set"]).target.apply(list).to_dict()
    assert places["document", "gap"] == [6, 10]
    assert places["document", "gap_new"] == [6]
    assert places["document", "gap_recurs"] == [10]
    assert places["document", "kl"] == [7, 9]
    assert places["placebo", "gap"] == [7]
    # A fifth of five targets is one; which one has nothing to do with losses.
    assert len(places["document", "recurs"]) == len(places["document", "new"]) == 1
    other = choose_targets(losses.assign(loss_long=0.0, kl=0.0), thresholds, share=0.2)
    for stratum in ("recurs", "new"):
        pd.testing.assert_frame_equal(
            found[found.target_set == stratum].reset_index(drop=True),
            other[other.target_set == stratum].reset_index(drop=True),
        )
    only = choose_targets(losses, thresholds, share=0.2, sets=["gap"])
    by_gap = found[found.target_set.str.startswith("gap")].reset_index(drop=True)
    pd.testing.assert_frame_equal(only, by_gap)
    # A sample of each set; that of a stratum lies within that of its set.
    few = choose_targets(losses, thresholds, share=0.2, max_targets=1)
    assert (few.groupby(["far_part", "target_set", "document"]).size() == 1).all()
    assert len(few.merge(found)) == len(few)
    assert set(few[few.target_set.str.startswith("gap_")].target) == set(
        few[few.target_set == "gap"].target
    )
    seeds = [choose_targets(losses, thresholds, 0.2, seed, max_targets=1) for seed in range(9)]
    assert len({tuple(one[one.target_set == "gap"].target) for one in seeds}) > 1
    assert (parse_share("all"), parse_share("top10%")) == (1.0, 0.1)
    assert {half_of(0), half_of(1)} == {"threshold", "report"}


class Parrot(torch.nn.Module):
    """Predicts what followed the last occurrence of the present token."""

    vocab_size = VOCAB

    def hidden(self, tokens_BL: torch.Tensor, *_: Any, last: int | None = None) -> torch.Tensor:
        logits = torch.zeros(*tokens_BL.shape, VOCAB)
        for row, tokens in enumerate(tokens_BL.tolist()):
            follows: dict[int, int] = {}
            for place, token in enumerate(tokens):
                if place:
                    follows[tokens[place - 1]] = token
                if token in follows:
                    logits[row, place, follows[token]] = 20.0
        return logits if last is None else logits[:, -last:]

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_the_check_tells_a_parrot_from_a_model_without_induction(model: Any) -> None:
    passages = [Document(np.random.default_rng(i).permutation(VOCAB)[:20]) for i in range(5)]
    parrot = repetition_drop(Scorer(Parrot(), torch.device("cpu")), passages, 20)
    assert parrot["drop"] == pytest.approx(np.log(VOCAB), abs=0.01)
    assert parrot["has_induction"]
    assert not repetition_drop(Scorer(model), passages, 20)["has_induction"]


def test_a_trained_run_is_measured_on_its_own_held_out_text(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config()
    train(config)
    trained = load_model(config.run_folder, device="cpu")
    text = open_documents(None, trained, limit=8)
    assert len(text) == 8
    windows = Windows(24, 8, 32)
    choices: dict[str, Any] = {"ks": (1, 2), "selectors": "add_one", "min_gap": 0.0}
    choices |= {"max_targets": 8, "sets": ("gap",)}
    results = measure(trained, text, windows, units=["tokens", "words"], **choices)
    one = results.tokens[results.tokens.document == results.tokens.document.iloc[0]]
    document = text[int(one.document.iloc[0])]
    assert "".join(one.text) == trained.tokenizer.decode(document.tokens.tolist())
    words = results.influence.query("units == 'words' and control == 'own'")
    assert (words.far_end - words.far_first).max() > 1
    with pytest.raises(ConfigError, match="68 positions are more than"):
        measure(trained, text, Windows(65, 8, 4), **choices)
    for targets in (results, 0.3):
        with pytest.raises(ConfigError, match=r"leave .*out"):
            measure(trained, text, windows, at="the", targets=targets, ks=(1,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(SETTINGS, selectors=("guess",)), "'guess' is unknown; choose from add_one"),
        (replace(SETTINGS, ks=(11,)), "11 is more than the 10 far units"),
        (replace(SETTINGS, ks=(9,)), r"9 is more than the 8 far units \(span:3\)"),
        (replace(SETTINGS, ks=()), "ks names none"),
        (replace(SETTINGS, ks=(0,)), "from 1 up"),
        (replace(SETTINGS, units=("span:1",)), "units=span:1 is none of"),
        (replace(SETTINGS, foreign="none"), r"foreign=none \(--foreign-text\) is none of"),
        (replace(SETTINGS, far_states="both"), "far_states=both"),
        (replace(SETTINGS, num_foreign=0), "at least one draw"),
        (replace(SETTINGS, ks=(1, 1)), "names one twice"),
        (replace(SETTINGS, min_gap=float("nan")), "min_gap=nan"),
        (replace(SETTINGS, seed=-1), "seed=-1"),
        (replace(SETTINGS, target_share=10.0), "share of 10.0"),
        (replace(SETTINGS, sets=("kl",)), "sets=kl must be gap"),
        (replace(SETTINGS, sets=("gap", "kll")), "sets=gap,kll must be gap"),
        (replace(SETTINGS, max_targets=0), "must be at least 1"),
        (replace(SETTINGS, num_foreign=7), "8 documents can stand in for each other"),
        (replace(SETTINGS, windows=Windows(16, 16)), "short=16 must be below"),
        (replace(SETTINGS, windows=Windows(60, 6)), "longer than long=60"),
        (replace(SETTINGS, units=("words",)), "need the text of each token"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    model: Any, documents: Documents, tmp_path: Path, settings: Settings, message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        measured_into(tmp_path, model, documents, settings)


@pytest.mark.parametrize("text", ["bottom10%", "top0%", "top200%", "10", "top x%"])
def test_shares_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="targets="):
        parse_share(text)


@pytest.mark.parametrize("windows", [Windows(16, 6), Windows(40, 8, 4), Windows(60, 30)], ids=str)
@pytest.mark.parametrize("far_states", ["contextual", "isolated"])
def test_a_first_look_bounds_the_work_and_not_the_documents(
    model: Any, windows: Windows, far_states: Reading
) -> None:
    """However many documents there are, and however long."""
    rng = np.random.default_rng(0)
    budget = 25_000
    for num_documents, length in ((4, 2000), (12, 400)):
        texts = Documents.of([rng.integers(0, VOCAB, length) for _ in range(num_documents)])
        cut = first_look(texts, windows, far_states, budget)
        assert [d.number for d in cut] == [d.number for d in texts]
        settings = replace(
            SETTINGS, windows=windows, min_gap=0.0, num_foreign=1, ks=(1, 2, 4, 8),
            far_states=far_states,
            target_share=0.1, units=("tokens",), selectors=("add_one_screened", "random"),
        )  # fmt: skip
        plan = Plan.of(loaded(model), cut, settings)
        losses = pd.concat([pd.DataFrame(dict(plan.losses(d.number)["losses"])).assign(
            document=d.number) for d in cut])  # fmt: skip
        targets = plan.targets(losses)
        for number in sorted(set(targets.document)):
            plan.recovery(number, targets[targets.document == number])
        assert budget / 4 < plan.scorer.token_forwards < 2 * budget
