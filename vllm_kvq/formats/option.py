"""Options: the settings that a codec, or the cache around it, offers to users."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One setting: its name as users write it, what it means, and the values it may take.

    `default` None leaves the choice to whoever reads the option: to the head size, to the model, or to vLLM.
    """

    name: str
    help: str
    default: Any = None
    choices: tuple[Any, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    multiple: int = 1
    """A whole number must be a multiple of this; 0: any number is accepted."""

    def __post_init__(self) -> None:
        if self.default is not None:
            self.check(self.default)

    def check(self, value: Any) -> None:
        if isinstance(value, Mapping):
            raise ValueError(f"{self._refusal(value)}; it may be given by layer only when a whole model is served")
        if self.choices:
            # 2.0 == 2 and True == 1, but neither is a choice
            if value not in self.choices or type(value) is not type(self.choices[0]):
                raise ValueError(self._refusal(value))
            return
        whole = self.multiple > 0
        good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not good or not self.low <= value <= self.high or (whole and value % self.multiple):
            raise ValueError(self._refusal(value))

    def _refusal(self, value: Any) -> str:
        said = f"option {self.name!r} is {value!r}; it takes "
        if self.choices:
            return f"{said}one of {list(self.choices)}"
        step = f", a multiple of {self.multiple}" if self.multiple > 1 else ""
        return f"{said}a {'whole ' * (self.multiple > 0)}number from {self.low:g} to {self.high:g}{step}"

    @property
    def allowed(self) -> str:
        """The allowed values, as the table of options prints them."""
        if self.choices:
            return ", ".join(map(str, self.choices))
        step = f", multiple of {self.multiple}" if self.multiple > 1 else ""
        return f"{self.low:g} to {self.high:g}{step}"


@dataclass(frozen=True)
class LayerList(Option):
    """An option that names layers of the model: counted from 0 up, or from -1, the last one, down."""

    def check(self, value: Any) -> None:
        layers = isinstance(value, (list, tuple))
        if not layers or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise ValueError(
                f"option {self.name!r} is {value!r}; it takes a list of layer indices, from 0, or from -1 for the last"
            )

    @property
    def allowed(self) -> str:
        return "list of layer indices, -1 the last"

    def resolved(self, value: Iterable[int], total: int) -> frozenset[int]:
        """The indices from 0 in a model of `total` layers. Raises ValueError for a layer that it does not have."""
        if beyond := [i for i in value if not -total <= i < total]:
            raise ValueError(
                f"option {self.name!r} names layer {beyond[0]}; the model has layers 0 to {total - 1} (-1 to {-total} "
                "counted from the last)"
            )
        return frozenset(i % total for i in value)


# -- options that several codecs share -------------------------------------------------------------------------------
KEY_BITS = Option("key_bits", "bits per key code", 2, choices=(2, 4))
VALUE_BITS = Option("value_bits", "bits per value code", 2, choices=(2, 4))
KEY_SCALES = Option("key_scales", "scales of keys per channel: of the range, or fitted", "range", ("range", "fitted"))
VALUE_SCALES = Option(
    "value_scales", "scales of values per token: of the range, or fitted", "range", KEY_SCALES.choices
)
"""`quant.fitted_parameters` defines the fitted ones."""
BOOST = Option(
    "boost",
    "fraction of the channels with 4-bit codes; the others have 2-bit codes",
    choices=("none", "eighth", "quarter", "half"),
)
"""For keys with parameters per channel. Default: a quarter if all other options allow it (kitty.py, squat.py)."""
TOKEN_SCALE = Option(
    "token_scale", "a scale per token on top of the channels' own, which is not served", "none", ("none", "balanced")
)
"""For keys with parameters per channel."""
PAIRING = Option("pairing", "RoPE's channel pairs, from the model unless set", choices=("half", "interleaved"))
"""For codecs with `pairs_channels`. The user's setting replaces the geometry's pairing."""
