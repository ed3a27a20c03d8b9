"""Run the command `explain`: show which distant tokens one prediction depends on.

    explain MODEL --text=FILE --at=Paris      the prediction of a word in a file
    explain MODEL --text=FILE.jsonl:3         of one record
    explain MODEL --prompt='…'                of what the model writes after a prompt
    … --check                                 compare with unrelated texts, too
    … --dry-run                               only count what it costs

cli.py calls `run_explain`, and the package `analysis` does the work.
"""

from __future__ import annotations

import argparse
import sys
from os.path import isfile
from pathlib import Path
from typing import Any

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.base.errors import ConfigError, naming
from olmo_sparsity.base.path_options import check_suffix
from olmo_sparsity.base.progress import say
from olmo_sparsity.command.memory import keep_freed_memory
from olmo_sparsity.config.command_line import given_options


def run_explain(options: argparse.Namespace) -> int:
    """Explain one prediction, and print it as text, JSON or a page; return the exit code."""
    from olmo_sparsity.analysis.explain.answer import count_cost, explain
    from olmo_sparsity.analysis.explain.request import ExplainRequest
    from olmo_sparsity.analysis.explain.stored_form import to_json

    keep_freed_memory()
    if options.html is not None:
        check_suffix("--html", options.html, ".html")
    request = ExplainRequest.of(**_explain_keywords(options))
    if options.dry_run:
        print(count_cost(request, with_check=options.check))
        return 0
    result = explain(request)
    # Before the check, which takes longer than the explanation.
    if not options.json:
        print(result.describe(bold=sys.stdout.isatty()), flush=True)
    if options.check:
        checked = result.check()
        if not options.json:
            print(f"\n{checked}")
    if options.json:
        print(to_json(result))
    if options.html is not None:
        result.to_html(options.html)
        print(options.html, file=sys.stderr)
    return 0


def _explain_keywords(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `explain`. Files that options name are read."""
    from olmo_sparsity.analysis.explain.request import ExplainRequest
    from olmo_sparsity.analysis.explain.text_file import read_text
    from olmo_sparsity.analysis.measurement.at import parse_at

    _check_options_have_effect(options)
    keywords = given_options(options, ExplainRequest.accepted_keywords())
    if options.text is not None:
        keywords["text"] = _text_of(options.text, options.field)
    for name in ("prompt", "target"):
        words = getattr(options, name)
        if words is None:
            continue
        # Taken literally, which the user may not have meant.
        if isfile(words):
            say(f"--{name}: the words '{words}' themselves; --{name} @{words} reads the file")
        with naming(f"--{name}"):
            keywords[name] = read_text(words, inline=True)
    if options.at:
        keywords["at"] = [parse_at(at) for at in options.at]
    keywords["unrelated"] = options.unrelated or "builtin:embedded"
    return keywords


def _check_options_have_effect(options: argparse.Namespace) -> None:
    """Raise ConfigError if an option was given that would do nothing: the user would believe that
    it did."""
    if options.dry_run:
        results = {"--json": options.json, "--html": options.html is not None}
        flags = [flag for flag, is_given in results.items() if is_given]
        if flags:
            raise ConfigError(
                f"{', '.join(flags)}: cannot be combined with --dry-run, which has no results; "
                "omit what has no effect"
            )
    # Unrelated text is used by the check, and where distant states are replaced.
    settings = vars(options)  # those that were given
    distant_states = settings.get("distant_states")
    is_replaced = distant_states is not None and interpretation_of(distant_states).replaces
    uses_unrelated = options.check or is_replaced
    if options.unrelated is not None and not uses_unrelated:
        raise ConfigError(
            "--unrelated has no effect here; add --check, or --distant-states=replaced"
        )
    # Of the selectors `random` draws units, and a rule of the user's own may.
    selector = settings.get("selector") or ""
    if "seed" in settings and not (uses_unrelated or selector == "random" or ":" in selector):
        raise ConfigError("--seed has no effect here, as nothing is drawn; add --check, or omit it")
    if options.field is not None and options.text is None:
        raise ConfigError(f"--field={options.field} is of --text FILE:N; omit it")


def _text_of(path: str, field: str | None) -> str:
    """Return the text of a file, or of one record of a file.

    Args:
        path: FILE; or FILE:N, the N-th record with text, from 1.
        field: The field of the record that has the text. None means the field `text`.
    """
    from olmo_sparsity.analysis.explain.text_file import read_text
    from olmo_sparsity.text.inputs import open_text
    from olmo_sparsity.text.record_files import is_records

    file, _, number = path.rpartition(":")
    # A name may hold a colon, so FILE:N is one only if FILE exists.
    if field is None and not (number.isdigit() and Path(file).is_file()):
        if is_records(Path(path)):
            raise ConfigError(
                f"--text={path} holds records; pass one of them, such as --text={path}:1, and "
                "--field=NAME if its text is not in the field text"
            )
        return read_text(path)
    if file and not is_records(Path(file)):
        raise ConfigError(
            f"--text={path}: {file} is one text, not a file of records; pass --text={file}"
        )
    if not file:
        raise ConfigError(f"--text={path}: --field requires FILE:N, such as --text={path}:1")
    for record in open_text(file, field or "text"):
        if record.name.rpartition(":")[2] == number:
            return record.text
    raise ConfigError(
        f"--text={path}: {file} has no record {number} with text; N counts records from 1"
    )
