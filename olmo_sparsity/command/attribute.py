"""The command `attribute`: which source each statement of an answer relies on.

Place in the flow: below cli.py."""

from __future__ import annotations

import argparse
import json
import sys
from glob import glob, has_magic
from os.path import isfile
from pathlib import Path

from olmo_sparsity.analysis.options import ModelOptions, build
from olmo_sparsity.base.errors import ConfigError, DataError, printable
from olmo_sparsity.base.files import refuse_suffix
from olmo_sparsity.base.progress import say
from olmo_sparsity.command import arguments
from olmo_sparsity.config.schema import given_options
from olmo_sparsity.sources.options import ServerOptions, SourceSettings

OF_QUESTIONS = (
    *("out", "shard", "gate", "baseline", "margin", "allow_other_model"),
    *("must_pass", "new_need_source"),
)
OF_ONE_QUESTION = ("question", "answer", "reasoning", "candidates", "json", "message", "passages")


def attribute(options: argparse.Namespace) -> int:
    if options.questions is not None:
        return _attribute_questions(options)
    from olmo_sparsity.analysis.explain.prompt import read_text
    from olmo_sparsity.analysis.results.tables import plain
    from olmo_sparsity.sources import messages, statements
    from olmo_sparsity.sources.request import AttributeRequest

    _refuse(options, "require --questions", *OF_QUESTIONS)
    if options.messages is None:
        _refuse(options, "requires --messages", "passages")
    if options.html is not None:
        refuse_suffix("--html", options.html, ".html")
    if options.question is None and options.messages is None:
        raise ConfigError("--source requires --question")
    texts = ("question", "answer", "reasoning")
    for name in texts:
        if (text := getattr(options, name)) and isfile(text):
            say(f"--{name}: the words '{text}' themselves; --{name} @{text} reads the file")
    given = given_options(options, AttributeRequest.names()) | {
        "sources": None if options.source is None else _read_sources(options.source),
        "messages": None if options.messages is None else messages.read_log(options.messages),
    }
    given |= {name: given[name] and read_text(given[name], inline=True) for name in texts}
    request = AttributeRequest.of(**given)
    if options.dry_run:
        print(statements.count_cost(request))
        return 0
    result = statements.attribute(request)
    if options.json:
        print(json.dumps(plain(result.to_dict()), ensure_ascii=False, indent=1))
    else:
        print(result.describe(bold=sys.stdout.isatty()), flush=True)
        for row in result.sources.itertuples() if options.messages is not None else ():
            print(f"{printable(row.source)}: {row.verdict}", flush=True)
    if options.html is not None:
        result.to_html(options.html)
        print(options.html, file=sys.stderr)
    return 0


def _attribute_questions(options: argparse.Namespace) -> int:
    from olmo_sparsity.analysis.measurement.plan import load
    from olmo_sparsity.sources import expectations, gate, questions, suite
    from olmo_sparsity.sources.request import AttributeRequest

    _refuse(options, "cannot be combined with --questions", *OF_ONE_QUESTION)
    if not options.gate:
        _refuse(options, "require --gate", "baseline", "margin", "must_pass")
    if not options.baseline:
        _refuse(options, "requires --baseline", "allow_other_model", "new_need_source")
    gate.refuse_margin(options.margin)
    shard = arguments.parse_shard(options.shard)
    if options.gate and shard != (0, 1):
        raise ConfigError("--gate: run it once all shards have finished, as one process")
    model, path, out = options.model, options.questions, options.out
    loading = build(ModelOptions, vars(options))
    serving = build(ServerOptions, vars(options)).loading
    how = {"whole_prompts": True, "only_counts": options.dry_run} | serving
    loaded = load(model, options.tokenizer, loading, True, **how)
    settings = build(SourceSettings, vars(options))
    common = AttributeRequest(
        model=loaded, decoys=options.decoys, settings=settings, loading=loading
    )
    if options.gate:
        expectations.read_expectations(path)  # a wrong one is an error before anything is computed
    if options.dry_run:
        print(questions.count_questions(common, path))
        return 0
    if out is None:
        raise ConfigError("--questions requires --out, the folder of the results")
    pages = None if options.html is None else Path(options.html)
    report = None
    if options.gate:
        names = ("baseline", "allow_other_model", "margin", "must_pass", "new_need_source")
        how = {name: getattr(options, name) for name in names}
        found, report = suite.run(common, path, out, pages=pages, **how)
    else:
        found = questions.measure_questions(common, path, out, shard=shard, pages=pages)
    if found is None:
        return 0
    print(questions.describe(found))
    print(f"tables: {out}/statements.parquet, matrix.parquet")
    if pages is not None:
        print(f"pages: {pages}/index.html")
    if report is None:
        return 0
    print(report.describe())
    return int(not report.passed)


def _refuse(options: argparse.Namespace, why: str, *names: str) -> None:
    """Raise where an option was given that would have no effect."""
    defaults = {"message": -1, "must_pass": 1.0}
    given = [
        name
        for name in names
        if getattr(options, name) and getattr(options, name) != defaults.get(name)
    ]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags}: {why}; omit what has no effect")


def _read_sources(sources: list[str]) -> dict[str, str]:
    from olmo_sparsity.analysis.explain.prompt import read_text

    named = [pair for source in sources for pair in _named_files(source)]
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        raise ConfigError(f"--source: duplicate names: {', '.join(names)}")
    if len(named) > len(sources):
        say(f"--source: {len(named)} files are sources: {', '.join(names)}")
    texts = dict[str, str]()
    for name, path in named:
        try:
            texts[name] = read_text(path)
        except DataError as error:
            raise DataError(f"--source: {error}; convert it to text, or name other files") from None
    return texts


def _named_files(source: str) -> list[tuple[str, str]]:
    """Name and path of NAME=FILE, of a file, or of all files of a folder or glob."""
    is_folder = Path(source).is_dir()
    if is_folder or (not Path(source).exists() and has_magic(source)):
        found = Path(source).iterdir() if is_folder else map(Path, glob(source))
        # What begins with a dot was written by a program, such as .DS_Store.
        files = sorted(path for path in found if path.is_file() and path.name[0] != ".")
        if not files:
            raise ConfigError(f"--source={source} is a folder or glob without files")
        return [(path.name, str(path)) for path in files]
    name, _, path = source.partition("=")
    return [(name, path) if path else (Path(source).name, source)]
