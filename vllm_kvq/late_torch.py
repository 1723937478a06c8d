"""torch, imported when one of its names is first used.

Formats are written in torch, but the table of formats is also what a mistyped command line is refused from, and torch
takes seconds to load. So whatever a refusal imports says `import vllm_kvq.late_torch as torch`, and uses torch's
names at the top of its modules only in annotations. Everything else says `import torch`.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    found = getattr(importlib.import_module("torch"), name)
    globals()[name] = found  # later uses find it here, and don't come by again
    return found
