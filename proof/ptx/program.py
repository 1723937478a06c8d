"""A PTX program as plain data: instructions, their operands, parameters, variables."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


class Unsupported(NotImplementedError):
    """PTX that this package does not know."""


@dataclass(frozen=True)
class Register:
    slot: int
    bits: int
    name: str


@dataclass(frozen=True)
class Special:
    name: str


@dataclass(frozen=True)
class Immediate:
    """Its bits, whatever type an instruction reads them in."""

    bits: int
    floating: int = 0
    """32 or 64 for 0f... and 0d..., whose bits have that width."""


@dataclass(frozen=True)
class Symbol:
    name: str


@dataclass(frozen=True)
class Address:
    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True)
class Vector:
    parts: tuple[Operand, ...]


@dataclass(frozen=True)
class Sink:
    """`_`: a result that is thrown away."""


@dataclass(frozen=True)
class Pair:
    """p|q: two results of one instruction."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Negated:
    register: Register


Operand = Register | Special | Immediate | Symbol | Address | Vector | Sink | Pair | Negated


@dataclass(frozen=True)
class Instruction:
    name: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None = None
    unless: bool = False
    text: str = ""


@dataclass
class Program:
    name: str
    params: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Offset and bytes of each parameter in the block of all."""
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    bits: list[int] = field(default_factory=list)
    """Width of each register."""
    shared: dict[str, int] = field(default_factory=dict)
    """Addresses of shared variables; the last may be of the size that a launch says."""
    static_shared: int = 0
    data: dict[str, np.ndarray] = field(default_factory=dict)
    """The bytes of initialized global and constant variables."""

    @property
    def param_bytes(self) -> int:
        return max((at + size for at, size in self.params.values()), default=0)
