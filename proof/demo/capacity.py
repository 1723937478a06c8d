"""The capacity of the cache, as a server's log has it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Capacity:
    """What the integration's start-up line says about the cache's memory."""

    format: str
    bits: float
    tokens: int
    bf16_tokens: int

    def __str__(self) -> str:
        return (
            f"capacity: {self.tokens:,} tokens fit in the cache as {self.format} ({self.bits:g} bits per "
            f"element); a bf16 cache would hold {self.bf16_tokens:,} in the same bytes "
            f"({self.tokens / self.bf16_tokens:.2f} times as many)"
        )


def parse_capacity(log: str) -> Capacity | None:
    """Read the last `kvq: format=... bits=... capacity_tokens=... bf16_tokens=...` line of a server's log."""
    for line in reversed(log.splitlines()):
        at = line.find("kvq: format=")
        if at < 0:
            continue
        fields = dict(re.findall(r"(\w+)=(\S+)", line[at:]))
        try:
            return Capacity(
                fields["format"],
                float(fields["bits"]),
                int(fields["capacity_tokens"]),
                int(fields["bf16_tokens"]),
            )
        except (KeyError, ValueError):
            continue
    return None
