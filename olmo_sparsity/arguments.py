"""What each command of `olmo-sparsity` can be told.

Place in the flow: beneath cli.py, which carries the commands out. Imports nothing heavy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import NoReturn

from olmo_sparsity import __version__
from olmo_sparsity.errors import printable

# What `measure` takes where nothing is said, and with --quick.
THOROUGH = {"selectors": "add_one,divergence,random,nearest", "foreign": 3, "max_documents": None}
QUICK = {"selectors": "add_one_screened,random", "foreign": 1, "max_documents": 30}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"olmo-sparsity: {printable(message)} ({self.prog} --help says more)\n")


def build_parser(runs: Mapping[str, Callable[..., int]]) -> argparse.ArgumentParser:
    """`runs`: what carries out each command."""
    parser = Parser(
        prog="olmo-sparsity",
        description="Train models whose position IDs are explicit, then ask which far-away tokens "
        "their predictions depend on.",
        epilog="CONFIG is a YAML file; any of its keys can follow as --key.sub=value.",
    )
    parser.add_argument("--version", action="version", version=f"olmo-sparsity {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.set_defaults(run=runs[name], command=name)
        return sub

    sub = command("prepare", "turn a corpus into token shards")
    sub.add_argument("config", metavar="CONFIG")

    sub = command("train", "train a model on prepared shards (goes on where it stopped)")
    sub.add_argument("config", metavar="CONFIG")
    sub.add_argument(
        "--dry-run", action="store_true", help="show the resolved config and what the run will cost"
    )

    sub = command("sweep", "train every run of a grid, one after the other or on SLURM")
    sub.add_argument("config", metavar="GRID", help="a YAML file: configs × choices")
    how = sub.add_mutually_exclusive_group()
    how.add_argument("--list", action="store_true", help="say what is done, running, failed")
    how.add_argument("--only", type=int, metavar="N", help="train the N-th run, from 0, here")
    how.add_argument("--slurm", nargs="?", const="", metavar="FLAGS",
                     help="submit what is left as an array, with these sbatch flags")  # fmt: skip

    sub = command("losses", "print a run's held-out loss by position, and its induction")
    sub.add_argument("run_folder", metavar="RUN_FOLDER")
    sub.add_argument("--out", help="also draw them over steps: a .png, .pdf or .svg file")

    sub = command("export", "write a checkpoint as a folder that transformers loads by itself")
    sub.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT_FOLDER")
    sub.add_argument("out", metavar="OUT")

    sub = command("explain", "show which far tokens one prediction depends on")
    sub.add_argument(
        "model", metavar="MODEL", help="run, checkpoint, Hugging Face folder or hub name"
    )
    what = sub.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", metavar="FILE", help="one document; - is standard input")
    what.add_argument("--prompt", metavar="TEXT", help="@FILE reads it from a file")
    sub.add_argument("--at", action="append", metavar="WORDS", help="targets: words, /a regular "
                     "expression/, or tokens FIRST:END, without END; may be given several times "
                     "(default: the tokens that gain most)")  # fmt: skip
    sub.add_argument("--target", metavar="TEXT", help="the answer (default: what the model says)")
    sub.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="of an answer "
                     "that the model writes, no more than N (%(default)s)")  # fmt: skip
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
    sub.add_argument("--foreign", metavar="TEXT", help="where those come from: what --text of "
                     "`measure` reads (embedded)")  # fmt: skip
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--html", metavar="FILE", help="write a page to read in a browser")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("measure", "ask a model which far tokens its held-out losses depend on")
    sub.add_argument(
        "model", metavar="MODEL", help="run, checkpoint, Hugging Face folder or hub name"
    )
    sub.add_argument("--out", required=True, help="folder of the results; a second start resumes")
    sub.add_argument("--text", help="a file or glob of .txt, .md, .jsonl, .csv, .tsv or .parquet, "
                     "a folder of .txt files, a saved data set, a prepared folder, a name on the "
                     "hub, - for standard input, … (all in docs/train.md; default: the run's own "
                     "held-out documents)")  # fmt: skip
    sub.add_argument("--field", default="text", help="of a record: which holds the text (text)")
    sub.add_argument("--split-at", choices=("whole", "blank-lines"), default="whole",
                     help="a file of plain text is one document, or each part between blank lines "
                     "(%(default)s)")  # fmt: skip
    sub.add_argument(
        "--long", type=int, default=128, help="tokens of the long window (%(default)s)"
    )
    sub.add_argument("--short", type=int, default=32, help="tokens of the short one (%(default)s)")
    sub.add_argument(
        "--stride",
        type=int,
        default=1,
        help="targets that share windows; losses of N cost an N-th (%(default)s)",
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
    sub.add_argument("--sets", default="gap,kl,recurs,new", help="of targets: by their gap, by how "
                     "much the prediction changes, by the text alone (%(default)s); `gap` costs a "
                     "quarter")  # fmt: skip
    sub.add_argument("--max-targets", type=int, metavar="N", help="of each set, in a document, N "
                     "drawn at random (all)")  # fmt: skip
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
    sub.add_argument(
        "--quick", action="store_true", help=f"a first look at the beginnings of documents: {quick}"
    )
    how = sub.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="show what it will cost")
    how.add_argument("--partial", action="store_true", help="measure nothing: sum up the documents "
                     "that are finished, of all shards, in OUT/partial")  # fmt: skip

    sub = command("figure", "draw Figure 2 from measurements, or accuracy by length from tasks")
    sub.add_argument("results", metavar="RESULTS", nargs="+")
    sub.add_argument("--out", required=True, help="a .png, .pdf or .svg file")
    sub.add_argument("--labels", help="comma-separated names of the models")

    sub = command("ladder", "compare many models: excess against size and against induction")
    sub.add_argument("results", metavar="RESULTS", nargs="+")
    sub.add_argument("--out", required=True, help="a .png, .pdf or .svg file; its numbers "
                     "and what was run go beside it as .csv and .meta.json")  # fmt: skip
    sub.add_argument("--selector", default="add_one", help="(%(default)s)")
    sub.add_argument("--units", default="tokens", help="(%(default)s)")
    sub.add_argument("--k", type=int, default=8, help="(%(default)s)")

    sub = command("report", "write a measurement as one page to read in a browser")
    sub.add_argument("results", metavar="RESULTS")
    sub.add_argument("--out", required=True, help="an .html file")
    sub.add_argument("--max-documents", type=int)

    sub = command("task", "train and test a synthetic task under every position scheme")
    sub.add_argument("config", metavar="CONFIG")
    sub.add_argument("--shard", default="0/1", help="i/n: the i-th of n parts (from 0)")

    sub = command("theory", "the theorems in numbers: risk by length against both bounds")
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
