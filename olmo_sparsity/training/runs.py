"""Open the runs of this package for measurements: their weights, and the text that they held out.

    runs = Runs()
    folder = runs.find(Path("runs/c4_pose"))    # runs/c4_pose/checkpoints/step020000
    runs.load(folder, "runs/c4_pose", dtype="auto", device="cuda")
    runs.find(Path("data/c4"))                  # None: prepared text, not a run

`Runs` is found by the entry point `olmo_sparsity.runs`, and called by `load_model` and
`open_documents`. It is imported without [train], too, so that `_load_checkpoint` imports what needs
OLMo itself.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from olmo_sparsity.base.devices import multiplies
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.manifest import MANIFEST, find_damage
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.text import DataConfig
from olmo_sparsity.models.checkpoint_files import (
    WEIGHTS,
    check_of_same_run,
    find_step,
    list_checkpoints,
    load_checkpoint_config,
    load_weights,
    verified_checkpoints,
    weight_files,
)
from olmo_sparsity.models.find import DTYPES
from olmo_sparsity.models.identity.file_fingerprint import fingerprint
from olmo_sparsity.models.pretrained_tokenizer import read_tokenizer
from olmo_sparsity.text.runs import PreparedText, TrainedModel, TrainingText

OPTIMIZER_STATE = "engine/"
"""Beginning of the file names of optimizer state. It is most of the bytes of a checkpoint, and is
not verified where only weights are read."""


class Runs:
    """A `RunLoader` for run folders, checkpoint folders and prepared text."""

    def find(self, path: Path) -> Path | None:
        """Return the checkpoint folder that a path means: itself, or the newest intact one of a
        run. None if it is neither."""
        # Prepared text and measurements have a manifest, too.
        is_checkpoint = (path / "config.yaml").exists() or find_step(path) is not None
        if is_checkpoint and (path / MANIFEST).is_file():
            problem = find_damage(path, skip=OPTIMIZER_STATE)
            if problem:
                raise DataError(f"checkpoint '{path}': {problem}; use another one of its run")
            return path
        return _latest_or_fail(path) if (path / "checkpoints").is_dir() else None

    def load(self, folder: Path, name: str, dtype: str, device: str) -> TrainedModel:
        """Return the model of a checkpoint folder.

        Args:
            name: The run or folder that the user named.
            dtype: `auto` is bf16 on a GPU that multiplies it, where fp32 takes 8 to 15 times as
                long, and fp32 elsewhere.
        """
        if dtype == "auto":
            torch_device = torch.device(device)
            on_gpu = torch_device.type == "cuda"
            has_bf16 = on_gpu and multiplies(torch_device, torch.bfloat16)
            dtype = "bf16" if has_bf16 else "fp32"
            if on_gpu:
                say(f"{name}: weights in {dtype}; dtype=fp32 is slower and exact")
        loaded = _load_checkpoint(folder, DTYPES[dtype], device)
        step = loaded.trained["step"]
        num_steps = loaded.trained["num_steps"]
        # No line if the user named this checkpoint, and not its run.
        if folder != Path(name) and step is not None and step < num_steps:
            say(f"{name} has not ended: reading step {step:,} of {num_steps:,}")
        return loaded

    def checkpoints(self, path: Path) -> list[Path]:
        """Return the checkpoints of a run, the oldest first."""
        return list_checkpoints(path)[::-1]

    def open_prepared(self, folder: Path) -> PreparedText | None:
        """Return the held-out text of a prepared folder; None if it is not one."""
        if not (folder / MANIFEST).is_file():
            return None
        return _open_heldout(DataConfig(folder=str(folder)))


def _open_heldout(data: DataConfig) -> PreparedText:
    """Return the held-out documents of prepared text."""
    from olmo_sparsity.data.shards import open_shards

    return open_shards(data, "heldout")


def training_text(data: DataConfig) -> TrainingText:
    """Return where the text of a run is, and how to open its held-out part."""
    corpora = tuple(corpus.alone() for corpus in data.corpora) or (data.corpus,)
    return TrainingText(data.folder, partial(_open_heldout, data), corpora, data.heldout_share)


def _latest_or_fail(run_folder: Path) -> Path:
    """Return the newest intact checkpoint of a run. Report a newer one that is damaged."""
    first_problem = ""
    for folder, problem in verified_checkpoints(run_folder, OPTIMIZER_STATE):
        if problem is None:
            if first_problem:
                say(f"{first_problem}; reading {folder.name} instead")
            check_of_same_run(run_folder, folder)
            return folder
        first_problem = first_problem or f"{folder}: {problem}"
    if first_problem:
        raise DataError(f"no checkpoint of '{run_folder}' is intact; the latest, {first_problem}")
    raise DataError(f"'{run_folder / 'checkpoints'}' holds no step* folder; train first")


def _load_checkpoint(folder: Path, dtype: torch.dtype, device: str) -> TrainedModel:
    """Return the model of a checkpoint folder, with what is known about its training."""
    from olmo_sparsity.models.build import build_model  # needs what [train] installs

    config = load_checkpoint_config(folder)
    model = build_model(config.model)
    load_weights(model, folder / WEIGHTS)
    return TrainedModel(
        model=model.to(device=device, dtype=dtype).eval(),
        tokenizer=read_tokenizer(folder / "tokenizer.json"),
        name=str(folder),
        weights_sha256=fingerprint(weight_files(folder / WEIGHTS)),
        text=training_text(config.data),
        trained={
            "step": find_step(folder),
            "num_steps": config.training.num_steps,
            "positions": config.positions.scheme,
            "length": config.training.length,
            "target_length": config.positions.target_length,
            "seed": config.seed,
            "init_from": config.init_from,
        },
    )
