"""How long a server takes to start: as long as plain vLLM's."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

from vllm_kvq.bench.servers.server import Server, free_port

pytestmark = pytest.mark.engine
HOST = "127.0.0.1"
ARGUMENTS = ["--enforce-eager", "--max-model-len", "1024"]


def serve(model: Path, log: Path, dtype: str) -> Server:
    return Server(str(model), ["--kv-cache-dtype", dtype, *ARGUMENTS], HOST, free_port(HOST), log)


@pytest.mark.wide
def test_a_start_takes_as_long_as_plain_vllms(model: Path, tmp_path: Path) -> None:
    """The kernels are compiled by now: the model's fixture is older than this test's servers."""

    def seconds(dtype: str) -> float:
        begin = time.monotonic()
        with serve(model, tmp_path / dtype, dtype) as server:
            server.wait_until_healthy(240)
            return time.monotonic() - begin

    seconds("squat2")  # warm up whatever is read from disk for the first time
    differences = [seconds("squat2") - seconds("auto") for _ in range(3)]
    assert statistics.median(differences) < 3.0, differences
