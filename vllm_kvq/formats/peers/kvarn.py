"""kvarn_k4v2, kvarn_k4v4, kvarn_k2v2: KVarN. A Hadamard rotation, then a scale per token beside one per channel.

    X = tile H,   s_t, s_c = balanced(X)     (balance.py) of the N tokens of a page and the d channels of a head

    keys    x' = s_t (code scale_c + zero_c)      rounded per channel over the tile's tokens
    values  x' = s_c (code scale_t + zero_t)      rounded per token over the channels

s_c of the keys is part of scale_c and zero_c, and s_t of the values of scale_t and zero_t. Its authors keep the first
tile of a request in full precision: `S` = N gives that, the default of 32 most of it.

Page (d = N = 128), 4-bit keys, 2-bit values: b + 0.375 bits per element
    keys    scale, zero   f16 [d]                 256 each
    values  scale         f16 [d]                 256        s_c
Slab (32 tokens)
    keys    codes         u8  [d b / 32 quads][32][4]   2048
            token         f16 [32]                       64   s_t
    values  codes         u8  [d b / 32 quads][32][4]   1024
            token, zero   f16 [32]                       64 each
"""

from __future__ import annotations

import torch

from vllm_kvq.formats.balance import balanced
from vllm_kvq.formats.codec import Geometry
from vllm_kvq.formats.fields import Field, Packed
from vllm_kvq.formats.option import KEY_BITS, VALUE_BITS
from vllm_kvq.formats.peers.coding import CodedKeys, CodedValues, Coding
from vllm_kvq.formats.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.quant import affine_codes, affine_parameters
from vllm_kvq.formats.rotation import hadamard
from vllm_kvq.formats.table import Format

ROUNDS = 16


class TileCoding(Coding):
    page_wide = True

    def __init__(self, geometry: Geometry, bits: int) -> None:
        self.d, self.bits = geometry.d, bits

    def rotation(self) -> torch.Tensor:
        return hadamard(self.d)

    def _codes(self, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        return pack_keys(affine_codes(x, scale, zero, self.bits).unflatten(1, (-1, SLAB)), self.bits)

    def _numbers(self, fields: Packed, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(zero, unpack_keys(fields["codes"], self.bits).float().flatten(1, 2), scale)


class KeyTiles(TileCoding):
    def __init__(self, geometry: Geometry, bits: int) -> None:
        super().__init__(geometry, bits)
        self.page_fields = tuple(Field(name, torch.float16, (self.d,)) for name in ("scale", "zero"))
        self.slab_fields = (
            Field("codes", torch.uint8, key_code_shape(self.d, bits)),
            Field("token", torch.float16, (SLAB,)),
        )

    def encode(self, x: torch.Tensor) -> Packed:
        token, _ = balanced(x, ROUNDS)
        scale, zero = affine_parameters(x / token, -2, self.bits)
        return {
            "codes": self._codes(x / token, scale, zero),
            "token": token.unflatten(1, (-1, SLAB)).squeeze(-1),
            "scale": scale.squeeze(-2),
            "zero": zero.squeeze(-2),
        }

    def decode(self, fields: Packed) -> torch.Tensor:
        scale, zero = (fields[name].float().unsqueeze(-2) for name in ("scale", "zero"))
        return self._numbers(fields, scale, zero) * fields["token"].float().flatten(1).unsqueeze(-1)


class ValueTiles(TileCoding):
    def __init__(self, geometry: Geometry, bits: int) -> None:
        super().__init__(geometry, bits)
        self.page_fields = (Field("scale", torch.float16, (self.d,)),)
        self.slab_fields = (
            Field("codes", torch.uint8, key_code_shape(self.d, bits)),
            *(Field(name, torch.float16, (SLAB,)) for name in ("token", "zero")),
        )

    def encode(self, x: torch.Tensor) -> Packed:
        _, channel = balanced(x, ROUNDS)
        token, zero = affine_parameters(x / channel, -1, self.bits)
        return {
            "codes": self._codes(x / channel, token, zero),
            "token": token.unflatten(1, (-1, SLAB)).squeeze(-1),
            "zero": zero.unflatten(1, (-1, SLAB)).squeeze(-1),
            "scale": channel.squeeze(-2),
        }

    def decode(self, fields: Packed) -> torch.Tensor:
        token, zero = (fields[name].float().flatten(1).unsqueeze(-1) for name in ("token", "zero"))
        return self._numbers(fields, token, zero) * fields["scale"].float().unsqueeze(-2)


class KVarNKeys(CodedKeys):
    name = "kvarn"
    title = "rotated, per channel over a page, with a scale per token"
    options = (KEY_BITS,)
    coding_class = KeyTiles


class KVarNValues(CodedValues):
    name = "kvarn"
    title = "rotated, per token, with a scale per channel of a page"
    options = (VALUE_BITS,)
    coding_class = ValueTiles


def _format(keys: int, values: int) -> Format:
    defaults = {"key_bits": keys, "value_bits": values, "S": 32}
    title = f"KVarN, {keys}-bit keys, {values}-bit values"
    return Format(f"kvarn_k{keys}v{values}", title, KVarNKeys, KVarNValues, defaults, public=False)


FORMATS = (_format(4, 4), _format(4, 2), _format(2, 2))
