"""Convert GGUF files, the format of llama.cpp, to folders of transformers in the cache.

    format.py          `convert_gguf`, the entry: one file in, the path of a folder out
      header.py        the entries and tensors of a file
      config.py        checks of the entries; what transformers does not read of them
      weights.py       the weights, as a model of transformers
      tokenizer.py     the tokenizer: how text is split, what precedes it
      vocabulary.py    checks of its tokens and merges
    origin.py          the file that a folder of the cache was converted from
    smollm2.py         finds the GGUF file of the model `smollm2`

models/find.py calls the converter by its entry point in the group `olmo_sparsity.formats`, when
`load_model` is given such a file. sources/open.py reads its tokenizer, for a file that llama.cpp
computes with.
"""
