"""Track checkpoints on one fixed text: `TrackRequest` → rows of each checkpoint → `Tracked`.

Place in the flow: above fixed_text.py. The processes of `torch.distributed` share the documents of
each checkpoint; those of a SLURM array (`shard`) share the checkpoints.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import pandas as pd
import torch.distributed as dist

from olmo_sparsity.analysis.options import ModelOptions, Request, TrackSettings
from olmo_sparsity.analysis.results.tracked import Tracked
from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.tracking.fixed_text import FixedText
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.files import writing
from olmo_sparsity.base.folders import Pieces, WorkFolder
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.base.streams import VERSION
from olmo_sparsity.models.load import load_model, wrap_model
from olmo_sparsity.models.loaded import LoadedModel, using
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.text.runs import run_loaders
from olmo_sparsity.text.vocabulary import tokenizer_fingerprint

READ_DOCUMENTS = 4096
"""The most documents that are read to find some that are long enough."""


@dataclass(frozen=True, kw_only=True)
class TrackRequest(Request):
    """A call of `track`, checked."""

    models: tuple[Any, ...]
    """Runs, of which all checkpoints are tracked, checkpoints, other models, or one in memory."""

    tokenizer: Any = None
    text: Any = None
    text_field: str = "text"
    out: str | Path | None = None
    budget: float | None = None
    shard: tuple[int, int] = (0, 1)
    settings: TrackSettings = field(default_factory=TrackSettings)
    loading: ModelOptions = field(default_factory=ModelOptions)

    def checked(self) -> Self:
        self.settings.check()
        index, of = self.shard
        if not 0 <= index < of or (of > 1 and self.out is None):
            raise ConfigError(f"shard={self.shard} must be (i, n) with 0 <= i < n, and needs out")
        in_memory = [m for m in self.models if not isinstance(m, str | Path)]
        if self.out is not None and in_memory:
            raise ConfigError(f"out={self.out} needs models by name, not in memory")
        if len(set(map(str, self.models))) < len(self.models):
            raise ConfigError(f"models={self.models} holds one twice")
        return self


def track(
    model: Any, tokenizer: Any = None, *, text: Any = None, budget: float | None = None,
    **settings: Any,
) -> Tracked:  # fmt: skip
    """Measure what a checkpoint gains from long contexts, on a fixed text.

    `model`: in memory (with its tokenizer), a run (all checkpoints), or a name. `text`: held-out
    text in any form that `open_documents` reads; by default the run's own. `budget`: the most
    token-forwards of a checkpoint. `settings`: long, local, documents, seed, of `TrackSettings`.
    Calls with the same text and tokenizer have the same targets and unrelated texts. The processes
    of `torch.distributed` share the documents: all of them must call it.
    """
    given = {"tokenizer": tokenizer, "text": text, "budget": budget, **settings}
    found = track_checkpoints(TrackRequest.of(models=(model,), **given))
    assert found is not None, "one process has all checkpoints"
    return found


def track_checkpoints(request: TrackRequest) -> Tracked | None:
    """Track all checkpoints of a request. With `out`, finished ones are in that folder, and the
    same call resumes. None: other processes have checkpoints left."""
    tracking, (rank, _) = _Tracking(request), _processes()
    for line in tracking.describe_cost().splitlines() if not rank else ():
        say(line)
    done = list[pd.DataFrame]()
    with Progress("tracking", len(tracking.mine), "checkpoints", enabled=not rank) as progress:
        for checkpoint in tracking.checkpoints:
            rows = tracking.known(checkpoint)
            if rows is None and checkpoint in tracking.mine:
                rows = tracking.measure(checkpoint)
                progress.update(progress.done + 1)
            done += [] if rows is None else [rows]
    if missing := len(tracking.checkpoints) - len(done):
        say(f"{missing} of {len(tracking.checkpoints)} checkpoints are left to others")
        return None
    tracked = Tracked(pd.concat(done, ignore_index=True))
    if request.out is not None and not rank:
        with writing(Path(request.out) / "track.parquet") as partial:
            tracked.rows.to_parquet(partial)
    return tracked


def count_track(request: TrackRequest) -> Cost:
    """Count the cost of all checkpoints, and write nothing."""
    tracking = _Tracking(replace(request, out=None))
    tokens = tracking.tokens * len(tracking.checkpoints)
    return Cost(tokens, tracking.first.num_parameters, tracking.describe_cost())


def _processes() -> tuple[int, int]:
    """Rank and number of the processes that share the documents."""
    is_shared = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if is_shared else (0, 1)


def measure_together(text: FixedText, scorer: Scorer) -> pd.DataFrame:
    """Return the rows of all documents, of which each process measures its share."""
    rank, count = _processes()
    parts = [text.measure(scorer, text.numbers[rank::count])] * count
    if count > 1:
        dist.all_gather_object(parts, parts[rank])
    return pd.concat(parts).sort_values("document", kind="stable", ignore_index=True)


@dataclass(frozen=True)
class Checkpoint:
    run: str
    step: int
    model: Any

    @staticmethod
    def all_of(model: Any) -> list[Checkpoint]:
        """The checkpoints of a run of ours, or of transformers' Trainer; else the model itself."""
        paths = list[Path]()
        if isinstance(model, str | Path):
            paths = [path for loader in run_loaders() for path in loader.checkpoints(Path(model))]
            paths = paths or [*Path(model).glob("checkpoint-*")]
        steps = sorted((int(re.sub(r"\D", "", path.name)), path) for path in paths)
        run = str(model) if isinstance(model, str | Path) else "model"
        return [Checkpoint(run, *step) for step in steps] or [Checkpoint(run, 0, model)]

    @property
    def piece(self) -> tuple[str, str]:
        """The name of its rows in the folder, and what changes with its files."""
        files = [(p.name, p.stat().st_mtime_ns) for p in sorted(Path(str(self.model)).glob("*"))]
        return sha256(f"{self.run} {self.step}".encode()).hexdigest()[:16], repr(files)


class _Tracking:
    """The text, read with the first checkpoint's tokenizer, and the folder of finished rows."""

    def __init__(self, request: TrackRequest) -> None:
        self.request = request
        self.checkpoints = [c for model in request.models for c in Checkpoint.all_of(model)]
        self.mine = self.checkpoints[request.shard[0] :: request.shard[1]]
        self.first, documents = self._load(self.checkpoints[0]), request.text
        if not isinstance(documents, Documents):
            field = request.text_field
            documents = open_documents(request.text, self.first, READ_DOCUMENTS, field=field)
        prefix = self.first.prefix_ids(request.loading.prefix, "".join(documents[0].texts))
        self.text = FixedText.of(documents, request.settings, prefix)
        scorer = self._scorer(self.first)
        if request.budget is not None:
            self.text = self.text.within(request.budget, scorer)
        self.tokens = self.text.cost(scorer, self.text.numbers)
        identity = {
            "text": self.text.documents.fingerprint,
            "tokenizer": self._tokenizer_of(self.first),
            "prefix": list(self.text.prefix),
            "settings": asdict(request.settings),
            "random_streams": VERSION,
        }
        self.of, self.pieces = json.dumps(identity), None
        if request.out is not None:
            work = WorkFolder(Path(request.out), "out", "identity.json")
            work.create("checkpoints")
            work.identify(identity)
            self.pieces = Pieces(work.path / "checkpoints")

    def _load(self, checkpoint: Checkpoint) -> LoadedModel:
        if isinstance(checkpoint.model, str | Path):
            return load_model(checkpoint.model, **self.request.loading.loading)
        return wrap_model(checkpoint.model, self.request.tokenizer)

    def _scorer(self, model: LoadedModel) -> Scorer:
        model.check_positions(len(self.text.prefix) + self.request.settings.long)
        return Scorer(model.model, batch_tokens=self.request.loading.batch_tokens)

    def _tokenizer_of(self, model: LoadedModel) -> str:
        if model.tokenizer is None:
            raise DataError(f"'{model.name}' has no tokenizer")
        return tokenizer_fingerprint(model.tokenizer)

    def describe_cost(self) -> str:
        text, contexts = self.text, ", ".join(map(str, self.text.contexts))
        return (
            f"{len(text.documents)} documents of {text.settings.long:,} tokens; the last "
            f"{text.settings.local:,} are targets, with {contexts} tokens before them\n"
            f"checkpoints     {len(self.checkpoints):,}, each:\n"
            f"{Cost(self.tokens, self.first.num_parameters)}"
        )

    def known(self, checkpoint: Checkpoint) -> pd.DataFrame | None:
        if self.pieces is None:
            return None
        name, files = checkpoint.piece
        found = self.pieces.read(name, self.of + files)
        return pd.DataFrame(found["rows"]) if found else None

    def measure(self, checkpoint: Checkpoint) -> pd.DataFrame:
        is_first = checkpoint is self.checkpoints[0]
        model = self.first if is_first else self._load(checkpoint)
        if self._tokenizer_of(model) != self._tokenizer_of(self.first):
            raise DataError(f"{model.name} has another tokenizer than {self.first.name}")
        with using(model):
            rows = measure_together(self.text, self._scorer(model))
        rows = rows.assign(run=checkpoint.run, step=checkpoint.step)
        if self.pieces is not None and not _processes()[0]:
            name, files = checkpoint.piece
            self.pieces.write(name, self.of + files, {"rows": rows.to_dict("records")})
        return rows
