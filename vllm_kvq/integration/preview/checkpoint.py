"""What a checkpoint's folder lacks: `check` loads nothing, and a server would notice late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvq.integration.plan.model.weights import WEIGHTS, weight_files
from vllm_kvq.problem import Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

INDEX = "*.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json", "*.tiktoken")
WITHOUT_FILES = ("dummy",)
"""Values of vLLM's --load-format for weights that no file holds."""


def checkpoint_problem(vllm_config: VllmConfig) -> Problem | None:
    """Files that are missing; only folders are looked at: for a model's name vLLM downloads what it needs."""
    model = vllm_config.model_config
    if vllm_config.load_config.load_format not in WITHOUT_FILES and (folder := Path(model.model)).is_dir():
        if not weight_files(folder):
            return Problem(f"{folder} has no weights ({', '.join(WEIGHTS)})", "download them, or name another model")
        if missing := _missing_shards(folder):
            more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
            return Problem(f"{folder} lacks {missing[0]}{more}", "download the checkpoint again")
    if model.skip_tokenizer_init or not (folder := Path(model.tokenizer)).is_dir():
        return None
    if any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        return None
    return Problem(f"{folder} has no tokenizer ({', '.join(TOKENIZERS)})", "add its files, or name it with --tokenizer")


def _missing_shards(folder: Path) -> list[str]:
    """Files that an index of the weights names and that are not there: none where some index is complete, because a
    folder may hold the index of another kind of weights, too."""
    missing = [[name for name in _named(path) if not (folder / name).is_file()] for path in folder.glob(INDEX)]
    return min(missing, key=len, default=[])


def _named(index: Path) -> list[str]:
    """Nothing where it is damaged: vLLM says that in its own words."""
    try:
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(name) for name in weights.values()})
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
