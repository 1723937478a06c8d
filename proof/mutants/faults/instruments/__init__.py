"""Faults in what judges: the instruments of proof/, the documents, the faults themselves."""
