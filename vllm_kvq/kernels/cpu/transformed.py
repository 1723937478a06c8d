"""What the constants of transformed keys (formats/methods/klt.py) are in C++: tables with a part for each KV head.

Once per step a query is multiplied by its head's matrix, which gives a number for each channel (kernels make those
of the slots from it), and pair by pair by b, for a slab's e (formats/parts/turning.py).

Before constants are fitted there are no heads: nothing can be packed or read, but the format can be asked about.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_kvq.formats.methods.klt import DIGIT, TransformedKeys
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.turning import Turning

TABLES = ("backward", "forward", "channels", "mean", "places", "fine", "coarse", "pairs")


def tables(codec: TransformedKeys) -> dict[str, np.ndarray]:
    d = codec.d
    if codec.heads:
        t = codec.transform
        turning, (backward, forward) = t.turning, (_panels(x) for x in (t.backward.mT * t.step, t.forward))
        channels = torch.cat([t.weight, t.step, t.most], 1)
        of_heads = backward, forward, channels, t.constant, torch.stack([t.channel, DIGIT * t.digit], 1).int()
    else:
        turning, panels = Turning.none(d), (d // SLAB, d, SLAB)
        shapes = panels, panels, (3, d), (d,), (2, codec.slots)
        # not vLLM's default, which is the model's dtype while layers are made
        of_heads = tuple(torch.zeros(0, *shape, dtype=torch.float32) for shape in shapes)
    pairs = torch.cat([turning.first, turning.second]).int()
    found = zip(TABLES, (*of_heads, *turning.tables(), pairs), strict=True)
    return {name: table.cpu().contiguous().numpy() for name, table in found}


def _panels(x: torch.Tensor) -> torch.Tensor:
    """(H, d, d) -> (H, d / 32, d, 32): the columns that are multiplied together lie together."""
    return x.unflatten(-1, (-1, SLAB)).transpose(1, 2)
