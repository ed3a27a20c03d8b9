"""An exported run under the evaluation harness, with a task made here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from olmo_sparsity.analysis.kernels.losses import token_losses
from olmo_sparsity.analysis.models.load import LoadedModel, load_model
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.model.exchange import export
from olmo_sparsity.training.loop import train

TASK = """
task: copy_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def test_the_harness_reads_an_exported_run(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="needs the harness: pip install lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = make_config()
    train(config)
    export(Path(config.run_folder), tmp_path / "exported")
    rows = [
        {"text": f"the {word} and the", "choices": [f" {word}", " of"], "answer": 0}
        for word in ("king", "house", "tree")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "copy.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path / 'exported'}",
        tasks=["copy_words"],
        device="cpu",
        task_manager=TaskManager(include_path=str(tmp_path)),
    )
    # Its log-likelihoods are those of the checkpoint.
    loaded = load_model(config.run_folder, device="cpu")
    for sample, row in zip(found["samples"]["copy_words"], rows, strict=True):
        for answer, choice in zip(sample["resps"], row["choices"], strict=True):
            assert float(answer[0][0]) == pytest.approx(
                log_likelihood(loaded, row["text"], choice), abs=1e-3
            )


def log_likelihood(loaded: LoadedModel, text: str, choice: str) -> float:
    assert loaded.tokenizer is not None
    start, tokens = (torch.tensor([loaded.tokenizer.encode(t).ids]) for t in (text, text + choice))
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        nll_BL = token_losses(loaded.model, tokens[:, :-1], positions[:, :-1], tokens[:, 1:])
    return -float(nll_BL[0, start.shape[1] - 1 :].sum())
