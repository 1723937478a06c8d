"""Faults in vllm_kvq/formats."""

from __future__ import annotations

from proof.mutants.fault import Fault

FAULTS: tuple[Fault, ...] = ()
