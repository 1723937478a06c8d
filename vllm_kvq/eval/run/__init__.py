"""Runs an evaluation: the plan, the run, and the store that keeps every number."""
