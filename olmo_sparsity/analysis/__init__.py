"""Measure which distant tokens the predictions of a language model depend on.

    api.py           the functions `explain` and `measure`, with their documentation
    options.py       their options; request.py: one call; shard.py: the documents of one process;
                     interpretation.py: what "only k distant tokens" can mean
    measurement/     many documents: targets → units → selectors → recovery, in parts that resume
    explain/         one text: the units of a few targets, checked against unrelated texts
    selectors/       rules that rank distant units
    scoring/         losses of chosen tokens, in batches; the only code that runs the model
    results/         tables of a measurement, statistics over them, a summary for a terminal
    report/          Figure 2 and HTML pages
    callbacks/       losses by place while another trainer trains

A newcomer may read api.py, measurement/plan.py, measurement/text_evaluation.py and
selectors/add_one.py, in this order. docs/development.md follows documents through `measure`.
"""
