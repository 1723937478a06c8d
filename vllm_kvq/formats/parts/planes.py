"""Plane-quad codes: the packing of b-bit codes into bytes, for keys and for values.

A 32-bit word holds 4 bytes for 4 consecutive indices along the *reduction* dimension of the product it takes part
in (keys: 4 channels of one token; values: 4 tokens of one channel). One byte holds 8/b codes, one per *plane*:
plane p of byte i is the code of index i + p * stride, with stride = n * b / 8.

    keys    (32 tokens, n channels) -> [channel quads of a plane][32 tokens][4 channels]
    values  (32 tokens, n channels) -> [8 token quads][channels of a plane][4 tokens]

Thus one 64-byte load, one shift and one mask give 16 tokens (or channels) times 4 reduction steps of one plane: the
operand of a byte dot-product instruction on a CPU, and the B fragment of an integer matrix product on a GPU, with
no horizontal sums and no shuffles.
"""

from __future__ import annotations

import torch

SLAB = 32
"""Tokens of a slab: the unit from which every layout is built."""


def planes_of(bits: int) -> int:
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"codes of {bits} bits do not pack into bytes (1, 2, 4 or 8 do)")
    return 8 // bits


def key_code_shape(n: int, bits: int) -> tuple[int, int, int]:
    return n // planes_of(bits) // 4, SLAB, 4


def value_code_shape(n: int, bits: int) -> tuple[int, int, int]:
    return SLAB // 4, n // planes_of(bits), 4


def _merge(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., n) codes -> (..., n * b / 8) bytes, by planes."""
    p = planes_of(bits)
    split = codes.to(torch.uint8).unflatten(-1, (p, codes.shape[-1] // p))
    out = split[..., 0, :].clone()
    for i in range(1, p):
        out |= split[..., i, :] << (bits * i)
    return out


def _split(data: torch.Tensor, bits: int) -> torch.Tensor:
    mask = (1 << bits) - 1
    return torch.cat([(data >> (bits * i)) & mask for i in range(planes_of(bits))], dim=-1)


def pack_keys(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., 32, n) codes -> (..., quads, 32, 4) bytes."""
    b = _merge(codes, bits)
    return b.unflatten(-1, (-1, 4)).transpose(-3, -2).contiguous()


def unpack_keys(data: torch.Tensor, bits: int) -> torch.Tensor:
    return _split(data.transpose(-3, -2).flatten(-2), bits)


def pack_values(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., 32, n) codes -> (..., 8, channels of a plane, 4) bytes."""
    b = _merge(codes, bits)
    return b.unflatten(-2, (SLAB // 4, 4)).transpose(-2, -1).contiguous()


def unpack_values(data: torch.Tensor, bits: int) -> torch.Tensor:
    return _split(data.transpose(-2, -1).flatten(-3, -2), bits)


def pack_sign_words(bits: torch.Tensor) -> torch.Tensor:
    """(..., 32) booleans -> (...,) int32; element e becomes bit 8 * (e % 4) + e // 4.

    With that order `(word >> quad) & 0x01010101` is the byte mask of that quad's 4 elements, ready to be or-ed into the
    plane-quad bytes as their next higher bit.
    """
    e = torch.arange(32, device=bits.device)
    weight = torch.ones((), dtype=torch.int64, device=bits.device) << (8 * (e % 4) + e // 4)
    word = (bits.to(torch.int64) * weight).sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def unpack_sign_words(words: torch.Tensor) -> torch.Tensor:
    e = torch.arange(32, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> (8 * (e % 4) + e // 4)) & 1).bool()
