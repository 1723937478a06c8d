"""A server's processes end when the one that started them is gone: vLLM's own would keep the cache's memory for ever.

This runs only in processes that vLLM itself starts for a server or for `LLM`, and only where one of our formats is
served: an engine inside the user's own process, and Ray's actors, have no such parent.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from multiprocessing import current_process
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import EngineCoreProc

logger = init_logger("vllm.kvq")
LOOK_SECONDS = 1.0
GRACE_SECONDS = 10.0
"""What a process gets to end in order; an engine that warms up does not listen."""
API_SERVER = "ApiServer_"
"""Several API servers of one `vllm serve` are processes of this name, and make the configuration anew."""
_engine, _coordinator = EngineCoreProc.run_engine_core, DPCoordinatorProc.run_coordinator


def guard() -> None:
    """What this process starts from now on watches it, and so does this process if it is one of several API servers.

    Ledger: ledger.py.
    """
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)
    if current_process().name.startswith(API_SERVER):
        watch()


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """What vLLM's engine process runs."""
    watch()
    _engine(*args, **kwargs)


def run_coordinator(*args: Any, **kwargs: Any) -> None:
    """What the process runs that stands between the engines of data parallelism."""
    watch()
    _coordinator(*args, **kwargs)


@functools.cache
def watch() -> None:
    """In a thread of its own, and once."""
    threading.Thread(target=end_after, args=(os.getppid(),), daemon=True, name="kvq-orphans").start()


def end_after(parent: int) -> None:
    """Wait until `parent` is no longer this process's parent, then end this one; an engine's workers notice that."""
    # The kernel gives a process another parent when its own is gone. (A pipe to it would stay open in forked siblings.)
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    logger.warning("kvq: the process that started %s is gone, so it ends, too", current_process().name)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
