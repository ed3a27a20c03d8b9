"""How does the influence of a token fall with its distance, and does that need its own text?

    python -m study.benchmarks.distance OUT.csv --text TEXT [--num 24]

For the last token of each text, the norm of the gradient of its log-probability by the embedding of
each token before it, with the text as it is, with another text in place of all but the last 64
tokens, with the tokens in random order, and with random weights. The median over texts, by distance
r, is fitted by γ + β (r + 1)^−p, as in arXiv 2606.29139, and by an exponential with a floor.
OUT.csv: a row for each condition.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from olmo_sparsity.analysis.results.intervals import percentile_interval, resample_weights
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.find import find_folder
from study.benchmarks.evidence import read_texts

LENGTH, LOCAL, FIRST = 1024, 64, 16
"""Tokens of a text, those that an unrelated text leaves, and those at its beginning that are left
out: attention rests on them."""

EDGES = np.unique(np.geomspace(1, LENGTH - FIRST, 25).astype(int)) - 1
"""Distances r where a bin begins, from 0, the token before the target, and where the last ends."""

MIDDLES = (EDGES[:-1] + EDGES[1:] - 1) / 2
P, RANGES = np.arange(0.05, 3, 0.01), np.geomspace(1, LENGTH, 200)
POWERS, EXPONENTIALS = (MIDDLES + 1) ** -P[:, None], np.exp(-MIDDLES / RANGES[:, None])
FLOORS = np.array([0, *np.geomspace(1e-6, 1, 61)])
"""Tried values of p, of the range of an exponential, and of γ / β."""


def influence(model: PreTrainedModel, ids: np.ndarray, newline: int) -> np.ndarray:
    """By distance. The line break before the text has none."""
    tokens = torch.from_numpy(np.concatenate([[newline], ids]))[None]
    with torch.no_grad():
        embedded = model.get_input_embeddings()(tokens[:, :-1])
    embedded.requires_grad_()
    logits = model(inputs_embeds=embedded, logits_to_keep=1).logits[0, -1].float()
    (gradient,) = torch.autograd.grad(logits.log_softmax(0)[tokens[0, -1]], embedded)
    return gradient[0, 1:].float().norm(dim=-1).numpy()[::-1]


def binned(rows: list[np.ndarray]) -> np.ndarray:
    """profile_NE: of each text, the median in each bin of distances."""
    return np.array([[np.median(row[a:b]) for a, b in pairwise(EDGES)] for row in rows])


def fitted(profile_E: np.ndarray, falls_KE: np.ndarray) -> tuple[int, float]:
    """Which fall fits best as β (γ / β + fall), and the root mean square of the logarithms'
    errors."""
    falls_KE = np.maximum(falls_KE, 1e-30)  # an exponential may be 0
    errors_KCE = np.log(profile_E) - np.log(FLOORS[:, None] + falls_KE[:, None])
    errors_KC = errors_KCE.std(axis=-1)  # β is the mean of their differences
    return int(errors_KC.min(axis=1).argmin()), float(errors_KC.min())


def summarize(profile_NE: np.ndarray) -> dict[str, float]:
    drawn = [
        np.repeat(profile_NE, w.astype(int), axis=0)
        for w in resample_weights(len(profile_NE))[:200]
    ]
    middle = np.median(profile_NE, axis=0)
    p = [P[fitted(np.median(some, axis=0), POWERS)[0]] for some in (profile_NE, *drawn)]
    ends = percentile_interval(np.array(p[1:]), p[0])
    return dict(zip(("p", "p_low", "p_high"), ends, strict=True)) | {
        "error": fitted(middle, POWERS)[1],
        "error_exponential": fitted(middle, EXPONENTIALS)[1],
        "far": float((middle[MIDDLES >= LOCAL] / middle[0]).mean()),
        "texts": len(profile_NE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--num", type=int, default=24)
    given = parser.parse_args()
    folder = find_folder("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).requires_grad_(False)
    torch.manual_seed(0)
    untrained = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).requires_grad_(
        False
    )
    (newline,) = tokenizer("\n").input_ids
    ids = [np.array(tokenizer(text).input_ids) for text in read_texts([given.text])]
    ids = [one[:LENGTH] for one in ids if len(one) >= LENGTH][: given.num]
    other = [
        np.concatenate([b[: LENGTH - LOCAL], a[-LOCAL:]])
        for a, b in zip(ids, ids[1:] + ids[:1], strict=True)
    ]
    mixed = [
        np.concatenate([stream(0, "order", i).permutation(a[:-1]), a[-1:]])
        for i, a in enumerate(ids)
    ]
    lines = []
    for called, one, texts in (
        ("own text", model, ids),
        ("unrelated text", model, other),
        ("tokens in random order", model, mixed),
        ("random weights", untrained, ids),
    ):
        profile_NE = binned([influence(one, some, newline) for some in texts])
        lines.append({"condition": called} | summarize(profile_NE))
        print(lines[-1], flush=True)
    pd.DataFrame(lines).round(4).to_csv(given.out, index=False)


if __name__ == "__main__":
    main()
