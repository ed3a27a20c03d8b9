"""One measurement, start to end: losses of every document, then questions about the chosen targets.

Place in the flow: model + documents → **results**. The command `olmo-sparsity measure` is
`measure`.

Documents are independent and written one by one, so a killed measurement goes on where it stopped,
and `shard=(i, n)` measures every n-th document for `merge` to put together. All draws are seeded
by (seed, document, block, draw): who measures a document leaves no trace in its numbers.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.dependencies import measure_dependencies
from analysis.gate import repetition_drop
from analysis.influence import SELECTORS, Question
from analysis.losses import ContextLosses, context_losses
from analysis.pieces import token_pieces
from analysis.recovery import SUMMARY_COLUMNS, set_losses, summarize
from analysis.results import ResultWriter, consolidate, merge, read_parts
from analysis.scoring import FarStates, Scorer
from analysis.targets import TargetChooser, gap_threshold, half_of
from analysis.windows import Block, Windows
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.model.load import LoadedModel
from olmo_sparsity.progress import Progress
from olmo_sparsity.versions import code_version, versions

NUM_DRAWS = {"random": 5}
"""Draws of the own control; every other selector is deterministic."""


@dataclass(frozen=True)
class Settings:
    windows: Windows
    selectors: tuple[str, ...] = ("add_one", "divergence", "random", "nearest")
    ks: tuple[int, ...] = (1, 2, 4, 8, 16)
    target_share: float = 0.1
    min_gap: float = 0.1
    """Nats: a target with a smaller gap has nothing to recover, however high it ranks."""

    far_states: FarStates = "isolated"
    num_foreign: int = 3
    seed: int = 0

    def check(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"--seed={self.seed} must not be negative")
        if not 0 <= self.min_gap < float("inf"):
            raise ConfigError(f"--min-gap={self.min_gap} must be a number of nats, 0 or more")
        for option, values in (("--ks", self.ks), ("--selectors", self.selectors)):
            if len(set(values)) < len(values):
                raise ConfigError(f"{option}: {', '.join(map(str, values))} names one twice")
        for name in self.selectors:
            if name not in SELECTORS:
                raise ConfigError(
                    f"--selectors: '{name}' is unknown; choose from {', '.join(SELECTORS)}"
                )
        if not self.ks or min(self.ks) < 1:
            raise ConfigError(f"--ks={','.join(map(str, self.ks))} must be numbers from 1 up")
        if max(self.ks) > self.windows.num_far:
            raise ConfigError(
                f"--ks: {max(self.ks)} is more than the {self.windows.num_far} far tokens of "
                f"--long={self.windows.long} and --short={self.windows.short}"
            )
        if self.num_foreign < 1:
            raise ConfigError(f"--foreign={self.num_foreign}: the control needs at least one draw")


@dataclass
class Source:
    """Documents as token ids; a document's index is its place in the source."""

    name: str
    fingerprint: str
    documents: list[np.ndarray] = field(repr=False)


def measure(
    loaded: LoadedModel,
    source: Source,
    settings: Settings,
    out: Path,
    *,
    shard: tuple[int, int] = (0, 1),
    batch_tokens: int = 16384,
    command: Sequence[str] = (),
) -> None:
    """Measure what is not finished yet in `out`; with all documents done, also summarise."""
    settings.windows.check(loaded.max_positions)
    settings.check()
    index, of = shard
    started = time.perf_counter()
    long_enough = [
        number for number, text in enumerate(source.documents) if len(text) > settings.windows.long
    ]
    if {half_of(number) for number in long_enough} != {"threshold", "report"}:
        raise DataError(
            f"{source.name}: {len(long_enough)} of {len(source.documents)} documents are longer "
            f"than --long={settings.windows.long}, and both halves (even and odd) need one; give "
            "more or longer text, or lower --long"
        )
    if batch_tokens < 1:
        raise ConfigError(f"--batch-tokens={batch_tokens} must be at least 1")
    device = next(loaded.model.parameters()).device
    scorer = Scorer(loaded.model, device, far_states=settings.far_states, batch_tokens=batch_tokens)
    writer = ResultWriter(out, identity_of(loaded, source, settings))
    mine = [number for number in long_enough if number % (2 * of) // 2 == index]
    todo = [number for number in mine if number not in writer.finished()]
    if todo:
        chooser = _fit_chooser(scorer, source, settings, long_enough)
        asker = _Asker(scorer, source, settings, long_enough)
        with Progress("measuring", len(mine), "documents") as progress:
            progress.resume_at(len(mine) - len(todo))
            for done, number in enumerate(todo, start=len(mine) - len(todo) + 1):
                writer.write(number, asker.tables(number, chooser, loaded))
                progress.update(done)
        writer.close()
    gate = repetition_drop(
        scorer, [source.documents[number] for number in long_enough], settings.windows.long // 2
    )
    about = {
        "model": {
            "name": loaded.name,
            "fingerprint": loaded.fingerprint,
            "num_parameters": loaded.num_parameters,
        },
        "data": {"source": source.name, "fingerprint": source.fingerprint},
        "windows": asdict(settings.windows) | {"far_states": settings.far_states},
        "selectors": list(settings.selectors),
        "ks": list(settings.ks),
        "seed": settings.seed,
        "targets": {"share": settings.target_share, "min_gap": settings.min_gap},
        "gate": gate,
        "counts": {
            "documents_measured": len(long_enough),
            "documents_too_short": len(source.documents) - len(long_enough),
        },
        "code": code_version(),
        "versions": versions(),
        "shard": list(shard),
        "command": list(command),
        "seconds_of_last_start": time.perf_counter() - started,
    }
    if of == 1:
        conclude(out, about)
    else:
        (out / ABOUT).write_text(json.dumps(about, indent=1))


ABOUT = "about.json"
"""What a shard says of itself, for the meta.json of what it is merged into."""


def merge_shards(folders: list[Path], out: Path) -> None:
    """Several shards of one measurement, merged and summarised as if one process had done it."""
    for folder in folders:
        about = Path(folder) / ABOUT
        if not about.is_file():
            raise DataError(
                f"{about} is missing: {folder} is not a finished shard (--shard i/n); run its "
                "command again"
            )
    meta = json.loads(about.read_text())
    _, of = meta["shard"]
    here = [json.loads((Path(folder) / ABOUT).read_text())["shard"][0] for folder in folders]
    missing = sorted(set(range(of)) - set(here))
    if missing:
        named = ", ".join(f"{index}/{of}" for index in missing)
        raise DataError(f"{out}: shard {named} is missing; measure it, or name its folder too")
    merge(folders, out)
    conclude(out, meta | {"merged_from": [str(folder) for folder in folders]})


def identity_of(loaded: LoadedModel, source: Source, settings: Settings) -> dict[str, Any]:
    """What must be equal for two results to be parts of one measurement."""
    return {
        "model": loaded.fingerprint,
        "data": source.fingerprint,
        "num_documents": len(source.documents),
        "settings": asdict(settings),
    }


def conclude(folder: Path, meta: dict[str, Any]) -> None:
    """Parts → summary and final tables."""
    tables = read_parts(folder)
    if not (tables["recovery"].target_set == "gap").any():
        raise DataError(
            f"{folder}: no target has a gap large enough; measure into another folder with a lower "
            "--min-gap, a larger share in --targets or more text"
        )
    losses = tables["losses"]
    fitted_on = losses[losses.half == "threshold"]
    meta["targets"]["threshold"] = gap_threshold(
        (fitted_on.loss_short - fitted_on.loss_long).to_numpy(), **meta["targets"]
    )
    summary = summarize(losses, tables["recovery"])
    costs = tables["costs"].groupby("selector")[["token_forwards", "num_targets"]].sum()
    per_target = costs.token_forwards / costs.num_targets
    summary["token_forwards_per_target"] = summary.selector.map(per_target)
    final: dict[str, pd.DataFrame | dict] = {"summary": summary}
    if tables["tokens"].text.str.len().any():  # without a tokenizer there are no words
        final["dependencies"] = measure_dependencies(
            tables["tokens"], losses, tables["influence"], tables["recovery"], meta["windows"]
        )
    consolidate(folder, final, meta)


def format_summary(summary: pd.DataFrame, target_set: str = "gap") -> str:
    """The headline table, for people."""
    rows = summary[summary.target_set == target_set]
    own, foreign = (
        rows[rows.control == c].set_index(["selector", "k"]) for c in ("own", "foreign")
    )
    lines = [f"{'selector':<18}{'k':>3}  {'recovery':>20}  {'foreign':>8}  {'excess':>22}"]
    for key, row in own.iterrows():
        selector, k = key
        lines.append(
            f"{selector:<18}{k:>3}  {row.recovery:>6.2f} [{row.low:.2f}, {row.high:.2f}]"
            f"  {foreign.loc[key].recovery:>8.2f}"
            f"  {row.excess:>+7.3f} [{row.excess_low:+.3f}, {row.excess_high:+.3f}]"
        )
    return "\n".join(lines)


def _fit_chooser(
    scorer: Scorer, source: Source, settings: Settings, long_enough: list[int]
) -> TargetChooser:
    half = [number for number in long_enough if half_of(number) == "threshold"]
    documents = [source.documents[number] for number in half]
    losses = []
    with Progress("threshold", len(half), "documents") as progress:
        for done, document in enumerate(documents, start=1):
            losses.append(context_losses(scorer, document, settings.windows))
            progress.update(done)
    return TargetChooser.fit(losses, documents, settings.target_share, settings.min_gap)


class _Asker:
    """Puts every question about one document and collects its rows of all tables."""

    def __init__(
        self, scorer: Scorer, source: Source, settings: Settings, long_enough: list[int]
    ) -> None:
        self.scorer, self.source, self.settings = scorer, source, settings
        self.pool = long_enough

    def tables(self, number: int, chooser: TargetChooser, loaded: LoadedModel) -> dict[str, dict]:
        document, windows = self.source.documents[number], self.settings.windows
        losses = context_losses(self.scorer, document, windows)
        half = half_of(number)
        tables: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
        tables["losses"] = {
            "target": losses.target.tolist(),
            "token_id": losses.token_id.tolist(),
            "loss_long": losses.loss_long.tolist(),
            "loss_short": losses.loss_short.tolist(),
            "half": [half] * len(losses.target),
        }
        if half == "threshold":
            return tables
        texts = [""] * len(document)
        if loaded.tokenizer is not None:
            texts = token_pieces(loaded.tokenizer, document.tolist())
        tables["tokens"] = {
            "place": list(range(len(document))),
            "token_id": document.tolist(),
            "text": texts,
        }
        draw = np.random.default_rng([self.settings.seed, number])
        chosen = chooser.choose(document, losses, windows, draw)
        sets_of = defaultdict(list)
        for name, indices in chosen.items():
            for index in indices.tolist():
                sets_of[index].append(name)
        for block in windows.blocks(document):
            first = block.start - windows.long
            wanted = [i for i in range(block.num_targets) if first + i in sets_of]
            if wanted:
                names = [sets_of[first + i] for i in wanted]
                self._ask(number, block, np.array(wanted), names, losses, tables)
        return tables

    def _ask(
        self,
        number: int,
        block: Block,
        targets: np.ndarray,
        names: list[list[str]],
        losses: ContextLosses,
        tables: dict[str, dict[str, list]],
    ) -> None:
        for selector in self.settings.selectors:
            for draw in range(NUM_DRAWS.get(selector, 1)):
                self._run(number, block, block, targets, names, selector, "own", draw, tables)
            for draw in range(self.settings.num_foreign):
                foreign = block.with_far(self._foreign_far(number, block, draw))
                self._run(number, foreign, block, targets, names, selector, "foreign", draw, tables)

    def _foreign_far(self, number: int, block: Block, draw: int) -> np.ndarray:
        """As many consecutive tokens of another document; the same for every selector."""
        generator = np.random.default_rng([self.settings.seed, number, block.start, draw])
        others = [other for other in self.pool if other != number]
        document = self.source.documents[others[generator.integers(len(others))]]
        offset = generator.integers(len(document) - self.settings.windows.num_far + 1)
        return document[offset : offset + self.settings.windows.num_far]

    def _run(
        self,
        number: int,
        block: Block,
        own: Block,
        targets: np.ndarray,
        names: list[list[str]],
        selector: str,
        control: str,
        draw: int,
        tables: dict[str, dict[str, list]],
    ) -> None:
        generator = np.random.default_rng(
            [self.settings.seed, number, block.start, draw, len(control)]
        )
        question = Question(block, own, targets, max(self.settings.ks), generator)
        before = self.scorer.token_forwards
        choice = SELECTORS[selector](self.scorer, question)
        if control == "own" and draw == 0:
            _append(
                tables["costs"],
                selector=selector,
                token_forwards=self.scorer.token_forwards - before,
                num_targets=len(targets),
            )
        found = set_losses(
            self.scorer,
            block,
            own,
            targets,
            choice,
            self.settings.ks,
            with_kl=selector == "divergence",
        )
        for row, target in enumerate(targets.tolist()):
            place = own.start + target
            if draw == 0:
                for rank, far in enumerate(choice.far_TK[row].tolist(), start=1):
                    _append(
                        tables["influence"],
                        target=place,
                        selector=selector,
                        control=control,
                        rank=rank,
                        far_position=own.start - own.windows.long + far,
                        far_token_id=int(block.tokens[far]),
                        influence=float(choice.influence_TK[row, rank - 1]),
                    )
            for target_set in names[row]:
                for column, k in enumerate(self.settings.ks):
                    _append(
                        tables["recovery"],
                        target=place,
                        target_set=target_set,
                        selector=selector,
                        control=control,
                        draw=draw,
                        k=k,
                        loss_set=float(found.loss_TK[row, column]),
                        kl_set=None if found.kl_TK is None else float(found.kl_TK[row, column]),
                        kl_short=None if found.kl_short_T is None else float(found.kl_short_T[row]),
                    )


def _append(table: dict[str, list], **values: Any) -> None:
    for name, value in values.items():
        table[name].append(value)


__all__ = ["SUMMARY_COLUMNS", "Settings", "Source", "conclude", "format_summary", "measure"]
