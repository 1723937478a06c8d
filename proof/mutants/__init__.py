"""Deliberately planted faults, one at a time: a test suite is worth what it catches."""
