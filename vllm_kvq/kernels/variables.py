"""The environment variables of this package, and what is said of one that is none of them."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_kvq.meant import meant
from vllm_kvq.problem import Problem

PREFIX = "VLLM_KVQ_"
VARIABLES = {
    "VLLM_KVQ_ADMIT": "a release of vLLM that is tried and not supported, for `python -m proof admit`",
    "VLLM_KVQ_CACHE": "folder for compiled kernels and fitted constants",
    "VLLM_KVQ_CXXFLAGS": "more flags for the C++ compiler",
    "VLLM_KVQ_GPU_PATH": "1: the GPU's path on CPU tensors, for tests",
    "VLLM_KVQ_ISA": "instruction set of the C++ kernels",
    "VLLM_KVQ_KERNELS": "torch: PyTorch's kernels in place of C++",
}


def variables_problem(environment: Mapping[str, str]) -> Problem | None:
    for name in environment:
        if name.startswith(PREFIX) and name not in VARIABLES:
            close = meant(name, VARIABLES)
            known = f"did you mean {close}?" if close else f"there are {', '.join(VARIABLES)}"
            return Problem(f"the environment has {name}, which nothing reads", known)
    return None


def values_problem(environment: Mapping[str, str]) -> Problem | None:
    """A variable that takes one of a few words, and has another one."""
    from vllm_kvq.kernels.cpu.library import ISAS
    from vllm_kvq.kernels.paths import WISHES

    taken = {"VLLM_KVQ_KERNELS": WISHES, "VLLM_KVQ_ISA": ("", *ISAS), "VLLM_KVQ_GPU_PATH": ("", "0", "1")}
    for name, words in taken.items():
        if (value := environment.get(name)) is not None and value not in words:
            close = meant(value, words)
            known = f"did you mean {close}?" if close else f"it takes one of {', '.join(filter(None, words))}"
            return Problem(f"{name} is {value!r}", known)
    return None
