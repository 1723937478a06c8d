"""int4_hadamard: keys rotated by a Hadamard matrix, then 4 bits per token over groups of channels.

A few channels of the keys are far larger than the others, and a group that holds one spends all its codes on it. After
k' = H k every channel has a part of every outlier, so that groups of one token hold numbers of like size. H
(vllm_kvq/formats/parts/rotation.py) is orthonormal, and keys are never rotated back: the query is rotated instead, once
per step.

    q . k = (H q) . (H k)
    zero = min, scale = (max - min) / 15, code = round((x - zero) / scale)      over `hadamard_group` channels of H k

Slab of the keys (32 tokens; d = 128, groups of 32 channels): 2560 bytes, 5 bits per element

    k_codes  u8   [d / 8 quads][32][4]      2048   plane-quad (vllm_kvq/formats/parts/planes.py)
    k_scale  f16  [d / group][32 tokens]     256   token-minor: scales of 16 tokens in one load
    k_zero   f16  [d / group][32 tokens]     256

Values are vllm_kvq's own, 4 bits per token over groups of 32 channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_kvq.formats.codec import Geometry, KeyCodec
from vllm_kvq.formats.methods.values import TokenValues
from vllm_kvq.formats.option import Option
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.parts.quant import affine_codes, affine_parameters
from vllm_kvq.formats.parts.rotation import hadamard
from vllm_kvq.formats.table import Format

BITS = 4


class HadamardKeys(KeyCodec):
    name = "hadamard"
    title = "per token over groups of channels, rotated by a Hadamard matrix"
    options = (Option("hadamard_group", "rotated channels that share a scale", 32, choices=(16, 32)),)

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.d, self.group = geometry.d, options["hadamard_group"]
        self.groups = self.d // self.group

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (
            Field("k_codes", torch.uint8, key_code_shape(self.d, BITS)),
            Field("k_scale", torch.float16, (self.groups, SLAB)),
            Field("k_zero", torch.float16, (self.groups, SLAB)),
        )

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        return x @ hadamard(self.d).to(x.device)

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        grouped = self.rotate(x).unflatten(1, (-1, SLAB)).unflatten(-1, (self.groups, self.group))
        scale, zero = affine_parameters(grouped, -1, BITS)
        codes = affine_codes(grouped, scale, zero, BITS).flatten(-2)
        token_minor = {"k_scale": scale.squeeze(-1).mT, "k_zero": zero.squeeze(-1).mT}
        return {"k_codes": pack_keys(codes, BITS), **token_minor}

    def query_features(self, query: torch.Tensor) -> torch.Tensor:
        return self.rotate(query)

    def key_features(self, fields: Packed) -> torch.Tensor:
        """H k: what is stored."""
        codes = unpack_keys(fields["k_codes"], BITS).float().unflatten(-1, (self.groups, self.group))
        scale, zero = (fields[name].float().mT.unsqueeze(-1) for name in ("k_scale", "k_zero"))
        return torch.addcmul(zero, codes, scale).flatten(-2).flatten(1, 2)

    def unpack(self, fields: Packed) -> torch.Tensor:
        return self.rotate(self.key_features(fields))


INT4_HADAMARD = Format(
    "int4_hadamard",
    "rotated keys, 4 bits",
    HadamardKeys,
    TokenValues,
    {"value_bits": 4, "W": 32},
)
