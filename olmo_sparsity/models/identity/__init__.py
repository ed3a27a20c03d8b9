"""Identify a model, and notice when it has changed between two calls.

    use.py                 `in_use`: one thread at a time, in evaluation mode; a change is noticed
      known_identities.py  the identity of each model at its last use
      model_identity.py    what determines the logits of a model in memory
        checksums.py       of its tensors and plain values
        replaced_code.py   of functions that somebody put in place of its methods
    file_fingerprint.py    a hash of the files of a model

Every public call that computes with a model does it inside `in_use`. Measurements store the
identity, so that another model cannot continue their results.
"""
