"""Read text of any form, and cut it into documents, blocks of targets, units and sentences.

From what a user names to documents:

    inputs.py            `open_documents`, the entry
      forms.py           the corpus that a text names; rows in memory
      corpus.py          a corpus as a stream of records; which documents are held out
        corpus_readers.py   the records of each of its inputs
        input_files.py   the files that a path names
        record_files.py  files → lines, rows or whole texts
        python_sources.py   the Python files of this machine
      records.py         a line or row → a record; tally.py counts bad ones
      tokenized.py       records → documents, each content once
      split.py           long documents → parts
      runs.py            what a training package must provide, for held-out text
    vocabulary.py        identifies a tokenizer

From documents to what is measured:

    documents.py         `Document`: token IDs, with their texts and units
      token_texts.py     the text of each token
      sentences.py       where sentences begin; text_blocks.py: paragraphs and Markdown;
                         abbreviations.py: dots that end no sentence
    windows.py           documents → blocks of targets with their windows
    units.py             distant tokens that are ranked as one
    distant_text.py      distant tokens, by their places in a document
    controls.py          unrelated texts, which replace distant tokens
"""
