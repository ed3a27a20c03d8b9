"""Estimate what a run takes before it starts: parameters, FLOPs, memory, disk, hours and price.

    config, Hardware ─> cost_of_run ─> RunCost: micro-batches that fit, memory, seconds of a step
                     ─> estimate: the lines of `train --dry-run`

Called by dry_run.py, by `experiment --dry-run`, and by setup/resolve.py, which chooses
micro-batches.

    hardware.py             the processes of a run, each with a device
    meta_model.py           the model without memory, for its parameters and FLOPs

    state_memory.py         bytes that each engine holds: weights, gradients, optimizer, buffers
    activation_memory.py    bytes of activations at the peak of a step
      kept_bytes.py         bytes that one layer keeps for its backward pass
    device_memory.py        both for one run: its peak on a device, and micro-batches that fit
    host.py                 main memory, disk, and the time of a save

    compute.py              FLOPs of a token, and the share of a GPU's peak that a run reaches
    network.py              bytes that collectives send, and the speed at which they do
    evaluations.py          seconds and memory of an evaluation
    pauses.py               time outside of steps: evaluations and saves
    failures.py             time that failures add

    cost.py                 all of them for one run with one engine: memory, hours, GPU-hours
    cheaper.py              settings with which the run would take less time
    fit.py                  rejects a run that does not fit, and names an engine that does
    report.py               the lines of `train --dry-run`

Memory is computed by formulas that were compared with measured peaks. Time is FLOPs divided by a
measured share of the vendor's peak, and bytes divided by the speed of the network.
"""
