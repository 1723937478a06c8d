"""The servers: one that can do everything, and those that differ in what runs behind the endpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from proof.clients.adapters import ADAPTER, NAME
from proof.clients.bench import BENCH
from proof.clients.case import Case
from proof.clients.chats import CHATS, SHORT
from proof.clients.crowd import CROWD
from proof.clients.tools import TOOLS
from vllm_kvq.bench.servers.server import Server, free_port

HOST, MODEL = "127.0.0.1", "real"
MAX_LEN = 8192


@dataclass(frozen=True)
class Setup:
    name: str
    cases: tuple[Case, ...]
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    lora: bool = False
    tools: bool = False
    v2: bool = False
    """vLLM's V2 model runner, whose Triton kernels are interpreted on a CPU."""

    def server(self, checkpoint: Path, cache: Sequence[str], adapter: Path | None, log: Path) -> Server:
        arguments = ["--served-model-name", MODEL, "--max-model-len", str(MAX_LEN), "--enforce-eager"]
        arguments += ["--enable-prompt-tokens-details", *cache, *self.arguments]
        if self.tools:
            arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        if self.lora:
            arguments += ["--enable-lora", "--lora-modules", f"{NAME}={adapter}"]
        server = Server(str(checkpoint), arguments, HOST, free_port(HOST), log)
        if self.v2:
            server.command[:1] = [sys.executable, "-m", "proof.oracle.engines.vllm_v2"]
        return server


FULL = "one server"
TOGETHER = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""vLLM wants a NUMA node for each rank, or to be told not to bind threads."""
SETUPS = (
    Setup(FULL, CHATS + TOOLS + CROWD + BENCH + ADAPTER, lora=True, tools=True),
    Setup("two API servers", SHORT + CROWD, ("--api-server-count", "2")),
    Setup("tensor parallel", SHORT, ("--tensor-parallel-size", "2"), TOGETHER),
    Setup("data parallel", SHORT + CROWD, ("--data-parallel-size", "2"), TOGETHER),
    Setup("V2 model runner", SHORT, v2=True),
)
