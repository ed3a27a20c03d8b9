"""Ask a trained model what its losses depend on.

from analysis import Scorer, Windows, context_losses, influence_map, load_model, recover

No name here may be that of a module, which would hide it.
"""

from __future__ import annotations

from typing import Any

_HOME = {
    "load_model": "olmo_sparsity.model.load",
    "context_losses": "analysis.losses",
    "influence_map": "analysis.influence",
    "recover": "analysis.recovery",
    "summarize": "analysis.recovery",
    "Settings": "analysis.settings",
    "Scorer": "analysis.scoring",
    "open_source": "analysis.sources",
    "Windows": "analysis.windows",
    "read_results": "analysis.results",
}


def __getattr__(name: str) -> Any:
    # Looked up when asked for: figures and report must not pay for torch.
    if name not in _HOME:
        raise AttributeError(f"module 'analysis' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
