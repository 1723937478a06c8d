"""What users write after --formats: `squat2:r=8,W=64,innerq2`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvq.formats.by_layer import all_options
from vllm_kvq.formats.table import PLAIN, get_format, label

FP8 = "fp8"
BASELINES = (PLAIN, FP8)


@dataclass(frozen=True)
class Choice:
    """A KV cache dtype and its options; refuses whatever the format would refuse."""

    format: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.ours:
            for options in all_options(self.options):
                get_format(self.format).settings(options)
        elif self.options:
            raise ValueError(f"{self.format} is vLLM's own cache and takes no options")

    @property
    def ours(self) -> bool:
        return self.format not in BASELINES

    @property
    def label(self) -> str:
        """As users write it."""
        return label(self.format, self.options)


def choices(text: str) -> list[Choice]:
    """A comma separates both formats and a format's options: a piece with a `=` belongs to the format before it."""
    found: list[tuple[str, dict[str, Any]]] = []
    for piece in re.split(r",(?![^\[]*\]|[^{]*\})", text):
        piece = piece.strip()
        # a colon after a "=" belongs to the option's value
        name, colon, first = piece.partition(":") if ":" in piece.partition("=")[0] else (piece, "", "")
        option = first if colon else name
        if colon or "=" not in name:
            found.append((name, {}))
            if not name:
                raise ValueError(f"{text!r} names an empty format; write formats with commas between them")
        if colon or "=" in name:
            if not found:
                raise ValueError(f"{text!r} begins with an option; the format comes first: squat2:r=8")
            key, equals, value = option.partition("=")
            if not (key and equals and value):
                raise ValueError(f"{piece!r} is not an option; write it as name=value, like squat2:r=8,W=64")
            if key in found[-1][1]:
                raise ValueError(f"{found[-1][0]} has option {key!r} twice")
            found[-1][1][key] = _value(value)
    made = [Choice(name, options) for name, options in found]
    labels = [choice.label for choice in made]
    if twice := {name for name in labels if labels.count(name) > 1}:
        raise ValueError(f"{min(twice)} is named twice")
    return made


def _value(text: str) -> Any:
    """A number, a list or a mapping as JSON has it; anything else is a word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
