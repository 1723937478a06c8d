"""Triton kernels over packed pages; installed as `vllm_kvq.triton_kernels`. Nothing here imports vllm.

No GPU has run any of it yet: it is tested under Triton's interpreter and compiled for every target (docs/kernels.md).
"""
