"""Whether a gate passes unchanged input and fails where a source is missing.

    python -m study.benchmarks.gate study/results/models/sources_32

Twelve exercises of the laboratory, of which is known what each statement rests on. Printed are: 20
runs of the same input with the first as baseline; 20 runs with other decoys (the null: what differs
is chance); and one run in which a prompt builder drops the first source of each question.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import pandas as pd

from olmo_sparsity import load_model
from olmo_sparsity.analysis.attribution.gate import GateReport, check
from olmo_sparsity.analysis.attribution.questions import measure_questions
from olmo_sparsity.analysis.attribution.segments import AttributeRequest
from olmo_sparsity.analysis.settings import SourceSettings
from study.benchmarks.laboratory import NONE, ONE, Exercise, exercises

NUM, RUNS = 12, 20


def line(one: Exercise, dropped: bool) -> str:
    expect = [
        need[0] if kind == ONE else "none" if kind == NONE else None
        for kind, need in zip(one.kinds, one.needs, strict=True)
    ]
    sources = dict([*one.sources.items()][int(dropped) :])
    about = {"sources": sources, "question": one.question, "answer": one.statements}
    return json.dumps(about | {"expect": expect})


def main(name: str) -> None:
    model, drawn = load_model(name), list(exercises(NUM, 77))
    with tempfile.TemporaryDirectory() as root:

        def run(out: str, seed: int = 0, dropped: bool = False) -> GateReport:
            file, folder = Path(root, f"{out}.jsonl"), Path(root, out)
            file.write_text("\n".join(line(one, dropped) for one in drawn))
            with redirect_stderr(io.StringIO()):
                common = AttributeRequest(model=model, settings=SourceSettings(seed=seed))
                measure_questions(common, file, folder)
            return check(file, folder, Path(root, "first"))

        def failed(found: GateReport, kind: str) -> int:
            return sum(case.kind == kind for case in found.failures)

        first = run("first")
        num = {k: sum(c.kind == k for c in first.checks) for k in ("expect", "baseline")}
        print(f"checks: {num['expect']} of expect, {num['baseline']} of the baseline")
        print(f"first run: {failed(first, 'expect')} fail")
        same = [run(f"same{i}") for i in range(RUNS)]
        print(f"{sum(not one.failures for one in same)} of {RUNS} equal runs pass")
        before = pd.read_parquet(Path(root, "first", "statements.parquet")).sources.map(tuple)
        others = [run(f"seed{seed}", seed) for seed in range(1, RUNS + 1)]
        for kind in ("expect", "baseline"):
            print(f"other decoys, {kind}: {[failed(one, kind) for one in others]}")
        after = [
            pd.read_parquet(Path(root, f"seed{i}", "statements.parquet")) for i in range(1, 21)
        ]
        differ = [int((one.sources.map(tuple) != before).sum()) for one in after]
        print(f"other decoys, verdicts that differ: {differ}")
        dropped = run("dropped", dropped=True)
        print(
            f"a source dropped: {failed(dropped, 'expect')} of expect fail, "
            f"{failed(dropped, 'baseline')} of the baseline"
        )


if __name__ == "__main__":
    main(sys.argv[1])
