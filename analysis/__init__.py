"""Measure which far-away tokens the predictions of a trained language model depend on.

from analysis import Windows, load_model, measure, open_documents

No name here may equal that of a module, which would hide it.
"""

from __future__ import annotations

from typing import Any

_MODULES = {
    "explain": "analysis.explanation",
    "load_model": "olmo_sparsity.model.load",
    "open_documents": "analysis.sources",
    "Document": "analysis.documents",
    "Documents": "analysis.documents",
    "Controls": "analysis.documents",
    "Windows": "analysis.windows",
    "Scorer": "analysis.scoring",
    "context_losses": "analysis.scoring",
    "influence_map": "analysis.influence",
    "measure": "analysis.measurement",
    "recover": "analysis.recovery",
    "summarize": "analysis.statistics",
    "compare": "analysis.results",
    "read_results": "analysis.results",
}


__all__ = list(_MODULES)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Imported on first use: figures and report must not import torch.
    if name not in _MODULES:
        raise AttributeError(f"module 'analysis' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
