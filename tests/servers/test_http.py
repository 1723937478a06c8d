"""Every format over HTTP: the server's tokens are those of the reference, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
import traces
from completions import complete

from proof.demo.capacity import parse_capacity
from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.trace import Chunk, Request, Result, Trace
from vllm_kvq.bench.servers.server import Server
from vllm_kvq.formats import FORMATS

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]
N = 64
FIRST = ["qjl3"]


def as_result(request: Request, tokens: list[int]) -> Result:
    """What the scheduler does with one request on an idle server: the prompt at once, then token by token."""
    pages = list(range(1, 100))
    steps = [[Chunk(f"{request.name}-0", 0, len(request.prompt), pages=pages)]]
    steps += [[Chunk(f"{request.name}-0", len(request.prompt) + i, 1, pages=pages)] for i in range(len(tokens) - 1)]
    return Result({request.name: [tokens]}, {}, steps, 0, (0, 0))


def ctrl_c_leaves_nothing(server: Server) -> None:
    """A terminal sends SIGINT to all processes of the command."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    assert len(processes) > 2
    os.killpg(server.pid, signal.SIGINT)
    _, left = psutil.wait_procs(processes, 40)
    assert not [" ".join(process.cmdline()) for process in left]


WIDE = [pytest.param(f.name, marks=pytest.mark.wide) for f in FORMATS.values() if f.public and f.name not in FIRST]


@pytest.mark.parametrize("name", [*FIRST, *WIDE])
def test_server_answers_like_the_reference(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # started in the checkout, and with it on the path
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    request = traces.prefixes(N)[0].requests[0]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # one format compiled, as vLLM does by default; a configuration file for the others
    arguments = (
        ["--kv-cache-dtype", name] if name == "squat2" else ["--config", f"configs/{name}.yaml", "--enforce-eager"]
    )
    arguments += [
        "--dtype",
        "float32",
        "--max-model-len",
        "1024",
        "--block-size",
        str(N),
        "--served-model-name",
        "tiny",
    ]
    with Server(str(model), arguments, "127.0.0.1", port, tmp_path / "log") as server:
        server.wait_until_healthy(240)
        tokens = complete(server.url, request.prompt, request.max_tokens)
        # again, now from the prefix cache
        assert len(complete(server.url, request.prompt, request.max_tokens)) == request.max_tokens
        capacity = parse_capacity(server.read_log())
        assert capacity is not None
        assert capacity.format == name
        # vLLM did not take our folder of that name for the package that it looks for
        assert "triton_kernels" not in server.read_log()
        ctrl_c_leaves_nothing(server)
    reference = ReplayModel(str(model), name, N, kernel_error=1e-2 if name == "qjl3" else 1e-3)
    verdict = judge(reference, [Trace((request,))], [as_result(request, tokens)])
    assert not verdict.mismatches
    assert verdict.tokens == request.max_tokens
