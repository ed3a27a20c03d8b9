"""Prepare text as token shards, and make training batches of them.

`prepare`, once for a text:

    prepare.py                one corpus or several, one process or several
      prepare_folder.py       fills one folder, or resumes filling it
      prepare_together.py     several processes share the files of a corpus
      split_checks.py         is there training text and held-out text?
    document_batches.py       documents → batches for the tokenizer, and where a shard ends
    encode_shards.py          batches → shards: background.py, shard_writer.py
    tokenizer.py              loads or trains the tokenizer
    shard_manifest.py         which shards a folder has, and how they were made

A run, in each step:

    shards.py                 opens a prepared folder; token_files.py: are its files intact?
    sequences.py              shards → sequences of equal length
    mixture.py                in which order a run reads them; order.py: within an epoch
    batches.py                the batch of a step, from its number alone
      positions.py            its position IDs: contiguous, PoSE, randomized
      transform.py            sequences that a function of the user changes
    heldout.py                batches of held-out text, for evaluations

A newcomer may read shards.py, batches.py and positions.py, in this order.
"""
