"""Tokens whose scores rise, and one of them 20 nats above all others: the running maximum of a softmax must fall far
back there, and whatever was added up before must nearly vanish."""

from __future__ import annotations

import functools

import torch
from layer import Layer

from proof.kernels.exact import relative_error
from proof.oracle.reference.reference import ReferenceCache
from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.kernels.step import Step
from vllm_kvq.kernels.torch.step import TORCH, Kernels, PlannedStep

SLOPE, PEAK = 6.0, 28.0
"""Nats: from the first token to the last, and of the one token above the last. Packing takes up to 8 of these."""


def rising(
    heads: int, tokens: int, peak: int, share: int, queries: int, d: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query (queries, heads * share, d), key and value (heads, tokens, d), for the scale d^-0.5."""
    rng = torch.Generator().manual_seed(seed)
    direction = torch.randint(2, (heads, d), generator=rng) * 2.0 - 1
    score = SLOPE * torch.arange(tokens) / tokens
    score[peak] = SLOPE + PEAK
    key = score[:, None] * d**-0.5 * direction[:, None] + 0.05 * torch.randn(heads, tokens, d, generator=rng)
    strength = 1 + 0.05 * torch.rand(queries, heads * share, 1, generator=rng)
    return strength * direction.repeat_interleave(share, 0), key, torch.randn(heads, tokens, d, generator=rng)


def exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every query over all tokens, in float64: out (q, Hq, d) and the log-sum-exp (q, Hq)."""
    rows = query.double().unflatten(1, (len(key), -1))
    scores = torch.einsum("qhgd,htd->qhgt", rows, key.double()) * scale
    out = torch.einsum("qhgt,htd->qhgd", scores.softmax(-1), value.double())
    return out.flatten(1, 2), scores.logsumexp(-1).flatten(1)


def unpacked(fmt: PageFormat, pages: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (heads, tokens, head_size) of one request's pages, as they are read back."""
    read = fmt.unpack(fmt.read(pages, ids))
    keys, values = (x.unflatten(0, (len(ids), -1)).transpose(0, 1).flatten(1, 2) for x in read)
    return keys[..., : fmt.geometry.head_size], values[..., : fmt.geometry.head_size]


def stands_out(query: torch.Tensor, key: torch.Tensor, peak: int, scale: float) -> bool:
    """Whether the peak is still 20 nats above all else, for every query, after packing."""
    rows = query.double().unflatten(1, (len(key), -1))
    scores = torch.einsum("qhgd,htd->qhgt", rows, key.double()) * scale
    top = scores[..., peak].clone()
    scores[..., peak] = -torch.inf
    return bool((top - scores.amax(-1) > 20).all())


# -- a whole decode step -----------------------------------------------------------------------------------------------
CONTEXT = 300
PEAKS = (3, 130, 255, 290, 300)
"""One request for each: in the sinks, in the middle, at the end of what is packed, in the ring, the new token."""


@functools.cache
def _requests(name: str, d: int) -> tuple[PageFormat, list[tuple[torch.Tensor, ...]], torch.Tensor]:
    """The format, every request's query, key and value, and what its last token must give."""
    fmt = get_format(name).bind(Geometry(d, 64, torch.float32), {"W": 32, "S": 16})
    requests, want = [], []
    for i, peak in enumerate(PEAKS):
        query, key, value = rising(2, CONTEXT + 1, peak, 1, CONTEXT + 1, d, i)
        one = (query, key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous())
        requests.append(one)
        cache = ReferenceCache(fmt, 2)
        cache.step(*(x[:CONTEXT] for x in one), d**-0.5)
        want.append(cache.step(*(x[CONTEXT:] for x in one), d**-0.5))
    return fmt, requests, torch.cat(want)


def decode_error(name: str, d: int, step_of: type[Step], kernels: Kernels = TORCH) -> float:
    """The error of a decode step after prompts that `kernels` packed."""
    fmt, requests, want = _requests(name, d)
    layer = Layer(fmt, len(PEAKS), tokens=320, share=1)
    cpu = torch.device("cpu")
    prompts = PlannedStep(fmt, layer.slots, 0, layer.scale, cpu, kernels)
    layer.run(
        prompts, [CONTEXT] * len(PEAKS), *(torch.cat([x[:CONTEXT] for x in one]) for one in zip(*requests, strict=True))
    )
    step = step_of(fmt, layer.slots, 0, layer.scale, cpu)  # type: ignore[call-arg]
    last = (torch.cat([x[CONTEXT:] for x in one]) for one in zip(*requests, strict=True))
    return relative_error(layer.run(step, [1] * len(PEAKS), *last), want.double())
