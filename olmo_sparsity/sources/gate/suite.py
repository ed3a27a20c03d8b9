"""Run the gate on a file of questions, as one call.

Place in the flow: **`check`** is `olmo_sparsity.check`. It and the command
`attribute --questions … --gate` call **`run`**:

    gate.py           is there anything to check?
    questions.py      answer the questions, and store the answers
    gate.py           compare verdicts with what is expected of them
    gate/report.py    write gate.xml and gate.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from olmo_sparsity.analysis.measurement.reading import load
from olmo_sparsity.analysis.options import ModelOptions
from olmo_sparsity.analysis.request import build_group
from olmo_sparsity.base.errors import ConfigError, check_type
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.path_options import path_of
from olmo_sparsity.config.schema import schema_fields
from olmo_sparsity.sources.gate import gate, questions
from olmo_sparsity.sources.gate.expectations import read_expectations
from olmo_sparsity.sources.gate.index_page import write_index
from olmo_sparsity.sources.gate.report import GateReport
from olmo_sparsity.sources.options import ServerOptions, SourceSettings
from olmo_sparsity.sources.request import AttributeRequest


def check(
    model: Any,
    questions: str | Path | Sequence[Mapping[str, Any]],
    out: str | Path,
    *,
    tokenizer: Any = None,
    decoys: Any = None,
    baseline: str | Path | None = None,
    allow_other_model: bool = False,
    margin: float = 0.0,
    must_pass: float = 1.0,
    new_need_source: bool = False,
    pages: str | Path | None = None,
    **options: Any,
) -> GateReport:
    """Run the gate, and return a report that is true if enough checks pass.

    Args:
        model: A name that `load_model` takes, or a model in memory.
        questions: A .jsonl file, or a list of its objects.
        out: The folder of the results; the same call resumes in it.
        tokenizer: The tokenizer of a model in memory, or on a server.
        decoys: Unrelated texts. Default: the sources of the other questions.
        baseline: The `out` folder of an earlier run, whose verdicts are expected, too.
        allow_other_model: Compare with a baseline of another model, tokenizer or options.
        margin: Nats by which an effect may miss, or exceed, what a verdict requires; 3 at most.
        must_pass: The share of the checks of `expect` that must pass. All of a baseline must.
        new_need_source: Fail statements that the baseline does not have and that rest on no source.
        pages: A folder that gets a page for each question.
        options: Options of `attribute`, such as `draws` or `chat`.

    Example:
        def test_answers_rest_on_their_sources(tmp_path):
            assert check("smollm2", "questions.jsonl", tmp_path, decoys="my_texts", prefix="\\n")
    """
    _check_options_are_known(options)
    settings = build_group(SourceSettings, options)
    loading = build_group(ModelOptions, options)
    gate.check_margin(margin)
    gate.check_must_pass(must_pass)
    check_type("new_need_source", new_need_source, bool, "True or False")
    check_type("allow_other_model", allow_other_model, bool, "True or False")
    _check_has_baseline(baseline, allow_other_model, new_need_source)
    for name, folder in (("baseline", baseline), ("pages", pages)):
        if folder is not None:
            path_of(name, folder)

    path = _as_file(questions, path_of("out", out))
    # A wrong expectation is an error before a model is loaded, which may take minutes.
    read_expectations(path)

    serving = build_group(ServerOptions, options)
    loaded = load(
        model, tokenizer, loading, encodes_text=True, whole_prompts=True, **serving.loading
    )
    common = AttributeRequest(model=loaded, decoys=decoys, settings=settings, loading=loading)
    return run(
        common,
        path,
        out,
        pages=pages,
        baseline=baseline,
        allow_other_model=allow_other_model,
        margin=margin,
        must_pass=must_pass,
        new_need_source=new_need_source,
    ).report


def _check_has_baseline(
    baseline: str | Path | None, allow_other_model: bool, new_need_source: bool
) -> None:
    """Raise ConfigError for an option that says how to compare with a baseline, without one."""
    of_baseline = {"allow_other_model": allow_other_model, "new_need_source": new_need_source}
    for name, value in of_baseline.items():
        if value and baseline is None:
            raise ConfigError(f"{name}=True has no effect without baseline; pass one, or omit it")


def _check_options_are_known(options: Mapping[str, Any]) -> None:
    """Raise TypeError for a misspelt option, which would have no effect."""
    known = {
        *schema_fields(SourceSettings),
        *schema_fields(ModelOptions),
        *schema_fields(ServerOptions),
    }
    unknown = sorted(options.keys() - known)
    if unknown:
        raise TypeError(f"check has no option {', '.join(unknown)}")


class GateRun(NamedTuple):
    """What a run of the gate returns."""

    statements: pd.DataFrame
    """The table of all statements."""

    report: GateReport


def run(
    common: AttributeRequest,
    path: str | Path,
    out: str | Path,
    *,
    pages: str | Path | None = None,
    baseline: str | Path | None = None,
    allow_other_model: bool = False,
    **tolerance: Any,
) -> GateRun:
    """Answer the questions, check the answers, and write gate.xml and gate.json into `out`.

    Args:
        common: What all questions share: a loaded model, options and decoys.
        path: The questions file.
        pages: A folder that gets a page for each question.
        baseline: The folder of an earlier run.
        allow_other_model: Accept an earlier run of another model.
        tolerance: `margin`, `must_pass` and `new_need_source`, as `gate.check` takes them.
    """
    # Is there anything to check? It is known before the first question is answered.
    identity = questions.identity_of_questions(common, path)
    must_pass = tolerance.get("must_pass", 1.0)
    gate.check_has_expectations(path, out, identity, baseline, allow_other_model, must_pass)
    folder = None if pages is None else Path(pages)
    statements = questions.measure_questions(common, path, out, pages=folder)
    assert statements is not None  # one process answers all questions
    # From what is stored, so that a changed `expect` or margin computes nothing again.
    report = gate.check(path, out, baseline, allow_other_model, **tolerance)
    report.write(Path(out), Path(path).name)
    if folder is not None:
        # Once more, now with the column of checks.
        write_index(folder, out, report.passes_by_index)
    return GateRun(statements, report)


def _as_file(questions: str | Path | Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Return the file of the questions. If a user has passed objects, write them into one."""
    if isinstance(questions, str | PathLike):
        return path_of("questions", questions)
    accepted = "a .jsonl file, or a list of its objects"
    check_type("questions", questions, Mapping, accepted, several=True)
    if not len(questions):
        raise ConfigError("questions is an empty list, which would check nothing; pass questions")
    lines = []
    for number, record in enumerate(questions, start=1):
        try:
            lines.append(json.dumps(dict(record)) + "\n")
        except TypeError as error:
            raise ConfigError(
                f"questions: question {number} cannot be written as JSON ({error}); pass strings, "
                "numbers, lists and mappings of Python"
            ) from None
    # Next to the folder of results, as that holds nothing but results.
    path = out.with_name(f"{out.name}.questions.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(lines))
    return path
