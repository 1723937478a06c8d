"""Runs engines, each in a process forked from one that has imported vLLM already: seconds instead of half a minute.

Reads lines of JSON {"task", "job", "out", "log"} and answers each with the exit code of its process.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from proof.oracle.warm import warm


def serve(job: dict[str, Any]) -> Any:
    """The results of traces."""
    from proof.oracle.engine import TracedEngine
    from proof.oracle.trace import Request, Trace

    class Engine(TracedEngine):
        def _add(self, r: Request, sampling: Any) -> None:
            if job.get("adapter"):
                from vllm.lora.request import LoRARequest

                add, lora = self.engine.add_request, LoRARequest("adapter", 1, job["adapter"])
                self.engine.add_request = lambda *a, **k: add(*a, lora_request=lora, **k)
                super()._add(r, sampling)
                self.engine.add_request = add
            else:
                super()._add(r, sampling)

    engine = Engine(job["model"], **job["engine"])
    return [engine.run(Trace.from_json(t)).to_json() for t in job["traces"]]


def configure(job: dict[str, Any]) -> Any:
    """The sentence that the configuration is refused with, or None."""
    from vllm import EngineArgs

    try:
        EngineArgs(job["model"], **job["engine"]).create_engine_config()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def start(job: dict[str, Any]) -> Any:
    """The error that the engine does not start with, or None."""
    try:
        serve(job)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


TASKS = {"serve": serve, "configure": configure, "start": start}


def _child(message: dict[str, str]) -> int:
    log = os.open(message["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        result = TASKS[message["task"]](json.loads(Path(message["job"]).read_text()))
        Path(message["out"]).write_text(json.dumps(result))
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main() -> None:
    warm()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os._exit(_child(json.loads(line)))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
