"""`preload`, for engines of vLLM's V2 model runner."""

from __future__ import annotations

import atexit
import os

from proof.oracle.interpreted import serve_v2

serve_v2()
import proof.oracle.preload  # noqa: E402, F401

# at its end Triton's library would list on stderr what it has not freed
atexit.register(os._exit, 0)
