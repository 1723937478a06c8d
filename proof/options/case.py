"""One combination of options, and the head that it is bound to, as plain data that a JSON file can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.parts.rope import Rope

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

POSITIONS = 2048
"""More than the tokens of any case."""


@dataclass(frozen=True)
class Case:
    format: str
    head_size: int
    block_size: int
    dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)
    rotary_dim: int | None = None
    seed: int = 0
    """The seed of the data."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it takes one of {list(DTYPES)}")
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options is {self.options!r}; it takes an object of options")
        if type(self.seed) is not int or self.seed < 0:
            raise ValueError(f"seed is {self.seed!r}; it takes a whole number from 0")
        get_format(str(self.format))
        Geometry(self.head_size, self.block_size, DTYPES[self.dtype], rotary_dim=self.rotary_dim)

    def bind(self, **changed: Any) -> PageFormat:
        """ValueError for a combination that the format refuses."""
        rope = Rope.plain(self.rotary_dim or self.head_size, POSITIONS)
        geometry = Geometry(self.head_size, self.block_size, DTYPES[self.dtype], rotary_dim=self.rotary_dim, rope=rope)
        return get_format(self.format).bind(geometry, {**self.options, **changed})

    @classmethod
    def from_json(cls, data: Any) -> Case:
        try:
            return cls(**data)
        except TypeError as error:
            raise ValueError(str(error)) from None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "options": dict(self.options)}
