"""The operations on packed pages that every kind of GPU kernel provides (triton/kernels.py, cuda.py).

    pack             the units that a step completes: ring and new tokens -> pages
    launch_attend    into the caller's tensors, sizes from shapes, lengths from the device: suitable for a CUDA graph
    attend_table     the same, allocating its results
    unpack           pages -> plain keys and values, where `unpacks`
    attend_packed    a list of pages, as for the PyTorch and C++ kernels (kernels/torch/attend.py)

The parts of an attention are joined by one merge, Triton's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.gpu.launch import merge_launch, power_of_two
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.torch.attend import Partial
from vllm_kvq.kernels.torch.lists import PageList


class PageTable(NamedTuple):
    """n requests' packed tokens by block table, on the device."""

    table: torch.Tensor
    """(n, pages of the longest) rows of the pages, int32 or int64."""
    low: torch.Tensor
    """(n,): tokens [low, high) of each request are attended; of the table's shape: tokens of each page."""
    high: torch.Tensor


class Ragged(NamedTuple):
    """Requests with different numbers of queries, one request after the other."""

    start: torch.Tensor
    """(n + 1,) on the device: request i has the tokens [start[i], start[i + 1]); others are not written."""
    longest: int
    """The most that one of them has."""
    tokens: int | None = None
    """How many of the first tokens may be theirs; None: all."""


class PackSource(NamedTuple):
    """What a step packs units from; the device decides which of them are complete."""

    plan: torch.Tensor
    """(8, requests), which `begin` made (triton_kernels/step.py)."""
    table: torch.Tensor
    """(requests, pages)."""
    side_table: torch.Tensor
    side: torch.Tensor
    """The sidecar's pool (blocks, elements) of the keys' type."""
    key: torch.Tensor
    """The step's new tokens."""
    value: torch.Tensor
    units: int
    """The most units that one request completes."""


class PagedKernels(ABC):
    """One kind of kernels; formats that it does not support (`why_not`) are served by others."""

    name: ClassVar[str]
    caps: ClassVar[bool]
    """Whether they support a soft cap of scores."""
    unpacks: ClassVar[bool] = False
    """Whether they have `unpack`."""

    @abstractmethod
    def unsupported(self, fmt: PageFormat) -> str | None:
        """One sentence, with what to do about it, if these kernels can't serve this format."""

    def unavailable(self, capability: tuple[int, int]) -> str | None:
        """One sentence if these kernels are not available here for a GPU of this compute capability."""
        return None

    @abstractmethod
    def prepare(self, fmt: PageFormat, device: torch.device) -> None:
        """Load all that a launch needs now rather than in the first request or during graph capture. BuildError, one
        sentence, if it is not available."""

    @abstractmethod
    def pack(
        self,
        fmt: PageFormat,
        slots: SlotGeometry,
        source: PackSource,
        pages: torch.Tensor,
        faults: torch.Tensor,
    ) -> None:
        """Packs the units that a step completes. faults[1] counts elements that were replaced."""

    @abstractmethod
    def splits_of(
        self, fmt: PageFormat, requests: int, q: int, query_heads: int, table: torch.Tensor, pages: torch.Tensor
    ) -> int:
        """The number of parts into which each request's tokens are split, from shapes only, as CUDA graphs require."""

    @abstractmethod
    def launch_attend(
        self,
        fmt: PageFormat,
        query: torch.Tensor,
        pages: torch.Tensor,
        table: PageTable,
        into: Partial,
        scale: float,
        cap: float = 0.0,
        ragged: Ragged | None = None,
    ) -> None:
        """Fills out (splits, requests, queries, query heads, head_size) and lse, dense float32: parts of a merge.

        With `ragged`, query is (1, tokens, query heads, head_size). `cap`: the soft cap of scores; 0: none.
        """

    def unpack(
        self,
        fmt: PageFormat,
        pages: torch.Tensor,
        ids: torch.Tensor,
        seen: tuple[int, int],
        into: tuple[torch.Tensor, torch.Tensor],
        faults: torch.Tensor,
    ) -> None:
        """The pages `ids` into keys and values (their tokens, heads, head_size), dense, of any float type.

        `seen`: tokens [low, high), counted from the first page's first one. faults[0] counts their slabs that are not
        packed.
        """
        raise NotImplementedError(f"the {self.name} kernels unpack no pages")

    def why_not(self, fmt: PageFormat, capped: bool = False) -> str | None:
        """Why these kernels do not support this format, or the soft cap that scores have."""
        if (why := self.unsupported(fmt)) is not None:
            return why
        if capped and not self.caps:
            return f"the {self.name} kernels for {fmt.name} don't support a soft cap of attention scores"
        return None

    def attend_table(
        self,
        fmt: PageFormat,
        query: torch.Tensor,
        pages: torch.Tensor,
        table: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        scale: float,
        splits: int | None = None,
        cap: float = 0.0,
    ) -> Partial:
        """n requests with q queries each over their packed tokens [low, high); nothing is read on the host.

        query (n, q, Hq, head_size) of any float type, pages (B, H, record_bytes) uint8, table (n, pages of the longest)
        int32 or int64 rows of `pages`, low and high (n,). A padded row has high = 0. Pages out of range and slabs that
        were never packed are not seen. If `low` and `high` have the table's shape, every page has its own limits.
        """
        self._check(fmt, query, pages, cap)
        n, q, query_heads, head_size = query.shape
        if query.stride(-1) != 1:
            query = query.contiguous()
        splits = splits or self.splits_of(fmt, n, q, query_heads, table, pages)
        out = query.new_empty(splits, n, q, query_heads, head_size, dtype=torch.float32)
        lse = query.new_empty(splits, n, q, query_heads, dtype=torch.float32)
        if not out.numel() or not pages.shape[0] or not table.shape[1]:
            return out[0].zero_(), lse[0].fill_(-torch.inf)
        self.launch_attend(fmt, query, pages, PageTable(table, low, high), (out, lse), scale, cap)
        return (out[0], lse[0]) if splits == 1 else merge_parts(out, lse)

    def _check(self, fmt: PageFormat, query: torch.Tensor, pages: torch.Tensor, cap: float) -> None:
        if why := self.why_not(fmt, cap > 0):
            raise ValueError(why)
        if query.shape[-1] != fmt.geometry.head_size:
            raise ValueError(f"queries of {query.shape[-1]} channels; the format is bound to {fmt.geometry.head_size}")
        check_pages(fmt, pages)
        if query.shape[2] % pages.shape[1]:
            raise ValueError(f"{query.shape[2]} query heads do not share {pages.shape[1]} KV heads evenly")

    def attend_packed(
        self,
        fmt: PageFormat,
        query: torch.Tensor,
        pages: torch.Tensor,
        listed: PageList,
        scale: float,
    ) -> Partial:
        """The pages of all requests in one list, which is converted to a table (one host read)."""
        n, owner = len(query), listed.owner
        count = torch.bincount(owner, minlength=n)
        width = max(1, int(count.max())) if n else 1
        place = torch.arange(len(owner), device=owner.device) - (count.cumsum(0) - count)[owner]
        table = torch.full((n, width), -1, dtype=torch.int32, device=pages.device)
        lows, highs = torch.zeros_like(table), torch.zeros_like(table)
        for target, source in ((table, listed.ids), (lows, listed.low), (highs, listed.high)):
            target[owner, place] = source.to(torch.int32)
        return self.attend_table(fmt, query, pages, table, lows, highs, scale)


def check_pages(fmt: PageFormat, pages: torch.Tensor) -> None:
    if pages.dtype != torch.uint8 or pages.dim() != 3 or pages.shape[2] < fmt.record_bytes or pages.stride(2) != 1:
        raise ValueError(f"pages must be uint8 (blocks, heads, {fmt.record_bytes}) with a dense last dimension")
    if any(s % 64 for s in pages.stride()[:2]) or pages.data_ptr() % 64:
        raise ValueError(f"pages at {pages.data_ptr():#x} with strides {pages.stride()} are not aligned to 64 bytes")


def merge_parts(
    out: torch.Tensor, lse: torch.Tensor, into: torch.Tensor | None = None, tokens: torch.Tensor | None = None
) -> Partial:
    """Parts stacked along dimension 0, dense float32 -> their merge, with its log-sum-exp.

    `into`: a dense tensor of any float type for the result. `tokens`: how many of (parts, tokens, heads, HEAD) are
    real, on the device; the rest of the result is 0.
    """
    from vllm_kvq.triton_kernels.merge import merge_kernel

    parts, head = out.shape[0], out.shape[-1]
    merged, total = torch.empty_like(out[0]) if into is None else into, torch.empty_like(lse[0])
    rows = total.numel()
    sizes = {"HEAD": head, "COLUMNS": power_of_two(head), "PARTS": power_of_two(parts)}
    sizes["LIMITED"] = 0 if tokens is None else out.shape[-2]
    limit = total if tokens is None else tokens
    if rows:
        options = merge_launch(parts).options
        merge_kernel[(rows,)](out, lse, merged, total, rows, parts, limit, **sizes, **options)
    return merged, total
