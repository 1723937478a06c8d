"""Packing and fitting in C++ (csrc/cpu/pack), with the contract of kernels/torch/pack.py.

Codes and parameters are those of the PyTorch codecs for the same float32 input, except where a different order of
summation falls on the other side of a cell border: fitted scales, SQuat's blocks after the first, QJL's signs and
norms, and PolarQuant's angles, which use a different arctangent.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.kernels.cpu import tuples
from vllm_kvq.kernels.cpu.attend import bound_to
from vllm_kvq.kernels.cpu.call import all_threads
from vllm_kvq.kernels.cpu.layout import reduction
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.torch import pack as reference
from vllm_kvq.kernels.torch.pack import Pair, Units

_NO_STATE = torch.zeros(0, dtype=torch.float32)


def pack(
    fmt: PageFormat, pages: torch.Tensor, units: Units, old: Pair, new: Pair, state: torch.Tensor | None
) -> torch.Tensor | int:
    bound, lib = bound_to(fmt)
    lists, fresh = tuples.Units.of(units), tuples.Pair.of(new)
    mine = _NO_STATE if state is None else state.contiguous()
    return int(lib.pack(bound, pages, lists, tuples.Pair(*old), fresh, mine, all_threads()))


def store(pool: Pair, rows: torch.Tensor, new: Pair, source: torch.Tensor) -> None:
    lib: Any = library()
    lib.store_tokens(tuples.Pair(*pool), rows, tuples.Pair.of(new), source)


def fit(fmt: PageFormat, query: torch.Tensor, key: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
    lib, needed = library(), reduction(fmt)
    if lib is None or needed is None:
        return reference.fit(fmt, query, key, state)
    found = torch.empty(needed.shape(key.shape[1], fmt.geometry.d), dtype=needed.dtype)
    getattr(lib, needed.name)(_dense(query if needed.of_queries else key), found, all_threads())
    return needed.finish(fmt.keys, found, len(key), state)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
