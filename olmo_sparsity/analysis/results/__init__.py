"""Read the tables of a measurement, and compute statistics. Nothing here imports torch."""
