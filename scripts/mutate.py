"""Put small errors into core modules, one at a time, and see whether the tests of the same folder
notice: `python scripts/mutate.py [--number 60] [--seed 1] [--only scorer,recovery]`."""

from __future__ import annotations

import argparse
import ast
import compileall
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import cache_from_source
from pathlib import Path

import hypothesis  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import pandas  # noqa: F401
import pyarrow.parquet  # noqa: F401
import pytest
import torch._dynamo  # noqa: F401
import transformers  # noqa: F401

ROOT = Path(__file__).parents[1]
CORE = (
    *("scorer", "model_runner", "recovery", "targets", "statistics", "target_sums", "summary"),
    *("evidence", "verdict"),
    *("distant_states", "attention", "influence", "windows", "units"),
    *("documents", "controls", "batches", "positions", "shards", "moments", "writer"),
    *("optim", "rope", "locks", "work_folder"),
)
OPPOSITE = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult},
}


def errors_of(tree: ast.AST) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """Yield line, description and a function that makes the error, for code that runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Raise | ast.Assert):
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
            yield node.lineno, "comparison", lambda n=node: n.ops.__setitem__(0, flip(n.ops[0]))
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPPOSITE:
            yield node.lineno, "operator", lambda n=node: setattr(n, "op", flip(n.op))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield node.lineno, "number", lambda n=node: setattr(n, "value", n.value + 1)
        elif isinstance(node, ast.If | ast.IfExp):
            yield node.lineno, "branch", lambda n=node: setattr(n, "test", negated(n.test))
        if not isinstance(node, ast.JoinedStr) and "TYPE_CHECKING" not in ast.dump(node)[:80]:
            yield from errors_of(node)


def flip(operator: ast.AST) -> ast.AST:
    return OPPOSITE[type(operator)]()


def negated(test: ast.expr) -> ast.expr:
    return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)


def tests_of(module: Path) -> list[list[Path]]:
    """The module's own tests, then the others of the folder, or of the nearest one above it."""
    folder = "tests" / module.relative_to("olmo_sparsity").parent
    while not any(folder.glob("test_*.py")):
        folder = folder.parent
    own = sorted(folder.glob(f"test_{module.stem}*.py"))
    others = [] if folder == Path("tests") else sorted({*folder.glob("test_*.py")} - {*own})
    return [files for files in (own, others) if files]


def test(folder: str, files: list[Path]) -> None:
    """Run in a fork of this process, which has imported what is slow to import."""
    os.setsid()
    os.chdir(folder)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1), os.dup2(nothing.fileno(), 2)
    options = ["-x", "--timeout=120", "--assert=plain", "-p", "no:cacheprovider"]
    os._exit(int(pytest.main([*options, *map(str, files)])))


def is_noticed(folder: str, files: list[Path], timeout_s: float = 600) -> bool:
    process = multiprocessing.get_context("fork").Process(target=test, args=(folder, files))
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return process.exitcode != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=lambda text: text.split(","), default=CORE)
    parser.add_argument("--part", default="0/1", help="of the draw, to run parts side by side")
    args = parser.parse_args()
    os.chdir(ROOT)
    modules = sorted(path for path in Path("olmo_sparsity").rglob("*.py") if path.stem in args.only)
    missing = sorted({*args.only} - {module.stem for module in modules})
    if missing:  # renamed since: their errors would silently not be drawn
        parser.error(f"no module is named {', '.join(missing)}; correct --only, or CORE here")
    known = [(m, i) for m in modules for i, _ in enumerate(errors_of(ast.parse(m.read_text())))]
    part, num_parts = map(int, args.part.split("/"))
    drawn = sorted(random.Random(args.seed).sample(known, args.number))[part::num_parts]
    missed, begun = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, symlinks=True, ignore=ignored)
        for name in ("olmo_sparsity", "tests"):
            compileall.compile_dir(Path(folder, name), quiet=1)
        sys.path.insert(0, folder)
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        for module, index in drawn:
            tree = ast.parse(module.read_text())
            line, kind, make = list(errors_of(tree))[index]
            make()
            changed = Path(folder, module)
            changed.write_text(ast.unparse(ast.fix_missing_locations(tree)))
            Path(cache_from_source(str(changed))).unlink(missing_ok=True)
            noticed = any(is_noticed(folder, files) for files in tests_of(module))
            shutil.copy(module, changed)
            missed += not noticed
            text = module.read_text().splitlines()[line - 1].strip()
            said = "noticed" if noticed else "MISSED "
            print(f"{said} {module}:{line} {kind}: {text}", flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(drawn) - missed} of {len(drawn)} noticed; {used.ru_utime + used.ru_stime:.0f} s of "
        f"CPU, {time.monotonic() - begun:.0f} s"
    )
    return 0


def ignored(folder: str, names: list[str]) -> set[str]:
    at_top = {".git", ".venv", "runs", "results", "data", "site"} if folder == str(ROOT) else set()
    return {name for name in names if name in at_top or name.startswith((".venv", "__pycache__"))}


if __name__ == "__main__":
    sys.exit(main())
