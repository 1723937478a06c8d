"""oscar2: OSCAR (arXiv 2605.17757), 2 bits after rotations that are fitted to a calibration text.

    keys    C = mean of q q^T over the queries of a KV head's group
    values  C = mean of w v v^T,   w = k C_keys k^T, with a mean of 1
    R = U H P     U: eigenvectors of C, H: the Hadamard matrix,
                  P: moves column i of U H, of the i-th largest eigenvalue, to the index with i's bits reversed

Keys and queries are as they are after RoPE. The authors' code takes the mean of C over the KV heads of a layer, and
thus one R for all of them (`oscar_rotation` layer); "head" gives each its own.

    y = x R,   y = clamp(y, -t, t)     t: the element floor(share d) of |y| sorted; share .96 of keys, .92 of values
    scale = (max - min) / 3,  zero = -min / scale,  code = floor(y / scale + zero + 1/2),  y' = (code - zero) scale

over 128 channels of a token. The first 64 tokens and the newest 256 are exact. Scale and zero are stored as float16:
the paper counts 16 bits for each, their server stores 32.

Slab (32 tokens; d = 128): 1152 bytes for each half, 2.25 bits per element

    codes        u8   [d / 16 quads][32][4]   1024
    scale, zero  f16  [d / 128][32]             64 each
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import vllm_kvq.late_torch as torch
from vllm_kvq.eval.peers.coding import CodedKeys, CodedValues, Coding
from vllm_kvq.formats.codec import Geometry
from vllm_kvq.formats.constants import Calibration, known, not_served
from vllm_kvq.formats.option import Option
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.parts.quant import half
from vllm_kvq.formats.parts.rotation import hadamard
from vllm_kvq.formats.table import Format

NAME = "oscar2"
BITS = 2
TOP = 2**BITS - 1
GROUP = 128
KEY_SHARE, VALUE_SHARE = 0.96, 0.92
SMALLEST = 1e-8
"""OSCAR's least range of a group."""
ROTATION = Option(
    "oscar_rotation", "which KV heads share OSCAR's rotation: all of a layer, or none", "layer", ("layer", "head")
)


# -- calibration -----------------------------------------------------------------------------------------------------
def rotations(covariance: torch.Tensor) -> torch.Tensor:
    """(heads, d, d) float64 -> R, (heads, d, d) float32."""
    d = covariance.shape[-1]
    eigenvalues, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    order = eigenvalues.argsort(dim=-1, descending=True)
    place = torch.tensor([int(f"{i:0{d.bit_length() - 1}b}"[::-1], 2) for i in range(d)])
    columns = torch.empty_like(order)
    columns[:, place] = order
    mixed = vectors @ hadamard(d).double()
    return mixed.gather(-1, columns[:, None].expand_as(mixed)).float()


def of_queries(calibration: Calibration) -> torch.Tensor:
    """(KV heads, d, d) float64."""
    q = calibration.grouped.double()
    return q.mT @ q / q.shape[1]


def of_values(calibration: Calibration) -> torch.Tensor:
    k, v = (x.transpose(0, 1).double() for x in (calibration.key, calibration.value))
    weight = ((k @ of_queries(calibration)) * k).sum(-1, keepdim=True)
    weight = weight / weight.mean(1, keepdim=True).clamp_min(1e-12)
    return (v * weight).mT @ v / v.shape[1]


def fitted(covariance: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    if options[ROTATION.name] == "head":
        return rotations(covariance)
    return rotations(covariance.mean(0, keepdim=True)).expand(len(covariance), -1, -1)


# -- the codec -------------------------------------------------------------------------------------------------------
class RotatedCoding(Coding):
    def __init__(self, geometry: Geometry, share: float, constants: torch.Tensor | None) -> None:
        d = geometry.head_size
        if d & (d - 1):
            raise ValueError(f"{NAME} needs a Hadamard matrix of the whole head, whose size {d} is not a power of two")
        self.clip, self.group, self.constants = int(share * d), min(d, GROUP), constants
        numbers = (d // self.group, SLAB)
        self.slab_fields = (
            Field("codes", torch.uint8, key_code_shape(d, BITS)),
            *(Field(name, torch.float16, numbers) for name in ("scale", "zero")),
        )

    def rotation(self) -> torch.Tensor:
        return known(self.constants, NAME)

    def encode(self, x: torch.Tensor) -> Packed:
        most = x.abs().sort(dim=-1).values[..., self.clip, None]
        y = x.clamp(-most, most).unflatten(1, (-1, SLAB)).unflatten(-1, (-1, self.group))
        low = y.amin(-1, keepdim=True)
        scale = (y.amax(-1, keepdim=True) - low).clamp_min(SMALLEST) / TOP
        zero = -low / scale
        # codes are chosen before scale and zero are rounded
        codes = (y / scale + zero + 0.5).long().clamp(0, TOP).flatten(-2)
        return {"codes": pack_keys(codes, BITS)} | {
            name: half(number.squeeze(-1).mT) for name, number in (("scale", scale), ("zero", zero))
        }

    def decode(self, fields: Packed) -> torch.Tensor:
        codes = unpack_keys(fields["codes"], BITS).float().unflatten(-1, (-1, self.group))
        scale, zero = (fields[name].float().mT.unsqueeze(-1) for name in ("scale", "zero"))
        return ((codes - zero) * scale).flatten(-2).flatten(1, 2)


class OscarKeys(CodedKeys):
    name = "oscar"
    title = "rotated by what queries look at, 2 bits per token"
    hurt_by_biases = "rotates keys, which spreads a constant channel over all that share a scale"
    options = (ROTATION,)
    calibrated = True
    reference_only = not_served(NAME)

    @classmethod
    def coding_of(cls, geometry: Geometry, options: Mapping[str, Any]) -> Coding:
        return RotatedCoding(geometry, KEY_SHARE, geometry.constants and geometry.constants.keys)

    @classmethod
    def fit_constants(cls, calibration: Calibration, options: Mapping[str, Any]) -> torch.Tensor:
        return fitted(of_queries(calibration), options)


class OscarValues(CodedValues):
    name = "oscar"
    title = "rotated by what scores weigh, 2 bits per token"
    options = (ROTATION,)
    calibrated = True
    reference_only = not_served(NAME)

    @classmethod
    def coding_of(cls, geometry: Geometry, options: Mapping[str, Any]) -> Coding:
        return RotatedCoding(geometry, VALUE_SHARE, geometry.constants and geometry.constants.values)

    @classmethod
    def fit_constants(cls, calibration: Calibration, options: Mapping[str, Any]) -> torch.Tensor:
        return fitted(of_values(calibration), options)


FORMATS = (Format(NAME, "OSCAR, 2-bit", OscarKeys, OscarValues, {"S": 64, "W": 256}, public=False),)
