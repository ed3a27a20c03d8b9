"""Measure net excess at the evaluations of a training run, to show when sparsity appears.

Place in the flow: weights → net excess, for the training log. Called by the command `train`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import pandas as pd
import torch

from olmo_sparsity.analysis.inputs.documents import Document, Documents
from olmo_sparsity.analysis.inputs.windows import Windows
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.recovery import DOCUMENT
from olmo_sparsity.analysis.models.load import LoadedModel, using
from olmo_sparsity.analysis.results.statistics import summarize
from olmo_sparsity.analysis.results.tables import Columns, joined
from olmo_sparsity.analysis.settings import Settings
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.errors import DataError
from olmo_sparsity.model.build import build_model
from olmo_sparsity.model.checkpoint_files import fill
from olmo_sparsity.training.distributed import Processes

COLUMNS = ["net", "net_low", "net_high", "excess", "gap", "num_targets"]

TARGETS_OF_DOCUMENT = 2

PLACES_OF_DOCUMENT = 256
"""Targets per document that get losses, from which the evaluated ones are chosen."""


class SparsityProbe:
    """Processes share the documents, each with a copy of the model."""

    def __init__(
        self, config: RunConfig, heldout: TokenShards, device: torch.device, processes: Processes
    ) -> None:
        self.config, self.heldout, self.device = config, heldout, device
        self.processes = processes
        self.settings = probe_settings(config)
        self.documents = probe_documents(config, heldout, self.settings.windows)

    def __call__(self, weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, float]]:
        """units → {"net", "net_low", "net_high", "excess", "gap", "num_targets"} of the best single
        far token and of the best run of four. Empty while no target has a large enough gap."""
        with self.processes.agree():
            model = build_model(self.config.model)
            fill(model, weights, "the weights of the engine")
            name, tokenizer = self.config.run_folder, self.heldout.tokenizer
            loaded = LoadedModel(model.to(self.device).eval(), tokenizer, name, 0, None, None)
        with using(loaded):
            with self.processes.agree():
                plan = Plan.of(loaded, self.documents, self.settings)
            return self._measure(plan)

    def _measure(self, plan: Plan) -> dict[str, dict[str, float]]:
        losses = self._shared(plan.measured, lambda number: plan.losses(number)["losses"])
        targets = plan.targets(losses)
        if DOCUMENT not in set(targets.far_part):  # none, or of the placebo alone
            return {}
        numbers = sorted(set(targets.document))
        recovery = self._shared(numbers, lambda n: plan.recovery(n, targets)["recovery"])
        summary = summarize(losses, targets, recovery)
        rows = summary[summary.target_set == "gap"].set_index("units")[COLUMNS].astype(float)
        return {str(units): row.to_dict() for units, row in rows.iterrows()}

    def _shared(self, numbers: Sequence[int], measure: Callable[[int], Columns]) -> pd.DataFrame:
        """The tables of all documents, on each process."""
        own, count = self.processes.rank, self.processes.world_size
        with self.processes.agree():
            found = {number: measure(number) for number in numbers[own::count]}
        parts = self.processes.gather(found)
        return joined(dict(sorted((n, table) for part in parts for n, table in part.items())))


def probe_settings(config: RunConfig) -> Settings:
    """Windows that end within the training length."""
    length = config.training.length
    return Settings(
        long=length * 3 // 4,
        short=length // 4,
        stride=max(1, length // 8),
        units=("tokens", "span:4"),
        selectors=("add_one_screened",),
        ks=(1,),
        sets=("gap",),
        max_targets=TARGETS_OF_DOCUMENT,
        draws=1,
        halves=0,
    )


def _by_turns(heldout: TokenShards) -> Iterator[tuple[TokenShards, int]]:
    """The documents of each corpus in turn."""
    corpora = [part.shards for part in heldout.parts]
    for number in range(max(map(len, corpora))):
        yield from ((corpus, number) for corpus in corpora if number < len(corpus))


def probe_documents(config: RunConfig, heldout: TokenShards, windows: Windows) -> Documents:
    """The beginnings of the first held-out documents that are long enough: half of them only fix
    the threshold."""
    size = windows.first_target + PLACES_OF_DOCUMENT
    tokens = (part.document(number) for part, number in _by_turns(heldout))
    long_enough = (text[:size] for text in tokens if len(text) > windows.first_target)
    wanted = 2 * config.evaluation.sparsity_targets // TARGETS_OF_DOCUMENT
    items = [
        Document(text, number, tokenizer=heldout.tokenizer)
        for number, text in enumerate(islice(long_enough, wanted))
    ]
    if len(items) < 4:
        found = f"four held-out documents above {windows.first_target} tokens, not {len(items)}"
        raise DataError(f"evaluation.sparsity_targets needs {found}; prepare more text, or set 0")
    return Documents("held-out documents", items)
