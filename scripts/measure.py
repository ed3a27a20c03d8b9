"""Measuring for launchers that want a script: `python scripts/measure.py MODEL --out DIR …`."""

import sys

from olmo_sparsity.command.cli import entry

if __name__ == "__main__":
    entry(["measure", *sys.argv[1:]])
