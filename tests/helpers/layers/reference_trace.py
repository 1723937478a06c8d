"""Three requests with chunks, drafts (some rejected), and a prefix hit, compared with the reference cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from layer import Layer

from proof.kernels.exact import relative_error
from proof.oracle.reference.reference import ReferenceCache
from vllm_kvq.bench.pools import calibrated
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels.step import Step

DRAFTS = 2
HIT, OF = 2, 0
"""The third request finds two pages of the first one."""


def worst_error(
    name: str,
    build: Callable[[Layer], Step],
    heads: int = 2,
    share: int = 2,
    decodes: int = 33,
    learned: bool = False,
    cap: float = 0.0,
    **options: int,
) -> float:
    """Over all answers of the trace; `learned`: the layer has learned sinks; `cap`: the soft cap of its scores. Blocks
    begin as what their last owner left: NaN, but for the sidecars."""
    geometry = Geometry(64, 64, torch.float32)
    fmt = calibrated(get_format(name).bind(geometry, {"W": 32, "S": 40, **options}), heads)
    layer = Layer(fmt, 3, tokens=320, heads=heads, share=share, drafts=DRAFTS)
    layer.caches.sinks.fill_(torch.nan)  # type: ignore[union-attr]
    layer.caches.pages[..., fmt.slabs_at :] = 0xFF
    sinks = torch.linspace(-2, 3, heads * share) if learned else None
    layer.caches.learned = sinks
    step = build(layer)
    caches = [ReferenceCache(fmt, heads, DRAFTS) for _ in range(3)]
    for cache in caches:
        cache.learned = sinks
    shared: list[torch.Tensor] = []
    worst = 0.0

    def run(*lengths: int) -> None:
        nonlocal worst
        data = layer.random(sum(lengths), sum(layer.held))
        got, at = layer.run(step, list(lengths), *data), 0
        for i, new in enumerate(lengths):
            if new:
                mine = (x[at : at + new] for x in data)
                worst = max(worst, relative_error(got[at : at + new], caches[i].step(*mine, layer.scale, cap).double()))
                at += new
        if shared:
            assert torch.equal(layer.blocks(OF)[0][:pages], shared[0]), "a shared page was written to"

    def reject(request: int, count: int) -> None:
        layer.held[request] -= count
        caches[request].rewind(layer.held[request])

    # the second request's first chunk ends where a unit does
    run(1, 96, 0)
    run(70, 3, 0)
    reject(1, 2)
    run(60, 1, 0)
    pages = 2
    layer.hit(HIT, OF, pages)
    shared.append(layer.blocks(OF)[0][:pages].clone())
    caches[HIT] = ReferenceCache.after_hit(fmt, heads, [caches[OF].page(i) for i in range(pages)], DRAFTS)
    caches[HIT].learned = sinks
    run(1, 2, fmt.W + 29)
    # the first request begins a page in the step in which the second one goes on with one
    run(32, 30, 1)
    reject(0, 1)
    for i in range(decodes):
        run(1, 1 + i % 2, 1)
    return worst
