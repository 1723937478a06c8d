"""Rotations of a head's channels: orthonormal, so q . k does not change when both are rotated.

    H = H_b / sqrt(b) along the diagonal, b the largest power of two that divides d;   H_2n = [[H_n, H_n], [H_n, -H_n]]

H is symmetric, so it is its own inverse. Every rotated channel holds a part of every outlier of its block.
"""

from __future__ import annotations

import functools

import vllm_kvq.late_torch as torch


def block(d: int) -> int:
    return d & -d


@functools.cache
def hadamard(d: int) -> torch.Tensor:
    """(d, d), orthonormal and symmetric."""
    b = block(d)
    # vLLM sets PyTorch's default type to the model's while it loads
    h = torch.ones(1, 1, dtype=torch.float32)
    while len(h) < b:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return torch.block_diag(*[h / b**0.5] * (d // b))
