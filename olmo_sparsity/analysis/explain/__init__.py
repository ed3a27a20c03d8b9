"""Explain predictions of one text: answer.py answers a request, explanation.py is what it returns.

request.py          a call → ExplainRequest, with checked options
prompt.py           text or prompt → token IDs; with chat_template.py and generation.py
prepared.py         token IDs → windows, named targets, scorer
target_choice.py    named targets, or those with the largest gaps (largest_gaps.py)
answer.py           all of these → evaluation.py → Explanation
explained_text.py   what was computed, as plain data; page.py and stored_form.py read it
explanation.py      the same with the methods that users call
checking.py         the same targets with unrelated texts (unrelated.py); check.py is the result
"""
