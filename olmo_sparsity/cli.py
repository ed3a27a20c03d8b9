"""The command `olmo-sparsity`. Nothing heavy is imported before a command is chosen.

Place in the flow: the thin outside. Each command parses its arguments and calls one function.
Exit codes: 0 done; 2 the input must be mended (one line says how); 75 stopped by a signal after
saving, the same command goes on; anything else is a bug of ours, with its traceback.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable

from olmo_sparsity import __version__
from olmo_sparsity.errors import UserError

EXIT_BAD_INPUT = 2


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    # Only commands that read a config take further `--key.sub=value` words.
    strange = [word for word in rest if "config" not in options or not word.startswith("--")]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    options.overrides = rest
    try:
        return options.run(options)
    except UserError as error:
        print(f"olmo-sparsity: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        print(f"olmo-sparsity: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_BAD_INPUT


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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
        sub.set_defaults(run=run)
        return sub

    sub = command("prepare", prepare, "turn a corpus into token shards")
    sub.add_argument("config", metavar="CONFIG")

    sub = command("train", train, "train a model on prepared shards (goes on where it stopped)")
    sub.add_argument("config", metavar="CONFIG")
    sub.add_argument(
        "--dry-run", action="store_true", help="show the resolved config and what the run will cost"
    )

    sub = command("losses", losses, "print a run's held-out loss by position")
    sub.add_argument("run_folder", metavar="RUN_FOLDER")

    sub = command(
        "export", export, "write a checkpoint as a folder that transformers loads by itself"
    )
    sub.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT_FOLDER")
    sub.add_argument("out", metavar="OUT")
    return parser


def prepare(options: argparse.Namespace) -> int:
    from olmo_sparsity.config_file import load_config
    from olmo_sparsity.data import tokens

    tokens.prepare(load_config(options.config, options.overrides).data)
    return 0


def train(options: argparse.Namespace) -> int:
    from olmo_sparsity.config_file import load_config
    from olmo_sparsity.training import loop

    config = load_config(options.config, options.overrides)
    if options.dry_run:
        loop.dry_run(config)
        return 0
    return int(loop.train(config))


def losses(options: argparse.Namespace) -> int:
    from olmo_sparsity.training import run_folder

    print(run_folder.loss_table(options.run_folder))
    return 0


def export(options: argparse.Namespace) -> int:
    from pathlib import Path

    from olmo_sparsity.model import exchange

    name = exchange.export(Path(options.checkpoint), Path(options.out))
    print(f"{options.out}: {name}; transformers.AutoModelForCausalLM.from_pretrained reads it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
