"""The cost of an explanation, an attribution or a measurement.

Place in the flow: below `estimate_cost` and `--dry-run`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    token_forwards: int
    num_parameters: int
    details: str = ""
    """For a measurement: documents, targets, memory and time, as found in a short trial."""

    @property
    def flops(self) -> float:
        return 2.0 * self.num_parameters * self.token_forwards

    def __str__(self) -> str:
        if not self.num_parameters:  # of a server
            return self.details or f"token-forwards  {self.token_forwards:,}"
        return self.details or (
            f"token-forwards  {self.token_forwards:,}\n"
            f"FLOPs           {self.flops:.2e} (2 per parameter): {self.flops / 4e14:,.1f} s of a "
            "GPU that does 400 TFLOP/s"
        )
