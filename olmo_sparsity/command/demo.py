"""Explain a prediction that anybody can check, without a model or a text of one's own.

Place in the flow: below cli.py.
"""

from __future__ import annotations

from pathlib import Path

from olmo_sparsity.analysis.api import explain
from olmo_sparsity.analysis.models.load import DEMO, LoadedModel, load_model
from olmo_sparsity.errors import UserError
from olmo_sparsity.runtime import say

NEXT = """\
Next, with a model of yours (a folder, a .gguf file, a run, or a name on the hub; FILES: unrelated texts):
  olmo-sparsity explain MODEL --text FILE --at "some words of it" --check --foreign FILES
  olmo-sparsity attribute MODEL --source a.txt --source b.txt --question "When?" --decoys FILES
  olmo-sparsity measure MODEL --text FOLDER --quick --out results/first"""  # noqa: E501


def demo(html: str | None = None) -> None:
    """Find the distant words by which SmolLM2 predicts the name at the end of a text."""
    text = (DEMO / "ayrton.txt").read_text().strip()
    model = _find_model()
    print(f"{text}\n\nWhich distant words does {model.name} need to predict the last one?\n")
    e = explain(model, text=text, at="Ayrton", units="words", k=2, short=12, prefix="\n")
    print(e)
    print(e.check(foreign=str(DEMO / "unrelated.txt")))
    if html is not None:
        e.to_html(Path(html))
        print(f"page: {html}")
    print(f"\n{NEXT}")


def _find_model() -> LoadedModel:
    try:
        return load_model("smollm2")
    except UserError as error:
        say(str(error))
        say("Here is a small model that is installed instead (0.56M parameters).")
        return load_model("demo")
