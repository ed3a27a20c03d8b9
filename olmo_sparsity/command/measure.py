"""Run the command `measure`: which distant tokens the losses on many documents depend on.

    measure RUN --out=FOLDER               this process's documents; the last process prints results
    measure RUN --out=FOLDER --dry-run     the cost, before anything is measured
    measure RUN --out=FOLDER --partial     results of the documents that are finished so far
    measure CONFIG.yaml … --dry-run        the cost for a model that is not trained yet

cli.py calls `run_measure`, and the package `analysis` does the work.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.command.memory import keep_freed_memory
from olmo_sparsity.command.share import parse_shard
from olmo_sparsity.config.command_line import given_options

if TYPE_CHECKING:
    from olmo_sparsity.analysis.results.results import Results


def run_measure(options: argparse.Namespace) -> int:
    """Measure this process's part of the documents, or print the cost; return the exit code."""
    from olmo_sparsity.analysis.measurement import estimate, measurement, summing_up
    from olmo_sparsity.analysis.measurement.at import parse_at
    from olmo_sparsity.analysis.measurement.planning import make_plan
    from olmo_sparsity.analysis.measurement.request import MeasureRequest
    from olmo_sparsity.analysis.results.summary import describe
    from olmo_sparsity.base.provenance import typed_command

    keep_freed_memory()
    out = Path(options.out)
    keywords = given_options(options, MeasureRequest.accepted_keywords())
    # Before other keywords are added: only the names of options that the user has typed.
    keywords["typed"] = tuple(keywords)
    keywords["shard"] = parse_shard(options.shard, by_launch=False)
    keywords["command"] = tuple(typed_command())
    keywords["at"] = options.at and [parse_at(words) for words in options.at]
    if options.speed is not None and not options.dry_run:
        raise ConfigError(f"--speed={options.speed} is of --dry-run: add it")

    if options.model.endswith(".yaml"):
        # A config: there is no model yet, so that only its price can be asked for.
        print(_price_of_untrained(options, keywords))
        return 0
    request = MeasureRequest.of(documents=options.text, **keywords)
    if options.dry_run:
        print(estimate.estimate(make_plan(request), request.shard, options.speed))
        return 0
    results: Results | None
    if options.partial:
        results = summing_up.sum_up_partial(make_plan(request), out, request.command)
        out /= "partial"
    else:
        results = measurement.measure(request)
    if results is not None:  # None: other processes have documents left
        print(describe(results))
        print(f"tables: {out}/*.parquet; to read: olmo-sparsity report {out} --out {out}.html")
    return 0


def _price_of_untrained(options: argparse.Namespace, keywords: dict[str, Any]) -> str:
    """Return what it will cost to measure the model of a config, before it is trained.

    Args:
        options: The options of the command; its MODEL is the config.
        keywords: The keyword arguments of `measure`.
    """
    from olmo_sparsity.config.run import load_config
    from olmo_sparsity.experiment.price_measurement import price_config

    if not options.dry_run:
        raise ConfigError(
            f"MODEL={options.model} is a config: train it and pass its run folder, or add "
            "--dry-run for the cost"
        )
    for name in ("targets", "choices", "losses", "at", "quick", "partial", "shard"):
        if getattr(options, name):
            raise ConfigError(
                f"--{name} requires a trained model, and MODEL={options.model} is a config: omit it"
            )
    # These say where results go and how they were made, which costs nothing.
    free = ("model", "command", "typed", "out", "shard", "at")
    priced = {name: value for name, value in keywords.items() if name not in free}
    return str(price_config(load_config(options.model), priced, options.text, options.speed))
