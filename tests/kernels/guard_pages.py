"""Calls of the C++ kernels with tensors at the edge of their memory: what reads or writes beyond one is killed.

Each tensor is copied to pages of its own, between two that no process may touch: once it begins where they begin, and
in a second call it ends where they end. It is the usual library that is called, with every instruction set; a sanitized
build (`test_cpu_sanitizers.py`) also knows where tensors of the same storage end, and arrays on the stack.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from typing import Any

import torch

PAGE = mmap.PAGESIZE
NO_ACCESS = 0
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect


def between_guards(size: int) -> mmap.mmap:
    """`size` bytes, a multiple of PAGE, after and before a page that can't be read."""
    memory = mmap.mmap(-1, size + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (start, start + PAGE + size):
        if _mprotect(ctypes.c_void_p(guard), PAGE, NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
    return memory


class Copy:
    """The bytes of one storage that a call's tensors touch, at an edge of their memory."""

    def __init__(self, tensors: Iterable[torch.Tensor], at_end: bool) -> None:
        extents = [extent(x) for x in tensors]
        self.first, last = min(a for a, _ in extents), max(b for _, b in extents)
        size = last - self.first
        room = -(-size // PAGE) * PAGE
        self._memory = between_guards(room)
        self._start = PAGE + (room - size if at_end else 0)
        self._original = (ctypes.c_char * size).from_address(self.first)
        self._memory[self._start : self._start + size] = bytes(self._original)

    def view(self, x: torch.Tensor) -> torch.Tensor:
        first, last = extent(x)
        count = (last - first) // x.itemsize
        offset = self._start + first - self.first
        return torch.frombuffer(self._memory, dtype=x.dtype, count=count, offset=offset).as_strided(x.shape, x.stride())

    def write_back(self) -> None:
        size = len(self._original)
        ctypes.memmove(self._original, self._memory[self._start : self._start + size], size)


def extent(x: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte and just past its last."""
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.itemsize


def tensors_in(arguments: Any) -> list[torch.Tensor]:
    if isinstance(arguments, torch.Tensor):
        return [arguments] if arguments.numel() else []
    return [x for part in arguments for x in tensors_in(part)] if isinstance(arguments, tuple) else []


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; its arguments are tensors, tuples of them, and other values."""

    def call(*arguments: Any) -> Any:
        by_storage: dict[int, list[torch.Tensor]] = {}
        for x in tensors_in(arguments):
            by_storage.setdefault(storage_of(x), []).append(x)
        for at_end in (False, True):
            copies = {storage: Copy(tensors, at_end) for storage, tensors in by_storage.items()}
            result = function(*in_copies(arguments, copies))
        for copy in copies.values():
            copy.write_back()
        return result

    return call


def storage_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def in_copies(arguments: Any, copies: dict[int, Copy]) -> Any:
    if isinstance(arguments, torch.Tensor):
        return copies[storage_of(arguments)].view(arguments) if arguments.numel() else arguments
    return tuple(in_copies(part, copies) for part in arguments) if isinstance(arguments, tuple) else arguments
