"""`preload`, for engines of vLLM's V2 model runner."""

from __future__ import annotations

from proof.oracle.engines.interpreted import serve_v2

serve_v2()
import proof.oracle.engines.preload  # noqa: E402, F401
