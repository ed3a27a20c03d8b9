"""Evaluate after a step, and write the line of metrics.jsonl: steps.py calls `evaluate_step`.

evaluation/evaluate.py measures held-out losses, evaluation/lm_eval_tasks.py the tasks of lm_eval.
"""

from __future__ import annotations

from typing import Any

from olmo_sparsity.base.progress import Progress
from olmo_sparsity.training.checkpoints.writer import CheckpointWriter
from olmo_sparsity.training.metrics.loss_rows import LossRow, format_losses
from olmo_sparsity.training.metrics.metrics import Metrics
from olmo_sparsity.training.prepared_run import PreparedRun


def evaluate_step(
    run: PreparedRun, step: int, metrics: Metrics, writer: CheckpointWriter, progress: Progress
) -> None:
    """Measure held-out losses, and everything else that `evaluation` configures, and log them.
    Every process must call it."""
    engine = run.engine
    evaluation = run.evaluation
    run.watchdog.expect(f"the evaluation of step {step}")
    other_results: dict[str, Any] = {}

    losses_by_corpus: dict[str, list[LossRow]] = {}
    if evaluation.corpora:
        losses_by_corpus = evaluation.losses_by_corpus(engine)
        other_results["by_corpus"] = losses_by_corpus
        losses = evaluation.mean_losses(losses_by_corpus)
    else:
        losses = evaluation.losses(engine)
    drop = evaluation.induction_drop(engine)
    if evaluation.settings.documents:
        other_results["by_place"] = evaluation.losses_by_place(engine)
    if run.measures:
        # A save under way has a copy of the weights, too. Main memory may have room for one.
        writer.wait()
        weights = engine.copy_weights(whole=True)
        for name, measure in run.measures.items():
            other_results[name] = measure(step, weights)

    with engine.processes.raising_together():
        metrics.write_heldout(step, losses, drop, other_results)
    if step < run.config.training.num_steps:  # `finish` of loop.py prints those of the last step
        progress.note(
            f"step {step}: held-out loss {format_losses(losses)}; induction drop {drop:.2f}"
        )
        for name, rows in losses_by_corpus.items():
            progress.note(f"step {step}: held-out loss of {name} {format_losses(rows)}")
