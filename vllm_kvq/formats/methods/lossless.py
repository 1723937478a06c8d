"""`lossless`: for tests. Keys and values are stored bit for bit, in pages whose size differs from vLLM's own.

    k_raw  model dtype  [d][32 tokens]   channel-major, so mistaking keys for values can't go unnoticed

With it, in float32, greedy tokens must equal plain vLLM's in every scenario: any difference is a bug in the integration
and can't be blamed on quantization. It saves no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import vllm_kvq.late_torch as torch
from vllm_kvq.formats.codec import Geometry, KeyCodec
from vllm_kvq.formats.methods.values import RawValues
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.table import Format


class RawKeys(KeyCodec):
    name = "lossless"
    title = "as they are, in the model's dtype"
    public = False

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.d, self.dtype = geometry.d, geometry.dtype

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (Field("k_raw", self.dtype, (self.d, SLAB)),)

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return {"k_raw": x.unflatten(1, (-1, SLAB)).transpose(-2, -1)}

    def unpack(self, fields: Packed) -> torch.Tensor:
        return fields["k_raw"].float().transpose(-2, -1).flatten(1, 2)


FORMATS = (Format("lossless", "bit-exact, for tests", RawKeys, RawValues, public=False),)
