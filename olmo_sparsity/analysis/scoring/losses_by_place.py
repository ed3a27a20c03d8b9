"""Compute the loss by place of one or several checkpoints on one fixed text.

    LossesRequest → all checkpoints of its models
                  → one plain forward pass for each document and checkpoint
                  → sums of the losses in ranges of places → LossesByPlace

This answers whether distant text helps at all: later places have more text before them.
`losses_by_place` is the function for Python, `read_losses` answers the request of the command.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.reading import load
from olmo_sparsity.analysis.options import LossSettings, ModelOptions, Request
from olmo_sparsity.analysis.results.losses_by_place import COLUMNS, NO_STEP, LossesByPlace
from olmo_sparsity.analysis.scoring.logprobs import logprobs_of
from olmo_sparsity.analysis.scoring.tensors import check_finite
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.files import writing
from olmo_sparsity.base.path_options import path_of
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.base.work_folder import Pieces, WorkFolder
from olmo_sparsity.models.loaded import LoadedModel, using
from olmo_sparsity.models.losses import place_edges
from olmo_sparsity.models.prompts import Prompt
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.text.runs import run_loaders
from olmo_sparsity.text.vocabulary import tokenizer_fingerprint

MIN_DOCUMENTS = 8
"""With fewer documents an error is raised, as intervals over fewer mean nothing."""

DOCUMENTS_PER_CALL = 8
"""The number of documents that are scored in one call."""


@dataclass(frozen=True, kw_only=True)
class LossesRequest(Request):
    """A call of `losses_by_place`, checked."""

    models: tuple[Any, ...]
    """Runs, of which all checkpoints are read, checkpoints, other models, or models in memory."""

    tokenizer: Any = None
    text: Any = None
    field: str = "text"
    out: str | Path | None = None
    settings: LossSettings = dataclasses.field(default_factory=LossSettings)
    loading: ModelOptions = dataclasses.field(default_factory=ModelOptions)

    def checked(self) -> Self:
        """Return the request if its models go together."""
        self.settings.check()
        if not self.models:
            raise ConfigError("model=[] names no model; pass one, or a list of runs and models")
        if self.out is not None:
            path_of("out", self.out)
        in_memory = [model for model in self.models if not isinstance(model, str | Path)]
        if in_memory and (self.out is not None or len(self.models) > 1):
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


def read_losses(request: LossesRequest) -> LossesByPlace:
    """Answer a request. With `out`, finished checkpoints are stored in that folder, and the same
    call resumes."""
    return _Reading(request).run()


@dataclass(frozen=True)
class _Checkpoint:
    """A model whose losses are read: one step of a run, or a model without steps."""

    name: str
    """Name of its run, or of the model itself."""

    step: int
    """NO_STEP for a model without steps."""

    model: Any
    """Folder or hub name of the model, or the model in memory."""

    @staticmethod
    def all_of(model: Any) -> list[_Checkpoint]:
        """Return the checkpoints of a run, in the order of their steps, or the model itself if it
        is not a run. Runs are ours or those of transformers' `Trainer`."""
        if not isinstance(model, str | Path):
            return [_Checkpoint("model", NO_STEP, model)]
        path = Path(model)
        name = str(model)
        folders: list[Path] = []
        for loader in run_loaders():
            folders += loader.checkpoints(path)
        if not folders:
            folders += path.glob("checkpoint-*")
        if not folders:
            return [_Checkpoint(name, _step_of(path), model)]
        steps = sorted((_step_of(folder), folder) for folder in folders)
        return [_Checkpoint(name, step, folder) for step, folder in steps]

    @property
    def files(self) -> str:
        """Return names and times of the checkpoint's files, as a text that differs when they do. A
        checkpoint may be one file."""
        path = Path(self.model)
        files = [path] if path.is_file() else sorted(path.glob("*"))
        return repr([(file.name, file.stat().st_mtime_ns) for file in files])


def _step_of(folder: Path) -> int:
    """Return the step that a folder is named by, such as 2000 for `step002000` of ours and for
    `checkpoint-2000` of transformers' `Trainer`; else NO_STEP."""
    number = re.search(r"(?:step|checkpoint-)(\d+)$", folder.name)
    return int(number[1]) if number else NO_STEP


class _Reading:
    """Reads the losses of all checkpoints of a request. It holds the documents, as tokens of the
    first checkpoint's tokenizer, and the folder of finished checkpoints."""

    def __init__(self, request: LossesRequest) -> None:
        """List the checkpoints, load the first, open the documents, and create the folder."""
        self.request = request
        self.settings = request.settings
        self.checkpoints: list[_Checkpoint] = []
        for model in request.models:
            self.checkpoints += _Checkpoint.all_of(model)
        self.first = self._load(self.checkpoints[0])
        self.documents = self._open_documents()
        self.prefix = self.first.prefix_ids(request.loading.prefix, self.documents[0].texts[0])
        self.pieces: Pieces | None = None
        """Where finished checkpoints are stored; None without `out`."""

        identity = {
            "text": self.documents.fingerprint,
            "tokenizer": _tokenizer_of(self.first),
            "prefix": list(self.prefix),
            "settings": asdict(self.settings),
            # A loss in bf16 is another number; checkpoints of one call are loaded alike.
            "dtype": self.first.dtype,
        }
        self.identity = json.dumps(identity)
        if request.out is not None:
            work = WorkFolder(Path(request.out), "out", "identity.json", own_key="text")
            work.create("checkpoints")
            work.identify(identity)
            self.pieces = Pieces(work.path / "checkpoints")

    def _load(self, checkpoint: _Checkpoint) -> LoadedModel:
        """Load a checkpoint as the request says."""
        model = checkpoint.model
        return load(model, self.request.tokenizer, self.request.loading, whole_prompts=True)

    def _open_documents(self) -> Documents:
        """Return the documents that are long enough, each cut to `length` tokens, so that every
        place has the same number of documents."""
        length = self.settings.length
        text = self.request.text
        if not isinstance(text, Documents):
            max_documents = self.settings.documents
            field = self.request.field
            text = open_documents(text, self.first, max_documents, field=field, min_tokens=length)
        long_enough = (document for document in text if len(document.tokens) >= length)
        items = [
            replace(document, tokens=document.tokens[:length], number=number)
            for number, document in enumerate(islice(long_enough, self.settings.documents))
        ]
        if len(items) < MIN_DOCUMENTS:
            raise DataError(
                f"{text.name}: {len(items)} documents have {length=} tokens, and "
                f"{MIN_DOCUMENTS} are needed; lower length, or pass more text"
            )
        return replace(text, items=items)

    def run(self) -> LossesByPlace:
        """Return the losses of all checkpoints. Those that an earlier call has stored are not
        computed again."""
        num_checkpoints = len(self.checkpoints)
        tokens = num_checkpoints * len(self.documents) * self.settings.length
        if num_checkpoints > 1:
            say(f"{num_checkpoints} checkpoints, {tokens:,} token-forwards in all")
        tables = []
        with Progress("reading losses", num_checkpoints, "checkpoints") as progress:
            for number, checkpoint in enumerate(self.checkpoints, start=1):
                rows = self._stored_rows(checkpoint)
                if rows is None:
                    rows = self._measure(checkpoint)
                tables.append(rows)
                progress.update(number)
        losses = LossesByPlace(pd.concat(tables, ignore_index=True), self.documents.name)
        if self.request.out is not None:
            with writing(Path(self.request.out) / "losses.parquet") as partial:
                losses.rows.to_parquet(partial)
        return losses

    def _stored_rows(self, checkpoint: _Checkpoint) -> pd.DataFrame | None:
        """Return the rows of a checkpoint that an earlier call has stored; None if there are
        none."""
        if self.pieces is None:
            return None
        stored = self.pieces.read(_name_of_piece(checkpoint), self.identity + checkpoint.files)
        return pd.DataFrame(stored["rows"]) if stored else None

    def _measure(self, checkpoint: _Checkpoint) -> pd.DataFrame:
        """Compute the losses of a checkpoint, sum them by place, and store the rows."""
        is_first = checkpoint is self.checkpoints[0]
        model = self.first if is_first else self._load(checkpoint)
        if _tokenizer_of(model) != _tokenizer_of(self.first):
            raise DataError(
                f"{model.name} has another tokenizer than {self.first.name}, so its losses are of "
                "other tokens; pass models of one tokenizer"
            )
        model.check_positions(len(self.prefix) + self.settings.length, "lower length")
        with using(model):
            nll_DT = self._losses(model)
        table = pd.DataFrame(self._sum_by_place(nll_DT))
        table = table.assign(model=checkpoint.name, step=checkpoint.step)[COLUMNS]
        if self.pieces is not None:
            content = {"rows": table.to_dict("records")}
            piece = _name_of_piece(checkpoint)
            self.pieces.write(piece, self.identity + checkpoint.files, content)
        return table

    def _sum_by_place(self, nll_DT: np.ndarray) -> list[dict[str, Any]]:
        """Return a row for each document and range of places, with the sum of its losses."""
        length = self.settings.length
        # The first token, if nothing predicts it: without a prefix the losses begin at place 1.
        num_skipped = length - nll_DT.shape[1]
        rows = []
        for number, nll_T in enumerate(nll_DT):
            for first, end in pairwise(place_edges(length)):
                losses = nll_T[max(first - num_skipped, 0) : end - num_skipped]
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

    def _losses(self, model: LoadedModel) -> np.ndarray:
        """Return nll_DT of the tokens of each document, in nats. The first token has a loss only if
        a prefix predicts it."""
        scorer = logprobs_of(model, self.request.loading.batch_tokens)
        prompts = [self._prompt(document.tokens) for document in self.documents]
        log_p: list[np.ndarray] = []
        for start in range(0, len(prompts), DOCUMENTS_PER_CALL):
            log_p += scorer.score(prompts[start : start + DOCUMENTS_PER_CALL])
        nll_DT = -np.stack(log_p)
        check_finite(nll_DT.ravel(), "tokens")
        return nll_DT

    def _prompt(self, tokens: Sequence[int] | np.ndarray) -> Prompt:
        """Return a document as a prompt. Its continuation, which is scored, is all tokens that
        something precedes."""
        ids = np.asarray(tokens, np.int64)
        if self.prefix:
            return Prompt(np.array(self.prefix, np.int64), ids)
        return Prompt(ids[:1], ids[1:])


def _name_of_piece(checkpoint: _Checkpoint) -> str:
    """Return the name under which the rows of a checkpoint are stored."""
    return sha256(f"{checkpoint.name} {checkpoint.step}".encode()).hexdigest()[:16]


def _tokenizer_of(model: LoadedModel) -> str:
    """Return a fingerprint of a model's tokenizer; DataError if it has none."""
    if model.tokenizer is None:
        raise DataError(f"'{model.name}' has no tokenizer")
    return tokenizer_fingerprint(model.tokenizer)
