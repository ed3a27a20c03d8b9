"""What one target costs at 1k to 32k tokens, by selector: token-forwards, seconds, peak memory (of
the GPU, if there is one).

python -m study.benchmarks.long_context [--model FOLDER] [--lengths 1024,8192] [--out FILE.json]

Without a model it takes random weights (4 layers, width 256), which cost the same. Each row is a
process of its own, so that its peak of memory is its own. Seconds of a noisy machine compare within
one run only. A row that takes more than --cpu-seconds is stopped: its memory is the peak until
then, and the forwards of add_one, with equal rows, are computed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch

from olmo_sparsity.analysis.inputs.windows import Units, Windows
from olmo_sparsity.analysis.models.load import load_model
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.influence import SELECTORS
from olmo_sparsity.analysis.selectors.selector import Question
from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.model.build import build_model
from olmo_sparsity.runtime import choose_device, peak_memory_gib

SHORT, K = 256, 4
ASKED = tuple(name for name in SELECTORS if name not in ("nearest", "random"))


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


def measure_row(model_name: str, selector: str, length: int, cpu_seconds: int) -> dict[str, Any]:
    """One target at the end of `length` tokens, all of them before it."""
    model = load_model(model_name).model if model_name else random_model(length)
    device = choose_device("auto")
    model.to(device)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, length + 1)
    block = Windows("all", SHORT).block(tokens, length, length + 1)
    scorer = Scorer(model)
    started = time.perf_counter()
    context = scorer.context(block)
    prefilled, prefill_s = scorer.token_forwards, time.perf_counter() - started
    units = Units.of_tokens(block.num_far)
    question = Question(context, units, [(0, 1)], K, np.random.default_rng(0))
    started = time.perf_counter()

    def found(**more: Any) -> dict[str, Any]:
        return {
            "selector": selector,
            "length": length,
            "token_forwards": scorer.token_forwards - prefilled,
            "seconds": time.perf_counter() - started,
            "prefill_seconds": prefill_s,
            "peak_gib": peak_memory_gib(device),
            **more,
        }

    def give_up(*_: Any) -> None:
        print(json.dumps(found(stopped=True)))
        sys.stdout.flush()
        os._exit(0)

    signal.signal(signal.SIGXCPU, give_up)
    spent = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_seconds, resource.RLIM_INFINITY))
    choice = SELECTORS[selector](scorer, question)
    return found(chosen=choice.unit_TK[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768")
    parser.add_argument("--selectors", default=",".join(ASKED))
    parser.add_argument("--cpu-seconds", type=int, default=300)
    parser.add_argument("--out")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        selector, length = options.row.split(":")
        row = measure_row(options.model, selector, int(length), options.cpu_seconds)
        print(json.dumps(row))
        return
    rows = []
    print(f"{'tokens':>7}  {'selector':18} {'token-forwards':>14} {'seconds':>9} {'GiB':>6}")
    for length in map(int, options.lengths.split(",")):
        for selector in options.selectors.split(","):
            command = [
                sys.executable,
                "-m",
                "study.benchmarks.long_context",
                "--model",
                options.model,
            ]
            command += ["--row", f"{selector}:{length}", "--cpu-seconds", str(options.cpu_seconds)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["killed"])[-1]
                row = {"selector": selector, "length": length, "failed": last[:120]}
            else:
                row = json.loads(done.stdout)
                if row.get("stopped"):
                    computed = (length - SHORT + 1) * SHORT if selector == "add_one" else None
                    row["token_forwards"] = computed
            rows.append(row)
            if "failed" in row:
                print(f"{length:>7}  {selector:18} {row['failed']}")
                continue
            seconds = "stopped" if row.get("stopped") else f"{row['seconds']:.2f}"
            forwards = "–" if row["token_forwards"] is None else f"{row['token_forwards']:,}"
            print(
                f"{length:>7}  {selector:18} {forwards:>14} {seconds:>9} {row['peak_gib']:>6.2f}",
                flush=True,
            )
    if options.out:
        with open(options.out, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
