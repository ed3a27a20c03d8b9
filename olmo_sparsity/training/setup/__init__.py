"""Check a run and complete its config, before a model is built. Called by start.py and dry_run.py.

    inputs.py              the complete config, and what reads the text: batches, evaluations
      resolve.py           what hardware and text determine: micro-batches, precision, vocabulary
      corpus_weights.py    by which weights several corpora are mixed, in each stretch of batches
    epochs.py              how often the run reads its text; rejects too often
    preflight.py           checks GPUs, settings and disks of all processes together

A run goes through inputs.py. A dry run, which may have no text yet, calls resolve.py and epochs.py.
"""
