"""Train a small transformer on the planted strings, to compare it with the theory.

Place in the flow: planted.py → strings + position IDs → PositionedOLMo → rows next to the rows of
the idealised class. The theorems do not cover a transformer, which is not in the class of
Definition 3.3.

A string is followed by one query token, where the label is predicted. The query's ID is one above
the largest of the string. With PoSE the IDs of a training string are spread below the IDs of the
longest test string; tokens with equal coupled IDs keep equal ones.

Dimension key: B batch, L length (with the query), Y labels.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F

from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.data.positions import pose
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.runtime import Progress
from study.fit import fit
from study.theory.cases import build_planted
from study.theory.learning import training_lengths
from study.theory.planted import Planted
from study.theory.results import Row
from study.theory.settings import BridgeConfig, CaseConfig, TheoryConfig


def run_bridge(config: TheoryConfig) -> list[Row]:
    bridge = config.bridge
    runs = list(product(bridge.cases, bridge.schemes, bridge.seeds))
    rows: list[Row] = []
    total = len(runs) * bridge.num_steps
    with Progress("bridge", total=total, unit="steps") as progress:
        for index, (case, scheme, seed) in enumerate(runs):
            planted = build_planted(config, case)
            model = _train(config, planted, case, scheme, seed, progress, index * bridge.num_steps)
            rows += _measure(config, planted, case, scheme, seed, model)
    return rows


def build_transformer(bridge: BridgeConfig, planted: Planted, longest: int) -> PositionedOLMo:
    size = len(planted.background_V) + 1 + planted.num_labels
    return PositionedOLMo(
        ModelConfig(
            d_model=bridge.width,
            n_layers=bridge.num_layers,
            n_heads=bridge.num_heads,
            vocab_size=size,
            embedding_size=size,
            max_sequence_length=longest + 1,
            rotary_fraction=bridge.rotary_fraction,
            weight_tying=False,
        )
    )


def draw_batch(
    planted: Planted,
    length: int,
    num_strings: int,
    rng: np.random.Generator,
    spread_over: int | None = None,
    num_chunks: int = 2,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens_BL and positions_BL, with the query, and labels_B. `spread_over`: PoSE spreads the IDs
    below the IDs of a string of this length."""
    sample = planted.sample(length, num_strings, rng)
    query = len(planted.background_V)
    tokens_BL = np.pad(sample.tokens_BL, ((0, 0), (0, 1)), constant_values=query)
    num_ids = int(planted.ids(length)[-1]) + 1
    ids_BL = np.pad(sample.ids_BL, ((0, 0), (0, 1)), constant_values=num_ids)
    if spread_over is not None:
        target = int(planted.ids(spread_over)[-1]) + 2
        chunks = min(num_chunks, num_ids + 1)
        spread_BI = np.stack(
            [pose(rng, num_ids + 1, target, num_chunks=chunks) for _ in range(num_strings)]
        )
        ids_BL = np.take_along_axis(spread_BI, ids_BL, axis=1)
    return (
        torch.from_numpy(tokens_BL),
        torch.from_numpy(ids_BL.astype(np.int64)),
        torch.from_numpy(sample.labels_B),
    )


def label_logits(
    model: PositionedOLMo, tokens_BL: torch.Tensor, positions_BL: torch.Tensor, num_labels: int
) -> torch.Tensor:
    """logits_BY at the query; the labels are the last rows of the vocabulary."""
    return model.unembed(model.hidden(tokens_BL, positions_BL)[:, -1])[:, -num_labels:]


def _train(
    config: TheoryConfig,
    planted: Planted,
    case: CaseConfig,
    scheme: str,
    seed: int,
    progress: Progress,
    steps_before: int,
) -> PositionedOLMo:
    bridge, lengths = config.bridge, training_lengths(config.train_length)
    longest = config.train_length * max(config.test_multiples)
    rng = np.random.default_rng([seed, 0])
    torch.manual_seed(seed)
    model = build_transformer(bridge, planted, longest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=bridge.learning_rate, weight_decay=0.1)
    num_steps = bridge.num_steps
    warmup = max(1, num_steps // 20)
    title = f"{case.setting} k={case.num_places} {scheme} seed {seed}"

    def loss_of(length: int) -> torch.Tensor:
        tokens_BL, positions_BL, labels_B = draw_batch(
            planted,
            length,
            bridge.batch_size,
            rng,
            spread_over=longest if scheme == "pose" else None,
            num_chunks=bridge.num_chunks,
        )
        return F.cross_entropy(
            label_logits(model, tokens_BL, positions_BL, planted.num_labels), labels_B
        )

    fit(
        model,
        # Eq. (3), one length per step: needs no padding
        (int(rng.choice(lengths)) for _ in range(num_steps)),
        optimizer,
        loss_of=loss_of,
        rate=lambda step: bridge.learning_rate * min(step / warmup, 1 - (step - 1) / num_steps),
        max_grad_norm=1.0,
        report=lambda step, loss: progress.update(
            steps_before + step, case=title, loss=f"{loss:.3f}"
        ),
    )
    return model


@torch.no_grad()
def _measure(
    config: TheoryConfig,
    planted: Planted,
    case: CaseConfig,
    scheme: str,
    seed: int,
    model: PositionedOLMo,
) -> list[Row]:
    lengths = training_lengths(config.train_length)
    tested = sorted({*lengths, *(config.train_length * m for m in config.test_multiples)})
    count, wrong = config.bridge.num_strings, {}
    for length in tested:
        rng = np.random.default_rng([seed, length])
        tokens_BL, positions_BL, labels_B = draw_batch(planted, length, count, rng)
        parts = [
            label_logits(model, *part, planted.num_labels)
            for part in zip(tokens_BL.split(256), positions_BL.split(256), strict=True)
        ]
        probs_BY = torch.cat(parts).double().softmax(dim=-1)
        wrong[length] = 1 - probs_BY.gather(1, labels_B[:, None])[:, 0].numpy()
    deltas = [float(wrong[length].mean()) for length in lengths]
    rows = []
    for length in tested:
        risk = float(wrong[length].mean())
        half = 1.96 * float(wrong[length].std(ddof=1)) / math.sqrt(count)
        rows.append(
            Row(
                model=scheme,
                setting=case.setting,
                num_places=case.num_places,
                attention_places=0,
                train_length=config.train_length,
                objective="mixture",
                marker_rate=float(1 - planted.background_V[0]),
                seed=seed,
                length=length,
                risk=risk,
                low=max(0.0, risk - half),
                high=risk + half,
                method="sampled",
                delta_mean=float(np.mean(deltas)),
                delta_worst=max(deltas),
                refusal="a transformer is not in the class of Definition 3.3",
            )
        )
    return rows
