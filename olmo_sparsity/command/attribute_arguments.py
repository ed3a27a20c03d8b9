"""Declare the options of the command `attribute`.

Place in the flow: `build_parser` of arguments.py → **`add_attribute`**, unless the package
`sources` is left out of the installation. Options that are settings of the function `attribute`
are derived from its schemas and its docstring (`add_options`); the others are written here.
attribute.py says which of them need another one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from olmo_sparsity.analysis.options import ModelOptions
from olmo_sparsity.command.parser import (
    AT_FILE,
    MODEL,
    TOKENIZER,
    Parser,
    add_documented,
    add_shard,
)
from olmo_sparsity.config.command_line import add_options, arguments_of

LAST_MESSAGE = -1
"""Default of --message, counted from the end as in a list."""

MUST_ALL_PASS = 1.0
"""Default of --must-pass, as a fraction."""


def add_attribute(sub: Parser) -> None:
    """Add the options of `attribute`, with the help of the function's docstring."""
    # Imported here, as the package can be left out of an installation.
    from olmo_sparsity.sources.attribute import attribute
    from olmo_sparsity.sources.options import ServerOptions, SourceSettings

    help = arguments_of(attribute)
    sub.add(
        "model",
        metavar="MODEL",
        help=f"{MODEL}; llama:FILE.gguf; or the URL of a server, or several with commas between "
        "them",
    )
    sub.add("--tokenizer", metavar="FOLDER", help=TOKENIZER)
    _add_inputs(sub, help)
    add_documented(sub, help, decoys="TEXT")
    sub.add("--dry-run", action="store_true", help="count the cost")
    add_options(sub, SourceSettings, ModelOptions, ServerOptions, help=help)
    sub.add(
        "--html",
        metavar="FILE",
        help="write a page to read in a browser; of --questions, a folder of one for each",
    )
    sub.add("--json", action="store_true", help="print JSON")
    sub.add("--out", metavar="FOLDER", help="of --questions; the same command resumes")
    add_shard(sub, "of --questions: ")
    _add_gate(sub)


def _add_inputs(sub: Parser, help: Mapping[str, str]) -> None:
    """Add the options that name sources, question and answer, of one answer or of many."""
    # Exactly one of the three: what is attributed.
    inputs = sub.add_mutually_exclusive_group(required=True)
    inputs.add_argument(
        "--source",
        action="extend",
        nargs="+",
        metavar="NAME=FILE",
        help="the sources: files, folders, or globs of them",
    )
    inputs.add_argument(
        "--questions",
        metavar="FILE",
        help="many questions: a .jsonl file with the fields sources, question and answer; decoys "
        "are others' sources",
    )
    inputs.add_argument(
        "--messages",
        metavar="FILE",
        help="the log of an agent: a .json file of messages, or a .jsonl file with one a line",
    )
    sub.add("--message", type=int, default=LAST_MESSAGE, metavar="N", help=help["message"])
    sub.add("--passages", metavar="TAG|REGEX", help=help["passages"])
    sub.add("--question", metavar="TEXT", help=f"{help['question']}. {AT_FILE}")
    sub.add(
        "--answer",
        metavar="TEXT",
        help="the answer, which is split into sentences (default: the model generates one). "
        f"{AT_FILE}",
    )
    sub.add("--reasoning", metavar="TEXT", help=f"{help['reasoning']}. {AT_FILE}")
    sub.add("--candidates", type=_parse_names, metavar="NAME,…", help=help["candidates"])


def _add_gate(sub: Parser) -> None:
    """Add the options that compare verdicts with what is expected."""
    sub.add(
        "--gate",
        action="store_true",
        help="of --questions: exit with 1 if a verdict is not what the field `expect` says; OUT "
        "gets gate.xml (JUnit) and gate.json",
    )
    sub.add(
        "--baseline",
        metavar="FOLDER",
        help="of --gate: the --out of an earlier run; its verdicts are expected, too",
    )
    sub.add(
        "--allow-other-model",
        action="store_true",
        help="of --baseline: compare although model, tokenizer, template or options are others",
    )
    sub.add(
        "--margin",
        type=float,
        default=0.0,
        metavar="NATS",
        help="of --gate: nats by which an effect may miss or exceed what a verdict requires "
        "(0 to 3)",
    )
    sub.add(
        "--must-pass",
        type=_parse_percentage,
        default=MUST_ALL_PASS,
        metavar="SHARE",
        help="of --gate: the share of the checks of `expect` that must pass, such as 90%% (all); "
        "those of --baseline must all pass",
    )
    sub.add(
        "--new-need-source",
        action="store_true",
        help="of --baseline: fail statements that it does not have and that rest on no source",
    )


def _parse_names(text: str) -> tuple[str, ...]:
    """Return names with commas between them."""
    return tuple(text.split(","))


def _parse_percentage(text: str) -> float:
    """Return a percentage as a fraction: `90%` as 0.9."""
    try:
        fraction = float(text.removesuffix("%")) / 100
    except ValueError:
        fraction = 0.0  # refused below
    if not (text.endswith("%") and 0 < fraction <= 1):
        raise argparse.ArgumentTypeError(f"{text!r} must be a share of checks, such as 90%")
    return fraction
