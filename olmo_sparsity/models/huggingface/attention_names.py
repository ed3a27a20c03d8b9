"""Name the attention functions that layers of transformers may call.

A config says by a name which function the layers call. Ours has two names in the registry of
transformers (own_attention.py), one for each function that it can replace:

    in a config     while ours is set          where ours has no task, it calls
    "sdpa"          "olmo_sparsity"            "sdpa"
    "eager"         "olmo_sparsity_eager"      the eager attention of the family

Names are a module of their own because importing transformers takes two seconds.
"""

from __future__ import annotations

OWN_SDPA = "olmo_sparsity"
"""The name of our attention in place of "sdpa". Training sets it permanently."""

OWN_EAGER = "olmo_sparsity_eager"

REPLACED_BY_OWN = {OWN_SDPA: "sdpa", OWN_EAGER: "eager"}
"""The function of transformers that each of our names replaces."""

OWN_IN_PLACE_OF = {replaced: own for own, replaced in REPLACED_BY_OWN.items()}
"""Our name for each function that can be replaced."""

REPLACEABLE = frozenset({*REPLACED_BY_OWN, *OWN_IN_PLACE_OF})
"""Names in a config whose layers can call our attention: those that it replaces, and its own. No
other one, such as flash attention, is replaced."""

FUSED = frozenset({"sdpa", OWN_SDPA})
"""Names of attention by PyTorch's fused kernels, which is causal by itself without a mask, and
keeps no scores for a backward pass."""
