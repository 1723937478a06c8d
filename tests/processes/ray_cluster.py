"""A Ray cluster for the tests of examples/, whose processes are known by a variable in their environment."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_kvq.bench.servers.server import free_port

ROOT = Path(__file__).parents[2]
PATIENCE = 600
"""Seconds: other test processes share the cores."""
CORES = 4
"""Cores that the cluster counts, however many there are."""
ENGINE = ("--kv-cache-dtype", "kitty2", "--enforce-eager", "--max-model-len", "512", "--cpus", "0.1",
          "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "4")  # fmt: skip


@dataclass(frozen=True)
class Job:
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self) -> int:
        return self.process.wait(timeout=PATIENCE)

    def until(self, so: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Waits until that is so; an error if the job ends before."""
        end = time.monotonic() + seconds
        while not so():
            assert self.process.poll() is None, self.said()[-4000:]
            assert time.monotonic() < end, self.said()[-4000:]
            time.sleep(0.1)


class Cluster:
    def __init__(self, folder: Path):
        self.address = f"127.0.0.1:{free_port('127.0.0.1')}"
        self._mark = ("KVQ_TEST_RAY", folder.name)
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._environment = {
            **os.environ,
            "PYTHONPATH": path,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",  # Ray listens on all of the machine's addresses
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_raylet_start_wait_time_s": "200",
            "RAY_DEDUP_LOGS": "0",
            self._mark[0]: self._mark[1],
        }
        self._environment.pop("RAY_ADDRESS", None)
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--num-cpus", str(CORES)]
        command += ["--node-ip-address", "127.0.0.1", "--port", self.address.rpartition(":")[2]]
        command += ["--include-dashboard=false", "--object-store-memory", str(200 << 20), "--temp-dir", str(folder)]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    def job(self, folder: Path, *arguments: str) -> Job:
        """Python with these arguments, in the folder."""
        environment = self._environment | {"RAY_ADDRESS": self.address}
        log = folder / "log"
        with log.open("wb") as file:
            command = [sys.executable, *arguments]
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
        return Job(process, log)

    def running(self, named: str = "") -> list[int]:
        """The cluster's and its jobs' processes with this in their command line."""
        mark, found = "=".join(self._mark).encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment, command = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if mark in environment.split(b"\0") and named.encode() in command:
                found.append(int(folder.name))
        return found

    def engines(self) -> list[int]:
        return self.running("VLLM::EngineCore")

    def without_engines(self) -> None:
        """Waits until those of an earlier job are gone."""
        end = time.monotonic() + PATIENCE
        while left := self.engines():
            assert time.monotonic() < end, left
            time.sleep(0.2)

    def kill(self) -> None:
        while left := self.running():  # a process may start another before it is killed
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="kvq-ray-"))  # pytest's are too long for the names of Ray's sockets
    cluster = None
    try:
        cluster = Cluster(folder)
        yield cluster
    finally:
        if cluster is not None:
            cluster.kill()
        shutil.rmtree(folder, ignore_errors=True)
