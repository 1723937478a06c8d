"""Triton's interpreter in half the time. What it computes stays the same."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

UNCHANGED = SimpleNamespace(restore=lambda: None)


@functools.cache
def quicken() -> None:
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    # it computes whether each sum and product overflows, and outside of its debug mode ignores the answer
    builder.options = replace(builder.options, sanitize_overflow=False)
    _patch_once_per_kernel(interpreter)


def _patch_once_per_kernel(interpreter: Any) -> None:
    """A kernel's start replaces the functions of triton.language by interpreted ones, and its end restores them. Each
    call of a device function replaces them again, which takes a third of the time."""
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    language = (interpreter.tl, interpreter.tl.core)
    patched: set[tuple[bool, ...]] = set()

    @functools.cache
    def named_in(function: Any) -> tuple[bool, ...]:
        named = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return tuple(module in named for module in language)

    def patch_once(function: Any) -> Any:
        if (names := named_in(function)) in patched:
            return UNCHANGED
        patched.add(names)
        return patch(function)

    def run_kernel(self: Any, *arguments: Any, **named: Any) -> Any:
        patched.clear()
        return run(self, *arguments, **named)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = run_kernel
