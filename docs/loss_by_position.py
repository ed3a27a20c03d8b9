"""How the loss of models depends on where a token stands, for texts longer than they were trained.

    python docs/loss_by_position.py TEXT OUT.csv MODEL…

Each document of enough tokens is read once from its beginning. A row is one model on one document:
its mean loss between two positions.
"""

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from olmo_sparsity.analysis.inputs.texts import open_documents
from olmo_sparsity.analysis.kernels.losses import token_losses
from olmo_sparsity.analysis.models.load import load_model


def losses_of(model: str, text: str, edges: list[int], num_documents: int) -> pd.DataFrame:
    loaded = load_model(model)
    places_1L = torch.arange(edges[-1] - 1)[None]
    rows = []
    for document in open_documents(text, loaded, num_documents):
        if len(document.tokens) < edges[-1]:
            continue
        tokens_1L = torch.from_numpy(document.tokens[: edges[-1]].astype(np.int64))[None]
        with torch.no_grad():  # nll_L[i] is of token i + 1
            losses_1L = token_losses(loaded.model, tokens_1L[:, :-1], places_1L, tokens_1L[:, 1:])
        nll_L = losses_1L[0].double()
        means = {f"{a}-{b}": nll_L[max(a - 1, 0) : b - 1].mean().item() for a, b in pairwise(edges)}
        rows.append({"model": Path(model).name, "document": document.number, **means})
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("text", help="as of olmo-sparsity measure --text")
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--edges", type=int, nargs="+", default=[0, 256, 512, 1024, 2048])
    parser.add_argument("--num-documents", type=int, default=100)
    asked = parser.parse_args()
    tables = [losses_of(m, asked.text, asked.edges, asked.num_documents) for m in asked.models]
    pd.concat(tables).round(4).to_csv(asked.out, index=False)


if __name__ == "__main__":
    main()
