"""Faults in what users meet first."""
