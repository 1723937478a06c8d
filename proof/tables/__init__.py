"""Numbers that compilers and counters give on any machine: what the tables of the documents are printed from.

instructions.py    instructions of CPU attention per cached element
compile_table.py   registers, spills and inner loops of the GPU kernels, for every target
compile_cuda.py    the CUDA kernels' part of that
gpu_traffic.py     what the GPU kernels load per cached token in a decode step
"""
