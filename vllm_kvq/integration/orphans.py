"""An engine ends when the process that started it is gone: vLLM's own would keep the cache's memory for ever.

Only processes that vLLM starts for an engine run this, and only where one of our formats is served: engines inside the
user's own process and Ray's actors have no such parent.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine.core import EngineCoreProc

logger = init_logger("vllm.kvq")
LOOK_SECONDS = 1.0
GRACE_SECONDS = 10.0
"""What an engine gets to end in order; while it warms up it does not listen."""
_vllms_own = EngineCoreProc.run_engine_core


def guard_engines() -> None:
    """Engines that this process starts from now on watch it. Ledger: compat.py."""
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """What vLLM's engine process runs."""
    threading.Thread(target=end_after, args=(os.getppid(),), daemon=True, name="kvq-orphans").start()
    _vllms_own(*args, **kwargs)


def end_after(parent: int) -> None:
    """Wait until `parent` is no longer this process's parent, then end this process; its workers notice that."""
    # The kernel gives a process another parent when its own is gone. (A pipe to it would stay open in forked siblings.)
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    logger.warning("kvq: the process that started this engine is gone, so the engine ends, too")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
