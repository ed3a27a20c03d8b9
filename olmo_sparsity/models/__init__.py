"""Load, build and run language models whose position IDs may have gaps.

    load.py                  `load_model`, for users: a name or a folder becomes a `LoadedModel`
      find.py                the folder of what a user typed
      loaded.py              the model with its tokenizer, its limits and its identity
      pretrained_tokenizer.py   the tokenizer, from files or objects of any library
    checkpoint_files.py      files of weights and checkpoint folders of ours
    build.py                 `build_model`, for training: a new model from a config
    language_model.py        the interface of both kinds of models that can be run
      olmo/                  ours, compatible with the fork's OLMo
      huggingface/           causal LMs of transformers
    prompts.py               the interface of models that only score whole prompts
    identity/                notices when a model in memory has changed
    gguf/                    converts GGUF files to folders that `load_model` reads

What both kinds of models compute with, as functions of tensors:

    attention.py             attention of rows, by the fastest kernel
      document_attention.py  within the documents of a row (on CPU: cpu_document_attention.py)
      distant_attention.py   to distant tokens, whose states rows share
      distant_states.py      these states: keys and values of distant tokens
    rope.py                  angles of rotary position embeddings
    losses.py                losses for evaluation; training_loss.py: for a training step
    prefix_tree.py           states of beginnings that several prompts share, computed once

The name of a tensor ends in a letter for each of its dimensions. They mean the same in all modules
of this folder:

    B   rows of a batch                         D   width of the model
    L   tokens of a row                         H   heads (of queries)
    S   keys that a token may attend to         G   heads of keys and values
    F   distant tokens                          K   width of a head
    W   wanted tokens, the last of each row     R   pairs of rotated coordinates of a head
    N   tokens of all rows together             V   vocabulary
    C   tokens of a chunk                       1   a dimension of size 1

A newcomer may read language_model.py, olmo/block.py and attention.py, in this order.
"""
