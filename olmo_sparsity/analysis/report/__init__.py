"""Draw figures, and write HTML pages, from the tables of a measurement.

figures.py   Figure 2: curves.py sorts measurements into curves, panels.py declares the panels, and
             gap_panel.py and share_panels.py draw them in the style of figure_style.py
report.py    the page of a measurement: texts_page.py shows the texts, from document_data.py;
             number_tables.py the numbers
losses_page.py   the page of losses by place
page.py      fills a template
"""
