"""Keys by transform coding: SQuat's thought carried through, not to a few directions of the queries but to all.

The Karhunen-Loeve transform, of keys as queries see them. A calibration text gives for each KV head the mean mu and the
covariance C_K of its keys, and the second moment C_Q of the queries that read them:

    M = d C_Q / tr C_Q + REGULAR I      R = M^(1/2)      an error e of a key harms scores by |R e|
    R C_K R = V diag(s^2) V^T           T = V^T R        y = T (k - mu) / s: all of variance 1, and not correlated
    b                                                    bits by channel: more where s is large, see `allocated`
    k' = mu + T^-1 s a level(code)                       a: one scale per token, see search.py

    q . k' = q . mu + a sum_c (s T^-T q)_c level(code_c)

So a kernel transforms a query once per step, and reads codes and one number per token. A channel has 0, 2, 4 or 6 bits:
0 to 3 digits of base 4, code = sum_j 4^j digit_j. Each digit is a code of 2 bits in a slot of its own, and the query's
number for the slot is the channel's times 4^j. To a kernel all heads thus have the same number of slots of 2 bits,
whatever their allocation.

Slab of the keys (32 tokens; d = 128, 3 bits): 1600 bytes, 3.125 bits per element

    k_codes  u8   [slots / 16 quads][32][4]   1536   slots = d bits / 2; plane-quad like all key codes
    k_scale  f16  [32]                          64

Values are `SearchedValues`: their covariance says little about the next text's, so they are only mixed and scaled.

    y = v H / sqrt(b)   H the Hadamard matrix, b the size of its blocks (rotation.py);   a as above, equal weights

    v_codes  u8   [8 token quads][d b / 8][4]   1024   b = 2 (low bits if b = 3) or 4; d = 128, b = 2
    v_high   u8   [8 token quads][d / 8][4]      512   only if b = 3: the highest bits
    v_scale  f16  [32]                            64
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_kvq.formats.codec import Geometry, KeyCodec, ValueCodec
from vllm_kvq.formats.constants import Calibration, not_served, of_one_head
from vllm_kvq.formats.fields import Field, Packed, round_up
from vllm_kvq.formats.option import Option
from vllm_kvq.formats.planes import (
    SLAB,
    key_code_shape,
    pack_keys,
    pack_values,
    unpack_keys,
    unpack_values,
    value_code_shape,
)
from vllm_kvq.formats.quant import LIMIT
from vllm_kvq.formats.rotation import block, hadamard
from vllm_kvq.formats.search import levels, searched, widths
from vllm_kvq.formats.table import Format

DIGIT = 2
"""Bits of a slot."""
REGULAR = 0.05
"""The share of M that is the same for all directions: another text's queries look elsewhere."""
SHORTEST = 1e-3
"""The least s, as a share of the largest: no transform has to stretch more."""
ERROR = (1.0, 0.1188, 0.01154, 0.00104)
"""Squared error of a normal number of variance 1 by its number of digits."""
RATE = Option("key_rate", "bits per key channel, on average", 3.0, low=1, high=5, multiple=0)
BITS = Option("searched_bits", "bits per value code with one searched scale per token", 3, (2, 3, 4))


# -- what is fitted to a calibration text ----------------------------------------------------------------------------
def allocated(variance: Sequence[float], slots: int) -> list[int]:
    """Digits by channel: each slot in turn goes where it takes away most of the error."""
    digits = [0] * len(variance)

    def gain(c: int) -> tuple[float, int]:
        return -variance[c] * (ERROR[digits[c]] - ERROR[digits[c] + 1]), c

    waiting = [gain(c) for c in range(len(variance))]
    heapq.heapify(waiting)
    for _ in range(slots):
        _, c = heapq.heappop(waiting)
        digits[c] += 1
        if digits[c] + 1 < len(ERROR):
            heapq.heappush(waiting, gain(c))
    return digits


def transform(calibration: Calibration, d: int, slots: int) -> torch.Tensor:
    """(KV heads, 3 + 2 d, d) float32: rows mu, s, digits, then T / s, then (T^-1 s)^T."""
    pad = d - calibration.key.shape[-1]
    key, query = (
        torch.nn.functional.pad(x.double(), (0, pad)) for x in (calibration.key.transpose(0, 1), calibration.grouped)
    )
    mean = key.mean(1, keepdim=True)
    covariance = (key - mean).mT @ (key - mean) / key.shape[1]
    moment = query.mT @ query / query.shape[1]
    share = d / moment.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-12)
    seen = moment * share[:, None, None] + REGULAR * torch.eye(d, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(seen)
    root, inverse = ((vectors * values[:, None] ** power) @ vectors.mT for power in (0.5, -0.5))
    variance, basis = torch.linalg.eigh(root @ covariance @ root)
    s = variance.clamp_min(0).sqrt()
    s = s.clamp_min(SHORTEST * s.amax(-1, keepdim=True).clamp_min(1e-6))
    digits = torch.tensor([allocated(v.tolist(), slots) for v in variance], dtype=torch.float64)
    forward, backward = basis.mT @ root / s[..., None], (inverse @ basis * s[:, None]).mT
    return torch.cat([mean, s[:, None], digits[:, None], forward, backward], 1).float()


# -- the codecs ------------------------------------------------------------------------------------------------------
class TransformedKeys(KeyCodec):
    name = "klt"
    title = "transformed by what queries look at, one scale per token"
    public = False
    options = (RATE,)
    calibrated = True
    reference_only = not_served("klt")

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.d, self.constants = geometry.d, geometry.constants and geometry.constants.keys
        self.slots = self._slots(geometry.d, options)

    @classmethod
    def fit_constants(cls, calibration: Calibration, options: Mapping[str, Any]) -> torch.Tensor:
        d = round_up(calibration.key.shape[-1], SLAB)
        return transform(calibration, d, cls._slots(d, options))

    @staticmethod
    def _slots(d: int, options: Mapping[str, Any]) -> int:
        # four planes of channel quads
        return round_up(int(d * options[RATE.name]) // DIGIT, 16)

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (
            Field("k_codes", torch.uint8, key_code_shape(self.slots, DIGIT)),
            Field("k_scale", torch.float16, (SLAB,)),
        )

    def _constants(self, device: torch.device) -> Sequence[torch.Tensor]:
        """mu, s, digits; T / s and (T^-1 s)^T."""
        rows = of_one_head(self.constants, self.name).to(device)
        mean, s, digits = rows[:3]
        return mean, s, digits.long(), rows[3 : 3 + self.d], rows[3 + self.d :]

    @staticmethod
    def _places(digits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each slot: its channel, and j. A channel's slots lie side by side."""
        channel = torch.repeat_interleave(digits)
        first = torch.cumsum(digits, 0) - digits
        return channel, torch.arange(len(channel), device=digits.device) - first[channel]

    def _by_head(self, what: Any, *tensors: Any) -> Any:
        heads = len(self.constants)
        if heads == 1:
            return what(self, *tensors)
        out = []
        for h in range(heads):
            one = object.__new__(type(self))
            one.d, one.slots, one.constants = self.d, self.slots, self.constants[h : h + 1]
            out.append(
                what(one, *({k: v[h::heads] for k, v in t.items()} if isinstance(t, dict) else t[h::heads] for t in tensors))
            )
        if isinstance(out[0], dict):
            return {k: torch.stack([o[k] for o in out], 1).flatten(0, 1) for k in out[0]}
        return torch.stack(out, 1).flatten(0, 1)

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return self._by_head(lambda one, x: one._pack(x), x)

    def unpack(self, fields: Packed) -> torch.Tensor:
        return self._by_head(lambda one, f: one._unpack(f), fields)

    def _pack(self, x: torch.Tensor) -> Packed:
        mean, s, digits, forward, _ = self._constants(x.device)
        codes, scale = searched((x - mean) @ forward.mT, *widths(DIGIT * digits), s.square())
        channel, j = self._places(digits)
        slots = (codes.long()[..., channel] >> DIGIT * j) & (2**DIGIT - 1)
        return {
            "k_codes": pack_keys(slots.unflatten(1, (-1, SLAB)), DIGIT),
            "k_scale": scale.squeeze(-1).unflatten(1, (-1, SLAB)),
        }

    def _unpack(self, fields: Packed) -> torch.Tensor:
        mean, _, digits, _, backward = self._constants(fields["k_codes"].device)
        channel, j = self._places(digits)
        slots = unpack_keys(fields["k_codes"], DIGIT).flatten(1, 2).float() * 4.0**j
        codes = slots.new_zeros(*slots.shape[:-1], self.d).index_add(-1, channel, slots)
        y = levels(codes, *widths(DIGIT * digits)) * fields["k_scale"].float().flatten(1, 2).unsqueeze(-1)
        # nothing larger was stored; the errors of a token's numbers may add up to more
        return (y @ backward + mean).clamp(-LIMIT, LIMIT)

    def query_features(self, query: torch.Tensor) -> torch.Tensor:
        mean, _, digits, _, backward = self._constants(query.device)
        channel, j = self._places(digits)
        step, most = widths(DIGIT * digits)
        seen = query @ backward.mT * step
        middle, constant = -(seen * most).sum(-1, keepdim=True) / 2, (query * mean).sum(-1, keepdim=True)
        return torch.cat([seen[..., channel] * 4.0**j, middle, constant], -1)

    def key_features(self, fields: Packed) -> torch.Tensor:
        scale = fields["k_scale"].float().flatten(1, 2).unsqueeze(-1)
        slots = unpack_keys(fields["k_codes"], DIGIT).flatten(1, 2).float()
        return torch.cat([slots * scale, scale, torch.ones_like(scale)], -1)


class SearchedValues(ValueCodec):
    name = "searched"
    title = "rotated, one searched scale per token"
    public = False
    options = (BITS,)

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.d, self.bits = geometry.d, options[BITS.name]
        self.low = 2 if self.bits == 3 else self.bits
        """Bits of the codes in `v_codes`."""

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        codes = Field("v_codes", torch.uint8, value_code_shape(self.d, self.low))
        high = Field("v_high", torch.uint8, value_code_shape(self.d, 1))
        return (codes, *((high,) if self.bits > self.low else ()), Field("v_scale", torch.float16, (SLAB,)))

    def _mixing(self, device: torch.device) -> torch.Tensor:
        return hadamard(self.d).to(device)

    def _widths(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return widths(torch.full((self.d,), self.bits, device=device))

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        y = x @ self._mixing(x.device) / block(self.d) ** 0.5
        found, scale = searched(y, *self._widths(x.device), torch.ones(self.d, device=x.device))
        codes = found.to(torch.uint8).unflatten(1, (-1, SLAB))
        fields = {
            "v_codes": pack_values(codes & (2**self.low - 1), self.low),
            "v_scale": scale.squeeze(-1).unflatten(1, (-1, SLAB)),
        }
        return fields if self.bits == self.low else {**fields, "v_high": pack_values(codes >> self.low, 1)}

    def unpack(self, fields: Packed) -> torch.Tensor:
        codes = unpack_values(fields["v_codes"], self.low)
        if self.bits > self.low:
            codes = codes | unpack_values(fields["v_high"], 1) << self.low
        scale = fields["v_scale"].float().unsqueeze(-1)
        y = (levels(codes.float(), *self._widths(codes.device)) * scale).flatten(1, 2)
        return (y @ self._mixing(y.device) * block(self.d) ** 0.5).clamp(-LIMIT, LIMIT)


def _klt(bits: int, rate: float) -> Format:
    title, defaults = f"Transform coding, {bits}-bit", {RATE.name: rate, BITS.name: bits, "W": 32}
    return Format(f"klt{bits}", title, TransformedKeys, SearchedValues, defaults, public=False)


FORMATS = (_klt(2, 2.5), _klt(3, 3.0), _klt(4, 4.0))
