"""A compiled library as a file: it appears only when it is complete, and a damaged one is not loaded.

The loader maps a truncated library without a look at its length, and the process dies of SIGBUS at the first access.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

ELF64 = b"\x7fELF\x02"
SECTIONS_AT, SECTION_COUNTS_AT, HEADER_BYTES = 0x28, 0x3A, 64
"""Of the ELF header: u64 where the section headers lie, which is at the file's end; u16 size and u16 count of them."""


def is_there(path: Path) -> bool:
    """Whether the file exists and is as long as its header says."""
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
            length = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < HEADER_BYTES or not header.startswith(ELF64):
        return False
    (sections,) = struct.unpack_from("<Q", header, SECTIONS_AT)
    size, count = struct.unpack_from("<HH", header, SECTION_COUNTS_AT)
    return bool(length >= sections + size * count)


def publish(made: Path, target: Path) -> None:
    """Moves a complete library into its place, from which no crash can make half of it."""
    with made.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(made, target)


def load(path: Path) -> Any:
    """The library, a tvm_ffi module: its functions are attributes."""
    import tvm_ffi

    if not is_there(path):
        raise ValueError("the file is damaged")
    return tvm_ffi.load_module(str(path))
