"""kvarn_k4v2, kvarn_k4v4, kvarn_k2v2: KVarN. A Hadamard rotation, then a scale per token beside one per channel.

    X = tile H                                    the N tokens of a page by the d channels of a head
    16 times:  X_t. /= std(X_t.) for all tokens t,  then  X_.c /= std(X_.c) for all channels c
    s_t, s_c = what the rows and the columns were divided by, of the iterate with the least imbalance
    imbalance = largest standard deviation of a row or a column / the smallest

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

from vllm_kvq.formats.codec import Geometry
from vllm_kvq.formats.fields import Field, Packed
from vllm_kvq.formats.option import KEY_BITS, VALUE_BITS
from vllm_kvq.formats.peers.coding import CodedKeys, CodedValues, Coding
from vllm_kvq.formats.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.quant import affine_codes, affine_parameters, positive_half
from vllm_kvq.formats.rotation import hadamard
from vllm_kvq.formats.table import Format

ROUNDS = 16
FLAT = 1e-6
"""A row or column that varies by less than this part of the tile is left as it is: equal tokens, a dead channel."""


def balanced(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(U, N, d) -> s_t (U, N, 1) with a geometric mean of 1, and s_c (U, 1, d), both as float16 stores them."""
    flat = FLAT * x.std((-2, -1), keepdim=True)
    rows, columns = torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1, :])
    kept, least = (rows, columns), torch.full_like(flat, torch.inf)
    for _ in range(ROUNDS + 1):
        across, along = (_log_std(x, rows, columns, dim, flat) for dim in (-1, -2))
        imbalance = torch.maximum(across.amax((-2, -1), keepdim=True), along.amax((-2, -1), keepdim=True))
        imbalance = imbalance - torch.minimum(across.amin((-2, -1), keepdim=True), along.amin((-2, -1), keepdim=True))
        better = imbalance < least
        least = torch.where(better, imbalance, least)
        kept = torch.where(better, rows, kept[0]), torch.where(better, columns, kept[1])
        rows = rows + across
        columns = columns + _log_std(x, rows, columns, -2, flat)
    middle = kept[0].mean(-2, keepdim=True)
    return positive_half((kept[0] - middle).exp()), positive_half((kept[1] + middle).exp())


def _log_std(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, dim: int, flat: torch.Tensor) -> torch.Tensor:
    std = (x / (rows + columns).exp()).std(dim, keepdim=True)
    return torch.where(x.std(dim, keepdim=True) > flat, std.clamp_min(1e-30).log(), 0)


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
        token, _ = balanced(x)
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
        _, channel = balanced(x)
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
