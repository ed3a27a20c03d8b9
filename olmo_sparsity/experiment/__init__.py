"""Run an experiment that one file describes: train models, measure them, draw one figure.

    file.py             reads the file (sections.py declares it)
      grid.py           all combinations of what it varies
      models.py         the models that are trained
      measurements.py   what is measured of them, as measure_section.py reads it
    jobs.py             lists the jobs of both
      job.py            one job, and how it stands: training_job.py, measurement_job.py
      here.py           runs them on this machine, by child_processes.py
      slurm.py          submits and cancels them, with the user's flags (slurm_flags.py)
        slurm_queue.py  which are in the queue
      price.py          estimates their cost: price_training.py, price_measurement.py
        measured_text.py    the documents that would be measured, or others of C4's lengths
      figure.py         draws what is finished
      comparisons.py    pairs what is compared
      agreement_of_seeds.py   says in which signs its seeds agree

Place in the flow: above training and analysis, which do not know each other; below the command.
"""
