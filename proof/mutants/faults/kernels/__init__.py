"""Faults in kernels, in what they are told of a layout, and in what is said of slow ones."""
