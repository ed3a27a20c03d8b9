"""Write what a run measures, and show it.

metrics.jsonl has a line for each step, and one for each evaluation:

    metrics.py         writes the lines; appended_file.py: on a disk that may be away for a while
    writers.py         hands each line to TensorBoard and W&B, too
    read.py            reads them
    loss_rows.py       the losses of an evaluation: a row for each range of positions

For the commands `losses` and `figure`:

    loss_table.py      held-out losses of a run, as text
    curves.py          curves of several runs, as a figure
"""
