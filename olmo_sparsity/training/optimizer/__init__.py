"""Update weights: AdamW and Muon, with the learning rate of each step.

    optim.py            builds the optimizer: which weights it decays, and which take Muon
    muon.py             PyTorch's Muon, in the precision of the run, also for divided matrices
    learning_rate.py    the schedule: warm-up, decay, cooldown
    jump_detector.py    skips the update of a step whose loss or gradient norm jumps
    moments.py          the optimizer's state on disk, which any engine can read

Engines build the optimizer once. steps.py computes the learning rate of each step and hands it to
them.
"""
