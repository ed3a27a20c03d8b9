"""The command `olmo-sparsity`. Nothing heavy is imported before a command is chosen.

Place in the flow: the thin outside. Each command parses its arguments and calls one function.
How it ends: ending.py.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from olmo_sparsity import __version__
from olmo_sparsity.ending import (
    EXIT_BAD_INPUT,
    EXIT_DEFECT,
    EXIT_LOST_PROCESS,
    answer,
    complain,
    flush_results,
    let_go_of_streams,
    name_streams,
)
from olmo_sparsity.errors import ConfigError, printable

__all__ = ["EXIT_BAD_INPUT", "entry", "main"]

# Commands that go on where they were stopped.
RESUMED = ("prepare", "train", "sweep", "measure", "task")

# What `measure` takes where nothing is said, and with --quick.
THOROUGH = {"selectors": "add_one,divergence,random,nearest", "foreign": 3, "max_documents": None}
QUICK = {"selectors": "add_one_screened,random", "foreign": 1, "max_documents": 30}


def entry(arguments: list[str] | None = None) -> NoReturn:
    """The command as a process of its own."""
    name_streams()
    try:
        code = main(arguments)
    except Exception:
        traceback.print_exc()
        code = EXIT_DEFECT
    let_go_of_streams()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # DeepSpeed keeps process groups alive, and with them gloo's threads. One that still lets
        # go of a tensor while Python is taken down aborts the process, and the launcher the job.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    # Only commands that read a config take further `--key.sub=value` words.
    strange = [word for word in rest if "config" not in options or not word.startswith("--")]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    options.overrides = rest
    if getattr(options, "out", None) == "":
        parser.error("--out is empty; name a file or folder")
    try:
        code = options.run(options)
        flush_results()
        return code
    except (Exception, KeyboardInterrupt) as error:
        return answer(error, resumes=options.command in RESUMED)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="olmo-sparsity",
        description="Train models whose position IDs are explicit, then ask which far-away tokens "
        "their predictions depend on.",
        epilog="CONFIG is a YAML file; any of its keys can follow as --key.sub=value.",
    )
    parser.add_argument("--version", action="version", version=f"olmo-sparsity {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], help: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.set_defaults(run=run, command=name)
        return sub

    sub = command("prepare", prepare, "turn a corpus into token shards")
    sub.add_argument("config", metavar="CONFIG")

    sub = command("train", train, "train a model on prepared shards (goes on where it stopped)")
    sub.add_argument("config", metavar="CONFIG")
    sub.add_argument(
        "--dry-run", action="store_true", help="show the resolved config and what the run will cost"
    )

    sub = command("sweep", sweep, "train every run of a grid, one after the other or on SLURM")
    sub.add_argument("config", metavar="GRID", help="a YAML file: configs × choices")
    how = sub.add_mutually_exclusive_group()
    how.add_argument("--list", action="store_true", help="say what is done, running, failed")
    how.add_argument("--only", type=int, metavar="N", help="train the N-th run, from 0, here")
    how.add_argument("--slurm", nargs="?", const="", metavar="FLAGS",
                     help="submit what is left as an array, with these sbatch flags")  # fmt: skip

    sub = command("losses", losses, "print a run's held-out loss by position, and its induction")
    sub.add_argument("run_folder", metavar="RUN_FOLDER")
    sub.add_argument("--out", help="also draw them over steps: a .png, .pdf or .svg file")

    sub = command(
        "export", export, "write a checkpoint as a folder that transformers loads by itself"
    )
    sub.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT_FOLDER")
    sub.add_argument("out", metavar="OUT")

    sub = command("explain", explain, "show which far tokens one prediction depends on")
    sub.add_argument(
        "model", metavar="MODEL", help="run, checkpoint, Hugging Face folder or hub name"
    )
    what = sub.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", metavar="FILE", help="one document; - is standard input")
    what.add_argument("--prompt", metavar="TEXT", help="@FILE reads it from a file")
    sub.add_argument("--at", action="append", metavar="WORDS", help="targets: words, /a regular "
                     "expression/, or tokens FIRST:END; may be given several times (default: the "
                     "tokens that gain most)")  # fmt: skip
    sub.add_argument("--target", metavar="TEXT", help="the answer (default: what the model says)")
    sub.add_argument("--chat", action="store_true", help="the prompt in the model's chat template")
    sub.add_argument("-k", type=int, default=8, help="far units of each target (%(default)s)")
    sub.add_argument("--units", default="tokens", help="tokens, words, sentences or span:W "
                     "(%(default)s)")  # fmt: skip
    sub.add_argument("--selector", default="add_one", help="(%(default)s); add_one_nested for long "
                     "texts")  # fmt: skip
    sub.add_argument(
        "--long", default="all", help="tokens before a target that count (%(default)s)"
    )
    sub.add_argument("--short", type=int, help="of those, the last ones are no candidates (32)")
    add_model_arguments(sub)
    sub.add_argument("--check", action="store_true", help="ask the same of unrelated texts")
    sub.add_argument("--foreign", default="embedded", metavar="TEXT", help="where those come from: "
                     "what --text of `measure` reads (%(default)s)")  # fmt: skip
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--html", metavar="FILE", help="write a page to read in a browser")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("measure", measure, "ask a model which far tokens its held-out losses depend on")
    sub.add_argument(
        "model", metavar="MODEL", help="run, checkpoint, Hugging Face folder or hub name"
    )
    sub.add_argument("--out", required=True, help="folder of the results; a second start resumes")
    sub.add_argument("--text", help="a file or glob of .txt, .md, .jsonl, .csv, .tsv or .parquet, "
                     "a folder of .txt files, a saved data set, a prepared folder, a name on the "
                     "hub, - for standard input, … (all in README; default: the run's own held-out "
                     "documents)")  # fmt: skip
    sub.add_argument("--field", default="text", help="of a record: which holds the text (text)")
    sub.add_argument("--split-at", choices=("whole", "blank-lines"), default="whole",
                     help="a file of plain text is one document, or each part between blank lines "
                     "(%(default)s)")  # fmt: skip
    sub.add_argument(
        "--long", type=int, default=128, help="tokens of the long window (%(default)s)"
    )
    sub.add_argument("--short", type=int, default=32, help="tokens of the short one (%(default)s)")
    sub.add_argument(
        "--stride", type=int, default=1, help="targets that share windows (%(default)s)"
    )
    sub.add_argument("--ks", default="1,2,4,8,16", help="numbers of far units (%(default)s)")
    sub.add_argument("--units", default="tokens", help="what is ranked and counted: tokens, words, "
                     "sentences, span:W, or several, comma-separated (%(default)s)")  # fmt: skip
    sub.add_argument("--selectors", help="comma-separated (add_one,divergence,random,nearest)")
    sub.add_argument("--targets", default="top10%", help="`all`, like `top10%%` (%(default)s), or "
                     "a folder of results: the same targets as there")  # fmt: skip
    sub.add_argument("--at", action="append", metavar="WORDS", help="targets: words, /a regular "
                     "expression/, or tokens FIRST:END, wherever they stand; may be given several "
                     "times")  # fmt: skip
    sub.add_argument("--planted", action="store_true",
                     help="ground truth: plant a far dependency into each document")  # fmt: skip
    sub.add_argument("--min-gap", type=float, default=0.1, help="nats (%(default)s)")
    sub.add_argument("--foreign", type=int, help="draws of the foreign control (3)")
    sub.add_argument("--foreign-text", choices=("unrelated", "matched", "shuffled"),
                     default="unrelated", help="of another document, of one around the target's "
                     "token, or the own far part in another order (%(default)s)")  # fmt: skip
    sub.add_argument("--max-documents", type=int, help="read no more than this many")
    sub.add_argument("--shard", default="0/1", help="i/n: the i-th (from 0) of n processes "
                     "that measure into one folder; the last one sums up")  # fmt: skip
    sub.add_argument("--seed", type=int, default=0)
    add_model_arguments(sub)
    sub.add_argument("--device-map", help="`auto` spreads a Hugging Face model over several GPUs")
    quick = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in QUICK.items())
    sub.add_argument("--quick", action="store_true", help=f"a first look in a minute: {quick}")
    sub.add_argument("--dry-run", action="store_true", help="show what it will cost")

    sub = command(
        "figure", figure, "draw Figure 2 from measurements, or accuracy by length from tasks"
    )
    sub.add_argument("results", metavar="RESULTS", nargs="+")
    sub.add_argument("--out", required=True, help="a .png, .pdf or .svg file")
    sub.add_argument("--labels", help="comma-separated names of the models")

    sub = command(
        "ladder", ladder, "compare many models: excess against size and against induction"
    )
    sub.add_argument("results", metavar="RESULTS", nargs="+")
    sub.add_argument("--out", required=True, help="a .png, .pdf or .svg file; its numbers "
                     "and what was run go beside it as .csv and .meta.json")  # fmt: skip
    sub.add_argument("--selector", default="add_one", help="(%(default)s)")
    sub.add_argument("--units", default="tokens", help="(%(default)s)")
    sub.add_argument("--k", type=int, default=8, help="(%(default)s)")

    sub = command("report", report, "write a measurement as one page to read in a browser")
    sub.add_argument("results", metavar="RESULTS")
    sub.add_argument("--out", required=True, help="an .html file")
    sub.add_argument("--max-documents", type=int)

    sub = command("task", task, "train and test a synthetic task under every position scheme")
    sub.add_argument("config", metavar="CONFIG")
    sub.add_argument("--shard", default="0/1", help="i/n: the i-th of n parts (from 0)")

    sub = command("theory", theory, "the theorems in numbers: risk by length against both bounds")
    sub.add_argument("config", metavar="CONFIG")
    return parser


def add_model_arguments(sub: argparse.ArgumentParser) -> None:
    """How the model is read and asked, alike in `explain` and `measure`."""
    sub.add_argument("--far-states", choices=("contextual", "isolated"), default="contextual",
                     help="a far token has its states in the long window, or is shown alone "
                     "(%(default)s)")  # fmt: skip
    sub.add_argument("--prefix", default="auto", metavar="WHAT", help="in front of every window: "
                     "auto (what the tokenizer puts before a text), bos, none, or a text "
                     "(%(default)s)")  # fmt: skip
    sub.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
                     help="(the checkpoint's own)")  # fmt: skip
    sub.add_argument("--device", default="auto", help="(a GPU where there is one)")
    sub.add_argument("--batch-tokens", type=int, help="per forward (4096 on CPU, else 16384)")


def prepare(options: argparse.Namespace) -> int:
    from olmo_sparsity.config_file import load_config
    from olmo_sparsity.data import tokens

    tokens.prepare(load_config(options.config, options.overrides).data)
    return 0


def train(options: argparse.Namespace) -> int:
    from olmo_sparsity.config_file import load_config
    from olmo_sparsity.training import loop
    from olmo_sparsity.training.distributed import LostProcess, connect

    if options.dry_run:
        loop.dry_run(load_config(options.config, options.overrides))
        return 0
    try:
        with connect() as processes:
            with processes.agree():
                config = load_config(options.config, options.overrides)
            return int(loop.train(config, processes))
    except LostProcess as lost:
        return complain(
            f"another process of this run is gone ({lost}); the same command goes on from the last "
            "checkpoint",
            EXIT_LOST_PROCESS,
        )


def sweep(options: argparse.Namespace) -> int:
    from olmo_sparsity import sweep as sweeps

    runs = sweeps.expand(options.config, options.overrides)
    if options.list:
        print(sweeps.format_states(runs))
        return 0
    if options.slurm is not None:
        return sweeps.submit(options.config, options.overrides, runs, options.slurm)
    if options.only is None:
        return sweeps.run_here(options.config, options.overrides, runs)
    if not 0 <= options.only < len(runs):
        raise ConfigError(f"--only={options.only}: {options.config} has runs 0 to {len(runs) - 1}")
    run = runs[options.only]
    with sweeps.noting_failure(run):
        return train(argparse.Namespace(config=run.config, overrides=run.overrides, dry_run=False))


def losses(options: argparse.Namespace) -> int:
    from pathlib import Path

    from olmo_sparsity.training import run_folder

    print(run_folder.loss_table(options.run_folder))
    if options.out is not None:
        run_folder.draw_losses(options.run_folder, Path(options.out))
        print(options.out)
    return 0


def export(options: argparse.Namespace) -> int:
    from pathlib import Path

    from olmo_sparsity.model import exchange

    name = exchange.export(Path(options.checkpoint), Path(options.out))
    print(f"{options.out}: {name}; transformers.AutoModelForCausalLM.from_pretrained reads it")
    return 0


def explain(options: argparse.Namespace) -> int:
    from analysis.explanation import explain as explained
    from analysis.explanation import read_text, to_json
    from analysis.targets import parse_at

    if options.html is not None and not options.html.endswith(".html"):
        raise ConfigError(f"--html={options.html} must end in .html: it is a page")
    if options.long != "all" and not options.long.isdecimal():
        raise ConfigError(f"--long={options.long} must be `all` or a number of tokens")
    found = explained(
        options.model,
        text=None if options.text is None else read_text(options.text),
        at=None if options.at is None else [parse_at(at) for at in options.at],
        prompt=None if options.prompt is None else read_text(options.prompt, inline=True),
        target=options.target,
        k=options.k,
        units=options.units,
        selector=options.selector,
        long="all" if options.long == "all" else int(options.long),
        short=options.short,
        far_states=options.far_states,
        prefix=options.prefix,
        chat=options.chat,
        foreign=options.foreign,
        device=options.device,
        dtype=options.dtype,
        batch_tokens=options.batch_tokens,
        seed=options.seed,
    )
    if options.check:
        found.check()
    print(to_json(found) if options.json else found.describe(bold=sys.stdout.isatty()))
    if options.html is not None:
        found.to_html(options.html)
        print(options.html, file=sys.stderr)
    return 0


def measure(options: argparse.Namespace) -> int:
    from dataclasses import replace
    from pathlib import Path

    from analysis.estimate import estimate
    from analysis.measurement import Plan, run
    from analysis.results import read_results
    from analysis.settings import Settings
    from analysis.sources import open_documents, plant_dependencies
    from analysis.summary import describe
    from analysis.targets import parse_at, parse_share
    from analysis.windows import Windows
    from olmo_sparsity.model.load import load_model
    from olmo_sparsity.versions import typed_command

    for name, value in (QUICK if options.quick else THOROUGH).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    given = Path(options.targets).is_dir()
    if (given or options.at) and options.planted:
        raise ConfigError("--planted has targets of its own; leave --targets and --at out")
    if options.at and options.targets != "top10%":
        raise ConfigError("--at names the targets; leave --targets out")
    at = [parse_at(words) for words in options.at or ()]
    settings = Settings(
        Windows(options.long, options.short, options.stride),
        units=tuple(options.units.split(",")),
        selectors=tuple(options.selectors.split(",")),
        ks=parse_numbers("--ks", options.ks, ","),
        target_share=1.0 if given else parse_share(options.targets),
        min_gap=options.min_gap,
        far_states=options.far_states,
        foreign=options.foreign_text,
        num_foreign=options.foreign,
        seed=options.seed,
    )
    settings.check()
    shard = parse_shard(options.shard)
    if Path(options.out).is_file():
        raise ConfigError(f"--out={options.out} is a file; name a folder for the results")
    targets = read_results(options.targets) if given else at or None
    model = load_model(
        options.model, device=options.device, dtype=options.dtype, device_map=options.device_map
    )
    documents = open_documents(
        options.text, model, options.max_documents, field=options.field, split_at=options.split_at
    )
    if options.planted:
        documents = plant_dependencies(documents, model, settings.windows, settings.seed)
    windows = replace(settings.windows, prefix=tuple(model.prefix_ids(options.prefix)))
    settings = replace(settings, windows=windows)
    plan = Plan.of(model, documents, settings, targets, options.batch_tokens)
    if options.dry_run:
        print(estimate(plan, shard))
        return 0
    found = run(plan, Path(options.out), shard, typed_command())
    if found is not None:
        print(describe(found))
    return 0


def figure(options: argparse.Namespace) -> int:
    from pathlib import Path

    folders = [Path(folder) for folder in options.results]
    labels = options.labels.split(",") if options.labels else None
    if (folders[0] / "accuracy.parquet").is_file():
        from olmo_sparsity.tasks.figure import draw

        draw(folders, Path(options.out), labels)
    else:
        from analysis.figures import draw_figure2
        from analysis.results import read_results

        draw_figure2([read_results(folder) for folder in folders], Path(options.out), labels)
    print(options.out)
    return 0


def ladder(options: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from analysis.ladder import describe_ladder, draw_ladder, ladder_table, made_by
    from analysis.results import read_results

    results = [read_results(folder) for folder in options.results]
    table, out = ladder_table(results), Path(options.out)
    draw_ladder(table, out, options.selector, options.k, options.units)
    table.round(4).to_csv(out.with_suffix(".csv"), index=False)
    out.with_suffix(".meta.json").write_text(json.dumps(made_by(results), indent=1))
    print(describe_ladder(table, options.selector, options.k, options.units))
    return 0


def report(options: argparse.Namespace) -> int:
    from pathlib import Path

    from analysis.report import write_report
    from analysis.results import read_results

    if options.max_documents is not None and options.max_documents < 1:
        raise ConfigError(f"--max-documents={options.max_documents} must be at least 1")
    if not options.out.endswith(".html"):
        raise ConfigError(f"--out={options.out} must end in .html: the report is a page")
    write_report(read_results(Path(options.results)), Path(options.out), options.max_documents)
    print(options.out)
    return 0


def task(options: argparse.Namespace) -> int:
    from olmo_sparsity.tasks import experiment
    from olmo_sparsity.tasks.results import format_table

    print(
        format_table(experiment.run(options.config, options.overrides, parse_shard(options.shard)))
    )
    return 0


def theory(options: argparse.Namespace) -> int:
    from olmo_sparsity.theory import experiment

    experiment.run(options.config, options.overrides)
    return 0


def parse_shard(text: str) -> tuple[int, int]:
    shard = parse_numbers("--shard", text, "/")
    if len(shard) != 2 or not 0 <= shard[0] < shard[1]:
        raise ConfigError(f"--shard={text} must be i/n with 0 <= i < n")
    return shard[0], shard[1]


def parse_numbers(option: str, text: str, separator: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(separator))
    except ValueError:
        raise ConfigError(
            f"{option}={text} must be whole numbers with '{separator}' between"
        ) from None


if __name__ == "__main__":
    entry()
