"""Faults in formats: in methods, in klt, and in the pages and options of all."""
