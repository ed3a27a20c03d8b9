"""The second product: which source does each statement of an answer rely on?

A user calls `olmo_sparsity.attribute` for one answer, or `olmo_sparsity.check` for a file of them.
A call of `attribute` goes through these modules, in this order:

    attribute.py     the signature, and what its options mean
    request.py       an `AttributeRequest`: the options of one call, checked (options.py has them)
    run_request.py   a request with its model → losses
    attribution.py   losses → verdicts: the `Attribution` that the user gets

They call the subfolders, each of which says in its `__init__.py` what it holds:

    reading/    what a user passes → sources, question, answer
    prompt/     sources, question, answer → tokens
    verdicts/   tokens → losses with decoys in place of sources → verdicts
    report/     verdicts → tables, words and a page
    gate/       many questions in a file: answers, and whether they are as expected
    servers/    models that compute on a server, or in llama.cpp

cost.py counts what a request would cost. open.py opens a model that computes elsewhere. dialects.py
is where support for another kind of server is added (docs/extend.md).
"""
