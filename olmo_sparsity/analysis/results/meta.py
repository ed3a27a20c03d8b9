"""Declare the content of meta.json, which says what was measured, and the names of target sets.

    {"model": {"name": "runs/pose", "num_parameters": 962560, …},
     "windows": {"long": "all", "short": 128, "stride": 64, …},
     "units": ["tokens"], "selectors": ["add_one_screened", "random"], "ks": [1, 2, 4], …}

summing_up.py of measurement writes meta.json; statistics, figures and `Results` read it. Never
imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypedDict

SETS = {
    "gap": "large gap",
    "bigram": "the token and the one before it recur",
    "every": "drawn from all tokens",
    "named": "named",
}
"""Names of the target sets, in display order."""


def main_set(target_sets: Iterable[str]) -> str | None:
    """Return the target set that a measurement reports first; None if there is no target set."""
    names = set(target_sets)
    order = ("gap", "named", "bigram", "every", *sorted(names))
    return next((name for name in order if name in names), None)


class InductionCheck(TypedDict):
    """The result of the induction check: does the model copy text that it has just read?"""

    loss_first: float
    """The mean loss on passages, in nats a token."""

    loss_repeated: float
    """The mean loss on the same passages when they are repeated directly after themselves."""

    drop: float
    """`loss_first` minus `loss_repeated`."""

    has_induction: bool
    """The verdict: whether the loss drops by `INDUCTION_SHARE` or more."""

    num_passages: int
    passage_length: int
    """In tokens."""


class SinkCheck(TypedDict):
    """The result of the sink check: does the model need a first token that every window shares?"""

    harm: float
    """By how many nats a distant token drawn at random raises the mean loss of the targets."""

    harm_with_prefix: float
    """The same with a prefix before every window."""

    needs_prefix: bool
    """The verdict: whether the prefix lowers the harm by more than `HARM_NATS` (sink.py)."""


@dataclass
class Meta:
    """meta.json: what was measured, and with which settings."""

    model: dict = field(default_factory=dict)
    """name, fingerprint, num_parameters, batch_noise; `trained`, how it was trained, if known."""

    data: dict = field(default_factory=dict)
    """source and fingerprint of the text, its groups, and the parts of split documents."""

    dtype: str = ""
    windows: dict = field(default_factory=dict)
    """long, short, stride, prefix, distant_states, …"""

    units: list = field(default_factory=list)
    selectors: list = field(default_factory=list)
    ks: list = field(default_factory=list)
    controls: dict = field(default_factory=dict)
    """control, the kind of unrelated text, and draws, how many there are of each target."""

    seed: int = 0
    targets: dict = field(default_factory=dict)
    """How targets were chosen: share, min_gap, threshold; or by which other measurement."""

    induction: dict = field(default_factory=dict)
    """An `InductionCheck`."""

    sink: dict = field(default_factory=dict)
    """A `SinkCheck`; empty if a prefix precedes the windows."""

    reliability: list = field(default_factory=list)
    """How well halves of the unrelated texts that replace distant text agree, by target set and
    units."""

    intervals: str = ""
    """How the intervals of the stored summary were computed: `reported.STUDENT`, or empty. Empty
    means an earlier version, which stored bootstrap intervals without Student's t, also for a
    handful of targets."""

    longppl: dict = field(default_factory=dict)
    """Perplexity of all tokens and of key tokens (`loss_statistics.LongPPL`)."""

    counts: dict = field(default_factory=dict)
    """Numbers of documents: measured, left, too short, trained on."""

    commit: str | None = None
    versions: dict = field(default_factory=dict)
    machine: str = ""
    command: list = field(default_factory=list)
    seconds_of_last_start: float = 0.0
    token_forwards_of_last_start: int = 0
    identity: dict = field(default_factory=dict)
    """What processes had to share to measure into one folder (identity.json)."""
