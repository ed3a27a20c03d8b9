"""`python -m olmo_sparsity` is the command `olmo-sparsity`."""

from olmo_sparsity.command.cli import entry

if __name__ == "__main__":
    entry()
