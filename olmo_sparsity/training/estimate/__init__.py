"""Estimate what a run takes before it starts: parameters, FLOPs, memory, disk, hours and price.

    hardware.py         the processes of a run, each with a device
    memory_formulas.py  bytes of activations, and of what each engine holds
    device_memory.py    these formulas for one run: its peak on a device, and micro-batches that fit
    host.py             main memory and disk
    evaluations.py      seconds and memory of an evaluation
    pauses.py           time outside of steps: evaluations and saves
    compute.py          FLOPs of a token, and the share of a GPU's peak that a run reaches
    network.py          bytes that collectives send, and the speed at which they do
    cost.py             all of them for one run with one engine: memory, hours, GPU-hours
    cheaper.py          settings with which the run would take less time
    fit.py              rejects a run that does not fit, and names an engine that does
    report.py           the lines of `train --dry-run`

    config, Hardware ─> fitting_micro_batch_size ─> cost_with: memory of a device, seconds of a step
                                                 ─> estimate: the lines of `train --dry-run`

Memory is computed by formulas that were compared with measured peaks. Time is FLOPs divided by a
measured share of the vendor's peak, and bytes divided by the speed of the network.
"""
