"""InnerQ: groups of 32 along the *inner* dimension of each product, hybrid rounding, per-channel key norms.

Keys: per token over 32 channels, after k / norm with norm_i = sqrt(max_t |K_ti|) of the prompt's keys (the norm is
folded into q once per page). Values: per channel over 32 tokens. Each group takes the mode with the smaller error
(`quant_mode: hybrid`; with `hybrid_prefill` only groups that prompts complete do, and the others are symmetric), or all
groups have the same mode (`symmetric`, `asymmetric`):

    asymmetric   x = zero + code scale,   zero = min, scale = (max - min) / (2^b - 1)
    symmetric    x = v scale,             |v| <= 2^b - 1, scale = max |x| / (2^b - 1)     (one more bit: the sign)

The 32-bit slot of a group holds the float32 zero or the 32 sign bits; v is stored in two's complement, its low b
bits as the code and the inverted sign as bit b, so that v + 2^b is one unsigned (b + 1)-bit code. The mode itself is
the sign bit of the scale, which is positive anyway: the paper's mask costs nothing (3.50 instead of 3.53 bits), and
the bytes are the same in all modes. With `key_norm: none` the norm that a page stores is 1.

Page (d = 128)
    k_inner_norm f16 [d]               256   the norm that this page's keys were divided by
Slab (32 tokens; d = 128, b = 2): keys 1792, values 1792 bytes, 3.5 bits per element each
    k_codes  u8   [d b / 32 quads][32][4]   1024   plane-quad, as everywhere
    k_scale  f16  [d / 32][32 tokens]        256   token-minor: scales multiply 16 tokens' partial scores at once
    k_slot   i32  [d / 32][32 tokens]        512   element e of the group at bit 8 (e % 4) + e / 4 (see planes.py)
    v_codes  u8   [8][d b / 8][4]           1024
    v_scale  f16  [d]                        256
    v_slot   i32  [d]                        512
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast

import torch

from vllm_kvq.formats.codec import Geometry, KeyCodec, ValueCodec
from vllm_kvq.formats.option import KEY_BITS, VALUE_BITS, Option
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import (
    SLAB,
    key_code_shape,
    pack_keys,
    pack_sign_words,
    pack_values,
    unpack_keys,
    unpack_sign_words,
    unpack_values,
    value_code_shape,
)
from vllm_kvq.formats.parts.quant import affine_codes, affine_parameters, half, positive_half
from vllm_kvq.formats.table import Format
from vllm_kvq.formats.variant import variant

GROUP = 32
"""Fixed: the slot's 32 bits hold one sign per element."""

MODES = ("hybrid", "symmetric", "asymmetric")
"""In the order in which kernels number them."""
HYBRID, SYMMETRIC, _ = range(len(MODES))
HYBRID_PREFILL = "hybrid_prefill"
QUANT_MODE = Option(
    "quant_mode",
    "mode of InnerQ's groups: the better one for each, the better one in the prompt only (not served), or one for all",
    "hybrid",
    ("hybrid", HYBRID_PREFILL, "symmetric", "asymmetric"),
)


class HybridPrefill:
    """`quant_mode: hybrid_prefill`: groups that a decode step completes are symmetric."""

    tells_decode = True
    reference_only = (
        f"option 'quant_mode' is not served as '{HYBRID_PREFILL}', which is only for vllm_kvq.roundtrip and the "
        "evaluation; 'hybrid' takes the same bytes"
    )

    def pack_decoded(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return cast("HybridKeys | HybridValues", self).pack_as(x, state, SYMMETRIC)


def _mode(options: Mapping[str, Any]) -> int:
    """The mode of groups that prompts complete."""
    name = options["quant_mode"]
    return HYBRID if name == HYBRID_PREFILL else MODES.index(name)


def _changes(options: Mapping[str, Any]) -> tuple[type, ...]:
    return (HybridPrefill,) if options["quant_mode"] == HYBRID_PREFILL else ()


def hybrid_quantize(x: torch.Tensor, bits: int, mode: int = HYBRID) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(..., 32) -> codes (..., 32), scale (...) whose sign is the mode, slot (...) int32."""
    top = 2**bits - 1
    scale, zero = affine_parameters(x, -1, bits)
    # the slot has room for a float32 zero, as in the paper
    zero = x.amin(-1, keepdim=True)
    codes = affine_codes(x, scale, zero, bits)
    wide = positive_half(x.abs().amax(-1, keepdim=True) / top)
    signed = (x / wide).round().clamp(-top, top)
    if mode == HYBRID:
        error = (torch.addcmul(zero, codes, scale) - x).square().sum(-1, keepdim=True)
        symmetric = (signed * wide - x).square().sum(-1, keepdim=True) < error
    else:
        symmetric = torch.full_like(zero, mode == SYMMETRIC, dtype=torch.bool)
    codes = torch.where(symmetric, signed.to(torch.int32) & top, codes.to(torch.int32))
    slot = torch.where(
        symmetric.squeeze(-1), pack_sign_words(signed >= 0), zero.squeeze(-1).contiguous().view(torch.int32)
    )
    return codes, torch.where(symmetric, -wide, scale).squeeze(-1), slot


def hybrid_dequantize(codes: torch.Tensor, scale: torch.Tensor, slot: torch.Tensor, bits: int) -> torch.Tensor:
    symmetric = scale.signbit().unsqueeze(-1)
    signed = codes + (unpack_sign_words(slot).float() - 1) * 2**bits
    zero = slot.contiguous().view(torch.float32).unsqueeze(-1)
    affine = torch.where(symmetric, torch.zeros_like(zero), zero)
    return torch.addcmul(affine, torch.where(symmetric, signed, codes), scale.abs().unsqueeze(-1))


def usable_norm(norm: torch.Tensor) -> torch.Tensor:
    """The norm as stored. A channel that was zero throughout the prompt gets 1, a nearly dead one at least 1/64, so
    later values in such a channel can't swamp their group."""
    return torch.where(norm > 0, half(norm).clamp_min(2.0**-6), 1.0)


KEY_NORMS = ("prompt", "none")


class HybridKeys(KeyCodec):
    name = "innerq"
    title = "per token over 32 channels, after division by the prompt's channel norms"
    hurt_by_biases = "gives 32 channels of a token one scale, which a wide constant channel uses up"
    options = (
        KEY_BITS,
        QUANT_MODE,
        Option("key_norm", "what InnerQ's keys are divided by: the prompt's norms, or nothing", "prompt", KEY_NORMS),
    )

    @classmethod
    def bind(cls, geometry: Geometry, options: Mapping[str, Any]) -> Self:
        return variant(cls, *_changes(options))(geometry, options)

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.d, self.bits, self.mode = geometry.d, options["key_bits"], _mode(options)
        self.state_rows = int(options["key_norm"] == "prompt")
        self.groups = geometry.d // GROUP

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (
            Field("k_codes", torch.uint8, key_code_shape(self.d, self.bits)),
            Field("k_scale", torch.float16, (self.groups, SLAB)),
            Field("k_slot", torch.int32, (self.groups, SLAB)),
        )

    @property
    def page_fields(self) -> tuple[Field, ...]:
        return (Field("k_inner_norm", torch.float16, (self.d,)),)

    def fit(self, queries: torch.Tensor, keys: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        return self.fit_top(keys.abs().amax(1, keepdim=True), state)

    def fit_top(self, top: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """The same from the keys' largest magnitudes (H, 1, d)."""
        norm = top.sqrt()
        return norm if state is None else torch.maximum(state, norm)

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return self.pack_as(x, state, self.mode)

    def pack_as(self, x: torch.Tensor, state: torch.Tensor | None, mode: int) -> Packed:
        norm = torch.ones_like(x[:, 0]) if state is None else usable_norm(state[:, 0])
        grouped = (x / norm[:, None]).unflatten(1, (-1, SLAB)).unflatten(-1, (self.groups, GROUP))
        codes, scale, slot = hybrid_quantize(grouped, self.bits, mode)
        return {
            "k_codes": pack_keys(codes.flatten(-2), self.bits),
            "k_scale": scale.transpose(-2, -1),
            "k_slot": slot.transpose(-2, -1),
            "k_inner_norm": norm,
        }

    def page_state(self, fields: Packed) -> torch.Tensor | None:
        return fields["k_inner_norm"].float().unsqueeze(1)

    def unpack(self, fields: Packed) -> torch.Tensor:
        codes = unpack_keys(fields["k_codes"], self.bits).float().unflatten(-1, (self.groups, GROUP))
        scale, slot = (fields[n].transpose(-2, -1) for n in ("k_scale", "k_slot"))
        x = hybrid_dequantize(codes, scale.float(), slot, self.bits).flatten(-2)
        return x.flatten(1, 2) * fields["k_inner_norm"].float()[:, None]


class HybridValues(ValueCodec):
    name = "innerq"
    title = "per channel over 32 tokens"
    options = (VALUE_BITS, QUANT_MODE)

    @classmethod
    def bind(cls, geometry: Geometry, options: Mapping[str, Any]) -> Self:
        return variant(cls, *_changes(options))(geometry, options)

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.d, self.bits, self.mode = geometry.d, options["value_bits"], _mode(options)

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (
            Field("v_codes", torch.uint8, value_code_shape(self.d, self.bits)),
            Field("v_scale", torch.float16, (self.d,)),
            Field("v_slot", torch.int32, (self.d,)),
        )

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return self.pack_as(x, state, self.mode)

    def pack_as(self, x: torch.Tensor, state: torch.Tensor | None, mode: int) -> Packed:
        codes, scale, slot = hybrid_quantize(x.unflatten(1, (-1, SLAB)).transpose(-2, -1), self.bits, mode)
        return {"v_codes": pack_values(codes.transpose(-2, -1), self.bits), "v_scale": scale, "v_slot": slot}

    def unpack(self, fields: Packed) -> torch.Tensor:
        codes = unpack_values(fields["v_codes"], self.bits).float().transpose(-2, -1)
        x = hybrid_dequantize(codes, fields["v_scale"].float(), fields["v_slot"], self.bits)
        return x.transpose(-2, -1).flatten(1, 2)


FORMATS = (Format("innerq2", "InnerQ, hybrid", HybridKeys, HybridValues, {"S": 32, "W": 96}),)
