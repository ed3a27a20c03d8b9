"""Use causal LMs of transformers: wrapped for position IDs with gaps, read from folders, exchanged.

Run a model (called through `LanguageModel`, by measurements, `attribute` and training):

    model.py               `HuggingFaceLM`, the wrapper
      model_parts.py       its embedding, layers and other parts, which families name differently
      compatibility.py     the trial that a model must pass first
        trial_with_gap.py  its checks of position IDs with a gap, and of kept states
        row_independence.py  its check that the losses of a row are its own
        tried_model.py     what all its checks have in common
        known_fits.py      what the last trial of each model has shown
      logit_map.py         scaled and capped logits
      position_limits.py   how many positions its config supports, and its attention windows
      masks.py             attention masks by position IDs
      caches.py            kept states of distant tokens, as caches of transformers
      recomputing.py       layers that a backward pass computes again, to save memory
      layer_views.py       what each layer sees of distant tokens whose states rows share
      own_attention.py     our attention function, which its layers call (attention_names.py)
    whole_prompts.py       models without position IDs, which only score whole prompts

Read a folder (called by models/load.py):

    folder.py              the model and its adapter
    weight_files.py        checks of the files, before transformers reads them

Translate between our config and a family's (called by training, by its estimate and by `export`):

    families.py            the table of families; our config → theirs
    config_of_weights.py   their config → ours
    family_weights.py      the names of weights, in both directions
    exchange.py            `export` and `init_from`
    computation.py         do two configs compute the same?
"""
