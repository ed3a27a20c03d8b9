"""Measure many documents: planning.py settles what is measured, measurement.py runs it.

request.py          the options of a call, checked together
planning.py         model, text and settings → plan.py, which computes one document at a time
  reading.py        reads model and text; fitting.py fits settings to both
  reuse.py          losses, targets and settings of another measurement
    matching.py     finds its targets and units in other tokens
    choices.py      units that it ranked
targets.py          which tokens are evaluated
recovery.py         ranks distant units of one document's targets, and evaluates them
  agreement.py      how well rankings and unrelated texts agree with losses
parts.py            stores what is finished, so that a measurement resumes
measurement.py      runs all documents, in one process or several
estimate.py         the cost, before anything runs; trial.py and target_costs.py
"""
