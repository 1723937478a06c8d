"""Patches that are installed later, and only where one of our formats is served."""
