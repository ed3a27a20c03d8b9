"""A first look, without a model or a text of one's own: `olmo-sparsity demo`.

Place in the flow: beneath cli.py. The model is that of `make figure2` (demo/README.md).
"""

from __future__ import annotations

from pathlib import Path

from olmo_sparsity.analysis.api import explain
from olmo_sparsity.analysis.models.load import DEMO

NEXT = """\
Next, with a model of yours (a folder, a run, or a name on the hub; FILES: unrelated texts):
  olmo-sparsity explain MODEL --text FILE --at "some words of it" --check --foreign FILES
  olmo-sparsity attribute MODEL --source a.txt --source b.txt --question "When?" --decoys FILES
  olmo-sparsity measure MODEL --text FOLDER --quick --out results/first"""


def demo(html: str | None = None) -> None:
    """The name at the end of a text: which far words help a small model to say it?"""
    text = (DEMO / "bridge.txt").read_text()
    print(text)
    e = explain("demo", text=text, at="Weissenborn", units="words", k=2)
    print(e)
    print(e.check(foreign=str(DEMO / "unrelated.txt")))
    if html is not None:
        e.to_html(Path(html))
        print(f"page: {html}")
    print(f"\n{NEXT}")
