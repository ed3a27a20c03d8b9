"""Open the inputs of a run: resolve its config, and build what reads the text.

    inputs = open_inputs(config, device, processes)
    inputs.config         the config, complete: micro-batches, precision, size of the vocabulary
    inputs.batches        training batches, by step
    inputs.evaluation     held-out losses

Each process does this by itself, without waiting for others. start.py calls `check_possible` first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from olmo_sparsity.config.run import flatten
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.yaml_files import to_yaml
from olmo_sparsity.data.batches import BatchPlan, TrainingBatches
from olmo_sparsity.data.shard_manifest import SPLITS
from olmo_sparsity.data.shards import TokenShards, open_shards
from olmo_sparsity.data.transform import load_transform
from olmo_sparsity.models.huggingface.exchange import check_exportable
from olmo_sparsity.training.engines.choose import check_engine
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.evaluation.evaluate import Evaluation, Measures
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.run_folder.folder import Flat
from olmo_sparsity.training.setup.corpus_weights import weights_of
from olmo_sparsity.training.setup.resolve import resolve


def check_possible(config: RunConfig, processes: Processes) -> None:
    """Raise ConfigError for what would fail in the first step, or only at the end."""
    check_engine(config.engine, config.training, processes.world_size)
    if config.checkpoint.export_at_end or config.evaluation.lm_eval:
        check_exportable(config.model)
    if config.model.architecture == "olmo":
        from olmo_sparsity.models.olmo.model import check_supported  # imports all of OLMo

        for first_step in config.training.first_steps:  # RoPE may differ in each stage
            check_supported(config.at(first_step).model)


@dataclass(frozen=True)
class Inputs:
    """Config and text of a run, which each process reads by itself, without waiting for others."""

    config: RunConfig
    """The config, with what hardware and tokenizer determine filled in."""

    settings: Flat
    """The config as flat keys, with which other starts are compared."""

    config_yaml: str
    """The config as YAML, for the run folder and each checkpoint."""

    device: torch.device
    """The device of this process."""

    shards: TokenShards
    """The training text."""

    batches: TrainingBatches
    """The batches of this process, by step."""

    evaluation: Evaluation
    """Held-out losses."""

    measures: Measures
    """What is evaluated besides, such as tasks of lm_eval."""

    epochs: dict[str, float]
    """How often the whole run reads each corpus."""


def open_inputs(config: RunConfig, device: torch.device, processes: Processes) -> Inputs:
    """Open the text, resolve the config with it, and build what reads the text: batches and
    evaluations."""
    # Each process hashes its share of the shards.
    share = (processes.rank, processes.world_size)
    shards, heldout = (open_shards(config.data, split, share) for split in SPLITS)
    config = resolve(config, shards, device, Hardware.here(device, processes))
    measures = build_measures(config, heldout, device, processes)
    evaluation = build_evaluation(heldout, config)
    evaluation.check()
    batches = build_batches(shards, config, processes)
    return Inputs(
        config=config,
        settings=flatten(config),
        config_yaml=to_yaml(config),
        device=device,
        shards=shards,
        batches=batches,
        evaluation=evaluation,
        measures=measures,
        epochs=batches.order.count_reads(config.training.num_steps),
    )


def build_measures(
    config: RunConfig, heldout: TokenShards, device: torch.device, processes: Processes
) -> Measures:
    """Return the functions that measure a copy of the weights in each evaluation."""
    if not config.evaluation.lm_eval:
        return {}
    from olmo_sparsity.training.evaluation.lm_eval_tasks import Tasks  # imports lm_eval, an extra

    return {"lm_eval": Tasks(config, heldout.tokenizer, device, processes)}


def build_evaluation(heldout: TokenShards, config: RunConfig) -> Evaluation:
    """Return the evaluation that the config describes."""
    return Evaluation(
        heldout,
        config.evaluation,
        trained_length=config.training.length,
        reached_length=config.largest_length,
        mask_documents=config.data.mask_documents,
        per_document=config.positions.per_document,
        weights=config.data.weights,
    )


def build_batches(shards: TokenShards, config: RunConfig, processes: Processes) -> TrainingBatches:
    """Return the batches of this process, by step."""
    plan = BatchPlan(
        config.positions,
        length=config.training.length,
        batch_size=config.training.batch_size,
        seed=config.seed,
        length_at=config.training.length_at,
        positions_at=lambda step: config.at(step).positions,
        transform=load_transform(config.data, shards.tokenizer, config.training.shortest_length),
        mask_documents=config.data.mask_documents,
        order=config.data.order,
        weights=weights_of(config),
    )
    return TrainingBatches(shards, plan, processes.rank, processes.world_size)
