"""Claim: trained at length 64, PoSE lowers the held-out loss at positions 64 to 255.

Trains the model of configs/quick.yaml at length 64, with RoPE alone and with RoPE + PoSE up to 256,
on the same text in the same order, five seeds each; about half an hour on 2 cores. Interrupted, it
goes on where it stopped. (Three seeds were planned: PoSE was ahead in all three, with an interval
that held zero; two more were added then.) Writes results/pose_pays.json, from which docs/results.md
quotes once it is stored (study/pages/keep_results.py).

    python -m study.benchmarks.pose_pays
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from olmo_sparsity.config.run import load_config
from olmo_sparsity.data.tokens import prepare
from olmo_sparsity.runtime import provenance
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.run_folder import read_metrics
from study.theory.results import half_width

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "results/pose_pays.json"
SEEDS = (11, 12, 13, 14, 15)  # configs/quick.yaml was set up while looking at seed 1

SETTINGS = [
    "--model.max_sequence_length=256",
    "--training.length=64",
    "--training.batch_size=64",
    "--training.num_steps=500",
    "--evaluation.length=256",
    "--evaluation.interval_steps=null",
    "--evaluation.num_sequences=400",
    "--checkpoint.interval_steps=100",
]
SCHEMES = {
    "rope": ["--positions.scheme=contiguous", "--positions.target_length=null"],
    "pose": ["--positions.scheme=pose", "--positions.target_length=256"],
}


def heldout_losses(scheme: str, seed: int) -> list[dict]:
    run_folder = f"runs/pose_pays/{scheme}_{seed}"
    overrides = [*SETTINGS, *SCHEMES[scheme], f"--seed={seed}", f"--run_folder={run_folder}"]
    config = load_config(ROOT / "configs/quick.yaml", overrides)
    prepare(config.data)
    if train(config):
        sys.exit("stopped; run the same command to go on")
    rows = list(read_metrics(Path(run_folder) / "metrics.jsonl"))
    return [row for row in rows if "heldout" in row][-1]["heldout"]


def main() -> None:
    losses = {scheme: {seed: heldout_losses(scheme, seed) for seed in SEEDS} for scheme in SCHEMES}
    ranges = [(row["from"], row["to"]) for row in losses["rope"][SEEDS[0]]]
    table = []
    for index, (first, last) in enumerate(ranges):
        by_scheme = {
            scheme: [losses[scheme][seed][index]["loss"] for seed in SEEDS] for scheme in SCHEMES
        }
        differences = [
            rope - pose for rope, pose in zip(by_scheme["rope"], by_scheme["pose"], strict=True)
        ]
        mean, half = float(np.mean(differences)), half_width(np.array(differences))
        low, high = mean - half, mean + half
        table.append(
            {
                "positions": [first, last],
                "num_tokens": losses["rope"][SEEDS[0]][index]["num_tokens"],
                "rope": sum(by_scheme["rope"]) / len(SEEDS),
                "pose": sum(by_scheme["pose"]) / len(SEEDS),
                "rope_minus_pose": {"mean": mean, "low": low, "high": high},
            }
        )
        print(
            f"positions {first:>3} … {last - 1:<3}  RoPE {table[-1]['rope']:.3f}  "
            f"PoSE {table[-1]['pose']:.3f}  difference {mean:+.3f} [{low:+.3f}, {high:+.3f}]"
        )
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        json.dumps(
            {
                "command": "python -m study.benchmarks.pose_pays",
                **provenance("cpu"),
                "seeds": SEEDS,
                "interval": "95%, Student's t over seeds, paired by seed",
                "ranges": table,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
