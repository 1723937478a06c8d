"""Where a checkpoint's files lie, and which of them are weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""Names of files of weights, those that vLLM prefers first."""


def weights_folder(name: str, revision: str | None) -> Path | None:
    """A checkpoint's folder, or where the model hub's cache has it. Nothing is downloaded."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not the name of a model on the hub
        return None
    return Path(config).parent if isinstance(config, str) else None


def weight_files(folder: Path) -> list[Path]:
    """All of them: a folder may hold the same weights in files of several kinds."""
    return sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))


def weight_bytes(folder: Path) -> int:
    """The size of what vLLM loads: the files of the first kind that is there."""
    for pattern in WEIGHTS:
        if found := [path.stat().st_size for path in folder.glob(pattern)]:
            return sum(found)
    return 0


def checkpoint_bytes(model: ModelConfig) -> int:
    """`weight_bytes` of a model's configuration, as far as the files are on this machine."""
    folder = weights_folder(model.model, model.revision)
    return 0 if folder is None else weight_bytes(folder)
