"""What one target costs at 1k to 32k tokens, by selector: token-forwards, seconds, memory.

python benchmarks/long_context.py [--model FOLDER] [--lengths 1024,8192,32768] [--out FILE.json]

Without a model it takes random weights (4 layers, width 256), which cost the same. Each row is a
process of its own, so that its peak of memory is its own. Seconds of a noisy machine compare within
one run only. add_one is asked in full up to --exact-up-to tokens; beyond, its cost is computed: its
rows are all alike.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch

from analysis.influence import SELECTORS, Question
from analysis.scoring import Scorer
from analysis.windows import Units, Windows
from olmo_sparsity.config import ModelConfig
from olmo_sparsity.model.load import build_model, load_model

SHORT, K = 256, 4
ASKED = ("add_one_nested", "add_one_screened", "gradient", "attention", "add_one")


def random_model(length: int) -> Any:
    torch.manual_seed(0)
    return build_model(
        ModelConfig(
            d_model=256,
            n_heads=4,
            n_layers=4,
            vocab_size=8192,
            max_sequence_length=length + 1,
            layer_norm_type="rms",
            weight_tying=True,
        )
    ).eval()


def measure_row(model_name: str, selector: str, length: int) -> dict[str, Any]:
    """One target at the end of `length` tokens, all of them before it."""
    model = load_model(model_name).model if model_name else random_model(length)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, length + 1)
    block = Windows("all", SHORT).block(tokens, length, length + 1)
    scorer = Scorer(model)
    started = time.perf_counter()
    context = scorer.context(block)
    prefilled, prefill_s = scorer.token_forwards, time.perf_counter() - started
    units = Units.of_tokens(block.num_far)
    question = Question(context, units, [(0, 1)], K, np.random.default_rng(0))
    started = time.perf_counter()
    choice = SELECTORS[selector](scorer, question)
    return {
        "selector": selector,
        "length": length,
        "token_forwards": scorer.token_forwards - prefilled,
        "seconds": time.perf_counter() - started,
        "prefill_seconds": prefill_s,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "chosen": choice.unit_TK[0].tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768")
    parser.add_argument("--selectors", default=",".join(ASKED))
    parser.add_argument("--exact-up-to", type=int, default=4096)
    parser.add_argument("--out")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        selector, length = options.row.split(":")
        print(json.dumps(measure_row(options.model, selector, int(length))))
        return
    rows = []
    print(f"{'tokens':>7}  {'selector':18} {'token-forwards':>14} {'seconds':>9} {'GiB':>6}")
    for length in map(int, options.lengths.split(",")):
        for selector in options.selectors.split(","):
            if selector == "add_one" and length > options.exact_up_to:
                row = {"selector": selector, "length": length, "seconds": None, "peak_gib": None,
                       "token_forwards": (length - SHORT + 1) * SHORT}  # fmt: skip
            else:
                command = [sys.executable, __file__, "--model", options.model]
                command += ["--row", f"{selector}:{length}"]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    last = (done.stderr.strip().splitlines() or ["killed"])[-1]
                    row = {"selector": selector, "length": length, "failed": last[:120]}
                else:
                    row = json.loads(done.stdout)
            rows.append(row)
            if "failed" in row:
                print(f"{length:>7}  {selector:18} {row['failed']}")
                continue
            seconds, memory = (
                "computed" if row[name] is None else f"{row[name]:.2f}"
                for name in ("seconds", "peak_gib")
            )
            print(f"{length:>7}  {selector:18} {row['token_forwards']:>14,} {seconds:>9} "
                  f"{memory:>6}", flush=True)  # fmt: skip
    if options.out:
        with open(options.out, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
