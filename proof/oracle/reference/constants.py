"""The constants that an engine of the oracle used: those that it left in its file, or that the user named."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from proof.oracle.engines import forked
from proof.oracle.engines.interpreted import RUNNER
from proof.oracle.engines.without_torchvision import without_torchvision
from vllm_kvq.formats import PageFormat, get_format
from vllm_kvq.formats.by_layer import options_at
from vllm_kvq.formats.constants import Constants


def calibrated(format_name: str, options: Mapping[str, Any]) -> bool:
    return get_format(format_name).settings(options_at(options, None)).calibrated


def constants_of(path: str, format_name: str, options: Mapping[str, Any]) -> Mapping[int, Constants]:
    """By packed layer; nothing for a format that needs none. `path`: the checkpoint that the engine ran in float32."""
    if not calibrated(format_name, options):
        return {}
    import transformers

    from vllm_kvq.integration.plan.calibration import read

    config = transformers.AutoConfig.from_pretrained(path)
    sees = config.architectures[0] if hasattr(config, "vision_config") else None
    # vLLM's models of images are made to work without torchvision in a process of their own
    file = forked.call(_file_of, path, format_name, options, sees) if sees else _file_of(path, format_name, options)
    if file is None:
        raise ValueError(f"the engine of {path} has left no file of constants")
    return read(file)[0]


def _file_of(path: str, format_name: str, options: Mapping[str, Any], sees: str | None = None) -> Path | None:
    """`sees`: the class of a model that sees images."""
    if sees is not None:
        without_torchvision(sees)
    from vllm.engine.arg_utils import EngineArgs

    from vllm_kvq.integration.plan.plan import plan

    arguments = EngineArgs(
        path,
        dtype="float32",
        kv_cache_dtype=format_name,
        kv_cache_memory_bytes=1 << 28,
        additional_config={"kvq": dict(options)},
    )
    # the other runner is refused in a process that does not interpret its kernels
    with mock.patch.dict(os.environ, {RUNNER: "0"}):
        config = arguments.create_engine_config()
    source = plan(config).calibration
    return None if source is None else source.path


def with_constants(fmt: PageFormat, constants: Mapping[int, Constants], layer: int) -> PageFormat:
    return fmt.with_constants(constants[layer]) if layer in constants else fmt
