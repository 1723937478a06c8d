"""int4_token: what vLLM stores with `--kv-cache-dtype int4_per_token_head`.

    x' = H (D x)      D: random signs, the same for every block of H (rotation.py) and every layer
    scale = max((max - min) / 15, 1e-6),  zero = clamp(round(-min / scale), 0, 15)      over the d channels of a token
    code  = clamp(round(x' / scale + zero), 0, 15),     x' = (code - zero) scale'

round rounds half away from zero, and scale' is the float32 scale with the zero in its 4 lowest bits. vLLM leaves a
factor sqrt(b) in x', and rounds x' to the model's dtype before it is quantized; neither is done here.

Slab (32 tokens; d = 128): 2176 bytes for each half, 4.25 bits per element

    codes  u8   [d / 8 quads][32][4]   2048
    scale  f32  [32]                    128   one load for scale and zero
"""

from __future__ import annotations

import functools

import vllm_kvq.late_torch as torch
from vllm_kvq.eval.peers.coding import CodedKeys, CodedValues, Coding
from vllm_kvq.formats.codec import Geometry
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.parts.rotation import hadamard
from vllm_kvq.formats.table import Format

BITS = 4
TOP = 2**BITS - 1
SMALLEST = 1e-6
SEED = 0x9E3779B9
"""vLLM's seed for the signs."""


@functools.cache
def signed_hadamard(d: int) -> torch.Tensor:
    """R (d, d) with x' = x R, vLLM's signs included."""
    b = d & -d
    generator = torch.Generator().manual_seed(SEED)
    signs = 2 * torch.bernoulli(torch.full((b,), 0.5), generator=generator) - 1
    return signs.repeat(d // b)[:, None] * hadamard(d)


class TokenCoding(Coding):
    def __init__(self, geometry: Geometry, bits: int) -> None:
        self.d = geometry.d
        self.slab_fields = (
            Field("codes", torch.uint8, key_code_shape(self.d, BITS)),
            Field("scale", torch.float32, (SLAB,)),
        )

    def rotation(self) -> torch.Tensor:
        return signed_hadamard(self.d)

    def encode(self, x: torch.Tensor) -> Packed:
        x = x.unflatten(1, (-1, SLAB))
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        scale = ((high - low) / TOP).clamp_min(SMALLEST)
        zero = (-low / scale + 0.5).floor().clamp(0, TOP)
        codes = (x * (1 / scale) + zero + 0.5).floor().clamp(0, TOP)
        both = (scale.view(torch.int32) & -16) | zero.int()
        return {"codes": pack_keys(codes, BITS), "scale": both.view(torch.float32).squeeze(-1)}

    def decode(self, fields: Packed) -> torch.Tensor:
        both = fields["scale"].contiguous().view(torch.int32).unsqueeze(-1)
        scale, zero = (both & -16).view(torch.float32), (both & 15).float()
        return ((unpack_keys(fields["codes"], BITS).float() - zero) * scale).flatten(1, 2)


class Int4Keys(CodedKeys):
    name = "int4_token"
    title = "rotated, 4 bits per token"
    hurt_by_biases = "rotates keys, which spreads a constant channel over all that share a scale"
    coding_class = TokenCoding


class Int4Values(CodedValues):
    name = "int4_token"
    title = "rotated, 4 bits per token"
    coding_class = TokenCoding


FORMATS = (Format("int4_token", "vLLM's int4_per_token_head", Int4Keys, Int4Values, public=False),)
