"""The common part of most peers: keys and values are rotated, and stored in the same way.

    keys    stored: k R     q . k = (q R) . (k R), so the query is rotated, once per step
    values  stored: v R     rotated back when they are read

A `Coding` says how the rotated numbers are stored. Its fields become "k_..." for keys and "v_..." for values.
Codes of both halves use the layout of key codes (planes.py): only PyTorch reads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import vllm_kvq.late_torch as torch
from vllm_kvq.formats.codec import Geometry, KeyCodec, ValueCodec
from vllm_kvq.formats.constants import by_head
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.quant import LIMIT


class Coding(ABC):
    page_wide: ClassVar[bool] = False
    slab_fields: tuple[Field, ...]
    page_fields: tuple[Field, ...] = ()

    @abstractmethod
    def __init__(self, geometry: Geometry, bits: int) -> None: ...

    @abstractmethod
    def rotation(self) -> torch.Tensor | None:
        """R (d, d), orthonormal, or (KV heads, d, d); None if nothing is rotated."""

    @abstractmethod
    def encode(self, x: torch.Tensor) -> Packed:
        """Rotated (U, T, d) -> fields."""

    @abstractmethod
    def decode(self, fields: Packed) -> torch.Tensor:
        """Fields -> rotated (U, T, d)."""


class _Half:
    """The part of a codec that keys and values share."""

    prefix: ClassVar[str]
    coding: Coding

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return self._prefixed(self.coding.slab_fields)

    @property
    def page_fields(self) -> tuple[Field, ...]:
        return self._prefixed(self.coding.page_fields)

    def _prefixed(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        return tuple(Field(self.prefix + f.name, f.dtype, f.shape) for f in fields)

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return {self.prefix + name: y for name, y in self.coding.encode(self._rotate(x)).items()}

    def unpack(self, fields: Packed) -> torch.Tensor:
        x, rotation = self._decode(fields), self.coding.rotation()
        # nothing larger was stored; the errors of a token's rotated numbers may add up to more
        return x if rotation is None else _turned(x, rotation.mT).clamp(-LIMIT, LIMIT)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        rotation = self.coding.rotation()
        return x if rotation is None else _turned(x, rotation)

    def _decode(self, fields: Packed) -> torch.Tensor:
        own = (*self.coding.slab_fields, *self.coding.page_fields)
        return self.coding.decode({f.name: fields[self.prefix + f.name] for f in own})


def _turned(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """(U, T, d) with heads fastest, or (..., KV heads, rows, d), times R."""
    rotation = rotation.to(x.device)
    if rotation.dim() == 3 and x.dim() == 3:
        return (by_head(x, len(rotation)) @ rotation).flatten(0, 1)
    return x @ rotation


class CodedKeys(_Half, KeyCodec):
    prefix = "k_"
    public = False
    coding_class: ClassVar[type[Coding]]
    bits: ClassVar[int] = 4
    """Used unless an option sets it."""

    @classmethod
    def coding_of(cls, geometry: Geometry, options: Mapping[str, Any]) -> Coding:
        return cls.coding_class(geometry, options.get("key_bits", cls.bits))

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.coding = self.coding_of(geometry, options)
        self.page_wide = self.coding.page_wide

    def query_features(self, query: torch.Tensor) -> torch.Tensor:
        return self._rotate(query)

    def key_features(self, fields: Packed) -> torch.Tensor:
        return self._decode(fields)


class CodedValues(_Half, ValueCodec):
    prefix = "v_"
    public = False
    coding_class: ClassVar[type[Coding]]
    bits: ClassVar[int] = 4
    """Used unless an option sets it."""

    @classmethod
    def coding_of(cls, geometry: Geometry, options: Mapping[str, Any]) -> Coding:
        return cls.coding_class(geometry, options.get("value_bits", cls.bits))

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.coding = self.coding_of(geometry, options)
        self.page_wide = self.coding.page_wide
