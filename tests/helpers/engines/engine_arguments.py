"""Arguments of vLLM's engine as many tests write them."""

from __future__ import annotations

from typing import Any


def kvq(name: str | None = None, /, **options: Any) -> dict[str, Any]:
    """The plugin's options and, if one is named, the format that reads them."""
    dtype = {} if name is None else {"kv_cache_dtype": name}
    return {**dtype, "additional_config": {"kvq": options}}
