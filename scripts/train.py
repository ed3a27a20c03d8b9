"""Training for launchers that want a script: `python scripts/train.py CONFIG [--key=value …]`."""

import sys

from olmo_sparsity.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
