"""Run the command `attribute`: which source each statement of an answer relies on.

    --source, --messages   one answer: a summary, JSON or a page    _attribute_one
    --questions            a file of many: tables, pages, a gate    _attribute_questions

Place in the flow: below cli.py, on top of the package `sources`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from glob import glob, has_magic
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from olmo_sparsity.analysis.options import ModelOptions, build
from olmo_sparsity.base.errors import ConfigError, DataError, printable
from olmo_sparsity.base.files import check_suffix
from olmo_sparsity.base.progress import say
from olmo_sparsity.command.memory import keep_freed_memory
from olmo_sparsity.command.share import parse_shard
from olmo_sparsity.config.command_line import given_options
from olmo_sparsity.sources.options import ServerOptions, SourceSettings

if TYPE_CHECKING:
    import pandas as pd

TEXTS = ("question", "answer", "reasoning")
"""Options that are a text, or @FILE."""

# Options that have no effect without another one, or together with another one.

OPTIONS_OF_QUESTIONS = (
    "out",
    "shard",
    "gate",
    "baseline",
    "margin",
    "allow_other_model",
    "must_pass",
    "new_need_source",
)
OPTIONS_OF_ONE_QUESTION = (
    "question",
    "answer",
    "reasoning",
    "candidates",
    "json",
    "message",
    "passages",
)
OPTIONS_OF_THE_GATE = ("baseline", "margin", "must_pass")
OPTIONS_OF_A_BASELINE = ("allow_other_model", "new_need_source")

DEFAULTS = {"message": -1, "must_pass": 1.0}
"""Defaults of options that are not empty or 0 when they were not given."""


def run_attribute(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    keep_freed_memory()
    if options.questions is not None:
        return _attribute_questions(options)
    return _attribute_one(options)


def _attribute_one(options: argparse.Namespace) -> int:
    """Attribute one answer, and print it."""
    from olmo_sparsity.analysis.results.tables import to_json_value
    from olmo_sparsity.sources import attributing, cost
    from olmo_sparsity.sources.documents import list_sources
    from olmo_sparsity.sources.request import AttributeRequest

    _check_not_given(options, "require --questions", OPTIONS_OF_QUESTIONS)
    if options.messages is None:
        _check_not_given(options, "requires --messages", ["passages"])
    if options.html is not None:
        check_suffix("--html", options.html, ".html")
    if options.question is None and options.messages is None:
        raise ConfigError("--source requires --question: pass the question that was answered")
    keywords = given_options(options, AttributeRequest.names()) | _read_inputs(options)
    request = AttributeRequest.of(**keywords)
    if options.messages is not None:
        for line in list_sources(request.sources):
            say(line)
    if options.dry_run:
        print(cost.count_cost(request))
        return 0
    result = attributing.attribute(request)
    if options.json:
        print(json.dumps(to_json_value(result.to_dict()), ensure_ascii=False, indent=1))
    else:
        print(result.describe(bold=sys.stdout.isatty()), flush=True)
        if options.messages is not None:  # its sources have names that the user has not chosen
            for row in result.sources.itertuples():
                print(f"{printable(row.source)}: {row.verdict}", flush=True)
    if options.html is not None:
        result.to_html(options.html)
        print(options.html, file=sys.stderr)
    return 0


def _read_inputs(options: argparse.Namespace) -> dict[str, Any]:
    """Read the files that options name."""
    from olmo_sparsity.analysis.explain.text_file import read_text
    from olmo_sparsity.sources.chat_log import read_log

    inputs: dict[str, Any] = {"sources": None, "messages": None}
    if options.source is not None:
        inputs["sources"] = _read_sources(options.source)
    if options.messages is not None:
        inputs["messages"] = read_log(options.messages)
    for name in TEXTS:
        text = getattr(options, name)
        if text and isfile(text):
            say(f"--{name}: the words '{text}' themselves; --{name} @{text} reads the file")
        inputs[name] = read_text(text, inline=True) if text else text
    return inputs


def _attribute_questions(options: argparse.Namespace) -> int:
    """Attribute this process's share of many answers, and with --gate compare them with what is
    expected."""
    from olmo_sparsity.sources import expectations, gate, questions

    _check_options_of_questions(options)
    gate.check_margin(options.margin)
    shard = parse_shard(options.shard)
    if options.gate:
        if shard.num_shards > 1:
            raise ConfigError("--gate: run it once all shards have finished, as one process")
        # A wrong line is an error before the model is loaded, which may take minutes.
        expectations.read_expectations(options.questions)
    common_request = _common_request(options)
    if options.dry_run:
        print(questions.count_questions(common_request, options.questions))
        return 0
    if options.out is None:
        raise ConfigError("--questions requires --out, the folder of the results")
    if options.gate:
        return _run_gate(options, common_request)
    table = questions.measure_questions(
        common_request, options.questions, options.out, shard=shard, pages=_pages(options)
    )
    if table is not None:  # None: other processes have questions left
        _print_results(options, table)
    return 0


def _run_gate(options: argparse.Namespace, common_request: Any) -> int:
    """Attribute all answers, and print which checks fail; return 1 if too many do."""
    from olmo_sparsity.sources import suite

    table, report = suite.run(
        common_request,
        options.questions,
        options.out,
        pages=_pages(options),
        baseline=options.baseline,
        allow_other_model=options.allow_other_model,
        margin=options.margin,
        must_pass=options.must_pass,
        new_need_source=options.new_need_source,
    )
    _print_results(options, table)
    print(report.describe())
    return 0 if report.passed else 1


def _pages(options: argparse.Namespace) -> Path | None:
    """Return the folder of a page for each question, if they are wanted."""
    return None if options.html is None else Path(options.html)


def _print_results(options: argparse.Namespace, table: pd.DataFrame) -> None:
    """Print a summary of the statements of all questions, and where tables and pages are."""
    from olmo_sparsity.sources import questions

    print(questions.describe(table))
    print(f"tables: {options.out}/statements.parquet, matrix.parquet")
    if options.html is not None:
        print(f"pages: {_pages(options)}/index.html")


def _check_options_of_questions(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option that has no effect on a file of questions."""
    _check_not_given(options, "cannot be combined with --questions", OPTIONS_OF_ONE_QUESTION)
    if not options.gate:
        _check_not_given(options, "require --gate", OPTIONS_OF_THE_GATE)
    if not options.baseline:
        _check_not_given(options, "requires --baseline", OPTIONS_OF_A_BASELINE)


def _common_request(options: argparse.Namespace) -> Any:
    """Return what all questions of a file share, with the model loaded."""
    from olmo_sparsity.analysis.measurement.reading import load
    from olmo_sparsity.sources.request import AttributeRequest

    loading = build(ModelOptions, vars(options))
    serving = build(ServerOptions, vars(options))
    model = load(
        options.model,
        options.tokenizer,
        loading,
        True,
        whole_prompts=True,
        only_counts=options.dry_run,
        **serving.loading,
    )
    settings = build(SourceSettings, vars(options))
    return AttributeRequest(model=model, decoys=options.decoys, settings=settings, loading=loading)


def _check_not_given(
    options: argparse.Namespace, reason: str, names: tuple[str, ...] | list[str]
) -> None:
    """Raise ConfigError if one of these options was given, which would have no effect."""
    flags = list[str]()
    for name in names:
        value = getattr(options, name)
        was_given = value != DEFAULTS[name] if name in DEFAULTS else bool(value)
        if was_given:
            flags.append(f"--{name.replace('_', '-')}")
    if flags:
        raise ConfigError(f"{', '.join(flags)}: {reason}; omit what has no effect")


def _read_sources(sources: list[str]) -> dict[str, str]:
    """Return the text of each source by its name. `sources`: as `--source` takes them."""
    from olmo_sparsity.analysis.explain.text_file import read_text

    files = list[_NamedFile]()
    for source in sources:
        files += _list_files(source)
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        raise ConfigError(f"--source: duplicate names: {', '.join(names)}; name one, as NAME=FILE")
    if len(files) > len(sources):
        say(f"--source: {len(files)} files are sources: {', '.join(names)}")
    texts = dict[str, str]()
    for file in files:
        try:
            texts[file.name] = read_text(file.path)
        except DataError as error:
            raise DataError(f"--source: {error}; convert it to text, or name other files") from None
    return texts


class _NamedFile(NamedTuple):
    """A file that is a source."""

    name: str
    path: str


def _list_files(source: str) -> list[_NamedFile]:
    """Return the file of NAME=FILE, a file, or all files of a folder or glob."""
    path = Path(source)
    name, _, file_name = source.partition("=")
    # A file whose name holds = is a file, too.
    if file_name and not path.exists() and Path(file_name).is_file():
        return [_NamedFile(name, file_name)]
    is_folder = path.is_dir()
    # A file whose name holds * or [ is a file.
    is_glob = not path.exists() and has_magic(source)
    if is_folder or is_glob:
        paths = list(path.iterdir()) if is_folder else [Path(name) for name in glob(source)]
        # What begins with a dot was written by a program, such as .DS_Store.
        files = sorted(file for file in paths if file.is_file() and file.name[0] != ".")
        if not files:
            raise ConfigError(f"--source={source} is a folder or glob without files; name files")
        return [_NamedFile(_readable_name(file), str(file)) for file in files]
    # A file that is not there is named in the error when it is read.
    if file_name and not path.is_file():
        return [_NamedFile(name, file_name)]
    return [_NamedFile(_readable_name(path), source)]


def _readable_name(path: Path) -> str:
    """Return the name of a file as text. In the locale C Python reads names as ASCII, and other
    letters as halves of surrogate pairs, though most names are in UTF-8."""
    return os.fsencode(path.name).decode(errors="backslashreplace")
