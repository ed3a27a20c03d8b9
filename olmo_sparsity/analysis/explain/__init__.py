"""Explain predictions of one text: request.py answers a call, explanation.py is what it returns."""
