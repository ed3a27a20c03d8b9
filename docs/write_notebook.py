"""docs/explain.ipynb, with the outputs of its cells: `python docs/write_notebook.py`.

A test runs the cells of the notebook that is stored.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

CELLS = [
    "# Explain one prediction\n\nWhich far words does a prediction depend on, and would an "
    "unrelated text have done as well? The model is the small one that is installed with the "
    "package; any folder, hub name or model in memory works in its place. A CPU is "
    "enough.",
    "import importlib.util\nimport subprocess\nimport sys\n\n"
    'if importlib.util.find_spec("olmo_sparsity") is None:  # as on Colab\n'
    '    package = "olmo-sparsity"  # or a wheel, a clone, git+ its address\n'
    '    subprocess.run([sys.executable, "-m", "pip", "install", "-q", package], check=True)\n\n'
    "from olmo_sparsity import explain\nfrom olmo_sparsity.analysis.models.load import DEMO\n\n"
    'text = (DEMO / "bridge.txt").read_text()\n'
    'e = explain("demo", text=text, at="Weissenborn", units="words", k=2)\ne',
    "Targets are underlined. A far word is as bright as its share of the most that one word does "
    "for its target.",
    "e.targets",
    "e.top(2)",
    "The check asks the same question about eight unrelated texts:",
    'print(e.check(foreign=str(DEMO / "unrelated.txt")))',
    "Which of several texts does a statement rest on?",
    "sources = {\n"
    '    "bridge": "The bridge over the river was opened in June by Katharina Weissenborn.",\n'
    '    "mill": "The old mill was sold to a family from the north, and stood empty for years.",\n'
    '    "school": "The school had forty children, who walked there along the river.",\n'
    "}\n"
    'answer = "The bridge was opened by Katharina Weissenborn."\n'
    'decoys = str(DEMO / "unrelated.txt")\n'
    'question = "Who opened the bridge?"\n'
    'explain("demo", sources=sources, question=question, answer=answer, decoys=decoys)',
]


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
    names: dict[str, Any] = {}
    cells, count = [], 0
    for number, source in enumerate(CELLS):
        about: dict[str, Any] = {"id": f"cell{number}", "metadata": {}, "source": source}
        try:
            ast.parse(source)
        except SyntaxError:
            cells.append(about | {"cell_type": "markdown"})
            continue
        count += 1
        outputs = outputs_of(source, names)
        for output in outputs:
            if output["output_type"] == "execute_result":
                output["execution_count"] = count
        cells.append(about | {"cell_type": "code", "execution_count": count, "outputs": outputs})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path = Path(__file__).parent / "explain.ipynb"
    path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
