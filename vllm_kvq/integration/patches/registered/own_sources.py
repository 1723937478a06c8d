"""Our folder `triton_kernels`, which vLLM takes for a package of that name.

vLLM looks for the package triton_kernels. In a process that was started in a checkout of this project, Python finds our
folder of that name instead: it takes a folder without `__init__.py` for a package where it finds no other. A real
package of that name, wherever it is on the path, comes first, and is not touched.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from vllm_kvq.integration.patches.patch import Hooks, Patch

NAME = "triton_kernels"


def hide_own_sources(_: Hooks | None = None) -> None:
    if _is_visible():
        sys.modules[NAME] = None  # type: ignore[assignment]


def _is_visible() -> bool:
    found = importlib.util.find_spec(NAME)
    if found is None or found.origin is not None:
        return False
    return all(_is_our_folder(Path(place)) for place in found.submodule_search_locations or ())


def _is_our_folder(folder: Path) -> bool:
    """Whether this is the triton_kernels/ of a checkout of this project, not necessarily of the one that runs."""
    link = folder.parent / "vllm_kvq" / folder.name
    return link.is_dir() and link.samefile(folder)


HIDDEN = Patch(
    what=f'sys.modules["{NAME}"] = None in a checkout',
    why=f"Python takes our folder {NAME}/ in a checkout for the package of that name that vLLM looks for",
    until="vLLM looks for a module inside the folder",
    install=hide_own_sources,
    active=lambda: not _is_visible(),
)
