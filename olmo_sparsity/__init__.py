"""Train language models with explicit position IDs, and measure which distant tokens they depend
on.

    from olmo_sparsity import explain, load_model

A public name is imported on first use, so that `import olmo_sparsity` takes no torch, and figures
can be drawn without it. No public name may equal the name of a subpackage: importing the subpackage
would replace it.

To add a name, write it below twice: as an import for type checkers, which do not run this file, and
in the table from which programs get it. A test compares both.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    # `X as X` says to a type checker that X may be imported from here.
    from olmo_sparsity.analysis.api import estimate_cost as estimate_cost
    from olmo_sparsity.analysis.api import explain as explain
    from olmo_sparsity.analysis.api import measure as measure
    from olmo_sparsity.analysis.callbacks.olmo_core import OLMoCoreLosses as OLMoCoreLosses
    from olmo_sparsity.analysis.callbacks.trainer import TrainerLosses as TrainerLosses
    from olmo_sparsity.analysis.measurement.recovery import recover as recover
    from olmo_sparsity.analysis.results.compare import compare as compare
    from olmo_sparsity.analysis.results.compare import transfer as transfer
    from olmo_sparsity.analysis.results.statistics import summarize as summarize
    from olmo_sparsity.analysis.results.stored_results import read_results as read_results
    from olmo_sparsity.analysis.scoring.document_losses import context_losses as context_losses
    from olmo_sparsity.analysis.scoring.losses_by_place import losses_by_place as losses_by_place
    from olmo_sparsity.analysis.scoring.scorer import Scorer as Scorer
    from olmo_sparsity.analysis.selectors.influence import influence_map as influence_map
    from olmo_sparsity.models.load import load_model as load_model
    from olmo_sparsity.sources.attribute import attribute as attribute
    from olmo_sparsity.sources.gate.suite import check as check
    from olmo_sparsity.sources.reading.answer_pieces import Answer as Answer
    from olmo_sparsity.sources.reading.prompt_parts import Segment as Segment
    from olmo_sparsity.text.controls import Controls as Controls
    from olmo_sparsity.text.documents import Document as Document
    from olmo_sparsity.text.documents import Documents as Documents
    from olmo_sparsity.text.inputs import open_documents as open_documents
    from olmo_sparsity.text.windows import Windows as Windows
else:
    # A type checker must not see what follows: with a `__getattr__` it would accept any name.
    _MODULE_OF_NAME = {
        "Answer": "sources.reading.answer_pieces",
        "Controls": "text.controls",
        "Document": "text.documents",
        "Documents": "text.documents",
        "OLMoCoreLosses": "analysis.callbacks.olmo_core",
        "Scorer": "analysis.scoring.scorer",
        "Segment": "sources.reading.prompt_parts",
        "TrainerLosses": "analysis.callbacks.trainer",
        "Windows": "text.windows",
        "attribute": "sources.attribute",
        "check": "sources.gate.suite",
        "compare": "analysis.results.compare",
        "context_losses": "analysis.scoring.document_losses",
        "estimate_cost": "analysis.api",
        "explain": "analysis.api",
        "influence_map": "analysis.selectors.influence",
        "load_model": "models.load",
        "losses_by_place": "analysis.scoring.losses_by_place",
        "measure": "analysis.api",
        "open_documents": "text.inputs",
        "read_results": "analysis.results.stored_results",
        "recover": "analysis.measurement.recovery",
        "summarize": "analysis.results.statistics",
        "transfer": "analysis.results.compare",
    }
    """The module of each public name, without `olmo_sparsity.` before it."""

    if find_spec("olmo_sparsity.sources") is None:  # it can be left out of an installation
        _MODULE_OF_NAME = {
            name: module
            for name, module in _MODULE_OF_NAME.items()
            if not module.startswith("sources.")
        }

    # `from olmo_sparsity import *` imports all of the list. `OLMoCoreLosses` is not in it, as it
    # needs OLMo-core, which few have installed; its own import works.
    __all__ = sorted({*_MODULE_OF_NAME, "__version__"} - {"OLMoCoreLosses"})

    def __dir__() -> list[str]:
        return sorted([*_MODULE_OF_NAME, "__version__"])

    def __getattr__(name: str) -> Any:
        """Import a public name. Python calls this for names that the module does not have."""
        if name not in _MODULE_OF_NAME:
            raise AttributeError(f"module 'olmo_sparsity' has no attribute '{name}'")
        module = importlib.import_module(f"olmo_sparsity.{_MODULE_OF_NAME[name]}")
        return getattr(module, name)
