"""Take training steps: forward, backward, sum of gradients, update.

    choose.py                 the engine of a run, by `engine.name` and the number of processes
      engine.py               `Engine`: one process, and what all engines have in common
      ddp.py                  `DDPEngine`: the whole model on each process
      fsdp.py                 `FSDPEngine`: weights divided by PyTorch's `fully_shard`
      deepspeed.py            `ZeroEngine`: ZeRO-1, 2 and 3
        deepspeed_settings.py   its JSON file, with what our config determines
        deepspeed_shards.py     where it keeps the fp32 weights and moments of a parameter
        deepspeed_import.py     the library, of the right version

What they share:

    losses.py                 a module whose forward returns the losses of a batch
    model_parts.py            the layers of a model, by which it is compiled and divided
    compilation.py            `torch.compile`, of the model or of each layer
    deferred.py               a model without memory, whose weights are made one by one

Read engine.py first: the others override where weights lie and how gradients are summed.
"""
