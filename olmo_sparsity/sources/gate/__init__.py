"""Answer the questions of a file, and check the verdicts on the answers.

    suite.py             `olmo_sparsity.check`, the entry of all
    questions_file.py    a line of the file → a request
    questions.py         requests → answers in a folder (answers.py), with an index (index_page.py)
    gate.py              answers → checks: against the field `expect` (expectations.py), and against
                         an earlier run (baseline.py)
    report.py, junit.py  checks → text, JSON and JUnit XML

baseline.py compares two runs with matching.py (which questions and statements are the same?),
renamed_sources.py (which sources are?) and statement_changes.py (is a verdict worse?), after
same_model.py has checked that both are of one model. Continuous integration runs the gate; the
command `attribute --questions` calls suite.py with `--gate`, and questions.py without it.
"""
