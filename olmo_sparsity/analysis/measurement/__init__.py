"""Measure many documents: planning.py settles what is measured, measurement.py runs it."""
