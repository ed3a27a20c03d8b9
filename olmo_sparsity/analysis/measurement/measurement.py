"""Run a measurement: losses of all documents, then recovery of chosen targets, then the summary.

`measure` is the main entry. It takes a request and returns results, which are also in a folder. Two
processes measure the documents 0 to 3 like this, each its own two:

    process 0                  process 1
    losses of 0 and 1          losses of 2 and 3         phase "losses": L_short and L_long
    both wait for the losses of 0 and 2                  they set the threshold of a target's gap
    targets of 1               targets of 3              chosen by these losses
    recovery of 1              recovery of 3             phase "recovery": ranked units, and L_k
    waits for process 1        ends
    summary, final tables                                by the first process (summing_up.py)

What is finished is in a folder that all share (parts.py). So a killed measurement resumes, and a
process that waits too long for others does their work itself (sharing.py).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.measurement.parts import Parts, results_folder
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.planning import make_plan
from olmo_sparsity.analysis.measurement.request import MeasureRequest
from olmo_sparsity.analysis.measurement.sharing import wait_for_documents, work_on_documents
from olmo_sparsity.analysis.measurement.summing_up import check_any_target, sum_up
from olmo_sparsity.analysis.results.notes import describe_induction, describe_sink
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.stored_results import FILES, read_results
from olmo_sparsity.analysis.results.target_rows import half_of
from olmo_sparsity.analysis.shard import ALL_DOCUMENTS, Shard
from olmo_sparsity.base.devices import device_name
from olmo_sparsity.base.errors import ConfigError, DataError, UnreadableNowError
from olmo_sparsity.base.launch import Launch, read_launch
from olmo_sparsity.base.locks import locked
from olmo_sparsity.base.manifest import MANIFEST, find_damage
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.provenance import provenance
from olmo_sparsity.models.loaded import using


def measure(request: MeasureRequest) -> Results | None:
    """Answer a request: plan it, run it, and return the results. Return None if documents are left
    to other processes."""
    out = request.out
    num_processes = read_launch().world_size
    if out is None and num_processes > 1:
        raise ConfigError(
            f"out=None: {num_processes} processes need a folder to share; pass out=FOLDER"
        )
    if out is not None:
        # Before the model is read, which may take minutes.
        results_folder(out).check_no_other_work()
    plan = make_plan(request)

    folder_of_results = tempfile.TemporaryDirectory() if out is None else nullcontext(out)
    with folder_of_results as folder:
        return run(plan, Path(folder), request.shard, request.command)


def wait_for_results(out: str | Path) -> Results:
    """Wait for the results that another process of the launch writes, and return them."""
    say(f"{out}: waiting for the results, which another process writes")
    # The manifest is written last, so the tables are there when it is.
    while not (Path(out) / MANIFEST).exists():
        time.sleep(0.5)
    return read_results(out)


def run(
    plan: Plan, out: Path, shard: tuple[int, int] = ALL_DOCUMENTS, command: Sequence[str] = ()
) -> Results | None:
    """Measure what is planned, into the folder `out`. Return the results in the first process of a
    launch; None in the others, and where documents are left to another shard.

    Args:
        shard: (i, n): measure only the i-th of n shares of the documents.
        command: What the user typed, for meta.json.
    """
    with using(plan.model):
        plan.check_model_unchanged()
        return _MeasuringProcess(plan, out, Shard(*shard), read_launch()).run(command)


class _MeasuringProcess:
    """One process of a measurement.

    A shard may have several processes: those of one launch, the first of which waits for the
    others. Shards are started apart, and may run one after the other. So a shard waits for another
    one only for losses that the threshold depends on, and not for ever.
    """

    def __init__(self, plan: Plan, out: Path, shard: Shard, launch: Launch) -> None:
        self.plan = plan
        self.out = out
        self.shard = shard
        self.launch = launch
        self.is_first = launch.rank == 0
        """Whether this process waits for the others of its launch, checks the model, shows progress
        and writes the results."""

        self.started_s = time.perf_counter()
        self.slowest_s = 0.0
        """Seconds that the slowest document took here. Another process is given up only after a
        multiple of this time (sharing.py)."""

        self.provenance = provenance(device_name(plan.scorer.device))
        self.parts = Parts(out, plan.identity())
        self.numbers = plan.measured_numbers
        """The numbers of all documents of the measurement."""

        self.numbers_of_shard = shard.of(self.numbers)
        self.numbers_of_process = shard.part(launch.rank, launch.world_size).of(self.numbers)
        self.targets = pd.DataFrame()
        """The table of the targets of those documents that have losses so far."""

    def run(self, command: Sequence[str]) -> Results | None:
        """Measure the documents of this process. Return the results if all documents are finished
        then, those of other processes included; else return None."""
        is_damaged = False
        if (self.out / MANIFEST).exists():
            try:
                return read_results(self.out) if self.is_first else None
            except UnreadableNowError:
                raise  # they may be intact
            except DataError as error:
                # The results are written again from the parts.
                say(str(error))
                is_damaged = True

        checks = self._check_model() if self.is_first else {"induction": {}, "sink": {}}
        if not self._run_phases():
            return None

        meta = self.provenance | {
            "command": list(command),
            **checks,
            "seconds_of_last_start": time.perf_counter() - self.started_s,
            "token_forwards_of_last_start": self.plan.scorer.token_forwards,
        }
        # Two shards may find at the same time that all documents are finished. The one that gets
        # the lock writes the results, and the other finds them whole.
        with locked(self.out, waits=True):
            if is_damaged or find_damage(self.out, FILES) is not None:
                targets = self.targets.reset_index(drop=True)
                sum_up(self.plan, self.parts, targets, meta, self.out)
            return read_results(self.out)

    def _check_model(self) -> dict[str, dict[str, Any]]:
        """Run the induction and the sink check, print their results, and return these for
        meta.json."""
        induction = self.plan.run_induction_check()
        print(describe_induction(induction, self.plan.settings.interpretation), file=sys.stderr)
        check = self.plan.run_sink_check()
        sink = {} if check is None else dict(check)
        warning = describe_sink(sink)
        if warning:
            say(warning)
        return {"induction": dict(induction), "sink": sink}

    def _run_phases(self) -> bool:
        """Run both phases. Return whether all documents are finished, as the first process of the
        launch finds; always False in the others."""
        self._run_phases_of_process()
        if not self.is_first:
            return False
        if self.launch.world_size > 1:
            self._wait_for_launch()

        num_unfinished = self._count_unfinished()
        if num_unfinished:
            print(
                f"shard {self.shard.shard_index}/{self.shard.num_shards} is done; {num_unfinished} "
                "documents are left to the others: the last to finish writes the results, and "
                "--partial those so far",
                file=sys.stderr,
            )
        return num_unfinished == 0

    def _run_phases_of_process(self) -> None:
        """Compute losses, choose targets, and evaluate them, in the documents of this process."""
        self.slowest_s = work_on_documents(
            "losses", self.parts, self.numbers_of_process, self._measure_losses, self.is_first
        )

        if self.plan.chooses_by_gap:
            # The threshold depends on all documents of one half, also on those of other processes.
            half = [number for number in self.numbers if half_of(number) == "threshold"]
            wait_for_documents("losses", self.parts, half, self._measure_losses, self.slowest_s)
        # Asked before targets are chosen, as other processes may finish their losses meanwhile. The
        # check below would then miss targets that are there.
        has_all_losses = self.parts.find_finished("losses").issuperset(self.numbers)
        self._choose_targets()
        if has_all_losses:
            # Before hours are spent on the targets of the placebo alone.
            check_any_target(self.plan, self.targets, self.parts)

        slowest_recovery_s = work_on_documents(
            "recovery",
            self.parts,
            self._with_targets(self.numbers_of_process),
            self._measure_recovery,
            self.is_first,
        )
        # A process without targets has measured nothing here, and must have patience, too.
        self.slowest_s = max(self.slowest_s, slowest_recovery_s)

    def _wait_for_launch(self) -> None:
        """Wait for the documents of the other processes of this launch."""
        wait_for_documents(
            "losses", self.parts, self.numbers_of_shard, self._measure_losses, self.slowest_s
        )
        # Those of this process were chosen already; now those of the others are known, too.
        self._choose_targets()
        with_targets = self._with_targets(self.numbers_of_shard)
        wait_for_documents(
            "recovery", self.parts, with_targets, self._measure_recovery, self.slowest_s
        )

    def _count_unfinished(self) -> int:
        """Return how many documents, of all shards, are not finished."""
        without_losses = set(self.numbers) - self.parts.find_finished("losses")
        if without_losses:
            return len(without_losses)
        self._choose_targets()
        check_any_target(self.plan, self.targets, self.parts)
        return len(set(self.targets.document) - self.parts.find_finished("recovery"))

    # --- steps of one document, and what is between the phases ---

    def _measure_losses(self, number: int) -> None:
        """Compute and store the losses of one document."""
        self.parts.add("losses", number, self.plan.compute_losses(number))

    def _measure_recovery(self, number: int) -> None:
        """Evaluate the targets of one document, and store their rows."""
        tables = self.plan.evaluate_targets(number, self.targets, self.parts)
        self.parts.add("recovery", number, tables)

    def _choose_targets(self) -> None:
        """Choose the targets of the documents that have losses so far."""
        self.parts.flush()  # so that this process's own losses can be read
        targets = self.plan.select_targets(self.parts.read("losses"))
        # Fixed targets are all returned, also those of documents that are not finished.
        self.targets = targets[targets.document.isin(self.parts.find_finished("losses"))]

    def _with_targets(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of those among these documents that have a target."""
        return sorted(set(numbers) & set(self.targets.document))
