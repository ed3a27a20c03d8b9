"""Fill folders with token shards. `prepare` of data/prepare.py is the entry.

    folder.py              fills one folder, or resumes filling it
    together.py            several processes share the files of a corpus: a folder each, then joined
    split_checks.py        is there training text and held-out text?

A folder is filled in this order:

    document_batches.py    documents → batches for the tokenizer, and where a shard ends
    encode_shards.py       batches → tokens → shards, each added to the manifest
    shard_writer.py        the files of one split of a shard, all of them or none
"""
