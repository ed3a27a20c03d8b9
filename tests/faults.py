"""Faults of disks, schedulers and hands: damaged files, kills at file operations, two at once.

    python -m tests.faults --damages 1000 --transplants 200 --kills 200 --limits 50 --races 20
    python -m tests.faults --only damage:137          one of them again, with its traceback

Every trial has its number as its seed, and takes folders that the commands themselves made. After a
fault the command that made the folder, or one that reads it, must give the very numbers of the
whole folder, or say in one line what is wrong (after a kill or a race: give the numbers). Failures:

    a traceback, a hang       as in tests/fuzz.py
    silence                   of a disk that takes no more: no line that says so
    other numbers             exit code 0, and nothing said about what is lost
    not healed                after a kill, the same command does not end as if nothing had been
    left over                 after that, a temporary file or a lock is still there
"""

from __future__ import annotations

import io
import json
import math
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from olmo_sparsity.analysis import measurement
from olmo_sparsity.analysis.results import read_results
from olmo_sparsity.analysis.tables import MADE_OF_PARTS
from olmo_sparsity.command.cli import main
from olmo_sparsity.tasks.results import read_results as read_task_results
from tests import fuzz
from tests.fuzz import (
    MEASURE,
    STRANGE,
    Answer,
    Failure,
    Random,
    Say,
    World,
    pick,
    places_of,
    run_command,
    succeed,
    write_yaml,
)
from tests.support.children import forkserver

# --- damages --------------------------------------------------------------------------------------

SIZES = [0, -1, 1, 2, 3, 10**6, 10**12, 10**30, 1.5]
TYPES = {"uint16": "int16", "float32": "int32"}


def change_json(path: Path, random: Random) -> str:
    """One place of a JSON file, or of one of its lines."""
    lines = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
    at = int(random.integers(len(lines)))
    whole = [json.loads(lines[at])]
    node, key = pick(random, list(places_of(whole)))
    kind, deep = pick(random, ["retype", "nest", "resize"]), b"1"
    if kind == "retype":
        node[key] = pick(random, STRANGE)
    elif kind == "nest":
        depth, node[key] = pick(random, [60, 400, 100_000]), "@"
        deep = b'{"a":' * depth + b"1" + b"}" * depth
    elif type(node[key]) in (int, float):  # a number that no memory holds, or another one
        node[key] = pick(random, SIZES)
    else:
        node[key] = TYPES.get(str(node[key]), node[key])
    lines[at] = json.dumps(whole[0]).encode().replace(b'"@"', deep)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return f"{kind} {key}"


def change_rows(path: Path, random: Random) -> str:
    """A Parquet file that is whole, and holds other rows."""
    table = pq.read_table(path)
    kind = pick(random, ["halve", "double", "renumber", "lose a column"])
    if kind == "halve":
        table = table[: len(table) // 2]
    elif kind == "double":
        table = pq.read_table([path, path]) if len(table) else table
    elif kind == "renumber" and "document" in table.schema.names:
        rows = table.to_pandas()
        table = type(table).from_pandas(rows.assign(document=rows.document + 2), table.schema)
    else:
        table = table.drop_columns(table.schema.names[0])
    pq.write_table(table, path)
    return f"{kind} rows"


def damage(folder: Path, random: Random) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # JSON says what the other files are: it is spoilt as often as all of them.
    said = [path for path in files if path.suffix in (".json", ".jsonl")]
    path = pick(random, said if said and random.random() < 0.5 else files)
    kind = pick(random, ["file", "file", "own", "own", "swap", "pipe", "sparse"])
    where = path.relative_to(folder)
    alike = [other for other in files if other.suffix == path.suffix and other != path]
    if kind == "swap" and alike:
        other = pick(random, alike)
        mine, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(mine)
        return f"{where}: swap with {other.relative_to(folder)}"
    if kind in ("pipe", "sparse"):
        path.unlink()
        os.mkfifo(path) if kind == "pipe" else path.touch()
        if kind == "sparse":
            os.truncate(path, 5 * 2**30)
        return f"{where}: a {kind} file"
    own = {".parquet": change_rows, ".json": change_json, ".jsonl": change_json}
    change = own.get(path.suffix, fuzz.spoil_file) if kind == "own" else fuzz.spoil_file
    return f"{where}: {change(path, random)}"


def transplant_into(folder: Path, twin: Path, random: Random) -> str:
    """A file or a whole inner folder from what the same commands made of other settings: each byte
    of it is as it was written, and only what other files say of it shows that it is not theirs."""
    donor = twin / folder.name
    theirs = sorted(path.relative_to(donor) for path in donor.rglob("*"))
    where = pick(random, theirs)
    if (donor / where).is_dir():
        shutil.rmtree(folder / where, ignore_errors=True)
        shutil.copytree(donor / where, folder / where)
    else:
        (folder / where).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(donor / where, folder / where)
    return f"{where} of another"


# --- the folders, and the commands that make and read them ----------------------------------------


def make_world(folder: Path) -> World:
    world = fuzz.make_world(folder)
    for shard in ("0/2", "1/2"):  # two parts of each kind
        succeed([*measure(world, folder / "results"), f"--shard={shard}"])
    succeed(["export", world.run["run_folder"], str(folder / "exported")])
    (folder / "losses").write_text(table_of(succeed(["losses", world.run["run_folder"]])))
    return world


def twin_of(world: World) -> Path:
    """The same folders, of another seed and another share of the text."""
    twin, made = world.folder / "twin", world.folder / "twin_made"
    if not twin.exists():
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        data = world.run["data"] | {"folder": str(made / "data"), "heldout_share": 0.5}
        run = world.run | {"seed": 4, "run_folder": str(made / "run"), "data": data}
        task = world.task | {"output": str(made / "task"), "num_test_samples": 30}
        for command, of in (("prepare", run), ("train", run), ("task", task)):
            succeed([command, write_yaml(made / f"{command}.yaml", of)])
        succeed(["export", run["run_folder"], str(made / "exported")])
        succeed(measure(world, made / "results", Path(run["run_folder"])))
        made.rename(twin)
    return twin


def table_of(answer: Answer) -> str:
    """Of losses, without its title, which names the folder."""
    return answer.out.partition("\n")[2]


def measure(world: World, out: Path, model: Path | None = None) -> list[str]:
    return ["measure", str(model or world.run["run_folder"]), "--out", str(out), *MEASURE]


def settings(here: Path, given: dict[str, Any], **changes: Any) -> str:
    return write_yaml(here / "settings.yaml", given | changes)


def train(world: World, run: Path, here: Path) -> list[str]:
    return ["train", settings(here, world.run, run_folder=str(run))]


def data_at(world: World, copy: Path) -> dict[str, Any]:
    return world.run["data"] | {"folder": str(copy)}


def unfinish(results: Path) -> None:
    for path in [*results.glob("*.parquet"), results / "meta.json", results / "manifest.json"]:
        path.unlink(missing_ok=True)


def forget_last(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/step000003")


def same_results(found: Path, expected: Path) -> None:
    ours, theirs = read_results(found), read_results(expected)
    for name in MADE_OF_PARTS:
        if not getattr(ours, name).equals(getattr(theirs, name)):
            raise Failure(f"other rows in {name}")


def same_end(found: Path, expected: Path, last: str = "checkpoints/step000003") -> None:
    ours, theirs = (load_file(run / last / "model.safetensors") for run in (found, expected))
    if ours.keys() != theirs.keys() or any(not ours[n].equal(theirs[n]) for n in ours):
        raise Failure(f"other weights in {found.name}")


def same_export(found: Path, expected: Path) -> None:
    same_end(found, expected, last="")
    texts = [
        {path.name: path.read_text() for path in folder.iterdir() if path.suffix != ".safetensors"}
        for folder in (found, expected)
    ]
    if texts[0] != texts[1]:
        raise Failure(f"other texts in {found.name}")


def same_shards(found: Path, expected: Path) -> None:
    for path in expected.glob("*.uint*"):
        if (found / path.name).read_bytes() != path.read_bytes():
            raise Failure(f"other tokens in {path.name}")


def same_rows(found: Path, expected: Path) -> None:
    if read_task_results(found)[0] != read_task_results(expected)[0]:
        raise Failure("other rows")


def same_text(found: Path, expected: Path) -> None:
    if found.read_text() != expected.read_text():
        raise Failure(f"other numbers, and nothing said:\n{found.read_text()}")


@dataclass
class Scene:
    """A copy of a folder that is damaged, and a command on it."""

    folder: str
    words: Callable[[World, Path, Path], list[str]]
    """Given the copy, and a folder for what else is written."""
    same: Callable[[Path, Path], None] | None = None
    """Where the exit code is 0: compares the copy with the whole folder, …"""
    made: str = ""
    like: str = ""
    """… or what the command made with this one; not if it says that it reads an earlier step."""
    begin: Callable[[Path], None] = lambda folder: None


MAKINGS = {
    "measuring": Scene("results", lambda w, c, h: measure(w, c), same_results, begin=unfinish),
    "training": Scene("run", train, same_end, begin=forget_last),
    "prepare": Scene(
        "data", lambda w, c, h: ["prepare", settings(h, w.run, data=data_at(w, c))], same_shards
    ),
    "task": Scene("task", lambda w, c, h: ["task", settings(h, w.task, output=str(c))], same_rows),
    "exporting": Scene(
        "exported", lambda w, c, h: ["export", w.run["run_folder"], str(c)], same_export
    ),
}
"""Their commands make the folder from nothing, too."""

SCENES = MAKINGS | {
    "measured": Scene("results", lambda w, c, h: measure(w, c), same_results),
    "report": Scene("results", lambda w, c, h: ["report", str(c), "--out=x.html"], same_results),
    "figure": Scene("results", lambda w, c, h: ["figure", str(c), "--out=x.png"], same_results),
    "targets": Scene(
        "results", lambda w, c, h: [*measure(w, h / "new"), f"--targets={c}"], same_results
    ),
    "trained": Scene("run", train),
    "losses": Scene("run", lambda w, c, h: ["losses", str(c)], same_text, "said", "losses"),
    "export": Scene(
        "run", lambda w, c, h: ["export", str(c), "new"], same_export, "new", "exported"
    ),
    "model": Scene("run", lambda w, c, h: measure(w, h / "new", c), same_results, "new", "results"),
    "shards": Scene(
        "data",
        lambda w, c, h: ["train", settings(h, w.run, run_folder="new", data=data_at(w, c))],
        same_shards,
    ),
    "task figure": Scene("task", lambda w, c, h: ["figure", str(c), "--out=x.png"], same_rows),
    "foreign": Scene(
        "exported",
        lambda w, c, h: ["explain", str(c), "--prompt", "the model reads far words and says what",
                         "--short", "2", "--units", "tokens", "-k", "1"],
    ),
}  # fmt: skip


SAID = ("; reading step", "damaged lines are passed over", "lines are lost")
"""With one of these a command says that it goes on without what is damaged."""


def damaged_folder(world: World, number: int, here: Path, say: Say) -> None:
    _spoilt_folder(world, number, here, say, damage)


def transplant(world: World, number: int, here: Path, say: Say) -> None:
    twin = twin_of(world)
    _spoilt_folder(
        world, number, here, say, lambda *given: transplant_into(given[0], twin, given[1])
    )


def _spoilt_folder(
    world: World, number: int, here: Path, say: Say, spoil: Callable[[Path, Random], str]
) -> None:
    random = np.random.default_rng(number)
    name = list(SCENES)[number % len(SCENES)]
    scene = SCENES[name]
    copy = here / scene.folder
    shutil.copytree(world.folder / scene.folder, copy)
    scene.begin(copy)
    say(name)
    say(spoil(copy, random))
    answer = run_command(scene.words(world, copy, here))
    (here / "said").write_text(table_of(answer))
    is_said = any(words in answer.error for words in SAID)
    if answer.code == 0 and scene.same is not None and not is_said:
        scene.same(here / (scene.made or scene.folder), world.folder / (scene.like or scene.folder))


# --- kills ----------------------------------------------------------------------------------------

_EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.utime", "os.chmod", "os.truncate")


def _child(words: list[str], watched: str, die_at: float, log: str, largest: int | None) -> None:
    """The command, killed at its n-th operation that changes a file of the folder (or from then on
    unable to write more than `largest` bytes to a file); how many there were is written beside
    it."""
    torch.set_num_threads(1)
    count, really = 0, os.fsync

    def operation() -> None:
        nonlocal count
        count += 1
        if count >= die_at and largest is None:
            os.kill(os.getpid(), signal.SIGKILL)
        elif count == die_at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))

    def hook(event: str, arguments: tuple) -> None:
        writes = event in _EVENTS or (event == "open" and (arguments[2] or 0) & 3)
        if writes and str(arguments[0]).startswith(watched):
            operation()

    def fsync(descriptor: int) -> None:
        operation()
        really(descriptor)

    os.fsync = fsync  # type: ignore[assignment] # counts file operations
    sys.addaudithook(hook)
    measurement.PATIENCE_S = 0
    Path(log).touch()
    sys.stdout = sys.stderr = said = io.StringIO()  # a log on disk would be limited, too
    try:
        code = main(words)
    except BaseException:
        traceback.print_exc()
        code = 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    Path(log).write_text(f"{said.getvalue()}\n{count}")
    os._exit(code)


def run_child(
    words: list[str], watched: Path, log: Path, die_at: float, largest: int | None = None
) -> Any:
    given = (words, str(watched), die_at, str(log), largest)
    child = forkserver.Process(target=_child, args=given)
    child.start()
    return child


_num_operations: dict[str, int] = {}


def kill(world: World, number: int, here: Path, say: Say) -> None:
    _disturb(world, number, here, say, limits=False)


def limit(world: World, number: int, here: Path, say: Say) -> None:
    """As on a full disk."""
    _disturb(world, number, here, say, limits=True)


def _disturb(world: World, number: int, here: Path, say: Say, limits: bool) -> None:
    random = np.random.default_rng(number)
    name = list(MAKINGS)[number % len(MAKINGS)]
    making, log, watched = MAKINGS[name], here / "log", here / "killed"
    folder = watched / making.folder
    words = making.words(world, folder, here)

    def run_until(die_at: float, largest: int | None = None) -> int:
        watched.mkdir()
        child = run_child(words, watched, log, die_at, largest)
        child.join()
        end = 0 if die_at == math.inf else -signal.SIGKILL if largest is None else 2
        said = log.read_text()
        if child.exitcode not in (0, end) or (child.exitcode == 2 and "too large" not in said):
            raise Failure(f"{name}: exit code {child.exitcode}: {said[-300:]}")
        return int(said.splitlines()[-1]) if child.exitcode == 0 else 0

    if name not in _num_operations:
        _num_operations[name] = run_until(math.inf)
        shutil.rmtree(watched)
    at = int(random.integers(1, _num_operations[name] + 1))
    largest = int(random.choice([0, 100, 2000, 20_000])) if limits else None
    done = "killed" if largest is None else f"no files above {largest} bytes"
    say(f"{name}, {done} at file operation {at} of {_num_operations[name]}")
    run_until(at, largest)
    answer = run_command(words)
    # An export refuses a folder that exists, which then must be whole (see `same`).
    if answer.code != 0 and not (name == "exporting" and "empty it" in answer.error):
        raise Failure(f"not healed: {answer.error[-300:]}")
    if making.same is not None:
        making.same(folder, world.folder / making.folder)
    left = [
        path.name for path in watched.rglob("*") if path.name == "lock" or path.suffix == ".tmp"
    ]
    if left:
        raise Failure(f"left over: {left}")


# --- races ----------------------------------------------------------------------------------------


def race(world: World, number: int, here: Path, say: Say) -> None:
    """Two measurements into one folder: the same command twice, or two shards; perhaps one of them
    killed, and begun again."""
    random = np.random.default_rng(number)
    out = here / "results"
    shards = [["--shard=0/2"], ["--shard=1/2"]] if random.random() < 0.3 else [[], []]
    die_at = int(random.integers(5, 80)) if random.random() < 0.4 else math.inf
    say(f"race of {shards}, the first killed at {die_at}")
    words = [[*measure(world, out), *shard] for shard in shards]
    children = [run_child(words[i], here, here / f"log{i}", [die_at, math.inf][i]) for i in (0, 1)]
    for i, child in enumerate(children):
        child.join()
        if child.exitcode not in (0, *([-signal.SIGKILL] if i == 0 else [])):
            raise Failure(f"exit code {child.exitcode}: {(here / f'log{i}').read_text()[-400:]}")
    for again in words:
        succeed(again)
    same_results(out, world.folder / "results")


TRIALS: dict[str, tuple[fuzz.Trial, int]] = {
    "damage": (damaged_folder, 600),
    "transplant": (transplant, 200),
    "kill": (kill, 100),
    "limit": (limit, 50),
    "race": (race, 20),
}

if __name__ == "__main__":
    measurement.PATIENCE_S = 0  # the first shard does not wait for the other
    raise SystemExit(fuzz.run_trials(make_world, TRIALS, "Faults of disks, schedulers, hands."))
