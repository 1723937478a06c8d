"""Keys by transform coding: SQuat's idea carried through, for all directions of the queries and not just a few.

The Karhunen-Loeve transform, of keys as queries see them. A calibration text gives for each KV head the mean mu of its
keys, which RoPE turns from slab to slab (parts/turning.py), their covariance C_K about it, and the second moment C_Q of
the queries that read them:

    M = d C_Q / tr C_Q + REGULAR I      R = M^(1/2)      an error e of a key harms scores by |R e|
    R C_K R = V diag(s^2) V^T           T = V^T R        y = T (k - mu) / s: all of variance 1, and not correlated
    b                                                    bits by channel: more where s is large, see `allocated`
    k' = mu + T^-1 s a level(code)                       a: one scale per token, see search.py

    q . k' = q . mu + a sum_c (s T^-T q)_c level(code_c)

So a kernel transforms a query once per step, and reads codes and one byte per token. A channel has 0, 2, 4 or 6 bits:
0 to 3 digits in base 4, code = sum_j 4^j digit_j. Each digit is a code of 2 bits in a slot of its own, and the query's
number for the slot is the channel's times 4^j. To a kernel all heads thus have the same number of slots of 2 bits,
whatever their allocation. Slots with the highest digits come first in the order in which kernels read them, because
queries in fixed point have one unit for each j.

Slab of the keys (32 tokens; d = 128, 3 bits): 1568 bytes, 3.0625 bits per element

    k_codes  u8   [slots / 16 quads][32][4]   1536   slots = d bits / 2; plane-quad like all key codes
    k_scale  u8   [32]                          32   parts/scales.py

Values are `SearchedValues`: their covariance says little about the next text's, so they are only mixed and scaled.

    y = v H / sqrt(b)   H the Hadamard matrix, b the size of its blocks (parts/rotation.py);   a as above, equal weights

    v_codes  u8   [8 token quads][d b / 8][4]   1024   b = 2 (low bits if b = 3) or 4; d = 128, b = 2
    v_high   u8   [8 token quads][d / 8][4]      512   only if b = 3: the highest bits
    v_scale  u8   [32]                            32   in the same line as k_scale
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvq.formats.codec import Geometry, KeyCodec, ValueCodec
from vllm_kvq.formats.constants import Calibration, Moments, by_head, known
from vllm_kvq.formats.option import Option
from vllm_kvq.formats.parts.fields import Field, Packed, round_up
from vllm_kvq.formats.parts.planes import (
    SLAB,
    key_code_shape,
    pack_keys,
    pack_values,
    unpack_keys,
    unpack_values,
    value_code_shape,
)
from vllm_kvq.formats.parts.quant import LIMIT
from vllm_kvq.formats.parts.rotation import block, hadamard
from vllm_kvq.formats.parts.scales import scale_field, scale_of
from vllm_kvq.formats.parts.search import levels, searched, widths
from vllm_kvq.formats.parts.turning import Turning
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
    """Digits by channel: each slot in turn goes where it takes away the most error."""
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


def _less(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the traces of the heads' matrices (H, d, d) are smaller, by their geometric mean."""
    traces = (x.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-30).log().sum() for x in (one, other))
    return bool(next(traces) < next(traces))


def constants_of(moments: Moments, turning: Turning, d: int) -> torch.Tensor:
    """(KV heads, 4 + 2 d, d) float32: rows b, s, theta and pairs (parts/turning.py), then T / s, then (T^-1 s)^T. The
    same for all numbers of bits. Means turn only where that leaves less to be stored."""
    short = d - moments.key.shape[-1]
    mean, covariance, moment = moments.turned_mean(turning), moments.turned_covariance(turning), moments.seen
    if not _less(moment @ covariance, moment @ moments.covariance):
        mean, covariance, turning = moments.mean, moments.covariance, Turning.none(len(moment[0]))
    pad = torch.nn.functional.pad
    mean, (covariance, moment) = pad(mean, (0, short)), (pad(x, (0, short, 0, short)) for x in (covariance, moment))
    share = d / moment.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-12)
    seen = moment * share[:, None, None] + REGULAR * torch.eye(d, dtype=torch.float64, device=moment.device)
    values, vectors = torch.linalg.eigh(seen)
    root, inverse = ((vectors * values[:, None] ** power) @ vectors.mT for power in (0.5, -0.5))
    variance, basis = torch.linalg.eigh(root @ covariance @ root)
    s = variance.clamp_min(0).sqrt()
    s = s.clamp_min(SHORTEST * s.amax(-1, keepdim=True).clamp_min(1e-6))
    forward, backward = basis.mT @ root / s[..., None], (inverse @ basis * s[:, None]).mT
    theta, pairs = (x.to(s).expand(len(s), 1, -1) for x in turning.rows(d))
    return torch.cat([mean[:, None], s[:, None], theta, pairs, forward, backward], 1).float()


@dataclass(frozen=True, eq=False)
class Transform:
    """A layer's constants as they are used: H KV heads, each with its own allocation of the same number of slots."""

    turning: Turning
    constant: torch.Tensor
    """(H, d): b, which RoPE turns."""
    weight: torch.Tensor
    """(H, 1, d): how much a channel's error matters, s^2."""
    forward: torch.Tensor
    """(H, d, d): y = (k - mu) @ forward."""
    backward: torch.Tensor
    """(H, d, d): k = mu + y @ backward."""
    step: torch.Tensor
    """(H, 1, d): of a channel's levels."""
    most: torch.Tensor
    """(H, 1, d): a channel's largest code; 0: the channel is not stored."""
    channel: torch.Tensor
    """(H, slots): a slot's channel."""
    digit: torch.Tensor
    """(H, slots): j of the slot."""

    @classmethod
    def of(cls, constants: torch.Tensor, slots: int) -> Transform:
        d = constants.shape[-1]
        mean, s, theta, pairs, forward, backward = constants.split((1, 1, 1, 1, d, d), 1)
        turning = Turning.of_rows(theta[0, 0], pairs[0, 0])
        digits = torch.tensor([allocated(of_head.square().tolist(), slots) for of_head in s[:, 0].cpu()])
        channel, digit = (x.to(s.device) for x in _placed(digits, slots))
        step, most = (x.to(s.device) for x in widths(DIGIT * digits[:, None]))
        return cls(turning, mean[:, 0], s.square(), forward.mT, backward, step, most, channel, digit)

    @functools.cached_property
    def mean(self) -> torch.Tensor:
        """(H, d, d): the mean of slab n is e(n) @ mean."""
        return self.turning.matrix(self.constant).mT

    @functools.cached_property
    def features(self) -> torch.Tensor:
        """(H, d, slots + d + 1): f(q) = q @ features. The last numbers go with a slab's e, and with a token's scale."""
        seen = self.backward.mT * self.step
        index = self.channel[:, None].expand(-1, seen.shape[1], -1)
        slots = seen.gather(-1, index) * 4.0 ** self.digit[:, None]
        return torch.cat([slots, self.mean.mT, -(seen * self.most).sum(-1, keepdim=True) / 2], -1)


def _placed(digits: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(H, d) digits of each channel -> (H, slots): each slot's channel and digit, the highest digits first, in the
    order in which kernels read them: word by word, each with four slots of each plane."""
    channel = torch.stack([torch.repeat_interleave(of_head) for of_head in digits])
    digit = torch.arange(slots) - (digits.cumsum(-1) - digits).gather(-1, channel)
    order = digit.argsort(dim=-1, descending=True, stable=True)
    order = order.unflatten(-1, (-1, 4, 4)).transpose(1, 2).flatten(1)
    return channel.gather(-1, order), digit.gather(-1, order)


# -- the codecs ------------------------------------------------------------------------------------------------------
class TransformedKeys(KeyCodec):
    name = "klt"
    title = "transformed by what queries look at, one scale per token"
    options = (RATE,)
    calibrated = True
    placed = True

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.d = geometry.d
        constants = None if geometry.constants is None else geometry.constants.keys
        # four planes of channel quads
        self.slots = round_up(int(self.d * options[RATE.name]) // DIGIT, 16)
        if constants is not None and constants.shape[1:] != (4 + 2 * self.d, self.d):
            raise ValueError(f"constants of shape {tuple(constants.shape)} are not those of heads of {self.d} channels")
        self.heads = 0 if constants is None else len(constants)
        """KV heads that have constants."""
        self._transform = None if constants is None else Transform.of(constants, self.slots)

    @classmethod
    def fit_constants(cls, calibration: Calibration, options: Mapping[str, Any]) -> torch.Tensor:
        key = calibration.key
        turning = Turning.of(calibration.turned, key.shape[-1])
        phases = turning.phases(torch.arange(len(key), device=key.device) // SLAB)
        return cls.fit_moments(Moments.of(calibration.query, key, phases), turning)

    @classmethod
    def fit_moments(cls, moments: Moments, turning: Turning | None = None) -> torch.Tensor:
        size = moments.key.shape[-1]
        return constants_of(moments, turning or Turning.none(size), round_up(size, SLAB))

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (
            Field("k_codes", torch.uint8, key_code_shape(self.slots, DIGIT)),
            scale_field("k_scale"),
        )

    @property
    def transform(self) -> Transform:
        return known(self._transform, self.name)

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        t = self.transform
        y = by_head(x, len(t.mean)) @ t.forward
        codes, scale = searched(y, t.step, t.most, t.weight)
        of_slots = t.channel[None, :, None].expand(*codes.shape[:-1], -1)
        slots = codes.long().gather(-1, of_slots) >> DIGIT * t.digit[:, None] & (2**DIGIT - 1)
        return {
            "k_codes": pack_keys(slots.flatten(0, 1).unflatten(1, (-1, SLAB)), DIGIT),
            "k_scale": scale.flatten(0, 1).squeeze(-1).unflatten(1, (-1, SLAB)),
        }

    def unpack(self, fields: Packed) -> torch.Tensor:
        t = self.transform
        slots, scale = (by_head(x, len(t.mean)) for x in self._read(fields))
        slots = slots * 4.0 ** t.digit[:, None]
        codes = slots.new_zeros(*slots.shape[:-1], self.d)
        codes.scatter_add_(-1, t.channel[None, :, None].expand(slots.shape), slots)
        y = levels(codes, t.step, t.most) * scale
        key = (y @ t.backward).flatten(0, 1)
        # nothing larger was stored; the errors of a token's numbers may add up to more
        return (key + self.mean_at(fields["position"], key.shape[1])).clamp(-LIMIT, LIMIT)

    def mean_at(self, position: torch.Tensor, tokens: int) -> torch.Tensor:
        t = self.transform
        mean = by_head(self._phases(position, tokens), len(t.mean)) @ t.mean
        return mean.flatten(0, 1).repeat_interleave(SLAB, 1)

    def _phases(self, position: torch.Tensor, tokens: int) -> torch.Tensor:
        """(U, tokens / 32, d): e of the slabs."""
        slab = position[:, None].long() // SLAB + torch.arange(tokens // SLAB, device=position.device)
        return self.transform.turning.phases(slab)

    def query_features(self, query: torch.Tensor) -> torch.Tensor:
        return query @ self.transform.features

    def key_features(self, fields: Packed) -> torch.Tensor:
        slots, scale = self._read(fields)
        phases = self._phases(fields["position"], slots.shape[1]).repeat_interleave(SLAB, 1)
        return torch.cat([slots * scale, phases, scale], -1)

    def _read(self, fields: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """(U, T, slots) codes and (U, T, 1) scales."""
        scale = scale_of(fields["k_scale"]).flatten(1, 2).unsqueeze(-1)
        return unpack_keys(fields["k_codes"], DIGIT).flatten(1, 2).float(), scale


class SearchedValues(ValueCodec):
    name = "searched"
    title = "rotated, one searched scale per token"
    options = (BITS,)

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.d, self.bits = geometry.d, options[BITS.name]
        self.low = 2 if self.bits == 3 else self.bits
        """Bits of the codes in `v_codes`."""

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        codes = Field("v_codes", torch.uint8, value_code_shape(self.d, self.low))
        high = Field("v_high", torch.uint8, value_code_shape(self.d, 1))
        return (codes, *((high,) if self.bits > self.low else ()), scale_field("v_scale"))

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
        scale = scale_of(fields["v_scale"]).unsqueeze(-1)
        y = (levels(codes.float(), *self._widths(codes.device)) * scale).flatten(1, 2)
        return (y @ self._mixing(y.device) * block(self.d) ** 0.5).clamp(-LIMIT, LIMIT)


def _klt(bits: int, rate: float, usual: int) -> Format:
    title, defaults = f"Transform coding, {bits}-bit", {RATE.name: rate, BITS.name: bits, "W": 32}
    return Format(f"klt{bits}", title, TransformedKeys, SearchedValues, defaults, usual=usual)


FORMATS = (_klt(2, 2.5, usual=3), _klt(3, 3.0, usual=1), _klt(4, 4.0, usual=2))
