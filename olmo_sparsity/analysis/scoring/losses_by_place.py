"""Compute the loss by place of one or several checkpoints, all on the same documents.

This answers whether distant text helps at all: later places have more text before them, so a model
that uses it has lower losses there.

    losses_by_place(["runs/pose", "runs/rope"], text="heldout.jsonl", length=1024)
        → all checkpoints of both runs                          (checkpoints.py)
        → 64 documents of 1,024 tokens                          (shared_text.py)
        → a loss for each of their tokens                       (logprobs.py)
        → sums of the losses of a document in the places 0 to 127, 128 to 255, 256 to 511 and 512 to
          1023
        → LossesByPlace: means, intervals, paired differences   (results/losses_by_place.py)

`losses_by_place` is the function that users call from Python; `read_losses` answers the request of
the command `losses`. stored_losses.py keeps the losses of finished checkpoints.

Dimension key: B rows of a batch (documents), L tokens of a row (those that have a loss).
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.reading import load
from olmo_sparsity.analysis.options import LossSettings, ModelOptions
from olmo_sparsity.analysis.request import Request
from olmo_sparsity.analysis.results.losses_by_place import COLUMNS, LossesByPlace
from olmo_sparsity.analysis.scoring.checkpoints import CheckpointToRead, list_checkpoints
from olmo_sparsity.analysis.scoring.logprobs import logprobs_of
from olmo_sparsity.analysis.scoring.shared_text import SharedText, open_shared_text
from olmo_sparsity.analysis.scoring.stored_losses import StoredLosses
from olmo_sparsity.analysis.scoring.tensors import check_finite
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.files import writing
from olmo_sparsity.base.path_options import path_of
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.models.loaded import LoadedModel, using
from olmo_sparsity.models.losses import place_edges

DOCUMENTS_PER_CALL = 8
"""The number of documents that are scored in one call."""


# --- the request ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LossesRequest(Request):
    """A call of `losses_by_place`, checked."""

    models: tuple[Any, ...]
    """Runs, of which all checkpoints are read, checkpoints, other models, or a model in memory."""

    tokenizer: Any = None
    """The tokenizer of a model in memory."""

    text: Any = None
    """Held-out text in any form that `open_documents` reads. With None it is that of the first
    run."""

    field: str = "text"
    out: str | Path | None = None
    """The folder for the losses of finished checkpoints, with which the same call resumes. They are
    not stored if it is None."""

    settings: LossSettings = dataclasses.field(default_factory=LossSettings)
    loading: ModelOptions = dataclasses.field(default_factory=ModelOptions)

    def checked(self) -> Self:
        """Return the request. Raise ConfigError if options are wrong or exclude each other."""
        self.settings.check()
        if not self.models:
            raise ConfigError("model=[] names no model; pass one, or a list of runs and models")
        if self.out is not None:
            path_of("out", self.out)
        has_model_in_memory = any(not isinstance(model, str | Path) for model in self.models)
        # It has no name that tells it from another, and no files that tell whether it has changed.
        if has_model_in_memory and (self.out is not None or len(self.models) > 1):
            raise ConfigError("a model in memory is read alone, without out; save it to compare it")
        names = [str(model) for model in self.models]
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ConfigError(f"Duplicate model: {repeated[0]}; pass each once")
        return self


def losses_by_place(
    model: Any, tokenizer: Any = None, *, text: Any = None, **settings: Any
) -> LossesByPlace:
    """Return the mean loss by place of one or several models on the same documents.

    The result's `table` has the losses, and `compare` returns paired differences.

    Args:
        model: A model in memory; or a run, of which all checkpoints are read, a checkpoint, or
            another name that `load_model` takes; or a list of such names.
        tokenizer: The tokenizer of a model in memory.
        text: Held-out text in any form that `open_documents` reads. Default: that of the first run.
        settings: `length` and `documents` of `LossSettings`, and options of `load_model`.
    """
    models = tuple(model) if isinstance(model, list | tuple) else (model,)
    request = LossesRequest.of(models=models, tokenizer=tokenizer, text=text, **settings)
    return read_losses(request)


# --- all checkpoints ------------------------------------------------------------------------------


def read_losses(request: LossesRequest) -> LossesByPlace:
    """Return the losses of all checkpoints. With `out`, finished checkpoints are stored in that
    folder, and the same call does not compute them again."""
    checkpoints: list[CheckpointToRead] = []
    for model in request.models:
        checkpoints += list_checkpoints(model)
    # The first model is loaded even if its losses are stored: its tokenizer encodes the text.
    first_model = _load(checkpoints[0], request)
    text = open_shared_text(
        request.text, first_model, request.settings, request.field, request.loading.prefix
    )
    store = None if request.out is None else _open_store(request, request.out, text, first_model)

    num_checkpoints = len(checkpoints)
    if num_checkpoints > 1:
        num_tokens = num_checkpoints * len(text.documents) * request.settings.length
        say(f"{num_checkpoints} checkpoints, {num_tokens:,} token-forwards in all")
    tables = []
    with Progress("reading losses", num_checkpoints, "checkpoints") as progress:
        for index, checkpoint in enumerate(checkpoints):
            rows = None if store is None else store.read(checkpoint)
            if rows is None:
                model = first_model if index == 0 else _load(checkpoint, request)
                rows = _measure(checkpoint, model, text, request)
                if store is not None:
                    store.write(checkpoint, rows)
            tables.append(rows)
            progress.update(index + 1)

    losses = LossesByPlace(pd.concat(tables, ignore_index=True), text.documents.name)
    if request.out is not None:
        with writing(Path(request.out) / "losses.parquet") as partial:
            losses.rows.to_parquet(partial)
    return losses


def _open_store(
    request: LossesRequest, out: str | Path, text: SharedText, first_model: LoadedModel
) -> StoredLosses:
    """Open the folder for the losses of finished checkpoints. Raise ConfigError if it holds losses
    of another text or with other settings."""
    identity = {
        **text.identity(),
        "settings": asdict(request.settings),
        # A loss in bf16 is another number; checkpoints of one call are loaded alike.
        "dtype": first_model.dtype,
    }
    return StoredLosses.open(Path(out), identity)


def _load(checkpoint: CheckpointToRead, request: LossesRequest) -> LoadedModel:
    """Load a checkpoint as the request says."""
    return load(checkpoint.model, request.tokenizer, request.loading, whole_prompts=True)


# --- the losses of one checkpoint -----------------------------------------------------------------


def _measure(
    checkpoint: CheckpointToRead, model: LoadedModel, text: SharedText, request: LossesRequest
) -> pd.DataFrame:
    """Compute the losses of a checkpoint. Return the rows of `LossesByPlace`."""
    text.check_tokenizer(model)
    length = request.settings.length
    model.check_positions(len(text.prefix) + length, "lower length")
    with using(model):
        nll_BL = _losses_of_tokens(model, text, request.loading.batch_tokens)
    rows = pd.DataFrame(_sum_by_place(nll_BL, length))
    return rows.assign(model=checkpoint.name, step=checkpoint.step)[COLUMNS]


def _losses_of_tokens(model: LoadedModel, text: SharedText, batch_tokens: int | None) -> np.ndarray:
    """Return nll_BL of the tokens of each document that a prompt scores, in nats."""
    scorer = logprobs_of(model, batch_tokens)
    prompts = text.prompts()
    log_p: list[np.ndarray] = []
    for start in range(0, len(prompts), DOCUMENTS_PER_CALL):
        log_p += scorer.score(prompts[start : start + DOCUMENTS_PER_CALL])
    nll_BL = -np.stack(log_p)
    check_finite(nll_BL.ravel(), "tokens")
    return nll_BL


def _sum_by_place(nll_BL: np.ndarray, length: int) -> list[dict[str, Any]]:
    """Return a row for each document and range of places, with the sum of its losses.

    Args:
        nll_BL: The losses of each document.
        length: Tokens of a document. There is one loss fewer if nothing predicts the first token.
    """
    # Without a prefix the losses begin at place 1.
    num_skipped = length - nll_BL.shape[1]
    rows = []
    for number, nll_L in enumerate(nll_BL):
        for first, end in pairwise(place_edges(length)):
            # The loss of place p is at index p − num_skipped.
            losses = nll_L[max(first - num_skipped, 0) : end - num_skipped]
            rows.append(
                {
                    "document": number,
                    "first": first,
                    "end": end,
                    "total": float(losses.sum()),
                    "count": len(losses),
                }
            )
    return rows
