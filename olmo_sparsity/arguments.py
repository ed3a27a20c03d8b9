"""Define the options of each `olmo-sparsity` command.

Place in the flow: beneath cli.py, which runs the commands. Imports no large package.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NoReturn

from olmo_sparsity import __version__
from olmo_sparsity.errors import printable

# Defaults of `measure`, and its values with --quick.
THOROUGH = {"selectors": "add_one,divergence,random,nearest", "foreign": 3, "max_documents": None}
QUICK = {"selectors": "add_one_screened,random", "foreign": 1, "max_documents": 30}


class Parser(argparse.ArgumentParser):
    add = argparse.ArgumentParser.add_argument

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"olmo-sparsity: {printable(message)} ({self.prog} --help says more)\n")


def build_parser(runs: Mapping[str, Any]) -> argparse.ArgumentParser:
    """`runs`: the function of each command, by its name."""
    parser = Parser(
        prog="olmo-sparsity",
        description="Train language models with explicit position IDs, and measure which far-away "
        "tokens their predictions depend on.",
        epilog="CONFIG is a YAML file; any of its keys can follow as --key.sub=value.",
    )
    parser.add_argument("--version", action="version", version=f"olmo-sparsity {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, help: str) -> Parser:
        sub = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.set_defaults(run=runs[name], command=name)
        return sub

    sub = command("prepare", "turn a corpus into token shards")
    sub.add("config", metavar="CONFIG")

    sub = command("train", "train a model on prepared shards (resumes where it stopped)")
    sub.add("config", metavar="CONFIG")
    sub.add("--dry-run", action="store_true",
            help="show the resolved config and the cost of the run")  # fmt: skip

    sub = command("sweep", "train every run of a grid, one after the other or on SLURM")
    sub.add("config", metavar="GRID", help="a YAML file: configs × choices")
    how = sub.add_mutually_exclusive_group()
    how.add_argument("--list", action="store_true", help="list the state of each run")
    how.add_argument("--only", type=int, metavar="N", help="train the N-th run, from 0, here")
    how.add_argument("--slurm", nargs="?", const="", metavar="FLAGS", help="submit unfinished runs "
                     "as an array, with sbatch flags")  # fmt: skip

    sub = command("losses", "print a run's held-out loss by position, and its induction drop")
    sub.add("run_folder", metavar="RUN_FOLDER")
    sub.add("--out", help="also draw them over steps: a .png, .pdf or .svg file")

    sub = command("export", "write a checkpoint as a folder that transformers loads by itself")
    sub.add("checkpoint", metavar="RUN_OR_CHECKPOINT_FOLDER")
    sub.add("out", metavar="OUT")

    sub = command("explain", "show which far tokens one prediction depends on")
    sub.add("model", metavar="MODEL", help="run, checkpoint, Hugging Face folder or hub name")
    what = sub.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", metavar="FILE", help="one document; - is standard input")
    what.add_argument("--prompt", metavar="TEXT", help="@FILE reads it from a file")
    sub.add("--at", action="append", metavar="WORDS", help="targets: words, /a regular "
            "expression/, or tokens FIRST:END, without END; may be given several times (default: "
            "the tokens with the largest gaps)")  # fmt: skip
    sub.add("--target", metavar="TEXT", help="the answer (default: generate one)")
    sub.add("--max-new-tokens", type=int, metavar="N", help="longest answer to generate (32)")
    sub.add("--chat", action="store_true", help="put the prompt into the chat template")
    sub.add("-k", type=int, default=8, help="far units for each target (%(default)s)")
    sub.add("--units", default="tokens", help="tokens, words, sentences or span:W (%(default)s)")
    sub.add("--selector", default="add_one", help="(%(default)s); add_one_nested for long texts")
    sub.add("--long", default="all", help="tokens before a target that it sees (%(default)s)")
    sub.add("--short", type=int, help="of those, the last N are no candidates (32)")
    add_model_arguments(sub)
    sub.add("--check", action="store_true", help="compare with unrelated texts")
    sub.add("--foreign", metavar="TEXT", help="unrelated texts, in any form that --text of "
            "`measure` reads (embedded)")  # fmt: skip
    sub.add("--seed", type=int, default=0)
    sub.add("--html", metavar="FILE", help="write a page to read in a browser")
    sub.add("--json", action="store_true", help="print JSON")

    sub = command("measure", "measure which far tokens the losses on many documents depend on")
    sub.add("model", metavar="MODEL", help="run, checkpoint, Hugging Face folder or hub name")
    sub.add("--out", required=True, help="folder of the results; the same command resumes")
    sub.add("--text", help="a file or glob of .txt, .md, .jsonl, .csv, .tsv or .parquet, a folder "
            "of .txt files, a saved data set, a prepared folder, a name on the hub, - for standard "
            "input, … (all in docs/train.md; default: the run's own held-out "
            "documents)")  # fmt: skip
    sub.add("--field", default="text", help="the field of a record that holds the text "
            "(%(default)s)")  # fmt: skip
    sub.add("--split-at", choices=("whole", "blank-lines"), default="whole", help="a file of plain "
            "text is one document, or each part between blank lines (%(default)s)")  # fmt: skip
    sub.add("--long", type=int, default=128, help="tokens of the long window (%(default)s)")
    sub.add("--short", type=int, default=32, help="tokens of the short one (%(default)s)")
    sub.add("--stride", type=int, default=1, help="targets that share windows; N make the losses N "
            "times cheaper (%(default)s)")  # fmt: skip
    sub.add("--ks", default="1,2,4,8,16", help="numbers of far units (%(default)s)")
    sub.add("--units", default="tokens", help="what is ranked and counted: tokens, words, "
            "sentences, span:W, or several, comma-separated (%(default)s)")  # fmt: skip
    sub.add("--selectors", help="comma-separated (add_one,divergence,random,nearest)")
    sub.add("--targets", default="top10%", help="`all`, like `top10%%` (%(default)s), or a folder "
            "of results: the same targets as there")  # fmt: skip
    sub.add("--at", action="append", metavar="WORDS", help="targets: words, /a regular "
            "expression/, or tokens FIRST:END; may be given several times")  # fmt: skip
    sub.add("--planted", action="store_true", help="ground truth: plant a far dependency into each "
            "document")  # fmt: skip
    sub.add("--min-gap", type=float, default=0.1, help="nats: targets with a smaller gap are "
            "not chosen (%(default)s); of `all` and of given targets none is left out")  # fmt: skip
    sub.add("--sets", default="gap,kl,recurs,new", help="target sets: by their gap, by the change "
            "of the prediction, by the text alone (%(default)s); `gap` alone costs a "
            "quarter")  # fmt: skip
    sub.add("--max-targets", type=int, metavar="N", help="at most N of each set and document, "
            "drawn at random (all)")  # fmt: skip
    sub.add("--foreign", type=int, help="draws of the foreign control (3)")
    sub.add("--halves", type=int, default=16, metavar="N", help="random halves of the far units "
            "that LDS is computed from (%(default)s; 0: none)")  # fmt: skip
    sub.add("--foreign-text", choices=("unrelated", "matched", "shuffled"), default="unrelated",
            help="text of another document, text around the target's token, or the own far part in "
            "another order (%(default)s)")  # fmt: skip
    sub.add("--max-documents", type=int, help="read no more than this many; of a "
            "prepared folder, spread over it")  # fmt: skip
    sub.add("--shard", default="0/1", help="i/n: the i-th (from 0) of n processes that measure "
            "into one folder; the last writes the results")  # fmt: skip
    sub.add("--seed", type=int, default=0)
    add_model_arguments(sub)
    sub.add("--device-map", help="`auto` spreads a Hugging Face model over several GPUs")
    quick = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in QUICK.items())
    sub.add("--quick", action="store_true", help="a first look at the beginnings of documents: "
            f"{quick}")  # fmt: skip
    how = sub.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="estimate the cost")
    how.add_argument("--partial", action="store_true", help="measure nothing: write results of the "
                     "finished documents, of all shards, to OUT/partial")  # fmt: skip

    sub = command("figure", "draw Figure 2 of measurements, or accuracy by length of tasks")
    sub.add("results", metavar="RESULTS", nargs="+")
    sub.add("--out", required=True, help="a .png, .pdf or .svg file")
    sub.add("--labels", help="comma-separated names of the models")

    sub = command("ladder", "compare many models: excess against size and against induction")
    sub.add("results", metavar="RESULTS", nargs="+")
    sub.add("--out", required=True, help="a .png, .pdf or .svg file; numbers and provenance go "
            "beside it as .csv and .meta.json")  # fmt: skip
    sub.add("--selector", default="add_one", help="(%(default)s)")
    sub.add("--units", default="tokens", help="(%(default)s)")
    sub.add("--k", type=int, default=8, help="(%(default)s)")

    sub = command("report", "write a measurement as one page to read in a browser")
    sub.add("results", metavar="RESULTS")
    sub.add("--out", required=True, help="an .html file")
    sub.add("--max-documents", type=int)

    sub = command("task", "train and test a synthetic task under every position scheme")
    sub.add("config", metavar="CONFIG")
    sub.add("--shard", default="0/1", help="i/n: the i-th of n parts (from 0)")

    sub = command("theory", "compute the theorems in numbers: risk by length against both bounds")
    sub.add("config", metavar="CONFIG")
    return parser


def add_model_arguments(sub: Parser) -> None:
    """Options of the model and its windows, shared by `explain` and `measure`."""
    sub.add("--far-states", choices=("contextual", "isolated"), default="contextual", help="far "
            "tokens keep their states in the long window, or are shown alone "
            "(%(default)s)")  # fmt: skip
    sub.add("--prefix", default="auto", metavar="WHAT", help="prefix of every window: auto (what "
            "the tokenizer puts before a text), bos, none, or a text (%(default)s)")  # fmt: skip
    sub.add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
            help="(the checkpoint's own)")  # fmt: skip
    sub.add("--device", default="auto", help="(a GPU if there is one)")
    sub.add("--batch-tokens", type=int, help="per forward (4096 on CPU, else 16384)")
