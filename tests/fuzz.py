"""Random malformed input to every command: each must be answered, or named in one line.

    python -m tests.fuzz --cases 1000            every case has its number as its seed
    python -m tests.fuzz --only 137              one of them again, with its traceback

A case takes whole input that this file made with the commands themselves, spoils one file (or one
option) at random, and runs a command on it in this process. What is a failure:

    a traceback      anything but the exit codes that the command line documents
    no answer        exit code 2 without exactly one line that says why
    a hang           more than LIMIT_S
    a silent loss    exit code 0 and a result that lacks or changes what the whole input gives
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from analysis.results import read_results
from analysis.tables import MADE_OF_PARTS
from olmo_sparsity.cli import main
from olmo_sparsity.data.shards import Manifest
from olmo_sparsity.tasks.results import read_results as read_task_results

LIMIT_S = 60

Random = np.random.Generator


class Failure(Exception):
    """What a command did that it must not do."""


# --- spoiling -------------------------------------------------------------------------------------


def spoil_bytes(path: Path, random: Random) -> str:
    """Changes one file; the name of what was done."""
    content = bytearray(path.read_bytes())
    size = len(content)
    place = int(random.integers(size + 1))
    some = random.bytes(int(random.integers(1, 33)))
    kind = str(random.choice(["flip", "cut", "insert", "remove", "zeros", "empty", "repeat",
                              "noise", "absent", "folder"]))  # fmt: skip
    if kind == "flip" and size:
        content[min(place, size - 1)] ^= 1 << int(random.integers(8))
    elif kind == "cut":
        del content[place:]
    elif kind == "insert":
        content[place:place] = some
    elif kind == "remove":
        del content[place : place + len(some)]
    elif kind == "zeros":
        content[place : place + len(some)] = bytes(len(content[place : place + len(some)]))
    elif kind == "empty":
        content.clear()
    elif kind == "repeat":
        content[place:place] = content[max(0, place - 200) : place]
    elif kind == "noise":
        content[:] = random.bytes(size)
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind != "absent":
        path.write_bytes(content)
    return f"{kind} at {place} of {size} in {path.name}"


STRANGE: list[Any] = [
    *(None, True, -1, 0, 1, 2, 3.5, -0.5, 1e30, float("nan"), float("inf")),
    *("", "x", "1", "null", "ü\x00", "../..", "/dev/null", "${seed}", "${nothing}", "a" * 5000),
    *([], [1, 2], ["x"], [[]], {}, {"x": 1}),
]


def spoil_settings(settings: dict[str, Any], random: Random) -> tuple[dict[str, Any], str]:
    """One key removed, renamed, added, or given a strange value."""
    changed = json.loads(json.dumps(settings))
    section, name = changed, ""
    while True:
        key = str(random.choice(list(section)))
        name = f"{name}.{key}" if name else key
        if not isinstance(section[key], dict) or not section[key] or random.random() < 0.1:
            break
        section = section[key]
    strange = STRANGE[int(random.integers(len(STRANGE)))]
    kind = str(random.choice(["value", "value", "value", "remove", "rename", "add"]))
    if kind == "value":
        section[key] = strange
    elif kind == "add":
        section[f"{key}_more"] = strange
    else:
        value = section.pop(key)
        if kind == "rename":
            section[key.upper()] = value
    return changed, f"{kind} {name} {strange!r}"


# --- the world of whole inputs --------------------------------------------------------------------


@dataclass
class World:
    """What the commands made of whole input, once."""

    folder: Path
    run: dict[str, Any]
    task: dict[str, Any]
    theory: dict[str, Any]
    losses: str
    """What `losses` prints of the run."""


MEASURE = ["--long", "24", "--short", "8", "--stride", "8", "--ks", "1,2", "--foreign", "1",
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
    run = {
        "run_folder": str(folder / "run"),
        "seed": 3,
        "data": {
            "folder": str(folder / "data"),
            "corpus": {"source": "c4_files", "path": str(corpus)},
            "tokenizer": {"train_vocab": 300},
            "heldout_share": 0.4,
        },
        "positions": {"scheme": "pose", "target_length": 32, "num_chunks": 2},
        "model": {
            "d_model": 16,
            "n_heads": 2,
            "n_layers": 1,
            "max_sequence_length": 64,
            "layer_norm_type": "rms",
        },
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2, "beta1": 0.9},
        "training": {"length": 16, "batch_size": 4, "num_steps": 3, "precision": "fp32"},
        "evaluation": {"num_sequences": 4, "interval_steps": 2},
        "checkpoint": {"interval_steps": 2, "keep": 2},
    }
    task = {
        "output": str(folder / "task"),
        "task": {"name": "scratchpad_parity"},
        "schemes": ["rope", "ppc"],
        "seeds": [1],
        "train_lengths": [3, 5],
        "test_lengths": [4, 8],
        "num_test_samples": 20,
        "positions": {"num_chunks": 2},
        "model": {"d_model": 16, "n_heads": 2, "n_layers": 1, "mlp_ratio": 2},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "training": {"num_steps": 3, "batch_size": 8},
    }
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
    world = World(folder, run, task, theory, "")
    for command, settings in (("prepare", run), ("train", run), ("task", task), ("theory", theory)):
        expect(0, run_command([command, write_yaml(folder / f"{command}.yaml", settings)]))
    expect(
        0, run_command(["measure", run["run_folder"], "--out", str(folder / "results"), *MEASURE])
    )
    world.losses = losses_of(run["run_folder"])[1]
    return world


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


def expect(code: int, answer: Answer) -> Answer:
    assert answer.code == code, answer.error
    return answer


def choose_file(folder: Path, random: Random) -> Path:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return files[int(random.integers(len(files)))]


def changed_copy(world: World, name: str, here: Path, random: Random) -> tuple[Path, str]:
    copy = here / name
    shutil.copytree(world.folder / name, copy)
    path = choose_file(copy, random)
    return copy, f"{path.parent.name}: {spoil_bytes(path, random)}"


# --- the kinds of cases ---------------------------------------------------------------------------
# Each spoils something, runs a command, and raises Failure if something was lost without a word.
# It tells `say` what it did.

Say = Callable[[str], None]
Kind = Callable[[World, Path, Random, Say], None]


def corpus(world: World, here: Path, random: Random, say: Say) -> None:
    path = here / ("corpus" + str(random.choice([".jsonl", ".json.gz"])))
    content = (world.folder / "corpus.jsonl").read_bytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    say(spoil_bytes(path, random))
    data = {"folder": str(here / "data"), "corpus": {"source": "c4_files", "path": str(path)}}
    settings = world.run | {"data": world.run["data"] | data}
    settings["data"]["corpus"]["max_bad_share"] = float(random.choice([0, 0.5, 1]))
    answer = run_command(["prepare", write_yaml(here / "run.yaml", settings)])
    if answer.code == 0 and path.suffix == ".jsonl":
        manifest = Manifest.load(here / "data")
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
        kept = sum(file.num_documents for file in manifest.files)
        if len(lines) != kept + manifest.tally.num_bad:
            raise Failure(f"{len(lines)} lines, {kept} documents, {manifest.tally.describe()}")


def config(world: World, here: Path, random: Random, say: Say) -> None:
    given = world.run | {"run_folder": str(here / "run")}
    settings, done = spoil_settings(given, random)
    say(done)
    text = write_yaml(here / "run.yaml", settings)
    if random.random() < 0.2:
        say(spoil_bytes(here / "run.yaml", random))
    command = ["train", text, "--dry-run"] if random.random() < 0.5 else ["train", text]
    with working_in(here):
        run_command(command)


def override(world: World, here: Path, random: Random, say: Say) -> None:
    sections = [f"{a}.{b}" for a, part in world.run.items() if isinstance(part, dict) for b in part]
    name = str(random.choice([*sections, "", "data..folder", "-", "model", "model.d_model.x"]))
    strange = STRANGE[int(random.integers(len(STRANGE)))]
    word = f"--{name}={strange}" if random.random() < 0.8 else f"--{name}"
    say(word[:100])
    given = write_yaml(here / "run.yaml", world.run | {"run_folder": str(here / "run")})
    with working_in(here):
        run_command(["train", given, "--dry-run", word])


def shards(world: World, here: Path, random: Random, say: Say) -> None:
    copy, done = changed_copy(world, "data", here, random)
    say(done)
    settings = world.run | {"run_folder": str(here / "run")}
    settings["data"] = settings["data"] | {"folder": str(copy)}
    answer = run_command(["train", write_yaml(here / "run.yaml", settings)])
    if answer.code == 0:
        # A flipped bit is another text, not a lost one: a corpus is not hashed at every start.
        sizes = [
            {
                file.name: file.stat().st_size
                for file in folder.iterdir()
                if "shard" not in file.name
            }
            for folder in (copy, world.folder / "data")
        ]
        tokens = [{n: s for n, s in size.items() if "0000" in n} for size in sizes]
        if tokens[0] != tokens[1]:
            raise Failure(f"trained on shards of other sizes: {tokens}")


def checkpoint(world: World, here: Path, random: Random, say: Say) -> None:
    copy, done = changed_copy(world, "run", here, random)
    say(done)
    command = str(random.choice(["losses", "measure", "export", "train"]))
    say(command)
    if command == "losses":
        code, table = losses_of(copy)
        if code == 0 and table != world.losses:
            raise Failure(f"other losses:\n{table}\nthan\n{world.losses}")
    elif command == "measure":
        answer = run_command(["measure", str(copy), "--out", str(here / "results"), *MEASURE])
        if answer.code == 0:
            same_results(here / "results", world.folder / "results")
    elif command == "export":
        run_command(["export", str(copy), str(here / "exported")])
    else:
        given = write_yaml(here / "run.yaml", world.run | {"run_folder": str(copy)})
        run_command(["train", given])


def losses_of(run_folder: str | Path) -> tuple[int, str]:
    """Exit code, and the table without its title, which names the folder."""
    answer = run_command(["losses", str(run_folder)])
    return answer.code, answer.out.partition("\n")[2]


def same_results(found: Path, expected: Path) -> None:
    ours, theirs = read_results(found), read_results(expected)
    for name in MADE_OF_PARTS:
        if not getattr(ours, name).equals(getattr(theirs, name)):
            raise Failure(f"other rows in {name}")


def results(world: World, here: Path, random: Random, say: Say) -> None:
    copy, done = changed_copy(world, "results", here, random)
    say(done)
    command = str(random.choice(["figure", "report", "measure", "targets"]))
    say(command)
    out = str(here / {"figure": "out.png", "report": "out.html"}.get(command, "out"))
    if command in ("figure", "report"):
        answer = run_command([command, str(copy), "--out", out])
        if answer.code == 0:
            same_results(copy, world.folder / "results")
    else:
        more = ["--targets", str(copy)] if command == "targets" else []
        where = str(copy) if command == "measure" else out
        answer = run_command(["measure", world.run["run_folder"], "--out", where, *MEASURE, *more])
        if answer.code == 0 and command == "measure":
            same_results(copy, world.folder / "results")


def task(world: World, here: Path, random: Random, say: Say) -> None:
    settings, done = spoil_settings(world.task | {"output": str(here / "out")}, random)
    say(done)
    with working_in(here):
        run_command(["task", write_yaml(here / "task.yaml", settings)])


def task_results(world: World, here: Path, random: Random, say: Say) -> None:
    copy, done = changed_copy(world, "task", here, random)
    say(done)
    if random.random() < 0.5:
        say("figure")
        answer = run_command(["figure", str(copy), "--out", str(here / "out.png")])
    else:
        say("task")
        given = write_yaml(here / "task.yaml", world.task | {"output": str(copy)})
        answer = run_command(["task", given])
    if (
        answer.code == 0
        and read_task_results(copy)[0] != read_task_results(world.folder / "task")[0]
    ):
        raise Failure("other rows")


def theory(world: World, here: Path, random: Random, say: Say) -> None:
    given = world.theory | {"output": str(here / "out"), "figure": str(here / "drawn")}
    settings, done = spoil_settings(given, random)
    say(done)
    with working_in(here):
        run_command(["theory", write_yaml(here / "theory.yaml", settings)])


def sweep(world: World, here: Path, random: Random, say: Say) -> None:
    write_yaml(here / "run.yaml", world.run)
    positions = {"pose": {}, "rope": {"positions.scheme": "contiguous"}}
    given = {
        "folder": str(here / "sweep"),
        "configs": ["run.yaml"],
        "grid": {"positions": positions, "seed": [1, 2]},
    }
    settings, done = spoil_settings(given, random)
    say(done)
    with working_in(here):
        run_command(["sweep", write_yaml(here / "sweep.yaml", settings), "--list"])


OPTIONS = ["--long", "--short", "--stride", "--ks", "--units", "--selectors", "--targets",
           "--min-gap", "--foreign", "--max-documents", "--shard", "--seed", "--batch-tokens",
           "--text", "--dtype", "--device"]  # fmt: skip
VALUES = ["", "0", "-1", "1.5", "x", "1e99", "1,1", "0/0", "2/1", "nan", "top0%", "text:",
          "add_one,add_one", "span:x", "span:99", "words", "c4_files:*", "/dev/null", "25",
          "ü"]  # fmt: skip


def options(world: World, here: Path, random: Random, say: Say) -> None:
    """Options of `measure` that make no sense."""
    name, strange = str(random.choice(OPTIONS)), str(random.choice(VALUES))
    say(f"{name}={strange}")
    with working_in(here):
        run_command(["measure", world.run["run_folder"], "--out", str(here / "out"), *MEASURE,
                     f"{name}={strange}"])  # fmt: skip


def texts(world: World, here: Path, random: Random, say: Say) -> None:
    """Every form of text that `measure` takes, spoilt."""
    rows = [json.loads(line) for line in (world.folder / "corpus.jsonl").read_text().splitlines()]
    field = str(random.choice(["text", "body", "", "a.b", "ü"]))
    frame = pd.DataFrame({field: [row["text"] for row in rows[:12]], "id": range(12)})
    suffix = str(random.choice([".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md"]))
    path = here / f"given{suffix}"
    if suffix in (".jsonl", ".json"):
        frame.to_json(path, orient="records", lines=suffix == ".jsonl")
    elif suffix in (".csv", ".tsv"):
        frame.to_csv(path, index=False, sep="," if suffix == ".csv" else "\t")
    elif suffix == ".parquet":
        frame.to_parquet(path)
    else:
        path.write_text("\n\n".join(frame[field]))
    say(f"--field={field}, {spoil_bytes(path, random)}" if random.random() < 0.8 else "whole")
    words = ["--field", field if random.random() < 0.8 else "other"]
    words += ["--split-at", str(random.choice(["whole", "blank-lines"]))]
    words += [f"--at={places(random)}"] if random.random() < 0.3 else []
    given, piped = str(path), b""
    if random.random() < 0.3 and path.is_file():
        given, piped = "-", path.read_bytes()
    say(" ".join([given, *words]))
    with reading(piped):
        run_command(["measure", world.run["run_folder"], "--out", str(here / "out"), *MEASURE,
                     "--text", given, *words])  # fmt: skip


def places(random: Random) -> str:
    some = ["far", "comes next", "/far|words/", "/(/", "/.*/", "5:9", "9:5", "-1:2", "0:99999", ":",
            "", "//", "5:", "ü", "/(a+)+$/", "1e9:2", "\x00"]  # fmt: skip
    return some[int(random.integers(len(some)))]


def explain(world: World, here: Path, random: Random, say: Say) -> None:
    """One text or prompt, perhaps spoilt, and options that may make no sense."""
    path = here / "given.txt"
    line = (world.folder / "corpus.jsonl").read_text().splitlines()[0]
    path.write_text(json.loads(line)["text"])
    if random.random() < 0.5:
        say(spoil_bytes(path, random))
    piped = path.read_bytes() if path.is_file() and random.random() < 0.3 else b""
    words = ["--text", "-" if piped else str(path)]
    if random.random() < 0.3:
        words = ["--prompt", str(random.choice([f"@{path}", "the model reads far words", "", "@"]))]
        words += (
            ["--target", str(random.choice(["next", "", "ü"]))] if random.random() < 0.5 else []
        )
    elif random.random() < 0.7:
        words.append(f"--at={places(random)}")
    words += [
        "--short",
        str(random.choice([8, 8, 8, 0, -1, 10**9])),
        "-k",
        str(random.choice([1, 2, 0])),
    ]
    name = ["--units", "--selector", "--long", "--prefix", "--far-states", "--seed",
            "--batch-tokens", "--html", "--json", "--chat"][int(random.integers(10))]  # fmt: skip
    if random.random() < 0.5:
        strange = str(random.choice([*VALUES, "all", "words", "16"]))
        words += [name] if name in ("--json", "--chat") else [f"{name}={strange}"]
    say(" ".join(words))
    with working_in(here), reading(piped):
        run_command(["explain", world.run["run_folder"], *words])


KINDS: tuple[Kind, ...] = (
    *(corpus, config, override, shards, checkpoint, results),
    *(task, task_results, theory, sweep, options, texts, explain),
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


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Relative names that a spoiled setting gives end up here."""
    with contextlib.chdir(folder):
        yield


# --- many cases -----------------------------------------------------------------------------------


def run_case(world: World, number: int) -> tuple[str, Failure | None]:
    """What was done, and what was wrong with the answer."""
    random = np.random.default_rng(number)
    kind = KINDS[number % len(KINDS)]
    done = [kind.__name__]
    with tempfile.TemporaryDirectory(dir=world.folder) as here:
        try:
            kind(world, Path(here), random, done.append)
        except Failure as failure:
            return ", ".join(done), failure
    return ", ".join(done), None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int, help="run one case and show its traceback")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    given = parse()
    with tempfile.TemporaryDirectory() as made:
        here = make_world(Path(made))
        if given.only is not None:
            done, failure = run_case(here, given.only)
            print(done)
            if failure is not None:
                traceback.print_exception(failure.__cause__ or failure)
            raise SystemExit(failure is not None)
        failed: Counter[str] = Counter()
        for number in range(given.first, given.first + given.cases):
            done, failure = run_case(here, number)
            if failure is not None:
                failed[done.split(",")[0]] += 1
                print(f"case {number} ({done}): {failure}", flush=True)
        print(f"{given.cases} cases, failures: {dict(failed) or 'none'}")
        raise SystemExit(bool(failed))
