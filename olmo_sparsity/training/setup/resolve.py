"""Set what hardware, tokenizer and other keys determine, in a copy of a config.

    written by the user                  after `resolve`, for example
      model.vocab_size: 0                  50280, the tokenizer's; embedding_size: 50304
      data.order: auto                     stored, up to 2^24 sequences
      checkpoint.keep_every_steps: auto    2000, a tenth of 20,000 steps
      training.precision: auto             bf16 on a GPU that multiplies it
      training.micro_batch_size: auto      16, what fits into memory

Called by inputs.py for a run, and by dry_run.py for its price.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.rules import check_model
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.order import choose_order
from olmo_sparsity.data.prepare import check_same_settings
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.data.transform import with_fingerprint
from olmo_sparsity.training.estimate.device_memory import fitting_micro_batch_size
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.processes.device import choose_precision
from olmo_sparsity.training.setup.corpus_weights import earlier_weights


def resolve(
    config: RunConfig, shards: TokenShards, device: torch.device, hardware: Hardware
) -> RunConfig:
    """Return a copy with the fields set that hardware and tokenizer determine. Raise ConfigError
    for what does not fit the shards."""
    check_same_settings(config.data)

    # The model has the tokenizer's vocabulary.
    model = with_vocabulary(config.model, shards.vocab_size)
    if model.vocab_size < shards.vocab_size:
        raise ConfigError(f"{model.vocab_size=} must be 0 or at least {shards.vocab_size}")
    check_model(model, "config")  # the embedding may be too small for the vocabulary
    # Every tokenizer has an end-of-text token; few have one for padding.
    model = replace(model, eos_token_id=shards.eos_id, pad_token_id=shards.eos_id)

    # All corpora are read in an order of one kind, which suits the largest of them.
    corpora = shards.corpora.values() or [shards]
    num_sequences = max(corpus.count_sequences(config.training.length) for corpus in corpora)
    order = choose_order(config.data.order, num_sequences)
    data = replace(with_fingerprint(config.data), order=order)

    # A saved config has them already, and must have the same.
    weights_before_branch = earlier_weights(config)
    if config.training.earlier_weights not in ([], weights_before_branch):
        raise ConfigError(
            "training.earlier_weights is set, but follows from branch_from; leave it out"
        )
    training = replace(config.training, earlier_weights=weights_before_branch)
    config = replace(config, model=model, data=data, training=training)
    return for_hardware(with_staying_checkpoints(config), device, hardware)


KEPT_FROM_STEPS = 10_000
"""Number of steps from which `checkpoint.keep_every_steps=auto` keeps ten checkpoints. Shorter runs
take minutes, or a few hours, and can be run again."""


def with_staying_checkpoints(config: RunConfig) -> RunConfig:
    """Return a copy in which `checkpoint.keep_every_steps` is a number of steps or None."""
    checkpoint = config.checkpoint
    if checkpoint.keep_every_steps != 0:  # not `auto`
        return config
    num_steps = config.training.num_steps
    interval = num_steps // 10 if num_steps >= KEPT_FROM_STEPS else None
    return replace(config, checkpoint=replace(checkpoint, keep_every_steps=interval))


def for_hardware(config: RunConfig, device: torch.device, hardware: Hardware) -> RunConfig:
    """Return a copy with the precision and the micro-batches of this hardware."""
    precision = choose_precision(config.training.precision, device)
    config = replace(config, training=replace(config.training, precision=precision))
    if config.training.micro_batch_size is None:
        return config
    # After the precision, on which the memory of a micro-batch depends.
    micro_batch_size = fitting_micro_batch_size(config, hardware)
    training = replace(config.training, micro_batch_size=micro_batch_size)
    return replace(config, training=training)


def with_vocabulary(model: ModelConfig, size: int) -> ModelConfig:
    """Return a copy whose vocabulary has the tokenizer's size, unless the config sets another."""
    if model.vocab_size != 0:
        return replace(model)
    # Rounded up to a multiple of 128, for fast matrix products.
    rounded_size = math.ceil(size / 128) * 128
    return replace(model, vocab_size=size, embedding_size=model.embedding_size or rounded_size)
