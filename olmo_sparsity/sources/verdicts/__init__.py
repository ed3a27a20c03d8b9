"""Decide which sources a statement relies on, from losses with decoys in place of sources.

    decoys.py         unrelated texts, as long as each source
    trials.py         prompts with decoys → the losses of statements, as many as verdicts need
    losses.py         these losses, and what a source *gives* and what is *lost* without it
    effect_tests.py   a p-value of each effect
    evidence.py       which effects are beyond chance
    verdict.py        "one", "either", "both", "none" or "undecided", with the sources

run_request.py draws decoys and runs the trials; attribution.py asks for the verdicts. The last four
need NumPy only.
"""
