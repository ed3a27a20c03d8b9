"""Train language models with explicit position IDs, and measure which far tokens they depend on.

from olmo_sparsity import explain

The names below are imported on first use, so that `import olmo_sparsity` takes no torch, and
figures can be drawn without it. None of them may equal the name of a subpackage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from olmo_sparsity.analysis.api import attribute, estimate_cost, explain, measure
    from olmo_sparsity.analysis.attribution.sources import Answer, Segment
    from olmo_sparsity.analysis.inputs.documents import Controls, Document, Documents
    from olmo_sparsity.analysis.inputs.texts import open_documents
    from olmo_sparsity.analysis.inputs.windows import Windows
    from olmo_sparsity.analysis.measurement.recovery import recover
    from olmo_sparsity.analysis.models.load import load_model
    from olmo_sparsity.analysis.results.results import compare, read_results, transfer
    from olmo_sparsity.analysis.results.statistics import summarize
    from olmo_sparsity.analysis.scoring.score import score
    from olmo_sparsity.analysis.scoring.scorer import Scorer, context_losses
    from olmo_sparsity.analysis.selectors.influence import influence_map

__version__ = "0.1.0"

_MODULES = {
    "explain": "analysis.api",
    "attribute": "analysis.api",
    "measure": "analysis.api",
    "estimate_cost": "analysis.api",
    "load_model": "analysis.models.load",
    "open_documents": "analysis.inputs.texts",
    "Windows": "analysis.inputs.windows",
    "read_results": "analysis.results.results",
    "compare": "analysis.results.results",
    "transfer": "analysis.results.results",
    "summarize": "analysis.results.statistics",
    "Document": "analysis.inputs.documents",
    "Documents": "analysis.inputs.documents",
    "Controls": "analysis.inputs.documents",
    "Answer": "analysis.attribution.sources",
    "Segment": "analysis.attribution.sources",
    "Scorer": "analysis.scoring.scorer",
    "context_losses": "analysis.scoring.scorer",
    "influence_map": "analysis.selectors.influence",
    "recover": "analysis.measurement.recovery",
    "score": "analysis.scoring.score",
}

__all__ = [
    "Answer",
    "Controls",
    "Document",
    "Documents",
    "Scorer",
    "Segment",
    "Windows",
    "__version__",
    "attribute",
    "compare",
    "context_losses",
    "estimate_cost",
    "explain",
    "influence_map",
    "load_model",
    "measure",
    "open_documents",
    "read_results",
    "recover",
    "score",
    "summarize",
    "transfer",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'olmo_sparsity' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"olmo_sparsity.{_MODULES[name]}"), name)
