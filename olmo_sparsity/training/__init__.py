"""Train a model: one process or many, from a config to checkpoints, and again after a kill.

The path through a run, which a newcomer may read in this order:

    loop.py ─> start.py ─> steps.py ─> engines/engine.py and after_step/, for each step

    loop.py          `train`: start, take steps, export; start again after a skipped batch
    start.py         builds all that the steps need, a `PreparedRun` (prepared_run.py)
      restore.py     fills model and engine from a checkpoint, or as a new run begins
    steps.py         takes steps, and does after each what is due

What these call. A folder imports only folders above it, and start.py imports none of
after_step/:

    processes/       how processes meet, talk, stop together, and notice that one hangs
    optimizer/       AdamW and Muon, the learning rate, the moments on disk
    engines/         a training step: one process, DDP, FSDP, DeepSpeed
    run_folder/      small files of a run: which run it is, its starts, its state
    metrics/         metrics.jsonl, written and read
    checkpoints/     when to save, how to save, and from which checkpoint to go on
    evaluation/      held-out losses by position, and tasks of lm_eval
    estimate/        hours, memory, disk and price of a run, before it starts
    setup/           what hardware and text determine, and checks before the model is built
    after_step/      the log of a step, its evaluation, its checkpoint

Two other ways in:

    dry_run.py       `train --dry-run`: what a run would do and cost, with setup/ and estimate/
    runs.py          opens finished runs for measurements (`load_model`, `open_documents`)

docs/development.md follows a batch and a config through these modules.
"""
