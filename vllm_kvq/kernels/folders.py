"""Where files that can be made again are kept: the folder that the user names, and the user's cache.

Compiled libraries and fitted constants are kept in the named folder if there is one. Measurements never are: they are
kept in the user's cache, or where `--cache` says.
"""

from __future__ import annotations

import os
from pathlib import Path

CACHE = "VLLM_KVQ_CACHE"


def named_folder() -> Path | None:
    named = os.environ.get(CACHE)
    return Path(named) if named else None


def user_folder() -> Path | None:
    """None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm_kvq"
    except RuntimeError:
        return None
