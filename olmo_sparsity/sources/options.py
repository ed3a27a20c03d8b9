"""The options of `attribute`. Imports nothing large, because `--help` reads it."""

from __future__ import annotations

from dataclasses import dataclass

from olmo_sparsity.config.schema import option, validate


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """The settings of `attribute`."""

    draws: int = option(8, least=2)
    units: str = "sources"
    rate: float = option(0.05, least=1e-06, most=0.999999)
    chat: bool = False
    control_tokens: bool = False
    max_new_tokens: int | None = option(None, metavar="N", least=1)
    seed: int = option(0, least=0)

    def check(self) -> None:
        validate(self)
        if self.units != "sources":
            from olmo_sparsity.text.windows import span_width

            span_width(self.units)
