"""vLLM's configuration, made as for an engine that starts, without starting one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proof.models import named

MEMORY = {"kv_cache_memory_bytes": 1 << 30}
"""For configurations that are made while other tests run: the memory of vLLM's default may not be free."""

Bare = Callable[..., Any]


@pytest.fixture
def bare(configured: Bare, monkeypatch: pytest.MonkeyPatch) -> Bare:
    """vLLM's configuration before anything of ours is written into it."""
    monkeypatch.setattr("vllm_kvq.integration.platform.apply", lambda served, vllm_config: None)
    return configured


@pytest.fixture
def configured(model: Path, tmp_path: Path) -> Bare:
    """vLLM's configuration as an engine has it."""
    from transformers.models.auto import modeling_auto as auto
    from vllm.engine.arg_utils import EngineArgs

    def make(**arguments: Any) -> Any:
        where: Path = model
        if arch := arguments.pop("model", None):
            arch = named(arch)
            config = replace(arch, numbers={**arch.numbers, **arguments.pop("numbers", {})}).build()
            config.architectures = [auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
            config.save_pretrained(where := tmp_path / "model")
            arguments = {"skip_tokenizer_init": True, "dtype": "float32", **arguments}
        if method := arguments.pop("draft", None):
            from proof.models.draft import random_draft

            draft = random_draft(tmp_path / "draft", model, method=method)
            arguments["speculative_config"] = {"method": method, "model": str(draft), "num_speculative_tokens": 3}
        return EngineArgs(model=str(where), **{"max_model_len": 256, **MEMORY, **arguments}).create_engine_config()

    return make
