"""Check that two runs of a questions file measured the same model with the same settings.

Place in the flow: two folders of results → **`compare_identities`**, by identity.json, and
**`compare_servers`**, by the probe → notes for gate.py, or an error. Verdicts of two models cannot
be compared: another model knows other facts by heart. For example, two identities that differ:

    earlier   {"model": "smollm2", "settings": {"draws": 4, "units": "sources"}, …}
    now       {"model": "smollm2", "settings": {"draws": 8, "units": "paragraphs"}, …}
    error     settings.units differs; `draws` may differ
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olmo_sparsity.base.differences import differences, leaves
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.sources.gate.answers import identity_in
from olmo_sparsity.sources.servers.probe import OTHER_NATS, distance, read_probe

MAY_DIFFER = re.compile(
    r"questions|num_questions|decoys|random_streams|settings\.(draws|seed)|versions(\..*)?"
)
"""Keys of the identity of results that may differ from a baseline's. Questions are what a gate
compares. Decoys, their number and their seed change verdicts by chance only, for which the
comparison has a tolerance."""


def compare_identities(
    identity: Mapping[str, Any], baseline: str | Path, allow_other_model: bool
) -> list[str]:
    """Return a note of how model, tokenizer, template or settings differ from those of the
    baseline, or nothing. Raise ConfigError if they differ, unless that is allowed.

    Args:
        identity: What identity.json of this run says.
        baseline: The folder of the earlier run.
        allow_other_model: Whether they may differ.
    """
    earlier_keys = _compared_keys(identity_in(baseline))
    keys = _compared_keys(identity)
    return _note_differences(differences(earlier_keys, keys), baseline, allow_other_model)


def _compared_keys(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that must be equal, with dots between the keys of nested mappings."""
    return {key: value for key, value in leaves(identity) if not MAY_DIFFER.fullmatch(key)}


def compare_servers(out: Path, baseline: Path, allow_other_model: bool) -> list[str]:
    """Return a note of by how much log-probabilities of the servers of both runs differ, or
    nothing. Raise ConfigError if they differ, unless that is allowed.

    A server may serve another model under the same name, so each run stores the log-probabilities
    of a fixed text (probe.py). Only runs behind a server have them.
    """
    log_p = read_probe(out)
    earlier_log_p = read_probe(baseline)
    # A model that computes in the process is known by the hash of its weights instead.
    if log_p is None or earlier_log_p is None:
        return []
    nats = distance(log_p, earlier_log_p)
    if nats <= OTHER_NATS:
        return []
    difference = f"the server's log-probabilities differ by {nats:.2f} nats a token"
    return _note_differences([difference], baseline, allow_other_model)


def _note_differences(
    model_differences: list[str], baseline: str | Path, allow_other_model: bool
) -> list[str]:
    """Return differences as a note; nothing if there are none. Raise ConfigError unless they are
    allowed."""
    if not model_differences:
        return []
    # The same words are a note if they are allowed, and the error if not.
    note = f"baseline={baseline} is of another model: {', '.join(model_differences)}"
    if not allow_other_model:
        raise ConfigError(f"{note}; measure it again, or pass --allow-other-model")
    return [note]
