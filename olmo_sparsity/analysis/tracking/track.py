"""Track checkpoints on one fixed text: `TrackRequest` → rows of each checkpoint → `Tracked`.

Place in the flow: above fixed_text.py. The processes of a training, or of `torch.distributed`,
share the documents of each checkpoint; those of a SLURM array share the checkpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import pandas as pd
import torch.distributed as dist

from olmo_sparsity.analysis.inputs.documents import Documents
from olmo_sparsity.analysis.inputs.runs import run_loaders
from olmo_sparsity.analysis.inputs.texts import open_documents
from olmo_sparsity.analysis.inputs.vocabulary import tokenizer_fingerprint
from olmo_sparsity.analysis.models.load import LoadedModel, load_model, using, wrap_model
from olmo_sparsity.analysis.results.tracked import Tracked
from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.settings import ModelOptions, Request, TrackSettings
from olmo_sparsity.analysis.tracking.fixed_text import FixedText
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.folders import Pieces, WorkFolder
from olmo_sparsity.io import writing
from olmo_sparsity.runtime import Progress, say
from olmo_sparsity.streams import VERSION

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
    """Token-forwards of a checkpoint; fewer documents are tracked if they cost more."""

    shard: tuple[int, int] = (0, 1)
    """The i-th of n processes that track checkpoints into one folder."""

    settings: TrackSettings = field(default_factory=TrackSettings)
    loading: ModelOptions = field(default_factory=ModelOptions)

    def checked(self) -> Self:
        self.settings.check()
        index, of = self.shard
        if not 0 <= index < of or (of > 1 and self.out is None):
            raise ConfigError(f"shard={self.shard} must be (i, n) with 0 <= i < n, and needs out")
        if not self.models:
            raise ConfigError("models is empty; pass at least one")
        return self


@dataclass(frozen=True)
class Checkpoint:
    run: str
    step: int
    model: Any

    @staticmethod
    def all_of(model: Any) -> Iterator[Checkpoint]:
        """The checkpoints of a run of ours, or of transformers' Trainer; else the model itself."""
        if not isinstance(model, str | Path):
            yield Checkpoint("model", 0, model)
            return
        folder, run = Path(model), str(model)
        found = [path for loader in run_loaders() for path in loader.checkpoints(folder)]
        found = found or sorted(folder.glob("checkpoint-*"), key=_step_of)
        for path in found or [folder]:
            yield Checkpoint(run, _step_of(path) if found else 0, str(path) if found else run)

    def load(self, request: TrackRequest) -> LoadedModel:
        if isinstance(self.model, str | Path):
            return load_model(self.model, **request.loading.loading)
        return wrap_model(self.model, request.tokenizer)

    @property
    def version(self) -> str:
        """Changes with the files."""
        paths = sorted(Path(str(self.model)).glob("*"))
        return sha256(repr([(p.name, p.stat().st_mtime_ns) for p in paths]).encode()).hexdigest()


def _step_of(path: Path) -> int:
    found = re.search(r"(\d+)$", path.name)
    return int(found[1]) if found else 0


def track(request: TrackRequest) -> Tracked | None:
    """Track all checkpoints of a request. With `out`, finished ones are in that folder, and the
    same call resumes. None: other processes have checkpoints left."""
    tracking, share = _Tracking(request), Share.of_processes()
    if not share.rank:
        for line in tracking.describe_cost().splitlines():
            say(line)
    done = list[pd.DataFrame]()
    with Progress("tracking", len(tracking.mine), "checkpoints", enabled=not share.rank) as shown:
        for checkpoint in tracking.checkpoints:
            rows = tracking.known(checkpoint)
            if rows is None and checkpoint in tracking.mine:
                rows = tracking.measure(checkpoint, share)
                shown.update(shown.done + 1)
            done += [] if rows is None else [rows]
    if missing := len(tracking.checkpoints) - len(done):
        say(f"{missing} of {len(tracking.checkpoints)} checkpoints are left to others")
        return None
    tracked = Tracked(pd.concat(done, ignore_index=True))
    if request.out is not None and not share.rank:
        with writing(Path(request.out) / "track.parquet") as partial:
            tracked.rows.to_parquet(partial)
    return tracked


def count_track(request: TrackRequest) -> Cost:
    """Count the cost of all checkpoints."""
    tracking = _Tracking(request)
    tokens = tracking.tokens * len(tracking.checkpoints)
    return Cost(tokens, tracking.first.num_parameters, tracking.describe_cost())


@dataclass(frozen=True)
class Share:
    """This process's documents of each checkpoint, and how the rows of all are joined."""

    rank: int = 0
    world_size: int = 1
    gather: Callable[[Any], list[Any]] = lambda rows: [rows]

    @staticmethod
    def of_processes() -> Share:
        """Of `torch.distributed`, if a training has initialised it."""
        if not (dist.is_available() and dist.is_initialized()):
            return Share()

        def gather(rows: Any) -> list[Any]:
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, rows)
            return every

        return Share(dist.get_rank(), dist.get_world_size(), gather)

    def measure(self, text: FixedText, scorer: Scorer) -> pd.DataFrame:
        own = text.measure(scorer, range(len(text.documents))[self.rank :: self.world_size])
        every = pd.concat(self.gather(own), ignore_index=True)
        return every.sort_values(["document"], kind="stable", ignore_index=True)


class _Tracking:
    """The text, read with the first checkpoint's tokenizer, and the folder of finished rows."""

    def __init__(self, request: TrackRequest) -> None:
        self.request = request
        self.checkpoints = [c for model in request.models for c in Checkpoint.all_of(model)]
        self.mine = self.checkpoints[request.shard[0] :: request.shard[1]]
        self.first = self.checkpoints[0].load(request)
        documents = request.text
        if not isinstance(documents, Documents):
            given = {"limit": READ_DOCUMENTS, "field": request.text_field}
            documents = open_documents(request.text, self.first, **given)
        prefix = self.first.prefix_ids(request.loading.prefix, "".join(documents[0].texts))
        self.text = FixedText.of(documents, request.settings, prefix)
        scorer = self._scorer(self.first)
        if request.budget is not None:
            self.text = self.text.within(request.budget, scorer)
        self.tokens = self.text.cost(scorer, range(len(self.text.documents)))
        self.of = sha256(json.dumps(self._identity()).encode()).hexdigest()
        self.pieces = None
        if request.out is not None:
            work = WorkFolder(Path(request.out), "out", "identity.json")
            work.create("checkpoints")
            work.identify(self._identity())
            self.pieces = Pieces(work.path / "checkpoints")

    def _identity(self) -> dict[str, Any]:
        assert self.first.tokenizer is not None
        return {
            "text": self.text.documents.fingerprint,
            "tokenizer": tokenizer_fingerprint(self.first.tokenizer),
            "prefix": list(self.text.prefix),
            "settings": asdict(self.request.settings),
            "random_streams": VERSION,
        }

    def _scorer(self, model: LoadedModel) -> Scorer:
        model.check_positions(len(self.text.prefix) + self.request.settings.long)
        return Scorer(model.model, batch_tokens=self.request.loading.batch_tokens)

    def describe_cost(self) -> str:
        text, num = self.text, len(self.checkpoints)
        one = Cost(self.tokens, self.first.num_parameters)
        return (
            f"{len(text.documents)} documents of {text.settings.long:,} tokens; targets: the last "
            f"{text.settings.local:,} of each, with {', '.join(map(str, text.contexts))} tokens "
            f"before them\n{num:,} checkpoint{'s' * (num != 1)}, each:\n{one}"
        )

    def known(self, checkpoint: Checkpoint) -> pd.DataFrame | None:
        if self.pieces is None:
            return None
        found = self.pieces.read(_name(checkpoint), self.of + checkpoint.version)
        return None if found is None else pd.DataFrame(found["rows"])

    def measure(self, checkpoint: Checkpoint, share: Share) -> pd.DataFrame:
        model = self.first
        if checkpoint is not self.checkpoints[0]:
            model = checkpoint.load(self.request)
        assert self.first.tokenizer is not None
        if model.tokenizer is None or tokenizer_fingerprint(
            model.tokenizer
        ) != tokenizer_fingerprint(self.first.tokenizer):
            raise DataError(f"{model.name} has another tokenizer than {self.first.name}")
        with using(model):
            rows = share.measure(self.text, self._scorer(model))
        rows = rows.assign(run=checkpoint.run, step=checkpoint.step)
        if self.pieces is not None and not share.rank:
            content = {"rows": rows.to_dict("records")}
            self.pieces.write(_name(checkpoint), self.of + checkpoint.version, content)
        return rows


def _name(checkpoint: Checkpoint) -> str:
    return sha256(f"{checkpoint.run} {checkpoint.step}".encode()).hexdigest()[:16]
