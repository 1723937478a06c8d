"""Settings: a format's options, complete and checked.

Users write options as JSON, `--additional-config '{"kvq": {"r": 8, "S": 4}}'`; the names are the papers' own. This
module declares those that every format has. All others are declared by the codecs that read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvq.formats.codec import LARGEST_BLOCK, Codec, KeyCodec, ValueCodec
from vllm_kvq.formats.option import LayerList, Option
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.meant import meant

SKIP_LAYERS = LayerList("skip_layers", "layers that are not packed", ())
BLOCK = Option("N", "tokens per page, the same as --block-size", low=SLAB, high=LARGEST_BLOCK, multiple=SLAB)
COMMON = (
    BLOCK,
    Option("W", "newest tokens read in full precision", 0, low=0, high=4096, multiple=32),
    Option(
        "W_keys",
        "newest tokens with keys in full precision, if fewer than W, which is not served",
        low=0,
        high=4096,
        multiple=32,
    ),
    Option("S", "first tokens read in full precision", 4, low=0, high=1024),
    Option(
        "recompute",
        "newest tokens of a request that no prefix hit covers; default W, or 0 with sliding-window layers",
        low=0,
        high=4096,
    ),
    SKIP_LAYERS,
)


@dataclass(frozen=True)
class Settings:
    """The user's value, else the format's default, else the option's."""

    keys: type[KeyCodec]
    values: type[ValueCodec]
    N: int | None
    W: int
    W_keys: int | None
    """None: W."""
    S: int
    recompute: int | None
    """None: `integration/plan/served.py` decides."""
    skip_layers: tuple[int, ...]
    """As given by the user; `skipped` resolves them to a model's layers."""
    own: tuple[tuple[str, Any], ...]
    """The options of the two codecs; None: the codec chooses by the head."""

    @property
    def calibrated(self) -> bool:
        """Whether a half has constants that are fitted to another text."""
        return self.keys.calibrated or self.values.calibrated

    @classmethod
    def of(cls, keys: type[KeyCodec], values: type[ValueCodec], given: Mapping[str, Any]) -> Settings:
        """Complete settings of two codecs; given values must be in range."""
        declared = {option.name: option for option in COMMON}
        for option in (*keys.options, *values.options):
            if declared.setdefault(option.name, option) != option:
                raise ValueError(
                    f"keys {keys.name!r} and values {values.name!r} can't be combined: both declare an option "
                    f"{option.name!r}, or every format has it, with another meaning"
                )
        for name, value in given.items():
            declared[name].check(value)
        complete = {name: given.get(name, option.default) for name, option in declared.items()}
        common = {option.name: complete.pop(option.name) for option in COMMON}
        common["skip_layers"] = tuple(common["skip_layers"])
        return cls(keys, values, own=tuple(complete.items()), **common)

    def skipped(self, total: int) -> frozenset[int]:
        """Indices of the layers that are not packed, in a model of `total`. ValueError if one is out of range."""
        return SKIP_LAYERS.resolved(self.skip_layers, total)

    def get(self, option: str) -> Any:
        """The value of a codec's option; None if neither codec has such an option."""
        return dict(self.own).get(option)

    def of_codec(self, codec: type[Codec]) -> dict[str, Any]:
        return {option.name: self.get(option.name) for option in codec.options}


def check_names(
    format_name: str,
    keys: type[KeyCodec],
    values: type[ValueCodec],
    chosen: Mapping[str, Any],
    readers: Callable[[], Mapping[str, Sequence[str]]],
) -> None:
    """Checks that each chosen option is read by these codecs, or by all formats, and has a value.

    `readers` maps every option that exists to the codecs that read it.
    """
    read = {option.name for option in (*COMMON, *keys.options, *values.options)}
    for name, value in chosen.items():
        if name not in read and name not in readers():
            close = meant(name, readers())
            known = f"did you mean {close!r}?" if close else f"known options are {', '.join(readers())}"
            raise ValueError(f"unknown kvq option {name!r}; {known}")
        if value is None:
            raise ValueError(f"option {name!r} is null; leave it out to get the default")
        if name not in read:
            raise ValueError(
                f"option {name!r} is not read by {format_name} (keys {keys.name!r}, values {values.name!r}); "
                f"it belongs to {', '.join(readers()[name])}"
            )
