"""Measure a model in training.

    evaluate.py         held-out losses by position, in each corpus, and on repeated passages
      position_sums.py  sums of losses by position, from which all of these are made
    lm_eval_tasks.py    tasks of lm_eval, if `evaluation.lm_eval` names any

after_step/evaluation.py calls them, and writes what they return to metrics.jsonl.
"""
