"""Prepare text as token shards, and make training batches of them.

`prepare`, once for a text:

    prepare.py                one corpus or several, one process or several
      preparation/            fills a folder: documents → batches → tokens → shards
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
    background.py             a thread that prepares the next items; `prepare` uses it, too

A newcomer may read shards.py, batches.py and positions.py, in this order.
"""
