"""Kernels, and one layer's step made of them; nothing here imports vllm.

step.py      the contract: what a step takes and does          slots.py    the layout of sidecars and sink pages
paths.py     which of the implementations serves a layer       build.py    compiles csrc/cpu
folders.py   where files that can be made again are kept
torch/       planned on the host, in PyTorch                   cpu/        C++
gpu/         Triton and CUDA
"""
