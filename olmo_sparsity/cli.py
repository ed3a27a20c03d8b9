"""The command line: parse the arguments of `olmo-sparsity` and call one function per command.

Place in the flow: on top of everything. Large packages are imported only inside a command. Exit
codes and error messages: ending.py.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
import traceback
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import NoReturn

from olmo_sparsity import arguments
from olmo_sparsity.ending import (
    EXIT_BAD_INPUT,
    EXIT_DEFECT,
    EXIT_LOST_PROCESS,
    close_streams,
    exit_code_of,
    flush_results,
    name_streams,
    print_error,
)
from olmo_sparsity.errors import ConfigError

__all__ = ["EXIT_BAD_INPUT", "entry", "main"]

# Commands that resume where they were stopped.
RESUMED = ("prepare", "train", "sweep", "measure", "task")


def entry(arguments: list[str] | None = None) -> NoReturn:
    """Run the command and exit."""
    name_streams()
    try:
        code = main(arguments)
    except Exception:
        traceback.print_exc()
        code = EXIT_DEFECT
    close_streams()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # DeepSpeed keeps process groups alive, and with them gloo's threads. If one of them frees a
        # tensor during Python's shutdown, the process aborts, and the launcher fails the job.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    # Only commands that read a config take further `--key.sub=value` words.
    unknown = [word for word in rest if "config" not in options or not word.startswith("--")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides = rest
    if getattr(options, "out", None) == "":
        parser.error("--out is empty; name a file or folder")
    try:
        code = options.run(options)
        flush_results()
        return code
    except (Exception, KeyboardInterrupt) as error:
        return exit_code_of(error, resumes=options.command in RESUMED)


def build_parser() -> argparse.ArgumentParser:
    return arguments.build_parser(globals())


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
            if config.evaluation.sparsity_targets:
                from analysis.probe import SparsityProbe

                return int(loop.train(config, processes, SparsityProbe))
            return int(loop.train(config, processes))
    except LostProcess as lost:
        return print_error(
            f"another process of this run is gone ({lost}); the same command goes on from the last "
            "checkpoint",
            EXIT_LOST_PROCESS,
        )


def sweep(options: argparse.Namespace) -> int:
    from olmo_sparsity import experiments, jobs
    from olmo_sparsity.sweep import Run

    all_jobs = experiments.read_jobs(options.config, options.overrides)
    if options.list:
        print(jobs.format_states(all_jobs))
        return 0
    if options.slurm is not None:
        return jobs.submit(options.config, options.overrides, all_jobs, options.slurm)
    if options.only is None:
        return jobs.run_here(options.config, options.overrides, all_jobs)
    if not 0 <= options.only < len(all_jobs):
        last = len(all_jobs) - 1
        raise ConfigError(f"--only={options.only}: {options.config} has runs 0 to {last}")
    job = all_jobs[options.only]
    with jobs.recording_failure(job):
        if isinstance(job, Run):
            return train(
                argparse.Namespace(config=job.config, overrides=job.overrides, dry_run=False)
            )
        assert isinstance(job, experiments.Experiment)
        if missing := jobs.unfinished_needs(job, all_jobs):
            raise ConfigError(f"{job.name} needs {', '.join(missing)}; run that first")
        return job.run()


def losses(options: argparse.Namespace) -> int:
    from olmo_sparsity.training import run_folder

    print(run_folder.loss_table(options.run_folder))
    if options.out is not None:
        run_folder.draw_losses(options.run_folder, Path(options.out))
        print(options.out)
    return 0


def export(options: argparse.Namespace) -> int:
    from olmo_sparsity.model import exchange

    name = exchange.export(Path(options.checkpoint), Path(options.out))
    print(f"{options.out}: {name}; transformers.AutoModelForCausalLM.from_pretrained reads it")
    return 0


def explain(options: argparse.Namespace) -> int:
    from analysis import explanation
    from analysis.explanation import read_text, to_json
    from analysis.targets import parse_at

    if options.html is not None and not options.html.endswith(".html"):
        raise ConfigError(f"--html={options.html} must end in .html")
    if options.foreign is not None and not options.check:
        raise ConfigError("--foreign is text for --check; add it, or leave --foreign out")
    if options.long != "all" and not options.long.isdecimal():
        raise ConfigError(f"--long={options.long} must be `all` or a number of tokens")
    taken = signature(explanation.explain).parameters
    given = {name: value for name, value in vars(options).items() if name in taken} | {
        "text": None if options.text is None else read_text(options.text),
        "prompt": None if options.prompt is None else read_text(options.prompt, inline=True),
        "at": options.at and [parse_at(at) for at in options.at],
        "long": "all" if options.long == "all" else int(options.long),
        "foreign": options.foreign or "embedded",
    }
    result = explanation.explain(**given)
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


def measure(options: argparse.Namespace) -> int:
    from analysis.estimate import estimate, first_look
    from analysis.measurement import run, sum_up_partial
    from analysis.parts import refuse_other_folder
    from analysis.plan import Plan
    from analysis.results import Results, read_results
    from analysis.settings import Settings
    from analysis.sources import open_documents, plant_dependencies
    from analysis.summary import describe
    from analysis.targets import parse_at, parse_share
    from analysis.windows import Windows
    from olmo_sparsity.model.load import load_model
    from olmo_sparsity.versions import typed_command

    for name, value in (arguments.QUICK if options.quick else arguments.THOROUGH).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    given = Path(options.targets).is_dir()
    if (given or options.at) and options.planted:
        raise ConfigError("--planted has its own targets; leave --targets and --at out")
    at = [parse_at(words) for words in options.at or ()]
    settings = Settings(
        Windows(options.long, options.short, options.stride),
        units=tuple(options.units.split(",")),
        selectors=tuple(options.selectors.split(",")),
        ks=parse_numbers("--ks", options.ks, ","),
        target_share=1.0 if given else parse_share(options.targets),
        min_gap=options.min_gap,
        sets=tuple(options.sets.split(",")),
        max_targets=options.max_targets,
        far_states=options.far_states,
        foreign=options.foreign_text,
        num_foreign=options.foreign,
        num_halves=options.halves,
        seed=options.seed,
    )
    settings.check()
    shard = parse_shard(options.shard)
    refuse_other_folder(Path(options.out))
    targets = read_results(options.targets) if given else at or None
    model = load_model(
        options.model, device=options.device, dtype=options.dtype, device_map=options.device_map
    )
    documents = open_documents(
        options.text, model, options.max_documents, field=options.field, split_at=options.split_at
    )
    if options.planted:
        documents = plant_dependencies(documents, model, settings.windows, settings.seed)
    if options.quick and not options.planted:
        documents = first_look(
            documents, settings.windows, settings.far_states, num_halves=settings.num_halves
        )
    windows = replace(settings.windows, prefix=tuple(model.prefix_ids(options.prefix)))
    settings = replace(settings, windows=windows)
    plan = Plan.of(model, documents, settings, targets, options.batch_tokens)
    if options.dry_run:
        print(estimate(plan, shard))
        return 0
    if options.partial:
        results: Results | None = sum_up_partial(plan, Path(options.out), typed_command())
    else:
        results = run(plan, Path(options.out), shard, typed_command())
    if results is not None:
        print(describe(results))
    return 0


def figure(options: argparse.Namespace) -> int:
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
    from analysis.ladder import describe_ladder, draw_ladder, ladder_table, made_by
    from analysis.results import read_results
    from olmo_sparsity.files import write_atomically

    results = [read_results(folder) for folder in options.results]
    table, out = ladder_table(results), Path(options.out)
    draw_ladder(table, out, options.selector, options.k, options.units)
    write_atomically(out.with_suffix(".csv"), table.round(4).to_csv(index=False))
    write_atomically(out.with_suffix(".meta.json"), json.dumps(made_by(results), indent=1))
    print(describe_ladder(table, options.selector, options.k, options.units))
    return 0


def report(options: argparse.Namespace) -> int:
    from analysis.report import write_report
    from analysis.results import read_results

    if options.max_documents is not None and options.max_documents < 1:
        raise ConfigError(f"--max-documents={options.max_documents} must be at least 1")
    if not options.out.endswith(".html"):
        raise ConfigError(f"--out={options.out} must end in .html")
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
