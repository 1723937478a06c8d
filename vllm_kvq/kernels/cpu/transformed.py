"""What the constants of transformed keys (formats/methods/klt.py) are in C++: tables with a part for each KV head.

The score of a token is linear in the query, so each head has one matrix, and a query one product with it per step:

    f(q) = q F         columns of F: the slots', (s T^-1)_c step_c 4^j, then those of the scale and of the constant
    q . k = f(q) . g(k)         g(k) = (code_1 scale, ..., code_n scale, scale, 1)

Before constants are fitted there are no heads: nothing can be packed or read, but the format can be asked about.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad

from vllm_kvq.formats.methods.klt import DIGIT, TransformedKeys
from vllm_kvq.formats.parts.fields import round_up
from vllm_kvq.formats.parts.planes import SLAB

TABLES = ("features", "forward", "channels", "places")


def tables(codec: TransformedKeys) -> dict[str, np.ndarray]:
    d, slots, columns = codec.d, codec.slots, round_up(codec.slots + 2, SLAB)
    if not codec.heads:
        empty = {"features": (d, columns), "forward": (d, d), "channels": (4, d), "places": (2, slots)}
        return {
            name: np.zeros((0, *shape), np.int32 if name == "places" else np.float32) for name, shape in empty.items()
        }
    t = codec.transform
    found = {
        "features": pad(t.features, (0, columns - slots - 2)),
        "forward": t.forward,
        "channels": torch.cat([t.mean, t.weight, t.step, t.most], 1),
        "places": torch.stack([t.channel, DIGIT * t.digit], 1).int(),
    }
    return {name: found[name].cpu().contiguous().numpy() for name in TABLES}
