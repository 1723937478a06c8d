"""An engine whose sidecar belongs to other tokens fails loudly: every waiting client gets an error, with the reason."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from vllm_kvq.bench.servers.server import Server, ServerError, free_port

pytestmark = [pytest.mark.engine, pytest.mark.wide]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAULTS = "server_faults.ServerFaults"
REASON = "self_attn.attn: stale sidecar: magic 0x4b565153, positions from 0, next position"


@pytest.fixture(autouse=True)
def path_of_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(HERE)]))


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=240)


@pytest.mark.slow
def test_a_server_ends_and_says_why(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status is vLLM's own: 0, whatever stopped its engine (docs/serving.md)."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    arguments = ["--kv-cache-dtype", "squat2", "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
    arguments += ["--served-model-name", "tiny", "--worker-extension-cls", FAULTS]
    body = {"model": "tiny", "prompt": [*range(10, 60)], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with Server(str(model), arguments, "127.0.0.1", free_port("127.0.0.1"), tmp_path / "log") as server:
        server.wait_until_healthy(240)
        with contextlib.ExitStack() as open_answers:
            clients = [open_answers.enter_context(post(f"{server.url}/v1/completions", body)) for _ in range(2)]
            for answer in clients:
                assert all(answer.readline() for _ in range(10))
            with post(f"{server.url}/collective_rpc", {"method": "damage_headers"}) as damaged:
                assert json.load(damaged) == {"results": ["2"]}
            for answer in clients:
                rest = answer.read()
                assert b'"error"' in rest
                assert b'"code": 500' in rest
                assert b'"finish_reason":"length"' not in rest
        # nobody asks it to
        with pytest.raises(ServerError, match="the server exited with status"):
            server.wait()
        assert REASON in server.read_log()


OFFLINE = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], kv_cache_dtype="squat2", dtype="float32", max_model_len=1024, enforce_eager=True,
              kv_cache_memory_bytes=1 << 26, worker_extension_cls=sys.argv[2])
    engine, sampling = llm.llm_engine, SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)
    engine.add_request("a", {"prompt_token_ids": [*range(10, 60)]}, sampling)
    for _ in range(5):
        engine.step()
    assert llm.collective_rpc("damage_headers") == [1]
    while engine.has_unfinished_requests():
        engine.step()
    print("went on to the end")
"""


@pytest.mark.slow
def test_a_script_ends_with_an_error(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OFFLINE)
    command = [sys.executable, str(script), str(model), FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "went on to the end" not in done.stdout
    assert REASON in done.stdout + done.stderr
