"""`Lab` writes tiny checkpoints of every architecture and starts engines for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proof.models import checkpoints
from proof.models.architecture import Architecture
from proof.models.seeing import SEEING
from proof.oracle.engines import forked
from proof.oracle.engines.without_torchvision import without_torchvision
from proof.oracle.trace import Result, Trace
from vllm_kvq.integration.patches.served.states import leave_checkpoints_out
from vllm_kvq.integration.plan import plan


class Lab:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def config(self, arch: Architecture) -> Path:
        path = self.folder / f"{arch.slug}-config"
        return path if path.exists() else checkpoints.write_config(arch, path)

    def model(self, arch: Architecture) -> Path:
        path = self.folder / arch.slug
        if not path.exists():
            checkpoints.write_model(arch, path)
            if arch.name in SEEING:
                SEEING[arch.name].complete(path)
        return path

    def run(
        self,
        arch: Architecture,
        traces: list[Trace],
        prepare: Callable[[Any], None] | None = None,
        **engine: Any,
    ) -> list[Result]:
        """`prepare` gets the TracedEngine before the traces, in its process."""
        arguments = {"dtype": arch.dtype, "skip_tokenizer_init": True, **arch.engine, **engine}
        if arch.hybrid and arguments["kv_cache_dtype"] == "auto":
            # plain vLLM crashes on a long prompt on a CPU; with our formats that is fixed
            arguments["before"] = leave_checkpoints_out
        if arch.vision:
            arguments["before"] = functools.partial(without_torchvision, arch.model)
        with forked.EngineProcess(str(self.model(arch)), arguments, {}, prepare) as process:
            return [process.run(trace) for trace in traces]

    def refusal(self, checkpoint: Path, vision: str | None = None, **engine: Any) -> str | None:
        """The sentence that the configuration is refused with, or None. `vision`: vLLM's class of a model that encodes
        images."""
        return forked.call(configure, str(checkpoint), vision, {"skip_tokenizer_init": True, **engine})


def configure(model: str, vision: str | None, engine: dict[str, Any]) -> str | None:
    from vllm import EngineArgs

    if vision is not None:
        without_torchvision(vision)
    try:
        EngineArgs(model, kv_cache_memory_bytes=1 << 30, **engine).create_engine_config()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def smallest_pages() -> None:
    """Before an engine is made: pages of 32 tokens for windows, whether that saves memory or not."""
    plan._window_block = lambda served, sizes: min(sizes)
