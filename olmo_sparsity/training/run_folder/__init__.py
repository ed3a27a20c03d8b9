"""Read and write the small files of a run folder. metrics.jsonl and checkpoints have own packages.

    folder.py            config.yaml: is it the same run, or a branch of it?
    environment.py       environment.json: command, host and versions of each start
    attempts.py          attempts.json: starts that died without getting on
    gpu_hours.py         gpu_hours.json: GPU-hours of all starts, and their limit
    skipped_batches.py   skipped_batches.json: batches that `training.on_nan=skip` leaves out
    trainer_state.py     trainer.json of a checkpoint: step, tokens, and more that a run needs

The first process writes them for all.
"""
