"""P1 of docs/thresholds.md: python docs/drop_at_checkpoints.py RUN OUT.csv

At every checkpoint of a run, by how much the loss on a passage of 32 tokens, from token 150 on of
each held-out file, falls when it is read a second time right after the first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from olmo_sparsity.analysis.inputs.texts import open_documents
from olmo_sparsity.analysis.kernels.losses import repetition_losses, token_losses
from olmo_sparsity.analysis.models.load import load_model

FIRST, LENGTH, BATCH = 150, 32, 64


def drop_of(checkpoint: Path) -> dict[str, float]:
    loaded = load_model(str(checkpoint))
    documents = open_documents(None, loaded)
    passages_BL = torch.from_numpy(
        np.stack(
            [d.tokens[FIRST : FIRST + LENGTH] for d in documents if len(d.tokens) >= FIRST + LENGTH]
        ).astype(np.int64)
    )
    with torch.no_grad():
        losses_B2 = torch.cat(
            [
                repetition_losses(lambda *inputs: token_losses(loaded.model, *inputs), some_BL)
                for some_BL in passages_BL.split(BATCH)
            ]
        )
    first, second = losses_B2.double().mean(0).tolist()
    return {"first": first, "second": second, "drop": first - second, "passages": len(passages_BL)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    checkpoints = sorted(options.run.glob("checkpoints/step*"))
    rows = [{"step": int(path.name[4:]), **drop_of(path)} for path in checkpoints]
    pd.DataFrame(rows).round(4).to_csv(options.out, index=False)
