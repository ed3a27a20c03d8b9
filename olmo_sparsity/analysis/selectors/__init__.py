"""Rank distant units: influence.py has all selectors, saliency.py the gradients that some use."""
