"""Faults in what measures formats, and in what shows the results."""
