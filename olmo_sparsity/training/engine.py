"""How a step is carried out: devices, precision, gradient accumulation, clipping.

Place in the flow: batches → model → **losses become updates**. The training loop hands over a
batch and a learning rate and knows nothing of what is below.

Dimension key: B batch, L length.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from olmo_sparsity.config import IGNORED, Precision, RunConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.model.losses import mean_loss
from olmo_sparsity.training.optim import build_optimizer

OPTIMIZER_FILE = "optimizer.pt"


class Engine:
    """One process, one device."""

    name = "one process"
    rank = 0
    world_size = 1

    def __init__(self, model: Any, config: RunConfig) -> None:  # what build_model returns
        self.config = config
        self.device = choose_device(config.training.device)
        self.model = model.to(self.device)
        self.optimizer = build_optimizer(model, config.optimizer)
        if config.training.activation_checkpointing:
            model.checkpoint_activations()
        if config.training.compile:
            model.hidden = torch.compile(model.hidden)

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.config.training.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def step(self, batch: Batch, learning_rate: float) -> tuple[Tensor, Tensor]:
        """One optimizer step. Returns (mean loss, gradient norm) still on the device."""
        num_labels = int((batch.labels_BL != IGNORED).sum())
        self.model.train()
        losses = []
        for part in batch.split(self.config.training.micro_batch_size or len(batch.tokens_BL)):
            part = part.to(self.device)
            with self.autocast():
                loss = mean_loss(
                    self.model, part.tokens_BL, part.positions_BL, part.labels_BL, num_labels
                )
            loss.backward()
            losses.append(loss.detach())
        limit = self.config.training.max_grad_norm
        norm = nn.utils.clip_grad_norm_(
            self.model.parameters(), float("inf") if limit is None else limit
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum(), norm

    def save_optimizer(self, folder: Path) -> None:
        torch.save(self.optimizer.state_dict(), folder / OPTIMIZER_FILE)

    def load_optimizer(self, folder: Path) -> None:
        path = folder / OPTIMIZER_FILE
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            self.optimizer.load_state_dict(state)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"{path}: optimizer state does not fit this run: {reason}; delete the checkpoint "
                "to resume from the one before"
            ) from None


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"training.device={name} cannot be used: {reason}; set it to auto or cpu"
        ) from None
    return device


def choose_precision(name: Precision, device: torch.device) -> Precision:
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    abilities: dict = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if abilities.get("avx512_bf16") or abilities.get("amx_bf16") else "fp32"


def measure_matmul_peak(device: torch.device, precision: str) -> float:
    """FLOP/s of a plain square matmul on this device: the yardstick for every throughput shown."""
    size = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    own = torch.Generator(device)  # leave the run's random numbers alone
    left = torch.randn(size, size, device=device, dtype=dtype, generator=own)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        left @ left
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
