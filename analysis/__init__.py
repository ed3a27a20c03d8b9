"""Measure which far-away tokens the predictions of a trained language model depend on.

Installed, and imported, as olmo_sparsity.analysis (a link in that folder). Two names for one module
would make two of each class.
"""

if __name__ == "analysis":
    raise ImportError(
        "this folder is the package olmo_sparsity.analysis; from olmo_sparsity import explain"
    )
