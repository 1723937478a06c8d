"""The process that sandbox.py starts: it reads a program and its limits, has a child run it, and prints the verdict.

It is run as a file, by a Python that has imported nothing: this module imports nothing but the standard library and
sandbox_walls.py, also from its file.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import resource
import secrets
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

NEW_USER, NEW_PID, NEW_NET, NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
DEATH_SIGNAL, KEEP_CAPABILITIES, SUBREAPER, NO_NEW_PRIVILEGES = 1, 8, 36, 38
"""Options of prctl."""
CAPABILITIES_VERSION, MAY_READ = 0x20080522, 1 << 2
"""Constants of capset; CAP_DAC_READ_SEARCH."""
LIMITED = b"limited"
"""What a child says before it runs the program; it runs none if it could not be limited."""
LONGEST, LONGEST_BYTES = 300, 4096
"""The maximum characters of a reason, and bytes of what is read from the program."""
LOOK_SECONDS = 0.05
"""The interval between looks at the program's folder."""
Task = dict[str, Any]
libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    task = json.load(sys.stdin)
    user = _other_user()
    isolation = _isolate(user) if task["namespaces"] else "guard"
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    if user is not None:
        os.chown(task["folder"], user, user)
    word = secrets.token_hex(16)
    readable, writable = os.pipe()
    begins, limited = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        os.close(begins)
        _run(task, user, isolation, word, writable, limited)
    os.close(writable)
    os.close(limited)
    if os.read(begins, len(LIMITED)) != LIMITED:
        sys.exit(1)  # the error is on standard error
    os.close(begins)
    passed, reason = _watch(child, readable, word, task)
    print(json.dumps({"passed": passed, "reason": reason, "isolation": isolation}))


# -- before the program starts -----------------------------------------------------------------------------------------
def _other_user() -> int | None:
    """Root may do anything and start any number of processes, so the program runs under an invented user."""
    return None if os.getuid() else 1 << 20 | secrets.randbits(19)


def _isolate(user: int | None) -> str:
    """Children created from now on have their own process numbers and no network, if this system allows it."""
    return "namespaces" if _is_allowed(user) and _unshare(user) else "guard"


def _is_allowed(user: int | None) -> bool:
    """Tried by a child: AppArmor may let a user make namespaces and then refuse to let them be entered as that user,
    and a process that is half in can't go back."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if _unshare(user) else 1
        except OSError:
            pass  # what is refused is not an error: there are other walls
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def _unshare(user: int | None) -> bool:
    outside = os.getuid(), os.getgid()
    flags = NEW_PID | NEW_NET | NEW_IPC
    if libc.unshare(flags if user is not None else flags | NEW_USER):
        return False
    if user is None:
        # the same user as before, without privileges outside
        for name, text in (("setgroups", "deny"), ("uid_map", "{0} {0} 1"), ("gid_map", "{1} {1} 1")):
            Path(f"/proc/self/{name}").write_text(text.format(*outside), encoding="utf-8")
    return True


def _run(task: Task, user: int | None, isolation: str, word: str, pipe: int, limited: int) -> NoReturn:
    """In the child: writes the word if the program finishes, otherwise why it does not.

    The pipe `limited` is closed before the program starts, so nothing that the program does looks like a sandbox that
    could not be made.
    """
    try:
        os.setsid()
        libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        _limit(task, user, isolation)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        me = os.getpid()
        os.write(limited, LIMITED)
        os.close(limited)
        try:
            exec(compile(task["program"], "answer.py", "exec"), {"__name__": "answer"})
            said = word
        except BaseException as error:
            said = _line(error)
        if os.getpid() == me:  # and not a process that the program has forked
            os.write(pipe, said.encode(errors="replace")[:LONGEST_BYTES])
    except BaseException as error:
        os.write(2, f"{_line(error)}\n".encode())
    finally:
        os._exit(0)


def _line(error: BaseException) -> str:
    said = str(error).replace(os.path.dirname(os.__file__) + os.sep, "")  # Python's path says nothing of the program
    return " ".join(f"{type(error).__name__}: {said[:LONGEST]}".split()).removesuffix(":")


def _limit(task: Task, user: int | None, isolation: str) -> None:
    walls = _walls()  # while it can be read: the package may be in a folder that only root can enter
    os.chdir(task["folder"])
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    processes = task["processes"]
    if user is None and isolation == "guard":
        processes += _mine()
    for which, most in (
        (resource.RLIMIT_CPU, task["cpu_seconds"]),
        (resource.RLIMIT_AS, task["memory_bytes"]),
        (resource.RLIMIT_FSIZE, task["file_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, processes),
    ):
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # SIGKILL comes a second after SIGXCPU, of which a namespace's first process takes no notice
        last = most + 1 if which == resource.RLIMIT_CPU and hard != most else most
        resource.setrlimit(which, (most, last))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write that is too large raises OSError
    if user is not None:
        _become(user)
        if not os.path.exists(task["folder"]):
            why = f"root's programs run as another user, who can't reach {task['folder']}"
            raise PermissionError(f"set TMPDIR to a folder that every user can enter: {why}")
    elif isolation == "namespaces":
        _keep_capabilities(0)
    if not walls.build(task["folder"], user is None, isolation == "guard").seccomp:
        _take_sockets()


def _walls() -> Any:
    path = Path(__file__).with_name("sandbox_walls.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _become(user: int) -> None:
    """Root's own Python may be unreadable to other users; then the new user keeps only the right to read."""
    folders = [path for path in sys.path if os.path.isdir(path)]
    libc.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _keep_capabilities(0 if all(os.access(path, os.R_OK | os.X_OK) for path in folders) else MAY_READ)
    # the kernel forgets it when a process changes its user
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _keep_capabilities(kept: int) -> None:
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0)
    data = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capabilities can't be dropped")


def _mine() -> int:
    """Processes and threads that this user already has, which count towards the limit."""
    count = 0
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and path.stat().st_uid == os.getuid():
                count += len(list((path / "task").iterdir()))
        except OSError:
            continue  # it has exited
    return count


def _take_sockets() -> None:
    import _socket
    import socket

    class Taken:
        def __init__(self, *_: object, **__: object) -> None:
            raise PermissionError("there is no network here")

    for module in (socket, _socket):
        for name in ("socket", "SocketType", "socketpair", "create_connection", "create_server", "fromfd"):
            if hasattr(module, name):
                setattr(module, name, Taken)


# -- while it runs, and afterwards -------------------------------------------------------------------------------------
def _watch(child: int, pipe: int, word: str, task: Task) -> tuple[bool, str]:
    """The child's message counts only once it has exited."""
    deadline = time.monotonic() + task["seconds"]
    said, status, looked, filled = b"", None, 0.0, False
    while status is None and not filled and (left := deadline - time.monotonic()) > 0:
        if select.select([pipe], [], [], min(left, LOOK_SECONDS))[0]:
            more = os.read(pipe, LONGEST_BYTES)
            said = (said + more)[:LONGEST_BYTES]
            if not more:
                time.sleep(0.005)  # all ends of the pipe are closed, so it is about to exit
        found, code = os.waitpid(child, os.WNOHANG)
        status = code if found else None
        if time.monotonic() - looked > LOOK_SECONDS:
            filled, looked = _is_filled(task), time.monotonic()
    _kill(child, status is None)
    while select.select([pipe], [], [], 0)[0] and (more := os.read(pipe, LONGEST_BYTES)):
        said = (said + more)[:LONGEST_BYTES]
    if filled:
        return False, f"more than {task['folder_bytes']} bytes or {task['files']} files in its folder"
    if status is None:
        return False, f"still running after {task['seconds']} s"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        killed_late = number == signal.SIGKILL and used.ru_utime + used.ru_stime >= task["cpu_seconds"]
        if number == signal.SIGXCPU or killed_late:
            return False, f"still running after {task['cpu_seconds']} s of processor time"
        return False, f"killed by {signal.Signals(number).name}"
    text = said.decode(errors="replace")
    if text == word:
        return True, "passed"
    shown = "".join(c if c.isprintable() else "?" for c in text[:LONGEST])  # terminals obey some of these
    return False, shown or "it exited before its end"


def _is_filled(task: Task) -> bool:
    """Whether the program's folder holds more than it may; if a part of it can't be looked at, it does."""
    used = count = 0
    folders = [task["folder"]]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    used += entry.stat(follow_symlinks=False).st_blocks * 512
                    if used > task["folder_bytes"] or count > task["files"]:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # it has been removed in the meantime
        except OSError:
            return True
    return False


def _kill(child: int, alive: bool) -> None:
    """The child, and all processes that it has left: orphans become children of this process."""
    if alive:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    while left := _children():
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _children() -> list[int]:
    return [int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()]


if __name__ == "__main__":
    main()
