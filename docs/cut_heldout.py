"""The beginnings of held-out documents as a text: python docs/cut_heldout.py FOLDER OUT.jsonl

Measuring a document takes as long as it has windows; one target of each needs its beginning alone.
"""

import argparse
import json
from pathlib import Path

from olmo_sparsity.config.text import DataConfig
from olmo_sparsity.data.shards import open_shards


def cut(folder: Path, out: Path, num_characters: int) -> int:
    """Returns how many documents are as long."""
    shards = open_shards(DataConfig(folder=str(folder)), "heldout")
    documents = (shards.document(index) for index in range(shards.num_documents))
    texts = [shards.tokenizer.decode(tokens.tolist()) for tokens in documents]
    long = [{"text": text[:num_characters]} for text in texts if len(text) >= num_characters]
    out.write_text("".join(json.dumps(row) + "\n" for row in long), encoding="utf-8")
    return len(long)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="of olmo-sparsity prepare")
    parser.add_argument("out", type=Path)
    parser.add_argument("--characters", type=int, default=4000)
    asked = parser.parse_args()
    print(f"{cut(asked.folder, asked.out, asked.characters)} documents")
