"""Measure how close `prepare` comes to its limit, the bare tokenizer.

    python benchmarks/prepare.py

Claims, checked on the same text and cores within one run:
  - tokens/s of `prepare` (decompress, parse, split, tokenize, write, hash) is at least 0.9 of bare
    `tokenizers.encode_batch` on texts that already lie in memory;
  - it is faster than `datasets.map` with the same tokenizer, in either of its two parallel ways
    (a process per core, or the tokenizer's own threads), which does not even have to read JSON;
  - its peak memory (RSS) on the whole corpus stays below 1.5 GB.

The text is the embedded corpus, shuffled anew for every pass, as C4-format .json.gz files. On the
first of them all contestants run one after the other, several rounds, each time in a process of its
own; what counts is the best round of each, so that other users of the machine disturb little. Every
contestant's time includes loading the tokenizer.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import platform
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

PART_MEGABYTES = 30
BATCH_CHARACTERS = 2**21  # As in prepare: what differs is the work around the tokenizer.


def measure_bare(part: str, tokenizer_name: str, scratch: str) -> Callable[[], object]:
    """Read texts into memory, and return a function that only tokenizes them."""
    from olmo_sparsity.config.text import CorpusConfig
    from olmo_sparsity.data.tokenizer import load_tokenizer
    from olmo_sparsity.text.corpus import read_documents

    batches: list[list[str]] = [[]]
    num_characters = 0
    for document in read_documents(CorpusConfig("c4_files", path=part)):
        if num_characters > BATCH_CHARACTERS:
            batches.append([])
            num_characters = 0
        batches[-1].append(document.text)
        num_characters += len(document.text)

    def work() -> None:
        tokenizer = load_tokenizer(tokenizer_name)
        for batch in batches:
            tokenizer.encode_batch(batch, add_special_tokens=False)

    return work


def measure_prepare(part: str, tokenizer_name: str, scratch: str) -> Callable[[], object]:
    """Return a function that prepares the files, and returns the number of tokens."""
    from olmo_sparsity.config.text import CorpusConfig, DataConfig, TokenizerConfig
    from olmo_sparsity.data.prepare import prepare
    from olmo_sparsity.data.shard_manifest import SPLITS

    data = DataConfig(
        folder=f"{scratch}/prepared",
        corpus=CorpusConfig("c4_files", path=part),
        tokenizer=TokenizerConfig(name=tokenizer_name),
    )

    def work() -> int:
        manifest = prepare(data)
        return sum(manifest.num_tokens(split) for split in SPLITS)

    return work


def measure_map(num_proc: int | None) -> Callable[[str, str, str], Callable[[], object]]:
    """Return a contestant: `datasets.map` with processes, or with the tokenizer's own threads."""

    def measure(part: str, tokenizer_name: str, scratch: str) -> Callable[[], object]:
        import datasets

        from olmo_sparsity.data.tokenizer import load_tokenizer

        if num_proc:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        datasets.disable_progress_bars()
        rows = datasets.load_dataset(
            "json", data_files=part, split="train", cache_dir=f"{scratch}/cache"
        )

        def work() -> None:
            tokenizer = load_tokenizer(tokenizer_name)

            def encode(batch: dict) -> dict:
                encodings = tokenizer.encode_batch(batch["text"], add_special_tokens=False)
                return {"ids": [encoding.ids for encoding in encodings]}

            rows.map(encode, batched=True, num_proc=num_proc, remove_columns=rows.column_names)

        return work

    return measure


CORES = len(os.sched_getaffinity(0))
CONTESTANTS = {
    "encode_batch": measure_bare,
    "prepare": measure_prepare,
    "map, processes": measure_map(CORES),
    "map, threads": measure_map(None),
}


def run_contestant(name: str, part: str, tokenizer_name: str) -> dict[str, Any]:
    """In a process of its own, set a contestant up and time its work alone."""
    with tempfile.TemporaryDirectory() as scratch:
        work = CONTESTANTS[name](part, tokenizer_name, scratch)
        started = time.perf_counter()
        started_cpu = cpu_seconds()
        result = work()
        seconds = time.perf_counter() - started
        cpu = cpu_seconds() - started_cpu
    status = Path("/proc/self/status").read_text()
    peak_mb = int(status.split("VmHWM:")[1].split()[0]) / 1024
    return {"seconds": seconds, "cpu": cpu, "peak_mb": peak_mb, "result": result}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    this_process = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = this_process.ru_utime + this_process.ru_stime
    return seconds + children.ru_utime + children.ru_stime


def call_contestant(name: str, part: str, tokenizer_name: str) -> dict[str, Any]:
    """Run a contestant in a new process, so that none profits from what another has loaded."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_contestant, name, part, tokenizer_name).result()


def write_corpus(folder: Path, megabytes: int) -> list[Path]:
    """Write files in C4's format, of the embedded texts in an order that is new in each pass."""
    from olmo_sparsity.config.text import CorpusConfig
    from olmo_sparsity.text.corpus import read_documents

    texts = [document.text for document in read_documents(CorpusConfig("embedded"))]
    rng = random.Random(0)
    paths: list[Path] = []
    written = 0
    while written < megabytes * 10**6:
        paths.append(folder / f"c4-train.{len(paths):05d}.json.gz")
        end_of_file = written + min(PART_MEGABYTES * 10**6, megabytes * 10**6 - written)
        with gzip.open(paths[-1], "wb", compresslevel=3) as file:
            while written < end_of_file:
                for text in rng.sample(texts, len(texts)):
                    row = {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": ""}
                    file.write(json.dumps(row).encode() + b"\n")
                    written += len(text.encode())
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200, help="of text in the whole corpus")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokenizer", default="allenai_dolma2.json")
    options = parser.parse_args()
    rounds_by_name: dict[str, list[dict]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        part = str(write_corpus(Path(folder), options.megabytes)[0])
        for turn in range(options.rounds):
            for name, rounds in rounds_by_name.items():
                rounds.append(call_contestant(name, part, options.tokenizer))
                print(f"round {turn}: {name} {rounds[-1]['seconds']:.1f} s", file=sys.stderr)
        whole = call_contestant("prepare", f"{folder}/*.json.gz", options.tokenizer)
    report(options, rounds_by_name, whole)


def report(
    options: argparse.Namespace, rounds_by_name: dict[str, list[dict]], whole: dict[str, Any]
) -> None:
    """Print the best round of each contestant, and whether the claims hold. `whole`: of `prepare`
    on the whole corpus."""
    processor = platform.processor() or platform.machine()
    load = os.getloadavg()[0]
    print(f"\n{date.today()} · {processor}, {CORES} cores, load {load:.1f} at the end")
    packages = " ".join(f"{name} {version(name)}" for name in ("tokenizers", "datasets"))
    print(f"Python {platform.python_version()}, {packages}, {options.tokenizer}")
    print(f"python {' '.join(sys.argv)}")
    best = {
        name: min(rounds, key=lambda run: run["seconds"]) for name, rounds in rounds_by_name.items()
    }
    seconds = {name: run["seconds"] for name, run in best.items()}
    num_tokens = best["prepare"]["result"]
    size = min(PART_MEGABYTES, options.megabytes)
    print(f"{size} MB of text, {num_tokens:,} tokens, best of {options.rounds} rounds\n")
    print("| contestant     | seconds |  tokens/s | CPU seconds | prepare is |")
    print("|----------------|--------:|----------:|------------:|-----------:|")
    for name in CONTESTANTS:
        ratio = seconds[name] / seconds["prepare"]
        rate = num_tokens / seconds[name]
        print(
            f"| {name:<14} | {seconds[name]:>7.1f} | {rate:>9,.0f} | {best[name]['cpu']:>11.1f} | "
            f"{ratio:>9.2f}x |"
        )
    to_bare = seconds["encode_batch"] / seconds["prepare"]
    to_map = min(seconds["map, processes"], seconds["map, threads"]) / seconds["prepare"]
    rate = whole["result"] / whole["seconds"]
    print(f"\nwhole corpus, {options.megabytes} MB, in one run: {rate:,.0f} tokens/s")
    for claim, holds in (
        (f"{to_bare:.2f} of encode_batch, at least 0.9 wanted", to_bare >= 0.9),
        (f"{to_map:.2f} of the faster datasets.map, more than 1 wanted", to_map > 1),
        (
            f"{whole['peak_mb']:,.0f} MB of memory at its peak, below 1,500 wanted",
            whole["peak_mb"] < 1500,
        ),
    ):
        print(f"{'met   ' if holds else 'MISSED'} {claim}")


if __name__ == "__main__":
    main()
