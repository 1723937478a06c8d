"""How a function of vLLM's is replaced: once, however often it is asked for.

What stands in its place carries a mark. The mark is on the function itself and not in a separate list, so that it is
true whatever else happens: a function that vLLM or a test has put back is replaced again.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

MARK = "_kvq"
Make = Callable[[Any], Any]


def once(name: str, make: Make) -> None:
    """Put `make(vLLM's own)` in the place that `name` names (names.py), unless ours is there already."""
    owner, attribute = _place(name, importlib.import_module(name.partition(":")[0]))
    found, kind = _function(owner, attribute)
    if hasattr(found, MARK):
        return
    new = make(found)
    setattr(new, MARK, True)
    new.__wrapped__ = found
    setattr(owner, attribute, kind(new) if kind else new)


def own(name: str) -> Any:
    """vLLM's own function, replaced or not."""
    found, _ = _function(*_place(name, importlib.import_module(name.partition(":")[0])))
    while hasattr(found, MARK):  # a wrapper that somebody else has put around ours may carry a copy of the mark
        found = found.__wrapped__
    return found


def is_replaced(name: str) -> bool:
    return hasattr(_function(*_place(name, sys.modules[name.partition(":")[0]]))[0], MARK)


def is_loaded(name: str) -> bool:
    """Whether the module of this name has been imported."""
    return name.partition(":")[0] in sys.modules


def _function(owner: Any, attribute: str) -> tuple[Any, type | None]:
    """The function itself, and what it is wrapped in: classmethod, staticmethod or nothing."""
    held = inspect.getattr_static(owner, attribute)
    return (held.__func__, type(held)) if isinstance(held, classmethod | staticmethod) else (held, None)


def _place(name: str, module: ModuleType) -> tuple[Any, str]:
    """(module or class, attribute). An instance, such as the current platform, counts as its class."""
    owner, _, attribute = name.partition(":")[2].rpartition(".")
    if not owner:
        return module, attribute
    found = getattr(module, owner)
    return found if isinstance(found, type) else type(found), attribute
