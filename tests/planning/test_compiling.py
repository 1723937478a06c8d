"""Kernels that have to be compiled: the process that the user sees says so once, before the model loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_kvq.bench.servers.server import Server, free_port
from vllm_kvq.kernels import build

pytestmark = [pytest.mark.engine, pytest.mark.wide]
KEEP_WAITING = 0.5


def test_a_server_says_that_it_compiles(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that makes empty files and links them to the existing library."""
    library, asked, compiler = build.build(), tmp_path / "asked", tmp_path / "compiler"
    compiler.write_text(f"""#!/bin/sh
[ "$1" = --version ] && exit
echo "$@" >> {asked}
sleep {KEEP_WAITING}
case "$*" in *-shared*) made={library};; *) made=/dev/null;; esac
while [ "$1" != -o ]; do shift; done
cp "$made" "$2"
""")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("VLLM_KVQ_CACHE", str(tmp_path / "cache"))
    arguments = ["--kv-cache-dtype", "squat2", "--enforce-eager", "--max-model-len", "512", "--dtype", "float32"]
    with Server(str(model), arguments, "127.0.0.1", free_port("127.0.0.1"), tmp_path / "log") as server:
        server.wait_until_healthy(240)
        log = server.read_log().splitlines()
        assert server.stop() == 0
    many = len(build.sources(build.source_dir()))
    assert len(asked.read_text().splitlines()) == many + 1
    said = [i for i, line in enumerate(log) if re.search(r"kvq: compiling|kvq: \d+ of \d+ sources compiled", line)]
    (loading, *_) = [i for i, line in enumerate(log) if "Starting to load model" in line]
    assert f"{many} of {many} sources" in log[said[-1]]
    assert max(said) < loading
    assert all("APIServer" in log[i] for i in said)
    assert not any("no C++ kernels" in line for line in log)
