"""Options given by layer: `{"m": {"0-3": 512, "*": 256}}`.

A mapping names layers, a single one ("7") or a range ("0-3"), and "*" for all layers that it does not name. A
format is bound to one layer, so it never sees a mapping: this module gives each layer its own values. Options that
concern a request rather than a layer's pages have one value for all layers (`SHARED`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvq.formats.settings import COMMON

REST = "*"
CODECS = ("keys", "values")
"""The options that choose the codecs: pages are packed in units of the same number of tokens in all layers."""
SHARED = (*CODECS, *(option.name for option in COMMON))


@dataclass(frozen=True)
class ByLayer:
    """One option's values."""

    option: str
    named: tuple[tuple[range, Any], ...]
    rest: Any

    @classmethod
    def of(cls, option: str, given: Mapping[Any, Any]) -> ByLayer:
        """Raises ValueError for a mapping that does not follow the module's docstring."""
        if option in SHARED:
            raise ValueError(f"option {option!r} is given by layer, and must be the same in all layers")
        if REST not in given:
            raise ValueError(f'option {option!r} is given by layer without "{REST}", which sets it for all others')
        named = tuple((_layers(option, name), value) for name, value in given.items() if name != REST)
        seen: set[int] = set()
        for layers, _ in named:
            if twice := seen.intersection(layers):
                raise ValueError(f"option {option!r} names layer {min(twice)} more than once")
            seen.update(layers)
        return cls(option, named, given[REST])

    def at(self, layer: int) -> Any:
        return next((value for layers, value in self.named if layer in layers), self.rest)

    def check(self, packed: Collection[int], total: int) -> None:
        """Raises ValueError if it names layers that the model does not have, or that no format serves."""
        for layers, _ in self.named:
            if layers[-1] >= total:
                raise ValueError(
                    f"option {self.option!r} names layer {layers[-1]}; the model has layers 0 to {total - 1}"
                )
            if not any(layer in packed for layer in layers):
                raise ValueError(f"option {self.option!r} names {written(layers)}, which no format serves")


def _layers(option: str, name: Any) -> range:
    text = str(name) if isinstance(name, int) and not isinstance(name, bool) else name
    found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text, re.ASCII) if isinstance(text, str) else None
    layers = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if not layers:
        raise ValueError(
            f'option {option!r} is given by layer, and {name!r} names none; write "7" or "0-3", and "{REST}" for others'
        )
    return layers


def schedules(options: Mapping[str, Any]) -> list[ByLayer]:
    """The options that are given by layer."""
    return [ByLayer.of(name, value) for name, value in options.items() if isinstance(value, Mapping)]


def options_at(options: Mapping[str, Any], layer: int | None) -> dict[str, Any]:
    """One layer's options; None: a layer that no option names."""
    found = dict(options)
    for schedule in schedules(options):
        found[schedule.option] = schedule.rest if layer is None else schedule.at(layer)
    return found


def all_options(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every distinct set of options that some layer may get."""
    edges = {0, *(edge for s in schedules(options) for layers, _ in s.named for edge in (layers[0], layers[-1] + 1))}
    found: list[dict[str, Any]] = []
    for layer in (None, *sorted(edges)):
        if (here := options_at(options, layer)) not in found:
            found.append(here)
    return found


def written(layers: Iterable[int]) -> str:
    """`layer 7`, `layers 0-3 and 9`, as sentences name them."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    *most, last = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"layer {last}" if one else "layers " + (f"{', '.join(most)} and {last}" if most else last)
