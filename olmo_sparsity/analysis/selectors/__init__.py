"""Rank distant units: influence.py lists all selectors.

question.py   what a selector is asked and what it answers
add_one.py    each unit alone: Eq. (20), and faster approximations
halving.py    groups of units, halved again and again
pairs.py      units that help only together
gates.py      gradients of gates, by which some of these find candidates
saliency.py   gradients of embeddings, and attention
backward.py   what both kinds of gradients share
"""
