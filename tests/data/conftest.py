"""Text that is to be prepared."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from olmo_sparsity.config.sections import DataConfig
from olmo_sparsity.config.text import CorpusConfig, TokenizerConfig

WORDS = ["river", "the", "café", "日本語", "1984", "don't", "<|endoftext|>", "\n", "naïve", "🙂"]


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """Three files of C4 with a bad record in each; about 18 kB of text."""
    rng = random.Random(0)
    (tmp_path / "c4").mkdir()
    for name in "abc":
        lines = [
            json.dumps({"text": f"{name}{n} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 80)))})
            for n in range(30)
        ]
        lines.insert(rng.randrange(30), '{"text": "cut o')
        content = "\n".join(lines).encode()
        (tmp_path / "c4" / f"{name}.json.gz").write_bytes(gzip.compress(content))
    return DataConfig(
        folder=str(tmp_path / "prepared"),
        corpus=CorpusConfig("c4_files", path=f"{tmp_path}/c4/*.gz", max_bad_share=0.05),
        tokenizer=TokenizerConfig(train_vocab=300),
        heldout_share=0.3,
    )
