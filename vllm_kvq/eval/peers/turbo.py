"""turbo3, turbo4: TurboQuant as vLLM serves it, `--kv-cache-dtype turboquant_3bit_nc` and `turboquant_4bit_nc`.

Keys: a Hadamard matrix spreads a key's content over all channels, so a coordinate of its direction is nearly normal
with variance 1 / d. The levels are optimal for that distribution; the norm is stored with the codes.

    u = H x / |x|,   code = the level nearest to u,   x' = norm c / |c|,   norm = |x|,   c = the codes' levels

Values are not rotated, and stored uniformly over the channels of a token:

    scale = (max - min) / (2^b - 1),   code = floor((x - min) / scale + 1/2),   x' = min + code scale

vLLM does not pack the first two and the last two layers, and neither do these formats unless `skip_layers` says
otherwise. vLLM quantizes only heads whose size is a power of two; others are rotated here in blocks. The levels are
Lloyd and Max's for the normal distribution, each the mean of what is rounded to it, summed as in vLLM: 7e-4 from the
exact levels.

Slab (32 tokens; d = 128)                      4 bits             3 bits
    keys    codes  u8   [d / 8 quads][32][4]    2048               1024   the two lower bits, and
            high   u8   [d / 32 quads][32][4]                       512   the highest one
            norm   f16  [32]                      64                 64
    values  codes, high as those of the keys    2048               1536
            scale, zero  f16 [32]                 64 each            64 each
"""

from __future__ import annotations

import functools

import vllm_kvq.late_torch as torch
from vllm_kvq.eval.peers.coding import CodedKeys, CodedValues, Coding
from vllm_kvq.formats.codec import Geometry
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.parts.quant import half
from vllm_kvq.formats.parts.rotation import hadamard
from vllm_kvq.formats.table import Format

SKIPPED = (0, 1, -2, -1)
SMALLEST = 1e-8
"""vLLM's smallest scale of values, and what it adds to a norm before dividing by it."""
ROUNDS = 200
SETTLED = 1e-10
"""The last round is the first one that moves no level by this much."""
PIECES = 200
"""Steps per cell in the trapezoidal rule."""
SPAN = 3.5
"""The levels are first spread over this many standard deviations; three times as many hold all cells."""


@functools.cache
def levels(d: int, bits: int) -> torch.Tensor:
    """(2^bits,) float32, ascending."""
    n, sigma = 2**bits, d**-0.5
    found = SPAN * sigma * (torch.arange(1, 2 * n, 2, dtype=torch.float64) / n - 1)
    end = torch.tensor([3 * SPAN * sigma], dtype=torch.float64)
    share = torch.linspace(0, 1, PIECES + 1, dtype=torch.float64)[:, None]
    for _ in range(ROUNDS):
        border = torch.cat([-end, (found[1:] + found[:-1]) / 2, end])
        u = border[:-1] + share * border.diff()
        density = torch.exp(-(u**2) * d / 2)
        moved = torch.trapezoid(u * density, u, dim=0) / torch.trapezoid(density, u, dim=0)
        if (moved - found).abs().max() < SETTLED:
            break
        found = moved
    return found.float()


class _Codes(Coding):
    """3-bit codes are stored in 3 bits: the two lower ones together, and the highest one separately."""

    numbers: tuple[str, ...]
    """The float16 numbers that are stored for a token with its codes."""

    def __init__(self, geometry: Geometry, bits: int) -> None:
        self.d, self.bits = geometry.d, bits
        self.low = 2 if bits == 3 else bits
        codes = [Field("codes", torch.uint8, key_code_shape(self.d, self.low))]
        if self.low < bits:
            codes.append(Field("high", torch.uint8, key_code_shape(self.d, 1)))
        self.slab_fields = (*codes, *(Field(name, torch.float16, (SLAB,)) for name in self.numbers))

    def _packed(self, codes: torch.Tensor) -> Packed:
        low = {"codes": pack_keys(codes & (1 << self.low) - 1, self.low)}
        return low if self.low == self.bits else low | {"high": pack_keys(codes >> self.low, 1)}

    def _codes(self, fields: Packed) -> torch.Tensor:
        codes = unpack_keys(fields["codes"], self.low).long()
        return codes if self.low == self.bits else codes | unpack_keys(fields["high"], 1).long() << self.low


class Directions(_Codes):
    numbers = ("norm",)

    def rotation(self) -> torch.Tensor:
        return hadamard(self.d)

    def encode(self, x: torch.Tensor) -> Packed:
        x = x.unflatten(1, (-1, SLAB))
        known = levels(self.d, self.bits).to(x.device)
        norm = x.norm(dim=-1, keepdim=True)
        # a direction on the border between two levels gets the upper one
        codes = torch.bucketize(x / (norm + SMALLEST), (known[1:] + known[:-1]) / 2, right=True)
        return self._packed(codes) | {"norm": half(norm.squeeze(-1))}

    def decode(self, fields: Packed) -> torch.Tensor:
        found = levels(self.d, self.bits).to(fields["codes"].device)[self._codes(fields)]
        length = found.norm(dim=-1, keepdim=True)
        return (found / length * fields["norm"].float().unsqueeze(-1)).flatten(1, 2)


class Uniform(_Codes):
    numbers = ("scale", "zero")

    def rotation(self) -> None:
        return None

    def encode(self, x: torch.Tensor) -> Packed:
        x = x.unflatten(1, (-1, SLAB))
        low, top = x.amin(-1, keepdim=True), 2**self.bits - 1
        scale = ((x.amax(-1, keepdim=True) - low) / top).clamp_min(SMALLEST)
        # codes are chosen before scale and zero are rounded
        codes = ((x - low) / scale + 0.5).long().clamp(0, top)
        return self._packed(codes) | {"scale": half(scale.squeeze(-1)), "zero": half(low.squeeze(-1))}

    def decode(self, fields: Packed) -> torch.Tensor:
        scale, zero = (fields[name].float().unsqueeze(-1) for name in self.numbers)
        return torch.addcmul(zero, self._codes(fields).float(), scale).flatten(1, 2)


class Turbo4Keys(CodedKeys):
    name = "turbo4"
    title = "a norm, and the rotated direction by levels, 4 bits"
    hurt_by_biases = "has an error in proportion to the norm of the whole key, its constant part included"
    coding_class = Directions


class Turbo4Values(CodedValues):
    name = "turbo4"
    title = "uniform per token, 4 bits"
    coding_class = Uniform


class Turbo3Keys(CodedKeys):
    name = "turbo3"
    title = "a norm, and the rotated direction by levels, 3 bits"
    hurt_by_biases = "has an error in proportion to the norm of the whole key, its constant part included"
    coding_class = Directions
    bits = 3


class Turbo3Values(CodedValues):
    name = "turbo3"
    title = "uniform per token, 3 bits"
    coding_class = Uniform
    bits = 3


def _format(bits: int, keys: type[CodedKeys], values: type[CodedValues]) -> Format:
    title = f"vLLM's turboquant_{bits}bit_nc"
    return Format(f"turbo{bits}", title, keys, values, {"skip_layers": SKIPPED}, public=False)


FORMATS = (_format(4, Turbo4Keys, Turbo4Values), _format(3, Turbo3Keys, Turbo3Values))
