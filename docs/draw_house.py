"""Draw which package imports which, from the imports: python docs/draw_house.py

docs/figures/house.svg. A package stands above all that it imports.
"""

from __future__ import annotations

import ast
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "olmo_sparsity"
OUT = ROOT / "docs" / "figures" / "house.svg"
SAYS = {
    "command": "the command line",
    "analysis": "what a loss depends on",
    "tasks": "synthetic tasks",
    "theory": "the theorems in numbers",
    "jobs": "many runs, SLURM",
    "training": "losses become checkpoints",
    "model": "tokens and positions become losses",
    "data": "text becomes batches",
    "config": "the settings of a run",
    "disk": "files that survive kills",
    "process": "machine, messages, exit codes",
    "errors": "what a user can mend",
}


def rooms() -> dict[str, set[str]]:
    """Each package and what it imports, as the files have it today."""
    found: dict[str, set[str]] = {name: set() for name in SAYS}
    for path in PACKAGE.glob("*/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            parts = (module or "").split(".")
            if parts[0] == "olmo_sparsity" and len(parts) > 1 and parts[1] in SAYS:
                found[path.parent.name].add(parts[1])
    return {name: others - {name} for name, others in found.items()}


def level(name: str, imports: dict[str, set[str]]) -> int:
    return 1 + max((level(other, imports) for other in imports[name]), default=-1)


def draw(imports: dict[str, set[str]]) -> plt.Figure:
    levels = {name: level(name, imports) for name in imports}
    figure, axes = plt.subplots(figsize=(7.2, 6.2))
    places = {}
    for height in range(max(levels.values()) + 1):
        row = [name for name in SAYS if levels[name] == height]
        for i, name in enumerate(row):
            places[name] = (3.2 * (i - (len(row) - 1) / 2), 1.0 * height)
    for name, (x, y) in places.items():
        # What lies beneath through another package is left out: the picture stays readable.
        beneath = {far for other in imports[name] for far in imports[other]}
        for other in imports[name] - beneath:
            head = (places[other][0], places[other][1] + 0.26)
            axes.annotate("", head, (x, y - 0.26), arrowprops={"arrowstyle": "->", "color": "0.6"})
        axes.text(
            x,
            y,
            f"{name}\n{SAYS[name]}",
            ha="center",
            va="center",
            fontsize=7.5,
            bbox={"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": "0.4"},
        )
    axes.set(xlim=(-4.9, 4.9), ylim=(-0.5, max(levels.values()) + 0.5))
    axes.axis("off")
    return figure


if __name__ == "__main__":
    matplotlib.rcParams["svg.hashsalt"] = "house"
    draw(rooms()).savefig(OUT, metadata={"Date": None}, bbox_inches="tight", facecolor="white")
    print(OUT)
