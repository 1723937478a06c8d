"""A server's processes exit when the one that started them is gone: vLLM's own would keep the cache's memory for ever.

This runs only in processes that vLLM itself starts for a server or for `LLM`, and only where one of our formats is
served: an engine inside the user's own process, and Ray's actors, have no such parent.

It has nothing to do with compression. It is here because a server that is killed, for example by the kernel's OOM
killer, would leave a cache behind that takes the next one's memory; docs/upstream.md has a reproduction.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from multiprocessing import current_process
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.patches.once import once, own
from vllm_kvq.integration.patches.patch import Moment, Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENGINE = "vllm.v1.engine.core:EngineCoreProc.run_engine_core"
COORDINATOR = "vllm.v1.engine.coordinator:DPCoordinatorProc.run_coordinator"
LOOK_SECONDS = 1.0
GRACE_SECONDS = 10.0
"""The time that a process has to exit in good order; an engine that is warming up does not listen."""
API_SERVER = "ApiServer_"
"""Several API servers of one `vllm serve` are processes of this name, and make the configuration again."""


def guard(_: VllmConfig) -> None:
    """What this process starts from now on watches it, and so does this process if it is one of several API servers."""
    # functions of this module and no wrappers: vLLM pickles them for the processes that it spawns
    once(ENGINE, lambda _: run_engine_core)
    once(COORDINATOR, lambda _: run_coordinator)
    if current_process().name.startswith(API_SERVER):
        watch()


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """What vLLM's engine process runs."""
    watch()
    _vllms(run_engine_core, ENGINE)(*args, **kwargs)


def run_coordinator(*args: Any, **kwargs: Any) -> None:
    """What runs in the process that stands between the engines of data parallelism."""
    watch()
    _vllms(run_coordinator, COORDINATOR)(*args, **kwargs)


def _vllms(ours: Any, name: str) -> Any:
    """What ours has replaced. In a spawned process, where ours is the first to run, nothing is replaced yet."""
    return getattr(ours, "__wrapped__", None) or own(name)


@functools.cache
def watch() -> None:
    """In a thread of its own, and once."""
    threading.Thread(target=end_after, args=(os.getppid(),), daemon=True, name="kvq-orphans").start()


def end_after(parent: int) -> None:
    """Wait until `parent` is no longer this process's parent, then end this one; an engine's workers notice that."""
    # The kernel gives a process another parent when its own is gone. (A pipe to it would stay open in forked siblings.)
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    from vllm.logger import init_logger

    init_logger("vllm.kvq").warning(
        "kvq: the process that started %s is gone, so it exits, too", current_process().name
    )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


ORPHANS = Patch(
    what="EngineCoreProc.run_engine_core and DPCoordinatorProc.run_coordinator wrapped",
    why="the engine stays when its server is killed",
    until="vLLM's processes watch the one that made them",
    needs=(ENGINE, COORDINATOR),
    moment=Moment.CONFIGURED,
    install=guard,
    replaces=(ENGINE, COORDINATOR),
)
