"""Track a training run on its held-out text: what each evaluation gains from long contexts.

Place in the flow: weights → numbers of the metrics. Called by the training loop
(`evaluation.track`)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import pandas as pd
import torch
from torch import Tensor

from olmo_sparsity.analysis.inputs.documents import Document, Documents
from olmo_sparsity.analysis.models.use import in_use
from olmo_sparsity.analysis.results.tracked import Tracked
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.settings import TrackSettings
from olmo_sparsity.analysis.tracking.fixed_text import FixedText
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.model.build import build_model
from olmo_sparsity.model.checkpoint_files import fill
from olmo_sparsity.training.distributed import Processes


class Tracking:
    """Processes share the documents, each with a copy of the model."""

    def __init__(
        self, config: RunConfig, heldout: TokenShards, device: torch.device, processes: Processes
    ) -> None:
        self.config, self.device, self.processes = config.model, device, processes
        long = config.evaluation.length or config.largest_length
        local = max(1, min(128, long // 8))
        settings = TrackSettings(long=long, local=local, documents=config.evaluation.track)
        texts = (heldout.document(n) for n in range(len(heldout)))
        enough = islice((text for text in texts if len(text) >= long), settings.documents)
        items = [Document(t, n, tokenizer=heldout.tokenizer) for n, t in enumerate(enough)]
        self.text = FixedText.of(Documents("held-out documents", items), settings)

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """Number → its value, and the ends of its 95% interval."""
        own, count = self.processes.rank, self.processes.world_size
        with self.processes.agree():
            model = build_model(self.config)
            fill(model, weights, "the weights of the engine")
            model = model.to(self.device).eval()
            with in_use(model):
                rows = self.text.measure(Scorer(model), self.text.numbers[own::count])
        every = pd.concat(self.processes.gather(rows), ignore_index=True)
        numbers = Tracked(every.assign(run="", step=0)).numbers.dropna(subset=["value"])
        ends = numbers[["value", "low", "high"]].to_numpy().tolist()
        return dict(zip(numbers.number, ends, strict=True))
