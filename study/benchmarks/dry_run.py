"""Compare what `measure --dry-run` predicts with a run: token-forwards, time, memory.

python -m study.benchmarks.dry_run MODEL [any arguments of `olmo-sparsity measure` but --out]

Time means something on an idle machine only.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from olmo_sparsity.analysis.results.results import read_results

UNITS = {"h": 3600, "min": 60, "s": 1}


def measure(arguments: list[str], folder: Path) -> str:
    command = ["olmo-sparsity", "measure", *arguments, "--out", folder]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as place:
        said = measure([*arguments, "--dry-run"], Path(place, "out"))
        measure(arguments, Path(place, "out"))
        meta = read_results(Path(place, "out")).meta
    # Of the larger of the two processes; the trial does no more than the measurement.
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    ((forwards,), (gib,), (time,)) = (
        re.findall(pattern, said)
        for pattern in (r"token-forwards +about ([\d.e+]+)", r"memory +([\d.]+) GiB", r"time +(.*)")
    )
    seconds = sum(int(n) * UNITS[unit] for n, unit in re.findall(r"(\d+) (h|min|s)\b", time))
    print(f"{'':16}{'said':>12}{'came':>12}{'ratio':>8}")
    for name, says, comes, digits in (
        ("token-forwards", float(forwards), meta.token_forwards_of_last_start, 0),
        ("seconds", seconds, meta.seconds_of_last_start, 0),
        ("GiB", float(gib), memory, 2),
    ):
        ratio = f"{comes / says:.2f}" if says else "–"
        print(f"{name:<16}{says:>12,.{digits}f}{comes:>12,.{digits}f}{ratio:>8}")


if __name__ == "__main__":
    main()
