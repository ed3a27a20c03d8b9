"""Run the model: scorer.py computes losses with chosen distant tokens; the others build on it."""
