"""Run the command `losses`: print mean losses by place, of a run or of models on one text.

    losses RUN               the losses that the run has logged; no model is read
    losses RUN --text=…      all of its checkpoints are evaluated on a text
    losses MODEL MODEL …     several models are evaluated on one text

cli.py calls `run_losses`. What a run has logged is read by the package `training`, and models are
evaluated by `analysis`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from olmo_sparsity.command.arguments import measured_losses
from olmo_sparsity.config.command_line import given_options


def run_losses(options: argparse.Namespace) -> int:
    """Print the losses that a run has logged, or those of models; return the exit code."""
    keywords = given_options(options, measured_losses())
    if len(options.models) == 1 and not keywords:
        from olmo_sparsity.training.metrics.loss_table import describe_losses

        print(describe_losses(options.models[0]))
        return 0
    from olmo_sparsity.analysis.report.losses_page import write_losses
    from olmo_sparsity.analysis.scoring.losses_by_place import LossesRequest, read_losses

    table = read_losses(LossesRequest.of(models=tuple(options.models), **keywords))
    print(table.describe())
    if "out" in keywords:
        write_losses(table, Path(options.out) / "losses.html")
        print(f"{options.out}/losses.html")
    return 0
