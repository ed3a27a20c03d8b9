"""Compute our own model, which has the weights and the numbers of the fork's OLMo.

    model.py           `PositionedOLMo`: token IDs and position IDs become hidden states and logits
      block.py         one layer: norms, attention, feed-forward network
      layers.py        the arithmetic of a layer: rotation, RMSNorm, ALiBi, scaled queries
    inference.py       the same numbers without gradients, in less time: most of a measurement
      first_layer.py   the first layer, in which similar rows repeat each other
      layer_steps.py   any layer in steps; the last one computes wanted tokens only
      projections.py   queries, keys and values of a layer
      state_buffer.py  keys and values of a text that is computed in chunks

`build_model` (models/build.py) makes the model for training, `load_model` for a measurement. What
computes with it sees the interface `LanguageModel`.
"""
