"""int4_hadamard_q4_0: llama.cpp's block of 32 elements, q4_0, for keys and values rotated by a Hadamard matrix.

    x' = H x,   m = the x' of largest magnitude in a block,   scale = m / -8
    code = min(15, floor(x' / scale + 8.5)),    x' = (code - 8) float16(scale)        over 32 channels of one token

Codes are chosen before the scale is rounded, as in llama.cpp.

Slab (32 tokens; d = 128): 2304 bytes for each half, 4.5 bits per element

    codes  u8   [d / 8 quads][32][4]   2048
    scale  f16  [d / 32][32 tokens]     256   token-minor: scales of 16 tokens in one load
"""

from __future__ import annotations

import vllm_kvq.late_torch as torch
from vllm_kvq.eval.peers.coding import CodedKeys, CodedValues, Coding
from vllm_kvq.formats.codec import Geometry
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.parts.quant import TINY, half
from vllm_kvq.formats.parts.rotation import hadamard
from vllm_kvq.formats.table import Format

BITS = 4
BLOCK = 32


class BlockCoding(Coding):
    def __init__(self, geometry: Geometry, bits: int) -> None:
        self.d = geometry.d
        self.blocks = self.d // BLOCK
        self.slab_fields = (
            Field("codes", torch.uint8, key_code_shape(self.d, BITS)),
            Field("scale", torch.float16, (self.blocks, SLAB)),
        )

    def rotation(self) -> torch.Tensor:
        return hadamard(self.d)

    def encode(self, x: torch.Tensor) -> Packed:
        x = x.unflatten(1, (-1, SLAB)).unflatten(-1, (self.blocks, BLOCK))
        scale = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -8
        # a scale that float16 rounds to zero gives zeros, whatever the codes are
        codes = torch.where(scale.abs() < TINY / 2, 8, (x / scale + 8.5).floor().clamp(0, 15))
        return {"codes": pack_keys(codes.flatten(-2), BITS), "scale": half(scale.squeeze(-1).mT)}

    def decode(self, fields: Packed) -> torch.Tensor:
        codes = unpack_keys(fields["codes"], BITS).float().unflatten(-1, (self.blocks, BLOCK))
        return ((codes - 8) * fields["scale"].float().mT.unsqueeze(-1)).flatten(-2).flatten(1, 2)


class BlockKeys(CodedKeys):
    name = "q4_0"
    title = "rotated by a Hadamard matrix, 4 bits over 32 channels"
    hurt_by_biases = "rotates keys, which spreads a constant channel over all that share a scale"
    coding_class = BlockCoding


class BlockValues(CodedValues):
    name = "q4_0"
    title = "rotated by a Hadamard matrix, 4 bits over 32 channels"
    coding_class = BlockCoding


FORMATS = (Format("int4_hadamard_q4_0", "llama.cpp's q4_0 after a Hadamard", BlockKeys, BlockValues, public=False),)
