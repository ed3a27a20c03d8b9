"""Run the command `attribute`: which source each statement of an answer relies on.

    --source, --messages   one answer: a summary, JSON or a page    _attribute_one
    --questions            a file of many: tables and pages         _attribute_questions
    --questions --gate     the same, with the exit code of a test   _run_gate

cli.py calls `run_attribute`, and the package `sources` does the work. attribute_arguments.py
declares the options, and source_files.py reads the files of --source.
"""

from __future__ import annotations

import argparse
import json
import sys
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from olmo_sparsity.analysis.options import ModelOptions
from olmo_sparsity.analysis.request import build_group
from olmo_sparsity.base.errors import ConfigError, naming, printable
from olmo_sparsity.base.path_options import check_can_be_reopened, check_suffix
from olmo_sparsity.base.progress import say
from olmo_sparsity.command.attribute_arguments import LAST_MESSAGE, MUST_ALL_PASS
from olmo_sparsity.command.memory import keep_freed_memory
from olmo_sparsity.command.share import parse_shard
from olmo_sparsity.command.source_files import read_sources
from olmo_sparsity.config.command_line import given_options
from olmo_sparsity.sources.options import ServerOptions, SourceSettings

if TYPE_CHECKING:
    import pandas as pd

    from olmo_sparsity.sources.attribution import Attribution
    from olmo_sparsity.sources.request import AttributeRequest

TEXT_OPTIONS = ("question", "answer", "reasoning")
"""Options whose value is a text, or @FILE."""


def run_attribute(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    keep_freed_memory()
    _check_options_have_effect(options)
    if options.questions is None:
        return _attribute_one(options)
    if options.gate:
        return _run_gate(options)
    return _attribute_questions(options)


# --- options that have no effect ------------------------------------------------------------------


class Restricted(NamedTuple):
    """Options that have an effect only together with another one, or only without it."""

    reason: str
    """What is wrong with giving one of them, for the message."""

    names: tuple[str, ...]
    """The options, as attributes of what the parser returns."""


OF_QUESTIONS = Restricted(
    "require --questions",
    (
        "out",
        "shard",
        "gate",
        "baseline",
        "margin",
        "allow_other_model",
        "must_pass",
        "new_need_source",
    ),
)
OF_ONE_QUESTION = Restricted(
    "cannot be combined with --questions",
    ("question", "answer", "reasoning", "candidates", "json", "message", "passages"),
)
OF_GATE = Restricted("require --gate", ("baseline", "margin", "must_pass"))
OF_BASELINE = Restricted("requires --baseline", ("allow_other_model", "new_need_source"))
OF_MESSAGES = Restricted("requires --messages", ("passages",))
OF_RESULTS = Restricted("cannot be combined with --dry-run, which has no results", ("json", "html"))

DEFAULTS = {"message": LAST_MESSAGE, "must_pass": MUST_ALL_PASS}
"""Option → its value if it was not given, of those whose default is not None, False, empty or 0."""


def _check_options_have_effect(options: argparse.Namespace) -> None:
    """Raise ConfigError if an option was given that would do nothing: the user would believe that
    it did."""
    if options.dry_run:
        _check_not_given(options, OF_RESULTS)
    if options.questions is None:
        _check_not_given(options, OF_QUESTIONS)
        if options.messages is None:
            _check_not_given(options, OF_MESSAGES)
        return
    _check_not_given(options, OF_ONE_QUESTION)
    if not options.gate:
        _check_not_given(options, OF_GATE)
    if not options.baseline:
        _check_not_given(options, OF_BASELINE)


def _check_not_given(options: argparse.Namespace, restricted: Restricted) -> None:
    """Raise ConfigError if any of these options was given, with their names."""
    flags = [
        f"--{name.replace('_', '-')}" for name in restricted.names if _was_given(options, name)
    ]
    if flags:
        raise ConfigError(f"{', '.join(flags)}: {restricted.reason}; omit what has no effect")


def _was_given(options: argparse.Namespace, name: str) -> bool:
    """Return whether an option has another value than its default."""
    # The options of a settings class are absent unless they were given.
    value = getattr(options, name, None)
    if name in DEFAULTS:
        return bool(value != DEFAULTS[name])
    return bool(value)


# --- one answer -----------------------------------------------------------------------------------


def _attribute_one(options: argparse.Namespace) -> int:
    """Attribute one answer, and print it."""
    from olmo_sparsity.sources.cost import count_cost
    from olmo_sparsity.sources.reading.read_sources import list_sources
    from olmo_sparsity.sources.request import AttributeRequest
    from olmo_sparsity.sources.run_request import run_request

    if options.html is not None:
        check_suffix("--html", options.html, ".html")
    if options.question is None and options.messages is None:
        raise ConfigError("--source requires --question: pass the question that was answered")
    keywords = given_options(options, AttributeRequest.accepted_keywords()) | _read_inputs(options)
    request = AttributeRequest.of(**keywords)
    if options.messages is not None:
        # How sources are marked was chosen, not which ones: the user sees whether they are right.
        for line in list_sources(request.sources):
            say(line)
    if options.dry_run:
        print(count_cost(request))
        return 0
    _print_attribution(run_request(request), options)
    return 0


def _print_attribution(attribution: Attribution, options: argparse.Namespace) -> None:
    """Print the verdicts as text or JSON, and write the page if one is wanted."""
    from olmo_sparsity.analysis.results.json_values import to_json_value

    if options.json:
        print(json.dumps(to_json_value(attribution.to_dict()), ensure_ascii=False, indent=1))
    else:
        print(attribution.describe(bold=sys.stdout.isatty()), flush=True)
        if options.messages is not None:  # its sources have names that the user has not chosen
            for row in attribution.sources.itertuples():
                print(f"{printable(row.source)}: {row.verdict}", flush=True)
    if options.html is not None:
        attribution.to_html(options.html)
        print(options.html, file=sys.stderr)


def _read_inputs(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `attribute` that options give as files or texts."""
    from olmo_sparsity.analysis.explain.text_file import read_text
    from olmo_sparsity.sources.reading.chat_log import read_log

    inputs: dict[str, Any] = {"sources": None, "messages": None}
    if options.source is not None:
        inputs["sources"] = read_sources(options.source)
    if options.messages is not None:
        inputs["messages"] = read_log(options.messages)
    for name in TEXT_OPTIONS:
        text = getattr(options, name)
        # Taken literally, which the user may not have meant.
        if text and isfile(text):
            say(f"--{name}: the words '{text}' themselves; --{name} @{text} reads the file")
        with naming(f"--{name}"):
            inputs[name] = read_text(text, inline=True) if text else text
    return inputs


# --- a file of questions --------------------------------------------------------------------------


def _attribute_questions(options: argparse.Namespace) -> int:
    """Attribute this process's share of the answers to many questions, and print a summary once all
    are there."""
    from olmo_sparsity.sources.gate import gate, questions

    check_can_be_reopened("--questions", options.questions)
    gate.check_margin(options.margin)
    shard = parse_shard(options.shard)
    common_request = _common_request(options)
    if options.dry_run:
        print(questions.count_questions(common_request, options.questions))
        return 0
    _check_has_out(options)
    table = questions.measure_questions(
        common_request, options.questions, options.out, shard=shard, pages=_pages(options)
    )
    if table is not None:  # None: other processes have questions left
        _print_results(options, table)
    return 0


def _run_gate(options: argparse.Namespace) -> int:
    """Attribute the answers to many questions, and print which checks fail; return 1 if too many
    do."""
    from olmo_sparsity.sources.gate import expectations, gate, questions, suite

    gate.check_margin(options.margin)
    if parse_shard(options.shard).num_shards > 1:
        raise ConfigError("--gate: run it once all shards have finished, as one process")
    # A wrong line is an error before the model is loaded, which may take minutes.
    expectations.read_expectations(options.questions)
    common_request = _common_request(options)
    if options.dry_run:
        print(questions.count_questions(common_request, options.questions))
        return 0
    _check_has_out(options)
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


def _check_has_out(options: argparse.Namespace) -> None:
    """Raise ConfigError unless the folder of the results is given; a dry run needs none."""
    if options.out is None:
        raise ConfigError("--questions requires --out, the folder of the results")


def _common_request(options: argparse.Namespace) -> AttributeRequest:
    """Return what all questions of a file have in common, with the model loaded."""
    from olmo_sparsity.analysis.measurement.reading import load
    from olmo_sparsity.sources.request import AttributeRequest

    loading = build_group(ModelOptions, vars(options))
    serving = build_group(ServerOptions, vars(options))
    model = load(
        options.model,
        options.tokenizer,
        loading,
        encodes_text=True,
        whole_prompts=True,
        only_counts=options.dry_run,
        **serving.loading,
    )
    settings = build_group(SourceSettings, vars(options))
    return AttributeRequest(model=model, decoys=options.decoys, settings=settings, loading=loading)


def _pages(options: argparse.Namespace) -> Path | None:
    """Return the folder of a page for each question; None if none are wanted."""
    return None if options.html is None else Path(options.html)


def _print_results(options: argparse.Namespace, table: pd.DataFrame) -> None:
    """Print a summary of the statements of all questions, and where tables and pages are."""
    from olmo_sparsity.sources.gate import questions

    print(questions.describe(table))
    print(f"tables: {options.out}/statements.parquet, matrix.parquet")
    if options.html is not None:
        print(f"pages: {_pages(options)}/index.html")
