"""Measure many documents: planning.py settles what is measured, measurement.py runs it.

request.py             the options of a call, checked together
planning.py            model, text and settings → plan.py, which computes one document at a time
  enough_text.py       whether the text has enough documents and units
  reading.py           reads model and text; fitting.py fits settings to both
  identity.py          whether two calls are one measurement
  reused_settings.py   settings of another measurement
  reuse.py             its losses, and its targets (reused_targets.py)
    matching.py        finds its targets and units in other tokens, by token_alignment.py
targets.py             chooses targets from losses, or from the text
fixed_targets.py       targets that are fixed before: another measurement's, or named ones
  named_targets.py     those that a user names, which at.py finds
  choices.py           units that another measurement ranked
target_tables.py       reads tables of targets
recovery.py            puts each distant text of a document before its targets
  evaluated_text.py    one such text, with the targets of a block
  text_evaluation.py   computes the losses with k of its units
    ranking.py         ranks these units, by each selector
    agreement.py       how well rankings and unrelated texts agree with losses
  recovery_tables.py   the rows
measurement.py         runs all documents, in one process or several (sharing.py)
  parts.py             stores what is finished, so that a measurement resumes
    stored_part.py     one part; unfinished.py: pieces of a document that takes long
  summing_up.py        the summary and the final tables
estimate.py            the cost, before anything runs
  trial.py             the model's speed, and losses of a few blocks
  expected_targets.py  how many targets there will be
  counted_cost.py      token-forwards; target_costs.py counts those of targets
  cost_report.py       the printed lines; machine.py: the speed of other machines
"""
