"""KIVI: keys per channel over 32 tokens, values per token over groups of channels (values.py), both asymmetric.

    zero = min, scale = (max - min) / (2^b - 1), code = round((x - zero) / scale)   over 32 tokens of one channel

Slab of the keys (32 tokens; d = 128, b = 2): 1536 bytes, 3.0 bits per element

    k_scale  f16  [d]                           256   per channel in natural order: a kernel folds them into q,
    k_zero   f16  [d]                           256     once per slab and query
    k_codes  u8   [d b / 32 quads][32][4]      1024   plane-quad: the channel is the reduction dimension of q K

With `token_scale: balanced`, x / s_t is quantized, with s_t from balance.py, and this is stored in addition:

    k_token  f16  [32]                           64   16 / d bits per element: multiplies a token's finished score
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

from vllm_kvq.formats.codec import Geometry, KeyCodec
from vllm_kvq.formats.methods.values import TokenValues
from vllm_kvq.formats.option import KEY_BITS, KEY_SCALES, TOKEN_SCALE, Option
from vllm_kvq.formats.parts.balance import balanced
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.parts.quant import Quantized, affine_codes, affine_parameters
from vllm_kvq.formats.table import Format
from vllm_kvq.formats.variant import fitted, variant

BALANCE_ROUNDS = 2
"""More than two change the error of 2-bit keys by less than 1 %."""


class ChannelKeys(KeyCodec):
    name = "kivi"
    title = "per channel over 32 tokens"
    options: ClassVar[tuple[Option, ...]] = (KEY_BITS, KEY_SCALES, TOKEN_SCALE)
    parameters = staticmethod(affine_parameters)

    @classmethod
    def bind(cls, geometry: Geometry, options: Mapping[str, Any]) -> Self:
        return variant(cls, *cls.changes(options))(geometry, options)

    @classmethod
    def changes(cls, options: Mapping[str, Any]) -> tuple[type, ...]:
        """The changes for options that select another class."""
        scaled = (TokenScaled,) if options["token_scale"] == "balanced" else ()
        return (*scaled, *fitted(options["key_scales"]))

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.d, self.bits = geometry.d, options["key_bits"]

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (
            Field("k_scale", torch.float16, (self.d,)),
            Field("k_zero", torch.float16, (self.d,)),
            Field("k_codes", torch.uint8, key_code_shape(self.d, self.bits)),
        )

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        codes, scale, zero = self._quantize(x.unflatten(1, (-1, SLAB)), state)
        return {
            "k_scale": scale.squeeze(-2),
            "k_zero": zero.squeeze(-2),
            "k_codes": pack_keys(codes, self.bits),
        }

    def _quantize(self, x: torch.Tensor, state: torch.Tensor | None) -> Quantized:
        """Keys (U, s, 32, c)."""
        scale, zero = self.parameters(x, -2, self.bits)
        return affine_codes(x, scale, zero, self.bits), scale, zero

    def unpack(self, fields: Packed) -> torch.Tensor:
        codes = unpack_keys(fields["k_codes"], self.bits).float()
        scale, zero = (fields[n].float().unsqueeze(-2) for n in ("k_scale", "k_zero"))
        return torch.addcmul(zero, codes, scale).flatten(1, 2)


class TokenScaled(ChannelKeys):
    """`token_scale: balanced`: tokens of unequal size share a channel's range, so each is divided by its size first.

    This is not done if it increases the slab's squared error: a channel with a large mean varies more once divided.
    """

    reference_only = (
        "option 'token_scale' is served only as 'none'; a scale per token is for vllm_kvq.roundtrip and the evaluation"
    )

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (*super().slab_fields, Field("k_token", torch.float16, (SLAB,)))

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        token = balanced(x.unflatten(1, (-1, SLAB)), BALANCE_ROUNDS)[0].squeeze(-1)
        plain, scaled = (self._pack_divided(x, t, state) for t in (torch.ones_like(token), token))
        error, other = (
            (self.unpack(fields) - x).square().unflatten(1, (-1, SLAB)).sum((-2, -1)) for fields in (plain, scaled)
        )
        better = other < error
        return {
            name: torch.where(better.reshape(*better.shape, *[1] * (old.dim() - 2)), scaled[name], old)
            for name, old in plain.items()
        }

    def _pack_divided(self, x: torch.Tensor, token: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return {**super().pack(x / token.flatten(1).unsqueeze(-1), state), "k_token": token}

    def unpack(self, fields: Packed) -> torch.Tensor:
        return super().unpack(fields) * fields["k_token"].float().flatten(1).unsqueeze(-1)


FORMATS = (
    Format("kivi2", "KIVI, 2-bit", ChannelKeys, TokenValues, {"W": 32}, usual=5),
    Format("kivi4", "KIVI, 4-bit", ChannelKeys, TokenValues, {"key_bits": 4, "value_bits": 4, "W": 32}),
)
