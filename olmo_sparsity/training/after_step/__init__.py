"""Do what may be due after a step. steps.py calls log.py, evaluation.py and save.py, in this order.

    log.py           the numbers of a step, for metrics.jsonl
      clock.py       speed, and time that steps have waited
      alarms.py      lines for a loss that rises, or a slow process
    evaluation.py    evaluates, and writes the line of it
    save.py          copies weights and moments, and hands them to the thread that writes them
    profile.py       a trace of some steps (`train --profile`)

These three get the `PreparedRun` of prepared_run.py. steps.py decides when each is due.
"""
