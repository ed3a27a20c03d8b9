"""Compute the theorems in numbers: `python -m study.theory CONFIG [--key=value …]`."""

from __future__ import annotations

import argparse

from study.command import enter, run_command
from study.theory import experiment


def run(options: argparse.Namespace, settings: list[str]) -> None:
    experiment.run(options.config, settings)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m study.theory", description=__doc__)
    parser.add_argument("config", metavar="CONFIG")
    return run_command(parser, run, words, takes_settings=True, again="starts over")


if __name__ == "__main__":
    enter(main)
