"""Count how often a run reads its text, and reject one that reads it too often.

    epochs = count_epochs(config, shards)    # {"": 0.42}, or {"web": 0.3, "code": 4.7} of corpora
    describe_epochs(shards, epochs)          # {"text web": "9,000,000,000 tokens, read 0.3 …", …}
    check_epochs(config, epochs)             # ConfigError: … reads the corpus code 4.7 times, above
                                             # training.max_epochs=4

setup/inputs.py calls it at the start of a run, and dry_run.py for `train --dry-run`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.mixture import find_order
from olmo_sparsity.data.shards import TokenShards, open_shards
from olmo_sparsity.training.setup.corpus_weights import weights_of


def open_prepared(config: RunConfig) -> TokenShards | None:
    """Return the shards of the text, unverified; None if it is not prepared."""
    try:
        # Unverified, as hashing takes as long as reading all of it.
        return open_shards(config.data, "train", None)
    except DataError:
        return None


def count_epochs(config: RunConfig, shards: TokenShards) -> dict[str, float]:
    """Return how often a run reads each corpus, by its name; that of a single corpus is empty.
    Sequences that `data.transform` replaces count, too, as only a run knows how many it
    replaces."""
    order = find_order(
        shards,
        length=config.training.length,
        batch_size=config.training.batch_size,
        seed=config.seed,
        order=config.data.order,
        weights=weights_of(config),
    )
    return order.count_reads(config.training.num_steps)


def describe_epochs(shards: TokenShards, epochs: Mapping[str, float]) -> dict[str, str]:
    """Return a line for the text, or for each of several corpora, by its title."""
    lines = {}
    for name, times in epochs.items():
        num_tokens = (shards.corpora[name] if name else shards).num_tokens
        title = f"text {name}" if name else "text"
        lines[title] = f"{num_tokens:,} tokens, read {times:,.3g} times in the whole run"
    return lines


def check_epochs(config: RunConfig, epochs: Mapping[str, float]) -> None:
    """Raise ConfigError if a run reads a text more often than `training.max_epochs`."""
    training = config.training
    for name, times in epochs.items():
        if times > training.max_epochs:
            text = f"the corpus {name}" if name else "the text"
            # Enough for all corpora, so that the next start does not reject another one.
            needed_max_epochs = math.ceil(max(epochs.values()))
            raise ConfigError(
                f"training.num_steps={training.num_steps} reads {text} {times:,.3g} times, above "
                f"training.max_epochs={training.max_epochs:g}; prepare more, lower it, or pass "
                f"--training.max_epochs={needed_max_epochs}"
            )
