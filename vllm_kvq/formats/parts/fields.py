"""Byte ranges: how a record is cut into named, typed fields.

A codec says *what* it stores as a tuple of `Field`s; only this module decides *where* the bytes lie.
Every field starts on a 64-byte boundary (one cache line, one AVX-512 register), so that a kernel never has to
split a load, and a codec never has to know its neighbours. Only fields of at most half a line share one, two by two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

ALIGN = 64

Packed: TypeAlias = "dict[str, torch.Tensor]"


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Field:
    """One array of a record: `shape` elements of `dtype` in row-major order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Region:
    """Fields laid out one after the other; of two short ones, the second lies in the line of the first."""

    fields: tuple[Field, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, fields: tuple[Field, ...]) -> Region:
        names = [f.name for f in fields]
        if len(set(names)) != len(names):
            raise ValueError(f"duplicate field names: {names}")
        offsets, end, gap = [], 0, None
        for f in fields:
            short = f.nbytes <= ALIGN // 2
            if short and gap is not None:
                offsets.append(gap)
                gap = None
                continue
            offsets.append(end)
            gap = end + ALIGN // 2 if short else gap
            end = round_up(end + f.nbytes, ALIGN)
        return cls(fields, tuple(offsets), end)

    def offset(self, name: str) -> int:
        return next(o for f, o in zip(self.fields, self.offsets, strict=True) if f.name == name)

    def write(self, out: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Store `values[name]` of shape (..., *field.shape) into `out`, uint8 of shape (..., nbytes)."""
        for f, o in zip(self.fields, self.offsets, strict=True):
            x = values[f.name].to(f.dtype).contiguous()
            flat = x.reshape(*x.shape[: x.dim() - len(f.shape)], math.prod(f.shape))
            out[..., o : o + f.nbytes] = flat.view(torch.uint8)

    def read(self, data: torch.Tensor) -> Packed:
        """The inverse of `write`: views into `data` where its strides allow, otherwise copies."""
        got: Packed = {}
        for f, o in zip(self.fields, self.offsets, strict=True):
            raw = data[..., o : o + f.nbytes]
            got[f.name] = raw.contiguous().view(f.dtype).reshape(*data.shape[:-1], *f.shape)
        return got
