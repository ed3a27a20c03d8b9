"""Train and test a task under every scheme: `python -m study.tasks CONFIG [--key=value …]`."""

from __future__ import annotations

import argparse

from olmo_sparsity.command.share import parse_shard
from study.command import enter, run_command
from study.tasks import experiment
from study.tasks.results import format_table


def run(options: argparse.Namespace, settings: list[str]) -> None:
    print(format_table(experiment.run(options.config, settings, parse_shard(options.shard))))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m study.tasks", description=__doc__)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--shard", default="0/1", help="i/n: the i-th of n parts (from 0)")
    return run_command(parser, run, words, takes_settings=True, again="goes on")


if __name__ == "__main__":
    enter(main)
