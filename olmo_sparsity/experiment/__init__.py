"""Run an experiment that one file describes: train models, measure them, draw one figure.

Place in the flow: above training and analysis, which do not know each other; below the command.
file.py reads the file, jobs.py lists its jobs and their states, here.py runs them on this machine,
slurm.py submits them, price.py estimates their cost, figure.py draws what is there."""
