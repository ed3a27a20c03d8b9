"""Read the tables of a measurement, compute statistics, and describe them.

schemas.py, columns.py, meta.py  what is stored; tables.py reads and writes it, json_values.py JSON
shown_columns.py                 which columns of the summary are shown
results.py                       a finished measurement; stored_results.py reads it from its folder
compare.py                       compares two

pairing.py                       a row for each target, with own and unrelated losses side by side
statistics.py                    the summary; target_sums.py: the ratios of sums in it
intervals.py                     the bootstrap; student_t.py: intervals over few documents;
                                 rank_correlation.py: Spearman's
two_measurements.py              differences and means of two measurements
reported.py                      the final form of intervals
by_distance.py, chosen_units.py  how far back the units are
loss_statistics.py               all tokens; losses_by_place.py: by place

summary.py                       all of it for a terminal
conclusion.py, notes.py, doubts.py, terminal_table.py    its sentences and tables
comparison_text.py               the same for two measurements
view.py, targets_in_text.py      numbers and texts for terminal and page

Nothing here imports torch.
"""
