"""Losses by place: those of naive forwards, paired differences, runs, and trainers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from olmo_sparsity import TrainerLosses, losses_by_place
from olmo_sparsity.analysis.results.losses_by_place import COLUMNS, LossesByPlace
from olmo_sparsity.analysis.scoring import losses_by_place as module
from olmo_sparsity.analysis.scoring.shared_text import open_shared_text
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.command.cli import main
from olmo_sparsity.config.run import config_from_dict
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.models.load import load_model, wrap_model
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.metrics.read import read_metrics
from olmo_sparsity.training.setup.inputs import build_evaluation
from tests.support.explanations import WORDS, make_model, make_tokenizer

LENGTH = 40
T_OF_FREEDOM = {8: 2.306004, 9: 2.262157, 19: 2.093024}
"""97.5% quantiles of Student's t, from a table."""

EDGES = [(20, 40), (10, 20), (5, 10), (0, 5)]


def make_texts(num: int = 12) -> list[str]:
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(WORDS, 120)) for _ in range(num)]


@pytest.fixture(scope="module")
def model() -> Any:
    return wrap_model(make_model(), make_tokenizer())


def t_ends(values_D: np.ndarray) -> tuple[float, float]:
    reach = T_OF_FREEDOM[len(values_D) - 1] * values_D.std(ddof=1) / len(values_D) ** 0.5
    return values_D.mean() - reach, values_D.mean() + reach


@torch.no_grad()
def naive(model: Any, ids: list[int]) -> np.ndarray:
    """The loss of each token, behind the beginning-of-text token."""
    tokens = torch.tensor([[1, *ids]])
    logits = model.model(tokens, torch.arange(len(ids) + 1)[None])[0].float()
    return -logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()


def test_losses_are_those_of_naive_forwards_with_intervals_over_documents(model: Any) -> None:
    found = losses_by_place(model, text=make_texts(), length=LENGTH, documents=10)
    nll_DT = np.stack([naive(model, model.encode([t])[0][:LENGTH]) for t in make_texts()[:10]])
    assert list(zip(found.table["first"], found.table.end, strict=True)) == EDGES
    for row in found.table.itertuples():
        means_D = nll_DT[:, row.first : row.end].mean(1)
        assert row.loss == pytest.approx(means_D.mean(), abs=1e-4)
        assert (row.low, row.high) == pytest.approx(t_ends(means_D), abs=1e-3)
        assert (row.documents, row.tokens) == (10, 10 * (row.end - row.first))


def rows_of(values: dict[tuple[str, int], np.ndarray]) -> pd.DataFrame:
    rows = [
        (model, step, document, first, end, (end - first) * value, end - first)
        for (model, step), values_D in values.items()
        for document, value in enumerate(values_D)
        for first, end in ((0, 8), (8, 16))
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def test_a_difference_is_paired_over_documents() -> None:
    generator = np.random.default_rng(0)
    level_D = generator.normal(3, 1, 20)
    other_D = level_D + 0.1 + generator.normal(0, 0.05, 20)
    found = LossesByPlace(rows_of({("a", 5): level_D, ("a", 9): level_D - 1, ("b", 5): other_D}))
    (pair,) = found.pairs()
    assert pair == (("b", 5), ("a", 5)), "the last step of both"
    compared = found.compare(*pair)
    low, high = t_ends(other_D - level_D)
    assert compared["first"].tolist() == [8, 0], "the farthest places first"
    for row in compared.itertuples():
        assert (row.low, row.high) == pytest.approx((low, high), abs=1e-6)
        assert row.documents == 20
    own = found.table.iloc[0]
    assert own.high - own.low > 5 * (high - low)


def test_the_table_says_how_many_documents_and_tokens_each_loss_is_over() -> None:
    text = LossesByPlace(rows_of({("a", 5): np.ones(11)}), "some text").describe()
    (row, *_) = (line.split() for line in text.splitlines() if "8 … 15" in line)
    assert row == ["a", "5", "8", "…", "15", "11", "88", "1.0000", "[1.0000,", "1.0000]"]


def test_checkpoints_read_on_different_documents_are_not_put_into_one_table() -> None:
    first, second = rows_of({("a", 1): np.ones(9)}), rows_of({("b", 1): np.ones(8)})
    with pytest.raises(DataError, match="different documents"):
        LossesByPlace(pd.concat([first, second]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"length": 500}, "no documents of 500 tokens or more"),
        ({"text": make_texts(7)}, "7 documents have length=40"),
        ({"documents": 5}, "documents=5 must be at least 8"),
        ({"length": 8}, "length=8 must be at least 16"),
    ],
)
def test_too_little_text_is_rejected(model: Any, given: dict, message: str) -> None:
    options = {"text": make_texts(), "length": LENGTH} | given
    with pytest.raises((ConfigError, DataError), match=message):
        losses_by_place(model, **options)


def test_options_that_a_model_has_by_itself_are_refused(model: Any, trained: Path) -> None:
    with pytest.raises(ConfigError, match="dtype=bf16: a model in memory has its own"):
        losses_by_place(model, text=make_texts(), length=LENGTH, dtype="bf16")
    with pytest.raises(ConfigError, match=r"tokenizer: .* has its own"):
        losses_by_place(trained, make_tokenizer(), length=16, documents=8)


def test_models_of_different_tokenizers_are_not_compared(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_model().save_pretrained(other)
    make_tokenizer().save_pretrained(other)
    with pytest.raises(DataError, match="another tokenizer"):
        losses_by_place([trained, other], length=16, documents=8)


def test_losses_are_not_those_of_a_model_that_another_one_has_replaced(tmp_path: Path) -> None:
    """Also if its file has the same size, and the time of modification of the first."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    tables = []
    for seed in (0, 1):
        model = make_model()
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(std=0.3)
        model.save_pretrained(tmp_path / "model")
        for file in (tmp_path / "model").iterdir():
            os.utime(file, (1000, 1000))
        options = {"text": make_texts(), "length": LENGTH, "documents": 8}
        tables.append(losses_by_place(tmp_path / "model", **options, out=tmp_path / "out").table)
    assert (tables[0].loss - tables[1].loss).abs().max() > 1e-2


def test_a_run_and_its_export_have_one_tokenizer(trained: Path, tmp_path: Path) -> None:
    # transformers adds to the tokenizer's file what has no effect on tokens.
    assert main(["export", str(trained), str(tmp_path / "exported")]) == 0
    checkpoint = max(trained.glob("checkpoints/*"))
    losses = losses_by_place(
        [checkpoint, tmp_path / "exported"], text=make_texts(), length=16, documents=8
    ).table
    exported = losses[losses.model == str(tmp_path / "exported")]
    assert exported.loss.to_numpy() == pytest.approx(
        losses[losses.model == str(checkpoint)].loss.to_numpy(), abs=1e-5
    )


@pytest.fixture
def two_runs(trained: Path, tmp_path: Path) -> list[str]:
    """The words of a command that reads a run and its copy."""
    shutil.copytree(trained, tmp_path / "other")
    words = ["losses", str(trained), str(tmp_path / "other"), "--out", str(tmp_path / "out")]
    return [*words, "--length=32", "--documents=10"]


def test_a_command_reads_all_checkpoints_of_two_runs(
    two_runs: list[str], trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(two_runs) == 0
    steps = sorted(int(path.name[4:]) for path in (trained / "checkpoints").iterdir())
    rows = pd.read_parquet(tmp_path / "out/losses.parquet")
    assert sorted({*rows.step}) == steps
    assert {*rows.model} == {str(trained), str(tmp_path / "other")}
    # A run and its copy do not differ.
    assert "+0.0000 [+0.0000, +0.0000]" in capsys.readouterr().out.replace("−", "+")
    page = (tmp_path / "out/losses.html").read_text()
    assert "<script" not in page
    assert "10 documents" in page


def test_the_same_command_reads_only_a_damaged_checkpoint_again(
    two_runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(two_runs) == 0
    calls = []
    really = module._measure
    monkeypatch.setattr(module, "_measure", lambda *given: calls.append(given) or really(*given))
    next(iter((tmp_path / "out/checkpoints").iterdir())).write_text("{}")
    assert main(two_runs) == 0
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"dtype": "bf16"}, r"dtype=.*bfloat16"), ({"length": 16}, r"length=32 \(now 16")],
)
def test_a_folder_of_other_settings_is_refused(
    trained: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    options: dict[str, Any] = {"models": (str(trained),), "out": tmp_path / "out", "length": 32}
    options["documents"] = 10
    module.read_losses(module.LossesRequest.of(**options))
    with pytest.raises(ConfigError, match=message):
        module.read_losses(module.LossesRequest.of(**options | changed))


def test_our_trainer_logs_the_losses_that_the_command_reads(run_dict: dict) -> None:
    run_dict["evaluation"] |= {"interval_steps": 3, "documents": 9, "batch_size": 2}
    run_dict["checkpoint"] = {"keep_steps": [3, 6]}
    train(config_from_dict(run_dict))
    metrics = read_metrics(Path(run_dict["run_folder"]) / "metrics.jsonl")
    logged = {row["step"]: row["by_place"] for row in metrics if "by_place" in row}
    assert list(logged) == [3, 6]
    found = losses_by_place(run_dict["run_folder"], length=32, documents=9).table
    for step, parts in logged.items():
        rows = found[found.step == step]
        assert [part["from"] for part in parts] == rows["first"].tolist() == [16, 8, 4, 0]
        assert [part["loss"] for part in parts] == pytest.approx(rows.loss.tolist(), abs=1e-4)
        assert [part["num_tokens"] for part in parts] == rows.tokens.tolist()
        errors = ((rows.high - rows.loss) / T_OF_FREEDOM[8]).tolist()
        assert [part["standard_error"] for part in parts] == pytest.approx(errors, abs=1e-4)


def test_held_out_documents_are_the_same_for_the_trainer_and_the_command(
    trained: Path, run_dict: dict
) -> None:
    """Both choose eight evenly over all that are long enough, not the first ones."""
    request = module.LossesRequest.of(models=(str(trained),), length=16, documents=8)
    loaded = load_model(str(trained))
    text = open_shared_text(request.text, loaded, request.settings, request.field, "auto")
    documents = text.documents
    read = [document.tokens.tolist() for document in documents]
    run_dict["evaluation"] |= {"documents": 8, "document_length": 16}
    config = config_from_dict(run_dict)
    heldout = open_shards(config.data, "heldout")
    assert build_evaluation(heldout, config).documents.tolist() == read
    first = [heldout.document(number)[:16].tolist() for number in range(8)]
    assert read != first


def test_the_callback_of_transformers_logs_at_each_evaluation(tmp_path: Path) -> None:
    tokenizer, inner, texts = make_tokenizer(), make_model(), make_texts()
    rows = [{"input_ids": ids, "labels": ids} for ids in tokenizer(texts).input_ids]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, eval_strategy="steps", eval_steps=1, report_to=[], use_cpu=True,
        per_device_train_batch_size=1, per_device_eval_batch_size=1, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(inner, arguments, train_dataset=rows, eval_dataset=rows[:2])
    trainer.add_callback(TrainerLosses(trainer, tokenizer, texts, length=LENGTH))
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss_by_place/20-40" in row]
    assert [row["step"] for row in logged] == [1, 2]
    found = losses_by_place(inner, tokenizer, text=texts, length=LENGTH).table
    assert logged[1]["loss_by_place/20-40"] == pytest.approx(found.loss[0], abs=1e-5)
    assert logged[0]["loss_by_place/20-40"] != logged[1]["loss_by_place/20-40"]
