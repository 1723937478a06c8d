"""Which patches a failed test is about: those whose functions are in its traceback, or whose name a sentence quotes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from types import CodeType, FunctionType

from vllm_kvq.integration.patches.patch import Patch

FRAME = re.compile(r'vllm_kvq/integration/([\w/]+\.py)(?:", line |:)\d+(?:, in |: in )<?(\w+)')
"""A line of a traceback, in Python's form or in pytest's short one: the file and the function."""
NOBODY = "no patch"


def blamed(text: str, patches: Iterable[Patch]) -> list[str]:
    """In the order of the list of patches."""
    frames = FRAME.findall(text)
    found = [patch.what for patch in patches if _quoted(patch, text) or _among(patch, frames)]
    return found or [f"{NOBODY}, last of ours in it: {frames[-1][0]}" if frames else NOBODY]


def _quoted(patch: Patch, text: str) -> bool:
    return f'"{patch.what}"' in text


def _among(patch: Patch, frames: list[tuple[str, str]]) -> bool:
    if patch.install is None:  # many other functions are in the same file
        return False
    return any(file == patch.place and function in functions(patch) for file, function in frames)


def functions(patch: Patch) -> set[str]:
    """Those that `install` defines or calls in its own file, and those that these do."""
    assert patch.install is not None
    module = sys.modules[patch.install.__module__]
    todo: list[CodeType] = [patch.install.__code__]  # type: ignore[attr-defined]
    seen: set[CodeType] = set()
    while todo:
        code = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        todo += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        called = (getattr(module, name, None) for name in code.co_names)
        todo += [f.__code__ for f in called if isinstance(f, FunctionType) and f.__module__ == module.__name__]
    return {code.co_name for code in seen}
