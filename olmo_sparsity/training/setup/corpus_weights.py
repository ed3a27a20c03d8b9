"""Say by which weights several corpora are mixed in each stretch of batches.

    a run with two stages    weights_of(config)
      until step 1000        Weights({"web": 0.9, "code": 0.1}, until=1000)
      to the end             Weights({"web": 0.5, "code": 0.5}, until=None)

    a branch of it at step 600, with data.corpus of its own: web 0.2, code 0.8
                             earlier_weights(config), which training.earlier_weights stores
      until batch 600        EarlierWeights(600, {"web": 0.9, "code": 0.1})
                             weights_of(config)
      until batch 600        Weights({"web": 0.9, "code": 0.1}, until=600)
      to the end             Weights({"web": 0.2, "code": 0.8}, until=None)

A branch must know what its trunk has read, as it goes on in each corpus where the trunk has stopped
reading. resolve.py stores `earlier_weights` in the config; inputs.py and epochs.py ask
`weights_of` for the batches.
"""

from __future__ import annotations

from pathlib import Path

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.manifest import MANIFEST
from olmo_sparsity.config.run import load_saved_config
from olmo_sparsity.config.sections import EarlierWeights, RunConfig, StageConfig
from olmo_sparsity.data.batches import batch_of_step
from olmo_sparsity.data.mixture import Weights
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.run_folder.trainer_state import TrainerState


def weights_of(config: RunConfig) -> list[Weights]:
    """Return the weights of several corpora in each stretch of batches; empty for a single corpus.
    A stage ends after a number of batches, which is a number of steps where no batch is left
    out."""
    if not config.data.corpora:
        return []
    stretches = []
    num_before_branch = 0
    for trunk_weights in config.training.earlier_weights:
        stretches.append(Weights(trunk_weights.weights, trunk_weights.until))
        num_before_branch = trunk_weights.until
    # The trunk has read what its own weights said, whatever the stages of the branch say of these
    # batches.
    for stage in config.training.lengths or [StageConfig()]:
        if stage.until is None or stage.until > num_before_branch:
            stretches.append(Weights(stage.weights or config.data.weights, stage.until))
    return stretches


def earlier_weights(config: RunConfig) -> list[EarlierWeights]:
    """Return the weights by which several corpora were read before a branch, up to its checkpoint.
    Raise ConfigError for a branch with other corpora."""
    if config.branch_from is None or not config.data.corpora:
        return []
    own_config = Path(config.run_folder) / "config.yaml"
    if own_config.exists() and list_checkpoints(config.run_folder):
        # The branch goes on by itself, also when its trunk is deleted.
        return load_saved_config(own_config).training.earlier_weights
    origin = Path(config.branch_from)
    if not (origin / MANIFEST).is_file():
        return []  # not a checkpoint, which is reported when it is read
    trunk = load_saved_config(origin / "config.yaml")
    names = list(config.data.weights)
    names_of_trunk = list(trunk.data.weights)
    if names != names_of_trunk:
        raise ConfigError(
            f"branch_from={origin} reads the corpora {names_of_trunk}, this run {names}; list the "
            "same ones (a weight may be 0), or take the weights of the model with init_from"
        )
    # Batches count from 0, so the number of the next step's batch is how many come before it, read
    # or left out.
    state = TrainerState.read(origin)
    num_batches = batch_of_step(state.step + 1, state.skipped_batches)
    weights_until_branch = []
    for stretch in weights_of(trunk):
        until = num_batches if stretch.until is None else min(stretch.until, num_batches)
        weights_until_branch.append(EarlierWeights(until, dict(stretch.by_corpus)))
        if until == num_batches:  # later stretches are of the trunk alone
            break
    return weights_until_branch
