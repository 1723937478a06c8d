"""e4m3_unscaled, e4m3_calibrated: 8-bit floats, as vLLM's `--kv-cache-dtype fp8` stores keys and values.

    code = e4m3(clamp(x / s, -448, 448)),   x' = s code

s is 1, or one number for each layer's keys and one for its values, from a calibration text: max |x| / 448, as in
checkpoints that are published with scales for their cache. Nothing is rotated.

`e4m3_rounding` is "nearest", as on GPUs, or "toward_zero", as in vLLM's kernels for CPUs, which cut off the lower bits
(evaluation.md): that doubles the error and shrinks all numbers.

Slab (32 tokens; d = 128): 4096 bytes for each half, 8 bits per element

    codes  u8   [d / 4 quads][32][4]   the bytes of float8_e4m3fn
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_kvq.eval.peers.coding import CodedKeys, CodedValues, Coding
from vllm_kvq.formats.codec import Geometry
from vllm_kvq.formats.constants import Calibration, known, not_served
from vllm_kvq.formats.option import Option
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.table import Format

LARGEST = 448.0
LAST = 0x7E
"""The byte of the largest number; the next byte is a NaN."""
BIAS = 2.0**-120
"""Multiplies a float32 without loss so that its exponent field is e4m3's: biased by 7, not by 127."""
ROUNDING = Option(
    "e4m3_rounding",
    "rounding of 8-bit floats: to the nearest, or the lower bits cut off",
    "nearest",
    ("nearest", "toward_zero"),
)


def toward_zero(x: torch.Tensor) -> torch.Tensor:
    """float32 within +-448 -> the bytes of the nearest e4m3 of no larger magnitude."""
    bits = (x * BIAS).view(torch.int32)
    return ((bits >> 20 & 0x7F).clamp_max(LAST) | (bits >> 24 & 0x80)).to(torch.uint8)


class FloatCoding(Coding):
    """Floats with a scale of 1."""

    def __init__(self, geometry: Geometry, rounding: str) -> None:
        self.slab_fields = (Field("codes", torch.uint8, key_code_shape(geometry.d, 8)),)
        self.rounding = rounding

    @property
    def scale(self) -> torch.Tensor:
        """(1,)"""
        return torch.ones(1)

    def rotation(self) -> None:
        return None

    def encode(self, x: torch.Tensor) -> Packed:
        x = (x / self.scale.to(x.device)).clamp(-LARGEST, LARGEST).unflatten(1, (-1, SLAB))
        codes = toward_zero(x) if self.rounding == "toward_zero" else x.to(torch.float8_e4m3fn).view(torch.uint8)
        return {"codes": pack_keys(codes, 8)}

    def decode(self, fields: Packed) -> torch.Tensor:
        codes = unpack_keys(fields["codes"], 8).contiguous().view(torch.float8_e4m3fn)
        return (codes.float() * self.scale.to(codes.device)).flatten(1, 2)


class ScaledCoding(FloatCoding):
    def __init__(self, geometry: Geometry, rounding: str, constants: torch.Tensor | None) -> None:
        super().__init__(geometry, rounding)
        self.constants = constants

    @property
    def scale(self) -> torch.Tensor:
        # the same for all heads of the layer
        return known(self.constants, "e4m3_calibrated")[0]


def scales(x: torch.Tensor) -> torch.Tensor:
    """(tokens, KV heads, d) -> (KV heads, 1), the same for all heads of the layer."""
    return (x.float().abs().max() / LARGEST).clamp_min(1e-12).expand(x.shape[1], 1)


class FloatKeys(CodedKeys):
    name = "e4m3"
    title = "8-bit floats with a scale of 1"
    options = (ROUNDING,)

    @classmethod
    def coding_of(cls, geometry: Geometry, options: Mapping[str, Any]) -> Coding:
        return FloatCoding(geometry, options[ROUNDING.name])


class FloatValues(CodedValues):
    name = "e4m3"
    title = "8-bit floats with a scale of 1"
    options = (ROUNDING,)

    @classmethod
    def coding_of(cls, geometry: Geometry, options: Mapping[str, Any]) -> Coding:
        return FloatCoding(geometry, options[ROUNDING.name])


class ScaledKeys(CodedKeys):
    name = "e4m3_scaled"
    title = "8-bit floats with a scale per layer"
    options = (ROUNDING,)
    calibrated = True
    reference_only = not_served("e4m3_calibrated")

    @classmethod
    def coding_of(cls, geometry: Geometry, options: Mapping[str, Any]) -> Coding:
        constants = geometry.constants and geometry.constants.keys
        return ScaledCoding(geometry, options[ROUNDING.name], constants)

    @classmethod
    def fit_constants(cls, calibration: Calibration, options: Mapping[str, Any]) -> torch.Tensor:
        return scales(calibration.key)


class ScaledValues(CodedValues):
    name = "e4m3_scaled"
    title = "8-bit floats with a scale per layer"
    options = (ROUNDING,)
    calibrated = True
    reference_only = not_served("e4m3_calibrated")

    @classmethod
    def coding_of(cls, geometry: Geometry, options: Mapping[str, Any]) -> Coding:
        constants = geometry.constants and geometry.constants.values
        return ScaledCoding(geometry, options[ROUNDING.name], constants)

    @classmethod
    def fit_constants(cls, calibration: Calibration, options: Mapping[str, Any]) -> torch.Tensor:
        return scales(calibration.value)


FORMATS = (
    Format("e4m3_unscaled", "8-bit floats with a scale of 1", FloatKeys, FloatValues, public=False),
    Format("e4m3_calibrated", "8-bit floats with calibrated scales", ScaledKeys, ScaledValues, public=False),
)
