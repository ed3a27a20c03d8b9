"""Search for the hypothesis with the fastest growing risk from lengths L/2 … L to L̄.

Place in the flow: planted.py + risks.transfer_risk_of → rows next to the learned hypotheses. The
search is gradient ascent through the exact risk. Its result is a lower bound on the worst case; the
paper's (L̄/L)² is an upper bound.

Dimension key: P relative-place rows, C token codes, Y labels.
"""

from __future__ import annotations

import numpy as np
import torch

from olmo_sparsity.runtime import Progress
from study.theory.bounds import both_bounds
from study.theory.learning import training_lengths
from study.theory.planted import (
    Planted,
    marker_background,
    parity_tokens,
    regularity,
    shapes_within,
    translated_shapes,
)
from study.theory.results import Row
from study.theory.risks import transfer_risk_of
from study.theory.settings import WorstCaseConfig
from study.theory.sparse_attention import KeyShape, SparseAttention

# Training risks are clamped to this. The exact risk is off by up to 2e-6, a tenth of a risk of
# 1e-5, and a search with a lower floor finds that error: at 1e-6 it reports a growth of 18.6 at
# 8L; a finer integral gives 13.9.
_FLOOR = 1e-4
# Log keys stay within this of 0, so that the integral behind the exact risk stays short.
_LARGEST_LOG_KEY = 12.0


def search_worst_cases(
    config: WorstCaseConfig, test_multiples: list[int], constant: float
) -> list[Row]:
    k, span, longest = 2, config.train_length // 4, config.train_length
    law = translated_shapes(shapes_within(k, span))
    planted = Planted(law, *parity_tokens(k), marker_background(config.marker_rate))
    shape = KeyShape(k, span)
    lengths = [longest * multiple for multiple in test_multiples if multiple > 1]
    rows = []
    total = len(lengths) * len(config.seeds) * config.num_steps
    with Progress("worst case", total=total, unit="steps") as progress:
        for test in lengths:
            for seed in config.seeds:
                trained, tested = _search(planted, shape, longest, test, seed, config, progress)
                deltas = float(np.mean(trained)), max(trained)
                rows.append(
                    Row(
                        model="worst_case",
                        setting="local",
                        num_places=k,
                        attention_places=k,
                        train_length=longest,
                        objective="worst_growth",
                        marker_rate=config.marker_rate,
                        seed=seed,
                        length=test,
                        risk=tested,
                        low=tested,
                        high=tested,
                        method="transfer",
                        **both_bounds(
                            longest,
                            test,
                            span,
                            deltas,
                            lambda length: regularity(law, length, span),
                            uniform_placement=True,
                            constant=constant,
                        ),
                    )
                )
    return rows


def _search(
    planted: Planted,
    shape: KeyShape,
    longest: int,
    test: int,
    seed: int,
    config: WorstCaseConfig,
    progress: Progress,
) -> tuple[list[float], float]:
    """The training risks and the test risk of the hypothesis with the largest ratio so far."""
    model = _start(planted, shape, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    best, risks = 0.0, ([1.0], 1.0)
    steps_before = progress.done
    for step in range(config.num_steps):
        key_PC = model.log_key_RPC[0].clamp(-_LARGEST_LOG_KEY, _LARGEST_LOG_KEY)
        *trained, tested = (
            transfer_risk_of(key_PC, model.values()[0], model, planted, length)
            for length in (*training_lengths(longest), test)
        )
        trained_G = torch.stack(trained)
        growth = tested / trained_G.max().clamp(min=_FLOOR)
        if float(growth.detach()) > best:
            best, risks = float(growth.detach()), (trained_G.tolist(), float(tested.detach()))
        optimizer.zero_grad()
        (-growth.log()).backward()
        optimizer.step()
        progress.update(steps_before + step + 1, length=str(test), growth=f"{best:.1f}")
    return risks


def _start(planted: Planted, shape: KeyShape, seed: int) -> SparseAttention:
    """Random tables, except that the planted tuples are learned already, as after training."""
    generator = torch.Generator().manual_seed(seed)
    model = SparseAttention(shape, len(planted.background_V), planted.num_labels, 1)
    weights_J = len(planted.background_V) ** np.arange(shape.num_places)[::-1]
    with torch.no_grad():
        model.log_key_RPC.normal_(0, 2, generator=generator)
        model.value_logits_RCY.normal_(0, 2, generator=generator)
        for tokens_J, label in zip(planted.tokens_ZJ, planted.labels_Z, strict=True):
            code = int(tokens_J @ weights_J)
            model.log_key_RPC[0, :, code] = 6.0
            model.value_logits_RCY[0, code] = -4.0
            model.value_logits_RCY[0, code, label] = 4.0
    return model
