"""Faults of disks, schedulers and hands: damaged files, kills at file operations, two at once.

    python -m tests.faults --damages 1000 --kills 200 --races 20
    python -m tests.faults --only damage:137          one of them again, with its traceback

Every trial has its number as its seed, and takes folders that the commands themselves made. After a
fault the command that made the folder, or one that reads it, must give the very numbers of the
whole folder, or say in one line what is wrong (after a kill or a race: give the numbers). Failures:

    a traceback, a hang       as in tests/fuzz.py
    other numbers             exit code 0, and nothing said about what is lost
    not healed                after a kill, the same command does not end as if nothing had been
    left over                 after that, a temporary file or a lock is still there
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from analysis import measurement
from tests import fuzz
from tests.children import forkserver
from tests.fuzz import MEASURE, STRANGE, Answer, Failure, Random, run_command, write_yaml

# --- damages --------------------------------------------------------------------------------------


def truncate(content: bytes, random: Random) -> bytes:
    return content[: int(random.integers(len(content) + 1))]


def flip(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(int(random.integers(1, 4))):
        if changed:
            changed[int(random.integers(len(changed)))] ^= 1 << int(random.integers(8))
    return bytes(changed)


def halve(content: bytes, random: Random) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(lines[::2]) if len(lines) > 1 else content[: len(content) // 2]


def double(content: bytes, random: Random) -> bytes:
    return content + content


def renumber(content: bytes, random: Random) -> bytes:
    digits = [i for i, byte in enumerate(content) if 48 <= byte < 57]
    changed = bytearray(content)
    if digits:
        changed[digits[int(random.integers(len(digits)))]] += 1
    return bytes(changed)


def lose_a_line(content: bytes, random: Random) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(lines[: (at := int(random.integers(len(lines) or 1)))] + lines[at + 1 :])


def spoil_a_line(content: bytes, random: Random) -> bytes:
    lines = content.splitlines(keepends=True) or [b"\n"]
    at = int(random.integers(len(lines)))
    words = [b"", b"{", b"null", b"[1]", b"7", b'"x"', b"{}", b'{"step": "x"}', b'{"step": 1e999}',
             b'{"step": 2, "loss": null}', b'{"step": 2, "heldout": 3}', b"[" * 10**5]  # fmt: skip
    lines[at] = words[int(random.integers(len(words)))] + b"\n"
    return b"".join(lines)


def nest(content: bytes, random: Random) -> bytes:
    return _changed_json(content, random, lambda _: "@").replace(
        b'"@"', b'{"a":' * (depth := int(random.choice([60, 400, 100_000]))) + b"1" + b"}" * depth
    )


def retype(content: bytes, random: Random) -> bytes:
    return _changed_json(content, random, lambda _: STRANGE[int(random.integers(len(STRANGE)))])


def resize(content: bytes, random: Random) -> bytes:
    """A number that no memory holds, or another one."""
    other = [0, -1, 1, 2, 3, 10**6, 10**12, 10**30, 1.5]
    return _changed_json(
        content, random,
        lambda value: other[int(random.integers(len(other)))] if type(value) in (int, float)
        else {"uint16": "int16", "float32": "int32"}.get(str(value), value),
    )  # fmt: skip


def _changed_json(content: bytes, random: Random, change: Callable[[Any], Any]) -> bytes:
    """One place of a JSON file, or of one of its lines."""
    lines = content.splitlines() if content.count(b"\n{") else [content]
    at = int(random.integers(len(lines)))
    try:
        value: Any = json.loads(lines[at])
    except ValueError:
        return flip(content, random)
    places: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        node = level.pop()
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                level.append(node[key])
    if places:
        node, key = places[int(random.integers(len(places)))]
        node[key] = change(node[key])
    lines[at] = json.dumps(value).encode()
    return b"\n".join(lines) + b"\n"


def change_rows(path: Path, random: Random) -> str:
    """A Parquet file that is whole, and holds other rows."""
    table = pq.read_table(path)
    kind = str(random.choice(["halve", "double", "renumber", "lose a column"]))
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


BYTES = (truncate, flip, halve, double, renumber)
LINES = (lose_a_line, spoil_a_line, retype, nest)
JSON = (retype, nest, resize, renumber)


def damage(folder: Path, random: Random) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # JSON says what the other files are: it is spoilt as often as all of them.
    said = [path for path in files if path.suffix in (".json", ".jsonl")]
    files = said if said and random.random() < 0.5 else files
    path = files[int(random.integers(len(files)))]
    where = path.relative_to(folder)
    kind = str(random.choice(["bytes", "bytes", "own", "own", "delete", "swap", "loop", "folder"]))
    if kind == "delete":
        path.unlink()
    elif kind == "swap":
        alike = [p for p in sorted(folder.rglob(f"*{path.suffix}")) if p.is_file() and p != path]
        if alike:
            other = alike[int(random.integers(len(alike)))]
            mine, theirs = path.read_bytes(), other.read_bytes()
            path.write_bytes(theirs), other.write_bytes(mine)
            kind = f"swap with {other.relative_to(folder)}"
    elif kind == "loop":
        path.unlink()
        path.symlink_to(path.name)
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "own" and path.suffix == ".parquet":
        kind = change_rows(path, random)
    else:
        some = {".json": JSON, ".jsonl": LINES}.get(path.suffix, BYTES) if kind == "own" else BYTES
        change = some[int(random.integers(len(some)))]
        path.write_bytes(change(path.read_bytes(), random))
        kind = change.__name__
    return f"{kind}: {where}"


# --- the folders, and the commands that make and read them ----------------------------------------


def make_world(folder: Path) -> fuzz.World:
    world = fuzz.make_world(folder)
    results = folder / "results"
    shutil.rmtree(results)
    measurement.PATIENCE_S = 0  # the first shard does not wait for the other
    for shard in ("0/2", "1/2"):  # two parts of each kind
        words = ["measure", world.run["run_folder"], "--out", str(results), *MEASURE]
        fuzz.expect(0, run_command([*words, f"--shard={shard}"]))
    fuzz.expect(0, run_command(["export", world.run["run_folder"], str(folder / "exported")]))
    return world


def measure(world: fuzz.World, out: Path, model: str | None = None) -> list[str]:
    return ["measure", model or world.run["run_folder"], "--out", str(out), *MEASURE]


def settings_at(world: fuzz.World, here: Path, **changes: Any) -> str:
    return write_yaml(here / "settings.yaml", world.run | changes)


def unfinish(results: Path) -> None:
    for path in [*results.glob("*.parquet"), results / "meta.json", results / "manifest.json"]:
        path.unlink(missing_ok=True)


def same_weights(found: Path, expected: Path) -> None:
    from safetensors.torch import load_file

    ours, theirs = load_file(found), load_file(expected)
    if ours.keys() != theirs.keys() or any(not ours[n].equal(theirs[n]) for n in ours):
        raise Failure(f"other weights in {found.name}")


@dataclass
class Scene:
    """A copy of a folder that is damaged, a command on it, and what must then be."""

    source: str
    begin: Callable[[Path], None]
    words: Callable[[fuzz.World, Path, Path], list[str]]
    check: Callable[[fuzz.World, Path, Path, Answer], None]
    """Only where the exit code is 0."""


def _nothing(*_: Any) -> None:
    pass


def _same_results(world: fuzz.World, copy: Path, here: Path, answer: Answer) -> None:
    fuzz.same_results(copy, world.folder / "results")


def _same_new_results(world: fuzz.World, copy: Path, here: Path, answer: Answer) -> None:
    fuzz.same_results(here / "new", world.folder / "results")


def _same_end(world: fuzz.World, copy: Path, here: Path, answer: Answer) -> None:
    last = "checkpoints/step000003/model.safetensors"
    same_weights(copy / last, world.folder / "run" / last)


def _same_losses(world: fuzz.World, copy: Path, here: Path, answer: Answer) -> None:
    if answer.out.partition("\n")[2] != world.losses and not answer.error:
        raise Failure(f"other losses, and nothing said:\n{answer.out}")


def _same_export(world: fuzz.World, copy: Path, here: Path, answer: Answer) -> None:
    if not answer.error:  # else it has said that it takes an earlier checkpoint
        expected = world.folder / "exported/model.safetensors"
        same_weights(here / "new/model.safetensors", expected)


def _same_shards(world: fuzz.World, copy: Path, here: Path, answer: Answer) -> None:
    for path in (world.folder / "data").glob("*.uint*"):
        if (copy / path.name).read_bytes() != path.read_bytes():
            raise Failure(f"other tokens in {path.name}")


def _same_rows(world: fuzz.World, copy: Path, here: Path, answer: Answer) -> None:
    if fuzz.read_task_results(copy)[0] != fuzz.read_task_results(world.folder / "task")[0]:
        raise Failure("other rows")


def _train(world: fuzz.World, copy: Path, here: Path) -> list[str]:
    return ["train", settings_at(world, here, run_folder=str(copy))]


def _prepare(world: fuzz.World, copy: Path, here: Path) -> list[str]:
    return ["prepare", settings_at(world, here, data=world.run["data"] | {"folder": str(copy)})]


def _task(world: fuzz.World, copy: Path, here: Path) -> list[str]:
    return ["task", write_yaml(here / "task.yaml", world.task | {"output": str(copy)})]


def _forget_last(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/step000003")


SCENES: dict[str, Scene] = {
    "measuring": Scene("results", unfinish, lambda w, c, h: measure(w, c), _same_results),
    "measured": Scene("results", _nothing, lambda w, c, h: measure(w, c), _same_results),
    "report": Scene(
        "results", _nothing, lambda w, c, h: ["report", str(c), "--out", str(h / "x.html")],
        _same_results,
    ),
    "figure": Scene(
        "results", _nothing, lambda w, c, h: ["figure", str(c), "--out", str(h / "x.png")],
        _same_results,
    ),
    "targets": Scene(
        "results", _nothing, lambda w, c, h: [*measure(w, h / "new"), "--targets", str(c)],
        _same_results,
    ),
    "training": Scene("run", _forget_last, _train, _same_end),
    "trained": Scene("run", _nothing, _train, _nothing),
    "losses": Scene("run", _nothing, lambda w, c, h: ["losses", str(c)], _same_losses),
    "export": Scene(
        "run", _nothing, lambda w, c, h: ["export", str(c), str(h / "new")], _same_export
    ),
    "prepare": Scene("data", _nothing, _prepare, _same_shards),
    "task": Scene("task", _nothing, _task, _same_rows),
    "foreign": Scene(
        "exported", _nothing,
        lambda w, c, h: ["explain", str(c), "--prompt", "the model reads far words and says what",
                         "--short", "2", "--units", "tokens", "-k", "1"],
        _nothing,
    ),
}  # fmt: skip


def damage_trial(world: fuzz.World, number: int, here: Path, say: Callable[[str], None]) -> None:
    random = np.random.default_rng(number)
    name = list(SCENES)[number % len(SCENES)]
    scene = SCENES[name]
    copy = here / scene.source
    shutil.copytree(world.folder / scene.source, copy)
    scene.begin(copy)
    say(f"{name}, {damage(copy, random)}")
    answer = run_command(scene.words(world, copy, here))
    if answer.code == 0:
        scene.check(world, copy, here, answer)


# --- kills ----------------------------------------------------------------------------------------

_EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.utime", "os.chmod", "os.truncate")


def _child(words: list[str], watched: str, die_at: float, log: str) -> None:
    """The command, killed at its n-th operation that changes a file of the folder; how many there
    were is written beside it."""
    import torch

    torch.set_num_threads(1)
    count, really = 0, os.fsync

    def operation() -> None:
        nonlocal count
        count += 1
        if count >= die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple) -> None:
        writes = event in _EVENTS or (event == "open" and (arguments[2] or 0) & 3)
        if writes and str(arguments[0]).startswith(watched):
            operation()

    def fsync(descriptor: int) -> None:
        operation()
        really(descriptor)

    os.fsync = fsync  # type: ignore[assignment] # counts file operations
    sys.addaudithook(hook)
    from olmo_sparsity.cli import main

    measurement.PATIENCE_S = 0
    with open(log, "w") as file:
        sys.stdout = sys.stderr = file
        try:
            code = main(words)
        except BaseException:
            traceback.print_exc()
            code = 1
        file.write(f"\n{count}")
        file.flush()
    os._exit(code)


def run_child(words: list[str], watched: Path, log: Path, die_at: float = math.inf) -> Any:
    child = forkserver.Process(target=_child, args=(words, str(watched), die_at, str(log)))
    child.start()
    return child


@dataclass
class Making:
    """A command that makes a folder from nothing, and whether that is what it should be."""

    folder: str
    words: Callable[[fuzz.World, Path, Path], list[str]]
    check: Callable[[fuzz.World, Path, Path, Answer], None]


MAKINGS = {
    "measure": Making("results", lambda w, c, h: measure(w, c), _same_results),
    "export": Making(
        "new", lambda w, c, h: ["export", w.run["run_folder"], str(c)], _same_export
    ),
    "train": Making("run", _train, _same_end),
    "prepare": Making("data", _prepare, _same_shards),
    "task": Making("task", _task, _same_rows),
}  # fmt: skip
_num_operations: dict[str, int] = {}


def kill_trial(world: fuzz.World, number: int, here: Path, say: Callable[[str], None]) -> None:
    random = np.random.default_rng(number)
    name = list(MAKINGS)[number % len(MAKINGS)]
    making, log = MAKINGS[name], here / "log"
    if name not in _num_operations:
        (here / "once").mkdir()
        whole = here / "once" / making.folder
        child = run_child(making.words(world, whole, here), here / "once", log)
        child.join()
        if child.exitcode != 0:
            raise Failure(f"{name}: exit code {child.exitcode}: {log.read_text()[-300:]}")
        _num_operations[name] = int(log.read_text().splitlines()[-1])
    at = int(random.integers(1, _num_operations[name] + 1))
    say(f"{name}, killed at file operation {at} of {_num_operations[name]}")
    (here / "killed").mkdir()
    folder = here / "killed" / making.folder
    child = run_child(making.words(world, folder, here), here / "killed", log, at)
    child.join()
    if child.exitcode not in (0, -signal.SIGKILL):
        raise Failure(f"exit code {child.exitcode}: {log.read_text()[-300:]}")
    answer = run_command(making.words(world, folder, here))
    if answer.code != 0:
        raise Failure(f"not healed: {answer.error[-300:]}")
    making.check(world, folder, here / "killed", Answer(0, answer.out, ""))
    left = [path.name for path in (here / "killed").rglob("*") if path.suffix == ".tmp"]
    left += [path.name for path in (here / "killed").rglob("lock")]
    if left:
        raise Failure(f"left over: {left}")


# --- races ----------------------------------------------------------------------------------------


def race_trial(world: fuzz.World, number: int, here: Path, say: Callable[[str], None]) -> None:
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
    fuzz.expect(0, run_command(words[0]))
    fuzz.expect(0, run_command(words[1]))
    fuzz.same_results(out, world.folder / "results")


# --- many trials ----------------------------------------------------------------------------------

TRIALS = {"damage": damage_trial, "kill": kill_trial, "race": race_trial}


def run_trial(world: fuzz.World, kind: str, number: int) -> tuple[str, Failure | None]:
    done = [f"{kind}:{number}"]
    with tempfile.TemporaryDirectory(dir=world.folder) as here:
        try:
            TRIALS[kind](world, number, Path(here), done.append)
        except Failure as failure:
            return " ".join(done), failure
        except Exception as bug:  # of a check: what it reads is not there, say
            failure = Failure(f"{type(bug).__name__}: {bug}")
            failure.__cause__ = bug
            return " ".join(done), failure
    return " ".join(done), None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for kind, count in (("damages", 600), ("kills", 100), ("races", 20)):
        parser.add_argument(f"--{kind}", type=int, default=count)
    parser.add_argument("--first", type=int, default=0, help="the first number")
    parser.add_argument("--only", help="one trial, as in damage:137, with its traceback")
    return parser.parse_args(arguments)


def run() -> bool:
    given = parse()
    with tempfile.TemporaryDirectory() as made:
        world = make_world(Path(made))
        if given.only is not None:
            kind, number = given.only.split(":")
            done, failure = run_trial(world, kind, int(number))
            print(done)
            if failure is not None:
                traceback.print_exception(failure.__cause__ or failure)
            return failure is not None
        failed: Counter[str] = Counter()
        for kind, count in (
            ("damage", given.damages),
            ("kill", given.kills),
            ("race", given.races),
        ):
            for number in range(given.first, given.first + count):
                done, failure = run_trial(world, kind, number)
                if failure is not None:
                    failed[" ".join(done.split(",")[0].split(" ")[1:]) or kind] += 1
                    print(f"{done}: {failure}", flush=True)
            print(f"{count} {kind} trials; failures so far: {dict(failed) or 'none'}", flush=True)
        return bool(failed)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    raise SystemExit(run())
