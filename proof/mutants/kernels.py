"""Faults in vllm_kvq/kernels, csrc and triton_kernels."""

from __future__ import annotations

from proof.mutants.fault import Fault

FAULTS: tuple[Fault, ...] = ()
