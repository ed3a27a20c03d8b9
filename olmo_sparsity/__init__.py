"""Train language models with explicit position IDs, and measure which far tokens they depend on."""

__version__ = "0.1.0"
