"""Claim: `score` costs at most 1.3 times plain forward passes over as many tokens. (That it gives
the losses of such passes is a test.)

    pip install longppl==0.3.0
    python -m study.benchmarks.score MODEL TEXT [--documents 3] [--contexts 512,2048] [--local 256]

One thread, CPU time, in one run. For each document in turn: `score`; a ladder as one would write it
with `transformers` (a forward pass of each context, and of the unrelated text); only these forward
passes, without losses; and `find_key_token` of longppl, which has no unrelated text, takes the
whole document as the long context and every token as a target. Ratios are medians over documents.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from longppl.longppl import find_key_token

from olmo_sparsity import load_model, score
from olmo_sparsity.analysis.models.load import LoadedModel
from study.benchmarks.evidence import read_texts


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    found = call()
    return time.process_time() - began, found


@torch.no_grad()
def losses(model: Any, ids: list[int], num_scored: int) -> torch.Tensor:
    row = torch.tensor([ids])
    logits = model(row).logits[0, -num_scored - 1 : -1].float()
    return torch.nn.functional.cross_entropy(logits, row[0, -num_scored:], reduction="none")


@torch.no_grad()
def only_forward(model: Any, rows: list[list[int]]) -> None:
    for row in rows:
        model.base_model(torch.tensor([row]))


def compare(
    loaded: LoadedModel, text: str, other: str, contexts: tuple[int, ...], local: int
) -> dict[str, float]:
    """CPU seconds of each way."""
    model, seconds = loaded.model.model, {}  # that of transformers

    options = {"contexts": contexts, "local": local, "prefix": "none"}
    # Each is the other's unrelated text; half of the time is one's.
    seconds["score"], _ = timed(lambda: list(score(loaded, [text, other], **options)))
    seconds["score"] /= 2
    ids, far = (loaded.encode([one])[0] for one in (text, other))
    rows = [ids[-local - c :] for c in (local, *contexts)]
    rows.append([*far[: contexts[-1] - local], *ids[-2 * local :]])
    seconds["ladder"], _ = timed(lambda: [losses(model, row, local) for row in rows])
    seconds["forward passes"], _ = timed(lambda: only_forward(model, rows))

    def tokenizer(given: str, **_: Any) -> dict[str, torch.Tensor]:
        places = torch.arange(len(ids))
        return {
            "input_ids": torch.tensor([ids]),
            "offset_mapping": torch.stack((places, places + 1), -1)[None],
        }

    seconds["longppl"], _ = timed(lambda: find_key_token(text, model, tokenizer, local, local))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument(
        "--contexts", type=lambda t: tuple(map(int, t.split(","))), default=(512, 2048)
    )
    parser.add_argument("--local", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(options.model)
    texts = [text[:16000] for text in read_texts([options.text]) if len(text) >= 16000]
    found = [
        compare(loaded, texts[2 * i], texts[2 * i + 1], options.contexts, options.local)
        for i in range(options.documents)
    ]
    for name in found[0]:
        ratios = [one[name] / one["forward passes"] for one in found]
        print(f"{name:16} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
