"""What transformed keys' constants (formats/klt.py) are to the C++ kernels: tables with a part for each KV head.

The score of a token is linear in the query, so each head has one matrix F, and a query one product with it per step:

    f(q) = F q         rows of F: the slots', (s T^-1)_c step_c 4^j, then those of the scale and of the constant
    q . k = f(q) . g(k)         g(k) = (code_1 scale, ..., code_n scale, scale, 1)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_kvq.formats.fields import round_up
from vllm_kvq.formats.klt import DIGIT, TransformedKeys
from vllm_kvq.formats.planes import SLAB
from vllm_kvq.formats.search import HALF_WIDTH

TABLES = ("features", "forward", "channels", "places")


def key_heads(codec: TransformedKeys) -> int:
    """The KV heads that have constants: none before they are fitted, when nothing can be packed or read."""
    found: Any = codec.constants
    return 0 if found is None else len(found)


def steps(bits: torch.Tensor) -> torch.Tensor:
    """`search.widths`' steps in float32, whatever PyTorch's default type is: vLLM sets it to the model's."""
    most = (2.0 ** bits.double() - 1).float()
    return 2 * torch.tensor(HALF_WIDTH, dtype=torch.float32)[bits] / most.clamp_min(1)


def tables(codec: TransformedKeys) -> dict[str, np.ndarray]:
    d, slots, heads = codec.d, codec.slots, key_heads(codec)
    constants: Any = codec.constants
    features = torch.zeros(heads, d, round_up(slots + 2, SLAB), dtype=torch.float32)
    forward, channels = (torch.zeros(heads, n, d, dtype=torch.float32) for n in (d, 4))
    places = torch.zeros(heads, 2, slots, dtype=torch.int32)
    for h in range(heads):
        rows = constants[h].cpu()
        mean, s, digits = rows[0], rows[1], rows[2].long()
        step, most = steps(DIGIT * digits), 4.0 ** digits.float() - 1
        seen = rows[3 + d :].T * step  # (d, channels)
        channel = torch.repeat_interleave(digits)
        j = torch.arange(slots) - (torch.cumsum(digits, 0) - digits)[channel]
        features[h, :, :slots] = seen[:, channel] * 4.0 ** j.float()
        features[h, :, slots] = -(seen * most).sum(-1) / 2
        features[h, :, slots + 1] = mean
        forward[h] = rows[3 : 3 + d].T
        channels[h] = torch.stack([mean, s.square(), step, most])
        places[h] = torch.stack([channel, DIGIT * j])
    return {name: x.numpy() for name, x in zip(TABLES, (features, forward, channels, places), strict=True)}
