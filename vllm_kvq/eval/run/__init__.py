"""Carries an evaluation out: the plan, the run, and the store that keeps every number."""
