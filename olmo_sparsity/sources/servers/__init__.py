"""Compute log-probabilities of prompts on servers behind URLs, or with llama.cpp in this process.

    pool.py         `Servers`: shares prompts among servers of one model
    checks.py       proves that a server's numbers can be used, before any is
    server.py       `Server`: one server, whose every reply is checked
      server_tokens.py       tokens as a server writes them
      log_probabilities.py   numbers as a server writes them
    connection.py   HTTP requests, sent again where that may help
    probe.py        the text by whose numbers a model is recognized
    threads.py      several calls at once
    llama.py        `LlamaCpp`: the same for a GGUF file

open.py makes `Servers` or `LlamaCpp` of a model's name; verdicts/trials.py has them score prompts.
dialects.py, one folder above because others extend it, says how each kind of server is asked.
"""
