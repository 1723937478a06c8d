"""What the constants of transformed keys (formats/methods/klt.py) are in C++: tables with a part for each KV head.

The score of a token is linear in the query, so each head has one matrix, and a query one product with it per step:

    f(q) = q F         columns of F: the slots', (s T^-1)_c step_c 4^j, then those of a slab's e and of the scale
    q . k = f(q) . g(k)         g(k) = (code_1 scale, ..., code_n scale, e_1, ..., e_d, scale)

Before constants are fitted there are no heads: nothing can be packed or read, but the format can be asked about.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad

from vllm_kvq.formats.methods.klt import DIGIT, TransformedKeys
from vllm_kvq.formats.parts.fields import round_up
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.turning import Turning

TABLES = ("features", "forward", "channels", "mean", "places", "fine", "coarse")


def tables(codec: TransformedKeys) -> dict[str, np.ndarray]:
    d, columns = codec.d, round_up(codec.slots + codec.d + 1, SLAB)
    fine, coarse = (codec.transform.turning if codec.heads else Turning.none(d)).tables()
    if codec.heads:
        t = codec.transform
        features = pad(t.features, (0, columns - t.features.shape[-1]))
        channels = torch.cat([t.weight, t.step, t.most], 1)
        of_heads = features, t.forward, channels, t.mean, torch.stack([t.channel, DIGIT * t.digit], 1).int()
    else:
        shapes = (d, columns), (d, d), (3, d), (d, d), (2, codec.slots)
        # not vLLM's default, which is the model's dtype while layers are made
        of_heads = tuple(torch.zeros(0, *shape, dtype=torch.float32) for shape in shapes)
    found = zip(TABLES, (*of_heads, fine, coarse), strict=True)
    return {name: table.cpu().contiguous().numpy() for name, table in found}
