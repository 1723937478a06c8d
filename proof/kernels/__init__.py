"""References for kernels, and ways to run them that a server never uses.

    exact.py          attention over packed pages in float64
    packing.py        only the CUDA kernel's packing
    cubin.py          one CUDA kernel by itself, compiled
    step_traffic.py   a layer's GPU step over requests that grow, against the reference cache
    probe.py          counts the instructions of the CPU kernels; executes those that this processor lacks
    sanitize.py       the CPU kernels under g++'s sanitizers

The tests of the kernels are in `tests/kernels`, `tests/triton`, `tests/cuda` and `tests/gpu`.
"""
