"""Values of all methods but InnerQ: per token, asymmetric, in groups of G channels; and uncompressed ones.

    zero = min, scale = (max - min) / (2^b - 1), code = round((x - zero) / scale)   over G channels of one token

Slab (32 tokens; d = 128, b = 2, G = 32):

    v_codes  u8   [8 token quads][d b / 8][4]   1024   plane-quad: the token is the reduction dimension of P V
    v_scale  f16  [d / G][32 tokens]             256   token-minor: a kernel folds 16 tokens' scales into the
    v_zero   f16  [d / G][32 tokens]             256     softmax weights with one load

The last group is smaller if G does not divide d. With `value_rotation: hadamard` the same is done to v H
(parts/rotation.py).

Uncompressed (PolarQuant's main setting in float16 and bfloat16, and `lossless` in any dtype):

    v_raw  model dtype  [32 tokens][d]   natural order, because no code needs unpacking
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import vllm_kvq.late_torch as torch
from vllm_kvq.formats.codec import Geometry, ValueCodec
from vllm_kvq.formats.option import VALUE_BITS, VALUE_SCALES, Option
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import SLAB, pack_values, unpack_values, value_code_shape
from vllm_kvq.formats.parts.quant import LIMIT, affine_codes, affine_parameters
from vllm_kvq.formats.parts.rotation import block, hadamard
from vllm_kvq.formats.variant import fitted, variant


class TokenValues(ValueCodec):
    name = "token"
    title = "per token over groups of channels"
    options = (
        VALUE_BITS,
        Option("group", "channels per group of the per-token values", 32, low=16, high=256, multiple=16),
        VALUE_SCALES,
        Option("value_rotation", "rotation of per-token values before they are rounded", "none", ("none", "hadamard")),
    )
    parameters = staticmethod(affine_parameters)

    @classmethod
    def bind(cls, geometry: Geometry, options: Mapping[str, Any]) -> Self:
        rotated = (Rotated,) if options["value_rotation"] == "hadamard" else ()
        return variant(cls, *rotated, *fitted(options["value_scales"]))(geometry, options)

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.d, self.bits, self.group = geometry.d, options["value_bits"], min(options["group"], geometry.d)
        self.groups = -(-self.d // self.group)

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (
            Field("v_codes", torch.uint8, value_code_shape(self.d, self.bits)),
            Field("v_scale", torch.float16, (self.groups, SLAB)),
            Field("v_zero", torch.float16, (self.groups, SLAB)),
        )

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        x = x.unflatten(1, (-1, SLAB))
        codes, scales, zeros = [], [], []
        for part in x.split(self.group, dim=-1):
            s, z = self.parameters(part, -1, self.bits)
            codes.append(affine_codes(part, s, z, self.bits))
            scales.append(s)
            zeros.append(z)
        return {
            "v_codes": pack_values(torch.cat(codes, -1), self.bits),
            "v_scale": torch.cat(scales, -1).transpose(-2, -1),
            "v_zero": torch.cat(zeros, -1).transpose(-2, -1),
        }

    def unpack(self, fields: Packed) -> torch.Tensor:
        codes = unpack_values(fields["v_codes"], self.bits).float()
        out = torch.empty_like(codes)
        scale, zero = (fields[n].float().transpose(-2, -1) for n in ("v_scale", "v_zero"))
        for g in range(self.groups):
            at = slice(g * self.group, (g + 1) * self.group)
            out[..., at] = torch.addcmul(zero[..., g, None], codes[..., at], scale[..., g, None])
        return out.flatten(1, 2)


class Rotated(TokenValues):
    """`value_rotation: hadamard`: v H / sqrt(b) is stored, and rotated back when it is read.

    It is divided by sqrt(b), b the size of H's blocks, because the rotation gathers b equal channels of a token in one
    number, which must fit into a float16.
    """

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return super().pack(x @ self._rotation(x.device) / self._root, state)

    def unpack(self, fields: Packed) -> torch.Tensor:
        x = super().unpack(fields)
        # nothing larger was stored; the errors of a token's rotated numbers may add up to more
        return (x @ self._rotation(x.device) * self._root).clamp(-LIMIT, LIMIT)

    def _rotation(self, device: torch.device) -> torch.Tensor:
        return hadamard(self.d).to(device)

    @property
    def _root(self) -> float:
        return float(block(self.d) ** 0.5)


class RawValues(ValueCodec):
    name = "raw"
    title = "as they are, in the model's dtype"

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.d, self.dtype = geometry.d, geometry.dtype

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (Field("v_raw", self.dtype, (SLAB, self.d)),)

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return {"v_raw": x.unflatten(1, (-1, SLAB)).to(self.dtype)}

    def unpack(self, fields: Packed) -> torch.Tensor:
        return fields["v_raw"].float().flatten(1, 2)
