"""`Lab` starts engines for tiny models of every architecture."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest

from proof.models.architecture import Architecture
from proof.oracle.engine import ENVIRONMENT
from proof.oracle.trace import Result, Trace

# two spinning threads per engine are far slower than one where the machine has other work
THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class Lab:
    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, itertools.count()
        self.log = (folder / "worker.log").open("w")
        self.worker = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **ENVIRONMENT, **THREADS},
        )

    def close(self) -> None:
        assert self.worker.stdin is not None
        self.worker.stdin.close()
        self.worker.wait(timeout=60)
        self.log.close()

    def config(self, arch: Architecture) -> Path:
        path = self.folder / f"{arch.slug}-config"
        return path if path.exists() else checkpoints.write_config(arch, path)

    def model(self, arch: Architecture) -> Path:
        path = self.folder / arch.slug
        return path if path.exists() else checkpoints.write_model(arch, path)

    def adapter(self, arch: Architecture) -> Path:
        path = self.folder / f"{arch.slug}-adapter"
        return path if path.exists() else checkpoints.write_adapter(path, arch.build())

    def do(self, task: str, **job: Any) -> Any:
        at = self.folder / f"{next(self.count)}-{task}"
        message = {"task": task, "job": f"{at}.json", "out": f"{at}.out", "log": f"{at}.log"}
        Path(message["job"]).write_text(json.dumps(job))
        assert self.worker.stdin is not None
        assert self.worker.stdout is not None
        self.worker.stdin.write(json.dumps(message) + "\n")
        self.worker.stdin.flush()
        code = self.worker.stdout.readline().strip()
        if code != "0":
            tail = Path(message["log"]).read_text()[-6000:] if Path(message["log"]).exists() else ""
            raise RuntimeError(f"{task} ended with {code!r}:\n{tail}")
        return json.loads(Path(message["out"]).read_text())

    def run(self, arch: Architecture, traces: list[Trace], adapter: bool = False, **engine: Any) -> list[Result]:
        arguments = {"dtype": arch.dtype, "skip_tokenizer_init": True, **arch.engine, **engine}
        results = self.do(
            "serve",
            model=str(self.model(arch)),
            engine=arguments,
            traces=[t.to_json() for t in traces],
            adapter=str(self.adapter(arch)) if adapter else None,
        )
        return [Result.from_json(r) for r in results]


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("models"))
    yield lab
    lab.close()


@pytest.fixture(autouse=True)
def _needs(request: pytest.FixtureRequest) -> None:
    call = getattr(request.node, "callspec", None)
    arch = call.params.get("arch") if call else None
    if arch is not None and arch.needs:
        # installed, but built for another torch: importing it raises something else
        pytest.importorskip(arch.needs, exc_type=Exception)
