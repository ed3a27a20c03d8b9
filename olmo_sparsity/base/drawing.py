"""Save matplotlib figures in one style, with the same bytes for the same numbers.

    save(draw, Path("figure.png"))     # `draw` returns a matplotlib Figure; PRINT is the style

    labels_of_folders(["a/seed1", "b/seed1"])      # ["a/seed1", "b/seed1"]
    labels_of_folders(["runs/pose", "runs/rope"])  # ["pose", "rope"]

Place in the flow: the last step of all figures. Never imports torch or pyplot, and changes no
global state.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.files import writing

# Okabe and Ito's palette, which colour-blind readers can distinguish.
BLACK = "#000000"
GREY = "#888888"  # not theirs, and not in PALETTE: for what a figure is compared with
BLUE = "#0072B2"
RED = "#D55E00"
GREEN = "#009E73"
PINK = "#CC79A7"
ORANGE = "#E69F00"
SKY = "#56B4E9"
PALETTE = (BLACK, BLUE, RED, GREEN, PINK, ORANGE, SKY)

SUFFIXES = (".png", ".pdf", ".svg")

PRINT: dict[str, Any] = {
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "font.family": "DejaVu Sans",
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "olmo-sparsity",
    "pdf.fonttype": 42,
    "text.parse_math": False,
    "axes.unicode_minus": True,
    "savefig.dpi": 300,
}
"""matplotlib's settings for a column in print: small type, thin lines, and text that stays text in
PDF and SVG."""


def save(draw: Callable[[], Figure], out: Path, **settings: Any) -> None:
    """Write a figure to a file.

    Args:
        draw: Returns the figure. It is called while the settings are in effect.
        out: A path that ends in .png, .pdf or .svg.
        settings: Settings of matplotlib, which replace those in `PRINT`.
    """
    out = Path(out)
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"--out {out}: the name of a figure must end in {', '.join(SUFFIXES)}")
    picture = render(draw, out.suffix[1:], settings)
    out.parent.mkdir(parents=True, exist_ok=True)
    with writing(out) as partial:
        partial.write_bytes(picture)


def render(draw: Callable[[], Figure], suffix: str, settings: dict[str, Any]) -> bytes:
    """Return the bytes of a figure as png, pdf or svg. Equal figures have equal bytes."""
    stream = io.BytesIO()
    # A date would make equal results unequal files.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix, {})
    # matplotlib types its settings as one literal of all their names.
    rc: Any = PRINT | settings
    # Names of tokens may have letters that no font has; a box is drawn in their place.
    with matplotlib.rc_context(rc), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        draw().savefig(stream, format=suffix, metadata=metadata)
    return stream.getvalue()


def band(axes: Axes, x: Any, low: Any, high: Any, color: str, alpha: float = 0.15) -> None:
    """Draw a shaded band from `low` to `high` around a curve."""
    axes.fill_between(x, low, high, color=color, alpha=alpha, linewidth=0, zorder=0)


# --- labels of curves -----------------------------------------------------------------------------


def one_label_each(labels: Sequence[str] | None, default: Sequence[str]) -> list[str]:
    """Return a label for each of several results in one figure.

    Args:
        labels: Those that the user passed; None or empty: the default ones are taken.
        default: A label for each result, by which their number is checked, too.

    Raises:
        ConfigError: There is not one label for each result.
    """
    names = list(labels or default)
    if len(names) != len(default):
        raise ConfigError(f"{len(names)} labels for {len(default)} results; give one for each")
    return names


def short_labels(names: Iterable[str], max_length: int = 30) -> dict[str, str]:
    """Return a label for each name: its last `max_length` characters, because the end of a path
    says most. Of names with the same end, as many more characters are kept as make them
    different."""
    names = list(dict.fromkeys(names))
    labels = {}
    for name in names:
        length = max_length
        if len(name) > length:
            # One character of a shortened label is the sign that more precedes it.
            while length < len(name) and _ends_alike(name[1 - length :], name, names):
                length += 1
        labels[name] = name if len(name) <= length else "…" + name[1 - length :]
    return labels


def _ends_alike(end: str, name: str, names: Iterable[str]) -> bool:
    """Return whether another name than `name` has this end, too."""
    return any(other.endswith(end) for other in names if other != name)


def labels_of_folders(folders: Sequence[str | Path]) -> list[str]:
    """Return a label for each folder: its name. Folders with the same name get as many folders
    before it as make them different, as in `a/seed1` and `b/seed1`."""
    all_parts = [Path(folder).absolute().parts for folder in folders]
    for folder, parts in zip(folders, all_parts, strict=True):
        if all_parts.count(parts) > 1:
            raise ConfigError(f"{folder} is named twice; name each folder once")

    labels = []
    for parts in all_parts:
        others = [other for other in all_parts if other != parts]
        num_parts = 1
        while num_parts < len(parts) and _have_end(others, parts[-num_parts:]):
            num_parts += 1
        labels.append(str(Path(*parts[-num_parts:])))
    return labels


def _have_end(paths: Iterable[tuple[str, ...]], end: tuple[str, ...]) -> bool:
    """Return whether any path, as a tuple of its parts, ends with these parts."""
    return any(parts[-len(end) :] == end for parts in paths)


def check_labels_differ(labels: Sequence[str]) -> None:
    """Raise ConfigError if two curves would have the same entry in the legend."""
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(
                f"--labels: '{label}' is there twice; give each run a label of its own"
            )
