"""Measure many documents: plan.py settles what is measured, measurement.py runs it."""
