"""Compute the mean loss by place of checkpoints on one fixed text.

Place in the flow: `LossesRequest` → one plain forward pass a document and checkpoint →
`LossesByPlace`."""

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

from olmo_sparsity.analysis.measurement.plan import load
from olmo_sparsity.analysis.options import LossSettings, ModelOptions, Request
from olmo_sparsity.analysis.results.losses_by_place import COLUMNS, LossesByPlace
from olmo_sparsity.analysis.scoring.logprobs import logprobs_of
from olmo_sparsity.analysis.scoring.scorer import refuse_no_numbers
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.files import path_of, writing
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.base.work_folder import Pieces, WorkFolder
from olmo_sparsity.models.loaded import LoadedModel, using
from olmo_sparsity.models.losses import place_edges
from olmo_sparsity.models.prompts import Prompt
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.text.runs import run_loaders
from olmo_sparsity.text.vocabulary import tokenizer_fingerprint

FEWEST = 8
"""The fewest documents that are read; intervals over fewer mean nothing."""

AT_ONCE = 8
"""Documents that are scored together."""


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

    `model`: a model in memory (with its tokenizer); or a run (all its checkpoints), a checkpoint or
    another name that `load_model` takes; or a list of those. `text`: held-out text in any form that
    `open_documents` reads; by default the first run's own. `settings`: `length` and `documents` of
    `LossSettings`, and options of `load_model`. `.table` has the losses, `.compare` differences.
    """
    models = tuple(model) if isinstance(model, list | tuple) else (model,)
    request = LossesRequest.of(models=models, tokenizer=tokenizer, text=text, **settings)
    return read_losses(request)


def read_losses(request: LossesRequest) -> LossesByPlace:
    """Read all checkpoints of a request. With `out`, finished ones are kept in that folder, and the
    same call goes on."""
    return _Reading(request).run()


@dataclass(frozen=True)
class _Checkpoint:
    """A model of which losses are read: one step of a run, or a model without steps."""

    name: str
    """The run or model that it is of."""

    step: int
    model: Any
    """Folder or hub name of the model, or the model in memory."""

    @staticmethod
    def all_of(model: Any) -> list[_Checkpoint]:
        """Return the checkpoints of a run of ours or of transformers' `Trainer`, by their steps, or
        the model itself if it is not a run."""
        if not isinstance(model, str | Path):
            return [_Checkpoint("model", 0, model)]
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
        """A text that changes with the files of the checkpoint, or with the file that it is."""
        path = Path(self.model)
        files = [path] if path.is_file() else sorted(path.glob("*"))
        return repr([(file.name, file.stat().st_mtime_ns) for file in files])


def _step_of(folder: Path) -> int:
    """Return the step that a folder is named by, or 0."""
    number = re.search(r"(?:step|checkpoint-)(\d+)$", folder.name)
    return int(number[1]) if number else 0


class _Reading:
    """The documents, read with the first checkpoint's tokenizer, and the folder of finished
    checkpoints."""

    def __init__(self, request: LossesRequest) -> None:
        self.request = request
        self.settings = request.settings
        self.checkpoints: list[_Checkpoint] = []
        for model in request.models:
            self.checkpoints += _Checkpoint.all_of(model)
        self.first = self._load(self.checkpoints[0])
        self.documents = self._open_documents()
        self.prefix = self.first.prefix_ids(request.loading.prefix, self.documents[0].texts[0])
        self.pieces: Pieces | None = None
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
            work = WorkFolder(Path(request.out), "out", "identity.json")
            work.create("checkpoints")
            work.identify(identity)
            self.pieces = Pieces(work.path / "checkpoints")

    def _load(self, checkpoint: _Checkpoint) -> LoadedModel:
        model = checkpoint.model
        return load(model, self.request.tokenizer, self.request.loading, whole_prompts=True)

    def _open_documents(self) -> Documents:
        """Return documents that are long enough, each cut to `length`."""
        length = self.settings.length
        text = self.request.text
        if not isinstance(text, Documents):
            most = self.settings.documents
            field = self.request.field
            text = open_documents(text, self.first, most, field=field, min_tokens=length)
        long_enough = (document for document in text if len(document.tokens) >= length)
        items = [
            replace(document, tokens=document.tokens[:length], number=number)
            for number, document in enumerate(islice(long_enough, self.settings.documents))
        ]
        if len(items) < FEWEST:
            raise DataError(
                f"{text.name}: {len(items)} documents have {length=} tokens, and {FEWEST} are "
                "needed; lower length, or pass more text"
            )
        return replace(text, items=items)

    def run(self) -> LossesByPlace:
        """Read the losses of all checkpoints that are not known, and join all."""
        num_checkpoints = len(self.checkpoints)
        tokens = num_checkpoints * len(self.documents) * self.settings.length
        if num_checkpoints > 1:
            say(f"{num_checkpoints} checkpoints, {tokens:,} token-forwards in all")
        tables = []
        with Progress("reading losses", num_checkpoints, "checkpoints") as progress:
            for number, checkpoint in enumerate(self.checkpoints, start=1):
                rows = self._known(checkpoint)
                if rows is None:
                    rows = self._measure(checkpoint)
                tables.append(rows)
                progress.update(number)
        losses = LossesByPlace(pd.concat(tables, ignore_index=True), self.documents.name)
        if self.request.out is not None:
            with writing(Path(self.request.out) / "losses.parquet") as partial:
                losses.rows.to_parquet(partial)
        return losses

    def _known(self, checkpoint: _Checkpoint) -> pd.DataFrame | None:
        """Return the rows of a checkpoint that an earlier call has read."""
        if self.pieces is None:
            return None
        kept = self.pieces.read(_piece(checkpoint), self.identity + checkpoint.files)
        return pd.DataFrame(kept["rows"]) if kept else None

    def _measure(self, checkpoint: _Checkpoint) -> pd.DataFrame:
        """Read the losses of a checkpoint, sum them by place, and keep the rows."""
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
        edges = place_edges(self.settings.length)
        num_skipped = self.settings.length - nll_DT.shape[1]  # tokens that nothing predicts
        rows = []
        for number, nll_T in enumerate(nll_DT):
            for first, end in pairwise(edges):
                part = nll_T[max(first - num_skipped, 0) : end - num_skipped]
                rows.append((number, first, end, float(part.sum()), len(part)))
        names = ("document", *COLUMNS[3:])
        table = pd.DataFrame(rows, columns=names)
        table = table.assign(model=checkpoint.name, step=checkpoint.step)[COLUMNS]
        if self.pieces is not None:
            content = {"rows": table.to_dict("records")}
            self.pieces.write(_piece(checkpoint), self.identity + checkpoint.files, content)
        return table

    def _losses(self, model: LoadedModel) -> np.ndarray:
        """Return nll_DT of the tokens of each document; without the first one, which nothing
        predicts, unless a prefix precedes it."""
        scorer = logprobs_of(model, self.request.loading.batch_tokens)
        prompts = [self._prompt(document.tokens) for document in self.documents]
        log_p: list[np.ndarray] = []
        for start in range(0, len(prompts), AT_ONCE):
            log_p += scorer.score(prompts[start : start + AT_ONCE])
        nll_DT = -np.stack(log_p)
        refuse_no_numbers(nll_DT.ravel(), "tokens")
        return nll_DT

    def _prompt(self, tokens: Sequence[int] | np.ndarray) -> Prompt:
        ids = np.asarray(tokens, np.int64)
        if self.prefix:
            return Prompt(np.array(self.prefix, np.int64), ids)
        return Prompt(ids[:1], ids[1:])


def _piece(checkpoint: _Checkpoint) -> str:
    """Return the name of the file that keeps a checkpoint's rows."""
    return sha256(f"{checkpoint.name} {checkpoint.step}".encode()).hexdigest()[:16]


def _tokenizer_of(model: LoadedModel) -> str:
    if model.tokenizer is None:
        raise DataError(f"'{model.name}' has no tokenizer")
    return tokenizer_fingerprint(model.tokenizer)
