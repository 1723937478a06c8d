"""kvarn_k4v2, kvarn_k4v4: KVarN's presets kvarn_k4v2_g128 and kvarn_k4v4_g128. kvarn_k2v2 is not one of its presets.

A Hadamard rotation, then one scale per token and one per channel that give all tokens and all channels of a tile equal
variation (`normalized`). A tile is a page of one head; it has 128 tokens in the authors' code, and also here unless
`N` or --block-size says otherwise.

    X = tile H,   Y = X / s_t / s_c      of the N tokens of a page and the d channels of a head

    keys    scale = (max - min) / (2^b - 1) of a channel of Y,   x' = s_t (code s_c scale + s_c min)
    values  scale = (max - min) / (2^b - 1) of a token of Y,     x' = s_c (code s_t scale + s_t min)

The factors next to the code and the term after it are stored as one number each. Codes are chosen before these are
rounded, as in KVarN's store kernel. The first 128 tokens of a request (`S`) and those that do not yet fill a tile are
exact.

Page (d = N = 128), 4-bit keys, 2-bit values: b + 0.375 bits per element
    keys    scale, zero   f16 [d]                 256 each   s_c scale, s_c min
    values  scale         f16 [d]                 256        s_c
Slab (32 tokens)
    keys    codes         u8  [d b / 32 quads][32][4]   2048
            token         f16 [32]                       64   s_t
    values  codes         u8  [d b / 32 quads][32][4]   1024
            token, zero   f16 [32]                       64 each   s_t scale, s_t min
"""

from __future__ import annotations

import torch

from vllm_kvq.eval.peers.coding import CodedKeys, CodedValues, Coding
from vllm_kvq.formats.codec import Geometry
from vllm_kvq.formats.option import KEY_BITS, VALUE_BITS
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.parts.quant import half
from vllm_kvq.formats.parts.rotation import hadamard
from vllm_kvq.formats.table import Format

TILE = 128
ROUNDS = 16
STD = (1e-3, 1e3)
"""Standard deviations are clamped to this range."""
LOG_SCALE = (-0.3, 10.0)
"""No scale makes numbers larger by more than e^0.3."""
SMALLEST = 1e-10
"""KVarN's least scale of a group."""


def normalized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(U, a, b) -> scales (U, a, 1) and (U, 1, b) by which its rows and columns must be divided.

    Columns and rows are divided by their standard deviations in turn. The result is the iterate, x itself included,
    whose largest and smallest standard deviations are closest: the sum of both ratios is smallest.
    """
    rows, columns = torch.zeros_like(x[:, :, :1]), torch.zeros_like(x[:, :1])
    kept, least = (rows, columns), _imbalance(x)
    for _ in range(ROUNDS):
        columns = _grown(columns, x / rows.exp() / columns.exp(), -2)
        rows = _grown(rows, x / rows.exp() / columns.exp(), -1)
        now = _imbalance(x / rows.exp() / columns.exp())
        better = now <= least
        least = torch.where(better, now, least)
        kept = torch.where(better, rows, kept[0]), torch.where(better, columns, kept[1])
    return kept[0].exp(), kept[1].exp()


def _grown(log_scale: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    return (log_scale + x.std(dim, keepdim=True).clamp(*STD).log()).clamp(*LOG_SCALE)


def _imbalance(x: torch.Tensor) -> torch.Tensor:
    """(U, 1, 1)."""
    ratios = [std.amax(-1) / std.amin(-1).clamp_min(1e-8) for std in (x.std(-2), x.std(-1))]
    return (ratios[0] + ratios[1])[:, None, None]


class TileCoding(Coding):
    page_wide = True
    over: int
    """The dimension of (U, tokens, channels) along which a group runs: its parameters have size 1 there."""

    def __init__(self, geometry: Geometry, bits: int) -> None:
        self.d, self.bits = geometry.d, bits

    def rotation(self) -> torch.Tensor:
        return hadamard(self.d)

    def _quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(U, N, d) -> codes, scale and zero of the groups, and the divisors along them; all but codes have size 1."""
        # rows are groups, as in the kernel, which starts with the divisors along them
        y = x if self.over == -1 else x.mT
        rows, columns = normalized(y)
        z = y / columns / rows
        low, top = z.amin(-1, keepdim=True), 2**self.bits - 1
        scale = ((z.amax(-1, keepdim=True) - low) / top).clamp_min(SMALLEST)
        found = (((z - low) / scale).round().clamp(0, top), half(rows * scale), half(rows * low), half(columns))
        codes, scale, zero, along = (f if self.over == -1 else f.mT for f in found)
        return pack_keys(codes.unflatten(1, (-1, SLAB)), self.bits), scale, zero, along

    def _numbers(self, fields: Packed, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(zero, unpack_keys(fields["codes"], self.bits).float().flatten(1, 2), scale)


class KeyTiles(TileCoding):
    over = -2

    def __init__(self, geometry: Geometry, bits: int) -> None:
        super().__init__(geometry, bits)
        self.page_fields = tuple(Field(name, torch.float16, (self.d,)) for name in ("scale", "zero"))
        self.slab_fields = (
            Field("codes", torch.uint8, key_code_shape(self.d, bits)),
            Field("token", torch.float16, (SLAB,)),
        )

    def encode(self, x: torch.Tensor) -> Packed:
        codes, scale, zero, token = self._quantized(x)
        return {
            "codes": codes,
            "token": token.unflatten(1, (-1, SLAB)).squeeze(-1),
            "scale": scale.squeeze(-2),
            "zero": zero.squeeze(-2),
        }

    def decode(self, fields: Packed) -> torch.Tensor:
        scale, zero = (fields[name].float().unsqueeze(-2) for name in ("scale", "zero"))
        return self._numbers(fields, scale, zero) * fields["token"].float().flatten(1).unsqueeze(-1)


class ValueTiles(TileCoding):
    over = -1

    def __init__(self, geometry: Geometry, bits: int) -> None:
        super().__init__(geometry, bits)
        self.page_fields = (Field("scale", torch.float16, (self.d,)),)
        self.slab_fields = (
            Field("codes", torch.uint8, key_code_shape(self.d, bits)),
            *(Field(name, torch.float16, (SLAB,)) for name in ("token", "zero")),
        )

    def encode(self, x: torch.Tensor) -> Packed:
        codes, token, zero, channel = self._quantized(x)
        return {
            "codes": codes,
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


def _format(keys: int, values: int, shipped: bool = True) -> Format:
    defaults = {"key_bits": keys, "value_bits": values, "S": TILE, "N": TILE}
    title = f"KVarN, {keys}-bit keys, {values}-bit values" + ("" if shipped else "; not one of their presets")
    return Format(f"kvarn_k{keys}v{values}", title, KVarNKeys, KVarNValues, defaults, public=False)


FORMATS = (_format(4, 4), _format(4, 2), _format(2, 2, shipped=False))
