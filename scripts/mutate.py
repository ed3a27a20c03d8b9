"""Put small errors into core modules, one at a time, and see whether the tests of the same folder
notice: `python scripts/mutate.py [--number 60] [--seed 1] [--only scorer,recovery]`."""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = (
    *("scorer", "recovery", "targets", "statistics", "summary", "verdicts", "statements"),
    *("far_states", "attention", "influence", "windows", "documents", "batches", "positions"),
    *("shards", "moments", "checkpoint", "optim", "rope", "folders"),
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


def tests_of(module: Path) -> list[str]:
    """The tests of the same folder, those of the module itself first."""
    folder = "tests" / module.relative_to("olmo_sparsity").parent
    own = sorted(map(str, folder.glob(f"test_{module.stem}*.py")))
    if folder == Path("tests"):
        return own
    return own + [str(path) for path in sorted(folder.glob("test_*.py")) if str(path) not in own]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=lambda text: text.split(","), default=CORE)
    args = parser.parse_args()
    os.chdir(ROOT)
    modules = sorted(path for path in Path("olmo_sparsity").rglob("*.py") if path.stem in CORE)
    known = [(m, i) for m in modules for i, _ in enumerate(errors_of(ast.parse(m.read_text())))]
    drawn = sorted(random.Random(args.seed).sample(known, args.number))
    left = [(module, index) for module, index in drawn if module.stem in args.only]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, symlinks=True, ignore=ignored)
        for module, index in left:
            tree = ast.parse(module.read_text())
            line, kind, make = list(errors_of(tree))[index]
            make()
            changed = Path(folder, module)
            changed.write_text(ast.unparse(ast.fix_missing_locations(tree)))
            words = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=300", *tests_of(module)]
            env = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
            done = subprocess.run(words, cwd=folder, env=env, capture_output=True, check=False)
            shutil.copy(module, changed)
            missed += done.returncode == 0
            said = "MISSED " if done.returncode == 0 else "noticed"
            text = module.read_text().splitlines()[line - 1].strip()
            print(f"{said} {module}:{line} {kind}: {text}", flush=True)
    print(f"{len(left) - missed} of {len(left)} noticed")
    return 0


def ignored(folder: str, names: list[str]) -> set[str]:
    at_top = {".git", ".venv", "runs", "results", "data", "site"} if folder == str(ROOT) else set()
    return {name for name in names if name in at_top or name.startswith((".venv", "__pycache__"))}


if __name__ == "__main__":
    sys.exit(main())
