"""A real server whose CPU kernels are a sanitizer's build: it answers mixed requests, and its log must hold no report.

python -m proof sanitize address --server --formats squat2,qjl3
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import psutil

from proof.soak.client import BadAnswer, place, problem
from proof.soak.load import MAX_LEN, MODEL, Load, Order
from proof.soak.main import ENVIRONMENT, HOST, SHAPE
from vllm_kvq.bench.servers.server import Server, ServerError, free_port

REPORT = re.compile(r"^.*(?:AddressSanitizer|ThreadSanitizer|runtime error:).*$", re.MULTILINE)
START_SECONDS = 1200
CLIENTS, ORDERS = 4, 40
"""Requests at a time, and in total: prompts of all lengths, hits, several samples; hundreds of decode steps."""


def serve(environment: Mapping[str, str], library: Path, formats: Sequence[str]) -> int:
    """The exit status: 1 if there was a report, an answer was wrong or missing, or another library served."""
    from vllm_kvq.bench.models.random_model import random_model

    os.environ.update({**ENVIRONMENT, **environment})
    with tempfile.TemporaryDirectory(prefix="kvq-sanitize-") as folder:
        model = random_model(Path(folder) / "model", **SHAPE)
        wrong = [line for name in formats for line in _serve(model, name, library, Path(folder) / f"{name}.log")]
    return int(bool(wrong))


def _serve(model: Path, name: str, library: Path, log: Path) -> list[str]:
    """The problems found; all of them are printed."""
    arguments = ["--kv-cache-dtype", name, "--dtype", "float32", "--max-model-len", str(MAX_LEN), "--block-size", "64"]
    arguments += ["--served-model-name", MODEL, "--max-num-batched-tokens", "256", "--enforce-eager"]
    wrong: list[str] = []
    server = Server(str(model), arguments, HOST, free_port(HOST), log)
    try:
        with server:
            server.wait_until_healthy(START_SECONDS)
            if not _loaded(server.pid, library):
                wrong.append(f"no process of the server has loaded {library}")
            wrong += _answers(server.url)
            server.stop()
    except ServerError as error:
        wrong += [*error.log_tail, str(error)]
    text = server.read_log()
    # the report first: that answers are missing follows from it
    reports = list(REPORT.finditer(text))
    wrong = [found[0] for found in reports] + wrong
    print(f"{name}: {ORDERS} requests, {'; '.join(wrong[:4]) or 'no report'}", flush=True)
    if wrong:
        begin = reports[0].start() if reports else max(0, len(text) - 6000)
        print(text[begin : begin + 6000], file=sys.stderr)
    return wrong


def _loaded(pid: int, library: Path) -> bool:
    """Whether a process of the server has loaded the library."""
    processes = psutil.Process(pid).children(recursive=True)
    return any(str(library) in Path(f"/proc/{p.pid}/maps").read_text(encoding="utf-8") for p in processes)


def _answers(url: str) -> list[str]:
    load = Load(0, 0)
    orders = [load.draw() for _ in range(ORDERS)]

    def ask(order: Order) -> str | None:
        try:
            answer = place(url, order)
        except (BadAnswer, HTTPException, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return None if answer.left else problem(order, answer)

    with ThreadPoolExecutor(CLIENTS) as clients:
        return [complaint for complaint in clients.map(ask, orders) if complaint]
