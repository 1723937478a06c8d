"""Every call of a fuzz test has its tensors at the edge of their memory (guard_pages.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from guard_pages import guarded

from vllm_kvq.kernels.build import EXTRA_FLAGS
from vllm_kvq.kernels.cpu.library import library

CALLED = (
    "attend_packed",
    "attend_raw",
    "attend_step",
    "decode_step",
    "pack",
    "store_tokens",
    "gram",
    "squares",
    "largest",
)
"""The library's functions that these tests call."""


@pytest.fixture(autouse=True, scope="module")
def guards() -> Iterator[None]:
    """Not where a sanitizer knows the tensors' bounds."""
    with pytest.MonkeyPatch.context() as patch:
        if library() is not None and "-fsanitize" not in os.environ.get(EXTRA_FLAGS, ""):
            for name in CALLED:
                patch.setattr(library(), name, guarded(getattr(library(), name)))
        yield
