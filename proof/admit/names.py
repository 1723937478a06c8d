"""What each patch needs and this vLLM lacks: python -m proof.admit.names FILE, in the environment of that vLLM."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_kvq.integration import compat
from vllm_kvq.integration.patches.names import missing
from vllm_kvq.integration.patches.once import is_loaded
from vllm_kvq.integration.patches.registry import PATCHES

NO_PATCH = "names that no patch is about"


@dataclass(frozen=True)
class Need:
    """The names that one patch needs, or that everything else needs."""

    what: str
    place: str
    count: int
    """How many names it needs."""
    lacking: tuple[str, ...]


@dataclass(frozen=True)
class Names:
    version: str
    """What this vLLM says of itself."""
    needs: tuple[Need, ...]

    @property
    def lacking(self) -> int:
        return sum(bool(need.lacking) for need in self.needs)

    @property
    def patches(self) -> frozenset[str]:
        """Those that this vLLM gets."""
        return frozenset(need.what for need in self.needs)

    @classmethod
    def read(cls, file: Path) -> Names:
        found = json.loads(file.read_text(encoding="utf-8"))
        return cls(found["version"], tuple(Need(**{**n, "lacking": tuple(n["lacking"])}) for n in found["needs"]))


def look() -> Names:
    from vllm import __version__

    return Names(__version__, (*_of_patches(), _of_no_patch()))


def _of_patches() -> list[Need]:
    found = []
    for patch in PATCHES:
        if patch.of_this_vllm:
            names = tuple(dict.fromkeys((*patch.needs, *filter(is_loaded, patch.replaces))))
            found.append(Need(patch.what, patch.place, len(names), _lacking(names)))
    return found


def _of_no_patch() -> Need:
    tables = (compat.NEEDED, compat.NEEDED_ON_CPUS, compat.NEEDED_ON_GPUS, compat.NEEDED_BY_CHECK)
    pairs = [(module, name) for table in tables for module, names in table.items() for name in names]
    names = tuple(dict.fromkeys(f"{module}:{name}" for module, name in pairs))
    return Need(NO_PATCH, "compat.py", len(names), _lacking(names))


def _lacking(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(what for name in names if (what := missing((name,))) is not None))


def main(file: str) -> None:
    Path(file).write_text(json.dumps(asdict(look())), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
