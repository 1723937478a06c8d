"""A later chunk of a long prompt on a GPU: one layer's attention over what is packed already.

bf16       the chunk's attention over as many plain tokens, by the kernel that the server would use
unpacked   pages are unpacked once, and attended by that kernel (kernels/gpu/history.py); not for QJL
by pages   the kernels for decoding, which unpack pages again for every 16 rows
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_kvq.bench.gpu.decode import HEAD, HEADS, SHARE, N, measure
from vllm_kvq.bench.gpu.prompts import plain_seconds
from vllm_kvq.bench.gpu.results import NoTime, Results
from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.gpu.paged import PagedKernels
from vllm_kvq.kernels.step import Whole

CHUNK, HISTORY = 2048, 32768
HOW = ("unpacked", "by pages")


def run(device: torch.device, formats: list[str], results: Results) -> None:
    """Raises NoTime without the attention over bf16 to compare with."""
    chunk, history = (CHUNK, HISTORY) if device.type == "cuda" else (16, 2 * N)
    attend, name = whole(device)

    def tokens(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, HEAD, dtype=torch.bfloat16, device=device)

    query, key, value = tokens(chunk, HEADS * SHARE), tokens(history, HEADS), tokens(history, HEADS)

    def plain() -> tuple[float, int]:
        return plain_seconds([lambda: attend(query, key, value, HEAD**-0.5, 0.0)], device), 0

    bf16 = results.take(f"chunk bf16 by {name}", 1, history, plain).seconds
    results.tell("")
    results.tell(f"a chunk of {chunk} tokens over {history} packed ones; over bf16, by {name}: {1e6 * bf16:.0f} us")
    for fmt in dict.fromkeys(formats):
        ways = HOW if unpacks(fmt) else HOW[1:]
        try:
            both = [results.take(f"chunk {fmt} {how}", 1, history, timed(fmt, how, query, history)) for how in ways]
        except NoTime:
            continue
        cells = (f"{1e6 * x.seconds:>10.0f} us {x.what.split(' ', 2)[2]} ({x.seconds / bf16:.2f})" for x in both)
        results.tell(f"{fmt:<12} {'   '.join(cells)}")


def whole(device: torch.device) -> tuple[Whole, str]:
    """The server's kernel where there is vLLM, else PyTorch's, and its name."""
    from vllm_kvq.kernels.torch import attend

    if device.type == "cuda":
        try:
            from vllm_kvq.integration.worker.prompts import Asked, choice_for
        except ImportError:
            return attend.whole, "PyTorch's SDPA"
        choice = choice_for(Asked(device, torch.bfloat16, HEAD, True))
        return choice.prompts.whole or attend.whole, choice.name
    return attend.whole, "PyTorch's SDPA"


def bound(name: str) -> tuple[PageFormat, PagedKernels]:
    from vllm_kvq.bench.pools import calibrated
    from vllm_kvq.formats import Geometry, get_format
    from vllm_kvq.kernels.gpu.step import kernels_of

    fmt = calibrated(get_format(name).bind(Geometry(HEAD, N, torch.bfloat16)), HEADS)
    kernels = kernels_of(fmt)
    assert kernels is not None
    return fmt, kernels


def unpacks(name: str) -> bool:
    return bound(name)[1].unpacks


def timed(name: str, how: str, query: torch.Tensor, history: int) -> Callable[[], tuple[float, int]]:
    return lambda: (seconds(name, how, query, history), 0)


def seconds(name: str, how: str, query: torch.Tensor, history: int) -> float:
    from vllm_kvq.bench.pools import random_pages
    from vllm_kvq.kernels.gpu.history import Span, attend

    device = query.device
    fmt, kernels = bound(name)
    pages = random_pages(fmt, 1, HEADS).to(device)
    pages = torch.cat([pages[:1], pages[1:].repeat(history // N, 1, 1)])
    table = 1 + torch.randperm(history // N, device=device).to(torch.int32)
    if how == "unpacked":
        span, faults = Span(0, 0, len(query), 0, history), torch.zeros(2, dtype=torch.int32, device=device)
        over = whole(device)[0]
        took = plain_seconds(
            [lambda: attend(kernels, fmt, query, pages, table, span, over, HEAD**-0.5, 0.0, faults)], device
        )
        assert not int(faults[0]), "random pages are not packed"
        return took
    low = torch.zeros(1, dtype=torch.int32, device=device)
    call = (query[None], pages, table[None], low, low + history, HEAD**-0.5)
    return measure([lambda: kernels.attend_table(fmt, *call)], device, replays=5)
