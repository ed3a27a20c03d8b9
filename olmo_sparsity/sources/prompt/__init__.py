"""Encode a prompt and its answer, and note where sources and statements are.

    texts.py          sources and question → texts, through a chat template if there is one
    encode.py         these texts → a `SourcePrompt` (pieces.py): tokens, without an answer
    answer_tokens.py  an answer, passed or generated → its tokens and its reasoning
    layout.py         both → a `Layout`: all tokens, and where sources and statements are

run_request.py calls the last three in this order. The sources come from reading/, and
verdicts/trials.py evaluates the layout.
"""
