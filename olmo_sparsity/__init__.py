"""Train language models with explicit position IDs, and measure which far tokens they depend on.

from olmo_sparsity import explain

The names below are imported on first use, so that `import olmo_sparsity` takes no torch, and
figures can be drawn without it. None of them may equal the name of a subpackage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from olmo_sparsity.analysis.ask import explain
    from olmo_sparsity.analysis.documents import Controls, Document, Documents
    from olmo_sparsity.analysis.estimate import estimate
    from olmo_sparsity.analysis.explanation import read_explanation
    from olmo_sparsity.analysis.influence import influence_map
    from olmo_sparsity.analysis.measurement import measure
    from olmo_sparsity.analysis.plan import plan
    from olmo_sparsity.analysis.recovery import recover
    from olmo_sparsity.analysis.results import compare, read_results, transfer
    from olmo_sparsity.analysis.scoring import Scorer, context_losses
    from olmo_sparsity.analysis.segments import Segment
    from olmo_sparsity.analysis.sources import open_documents
    from olmo_sparsity.analysis.statistics import summarize
    from olmo_sparsity.analysis.windows import Windows
    from olmo_sparsity.model.load import load_model

__version__ = "0.1.0"

_MODULES = {
    "explain": "analysis.ask",
    "measure": "analysis.measurement",
    "plan": "analysis.plan",
    "estimate": "analysis.estimate",
    "load_model": "model.load",
    "open_documents": "analysis.sources",
    "Windows": "analysis.windows",
    "read_explanation": "analysis.explanation",
    "read_results": "analysis.results",
    "compare": "analysis.results",
    "transfer": "analysis.results",
    "summarize": "analysis.statistics",
    "Document": "analysis.documents",
    "Documents": "analysis.documents",
    "Controls": "analysis.documents",
    "Segment": "analysis.segments",
    "Scorer": "analysis.scoring",
    "context_losses": "analysis.scoring",
    "influence_map": "analysis.influence",
    "recover": "analysis.recovery",
}

__all__ = [
    "Controls", "Document", "Documents", "Scorer", "Segment", "Windows", "__version__", "compare",
    "context_losses", "estimate", "explain", "influence_map", "load_model", "measure",
    "open_documents", "plan", "read_explanation", "read_results", "recover", "summarize",
    "transfer",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'olmo_sparsity' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"olmo_sparsity.{_MODULES[name]}"), name)
