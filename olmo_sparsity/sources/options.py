"""Declare the options of `attribute`: settings of the verdicts, and how long servers are waited
for.

Place in the flow: read by request.py, the command and `--help`. So nothing large is imported here.
The docstring of `attribute` (attribute.py) explains each setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from olmo_sparsity.config.build import validate
from olmo_sparsity.config.schema import option


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """The settings that determine the verdicts. Results store them."""

    # Two, as one decoy has no variance. With 1,024 the rounds of tests double nine times, and each
    # spends a tenth of the error rate before the last (verdicts/evidence.py); with more, nothing
    # or less than nothing would be left for the last.
    draws: int = option(8, least=2, most=1024)
    units: str = "sources"
    rate: float = option(0.05, least=1e-06, most=0.999999)
    chat: bool = False
    control_tokens: bool = False
    max_new_tokens: int | None = option(None, metavar="N", least=1)
    seed: int = option(0, least=0)

    def check(self) -> None:
        """Raise ConfigError if a setting is out of its range, or `units` has no such form."""
        validate(self)
        if self.units != "sources":
            # Imported here, as it imports NumPy, which `--help` does without.
            from olmo_sparsity.text.units import span_width

            span_width(self.units)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How long a server is waited for. These change no number, so results do not store them."""

    timeout: float | None = option(
        None, "seconds that a server may take for one request; 600", metavar="S", least=0.001
    )
    patience: float | None = option(
        None, "seconds for which a request is repeated that a server did not answer; 300",
        metavar="S", least=0.0,
    )  # fmt: skip

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_model`."""
        return {"timeout": self.timeout, "patience": self.patience}
