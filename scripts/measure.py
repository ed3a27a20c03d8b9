"""Measuring for launchers that want a script: `python scripts/measure.py MODEL --out DIR …`."""

import sys

from olmo_sparsity.cli import main

if __name__ == "__main__":
    sys.exit(main(["measure", *sys.argv[1:]]))
