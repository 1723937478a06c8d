"""Numbers of the GPU kernels that compilers and counters give: the same in every run and on every machine.

compile_table.py   registers, spills and inner loops, for every target
compile_cuda.py    the CUDA kernels' part of that; sass.py reads the binaries of both
pipes.py           which unit carries out an instruction
traffic.py         what a decode step loads per cached token
roofline.py        bytes and instructions of attention, and the bounds that follow
"""
