"""What Linux itself refuses to the program in the sandbox, once and for all: Landlock's rules on files, and a filter on
system calls.

Loaded by sandbox_process.py, from its file: it imports nothing but the standard library. A system that lacks one of the
two gets the other; `Walls` says what there is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from dataclasses import dataclass

libc = ctypes.CDLL(None, use_errno=True)

# -- Landlock ---------------------------------------------------------------------------------------------------------
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Its system calls, with the same numbers on every processor."""
EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER, REFER, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 13, 1 << 14
WRITING = 0x1FF2
"""Write, remove and create files and everything else that a folder can hold; from its first version."""
READING = EXECUTE | READ_FILE | READ_FOLDER
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/zero", "/dev/urandom")
"""What may be read in addition to Python's own folders: no user's files, no secrets, nothing about other processes."""
NETWORK, OUTSIDE = 0b11, 0b11
"""Landlock, from versions 4 and 6: TCP; signals and abstract sockets to processes outside the sandbox."""

# -- seccomp ----------------------------------------------------------------------------------------------------------
SET_SECCOMP, FILTER = 22, 2
"""Arguments of prctl."""
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16
"""In the record of a system call."""
X32 = 0x40000000
"""x86-64's second set of numbers for the same calls begins here."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS: dict[str, tuple[int, int]] = {
    "socket": (41, 198),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "mount": (165, 40),
    "unshare": (272, 97),
    "setns": (308, 268),
}
"""Numbers on x86-64 and aarch64 of calls that reach other processes or the network, or leave something behind."""
OWNERS_CALLS: dict[str, tuple[int | None, int | None]] = {
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "prlimit64": (302, 261),
    "setpriority": (141, 140),
}
"""Calls with which a program that runs as the user can change the user's other files and processes."""
SIGNALS = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)}
"""Calls that may only name the program's own process."""
OTHER_SIGNALS = {"pidfd_send_signal": (424, 424), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)}


@dataclass(frozen=True)
class Walls:
    landlock: int
    """Its version; 0: this system has none, and the program reads and writes what its user may."""
    seccomp: bool
    """Whether calls are filtered; if not, only Python's sockets are disabled."""


def build(folder: str, as_user: bool, among_others: bool) -> Walls:
    """For this process and all that it starts; it must already be barred from new privileges. `as_user`: it runs as the
    user who evaluates; `among_others`: it sees the other processes' numbers."""
    version = _landlock(folder)
    refused = dict.fromkeys(_numbers(CALLS), errno.EPERM)
    refused[_number(CALLS["socket"]) or 0] = errno.ENETUNREACH
    if as_user:
        refused |= dict.fromkeys(_numbers(OWNERS_CALLS), errno.EPERM)
    signals: list[int] = []
    if as_user and among_others and version < 6:
        refused |= dict.fromkeys(_numbers(OTHER_SIGNALS), errno.EPERM)
        signals = _numbers(SIGNALS)
    return Walls(version, _filter(refused, signals))


def _landlock(folder: str) -> int:
    version: int = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return 0
    writing = WRITING | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    handled = [writing | READING, *([NETWORK] if version >= 4 else []), *([OUTSIDE] if version >= 6 else [])]
    attributes = (ctypes.c_uint64 * len(handled))(*handled)
    ruleset = libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(ctypes.sizeof(attributes)), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "Landlock can't make a set of rules")
    of_files = WRITE_FILE | READ_FILE | EXECUTE | TRUNCATE
    rules = {path: READING for path in (*SYSTEM, sys.prefix, sys.base_prefix) if os.path.exists(path)}
    rules |= {os.devnull: READ_FILE | WRITE_FILE, folder: writing | READING}
    for path, allowed in rules.items():
        parent = os.open(path, os.O_PATH)
        if not os.path.isdir(path):
            allowed &= of_files
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, parent), 12)
        if libc.syscall(ADD_RULE, ruleset, 1, rule, 0):
            raise OSError(ctypes.get_errno(), "Landlock refuses a rule", path)
        os.close(parent)
    if libc.syscall(RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "Landlock can't be set")
    os.close(ruleset)
    return version


def _number(numbers: tuple[int | None, int | None]) -> int | None:
    return numbers[platform.machine() == "aarch64"]


def _numbers(calls: dict[str, tuple[int, int]] | dict[str, tuple[int | None, int | None]]) -> list[int]:
    return [number for numbers in calls.values() if (number := _number(numbers)) is not None]


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def _filter(refused: dict[int, int], signals: list[int]) -> bool:
    """Refuses these calls with these errors, and signals to others; everything else is as before."""
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    steps = [(LOAD, 0, 0, ARCHITECTURE_AT), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL)]
    steps += [(LOAD, 0, 0, NUMBER_AT), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    for number, error in refused.items():
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | error)]
    for number in signals:
        own = [
            (EQUAL, 2, 0, os.getpid()),
            (EQUAL, 1, 0, 0),
            (RETURN, 0, 0, REFUSE | errno.EPERM),
            (RETURN, 0, 0, ALLOW),
        ]
        steps += [(EQUAL, 0, 1 + len(own), number), (LOAD, 0, 0, FIRST_ARGUMENT_AT), *own]
    steps.append((RETURN, 0, 0, ALLOW))
    packed = b"".join(struct.pack("=HBBI", *step) for step in steps)
    program = _Program(len(steps), packed)
    return not libc.prctl(SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0)
