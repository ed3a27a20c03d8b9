"""A whole measurement: resumed, sharded, controlled; and what is summarised from its tables."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.asking import Asker
from analysis.estimate import FEW_TARGETS, SOME_TARGETS, estimate
from analysis.gate import repetition_drop
from analysis.losses import ContextLosses, context_losses
from analysis.measure import measure, merge_shards
from analysis.recovery import recover, summarize
from analysis.results import ResultWriter, read_results
from analysis.scoring import Scorer
from analysis.settings import Settings
from analysis.sources import Source, open_source
from analysis.summary import format_summary, longppl
from analysis.targets import GapTargets, GivenTargets, half_of, parse_share
from analysis.windows import Windows
from olmo_sparsity.config import ModelConfig, RunConfig
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.model.load import LoadedModel, build_model, load_model
from olmo_sparsity.training.loop import train

VOCAB = 40
SETTINGS = Settings(Windows(16, 6), ks=(1, 2, 4), target_share=0.3, min_gap=0.0)


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(model, None, "tiny", 1, 64, "weights")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    shape = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB, "init_std": 0.3}
    return build_model(ModelConfig(**shape, max_sequence_length=64)).eval()


@pytest.fixture(scope="module")
def source() -> Source:
    generator = np.random.default_rng(0)
    lengths = generator.integers(10, 40, 12)
    documents = [generator.integers(0, VOCAB, length) for length in lengths]
    return Source("noise", "noise", documents)


def tables_of(folder: Path) -> dict[str, pd.DataFrame]:
    results = read_results(folder)
    return {
        name: getattr(results, name)
        for name in ("losses", "influence", "recovery", "tokens", "costs", "summary")
    }


@pytest.fixture(scope="module")
def measured(model: Any, source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    measure(loaded(model), source, SETTINGS, folder)
    return folder


def test_results_hold_what_they_should(measured: Path, source: Source) -> None:
    results = read_results(measured)
    long_enough = [i for i, document in enumerate(source.documents) if len(document) > 16]
    assert results.losses.document.unique().tolist() == long_enough
    assert len(results.losses) == sum(len(source.documents[i]) - 16 for i in long_enough)
    assert (results.losses.half == [half_of(i) for i in results.losses.document]).all()
    assert set(results.recovery.document) <= {i for i in long_enough if i % 2}
    assert results.meta["counts"] == {
        "documents_measured": len(long_enough),
        "documents_too_short": 12 - len(long_enough),
    }
    assert results.meta["gate"]["has_induction"] is False
    own = results.summary[results.summary.control == "own"]
    assert set(own.selector) == set(SETTINGS.selectors)
    assert (
        own[["excess", "excess_low", "excess_high", "token_forwards_per_target"]]
        .notna()
        .all(axis=None)
    )
    counts = results.recovery.groupby(["selector", "control"]).draw.nunique()
    assert counts["random", "own"] == 5
    assert (counts.xs("foreign", level="control") == 3).all()
    table = format_summary(results.summary)
    row = results.summary.query("target_set == 'gap' and control == 'own'").iloc[0]
    assert row.excess_nats == pytest.approx(row.excess * row.gap)
    assert f"{row.excess_nats:+.2f}" in table.splitlines()[1]
    assert row.selector in table.splitlines()[1]


def test_a_table_of_ones_own_beside_results_harms_nothing(measured: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(measured, tmp_path / "copy")
    (copy / "summary.csv").write_text("mine")
    assert len(read_results(copy).recovery) == len(read_results(measured).recovery)


def test_a_measurement_resumes_to_the_same_tables(
    model: Any, source: Source, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, calls = ResultWriter.write, []

    def stop_after_three(self: ResultWriter, document: int, tables: dict) -> None:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(document)
        really(self, document, tables)
        self.flush()

    monkeypatch.setattr(ResultWriter, "write", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        measure(loaded(model), source, SETTINGS, tmp_path)
    monkeypatch.setattr(
        ResultWriter,
        "write",
        lambda self, document, t: (calls.append(document), really(self, document, t)),
    )
    measure(loaded(model), source, SETTINGS, tmp_path)
    assert len(calls) == len(set(calls)), "a finished document was measured again"
    for name, table in tables_of(measured).items():
        pd.testing.assert_frame_equal(tables_of(tmp_path)[name], table)


def test_shards_merge_to_the_same_tables(
    model: Any, source: Source, measured: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / str(i) for i in range(3)]
    for i, folder in enumerate(folders):
        measure(loaded(model), source, SETTINGS, folder, shard=(i, 3))
    merge_shards(folders, tmp_path / "merged")
    for name, table in tables_of(measured).items():
        pd.testing.assert_frame_equal(tables_of(tmp_path / "merged")[name], table)


def test_a_missing_or_unfinished_shard_is_named(
    model: Any, source: Source, measured: Path, tmp_path: Path
) -> None:
    measure(loaded(model), source, SETTINGS, tmp_path / "0", shard=(0, 2))
    with pytest.raises(DataError, match="shard 1/2 is missing"):
        merge_shards([tmp_path / "0"], tmp_path / "merged")
    with pytest.raises(DataError, match="not a finished shard"):
        merge_shards([tmp_path / "0", measured], tmp_path / "merged")


def test_no_target_is_an_error_and_not_an_empty_table(
    model: Any, source: Source, tmp_path: Path
) -> None:
    with pytest.raises(
        DataError, match=r"large enough \(the largest is [\d.]+ nats, the threshold 1000\.00\)"
    ):
        measure(loaded(model), source, replace(SETTINGS, min_gap=1000.0), tmp_path)


def test_another_model_or_window_in_the_same_folder_is_refused(
    model: Any, source: Source, measured: Path
) -> None:
    other = replace(SETTINGS, windows=Windows(16, 5))
    with pytest.raises(DataError, match=r"short"):
        measure(loaded(model), source, other, measured)
    with pytest.raises(DataError, match=r"model"):
        measure(replace(loaded(model), fingerprint="else"), source, SETTINGS, measured)


class Shortsighted(torch.nn.Module):
    """A model that cannot see beyond the last `reach` inputs."""

    def __init__(self, model: Any, reach: int) -> None:
        super().__init__()
        self.inner, self.reach = model, reach

    def hidden(
        self, tokens_BL: torch.Tensor, positions_BL: torch.Tensor, *rest: Any, **options: Any
    ) -> torch.Tensor:
        length = tokens_BL.shape[1]
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        seen = (distance >= 0) & (distance < self.reach)
        bias = torch.zeros(length, length).masked_fill_(~seen, torch.finfo(torch.float).min)
        # One layer's reach would grow with depth, so the inner model has one.
        return self.inner.hidden(tokens_BL, positions_BL, bias[None, None], **options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def test_a_model_that_sees_no_further_than_the_short_window_has_no_excess(
    source: Source, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    shape = {"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": VOCAB, "init_std": 0.3}
    inner = build_model(ModelConfig(**shape, max_sequence_length=64))
    blind = Shortsighted(inner.eval(), reach=6)
    settings = replace(
        SETTINGS, far_states="isolated", target_share=1.0, selectors=("add_one", "divergence")
    )
    measure(loaded(blind), source, settings, tmp_path)
    results = read_results(tmp_path)
    np.testing.assert_allclose(results.losses.loss_long, results.losses.loss_short, atol=1e-5)
    short = results.losses.set_index(["document", "target"]).loss_short
    rows = results.recovery
    at = short.loc[list(zip(rows.document, rows.target, strict=True))].to_numpy()
    np.testing.assert_allclose(rows.loss_set, at, atol=1e-5)


def test_processes_of_one_launch_share_a_folder(
    model: Any, source: Source, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("analysis.measure.PATIENCE_S", 0.0)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(DataError, match="a process is lost"):
        measure(loaded(model), source, SETTINGS, tmp_path)
    monkeypatch.setenv("RANK", "1")
    assert not measure(loaded(model), source, SETTINGS, tmp_path)
    monkeypatch.setenv("RANK", "0")
    really, written = ResultWriter.write, []
    monkeypatch.setattr(ResultWriter, "write", lambda self, n, t: written.append(n))
    assert measure(loaded(model), source, SETTINGS, tmp_path)
    assert not written, "the first start had finished its share"
    monkeypatch.setattr(ResultWriter, "write", really)
    for name, table in tables_of(measured).items():
        pd.testing.assert_frame_equal(tables_of(tmp_path)[name], table)


def test_two_models_answer_for_the_same_targets(
    model: Any, source: Source, measured: Path, tmp_path: Path
) -> None:
    given = GivenTargets.read(measured, source)
    other = build_model(model.config).eval()
    measure(replace(loaded(other), fingerprint="other"), source, SETTINGS, tmp_path, targets=given)
    keys = ["document", "target", "target_set"]
    ours, theirs = (
        read_results(folder).recovery[keys].drop_duplicates(ignore_index=True)
        for folder in (tmp_path, measured)
    )
    pd.testing.assert_frame_equal(ours, theirs)
    # A longer window keeps those of the targets that still have one.
    longer = replace(SETTINGS, windows=Windows(20, 6))
    measure(loaded(model), source, longer, tmp_path / "longer", targets=given)
    kept = read_results(tmp_path / "longer").recovery[keys].drop_duplicates(ignore_index=True)
    pd.testing.assert_frame_equal(kept, theirs[theirs.target >= 20].reset_index(drop=True))
    with pytest.raises(DataError, match="other text"):
        GivenTargets.read(measured, replace(source, fingerprint="else"))


def test_the_estimate_is_near_what_it_takes(model: Any, source: Source, measured: Path) -> None:
    text = estimate(loaded(model), source, SETTINGS)
    costs = read_results(measured).costs
    (said,) = re.findall(r"about ([\d.e+]+), [\d,]+ for each target", text)
    # Selectors of the own candidates alone, without controls: a lower bound.
    assert costs.token_forwards.sum() < float(said) < 20 * costs.token_forwards.sum()
    assert f"{12 - len(read_results(measured).losses.document.unique())} too short" in text
    assert text.startswith("gate: loss ")


def test_the_estimate_of_long_documents_asks_few_of_their_targets(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, VOCAB, 3000) for _ in range(2)]
    source = Source("long", "x", documents)
    settings = replace(SETTINGS, windows=Windows(16, 6, 4), min_gap=0.0)
    asked, read = [], []
    tables, forwards = Asker.tables, context_losses

    def count(self: Asker, number: int, losses: ContextLosses | None) -> Any:
        found = tables(self, number, losses)
        asked.append(sorted(set(found["recovery"]["target"])))
        return found

    def follow(scorer: Scorer, document: np.ndarray, windows: Windows) -> ContextLosses:
        read.append(len(document))
        return forwards(scorer, document, windows)

    monkeypatch.setattr(Asker, "tables", count)
    monkeypatch.setattr("analysis.estimate.context_losses", follow)
    text = estimate(loaded(model), source, settings)
    long, stride = settings.windows.long, settings.windows.stride
    for targets in asked:  # whole blocks, no more than it takes
        assert len(targets) >= FEW_TARGETS
        assert (targets[-1] - long) // stride == (targets[FEW_TARGETS - 1] - long) // stride
    assert max(read) == settings.windows.long + SOME_TARGETS
    (said,) = re.findall(r"targets +([\d,]+) with both losses", text)
    assert said.replace(",", "") == str(2 * (3000 - settings.windows.long))


def test_recover_is_what_measure_does(model: Any, source: Source, measured: Path) -> None:
    rows = read_results(measured).recovery.query("selector == 'add_one' and control == 'own'")
    number = int(rows.document.iloc[0])
    here = rows[rows.document == number].drop_duplicates(["target", "k"])
    scorer = Scorer(model, torch.device("cpu"))
    found = recover(
        scorer, source.documents[number], SETTINGS.windows,
        ks=SETTINGS.ks, targets=here.target.unique(),
    )  # fmt: skip
    both = found.merge(here[["target", "k", "loss_set"]], on=["target", "k"])
    assert len(both) == len(found) == len(here)
    np.testing.assert_allclose(both.loss_set_x, both.loss_set_y, atol=1e-5)
    assert all(len(far) == k for far, k in zip(found.far, found.k, strict=True))


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


def test_recovery_is_a_ratio_of_sums_and_excess_is_paired() -> None:
    losses = pd.DataFrame(
        {
            "document": [1, 1, 3],
            "target": [20, 21, 20],
            "loss_short": [5.0, 4.0, 3.0],
            "loss_long": [1.0, 2.0, 2.0],
        }
    )
    keys = [(1, 20), (1, 21), (3, 20)]
    rows = []
    for control, draw, sets in (
        ("own", 0, [2.0, 3.0, 3.0]),
        ("foreign", 0, [4.0, 4.0, 3.0]),
        ("foreign", 1, [3.0, 4.0, 3.0]),
    ):
        for (document, target), loss in zip(keys, sets, strict=True):
            rows.append((document, target, "gap", "add_one", control, draw, 1, loss, None, None))
    columns = ["document", "target", "target_set", "selector", "control", "draw", "k", "loss_set"]
    recovery = pd.DataFrame(rows, columns=[*columns, "kl_set", "kl_short"])
    recovery[["kl_set", "kl_short"]] = recovery[["kl_set", "kl_short"]].astype(float)
    summary = summarize(losses, recovery).set_index("control")
    assert summary.recovery["own"] == pytest.approx((3 + 1 + 0) / (4 + 2 + 1))
    assert summary.recovery["foreign"] == pytest.approx(1.5 / 7)
    assert summary.excess["own"] == pytest.approx(2.5 / 7)
    assert summary.gap["own"] == pytest.approx(7 / 3)
    assert summary.excess_nats["own"] == pytest.approx(2.5 / 3)
    # Resamples hold the first document only, the second only, or both.
    assert summary.excess_nats_low["own"] == pytest.approx(0)
    assert summary.excess_nats_high["own"] == pytest.approx(2.5 / 2)
    assert summary.num_targets["own"] == 3
    assert summary.num_documents["own"] == 2
    assert summary.low["own"] <= summary.recovery["own"] <= summary.high["own"]


def test_intervals_cover_as_often_as_they_say() -> None:
    """Documents with a known mean recovery of one half: about 95 of 100 intervals hold it."""
    covered = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        document = np.repeat(np.arange(60), 4)
        share = 0.5 + 0.2 * generator.standard_normal(60)[document]
        losses = pd.DataFrame(
            {"document": document, "target": np.tile(np.arange(4), 60), "loss_short": 2.0,
             "loss_long": 1.0}
        )  # fmt: skip
        recovery = losses[["document", "target"]].assign(
            target_set="gap", selector="s", control="own", draw=0, k=1, loss_set=2.0 - share,
            kl_set=np.nan, kl_short=np.nan,
        )  # fmt: skip
        (row,) = summarize(losses, recovery, seed).query("control == 'own'").to_dict("records")
        covered += row["low"] <= 0.5 <= row["high"]
    assert 88 <= covered <= 100


# --- targets, gate, sources -----------------------------------------------------------------------


def test_targets_are_chosen_as_said() -> None:
    windows = Windows(6, 3)
    document = np.array([7, 1, 2, 3, 1, 2, 7, 1, 9, 2, 7])
    chooser = GapTargets(min_gap=0.5, common_tokens=frozenset({1, 2, 3}))
    gaps = [0.6, 0.001, 0.4, -0.002, 2.0]
    from analysis.losses import ContextLosses

    targets = np.arange(6, 11)
    losses = ContextLosses(targets, document[targets], np.zeros(5), np.array(gaps))
    chosen = chooser.choose(1, document, losses, windows, np.random.default_rng(0))
    assert chosen["gap"].tolist() == [0, 4]
    assert chosen["zero_gap"].tolist() == [1, 3]
    # 7 at place 6: far at 0, not near; 9 occurs nowhere before; 7 at place 10: far at 6, not near.
    assert chosen["content"].tolist() == [0, 4]


def test_the_threshold_is_a_quantile_with_a_floor() -> None:
    from analysis.losses import ContextLosses

    gaps = np.linspace(0, 1, 101)
    part = ContextLosses(np.arange(101), np.arange(101), np.zeros(101), gaps)
    documents = [np.arange(50)]
    assert GapTargets.fit([part], documents, 0.1, 0.2).min_gap == pytest.approx(0.9)
    assert GapTargets.fit([part], documents, 0.1, 0.95).min_gap == 0.95
    assert GapTargets.fit([part], documents, 1.0, 0.2).min_gap == -np.inf
    assert (parse_share("all"), parse_share("top10%")) == (1.0, 0.1)


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


def test_the_gate_tells_a_parrot_from_a_model_without_induction(model: Any) -> None:
    passages = [np.random.default_rng(i).permutation(VOCAB)[:20] for i in range(5)]
    parrot = repetition_drop(Scorer(Parrot(), torch.device("cpu")), passages, 20)
    assert parrot["drop"] == pytest.approx(np.log(VOCAB), abs=0.01)
    assert parrot["has_induction"]
    untrained = repetition_drop(Scorer(model, torch.device("cpu")), passages, 20)
    assert not untrained["has_induction"]


def test_a_trained_run_is_measured_on_its_own_held_out_text(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config()
    train(config)
    run = load_model(config.run_folder, device="cpu")
    text = open_source(run, max_documents=12)
    assert len(text.documents) == 12
    settings = Settings(Windows(24, 8, 4), ks=(1, 2), selectors=("add_one",), min_gap=0.0)
    measure(run, text, settings, tmp_path / "results")
    results = read_results(tmp_path / "results")
    one = results.tokens[results.tokens.document == results.tokens.document.iloc[0]]
    assert " the " in "".join(one.text)
    with pytest.raises(ConfigError, match="needs 65 positions"):
        measure(run, text, replace(settings, windows=Windows(65, 8)), tmp_path / "other")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(SETTINGS, selectors=("guess",)), "'guess' is unknown; choose from add_one"),
        (replace(SETTINGS, ks=(11,)), "11 is more than the 10 far tokens"),
        (replace(SETTINGS, ks=()), "from 1 up"),
        (replace(SETTINGS, num_foreign=0), "at least one draw"),
        (replace(SETTINGS, ks=(1, 1)), "names one twice"),
        (replace(SETTINGS, min_gap=float("nan")), "--min-gap=nan"),
        (replace(SETTINGS, seed=-1), "--seed=-1"),
        (replace(SETTINGS, windows=Windows(16, 16)), "--short=16 must be below"),
        (replace(SETTINGS, windows=Windows(63, 6)), "longer than --long=63"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    model: Any, source: Source, tmp_path: Path, settings: Settings, message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        measure(loaded(model), source, settings, tmp_path)


@pytest.mark.parametrize("text", ["bottom10%", "top0%", "top200%", "10", "top x%"])
def test_shares_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--targets"):
        parse_share(text)
