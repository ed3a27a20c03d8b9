"""Beginnings of held-out documents."""

from __future__ import annotations

import json
from pathlib import Path

from docs.cut_heldout import cut
from olmo_sparsity.data.shards import TokenShards


def test_beginnings_of_all_that_are_long_enough(
    data_folder: Path, heldout: TokenShards, tmp_path: Path
) -> None:
    out = tmp_path / "cut.jsonl"
    texts = [heldout.tokenizer.decode(heldout.document(i)) for i in range(heldout.num_documents)]
    limit = sorted(map(len, texts))[len(texts) // 2]
    assert cut(data_folder, out, limit) == sum(len(text) >= limit for text in texts)
    found = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert found == [text[:limit] for text in texts if len(text) >= limit]
