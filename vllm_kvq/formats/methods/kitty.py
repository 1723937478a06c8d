"""Kitty (arXiv 2511.18643): KIVI's 2-bit keys, with 4 bits for the channels that need them.

In each slab of 32 tokens the channels with the widest range are boosted; `boost` is the fraction of them:

    zero = min, scale = (max - min) / (2^b - 1), code = round((x - zero) / scale)   b = 4 if boosted, else 2
    code = low + 4 high                                                             high = 0 where not boosted

Low and high digits are separate 2-bit codes, so the same product reads both: all channels times the low digits, plus
the boosted channels, with four times their scale, times the high ones.

Slab of the keys (32 tokens; d = 128, a quarter boosted): 1792 bytes, 3.5 bits per element

    k_scale  f16  [d]                       256   per channel in natural order: a kernel folds them into q,
    k_zero   f16  [d]                       256     once per slab and query
    k_codes  u8   [d / 16 quads][32][4]    1024   low digits, plane-quad: the channel is the reduction dimension
    k_high   u8   [b / 16 quads][32][4]     256   high digits of the b boosted channels in their natural order

Scales are positive; the sign bit of a boosted channel's scale is set, and nothing else marks these channels.

The paper takes a quarter of the channels by their magnitude and leaves values as in KIVI. Here the range decides,
because it determines the quantizer's step; scales are fitted, and values are rotated (values.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import vllm_kvq.late_torch as torch
from vllm_kvq.formats.codec import Geometry, KeyCodec
from vllm_kvq.formats.methods.values import TokenValues
from vllm_kvq.formats.option import BOOST, KEY_SCALES, Option
from vllm_kvq.formats.parts.fields import Field, Packed, round_up
from vllm_kvq.formats.parts.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.parts.quant import Quantized, affine_codes, affine_parameters
from vllm_kvq.formats.table import Format
from vllm_kvq.formats.variant import fitted, variant

LOW, WHOLE = 2, 4
"""Code bits of a plain channel and of a boosted one."""
PARTS = {"eighth": 8, "quarter": 4, "half": 2}
USUAL = "quarter"


class BoostedKeys(KeyCodec):
    name = "kitty"
    title = "per channel over 32 tokens, wide channels in 4 bits"
    options: ClassVar[tuple[Option, ...]] = (KEY_SCALES, BOOST)
    parameters = staticmethod(affine_parameters)

    @classmethod
    def bind(cls, geometry: Geometry, options: Mapping[str, Any]) -> Self:
        return variant(cls, *fitted(options["key_scales"]))(geometry, options)

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        part = options["boost"] or USUAL
        if part == "none":
            raise ValueError("option 'boost' is 'none': that is KIVI; use kivi2, with key_scales 'fitted' as here")
        self.d = geometry.d
        # four planes of channel quads
        self.boosted = round_up(self.d // PARTS[part], 16)

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (
            Field("k_scale", torch.float16, (self.d,)),
            Field("k_zero", torch.float16, (self.d,)),
            Field("k_codes", torch.uint8, key_code_shape(self.d, LOW)),
            Field("k_high", torch.uint8, key_code_shape(self.boosted, LOW)),
        )

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        x = x.unflatten(1, (-1, SLAB))
        span = x.amax(-2, keepdim=True) - x.amin(-2, keepdim=True)
        channels = span.sort(dim=-1, descending=True, stable=True).indices[..., : self.boosted].sort(dim=-1).values
        boosted = torch.zeros_like(span, dtype=torch.bool).scatter(-1, channels, True)
        codes, scale, zero = self._quantize(x, boosted, state)
        codes = codes.to(torch.uint8)
        high = codes.gather(-1, channels.expand(*codes.shape[:-1], -1)) >> LOW
        return {
            "k_scale": torch.where(boosted, -scale, scale).squeeze(-2),
            "k_zero": zero.squeeze(-2),
            "k_codes": pack_keys(codes & (2**LOW - 1), LOW),
            "k_high": pack_keys(high, LOW),
        }

    def _quantize(self, x: torch.Tensor, boosted: torch.Tensor, state: torch.Tensor | None) -> Quantized:
        """Keys (U, s, 32, c), and flags for which of their c channels are boosted (U, s, 1, c)."""
        few, many = (self.parameters(x, -2, bits) for bits in (LOW, WHOLE))
        scale, zero = (torch.where(boosted, m, f) for f, m in zip(few, many, strict=True))
        top = torch.where(boosted, 2.0**WHOLE - 1, 2.0**LOW - 1)
        return affine_codes(x, scale, zero, WHOLE).minimum(top), scale, zero

    def unpack(self, fields: Packed) -> torch.Tensor:
        scale, zero = (fields[n].float().unsqueeze(-2) for n in ("k_scale", "k_zero"))
        boosted = scale.signbit().to(torch.uint8)
        channels = boosted.sort(dim=-1, descending=True, stable=True).indices[..., : self.boosted]
        low, high = (unpack_keys(fields[n], LOW) for n in ("k_codes", "k_high"))
        codes = low.scatter_add(-1, channels.expand(high.shape), high << LOW)
        return torch.addcmul(zero, codes.float(), scale.abs()).flatten(1, 2)


FORMATS = (
    Format(
        "kitty2",
        "Kitty, rotated values",
        BoostedKeys,
        TokenValues,
        {"key_scales": "fitted", "value_scales": "fitted", "value_rotation": "hadamard", "group": 256, "W": 32},
        usual=4,
    ),
)
