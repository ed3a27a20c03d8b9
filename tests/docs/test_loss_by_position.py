"""A model's mean loss between two positions, against transformers' own loss."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from docs.loss_by_position import losses_of
from olmo_sparsity.analysis.models.load import DEMO

TEXT = "The miller of Orsk kept three ducks. " * 12


def test_losses_between_positions_are_those_of_transformers(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in (TEXT, "short", TEXT[9:])))
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    found = losses_of(str(tmp_path / "model"), str(path), [0, 16, 64], 3)
    assert found.document.tolist() == [0, 2]
    tokens = tokenizer(TEXT, return_tensors="pt").input_ids[:, :64]
    with torch.no_grad():
        within = model(tokens[:, :16], labels=tokens[:, :16]).loss.item()
        hidden = tokens.where(torch.arange(64) >= 16, -100)
        beyond = model(tokens, labels=hidden).loss.item()
    assert found.loc[0, ["0-16", "16-64"]].tolist() == pytest.approx([within, beyond], abs=1e-5)
