"""The control text: the same stretches, of other documents."""

import random

from tokenizers import Tokenizer

from docs.exchange_stretches import exchange
from olmo_sparsity.data.tokenizer import train_tokenizer


def test_stretches_are_exchanged_between_documents() -> None:
    rng = random.Random(0)
    # Each document has words of its own, so that a stretch tells where it is from.
    texts = [" ".join(rng.choice(f"{c}a {c}b {c}c".split()) for _ in range(90)) for c in "bdfg"]
    tokenizer: Tokenizer = train_tokenizer(iter(texts), 300)
    before = [tokenizer.encode(text).ids for text in texts]
    after = [tokenizer.encode(text).ids for text in exchange(texts, tokenizer, 8, seed=1)]

    def cut(ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[i : i + 8]) for i in range(0, len(ids) - 7, 8)]

    assert [len(cut(ids)) for ids in after] == [len(cut(ids)) for ids in before]
    stretches = [stretch for ids in before for stretch in cut(ids)]
    assert sorted(s for ids in after for s in cut(ids)) == sorted(stretches)
    stayed = sum(s in cut(b) for b, a in zip(before, after, strict=True) for s in cut(a))
    assert stayed < len(stretches) / 2, "a quarter stays where it was, by chance"
