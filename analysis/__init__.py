"""Ask a trained model what its losses depend on.

from analysis import Windows, load_model, measure, open_documents

No name here may be that of a module, which would hide it.
"""

from __future__ import annotations

from typing import Any

_HOME = {
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
    "read_results": "analysis.results",
}


def __getattr__(name: str) -> Any:
    # Looked up when asked for: figures and report must not pay for torch.
    if name not in _HOME:
        raise AttributeError(f"module 'analysis' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
