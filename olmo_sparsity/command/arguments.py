"""Declare the options of each `olmo-sparsity` command.

Place in the flow: words of the command line → **`build_parser`** → options → cli.py, which runs the
commands. A function here adds the options of one command (`_add_measure`), or of a group of
commands (`_add_training`). There are two kinds of options:

    settings of a function, such as --ks   derived from its schema and docstring (`add_options`)
    others, such as --out                  written here

No large package is imported, so that `--help` takes no seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from olmo_sparsity import __version__
from olmo_sparsity.analysis import api
from olmo_sparsity.analysis import options as settings
from olmo_sparsity.analysis.options import ModelOptions
from olmo_sparsity.command.parser import (
    AT,
    AT_FILE,
    MODEL,
    TOKENIZER,
    Parser,
    add_documented,
    add_shard,
)
from olmo_sparsity.config.command_line import add_options, arguments_of
from olmo_sparsity.config.schema import schema_fields, spell

AddCommand = Callable[[str, str], Parser]
"""Adds a command by its name and help, and returns its parser, to which options are added."""


def build_parser(runs: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Return the parser of all commands. `runs`: the function that runs each command, by the
    command's name."""
    parser = Parser(
        prog="olmo-sparsity",
        description="Train language models with explicit position IDs, and measure which far-away "
        "tokens their predictions depend on.",
        epilog="CONFIG is a YAML file, of yours or one that `configs` lists; any of its keys can "
        "follow as --key.sub=value.",
    )
    parser.add_argument("--version", action="version", version=f"olmo-sparsity {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, help: str) -> Parser:
        # Without abbreviations, an option that is added later changes no script.
        sub = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.set_defaults(run=runs[name], command=name)
        return sub

    _add_training(command)
    _add_explain(command("explain", "show which distant tokens one prediction depends on"))
    if find_spec("olmo_sparsity.sources") is not None:  # it can be left out of an installation
        from olmo_sparsity.command.attribute_arguments import add_attribute

        add_attribute(
            command("attribute", "show which source each statement of an answer relies on")
        )
    _add_measure(
        command("measure", "measure which distant tokens the losses on many documents depend on")
    )
    _add_losses(command("losses", "print mean losses by place, of a run or of models on one text"))
    _add_results(command)
    return parser


def _add_training(command: AddCommand) -> None:
    """Add the commands that make a model, with their options."""
    sub = command("configs", "list the configs that are installed, or print one")
    sub.add("name", metavar="NAME", nargs="?", help="print this one, for a file of yours")

    sub = command("prepare", "turn a corpus into token shards")
    sub.add("config", metavar="CONFIG")
    add_shard(sub, "of files of records on disk: ")

    sub = command("train", "train a model on prepared shards (resumes where it stopped)")
    sub.add("config", metavar="CONFIG")
    sub.add(
        "--dry-run", action="store_true", help="show the resolved config and the cost of the run"
    )
    _add_gpus(sub)
    sub.add(
        "--gpu-hours-per-failure",
        type=float,
        metavar="HOURS",
        help="of --dry-run: how often GPUs fail, for the hours that this adds (50,000: Llama 3's)",
    )
    sub.add(
        "--profile",
        metavar="FIRST:LAST",
        help="write a Chrome trace of these steps, such as 10:15, into the run folder",
    )

    _add_experiment(
        command(
            "experiment",
            "train models, measure them and draw one figure, as one file says (resumes)",
        )
    )

    sub = command("export", "write a checkpoint as a folder that transformers loads by itself")
    sub.add("checkpoint", metavar="RUN_OR_CHECKPOINT_FOLDER")
    sub.add("out", metavar="OUT")
    sub.add("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the weights")


def _add_experiment(sub: Parser) -> None:
    """Add the options of `experiment`."""
    sub.add("config", metavar="FILE", help="a YAML file: models × choices, measure, figure")
    # Without any of these, all jobs are run here.
    modes = sub.add_mutually_exclusive_group()
    modes.add_argument("--list", action="store_true", help="list the state of each job")
    modes.add_argument(
        "--cancel",
        action="store_true",
        help="cancel its jobs of SLURM, those that wait first; trainings save before they end",
    )
    modes.add_argument(
        "--dry-run",
        action="store_true",
        help="what each job and all of them cost, before anything is trained",
    )
    modes.add_argument(
        "--only",
        metavar="JOB",
        help="run one job here: a name that --list prints, or the N-th model, from 0",
    )
    modes.add_argument(
        "--slurm",
        nargs="?",
        const="",
        metavar="FLAGS",
        help="submit what is not done as arrays, with these sbatch flags for trainings",
    )
    sub.add(
        "--measure-slurm",
        metavar="FLAGS",
        help="sbatch flags for measurements and the figure (those of --slurm)",
    )
    sub.add("--max-jobs", type=int, metavar="N", help="most tasks of an array that run at once")
    sub.add(
        "--time",
        action="append",
        metavar="MODEL=TIME",
        help="time limit of a model, or of all whose name begins so; may be given several times",
    )
    _add_gpus(sub)


def _add_gpus(sub: Parser) -> None:
    """Add the options that describe the GPUs of a dry run."""
    sub.add("--gpus", type=int, metavar="N", help="of --dry-run: on so many GPUs (default: here)")
    sub.add("--gpu", metavar="NAME", help="of --dry-run: such as a100-40 or h200 (h100)")
    sub.add("--nodes", type=int, metavar="N", help="of --dry-run (default: 8 GPUs a node)")
    sub.add(
        "--nics-per-node",
        type=int,
        metavar="N",
        help="of --dry-run: network cards of a node (default: one a GPU with NVLink, else one)",
    )
    sub.add(
        "--gpu-hour", type=float, metavar="PRICE", help="of --dry-run: print what the run costs"
    )
    sub.add(
        "--disk-speed",
        type=float,
        metavar="GB/S",
        help="of --dry-run: GB/s at which the file system writes checkpoints of all processes (1)",
    )


def _add_explain(sub: Parser) -> None:
    """Add the options of `explain`, whose help is from the docstring of the function `explain`."""
    help = arguments_of(api.explain)
    sub.add("model", metavar="MODEL", help=MODEL)
    sub.add("--tokenizer", metavar="FOLDER", help=TOKENIZER)
    inputs = sub.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--text", metavar="FILE", help="one document; - is standard input")
    inputs.add_argument("--prompt", metavar="TEXT", help=f"{help['prompt']}. {AT_FILE}")
    sub.add(
        "--field",
        metavar="NAME",
        help="of --text FILE:N, the N-th record of a file (.jsonl, .parquet): its text (text)",
    )
    sub.add("--at", action="append", metavar="WORDS", help=AT)
    sub.add("--target", metavar="TEXT", help=f"{help['target']}. {AT_FILE}")
    sub.add("--dry-run", action="store_true", help="count the cost")
    add_options(sub, settings.ExplainSettings, ModelOptions, help=help)
    sub.add("--check", action="store_true", help="compare with unrelated texts")
    add_documented(sub, help, unrelated="TEXT")
    sub.add("--html", metavar="FILE", help="write a page to read in a browser")
    sub.add("--json", action="store_true", help="print JSON")


def _add_measure(sub: Parser) -> None:
    """Add the options of `measure`, whose help is from the docstring of the function `measure`, and
    of `explain` where that refers to it."""
    own_help = arguments_of(api.measure)
    # "As in `explain`" would send the reader of --help elsewhere.
    own_help = {name: text for name, text in own_help.items() if not text.startswith("as in")}
    help = arguments_of(api.explain) | own_help
    sub.add("model", metavar="MODEL", help=MODEL)
    sub.add("--tokenizer", metavar="FOLDER", help=TOKENIZER)
    sub.add("--out", required=True, help="folder of the results; the same command resumes")
    sub.add(
        "--text",
        help="a file or glob of .jsonl, .parquet or plain text, a folder of plain text, a prepared "
        "folder, a name on the hub, - for standard input, … (all in docs/measure.md; default: the "
        "run's own held-out documents)",
    )
    add_documented(sub, help, targets="FOLDER", choices="FOLDER", losses="FOLDER")
    sub.add("--at", action="append", metavar="WORDS", help=AT)
    add_options(sub, settings.Settings, settings.TextOptions, ModelOptions, help=help)
    add_shard(sub)
    # The help shows what --quick stands for, from where it is defined.
    quick = " ".join(
        f"--{name.replace('_', '-')} {spell(value)}"
        for name, value in (settings.QUICK | settings.QUICK_BLOCKS).items()
    )
    sub.add("--quick", action="store_true", help=f"random blocks of few documents: {quick}")
    modes = sub.add_mutually_exclusive_group()
    modes.add_argument("--dry-run", action="store_true", help="estimate the cost")
    sub.add(
        "--speed",
        metavar="GPU|N",
        help="of --dry-run: GPU-hours on such a GPU, as h100, or at so many token-forwards a "
        "second",
    )
    modes.add_argument(
        "--partial",
        action="store_true",
        help="measure nothing: write results of the finished documents, of all shards, to "
        "OUT/partial",
    )


def _add_losses(sub: Parser) -> None:
    """Add the options of `losses`."""
    sub.add(
        "models",
        metavar="RUN|MODEL",
        nargs="+",
        help="one run alone: what it logged, without reading a model. Else runs (all checkpoints), "
        "folders of transformers' Trainer, or models",
    )
    # Options that were not given are absent: one run without options is read from its log, and no
    # default must look like an option.
    absent = argparse.SUPPRESS
    sub.add("--text", default=absent, help="held-out text (default: the first run's own)")
    sub.add("--field", default=absent, help="the field that holds the text (text)")
    sub.add(
        "--out",
        default=absent,
        help="folder of a page with curves and a table; the same command goes on",
    )
    add_options(sub, settings.LossSettings, ModelOptions)


def measured_losses() -> set[str]:
    """Return the names of the options that say how `losses` reads a model. With any of them a model
    is evaluated; without them the log of a run is read."""
    schemas = (settings.LossSettings, ModelOptions)
    return {"text", "field", "out"}.union(*map(schema_fields, schemas))


def _add_results(command: AddCommand) -> None:
    """Add the commands that show finished results, with their options."""
    sub = command("figure", "draw Figure 2 of measurements, or the losses of runs as they train")
    sub.add(
        "results",
        metavar="RESULTS|RUN",
        nargs="+",
        help="folders of `measure`, of runs that train, or the folder of an experiment",
    )
    sub.add("--out", required=True, help="a .png, .pdf or .svg file")
    sub.add("--labels", help="comma-separated names of the models")

    sub = command(
        "compare",
        "compare two measurements of the same text: the difference of net excess, each document "
        "resampled for both at once",
    )
    sub.add("first", metavar="RESULTS", help="a folder of `measure` or of `experiment`")
    sub.add(
        "second",
        metavar="RESULTS",
        nargs="?",
        help="omit it for an experiment's folder: models of one seed that differ in one thing are "
        "then paired, at the last step and at each long window",
    )
    sub.add(
        "--transfer",
        action="store_true",
        help="each was measured with the other's --choices: the mean of both directions",
    )
    sub.add("--out", help="a .csv file of all values")

    sub = command("report", "write a measurement as one page to read in a browser")
    sub.add("results", metavar="RESULTS", help="a folder of `measure` or of `experiment`")
    sub.add("--out", required=True, help="an .html file")
    sub.add("--max-documents", type=int)
