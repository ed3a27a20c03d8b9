"""Parse the command line of `olmo-sparsity`, and call one function per command.

    entry → main → arguments.build_parser → the function with the command's name → an exit code

Options are declared in arguments.py; exit codes and error messages are in ending.py.

Place in the flow: on top of everything. Large packages are imported only inside a command, so that
`--help` and a mistake in the options take no seconds."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.base.errors import (
    NO_DOCSTRINGS,
    ConfigError,
    DataError,
    UserError,
    naming_extras,
)
from olmo_sparsity.base.files import check_no_tilde, check_suffix, write_atomically
from olmo_sparsity.base.launch import EXIT_LOST_PROCESS
from olmo_sparsity.base.renamed import current_words
from olmo_sparsity.command import arguments, ending
from olmo_sparsity.command.ending import EXIT_BAD_INPUT, print_error
from olmo_sparsity.command.memory import give_back_freed_memory, keep_freed_memory
from olmo_sparsity.config.command_line import given_options

__all__ = ["EXIT_BAD_INPUT", "entry", "main"]

GOES_ON = "goes on"
"""What a command that was stopped does when it is given again, if it keeps what it has done."""

STARTS_AGAIN = "starts again, as a dry run stores nothing"
"""The same for a dry run."""

RESUMED = ("prepare", "train", "experiment", "measure")
"""Commands that keep what they have done, and go on when they are given again."""


def entry(arguments: list[str] | None = None) -> NoReturn:
    """Run the command that was typed, and exit with its code."""
    gc.set_threshold(10_000)  # imports allocate without garbage: a tenth of the time of a start
    ending.prepare_streams()
    ending.interrupt_on_signals()
    try:
        code = main(arguments)
    except KeyboardInterrupt:  # before the command began
        code = print_error("stopped", ending.EXIT_INTERRUPTED)
    except Exception:
        traceback.print_exc()
        code = ending.EXIT_DEFECT
    ending.close_streams()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # DeepSpeed keeps process groups alive, and with them gloo's threads. If one of them frees a
        # tensor during Python's shutdown, the process aborts, and the launcher fails the job.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return its exit code. `arguments`: those of this process by default."""
    if sys.flags.optimize > 1:  # the help of options, too, is made of docstrings
        return print_error(NO_DOCSTRINGS)
    parser = build_parser()
    words = sys.argv[1:] if arguments is None else arguments
    options, rest = parser.parse_known_args(current_words(words))
    # Only commands that read a config take further `--key.sub=value` words.
    unknown = [word for word in rest if "config" not in options or not word.startswith("--")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides = rest
    _check_not_blank(parser, options, words)
    try:
        for name in ("out", "html"):
            check_no_tilde(f"--{name}", getattr(options, name, None))
        with naming_extras():
            code = options.run(options)
        ending.flush_results()
        return code
    except (Exception, KeyboardInterrupt) as error:
        return _exit_code_of(error, options)


def _exit_code_of(error: BaseException, options: argparse.Namespace) -> int:
    """Print what stopped the command, and what the same command would do now; return the exit
    code."""
    if getattr(options, "questions", None) is not None:
        # Not the code of a stopped training, which SLURM's scripts submit again.
        return ending.exit_code_of(error, again=GOES_ON, code=ending.EXIT_INTERRUPTED)
    if options.command in RESUMED and getattr(options, "dry_run", False):
        return ending.exit_code_of(error, again=STARTS_AGAIN, code=ending.EXIT_INTERRUPTED)
    keeps_work = options.command in RESUMED
    if options.command == "losses":
        keeps_work = getattr(options, "out", None) is not None  # without a folder nothing is kept
    return ending.exit_code_of(error, again=GOES_ON if keeps_work else None)


MAY_BE_BLANK = ("prefix", "slurm", "measure_slurm")
"""Options for which white space, or nothing, is a value."""


def _check_not_blank(
    parser: argparse.ArgumentParser, options: argparse.Namespace, words: list[str]
) -> None:
    """Exit where an option is white space or nothing, as a variable of the shell that is not set
    leaves it: as a path it would mean the current folder."""
    for name, value in vars(options).items():
        values = value if isinstance(value, list | tuple) else [value]
        is_blank = any(isinstance(item, str) and not item.strip() for item in values)
        if is_blank and name not in MAY_BE_BLANK:
            flag = f"--{name.replace('_', '-')}"
            is_option = any(word.partition("=")[0] == flag for word in words)
            shown = flag if is_option else name.upper()
            parser.error(f"{shown} is blank; write a value there (is a shell variable unset?)")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, in which each command has the function of this module with its name."""
    return arguments.build_parser(globals())


# --- the commands: each takes its options and returns its exit code -------------------------------


def configs(options: argparse.Namespace) -> int:
    from olmo_sparsity.config.installed import list_configs, read_config

    if options.name is None:
        print(list_configs())
    else:
        print(read_config(options.name).rstrip())
    return 0


def prepare(options: argparse.Namespace) -> int:
    from olmo_sparsity.config.run import load_config
    from olmo_sparsity.data import tokens

    shard = arguments.parse_shard(options.shard, by_launch=False)
    tokens.prepare(load_config(options.config, options.overrides).data, shard)
    return 0


def train(options: argparse.Namespace) -> int:
    from olmo_sparsity.base.launch import read_launch
    from olmo_sparsity.config.run import load_config

    _check_gpus_are_of_a_dry_run(options)
    read = partial(load_config, options.config, options.overrides)
    config = None
    # One process reports a mistake before the imports below, which take seconds. Several must agree
    # on it first, so that no one waits for one that has ended.
    is_alone = options.dry_run or read_launch().world_size == 1
    reported_later = () if is_alone else (UserError,)
    with contextlib.suppress(*reported_later):
        config = read()
    from olmo_sparsity.training import loop, start
    from olmo_sparsity.training.distributed import LostProcess, connect

    if options.dry_run:
        start.dry_run(config or read(), _hardware(options))
        return 0
    try:
        with connect(config.engine if config else None) as processes:
            with processes.agree():
                config = config or read()
            if config.engine.name.startswith(("fsdp", "zero")):
                give_back_freed_memory(2**20)
            elif config.training.length * config.model.d_model >= 2**22:
                give_back_freed_memory()
            return int(loop.train(config, processes, getattr(options, "profile", None)))
    except LostProcess as lost:
        again = "the same command goes on from the last checkpoint"
        message = f"another process of this run is gone ({lost}); {again}"
        return print_error(message, EXIT_LOST_PROCESS)


def _check_gpus_are_of_a_dry_run(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option that describes GPUs, without `--dry-run --gpus N`."""
    for name in ("gpus", "gpu", "nodes", "nics_per_node", "gpu_hour"):
        is_given = getattr(options, name, None) is not None
        if is_given and not (options.dry_run and options.gpus is not None):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} describes the GPUs of a dry run: use --dry-run --gpus N")


def _hardware(options: argparse.Namespace) -> Any:
    """Return the hardware that --gpus, --gpu and --nodes describe; None without --gpus."""
    from olmo_sparsity.training.estimate.hardware import Hardware

    if options.gpus is None:
        return None
    return Hardware.of(
        options.gpu or "h100",
        options.gpus,
        options.nodes,
        nics_per_node=options.nics_per_node,
        price=options.gpu_hour,
    )


def experiment(options: argparse.Namespace) -> int:
    from olmo_sparsity.command import experiment

    _check_gpus_are_of_a_dry_run(options)
    return experiment.run(options, train, _hardware)


def losses(options: argparse.Namespace) -> int:
    keywords = given_options(options, arguments.measured_losses())
    if len(options.models) == 1 and not keywords:
        from olmo_sparsity.training import curves

        print(curves.loss_table(options.models[0]))
        return 0
    from olmo_sparsity.analysis.report.losses_page import write_losses
    from olmo_sparsity.analysis.scoring.losses_by_place import LossesRequest, read_losses

    table = read_losses(LossesRequest.of(models=tuple(options.models), **keywords))
    print(table.describe())
    if "out" in keywords:
        write_losses(table, Path(options.out) / "losses.html")
        print(f"{options.out}/losses.html")
    return 0


def export(options: argparse.Namespace) -> int:
    from olmo_sparsity.models import exchange

    name = exchange.export(Path(options.checkpoint), Path(options.out), options.dtype)
    print(f"{options.out}: {name}; transformers.AutoModelForCausalLM.from_pretrained reads it")
    return 0


def explain(options: argparse.Namespace) -> int:
    from olmo_sparsity.analysis.explain import request as explaining
    from olmo_sparsity.analysis.explain.explanation import to_json

    keep_freed_memory()
    if options.html is not None:
        check_suffix("--html", options.html, ".html")
    request = explaining.ExplainRequest.of(**_explain_keywords(options))
    if options.dry_run:
        print(explaining.count_cost(request, options.check))
        return 0
    result = explaining.explain(request)
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
    """Return the keywords of `explain`, with the files read that options name."""
    from olmo_sparsity.analysis.explain.prompt import read_text
    from olmo_sparsity.analysis.explain.request import ExplainRequest
    from olmo_sparsity.analysis.measurement.targets import parse_at

    distant_states = vars(options).get("distant_states")
    is_replaced = distant_states is not None and interpretation_of(distant_states).replaces
    if options.unrelated is not None and not options.check and not is_replaced:
        raise ConfigError("--unrelated requires --check, which uses this text: add --check")
    if options.field is not None and options.text is None:
        raise ConfigError(f"--field={options.field} is of --text FILE:N; omit it")
    keywords = given_options(options, ExplainRequest.names())
    if options.text is not None:
        keywords["text"] = _text_of(options.text, options.field)
    if options.prompt is not None:
        keywords["prompt"] = read_text(options.prompt, inline=True)
    if options.at:
        keywords["at"] = [parse_at(at) for at in options.at]
    keywords["unrelated"] = options.unrelated or "builtin:embedded"
    return keywords


def _text_of(path: str, field: str | None) -> str:
    """Return the text of a file, or of a record, FILE:N."""
    from olmo_sparsity.analysis.explain.prompt import read_text
    from olmo_sparsity.text.inputs import open_text
    from olmo_sparsity.text.record_files import is_records

    file, _, number = path.rpartition(":")
    if field is None and not (number.isdigit() and Path(file).is_file()):
        if is_records(Path(path)):
            raise ConfigError(
                f"--text={path} holds records; pass one of them, such as --text={path}:1, and "
                "--field=NAME if its text is not in the field text"
            )
        return read_text(path)
    if file:
        for record in open_text(file, field or "text"):
            if record.name.rpartition(":")[2] == number:
                return record.text
    raise ConfigError(f"--text={path} with --field must be FILE:N, a record with text, N from 1")


def attribute(options: argparse.Namespace) -> int:
    from olmo_sparsity.command import attribute

    keep_freed_memory()
    return attribute.attribute(options)


def measure(options: argparse.Namespace) -> int:
    from olmo_sparsity.analysis.measurement import estimate, measurement, plan, targets
    from olmo_sparsity.analysis.measurement.plan import MeasureRequest
    from olmo_sparsity.analysis.results.summary import describe
    from olmo_sparsity.base.provenance import typed_command

    keep_freed_memory()
    out = Path(options.out)
    keywords = given_options(options, MeasureRequest.names())
    keywords["typed"] = tuple(keywords)
    keywords["shard"] = arguments.parse_shard(options.shard, by_launch=False)
    keywords["command"] = tuple(typed_command())
    keywords["at"] = options.at and [targets.parse_at(words) for words in options.at]
    if options.speed is not None and not options.dry_run:
        raise ConfigError(f"--speed={options.speed} is of --dry-run: add it")
    if options.model.endswith(".yaml"):
        print(_price_of_untrained(options, keywords))
        return 0
    request = MeasureRequest.of(documents=options.text, **keywords)
    if options.dry_run:
        print(estimate.estimate(plan.plan(request), request.shard, options.speed))
        return 0
    if options.partial:
        results: Any = measurement.sum_up_partial(plan.plan(request), out, request.command)
        out /= "partial"
    else:
        results = measurement.measure(request)
    if results is not None:
        print(describe(results))
        print(f"tables: {out}/*.parquet; to read: olmo-sparsity report {out} --out {out}.html")
    return 0


def _price_of_untrained(options: argparse.Namespace, keywords: dict[str, Any]) -> str:
    """Price a measurement of the model that a config will train, before anything is trained."""
    from olmo_sparsity.config.run import load_config
    from olmo_sparsity.experiment.price import price_config

    if not options.dry_run:
        raise ConfigError(
            f"MODEL={options.model} is a config: train it and pass its run folder, or add "
            "--dry-run for the cost"
        )
    for name in ("targets", "choices", "losses", "at", "quick", "partial", "shard"):
        if getattr(options, name):
            raise ConfigError(
                f"--{name} requires a trained model, and MODEL={options.model} is a config: omit it"
            )
    # These say where results go and how they were made, which costs nothing.
    free = ("model", "command", "typed", "out", "shard", "at")
    priced = {name: value for name, value in keywords.items() if name not in free}
    return str(price_config(load_config(options.model), priced, options.text, options.speed))


def figure(options: argparse.Namespace) -> int:
    from olmo_sparsity.command.experiment import draw_folder

    labels = options.labels.split(",") if options.labels else None
    if labels is not None and (not all(labels) or len(set(labels)) < len(labels)):
        raise ConfigError(f"--labels={options.labels} must name each model, each otherwise")
    if all((Path(folder) / "metrics.jsonl").is_file() for folder in options.results):
        from olmo_sparsity.training.curves import draw_curves

        draw_curves(options.results, Path(options.out), labels)
    elif len(options.results) == 1 and draw_folder(options.results[0], options.out):
        if labels is not None:
            raise ConfigError(f"--labels={options.labels}: an experiment's file has its labels")
    else:
        _draw_measurements(options.results, Path(options.out), labels)
    print(options.out)
    return 0


def _draw_measurements(folders: list[str], out: Path, labels: list[str] | None) -> None:
    """Draw Figure 2. A measurement that has no results is an empty point with its reason."""
    from olmo_sparsity.analysis.report.figures import Missing, draw_figure2
    from olmo_sparsity.analysis.results.results import read_results
    from olmo_sparsity.base.progress import say

    names = [Path(folder).name for folder in folders]
    has_labels = labels is not None and len(labels) == len(folders)
    if labels is not None and has_labels:
        names = labels
    results = []
    drawn_names = list[str]()
    missing = list[Missing]()
    for folder, name in zip(folders, names, strict=True):
        try:
            results.append(read_results(folder))
        except DataError as error:
            if len(folders) == 1 or not (Path(folder) / "identity.json").is_file():
                raise  # nothing else is drawn, or no measurement was begun there
            say(f"{folder} is not drawn: {error}")
            missing.append(Missing(name, str(error)))
            last_error = error
        else:
            drawn_names.append(name)
    if not results:
        raise last_error
    # `draw_figure2` reports a wrong number of labels.
    draw_figure2(results, out, drawn_names if has_labels else labels, missing)


def compare(options: argparse.Namespace) -> int:
    from olmo_sparsity.analysis.results.comparison import describe_comparison
    from olmo_sparsity.analysis.results.results import read_results

    if options.out is not None:
        check_suffix("--out", options.out, ".csv")
    pairs = _pairs_to_compare(options)
    tables = []
    for first, second in pairs:
        table, summary = describe_comparison(
            read_results(first), read_results(second), options.transfer
        )
        print(summary)
        tables.append(table if len(pairs) == 1 else table.assign(first=first, second=second))
    if options.out is not None:
        import pandas as pd

        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(options.out), pd.concat(tables).to_csv(index=False))
        print(options.out)
    return 0


def _pairs_to_compare(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the folders of both results; or, of an experiment's folder, those of the first model
    and each other one."""
    from olmo_sparsity.command.experiment import measurements_in

    if options.second is not None:
        return [(options.first, options.second)]
    measured = measurements_in(options.first)
    if measured is None:
        raise ConfigError(f"{options.first} is no experiment's folder: pass two results to compare")
    folders = list(measured.values())
    if len(folders) < 2:
        raise ConfigError(f"{options.first} has one measured model: pass two results to compare")
    return [(folders[0], folder) for folder in folders[1:]]


def report(options: argparse.Namespace) -> int:
    from olmo_sparsity.analysis.report.report import write_report
    from olmo_sparsity.analysis.results.results import read_results
    from olmo_sparsity.command.experiment import measurements_in

    if options.max_documents is not None and options.max_documents < 1:
        raise ConfigError(f"--max-documents={options.max_documents} must be at least 1")
    check_suffix("--out", options.out, ".html")
    out = Path(options.out)
    measured = measurements_in(options.results) or {"": options.results}
    for name, folder in measured.items():
        # A page for each model of an experiment that has several.
        page = out if len(measured) == 1 else out.with_stem(f"{out.stem}_{name}")
        write_report(read_results(folder), page, options.max_documents)
        print(page)
    return 0
