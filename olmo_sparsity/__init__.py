"""Train language models with explicit position IDs, and measure which distant tokens they depend
on.

from olmo_sparsity import explain

The names below are imported on first use, so that `import olmo_sparsity` takes no torch, and
figures can be drawn without it. None of them may equal the name of a subpackage."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from olmo_sparsity.analysis.api import estimate_cost, explain, measure
    from olmo_sparsity.analysis.callbacks.olmo_core import OLMoCoreLosses
    from olmo_sparsity.analysis.callbacks.trainer import TrainerLosses
    from olmo_sparsity.analysis.measurement.recovery import recover
    from olmo_sparsity.analysis.results.results import compare, read_results, transfer
    from olmo_sparsity.analysis.results.statistics import summarize
    from olmo_sparsity.analysis.scoring.document_losses import context_losses
    from olmo_sparsity.analysis.scoring.losses_by_place import losses_by_place
    from olmo_sparsity.analysis.scoring.scorer import Scorer
    from olmo_sparsity.analysis.selectors.influence import influence_map
    from olmo_sparsity.models.load import load_model
    from olmo_sparsity.sources.attribute import attribute
    from olmo_sparsity.sources.gate.suite import check
    from olmo_sparsity.sources.reading.answer_pieces import Answer
    from olmo_sparsity.sources.reading.prompt_parts import Segment
    from olmo_sparsity.text.controls import Controls
    from olmo_sparsity.text.documents import Document, Documents
    from olmo_sparsity.text.inputs import open_documents
    from olmo_sparsity.text.windows import Windows

__version__ = "0.1.0"

_MODULES = {
    "analysis.api": "estimate_cost explain measure",
    "analysis.callbacks.olmo_core": "OLMoCoreLosses",
    "analysis.callbacks.trainer": "TrainerLosses",
    "sources.attribute": "attribute",
    "sources.reading.answer_pieces": "Answer",
    "sources.reading.prompt_parts": "Segment",
    "sources.gate.suite": "check",
    "text.controls": "Controls",
    "text.documents": "Document Documents",
    "text.inputs": "open_documents",
    "text.windows": "Windows",
    "analysis.measurement.recovery": "recover",
    "models.load": "load_model",
    "analysis.results.results": "compare read_results transfer",
    "analysis.results.statistics": "summarize",
    "analysis.scoring.document_losses": "context_losses",
    "analysis.scoring.losses_by_place": "losses_by_place",
    "analysis.scoring.scorer": "Scorer",
    "analysis.selectors.influence": "influence_map",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Answer",
    "Controls",
    "Document",
    "Documents",
    "OLMoCoreLosses",
    "Scorer",
    "Segment",
    "TrainerLosses",
    "Windows",
    "__version__",
    "attribute",
    "check",
    "compare",
    "context_losses",
    "estimate_cost",
    "explain",
    "influence_map",
    "load_model",
    "losses_by_place",
    "measure",
    "open_documents",
    "read_results",
    "recover",
    "summarize",
    "transfer",
]

if find_spec("olmo_sparsity.sources") is None:  # it can be left out of an installation
    _HOME = {name: module for name, module in _HOME.items() if not module.startswith("sources.")}
    __all__[:] = [name for name in __all__ if name in _HOME or name == "__version__"]

# `from olmo_sparsity import *` imports all of the list, and few have OLMo-core, which this needs.
# Its own import works; type checkers read the list above.
__all__[:] = [name for name in __all__ if name != "OLMoCoreLosses"]


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'olmo_sparsity' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"olmo_sparsity.{_HOME[name]}"), name)
