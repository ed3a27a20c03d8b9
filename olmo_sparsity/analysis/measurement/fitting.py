"""Fit the settings of a measurement to its model and its text, and check that they fit.

A user passes few options. The others follow from the length of the window, from the number of
positions that the model takes, and from the number of blocks in the text:

    fit_to_limit         short=64 in place of 128 for a model with 256 positions
    with_quick_blocks    blocks=4 and stride=16 for `--quick`
    fraction_of_blocks   0.02 for blocks=4, if a document has 200 blocks on average

What a user has set stays. make_plan (planning.py) calls these functions, and the checks below them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from olmo_sparsity.analysis.options import QUICK_BLOCKS, Settings
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.windows import default_local
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.documents import Documents

OPTIONS_WITH_DEFAULTS_OF_LENGTH = ("max_targets", "halves", "draws", "stride")
"""Options whose defaults depend on `long`."""


def say_defaults_of_length(settings: Settings) -> None:
    """Print which defaults differ from those of long="all" because the window has a fixed
    length."""
    if settings.long == "all" or settings.interpretation.replaces:
        return
    settings_of_all = Settings()
    differences = []
    for name in OPTIONS_WITH_DEFAULTS_OF_LENGTH:
        value = getattr(settings, name)
        value_of_all = getattr(settings_of_all, name)
        if name not in settings.changed_options and value != value_of_all:
            differences.append(f"{name}={value} ({value_of_all})")
    if differences:
        say(f"long={settings.long} has other defaults than long=all: {'; '.join(differences)}")


def fit_to_limit(settings: Settings, limit: int | None) -> Settings:
    """Return settings that suit a model with few positions: with long="all" the default local
    window is at most a quarter of them.

    Args:
        limit: The number of positions that the model takes; None if it has no limit.
    """
    has_default_windows = settings.windows.has_all and "short" not in settings.changed_options
    if not has_default_windows or limit is None or limit >= 4 * settings.short:
        return settings
    # Half of the local window, as by default.
    stride = settings.stride if "stride" in settings.changed_options else max(1, limit // 8)
    return replace(settings, short=default_local(settings.short, limit), stride=stride)


def with_quick_blocks(settings: Settings, limit: int | None, num_prefix: int) -> Settings:
    """Return settings with the few blocks of a first look, unless the user has set which blocks to
    measure.

    Args:
        settings: The settings so far.
        limit: The number of positions that the model takes; None if it has no limit.
        num_prefix: Tokens of the prefix, which take positions, too.
    """
    if "sample" in settings.changed_options:
        return settings
    quick = replace(settings, **QUICK_BLOCKS | settings.changed_options)
    if limit is None or quick.windows.has_all or "stride" in settings.changed_options:
        return quick
    # The last target of a block sees stride − 1 tokens more than the first.
    room = limit - num_prefix - quick.windows.tokens_before(0)
    return replace(quick, stride=max(1, min(quick.stride, room + 1)))


def fraction_of_blocks(documents: Documents, settings: Settings) -> float:
    """Return the fraction of all blocks to measure. The setting `sample` is this fraction; `blocks`
    says how many blocks of each document to measure, on average.

    Dimension key: M documents.
    """
    if settings.blocks is None:
        return settings.sample
    windows = settings.windows
    num_targets_M = np.array([len(doc.tokens) - windows.first_target for doc in documents])
    # Documents that are too short for a target are not measured, and have no blocks.
    num_targets_M = num_targets_M[num_targets_M > 0]
    num_blocks_M = np.ceil(num_targets_M / windows.stride)
    num_wanted = settings.blocks * len(num_blocks_M)
    return min(1.0, num_wanted / max(num_blocks_M.sum(), 1))


def check_room_after_prefix(num_prefix: int, short: int, model: LoadedModel) -> None:
    """Raise ConfigError if no distant token fits between the prefix and the local window."""
    limit = model.max_positions
    if limit is not None and num_prefix + short >= limit:
        raise ConfigError(
            f"prefix ({num_prefix:,} tokens) and local window (short={short}) need more than the "
            f"{limit:,} positions of '{model.name}'; pass a shorter prefix, or lower short"
        )


def check_same_prefix(
    other_prefix_ids: tuple[int, ...], prefix_ids: tuple[int, ...], model: LoadedModel
) -> None:
    """Raise DataError if choices were ranked after another prefix. A model without a tokenizer has
    no prefix of its own, and takes that of the choices."""
    if model.tokenizer is not None and prefix_ids != other_prefix_ids:
        raise DataError(
            f"choices were measured with the prefix {list(other_prefix_ids)} (token IDs), and "
            f"'{model.name}' has {list(prefix_ids)}; pass the same prefix to both"
        )
