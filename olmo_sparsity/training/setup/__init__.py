"""Check a run and fill in its config, before a model is built. Called by start.py and dry_run.py.

resolve.py           what hardware and tokenizer determine: micro-batches, precision, vocabulary
preflight.py         checks GPUs, settings and disks of all processes
epochs.py            how often the run reads its text; rejects too often
corpus_weights.py    by which weights several corpora are mixed, in each stretch of batches
"""
