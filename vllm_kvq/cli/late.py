"""torch takes seconds to load, and a mistyped command line can be refused without it.

The table of formats, which a refusal needs, imports torch like anything else. In this process such an import gives a
module that loads itself when one of its names is first used. So modules that a refusal imports may use torch's names
only in functions and in annotations, or the wait comes back (tests/commands/test_imports.py).
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

LATE = "torch"


class LateModule(ModuleType):
    """`importlib.util.LazyLoader` gives one that is loaded as soon as a second module imports it."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__path__ = spec.submodule_search_locations or []
        try:
            spec.loader.exec_module(self)
        except BaseException:
            del sys.modules[LATE]
            raise
        return getattr(self, name)


def load_torch_late() -> None:
    if LATE in sys.modules or (spec := importlib.util.find_spec(LATE)) is None:
        return
    module = LateModule(LATE)
    # without a __path__, so that an import of torch.nn begins with torch
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    module.__package__ = LATE
    sys.modules[LATE] = module
