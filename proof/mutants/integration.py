"""Faults in vllm_kvq/integration."""

from __future__ import annotations

from proof.mutants.fault import Fault

FAULTS: tuple[Fault, ...] = ()
