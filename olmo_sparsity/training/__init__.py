"""Train a model: one process or many, from a config to checkpoints, and again after a kill.

    loop.py ─> start.py ─> steps.py ─> engine.py, for each step

    loop.py                   `train`: start, take steps, export; start again after a skipped batch
    start.py                  builds all that the steps need
      resolve.py              what hardware and text determine: corpus_weights.py, device.py
      run_folder.py           is it the same run? environment.py, attempts.py, skipped_batches.py
      preflight.py            checks GPUs, settings, disks
      resume.py               the checkpoint to go on from
      deferred.py             a model whose weights are made one by one
      restore.py              fills model and engine; trainer_state.py
    steps.py                  takes steps; logs, evaluates and saves when that is due
      step_log.py             numbers of a step: step_clock.py, step_profile.py
      step_evaluation.py      evaluate.py: position_sums.py, loss_rows.py; lm_eval_tasks.py
      step_save.py            save_steps.py: when to save; replicas.py: are all copies equal?
      metrics.py              metrics.jsonl: metrics_file.py, appended_file.py, metric_writers.py
      alarms.py               a loss that rises, a slow process
    choose_engine.py          the engine of a run
      engine.py               one process, and DDP: losses.py, compilation.py, model_parts.py
      fsdp_engine.py          `fully_shard`: sharded_muon.py
      deepspeed_engine.py     ZeRO: deepspeed_settings.py
      optim.py                AdamW and Muon: learning_rate.py, jump_detector.py
      moments.py              their state in checkpoints
    checkpoint.py             writes checkpoints in a thread; checkpoint_save.py: one of them
    distributed.py            messages and common errors of the processes of a run
      process_group.py        how they meet: interface.py; all_reduce.py: how fast is their network?
    watchdog.py               ends a run that hangs: stacks.py
    stop_signals.py           a signal asks to save and stop; gpu_hours.py: so does a limit

    dry_run.py                what a run would do and cost: epochs.py
      estimate/               hours, memory, disk, price: activations.py
    loss_table.py, curves.py  what a run has logged, as text and as a figure
    runs.py                   opens runs for measurements

A newcomer may read loop.py, steps.py and engine.py, in this order. docs/development.md follows a
batch and a config through these modules.
"""
