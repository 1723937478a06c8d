"""nvfp4_block: NVIDIA's block floats. 16 channels of a token share a scale of 8 bits, and a page one of 32.

    s = max |x| / (6 * 448) of the page,   scale = e4m3(max |x| / (6 s)) of 16 channels
    x = sign * level * scale * s,          level in 0, 0.5, 1, 1.5, 2, 3, 4, 6    (e2m1; ties to the even code)

Page: 64 bytes for each half, of which 4 are used
    page   f32  [1]                           s
Slab (32 tokens; d = 128): 2304 bytes for each half, 4.5 bits per element
    codes  u8   [d / 8 quads][32][4]   2048   the sign above the level's number
    scale  f8   [d / 16][32 tokens]     256   token-minor
"""

from __future__ import annotations

import math

import torch

from vllm_kvq.eval.peers.coding import CodedKeys, CodedValues, Coding
from vllm_kvq.formats.codec import Geometry
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.table import Format

BITS = 4
BLOCK = 16
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_SCALE = 448.0


def borders(device: torch.device) -> torch.Tensor:
    """(7,): what is above the i-th is rounded to a level above the i-th."""
    levels = torch.tensor(LEVELS, device=device)
    middles = (levels[1:] + levels[:-1]) / 2
    # bucketize gives a tie to the lower level: where that is odd, the border lies just below the tie
    below = torch.nextafter(middles, torch.full_like(middles, -math.inf))
    return torch.where(torch.arange(7, device=device) % 2 == 1, below, middles)


class FloatCoding(Coding):
    page_wide = True

    def __init__(self, geometry: Geometry, bits: int) -> None:
        self.blocks = geometry.d // BLOCK
        self.page_fields = (Field("page", torch.float32, (1,)),)
        self.slab_fields = (
            Field("codes", torch.uint8, key_code_shape(geometry.d, BITS)),
            Field("scale", torch.float8_e4m3fn, (self.blocks, SLAB)),
        )

    def rotation(self) -> None:
        return None

    def encode(self, x: torch.Tensor) -> Packed:
        page = (x.abs().amax((-2, -1)) / (LEVELS[-1] * LARGEST_SCALE)).clamp_min(2.0**-100)
        x = x.unflatten(1, (-1, SLAB)).unflatten(-1, (self.blocks, BLOCK))
        by_block = page[:, None, None, None, None]
        scale = x.abs().amax(-1, keepdim=True) / (LEVELS[-1] * by_block)
        scale = scale.clamp_max(LARGEST_SCALE).to(torch.float8_e4m3fn).float()
        # a block that is tiny compared with its page has a scale of 0, and is read as zeros
        y = torch.where(scale > 0, x / (scale * by_block), 0)
        codes = torch.bucketize(y.abs(), borders(x.device)) | (y < 0).long() << 3
        return {
            "codes": pack_keys(codes.flatten(-2), BITS),
            "scale": scale.squeeze(-1).mT,
            "page": page.unsqueeze(-1),
        }

    def decode(self, fields: Packed) -> torch.Tensor:
        codes = unpack_keys(fields["codes"], BITS).long().unflatten(-1, (self.blocks, BLOCK))
        levels = torch.tensor([*LEVELS, *(-level for level in LEVELS)], device=codes.device)[codes]
        scale = fields["scale"].float().mT.unsqueeze(-1) * fields["page"].float()[:, :, None, None, None]
        return (levels * scale).flatten(-2).flatten(1, 2)


class FloatKeys(CodedKeys):
    name = "nvfp4"
    title = "e2m1 over 16 channels of a token"
    hurt_by_biases = "gives 16 channels of a token one scale, which a wide constant channel uses up"
    coding_class = FloatCoding


class FloatValues(CodedValues):
    name = "nvfp4"
    title = "e2m1 over 16 channels of a token"
    coding_class = FloatCoding


FORMATS = (Format("nvfp4_block", "NVIDIA's block floats", FloatKeys, FloatValues, public=False),)
