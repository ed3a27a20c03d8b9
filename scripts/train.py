"""Training for launchers that want a script: `python scripts/train.py CONFIG [--key=value …]`."""

import sys

from olmo_sparsity.command.cli import entry

if __name__ == "__main__":
    # The deepspeed launcher adds --local_rank=N to what it also says in LOCAL_RANK.
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]
    entry(["train", *words])
