"""The models this project brings along: `demo_model` is trained, `random_model` is for tests.

    python -m vllm_kvq.demo.model OUT_DIR      writes the trained one
"""

from __future__ import annotations

from .random_model import random_model

__all__ = ["random_model"]
