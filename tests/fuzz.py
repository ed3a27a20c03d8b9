"""Random malformed input to every command: each must be answered, or named in one line.

    python -m tests.fuzz --cases 1000            every case has its number as its seed
    python -m tests.fuzz --only case:137         one of them again, with its traceback

A case takes whole input, spoils one file, one setting or one option at random, and runs a command
on it in this process. What is a failure:

    a traceback      anything but the exit codes that the command line documents
    no answer        exit code 2 without exactly one line that says why
    a hang           more than LIMIT_S
    a silent loss    exit code 0 and a corpus of which lines are missing
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import io
import json
import os
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
import yaml

from olmo_sparsity.command.cli import main
from olmo_sparsity.data.shards import Manifest
from tests.conftest import small_run, small_task

LIMIT_S = 300  # of a busy machine, too

Random = np.random.Generator
T = TypeVar("T")


class Failure(Exception):
    """What a command did that it must not do."""


# --- spoiling -------------------------------------------------------------------------------------


def pick(random: Random, some: Sequence[T]) -> T:
    return some[int(random.integers(len(some)))]


LINES = [b"", b"{", b"null", b"[1]", b"7", b'"x"', b"{}", b'{"step": "x"}', b'{"step": 1e999}',
         b'{"step": 2, "loss": null}', b'{"step": 2, "heldout": 3}', b"[" * 10**5]  # fmt: skip


def spoil_file(path: Path, random: Random) -> str:
    """Changes one file; the name of what was done."""
    content = path.read_bytes()
    place = int(random.integers(len(content) + 1))
    before, after, some = content[:place], content[place:], random.bytes(random.integers(1, 33))
    lines = content.splitlines(keepends=True)
    at = int(random.integers(len(lines) or 1))
    changes = {
        "flip": before + bytes(byte ^ 1 << random.integers(8) for byte in after[:1]) + after[1:],
        "cut": before,
        "insert": before + some + after,
        "remove": before + after[len(some) :],
        "zeros": before + bytes(len(after[: len(some)])) + after[len(some) :],
        "empty": b"",
        "repeat": before + before[-200:] + after,
        "double": content + content,
        "noise": random.bytes(len(content)),
        "renumber": before
        + re.sub(rb"[0-8]", lambda digit: bytes([digit[0][0] + 1]), after, count=1),
        "halve": b"".join(lines[::2]) if len(lines) > 1 else content[: len(content) // 2],
        "lose a line": b"".join(lines[:at] + lines[at + 1 :]),
        "spoil a line": b"".join([*lines[:at], pick(random, LINES), b"\n", *lines[at + 1 :]]),
    }
    kind = pick(random, [*changes, "absent", "folder", "loop"])
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind != "absent":
        path.write_bytes(changes[kind])
    return f"{kind} at {place} of {len(content)} in {path.name}"


STRANGE: list[Any] = [
    *(None, True, -1, 0, 1, 2, 3.5, -0.5, 1e30, float("nan"), float("inf")),
    *("", "x", "1", "null", "ü\x00", "../..", "/dev/null", "${seed}", "${nothing}", "a" * 5000),
    *([], [1, 2], ["x"], [[]], {}, {"x": 1}),
]


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in nested dicts and lists, with each of its keys."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places_of(value[key])


def spoil_settings(settings: dict[str, Any], random: Random) -> tuple[dict[str, Any], str]:
    """One key removed, renamed, added, or given a strange value; seldom one of a whole section."""
    changed, leaf = copy.deepcopy(settings), random.random() < 0.9
    places = [(node, key) for node, key in places_of(changed) if isinstance(node, dict)]
    section, key = pick(
        random, [(s, k) for s, k in places if not (leaf and isinstance(s[k], dict))]
    )
    strange = pick(random, STRANGE)
    kind = pick(random, ["value", "value", "value", "remove", "rename", "add"])
    if kind == "value":
        section[key] = strange
    elif kind == "add":
        section[f"{key}_more"] = strange
    else:
        value = section.pop(key)
        if kind == "rename":
            section[key.upper()] = value
    return changed, f"{kind} {key} {strange!r}"


# --- the world of whole inputs --------------------------------------------------------------------


@dataclass
class World:
    """Settings, and what `prepare` and `train` made of them, once."""

    folder: Path
    run: dict[str, Any]
    task: dict[str, Any]
    theory: dict[str, Any]


MEASURE = ["--long", "24", "--short", "8", "--stride", "8", "--ks", "1,2", "--draws", "1",
           "--selectors", "random,nearest", "--min-gap", "0", "--max-documents", "8"]  # fmt: skip


def make_world(folder: Path) -> World:
    corpus = folder / "corpus.jsonl"
    words = ["the", "model", "reads", "far", "words", "and", "says", "what", "comes", "next"]
    random = np.random.default_rng(0)
    lines = [
        json.dumps({"text": f"Document {number}: {' '.join(random.choice(words, 60))}."})
        for number in range(40)
    ]
    corpus.write_text("\n".join(lines) + "\n")
    run = small_run(
        folder / "run",
        {
            "folder": str(folder / "data"),
            "corpus": {"source": "c4_files", "path": str(corpus)},
            "tokenizer": {"train_vocab": 300},
            "heldout_share": 0.4,
        },
    )
    run["training"]["num_steps"] = 3
    run["evaluation"]["interval_steps"] = run["checkpoint"]["keep"] = 2
    task = small_task(folder / "task")
    task |= {"seeds": [1], "num_test_samples": 20, "positions": {"num_chunks": 2}}
    theory = {
        "output": str(folder / "theory"),
        "figure": str(folder / "theory_figure"),
        "train_length": 6,
        "test_multiples": [1, 2],
        "local_span": 2,
        "seeds": [1],
        "num_strings": 20,
        "cases": [{"setting": "local", "num_places": 1, "marker_rate": 0.1}],
    }
    for command, settings in (("prepare", run), ("train", run), ("task", task), ("theory", theory)):
        succeed([command, write_yaml(folder / f"{command}.yaml", settings)])
    return World(folder, run, task, theory)


def write_yaml(path: Path, settings: Any) -> str:
    path.write_text(yaml.safe_dump(settings, allow_unicode=True))
    return str(path)


# --- running --------------------------------------------------------------------------------------


@dataclass
class Answer:
    code: int
    out: str
    error: str


def run_command(words: list[str]) -> Answer:
    def late(*_: object) -> None:
        raise Failure(f"no answer after {LIMIT_S} s")

    out, error = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            try:
                code = main(words)
            except SystemExit as exit:
                code = exit.code if isinstance(exit.code, int) else 2
    except Failure:
        raise
    except BaseException as bug:
        raise Failure(f"{type(bug).__name__}: {bug}") from bug
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    answer = Answer(code, out.getvalue(), error.getvalue())
    if code not in (0, 2):
        raise Failure(f"exit code {code}: {answer.error[-300:]}")
    if code == 2:
        said = [line for line in answer.error.splitlines() if line.startswith("olmo-sparsity")]
        if len(said) != 1:
            raise Failure(f"exit code 2, and {len(said)} lines that say why: {answer.error[-300:]}")
        if "Traceback" in answer.error:
            raise Failure(f"a traceback is printed: {answer.error[-300:]}")
    return answer


def succeed(words: list[str]) -> Answer:
    answer = run_command(words)
    assert answer.code == 0, answer.error
    return answer


def measure(world: World, out: Path, *words: str) -> Answer:
    return run_command(["measure", world.run["run_folder"], "--out", str(out), *MEASURE, *words])


# --- the kinds of cases ---------------------------------------------------------------------------
# Each spoils something, runs a command, and raises Failure if something was lost without a word.
# It tells `say` what it did. Folders that commands have made are damaged in tests/faults.py.

Say = Callable[[str], None]
Kind = Callable[[World, Path, Random, Say], None]


def corpus(world: World, here: Path, random: Random, say: Say) -> None:
    path = here / ("corpus" + pick(random, [".jsonl", ".json.gz"]))
    content = (world.folder / "corpus.jsonl").read_bytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    say(spoil_file(path, random))
    data = {"folder": str(here / "data"), "corpus": {"source": "c4_files", "path": str(path)}}
    settings = world.run | {"data": world.run["data"] | data}
    settings["data"]["corpus"]["max_bad_share"] = float(random.choice([0, 0.5, 1]))
    answer = run_command(["prepare", write_yaml(here / "run.yaml", settings)])
    if answer.code == 0 and path.suffix == ".jsonl":
        manifest = Manifest.load(here / "data")
        num_lines = len(path.read_bytes().removesuffix(b"\n").split(b"\n"))
        kept = sum(file.num_documents for file in manifest.files)
        told = manifest.tally.num_bad + sum(manifest.tally.left_out.values())
        if num_lines != kept + told:
            raise Failure(f"{num_lines} lines, {kept} documents, {manifest.tally.describe()}")


def config(world: World, here: Path, random: Random, say: Say) -> None:
    # Where the file says nothing, or too much, no more steps either.
    words = ["--training.num_steps=3", *(["--dry-run"] if random.random() < 0.5 else [])]
    run_spoilt(["train", *words], world.run | {"run_folder": str(here / "run")}, random, say)


def run_spoilt(command: list[str], settings: dict[str, Any], random: Random, say: Say) -> None:
    changed, done = spoil_settings(settings, random)
    say(done)
    given = write_yaml(Path("settings.yaml"), changed)
    if random.random() < 0.1:
        say(spoil_file(Path(given), random))
    run_command([command[0], given, *command[1:]])


def override(world: World, here: Path, random: Random, say: Say) -> None:
    sections = [f"{a}.{b}" for a, part in world.run.items() if isinstance(part, dict) for b in part]
    name = pick(random, [*sections, "", "data..folder", "-", "model", "model.d_model.x"])
    strange = pick(random, STRANGE)
    word = f"--{name}={strange}" if random.random() < 0.8 else f"--{name}"
    say(word[:100])
    given = write_yaml(here / "run.yaml", world.run | {"run_folder": str(here / "run")})
    run_command(["train", given, "--dry-run", word])


def task(world: World, here: Path, random: Random, say: Say) -> None:
    run_spoilt(["task"], world.task | {"output": str(here / "out")}, random, say)


def theory(world: World, here: Path, random: Random, say: Say) -> None:
    places = {"output": str(here / "out"), "figure": str(here / "drawn")}
    run_spoilt(["theory"], world.theory | places, random, say)


def sweep(world: World, here: Path, random: Random, say: Say) -> None:
    write_yaml(here / "run.yaml", world.run)
    positions = {"pose": {}, "rope": {"positions.scheme": "contiguous"}}
    given = {
        "folder": str(here / "sweep"),
        "configs": ["run.yaml"],
        "grid": {"positions": positions, "seed": [1, 2]},
    }
    run_spoilt(["sweep", "--list"], given, random, say)


OPTIONS = ["--long", "--short", "--stride", "--ks", "--units", "--selectors", "--share",
           "--min-gap", "--draws", "--max-documents", "--shard", "--seed", "--batch-tokens",
           "--text", "--dtype", "--device"]  # fmt: skip
VALUES = ["", "0", "-1", "1.5", "x", "1e99", "1,1", "0/0", "2/1", "nan", "top0%", "text:",
          "add_one,add_one", "span:x", "span:99", "words", "c4_files:*", "/dev/null", "25",
          "ü"]  # fmt: skip


def options(world: World, here: Path, random: Random, say: Say) -> None:
    """Options of `measure` that make no sense."""
    name, strange = pick(random, OPTIONS), pick(random, VALUES)
    say(f"{name}={strange}")
    measure(world, here / "out", f"{name}={strange}")


def texts(world: World, here: Path, random: Random, say: Say) -> None:
    """Every form of text that `measure` takes, spoilt."""
    rows = [json.loads(line) for line in (world.folder / "corpus.jsonl").read_text().splitlines()]
    field = pick(random, ["text", "text", "body", "", "a.b", "ü"])
    frame = pd.DataFrame({field: [row["text"] for row in rows[:12]], "id": range(12)})
    suffix = pick(random, [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md"])
    path = here / f"given{suffix}"
    if suffix in (".jsonl", ".json"):
        frame.to_json(path, orient="records", lines=suffix == ".jsonl")
    elif suffix in (".csv", ".tsv"):
        frame.to_csv(path, index=False, sep="," if suffix == ".csv" else "\t")
    elif suffix == ".parquet":
        frame.to_parquet(path)
    else:
        path.write_text("\n\n".join(frame[field]))
    say(f"--field={field}, {spoil_file(path, random)}" if random.random() < 0.8 else "whole")
    words = []
    if random.random() < 0.5:
        words += ["--field", field if random.random() < 0.8 else "other"]
    if random.random() < 0.5:
        words += ["--split-at", pick(random, ["whole", "blank-lines"])]
    words += [f"--at={places(random)}"] if random.random() < 0.3 else []
    given, piped = str(path), b""
    if random.random() < 0.3 and path.is_file():
        given, piped = "-", path.read_bytes()
    say(" ".join([given, *words]))
    with reading(piped):
        measure(world, here / "out", "--text", given, *words)


def places(random: Random) -> str:
    some = ["far", "comes next", "/far|words/", "/(/", "/.*/", "5:9", "9:5", "-1:2", "0:99999", ":",
            "", "//", "5:", "ü", "/(a+)+$/", "1e9:2", "\x00"]  # fmt: skip
    return pick(random, some)


def explain(world: World, here: Path, random: Random, say: Say) -> None:
    """One text or prompt, perhaps spoilt, and options that may make no sense."""
    path = here / "given.txt"
    line = (world.folder / "corpus.jsonl").read_text().splitlines()[0]
    path.write_text(json.loads(line)["text"][:200])  # what the model is prepared for
    if random.random() < 0.5:
        say(spoil_file(path, random))
    piped = path.read_bytes() if path.is_file() and random.random() < 0.3 else b""
    words = ["--text", "-" if piped else str(path)]
    if random.random() < 0.3:
        words = ["--prompt", pick(random, [f"@{path}", "the model reads far words", "", "@"])]
        if random.random() < 0.5:
            words += ["--target", pick(random, ["next", "", "ü"])]
    elif random.random() < 0.7:
        words.append(f"--at={places(random)}")
    words += ["--short=8", "-k=2"]
    if random.random() < 0.5:
        name = pick(random, ["--units", "--selector", "--long", "--short", "-k", "--prefix",
                             "--far-states", "--seed", "--batch-tokens", "--html", "--json",
                             "--chat"])  # fmt: skip
        strange = pick(random, [*VALUES, "all", "words", "16"])
        words += [name] if name in ("--json", "--chat") else [f"{name}={strange}"]
    say(" ".join(words))
    with reading(piped):
        run_command(["explain", world.run["run_folder"], *words])


KINDS: tuple[Kind, ...] = (
    *(corpus, config, override, task, theory),
    *(sweep, options, texts, explain),
)


@contextlib.contextmanager
def reading(piped: bytes) -> Iterator[None]:
    """Standard input."""
    with tempfile.TemporaryFile() as file:
        file.write(piped)
        file.seek(0)
        before, kept = sys.stdin, os.dup(0)
        os.dup2(file.fileno(), 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (stays open until it is put back)
        try:
            yield
        finally:
            sys.stdin = before
            os.dup2(kept, 0)
            os.close(kept)


# --- many cases -----------------------------------------------------------------------------------

Trial = Callable[[World, int, Path, Say], None]
"""Given its number, which is its seed, and an empty folder."""


def spoilt_input(world: World, number: int, here: Path, say: Say) -> None:
    kind = KINDS[number % len(KINDS)]
    say(kind.__name__)
    kind(world, here, np.random.default_rng(number), say)


def run_trial(world: World, trial: Trial, number: int) -> tuple[str, Failure | None]:
    """What was done, and what was wrong with the answer."""
    done: list[str] = []
    failure = None
    # Relative names that a spoiled setting gives end up here.
    with tempfile.TemporaryDirectory(dir=world.folder) as here, contextlib.chdir(here):
        try:
            trial(world, number, Path(here), done.append)
        except Failure as found:
            failure = found
        except Exception as bug:  # of a check: what it reads is not there, say
            failure = Failure(f"{type(bug).__name__}: {bug}")
            failure.__cause__ = bug
    return ", ".join(done), failure


def run_trials(
    make_world: Callable[[Path], World], trials: dict[str, tuple[Trial, int]], about: str
) -> bool:
    """As the command line says; whether one has failed. `trials`: with how many there are."""
    parser = argparse.ArgumentParser(description=about)
    for kind, (_, count) in trials.items():
        parser.add_argument(f"--{kind}s", type=int, default=count)
    parser.add_argument("--first", type=int, default=0, help="the first number")
    parser.add_argument("--only", help=f"one of them, as in {kind}:137, with its traceback")
    given = parser.parse_args()
    torch.set_num_threads(1)
    failed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as made:
        world = make_world(Path(made))
        if given.only is not None:
            kind, _, number = given.only.rpartition(":")
            done, failure = run_trial(world, trials[kind][0], int(number))
            print(done)
            if failure is not None:
                traceback.print_exception(failure.__cause__ or failure)
            return failure is not None
        for kind, (trial, _) in trials.items():
            count = getattr(given, f"{kind}s")
            for number in range(given.first, given.first + count):
                done, failure = run_trial(world, trial, number)
                if failure is not None:
                    failed[done.split(",")[0]] += 1
                    print(f"{kind}:{number} ({done}): {failure}", flush=True)
            print(f"{count} {kind}s; failures so far: {dict(failed) or 'none'}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(run_trials(make_world, {"case": (spoilt_input, 1000)}, "Malformed input."))
