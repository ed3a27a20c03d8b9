"""Texts whose stretches of 64 tokens are exchanged between documents: the same words, but what
stands further back is of other documents. A control: who reads it can learn nothing from far text.

    python docs/exchange_stretches.py TOKENIZER OUT.jsonl TEXT…

Each document keeps its number of stretches; what is left at its end is dropped.
"""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer

from olmo_sparsity.analysis.inputs.records import Document, read_file
from olmo_sparsity.data.tokenizer import load_tokenizer


def exchange(texts: list[str], tokenizer: Tokenizer, length: int, seed: int) -> Iterator[str]:
    """Each text anew, of as many stretches as it has, drawn without replacement from all."""
    ids = [tokenizer.encode(text).ids for text in texts]
    counts = [len(tokens) // length for tokens in ids]
    stretches = [
        tokens[length * i : length * (i + 1)]
        for tokens, count in zip(ids, counts, strict=True)
        for i in range(count)
    ]
    random.Random(seed).shuffle(stretches)
    start = 0
    for count in counts:
        if count:
            yield tokenizer.decode(list(chain.from_iterable(stretches[start : start + count])))
        start += count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("tokenizer", help="folder or file of the tokenizer")
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--length", type=int, default=64, help="tokens of a stretch (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    texts = [
        record.text
        for path in asked.texts
        for record in read_file(path, "text", "whole")
        if isinstance(record, Document)
    ]
    with asked.out.open("w") as file:
        for text in exchange(texts, load_tokenizer(asked.tokenizer), asked.length, asked.seed):
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
