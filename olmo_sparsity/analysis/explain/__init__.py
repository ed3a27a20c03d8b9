"""Explain predictions of one text: request.py answers a call, explanation.py is what it returns.

prompt/pieces.py           text or prompt → token IDs; with chat_template.py and generation.py
prepared.py         token IDs → windows, targets, scorer
request.py          a call → targets → evaluation.py → Explanation
explained_text.py   what was computed, as plain data; page.py and stored_form.py read it
explanation.py      the same with the methods that users call
check.py            the same targets with unrelated texts (unrelated.py)
"""
