"""The cost of packing a prompt on a GPU, and a layer's prefill to compare it with."""

from __future__ import annotations

import statistics
import time

import torch

from vllm_kvq.bench.gpu.decode import HEAD, HEADS, SHARE, Calls, N, measure

PROMPT, HIDDEN, MLP = 4096, 4096, 14336
"""Tokens of a prompt, and the layer of an 8B Llama with which packing them is compared."""
ROUNDS = 10
"""How often a call without a graph is timed."""


def prompt_calls(name: str, tokens: int, device: torch.device) -> Calls:
    """The whole cost of a prompt of one chunk beyond its attention: begin, pack, commit."""
    from vllm_kvq.bench.pools import calibrated
    from vllm_kvq.formats import Geometry, get_format
    from vllm_kvq.kernels.gpu.step import GPUStep
    from vllm_kvq.kernels.slots import SlotGeometry
    from vllm_kvq.kernels.step import Caches, StepBatch

    fmt = calibrated(get_format(name).bind(Geometry(HEAD, N, torch.bfloat16)), HEADS)
    slots = SlotGeometry.of(fmt, HEADS, 0)
    step = GPUStep(fmt, slots, 0, HEAD**-0.5, device)
    counts = [-(-tokens // N), slots.sidecar_blocks, slots.sink_blocks]
    blocks = 1 + sum(counts)
    table, side, sinks = (
        x[None].contiguous() for x in torch.arange(1, blocks, dtype=torch.int32, device=device).split(counts)
    )
    pages = torch.zeros(blocks, HEADS, fmt.record_bytes, dtype=torch.uint8, device=device)
    pools = [torch.zeros(blocks, slots.page_bytes // 2, dtype=torch.bfloat16, device=device) for _ in range(2)]
    caches = Caches(pages, pools[0], pools[1] if fmt.S else None)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    batch = StepBatch(ends.cpu(), ends, ends[1:].clone(), table, side, sinks if fmt.S else None, tokens)
    query = torch.randn(tokens, HEADS * SHARE, HEAD, dtype=torch.bfloat16, device=device)
    key, value = (torch.randn(tokens, HEADS, HEAD, dtype=torch.bfloat16, device=device) for _ in range(2))

    def call() -> None:
        plan = step._begin(batch, caches, query, key, value)
        if step.fits_queries:
            step._fit(batch, caches, plan, query, 0)
        step._pack(batch, caches, plan, key, value)

    # the header stays zero, so every call is the first of its request
    return [call]


def prefill_seconds(tokens: int, device: torch.device) -> float:
    """One layer's matrix products and causal attention over a prompt, in bf16."""
    half = torch.bfloat16
    # a dry run's layer is narrow: its time means nothing, and the real one takes minutes on a CPU
    hidden, mlp = (HIDDEN, MLP) if device.type == "cuda" else (HEAD, HEAD)
    x, attended, inner = (
        torch.randn(tokens, n, device=device, dtype=half) for n in (hidden, HEADS * SHARE * HEAD, mlp)
    )
    heads = (HEADS * SHARE + 2 * HEADS) * HEAD
    shapes = ((hidden, heads), (HEADS * SHARE * HEAD, hidden), (hidden, 2 * mlp), (mlp, hidden))
    weights = [torch.randn(shape, device=device, dtype=half) for shape in shapes]
    inputs = x, attended, x, inner
    query = torch.randn(1, HEADS * SHARE, tokens, HEAD, device=device, dtype=half)
    key, value = (torch.randn(1, HEADS, tokens, HEAD, device=device, dtype=half) for _ in range(2))

    def call() -> None:
        for a, b in zip(inputs, weights, strict=True):
            a @ b
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return measure([call], device)


def packing(name: str, tokens: int, device: torch.device) -> float:
    calls = prompt_calls(name, tokens, device)
    # SQuat's eigenvectors are computed by PyTorch, which a graph can't capture
    return measure(calls, device) if not name.startswith("squat") else plain_seconds(calls, device)


def plain_seconds(calls: Calls, device: torch.device) -> float:
    """Median seconds of a call without a graph, including waiting for the device."""
    times = []
    for _ in range(ROUNDS if device.type == "cuda" else 1):
        start = time.perf_counter()
        for call in calls:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / len(calls))
    return statistics.median(times)
