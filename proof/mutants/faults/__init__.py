"""The faults, by the code in which they are planted."""
