"""One measurement, start to end: losses of every document, then questions about the chosen targets.

Place in the flow: model + documents → **results**. The command `olmo-sparsity measure` is
`measure`.

Documents are independent and written as they are finished, so a killed measurement goes on where it
stopped. Processes of one launch share the documents and the folder, and the first of them sums up;
`shard=(i, n)` measures every n-th document into a folder of its own, for `merge_shards` to put
together.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.asking import Asker
from analysis.dependencies import measure_dependencies
from analysis.gate import repetition_drop
from analysis.losses import ContextLosses, context_losses
from analysis.planted import hit_rates
from analysis.recovery import summarize
from analysis.results import (
    ResultWriter,
    consolidate,
    finished_documents,
    main_set,
    merge,
    read_parts,
)
from analysis.scoring import Scorer
from analysis.settings import Settings
from analysis.sources import Source
from analysis.summary import describe_gate, longppl
from analysis.targets import (
    GapTargets,
    GivenTargets,
    PlantedTargets,
    TargetChooser,
    gap_threshold,
    half_of,
)
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.launch import read_launch
from olmo_sparsity.model.load import LoadedModel, device_name
from olmo_sparsity.progress import Progress
from olmo_sparsity.versions import provenance

PATIENCE_S = 900
"""How long the process that sums up waits for another one's next document."""


def measure(
    loaded: LoadedModel,
    source: Source,
    settings: Settings,
    out: Path,
    *,
    targets: GivenTargets | None = None,
    shard: tuple[int, int] = (0, 1),
    batch_tokens: int | None = None,
    command: Sequence[str] = (),
) -> bool:
    """Measure what is not finished yet in `out`; with all documents done, also summarise. True for
    the process that did."""
    settings.windows.check(loaded.max_positions)
    settings.check()
    if batch_tokens is not None and batch_tokens < 1:
        raise ConfigError(f"--batch-tokens={batch_tokens} must be at least 1")
    launch, started = read_launch(), time.perf_counter()
    long_enough = documents_to_measure(source, settings)
    device = next(loaded.model.parameters()).device
    made_by = provenance(device_name(device))
    scorer = Scorer(loaded.model, device, far_states=settings.far_states, batch_tokens=batch_tokens)
    writer = ResultWriter(out, identity_of(loaded, source, settings, targets))
    ours = share_of(long_enough, *shard)
    mine = share_of(
        long_enough, shard[0] * launch.world_size + launch.rank, shard[1] * launch.world_size
    )
    todo = [number for number in mine if number not in writer.finished()]
    gate = ask_gate(scorer, source, settings, long_enough) if launch.rank == 0 else {}
    if gate:
        print(describe_gate(gate, settings.far_states, source.planted is not None), file=sys.stderr)
    if todo:
        known = read_losses(out)
        chooser = choose_targets(scorer, source, settings, long_enough, known, targets)
        asker = Asker(scorer, source, settings, chooser, loaded.tokenizer)
        # These are done with: written first, a second start reads their losses.
        for number in [n for n in todo if n in known and chooser.half(n) == "threshold"]:
            writer.write(number, asker.tables(number, known[number]))
            todo.remove(number)
        writer.flush()
    with Progress("measuring", len(ours), "documents", enabled=launch.rank == 0) as progress:
        progress.resume_at(len(ours) - len(todo) * launch.world_size)
        for left, number in zip(range(len(todo) - 1, -1, -1), todo, strict=True):
            writer.write(number, asker.tables(number, known.get(number)))
            # The others are about as far.
            progress.update(len(ours) - left * launch.world_size)
        writer.close()
        if launch.rank > 0:
            return False
        _wait_for_others(out, set(ours), progress)
    about = made_by | {
        "model": {
            "name": loaded.name,
            "fingerprint": loaded.fingerprint,
            "num_parameters": loaded.num_parameters,
            "trained": loaded.trained,
        },
        "data": {"source": source.name, "fingerprint": source.fingerprint},
        "dtype": dtype_of(loaded),
        "windows": asdict(settings.windows) | {"far_states": settings.far_states},
        "selectors": list(settings.selectors),
        "ks": list(settings.ks),
        "seed": settings.seed,
        "targets": {"share": settings.target_share, "min_gap": settings.min_gap},
        "gate": gate,
        "counts": {
            "documents_measured": len(long_enough),
            "documents_too_short": source.num_too_short + len(source.documents) - len(long_enough),
        },
        "shard": list(shard),
        "command": list(command),
        "seconds_of_last_start": time.perf_counter() - started,
    }
    if targets is not None:
        about["targets"] = {"given": targets.fingerprint}
    if shard[1] > 1:
        (out / ABOUT).write_text(json.dumps(about, indent=1))
        return False
    conclude(out, about)
    return True


def documents_to_measure(source: Source, settings: Settings) -> list[int]:
    long_enough = [
        number for number, text in enumerate(source.documents) if len(text) > settings.windows.long
    ]
    if {half_of(number) for number in long_enough} != {"threshold", "report"}:
        raise DataError(
            f"{source.name}: {len(long_enough)} of {len(source.documents)} documents are longer "
            f"than --long={settings.windows.long}; one at an even and one at an odd place are "
            "needed, since half of them only fix the threshold. Give more documents (a text file "
            "is one), raise --max-documents, or lower --long"
        )
    return long_enough


def ask_gate(
    scorer: Scorer, source: Source, settings: Settings, long_enough: list[int]
) -> dict[str, float | bool | int]:
    documents = [source.documents[number] for number in long_enough]
    return repetition_drop(scorer, documents, settings.windows.long // 2)


def share_of(documents: list[int], index: int, of: int) -> list[int]:
    """Every of-th pair, so that each share has documents of both halves."""
    return [number for number in documents if number % (2 * of) // 2 == index]


def choose_targets(
    scorer: Scorer,
    source: Source,
    settings: Settings,
    long_enough: list[int],
    known: dict[int, ContextLosses],
    given: GivenTargets | None = None,
) -> TargetChooser:
    """`known`: losses by document; those that are needed here and missing are added."""
    if given is not None:
        return given
    if source.planted is not None:
        return PlantedTargets(len(source.planted))
    half = [number for number in long_enough if half_of(number) == "threshold"]
    with Progress("threshold", len(half), "documents", enabled=read_launch().rank == 0) as progress:
        for done, number in enumerate(half, start=1):
            if number not in known:
                known[number] = context_losses(scorer, source.documents[number], settings.windows)
            progress.update(done)
    documents = [source.documents[number] for number in half]
    return GapTargets.fit(
        [known[number] for number in half], documents, settings.target_share, settings.min_gap
    )


def read_losses(folder: Path) -> dict[int, ContextLosses]:
    """Of the documents that are measured already."""
    columns = ("target", "token_id", "loss_long", "loss_short")
    return {
        int(number): ContextLosses(*(rows[name].to_numpy() for name in columns))
        for number, rows in read_parts(folder)["losses"].groupby("document")
    }


def _wait_for_others(folder: Path, wanted: set[int], progress: Progress) -> None:
    missing, since = wanted, time.monotonic()
    while True:
        left = wanted - finished_documents(folder)
        if not left:
            return
        if left != missing:
            missing, since = left, time.monotonic()
        progress.update(len(wanted) - len(left))
        if time.monotonic() - since > PATIENCE_S:
            raise DataError(
                f"{folder}: {len(left)} documents of other processes are not measured, and none "
                f"has come for {PATIENCE_S} s; a process is lost. Run the same command again: it "
                "measures only what is missing"
            )
        time.sleep(0.5)


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


def identity_of(
    loaded: LoadedModel, source: Source, settings: Settings, targets: GivenTargets | None
) -> dict[str, Any]:
    """What must be equal for two results to be parts of one measurement."""
    return {
        "model": loaded.fingerprint,
        "dtype": dtype_of(loaded),
        "data": source.fingerprint,
        "num_documents": len(source.documents),
        "settings": asdict(settings),
        "targets": None if targets is None else targets.fingerprint,
    }


def dtype_of(loaded: LoadedModel) -> str:
    return str(next(loaded.model.parameters()).dtype).removeprefix("torch.")


def conclude(folder: Path, meta: dict[str, Any]) -> None:
    """Parts → summary and final tables."""
    tables = read_parts(folder)
    losses, recovery = tables["losses"], tables["recovery"]
    gaps = losses.loss_short - losses.loss_long
    if "share" in meta["targets"] and not len(tables["planted"]):
        fitted_on = gaps[losses.half == "threshold"]
        meta["targets"]["threshold"] = gap_threshold(fitted_on.to_numpy(), **meta["targets"])
    if main_set(recovery.target_set.unique()) is None:
        if "given" in meta["targets"]:
            raise DataError(f"{folder}: none of the given targets has a whole long window here")
        raise DataError(
            f"{folder}: no target has a gap large enough (the largest is "
            f"{gaps[losses.half == 'report'].max():.2f} nats, the threshold "
            f"{meta['targets']['threshold']:.2f}); measure into another folder with a larger share "
            "in --targets, a lower --min-gap or more text"
        )
    meta["longppl"] = longppl(losses)
    summary = summarize(losses, recovery)
    costs = tables["costs"].groupby("selector")[["token_forwards", "num_targets"]].sum()
    per_target = costs.token_forwards / costs.num_targets
    summary["token_forwards_per_target"] = summary.selector.map(per_target)
    hits = hit_rates(tables["influence"], tables["planted"], tuple(meta["ks"]))
    summary = summary.merge(hits, how="left", on=["target_set", "selector", "control", "k"])
    final: dict[str, pd.DataFrame | dict] = {"summary": summary}
    if tables["tokens"].text.str.len().any():  # without a tokenizer there are no words
        final["dependencies"] = measure_dependencies(
            tables["tokens"], losses, tables["influence"], recovery, meta["windows"]
        )
    consolidate(folder, final, meta)
