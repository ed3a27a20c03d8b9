"""olmo-sparsity: train models whose position IDs are explicit, then ask what they depend on."""

__version__ = "0.1.0"
