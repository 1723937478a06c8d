"""A compiled library as a file: it appears only when it is complete, and a damaged or an untrusted one is not loaded.

The loader maps a truncated library without looking at its length, and the process dies of SIGBUS at the first access.
A changed byte would be worse: the kernels would compute something else. So what is compiled here ends with a hash of
all that comes before; linkers and loaders ignore it. A wheel's library has none, because patchelf rewrites it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import sys
from pathlib import Path
from typing import Any

from vllm_kvq.kernels import trust

ELF64 = b"\x7fELF\x02"
MACHINE_AT, SECTIONS_AT, SECTION_COUNTS_AT, HEADER_BYTES = 0x12, 0x28, 0x3A, 64
"""Offsets in the ELF header: u16 machine; u64 where the section headers lie, which is at the file's end; u16 size and
u16 count of them."""
ANY_MACHINE = 0
LIBRARY = ".so"
SEAL = b"kvq-sha256"
"""Followed by the hash of everything before: the end of a library that was compiled here."""
SEAL_BYTES = len(SEAL) + hashlib.sha256().digest_size


def why_not(path: Path, shipped: bool = False) -> str | None:
    """Why an existing file is not loaded, to be put after its name; None: it is as it was compiled, for this processor,
    and nobody else could have changed it. `shipped`: it is a part of the installed package, which is trusted."""
    try:
        data = path.read_bytes()
        if not shipped and (who := trust.writers(path)) is not None:
            return f"is not trusted, because {who}"
    except OSError as error:
        return f"can't be read: {error.strerror}"
    if len(data) < HEADER_BYTES or not data.startswith(ELF64):
        return "is damaged"
    (sections,) = struct.unpack_from("<Q", data, SECTIONS_AT)
    size, count = struct.unpack_from("<HH", data, SECTION_COUNTS_AT)
    whole = unsealed(data)
    if len(whole) < sections + size * count:
        return "is damaged"
    if whole is not data and not data.endswith(hashlib.sha256(whole).digest()):
        return "is damaged"
    if struct.unpack_from("<H", data, MACHINE_AT)[0] not in (ANY_MACHINE, _machine()):
        return "is for another kind of processor"
    return None


def is_there(path: Path) -> bool:
    """Whether the file exists and can be loaded."""
    return os.path.exists(path) and why_not(path) is None  # False also where the folder can't be entered


@functools.cache
def _machine() -> int | None:
    """The processor that this Python was compiled for, as ELF has it."""
    with open(sys.executable, "rb") as file:
        header = file.read(HEADER_BYTES)
    return struct.unpack_from("<H", header, MACHINE_AT)[0] if header.startswith(ELF64) else None


def unsealed(data: bytes) -> bytes:
    """The library without the hash at its end."""
    return data[:-SEAL_BYTES] if data[-SEAL_BYTES:].startswith(SEAL) else data


def publish(made: Path, target: Path) -> None:
    """Moves a complete file into its place, so that no crash can leave half of it there. Only libraries, which are
    loaded, get a hash; PTX is text."""
    seal = SEAL + hashlib.sha256(made.read_bytes()).digest() if target.suffix == LIBRARY else b""
    with made.open("ab") as file:
        file.write(seal)
        file.flush()
        os.fchmod(file.fileno(), 0o755)  # whatever the umask: nobody else may write to it
        os.fsync(file.fileno())
    os.replace(made, target)


def load(path: Path, shipped: bool = False) -> Any:
    """The library, a tvm_ffi module: its functions are attributes. `shipped`: as above."""
    import tvm_ffi

    path = path.resolve()
    if (why := why_not(path, shipped)) is not None:
        raise ValueError(f"the file {why}")
    return tvm_ffi.load_module(str(path))
