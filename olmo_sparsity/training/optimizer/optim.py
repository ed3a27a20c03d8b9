"""Build the optimizer of a model: AdamW, or Muon and AdamW (`optimizer.name`).

    optimizer.name    matrices of layers    embeddings, output    norms, biases
    adamw             AdamW                 AdamW                 AdamW
    muon              Muon                  AdamW                 AdamW

    optimizer = build_optimizer(model, config.optimizer, "bf16")    # engines call it once
    moments_of(optimizer, weight)    # {"exp_avg": …, "exp_avg_sq": …}; Muon: {"momentum_buffer": …}

learning_rate.py has the schedule, which engines set in each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import unwrap
from typing import Any, cast

import torch
from torch import Tensor, nn

from olmo_sparsity.config.sections import OptimizerConfig, Precision
from olmo_sparsity.models.language_model import LanguageModel
from olmo_sparsity.training.optimizer.moments import KEYS, MUON_KEYS
from olmo_sparsity.training.optimizer.muon import Muon


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW, without the wrappers of its methods. These are for optimizers that are
    themselves compiled, as ours never is, and import PyTorch's compiler, which takes about a second
    of each start."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        unwrap(torch.optim.AdamW.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        unwrap(torch.optim.AdamW.zero_grad)(self, set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return unwrap(torch.optim.AdamW.step)(self, closure)


class MuonAndAdamW:
    """Muon for some parameters and AdamW for the others, with the interface of one optimizer."""

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        self.muon = muon
        self.adamw = adamw

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [*self.muon.param_groups, *self.adamw.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        return {**self.muon.state, **self.adamw.state}

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)


Optimizer = torch.optim.AdamW | MuonAndAdamW


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    precision: Precision,
    muon_class: type[Muon] = Muon,
) -> Optimizer:
    """Return the optimizer of all parameters of a model.

    Args:
        precision: That of the run. Muon makes its updates orthogonal in it.
        muon_class: The class for matrices if the config names Muon. It differs by engine, as
            `fully_shard` divides matrices among processes.
    """
    if config.name == "adamw":
        return build_adamw(model.parameters(), model, config)
    matrices = matrices_of_layers(model)
    # By identity: `==` of tensors compares their elements.
    matrix_ids = {id(matrix) for matrix in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in matrix_ids]
    muon = muon_class(
        matrices,
        torch.float32 if precision == "fp32" else torch.bfloat16,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
    )
    return MuonAndAdamW(muon, build_adamw(rest, model, config))


def matrices_of_layers(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices that Muon updates: all except embeddings and output, whose rows belong to
    single tokens. What OLMo keeps in one matrix (queries, keys and values; both halves of SwiGLU)
    is updated as one."""
    of_tokens = {id(weight) for weight in embeddings_of(model)}
    unembedding, _ = cast(LanguageModel, model).unembedding
    of_tokens.add(id(unembedding))
    return [
        parameter
        for parameter in model.parameters()
        if parameter.ndim == 2 and id(parameter) not in of_tokens
    ]


def embeddings_of(model: nn.Module) -> list[Tensor]:
    """Return the tables of embeddings of a model."""
    return [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]


def build_adamw(
    parameters: Iterable[nn.Parameter],
    model: nn.Module,
    config: OptimizerConfig,
    adamw_class: type[torch.optim.AdamW] = AdamW,
) -> torch.optim.AdamW:
    """Return AdamW of some parameters of a model. As in OLMo, it decays matrices of layers, and
    embeddings, norms and biases only if the config says so.

    Args:
        parameters: The parameters that it updates.
        model: The model, by which embeddings are known.
        config: The section `optimizer`.
        adamw_class: AdamW itself, or a subclass of it.
    """
    embedding_ids = {id(weight) for weight in embeddings_of(model)}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}  # by whether it is decayed
    for parameter in parameters:
        if id(parameter) in embedding_ids:
            is_decayed = config.decay_embeddings
        else:
            # A parameter that DeepSpeed has sharded is empty.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            is_decayed = len(shape) > 1 or config.decay_norm_and_bias
        groups[is_decayed].append(parameter)
    return adamw_class(
        [
            {"params": members, "weight_decay": config.weight_decay if is_decayed else 0.0}
            for is_decayed, members in groups.items()
            if members
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,  # one kernel for all parameters of a group
    )


def moments_of(optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Return the moments of a parameter by name. Create them if there was no update yet, as the
    optimizer itself does only in the first one."""
    keys: tuple[str, ...] = KEYS
    if isinstance(optimizer, MuonAndAdamW):
        groups = optimizer.muon.param_groups
        muon_ids = {id(matrix) for group in groups for matrix in group["params"]}
        is_of_muon = id(parameter) in muon_ids
        keys = MUON_KEYS if is_of_muon else KEYS
        optimizer = optimizer.muon if is_of_muon else optimizer.adamw
    state = optimizer.state[parameter]
    if not state:
        if keys == KEYS:
            # A fused AdamW counts its steps on the device.
            state["step"] = torch.zeros((), device=parameter.device)
        for key in keys:
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return {key: state[key] for key in keys}
