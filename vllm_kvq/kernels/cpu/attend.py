"""CPU kernels in C++ (csrc/cpu), with the PyTorch kernels' contract.

    attend_packed(fmt, query, pages, listed, scale, cap) -> (out, lse)

If the library is not available or does not support a format, the PyTorch path serves its whole step (kernels/paths.py).
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.cpu.call import all_threads, scores
from vllm_kvq.kernels.cpu.layout import bind
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.cpu.tuples import Held, Output, Part
from vllm_kvq.kernels.torch.attend import Partial
from vllm_kvq.kernels.torch.lists import PageList, TokenList


def bound_to(fmt: PageFormat) -> tuple[Any, Any]:
    """The format in the library's terms, and the library."""
    bound, lib = bind(fmt), library()
    if bound is None or lib is None:
        raise ValueError(f"{fmt.name} has no C++ kernels here; the PyTorch kernels serve it")
    return bound, lib


def attend_packed(
    fmt: PageFormat,
    query: torch.Tensor,
    pages: torch.Tensor,
    listed: PageList,
    scale: float,
    cap: float = 0.0,
) -> Partial:
    """n requests with q queries each over their packed tokens; see `attend.attend_packed`.

    query (n, q, Hq, head_size) of any float type and with any outer strides, pages (B, H, record_bytes) with
    any outer strides. IndexError for a page id or an owner out of range.
    """
    bound, lib = bound_to(fmt)
    if query.stride(-1) != 1:
        query = query.contiguous()
    listed = PageList(*(x.to(torch.int64).contiguous() for x in listed))
    n, q, heads, head_size = query.shape
    into = Part(torch.empty(n, q, heads, head_size), torch.empty(n, q, heads))
    lib.attend_packed(bound, query, pages, listed, scores(scale, cap), into, all_threads())
    return into


def all_packed(fmt: PageFormat, pages: torch.Tensor, listed: PageList) -> bool:
    bound, lib = bound_to(fmt)
    return lib.unpacked_page(bound, pages, listed) < 0


_NO_LSE = torch.zeros(0, dtype=torch.float32)


def attend_raw(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float, cap: float = 0.0
) -> Partial:
    """`attend.attend_raw`, with any outer strides; a token that no query sees is not read.

    query (n, q, Hq, d), key and value (n, t, H, d), seen (n, q, t) booleans.
    """
    n, q, heads, d = query.shape
    out, lse = torch.empty(n * q, heads, d), torch.empty(n, q, heads)
    rows = torch.arange(n * key.shape[1]).view(n, -1)
    tokens = TokenList((key, value), (key[:0], value[:0]), rows, seen)
    _raw(Output(out, torch.arange(n * q)), lse, query, tokens, scale, [], cap)
    return out.view(n, q, heads, d), lse


def attend_into(
    output: torch.Tensor,
    output_rows: torch.Tensor,
    query: torch.Tensor,
    tokens: TokenList,
    scale: float,
    parts: list[Partial],
    cap: float = 0.0,
) -> None:
    """`attend.attend_into` without copies, for at most two other parts. IndexError for a row out of range."""
    _raw(Output(output, output_rows), _NO_LSE, query, tokens, scale, parts, cap)


def attend_step(
    fmt: PageFormat,
    output: torch.Tensor,
    output_rows: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    listed: PageList,
    tokens: TokenList,
    scale: float,
    cap: float = 0.0,
) -> bool:
    """`attend.attend_step` in one call and one parallel loop. IndexError as in `attend_packed` and `attend_into`."""
    bound, lib = bound_to(fmt)
    if query.stride(-1) != 1:
        query = query.contiguous()
    # no loops: at short contexts the call dominates a step's cost
    held, into = Held.of(tokens), Output(output, output_rows)
    return lib.attend_step(bound, query, pages, listed, held, scores(scale, cap), into, all_threads()) < 0  # type: ignore[no-any-return]


def _raw(
    output: Output,
    lse: torch.Tensor,
    query: torch.Tensor,
    tokens: TokenList,
    scale: float,
    parts: list[Partial],
    cap: float,
) -> None:
    lib: Any = library()
    (key, value), (more_key, more_value), rows, seen = tokens
    query, key, value, more_key, more_value = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, more_key, more_value)
    )
    held = Held.of(TokenList((key, value), (more_key, more_value), rows, seen))
    lib.attend_raw(query, held, scores(scale, cap), tuple(parts), output, lse, all_threads())
