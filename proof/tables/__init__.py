"""Numbers that compilers and counters give: what the tables of the documents are printed from.

    instructions.py    instructions of CPU attention per cached element
    attended.py        which formats the GPU kernels attend, and which of them share a kernel
    compile_table.py   registers, spills and inner loops of the GPU kernels, for every target
    compile_cuda.py    the CUDA kernels' part of that; sass.py reads the binaries of both
    gpu_traffic.py     what the GPU kernels load per cached token in a decode step

None of them is a time, so they are the same in every run and on every machine that has the compiler.
"""
