"""Rank distant units: influence.py lists all selectors.

question.py   what a selector is asked and what it answers
add_one.py    each unit alone: Eq. (20), and faster approximations
halving.py    groups of units, halved again and again
pairs.py      units that help only together
saliency.py   gradients and attention, which some of these use
"""
