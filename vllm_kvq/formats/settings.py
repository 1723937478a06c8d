"""Options of a format: what can be set, within which limits, and what a format makes of it.

Users write them as JSON, `--additional-config '{"kvq": {"r": 8, "S": 4}}'`; the names are the papers' own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Option:
    """One setting: what it means, which codecs read it ("*": all), and the values it may take."""

    help: str
    codecs: tuple[str, ...]
    choices: tuple[Any, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    multiple: int = 1

    def check(self, name: str, value: Any) -> None:
        if self.choices:
            # 2.0 == 2 and True == 1, but neither is a choice
            if value not in self.choices or type(value) is not type(self.choices[0]):
                raise ValueError(f"option {name!r} is {value!r}; it takes one of {list(self.choices)}")
            return
        whole = self.multiple > 0
        good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not good or not self.low <= value <= self.high or (whole and value % self.multiple):
            step = f", a multiple of {self.multiple}" if self.multiple > 1 else ""
            kind = "a whole number" if whole else "a number"
            raise ValueError(f"option {name!r} is {value!r}; it takes {kind} from {self.low:g} to {self.high:g}{step}")


KEY_CODECS = ("squat", "kivi", "qjl", "polar", "innerq", "lossless")
VALUE_CODECS = ("token", "innerq", "raw")
_SCALAR_KEYS = ("squat", "kivi", "innerq")

OPTIONS: dict[str, Option] = {
    "keys": Option("key codec", ("*",), choices=KEY_CODECS[:-1]),
    "values": Option("value codec: per token, InnerQ's hybrid, or the model's 16 bits", ("*",), choices=VALUE_CODECS),
    "key_bits": Option("bits per key code", _SCALAR_KEYS, choices=(2, 4)),
    "value_bits": Option("bits per value code", ("token", "innerq"), choices=(2, 4)),
    "group": Option("channels per group of the per-token values", ("token",), low=16, high=256, multiple=16),
    "N": Option("tokens per page, the same as --block-size", ("*",), low=32, high=1024, multiple=32),
    "W": Option("newest tokens read in full precision", ("*",), low=0, high=4096, multiple=32),
    "S": Option("first tokens read in full precision", ("*",), low=0, high=1024),
    "r": Option("rank of SQuat's query subspace", ("squat",), low=1, high=16),
    "lambda": Option("SQuat's regularisation; 0.1 destroys accuracy", ("squat",), low=1e-6, high=0.1, multiple=0),
    "g": Option("channels per block of SQuat's update", ("squat",), low=16, high=128, multiple=16),
    "m": Option("sign bits of QJL's inlier sketch", ("qjl",), low=32, high=2048, multiple=32),
    "m_out": Option("sign bits of QJL's outlier sketch", ("qjl",), low=32, high=2048, multiple=32),
    "outliers": Option("outlier channels of QJL", ("qjl",), low=1, high=32),
    "outlier_choice": Option("what decides on them: the prompt, or each slab", ("qjl",), choices=("prompt", "slab")),
    "mode": Option("PolarQuant's grid", ("polar",), choices=("grouped", "paper")),
    "angle_bits": Option("PolarQuant's angle bits", ("polar",), choices=(2, 4)),
    "radius_bits": Option("PolarQuant's radius bits", ("polar",), choices=(2, 4)),
    "pairing": Option("RoPE's channel pairs, from the model unless set", ("polar",), choices=("half", "interleaved")),
    "seed": Option("seed of QJL's sketches", ("qjl",), low=0, high=2**31 - 1),
    "skip_layers": Option("indices of layers to keep in 16 bits (CPU; prefix caching is off then)", ("*",)),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """A format's options after its defaults; None where the head size decides (see `Format.bind`)."""

    keys: str
    values: str
    key_bits: int = 2
    value_bits: int = 2
    group: int = 32
    N: int | None = None
    W: int = 0
    S: int = 0
    r: int = 5
    lam: float = field(default=1e-3, metadata={"option": "lambda"})
    g: int | None = None
    m: int | None = None
    m_out: int | None = None
    outliers: int | None = None
    outlier_choice: str = "prompt"
    mode: str = "grouped"
    angle_bits: int = 4
    radius_bits: int = 4
    pairing: str | None = None
    seed: int = 42
    skip_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for f in fields(self):
            name, value = f.metadata.get("option", f.name), getattr(self, f.name)
            if value is None or (name == "keys" and value == "lossless"):
                continue
            if name == "skip_layers":
                if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value):
                    raise ValueError(f"option 'skip_layers' is {value!r}; it takes a list of layer indices from 0")
                continue
            OPTIONS[name].check(name, value)

    def with_options(self, format_name: str, options: Mapping[str, Any]) -> Settings:
        """These settings with the user's options; each must be known, in range, and read by a codec in use."""
        names = {f.metadata.get("option", f.name): f.name for f in fields(self)}
        unknown = [k for k in options if k not in names]
        if unknown:
            raise ValueError(f"unknown kvq option {unknown[0]!r}; known options are {', '.join(OPTIONS)}")
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in options.items():
            values[names[name]] = self._value(name, value)
        new = Settings(**values)
        for name in options:
            if not {"*", new.keys, new.values} & set(OPTIONS[name].codecs):
                raise ValueError(
                    f"option {name!r} is not read by {format_name} (keys {new.keys!r}, values {new.values!r}); "
                    f"it belongs to {', '.join(OPTIONS[name].codecs)}"
                )
        return new

    @staticmethod
    def _value(name: str, value: Any) -> Any:
        if value is None:
            raise ValueError(f"option {name!r} is null; leave it out to get the default")
        if name == "skip_layers":
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"option 'skip_layers' is {value!r}; it takes a list of layer indices from 0")
            return tuple(value)
        OPTIONS[name].check(name, value)
        return value
