"""`explain` and `measure` where the far text is named sources.

Place in the flow: beneath cli.py.
"""

from __future__ import annotations

import argparse
from glob import glob, has_magic
from os.path import isfile
from pathlib import Path
from typing import Any

from olmo_sparsity.command import arguments
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.runtime import say
from olmo_sparsity.settings import given_options


def _named_files(source: str) -> list[tuple[str, str]]:
    """Name and path of NAME=FILE, of a file, or of all files of a folder or glob."""
    is_folder = Path(source).is_dir()
    if is_folder or (not Path(source).exists() and has_magic(source)):
        found = Path(source).iterdir() if is_folder else map(Path, glob(source))
        files = sorted(path for path in found if path.is_file())
        if not files:
            kind = "a folder" if is_folder else "a glob"
            raise ConfigError(f"--source={source} is {kind} without files")
        return [(path.name, str(path)) for path in files]
    name, _, path = source.partition("=")
    return [(name, path) if path else (Path(source).name, source)]


def source_options(options: argparse.Namespace) -> dict[str, Any]:
    """What belongs to sources, refused by `explain` without them."""
    from olmo_sparsity.analysis.explain.prompt import read_text

    texts = {name: getattr(options, name) for name in ("question", "answer")}
    for name, text in texts.items():
        if text and isfile(text):
            say(f"--{name}: the words '{text}' themselves; --{name} @{text} reads the file")
    return {
        **{name: text and read_text(text, inline=True) for name, text in texts.items()},
        "sources": None if options.source is None else _read_sources(options),
        "candidates": options.candidates,
        "decoys": options.decoys,
        "dry_run": options.dry_run,
    }


def _read_sources(options: argparse.Namespace) -> dict[str, str]:
    from olmo_sparsity.analysis.explain.prompt import read_text

    if options.check or options.foreign is not None or options.judge is not None:
        raise ConfigError(
            "--check, --foreign and --judge are for a text or prompt; sources have --decoys"
        )
    named = [pair for source in options.source for pair in _named_files(source)]
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        raise ConfigError(f"--source: two have one name: {', '.join(names)}")
    return {name: read_text(path) for name, path in named}


def measure_questions_file(options: argparse.Namespace) -> int:
    from olmo_sparsity.analysis.attribution.questions import describe, measure_questions
    from olmo_sparsity.analysis.attribution.statements import Cost
    from olmo_sparsity.analysis.models.load import load_model
    from olmo_sparsity.analysis.settings import (
        ModelOptions,
        Settings,
        SourceSettings,
        TextOptions,
        build,
    )

    for name in ("text", "targets", "choices", "losses", "at", "quick", "partial"):
        if getattr(options, name):
            raise ConfigError(f"--{name} does not go with --questions; leave it out")
    given = given_options(options, Settings, TextOptions, SourceSettings, ModelOptions)
    if "units" in given:  # of sources there is one kind at a time
        given["units"] = ",".join(given["units"])
    known = build(ModelOptions, given)
    model = load_model(
        options.model, device=known.device, dtype=known.dtype, device_map=known.device_map
    )
    found = measure_questions(
        model,
        options.questions,
        options.out,
        decoys=options.decoys,
        shard=arguments.parse_shard(options.shard),
        dry_run=options.dry_run,
        **given,
    )
    if found is not None:
        print(found if isinstance(found, Cost) else describe(found))
        if not options.dry_run:
            print(f"tables: {options.out}/statements.parquet, matrix.parquet")
    return 0
