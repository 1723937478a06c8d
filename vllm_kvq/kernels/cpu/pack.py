"""Packing and fitting in C++ (csrc/cpu/pack.h), with the contract of kernels/torch/pack.py.

Codes and parameters are those of the PyTorch codecs for the same float32 input, except where a sum of another order
falls on the other side of a cell border: SQuat's blocks after the first, QJL's signs and norms, and PolarQuant's
angles, whose arctangent is another one.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.innerq import HybridKeys
from vllm_kvq.formats.qjl import SketchKeys
from vllm_kvq.formats.squat import SQuatKeys
from vllm_kvq.kernels.cpu.attend import bound_to, isa, library
from vllm_kvq.kernels.torch import pack as reference
from vllm_kvq.kernels.torch.pack import Pair, Units

_NO_STATE = torch.zeros(0, dtype=torch.float32)


def pack(
    fmt: PageFormat, pages: torch.Tensor, units: Units, old: Pair, new: Pair, state: torch.Tensor | None
) -> torch.Tensor | int:
    bound, lib = bound_to(fmt)
    k = fmt.keys
    squat = (k.lam, k.block) if isinstance(k, SQuatKeys) else (1.0, 16)
    tables = (bound.layout, bound.constants, bound.pairs)
    lists = (units.page, units.unit, units.rows, units.owner, units.follows.view(torch.uint8))
    late = tuple(x.unsqueeze(1) for x in new)
    mine = _NO_STATE if state is None else state.contiguous()
    return int(lib.pack(*tables, pages, *lists, *old, *late, mine, *squat, torch.get_num_threads(), isa()))


def store(pool: Pair, rows: torch.Tensor, new: Pair, source: torch.Tensor) -> None:
    lib: Any = library()
    lib.store_tokens(*pool, rows, *(x.unsqueeze(1) for x in new), source)


def fit(fmt: PageFormat, query: torch.Tensor, key: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
    lib, codec, heads, d = library(), fmt.keys, key.shape[1], fmt.geometry.d
    if lib is not None and isinstance(codec, SQuatKeys):
        gram = torch.empty(heads, d, d, dtype=torch.float64)
        lib.reduce_rows(_dense(query), gram, torch.get_num_threads(), isa())
        return codec.fit_gram(gram, state)
    if lib is not None and isinstance(codec, SketchKeys):
        sums = torch.empty(heads, d, dtype=torch.float64)
        lib.reduce_rows(_dense(key), sums, torch.get_num_threads(), isa())
        return codec.fit_sums(sums.float(), len(key), state)
    if lib is not None and isinstance(codec, HybridKeys):
        top = torch.empty(heads, d)
        lib.reduce_rows(_dense(key), top, torch.get_num_threads(), isa())
        return codec.fit_top(top.unsqueeze(1), state)
    return reference.fit(fmt, query, key, state)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
