"""Constants: what a calibrated codec knows about a layer's KV heads before it packs anything.

They are fitted to a text other than those that are packed later (`Codec.calibrated`, `Codec.fit_constants`). A bound
codec packs a single head and gets that head's constants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Constants:
    """(KV heads, ...) float32 for each half; None for a half that is not calibrated."""

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __post_init__(self) -> None:
        if self.keys is not None and self.values is not None and len(self.keys) != len(self.values):
            raise ValueError(f"constants of {len(self.keys)} heads' keys and of {len(self.values)} heads' values")

    def of_head(self, head: int) -> Constants:
        return Constants(*(None if x is None else x[head : head + 1] for x in (self.keys, self.values)))


@dataclass(frozen=True, eq=False)
class Calibration:
    """A layer's queries (tokens, query heads, d), keys and values (tokens, KV heads, d), as passed to the cache."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def __post_init__(self) -> None:
        if self.key.shape != self.value.shape or self.query.dim() != 3 or self.query.shape[1] % self.key.shape[1]:
            shapes = ", ".join(str(tuple(x.shape)) for x in (self.query, self.key, self.value))
            raise ValueError(f"queries, keys and values {shapes} are not those of one layer")

    @property
    def grouped(self) -> torch.Tensor:
        """Queries by KV head: (KV heads, tokens * group, d)."""
        heads = self.key.shape[1]
        return self.query.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)


def of_one_head(constants: torch.Tensor | None, name: str) -> torch.Tensor:
    """The constants of the head that a calibrated codec packs. Raises ValueError unless they are those of one head."""
    if constants is None or len(constants) != 1:
        raise ValueError(f"{name} packs one KV head, with constants that are fitted to another text")
    return constants[0]


def not_served(name: str) -> str:
    """`Codec.reference_only` of a calibrated codec."""
    return (
        f"{name} has constants that are fitted to a calibration text, which a server does not have; measure it with "
        "`vllm-kvq eval heads`, or serve kitty2"
    )
