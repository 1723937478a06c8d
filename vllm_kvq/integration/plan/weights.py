"""Where a checkpoint's files lie."""

from __future__ import annotations

from pathlib import Path


def weights_folder(name: str, revision: str | None) -> Path | None:
    """A checkpoint's folder, or where the model hub's cache has it. Nothing is downloaded."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # no name of a model on the hub
        return None
    return Path(config).parent if isinstance(config, str) else None
