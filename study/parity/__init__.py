"""Judge the paper's experiment on sparse parity by the claims U1 to U23.

`study/records/thresholds.md` registers the claims and their rules; the modules apply them to the
trials that `make -f study/Makefile parity` has stored in study/results/parity:

    models.py         read the trained models of a folder; what is measured of one model
    verdicts/verdict.py       rules over seeds, and verdicts over several cases
    table.py          U1 to U7: the paper's table
    reach.py          U8 to U14: what decides how far a model carries
    family.py         U15 to U21: which departure from the paper's model family matters
    program_order.py  U22 and U23: variable assignment in program order

While trials are missing, a verdict that needs them is "unfinished".
"""
