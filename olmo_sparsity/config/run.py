"""Read, check and write the settings of a training run.

    config = load_config("mine.yaml", ["--seed=4"])   # what a user wrote
    save_config(config, "runs/mine/config.yaml")
    config = load_saved_config("runs/mine/config.yaml")

Types and ranges are checked by the schema, and rules between settings by rules.py. So whoever gets
a `RunConfig` from here can rely on it; no text is read and no model is built before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from olmo_sparsity.base.differences import leaves
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.path_options import check_output_path
from olmo_sparsity.config.build import build
from olmo_sparsity.config.rules import check_config
from olmo_sparsity.config.schema import used
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.yaml_files import read_given, read_yaml, to_yaml


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read and check the settings of a run."""
    config = config_from_dict(read_given(path, overrides), str(path))
    check_output_path("run_folder", config.run_folder)
    check_output_path("data.folder", config.data.folder)
    return config


def load_saved_config(path: str | Path) -> RunConfig:
    """Read a file that `save_config` wrote, in this or an earlier version. The folder may be
    anybody's, so the file is read by itself: it can name no other file as its base."""
    settings = _with_transform(read_yaml(Path(path)))
    settings = _without_removed_settings(settings)
    # Runs that began before there was a choice have stored orders, of any length.
    data = settings.get("data")
    if isinstance(data, dict):
        settings = settings | {"data": {"order": "stored"} | data}
    return config_from_dict(settings, str(path))


def config_from_dict(settings: dict, origin: str = "config") -> RunConfig:
    """Build a config and check it. `origin` names where the settings are from, for messages."""
    config = build(RunConfig, settings, origin)
    check_config(config, origin)
    return config


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write all fields that have an effect. The file gives the same run, without its base file."""
    write_atomically(Path(path), to_yaml(config))


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return the value of every setting that has an effect, by its dotted key, such as
    {"training.length": 128}."""
    return dict(leaves(used(config)))


# --- settings of earlier versions -----------------------------------------------------------------


REMOVED: dict[str, dict[str, Any]] = {
    "data": {"train_files": (None,), "heldout_files": (None,), "token_dtype": ("uint16",)},
    # Any number: these were measurements.
    "evaluation": {"sparsity_targets": range(10**6 + 1), "track": range(10**6 + 1)},
}
"""Settings that earlier versions saved and this one lacks, with the values that had no effect on
the weights. With such a value the setting is dropped. With another one the key stays and is
rejected as unknown, as the run cannot be repeated here."""


def _without_removed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without those that `REMOVED` lists with their value."""
    for section, removed in REMOVED.items():
        values = settings.get(section)
        if not isinstance(values, dict):
            continue
        remaining = {}
        for name, value in values.items():
            if value not in removed.get(name, ()):
                remaining[name] = value
        settings = settings | {section: remaining}
    return settings


def _with_transform(settings: dict[str, Any]) -> dict[str, Any]:
    """Replace `data.planted` and `data.repeated`, which earlier versions saved. A run that was
    trained on such text can be loaded; it does not go on, as no transform has this name."""
    data = settings.get("data")
    if not isinstance(data, dict):
        return settings
    changed_data = dict(data)
    transforms = {}
    for name in ("planted", "repeated"):
        section = changed_data.pop(name, None)
        if isinstance(section, dict) and section.get("share"):
            transforms[name] = section
    if transforms:
        changed_data["transform"] = "text of an earlier version"
        changed_data["transform_options"] = transforms
    return settings | {"data": changed_data}
