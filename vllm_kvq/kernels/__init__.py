"""Kernels by device; nothing here imports vllm."""
