"""The environment variables of this package, and what is said of one that is none of them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

PREFIX = "VLLM_KVQ_"
VARIABLES = {
    "VLLM_KVQ_ADMIT": "a release of vLLM that is tried and not supported, for `python -m proof admit`",
    "VLLM_KVQ_CACHE": "folder for compiled kernels and fitted constants",
    "VLLM_KVQ_CXXFLAGS": "more flags for the C++ compiler",
    "VLLM_KVQ_GPU_PATH": "1: the GPU's path on CPU tensors, for tests",
    "VLLM_KVQ_ISA": "instruction set of the C++ kernels",
    "VLLM_KVQ_KERNELS": "torch: PyTorch's kernels in place of C++",
}


def variables_problem(environment: Mapping[str, str]) -> str | None:
    for name in environment:
        if name.startswith(PREFIX) and name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1)
            known = f"did you mean {close[0]}?" if close else f"there are {', '.join(VARIABLES)}"
            return f"the environment has {name}, which nothing reads; {known}"
    return None
