"""What the commands that start servers share."""

from __future__ import annotations

import os
import signal
import sys

from vllm_kvq import console
from vllm_kvq.bench.servers.server import ServerError


def prepare() -> None:
    """SIGTERM ends the command cleanly, so that its servers are stopped; and nothing is downloaded."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def failed(prog: str, error: ServerError, as_json: bool) -> int:
    """Says why a server failed, after the end of its log. Returns the exit status."""
    for line in error.log_tail:
        print(line, file=sys.stderr)
    return console.fail(prog, error, as_json)
