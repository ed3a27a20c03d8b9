"""The paper's experiments: tasks, theorems, rivals, results. Run from a clone."""
