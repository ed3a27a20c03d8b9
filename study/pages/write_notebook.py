"""Run docs/explain.ipynb and store its outputs: `python -m study.pages.write_notebook`.

A test runs the cells of the notebook that is stored.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any


def outputs_of(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """What is printed, and the value of a last line that is an expression."""
    body = ast.parse(code).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    if value is not None:
        data = {"text/plain": repr(value), "text/html": value._repr_html_()}
        found.append({"output_type": "execute_result", "data": data, "metadata": {}})
    return found


def main() -> None:
    path = Path(__file__).parents[2] / "docs/explain.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(cells, 1):
        cell["outputs"] = outputs_of(cell["source"], names)
        for place in (cell, *cell["outputs"]):
            if place.get("output_type") != "stream":
                place["execution_count"] = count
    path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
