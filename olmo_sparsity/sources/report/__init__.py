"""Show an attribution: as tables, in words, with citations, as an assertion, as a page.

    tables.py, statement_rows.py   the tables of effects, sources and statements
    table_rows.py                  the columns of their rows, for the modules below
    verdict_text.py, words.py      a verdict in words, and which words of a statement have its nats
    citations.py                   the answer with citations
    reliance.py                    what `assert attribution.relies_on("faq.md")` prints
    how_to_read.py                 how to read verdicts, printed above them
    page.py                        the answer as an HTML page

attribution.py alone calls these modules, in its properties and methods.
"""
