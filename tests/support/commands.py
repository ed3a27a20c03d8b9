"""Check a command line of a page or of a Makefile without running it."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from olmo_sparsity.analysis.selectors.influence import SELECTORS
from olmo_sparsity.base.renamed import current_words
from olmo_sparsity.command.cli import build_parser
from olmo_sparsity.config.run import load_config
from olmo_sparsity.experiment.file import Experiment, read_experiment

ROOT = Path(__file__).parents[2]
parser = cache(build_parser)


@cache
def experiment_of(config: str, *overrides: str) -> Experiment:
    return read_experiment(os.path.relpath(ROOT / config), overrides)


def check_command(words: list[str]) -> None:
    options, rest = parser().parse_known_args(current_words(words))
    assert all(word.startswith("--") and "=" in word for word in rest)
    if options.command == "experiment":
        assert experiment_of(options.config, *rest).models
    elif hasattr(options, "config"):
        load_config(ROOT / options.config, rest)
    elif options.command == "measure":
        shipped = {name for name in getattr(options, "selectors", ()) if ".py:" not in name}
        assert shipped <= set(SELECTORS)
