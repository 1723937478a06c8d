"""turbo3, turbo4: TurboQuant. A random rotation makes every key's direction uniform on the sphere, and with it the
distribution of each coordinate known: the levels are the best ones for that distribution, and only the norm is stored.

    x' = x R,   R random and orthonormal;   u = x' / |x|,   code = the level nearest to u
    x' = norm c,   c = the codes' levels,   norm = |x| / |c|

The density of a coordinate u of a uniform direction is proportional to (1 - u^2)^((d - 3) / 2). Its levels are Lloyd's
and Max's: each is the mean of what is rounded to it. The division by |c| is vLLM's norm correction (`_nc`), done here
before the norm is stored. vLLM's own `turboquant_*` rotate by a Hadamard matrix and store values uniformly with a scale
and a zero; here, as in the paper, values are stored as keys are.

Slab (32 tokens; d = 128), each half: 4 bits 2112 bytes (4.125 bits per element), 3 bits 1600 bytes (3.125)

    codes  u8   [d / 8 quads][32][4]    2048   4 bits
    codes  u8   [d / 16 quads][32][4]   1024   3 bits: the two lower ones, and
    high   u8   [d / 32 quads][32][4]    512   the highest, so that 3 bits are stored in 3 bits
    norm   f16  [32]                      64
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from vllm_kvq.formats.codec import Geometry
from vllm_kvq.formats.fields import Field, Packed
from vllm_kvq.formats.peers.coding import CodedKeys, CodedValues, Coding
from vllm_kvq.formats.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.qjl import sketch
from vllm_kvq.formats.quant import half
from vllm_kvq.formats.table import Format

SEED = 42
GRID = 1 << 16
"""Cells in which the density is summed."""
ROUNDS = 300
"""Of Lloyd's iteration: 4 bits are then settled to 1e-6 of the largest level."""


@functools.cache
def levels(d: int, bits: int) -> torch.Tensor:
    """(2^bits,) float32, ascending."""
    edge = np.linspace(-1, 1, GRID + 1)
    u = (edge[1:] + edge[:-1]) / 2
    density = np.exp((d - 3) / 2 * np.log1p(-(u**2)))
    mass = np.concatenate([[0.0], density.cumsum()])
    moment = np.concatenate([[0.0], (density * u).cumsum()])
    found = np.linspace(-1, 1, 2**bits + 2)[1:-1] * 3 / math.sqrt(d)
    for _ in range(ROUNDS):
        border = np.concatenate([[-1.0], (found[1:] + found[:-1]) / 2, [1.0]])
        found = np.diff(np.interp(border, edge, moment)) / np.diff(np.interp(border, edge, mass))
    return torch.from_numpy(found.astype(np.float32))


class LevelCoding(Coding):
    def __init__(self, geometry: Geometry, bits: int) -> None:
        self.d, self.bits = geometry.d, bits
        self.low = 2 if bits == 3 else bits
        codes = Field("codes", torch.uint8, key_code_shape(self.d, self.low))
        high = Field("high", torch.uint8, key_code_shape(self.d, 1))
        norm = Field("norm", torch.float16, (SLAB,))
        self.slab_fields = (codes, norm) if self.low == bits else (codes, high, norm)

    def rotation(self) -> torch.Tensor:
        return sketch(self.d, self.d, SEED) / math.sqrt(self.d)

    def encode(self, x: torch.Tensor) -> Packed:
        x = x.unflatten(1, (-1, SLAB))
        known = levels(self.d, self.bits).to(x.device)
        norm = x.norm(dim=-1, keepdim=True)
        codes = torch.bucketize(x / norm.clamp_min(1e-30), (known[1:] + known[:-1]) / 2)
        stored = half(norm / known[codes].norm(dim=-1, keepdim=True)).squeeze(-1)
        fields = {"codes": pack_keys(codes & (1 << self.low) - 1, self.low), "norm": stored}
        return fields if self.low == self.bits else fields | {"high": pack_keys(codes >> self.low, 1)}

    def decode(self, fields: Packed) -> torch.Tensor:
        codes = unpack_keys(fields["codes"], self.low).long()
        if self.low < self.bits:
            codes = codes | unpack_keys(fields["high"], 1).long() << self.low
        known = levels(self.d, self.bits).to(codes.device)
        return (known[codes] * fields["norm"].float().unsqueeze(-1)).flatten(1, 2)


class Turbo4Keys(CodedKeys):
    name = "turbo4"
    title = "a norm, and the direction by levels, 4 bits"
    hurt_by_biases = "has an error in proportion to the norm of the whole key, its constant part included"
    coding_class = LevelCoding


class Turbo4Values(CodedValues):
    name = "turbo4"
    title = "a norm, and the direction by levels, 4 bits"
    coding_class = LevelCoding


class Turbo3Keys(CodedKeys):
    name = "turbo3"
    title = "a norm, and the direction by levels, 3 bits"
    hurt_by_biases = "has an error in proportion to the norm of the whole key, its constant part included"
    coding_class = LevelCoding
    bits = 3


class Turbo3Values(CodedValues):
    name = "turbo3"
    title = "a norm, and the direction by levels, 3 bits"
    coding_class = LevelCoding
    bits = 3


FORMATS = (
    Format("turbo4", "TurboQuant, 4-bit", Turbo4Keys, Turbo4Values, public=False),
    Format("turbo3", "TurboQuant, 3-bit", Turbo3Keys, Turbo3Values, public=False),
)
