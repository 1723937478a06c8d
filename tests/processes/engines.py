"""Runs traces on engines that spread over processes. Each engine is driven by a process forked from this one, which is
itself forked from one that has imported vLLM. vLLM starts the workers as always; for a job with "fork" they are forked
too, which saves half a minute.

Gets lists of jobs and answers each list, once all of its jobs are done, with their exit codes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any


def caches(worker: Any) -> dict[str, dict[str, Any]]:
    """One worker's packed layers: their numbers, and a hash of all that they keep."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    found = {}
    for name, layer in layers.items():
        packed = getattr(getattr(layer, "impl", None), "packed", None)
        if packed is None:
            continue
        kept = [layer.kv_cache, packed.sidecar.kv_cache, *([packed.sinks.kv_cache] if packed.sinks else [])]
        digest = hashlib.sha256(b"".join(x.contiguous().view(-1).numpy().tobytes() for x in kept))
        found[name] = {
            "index": packed.fmt.geometry.layer,
            "heads": packed.sidecar.slots_geometry.heads,
            "seed": getattr(packed.fmt.keys, "seed", None),
            "constants": packed.calibration,
            "written": int(layer.kv_cache.count_nonzero()) > 0,
            "digest": digest.hexdigest(),
        }
    return found


def serve(job: dict[str, Any]) -> Any:
    from proof.oracle.engines import engine as oracle

    os.environ.update(job["variables"])
    if job["ray"]:
        import ray_on_cpus

        ray_on_cpus.start(job["ray"])
    if job["fork"]:
        from vllm.v1.engine import coordinator, utils
        from vllm.v1.executor import multiproc_executor

        for module in (coordinator, utils, multiproc_executor):
            module.get_mp_context = lambda: multiprocessing.get_context("fork")
    if "data_parallel_size" in job["engine"]:
        import data_parallel

        return {"results": data_parallel.serve(job), "ranks": []}
    from proof.oracle.trace import Trace

    engine = oracle.TracedEngine(job["model"], **job["engine"])
    results = [engine.run(Trace.from_json(t)).to_json() for t in job["traces"]]
    executor = engine.engine.engine_core.engine_core.model_executor
    ranks = executor.collective_rpc(caches) if job["engine"]["kv_cache_dtype"] != "auto" else []
    executor.shutdown()
    if job["ray"]:
        ray_on_cpus.stop()
    return {"results": results, "ranks": ranks}


def _child(job: dict[str, Any]) -> None:
    # a separate session: whatever the engine leaves behind is found and stopped with it
    os.setsid()
    log = os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        Path(job["out"]).write_text(json.dumps(serve(job)), encoding="utf-8")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def drive(pipe: Any, log: str, variables: dict[str, str]) -> None:
    """Answers lists of jobs until the pipe is closed."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(out, fd)
    os.environ.clear()
    os.environ.update(variables)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # as in what a user starts
    from vllm import logger

    logger._configure_vllm_root_logger()  # the process that this one is forked from is silent
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_done(pipe.recv()))


def _done(jobs: list[dict[str, Any]]) -> list[int]:
    children = []
    for job in jobs:
        pid = os.fork()
        if pid == 0:
            _child(job)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return codes
